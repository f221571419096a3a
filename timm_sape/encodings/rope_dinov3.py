"""Rotary position encoding of DINOv3 (Siméoni et al., 2025), as timm's `RotaryEmbeddingDinoV3` has it.

Axial, with positions relative to the image rather than counted in patches. 2-D in that one half of the channels turns
with y and the other with x. Costs two multiplications per entry of q and k.
"""
import math
from typing import Optional

import torch

from ..grid import Grid
from .base import FixedRotaryEncoding, rotation_table
from .checks import is_number
from .registry import register_encoding


@register_encoding('rope_dinov3')
class NormalizedRotaryEncoding(FixedRotaryEncoding):
    """Axial rotary of DINOv3.

    Pair k < d/4 turns by 2 pi y / base^(4k/d), pair d/4 + k by 2 pi x / base^(4k/d).

    Pair t is the channels t and t + d/2. y is 2 (i + 1/2) / H - 1 for row i, x likewise, so both lie between -1 and 1.

    In training they can be changed at random, by a shift, then a jitter, then a rescaling, drawn anew for each forward
    pass, for all images and layers together. (`auto_rope_dinov3` has a gate and so a rotation in each layer, and draws
    in each.) The generator is torch's default one on the model's device, where timm takes that of the CPU.

    Angles are those of timm's `RotaryEmbeddingDinoV3`, computed here since that hands out their sines and cosines, and
    a gate acts on the angles.

    Args:
        base: Periods go from 1 to nearly this. More than 0.
        normalize: What i is divided by: 'separate' for H along y and W along x, 'max' or 'min' for the larger or the
            smaller of the two along both axes, which keeps proportions; one axis then does not end at 1.
        shift: Add to each axis up to so much, positive or negative. 0 or more; None for no shift.
        jitter: Multiply each axis by a factor from 1/jitter to jitter, whose logarithm is drawn. 1 or more; None for
            no jitter.
        rescale: Multiply both axes by one such factor. 1 or more; None for no rescaling.

    Raises:
        ValueError: If a value is none of these, or the head dim is not a multiple of 4.
    """
    rotate_half = True
    relative = True
    sees_mirror = True
    resolution = 'nothing to do: positions go from -1 to 1'
    paper = 'https://arxiv.org/abs/2508.10104'

    def __init__(
            self,
            *,
            base: float = 100.0,
            normalize: str = 'separate',
            shift: Optional[float] = None,
            jitter: Optional[float] = None,
            rescale: Optional[float] = None,
            **host,
    ) -> None:
        super().__init__(**host)
        self._require_head_dim('rope_dinov3', 4)
        if not is_number(base) or base <= 0:
            raise ValueError(f"'rope_dinov3' needs base to be a positive number, got {base!r}.")
        if normalize not in ('separate', 'max', 'min'):
            raise ValueError(f"'rope_dinov3': normalize must be 'separate', 'max' or 'min', got {normalize!r}.")
        for name, value, least in (('shift', shift, 0), ('jitter', jitter, 1), ('rescale', rescale, 1)):
            if value is not None and (not is_number(value) or value < least):
                raise ValueError(
                    f"'rope_dinov3' needs {name} to be a number of at least {least}, or None for none, got {value!r}.")
        self.base = base
        self.normalize = normalize
        self.shift = shift
        self.jitter = jitter
        self.rescale = rescale
        self.make_table()

    @property
    def augments(self) -> bool:
        """Whether positions change at random in training."""
        return any(limit is not None for limit in (self.shift, self.jitter, self.rescale))

    def compute_angles(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return self._turn(self._positions(grid, device, dtype))

    def rotation_of_grid(self, grid: Grid) -> torch.Tensor:
        if not self.training or not self.augments:
            return super().rotation_of_grid(grid)
        position = self._augmented(self._positions(grid, self.table.device, self.table.dtype))
        return rotation_table(self.gated(self._turn(position)), self.rotate_half)

    def _positions(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """(y, x) of each patch, `[H*W, 2]`."""
        height, width = grid.size
        if self.normalize == 'max':
            height = width = torch.sym_max(height, width)
        elif self.normalize == 'min':
            height = width = torch.sym_min(height, width)
        y, x = grid.coordinates(device, dtype).unbind(-1)
        return torch.stack([(2 * y + 1) / height - 1, (2 * x + 1) / width - 1], dim=-1)

    def _augmented(self, position: torch.Tensor) -> torch.Tensor:
        def draw(size: int, limit: float) -> torch.Tensor:
            return position.new_empty(size).uniform_(-limit, limit)

        if self.shift is not None:
            position = position + draw(2, self.shift)
        if self.jitter is not None:
            position = position * draw(2, math.log(self.jitter)).exp()
        if self.rescale is not None:
            position = position * draw(1, math.log(self.rescale)).exp()
        return position

    def _turn(self, position: torch.Tensor) -> torch.Tensor:
        """Positions `[H*W, 2]` to angles `[H*W, d/2]`."""
        k = torch.arange(self.head_dim // 4, device=position.device, dtype=position.dtype)
        periods = self.base ** (4 * k / self.head_dim)  # [d/4]
        return (2 * math.pi * position[:, :, None] / periods).flatten(1)
