"""Axial 2-D rotary position encoding (Heo et al., 'Rotary Position Embedding for Vision Transformer', ECCV 2024).

Pairs of channels of q and k are rotated by angles that grow with position, so that q.k depends on the offset of two
patches. Half of the channels rotate with x and half with y. It costs two multiplications per entry of q and k.
"""
from typing import Tuple

import torch

from ..grid import Grid
from .base import FixedRotaryEncoding, FrequencyEncoding, axial_frequencies
from .registry import register_encoding


@register_encoding('rope2d')
class AxialRotaryEncoding(FixedRotaryEncoding, FrequencyEncoding):
    """Axial 2-D rotary (RoPE-Axial).

    Channel pair t < d/4 is rotated by x * 100^(-4t/d), pair d/4 + t by y * 100^(-4t/d).

    The base is always 100, the paper's. `rope2d_mixed` learns its frequencies.

    Raises:
        ValueError: If the head dim is not a multiple of 4.
    """
    relative = True
    sees_mirror = True
    paper = 'https://arxiv.org/abs/2403.13298'

    def __init__(self, **host) -> None:
        super().__init__(**host)
        self._require_head_dim(4)
        self.make_table()

    def compute_angles(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return self.angles_of(grid, axial_frequencies(self.head_dim // 4, 100, device, dtype))  # [H*W, d/2]

    def frequency_range(self) -> Tuple[float, float]:
        return 1., 100 ** (4 / self.head_dim - 1)
