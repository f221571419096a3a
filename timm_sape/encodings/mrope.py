"""Multimodal rotary position encoding (Wang et al., 'Qwen2-VL', 2024), by default in the later layout of Qwen3-VL.

Each pair of channels follows time, y or x. An image is at time 0, so in 2-D the pairs of time are not rotated. Each
axis has a third of the frequencies, whereas in an axial encoding each axis has all of them. In Qwen2-VL an axis has a
block of neighbouring pairs, and so frequencies of similar size: time the highest, x the lowest. In Qwen3-VL, and in
timm's `RotaryEmbeddingMRope`, pairs take turns. It costs two multiplications per entry of q and k.

On a small image the contiguous layout hardly tells rows apart: y starts at 10000^(-2t/d) radians a patch, .04 for
t = 11 and a head dim of 64. `section` may give time no pair at all.
"""
from typing import Optional, Sequence, Tuple

import torch

from ..checks import is_integer
from ..grid import Grid
from .base import FixedRotaryEncoding, FrequencyEncoding
from .registry import register_encoding


@register_encoding('mrope')
class MultimodalRotaryEncoding(FixedRotaryEncoding, FrequencyEncoding):
    """Multimodal rotary (M-RoPE).

    Pair k < d/2, the channels k and k + d/2, turns by 10000^(-2k/d) times 0, y, x, 0, y, x, ... With
    `layout='contiguous'` times 0, ..., 0, y, ..., y, x, ..., x.

    Interleaved angles are those of timm's layer, computed here because it returns only sines and cosines, and a gate
    needs angles.

    Args:
        layout: 'interleaved' as in Qwen3-VL and timm, or 'contiguous' as in Qwen2-VL.
        section: (t, h, w), how many pairs follow each axis. Interleaved, it is read as timm reads it: the first h of
            the pairs 1, 4, 7, ... follow y, the first w of the pairs 2, 5, 8, ... follow x, or all of them if there are
            not so many; the others follow time, whatever t is. Contiguous, t + h + w must be d/2. Default: as even as
            it gets, (11, 11, 10) for a head dim of 64. timm's default of (8, 12, 12) is the same up to a head dim of
            74, interleaved; beyond that it leaves all further pairs to time. Qwen2-VL has (16, 24, 24) for its head dim
            of 128, in the same shares (8, 12, 12) for 64. Both have other bases than 10000, for long texts.

    Raises:
        ValueError: If `layout` is neither, `section` is not three integers, of which h and w are 1 or more, or does not
            add up to d/2 where it must, or the head dim is odd or less than 6, where no pair would be left for x.
    """
    rotate_half = True
    relative = True
    sees_mirror = True
    paper = 'https://arxiv.org/abs/2409.12191'

    def __init__(
            self,
            *,
            layout: str = 'interleaved',
            section: Optional[Sequence[int]] = None,
            **host,
    ) -> None:
        super().__init__(**host)
        self._require_head_dim(2)
        num_pairs = self.head_dim // 2
        if num_pairs < 3:
            raise ValueError(
                f"'mrope' needs a head dim of 6 or more, a pair for each axis, got {self.head_dim}. Choose another "
                'num_heads.')
        self._require_choice('layout', layout, ('interleaved', 'contiguous'))
        if section is None:
            section = ((num_pairs + 2) // 3, (num_pairs + 1) // 3, num_pairs // 3)
        elif (
                not isinstance(section, (tuple, list)) or len(section) != 3
                or not all(is_integer(s, 0) for s in section)
                or 0 in section[1:]):
            raise ValueError(
                f"'mrope': section must be integers (t, h, w), h and w of 1 or more, t of 0 or more, got {section!r}.")
        elif layout == 'contiguous' and sum(section) != num_pairs:
            raise ValueError(
                f"'mrope': in the contiguous layout the {num_pairs} pairs of a head dim of {self.head_dim} must each "
                f'follow an axis, but section={section!r} makes {sum(section)}.')
        self.layout = layout
        self.section = tuple(section)
        self.make_table()

    def compute_angles(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        t, h, w = self.section
        k = torch.arange(self.head_dim // 2, device=device, dtype=dtype)
        frequencies = 10000 ** (-2 * k / self.head_dim)  # [d/2]
        if self.layout == 'contiguous':
            follows_y, follows_x = (t <= k) & (k < t + h), t + h <= k
        else:
            follows_y = (k % 3 == 1) & (k < 3 * h)
            follows_x = (k % 3 == 2) & (k < 3 * w)
        return self.angles_of(grid, torch.stack([frequencies * follows_y, frequencies * follows_x]))  # [H*W, d/2]

    def frequency_range(self) -> Tuple[float, float]:
        return 1., 10000 ** (2 / self.head_dim - 1)  # of all pairs: the base is one for all axes
