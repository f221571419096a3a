"""Attention with a bias of distances between codes, without storing anything N x N: a block of queries at a time.

The squared distance of two codes is a product of two longer vectors, [-2 w_i, s_i, 1] and [w_j, 1, s_j] with s = |w|^2,
so one matrix product gives a block of them. In float32 it would lose the small distances, those between patches of one
region; in float64 it is as good as a difference, and costs little, as the codes are short. From s_i and s_j goes what
the codes' own rounding may amount to: a distance below it is 0 and has no gradient, as its direction would be random.

The backward pass computes the blocks anew. With G the gradient of a distance D and R = G / D, that of the codes is
rowsum(R + R^T) w - (R + R^T) w.
"""
from typing import Iterator, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F

from ..grid import Grid
from .attention import attend, merge_masks
from .contextual import pairwise_distance, without_autocast

__all__ = ['distance_attention', 'distance_bias']

NARROW = 4  # codes of so few channels lie so close that the gradient's differences lose digits as well
BLOCK = 2 ** 17  # logits in a block: what of them is at hand at one time fits a cache


class _Codes(NamedTuple):
    """Codes of one axis in the form that the blocks want them, zeros in the rows of prefix tokens, `[B*h, N, ...]`."""
    left: torch.Tensor
    right: torch.Tensor
    centred: torch.Tensor
    noise: torch.Tensor  # what was taken off s, and what a squared distance counts as at least when divided by


def _prepare(codes: torch.Tensor, num_tokens: int) -> _Codes:
    dtype = codes.dtype
    codes = codes.flatten(0, 1)
    if codes.device.type != 'mps':  # it has no float64
        codes = codes.double()
    w = codes - codes.mean(dim=-2, keepdim=True)  # changes no distance, saves digits
    s = w.square().sum(dim=-1, keepdim=True)
    noise = 16 * torch.finfo(w.dtype).eps * s
    noise += (64 * torch.finfo(dtype).eps) ** 2 * codes.square().sum(dim=-1, keepdim=True)
    one, fill = torch.ones_like(s), w.new_zeros(*w.shape[:-1], -(w.shape[-1] + 2) % 8)  # widths that are quick
    prefix = (0, 0, num_tokens - w.shape[-2], 0)
    return _Codes(
        F.pad(torch.cat([-2 * w, s - noise, one, fill], dim=-1), prefix),
        F.pad(torch.cat([w, one, s - noise, fill], dim=-1), prefix),
        F.pad(w, prefix).to(dtype),
        F.pad(noise.to(dtype).clamp_min(torch.finfo(dtype).tiny), prefix, value=1.0),
    )


def _blocks(num_heads: int, num_tokens: int) -> Iterator[Tuple[slice, slice]]:
    """Slices of `[B*h, N]`: whole heads if they are small, else rows of one."""
    heads = max(1, BLOCK // num_tokens ** 2)
    rows = min(num_tokens, max(16, BLOCK // num_tokens))
    for head in range(0, num_heads, heads):
        for row in range(0, num_tokens, rows):
            yield slice(head, head + heads), slice(row, row + rows)


def _square(codes: _Codes, heads: slice, rows: slice) -> torch.Tensor:
    """Squared distances less noise, negative where they are no more than that. Those of prefix tokens are 0."""
    return torch.bmm(codes.left[heads, rows], codes.right[heads].transpose(1, 2)).to(codes.centred.dtype)


def _flat(*tensors: torch.Tensor):
    """`[B, h, ...]` to `[B*h, ...]`, in float32 at least."""
    return [t.to(torch.promote_types(t.dtype, torch.float32)).flatten(0, 1) for t in tensors]


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
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    flat_out = out.flatten(0, 1)
    qs, ks, vs = _flat(q, k, v)
    x, y = _prepare(codes_x, num_tokens), _prepare(codes_y, num_tokens)
    gain = bias_scale.to(codes_x.dtype).expand(batch, num_heads).reshape(-1, 1, 1)
    for heads, rows in _blocks(len(qs), num_tokens):
        bias = _square(x, heads, rows).relu_().sqrt_()
        bias += _square(y, heads, rows).relu_().sqrt_()
        bias *= gain[heads]
        block = F.scaled_dot_product_attention(
            qs[None, heads, rows], ks[None, heads], vs[None, heads], attn_mask=bias[None], scale=scale)
        flat_out[heads, rows] = block[0].to(out.dtype)
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
    gs, qs, ks, vs = _flat(grad, q, k, v)
    codes = _prepare(codes_x, num_tokens), _prepare(codes_y, num_tokens)
    gain = bias_scale.to(codes_x.dtype).expand(batch, num_heads).reshape(-1, 1, 1)
    grad_q, grad_k, grad_v = torch.empty_like(qs), torch.zeros_like(ks), torch.zeros_like(vs)
    grad_codes = [torch.zeros_like(c.centred) for c in codes]
    grad_gain = torch.zeros_like(gain)
    for heads, rows in _blocks(len(qs), num_tokens):
        squares = [_square(c, heads, rows) for c in codes]
        distances = [square.relu().sqrt_() for square in squares]
        distance = distances[0] + distances[1]
        logits = torch.baddbmm(
            distance * gain[heads], qs[heads, rows], ks[heads].transpose(1, 2), alpha=scale)
        p = logits.softmax(dim=-1)
        g = gs[heads, rows]
        grad_v[heads].baddbmm_(p.transpose(1, 2), g)
        grad_p = torch.bmm(g, vs[heads].transpose(1, 2))
        grad_logits = torch.ops.aten._softmax_backward_data(grad_p, p, -1, p.dtype)
        grad_q[heads, rows] = torch.bmm(grad_logits, ks[heads])
        grad_k[heads].baddbmm_(grad_logits.transpose(1, 2), qs[heads, rows])
        grad_gain[heads] += distance.mul_(grad_logits).sum(dim=(1, 2), keepdim=True)
        for c, square, d, grad_w in zip(codes, squares, distances, grad_codes):
            # D / D^2 = 1 / D, 0 where D = 0; the divisor is no noise, so nothing explodes on the way to 0
            r = d.div_(torch.maximum(square, c.noise[heads, rows], out=square)).mul_(grad_logits)
            w = c.centred
            if w.shape[-1] <= NARROW and w.device.type != 'mps':
                r, w = r.double(), w.double()
            grad_w[heads, rows] += r.sum(dim=2, keepdim=True) * w[heads, rows] - torch.bmm(r, w[heads])
            grad_w[heads] += r.sum(dim=1).unsqueeze(-1) * w[heads] - torch.bmm(r.transpose(1, 2), w[heads, rows])
    prefix = num_tokens - codes_x.shape[-2]
    grad_codes = [(gain * g[:, prefix:]).unflatten(0, (batch, num_heads)) for g in grad_codes]
    grads = (grad_q.mul_(scale), grad_k.mul_(scale), grad_v)
    grad_q, grad_k, grad_v = (g.unflatten(0, (batch, num_heads)).to(t.dtype) for g, t in zip(grads, (q, k, v)))
    grad_scale = grad_gain.view(batch, num_heads).sum(0)
    if bias_scale.shape[0] == 1:
        grad_scale = grad_scale.sum(0, keepdim=True)
    return grad_q, grad_k, grad_v, *grad_codes, grad_scale.to(bias_scale.dtype)


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
