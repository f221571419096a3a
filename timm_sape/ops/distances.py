"""Attention with a bias of distances between codes, without storing anything N x N: a block of queries at a time.

The squared distance of two codes is a product of two longer vectors, [-2 w_i, s_i, 1] and [w_j, 1, s_j] with s = |w|^2,
so one matrix product gives a block of them. Of small distances, those between patches of one region, it loses the
digits: what comes out as a small part of s_i is computed once more, from the difference.

The backward pass computes the blocks anew. With G the gradient of a distance D and R = G / D, that of the codes is
rowsum(R + R^T) w - (R + R^T) w. Small distances make R large and what is left of the two terms small: such pairs are
taken out, and summed as r * (w_i - w_j), or, where they are many, all is in float64.
"""
from typing import Iterator, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F

from ..grid import Grid
from .attention import attend, merge_masks
from .chunks import chunk_size, chunks
from .contextual import pairwise_distance, without_autocast

__all__ = ['distance_attention', 'distance_bias']

NARROW = 4  # codes of so few channels lie so close that some distance is always small
NEAR = 2 ** -6  # squared distances below this part of s are computed from differences


class _Codes(NamedTuple):
    """Codes of one axis in the form that the blocks want them, `[n, N, ...]`; those of prefix tokens are zeros."""
    centred: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    near: torch.Tensor  # squared distances below this want a second look, `[n, N, 1]`
    noise: torch.Tensor  # squared distances up to this are 0, `[n, N, 1]`; infinite for prefix tokens


_Near = Union[None, str, Tuple[torch.Tensor, ...]]  # no entries, 'many', or where in `[n, R, N]`


def _prepare(codes: torch.Tensor, num_tokens: int) -> _Codes:
    """Of codes `[n, N-P, C]`."""
    w = codes - codes.mean(dim=-2, keepdim=True)  # changes no distance, saves digits
    s = w.square().sum(dim=-1, keepdim=True)
    noise = (64 * torch.finfo(codes.dtype).eps) ** 2 * codes.square().sum(dim=-1, keepdim=True)
    one, fill = torch.ones_like(s), w.new_zeros(*w.shape[:-1], -(w.shape[-1] + 2) % 4)  # widths that are quick
    prefix = (0, 0, num_tokens - w.shape[-2], 0)
    return _Codes(
        F.pad(w, prefix),
        F.pad(torch.cat([-2 * w, s, one, fill], dim=-1), prefix),
        F.pad(torch.cat([w, one, s, fill], dim=-1), prefix),
        F.pad(torch.maximum(NEAR * s, 4 * noise), prefix),
        F.pad(noise, prefix, value=float('inf')),
    )


def _squares(codes: _Codes, rows: slice, num_prefix_tokens: int) -> Tuple[torch.Tensor, _Near]:
    """Squared distances from the tokens of a block to all, 0 where a prefix token takes part, `[n, R, N]`; and which of
    them are small."""
    w = codes.centred
    if w.device.type != 'cpu':  # a look at what comes out would make a GPU wait
        return _squares_by_difference(codes, rows), 'many' if w.shape[-1] <= NARROW else None
    squares = torch.bmm(codes.left[:, rows], codes.right.transpose(1, 2))
    diagonal = squares.diagonal(rows.start, 1, 2)
    diagonal.fill_(float('inf'))
    limit, near = codes.near[:, rows], None
    if (squares[:, :, num_prefix_tokens:].amin(-1, keepdim=True) < limit).any():
        near = head, row, column = (squares < limit).nonzero(as_tuple=True)
        if len(head) * w.shape[-1] > squares.numel():
            return _squares_by_difference(codes, rows), 'many'
        i, j = (head, row + rows.start), (head, column)
        square = (w[i] - w[j]).square_().sum(dim=-1)
        noise = codes.noise[..., 0]
        squares[near] = square.masked_fill_(square <= torch.maximum(noise[i], noise[j]), 0)
    diagonal.zero_()
    return squares, near


def _squares_by_difference(codes: _Codes, rows: slice) -> torch.Tensor:
    w, noise = codes.centred, codes.noise
    squares = torch.cdist(w[:, rows], w, compute_mode='donot_use_mm_for_euclid_dist').square_()
    return squares.masked_fill_(squares <= torch.maximum(noise[:, rows], noise.transpose(1, 2)), 0)


def _rows(num_tokens: int) -> Iterator[slice]:
    """Blocks of the tokens of one head, or of few small heads."""
    rows = min(num_tokens, max(16, chunk_size() // num_tokens))
    for row in range(0, num_tokens, rows):
        yield slice(row, min(row + rows, num_tokens))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@torch.library.custom_op('timm_sape::distance_attention', mutates_args=())
@without_autocast
def _distance_attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        codes_x: torch.Tensor,
        codes_y: torch.Tensor,
        bias_scale: torch.Tensor,
        scale: float,
) -> torch.Tensor:
    batch, num_heads, num_tokens, _ = q.shape
    num_prefix_tokens = num_tokens - codes_x.shape[-2]
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    gain = bias_scale.to(codes_x.dtype).expand(batch, num_heads)
    codes = [_prepare(c, num_tokens) for c in (codes_x, codes_y)]
    for chunk in chunks(batch, num_heads, num_tokens ** 2):
        qs, ks, vs = (_wide(t[chunk]) for t in (q, k, v))  # [b, n, N, d]
        parts = [_Codes(*(t[chunk].flatten(0, 1) for t in c)) for c in codes]
        gains = gain[chunk][..., None, None]
        for rows in _rows(num_tokens):
            dx, dy = (_squares(c, rows, num_prefix_tokens)[0].sqrt_() for c in parts)
            bias = dx.add_(dy).view(*gains.shape[:2], *dx.shape[1:]).mul_(gains)
            out[chunk][:, :, rows] = F.scaled_dot_product_attention(
                qs[:, :, rows], ks, vs, attn_mask=bias, scale=scale)
    return out


@_distance_attention.register_fake
def _(q, k, v, codes_x, codes_y, bias_scale, scale):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.custom_op('timm_sape::distance_attention_backward', mutates_args=())
@without_autocast
def _distance_attention_backward(
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        codes_x: torch.Tensor,
        codes_y: torch.Tensor,
        bias_scale: torch.Tensor,
        scale: float,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, num_heads, num_tokens, _ = q.shape
    num_prefix_tokens = num_tokens - codes_x.shape[-2]
    gain = bias_scale.to(codes_x.dtype).expand(batch, num_heads)
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, codes_x, codes_y)]
    grad_gain = torch.empty_like(gain, memory_format=torch.contiguous_format)
    codes = [_prepare(c, num_tokens) for c in (codes_x, codes_y)]
    for chunk in chunks(batch, num_heads, num_tokens ** 2):
        gs, qs, ks, vs = (_wide(t[chunk]).flatten(0, 1) for t in (grad, q, k, v))  # [n, N, d]
        parts = [_Codes(*(t[chunk].flatten(0, 1) for t in c)) for c in codes]
        gains = gain[chunk].reshape(-1, 1, 1)
        grad_q, grad_k, grad_v = torch.empty_like(qs), torch.zeros_like(ks), torch.zeros_like(vs)
        grad_codes = [torch.zeros_like(c.centred) for c in parts]
        grad_gains = torch.zeros_like(gains)
        for rows in _rows(num_tokens):
            squares, nears = zip(*(_squares(c, rows, num_prefix_tokens) for c in parts))
            distances = [square.sqrt() for square in squares]
            distance = distances[0] + distances[1]
            logits = (distance * gains).baddbmm_(qs[:, rows], ks.transpose(1, 2), alpha=scale)
            p = logits.softmax(dim=-1)
            g = gs[:, rows]
            grad_v.baddbmm_(p.transpose(1, 2), g)
            grad_p = torch.bmm(g, vs.transpose(1, 2))
            grad_logits = torch.ops.aten._softmax_backward_data(grad_p, p, -1, p.dtype)
            grad_q[:, rows] = torch.bmm(grad_logits, ks)
            grad_k.baddbmm_(grad_logits.transpose(1, 2), qs[:, rows])
            grad_gains += distance.mul_(grad_logits).sum(dim=(1, 2), keepdim=True)
            for c, square, near, d, grad_w in zip(parts, squares, nears, distances, grad_codes):
                # D / D^2 = 1 / D, and 0 where D = 0
                r = d.div_(square.clamp_(min=torch.finfo(d.dtype).tiny)).mul_(grad_logits)
                w = c.centred
                if near == 'many':
                    if w.device.type != 'mps':  # which has no float64
                        r, w = r.double(), w.double()
                elif near is not None:
                    head, row, column = near
                    i, j = (head, row + rows.start), (head, column)
                    pull = r[near].unsqueeze(-1) * (w[i] - w[j])
                    grad_w.index_put_(i, pull, accumulate=True).index_put_(j, -pull, accumulate=True)
                    r[near] = 0
                grad_w[:, rows] += r.sum(dim=2, keepdim=True) * w[:, rows] - torch.bmm(r, w)
                grad_w += r.sum(dim=1).unsqueeze(-1) * w - torch.bmm(r.transpose(1, 2), w[:, rows])
        found = (
            grad_q.mul_(scale), grad_k.mul_(scale), grad_v, *(gains * g[:, num_prefix_tokens:] for g in grad_codes))
        for whole, part in zip((*grads, grad_gain), (*found, grad_gains)):
            whole = whole[chunk]
            whole.copy_(part.view(whole.shape))
    grad_scale = grad_gain.sum(0)
    if bias_scale.shape[0] == 1:
        grad_scale = grad_scale.sum(0, keepdim=True)
    return *grads, grad_scale.to(bias_scale.dtype)


@_distance_attention_backward.register_fake
def _(grad, q, k, v, codes_x, codes_y, bias_scale, scale):
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, codes_x, codes_y, bias_scale))


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    return (*_distance_attention_backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale), None)


_distance_attention.register_autograd(_backward, setup_context=_setup_context)


def distance_bias(codes_x: torch.Tensor, codes_y: torch.Tensor, grid: Grid) -> torch.Tensor:
    """|x_i - x_j| + |y_i - y_j| between patches, 0 where a prefix token takes part.

    Args:
        codes_x: Codes of the patches along x, `[B, h, N-P, Cx]`.
        codes_y: Codes along y, `[B, h, N-P, Cy]`.
        grid: The grid.

    Returns:
        `[B, h, N, N]`.
    """
    return grid.pad_prefix(pairwise_distance(codes_x) + pairwise_distance(codes_y))


def distance_attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        codes_x: torch.Tensor,
        codes_y: torch.Tensor,
        bias_scale: torch.Tensor,
        grid: Grid,
        *,
        scale: float,
        attn_mask: Optional[torch.Tensor] = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        backend: str = 'torch',
) -> torch.Tensor:
    """softmax(scale * q.k + bias_scale * (|x_i - x_j| + |y_i - y_j|)) v; prefix tokens have no codes and no bias.

    Args:
        q: Queries, prefix tokens first, `[B, h, N, d]`.
        k: Keys, likewise.
        v: Values, likewise.
        codes_x: Codes of the patches along x, `[B, h, N-P, Cx]`, in float32 or wider.
        codes_y: Codes along y, `[B, h, N-P, Cy]`.
        bias_scale: `[1]` or `[h]`.
        grid: The grid.
        scale: Factor of q.k.
        attn_mask: As in `merge_masks`; for the reference alone, and so are the next two.
        is_causal: Mask out all later tokens.
        dropout_p: Dropout of the probabilities.
        backend: As `choose_backend` gives it.

    Returns:
        `[B, h, N, d]` in the dtype of v, computed in float32 at least.
    """
    if backend == 'reference':
        bias = bias_scale.to(codes_x.dtype).view(-1, 1, 1) * distance_bias(codes_x, codes_y, grid)
        mask = merge_masks(bias, attn_mask, is_causal, q.shape[2], q.device)
        return attend(q, k, v, mask, scale=scale, dropout_p=dropout_p)
    if backend == 'triton':
        from .distances_triton import triton_distance_attention
        return triton_distance_attention(q, k, v, codes_x, codes_y, bias_scale, scale=scale)
    return _distance_attention(q, k, v, codes_x, codes_y, bias_scale, scale)
