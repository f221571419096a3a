"""Absolute position encoding: a learned vector for each token (Dosovitskiy et al. 2021, the default of ViT).

A learned vector is added to each token. Only the resampling of its table is 2-D. It is timm's default.
"""
import math
from typing import Tuple

import torch
import torch.nn.functional as F

from .. import ops
from ..grid import Grid
from .base import PositionEncoding
from .registry import register_encoding


@register_encoding('ape')
class AbsolutePositionEncoding(PositionEncoding):
    """Learned absolute table, timm's `pos_embed`.

    The table is added to the tokens. It is the model's parameter `pos_embed`, so that timm's checkpoints, resampling,
    initialization and parameter groups work with it as usual. It has rows for the prefix tokens too, unless the model
    has `no_embed_class`: then the host passes zeros for them.
    """
    asks_for = ('pos_embed',)
    per_layer = False
    adds = '(H*W + P) * D'
    on_other_grids = 'the table is resampled (bicubic, antialiased)'
    paper = 'https://arxiv.org/abs/2010.11929'

    def embed(self, x: torch.Tensor, grid: Grid, pos_embed: torch.Tensor) -> torch.Tensor:
        p, rows, size = grid.num_prefix_tokens, pos_embed.shape[1], self.grid_size
        if rows != p + math.prod(size):
            # in timm, a table resized by hand is right if the patch embedding is resized, too
            if rows != p + grid.num_patches:
                raise ValueError(
                    f'pos_embed has {rows} rows, but the model has {p} prefix tokens and {size[0]}x{size[1]} patches. '
                    'To change the size of the model, call its set_input_size, which also resamples the table. For '
                    'other prefix tokens, create it with class_token= and reg_tokens=.')
            size = grid.size
        if not grid.matches(size):
            pos_embed = resample_pos_embed(pos_embed, size, grid.size, p)
        return grid.keep_tokens(pos_embed)  # [1, P+H*W, D] or [B, N, D]


def resample_pos_embed(
        table: torch.Tensor,
        old_size: Tuple[int, int],
        new_size: Tuple[int, int],
        num_prefix_rows: int = 0,
) -> torch.Tensor:
    """A learned table for another grid: what timm's `resample_abs_pos_embed` does, which always computes in float32.

    Args:
        table: `[1, n+H*W, D]` for n prefix rows, which stay as they are.
        old_size: (H, W).
        new_size: (H, W) of the grid to resample for.
        num_prefix_rows: n.

    Returns:
        The table for `new_size`, computed in float64 if it is in float64, else in float32.
    """
    if not ops.is_exporting() and new_size == old_size:  # in an export this would hold for one size only
        return table
    prefix, patches = table[:, :num_prefix_rows], table[:, num_prefix_rows:]
    (wide,) = ops.upcast(patches)
    wide = wide.reshape(1, *old_size, -1).permute(0, 3, 1, 2)  # [1, D, H, W]
    wide = F.interpolate(wide, size=new_size, mode='bicubic', antialias=True)
    patches = wide.permute(0, 2, 3, 1).reshape(1, -1, table.shape[-1]).to(table.dtype)
    return torch.cat([prefix, patches], dim=1) if num_prefix_rows else patches
