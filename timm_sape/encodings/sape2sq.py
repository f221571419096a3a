"""SaPE2 with squared distances, so that any attention kernel can compute it. Our extension, not in the paper.

The codes are SaPE2's (see `sape2_k`). Their squared distance is |c_i|^2 + |c_n|^2 - 2 c_i.c_n, which is a product of
vectors, so the bias takes W + H + 2 further channels of q and k. No N x N tensor is made and attention stays fused. It
has the 2-D form and the blind spots of SaPE2, so combine it with another encoding, such as `ape`. Squaring gives less
weight to small distances and more to large ones.

Cost: the codes, N x W and N x H, and attention with a head dim of d + W + H + 2, or d + W + H + 4 in half precision,
rounded up to a multiple of 8.
"""
from typing import Tuple

import torch

from .. import ops
from ..grid import Grid
from .registry import register_encoding
from .sape2 import SemanticAwareEncoding

# Gains from this size on are split evenly between q and k. Smaller ones multiply the channels of q, which rounds the
# bias more, but so small a bias hardly matters.
MIN_GAIN = 1e-3


class SquaredSemanticAwareEncoding(SemanticAwareEncoding):
    """Logits between patches get bias_scale * |c_i - c_n|^2, summed over both axes, where c are the codes of SaPE2.

    Keywords, tables, presets and the rule for other grids are SaPE2's. On another grid that rule scales codes by
    sqrt(W0/W), which keeps the mean of squared distances over a row.

    Everything is computed in at least float32, except the product itself, which is part of attention. It is a small
    difference of large terms. Three things keep it accurate in half precision. Codes are centred over the patches. The
    norms are computed from the rounded codes, so the result is the exact distance between these, which has no error
    where distances are zero. And each norm has two channels, the second for what rounding leaves of it.

    Gradients are less accurate than outputs. In bfloat16, on a grid of 14x14, that of q is off by 2 % if the entries of
    the tables have a standard deviation of .1, and by 14 % at .3, where biases reach hundreds (`sape2_k`: .2 %).
    """

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
            gain = self.gated(self._gain(codes)).view(-1, 1, 1)  # [h|1, 1, 1]
            # Both sides are multiplied by the square root of the gain's size, so that both are rounded alike. The side
            # of q has gain / size, which is 1 or -1 unless the gain is tiny, and carries the gradient of the gain.
            size = gain.detach().abs().clamp(min=MIN_GAIN)
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
