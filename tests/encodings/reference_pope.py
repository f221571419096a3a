"""PoPE in float64 loops (Gopalakrishnan et al., 'Decoupling the "What" and "Where" With Polar Coordinate Positional
Embeddings', 2025), axial.

`phases` is `[h, d]`. With `ref_grid_size`, positions are those in the trained grid.
"""
import math

import torch

from loops import places, rescaled, stacked, vectors


def length(x, gate):
    """softplus(x); with a gate, that far from x to softplus(x)."""
    return x + gate * (torch.log(1 + torch.exp(x)) - x)


def axial(dim, grid_size, ref_grid_size=None, base=100):
    """The first d/2 channels turn by x * base^(-2c/d), the others by y."""
    to_y, to_x = (rescaled(*sizes) for sizes in zip(grid_size, ref_grid_size or grid_size))

    def turn(h, c, row, column):
        place = to_x(column) if c < dim // 2 else to_y(row)
        return place * base ** (-2 * (c % (dim // 2)) / dim)

    return turn


def logits(q, k, grid_size, angle, *, phases, factor=1, gate=1, num_prefix_tokens=0, keep_indices=None):
    """Sum over channels of the lengths of q and k times the cosine of the angle between them, over sqrt(d).

    Prefix tokens are in the centre of the grid, and their keys have no phases. `angle` is as in `loops.rotated`, but of
    channels, and `factor` a further one of all logits.
    """
    d, corner = q.shape[-1], (grid_size[0] - 1, grid_size[1] - 1)
    of_q, of_k = (vectors(length(x, gate)) for x in (q, k))
    out = []
    for b in range(len(of_q)):
        patches = places(b, grid_size, keep_indices)
        out.append([[[] for _ in of_q[b][0]] for _ in of_q[b]])
        for h in range(len(of_q[b])):
            centre = [(angle(h, c, 0, 0) + angle(h, c, *corner)) / 2 for c in range(d)]
            angles = [centre] * num_prefix_tokens + [[angle(h, c, *place) for c in range(d)] for place in patches]
            for i, a_i in enumerate(angles):
                for j, a_j in enumerate(angles):
                    between = torch.tensor([b - a for a, b in zip(a_i, a_j)], dtype=q.dtype)
                    if j >= num_prefix_tokens:
                        between = between + phases[h]
                    products = of_q[b][h][i] * of_k[b][h][j] * torch.cos(gate * between)
                    out[b][h][i].append(factor * products.sum() / math.sqrt(d))
    return stacked(out)
