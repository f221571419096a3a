"""ALiBi (Press et al., 'Train Short, Test Long', ICLR 2022) with distances in the plane, as CROMA (Fuller et al.,
NeurIPS 2023) uses it for images.

Each head lowers a logit in proportion to the distance of two patches, by a fixed slope. The distance is Euclidean or
counts steps along rows and columns; direction does not matter. It costs one addition per logit.
"""
import torch

from ..grid import Grid
from .base import OffsetBiasEncoding, per_head, slopes_for_any_heads
from .registry import register_encoding


@register_encoding('alibi2d')
class LinearBiasEncoding2d(OffsetBiasEncoding):
    """ALiBi with distances in the plane (2D-ALiBi).

    Logits between patches get -m_i * distance, with the slope m_i = 2^(-8i/h) for head i = 1 ... h.

    If h is not a power of two, the slopes are those for the next lower power, followed by every second slope for the
    next higher one, as in ALiBi. Distances are in patches. The bias of prefix tokens is 0.

    Args:
        distance: 'euclidean', or 'manhattan' for |dy| + |dx|.

    Raises:
        ValueError: If `distance` is neither.
    """
    sees_mirror = False
    paper = 'https://arxiv.org/abs/2311.00566'

    def __init__(self, *, distance: str = 'euclidean', **host) -> None:
        self._require_choice('distance', distance, ('euclidean', 'manhattan'))
        super().__init__(**host)
        self.distance = distance
        self.slopes = slopes_for_any_heads(self.num_heads, lambda n: [2 ** (-8 * i / n) for i in range(1, n + 1)])
        self.make_table()

    def compute(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        dy, dx = self.offsets(grid, device, dtype)
        # not torch.hypot, which ONNX lacks
        distance = (dy ** 2 + dx ** 2).sqrt() if self.distance == 'euclidean' else dy.abs() + dx.abs()  # [2H-1, 2W-1]
        return -per_head(self.slopes, device, dtype) * distance  # [h, 2H-1, 2W-1]
