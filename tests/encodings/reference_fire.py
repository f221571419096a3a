"""FIRE in float64 loops (Li et al., ICLR 2024, Eq. 4 and 5), with distances on a grid in place of those in a text.

b = f(psi(r) / psi(max(L, R))) with psi(r) = log(c r + 1). In the paper R is the position of the query; here it is the
largest distance in the image. 1e-6 is added to the denominator.
"""
import math

import torch

from loops import logit_bias


def between(dy, dx, distance):
    return abs(dy) + abs(dx) if distance == 'manhattan' else math.hypot(dy, dx)


def bias(log_scale, threshold, weight1, bias1, weight2, bias2, grid_size, *, distance='euclidean', **where):
    """`[B, h, N, N]`."""
    corner = torch.tensor(between(grid_size[0] - 1, grid_size[1] - 1, distance), dtype=torch.float64)
    c, largest = log_scale[0].abs(), max(threshold[0], corner)

    def pair(h, yi, xi, yj, xj):
        r = between(yi - yj, xi - xj, distance)
        ratio = torch.log(1 + c * r) / (torch.log(1 + c * largest) + 1e-6)
        hidden = weight1[:, 0] * ratio + bias1
        hidden = torch.where(hidden > 0, hidden, torch.zeros_like(hidden))
        return weight2[h] @ hidden + bias2[h]

    return logit_bias(pair, weight2.shape[0], grid_size, **where)
