"""Spiral RoPE (Liu et al., 'Spiral RoPE: Rotate Your Rotary Positional Embeddings in the 2D Plane', 2026).

Pairs of channels of q and k are rotated by angles that grow with position, along directions that are spread evenly over
the half plane, one for each group of channels. With two directions it is axial. Costs two multiplications per entry of
q and k.
"""
import math
from typing import Tuple

import torch

from ..checks import is_integer, is_number
from ..grid import Grid
from .base import FixedRotaryEncoding
from .frequencies import FrequencyEncoding
from .registry import register_encoding


@register_encoding('rope_spiral')
class SpiralRotaryEncoding(FixedRotaryEncoding, FrequencyEncoding):
    """Spiral rotary.

    Channel pair t < d/4 is rotated by w_t * (y cos a_t + x sin a_t), pair d/4 + t by w_t * (x cos a_t - y sin a_t).

    w_t = max_freq * 10000^(-4t/d), and a_t = (floor(t / 2) mod K/2) * pi/K: pairs 2j and 2j + 1 share one of the K/2
    directions, taken in turn; the other half of the channels is at right angles to them. Frequencies and their order
    are those of the authors' code. That code turns the table of angles by interpolation, so angles near the edges of
    the image are cut off; here, as in the paper, a patch is projected onto the direction. It also always rescales
    positions to the trained grid, which is `resolution='rescale'` here, and needs a head dim that is a multiple of 4 K.

    Args:
        num_directions: K, an even number of 2 or more.
        max_freq: Frequency of pair 0, in radians per patch. More than 0.

    Raises:
        ValueError: If a value is none of these, or the head dim is not a multiple of 4.
    """
    relative = True
    sees_mirror = True
    paper = 'https://arxiv.org/abs/2602.03227'

    def __init__(self, *, num_directions: int = 4, max_freq: float = 1.5, **host) -> None:
        super().__init__(**host)
        self._require_head_dim('rope_spiral', 4)
        if not is_integer(num_directions, 2) or num_directions % 2:
            raise ValueError(
                f"'rope_spiral' needs num_directions to be an even number of 2 or more, got {num_directions!r}.")
        if not is_number(max_freq) or max_freq <= 0:
            raise ValueError(f"'rope_spiral' needs max_freq to be a positive number, got {max_freq!r}.")
        self.num_directions = num_directions
        self.max_freq = max_freq
        self.make_table()

    def compute_angles(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        t = torch.arange(self.head_dim // 4, device=device)
        turn = (t // 2 % (self.num_directions // 2)).to(dtype) * (math.pi / self.num_directions)  # [d/4]
        frequencies = self.max_freq * 10000 ** (-4 * t.to(dtype) / self.head_dim)  # [d/4]
        cos, sin = frequencies * turn.cos(), frequencies * turn.sin()
        along_y, along_x = torch.cat([cos, -sin]), torch.cat([sin, cos])  # [d/2]
        return self.angles_of(grid, torch.stack([along_y, along_x]))  # [H*W, d/2]

    def frequency_range(self) -> Tuple[float, float]:
        return self.max_freq, self.max_freq * 10000 ** (4 / self.head_dim - 1)
