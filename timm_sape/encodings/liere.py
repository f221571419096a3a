"""LieRE (Ostmeier et al., 'LieRE: Lie Rotational Positional Encodings', ICML 2025).

A rotation of q and k that is not made of pairs of channels: a block of channels is multiplied by an orthogonal matrix,
the exponential of a skew-symmetric one that each head learns. It is 2-D in that it is y times one learned matrix plus x
times another. It costs an exponential of each block in each layer and patch, whatever the batch size, and a product of
each block with q and with k.
"""
from typing import Optional, Tuple

import torch
import torch.nn as nn

from .. import ops
from ..checks import is_integer
from ..grid import Grid
from .base import BlockRotaryEncoding, CoordinateEncoding
from .registry import register_encoding


@register_encoding('liere')
class LieRotaryEncoding(BlockRotaryEncoding, CoordinateEncoding):
    """Lie rotational (LieRE).

    Block m of the channels of head h is multiplied by exp(y * A[0, h, m] + x * A[1, h, m]), A skew-symmetric.

    Each layer learns its own A. Rows are counted from 0, follow the rule for other grids, and are divided by H0 - 1, so
    y goes from 0 to 1 on the trained grid; x likewise. q.k depends on position differences alone only if the matrices
    of y and x commute, as for blocks of 2, where this is `rope2d_mixed` with other initial values. The entries above
    the diagonal start uniform in 0 to 2 pi, as in the authors' code. This is its option with separate matrices for each
    layer and head. On a grid of H rows in place of H0, that code lets y go from 0 to H/H0; here the distance of two
    rows stays what it was (or `rescale`). The entries get no weight decay. Computed in at least float32.

    Args:
        block_size: Channels of a block, 2 or more. None for one block of the whole head dim.

    Raises:
        ValueError: If it is not such an integer, or does not divide the head dim.
    """
    adds = 'L * 7 * D'
    on_other_grids = 'positions extrapolate, or `rescale`'
    paper = 'https://arxiv.org/abs/2406.10322'

    def __init__(self, *, block_size: Optional[int] = 8, device=None, dtype=None, **host) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        block_size = self.head_dim if block_size is None else block_size
        require_blocks('liere', block_size, self.head_dim)
        self.block_size = block_size
        shape = 2, self.num_heads, self.head_dim // block_size, block_size * (block_size - 1) // 2
        self.entries = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def fits(cls, dim: int, num_heads: int) -> bool:
        return dim // num_heads % 8 == 0

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.entries, 0, 2 * torch.pi)

    def saved_grid_size(self) -> Optional[Tuple[int, int]]:
        return self.ref_grid_size

    def blocks(self, grid: Grid) -> torch.Tensor:
        a, = ops.upcast(self.entries)
        places = self.coordinates(grid, a.device, a.dtype)  # [H*W, 2]
        y, x = (p / max(size - 1, 1) for p, size in zip(places.unbind(-1), self.ref_grid_size))
        y, x = y[:, None, None], x[:, None, None]
        entries = self.gated(y * a[0, :, None] + x * a[1, :, None])  # [h, H*W, n, b*(b-1)/2]
        return ops.matrix_exp(ops.skew(entries, self.block_size))


def require_blocks(name: str, block_size: int, head_dim: int) -> None:
    """
    Raises:
        ValueError: If block_size is no integer of 2 or more that divides head_dim.
    """
    if not is_integer(block_size, 2):
        raise ValueError(f'{name!r} needs block_size to be an integer of 2 or more, got {block_size!r}.')
    if head_dim % block_size:
        raise ValueError(
            f'{name!r} needs a head dim that is a multiple of block_size={block_size}, got {head_dim}. Choose another '
            'num_heads or block_size.')
