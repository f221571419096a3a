"""RoPE along the raster in float64 loops (Su et al., 'RoFormer', 2021, Eq. 14 and 15).

Positions are counted row by row. With `ref_grid_size`, they are squeezed or stretched to the number of patches of that
grid.
"""
from loops import rotated


def angle(dim, grid_size, ref_grid_size=None):
    """Raster index times 10000^(-2t/d)."""
    height, width = grid_size
    ref_height, ref_width = ref_grid_size or grid_size
    scale = ref_height * ref_width / (height * width)
    return lambda h, t, row, column: (row * width + column) * scale * 10000 ** (-2 * t / dim)


def rotate(x, grid_size, *, ref_grid_size=None, gate=1, **where):
    """Pair t is the channels 2t and 2t + 1."""
    plain = angle(x.shape[-1], grid_size, ref_grid_size)
    return rotated(x, lambda *place: gate * plain(*place), grid_size, **where)
