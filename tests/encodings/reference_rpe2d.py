"""2D-RPE of ViTARC in float64 loops (Li et al., 'Tackling the Abstraction and Reasoning Corpus with Vision
Transformers', 2024, Eq. 12).

The equation has no sign; as in ALiBi and in the published code, the distance is subtracted. With `ref_grid_size`,
distances are those in the trained grid.
"""
from loops import logit_bias, rescaled


def halved(num_heads, start):
    """The slopes of the published code: halved from head to head, with ALiBi's rule for other than powers of two."""
    n = 1
    while 2 * n <= num_heads:
        n *= 2
    of_power = [start / 2 ** i for i in range(n)]
    if n == num_heads:
        return of_power
    more = halved(2 * n, start)
    return of_power + [more[2 * i] for i in range(num_heads - n)]


def bias(num_heads, grid_size, *, ref_grid_size=None, slopes='paper', diagonal=False, **where):
    """r_left for j <= i in the raster, else r_right, times the Manhattan distance, `[B, h, N, N]`."""
    ref_height, ref_width = ref_grid_size or grid_size
    to_y, to_x = rescaled(grid_size[0], ref_height), rescaled(grid_size[1], ref_width)
    if slopes == 'paper':
        left = [1 / 2 * 2 ** (-8 * i / num_heads) for i in range(num_heads)]
        right = [1 / 2 ** 0.5 * 2 ** (-8 * i / num_heads) for i in range(num_heads)]
    else:
        left, right = halved(num_heads, 1 / 2), halved(num_heads, 1 / 2 ** 0.5)

    def pair(h, from_y, from_x, y, x):
        i, j = from_y * grid_size[1] + from_x, y * grid_size[1] + x
        distance = abs(to_y(y) - to_y(from_y)) + abs(to_x(x) - to_x(from_x))
        if diagonal and x > from_x and (y > from_y or y < from_y):
            distance *= 2 ** 0.25
        return -(left if j <= i else right)[h] * distance

    return logit_bias(pair, num_heads, grid_size, **where)
