"""Biases that depend only on the offset between two patches, so on 2H-1 x 2W-1 numbers per head.

Only these numbers are stored. Each forward pass copies the N x N biases out of them, which takes as long as any other
pass over the logits. For 32 x 32 patches and 12 heads this stores 0.2 MB instead of 48, which matters most where each
layer has its own bias.
"""
from typing import Callable, List, Sequence, Tuple

import torch

from ...grid import Grid
from .coordinates import CoordinateEncoding
from .fixed import FixedEncoding

__all__ = ['OffsetBiasEncoding', 'between_patches', 'per_head', 'slopes_for_any_heads']


class OffsetBiasEncoding(FixedEncoding, CoordinateEncoding):
    """A bias b_h(dy, dx), where the key is dy rows below and dx columns to the right of the query.

    A subclass defines `compute`, which returns the bias for dy = 1-H ... H-1 and dx = 1-W ... W-1, `[h, 2H-1, 2W-1]`,
    and calls `make_table`.

    Args:
        resolution: What happens on another grid than the trained one, H0 x W0. 'extrapolate': offsets continue.
            'rescale': they are squeezed or stretched, so dy becomes dy * H0/H, and dx likewise. 'slopes': both are
            multiplied by sqrt(H0 * W0 / (H * W)), which amounts to other slopes (Al-Khateeb et al. 2023, 2310.13017,
            for texts) and keeps directions the same at any aspect ratio.
    """
    relative = True
    skips_dropped = True
    rules = ('extrapolate', 'rescale', 'slopes')
    on_other_grids = 'distances extrapolate, or `rescale`, `slopes`'

    def __init__(self, *, resolution: str = 'extrapolate', **host) -> None:
        super().__init__(resolution=resolution, **host)

    def offsets(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> Tuple[torch.Tensor, torch.Tensor]:
        """dy and dx in patches of the trained grid, `[2H-1, 1]` and `[2W-1]`."""
        ref = self.rescaling(grid)
        dy, dx = (torch.arange(1 - size, size, device=device, dtype=dtype) for size in grid.size)
        if ref is not None:
            sy, sx = ref[0] / grid.height, ref[1] / grid.width
            if self.rule == 'slopes':
                sy = sx = (torch.ones((), device=device, dtype=dtype) * (sy * sx)).sqrt()  # sizes may be symbolic
            dy, dx = dy * sy, dx * sx
        return dy[:, None], dx

    def position_bias(self, grid: Grid) -> torch.Tensor:
        return self.spread(self.table_for(grid), grid)

    @staticmethod
    def spread(table: torch.Tensor, grid: Grid) -> torch.Tensor:
        """From biases by offset `[h, 2H-1, 2W-1]` to biases between tokens `[(B,) h, N, N]`."""
        # Tracing would turn the strides into constants, even if sizes are dynamic.
        if grid.keep_indices is not None or torch.jit.is_tracing():
            return grid.pad_prefix(between_patches(table.flatten(1).T, grid).transpose(-2, -1))
        # The biases of the query at (y, x) are the H x W window that begins at offset (-y, -x), so the first window
        # belongs to the last patch. `unfold` would read better, but fails on symbolic sizes.
        head, row, column = table.stride()
        windows = table.as_strided((table.shape[0], *grid.size, *grid.size), (head, row, column, row, column))
        rows = windows.flip(1, 2)  # [h, H, W, H, W]
        return grid.pad_prefix(rows.flatten(3, 4).flatten(1, 2))  # [h, N, N]


def per_head(values: Sequence[float], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """One number per head as a tensor `[h, 1, 1]`, which broadcasts with a table `[h, 2H-1, 2W-1]`."""
    return torch.tensor(values, device=device, dtype=dtype)[:, None, None]


def slopes_for_any_heads(num_heads: int, geometric: Callable[[int], List[float]]) -> List[float]:
    """The slopes of all heads, by ALiBi's rule if their number is not a power of two.

    These are the slopes for the next lower power of two, then every second slope for the next higher one, until there
    are enough.

    Args:
        num_heads: h.
        geometric: Returns the slopes of n heads, for n a power of two.
    """
    lower = 2 ** (num_heads.bit_length() - 1)
    return [*geometric(lower), *geometric(2 * lower)[::2][:num_heads - lower]]


def between_patches(values: torch.Tensor, grid: Grid) -> torch.Tensor:
    """From one value per offset to one value per pair of patches.

    Args:
        values: Value of each offset p_i - p_j, from (1-H, 1-W) to (H-1, W-1) row by row, `[(2H-1)*(2W-1), h]`.
        grid: The grid.

    Returns:
        `[h, H*W, H*W]`, or `[B, h, K, K]` if patches were dropped.
    """
    if grid.keep_indices is not None:
        dy, dx = grid.kept_offsets()  # p_j - p_i, [B, K, K]
        index = (grid.height - 1 - dy) * (2 * grid.width - 1) + grid.width - 1 - dx
        return values.T.index_select(1, index.flatten()).reshape(values.shape[1], *index.shape).transpose(0, 1)
    y, x = (torch.arange(size, device=values.device) for size in grid.size)
    dy = y[:, None] - y + grid.height - 1  # [H, H]
    dx = x[:, None] - x + grid.width - 1  # [W, W]
    index = dy[:, None, :, None] * (2 * grid.width - 1) + dx[None, :, None, :]  # [H, W, H, W]
    # values[index] does the same, but its gradient is slower.
    pairs = values.T.index_select(1, index.flatten())
    return pairs.reshape(-1, grid.num_patches, grid.num_patches)
