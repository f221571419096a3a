"""Axial 2-D rotary position encoding (Heo et al., 'Rotary Position Embedding for Vision Transformer', ECCV 2024).

2-D in that half of the channels rotate with x and half with y. Costs two multiplications per entry of q and k.
"""
import torch

from ..grid import Grid
from .base import CoordinateEncoding, FixedRotaryEncoding
from .registry import register_encoding


@register_encoding('rope2d')
class AxialRotaryEncoding(FixedRotaryEncoding, CoordinateEncoding):
    """Axial 2-D rotary (RoPE-Axial).

    Channel pair t < d/4 is rotated by x * 100^(-4t/d), pair d/4 + t by y * 100^(-4t/d).

    Raises:
        ValueError: If the head dim is not a multiple of 4.
    """
    relative = True
    sees_mirror = True
    resolution = 'angles go on for further patches, or `rescale`'
    paper = 'https://arxiv.org/abs/2403.13298'

    def __init__(self, **host) -> None:
        super().__init__(**host)
        self._require_head_dim(self.name, 4)
        self.make_table()

    def compute_angles(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        t = torch.arange(self.head_dim // 4, device=device, dtype=dtype)
        y, x = self.coordinates(grid, device, dtype).unbind(-1)  # [H*W]
        frequencies = 100 ** (-4 * t / self.head_dim)  # [d/4]
        return torch.cat([x[:, None] * frequencies, y[:, None] * frequencies], dim=-1)  # [H*W, d/2]
