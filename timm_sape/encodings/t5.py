"""Relative position bias of T5 (Raffel et al., 'Exploring the Limits of Transfer Learning', JMLR 2020).

A learned number for each bucket of distances and each head, the same in all layers. Each small distance has a bucket of
its own, large ones share buckets. Ours is 2-D: it has a table for dy and one for dx, and adds their numbers. The
original is for sequences, which here means the raster. It costs one look-up of N x N numbers per head and forward pass.
"""
import math
import operator
from functools import reduce

import torch
import torch.nn as nn

from .. import ops
from ..grid import Grid
from .base import PositionEncoding
from .registry import register_encoding

NUM_BUCKETS = 32  # 16 for each sign, of which the first 8 are for a single distance each
# Smallest distance in each of the other buckets: the first integer that is not below
# 8 * (128 / 8)^(k / 8) = sqrt(64 * 2^k). In integers, because a rounded logarithm could fall on either side of one.
THRESHOLDS = tuple(math.isqrt(64 * 2 ** k - 1) + 1 for k in range(8))


@register_encoding('t5')
class BucketedRelativePositionBias(PositionEncoding):
    """Relative bias of T5, in x and y.

    Logits get table_y[bucket(y_j - y_i)] + table_x[bucket(x_j - x_i)].

    Of the 32 buckets, 16 are for positive offsets (j after i) and 16 for all others. In each half, the distances 0 to 7
    have a bucket each. A distance m >= 8 has bucket 8 + floor(8 * log(m / 8) / log(128 / 8)), at most 15, so new
    buckets begin at 8, 12, 16, 23, 32, 46, 64 and 91. (No positive offset has distance 0, so that bucket is unused, as
    in T5.)

    T5 adds them to q.k; here, as everywhere in this package, they are added to q.k / sqrt(d).

    Tables are initialized from a normal distribution with std 1/sqrt(D), as in the T5 of Hugging Face's transformers,
    and get no weight decay. Computed in at least float32.

    Args:
        distance: 'axis' as above. 'raster': one table, and distances along the raster as in a text; on another grid the
            same distance is then another offset.

    Raises:
        ValueError: If `distance` is neither.
    """
    per_layer = False
    relative = True
    adds = '64 * h'
    on_other_grids = 'further distances share the last buckets'
    skips_dropped = True
    paper = 'https://arxiv.org/abs/1910.10683'

    def __init__(self, *, distance: str = 'axis', device=None, dtype=None, **host) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        self._require_choice('distance', distance, ('axis', 'raster'))
        self.distance = distance
        for name in ('table_y', 'table_x') if distance == 'axis' else ('table',):
            setattr(self, name, nn.Parameter(torch.empty(NUM_BUCKETS, self.num_heads, device=device, dtype=dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self.parameters(recurse=False):
            nn.init.normal_(table, std=self.dim ** -0.5)

    def position_bias(self, grid: Grid) -> torch.Tensor:
        if grid.keep_indices is not None:
            return grid.pad_prefix(self._between_kept(grid))  # [B, h, N, N]
        if self.distance == 'raster':
            return grid.pad_prefix(_along(self.table, grid.num_patches))  # [h, N, N]
        along_y = _along(self.table_y, grid.height)[:, :, None, :, None]  # [h, H, 1, H, 1]
        along_x = _along(self.table_x, grid.width)[:, None, :, None, :]  # [h, 1, W, 1, W]
        bias = (along_y + along_x).reshape(-1, grid.num_patches, grid.num_patches)
        return grid.pad_prefix(bias)  # [h, N, N]

    def _between_kept(self, grid: Grid) -> torch.Tensor:
        """The bias between the patches in the sequence, `[B, h, K, K]`."""
        dy, dx = grid.kept_offsets()  # [B, K, K]
        axes = {'table': dy * grid.width + dx} if self.distance == 'raster' else {'table_y': dy, 'table_x': dx}
        tables = ops.upcast(*(getattr(self, name) for name in axes))
        found = [table.T.index_select(1, bucket(d).flatten()) for table, d in zip(tables, axes.values())]
        return reduce(operator.add, found).reshape(self.num_heads, *dy.shape).transpose(0, 1)


def _along(table: torch.Tensor, size: int) -> torch.Tensor:
    """The bias between all pairs of `size` places in a line, from a table `[buckets, h]`, `[h, size, size]`."""
    (table,) = ops.upcast(table)
    place = torch.arange(size, device=table.device)
    values = table.T.index_select(1, bucket(torch.arange(1 - size, size, device=table.device)))  # [h, 2*size-1]
    offset = place - place[:, None] + size - 1  # [size, size]
    return values.index_select(1, offset.flatten()).reshape(-1, size, size)


def bucket(offset: torch.Tensor) -> torch.Tensor:
    """The bucket of each offset j - i. Integers of any shape to integers of the same shape, 0 to 31."""
    distance = offset.abs()
    index = distance.clamp(max=THRESHOLDS[0])
    for threshold in THRESHOLDS[1:]:
        index = index + (distance >= threshold)
    return index + NUM_BUCKETS // 2 * (offset > 0)
