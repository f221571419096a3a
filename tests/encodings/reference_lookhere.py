"""LookHere-90 in float64 loops (Fuller et al., 'LookHere', NeurIPS 2024, and its published code).

What each head sees and its slope are written out below. With `ref_grid_size`, distances are those in the trained grid;
what a head sees goes by the rows and columns of the grid itself.
"""
import math

from loops import logit_bias, rescaled

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
HEADS = {  # number of heads: (what it looks at, slope) of each
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


def bias(num_heads, grid_size, *, ref_grid_size=None, layer=0, depth=1, **where):
    """-2 * (1.5 ... .5) * slope * Euclidean distance where a head looks, else -inf, `[B, h, N, N]`."""
    ref_height, ref_width = ref_grid_size or grid_size
    to_y, to_x = rescaled(grid_size[0], ref_height), rescaled(grid_size[1], ref_width)
    factor = 1.5 if depth == 1 else 1.5 + layer * (0.5 - 1.5) / (depth - 1)

    def pair(h, from_y, from_x, y, x):
        kind, slope = HEADS[num_heads][h]
        if not SEEN[kind](y - from_y, x - from_x):
            return -math.inf
        dy, dx = to_y(y) - to_y(from_y), to_x(x) - to_x(from_x)
        return -2 * factor * slope * math.sqrt(dy * dy + dx * dx)

    return logit_bias(pair, num_heads, grid_size, **where)
