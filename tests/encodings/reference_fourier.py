"""Learnable Fourier features (Li et al. 2021, arXiv:2106.02795).

r = [cos(p W), sin(p W)] / sqrt(F) and PE = fc2(GELU(fc1(r))), for a patch at p = (y, x).
"""
import math

import torch

from loops import changed_patches, rescaled


def gelu(a):
    return a * (1 + torch.erf(a / math.sqrt(2))) / 2


def fourier(tokens, freqs, weight1, bias1, weight2, bias2, grid_size, *, ref_grid_size=None, **where):
    """Each patch plus an MLP of the waves of its place, which is in patches of the trained grid.

    Args:
        tokens: `[B, N, D]`.
        freqs: Frequencies along y and along x, `[2, F/2]`.
        weight1: Weight of the first layer, `[hidden, F]`.
        bias1: Its bias, `[hidden]`.
        weight2: Weight of the second layer, `[D, hidden]`.
        bias2: Its bias, `[D]`.
        grid_size: (H, W).
        ref_grid_size: The trained grid, if coordinates are rescaled to it.
        where: As for `changed_patches`.
    """
    num_features = weight1.shape[1]
    to_y, to_x = (rescaled(size, ref) for size, ref in zip(grid_size, ref_grid_size or grid_size))

    def row(y, x):
        phases = [to_y(y) * freqs[0, k] + to_x(x) * freqs[1, k] for k in range(num_features // 2)]
        features = torch.stack([torch.cos(a) for a in phases] + [torch.sin(a) for a in phases])
        features = features / math.sqrt(num_features)
        hidden = torch.stack([gelu(w @ features + b) for w, b in zip(weight1, bias1)])
        return torch.stack([w @ hidden + b for w, b in zip(weight2, bias2)])

    rows = {(y, x): row(y, x) for y in range(grid_size[0]) for x in range(grid_size[1])}
    return changed_patches(tokens, lambda token, b, y, x: token + rows[y, x], grid_size, **where)
