"""LookHere (Fuller et al., 'LookHere: Vision Transformers with Directed Attention Generalize and Extrapolate', NeurIPS
2024), the variant with a field of view of 90 degrees.

In most heads a patch sees only one quarter of the plane around it, and distant patches get less attention. It is 2-D in
that the quarters point in eight directions. It costs one addition per logit, and in each layer a pass over the logits
to make the bias from its 2H-1 x 2W-1 values per head.
"""
import math
from typing import List, Tuple

import torch

from ..grid import Grid
from .base import OffsetBiasEncoding, per_head
from .registry import register_encoding

# Directions (y, x) in the authors' order. A quarter extends 45 degrees to both sides of its direction.
CORNERS = ((-1, -1), (-1, 1), (1, -1), (1, 1))
TRIANGLES = ((-1, 0), (1, 0), (0, -1), (0, 1))
EVERYWHERE = (0, 0)
UNSEEN = 1.0  # marks unseen offsets in the table, since all biases are 0 or less


@register_encoding('lookhere')
class DirectedAttentionEncoding(OffsetBiasEncoding):
    """Directed attention (LookHere-90).

    Logits get -2 * f * m * Euclidean distance within the head's field of view, and -inf outside of it.

    f goes from 1.5 in the first layer to .5 in the last, in equal steps. Heads come in groups of four, which see, in
    this order:

    - corners: the quarters between two axes, up left, up right, down left, down right; m is 2^-1 in the first such
      group, 2^-2 in the second and so on;
    - triangles: the quarters around an axis, up, down, left, right; as many groups or one less, with the same m;
    - everything: the last group, with m of 4^-1 ... 4^-4 for its four heads.

    The edges of a quarter and the patch itself count as seen. This is the authors' code for 12 and 16 heads, except
    that theirs rounds biases to bfloat16, by up to .06 on 14 x 14 patches, and masks by a large number. Their 6 heads
    are four corners and the first two that see everything. Their code has no 4 or 8 heads: here 4 heads see corners,
    and 8 heads are a group of corners and one that sees everything.

    Prefix tokens see and are seen by all tokens, with bias 0. On another grid the fields of view follow its own rows
    and columns, even where distances are rescaled. There is no `auto_lookhere`, because 0 * -inf is NaN.

    Raises:
        ValueError: If the number of heads is neither 6 nor a multiple of 4. Hence there is no `vit_tiny_lookhere`.
    """
    per_layer = True  # because of f
    uses_depth = True  # likewise
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
        # Do not store -inf: it would turn into NaN where buffers are averaged, scaled or compared.
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
