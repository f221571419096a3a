"""SaPE2's codes and attention by compiled kernels for the CPU, `cpp_kernels.cpp`. Nothing N x N is stored.

They do less than the PyTorch operators: each distance is computed once, from the difference, and a block of pairs
stays in the cache from the logits to the last gradient. Half precision is computed in float32.
"""
from typing import Tuple

import torch
import torch.nn.functional as F

from .codes import CODES, CODES_BACKWARD, empty_codes, patches_of, register_codes
from .cpp_build import find_cpp
from .distances import ATTENTION, ATTENTION_BACKWARD, register_attention
from .precision import wide

__all__ = ['cpp_axis_codes', 'cpp_distance_attention']


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


@torch.library.custom_op('timm_sape::cpp_axis_codes', mutates_args=(), device_types='cpu', schema=CODES)
def cpp_axis_codes(q, k, table_x, table_y, height, width, mode, gate_scale, shrink_x, shrink_y):
    codes = empty_codes(q, height, width, mode)
    _kernels().codes(
        *_rows(*patches_of(height, width, q, k), table_x, table_y), height, width, mode, gate_scale, shrink_x, shrink_y,
        *codes)
    return codes


@torch.library.custom_op(
    'timm_sape::cpp_axis_codes_backward', mutates_args=(), device_types='cpu', schema=CODES_BACKWARD)
def cpp_axis_codes_backward(
        grad_x, grad_y, q, k, table_x, table_y, height, width, mode, gate_scale, shrink_x, shrink_y,
):
    rows = _rows(*patches_of(height, width, q, k), table_x, table_y)
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in rows[:2]]
    heads = q.shape[0] * q.shape[1]
    grads += [t.new_empty(heads, *t.shape) for t in rows[2:]]
    _kernels().codes_backward(
        *wide(grad_x, grad_y), *rows, height, width, mode, gate_scale, shrink_x, shrink_y, *grads)
    grads[2:] = (g.sum(0) for g in grads[2:])
    prefix = q.shape[2] - height * width
    grads[:2] = (F.pad(g, (0, 0, prefix, 0)) if prefix else g for g in grads[:2])  # prefix tokens have no codes
    return tuple(_like(t, g) for t, g in zip((q, k, table_x, table_y), grads))


register_codes(cpp_axis_codes, cpp_axis_codes_backward)


@torch.library.custom_op('timm_sape::cpp_distance_attention', mutates_args=(), device_types='cpu', schema=ATTENTION)
def cpp_distance_attention(q, k, v, codes_x, codes_y, bias_scale, scale):
    rows = _rows(q, k, v)
    gain = bias_scale.to(codes_x.dtype).expand(q.shape[1]).contiguous()
    out = torch.empty_like(rows[2], memory_format=torch.contiguous_format)
    _kernels().attention(*rows, *wide(codes_x, codes_y), gain, scale, out)
    return _like(v, out)


@torch.library.custom_op(
    'timm_sape::cpp_distance_attention_backward', mutates_args=(), device_types='cpu', schema=ATTENTION_BACKWARD)
def cpp_distance_attention_backward(grad, q, k, v, codes_x, codes_y, bias_scale, scale):
    rows, codes = _rows(grad, q, k, v), wide(codes_x, codes_y)
    gain = bias_scale.to(codes_x.dtype).expand(q.shape[1]).contiguous()
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (*rows[1:], *codes)]
    grad_gain = gain.new_empty(q.shape[:2])
    _kernels().attention_backward(*rows, *codes, gain, scale, *grads, grad_gain)
    grad_gain = grad_gain.sum(0)
    if bias_scale.shape[0] == 1:
        grad_gain = grad_gain.sum(0, keepdim=True)
    return tuple(_like(t, g) for t, g in zip((q, k, v, codes_x, codes_y, bias_scale), (*grads, grad_gain)))


register_attention(cpp_distance_attention, cpp_distance_attention_backward)
