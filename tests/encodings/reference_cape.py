"""CAPE for images (Likhomanenko et al. 2021, arXiv:2106.03143).

A token t at p becomes sqrt(D) * t + [cos(pi w.p), sin(pi w.p)] with w_k = rho_k * (cos k, sin k). In training p is
(p + global shift + local shift) * scale.
"""
import math

import torch

from loops import changed_patches


def position(i, size):
    """`size` positions from -1 to 1, and the distance of neighbors."""
    return (-1 + 2 * i / (size - 1), 2 / (size - 1)) if size > 1 else (0.0, 0.0)


def cape(tokens, grid_size, *, global_shift=None, local_shift=None, log_scale=None, **where):
    """Each patch times sqrt(D), plus waves of its position. What is drawn at random in training is given.

    Args:
        tokens: `[B, N, D]`.
        grid_size: (H, W).
        global_shift: `[B, 2]`.
        local_shift: In distances of neighbors, for the whole grid, `[B, H*W, 2]`.
        log_scale: `[B]`.
        where: As for `changed_patches`.
    """
    dim = tokens.shape[-1]

    def change(token, b, y, x):
        place = []
        for axis, i in enumerate((y, x)):
            p, step = position(i, grid_size[axis])
            if global_shift is not None:
                p = p + global_shift[b, axis].item()
            if local_shift is not None:
                p = p + local_shift[b, y * grid_size[1] + x, axis].item() * step
            if log_scale is not None:
                p = p * math.exp(log_scale[b].item())
            place.append(p)
        phases = []
        for k in range(dim // 2):
            rho = 10 ** (k / (dim // 2 - 1))
            phases.append(math.pi * rho * (math.cos(k) * place[0] + math.sin(k) * place[1]))
        waves = [math.cos(a) for a in phases] + [math.sin(a) for a in phases]
        return torch.stack([math.sqrt(dim) * t + w for t, w in zip(token, waves)])

    return changed_patches(tokens, change, grid_size, **where)
