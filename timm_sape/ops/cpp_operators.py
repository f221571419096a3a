"""SaPE2's codes and attention by compiled kernels for the CPU, `cpp_kernels.cpp`. Nothing N x N is stored.

They do less than the PyTorch operators: distances are computed from differences, in the backward pass once for both
directions, and a block of pairs stays in the cache from the logits to the last gradient. Half precision is computed in
float32. The operators return float32, too, because their backward passes need the output with all its digits.
"""
from typing import Sequence, Tuple

import torch
import torch.nn.functional as F

from .codes import CODES, CODES_BACKWARD, empty_codes, patches_of, register_codes
from .cpp_build import find_cpp
from .distances import (
    ATTENTION,
    ATTENTION_BACKWARD,
    ATTENTION_GRADIENTS,
    ATTENTION_OUTPUT,
    empty_gradients,
    empty_out,
    empty_rows,
    register_attention,
)
from .merged import MERGED_ARGUMENTS, register_merged
from .precision import wide

__all__ = ['cpp_axis_codes', 'cpp_distance_attention', 'cpp_sape2_attention']


def _kernels():
    """The compiled kernels. A graph that another process saved calls the operators without choosing a backend."""
    reason = find_cpp()
    if reason:
        raise RuntimeError(f"the kernels of the backend 'cpp' cannot be used: {reason}")
    return torch.ops.timm_sape_cpp


def _rows(*tensors: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    """As the kernels take them: float32 or wider, rows dense and a multiple of 16 numbers long."""
    tensors = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    tensors = [F.pad(t, (0, -t.shape[-1] % 16)) if t.shape[-1] % 16 else t for t in tensors]
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def _like(tensor: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
    """What a kernel wrote for padded rows, in the shape and the dtype of the tensor."""
    return padded[..., :tensor.shape[-1]].to(tensor.dtype).contiguous()


def _write_codes_gradients(
        grads_of_codes: Sequence[torch.Tensor],
        rows: Sequence[torch.Tensor],
        options: Sequence,
        onto: bool,
        grads: Sequence[torch.Tensor],
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Write the gradients of the patches of q and k, or add them to what is there; return those of the tables.

    Args:
        grads_of_codes: The gradients of the codes along x and along y.
        rows: q and k of the patches, and the tables, from `_rows`.
        options: height, width, mode, gate_scale, shrink_x and shrink_y.
        onto: Whether to add them.
        grads: Those of the patches of q and k.
    """
    heads = rows[0].shape[0] * rows[0].shape[1]
    grads_of_tables = [t.new_empty(heads, *t.shape) for t in rows[2:]]
    _kernels().codes_backward(*wide(*grads_of_codes), *rows, *options, onto, *grads, *grads_of_tables)
    return tuple(grad.sum(0) for grad in grads_of_tables)


def _attention(
        rows: Sequence[torch.Tensor],
        codes: Sequence[torch.Tensor],
        bias_scale: torch.Tensor,
        scale: float,
        v: torch.Tensor,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, float32 or wider, for q, k and v from `_rows`, and two numbers for each query."""
    gain = bias_scale.to(codes[0].dtype).expand(v.shape[1]).contiguous()
    out, numbers = empty_out(rows[2]), empty_rows(rows[0])
    _kernels().attention(*rows, *codes, gain, scale, out, *numbers)
    return out if out.shape == v.shape else empty_out(v, wide=True).copy_(out[..., :v.shape[-1]]), *numbers


def _attention_gradients(
        rows: Sequence[torch.Tensor],
        numbers: Sequence[torch.Tensor],
        codes: Sequence[torch.Tensor],
        bias_scale: torch.Tensor,
        scale: float,
) -> Tuple[torch.Tensor, ...]:
    """The gradients of q, k and v, of the codes and of the factor.

    Args:
        rows: The gradient of the output, the output, q, k and v, from `_rows`.
        numbers: Two for each query, from `_attention`.
    """
    gain = bias_scale.to(codes[0].dtype).expand(rows[0].shape[1]).contiguous()
    grads = empty_gradients(*rows[2:], *codes)
    grad_gain = gain.new_empty(rows[0].shape[:2])
    _kernels().attention_backward(*rows, *numbers, *codes, gain, scale, *grads, grad_gain)
    return *grads, grad_gain.sum_to_size(bias_scale.shape)


@torch.library.custom_op('timm_sape::axis_codes_cpp', mutates_args=(), device_types='cpu', schema=CODES)
def cpp_axis_codes(q, k, table_x, table_y, height, width, mode, gate_scale, shrink_x, shrink_y):
    codes = empty_codes(q, height, width, mode)
    rows = _rows(*patches_of(height, width, q, k), table_x, table_y)
    _kernels().codes(*rows, height, width, mode, gate_scale, shrink_x, shrink_y, *codes)
    return codes


@torch.library.custom_op(
    'timm_sape::axis_codes_cpp_backward', mutates_args=(), device_types='cpu', schema=CODES_BACKWARD)
def cpp_axis_codes_backward(
        grad_x, grad_y, q, k, table_x, table_y, height, width, mode, gate_scale, shrink_x, shrink_y,
):
    rows = _rows(*patches_of(height, width, q, k), table_x, table_y)
    grads, options = empty_gradients(*rows[:2]), (height, width, mode, gate_scale, shrink_x, shrink_y)
    tables = _write_codes_gradients((grad_x, grad_y), rows, options, False, grads)
    prefix = q.shape[2] - height * width
    grads = (F.pad(g, (0, 0, prefix, 0)) if prefix else g for g in grads)  # prefix tokens have no codes
    return tuple(_like(t, g) for t, g in zip((q, k, table_x, table_y), (*grads, *tables)))


register_codes(cpp_axis_codes, cpp_axis_codes_backward)


@torch.library.custom_op('timm_sape::distance_attention_cpp', mutates_args=(), device_types='cpu', schema=ATTENTION)
def cpp_distance_attention_forward(q, k, v, codes_x, codes_y, bias_scale, scale):
    return _attention(_rows(q, k, v), wide(codes_x, codes_y), bias_scale, scale, v)


@torch.library.custom_op(
    'timm_sape::distance_attention_cpp_backward', mutates_args=(), device_types='cpu', schema=ATTENTION_BACKWARD)
def cpp_distance_attention_backward(grad, out, row_max, row_sum, q, k, v, codes_x, codes_y, bias_scale, scale):
    grads = _attention_gradients(
        _rows(grad, out, q, k, v), wide(row_max, row_sum), wide(codes_x, codes_y), bias_scale, scale)
    return tuple(_like(t, g) for t, g in zip((q, k, v, codes_x, codes_y, bias_scale), grads))


register_attention(cpp_distance_attention_forward, cpp_distance_attention_backward, wide=True)


def cpp_distance_attention(q, k, v, *args) -> torch.Tensor:
    """The output, `[B, h, N, d]`, in the dtype of v. For the arguments see `ATTENTION_ARGUMENTS`."""
    return cpp_distance_attention_forward(q, k, v, *args)[0].to(v.dtype)


# The merged operator also keeps the codes for its backward pass.
_MERGED = f'({MERGED_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)'
_MERGED_BACKWARD = (
    f'(Tensor grad, {ATTENTION_OUTPUT}, Tensor codes_x, Tensor codes_y, {MERGED_ARGUMENTS}) -> {ATTENTION_GRADIENTS}')


@torch.library.custom_op('timm_sape::sape2_attention_cpp', mutates_args=(), device_types='cpu', schema=_MERGED)
def cpp_sape2_attention_forward(q, k, v, table_x, table_y, bias_scale, size, mode, factors):
    """The output, two numbers for each query, and the codes."""
    *factors, scale = factors
    rows, codes = _rows(q, k, v), empty_codes(q, *size, mode)
    _kernels().codes(*patches_of(*size, *rows[:2]), *_rows(table_x, table_y), *size, mode, *factors, *codes)
    return *_attention(rows, codes, bias_scale, scale, v), *codes


@cpp_sape2_attention_forward.register_fake
def _(q, k, v, table_x, table_y, bias_scale, size, mode, factors):
    return empty_out(v, wide=True), *empty_rows(q), *empty_codes(q, *size, mode)


@torch.library.custom_op(
    'timm_sape::sape2_attention_cpp_backward', mutates_args=(), device_types='cpu', schema=_MERGED_BACKWARD)
def cpp_sape2_attention_backward(
        grad, out, row_max, row_sum, codes_x, codes_y, q, k, v, table_x, table_y, bias_scale, size, mode, factors,
):
    *factors, scale = factors
    rows = _rows(grad, out, q, k, v)
    *grads, grad_x, grad_y, grad_scale = _attention_gradients(
        rows, wide(row_max, row_sum), wide(codes_x, codes_y), bias_scale, scale)
    patches = *patches_of(*size, *rows[2:4]), *_rows(table_x, table_y)
    tables = _write_codes_gradients(
        (grad_x, grad_y), patches, (*size, mode, *factors), True, patches_of(*size, *grads[:2]))
    return tuple(
        _like(t, g) for t, g in zip((q, k, v, table_x, table_y, bias_scale), (*grads, *tables, grad_scale)))


register_merged(cpp_sape2_attention_forward, cpp_sape2_attention_backward)


def cpp_sape2_attention(q, k, v, *args) -> torch.Tensor:
    """The output, `[B, h, N, d]`, in the dtype of v. For the arguments see `MERGED_ARGUMENTS`."""
    return cpp_sape2_attention_forward(q, k, v, *args)[0].to(v.dtype)
