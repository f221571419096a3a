"""nD-RoPE (Li et al., 'nD-RoPE: A Generalized RoPE for n-Dimensional Position Embedding', ICML 2026), in 2-D.

Pairs of channels of q and k are rotated by angles that grow with position. Each frequency is used along three
directions, 120 degrees apart, and each head has them turned. So taken together, the heads hardly prefer any direction;
an axial encoding prefers rows and columns. (In n dimensions the directions are the n + 1 corners of a simplex.) GridPE
(Li et al., 2024) has the same directions. It costs two multiplications per entry of q and k.
"""
import math
from typing import Tuple

import torch

from ..checks import is_number
from ..grid import Grid
from .base import FixedRotaryEncoding, FrequencyEncoding
from .registry import register_encoding


@register_encoding('rope_nd')
class SimplexRotaryEncoding(FixedRotaryEncoding, FrequencyEncoding):
    """Simplex rotary (nD-RoPE).

    A pair of head h is rotated by base^(-6s/d) * (x cos a + y sin a), with a = 2 pi k / 3 + pi h / (3 num_heads).

    k = 0, 1, 2 is its direction and s = 0, 1, ... its scale. The pairs of k = 0 come first, from the smallest s to the
    largest. If d is a multiple of 6, each direction has d/6 scales, as in the authors' code, which takes no other d
    (its ViT-S is 396 wide). Otherwise one or two directions have a scale more than the others: 11, 11 and 10 scales
    with d=64.

    The authors' code turns the directions of each head in each layer by a random angle. Here these angles are spread
    evenly over the heads, and all layers share them: a turn by 60 degrees would exchange the directions, but for signs.
    Their rule for larger images, a form of YaRN with three parameters, is left out.

    Args:
        base: Base of the frequencies, more than 1: they go from 1 radian per patch down to nearly 1/base. 100 is the
            authors' for images.

    Raises:
        ValueError: If `base` is not such a number, or the head dim is odd.
    """
    relative = True
    sees_mirror = True
    paper = 'https://arxiv.org/abs/2606.12146'

    def __init__(self, *, base: float = 100.0, **host) -> None:
        super().__init__(**host)
        self._require_head_dim(2)
        if not is_number(base) or base <= 1:
            raise ValueError(f"'rope_nd' needs base to be a number of more than 1, got {base!r}.")
        self.base = base
        self.make_table()

    def compute_angles(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        num_pairs = self.head_dim // 2
        t = torch.tensor([t for k in range(3) for t in range(k, num_pairs, 3)], device=device)
        scales, corners = (t // 3).to(dtype), (t % 3).to(dtype)  # [d/2]
        heads = torch.arange(self.num_heads, device=device, dtype=dtype)[:, None]
        turn = 2 * math.pi / 3 * corners + math.pi / (3 * self.num_heads) * heads  # [h, d/2]
        frequencies = self.base ** (-6 * scales / self.head_dim)
        return self.angles_of(grid, torch.stack([frequencies * turn.sin(), frequencies * turn.cos()]))  # [h, H*W, d/2]

    def frequency_range(self) -> Tuple[float, float]:
        return 1., self.base ** (-6 * ((self.head_dim // 2 - 1) // 3) / self.head_dim)
