"""Rotary position encoding (Su et al., 'RoFormer', 2021) along the raster.

Nothing about it is 2-D: neighbours in a column are W positions apart, although they are adjacent in the image. Costs
two multiplications per entry of q and k.
"""
import torch

from ..grid import Grid
from .base import CoordinateEncoding, FixedRotaryEncoding
from .registry import register_encoding


@register_encoding('rope1d')
class RotaryEncoding1d(FixedRotaryEncoding, CoordinateEncoding):
    """Rotary along the raster (RoPE).

    Pair k < d/2 of patch n of the raster is rotated by n * 10000^(-2k/d). Prefix tokens are not counted.

    Args:
        resolution: What happens on a grid of N patches other than the N0 of training. 'extrapolate': n goes up to
            N - 1. 'rescale': n is squeezed or stretched to n * N0/N.

    Raises:
        ValueError: If `resolution` is neither, or the head dim is odd.
    """
    relative = True
    sees_mirror = True
    resolution = 'the raster index goes on, or `rescale`'
    paper = 'https://arxiv.org/abs/2104.09864'

    def __init__(self, **host) -> None:
        super().__init__(**host)
        self._require_head_dim('rope1d', 2)
        self.make_table()

    def compute_angles(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        index = torch.arange(grid.num_patches, device=device, dtype=dtype)  # [H*W]
        if self.rescales and self.rescaling(grid) is not None:
            ref_height, ref_width = self.ref_grid_size
            index = index * (ref_height * ref_width / grid.num_patches)
        k = torch.arange(self.head_dim // 2, device=device, dtype=dtype)
        return index[:, None] * 10000 ** (-2 * k / self.head_dim)  # [H*W, d/2]
