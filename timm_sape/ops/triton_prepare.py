"""Codes as the kernels of `triton_distances` read them, padded, with their squared norms.

For q of 16 bits they are centred, and each is the sum of two fp16 numbers.
"""
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .triton_common import padded

__all__ = ['PreparedCodes']

SIZES = ['num_tokens', 'num_prefix_tokens', 'width_x', 'width_y']  # new values of these do not compile a kernel anew
# In place of the squared norm of what has no code, so that no distance to it counts; for norms in float32 and float64.
NO_CODE, NO_CODE_WIDE = tl.constexpr(-1e38), tl.constexpr(-1e300)
TILE = 8192  # codes at a time, as numbers

# The parameters of the kernel:
#   CODES_X, CODES_Y        [B*h, N-P, width], contiguous
#   WX, WY, SX, SY, UNIT    see `triton_distances`
#   num_tokens N, num_prefix_tokens P, and width_x, width_y, the channels of the codes
#   CX, CY                  channels, padded
#   TILE                    patches at a time, or tokens
#   CENTRE                  whether the mean over the patches is subtracted, so that products lose fewer digits
#   SPLIT                   whether a code is written as two numbers of 16 bits
#   EPS                     of the dtype of the codes


@triton.jit(do_not_specialize=SIZES)
def _prepare(
        CODES_X, CODES_Y, WX, WY, SX, SY, UNIT,
        num_tokens, num_prefix_tokens, width_x, width_y,
        CX: tl.constexpr, CY: tl.constexpr, TILE: tl.constexpr,
        CENTRE: tl.constexpr, SPLIT: tl.constexpr, EPS: tl.constexpr,
):
    """Prepare the codes of one head.

    With SPLIT the unit is a power of two with which the largest entry of all codes is at least 2^13 and less than 2^14.
    So all fit into fp16, and entries up to 2^16 times smaller keep 22 bits. If the largest entry is below 2^-113, the
    unit is as small as it can be.
    """
    head = tl.program_id(0).to(tl.int64)
    num_patches = num_tokens - num_prefix_tokens
    codes_x, codes_y = CODES_X + head * num_patches * width_x, CODES_Y + head * num_patches * width_y
    mean_x = _mean_code(codes_x, num_patches, width_x, CX, TILE, CENTRE)
    mean_y = _mean_code(codes_y, num_patches, width_y, CY, TILE, CENTRE)
    per_unit = 1.0
    if SPLIT:
        largest = tl.maximum(
            _largest(codes_x, mean_x, num_patches, width_x, CX, TILE, CENTRE, EPS),
            _largest(codes_y, mean_y, num_patches, width_y, CY, TILE, CENTRE, EPS))
        exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 13, 1)
        tl.store(UNIT + head, (exponent << 23).to(tl.float32, bitcast=True))
        per_unit = (254 - exponent << 23).to(tl.float32, bitcast=True)  # a division would not be exact
    _write_codes(
        codes_x, mean_x, per_unit, WX, SX, head, num_tokens, num_prefix_tokens, width_x,
        CX, TILE, CENTRE, SPLIT, EPS)
    _write_codes(
        codes_y, mean_y, per_unit, WY, SY, head, num_tokens, num_prefix_tokens, width_y,
        CY, TILE, CENTRE, SPLIT, EPS)


@triton.jit
def _load_patches(CODES, n, num_patches, width, C: tl.constexpr):
    """The codes of patches n, `[tile, C]`, 0 where there is no patch or channel; and where there is one."""
    c = tl.arange(0, C)
    inside = ((n >= 0) & (n < num_patches))[:, None] & (c[None, :] < width)
    return tl.load(CODES + n[:, None] * width + c[None, :], mask=inside, other=0.0), inside


@triton.jit
def _mean_code(CODES, num_patches, width, C: tl.constexpr, TILE: tl.constexpr, CENTRE: tl.constexpr):
    """The mean over the patches of a head, `[C]`; 0 without CENTRE."""
    mean = tl.zeros([C], CODES.dtype.element_ty)
    if CENTRE:
        for start in range(0, num_patches, TILE):
            w, _ = _load_patches(CODES, start + tl.arange(0, TILE), num_patches, width, C)
            mean += tl.sum(w / num_patches, 0)
    return mean


@triton.jit
def _centred(CODES, mean, n, num_patches, width, C: tl.constexpr, CENTRE: tl.constexpr, EPS: tl.constexpr):
    """The codes of patches n minus the mean, `[tile, C]`; 0 where there is no patch.

    A code that differs from the mean by rounding alone counts as the mean: if all codes are equal, all distances are 0.
    """
    w, inside = _load_patches(CODES, n, num_patches, width, C)
    if CENTRE:
        rounding = tl.sum(64 * EPS * tl.abs(w), 1)
        w = tl.where(inside, w - mean[None, :], 0.0)
        is_apart = tl.sum(tl.abs(w), 1) > rounding
        w = tl.where(is_apart[:, None], w, 0.0 * w)  # NaN and infinity become NaN
    return w


@triton.jit
def _largest(
        CODES, mean, num_patches, width, C: tl.constexpr, TILE: tl.constexpr, CENTRE: tl.constexpr, EPS: tl.constexpr,
):
    """The largest entry of all centred codes of a head."""
    largest = tl.zeros([TILE], CODES.dtype.element_ty)
    for start in range(0, num_patches, TILE):
        w = _centred(CODES, mean, start + tl.arange(0, TILE), num_patches, width, C, CENTRE, EPS)
        largest = tl.maximum(largest, tl.max(tl.abs(w), 1))
    return tl.max(largest, 0)


@triton.jit
def _write_codes(
        CODES, mean, per_unit, W, S, head, num_tokens, num_prefix_tokens, width,
        C: tl.constexpr, TILE: tl.constexpr, CENTRE: tl.constexpr, SPLIT: tl.constexpr, EPS: tl.constexpr,
):
    """Write W and S of a head, see `_prepare`."""
    c = tl.arange(0, C)
    for start in range(0, num_tokens, TILE):
        i = start + tl.arange(0, TILE)
        row, in_i = head * num_tokens + i, i < num_tokens
        at = row[:, None] * (2 * C if SPLIT else C) + c[None, :]
        w = _centred(CODES, mean, i - num_prefix_tokens, num_tokens - num_prefix_tokens, width, C, CENTRE, EPS)
        if SPLIT:
            w *= per_unit
            high = w.to(tl.float16)
            low = (w - high.to(tl.float32)).to(tl.float16)
            tl.store(W + at, high, mask=in_i[:, None])
            tl.store(W + at + C, low, mask=in_i[:, None])
            w = high.to(tl.float32) + low.to(tl.float32)
        else:
            tl.store(W + at, w, mask=in_i[:, None])
        w = w.to(S.dtype.element_ty)
        s = tl.where(
            i >= num_prefix_tokens, tl.sum(w * w, 1), NO_CODE if S.dtype.element_ty == tl.float32 else NO_CODE_WIDE)
        tl.store(S + row, s, mask=in_i)


class PreparedCodes(NamedTuple):
    """Codes as the kernels read them, in the order of their parameters."""
    wx: torch.Tensor
    wy: torch.Tensor
    sx: torch.Tensor
    sy: torch.Tensor
    unit: torch.Tensor

    @classmethod
    def empty(
            cls,
            codes_x: torch.Tensor,
            codes_y: torch.Tensor,
            num_tokens: int,
            dtype: torch.dtype,
    ) -> 'PreparedCodes':
        """Memory for codes `[B, h, N-P, C]` and q of a dtype."""
        rows, codes = codes_x.shape[0] * codes_x.shape[1], (codes_x, codes_y)
        split = dtype.itemsize <= 2
        w = [
            c.new_empty(
                rows, num_tokens, padded(c.shape[-1]) * (2 if split else 1), dtype=torch.float16 if split else None)
            for c in codes]
        s = [c.new_empty(rows, num_tokens, dtype=torch.float64 if dtype == torch.float32 else None) for c in codes]
        return cls(*w, *s, codes_x.new_empty(rows) if split else codes_x.new_ones(rows))

    @classmethod
    def of(cls, codes_x: torch.Tensor, codes_y: torch.Tensor, num_tokens: int, dtype: torch.dtype) -> 'PreparedCodes':
        """For codes `[B, h, N-P, C]` and q of a dtype."""
        codes = [c.contiguous() for c in (codes_x, codes_y)]
        widths = [padded(c.shape[-1]) for c in codes]
        prepared = cls.empty(*codes, num_tokens, dtype)
        tile = min(TILE // max(widths), padded(num_tokens))
        with torch.cuda.device_of(codes_x):
            _prepare[(len(prepared.unit),)](
                *codes, *prepared, num_tokens, num_tokens - codes_x.shape[-2], *(c.shape[-1] for c in codes),
                CX=widths[0], CY=widths[1], TILE=tile, CENTRE=dtype != torch.float32, SPLIT=dtype.itemsize <= 2,
                EPS=torch.finfo(codes_x.dtype).eps, num_warps=max(1, tile * max(widths) // 1024))
        return prepared
