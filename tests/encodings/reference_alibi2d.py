"""2D-ALiBi in float64 loops (Fuller et al., 'CROMA', NeurIPS 2023; Press et al., 'Train Short, Test Long', ICLR 2022).

The bias of ALiBi, -m times the distance (section 3 there), with the distance in the plane. With `ref_grid_size`,
distances are those in the trained grid.
"""
import math

from loops import logit_bias, rescaled


def slopes(num_heads):
    """2^(-8i/h), i from 1. Else those of n heads, n the next lower power of two, and every second one of 2n heads."""
    n = 1
    while 2 * n <= num_heads:
        n *= 2
    of_power = [2 ** (-8 * i / n) for i in range(1, n + 1)]
    if n == num_heads:
        return of_power
    more = slopes(2 * n)
    return of_power + [more[2 * i] for i in range(num_heads - n)]


def bias(num_heads, grid_size, *, ref_grid_size=None, distance='euclidean', **where):
    """-m times the distance, `[B, h, N, N]`."""
    ref_height, ref_width = ref_grid_size or grid_size
    to_y, to_x = rescaled(grid_size[0], ref_height), rescaled(grid_size[1], ref_width)
    m = slopes(num_heads)

    def pair(h, from_y, from_x, y, x):
        dy, dx = to_y(y) - to_y(from_y), to_x(x) - to_x(from_x)
        return -m[h] * (math.sqrt(dy * dy + dx * dx) if distance == 'euclidean' else abs(dy) + abs(dx))

    return logit_bias(pair, num_heads, grid_size, **where)
