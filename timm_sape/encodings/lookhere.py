"""LookHere (Fuller et al., 'LookHere: Vision Transformers with Directed Attention Generalize and Extrapolate', NeurIPS
2024), its variant with a field of view of 90 degrees.

Most heads see one quarter of the plane around a patch and nothing else; what they see weighs less the further away it
is. 2-D in that the quarters point in eight directions. Costs one addition per logit, and in each layer a pass over the
logits to make the bias out of its 2H-1 x 2W-1 values per head.
"""
import math
from typing import List, Tuple

import torch

from ..grid import Grid
from .offset_bias import OffsetBiasEncoding, per_head
from .registry import register_encoding

# (y, x) in the authors' order; a quarter reaches 45 degrees to both sides.
CORNERS = ((-1, -1), (-1, 1), (1, -1), (1, 1))
TRIANGLES = ((-1, 0), (1, 0), (0, -1), (0, 1))
EVERYWHERE = (0, 0)
UNSEEN = 1.0  # in the table, where all biases are 0 or less


@register_encoding('lookhere')
class DirectedAttentionEncoding(OffsetBiasEncoding):
    """Directed attention (LookHere-90).

    Logits get -2 * f * m * Euclidean distance within the head's field of view, and -inf outside of it.

    f goes from 1.5 in the first layer to .5 in the last. Heads come in groups of four. The first groups see the
    quarters between two axes (corners: up left, up right, down left, down right); as many groups, or one less, those
    around an axis (triangles: up, down, left, right); the last group sees everything. Borders and the patch itself are
    seen. m is 2^-1 in the first group of corners, 2^-2 in the second and so on, likewise in the groups of triangles,
    and 4^-1 ... 4^-4 for the four heads that see everything. So it is in the authors' code for 12 and 16 heads; 6 heads
    are four corners and the first two of those that see everything. 4 and 8 heads are not in it: here the only group of
    four sees corners, and of two groups the second sees everything.

    Prefix tokens see and are seen by everything, with bias 0. On another grid, fields of view are those of its own rows
    and columns, whatever becomes of distances. There is no `auto_lookhere`: 0 * -inf is no neutral start.

    Raises:
        ValueError: If the number of heads is neither 6 nor a multiple of 4. Hence there is no `vit_tiny_lookhere`.
    """
    per_layer = True  # f is
    gate_init = None
    paper = 'https://arxiv.org/abs/2405.13985'

    def __init__(self, *, layer: int = 0, depth: int = 1, **host) -> None:
        super().__init__(layer=layer, depth=depth, **host)
        if not self.fits(self.dim, self.num_heads):
            raise ValueError(
                f"'lookhere' needs 6 heads or a multiple of 4, got {self.num_heads}. Choose another num_heads.")
        layer_factor = 1.5 - layer / max(depth - 1, 1)
        directions, slopes = _heads(self.num_heads)
        self.directions = directions
        self.slopes = [2 * layer_factor * slope for slope in slopes]
        self.make_table()

    @classmethod
    def fits(cls, dim: int, num_heads: int) -> bool:
        return num_heads == 6 or num_heads % 4 == 0

    def compute(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        # not torch.hypot, which ONNX lacks
        distance = sum(d ** 2 for d in self.offsets(grid, device, dtype)).sqrt()  # [2H-1, 2W-1]
        bias = -per_head(self.slopes, device, dtype) * distance  # [h, 2H-1, 2W-1]
        y, x = (per_head(values, device, dtype) for values in zip(*self.directions))
        dy = torch.arange(1 - grid.height, grid.height, device=device, dtype=dtype)[:, None]
        dx = torch.arange(1 - grid.width, grid.width, device=device, dtype=dtype)
        ahead, aside = y * dy + x * dx, x * dy - y * dx  # [h, 2H-1, 2W-1]
        # Not -inf: a buffer that is averaged, scaled or compared should not turn into NaN.
        return bias.masked_fill(ahead < aside.abs(), UNSEEN)

    def position_bias(self, grid: Grid) -> torch.Tensor:
        table = self.table_for(grid)
        return self.spread(table.masked_fill(table > 0, -math.inf), grid)


def _heads(num_heads: int) -> Tuple[List[Tuple[int, int]], List[float]]:
    """Direction and slope of each head."""
    see_all = 0 if num_heads == 4 else 2 if num_heads == 6 else 4
    groups = (num_heads - see_all) // 4
    directions: List[Tuple[int, int]] = []
    slopes: List[float] = []
    for kind, count in ((CORNERS, groups - groups // 2), (TRIANGLES, groups // 2)):
        for i in range(count):
            directions += kind
            slopes += 4 * [2 ** -(i + 1)]
    directions += see_all * [EVERYWHERE]
    slopes += [4 ** -(i + 1) for i in range(see_all)]
    return directions, slopes
