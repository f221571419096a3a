"""Axial 2-D rotary position encoding (Heo et al., 'Rotary Position Embedding for Vision Transformer', ECCV 2024).

2-D in that one half of the channels turns with x and the other with y. Costs two multiplications per entry of q and k.
"""
import torch

from ..grid import Grid
from .base import FixedEncoding, rotation_table
from .registry import register_encoding


@register_encoding('rope2d')
class AxialRotaryEncoding(FixedEncoding):
    """RoPE-Axial: channel pair t < d/4 turns by x * 100^(-4t/d), pair d/4 + t by y * 100^(-4t/d).

    Raises:
        ValueError: If the head dim is not a multiple of 4.
    """
    relative = True
    resolution = 'angles go on for further patches'
    paper = 'https://arxiv.org/abs/2403.13298'

    def __init__(self, **host) -> None:
        super().__init__(**host)
        if self.head_dim % 4:
            raise ValueError(
                f"'rope2d' needs a head dim that is a multiple of 4, got {self.head_dim}. Choose another num_heads.")
        self.make_table()

    def compute(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        t = torch.arange(self.head_dim // 4, device=device, dtype=dtype)
        y, x = grid.coordinates(device, dtype).unbind(-1)  # [H*W]
        frequencies = 100 ** (-4 * t / self.head_dim)  # [d/4]
        angles = torch.cat([x[:, None] * frequencies, y[:, None] * frequencies], dim=-1)  # [H*W, d/2]
        return rotation_table(angles)

    def rotation(self, grid: Grid) -> torch.Tensor:
        return self.table_for(grid)
