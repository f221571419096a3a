"""2D-RPE of ViTARC (Li et al., 'Tackling the Abstraction and Reasoning Corpus with Vision Transformers', 2024).

ALiBi with the Manhattan distance and two slopes per head: a gentle one for keys before the query in the raster and a
steeper one for keys after it. It is 2-D through the distance; the choice of the slope is 1-D, by the raster. It costs
one addition per logit.
"""
from typing import List

import torch

from ..grid import Grid
from .base import OffsetBiasEncoding, per_head, slopes_for_any_heads
from .registry import register_encoding

STARTS = 2 ** -1, 2 ** -0.5  # r_left and r_right of the first head


@register_encoding('rpe2d')
class RelativePositionEncoding2d(OffsetBiasEncoding):
    """Manhattan distance with two slopes (2D-RPE).

    The logit of query i and key j gets -r_left * distance, or -r_right * distance if j > i in the raster.

    Distances are in patches. The slopes of head n = 0 ... h-1 are r_left = 2^-1 * 2^(-8n/h) and
    r_right = 2^-0.5 * 2^(-8n/h). The paper's text has no minus sign, but its code subtracts, as ALiBi does. The code
    also puts the special tokens at a large distance from all others; here prefix tokens have a bias of 0. And the code,
    like T5, adds the bias to q.k, the paper and this class to q.k / sqrt(d).

    Args:
        slopes: 'paper' for the slopes above. 'code' for those of the authors' code, which halve from head to head,
            whatever h is (for 8 heads both are the same), with ALiBi's rule if h is not a power of two.
        diagonal: Multiply the distance by 2^0.25 if the key is to the right and in another row, which makes two more
            slopes per head. This is the code's 'Four-diag-slope-Alibi', which calls these directions top and down
            right.

    Raises:
        ValueError: If a value is none of these.
    """
    sees_mirror = True
    paper = 'https://arxiv.org/abs/2410.06405'

    def __init__(self, *, slopes: str = 'paper', diagonal: bool = False, **host) -> None:
        self._require_choice('slopes', slopes, ('paper', 'code'))
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
