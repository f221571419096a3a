"""SaPE2's codes as an operator that stores only q, k and the tables for its backward pass.

Plain autograd would store gates, positions, cells and weights: some 40 bytes for each of the N * (W + H) entries of
every head and layer. Computing them again is cheap.
"""
from typing import List, Tuple

import torch

from .chunks import chunks
from .codes import CODES, CODES_BACKWARD, empty_codes, patches_of, register_codes
from .counting import cells, gates_of, sources_of, suffix_sum
from .distances import empty_gradients
from .precision import wide, without_autocast

__all__ = ['torch_axis_codes']


def _positions(gates: torch.Tensor, shrink: float) -> torch.Tensor:
    pos = suffix_sum(gates)
    return pos if shrink == 1 else pos * shrink


def _lines(x: torch.Tensor, height: int, width: int, along_y: bool) -> torch.Tensor:
    """From patches `[B, h, H*W, C]` to rows `[B, h, H, W, C]` or columns `[B, h, W, H, C]`."""
    x = x.unflatten(2, (height, width))
    return x.transpose(2, 3) if along_y else x


def _patches(x: torch.Tensor, along_y: bool) -> torch.Tensor:
    """The inverse of `_lines`."""
    return (x.transpose(2, 3) if along_y else x).flatten(2, 3)


def _values(sources, tables, sizes) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """The values at integer positions along x and along y, `[B, h, H*W, npos]`, for each source."""
    return [(source @ tables.T).split(sizes, dim=-1) for source in sources]


def _axis_forward(q, k, values, height, width, along_y, gate_scale, shrink) -> torch.Tensor:
    q, k = (_lines(t, height, width, along_y).contiguous() for t in (q, k))
    cell, weight = cells(_positions(gates_of(q, k, gate_scale), shrink), values[0].shape[-1])
    codes = []
    for z in values:
        z = _lines(z, height, width, along_y)  # [B, h, lines, C, npos]
        codes.append(z.gather(-1, cell).lerp_(z[..., 1:].gather(-1, cell), weight))
    codes = codes[0] if len(codes) == 1 else torch.cat(codes, dim=-1)
    return _patches(codes if shrink == 1 else codes * shrink ** 0.5, along_y)


def _axis_backward(
        grad, q, k, values, grad_q, grad_k, height, width, along_y, gate_scale, shrink,
) -> List[torch.Tensor]:
    """Add the part through the gates to the gradients of q and k, `[B, h, H*W, d]`; return those of the values."""
    lines_q, lines_k = (_lines(t, height, width, along_y) for t in (grad_q, grad_k))
    q, k = (_lines(t, height, width, along_y).contiguous() for t in (q, k))
    npos = values[0].shape[-1]
    gates = gates_of(q, k, gate_scale)
    pos = _positions(gates, shrink)
    cell, weight = cells(pos, npos)
    grad = _lines(grad, height, width, along_y)
    grad = grad if shrink == 1 else grad * shrink ** 0.5
    grad_values, grad_pos = [], torch.zeros_like(pos)
    for z, g in zip(values, grad.chunk(len(values), dim=-1)):
        z = _lines(z, height, width, along_y)
        grad_pos += g * (z[..., 1:].gather(-1, cell).sub_(z.gather(-1, cell)))
        upper = g * weight
        grad_z = torch.zeros(z.shape, dtype=z.dtype, device=z.device)
        grad_z = grad_z.scatter_add_(-1, cell, g - upper).scatter_add_(-1, cell + 1, upper)
        grad_values.append(_patches(grad_z, along_y))
    grad_pos.masked_fill_(pos >= npos - 1, 0)
    grad_gates = grad_pos.cumsum(-1)  # the gate of patch j is part of all positions up to j
    grad_logits = torch.ops.aten.sigmoid_backward(grad_gates, gates).mul_(shrink * gate_scale)
    lines_q += grad_logits @ k
    lines_k += grad_logits.transpose(-2, -1) @ q
    return grad_values


@torch.library.custom_op('timm_sape::axis_codes', mutates_args=(), schema=CODES)
@without_autocast
def torch_axis_codes(q, k, table_x, table_y, height, width, mode, gate_scale, shrink_x, shrink_y):
    q, k = patches_of(height, width, q, k)
    sizes, tables = [table_x.shape[0], table_y.shape[0]], torch.cat(wide(table_x, table_y))
    codes_x, codes_y = empty_codes(q, height, width, mode)
    for chunk in chunks(*q.shape[:2], q.shape[2] * q.shape[3], q.device):
        q_, k_ = wide(q[chunk], k[chunk])
        values_x, values_y = zip(*_values(sources_of(mode, q_, k_), tables, sizes))
        codes_x[chunk] = _axis_forward(q_, k_, values_x, height, width, False, gate_scale, shrink_x)
        codes_y[chunk] = _axis_forward(q_, k_, values_y, height, width, True, gate_scale, shrink_y)
    return codes_x, codes_y


@torch.library.custom_op('timm_sape::axis_codes_backward', mutates_args=(), schema=CODES_BACKWARD)
@without_autocast
def torch_axis_codes_backward(
        grad_x, grad_y, q, k, table_x, table_y, height, width, mode, gate_scale, shrink_x, shrink_y,
):
    sizes, tables = [table_x.shape[0], table_y.shape[0]], torch.cat(wide(table_x, table_y))
    grads = empty_gradients(q, k)
    for grad in grads:
        grad[:, :, :q.shape[2] - height * width] = 0  # prefix tokens have no codes
    q, k, grad_q, grad_k = patches_of(height, width, q, k, *grads)
    grad_tables = torch.zeros_like(tables)
    for chunk in chunks(*q.shape[:2], q.shape[2] * q.shape[3], q.device):
        q_, k_, grad_x_, grad_y_ = wide(q[chunk], k[chunk], grad_x[chunk], grad_y[chunk])
        part_q, part_k = torch.zeros_like(q_), torch.zeros_like(k_)
        sources = sources_of(mode, q_, k_)
        values_x, values_y = zip(*_values(sources, tables, sizes))
        grads_x = _axis_backward(
            grad_x_, q_, k_, values_x, part_q, part_k, height, width, False, gate_scale, shrink_x)
        grads_y = _axis_backward(
            grad_y_, q_, k_, values_y, part_q, part_k, height, width, True, gate_scale, shrink_y)
        for source, part, *grad_values in zip(sources, sources_of(mode, part_q, part_k), grads_x, grads_y):
            grad_values = torch.cat(grad_values, dim=-1).flatten(0, -2)
            part.view(-1, part.shape[-1]).addmm_(grad_values, tables)
            grad_tables.addmm_(grad_values.T, source.flatten(0, -2))
        grad_q[chunk], grad_k[chunk] = part_q, part_k
    parts = zip(grad_tables.split(sizes), (table_x, table_y))
    return *grads, *(grad.to(table.dtype, copy=True) for grad, table in parts)


register_codes(torch_axis_codes, torch_axis_codes_backward)
