"""`torch_codes` as Triton kernels: gates, suffix sums and look-ups of a line of patches in registers.

A line is a row of the grid, for the codes along x, or a column, for those along y. A program owns some lines of one
head, one after another. Backward it computes gates and positions again, and sums its part of the gradient of the table;
what programs found is summed outside. No two programs share a patch, so nothing is added atomically. The columns run
second, and add to the gradients of q and k that the rows have stored.

A tile of values has a column for each cell between integer positions, 16 for 16 patches. There is one more position
than that. If its column would double the tile, it is kept apart, as `last`.
"""
from typing import Dict, Tuple

import torch
import triton
import triton.language as tl

from .codes import empty_codes, patches_of
from .precision import wide
from .triton_common import dense_rows, dtype_of, load_rows, padded, to_tf32
from .triton_tiles import codes_options

__all__ = ['codes_of', 'gradients_of']

# New values of these do not compile a kernel anew.
SIZES = ['num_heads', 'num_tokens', 'num_patches', 'lines', 'lines_each', 'line_step', 'step', 'length']
PATCHES = 128  # in the lines of a program, at most, with padding

# The parameters of the kernels, by groups. A name with D in front is the gradient of what follows.
#
# Tensors:
#   Q, K                    of the patches, [B, h, H*W, d], with any strides but that of the channels, which is 1
#   TABLE                   [NPOS, d], contiguous
#   OUT, DOUT               codes, [B*h, H*W, length], or twice as wide with both sources, contiguous
#   DQ, DK                  of all tokens, [B*h, N, d], contiguous
#   DTABLE                  a part from each program, [programs, NPOS, d], contiguous
# Strides: sq_b, sq_h, sq_n, sk_b, sk_h, sk_n of q and k along batch, heads and patches
# Sizes: num_heads h, num_tokens N, num_patches H*W
# Lines, see `_axes`:
#   lines, lines_each       how many there are in a head, and how many of them a program owns
#   line_step               from the first patch of a line to that of the next one
#   step, length            from one patch of a line to the next one, and how many patches there are
# Factors: gate_scale of q.k in the gates, shrink of the positions, root (that of shrink) of the codes
# Widths:
#   HEAD_DIM, D             d, and padded
#   C                       length, padded
#   NPOS, M                 integer positions, and the cells between them, padded
# USES_Q, USES_K            which of q and k are multiplied with the table; q comes first in the codes
# ADD                       whether gradients are added to what is in DQ and DK
# DTYPE                     of what is computed; for q of 32 bits, gates are summed in float64
#
# Products for gradients have their factors in the dtype of q, except where this is not enough.


@triton.jit
def _sums(x, t, BACKWARDS: tl.constexpr, DTYPE_16: tl.constexpr):
    """Cumulative sums along lines, `[C, C]`, as products with a triangle of ones: threads exchange less than in a scan.

    x is split into two numbers of 16 bits.
    """
    if BACKWARDS:
        is_part = t[:, None] >= t[None, :]
    else:
        is_part = t[:, None] <= t[None, :]
    ones = tl.where(is_part, 1.0, 0.0).to(DTYPE_16)
    high = x.to(DTYPE_16)
    low = (x - high.to(x.dtype)).to(DTYPE_16)
    return tl.dot(high, ones, acc=tl.dot(low, ones))


@triton.jit
def _gates_and_positions(q, k, t, in_line, gate_scale, shrink, NPOS: tl.constexpr, DTYPE: tl.constexpr):
    """Gates of a line, positions, their cells, and how far in the cell they are, `[C, C]`."""
    logits = tl.dot(q, tl.trans(k), input_precision='ieee', out_dtype=DTYPE) * gate_scale
    gates = tl.where(in_line[None, :], 1.0 / (1.0 + tl.exp(-logits)), 0.0)
    if q.dtype.primitive_bitwidth <= 16:
        pos = _sums(gates, t, True, tl.float16) * shrink
    else:
        pos = tl.cumsum(gates.to(tl.float64), axis=1, reverse=True) * shrink
    cell = tl.maximum(tl.minimum(pos.to(tl.int32), NPOS - 2), 0)
    weight = (tl.minimum(pos, NPOS - 1.0, propagate_nan=tl.PropagateNan.ALL) - cell).to(DTYPE)
    return gates, pos, cell, weight


@triton.jit
def _table_parts(TABLE, like, HEAD_DIM: tl.constexpr, D: tl.constexpr, NPOS: tl.constexpr, M: tl.constexpr):
    """The table at positions below M, `[D, M]`, as the three numbers that q is multiplied with.

    They are three of bfloat16 or, as fp16 has too small a range, two of tf32. For more bits the first is the table.
    """
    m = tl.arange(0, M)
    rows = tl.trans(load_rows(TABLE, m, HEAD_DIM, m < NPOS, HEAD_DIM, D))
    first, second, third = rows, rows, rows
    if like.dtype.element_ty == tl.bfloat16:
        first = rows.to(tl.bfloat16)
        rest = rows - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    elif like.dtype.element_ty == tl.float16:
        first = to_tf32(rows)
        second = rows - first
    return first, second, third


@triton.jit
def _values(source, first, second, third, DTYPE: tl.constexpr):
    """Source times the table, `[C, M]`."""
    if source.dtype == tl.bfloat16:
        values = tl.dot(source, third)
        values = tl.dot(source, second, acc=values)
        values = tl.dot(source, first, acc=values)
    elif source.dtype == tl.float16:  # tf32 is finer
        source = source.to(tl.float32)
        values = tl.dot(source, second, input_precision='tf32')
        values = tl.dot(source, first, acc=values, input_precision='tf32')
    else:
        values = tl.dot(source, first, input_precision='ieee', out_dtype=DTYPE)
    return values


@triton.jit
def _last_row(TABLE, HEAD_DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr):
    """Row M of the table, `[1, D]`."""
    d = tl.arange(0, D)
    return tl.load(TABLE + M * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)[None, :]


@triton.jit
def _look_up(
        source, TABLE, first, second, third, cell, weight, OUT, at, inside, root,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, NPOS: tl.constexpr, M: tl.constexpr, DTYPE: tl.constexpr,
):
    """Store the codes that one source contributes."""
    values = _values(source, first, second, third, DTYPE)
    low = tl.gather(values, cell, 1)
    high = tl.gather(values, tl.minimum(cell + 1, M - 1), 1)
    if NPOS > M:
        last = tl.sum(source.to(DTYPE) * _last_row(TABLE, HEAD_DIM, D, M), 1)
        high = tl.where(cell == M - 1, last[:, None], high)
    tl.store(OUT + at, (low + weight * (high - low)) * root, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _forward(
        Q, K, TABLE, OUT,
        sq_b, sq_h, sq_n, sk_b, sk_h, sk_n,
        num_heads, num_tokens, num_patches, lines, lines_each, line_step, step, length, gate_scale, shrink, root,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, C: tl.constexpr, NPOS: tl.constexpr, M: tl.constexpr,
        USES_Q: tl.constexpr, USES_K: tl.constexpr, DTYPE: tl.constexpr,
):
    """The codes of some lines of one head."""
    programs = tl.cdiv(lines, lines_each)
    program, head = tl.program_id(0) % programs, (tl.program_id(0) // programs).to(tl.int64)
    b, h = head // num_heads, head % num_heads
    q_head, k_head = Q + b * sq_b + h * sq_h, K + b * sk_b + h * sk_h
    t = tl.arange(0, C)
    in_line = t < length
    inside = in_line[:, None] & in_line[None, :]
    width = length * (2 if USES_Q and USES_K else 1)
    first, second, third = _table_parts(TABLE, Q, HEAD_DIM, D, NPOS, M)
    for line in range(program * lines_each, tl.minimum(program * lines_each + lines_each, lines)):
        row = line * line_step + t * step
        q = load_rows(q_head, row, sq_n, in_line, HEAD_DIM, D)
        k = load_rows(k_head, row, sk_n, in_line, HEAD_DIM, D)
        _, _, cell, weight = _gates_and_positions(q, k, t, in_line, gate_scale, shrink, NPOS, DTYPE)
        at = (head * num_patches + row)[:, None] * width + t[None, :]
        if USES_Q:
            _look_up(
                q, TABLE, first, second, third, cell, weight, OUT, at, inside, root, HEAD_DIM, D, NPOS, M, DTYPE)
        if USES_K:
            _look_up(
                k, TABLE, first, second, third, cell, weight, OUT, at + (length if USES_Q else 0), inside, root,
                HEAD_DIM, D, NPOS, M, DTYPE)


@triton.jit
def _value_gradients(
        source, steps, DOUT, at, inside, pos, cell, num_reached, root,
        C: tl.constexpr, NPOS: tl.constexpr, M: tl.constexpr, DTYPE: tl.constexpr,
):
    """For one source: gradients of the positions, `[C, C]`, of the values at positions below M, `[C, M]`, and at M.

    Each value receives the gradients of the codes that were looked up near it.
    """
    m = tl.arange(0, M)
    slopes = tl.dot(source, steps, input_precision='ieee', out_dtype=DTYPE)
    dcode = tl.load(DOUT + at, mask=inside, other=0.0) * root
    dpos = dcode * tl.gather(slopes, cell, 1)
    pos = tl.minimum(pos, NPOS - 1.0, propagate_nan=tl.PropagateNan.ALL)
    dz = tl.zeros([C, M], DTYPE)
    for n in range(num_reached):
        share = tl.maximum((1.0 - tl.abs(pos - n)).to(DTYPE), 0.0, propagate_nan=tl.PropagateNan.ALL)
        dz += tl.where(m[None, :] == n, tl.sum(dcode * share, 1)[:, None], 0.0)
    share = tl.maximum((pos - (M - 1)).to(DTYPE), 0.0, propagate_nan=tl.PropagateNan.ALL)
    return dpos, dz, tl.sum(dcode * share, 1)


@triton.jit
def _source_gradient(
        dx, dz, dz_last, rows, TABLE,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, NPOS: tl.constexpr, M: tl.constexpr, DTYPE: tl.constexpr,
):
    """Add the gradient of q or k through the values."""
    dx += tl.dot(dz.to(rows.dtype), rows, input_precision='ieee', out_dtype=DTYPE)
    if NPOS > M:
        dx += dz_last[:, None] * _last_row(TABLE, HEAD_DIM, D, M)
    return dx


@triton.jit
def _add_table_gradient(dtable, dlast, dz, dz_last, source, NPOS: tl.constexpr, M: tl.constexpr, DTYPE: tl.constexpr):
    """Add what one source contributes to the gradient of the table below position M, `[M, D]`, and at M, `[D]`.

    If codes are close to each other, what tokens contribute nearly cancels. So dz is two numbers of 16 bits, not one.
    """
    high = dz.to(source.dtype)
    dtable += tl.dot(tl.trans(high), source, input_precision='ieee', out_dtype=DTYPE)
    if source.dtype.primitive_bitwidth <= 16:
        low = (dz - high.to(DTYPE)).to(source.dtype)
        dtable += tl.dot(tl.trans(low), source, input_precision='ieee', out_dtype=DTYPE)
    if NPOS > M:
        dlast += tl.sum(dz_last[:, None] * source.to(DTYPE), 0)
    return dtable, dlast


@triton.jit
def _store_tokens(DX, dx, row, inside, HEAD_DIM: tl.constexpr, D: tl.constexpr, ADD: tl.constexpr):
    """Store gradients of q or k, or add them to what is stored."""
    d = tl.arange(0, D)
    at, mask = DX + row[:, None] * HEAD_DIM + d[None, :], inside[:, None] & (d < HEAD_DIM)[None, :]
    if ADD:
        dx += tl.load(at, mask=mask, other=0.0).to(dx.dtype)
    tl.store(at, dx.to(DX.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _backward(
        Q, K, TABLE, DOUT, DQ, DK, DTABLE,
        sq_b, sq_h, sq_n, sk_b, sk_h, sk_n,
        num_heads, num_tokens, num_patches, lines, lines_each, line_step, step, length, gate_scale, shrink, root,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, C: tl.constexpr, NPOS: tl.constexpr, M: tl.constexpr,
        USES_Q: tl.constexpr, USES_K: tl.constexpr, ADD: tl.constexpr, DTYPE: tl.constexpr,
):
    """Gradients of q and k for some lines of one head, and their part of the gradient of the table."""
    programs = tl.cdiv(lines, lines_each)
    program, head = tl.program_id(0) % programs, (tl.program_id(0) // programs).to(tl.int64)
    b, h = head // num_heads, head % num_heads
    q_head, k_head = Q + b * sq_b + h * sq_h, K + b * sk_b + h * sk_h
    prefix = num_tokens - num_patches
    t, d, m = tl.arange(0, C), tl.arange(0, D), tl.arange(0, M)
    if not ADD:
        if program == 0:  # prefix tokens have no codes
            for n in range(prefix):
                zero_at = (head * num_tokens + n) * HEAD_DIM + d
                tl.store(DQ + zero_at, tl.zeros([D], DQ.dtype.element_ty), mask=d < HEAD_DIM)
                tl.store(DK + zero_at, tl.zeros([D], DK.dtype.element_ty), mask=d < HEAD_DIM)
    in_line = t < length
    inside = in_line[:, None] & in_line[None, :]
    width = length * (2 if USES_Q and USES_K else 1)
    rows = load_rows(TABLE, m, HEAD_DIM, m < NPOS, HEAD_DIM, D)
    steps = load_rows(TABLE, m + 1, HEAD_DIM, m < NPOS - 1, HEAD_DIM, D)
    steps = tl.trans(tl.where((m < NPOS - 1)[:, None], steps - rows, 0.0)).to(Q.dtype.element_ty)
    rows = rows.to(Q.dtype.element_ty)
    dtable, dlast = tl.zeros([M, D], DTYPE), tl.zeros([D], DTYPE)
    for line in range(program * lines_each, tl.minimum(program * lines_each + lines_each, lines)):
        row = line * line_step + t * step
        q = load_rows(q_head, row, sq_n, in_line, HEAD_DIM, D)
        k = load_rows(k_head, row, sk_n, in_line, HEAD_DIM, D)
        gates, pos, cell, _ = _gates_and_positions(q, k, t, in_line, gate_scale, shrink, NPOS, DTYPE)
        # Values above all positions of the line get no gradient. NaN counts as above all.
        reached = tl.where(pos <= NPOS - 1.0, cell, NPOS - 2)
        num_reached = tl.minimum(tl.max(tl.max(reached, 1), 0) + 2, min(NPOS, M))
        at = (head * num_patches + row)[:, None] * width + t[None, :]
        dpos = tl.zeros([C, C], DTYPE)
        if USES_Q:
            dpos_q, dz_q, last_q = _value_gradients(
                q, steps, DOUT, at, inside, pos, cell, num_reached, root, C, NPOS, M, DTYPE)
            dpos += dpos_q
            dtable, dlast = _add_table_gradient(dtable, dlast, dz_q, last_q, q, NPOS, M, DTYPE)
        if USES_K:
            dpos_k, dz_k, last_k = _value_gradients(
                k, steps, DOUT, at + (length if USES_Q else 0), inside, pos, cell, num_reached, root, C, NPOS, M, DTYPE)
            dpos += dpos_k
            dtable, dlast = _add_table_gradient(dtable, dlast, dz_k, last_k, k, NPOS, M, DTYPE)
        dpos = tl.where(pos >= NPOS - 1.0, 0.0, dpos)
        # the gate of patch j is part of all positions up to j
        if q.dtype.primitive_bitwidth <= 16:
            dgates = _sums(dpos, t, False, q.dtype) * shrink
        else:
            dgates = tl.cumsum(dpos, axis=1) * shrink
        dlogits = (dgates * gates * (1.0 - gates) * gate_scale).to(q.dtype)
        to_row = head * num_tokens + prefix + row
        dq = tl.dot(dlogits, k, input_precision='ieee', out_dtype=DTYPE)
        if USES_Q:
            dq = _source_gradient(dq, dz_q, last_q, rows, TABLE, HEAD_DIM, D, NPOS, M, DTYPE)
        _store_tokens(DQ, dq, to_row, in_line, HEAD_DIM, D, ADD)
        dk = tl.dot(tl.trans(dlogits), q, input_precision='ieee', out_dtype=DTYPE)
        if USES_K:
            dk = _source_gradient(dk, dz_k, last_k, rows, TABLE, HEAD_DIM, D, NPOS, M, DTYPE)
        _store_tokens(DK, dk, to_row, in_line, HEAD_DIM, D, ADD)
    to = DTABLE + tl.program_id(0).to(tl.int64) * NPOS * HEAD_DIM + d
    tl.store(to[None, :] + m[:, None] * HEAD_DIM, dtable, mask=(m < NPOS)[:, None] & (d < HEAD_DIM)[None, :])
    if NPOS > M:
        tl.store(to + M * HEAD_DIM, dlast, mask=d < HEAD_DIM)


def _lines_each(lines: int, length: int) -> int:
    """How many lines a program owns: about the same number for all."""
    programs = -(-lines * padded(length) // PATCHES)
    return -(-lines // programs)


def _axes(height: int, width: int, shrink_x: float, shrink_y: float) -> Tuple[Dict[str, object], Dict[str, object]]:
    """Lines along x (rows) and along y (columns), as the kernels are told of them."""
    of_rows, of_columns = _lines_each(height, width), _lines_each(width, height)
    return (
        dict(lines=height, lines_each=of_rows, line_step=width, step=1, length=width, shrink=shrink_x),
        dict(lines=width, lines_each=of_columns, line_step=1, step=width, length=height, shrink=shrink_y),
    )


def _programs(axis: Dict[str, object]) -> int:
    """How many there are for a head."""
    return -(-axis['lines'] // axis['lines_each'])


def _launch(kernel, axis, q, k, tensors, table, num_tokens, mode, gate_scale, **constants) -> None:
    """For the lines of all heads, of q and k without prefix tokens."""
    batch, num_heads, num_patches, head_dim = q.shape
    length, npos = axis['length'], len(table)
    with torch.cuda.device_of(q):
        kernel[(_programs(axis) * batch * num_heads,)](
            q, k, table, *tensors, *q.stride()[:3], *k.stride()[:3],
            num_heads, num_tokens, num_patches, **axis, gate_scale=gate_scale, root=axis['shrink'] ** 0.5,
            HEAD_DIM=head_dim, D=padded(head_dim), C=padded(length), NPOS=npos, M=padded(npos - 1),
            USES_Q='q' in mode, USES_K='k' in mode, DTYPE=dtype_of(table),
            **codes_options(head_dim, length, q.element_size(), len(mode), 'ADD' in constants), **constants)


def codes_of(
        q: torch.Tensor,
        k: torch.Tensor,
        table_x: torch.Tensor,
        table_y: torch.Tensor,
        height: int,
        width: int,
        mode: str,
        gate_scale: float,
        shrink_x: float,
        shrink_y: float,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """The codes along x and along y. For the arguments see `codes.CODES`."""
    num_tokens = q.shape[2]
    q, k = patches_of(height, width, *dense_rows(q, k))
    codes = empty_codes(q, height, width, mode)
    tables = (t.to(codes[0].dtype) for t in wide(table_x, table_y))
    for out, table, axis in zip(codes, tables, _axes(height, width, shrink_x, shrink_y)):
        _launch(_forward, axis, q, k, (out,), table, num_tokens, mode, gate_scale)
    return codes


def gradients_of(
        grad_x: torch.Tensor,
        grad_y: torch.Tensor,
        grad_q: torch.Tensor,
        grad_k: torch.Tensor,
        add: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        table_x: torch.Tensor,
        table_y: torch.Tensor,
        height: int,
        width: int,
        mode: str,
        gate_scale: float,
        shrink_x: float,
        shrink_y: float,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the tables; those of q and k are written to `grad_q` and `grad_k`, contiguous, or added."""
    num_tokens, grads = q.shape[2], []
    patches = patches_of(height, width, *dense_rows(q, k))
    axes = _axes(height, width, shrink_x, shrink_y)
    tables = (t.to(grad_x.dtype) for t in wide(table_x, table_y))
    for grad, table, axis in zip((grad_x, grad_y), tables, axes):
        parts = grad.new_empty(_programs(axis) * q.shape[0] * q.shape[1], *table.shape)
        tensors = grad.contiguous(), grad_q, grad_k, parts
        _launch(_backward, axis, *patches, tensors, table, num_tokens, mode, gate_scale, ADD=add)
        grads.append(parts.sum(0))
        add = True
    return grads[0].to(table_x.dtype), grads[1].to(table_y.dtype)
