"""PoPE (Gopalakrishnan et al., 'Decoupling the "What" and "Where" With Polar Coordinate Positional Embeddings', 2025).

With a rotary encoding the angle of a pair of channels depends on content and on position. Here each channel of q and k
has a length that depends on content alone, and an angle that depends on position alone. It is 2-D in that half of the
channels turn with x and half with y, as in the axial form of lucidrains/PoPE-pytorch. It costs a product of q and k
with twice as many channels.
"""
from typing import Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from .. import ops
from ..checks import is_number
from ..grid import Grid
from .base import FixedEncoding, FrequencyEncoding, axial_frequencies
from .registry import register_encoding


@register_encoding('pope')
class PolarEncoding(FixedEncoding, FrequencyEncoding):
    """Polar (PoPE).

    q.k becomes sum over c of softplus(q_ic) softplus(k_jc) cos(theta_c (x_j - x_i) + delta_c).

    For c < d/2, theta_c is base^(-2c/d). Channel d/2 + c has the same theta, and y instead of x. Each head of each
    layer learns its phases delta. They start at 0, and with phases of 0 the encoding cannot tell left from right.

    lucidrains' code keeps phases between -2 pi and 0. Here they are free: that range holds every angle, and a phase
    that reached a limit would stop learning.

    The paper is about sequences without a class token. All lengths are positive. So at the start, if patches
    look the same, the nearest one has the largest logit. A class token in a corner would look at that corner. Here
    prefix tokens are in the centre of the grid, so at the start they look there most. Their keys have no phases. Both
    are our choices.

    A gate multiplies angles and phases, and what softplus changes: at 0 the product is q.k. No parameter gets weight
    decay. Computed in at least float32.

    Args:
        base: Of the frequencies, more than 1. lucidrains' code has 10000, also for images; 100 is that of `rope2d`.

    Raises:
        ValueError: If `base` is no such number, or the head dim is odd.
    """
    relative = True
    per_layer = True
    adds = 'L * D'
    skips_dropped = True
    paper = 'https://arxiv.org/abs/2509.10534'

    def __init__(self, *, base: float = 100.0, device=None, dtype=None, **host) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        self._require_head_dim(2)
        if not is_number(base) or base <= 1:
            raise ValueError(f"'pope' needs base to be a number of more than 1, got {base!r}.")
        self.base = base
        self.phases = nn.Parameter(torch.empty(self.num_heads, self.head_dim, device=device, dtype=dtype))
        self.make_table()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.phases)

    def compute(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """The angle of each channel for each patch, 0 in the centre of the grid, `[H*W, d]`."""
        angles = self.angles_of(grid, axial_frequencies(self.head_dim // 2, self.base, device, dtype))
        return angles - (angles[:1] + angles[-1:]) / 2  # the first and the last patch are opposite corners

    def turn(self, q: torch.Tensor, k: torch.Tensor, grid: Grid) -> Tuple[torch.Tensor, torch.Tensor]:
        with ops.no_autocast(q):
            (phases,) = ops.upcast(self.phases)
            angles = grid.keep_rows(self.table_for(grid))  # [(B, 1,) N-P, d]
            of_keys = angles + phases[:, None]  # [(B,) h, N-P, d]
            return tuple(self._polar(x, grid.pad_tokens(self.gated(a))) for x, a in ((q, angles), (k, of_keys)))

    def _polar(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Channels with these lengths and angles as vectors in the plane, `[B, h, N, 2*d]`."""
        (wide,) = ops.upcast(x)
        lengths = F.softplus(wide)
        if self.gate is not None:
            lengths = wide + self.gate(lengths - wide)
        return torch.cat([lengths * angles.cos(), lengths * angles.sin()], dim=-1).to(x.dtype)

    def frequency_range(self) -> Tuple[float, float]:
        return 1., self.base ** (2 / self.head_dim - 1)
