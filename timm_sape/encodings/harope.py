"""HARoPE (Li et al., 'Head-wise Adaptive Rotary Positional Encoding for Fine-Grained Image Generation', CVPR 2026).

Before a rotation of pairs of channels, each head multiplies q and k by a learned matrix. So it can choose what is
rotated, by which frequency and along which axis, and how much each part counts. It is 2-D in that half of the channels
then rotate with x and half with y. It costs a product of q and of k with a d x d matrix in each head, two linear
systems of that size in each layer, and two multiplications per entry of q and k.
"""
from typing import Tuple

import torch
import torch.nn as nn

from .. import ops
from ..grid import Grid
from .registry import register_encoding
from .rope2d import AxialRotaryEncoding


@register_encoding('harope')
class HeadwiseRotaryEncoding(AxialRotaryEncoding):
    """Head-wise adaptive rotary (HARoPE).

    q and k of head h are multiplied by A_h = U_h diag(s_h) V_h^T, U and V orthogonal, s > 0, then rotated as `rope2d`.

    Each layer learns its own A, and starts with A = 1, as `rope2d`. U and V as Cayley transforms of skew-symmetric
    matrices, and s as an exponential, are our choices. The paper gives the equation of A; its code, under a
    non-commercial licence, was not read. A is the same for all tokens, so prefix tokens are multiplied by it too; they
    are not rotated. A gate multiplies the angles and the logarithms of s; at 0 the encoding does nothing. No parameter
    gets weight decay. Computed in at least float32.

    Raises:
        ValueError: If the head dim is not a multiple of 4.
    """
    per_layer = True
    turns_alike = True
    skips_dropped = True
    adds = 'L * D * d'
    paper = 'https://arxiv.org/abs/2510.10489'

    def __init__(self, *, device=None, dtype=None, **host) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        num_entries = self.head_dim * (self.head_dim - 1) // 2
        dd = {'device': device, 'dtype': dtype}
        self.entries = nn.Parameter(torch.empty(2, self.num_heads, num_entries, **dd))  # of U and of V
        self.log_scale = nn.Parameter(torch.empty(self.num_heads, self.head_dim, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.entries)
        nn.init.zeros_(self.log_scale)

    def turn(self, q: torch.Tensor, k: torch.Tensor, grid: Grid) -> Tuple[torch.Tensor, torch.Tensor]:
        with ops.no_autocast(q):
            entries, log_scale = ops.upcast(self.entries, self.log_scale)
            u, v = ops.cayley(ops.skew(entries, self.head_dim)).unbind(0)  # [h, d, d]
            transposed = v * self.gated(log_scale).exp()[:, None] @ u.transpose(-2, -1)
            return tuple((t.to(u.dtype) @ transposed).to(t.dtype) for t in (q, k))
