"""Spiral RoPE (Liu et al., 'Spiral RoPE: Rotate Your Rotary Positional Embeddings in the 2D Plane', 2026).

Pairs of channels of q and k are rotated by angles that grow with position, along directions that are spread evenly over
the half plane, one for each group of channels. With two directions it is axial. It costs two multiplications per entry
of q and k.
"""
import math
from typing import Optional, Tuple

import torch

from ..checks import is_integer, is_number
from ..grid import Grid
from .base import FixedRotaryEncoding, FrequencyEncoding
from .registry import register_encoding


@register_encoding('rope_spiral')
class SpiralRotaryEncoding(FixedRotaryEncoding, FrequencyEncoding):
    """Spiral rotary.

    Channel pair t < d/4 is rotated by w_t * (y cos a_t + x sin a_t), pair d/4 + t by w_t * (x cos a_t - y sin a_t).

    w_t = max_freq * 10000^(-4t/d), and a_t = (floor(t / 2) mod K/2) * pi/K: pairs 2j and 2j + 1 share one of the K/2
    directions, taken in turn; the other half of the channels is at right angles to them. If d is a multiple of 4 K,
    frequencies and their order are those of the authors' code. With another head dim some directions get more pairs
    than others: with d=24 and K=4, two get four and two get two. (There the code, which needs a multiple of 2 K, has
    the directions of its second half in another order.)

    The code turns the table of angles by interpolation, so angles near the edges of the image are cut off; here, as in
    the paper, a patch is projected onto the direction. It also always rescales positions to the trained grid, which is
    `resolution='rescale'` here.

    Args:
        num_directions: K, an even number of 2 or more, at most d/4 rounded up to an even number. Default: 4,
            or 2 if d is 4 or 8.
        max_freq: Frequency of pair 0, in radians per patch. More than 0.

    Raises:
        ValueError: If a value is none of these, the head dim is not a multiple of 4, or it is too small for that many
            directions.
    """
    relative = True
    sees_mirror = True
    paper = 'https://arxiv.org/abs/2602.03227'

    def __init__(self, *, num_directions: Optional[int] = None, max_freq: float = 1.5, **host) -> None:
        super().__init__(**host)
        self._require_head_dim(4)
        most = 2 * math.ceil(self.head_dim / 8)  # a group in each half for two of them; the last may be a single pair
        if num_directions is None:
            num_directions = min(4, most)
        if not is_integer(num_directions, 2) or num_directions % 2:
            raise ValueError(
                f"'rope_spiral' needs num_directions to be an even number of 2 or more, got {num_directions!r}.")
        if num_directions > most:
            raise ValueError(
                f"'rope_spiral' has too few channels for num_directions={num_directions}: a head dim of "
                f'{self.head_dim} has room for {most}. Use num_directions={most}, or fewer num_heads.')
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
