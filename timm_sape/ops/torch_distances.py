"""Attention with a bias of distances between codes, without storing anything N x N: a block of queries at a time.

The squared distance of two codes is the product of two longer vectors, [-2 w_i, s_i, 1] and [w_j, 1, s_j] with
s = |w|^2, so one matrix product gives a block of them. Small distances, such as those between patches of one region,
lose their digits in it. So squares below a small part of s_i are computed once more, from the difference. On CUDA all
are computed from products in float64.

The backward pass computes the blocks again. With G the gradient of a distance D and R = G / D, the gradient of the
codes is rowsum(R + R^T) w - (R + R^T) w. Where a distance is small, R is large and the two terms nearly cancel. Such
pairs are taken out and summed as r * (w_i - w_j). If there are many, everything is computed in float64 instead, unless
the codes are float64 already. Other devices than the CPU do not count the pairs, and treat them as many; there the
gradients of float64 codes that are nearly equal lose digits.

The gain's gradient is the sum of G D, whose terms have both signs. G carries the rounding error of the logits. With a
head dim of 256 logits reach hundreds, and in float32 that gradient can be off by 1e-3 where it is 1. Like the
reference's, its error is at most 4 eps max(1, |logit|) sum(p (|dp| + |delta|) D), where p are the probabilities, dp
their gradients, and delta = sum(p dp) over a row.
"""
import math
from typing import Iterator, NamedTuple, Tuple, Union

import torch
import torch.nn.functional as F

from .chunks import chunk_size, chunks
from .distances import (
    ATTENTION_ARGUMENTS,
    ATTENTION_GRADIENTS,
    distance_attention,
    empty_gradients,
    empty_out,
    register_flops,
    register_gradients,
)
from .precision import upcast, without_autocast
from .reference import cdist_is_slow, squares_by_products

__all__ = ['torch_distance_attention']

NEAR = 2 ** -6  # squared distances below this part of s are computed from differences


class _Codes(NamedTuple):
    """Codes in the form that the blocks need: `[2, B, h, N, ...]`, first all along x, then all along y.

    Those of n heads are `[2n, N, ...]`, first all along x as well. Codes of prefix tokens are zero.
    """
    raw: torch.Tensor  # for differences, which centred codes would round
    left: torch.Tensor  # -2 w, s, 1 with w the centred codes
    right: torch.Tensor  # w, 1, s
    near: torch.Tensor  # squared distances up to this are computed from differences, `[..., N, 1]`
    noise: torch.Tensor  # squared distances up to this are 0, `[..., N, 1]`

    def of(self, chunk: Tuple[slice, slice]) -> '_Codes':
        """Codes of some heads."""
        return _Codes(*(t[(slice(None), *chunk)].flatten(0, 2) for t in self))


# Pairs at small distances in a block: None, 'many', or for each its index in `[2n, R, N]`, and the indices of its two
# tokens in `[2n, N]`; all are indices into flattened tensors.
_Near = Union[None, str, Tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _prepare(codes_x: torch.Tensor, codes_y: torch.Tensor, num_tokens: int) -> _Codes:
    """From codes `[B, h, N-P, C]`. The narrower ones are padded with zeros, which changes no distance."""
    width, num_prefix_tokens = max(codes_x.shape[-1], codes_y.shape[-1]), num_tokens - codes_x.shape[-2]
    codes = torch.stack([F.pad(c, (0, width - c.shape[-1], num_prefix_tokens, 0)) for c in (codes_x, codes_y)])
    w = codes - codes[..., num_prefix_tokens:, :].mean(dim=-2, keepdim=True)  # so that products lose fewer digits
    w[..., :num_prefix_tokens, :] = 0
    s = w.square().sum(dim=-1, keepdim=True)
    finfo = torch.finfo(codes.dtype)
    noise = (64 * finfo.eps * codes).square().sum(dim=-1, keepdim=True)
    noise.clamp_(max=finfo.max)  # a distance of inf is no noise
    near = torch.maximum(NEAR * s, 4 * noise)
    one, fill = torch.ones_like(s), w.new_zeros(*w.shape[:-1], -(width + 2) % 4)  # products of such widths are faster
    one[..., :num_prefix_tokens, :] = 0
    right = torch.cat([w, one, s, fill], dim=-1)
    return _Codes(codes, torch.cat([w.mul_(-2), s, one, fill], dim=-1), right, near, noise)


class _Workspace:
    """Memory of one call for its blocks of pairs.

    If each block allocated its own, the C library would return it to the system and request it again, block by block.
    That takes longer than the computation.
    """

    def __init__(self, count: int):
        self.count = count
        self.memory = None

    def __call__(self, codes: _Codes, rows: slice) -> Tuple[torch.Tensor, ...]:
        """One `[2n, R, N]` and `count` times `[n, R, N]`; the first block is the largest."""
        heads, num_tokens, _ = codes.raw.shape
        shape = 2 + self.count, heads // 2, rows.stop - rows.start, num_tokens
        if self.memory is None:
            self.memory = codes.raw.new_empty(math.prod(shape))
        memory = self.memory[:math.prod(shape)].view(shape)
        return memory[:2].flatten(0, 1), *memory[2:]


def _squares(codes: _Codes, rows: slice, num_prefix_tokens: int, squares: torch.Tensor) -> _Near:
    """Write the squared distances from the tokens of a block to all tokens into `[2n, R, N]`; return the small ones.

    They are 0 where a prefix token takes part.
    """
    if codes.raw.device.type != 'cpu':  # a GPU would have to wait until the pairs are counted
        _precise_squares(codes, rows, num_prefix_tokens, squares)
        return 'many'
    torch.bmm(codes.left[:, rows], codes.right.transpose(1, 2), out=squares)
    _fill_unbiased(squares, rows, num_prefix_tokens, float('inf'))
    limit, near = codes.near[:, rows].flatten(), None
    lines = (squares.amin(-1).flatten() <= limit).nonzero().squeeze(-1)  # few have small distances
    if len(lines):
        w, noise = codes.raw.flatten(0, 1), codes.noise.flatten()
        _, num_rows, num_tokens = squares.shape
        small = squares.view(-1, num_tokens).index_select(0, lines) <= limit[lines].unsqueeze(-1)
        line, column = small.nonzero().unbind(-1)
        if len(line) * w.shape[-1] > squares.numel() and w.dtype != torch.float64:
            _precise_squares(codes, rows, num_prefix_tokens, squares)
            return 'many'
        row = lines[line]
        where, head = row * num_tokens + column, row // num_rows
        i, j = row + head * (num_tokens - num_rows) + rows.start, column + head * num_tokens
        near = where, i, j
        square = (w.index_select(0, i) - w.index_select(0, j)).square_().sum(dim=-1)
        square.masked_fill_(square <= torch.maximum(noise[i], noise[j]), 0)
        squares.view(-1).index_copy_(0, where, square)
    _clear_unbiased(codes, rows, num_prefix_tokens, squares)
    return near


def _fill_unbiased(pairs: torch.Tensor, rows: slice, num_prefix_tokens: int, value: float) -> None:
    """Write a value to the pairs that have no bias: those with a prefix token, and a token with itself."""
    pairs[:, :max(num_prefix_tokens - rows.start, 0)].fill_(value)
    pairs[:, :, :num_prefix_tokens].fill_(value)
    pairs.diagonal(rows.start, 1, 2).fill_(value)


def _clear_unbiased(codes: _Codes, rows: slice, num_prefix_tokens: int, squares: torch.Tensor) -> None:
    """Make the squared distances of these pairs 0. That of a code to itself is NaN if the code is not finite."""
    _fill_unbiased(squares, rows, num_prefix_tokens, 0)
    squares.diagonal(rows.start, 1, 2).copy_((0 * codes.raw[:, rows]).sum(dim=-1))


def _precise_squares(codes: _Codes, rows: slice, num_prefix_tokens: int, squares: torch.Tensor) -> None:
    w, noise = codes.raw, codes.noise
    if cdist_is_slow(w):
        squares.copy_(squares_by_products(w[:, rows], w))
    else:
        torch.square(torch.cdist(w[:, rows], w, compute_mode='donot_use_mm_for_euclid_dist'), out=squares)
    squares.masked_fill_(squares <= torch.maximum(noise[:, rows], noise.transpose(1, 2)), 0)
    _clear_unbiased(codes, rows, num_prefix_tokens, squares)


def _zeros_to_inf(distances: torch.Tensor, rows: slice, num_prefix_tokens: int, near: _Near) -> torch.Tensor:
    """Make G / D zero where the distance D is zero."""
    if near == 'many':
        return distances.masked_fill_(distances == 0, float('inf'))
    _fill_unbiased(distances, rows, num_prefix_tokens, float('inf'))
    if near is not None:
        flat, where = distances.view(-1), near[0]
        flat.index_fill_(0, where[flat[where] == 0], float('inf'))
    return distances


def _rows(num_tokens: int, device: torch.device) -> Iterator[slice]:
    """Blocks of tokens of one head, or of several small heads."""
    rows = min(num_tokens, max(16, chunk_size(device) // num_tokens))
    for row in range(0, num_tokens, rows):
        yield slice(row, min(row + rows, num_tokens))


_FORWARD = f'({ATTENTION_ARGUMENTS}) -> Tensor'
_BACKWARD = f'(Tensor grad, {ATTENTION_ARGUMENTS}) -> {ATTENTION_GRADIENTS}'


@torch.library.custom_op('timm_sape::distance_attention', mutates_args=(), schema=_FORWARD)
@without_autocast
def torch_distance_attention(q, k, v, codes_x, codes_y, bias_scale, scale):
    batch, num_heads, num_tokens, _ = q.shape
    num_prefix_tokens = num_tokens - codes_x.shape[-2]
    out = empty_out(v)
    gain = bias_scale.to(codes_x.dtype).expand(batch, num_heads)
    codes = _prepare(codes_x, codes_y, num_tokens)
    workspace = _Workspace(0)
    for chunk in chunks(batch, num_heads, num_tokens ** 2, q.device):
        qs, ks, vs = (upcast(t[chunk])[0] for t in (q, k, v))  # [b, n, N, d]
        heads = codes.of(chunk)
        gains = gain[chunk][..., None, None]
        for rows in _rows(num_tokens, q.device):
            squares, = workspace(heads, rows)
            _squares(heads, rows, num_prefix_tokens, squares)
            dx, dy = squares.sqrt_().chunk(2)
            bias = dx.add_(dy).view(*gains.shape[:2], *dx.shape[1:]).mul_(gains)
            out[chunk][:, :, rows] = F.scaled_dot_product_attention(
                qs[:, :, rows], ks, vs, attn_mask=bias, scale=scale)
    return out


def _add_near_pairs(grad: torch.Tensor, r: torch.Tensor, w: torch.Tensor, near: _Near) -> None:
    """Add r * (w_i - w_j) of the near pairs to `[2n, N, C]`, and set r to 0 for them in a block of R, `[2n, R, N]`."""
    where, i, j = near
    grad, r, w = grad.flatten(0, 1), r.view(-1), w.flatten(0, 1)
    pull = w.index_select(0, i).sub_(w.index_select(0, j)).mul_(r[where].unsqueeze(-1)).to(grad.dtype)
    grad.index_put_((i,), pull, accumulate=True).index_put_((j,), -pull, accumulate=True)
    r.index_fill_(0, where, 0)


def _add_gradient(grad: torch.Tensor, r: torch.Tensor, w_and_one: torch.Tensor, rows: slice) -> None:
    """Add rowsum(R + R^T) w - (R + R^T) w to `[2n, C, N]`, for a block of R, `[2n, R, N]`, and `[2n, N, C + 1]`."""
    w_and_one = w_and_one.mT
    w, sizes = w_and_one[:, :-1], [grad.shape[1], 1]  # R times one is the row sum
    rw, row_sum = torch.bmm(w_and_one, r.mT).split(sizes, dim=1)
    grad[:, :, rows] += row_sum * w[:, :, rows] - rw
    rw, column_sum = torch.bmm(w_and_one[:, :, rows], r).split(sizes, dim=1)
    grad += column_sum * w - rw


@torch.library.custom_op('timm_sape::distance_attention_backward', mutates_args=(), schema=_BACKWARD)
@without_autocast
def torch_distance_attention_backward(grad, q, k, v, codes_x, codes_y, bias_scale, scale):
    batch, num_heads, num_tokens, _ = q.shape
    num_prefix_tokens = num_tokens - codes_x.shape[-2]
    gain = bias_scale.to(codes_x.dtype).expand(batch, num_heads)
    grad = grad.contiguous()
    grads = empty_gradients(q, k, v, codes_x, codes_y)
    grad_gain = torch.empty_like(gain, memory_format=torch.contiguous_format)
    codes = _prepare(codes_x, codes_y, num_tokens)
    widths = codes_x.shape[-1], codes_y.shape[-1]
    least = 1e7 * torch.finfo(codes_x.dtype).tiny
    workspace = _Workspace(3)
    for chunk in chunks(batch, num_heads, num_tokens ** 2, q.device):
        gs, qs, ks, vs = (upcast(t[chunk])[0].flatten(0, 1) for t in (grad, q, k, v))  # [n, N, d]
        heads = codes.of(chunk)
        w_and_one = heads.right[..., :max(widths) + 1]
        precise = near_grad = None
        gains = gain[chunk].reshape(-1, 1, 1)
        grad_gains, grad_q = gains.new_zeros(len(gains)), torch.empty_like(qs)
        # transposed, `[n, d, N]` and `[2n, C, N]`: products are faster then
        grad_k, grad_v, grad_w = (t.new_zeros(t.mT.shape) for t in (ks, vs, heads.raw))
        for rows in _rows(num_tokens, q.device):
            distances, logits, p, grad_logits = workspace(heads, rows)
            near = _squares(heads, rows, num_prefix_tokens, distances)
            dx, dy = distances.sqrt_().chunk(2)
            torch.add(dx, dy, out=logits).mul_(gains).baddbmm_(qs[:, rows], ks.mT, alpha=scale)
            torch.softmax(logits, dim=-1, out=p)
            if p.device.type == 'cpu':  # where products of so small numbers would be subnormal, and many times slower
                F.threshold_(p, least, 0.0)
            g = gs[:, rows]
            grad_v.baddbmm_(g.mT, p)
            grad_p = torch.bmm(g, vs.mT, out=logits)
            torch._softmax_backward_data(grad_p, p, -1, p.dtype, grad_input=grad_logits)
            grad_q[:, rows] = torch.bmm(grad_logits, ks)
            grad_k.baddbmm_(qs[:, rows].mT, grad_logits)
            # Not from the gradient of the codes, although distances are proportional to these: that loses digits where
            # distances are small.
            for distance in (dx, dy):
                grad_gains += torch.linalg.vecdot(grad_logits.flatten(1), distance.flatten(1))
            divisors = _zeros_to_inf(distances, rows, num_prefix_tokens, near).unflatten(0, (2, -1))
            r = torch.div(grad_logits, divisors, out=divisors).flatten(0, 1)
            if near == 'many' and r.device.type != 'mps':  # which has no float64
                if precise is None:
                    precise = F.pad(heads.raw.double(), (0, 1), value=1)
                _add_gradient(grad_w, r.double(), precise, rows)
            else:
                if isinstance(near, tuple):
                    if near_grad is None:  # index_put_ sums float64 in order, float32 by atomics in any order
                        near_grad = torch.zeros_like(heads.raw, dtype=torch.float64)
                    _add_near_pairs(near_grad, r, heads.raw, near)
                _add_gradient(grad_w, r, w_and_one, rows)
        if near_grad is not None:
            grad_w += near_grad.mT
        grad_w = gains * grad_w.mT[:, num_prefix_tokens:].unflatten(0, (2, -1))
        found = grad_q.mul_(scale), grad_k.mT.mul_(scale), grad_v.mT, *(g[..., :n] for g, n in zip(grad_w, widths))
        for whole, part in zip((*grads, grad_gain), (*found, grad_gains)):
            whole = whole[chunk]
            whole.copy_(part.view(whole.shape))
    return *grads, grad_gain.sum_to_size(bias_scale.shape).to(bias_scale.dtype)


@torch_distance_attention.register_fake
def _(q, k, v, codes_x, codes_y, bias_scale, scale):
    return empty_out(v)


register_gradients(
    torch_distance_attention, torch_distance_attention_backward, distance_attention, needs_output=False)
register_flops(torch_distance_attention, torch_distance_attention_backward)
