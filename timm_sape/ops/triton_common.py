"""Padding, dtypes and memory layout, for the files with Triton kernels."""
from typing import List

import torch
import triton
import triton.language as tl

__all__ = ['dense_rows', 'dtype_of', 'load_rows', 'padded', 'to_tf32']


def padded(width: int) -> int:
    """The width of a tile with room for so many channels: a power of two, at least 16."""
    return max(16, 1 << (width - 1).bit_length())  # twenty times as fast as triton.next_power_of_2


def dense_rows(*tensors: torch.Tensor) -> List[torch.Tensor]:
    """Copy tensors that kernels cannot read: channels must be contiguous, and offsets within a head fit 32 bits."""
    return [
        t if t.stride(-1) == 1 and t.shape[-2] * t.stride(-2) < 2 ** 31 else t.contiguous() for t in tensors]


def dtype_of(codes: torch.Tensor) -> tl.dtype:
    """The dtype in which kernels compute what belongs to codes, or to their gradients."""
    return tl.float64 if codes.dtype == torch.float64 else tl.float32


@triton.jit
def load_rows(X, row, stride, inside, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """Rows of d channels, `[rows, D]` with D the padded d, 0 where there is no row or channel."""
    d = tl.arange(0, D)
    mask = inside[:, None]
    if HEAD_DIM < D:
        mask = mask & (d < HEAD_DIM)[None, :]
    return tl.load(X + row[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def to_tf32(x):
    """Cut off the digits that tf32 does not have, as tensor cores do it."""
    return (x.to(tl.uint32, bitcast=True) & 0xffffe000).to(tl.float32, bitcast=True)
