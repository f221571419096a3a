"""Sinusoidal position encoding of x and y, as in masked autoencoders (He et al., 2022).

A fixed vector of sines and cosines is added to each patch token. Half of the channels encode x and half y. It costs one
addition per token entry.
"""
import torch

from ..grid import Grid
from .base import CoordinateEncoding, FixedEncoding
from .registry import register_encoding


@register_encoding('sincos2d')
class SinusoidalPositionEncoding2d(FixedEncoding, CoordinateEncoding):
    """Sinusoidal in x and y.

    The patch at (y, x) gets [sin(x w), cos(x w), sin(y w), cos(y w)], D/4 channels each, w_k = 10000^(-4k/D).

    Nothing is added to prefix tokens.

    Raises:
        ValueError: If the embed dim is not a multiple of 4.
    """
    on_other_grids = 'coordinates extrapolate, or `rescale`'
    paper = 'https://arxiv.org/abs/2111.06377'

    def __init__(self, **host) -> None:
        super().__init__(**host)
        if self.dim % 4:
            raise ValueError(
                f"'sincos2d' needs an embed dim that is a multiple of 4, got {self.dim}. Choose another embed_dim.")
        self.make_table()

    def compute(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        k = torch.arange(self.dim // 4, device=device, dtype=dtype)
        frequencies = 10000 ** (-4 * k / self.dim)  # [D/4]
        y, x = (c[:, None] * frequencies for c in self.coordinates(grid, device, dtype).unbind(-1))  # [H*W, D/4]
        return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=-1)  # [H*W, D]

    def embed(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        return grid.keep_tokens(grid.pad_tokens(self.table_for(grid)))  # [(B,) N, D]
