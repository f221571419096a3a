"""What a position encoding is: a module that overrides one or more hooks, one for each place where position can act.

| hook | acts on | returns |
|---|---|---|
| `embed` | tokens, after the patch embedding or after a block | a term to add |
| `mix` | tokens and the sum of these terms | both, weighted |
| `layer_embed` | the input of each attention layer | a term for each layer |
| `turn` | q and k | both, multiplied by matrices |
| `rotation` | q and k | a table of sines and cosines |
| `position_bias` | logits, by geometry alone | a bias between tokens |
| `content_bias` | logits, from q and k | a bias between tokens |
| `channels` | logits, from q, k and the tokens | more channels of q and k, whose product is the bias |
| `values` | values | a term for the output of attention |

Two further hooks add nothing themselves. `attend` computes attention with the bias of `content_bias` faster, without
forming that bias. `logit_factor` is for rules for other grids: what q.k is multiplied by.

*One rule for dropped patches*: everything that a hook gets or returns covers only the tokens in the sequence. If some
patches were dropped, `grid.keep_indices` lists those that remain. Methods of `Grid` reduce a result for the whole grid
to these tokens (`between_tokens`, `keep_rows`, `keep_tokens`), and the base classes below call them.

*Hooks run inside the module's own call*: a host never calls `encoding.position_bias(grid)` but
`encoding(x, grid=grid, hook='position_bias')`. This way forward hooks fire, and libraries that load, move, gather or
count parameters around a module's call see everything that an encoding computes. The first argument is always a tensor,
even if the hook needs none, because such libraries expect one.

To add an encoding, write it in a file of this folder, decorate it with `register_encoding`, and import it in the
folder's `__init__.py`. Which base class?

| base | for |
|---|---|
| `PositionEncoding` | parameters that mean the same on any grid |
| `FixedEncoding` | a table that the grid alone determines, kept in a buffer |
| `RotaryEncoding`, `FixedRotaryEncoding` | rotations of pairs of channels: define the angles |
| `BlockRotaryEncoding` | rotations of larger blocks of channels: define their matrices |
| `CoordinateEncoding` | functions of coordinates, which extrapolate or are rescaled on another grid |
| `FrequencyEncoding` (`frequencies.py`) | rotations by frequencies, which have more rules for another grid |
| `ReferenceGridEncoding` | parameters that belong to the trained grid and are never resized |
| `ResizedEncoding` | parameters that belong to a grid and are resampled for another one |
"""
import threading
from abc import ABC, abstractmethod
from typing import Any, Callable, Dict, Optional, Sequence, Set, Tuple, Union

import torch
import torch.nn as nn
from timm.layers import trunc_normal_

from .. import ops
from ..checks import is_integer
from ..grid import MAX_SIDE, Grid, is_grid_size
from .hook_results import check_result

__all__ = [
    'BlockRotaryEncoding',
    'CoordinateEncoding',
    'FixedEncoding',
    'FixedRotaryEncoding',
    'PositionEncoding',
    'ReferenceGridEncoding',
    'ResizedEncoding',
    'RotaryEncoding',
    'fill_trunc_normal',
    'rotation_table',
]


def fill_trunc_normal(parameter: torch.Tensor, std: float) -> None:
    """Initialize with timm's `trunc_normal_`, with exactly this standard deviation and in any dtype.

    By default timm's function truncates at +-2, whatever the standard deviation. It also draws in the tensor's dtype,
    and in half precision some of these draws are infinite before they are truncated.
    """
    std = float(std)
    wide = torch.empty_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32), requires_grad=False)
    trunc_normal_(wide, std=std, a=-100 * std, b=100 * std)
    with torch.no_grad():
        parameter.copy_(wide)


AUTO = 'auto_'  # prefix of the name of an encoding with a gate


class Gate(nn.Module):
    """The learned scalar w of an `auto_` encoding (Auto-PE; Position-SHAP, Eq. 12 for its form on angles).

    The paper trains w with 100 times the learning rate of the other parameters. This module stores w/100 instead. An
    Adam-like optimizer takes steps of about the same size for every parameter, so w moves 100 times as far and no
    parameter group is needed. (SGD's steps grow with the gradient, so under SGD w moves 10^4 times as far. Also, the
    gradient of w/100 is 100 times that of w, which counts where gradients are clipped by their norm.)

    Angles are multiplied by w as they are, which is Eq. 12. The code of Position-SHAP's authors multiplies what is left
    of them in (-pi, pi] (rjbruin/position-shap at d695b6a), and a rotation by that is no longer relative.

    Args:
        init: Initial value of w.
    """

    def __init__(self, init: float, device=None, dtype=None) -> None:
        super().__init__()
        self.init = init
        self.weight = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.init / 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 100. * self.weight.to(x.dtype) * x  # the ONNX exporter of torch 2.11 fails on an integer 100


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
    supplements_ape: bool = True  #: Whether there are entrypoints `..._ape` that combine it with timm's learned table.
    prefix_rule: bool = True  #: The bias of every logit in the row or column of a prefix token is zero.
    relative: bool = False  #: Depends only on differences of positions.
    #: True: mirroring the image changes the features themselves. False: it only moves them to other places. None: that
    #: depends on the parameters or keywords.
    sees_mirror: Optional[bool] = None
    #: Names of what `embed` receives from the host as keywords, out of `given` of `position.SharedEncodings`.
    asks_for: Tuple[str, ...] = ()
    adds: str = ''  #: Number of parameters that it adds, for the tables of the documentation.
    on_other_grids: str = ''  #: What it does on a grid that it was not trained on, in one phrase.
    rules: Tuple[str, ...] = ()  #: Values of the keyword `resolution`, the default first. Empty: one rule.
    #: Keywords that change nothing on the trained grid, so that they may be chosen anew when a saved model is loaded.
    rule_keywords: Tuple[str, ...] = ()
    #: Whether a layer computes something else in a model of another depth. Then a pruned model cannot be saved.
    uses_depth: bool = False
    turns_alike: bool = False  #: Whether `turn` does the same to all tokens, on every grid.
    #: Whether computing it for few patches of a large grid costs little, because it does so for the kept ones alone, or
    #: makes at most a row for each patch. If not, such patches are refused by `Grid.check_density`.
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
        """Whether it multiplies q and k, as at most one encoding of a model may."""
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
        """q and k, multiplied by matrices of the encoding's own, before any rotation of pairs of channels.

        For rotations that are not of pairs. The hook applies the gate itself, so that a gate of 0 leaves q.k alone.

        Args:
            q: Queries after q_norm, unscaled, `[B, h, N, d]`.
            k: Keys, likewise, `[B, h, N, d]`.
            grid: The grid.

        Returns:
            Both, in their own dtypes. Prefix tokens have no position, so only matrices that do not depend on position
            multiply them.
        """
        raise NotImplementedError

    def rotation(self, grid: Grid) -> torch.Tensor:
        """The rotation of pairs of channels of q and k.

        The hook applies the gate itself, to the angles.

        Returns:
            Sines and cosines of the angles of patches, as `rotation_table` in this file returns them, in at least
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
        if own and type(self).reset_parameters in (PositionEncoding.reset_parameters, FixedEncoding.reset_parameters):
            raise ValueError(
                f'{self.name!r}: nothing gives {own[0]} its initial values again. Set the parameters of '
                f'{type(self).__name__} in reset_parameters, and end its constructor by self.reset_parameters().')

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


class FixedEncoding(PositionEncoding, ABC):
    """An encoding with a table that the grid alone determines.

    Most of these have no parameters and are the same in all layers. A subclass defines `compute` and calls `make_table`
    at the end of its constructor. The table of the model's own grid is a buffer, in at least float32 whatever the
    model's dtype. For any other grid the table is computed anew in each forward pass.
    """
    per_layer = False
    adds = 'none'

    def __init__(self, *, device=None, dtype=None, **host) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        self._table_kwargs = {
            'device': device,
            'dtype': torch.promote_types(dtype or torch.get_default_dtype(), torch.float32),
        }

    @abstractmethod
    def compute(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """The table of a whole grid. Its shape is up to the subclass."""

    def make_table(self) -> None:
        """Compute the buffer `table`.

        Raises:
            ValueError: If `compute` returns no tensor, or one that depends on a parameter.
        """
        table = self._own_table(torch.empty(0, **self._table_kwargs))
        if not isinstance(table, torch.Tensor):
            raise ValueError(
                f'{self.name!r}: compute returned {type(table).__name__}, not a tensor. Is a `return` missing?')
        if table.requires_grad:
            raise ValueError(
                f'{self.name!r}: compute of a FixedEncoding is called once, so its table would not follow a parameter. '
                'Derive it from PositionEncoding, or use the parameter in the hook.')
        self.register_buffer('table', table, persistent=False)

    def _compute(self, grid: Grid, like: torch.Tensor) -> torch.Tensor:
        with ops.no_autocast(like):  # products of matrices would round positions to bfloat16
            return self.compute(grid, like.device, like.dtype)

    def _own_table(self, like: torch.Tensor) -> torch.Tensor:
        return self._compute(Grid(*self.grid_size, self.num_prefix_tokens), like)

    def table_for(self, grid: Grid) -> torch.Tensor:
        """What `compute` returns for the whole of `grid`, taken from the buffer if it is the model's own grid."""
        like = self.table_like(grid)
        return self.table if like is self.table and grid.matches(self.grid_size) else self._compute(grid, like)

    def table_like(self, grid: Grid) -> torch.Tensor:
        """A tensor with the dtype and the device of tables: the table, or an empty tensor if that cannot be used.

        A model that was built on the meta device and got its parameters by `load_state_dict(..., assign=True)` still
        has its tables there. SDPA would read memory that is not theirs. And FSDP's `MixedPrecision` may have rounded
        them, by its `buffer_dtype`.
        """
        if self.table.is_meta and grid.device is not None:
            return torch.empty(0, device=grid.device, dtype=self.table.dtype)
        if self.table.is_floating_point() and self.table.dtype.itemsize < 4:
            return torch.empty(0, device=self.table.device, dtype=torch.float32)
        return self.table

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        self.table.copy_(self._own_table(self.table))

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        super().set_grid_size(grid_size)
        self.table = self._own_table(self.table)

    def _apply(self, fn, *args, **kwargs):
        # Recompute the table: model.half() would round it, model.double() would not make it more exact, and to_empty()
        # leaves it uninitialized.
        before = self.table
        super()._apply(fn, *args, **kwargs)
        if self.table is not before and not self.table.is_meta:
            self.table = self._own_table(ops.upcast(self.table)[0])
        return self


class RotaryEncoding(PositionEncoding, ABC):
    """A rotation of q and k. A subclass defines `angles`; a gate multiplies the angles."""
    rotate_half: bool = False  #: Pairs of channels are t and t + d/2 instead of 2t and 2t + 1.

    @abstractmethod
    def angles(self, grid: Grid) -> torch.Tensor:
        """Angle of each pair of channels for each patch of the whole grid, in radians and at least float32.

        Returns:
            `[(h,) H*W, d/2]`.
        """

    def rotation_of_grid(self, grid: Grid) -> torch.Tensor:
        """The table of the whole grid, gated, `[(h,) H*W, 2*d]`."""
        return rotation_table(self.gated(self.angles(grid)), self.rotate_half)

    def rotation(self, grid: Grid) -> torch.Tensor:
        return grid.keep_rows(self.rotation_of_grid(grid))

    def _require_head_dim(self, multiple: int) -> None:
        if self.head_dim % multiple:
            raise ValueError(
                f'{self.name!r} needs a head dim that is a multiple of {multiple}, got {self.head_dim}. '
                'Choose another num_heads.')


class FixedRotaryEncoding(FixedEncoding, RotaryEncoding):
    """A rotation without parameters. A subclass defines `compute_angles`."""

    @abstractmethod
    def compute_angles(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """As `angles`, computed on this device and in this dtype, `[(h,) H*W, d/2]`."""

    def compute(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        angles = self.compute_angles(grid, device, dtype)
        # The buffer holds sines and cosines. With a gate, which changes from step to step, it holds the angles.
        return rotation_table(angles, self.rotate_half) if self.gate is None else angles

    def angles(self, grid: Grid) -> torch.Tensor:
        like = self.table_like(grid)
        return self.compute_angles(grid, like.device, like.dtype)

    def rotation_of_grid(self, grid: Grid) -> torch.Tensor:
        table = self.table_for(grid)
        return table if self.gate is None else rotation_table(self.gated(table), self.rotate_half)


class BlockRotaryEncoding(PositionEncoding, ABC):
    """A rotation of q and k in blocks of channels, of any size. A subclass defines `blocks`."""

    @abstractmethod
    def blocks(self, grid: Grid) -> torch.Tensor:
        """The orthogonal matrix of each patch of the whole grid for each block of channels.

        A gate scales what the matrices are computed from: at 0 they are 1.

        Returns:
            `[h, H*W, n, b, b]` with n*b = d, in at least float32.
        """

    def turn(self, q: torch.Tensor, k: torch.Tensor, grid: Grid) -> Tuple[torch.Tensor, torch.Tensor]:
        p, dtype = grid.num_prefix_tokens, q.dtype
        with ops.no_autocast(q):
            blocks = self.blocks(grid)
            rows = grid.keep_rows(blocks.flatten(2))  # [(B,) h, N-P, n*b*b]
            blocks = rows.unflatten(-1, blocks.shape[2:])
            qk = torch.stack([q, k])[:, :, :, p:].to(blocks.dtype).unflatten(-1, blocks.shape[-3:-1])
            batch = 'b' if blocks.ndim == 6 else ''
            turned = torch.einsum(f'{batch}hpnij,sbhpnj->sbhpni', blocks, qk).flatten(-2).to(dtype)  # [2, B, h, N-P, d]
        return tuple(torch.cat([t[:, :, :p], patches], dim=2) for t, patches in zip((q, k), turned.unbind(0)))


_taking = threading.Lock()  # several threads may run a first forward pass at once, and only one may take the grid


class _SavesGrid(PositionEncoding):
    """An encoding that saves the grid of its parameters along with them.

    The grid is extra state, so it is in every state dict, however that is saved.
    """

    def expect_grid(self) -> None:
        """Prepare for a library that sets the entries of a checkpoint one by one, as parameters and buffers.

        accelerate does this for a model that was built on the meta device. Extra state is neither a parameter nor a
        buffer, so until the grid is known a buffer with the name of that entry stands in for it.
        """
        self.register_buffer('_extra_state', torch.tensor(self.saved_grid_size() or (0, 0), device='cpu'))

    def take_grid(self) -> None:
        """Take over the grid that such a library has set.

        The model calls it in `train()` and `eval()`. Where parameters stay on the meta device, because they are moved
        to another one for each call only, the first forward pass does.
        """
        with _taking:
            state = self._buffers.get('_extra_state')
            if state is not None and not state.is_meta and self.saved_grid_size() is not None:
                self.set_extra_state(state)
            self._buffers.pop('_extra_state', None)  # last: while it is there, other threads wait

    def forward(self, x: torch.Tensor, *tensors: torch.Tensor, hook: str, **given) -> Any:
        if '_extra_state' in self._buffers:
            self.take_grid()
        return super().forward(x, *tensors, hook=hook, **given)

    def _apply(self, fn, *args, **kwargs):
        self.take_grid()
        return super()._apply(fn, *args, **kwargs)

    def saved_grid_size(self) -> Optional[Tuple[int, int]]:
        """(H, W) that the parameters belong to. None if they fit any grid, so that none is saved."""
        raise NotImplementedError

    def get_extra_state(self) -> torch.Tensor:
        expected = self._buffers.get('_extra_state')
        return torch.tensor(self.saved_grid_size() or (0, 0), device='cpu') if expected is None else expected

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Handle the grid, int64 `[2]`, that was saved with the parameters that are being loaded.

        Raises:
            ValueError: If it is no grid, or one that the parameters of this encoding do not fit.
        """
        raise NotImplementedError

    def adapt(self, grid_size: Tuple[int, int], state_dict: Dict[str, torch.Tensor], path: str) -> None:
        """Before its entries of a checkpoint are loaded, make them and the encoding fit each other.

        Args:
            grid_size: (H, W) that the entries were trained on.
            state_dict: The checkpoint. Changed in place if entries are resized.
            path: Path of the encoding in the model, the prefix of its entries.
        """
        raise NotImplementedError

    def read_extra_state(self, state: torch.Tensor) -> Tuple[int, int]:
        """(H, W) from a saved entry, which may be floats: some tools average or cast all entries of a file.

        Raises:
            ValueError: If the entry is not a grid.
        """
        has_numbers = isinstance(state, torch.Tensor) and not state.is_complex() and not state.is_meta
        sizes = state.tolist() if has_numbers else state
        is_pair = isinstance(sizes, list) and len(sizes) == 2
        # The upper bound keeps a damaged file from making us allocate huge tables. NaN fails the comparison.
        if not is_pair or not all(isinstance(s, (int, float)) and 0.5 < s <= MAX_SIDE for s in sizes):
            got = sizes if isinstance(sizes, (list, int, float)) else type(sizes).__name__
            raise ValueError(
                f'{self.name!r}: the grid saved with its parameters, the entry _extra_state, must be (H, W) in '
                f'patches, at least 1 each, got {got}. The file is damaged; if you know the grid, set this entry to '
                'torch.tensor([H, W]).')
        height, width = (round(size) for size in sizes)
        return height, width

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.saved_grid_size() is None:
            del destination[f'{prefix}_extra_state']

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, *args) -> None:
        key = f'{prefix}_extra_state'
        self._buffers.pop('_extra_state', None)
        if not isinstance(state_dict.get(key), torch.Tensor):
            # Where an encoding saves no grid, torch.distributed.checkpoint leaves a marker of its own.
            state_dict = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *args)
        if self.saved_grid_size() is None and key in missing_keys:
            missing_keys.remove(key)


class ReferenceGridEncoding(_SavesGrid):
    """An encoding whose parameters belong to the grid that they were trained on and are never resized.

    `ref_grid_size`, (H, W), is that grid, and is saved with the parameters. On any other grid the encoding rescales its
    positions.
    """
    #: Whether a rule that needs the grid may be chosen when a model is loaded, whose checkpoint then lacks the grid.
    chosen_when_loading: bool = False

    def __init__(self, *, ref_grid_size: Optional[Tuple[int, int]] = None, **host) -> None:
        super().__init__(**host)
        self.ref_grid_size = tuple(ref_grid_size or self.grid_size)

    def saved_grid_size(self) -> Optional[Tuple[int, int]]:
        return self.ref_grid_size

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.ref_grid_size = self.read_extra_state(state)

    def set_ref_grid_size(self, ref_grid_size: Tuple[int, int]) -> None:
        """Prepare for loading parameters that were trained on another grid."""
        self.ref_grid_size = tuple(ref_grid_size)

    def adapt(self, grid_size: Tuple[int, int], state_dict: Dict[str, torch.Tensor], path: str) -> None:
        self.set_ref_grid_size(grid_size)

    def rescaling(self, grid: Grid) -> Optional[Tuple[int, int]]:
        """(H, W) of the grid to rescale positions to. None if `grid` is the trained one."""
        return None if grid.matches(self.ref_grid_size) else self.ref_grid_size


class CoordinateEncoding(ReferenceGridEncoding):
    """An encoding that is a function of coordinates.

    A subclass that has further rules for other grids lists them in `rules` and reads `rule`.

    Args:
        resolution: What happens on another grid than the trained one, H0 x W0. 'extrapolate': coordinates continue,
            0 ... H-1. 'rescale': they are squeezed or stretched to the trained range, so y becomes
            (y + 1/2) * H0/H - 1/2, and x likewise.

    Raises:
        ValueError: If `resolution` is none of the rules.
    """
    rules = ('extrapolate', 'rescale')
    rule_keywords = ('resolution',)
    chosen_when_loading = True

    def __init__(self, *, resolution: str = 'extrapolate', **host) -> None:
        self._require_choice('resolution', resolution, self.rules)
        self.rule = resolution
        super().__init__(**host)

    def saved_grid_size(self) -> Optional[Tuple[int, int]]:
        return None if self.rule == 'extrapolate' else self.ref_grid_size

    def rescaling(self, grid: Grid) -> Optional[Tuple[int, int]]:
        """(H, W) of the trained grid, if `grid` is another and the rule depends on it. Else None."""
        return None if self.rule == 'extrapolate' else super().rescaling(grid)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.set_ref_grid_size(self.read_extra_state(state))

    def set_ref_grid_size(self, ref_grid_size: Tuple[int, int]) -> None:
        super().set_ref_grid_size(ref_grid_size)
        self.init_non_persistent_buffers()

    def coordinates(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """(y, x) of each patch of the whole grid, in patches of the trained grid, `[H*W, 2]`."""
        coordinates = grid.coordinates(device, dtype)
        ref = self.rescaling(grid)
        if ref is None:
            return coordinates
        scale = [trained / size for trained, size in zip(ref, grid.size)]
        return torch.stack([(c + 0.5) * s - 0.5 for c, s in zip(coordinates.unbind(-1), scale)], dim=-1)


class ResizedEncoding(_SavesGrid, ABC):
    """An encoding whose parameters belong to a grid, `grid_size`, and are resampled for another one.

    Every path uses the same function, `resample`: a forward pass on images of another size, `set_input_size`, and
    loading weights of another size.
    """
    RESIZED: Tuple[str, ...] = ('table',)  #: Names of the parameters that are resampled.

    @abstractmethod
    def resample(
            self,
            name: str,
            table: torch.Tensor,
            old_size: Tuple[int, int],
            new_size: Tuple[int, int],
    ) -> torch.Tensor:
        """The values of a parameter for another grid.

        Args:
            name: Name of the parameter.
            table: Its values on a grid of `old_size`.
            old_size: (H, W).
            new_size: (H, W) of the grid to resample for.
        """

    def resized(self, name: str, grid: Grid) -> torch.Tensor:
        """The parameter `name`, resampled for the whole of `grid` if that is not the model's own."""
        table = getattr(self, name)
        return table if grid.matches(self.grid_size) else self.resample(name, table, self.grid_size, grid.size)

    def saved_grid_size(self) -> Tuple[int, int]:
        return self.grid_size

    def set_extra_state(self, state: torch.Tensor) -> None:
        # Tables for 3 x 5 and 5 x 3 patches can have the same shape. The model's own checks refuse them, but do not run
        # if it is part of another module whose state dict is loaded.
        saved = self.read_extra_state(state)
        if saved != self.grid_size:
            raise ValueError(
                f'{self.name!r}: the checkpoint is of a grid of {saved[0]}x{saved[1]} patches, the model has '
                f'{self.grid_size[0]}x{self.grid_size[1]}. Create the model with the img_size of the checkpoint '
                '(a plain ViT can then change it by set_input_size), or load with pretrained=True, which resizes.')

    def adapt(self, grid_size: Tuple[int, int], state_dict: Dict[str, torch.Tensor], path: str) -> None:
        if grid_size == self.grid_size:
            return
        for name in self.RESIZED:
            key = f'{path}.{name}'
            if key not in state_dict:
                continue
            try:
                state_dict[key] = self.resample(name, state_dict[key], grid_size, self.grid_size)
            except Exception as e:  # encodings do not check the entries of a damaged file
                raise ValueError(
                    f'{key} of the checkpoint cannot be resized from a grid of {grid_size[0]}x{grid_size[1]} patches. '
                    f'Is the file damaged? Copy or save it again. ({e})') from e
        state_dict[f'{path}._extra_state'] = self.get_extra_state()

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        if tuple(grid_size) == self.grid_size:
            return
        for name in self.RESIZED:
            table = getattr(self, name)
            with torch.no_grad():
                resampled = self.resample(name, table, self.grid_size, tuple(grid_size))
            setattr(self, name, nn.Parameter(resampled, requires_grad=table.requires_grad))
        super().set_grid_size(grid_size)


def rotation_table(angles: torch.Tensor, rotate_half: bool = False) -> torch.Tensor:
    """Sines and cosines in the layout of timm's `apply_rot_embed_cat`.

    Args:
        angles: Angle of each pair of channels in radians, `[..., H*W, d/2]`.
        rotate_half: Pairs are the channels t and t + d/2 instead of 2t and 2t + 1.

    Returns:
        The sines of all channels' angles, then their cosines, `[..., H*W, 2*d]`.
    """
    if rotate_half:
        angles = torch.cat([angles, angles], dim=-1)  # [..., H*W, d]
    else:
        # Not repeat_interleave, which torch.onnx.export(dynamo=False) exports wrongly.
        angles = torch.stack([angles, angles], dim=-1).flatten(-2)  # [..., H*W, d]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
