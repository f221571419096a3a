"""iRPE (Wu et al., 'Rethinking and Improving Relative Position Encoding for Vision Transformer', ICCV 2021).

Offsets are sorted into buckets: each small offset has its own, and the larger offsets are, the more of them share one.
Each bucket has a learned vector. The product of this vector with the query or the key of a pair is a bias, and the
vector can be added to the value. It is 2-D in that offsets are pairs (dy, dx): by default each axis has its buckets,
and a vector belongs to a pair of buckets. 'On keys' means that the vector is added to the key, so that it meets the
query; in `sape2_k` it is the other way, and the table is multiplied by the key.

It costs one product of the tokens with the table and one look-up of N x N numbers per head, and for values one sum of N
x N numbers by bucket. The vectors are never expanded to all N x N pairs.
"""
import math
import operator
from functools import reduce
from typing import List, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from .. import ops
from ..checks import is_number
from ..grid import Grid
from .base import PositionEncoding
from .registry import register_encoding

METHODS = ('product', 'euclidean', 'quantized', 'cross')


class ImageRelativePositionEncoding(PositionEncoding):
    """A table r has one vector per bucket, and I(i, j) is the bucket of the offset p_i - p_j.

    - on keys, logits get (q_i / sqrt(d)) . r_k[I(i, j)];
    - on queries, logits get (k_j / sqrt(d)) . r_q[I(j, i)], the bucket of the opposite offset, because the published
      code looks up as for keys and then transposes;
    - on values, the output gets sum_j attn_ij r_v[I(i, j)].

    A function g maps distances to buckets: g(x) = x for |x| up to alpha, and beyond it g(x) = sign(x) *
    floor(min(round(alpha + ln(|x| / alpha) / ln(gamma / alpha) * (beta - alpha)), beta)), where alpha, beta, gamma are
    1, 2, 8 times `ratio`. With ratio=1.9 the distances 0, 1, 2, 3, 4 map to 0, 1, 2, 2, 3 and all larger ones to 3,
    which makes 7 * 7 buckets of pairs. All pairs with a prefix token share one further bucket, so they do have a bias.
    Tables are initialized to zero and get no weight decay. Computed in at least float32.

    In two points this follows the published code, not the paper: 'quantized' maps squared distances to buckets instead
    of their ranks, which would depend on the grid, and `mode='bias'` adds its numbers to the logits unscaled.

    Args:
        method: What g is applied to. 'product': dy and dx, with a bucket for each pair of results. 'euclidean': the
            distance, rounded. 'quantized': the squared distance. 'cross': dy and dx, with a table for each; the two
            vectors are added.
        mode: 'contextual', as above, or 'bias': a number for each bucket instead of a vector, independent of q and k.
        ratio: 0.5 to 1000. The larger it is, the more buckets there are: distances of up to `ratio` patches each have
            their own.
        shared_heads: True: one table for all heads. False: one for each head.

    Raises:
        ValueError: If a value is none of these, or the mode is 'bias' for an encoding that acts on values.
    """
    on: str
    relative = True
    gate_init = 1.0
    prefix_rule = False
    on_other_grids = 'further offsets share the last buckets'
    skips_dropped = True
    paper = 'https://arxiv.org/abs/2107.14222'

    def __init__(
            self,
            *,
            method: str = 'product',
            mode: str = 'contextual',
            ratio: float = 1.9,
            shared_heads: bool = True,
            device=None,
            dtype=None,
            **host,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        name = self.name
        self._require_choice('method', method, METHODS)
        self._require_choice('mode', mode, ('contextual', 'bias'))
        if not is_number(ratio) or not 0.5 <= ratio <= 1000:
            raise ValueError(
                f'{name!r}: ratio must be a number from 0.5 (less would leave a single bucket) to 1000, got {ratio!r}.')
        if not isinstance(shared_heads, bool):
            raise ValueError(f'{name!r}: shared_heads must be True or False, got {shared_heads!r}.')
        if mode == 'bias' and 'v' in self.on:
            raise ValueError(f"{name!r}: values have no mode='bias'. Use 'irpe_qk', or leave mode out.")
        self.method = method
        self.mode = mode
        self.exact = math.floor(ratio)
        self.thresholds = _thresholds(ratio)
        last = len(self.thresholds)
        self.num_buckets = {
            'product': (2 * last + 1) ** 2 + 1,
            'euclidean': last + 1 + 1,
            'quantized': last + 1 + 1,
            'cross': 2 * (2 * last + 1 + 1),
        }[method]
        shape = () if shared_heads else (self.num_heads,)
        shape += (self.num_buckets,) if mode == 'bias' else (self.num_buckets, self.head_dim)
        for role in self.on:
            setattr(self, f'table_{role}', nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for role in self.on:
            nn.init.zeros_(getattr(self, f'table_{role}'))

    def content_bias(self, q: torch.Tensor, k: torch.Tensor, grid: Grid) -> torch.Tensor:
        buckets = self._buckets(grid, q.device)
        biases = []
        with ops.no_autocast(q):
            if 'k' in self.on:
                biases.append(self._look_up(q, self.table_k, buckets))
            if 'q' in self.on:
                biases.append(self._look_up(k, self.table_q, buckets).transpose(-2, -1))
            return reduce(operator.add, biases)  # [B, h, N, N]

    def _look_up(self, x: torch.Tensor, table: torch.Tensor, buckets: List[torch.Tensor]) -> torch.Tensor:
        """For all pairs, the product of token i with the vector of bucket I(i, j).

        Args:
            x: Queries or keys, `[B, h, N, d]`.
            table: `[(h,) buckets, d]`; in mode 'bias' `[(h,) buckets]`.
            buckets: As `_buckets` returns them.

        Returns:
            `[B, h, N, N]`; in mode 'bias' `[B|1, h|1, N, N]`.
        """
        x, table = ops.upcast(x, table)
        if self.mode == 'bias':
            table = table.view(-1, self.num_buckets)  # [h|1, buckets]
            # index_select, because the gradient of table[:, bucket] is slower
            found = [
                table.index_select(1, bucket.flatten()).unflatten(1, bucket.shape).squeeze(2).transpose(0, 1)
                for bucket in buckets]
        else:
            z = (x * self.head_dim ** -0.5) @ table.transpose(-2, -1)  # [B, h, N, buckets]
            found = [z.gather(-1, bucket.expand(*z.shape[:-1], -1)) for bucket in buckets]
        return reduce(operator.add, found)

    def _buckets(self, grid: Grid, device: torch.device) -> List[torch.Tensor]:
        """I(i, j) of all pairs of tokens, as row indices of the table; for 'cross' one tensor for dy and one for dx.

        Returns:
            int64 `[B|1, 1, N, N]` each.
        """
        if grid.keep_indices is None:
            y, x = (torch.arange(size, device=device) for size in grid.size)
            dy = (y[:, None] - y)[:, None, :, None]  # [H, 1, H, 1]
            dx = (x[:, None] - x)[None, :, None, :]  # [1, W, 1, W]
        else:
            dy, dx = (-offset for offset in grid.kept_offsets())  # [B, K, K]
        last = len(self.thresholds)
        width = 2 * last + 1  # number of results of g for signed distances
        end = self.num_buckets - 1
        if self.method == 'product':
            maps = [((self._g(dy) + last) * width + self._g(dx) + last, end)]
        elif self.method == 'euclidean':
            maps = [(self._g((dy.square() + dx.square()).float().sqrt().round().long()), end)]
        elif self.method == 'quantized':
            maps = [(self._g(dy.square() + dx.square()), end)]
        else:
            maps = [(self._g(dy) + last, width), (self._g(dx) + last + width + 1, end)]
        p, num_patches = grid.num_prefix_tokens, grid.num_patches
        buckets = []
        for bucket, prefix in maps:
            if grid.keep_indices is None:
                bucket = bucket.expand(*grid.size, *grid.size).reshape(1, num_patches, num_patches)
            buckets.append(F.pad(bucket, (p, 0, p, 0), value=prefix)[:, None])
        return buckets

    def _g(self, distance: torch.Tensor) -> torch.Tensor:
        """g for integers. It only compares integers, so no rounding error can move a distance to the next bucket."""
        size = distance.abs()
        bucket = size.clamp(max=self.exact)
        for threshold in self.thresholds[self.exact:]:
            bucket = bucket + (size >= threshold)
        return distance.sign() * bucket


@register_encoding('irpe_k')
class ImageRelativePositionEncodingK(ImageRelativePositionEncoding):
    """Image relative, on keys (iRPE)."""
    on = 'k'
    adds = 'L * 50 * d'


@register_encoding('irpe_q')
class ImageRelativePositionEncodingQ(ImageRelativePositionEncoding):
    """Image relative, on queries (iRPE)."""
    on = 'q'
    adds = 'L * 50 * d'


@register_encoding('irpe_qk')
class ImageRelativePositionEncodingQK(ImageRelativePositionEncoding):
    """Image relative, on queries and keys (iRPE)."""
    on = 'qk'
    adds = 'L * 100 * d'


@register_encoding('irpe_qkv')
class ImageRelativePositionEncodingQKV(ImageRelativePositionEncoding):
    """Image relative, on queries, keys and values (iRPE).

    The term for values takes the probabilities, so there is no fused attention.
    """
    on = 'qkv'
    adds = 'L * 150 * d'

    def values(self, attn: torch.Tensor, grid: Grid) -> torch.Tensor:
        with ops.no_autocast(attn):
            attn, table = ops.upcast(attn, self.table_v)
            sums = attn.new_zeros(*attn.shape[:-1], self.num_buckets)  # [B, h, N, buckets]
            for bucket in self._buckets(grid, attn.device):
                sums = sums.scatter_add(-1, bucket.expand(*attn.shape[:-1], -1), attn)
            return sums @ table  # [B, h, N, d]


def _thresholds(ratio: float) -> Tuple[int, ...]:
    """The smallest distance in each of the buckets 1, 2, ..., floor(beta)."""
    alpha, beta, gamma = ratio, 2 * ratio, 8 * ratio

    def g(x: int) -> int:
        if x <= alpha:
            return x
        return math.floor(min(round(alpha + math.log(x / alpha) / math.log(gamma / alpha) * (beta - alpha)), beta))

    thresholds, x = [], 0
    for bucket in range(1, math.floor(beta) + 1):
        while g(x) < bucket:
            x += 1
        thresholds.append(x)
    return tuple(thresholds)
