"""Rotations and fixed biases straight from their equations, as in references.py: one patch or pair at a time.

A rotation is an `angle(h, t, y, x)` for the pair t of head h, a bias a `pair(h, from_y, from_x, to_y, to_x)`.
"""
import math

import torch

from references import places, stacked, vectors


def rescaled(size, ref_size):
    """The coordinate of row or column i among `size`, in patches of the trained grid, which has `ref_size`."""
    return lambda i: (i + 0.5) * ref_size / size - 0.5


def rotated_half(x, angle, grid_size, num_prefix_tokens=0, keep_indices=None):
    """Turn channels t and t + d/2 of each patch by `angle(h, t, y, x)`; prefix tokens stay."""
    out = []
    for b, heads in enumerate(vectors(x)):
        place = places(b, grid_size, keep_indices)
        out.append([])
        for h, tokens in enumerate(heads):
            turned = tokens[:num_prefix_tokens]
            for (row, column), token in zip(place, tokens[num_prefix_tokens:]):
                half = len(token) // 2
                first, second = [], []
                for t in range(half):
                    a = torch.as_tensor(angle(h, t, row, column), dtype=x.dtype)
                    u, w = token[t], token[t + half]
                    first.append(u * torch.cos(a) - w * torch.sin(a))
                    second.append(u * torch.sin(a) + w * torch.cos(a))
                turned = turned + [torch.stack(first + second)]
            out[b].append(turned)
    return stacked(out)


def rope1d(dim, grid_size, ref_grid_size=None):
    """Raster index times 10000^(-2t/d)."""
    height, width = grid_size
    ref_height, ref_width = ref_grid_size or grid_size
    scale = ref_height * ref_width / (height * width)
    return lambda h, t, row, column: (row * width + column) * scale * 10000 ** (-2 * t / dim)


def mrope(dim, grid_size, ref_grid_size=None, section=None):
    """The pairs go to time, y, x in turn; what an axis does not want, having got its section, goes to time."""
    _, most_y, most_x = section or (dim, dim, dim)
    ref_height, ref_width = ref_grid_size or grid_size
    to_y, to_x = rescaled(grid_size[0], ref_height), rescaled(grid_size[1], ref_width)
    axes = []
    for t in range(dim // 2):
        turn = ('time', 'y', 'x')[t % 3]
        if turn == 'y' and axes.count('y') == most_y or turn == 'x' and axes.count('x') == most_x:
            turn = 'time'
        axes.append(turn)

    def angle(h, t, row, column):
        return {'time': 0.0, 'y': to_y(row), 'x': to_x(column)}[axes[t]] * 10000 ** (-2 * t / dim)

    return angle


def rope_dinov3(
        dim, grid_size, base=100.0, normalize='separate', shift=(0.0, 0.0), jitter=(1.0, 1.0), rescale=1.0):
    """2 pi c / base^(2k/(d/2)), first for c = y, then for c = x; what is given of the last three is what was drawn."""
    height, width = grid_size
    by_y, by_x = {
        'separate': (height, width), 'max': (max(grid_size),) * 2, 'min': (min(grid_size),) * 2}[normalize]

    def angle(h, t, row, column):
        axis, k = divmod(t, dim // 4)
        c = ((row + 0.5) / by_y, (column + 0.5) / by_x)[axis]
        c = 2 * c - 1
        c = (c + shift[axis]) * jitter[axis] * rescale
        return 2 * math.pi * c / base ** (2 * k / (dim / 2))

    return angle


def logit_bias(pair, num_heads, grid_size, num_prefix_tokens=0, keep_indices=None, batch=1):
    """`pair` for all tokens, 0 wherever a prefix token takes part, `[B, h, N, N]` in float64."""
    p = num_prefix_tokens
    bias = []
    for b in range(batch):
        place = places(b, grid_size, keep_indices)
        bias.append([[
            [0.0] * (p + len(place)) if i < p else
            [0.0 if j < p else pair(h, *place[i - p], *place[j - p]) for j in range(p + len(place))]
            for i in range(p + len(place))] for h in range(num_heads)])
    return torch.tensor(bias, dtype=torch.float64)


def by_alibis_rule(num_heads, of_a_power_of_two):
    """The slopes of n heads, n the next lower power of two, and every second one of those of 2n heads."""
    n = 1
    while 2 * n <= num_heads:
        n *= 2
    if n == num_heads:
        return of_a_power_of_two(n)
    more = by_alibis_rule(2 * n, of_a_power_of_two)
    return of_a_power_of_two(n) + [more[2 * i] for i in range(num_heads - n)]


def alibi2d(num_heads, grid_size, ref_grid_size=None, distance='euclidean'):
    """-2^(-8i/h) times the distance, i from 1."""
    ref_height, ref_width = ref_grid_size or grid_size
    to_y, to_x = rescaled(grid_size[0], ref_height), rescaled(grid_size[1], ref_width)
    slopes = by_alibis_rule(num_heads, lambda n: [2 ** (-8 * i / n) for i in range(1, n + 1)])

    def pair(h, from_y, from_x, y, x):
        dy, dx = to_y(y) - to_y(from_y), to_x(x) - to_x(from_x)
        return -slopes[h] * (math.sqrt(dy * dy + dx * dx) if distance == 'euclidean' else abs(dy) + abs(dx))

    return pair


def rpe2d(num_heads, grid_size, ref_grid_size=None, slopes='paper', diagonal=False):
    """Eq. 12: r_left for j <= i in the raster, else r_right, times the Manhattan distance, with ALiBi's sign."""
    ref_height, ref_width = ref_grid_size or grid_size
    to_y, to_x = rescaled(grid_size[0], ref_height), rescaled(grid_size[1], ref_width)
    if slopes == 'paper':
        left = [1 / 2 * 2 ** (-8 * i / num_heads) for i in range(num_heads)]
        right = [1 / 2 ** 0.5 * 2 ** (-8 * i / num_heads) for i in range(num_heads)]
    else:
        left = by_alibis_rule(num_heads, lambda n: [1 / 2 / 2 ** i for i in range(n)])
        right = by_alibis_rule(num_heads, lambda n: [1 / 2 ** 0.5 / 2 ** i for i in range(n)])

    def pair(h, from_y, from_x, y, x):
        i, j = from_y * grid_size[1] + from_x, y * grid_size[1] + x
        distance = abs(to_y(y) - to_y(from_y)) + abs(to_x(x) - to_x(from_x))
        if diagonal and x > from_x and (y > from_y or y < from_y):
            distance *= 2 ** 0.25
        return -(left if j <= i else right)[h] * distance

    return pair


SEEN = {  # what a head looks at, dy downwards
    'up left': lambda dy, dx: dy <= 0 and dx <= 0,
    'up right': lambda dy, dx: dy <= 0 and dx >= 0,
    'down left': lambda dy, dx: dy >= 0 and dx <= 0,
    'down right': lambda dy, dx: dy >= 0 and dx >= 0,
    'up': lambda dy, dx: dy <= dx <= -dy,
    'down': lambda dy, dx: -dy <= dx <= dy,
    'left': lambda dy, dx: dx <= dy <= -dx,
    'right': lambda dy, dx: -dx <= dy <= dx,
    'all': lambda dy, dx: True,
}
CORNERS = ['up left', 'up right', 'down left', 'down right']
TRIANGLES = ['up', 'down', 'left', 'right']
FOUR_SEE_ALL = [('all', 0.25), ('all', 0.0625), ('all', 0.015625), ('all', 0.00390625)]
LOOKHERE = {  # heads: (what it looks at, slope)
    4: [(kind, 0.5) for kind in CORNERS],
    6: [(kind, 0.5) for kind in CORNERS] + FOUR_SEE_ALL[:2],
    8: [(kind, 0.5) for kind in CORNERS] + FOUR_SEE_ALL,
    12: [(kind, 0.5) for kind in CORNERS + TRIANGLES] + FOUR_SEE_ALL,
    16: (
        [(kind, 0.5) for kind in CORNERS] + [(kind, 0.25) for kind in CORNERS]
        + [(kind, 0.5) for kind in TRIANGLES] + FOUR_SEE_ALL),
    20: (
        [(kind, 0.5) for kind in CORNERS] + [(kind, 0.25) for kind in CORNERS]
        + [(kind, 0.5) for kind in TRIANGLES] + [(kind, 0.25) for kind in TRIANGLES] + FOUR_SEE_ALL),
}


def lookhere(num_heads, grid_size, ref_grid_size=None, layer=0, depth=1):
    """-2 * (1.5 ... .5) * slope * Euclidean distance where a head looks, else -inf."""
    ref_height, ref_width = ref_grid_size or grid_size
    to_y, to_x = rescaled(grid_size[0], ref_height), rescaled(grid_size[1], ref_width)
    factor = 1.5 if depth == 1 else 1.5 + layer * (0.5 - 1.5) / (depth - 1)

    def pair(h, from_y, from_x, y, x):
        kind, slope = LOOKHERE[num_heads][h]
        if not SEEN[kind](y - from_y, x - from_x):
            return -math.inf
        dy, dx = to_y(y) - to_y(from_y), to_x(x) - to_x(from_x)
        return -2 * factor * slope * math.sqrt(dy * dy + dx * dx)

    return pair
