"""HARoPE in float64 loops (Li et al., 'Head-wise Adaptive Rotary Positional Encoding for Fine-Grained Image
Generation', CVPR 2026).

`entries` are those above the diagonals of the skew-symmetric matrices of U and of V, `[2, h, d*(d-1)/2]`; `log_scale`
are the logarithms of the singular values, `[h, d]`.
"""
import torch

import reference_rope2d
from loops import skew
from reference_string import into


def rotate(x, grid_size, *, entries, log_scale, ref_grid_size=None, gate=1, **where):
    """Head h: all tokens are multiplied by U_h diag(s_h) V_h^T, then patches are rotated by RoPE-Axial."""
    d = x.shape[-1]
    one = torch.eye(d, dtype=x.dtype)
    maps = []
    for h in range(x.shape[1]):
        u, v = ((one - skew(own, d)) @ torch.linalg.inv(one + skew(own, d)) for own in entries[:, h])
        maps.append(sum(torch.exp(gate * log_scale[h, c]) * torch.outer(u[:, c], v[:, c]) for c in range(d)))
    return reference_rope2d.rotate(into(x, maps), grid_size, ref_grid_size=ref_grid_size, gate=gate, **where)
