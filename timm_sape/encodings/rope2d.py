"""Axial 2-D rotary position encoding (Heo et al., 'Rotary Position Embedding for Vision Transformer', ECCV 2024).

2-D in that one half of the channels turns with x and the other with y. Costs two multiplications per entry of q and k.
"""
from typing import Tuple

import torch

from ..grid import Grid
from .base import PositionEncoding, rotation_table
from .registry import register_encoding


@register_encoding('rope2d')
class AxialRotaryEncoding(PositionEncoding):
    """RoPE-Axial: channel pair t < d/4 turns by x * 100^(-4t/d), pair d/4 + t by y * 100^(-4t/d).

    Raises:
        ValueError: If the head dim is not a multiple of 4.
    """
    per_layer = False
    relative = True
    adds = 'none'
    resolution = 'angles go on for further patches'
    paper = 'https://arxiv.org/abs/2403.13298'

    def __init__(self, *, device=None, dtype=None, **host) -> None:
        super().__init__(**host)
        if self.head_dim % 4:
            raise ValueError(
                f"'rope2d' needs a head dim that is a multiple of 4, got {self.head_dim}. Choose another num_heads.")
        dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self.register_buffer('table', self._compute(Grid(*self.grid_size), device).to(dtype), persistent=False)

    def _compute(self, grid: Grid, device=None) -> torch.Tensor:
        dtype = torch.float64 if device is None or torch.device(device).type == 'cpu' else torch.float32
        t = torch.arange(self.head_dim // 4, device=device, dtype=dtype)
        y, x = grid.coordinates(device, dtype).unbind(-1)  # [H*W]
        frequencies = 100 ** (-4 * t / self.head_dim)  # [d/4]
        angles = torch.cat([x[:, None] * frequencies, y[:, None] * frequencies], dim=-1)  # [H*W, d/2]
        return rotation_table(angles)

    def rotation(self, grid: Grid) -> torch.Tensor:
        if grid.matches(self.grid_size):
            return self.table
        return self._compute(grid, self.table.device).to(self.table.dtype)

    def reset_parameters(self) -> None:
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        self.table.copy_(self._compute(Grid(*self.grid_size), self.table.device))

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        super().set_grid_size(grid_size)
        table = self._compute(Grid(*self.grid_size), self.table.device)
        self.register_buffer('table', table.to(self.table.dtype), persistent=False)
