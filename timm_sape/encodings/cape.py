"""CAPE (Likhomanenko et al., 'CAPE: Encoding Relative Positions with Continuous Augmented Positional Embeddings',
NeurIPS 2021), the variant for images.

Sinusoids of positions. In training the positions are shifted and scaled at random, so the model learns to rely on what
does not change: relative positions. It is 2-D in that the directions of the waves are spread over the whole circle. It
costs one multiplication and one addition per token entry, and in training a table for each image.
"""
import math
from typing import Tuple

import torch
import torch.nn.functional as F

from ..checks import is_number
from ..grid import Grid
from .base import FixedEncoding
from .registry import register_encoding


@register_encoding('cape')
class ContinuousAugmentedPositionEncoding(FixedEncoding):
    """Continuous augmented (CAPE2d).

    Tokens t become sqrt(D) * t + [cos(pi w.p), sin(pi w.p)], where w_k = rho_k * (cos k, sin k), k < D/2.

    rho goes from 1 to 10 in a geometric series. p = (y, x) goes from -1 to 1 along each axis, whatever the grid; on an
    axis with a single patch it is 0. In training only, p becomes (p + global shift + local shift) * scale, drawn anew
    for each image from torch's default generator. The global shift is drawn per axis, the local shift per axis and
    patch, and the scale once for both axes.

    Prefix tokens have no position and stay unchanged, without the factor: the authors' module gets only patches.
    There is no `auto_cape`: the factor sqrt(D) has no neutral form.

    Args:
        max_global_shift: The global shift is uniform between minus and plus this. 0 or more.
        max_local_shift: The same for the local shift, as a fraction of the distance between neighbours. 0 or more.
            Beyond .5, neighbours may change places.
        max_scale: The scale lies between 1/max_scale and max_scale, and its logarithm is uniform. 1 or more.

    Raises:
        ValueError: If a value is out of its range, or the embed dim is odd.
    """
    gate_init = None
    on_other_grids = 'nothing to do: positions go from -1 to 1'
    changeable_keywords = ('max_global_shift', 'max_local_shift', 'max_scale')
    paper = 'https://arxiv.org/abs/2106.03143'

    def __init__(
            self,
            *,
            max_global_shift: float = 0.5,
            max_local_shift: float = 0.5,
            max_scale: float = 1.4,
            **host,
    ) -> None:
        super().__init__(**host)
        if self.dim % 2:
            raise ValueError(f"'cape' needs an even embed dim, got {self.dim}. Choose another embed_dim.")
        for name, value, least in (
                ('max_global_shift', max_global_shift, 0), ('max_local_shift', max_local_shift, 0),
                ('max_scale', max_scale, 1)):
            if not is_number(value) or value < least:
                raise ValueError(f"'cape' needs {name} to be a number of at least {least}, got {value!r}.")
        self.max_global_shift = max_global_shift
        self.max_local_shift = max_local_shift
        self.max_scale = max_scale
        self.make_table()

    def compute(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return self._waves(self._positions(grid, device, dtype)[0])

    def _positions(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> Tuple[torch.Tensor, torch.Tensor]:
        """(y, x) of each patch, `[H*W, 2]`, and the distance between neighbours along each axis, `[2]`."""
        index = grid.coordinates(device, dtype)  # [H*W, 2]
        last = index.amax(0)  # [2]
        end = last.clamp(max=1)  # 0 on an axis with a single patch
        step = 2 * end / last.clamp(min=1)
        return index * step - end, step

    def _waves(self, position: torch.Tensor) -> torch.Tensor:
        """From positions `[..., 2]` to their sinusoids `[..., D]`."""
        like = {'device': position.device, 'dtype': position.dtype}
        k = torch.arange(self.dim // 2, **like)
        rho = 10 ** torch.linspace(0, 1, self.dim // 2, **like)
        y, x = position.unsqueeze(-2).unbind(-1)  # [..., 1]
        phase = math.pi * (y * (rho * k.cos()) + x * (rho * k.sin()))  # [..., D/2]
        return torch.cat([phase.cos(), phase.sin()], dim=-1)

    def _augmented(self, grid: Grid, batch: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Positions, shifted and scaled at random for each image, `[B, H*W, 2]`."""
        def draw(*size: int) -> torch.Tensor:
            return 2 * torch.rand(batch, *size, device=device, dtype=dtype) - 1  # from -1 to 1

        position, step = self._positions(grid, device, dtype)
        if self.max_global_shift > 0:
            position = position + self.max_global_shift * draw(1, 2)
        if self.max_local_shift > 0:
            position = position + self.max_local_shift * step * draw(grid.num_patches, 2)
        if self.max_scale > 1:
            position = position * (math.log(self.max_scale) * draw(1, 1)).exp()
        return position

    def embed(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        if self.training and (self.max_global_shift > 0 or self.max_local_shift > 0 or self.max_scale > 1):
            table = self._waves(self._augmented(grid, x.shape[0], x.device, self.table_like(grid).dtype))  # [B, H*W, D]
            return grid.keep_tokens(grid.pad_tokens(table))  # [B, N, D]
        return grid.keep_tokens(grid.pad_tokens(self.table_for(grid)))  # [(B,) N, D]

    def mix(self, x: torch.Tensor, term: torch.Tensor, grid: Grid) -> Tuple[torch.Tensor, torch.Tensor]:
        p = grid.num_prefix_tokens
        factor = F.pad(x.new_full((x.shape[1] - p, 1), self.dim ** 0.5), (0, 0, p, 0), value=1.0)  # [N, 1]
        return x * factor, term
