"""Rotary position encoding of DINOv3 (Siméoni et al., 2025), as in timm's `RotaryEmbeddingDinoV3`.

Axial, with positions relative to the image rather than counted in patches. It is 2-D in that half of the channels
rotate with y and half with x. It costs two multiplications per entry of q and k.
"""
import math
from typing import Optional

import torch

from ..checks import is_number
from ..grid import Grid
from .base import FixedRotaryEncoding, rotation_table
from .registry import register_encoding


@register_encoding('rope_dinov3')
class NormalizedRotaryEncoding(FixedRotaryEncoding):
    """Axial rotary of DINOv3.

    Pair k < d/4 is rotated by 2 pi y / base^(4k/d), pair d/4 + k by 2 pi x / base^(4k/d).

    Pair t consists of the channels t and t + d/2. y is 2 (i + 1/2) / H - 1 for row i, and x likewise, so both lie
    between -1 and 1.

    In training, positions can be augmented at random: first a shift, then a jitter, then a rescaling. Each forward pass
    draws once for all images of one grid, the same for all layers. (`auto_rope_dinov3` draws in each layer, because
    each layer has its own gate and so its own rotation.) The numbers come from torch's default generator on the model's
    device; timm draws on the CPU.

    Angles are equal to those of timm's `RotaryEmbeddingDinoV3`. They are computed here because timm's module returns
    only sines and cosines, and a gate must multiply the angles.

    Args:
        base: Periods range from 1 to nearly this, in units of half the image. More than 0.
        normalize: What i + 1/2 is divided by. 'separate': H along y and W along x. 'max' or 'min': the larger or the
            smaller of the two along both axes, which keeps the aspect ratio, but then one axis does not end at 1.
        shift: Largest shift, drawn uniformly for each axis, positive or negative. 0 or more; None for no shift.
        jitter: Largest factor, drawn for each axis between 1/jitter and jitter, uniformly in the logarithm. 1 or more;
            None for no jitter.
        rescale: Largest factor for both axes together, drawn in the same way. 1 or more; None for no rescaling.

    Raises:
        ValueError: If a value is none of these, or the head dim is not a multiple of 4.
    """
    rotate_half = True
    relative = True
    sees_mirror = True
    on_other_grids = 'nothing to do: positions go from -1 to 1'
    changeable_keywords = ('shift', 'jitter', 'rescale')
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
        self._require_head_dim(4)
        if not is_number(base) or base <= 0:
            raise ValueError(f"'rope_dinov3' needs base to be a positive number, got {base!r}.")
        self._require_choice('normalize', normalize, ('separate', 'max', 'min'))
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
        """Whether positions are augmented at random in training."""
        return any(limit is not None for limit in (self.shift, self.jitter, self.rescale))

    def compute_angles(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return self._turn(self._positions(grid, device, dtype))

    def rotation_of_grid(self, grid: Grid) -> torch.Tensor:
        if not self.training or not self.augments:
            return super().rotation_of_grid(grid)
        like = self.table_like(grid)
        position = self._augmented(self._positions(grid, like.device, like.dtype))
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
        """From positions `[H*W, 2]` to angles in radians `[H*W, d/2]`."""
        k = torch.arange(self.head_dim // 4, device=position.device, dtype=position.dtype)
        periods = self.base ** (4 * k / self.head_dim)  # [d/4]
        return (2 * math.pi * position[:, :, None] / periods).flatten(1)
