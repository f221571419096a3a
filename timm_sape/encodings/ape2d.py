"""Factored absolute position encoding: a learned vector for each row and one for each column.

The table of 'ape' in factored form (the factorised embeddings of NaViT; Dehghani et al., 'Patch n' Pack', 2023). It is
2-D in that y and x are learned separately, so a row has the same vector in every column. It costs one addition per
token entry.
"""
from typing import Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from .. import ops
from ..grid import Grid
from .base import ResizedEncoding
from .registry import register_encoding


@register_encoding('ape2d')
class FactoredPositionEncoding(ResizedEncoding):
    """Learned absolute tables of rows and columns.

    The patch at (y, x) gets table_y[y] + table_x[x] ('sum'), or the two concatenated ('concat').

    The tables are initialized from a normal distribution with std .02 and get no weight decay. Nothing is added to
    prefix tokens. On another grid each table is resampled along its axis, linearly and without antialiasing. All this
    is as in timm's NaFlexVit (`pos_embed='factorized'`), which has only the sum.

    Args:
        combine: 'sum' of two tables of D channels, or 'concat' of two of D/2 channels, y first.

    Raises:
        ValueError: If `combine` is neither, or is 'concat' and the embed dim is odd.
    """
    RESIZED = ('table_y', 'table_x')
    per_layer = False
    adds = '(H + W) * D'
    on_other_grids = 'each table is resampled (linear)'
    paper = 'https://arxiv.org/abs/2307.06304'

    def __init__(self, *, combine: str = 'sum', device=None, dtype=None, **host) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        self._require_choice('combine', combine, ('sum', 'concat'))
        if combine == 'concat' and self.dim % 2:
            raise ValueError(f"'ape2d' with combine='concat' needs an even embed dim, got {self.dim}. Use 'sum'.")
        self.combine = combine
        channels = self.dim if combine == 'sum' else self.dim // 2
        height, width = self.grid_size
        self.table_y = nn.Parameter(torch.empty(height, channels, device=device, dtype=dtype))
        self.table_x = nn.Parameter(torch.empty(width, channels, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table_y, std=0.02)
        nn.init.normal_(self.table_x, std=0.02)

    def resample(
            self,
            name: str,
            table: torch.Tensor,
            old_size: Tuple[int, int],
            new_size: Tuple[int, int],
    ) -> torch.Tensor:
        (wide,) = ops.upcast(table)
        wide = F.interpolate(wide.T[None], size=new_size[self.RESIZED.index(name)], mode='linear')  # [1, C, H or W]
        return wide[0].T.to(table.dtype).contiguous()  # [H or W, C]

    def embed(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        rows, columns = ops.upcast(self.resized('table_y', grid), self.resized('table_x', grid))
        rows, columns = torch.broadcast_tensors(rows[:, None], columns)  # [H, W, C]
        table = rows + columns if self.combine == 'sum' else torch.cat([rows, columns], dim=-1)  # [H, W, D]
        return grid.keep_tokens(grid.pad_tokens(table.flatten(0, 1)))  # [(B,) N, D]
