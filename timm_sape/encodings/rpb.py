"""Relative position bias of Swin (Liu et al., 'Swin Transformer', ICCV 2021).

One learned number for each offset between two patches and each head. It is 2-D in that an offset is a pair (dy, dx). It
costs one look-up of N x N numbers per head and layer, whatever the batch size.
"""
from typing import Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from .. import ops
from ..grid import Grid
from .base import ResizedEncoding, between_patches, fill_trunc_normal
from .registry import register_encoding


@register_encoding('rpb')
class RelativePositionBias(ResizedEncoding):
    """Relative position bias of Swin.

    Logits get table[p_i - p_j], with a row for each offset from (1-H, 1-W) to (H-1, W-1).

    Rows are in the order of timm's `RelPosBias`, dy first. They are initialized from a truncated normal distribution
    with std .02 and get no weight decay. timm's layer is made for windows: it supports one grid size and at most one
    prefix token, whose pairs have numbers of their own. Here there can be any number of prefix tokens, and their bias
    is 0. On another grid the table is resampled as a map of (2H-1) x (2W-1) numbers, bicubic and without antialiasing,
    as in Swin's fine-tuning. Offset 0 stays in the middle. Computed in at least float32.
    """
    relative = True
    adds = 'L * (2 * H - 1) * (2 * W - 1) * h'
    on_other_grids = 'the table is resampled (bicubic)'
    skips_dropped = True
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
        return grid.pad_prefix(between_patches(table, grid))  # [(B,) h, N, N]
