"""Log-spaced continuous position bias in float64 loops (Liu et al., 'Swin Transformer V2', CVPR 2022, Eq. 3 and 4).

Mode 'swin' has the scaling and the sigmoid of its published code, mode 'cr' is that of timm's `vit_relpos_*`.
"""
import math

import torch

from loops import logit_bias


def squeezed(delta, ref, mode):
    """Eq. 4 for one axis; `ref` is the size of the trained grid along it."""
    if mode == 'cr':
        return math.copysign(math.log(1 + abs(delta)), delta)
    scaled = delta / max(ref - 1, 1) * 8
    return math.copysign(math.log2(1 + abs(scaled)) / math.log2(8), delta)


def bias(weight1, bias1, weight2, bias2, grid_size, ref_grid_size, *, mode, **where):
    """Eq. 3: an MLP of the offset p_i - p_j, `[B, h, N, N]`."""
    def pair(h, yi, xi, yj, xj):
        fy, fx = squeezed(yi - yj, ref_grid_size[0], mode), squeezed(xi - xj, ref_grid_size[1], mode)
        hidden = weight1[:, 0] * fy + weight1[:, 1] * fx + bias1
        hidden = torch.where(hidden > 0, hidden, torch.zeros_like(hidden))
        out = weight2[h] @ hidden
        return out + bias2[h] if mode == 'cr' else 16 / (1 + torch.exp(-out))

    return logit_bias(pair, weight2.shape[0], grid_size, **where)
