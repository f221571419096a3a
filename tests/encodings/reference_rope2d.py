"""RoPE-Axial in float64 loops (Heo et al., 'Rotary Position Embedding for Vision Transformer', ECCV 2024).

Its axial frequency: theta_t = 100^(-4t/d), once for x and once for y. With `ref_grid_size`, positions are those in the
trained grid.
"""
from loops import rescaled, rotated


def angle(dim, grid_size, ref_grid_size=None):
    """The first d/4 pairs turn by x * 100^(-4t/d), the others by y * 100^(-4t/d)."""
    ref_height, ref_width = ref_grid_size or grid_size
    to_y, to_x = rescaled(grid_size[0], ref_height), rescaled(grid_size[1], ref_width)

    def turn(h, t, row, column):
        if t < dim // 4:
            return to_x(column) * 100 ** (-4 * t / dim)
        return to_y(row) * 100 ** (-4 * (t - dim // 4) / dim)

    return turn


def rotate(x, grid_size, *, ref_grid_size=None, gate=1, **where):
    """Pair t is the channels 2t and 2t + 1."""
    plain = angle(x.shape[-1], grid_size, ref_grid_size)
    return rotated(x, lambda *place: gate * plain(*place), grid_size, **where)
