"""The class that all encodings are derived from, with a method for each hook."""
from typing import Any, Callable, Dict, Optional, Sequence, Set, Tuple, Union

import torch
import torch.nn as nn

from ... import ops
from ...checks import is_integer
from ...grid import Grid, is_grid_size
from .gate import Gate
from .hook_results import check_result

__all__ = ['PositionEncoding']


class PositionEncoding(nn.Module):
    """Base class of all encodings. Without any override it does nothing.

    The keywords below are what the host model tells each encoding. A subclass adds its own as keyword-only arguments
    with plain JSON values and passes the rest on as `**host`. The names of its own keywords are what users may set.

    Args:
        dim: D, embed dim of the model.
        num_heads: h, attention heads.
        grid_size: (H, W), the model's own grid.
        num_prefix_tokens: P, class and register tokens.
        layer: Index of the attention layer, from 0 (0 for an encoding that the whole model shares). Not stored.
        depth: Number of attention layers. Not stored.
        ref_grid_size: (H, W) of the grid that the parameters were trained on, if it is not the model's own. Only some
            encodings use it.
        gate: Initial value of the learned scalar that multiplies what the encoding contributes, for `auto_<name>`. None
            for no gate.

    Raises:
        ValueError: If the heads do not divide D, or the grid is not a pair of sizes; subclasses add their own.
    """
    name: str = ''  #: The name it is registered under.
    per_layer: bool = True  #: One instance per attention layer. False: one for the whole model.
    first_layers: Optional[int] = None  #: If set, only this many layers, from the first on, have an instance.
    #: Initial value of the gate of `auto_<name>`. None: the encoding has no neutral form, so it cannot be gated. 1: the
    #: encoding contributes zero until it is trained. A gate of 0 on top of that would get no gradient and never learn.
    gate_init: Optional[float] = 0.5
    alone: bool = True  #: Whether it does anything without other encodings.
    excludes: Dict[str, str] = {}  #: Encodings that it cannot be combined with, and why.
    #: False: there are no entrypoints `..._ape` that combine it with timm's learned table. True: there are, unless it
    #: only adds something to the tokens at the start.
    supplements_ape: bool = True
    #: The bias of every logit in the row or column of a prefix token is zero. Only tests of encodings read it.
    prefix_rule: bool = True
    relative: bool = False  #: Depends only on differences of positions.
    #: True: mirroring the image changes the features themselves. False: it only moves them to other places. None: that
    #: depends on the parameters or keywords.
    sees_mirror: Optional[bool] = None
    #: Names of what `embed` receives from the host as keywords, out of `given` of `position.SharedEncodings`.
    asks_for: Tuple[str, ...] = ()
    adds: str = ''  #: Number of parameters that it adds, for the tables of the documentation.
    on_other_grids: str = ''  #: What it does on a grid that it was not trained on, in one phrase.
    rules: Tuple[str, ...] = ()  #: Values of the keyword `resolution`, the default first. Empty: one rule.
    #: Keywords that may be chosen anew when a saved model is loaded, because in eval mode and on the trained grid they
    #: change nothing: rules for other grids, and what is random in training.
    changeable_keywords: Tuple[str, ...] = ()
    #: Whether a layer computes something else in a model of another depth. Then a pruned model cannot be saved.
    uses_depth: bool = False
    turns_alike: bool = False  #: Whether `turn` does the same to all tokens, on every grid.
    #: True: few kept patches of a large grid cost little, because only those are computed, or at most one row for each
    #: patch of the grid. False: `Grid.check_density` refuses such an input.
    skips_dropped: bool = False
    paper: str = ''  #: Link to the source.

    #: Where each hook acts. `attend` and `logit_factor` have no entry, because they add nothing themselves.
    HOOKS = {
        'embed': 'tokens',
        'mix': 'tokens',
        'layer_embed': 'tokens in each layer',
        'turn': 'q and k',
        'rotation': 'q and k',
        'position_bias': 'logits, by geometry',
        'content_bias': 'logits, from content',
        'channels': 'logits, from content, as channels of q and k',
        'values': 'values',
    }

    def __init__(
            self,
            *,
            dim: int,
            num_heads: int,
            grid_size: Tuple[int, int],
            num_prefix_tokens: int = 0,
            layer: int = 0,
            depth: int = 1,
            ref_grid_size: Optional[Tuple[int, int]] = None,
            gate: Optional[float] = None,
            device=None,
            dtype=None,
    ) -> None:
        super().__init__()
        if not (is_integer(dim, 1) and is_integer(num_heads, 1)) or dim % num_heads:
            raise ValueError(f'dim={dim!r} is not divisible by num_heads={num_heads!r}. Choose another num_heads.')
        if not is_grid_size(grid_size):
            raise ValueError(f'grid_size must be (H, W) in patches, got {grid_size!r}.')
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.grid_size = tuple(grid_size)
        self.num_prefix_tokens = num_prefix_tokens
        self.gate = None if gate is None else Gate(gate, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor, *tensors: torch.Tensor, hook: str, **given) -> Any:
        """Run one hook and apply the gate to what it contributes.

        Args:
            x: The hook's first tensor argument; any tensor if the hook takes none.
            tensors: The hook's other tensor arguments, in order.
            hook: Name of the hook.
            given: The hook's other arguments.

        Returns:
            What the hook returns, gated.

        Raises:
            ValueError: If the hook returns something else than its docstring says, or needs the whole of a large grid
                for a few patches.
        """
        if hook in ('turn', 'position_bias', 'content_bias', 'channels', 'attend') and not self.skips_dropped:
            given['grid'].check_density(self.name)
        if hook in ('rotation', 'position_bias', 'layer_embed', 'logit_factor'):
            with ops.no_autocast(x):  # in bfloat16 many patches of a large grid would have the same position
                found = getattr(self, hook)(**given)
        else:
            found = getattr(self, hook)(x, *tensors, **given)
        if hook != 'logit_factor':
            check_result(self, hook, found, (x, *tensors), given['grid'])
        if self._forward_hooks and isinstance(found, torch.Tensor):
            found = found.clone()  # it may be a table of the model, which a hook of the user's could change in place
        # a factor of q.k has no gate, and the other hooks named here apply it themselves
        if self.gate is None or hook in ('turn', 'rotation', 'channels', 'attend', 'logit_factor'):
            return found
        if hook == 'mix':
            return tuple(before + self.gate(after - before) for before, after in zip((x, *tensors), found))
        return self.gate(found)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """x times the gate, if there is one. For hooks that must apply it before they round or take a sine."""
        return x if self.gate is None else self.gate(x)

    def _require_choice(self, keyword: str, value: Any, choices: Sequence[str]) -> None:
        if value not in choices:
            *others, last = map(repr, choices)
            raise ValueError(f'{self.name!r}: {keyword} must be {", ".join(others)} or {last}, got {value!r}.')

    def _require_head_dim(self, multiple: int) -> None:
        if self.head_dim % multiple:
            raise ValueError(
                f'{self.name!r} needs a head dim that is a multiple of {multiple}, got {self.head_dim}. '
                'Choose another num_heads.')

    @classmethod
    def fits(cls, dim: int, num_heads: int) -> bool:
        """Whether it can be built for this embed dim and number of heads. There are entrypoints only where it can."""
        return True

    @classmethod
    def overrides(cls, hook: str) -> bool:
        """Whether the encoding acts through this hook."""
        return getattr(cls, hook) is not getattr(PositionEncoding, hook)

    @classmethod
    def rotates(cls) -> bool:
        """Whether it replaces or rotates q and k, as at most one encoding of a model may."""
        return cls.overrides('rotation') or cls.overrides('turn')

    @property
    def scales_logits(self) -> bool:
        """Whether `logit_factor` may return anything but None."""
        return self.overrides('logit_factor')

    @classmethod
    def acts_on(cls) -> Tuple[str, ...]:
        """The places where it acts, in words."""
        places = dict(cls.HOOKS, embed='tokens after a block') if cls.per_layer else cls.HOOKS
        return tuple(dict.fromkeys(place for hook, place in places.items() if cls.overrides(hook)))

    @classmethod
    def attention_kernel(cls) -> str:
        """Which kernels can compute attention with it, in words."""
        if cls.overrides('values'):
            return 'explicit'
        if cls.overrides('attend'):
            return 'ours'
        return 'SDPA, a mask' if cls.overrides('position_bias') or cls.overrides('content_bias') else 'any'

    def embed(self, x: torch.Tensor, grid: Grid, **asked) -> torch.Tensor:
        """A term to add to the tokens.

        If the whole model shares the encoding, the term is added once, after the patch embedding. If each layer has its
        own, it is added after the layer's block.

        Args:
            x: Tokens, prefix tokens first, `[B, N, D]`. After the patch embedding they carry no position yet.
            grid: The grid.
            asked: What the class `asks_for`. Empty after a block.

        Returns:
            Broadcastable to `[B, N, D]`. Its dtype may be wider than that of x.
        """
        raise NotImplementedError

    def mix(self, x: torch.Tensor, term: torch.Tensor, grid: Grid) -> Tuple[torch.Tensor, torch.Tensor]:
        """Weight tokens and positions before they are added.

        Args:
            x: Tokens without any position, `[B, N, D]`.
            term: Sum of the terms that all encodings' `embed` returned, broadcastable to `[B, N, D]`.
            grid: The grid.

        Returns:
            Both, weighted. If several encodings mix, each gets what the previous one returned.
        """
        raise NotImplementedError

    def layer_embed(self, grid: Grid) -> torch.Tensor:
        """A term for the normed input of each attention layer, `[L, (B,) N, D]`. The residual path does not get it."""
        raise NotImplementedError

    def turn(self, q: torch.Tensor, k: torch.Tensor, grid: Grid) -> Tuple[torch.Tensor, torch.Tensor]:
        """What takes the place of q and k in the logits, before any rotation of pairs of channels.

        For rotations that are not of pairs. The hook applies the gate itself, so that a gate of 0 leaves q.k alone.

        Args:
            q: Queries after q_norm, unscaled, `[B, h, N, d]`.
            k: Keys, likewise, `[B, h, N, d]`.
            grid: The grid.

        Returns:
            Both, `[B, h, N, C]` with C of d or more (d if the class has a rotation, too), in their own dtypes. Prefix
            tokens have no position, so what happens to them does not depend on position either.
        """
        raise NotImplementedError

    def rotation(self, grid: Grid) -> torch.Tensor:
        """The rotation of pairs of channels of q and k.

        The hook applies the gate itself, to the angles.

        Returns:
            Sines and cosines of the angles of patches, as `rotation_table` in `rotary.py` returns them, in at least
            float32, `[N-P, 2*d]`, `[h, N-P, 2*d]` or `[B, h|1, N-P, 2*d]`. Prefix tokens have no rows: they are not
            rotated.
        """
        raise NotImplementedError

    def position_bias(self, grid: Grid) -> torch.Tensor:
        """A bias that depends only on the grid, added to the scaled logits, broadcastable to `[B, h, N, N]`."""
        raise NotImplementedError

    def content_bias(self, q: torch.Tensor, k: torch.Tensor, grid: Grid) -> torch.Tensor:
        """A bias that depends on content, added to the scaled logits.

        Args:
            q: Queries after q_norm, before any rotation, unscaled, `[B, h, N, d]`.
            k: Keys, likewise, `[B, h, N, d]`.
            grid: The grid.

        Returns:
            Bias between tokens, broadcastable to `[B, h, N, N]`, in float32 or wider, whatever the dtype of q. If its
            dtype is wider than that of q, attention is computed in the wider one.
        """
        raise NotImplementedError

    def attend(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            rotated_q: torch.Tensor,
            rotated_k: torch.Tensor,
            mask: Optional[torch.Tensor],
            grid: Grid,
            scale: float,
            dropout_p: float,
            drop: Callable[[torch.Tensor], torch.Tensor],
            fused: bool,
    ) -> torch.Tensor:
        """Attention with the bias of `content_bias`, for encodings that can compute it without an N x N tensor.

        An encoding that overrides this hook must override `content_bias` too, which is still called where the
        probabilities themselves are needed. This hook applies the gate itself.

        Args:
            q: As for `content_bias`, `[B, h, N, d]`. The bias is computed from these.
            k: Likewise.
            v: Values, `[B, h, N, d]`.
            rotated_q: Queries for the product of the logits: q after any rotation, with the channels of other encodings
                appended, `[B, h, N, d+C]`.
            rotated_k: Likewise for the keys.
            mask: As `ops.merge_masks` returns it, including the biases of other encodings.
            grid: The grid.
            scale: Factor of the product.
            dropout_p: Dropout rate of the probabilities.
            drop: As for `ops.attend`.
            fused: Likewise.

        Returns:
            `[B, h, N, d]`.
        """
        raise NotImplementedError

    def channels(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            x: torch.Tensor,
            grid: Grid,
            scale: float,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Further channels of q and k, whose product is a bias, so that any attention kernel can compute it.

        The hook applies the gate itself, before anything is rounded.

        Args:
            q: Queries after q_norm, before any rotation, unscaled, `[B, h, N, d]`.
            k: Keys, likewise, `[B, h, N, d]`.
            x: The tokens that q and k are made of, `[B, N, D]`.
            grid: The grid.
            scale: Factor of q.k in the logits. It multiplies the product of these channels too.

        Returns:
            a and b, `[B, h, N, C]`, in the dtype of q. Logits get scale * a_i.b_j. Rows of prefix tokens are zero. They
            may be kept for the backward pass, so do not change them afterwards.
        """
        raise NotImplementedError

    def values(self, attn: torch.Tensor, grid: Grid) -> torch.Tensor:
        """A term to add to the output of the heads.

        Computing it takes the probabilities, so a model with such an encoding has no fused attention.

        Args:
            attn: Probabilities after softmax and dropout, `[B, h, N, N]`.
            grid: The grid.

        Returns:
            The term that is added to `attn @ v`, broadcastable to `[B, h, N, d]`.
        """
        raise NotImplementedError

    def logit_factor(self, grid: Grid) -> Union[None, float, torch.Tensor]:
        """What q.k is multiplied by on another grid than the trained one, in addition to the scale.

        It adds nothing to tokens or logits: it is there for rules for other sizes.

        Returns:
            A positive number; a tensor `[]` if sizes are symbolic; None for 1.
        """
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Give parameters and saved buffers their initial values; call `init_non_persistent_buffers` for the others.

        Raises:
            ValueError: If there are parameters of its own, and no override of this method that sets them.
        """
        own = [name for name, _ in self.named_parameters() if not name.startswith('gate.')]
        if own and type(self).reset_parameters is PositionEncoding.reset_parameters:
            raise ValueError(
                f'{self.name!r}: nothing gives {own[0]} its initial values again. Set the parameters of '
                f'{type(self).__name__} in reset_parameters, and end its constructor by self.reset_parameters().')
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Recompute the buffers that are not saved, after the module was constructed on the meta device."""

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        """Adapt to the model's new grid, (H, W), in `set_input_size`. Parameters keep what they have learned."""
        self.grid_size = tuple(grid_size)

    def set_depth(self, depth: int) -> None:
        """Drop everything that belongs to layers from index `depth` on, after the model was truncated."""

    def no_weight_decay(self) -> Set[str]:
        """Names of its parameters that get no weight decay: by default all, as for `pos_embed` in timm."""
        return {name for name, _ in self.named_parameters()}
