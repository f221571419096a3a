"""2D-RPE of ViTARC (Li et al., 'Tackling the Abstraction and Reasoning Corpus with Vision Transformers', 2024).

ALiBi with the Manhattan distance, and two slopes per head: a gentle one for the patches that come before in the raster
and a steeper one for those that come after. 2-D in the distance; which slope it is goes by the raster. Costs one
addition per logit.
"""
from typing import List

import torch

from ..grid import Grid
from .offset_bias import OffsetBiasEncoding, per_head, slopes_for_any_heads
from .registry import register_encoding

STARTS = 2 ** -1, 2 ** -0.5  # left and right slope of the first head


@register_encoding('rpe2d')
class RelativePositionEncoding2d(OffsetBiasEncoding):
    """Manhattan distance with two slopes (2D-RPE).

    The logit of patch i for patch j gets -r_left * distance, or -r_right * distance if j > i in the raster.

    The slopes of head i = 0 ... h-1 are r_left = 2^-1 * 2^(-8i/h) and r_right = 2^-0.5 * 2^(-8i/h). The paper's text
    has no sign; its code subtracts, as ALiBi does. The code also sets the special tokens at a large distance from all
    others; here prefix tokens have a bias of 0.

    Args:
        slopes: 'paper' for the slopes above, or 'code' for those of the authors' code, which halve from head to head
            however many there are (the same for 8 heads), with ALiBi's rule where that is no power of two.
        diagonal: Multiply distances by 2^0.25 towards patches that are to the right and in another row, for another two
            slopes per head: the code's 'Four-diag-slope-Alibi'. (It names these directions top and down right.)

    Raises:
        ValueError: If a value is none of these.
    """
    sees_mirror = True
    paper = 'https://arxiv.org/abs/2410.06405'

    def __init__(self, *, slopes: str = 'paper', diagonal: bool = False, **host) -> None:
        if slopes not in ('paper', 'code'):
            raise ValueError(f"'rpe2d': slopes must be 'paper' or 'code', got {slopes!r}.")
        if not isinstance(diagonal, bool):
            raise ValueError(f"'rpe2d': diagonal must be True or False, got {diagonal!r}.")
        super().__init__(**host)
        self.diagonal = diagonal
        self.left, self.right = (self._slopes(slopes, start) for start in STARTS)
        self.make_table()

    def _slopes(self, kind: str, start: float) -> List[float]:
        if kind == 'paper':
            return [start * 2 ** (-8 * i / self.num_heads) for i in range(self.num_heads)]
        return slopes_for_any_heads(self.num_heads, lambda n: [start * 2 ** -i for i in range(n)])

    def compute(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        dy, dx = self.offsets(grid, device, dtype)
        distance = dy.abs() + dx.abs()  # [2H-1, 2W-1]
        if self.diagonal:
            distance = torch.where((dx > 0) & (dy != 0), 2 ** 0.25 * distance, distance)
        after = (dy > 0) | (dy == 0) & (dx > 0)  # [2H-1, 2W-1], j > i
        left, right = (per_head(slopes, device, dtype) for slopes in (self.left, self.right))
        return -torch.where(after, right, left) * distance  # [h, 2H-1, 2W-1]
