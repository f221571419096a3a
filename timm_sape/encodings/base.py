"""What a position encoding is: a module with hooks, one for each place where position can act.

| hook | acts on | returns |
|---|---|---|
| `embed` | the tokens, after the patch embedding | a factor and a term for the tokens |
| `mix` | the tokens and the sum of those terms | the tokens |
| `layer_embed` | the input of each attention layer | a term for each layer |
| `after_block` | the tokens after a block | a term for the tokens |
| `rotation` | q and k | the table of angles that rotates them |
| `position_bias` | the logits, by geometry alone | a bias between tokens |
| `content_bias` | the logits, from q and k | a bias between tokens |
| `distances` | the same bias, as distances of codes | the codes |
| `channels` | the logits, from q, k and the tokens | further channels of q and k, whose product is the bias |
| `values` | the values | what is added to the attention's output |

An encoding overrides those that it needs. `after_block`, `content_bias`, `distances`, `channels` and `values` act on
the patches that are there, which `grid.keep_indices` names where some were dropped. What all others return is for the
whole grid: the caller takes the dropped ones out. To add an encoding: write it in a file of this folder, decorate it
with `register_encoding`, import it in the folder's `__init__.py`.

Which base class?

| base | for |
|---|---|
| `PositionEncoding` | parameters that mean the same on any grid |
| `FixedEncoding` | no parameters: a table that the grid determines, kept in a buffer |
| `RotaryEncoding`, `FixedRotaryEncoding` | rotations: define the angles |
| `CoordinateEncoding` | functions of coordinates, which may go on or be rescaled on another grid |
| `ReferenceGridEncoding` | parameters that belong to the trained grid and are never resized |
| `ResizedEncoding` | parameters that belong to a grid and are resampled for another one |
"""
from typing import Optional, Sequence, Set, Tuple

import torch
import torch.nn as nn
from timm.layers import trunc_normal_

from ..grid import Grid

__all__ = [
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
    """Initial values by timm's `trunc_normal_`, of just that standard deviation and in any dtype.

    timm's cuts at 2 whatever the deviation, and draws in the tensor's dtype: in half precision some of what it draws is
    infinite before it is cut.
    """
    wide = torch.empty_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32), requires_grad=False)
    trunc_normal_(wide, std=std, a=-100 * std, b=100 * std)
    with torch.no_grad():
        parameter.copy_(wide)


class Gate(nn.Module):
    """The learned scalar w of an `auto_` encoding (Auto-PE; Position-SHAP, Eq. 12 for its form on angles).

    The paper trains w with 100 times the learning rate of the rest. Stored is w/100, on which an Adam-like optimizer
    takes steps that are as long as its steps elsewhere, so w moves 100 times as far with any stock optimizer of that
    kind. (SGD, whose steps grow with the gradient, would move it 10^4 times as far; and the gradient of w/100 is 100
    times that of w wherever gradients are clipped by their norm.)

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
        return 100. * self.weight.to(x.dtype) * x  # an integer is too much for the ONNX exporter of torch 2.11


class PositionEncoding(nn.Module):
    """Base class of all encodings; without any override it does nothing.

    The keywords below are what the host model tells each encoding. A subclass adds its own as keyword-only arguments
    of plain JSON values and passes the rest on as `**host`; the names of its own keywords are what users may set.

    Args:
        dim: D, embed dim of the model.
        num_heads: h, attention heads.
        grid_size: (H, W), the model's own grid.
        num_prefix_tokens: P, class and register tokens.
        layer: Index of the attention layer, 0-based (0 for an encoding that the whole model shares).
        depth: Number of attention layers.
        ref_grid_size: (H, W) of the grid that the parameters were trained on, if it is not the model's own. Only
            encodings that keep one look at it.
        gate: Initial value of the learned scalar that multiplies what the encoding contributes, for `auto_<name>`. None
            for no such gate.

    Raises:
        ValueError: If the heads do not divide D, or the grid is no pair; subclasses add their own.
    """
    name: str = ''  #: What it is registered as.
    per_layer: bool = True  #: One instance per attention layer. Else one for the model, its geometry computed once.
    first_layers: Optional[int] = None  #: Only so many layers have one, counted from the first.
    #: Where the gate of `auto_<name>` starts. None: it cannot be gated. 1: all is zero at the start without it, where a
    #: gate of 0 on top would never learn.
    gate_init: Optional[float] = 0.5
    alone: bool = True  #: Means something without other encodings.
    prefix_rule: bool = True  #: Logits of prefix tokens have a bias of zero.
    relative: bool = False  #: Depends on differences of positions alone.
    adds: str = ''  #: Parameters added, for the tables of the documentation.
    resolution: str = ''  #: The rule for a grid that it was not trained on, in one phrase.
    paper: str = ''  #: Link to the source.

    HOOKS = {
        'embed': 'tokens',
        'mix': 'tokens',
        'layer_embed': 'tokens in each layer',
        'after_block': 'tokens after a block',
        'rotation': 'q and k',
        'position_bias': 'logits, by geometry',
        'content_bias': 'logits, from content',
        'distances': 'logits, from content',
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
        if dim % num_heads:
            raise ValueError(f'dim={dim} is not divisible by num_heads={num_heads}.')
        if not isinstance(grid_size, Sequence) or len(grid_size) != 2:
            raise ValueError(f'grid_size must be (H, W) in patches, got {grid_size!r}.')
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.grid_size = tuple(grid_size)
        self.num_prefix_tokens = num_prefix_tokens
        self.gate = None if gate is None else Gate(gate, device=device, dtype=dtype)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """What the encoding contributes, times its gate if it has one.

        Called by the callers of the hooks; only `rotation` and `channels` apply it themselves.
        """
        return x if self.gate is None else self.gate(x)

    @classmethod
    def fits(cls, dim: int, num_heads: int) -> bool:
        """Whether it can be built for a model of this width and number of heads. It has entrypoints for those alone."""
        return True

    @classmethod
    def overrides(cls, hook: str) -> bool:
        """Whether the encoding acts through `hook`, one of the keys of `HOOKS`."""
        return getattr(cls, hook) is not getattr(PositionEncoding, hook)

    @classmethod
    def acts_on(cls) -> Tuple[str, ...]:
        """The places where it acts, in words."""
        return tuple(dict.fromkeys(place for hook, place in cls.HOOKS.items() if cls.overrides(hook)))

    @classmethod
    def attention_kernel(cls) -> str:
        """What computes attention with it, in words: the more it adds, the fewer kernels can."""
        if cls.overrides('values'):
            return 'explicit'
        if cls.overrides('distances'):
            return 'ours'
        return 'SDPA, a mask' if cls.overrides('position_bias') or cls.overrides('content_bias') else 'any'

    @property
    def finds_objects(self) -> bool:
        """Whether it wants to know the objects."""
        return type(self).find_objects is not PositionEncoding.find_objects

    def find_objects(self, images: torch.Tensor, grid: Grid, patch_size: Tuple[int, int]) -> torch.Tensor:
        """Which object each patch belongs to, for an encoding that wants to know it in `embed`.

        Asked only where the caller of the model does not say. Whoever overrides it finds the answer in `grid.objects`.

        Args:
            images: `[B, C, height, width]`, as the model gets them.
            grid: The whole grid.
            patch_size: Height and width of a patch.

        Returns:
            int64 `[B, H*W]`.
        """
        raise AssertionError('not overridden')

    def embed(
            self,
            x: torch.Tensor,
            grid: Grid,
            pos_embed: Optional[torch.Tensor],
    ) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
        """Act on the tokens, which become `tokens * prod(factors) + sum(terms)` over all encodings.

        Args:
            x: Tokens without any position, prefix tokens first, `[B, N, D]`.
            grid: The whole grid.
            pos_embed: timm's own table at the model's root, `[1, H*W (+ P), D]`, None without `ape`.

        Returns:
            Factor and term, each None or broadcastable to `[B, N, D]`. The term may be wider than x.
        """
        return None, None

    def mix(self, x: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
        """Put tokens and positions together in another way than by adding them.

        Args:
            x: Tokens times the product of all factors, `[B, N, D]`.
            term: Sum of all terms, broadcastable to `[B, N, D]`.

        Returns:
            `[B, N, D]`.
        """
        raise AssertionError('not overridden')

    def layer_embed(self, grid: Grid) -> torch.Tensor:
        """What is added to the normed tokens that each attention layer sees, not to the residual path, `[L, N, D]`."""
        raise AssertionError('not overridden')

    def after_block(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        """What is added to the tokens after the block of this layer.

        Args:
            x: Tokens, `[B, N, D]`.
            grid: The grid. With `keep_indices` its N is P + K.

        Returns:
            Broadcastable to `[B, N, D]`.
        """
        raise AssertionError('not overridden')

    def rotation(self, grid: Grid) -> torch.Tensor:
        """Angles by which pairs of neighbouring channels (0, 1), (2, 3), ... of q and k are turned.

        Returns:
            Table made by `rotation_table`, `[H*W, 2*d]` or `[h, H*W, 2*d]`, in at least float32. Prefix tokens have no
            rows: they are not rotated.
        """
        raise AssertionError('not overridden')

    def position_bias(self, grid: Grid) -> torch.Tensor:
        """Bias that the grid alone determines, added to the scaled logits, `[N, N]` or `[h, N, N]`."""
        raise AssertionError('not overridden')

    def content_bias(self, q: torch.Tensor, k: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Bias that depends on the content, added to the scaled logits.

        Args:
            q: Queries after q_norm, before any rotation, unscaled, `[B, h, N, d]`.
            k: Keys, likewise, `[B, h, N, d]`.
            grid: The grid. With `keep_indices` its N is P + K.

        Returns:
            Bias between tokens, broadcastable to `[B, h, N, N]`. In float32 or wider whatever the dtype of q: where it
            is wider than q, the attention is computed in its dtype.
        """
        raise AssertionError('not overridden')

    def distances(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            grid: Grid,
            backend: str,
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `content_bias` gives, in a form from which attention can be computed without any N x N tensor.

        Only for encodings that override `content_bias` too. Which of the two is asked for is up to the attention layer.

        Args:
            q: As for `content_bias`.
            k: As for `content_bias`.
            grid: As for `content_bias`.
            backend: What computes attention from it, 'torch' or 'triton'.

        Returns:
            Codes of the patches, `[B, h, N-P, Cx]` and `[B, h, N-P, Cy]`, and a gain, `[1]` or `[h]`: the bias between
            patches is gain times the sum of both Euclidean distances.
        """
        raise AssertionError('not overridden')

    def code_widths(self, grid: Grid) -> Tuple[int, int]:
        """Cx and Cy of `distances`."""
        raise AssertionError('not overridden')

    def channels(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            x: torch.Tensor,
            grid: Grid,
            scale: float,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """A bias that is a product, as further channels of q and k, so that any attention kernel computes it.

        It applies the gate itself, which has to come before whatever rounds.

        Args:
            q: Queries after q_norm, before any rotation, unscaled, `[B, h, N, d]`.
            k: Keys, likewise, `[B, h, N, d]`.
            x: The tokens that q and k are made of, `[B, N, D]`.
            grid: The grid. With `keep_indices` its N is P + K.
            scale: Factor of q.k in the logits, and of these channels.

        Returns:
            a and b, `[B, h, N, C]` in the dtype of q: logits get scale * a_i.b_j. Rows of prefix tokens are zero.
        """
        raise AssertionError('not overridden')

    def values(self, attn: torch.Tensor, grid: Grid) -> torch.Tensor:
        """What is added to the output of the heads.

        Needs the probabilities, so a model with such an encoding computes attention explicitly.

        Args:
            attn: Probabilities after softmax and dropout, `[B, h, N, N]`.
            grid: The grid. With `keep_indices` its N is P + K.

        Returns:
            Addend to `attn @ v`, broadcastable to `[B, h, N, d]`.
        """
        raise AssertionError('not overridden')

    def reset_parameters(self) -> None:
        """Give all parameters and buffers their initial values."""

    def init_non_persistent_buffers(self) -> None:
        """Recompute the buffers that are not saved, after construction on the meta device."""

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        """The model's own grid has changed (`set_input_size`). Parameters keep what they have learned."""
        self.grid_size = tuple(grid_size)

    def set_depth(self, depth: int) -> None:
        """The model has been cut down to its first layers."""

    def no_weight_decay(self) -> Set[str]:
        """Names of own parameters without weight decay: by default all, as timm does for `pos_embed`."""
        return {name for name, _ in self.named_parameters()}


class FixedEncoding(PositionEncoding):
    """An encoding without parameters: the grid alone determines what it contributes, the same in all layers.

    A subclass defines `compute` and calls `make_table` at the end of its constructor. The table of the model's own grid
    is a buffer, in float32 at least whatever the model's dtype; that of another grid is computed in each forward.
    """
    per_layer = False
    adds = 'none'

    def __init__(self, *, device=None, dtype=None, **host) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        self._table_kwargs = {
            'device': device,
            'dtype': torch.promote_types(dtype or torch.get_default_dtype(), torch.float32),
        }

    def compute(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """What the encoding contributes on a whole grid."""
        raise AssertionError('not overridden')

    def make_table(self) -> None:
        """Compute the buffer."""
        self.register_buffer('table', self._own_table(**self._table_kwargs), persistent=False)

    def _own_table(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return self.compute(Grid(*self.grid_size, self.num_prefix_tokens), device, dtype)

    def table_for(self, grid: Grid) -> torch.Tensor:
        """What `compute` gives for `grid`, taken from the buffer if the grid is the model's own."""
        return self.table if grid.matches(self.grid_size) else self.compute(grid, self.table.device, self.table.dtype)

    def reset_parameters(self) -> None:
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        self.table.copy_(self._own_table(self.table.device, self.table.dtype))

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        super().set_grid_size(grid_size)
        self.table = self._own_table(self.table.device, self.table.dtype)

    def _apply(self, fn, *args, **kwargs):
        # model.half() would narrow the table, model.double() leave it no more exact, to_empty() leave it undefined
        dtype, was_meta = self.table.dtype, self.table.is_meta
        super()._apply(fn, *args, **kwargs)
        if self.table.dtype != dtype or was_meta and not self.table.is_meta:
            dtype = torch.promote_types(self.table.dtype, torch.float32)
            self.table = self._own_table(self.table.device, dtype)
        return self


class RotaryEncoding(PositionEncoding):
    """A rotation of q and k. A subclass defines `angles`; a gate multiplies them before their sine is taken."""
    rotate_half: bool = False  #: Pairs of channels are t and t + d/2 instead of 2t and 2t + 1.

    def angles(self, grid: Grid) -> torch.Tensor:
        """Angle of each pair of channels, in radians, `[H*W, d/2]` or `[h, H*W, d/2]`, in at least float32."""
        raise AssertionError('not overridden')

    def rotation(self, grid: Grid) -> torch.Tensor:
        return rotation_table(self.gated(self.angles(grid)), self.rotate_half)

    def _require_head_dim(self, name: str, multiple: int) -> None:
        if self.head_dim % multiple:
            raise ValueError(
                f'{name!r} needs a head dim that is a multiple of {multiple}, got {self.head_dim}. '
                'Choose another num_heads.')


class FixedRotaryEncoding(FixedEncoding, RotaryEncoding):
    """A rotation without parameters. A subclass defines `compute_angles`."""

    def compute_angles(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """`angles`, computed."""
        raise AssertionError('not overridden')

    def compute(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        angles = self.compute_angles(grid, device, dtype)
        # sine and cosine are kept, but under a gate, which changes from step to step
        return rotation_table(angles, self.rotate_half) if self.gate is None else angles

    def angles(self, grid: Grid) -> torch.Tensor:
        return self.compute_angles(grid, self.table.device, self.table.dtype)

    def rotation(self, grid: Grid) -> torch.Tensor:
        table = self.table_for(grid)
        return table if self.gate is None else rotation_table(self.gated(table), self.rotate_half)


class _SavesGrid(PositionEncoding):
    """An encoding that saves a grid with its parameters (as extra state), so that no road can lose it."""

    def saved_grid_size(self) -> Optional[Tuple[int, int]]:
        """(H, W) that the parameters belong to; None if that does not matter, and nothing is saved."""
        raise AssertionError('not overridden')

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.saved_grid_size() or (0, 0), device='cpu')

    def set_extra_state(self, state: torch.Tensor) -> None:
        raise AssertionError('not overridden')

    @staticmethod
    def read_extra_state(state: torch.Tensor) -> Tuple[int, int]:
        """The saved grid, also out of a file whose entries have all been averaged or cast to floats."""
        height, width = (round(size) for size in state.tolist())
        return height, width

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.saved_grid_size() is None:
            del destination[f'{prefix}_extra_state']

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, *args) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *args)
        if self.saved_grid_size() is None and f'{prefix}_extra_state' in missing_keys:
            missing_keys.remove(f'{prefix}_extra_state')


class ReferenceGridEncoding(_SavesGrid):
    """An encoding whose parameters mean something on the grid that they were trained on, and are never resized.

    `ref_grid_size` is that grid. On any other one, the encoding rescales its positions instead. It is saved with the
    parameters.
    """

    def __init__(self, *, ref_grid_size: Optional[Tuple[int, int]] = None, **host) -> None:
        super().__init__(**host)
        self.ref_grid_size = tuple(ref_grid_size or self.grid_size)

    def saved_grid_size(self) -> Optional[Tuple[int, int]]:
        return self.ref_grid_size

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.ref_grid_size = self.read_extra_state(state)

    def set_ref_grid_size(self, ref_grid_size: Tuple[int, int]) -> None:
        """Make room for parameters trained on another grid, which are about to be loaded."""
        self.ref_grid_size = tuple(ref_grid_size)

    def rescaling(self, grid: Grid) -> Optional[Tuple[int, int]]:
        """The grid to rescale positions to, None if `grid` is the trained one."""
        return None if grid.matches(self.ref_grid_size) else self.ref_grid_size


class CoordinateEncoding(ReferenceGridEncoding):
    """An encoding that is a function of coordinates.

    Args:
        resolution: What happens on another grid than the trained one, H0 x W0. 'extrapolate': coordinates go on,
            0 ... H-1. 'rescale': they are squeezed or stretched to the trained range, y becomes
            (y + 1/2) * H0/H - 1/2, x likewise.

    Raises:
        ValueError: If it is none of these.
    """

    def __init__(self, *, resolution: str = 'extrapolate', **host) -> None:
        if resolution not in ('extrapolate', 'rescale'):
            raise ValueError(
                f"{self.name!r}: resolution must be 'extrapolate' or 'rescale', got {resolution!r}.")
        self.rescales = resolution == 'rescale'
        super().__init__(**host)

    def saved_grid_size(self) -> Optional[Tuple[int, int]]:
        return self.ref_grid_size if self.rescales else None

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.set_ref_grid_size(self.read_extra_state(state))

    def set_ref_grid_size(self, ref_grid_size: Tuple[int, int]) -> None:
        super().set_ref_grid_size(ref_grid_size)
        self.init_non_persistent_buffers()

    def coordinates(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """(y, x) of each patch in patches of the trained grid, `[H*W, 2]`."""
        coordinates = grid.coordinates(device, dtype)
        if not self.rescales or self.rescaling(grid) is None:
            return coordinates
        scale = [ref / size for ref, size in zip(self.ref_grid_size, grid.size)]
        return torch.stack([(c + 0.5) * s - 0.5 for c, s in zip(coordinates.unbind(-1), scale)], dim=-1)


class ResizedEncoding(_SavesGrid):
    """An encoding whose parameters belong to a grid, `grid_size`, and are resampled for another one.

    The same function does it on every road: in a forward pass on images of another size, by `set_input_size`, and when
    weights of another size are loaded.
    """
    RESIZED: Tuple[str, ...] = ('table',)  #: Names of those parameters.

    def resample(
            self,
            name: str,
            table: torch.Tensor,
            old_size: Tuple[int, int],
            new_size: Tuple[int, int],
    ) -> torch.Tensor:
        """The parameter `name`, whose value for a grid of `old_size` is `table`, for one of `new_size`."""
        raise AssertionError('not overridden')

    def resized(self, name: str, grid: Grid) -> torch.Tensor:
        """The parameter `name` for `grid`."""
        table = getattr(self, name)
        return table if grid.matches(self.grid_size) else self.resample(name, table, self.grid_size, grid.size)

    def saved_grid_size(self) -> Tuple[int, int]:
        return self.grid_size

    def set_extra_state(self, state: torch.Tensor) -> None:
        # Tables of 3 x 5 and 5 x 3 patches may have one shape. The model refuses them, but a wrapper does not ask it.
        saved = self.read_extra_state(state)
        if saved != self.grid_size:
            raise ValueError(
                f'{self.name!r}: the checkpoint is of a grid of {saved[0]}x{saved[1]} patches, the model has '
                f'{self.grid_size[0]}x{self.grid_size[1]}. Load it into a model of its own size, then set_input_size.')

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
    """Sine and cosine in the layout of timm's `apply_rot_embed_cat`.

    Args:
        angles: In radians, one for each pair of channels, `[..., H*W, d/2]`.
        rotate_half: Pairs are the channels t and t + d/2 instead of 2t and 2t + 1.

    Returns:
        Sine of each channel's angle, then cosine, `[..., H*W, 2*d]`.
    """
    if rotate_half:
        angles = torch.cat([angles, angles], dim=-1)  # [..., H*W, d]
    else:
        # repeat_interleave is exported wrongly by torch.onnx.export(dynamo=False)
        angles = torch.stack([angles, angles], dim=-1).flatten(-2)  # [..., H*W, d]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
