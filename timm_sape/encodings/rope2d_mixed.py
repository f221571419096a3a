"""Mixed 2-D rotary position encoding (Heo et al., 'Rotary Position Embedding for Vision Transformer', ECCV 2024).

Pairs of channels of q and k are rotated by angles that grow with position, so that q.k depends on the offset of two
patches. Each pair rotates with a learned mixture of x and y, which can be a diagonal direction. It costs two
multiplications per entry of q and k.
"""
from typing import Tuple

import torch
import torch.nn as nn
from timm.layers.pos_embed_sincos import init_random_2d_freqs

from ..grid import Grid
from .base import FrequencyEncoding, RotaryEncoding, fill_with
from .registry import register_encoding


@register_encoding('rope2d_mixed')
class MixedRotaryEncoding(RotaryEncoding, FrequencyEncoding):
    """Mixed 2-D rotary (RoPE-Mixed).

    Pair t of head h is rotated by x * freqs[0, h, t] + y * freqs[1, h, t]; each layer learns its own freqs.

    The frequencies are initialized to 10^(-4t/d), t < d/4, in a random direction per head for the first d/4 pairs, and
    in the direction at right angles to it for the others. Angles are computed in at least float32. The frequencies get
    no weight decay. For the rule 'ntk' the highest and lowest frequencies are those of the initial values, 1 and
    10^(4/d - 1), whatever was learned; a frequency beyond them counts as the nearer one.

    Raises:
        ValueError: If the head dim is not a multiple of 4.
    """
    relative = True
    adds = 'L * D'
    paper = 'https://arxiv.org/abs/2403.13298'

    def __init__(self, *, device=None, dtype=None, **host) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        self._require_head_dim(4)
        self.freqs = nn.Parameter(torch.empty(2, self.num_heads, self.head_dim // 2, device=device, dtype=dtype))
        MixedRotaryEncoding.reset_parameters(self)  # a subclass has no parameters of its own yet

    def reset_parameters(self) -> None:
        freqs = init_random_2d_freqs(self.head_dim, 1, self.num_heads, temperature=10.0, device=self.freqs.device)
        fill_with(self.freqs, freqs[:, 0])

    def angles(self, grid: Grid) -> torch.Tensor:
        freqs = self.freqs.to(torch.promote_types(self.freqs.dtype, torch.float32))
        return self.angles_of(grid, freqs.flip(0))  # [h, H*W, d/2]

    def frequency_range(self) -> Tuple[float, float]:
        return 1., 10 ** (4 / self.head_dim - 1)
