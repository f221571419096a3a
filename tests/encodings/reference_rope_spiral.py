"""Spiral RoPE in float64 loops (Liu et al., 'Spiral RoPE', 2026).

Each pair of channels turns by a frequency times the projection of the patch onto the pair's direction. With
`ref_grid_size`, positions are those in the trained grid.
"""
import math

from loops import rescaled, rotated


def angle(dim, grid_size, ref_grid_size=None, num_directions=4, max_freq=1.5):
    """Directions of the first d/4 pairs go from the y axis towards x, those of the others from the x axis upwards."""
    ref_height, ref_width = ref_grid_size or grid_size
    to_y, to_x = rescaled(grid_size[0], ref_height), rescaled(grid_size[1], ref_width)
    quarter = dim // 4

    def turn(h, t, row, column):
        half, t = divmod(t, quarter)
        step = t // 2 % (num_directions // 2)
        direction = math.pi / 2 * (1 - half) - step * math.pi / num_directions
        projection = to_x(column) * math.cos(direction) + to_y(row) * math.sin(direction)
        return max_freq / 10000 ** (t / quarter) * projection

    return turn


def rotate(x, grid_size, *, ref_grid_size=None, gate=1, num_directions=4, max_freq=1.5, **where):
    """Pair t is the channels 2t and 2t + 1."""
    plain = angle(x.shape[-1], grid_size, ref_grid_size, num_directions, max_freq)
    return rotated(x, lambda *place: gate * plain(*place), grid_size, **where)
