"""Golden gate rotary position encoding (Jerry Xiong, 'On N-dimensional Rotary Positional Embeddings', 2025).

Pairs of channels of q and k are rotated by angles that grow with position, each pair along a direction of its own. The
golden ratio spreads the directions of all pairs and heads evenly, without randomness and without parameters. It costs
two multiplications per entry of q and k.
"""
import math

import torch

from ..checks import is_number
from ..grid import Grid
from .base import FixedRotaryEncoding
from .registry import register_encoding

TURN = math.pi * (math.sqrt(5) - 1) / 2  # from one direction to the next; directions that differ by pi are the same


@register_encoding('rope_golden')
class GoldenRotaryEncoding(FixedRotaryEncoding):
    """Golden gate rotary.

    Pair t of head h is rotated by w_t * (x cos a + y sin a), with a = (h * d/2 + t) * pi * (sqrt(5) - 1) / 2.

    The first z = min(round(zero_share * d/2), d/2 - 1) frequencies are 0, the others go from min_freq to max_freq in
    equal ratios: w_t = min_freq * (max_freq / min_freq)^((t - z) / (d/2 - z - 1)). Pair t consists of the channels t
    and t + d/2. Positions are relative to the image: x goes from -sqrt(W/H) to sqrt(W/H) in W steps, y from -sqrt(H/W)
    to sqrt(H/W) in H steps. There is a post with code, no paper. An axis of one patch is at 0 here; the code has it
    at the lower end of its range.

    Args:
        min_freq: Smallest frequency, in radians for half the side of a square image. More than 0.
        max_freq: Largest frequency, at least min_freq. .2 and 20 are the post's for ImageNet.
        zero_share: Share of the pairs that do not rotate, at least 0 and less than 1.

    Raises:
        ValueError: If a value is none of these, or the head dim is odd.
    """
    rotate_half = True
    relative = True
    sees_mirror = True
    on_other_grids = 'nothing to do: positions go from edge to edge'
    paper = 'https://jerryxio.ng/posts/nd-rope'

    def __init__(
            self,
            *,
            min_freq: float = 0.2,
            max_freq: float = 20.0,
            zero_share: float = 0.0,
            **host,
    ) -> None:
        super().__init__(**host)
        self._require_head_dim(2)
        if not is_number(min_freq) or not is_number(max_freq) or not 0 < min_freq <= max_freq:
            raise ValueError(
                f"'rope_golden' needs numbers 0 < min_freq <= max_freq, got min_freq={min_freq!r}, "
                f'max_freq={max_freq!r}.')
        if not is_number(zero_share) or not 0 <= zero_share < 1:
            raise ValueError(f"'rope_golden' needs zero_share of at least 0 and less than 1, got {zero_share!r}.")
        self.min_freq = min_freq
        self.max_freq = max_freq
        self.num_zeros = min(round(zero_share * (self.head_dim // 2)), self.head_dim // 2 - 1)
        self.make_table()

    def compute_angles(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        num_pairs = self.head_dim // 2
        steps = num_pairs - self.num_zeros
        t = torch.arange(steps, device=device, dtype=dtype) / max(steps - 1, 1)
        rotating = self.min_freq * (self.max_freq / self.min_freq) ** t
        frequencies = torch.cat([rotating.new_zeros(self.num_zeros), rotating])  # [d/2]
        turn = TURN * torch.arange(self.num_heads * num_pairs, device='cpu', dtype=torch.float64)  # MPS has no float64
        turn = turn.remainder(2 * math.pi).to(t).view(self.num_heads, 1, num_pairs)  # `device` may be None
        y, x = self._positions(grid, device, dtype).unbind(-1)
        return frequencies * (x[:, None] * turn.cos() + y[:, None] * turn.sin())  # [h, H*W, d/2]

    def _positions(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """(y, x) of each patch, `[H*W, 2]`."""
        height, width = grid.size
        y, x = grid.coordinates(device, dtype).unbind(-1)
        one = y.new_ones(())  # sizes become tensors, since torch.export has no root or maximum of them
        y = (2 * y - (height - 1)) / (one * (height - 1)).clamp(min=1) * (one * height / width).sqrt()
        x = (2 * x - (width - 1)) / (one * (width - 1)).clamp(min=1) * (one * width / height).sqrt()
        return torch.stack([y, x], dim=-1)
