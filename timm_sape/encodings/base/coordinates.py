"""Encodings that are functions of coordinates."""
from typing import Optional, Tuple

import torch

from ...grid import Grid
from .saved_grid import ReferenceGridEncoding

__all__ = ['CoordinateEncoding']


class CoordinateEncoding(ReferenceGridEncoding):
    """An encoding that is a function of coordinates.

    A subclass that has further rules for other grids lists them in `rules` and reads `rule`.

    Args:
        resolution: What happens on another grid than the trained one, H0 x W0. 'extrapolate': coordinates continue,
            0 ... H-1. 'rescale': they are squeezed or stretched to the trained range, so y becomes
            (y + 1/2) * H0/H - 1/2, and x likewise.

    Raises:
        ValueError: If `resolution` is none of the rules.
    """
    rules = ('extrapolate', 'rescale')
    changeable_keywords = ('resolution',)
    chosen_when_loading = True

    def __init__(self, *, resolution: str = 'extrapolate', **host) -> None:
        self._require_choice('resolution', resolution, self.rules)
        self.rule = resolution
        super().__init__(**host)

    def saved_grid_size(self) -> Optional[Tuple[int, int]]:
        return None if self.rule == 'extrapolate' else self.ref_grid_size

    def rescaling(self, grid: Grid) -> Optional[Tuple[int, int]]:
        """(H, W) of the trained grid, if `grid` is another and the rule depends on it. Else None."""
        return None if self.rule == 'extrapolate' else super().rescaling(grid)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.set_ref_grid_size(self.read_extra_state(state))

    def set_ref_grid_size(self, ref_grid_size: Tuple[int, int]) -> None:
        super().set_ref_grid_size(ref_grid_size)
        self.init_non_persistent_buffers()

    def coordinates(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """(y, x) of each patch of the whole grid, in patches of the trained grid, `[H*W, 2]`."""
        coordinates = grid.coordinates(device, dtype)
        ref = self.rescaling(grid)
        if ref is None:
            return coordinates
        scale = [trained / size for trained, size in zip(ref, grid.size)]
        return torch.stack([(c + 0.5) * s - 0.5 for c, s in zip(coordinates.unbind(-1), scale)], dim=-1)
