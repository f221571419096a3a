"""CoPE's bias as an operator that stores only q, k and the table for its backward pass, a chunk of heads at a time.

Plain autograd would store gates, positions, cells (in 64 bits), weights and both values of each of the N x N entries.
The bias itself remains N x N: the attention kernel takes it as a mask.
"""
from functools import partial
from typing import Optional, Tuple

import torch
from torch.utils.flop_counter import register_flop_formula

from ..grid import Grid
from .chunks import chunks
from .counting import cells, gates_of, suffix_sum
from .distances import empty_gradients
from .double_backward import differentiable_gradients
from .precision import wide, without_autocast
from .reference import contextual_bias

__all__ = ['torch_contextual_bias']


def _positions(gates: torch.Tensor, between: bool, shrink: float) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Positions, and with `between` the signs of the differences that they are the sizes of."""
    pos, sign = suffix_sum(gates), None
    if between:
        pos = pos - pos.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        sign = pos.sign()
        pos = pos.abs_()
    return pos if shrink == 1 else pos.mul_(shrink), sign


@torch.library.custom_op('timm_sape::contextual_bias', mutates_args=())
@without_autocast
def torch_contextual_bias(
        q: torch.Tensor,
        k: torch.Tensor,
        table: torch.Tensor,
        gate_scale: float,
        between: bool,
        shrink: float,
) -> torch.Tensor:
    num_tokens = q.shape[-2]
    table, = wide(table)
    bias = q.new_empty(*q.shape[:-1], num_tokens, dtype=torch.promote_types(q.dtype, torch.float32))
    for chunk in chunks(*q.shape[:2], num_tokens ** 2, q.device):
        q_, k_ = wide(q[chunk], k[chunk])
        pos, _ = _positions(gates_of(q_, k_, gate_scale), between, shrink)
        cell, weight = cells(pos, table.shape[0])
        z = q_ @ table.T  # [..., npos]
        bias[chunk] = z.gather(-1, cell).lerp_(z[..., 1:].gather(-1, cell), weight)
    return bias


@torch_contextual_bias.register_fake
def _(q, k, table, gate_scale, between, shrink):
    return q.new_empty(*q.shape[:-1], q.shape[-2], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op('timm_sape::contextual_bias_backward', mutates_args=())
@without_autocast
def torch_contextual_bias_backward(
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        table: torch.Tensor,
        gate_scale: float,
        between: bool,
        shrink: float,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tokens, npos, dtype = q.shape[-2], table.shape[0], table.dtype
    table, = wide(table)
    grad_q, grad_k = empty_gradients(q, k)
    grad_table = torch.zeros_like(table)
    for chunk in chunks(*q.shape[:2], num_tokens ** 2, q.device):
        q_, k_, g = wide(q[chunk], k[chunk], grad[chunk])
        gates = gates_of(q_, k_, gate_scale)
        pos, sign = _positions(gates, between, shrink)
        cell, weight = cells(pos, npos)
        z = q_ @ table.T
        grad_pos = z[..., 1:].gather(-1, cell).sub_(z.gather(-1, cell)).mul_(g).masked_fill_(pos >= npos - 1, 0)
        grad_z = torch.zeros_like(z)
        grad_z.scatter_add_(-1, cell, g * (1 - weight)).scatter_add_(-1, cell + 1, g * weight)
        grad_table += grad_z.flatten(0, -2).T @ q_.flatten(0, -2)
        if shrink != 1:
            grad_pos *= shrink
        if between:
            grad_pos *= sign
            grad_pos.diagonal(dim1=-2, dim2=-1).sub_(grad_pos.sum(dim=-1))
        # the gate of patch j is part of all positions up to j
        grad_logits = grad_pos.cumsum(-1).mul_(gates * (1 - gates)).mul_(gate_scale)
        grad_q[chunk] = (grad_z @ table).add_(grad_logits @ k_)
        grad_k[chunk] = grad_logits.transpose(-2, -1) @ q_
    return grad_q, grad_k, grad_table.to(dtype)


@torch_contextual_bias_backward.register_fake
def _(grad, q, k, table, gate_scale, between, shrink):
    return empty_gradients(q, k, table)


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.args = inputs[3:]


def _reference(gate_scale, between, shrink, q, k, table):
    grid = Grid(1, q.shape[2])  # only raster order matters
    return contextual_bias(
        q, k, table, grid, gate_scale=gate_scale, between=between, ref_num_patches=shrink * q.shape[2])


def _backward(ctx, grad):
    if torch.is_grad_enabled():  # the caller will differentiate the result again
        grads = differentiable_gradients(partial(_reference, *ctx.args), ctx.saved_tensors, (grad,))
        return (*grads, *(None for _ in ctx.args))
    return (*torch_contextual_bias_backward(grad, *ctx.saved_tensors, *ctx.args), *(None for _ in ctx.args))


torch_contextual_bias.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch_contextual_bias._opoverload.overloadpacket)
def _(q_shape, k_shape, table_shape, *args, out_shape=None, **kwargs) -> int:
    return _flops(q_shape, table_shape)


@register_flop_formula(torch_contextual_bias_backward._opoverload.overloadpacket)
def _(grad_shape, q_shape, k_shape, table_shape, *args, out_shape=None, **kwargs) -> int:
    return 3 * _flops(q_shape, table_shape)  # both products once more, and two products for the gradients of each


def _flops(q_shape, table_shape) -> int:
    batch, num_heads, num_patches, dim = q_shape
    return 2 * batch * num_heads * num_patches * dim * (num_patches + table_shape[0])
