"""CoPE's bias with a backward pass that keeps nothing but q, k and the table, a chunk of heads at a time.

Plain autograd would store gates, positions, cells (in 64 bits), weights and both values of each of the N x N entries.
What is left is the bias itself, which the attention kernel takes as a mask.
"""
from typing import Optional, Tuple, Union

import torch

from ..grid import Grid
from .backend import is_transformed
from .chunks import chunks
from .codes import _cells, _gates, wide
from .contextual import _suffix_sum, contextual_bias, without_autocast

__all__ = ['recomputed_contextual_bias']


def _positions(gates: torch.Tensor, between: bool, shrink: float) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Positions, and, where they are differences, the signs that these had."""
    pos, sign = _suffix_sum(gates), None
    if between:
        pos = pos - pos.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        sign = pos.sign()
        pos = pos.abs_()
    return pos if shrink == 1 else pos.mul_(shrink), sign


@torch.library.custom_op('timm_sape::contextual_bias', mutates_args=())
@without_autocast
def _contextual_bias(
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
    for chunk in chunks(*q.shape[:2], num_tokens ** 2):
        q_, k_ = wide(q[chunk], k[chunk])
        pos, _ = _positions(_gates(q_, k_, gate_scale), between, shrink)
        cell, weight = _cells(pos, table.shape[0])
        z = q_ @ table.T  # [..., npos]
        bias[chunk] = z.gather(-1, cell).lerp_(z[..., 1:].gather(-1, cell), weight)
    return bias


@_contextual_bias.register_fake
def _(q, k, table, gate_scale, between, shrink):
    return q.new_empty(*q.shape[:-1], q.shape[-2], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op('timm_sape::contextual_bias_backward', mutates_args=())
@without_autocast
def _contextual_bias_backward(
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
    grad_q, grad_k = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k))
    grad_table = torch.zeros_like(table)
    for chunk in chunks(*q.shape[:2], num_tokens ** 2):
        q_, k_, g = wide(q[chunk], k[chunk], grad[chunk])
        gates = _gates(q_, k_, gate_scale)
        pos, sign = _positions(gates, between, shrink)
        cell, weight = _cells(pos, npos)
        z = q_ @ table.T
        grad_pos = z[..., 1:].gather(-1, cell).sub_(z.gather(-1, cell)).mul_(g).masked_fill_(pos > npos - 1, 0)
        grad_z = torch.zeros_like(z)
        grad_z.scatter_add_(-1, cell, g * (1 - weight)).scatter_add_(-1, cell + 1, g * weight)
        grad_table += grad_z.flatten(0, -2).T @ q_.flatten(0, -2)
        if shrink != 1:
            grad_pos *= shrink
        if between:
            grad_pos *= sign
            grad_pos.diagonal(dim1=-2, dim2=-1).sub_(grad_pos.sum(dim=-1))
        # the gate of patch j counts in all positions up to j
        grad_logits = grad_pos.cumsum(-1).mul_(gates * (1 - gates)).mul_(gate_scale)
        grad_q[chunk] = (grad_z @ table).add_(grad_logits @ k_)
        grad_k[chunk] = grad_logits.transpose(-2, -1) @ q_
    return grad_q, grad_k, grad_table.to(dtype)


@_contextual_bias_backward.register_fake
def _(grad, q, k, table, gate_scale, between, shrink):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, table))


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.args = inputs[3:]


def _backward(ctx, grad):
    return (*_contextual_bias_backward(grad, *ctx.saved_tensors, *ctx.args), *(None for _ in ctx.args))


_contextual_bias.register_autograd(_backward, setup_context=_setup_context)


def recomputed_contextual_bias(
        q: torch.Tensor,
        k: torch.Tensor,
        table: torch.Tensor,
        grid: Grid,
        *,
        gate_scale: Union[float, torch.Tensor],
        between: bool = False,
        ref_num_patches: Optional[int] = None,
) -> torch.Tensor:
    """`contextual_bias`, arguments and result, by an operator of its own wherever that can do it.

    It cannot where patches are dropped, gates have a learned scale, sizes are symbolic, the table is wider than q, or
    torch.func is at work; and a graph that is exported has none of our operators in it.
    """
    special = (
        grid.keep_indices is not None or isinstance(gate_scale, torch.Tensor) or type(grid.num_patches) is not int
        or table.dtype.itemsize > max(q.dtype.itemsize, 4) or is_transformed() or torch.compiler.is_exporting()
        or torch.jit.is_tracing())
    if special:
        return contextual_bias(
            q, k, table, grid, gate_scale=gate_scale, between=between, ref_num_patches=ref_num_patches)
    p = grid.num_prefix_tokens
    shrink = 1.0 if ref_num_patches is None else ref_num_patches / grid.num_patches
    return grid.pad_prefix(_contextual_bias(q[:, :, p:], k[:, :, p:], table, gate_scale, between, shrink))
