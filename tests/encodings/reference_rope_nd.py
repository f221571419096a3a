"""nD-RoPE in float64 loops (Li et al., 'nD-RoPE', ICML 2026).

The wave vectors of a scale are the corners of a regular triangle around 0, each of length base^(-s/S), where S = d/6
scales fill a head. Each head has the triangle turned. With `ref_grid_size`, positions are those in the trained grid.
"""
import math

from loops import rescaled, rotated

CORNERS = [(1.0, 0.0), (-0.5, math.sqrt(0.75)), (-0.5, -math.sqrt(0.75))]  # (x, y)


def wave_vector(h, t, dim, num_heads, base=100.0):
    """(x, y) of pair t of head h. The pairs of a corner are neighbours, from its fastest to its slowest."""
    for corner in range(3):
        count = len(range(corner, dim // 2, 3))
        if t < count:
            break
        t -= count
    x, y = CORNERS[corner]
    turn = math.radians(60) * h / num_heads
    length = base ** (-t / (dim / 6))
    return (
        length * (x * math.cos(turn) - y * math.sin(turn)),
        length * (x * math.sin(turn) + y * math.cos(turn)))


def angle(dim, grid_size, num_heads, ref_grid_size=None, base=100.0):
    """The dot product of wave vector and position."""
    ref_height, ref_width = ref_grid_size or grid_size
    to_y, to_x = rescaled(grid_size[0], ref_height), rescaled(grid_size[1], ref_width)

    def turn(h, t, row, column):
        x, y = wave_vector(h, t, dim, num_heads, base)
        return to_x(column) * x + to_y(row) * y

    return turn


def rotate(x, grid_size, *, ref_grid_size=None, gate=1, base=100.0, **where):
    """Pair t is the channels 2t and 2t + 1."""
    plain = angle(x.shape[-1], grid_size, x.shape[1], ref_grid_size, base)
    return rotated(x, lambda *place: gate * plain(*place), grid_size, **where)
