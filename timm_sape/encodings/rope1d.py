"""Rotary position encoding (Su et al., 'RoFormer', 2021) along the raster.

Pairs of channels of q and k are rotated by angles that grow with the number of the patch, row by row. Nothing about it
is 2-D: neighbours in a column are W positions apart, although they are adjacent in the image. It costs two
multiplications per entry of q and k.
"""
import math
from typing import List, Tuple

import torch

from ..grid import Grid
from .base import FixedRotaryEncoding, FrequencyEncoding
from .registry import register_encoding


@register_encoding('rope1d')
class RotaryEncoding1d(FixedRotaryEncoding, FrequencyEncoding):
    """Rotary along the raster (RoPE).

    Pair k < d/2 of patch n of the raster is rotated by n * 10000^(-2k/d). Prefix tokens are not counted.

    Args:
        resolution: What happens on a grid of N patches other than the N0 of training. 'extrapolate': n goes up to
            N - 1. 'rescale': n is squeezed or stretched to n * N0/N. 'ntk': slow pairs of channels
            are rescaled, fast ones hardly. 'yarn': pairs with few turns over the N0 patches are rescaled, those with
            many are not, and logits are scaled up.

    Raises:
        ValueError: If `resolution` is none of these, `ramp` is not two numbers of turns, or the head dim is odd.
    """
    relative = True
    sees_mirror = True
    on_other_grids = 'the raster index extrapolates, or `rescale`, `ntk`, `yarn`'
    paper = 'https://arxiv.org/abs/2104.09864'

    def __init__(self, **host) -> None:
        super().__init__(**host)
        self._require_head_dim(2)
        self.make_table()

    def compute_angles(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        index = torch.arange(grid.num_patches, device=device, dtype=dtype)[:, None]  # [H*W, 1]
        k = torch.arange(self.head_dim // 2, device=device, dtype=dtype)
        frequencies = 10000 ** (-2 * k / self.head_dim)  # [d/2]
        ref = self.rescaling(grid)
        if ref is not None:
            trained = math.prod(ref)
            turns = trained * frequencies / (2 * math.pi)
            index = index * self.squeeze(trained / grid.num_patches, frequencies ** 2, turns)
        return index * frequencies  # [H*W, d/2]

    def frequency_range(self) -> Tuple[float, float]:
        return 1., 10000 ** (2 / self.head_dim - 1)

    def stretches(self, grid: Grid) -> List[float]:
        return [grid.num_patches / math.prod(self.ref_grid_size)]
