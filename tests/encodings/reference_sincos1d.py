"""Sinusoids along the raster (Vaswani et al. 2017, arXiv:1706.03762, Sec. 3.5): PE(n, 2k) and PE(n, 2k + 1)."""
import math

import torch

from loops import changed_patches


def sincos1d(tokens, grid_size, *, ref_grid_size=None, **where):
    """Each patch plus the waves of its raster index, which counts in patches of the trained grid."""
    height, width = grid_size
    ref_height, ref_width = ref_grid_size or grid_size
    dim = tokens.shape[-1]

    def change(token, b, y, x):
        n = (y * width + x) * ref_height * ref_width / (height * width)
        row = []
        for c in range(dim):
            angle = n / 10000 ** (2 * (c // 2) / dim)
            row.append(math.cos(angle) if c % 2 else math.sin(angle))
        return token + torch.tensor(row, dtype=torch.float64)

    return changed_patches(tokens, change, grid_size, **where)
