"""Rotations by frequencies, with the rules that the literature has for larger images than the trained ones.

Each rule says how far positions are squeezed, for each pair of channels by its frequency: not at all (extrapolation),
to the trained grid (position interpolation), or something between the two. Fast pairs tell neighbours apart, slow ones
the ends of the image. So the rules in between squeeze slow pairs more than fast ones.
"""
import math
from abc import ABC, abstractmethod
from typing import List, Sequence, Tuple, Union

import torch

from ... import ops
from ...checks import is_number
from ...grid import Grid
from .coordinates import CoordinateEncoding

__all__ = ['FrequencyEncoding', 'axial_frequencies']


def axial_frequencies(num: int, base: float, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A geometric series along each axis, base^(-t/num): for `num` pairs along x, then for `num` along y.

    Returns:
        As for `angles_of`, `[2, 2*num]`.
    """
    frequencies = base ** (-torch.arange(num, device=device, dtype=dtype) / num)
    zeros = torch.zeros_like(frequencies)
    return torch.stack([torch.cat([zeros, frequencies]), torch.cat([frequencies, zeros])])


class FrequencyEncoding(CoordinateEncoding, ABC):
    """A rotation of pairs of channels, or of single ones, by angles that are frequencies times coordinates.

    With a frequency f along y, the position y of a patch becomes (y + 1/2) * g - 1/2 on another grid than the trained
    one, and so do positions along x. (The halves do not change the angles between patches. They matter only towards
    prefix tokens, which are not rotated.) A rule is a choice of g, from 1 to H0/H:

    - 'rescale': H0/H (position interpolation; Chen et al. 2023, 2306.15595);
    - 'ntk': (H0/H)^e, where e goes from 0 for the highest to 1 for the lowest frequency, linearly in the logarithm. In
      a geometric series this is the NTK-aware change of base, b becomes b * s^(n/(n-1)) for n frequencies and
      s = H/H0. A single frequency counts as the highest;
    - 'yarn': c + (1 - c) * H0/H, where c is 0 for pairs that turn less than ramp[0] times from edge to edge of the
      trained grid, 1 for those that turn more than ramp[1] times, and linear between (YaRN; Peng et al. 2023,
      2309.00071). Logits q.k, those of prefix tokens too, are multiplied by 1/t = (0.1 ln(s) + 1)^2, where s is the
      larger of H/H0 and W/W0, and at least 1, as in FiT (Lu et al. 2024), which has YaRN in 2-D.

    A gate multiplies the angles, not that factor. The papers are about longer texts; on smaller images than the
    trained ones the same formulas stretch positions.

    Args:
        resolution: What happens on another grid than the trained one, H0 x W0. 'extrapolate': new patches get new
            angles. 'rescale': positions are squeezed or stretched to the trained grid. 'ntk': slow pairs of
            channels are rescaled, fast ones hardly. 'yarn': pairs with few turns over the trained grid are rescaled,
            those with many are not, and logits are scaled up.
        ramp: For 'yarn', two numbers of turns, at least 0, the first below the second: pairs with fewer turns than the
            first number are rescaled, those with more than the second are not. The default, YaRN's, is for long texts:
            on 14 x 14 patches no pair of 'rope2d' turns more than 2.3 times, so there 'yarn' is nearly 'rescale' with
            larger logits (but pairs of 'rope1d' turn up to 31 times).

    Raises:
        ValueError: If `resolution` is none of these, or `ramp` is not two such numbers.
    """
    rules = ('extrapolate', 'rescale', 'ntk', 'yarn')
    changeable_keywords = ('resolution', 'ramp')
    on_other_grids = 'angles extrapolate, or `rescale`, `ntk`, `yarn`'

    def __init__(self, *, resolution: str = 'extrapolate', ramp: Sequence[float] = (1, 32), **host) -> None:
        is_pair = isinstance(ramp, (tuple, list)) and len(ramp) == 2 and all(map(is_number, ramp))
        if not is_pair or not 0 <= ramp[0] < ramp[1]:
            raise ValueError(
                f'{self.name!r}: ramp must be two numbers of turns, [low, high] with 0 <= low < high, got {ramp!r}.')
        self.ramp = tuple(ramp)
        super().__init__(resolution=resolution, **host)

    @property
    def scales_logits(self) -> bool:
        return self.rule == 'yarn'

    @abstractmethod
    def frequency_range(self) -> Tuple[float, float]:
        """The highest and the lowest frequency of the design, in radians per patch."""

    def angles_of(self, grid: Grid, frequencies: torch.Tensor) -> torch.Tensor:
        """The angle of each pair for each patch of the whole grid, by the rule.

        Args:
            grid: The grid.
            frequencies: Of each pair along y and x, in radians per patch, `[2, (h,) d/2]`.

        Returns:
            In radians, `[(h,) H*W, d/2]`.
        """
        y, x = grid.coordinates(frequencies.device, frequencies.dtype)[..., None].unbind(1)  # [H*W, 1]
        along_y, along_x = frequencies.unsqueeze(-2).unbind(0)  # [(h,) 1, d/2]
        ref = self.rescaling(grid)
        if ref is not None:
            turns = (ref[0] * along_y.abs() + ref[1] * along_x.abs()) / (2 * math.pi)
            squares = along_y ** 2 + along_x ** 2
            y, x = (
                (c + 0.5) * self.squeeze(old / new, squares, turns) - 0.5
                for c, old, new in zip((y, x), ref, grid.size))
        return x * along_x + y * along_y

    def squeeze(
            self,
            ratio: float,
            squares: torch.Tensor,
            turns: torch.Tensor,
    ) -> Union[float, torch.Tensor]:
        """What positions along an axis are multiplied by, g.

        Args:
            ratio: Of the sizes along this axis, the trained one to the grid's.
            squares: Squared frequency of each pair.
            turns: How often each pair turns from edge to edge of the trained grid; of the same shape.
        """
        if self.rule == 'rescale':
            return ratio
        if self.rule == 'ntk':
            highest, lowest = self.frequency_range()
            if highest == lowest:
                return 1.
            within = squares.clamp(lowest ** 2, highest ** 2)  # what was learned may lie outside of the design, or be 0
            return ratio ** ((highest ** 2 / within).log() / (2 * math.log(highest / lowest)))
        low, high = self.ramp
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return kept + (1 - kept) * ratio

    def logit_factor(self, grid: Grid) -> Union[None, float, torch.Tensor]:
        if self.rescaling(grid) is None:
            return None
        return (0.1 * ops.log_of_largest([1., *self.stretches(grid)], grid.device) + 1) ** 2

    def stretches(self, grid: Grid) -> List[float]:
        """How many times as long as the trained grid this one is, along each axis."""
        return [new / old for new, old in zip(grid.size, self.ref_grid_size)]
