"""STRING (Schenck et al., 'Learning the RoPEs: Better 2D and 3D Position Encodings with STRING', ICML 2025).

If the matrices of a rotation for y and for x commute, it is a rotation of pairs of channels in another basis. Here each
head learns that basis, by the Cayley transform (Cayley-STRING). It is 2-D in that each pair of channels of the new
basis rotates with a learned mixture of x and y. It costs a product of q and of k with a d x d matrix in each head, a
linear system of that size in each layer, and two multiplications per entry of q and k.
"""
from typing import Tuple

import torch
import torch.nn as nn

from .. import ops
from ..grid import Grid
from .registry import register_encoding
from .rope2d_mixed import MixedRotaryEncoding


@register_encoding('string')
class CayleyRotaryEncoding(MixedRotaryEncoding):
    """Mixed 2-D rotary in a learned basis (Cayley-STRING).

    q and k of head h are multiplied by P_h^T, P = (1 - S) (1 + S)^-1, S skew-symmetric, then rotated as `rope2d_mixed`.

    That is the paper's P R P^T without its leftmost P, which q.k does not depend on. Each layer learns S and the
    frequencies. S starts at 0, so that the encoding starts as `rope2d_mixed`. P is the same for all tokens, so prefix
    tokens are multiplied by it too; they are not rotated. A gate multiplies the angles; at 0 the encoding does nothing,
    whatever P is. No parameter gets weight decay. Computed in at least float32.

    Raises:
        ValueError: If the head dim is not a multiple of 4.
    """
    turns_alike = True
    skips_dropped = True
    adds = 'L * D * (d + 1) / 2'
    paper = 'https://arxiv.org/abs/2502.02562'

    def __init__(self, *, device=None, dtype=None, **host) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        num_entries = self.head_dim * (self.head_dim - 1) // 2
        self.entries = nn.Parameter(torch.empty(self.num_heads, num_entries, device=device, dtype=dtype))
        nn.init.zeros_(self.entries)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.entries)

    def turn(self, q: torch.Tensor, k: torch.Tensor, grid: Grid) -> Tuple[torch.Tensor, torch.Tensor]:
        with ops.no_autocast(q):
            entries, = ops.upcast(self.entries)
            basis = ops.cayley(ops.skew(entries, self.head_dim))  # [h, d, d]
            return tuple((t.to(basis.dtype) @ basis).to(t.dtype) for t in (q, k))
