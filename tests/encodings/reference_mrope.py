"""M-RoPE in float64 loops (Wang et al., 'Qwen2-VL', 2024, section 2.1; the paper has no equation).

Pairs take turns in following time, y and x, as in timm's `RotaryEmbeddingMRope`. An image is at time 0. With
`ref_grid_size`, positions are those in the trained grid.
"""
from loops import rescaled, rotated


def angle(dim, grid_size, ref_grid_size=None, section=None):
    """The pairs go to time, y and x in turn. Once y or x has as many as `section` gives it, its turns go to time."""
    _, most_y, most_x = section or (dim, dim, dim)
    ref_height, ref_width = ref_grid_size or grid_size
    to_y, to_x = rescaled(grid_size[0], ref_height), rescaled(grid_size[1], ref_width)
    axes = []
    for t in range(dim // 2):
        axis = ('time', 'y', 'x')[t % 3]
        if axis == 'y' and axes.count('y') == most_y or axis == 'x' and axes.count('x') == most_x:
            axis = 'time'
        axes.append(axis)

    def turn(h, t, row, column):
        return {'time': 0.0, 'y': to_y(row), 'x': to_x(column)}[axes[t]] * 10000 ** (-2 * t / dim)

    return turn


def rotate(x, grid_size, *, ref_grid_size=None, section=None, gate=1, **where):
    """Pair t is the channels t and t + d/2."""
    plain = angle(x.shape[-1], grid_size, ref_grid_size, section)
    return rotated(x, lambda *place: gate * plain(*place), grid_size, rotate_half=True, **where)
