"""Absolute position encoding: a learned vector for each token (Dosovitskiy et al. 2021, the default of ViT).

A learned vector is added to each token. Only the resampling of its table is 2-D. It is timm's default.
"""
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed

from ..grid import Grid
from .base import PositionEncoding
from .registry import register_encoding


@register_encoding('ape')
class AbsolutePositionEncoding(PositionEncoding):
    """Learned absolute table, timm's `pos_embed`.

    The table is added to the tokens. It is the model's parameter `pos_embed`, so that timm's checkpoints, resampling,
    initialization and parameter groups work with it as usual. It has rows for the prefix tokens too, unless the model
    has `no_embed_class`.
    """
    asks_for = ('pos_embed',)
    per_layer = False
    adds = '(H*W + P) * D'
    resolution = 'the table is resampled (bicubic, antialiased)'
    paper = 'https://arxiv.org/abs/2010.11929'

    def embed(self, x: torch.Tensor, grid: Grid, pos_embed: torch.Tensor) -> torch.Tensor:
        num_prefix_rows = pos_embed.shape[1] - self.grid_size[0] * self.grid_size[1]
        if not grid.matches(self.grid_size):
            pos_embed = resample_abs_pos_embed(
                pos_embed,
                new_size=grid.size,
                old_size=self.grid_size,
                num_prefix_tokens=num_prefix_rows,
            )
        pos_embed = F.pad(pos_embed, (0, 0, grid.num_prefix_tokens - num_prefix_rows, 0))  # [1, P+H*W, D]
        return grid.keep_tokens(pos_embed)
