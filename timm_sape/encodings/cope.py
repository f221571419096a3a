"""CoPE (Golovneva et al., 'Contextual Position Encoding', 2024), as the SaPE2 paper compares it.

The position of token j, as query i sees it, is the sum of the gates of i from j to the end. This position selects a
learned vector. The product of that vector with the query is added to the logit. Nothing about it is 2-D: positions are
counted along the raster, and in a ViT, which is not causal, the sum runs to the end of it. It costs one N x N look-up
per head.
"""
import torch
import torch.nn as nn

from .. import ops
from ..checks import is_integer
from ..grid import Grid
from .base import ReferenceGridEncoding
from .registry import register_encoding


@register_encoding('cope')
class ContextualPositionEncoding(ReferenceGridEncoding):
    """Contextual (CoPE).

    Logits get bias_scale * z_i[p_ij], z_i[p] = q_i.e[p], where p_ij sums sigmoid(q_i.k_m / sqrt(d)) over m >= j.

    The paper's equation sums the gates from j to i, both included, and does not divide by sqrt(d). Its listing sums to
    the end and divides, as here. Under a causal mask both sums are the same.

    Computed in float32 at least. The table starts at zero and has no weight decay. The authors use as many positions as
    tokens, which makes z itself N x N; here `npos` is a keyword, and further positions count as the last one. On a grid
    of N patches other than the N0 trained on, positions are scaled by N0/N.

    Published code differs in the factor of z. facebookresearch/RAM divides by sqrt(d) unless told otherwise, as here.
    The paper's snippet, x-transformers and the repository that appears to be that of SaPE2's authors do not. The latter
    also counts the class token among the positions and has npos = 10: `npos=10, bias_scale='one'` is nearest to it.

    Args:
        npos: Number of embeddings, 2 or more.
        bias_scale: Factor of z, 'head_dim' for 1/sqrt(d) or 'one'.
        direction: 'literal' for the sum to the end of the raster, as in the paper's listing; 'between' for the gates
            from the earlier of the two patches up to, but without, the later one: p_ij = |S_ij - S_ii| with S the sum
            to the end. The sum of the paper's equation also has the gate of i.

    Raises:
        ValueError: If a value is none of these.
    """
    gate_init = 1.0
    adds = 'L * npos * d'
    on_other_grids = 'positions are scaled to the trained grid'
    skips_dropped = True
    paper = 'https://arxiv.org/abs/2405.18719'

    def __init__(
            self,
            *,
            npos: int = 64,
            bias_scale: str = 'head_dim',
            direction: str = 'literal',
            device=None,
            dtype=None,
            **host,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        if not is_integer(npos, 2):
            raise ValueError(f"'cope' needs npos to be an integer of 2 or more, got {npos!r}.")
        self._require_choice('bias_scale', bias_scale, ('head_dim', 'one'))
        self._require_choice('direction', direction, ('literal', 'between'))
        self.bias_scale = 1.0 if bias_scale == 'one' else self.head_dim ** -0.5
        self.direction = direction
        self.table = nn.Parameter(torch.empty(npos, self.head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table)

    def content_bias(self, q: torch.Tensor, k: torch.Tensor, grid: Grid) -> torch.Tensor:
        ref = self.rescaling(grid)
        return self.bias_scale * ops.contextual_bias(
            q, k, self.table, grid,
            gate_scale=self.head_dim ** -0.5,
            between=self.direction == 'between',
            ref_num_patches=ref and ref[0] * ref[1],
        )
