"""SaPE2 with squared distances, so that any attention kernel computes it: an extension of ours, not in the paper.

The codes are SaPE2's (see `sape2`). Their squared distance is a product, |c_i|^2 + |c_n|^2 - 2 c_i.c_n, and so the bias
is W + H + 2 further channels of q and k: no N x N tensor is made for it, and attention stays fused. 2-D as SaPE2 is,
and blind to what SaPE2 is blind to, hence `ape+sape2sq_k`. Being squared, small distances weigh less, large ones more.

Cost: the codes, N x W and N x H, and attention with a head dim of d + W + H + 2, or + 4 in half precision.
"""
from typing import Tuple

import torch

from .. import ops
from ..grid import Grid
from .registry import register_encoding
from .sape2 import SemanticAwareEncoding

LEAST_GAIN = 1e-3  # smaller ones multiply the channels, which costs them digits that no longer matter


class SquaredSemanticAwareEncoding(SemanticAwareEncoding):
    """Logits get bias_scale * |c_i - c_n|^2 between patches, summed over both axes, with c the codes of SaPE2.

    Keywords, tables, presets and the rule for other grids are SaPE2's: there codes are scaled by sqrt(W0/W), with which
    the mean of squared distances over a row stays what it was, too. Everything is computed in float32 at least, but for
    the product itself, which is the attention's own. Three things keep the difference of large products right in half
    precision: codes are centred over the patches; the norms are those of the rounded codes, so that what is computed is
    the distance between these, with no error where it is small; and norms have two channels, for what rounding leaves.
    """
    family = 'sape2sq'

    def channels(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            x: torch.Tensor,
            grid: Grid,
            scale: float,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        with ops.no_autocast(q):
            codes = torch.cat(self.codes(q, k, grid), dim=-1)  # [B, h, N-P, W+H]
            codes = codes - codes.mean(dim=-2, keepdim=True)  # changes no distance
            gain = codes.new_full((1,), self.bias_scale) if self.gain is None else self.gain.to(codes.dtype)
            gain = self.gated(gain).view(-1, 1, 1)  # [h|1, 1, 1]
            # Both sides carry the root of its size, so that both are rounded alike. As a factor of one side it is 1 or
            # -1, and has its gradient there.
            size = gain.detach().abs().clamp(min=LEAST_GAIN)
            codes = _rounded(codes * (2 * size / scale).sqrt(), q.dtype)
            norms = codes.square().sum(dim=-1, keepdim=True) / 2
            high = _rounded(norms, q.dtype)
            norms = high if q.dtype == norms.dtype else torch.cat([high, norms - high], dim=-1)
            ones = torch.ones_like(norms)
            a = gain / size * torch.cat([-codes, norms, ones], dim=-1)  # [B, h, N-P, C]
            b = torch.cat([codes, ones, norms], dim=-1)  # [B, h, N-P, C]
        return grid.pad_tokens(a.to(q.dtype)), grid.pad_tokens(b.to(q.dtype))


@register_encoding('sape2sq_q')
class SquaredSemanticAwareEncodingQ(SquaredSemanticAwareEncoding):
    """SaPE2(Q) with squared distances."""
    mode = 'q'


@register_encoding('sape2sq_k')
class SquaredSemanticAwareEncodingK(SquaredSemanticAwareEncoding):
    """SaPE2(K) with squared distances."""
    mode = 'k'


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).to(x.dtype)
