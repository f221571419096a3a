"""Sinusoidal position encoding (Vaswani et al., 'Attention Is All You Need', 2017) along the raster.

A fixed vector of sines and cosines of the number of the patch, row by row, is added to each patch token. Nothing about
it is 2-D: neighbours in a column are W positions apart, although they are adjacent in the image. It costs one addition
per token entry.
"""
import torch

from ..grid import Grid
from .base import CoordinateEncoding, FixedEncoding
from .registry import register_encoding


@register_encoding('sincos1d')
class SinusoidalPositionEncoding1d(FixedEncoding, CoordinateEncoding):
    """Sinusoidal along the raster.

    Patch n of the raster gets sin(n * w_k) in channel 2k and cos(n * w_k) in channel 2k + 1, w_k = 10000^(-2k/D).

    Prefix tokens are not counted, and nothing is added to them.

    Args:
        resolution: What happens on a grid of N patches other than the N0 of training. 'extrapolate': n goes up to
            N - 1. 'rescale': n is squeezed or stretched to n * N0/N.

    Raises:
        ValueError: If `resolution` is neither, or the embed dim is odd.
    """
    on_other_grids = 'the raster index extrapolates, or `rescale`'
    paper = 'https://arxiv.org/abs/1706.03762'

    def __init__(self, **host) -> None:
        super().__init__(**host)
        if self.dim % 2:
            raise ValueError(f"'sincos1d' needs an even embed dim, got {self.dim}. Choose another embed_dim.")
        self.make_table()

    def compute(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        index = torch.arange(grid.num_patches, device=device, dtype=dtype)  # [H*W]
        if self.rescaling(grid) is not None:
            ref_height, ref_width = self.ref_grid_size
            index = index * (ref_height * ref_width / grid.num_patches)
        k = torch.arange(self.dim // 2, device=device, dtype=dtype)
        angles = index[:, None] * 10000 ** (-2 * k / self.dim)  # [H*W, D/2]
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)  # [H*W, D]

    def embed(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        return grid.keep_tokens(grid.pad_tokens(self.table_for(grid)))  # [(B,) N, D]
