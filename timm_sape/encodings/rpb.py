"""Relative position bias of Swin (Liu et al., 'Swin Transformer', ICCV 2021).

One learned number for each offset between two patches and each head. 2-D in that an offset is a pair (dy, dx). Costs
one look-up of N x N numbers per head and layer, whatever the batch.
"""
from typing import Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from .. import ops
from ..grid import Grid
from .base import ResizedEncoding, fill_trunc_normal
from .registry import register_encoding


@register_encoding('rpb')
class RelativePositionBias(ResizedEncoding):
    """Relative position bias of Swin.

    Logits get table[p_i - p_j], with a row for each offset from (1-H, 1-W) to (H-1, W-1).

    The rows stand in the order of timm's `RelPosBias`, dy first. They start as a truncated normal distribution with std
    .02 and have no weight decay. timm's layer serves windows: it takes one prefix token at most, whose pairs have
    numbers of their own, and one size of grid. Here any number of prefix tokens has no bias, and on another grid the
    table is resampled as the map of (2H-1) x (2W-1) numbers that it is: bicubic, without antialiasing, as Swin's
    fine-tuning does. Offset 0 stays in its middle. Computed in float32 at least.
    """
    relative = True
    adds = 'L * (2 * H - 1) * (2 * W - 1) * h'
    resolution = 'the table is resampled (bicubic)'
    paper = 'https://arxiv.org/abs/2103.14030'

    def __init__(self, *, device=None, dtype=None, **host) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        height, width = self.grid_size
        num_offsets = (2 * height - 1) * (2 * width - 1)
        self.table = nn.Parameter(torch.empty(num_offsets, self.num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        fill_trunc_normal(self.table, 0.02)

    def resample(
            self,
            name: str,
            table: torch.Tensor,
            old_size: Tuple[int, int],
            new_size: Tuple[int, int],
    ) -> torch.Tensor:
        (wide,) = ops.upcast(table)
        old_size, new_size = ([2 * size - 1 for size in sizes] for sizes in (old_size, new_size))
        wide = F.interpolate(wide.T.reshape(1, -1, *old_size), size=new_size, mode='bicubic')  # [1, h, 2H-1, 2W-1]
        return wide[0].flatten(1).T.to(table.dtype).contiguous()  # [(2H-1)*(2W-1), h]

    def position_bias(self, grid: Grid) -> torch.Tensor:
        (table,) = ops.upcast(self.resized('table', grid))
        return grid.between_tokens(between_patches(table, grid))  # [(B,) h, N, N]


def between_patches(values: torch.Tensor, grid: Grid) -> torch.Tensor:
    """From offsets to pairs of patches.

    Args:
        values: Of each offset p_i - p_j, from (1-H, 1-W) to (H-1, W-1) row by row, `[(2H-1)*(2W-1), h]`.
        grid: The whole grid.

    Returns:
        `[h, H*W, H*W]`.
    """
    y, x = (torch.arange(size, device=values.device) for size in grid.size)
    dy = y[:, None] - y + grid.height - 1  # [H, H]
    dx = x[:, None] - x + grid.width - 1  # [W, W]
    index = dy[:, None, :, None] * (2 * grid.width - 1) + dx[None, :, None, :]  # [H, W, H, W]
    # values[index] would do, but its gradient is 30 times slower
    pairs = values.T.index_select(1, index.flatten())
    return pairs.reshape(-1, grid.num_patches, grid.num_patches)
