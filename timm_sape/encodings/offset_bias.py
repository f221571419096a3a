"""What the biases share that depend on the offset from one patch to another alone, so on 2H-1 x 2W-1 numbers per head.

These numbers are what is kept. The N x N biases are copied out of them in each forward pass, which takes as long as any
other pass over the logits: at 32 x 32 patches and 12 heads 0.2 MB are kept instead of 48, and a bias that differs from
layer to layer does not cost as much memory as all layers.
"""
from typing import Callable, List, Sequence, Tuple

import torch

from ..grid import Grid
from .base import CoordinateEncoding, FixedEncoding
from .rpb import between_patches

__all__ = ['OffsetBiasEncoding', 'per_head', 'slopes_for_any_heads']


class OffsetBiasEncoding(FixedEncoding, CoordinateEncoding):
    """A bias b_h(dy, dx) for the patch that is dy rows below and dx columns to the right of the one that looks.

    A subclass defines `compute`, which returns it for dy = 1-H ... H-1 and dx = 1-W ... W-1, `[h, 2H-1, 2W-1]`, and
    calls `make_table`.

    Args:
        resolution: On another grid than the trained one, H0 x W0, offsets go on ('extrapolate') or are squeezed or
            stretched, dy to dy * H0/H, dx likewise ('rescale').
    """
    relative = True
    resolution = 'distances go on, or `rescale`'

    def offsets(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> Tuple[torch.Tensor, torch.Tensor]:
        """dy and dx in patches of the trained grid, `[2H-1, 1]` and `[2W-1]`."""
        ref = self.rescaling(grid) if self.rescales else None
        dy, dx = (torch.arange(1 - size, size, device=device, dtype=dtype) for size in grid.size)
        if ref is not None:
            dy, dx = dy * (ref[0] / grid.height), dx * (ref[1] / grid.width)
        return dy[:, None], dx

    def position_bias(self, grid: Grid) -> torch.Tensor:
        return self.spread(self.table_for(grid), grid)

    @staticmethod
    def spread(table: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Biases by offset `[h, 2H-1, 2W-1]` to biases between tokens `[(B,) h, N, N]`."""
        if torch.jit.is_tracing():  # tracing would fix the strides, even where sizes may change
            return grid.between_tokens(between_patches(table.flatten(1).T, grid).transpose(1, 2))
        # The biases of the patch at (y, x) are the window that begins at offset (-y, -x), so the first window belongs
        # to the last patch. Not `unfold`, which fails on symbolic sizes.
        head, row, column = table.stride()
        windows = table.as_strided((table.shape[0], *grid.size, *grid.size), (head, row, column, row, column))
        rows = windows.flip(1, 2)  # [h, H, W, H, W]
        return grid.between_tokens(rows.flatten(3, 4).flatten(1, 2))  # [(B,) h, N, N]


def per_head(values: Sequence[float], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """One number per head, as a tensor that goes with a table by offset, `[h, 1, 1]`."""
    return torch.tensor(values, device=device, dtype=dtype)[:, None, None]


def slopes_for_any_heads(num_heads: int, geometric: Callable[[int], List[float]]) -> List[float]:
    """ALiBi's rule for a number of heads that is no power of two.

    The slopes of the next lower power, then every second one of the next higher power, as many as are missing.

    Args:
        num_heads: h.
        geometric: The slopes of n heads, n a power of two.
    """
    lower = 2 ** (num_heads.bit_length() - 1)
    return [*geometric(lower), *geometric(2 * lower)[::2][:num_heads - lower]]
