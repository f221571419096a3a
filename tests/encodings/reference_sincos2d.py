"""Sinusoids of x and y (He et al. 2022, arXiv:2111.06377): those of Vaswani et al. 2017, Sec. 3.5, for each axis."""
import math

import torch

from loops import changed_patches, rescaled


def sincos2d(tokens, grid_size, *, ref_grid_size=None, **where):
    """Each patch plus sines of x, cosines of x, sines of y, cosines of y, in patches of the trained grid."""
    num_waves = tokens.shape[-1] // 4
    to_y, to_x = (rescaled(size, ref) for size, ref in zip(grid_size, ref_grid_size or grid_size))

    def change(token, b, y, x):
        row = []
        for wave, place in ((math.sin, to_x(x)), (math.cos, to_x(x)), (math.sin, to_y(y)), (math.cos, to_y(y))):
            row += [wave(place / 10000 ** (k / num_waves)) for k in range(num_waves)]
        return token + torch.tensor(row, dtype=torch.float64)

    return changed_patches(tokens, change, grid_size, **where)
