"""Relative position bias in float64 loops (Liu et al., 'Swin Transformer', ICCV 2021, Eq. 4).

The table has a row for each offset p_i - p_j of the grid that it was made for. For another grid it is resampled as
PyTorch's bicubic interpolation without antialiasing does it.
"""
import math

from loops import logit_bias


def cubic(t):
    """Weight of a neighbour at distance t: the cubic convolution of Keys with a = -3/4."""
    a, t = -0.75, abs(t)
    if t <= 1:
        return (a + 2) * t ** 3 - (a + 3) * t ** 2 + 1
    return a * (t ** 3 - 5 * t ** 2 + 8 * t - 4) if t < 2 else 0


def resampled(values, length):
    """A list at the centres of `length` cells, from that at the centres of its own; constant beyond the outer ones."""
    out = []
    for i in range(length):
        place = (i + 0.5) * len(values) / length - 0.5
        low = math.floor(place)
        out.append(sum(
            cubic(place - n) * values[min(max(n, 0), len(values) - 1)] for n in range(low - 1, low + 3)))
    return out


def bias(table, grid_size, own_size, **where):
    """table[p_i - p_j], `[B, h, N, N]`. The rows of the table are the offsets of a grid of `own_size`."""
    (height, width), (own_height, own_width) = grid_size, own_size
    rows = table.unbind(0)
    rows = [list(rows[r * (2 * own_width - 1):(r + 1) * (2 * own_width - 1)]) for r in range(2 * own_height - 1)]
    if grid_size != own_size:
        rows = [resampled(row, 2 * width - 1) for row in rows]
        columns = [resampled([row[c] for row in rows], 2 * height - 1) for c in range(2 * width - 1)]
        rows = [[column[r] for column in columns] for r in range(2 * height - 1)]

    def pair(h, yi, xi, yj, xj):
        return rows[yi - yj + height - 1][xi - xj + width - 1][h]

    return logit_bias(pair, table.shape[1], grid_size, **where)
