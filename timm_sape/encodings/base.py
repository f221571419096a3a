"""What a position encoding is: a module with up to five hooks, one for each place where position can act.

| hook | acts on | returns |
|---|---|---|
| `embed` | the tokens, after the patch embedding | a factor and a term for the tokens |
| `rotation` | q and k | the table of angles that rotates them |
| `position_bias` | the logits, by geometry alone | a bias between tokens |
| `content_bias` | the logits, from q and k | a bias between tokens |
| `values` | the values | what is added to the attention's output |

An encoding overrides those that it needs. The first three see whole grids only: dropped patches are taken out of what
they return by the caller. To add one: write it in a file of this folder, decorate it with `register_encoding`, import
it in the folder's `__init__.py`.
"""
from typing import Optional, Set, Tuple

import torch
import torch.nn as nn

from ..grid import Grid

__all__ = ['FixedEncoding', 'PositionEncoding', 'ReferenceGridEncoding', 'rotation_table']


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
    """
    per_layer: bool = True  #: One instance per attention layer. Else one for the model, its geometry computed once.
    relative: bool = False  #: Depends on differences of positions alone.
    adds: str = ''  #: Parameters added, for the tables of the documentation.
    resolution: str = ''  #: The rule for a grid that it was not trained on, in one phrase.
    paper: str = ''  #: Link to the source.

    HOOKS = {
        'embed': 'tokens',
        'rotation': 'q and k',
        'position_bias': 'logits, by geometry',
        'content_bias': 'logits, from content',
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
            device=None,
            dtype=None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.grid_size = tuple(grid_size)
        self.num_prefix_tokens = num_prefix_tokens

    @classmethod
    def overrides(cls, hook: str) -> bool:
        """Whether the encoding acts through `hook`, one of the keys of `HOOKS`."""
        return getattr(cls, hook) is not getattr(PositionEncoding, hook)

    @classmethod
    def acts_on(cls) -> Tuple[str, ...]:
        """The places where it acts, in words."""
        return tuple(place for hook, place in cls.HOOKS.items() if cls.overrides(hook))

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
            Factor and term, each None or broadcastable to `[B, N, D]`.
        """
        return None, None

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
        super().__init__(**host)
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


class ReferenceGridEncoding(PositionEncoding):
    """An encoding whose parameters mean something on the grid that they were trained on, and are never resized.

    `ref_grid_size` is that grid. On any other one, the encoding rescales its positions instead. It is saved with the
    parameters (as the module's extra state), so that it cannot get lost on any road that a checkpoint takes.
    """

    def __init__(self, *, ref_grid_size: Optional[Tuple[int, int]] = None, **host) -> None:
        super().__init__(**host)
        self.ref_grid_size = tuple(ref_grid_size or self.grid_size)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.ref_grid_size, device='cpu')

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.ref_grid_size = self.read_extra_state(state)

    @staticmethod
    def read_extra_state(state: torch.Tensor) -> Tuple[int, int]:
        """The saved grid, also out of a file whose entries have all been averaged or cast to floats."""
        height, width = (round(size) for size in state.tolist())
        return height, width

    def set_ref_grid_size(self, ref_grid_size: Tuple[int, int]) -> None:
        """Make room for parameters trained on another grid, which are about to be loaded."""
        self.ref_grid_size = tuple(ref_grid_size)

    def rescaling(self, grid: Grid) -> Optional[Tuple[int, int]]:
        """The grid to rescale positions to, None if `grid` is the trained one."""
        return None if grid.matches(self.ref_grid_size) else self.ref_grid_size


def rotation_table(angles: torch.Tensor) -> torch.Tensor:
    """Sine and cosine in the layout of timm's `apply_rot_embed_cat`.

    Args:
        angles: In radians, one for each pair of channels, `[..., H*W, d/2]`.

    Returns:
        Each sine twice, then each cosine twice, `[..., H*W, 2*d]`.
    """
    angles = angles.repeat_interleave(2, dim=-1)  # [..., H*W, d]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
