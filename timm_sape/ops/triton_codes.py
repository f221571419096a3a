"""`torch_codes` as Triton kernels: gates, suffix sums and look-ups of a line of patches in registers.

A line is a row of the grid, for the codes along x, or a column, for those along y. Forward, a program owns one line.
Backward, it owns some lines of one head, one after another, computes gates, positions and values again, and sums its
part of the gradient of the table; what programs found is summed outside. No two programs share a patch, so nothing is
added atomically. The columns run second, and add to the gradients of q and k that the rows have stored.

The values at integer positions, source times table, are kept as two products: with the rows m of the table, and with
the steps from m to m+1. So a tile has as many columns as there are cells between positions, 16 for 16 patches.
"""
from typing import Dict, Tuple

import torch
import triton
import triton.language as tl

from .codes import empty_codes, patches_of, register_codes
from .precision import wide, without_autocast
from .triton_common import dense_rows, dtype_of, padded, to_tf32
from .triton_tiles import codes_options

__all__ = ['triton_axis_codes', 'triton_axis_codes_backward']

# New values of these do not compile a kernel anew.
SIZES = ['num_heads', 'num_tokens', 'num_patches', 'lines', 'line_step', 'step', 'length']
# Whether q has more than 16 bits: dtype of the sums of gates, and precision of products for gradients. For the former
# tensor cores multiply 16 bits, and tf32 is finer than that.
PRECISIONS = {
    False: {'SUM': tl.float32, 'GRADIENT_PRECISION': 'tf32'},
    True: {'SUM': tl.float64, 'GRADIENT_PRECISION': 'ieee'},
}
LINES = 4  # of a program of `_backward`
PART = 32  # channels at a time

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
#   lines                   how many there are in a head
#   line_step               from the first patch of a line to that of the next one
#   step, length            from one patch of a line to the next one, and how many patches there are
# Factors: gate_scale of q.k in the gates, shrink of the positions, root (that of shrink) of the codes
# Widths:
#   HEAD_DIM, D             d, and padded
#   C                       length, padded
#   NPOS, M                 integer positions, and the cells between them, padded
#   PART                    channels at a time, since registers do not suffice for more
# USES_Q, USES_K            which of q and k are multiplied with the table; q comes first in the codes
# LINES                     lines of a program of `_backward`
# ADD                       whether gradients are added to what is in DQ and DK
# Precision: see PRECISIONS; DTYPE is that of what is not a sum of gates


@triton.jit
def _load_part(X, at, stride, inside, part, HEAD_DIM: tl.constexpr, PART: tl.constexpr):
    """PART channels of rows of q, k or the table, `[rows, PART]`, 0 where there is nothing."""
    d = part + tl.arange(0, PART)
    return tl.load(X + at[:, None] * stride + d[None, :], mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _gates_and_positions(
        Q, K, row, in_line, sq_n, sk_n, gate_scale, shrink,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, NPOS: tl.constexpr, SUM: tl.constexpr, DTYPE: tl.constexpr,
):
    """Gates of a line, positions, their cells, and how far in the cell they are, `[C, C]`."""
    q = _load_part(Q, row, sq_n, in_line, 0, HEAD_DIM, D)
    k = _load_part(K, row, sk_n, in_line, 0, HEAD_DIM, D)
    logits = tl.dot(q, tl.trans(k), input_precision='ieee', out_dtype=DTYPE) * gate_scale
    gates = tl.where(in_line[None, :], 1.0 / (1.0 + tl.exp(-logits)), 0.0)
    pos = tl.cumsum(gates.to(SUM), axis=1, reverse=True) * shrink
    cell = tl.maximum(tl.minimum(pos.to(tl.int32), NPOS - 2), 0)
    weight = (tl.minimum(pos, NPOS - 1.0, propagate_nan=tl.PropagateNan.ALL) - cell).to(DTYPE)
    return gates, pos, cell, weight


@triton.jit
def _add_values(values, source, rows, DTYPE: tl.constexpr):
    """Add source times rows. 16 bits fit into tf32; the rows of the table are the sum of two such numbers."""
    if source.dtype.primitive_bitwidth <= 16:
        source = source.to(tl.float32)
        high = to_tf32(rows)
        values = tl.dot(source, tl.trans(rows - high), acc=values, input_precision='tf32')
        return tl.dot(source, tl.trans(high), acc=values, input_precision='tf32')
    return values + tl.dot(source, tl.trans(rows), input_precision='ieee', out_dtype=DTYPE)


@triton.jit
def _look_up(
        SOURCE, row, in_line, stride, TABLE, cell, weight, OUT, at, inside, root,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, C: tl.constexpr, NPOS: tl.constexpr, M: tl.constexpr,
        PART: tl.constexpr, DTYPE: tl.constexpr,
):
    """Store the codes that one source contributes."""
    m = tl.arange(0, M)
    low = tl.zeros([C, M], DTYPE)
    step = tl.zeros([C, M], DTYPE)
    for part in tl.static_range(0, D, PART):
        source = _load_part(SOURCE, row, stride, in_line, part, HEAD_DIM, PART)
        rows = _load_part(TABLE, m, HEAD_DIM, m < NPOS - 1, part, HEAD_DIM, PART)
        steps = _load_part(TABLE, m + 1, HEAD_DIM, m < NPOS - 1, part, HEAD_DIM, PART) - rows
        low = _add_values(low, source, rows, DTYPE)
        step = _add_values(step, source, steps, DTYPE)
    tl.store(OUT + at, (tl.gather(low, cell, 1) + weight * tl.gather(step, cell, 1)) * root, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _forward(
        Q, K, TABLE, OUT,
        sq_b, sq_h, sq_n, sk_b, sk_h, sk_n,
        num_heads, num_tokens, num_patches, lines, line_step, step, length, gate_scale, shrink, root,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, C: tl.constexpr, NPOS: tl.constexpr, M: tl.constexpr,
        PART: tl.constexpr, USES_Q: tl.constexpr, USES_K: tl.constexpr,
        SUM: tl.constexpr, GRADIENT_PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):
    """The codes of one line."""
    line, head = tl.program_id(0) % lines, (tl.program_id(0) // lines).to(tl.int64)
    b, h = head // num_heads, head % num_heads
    q_head, k_head = Q + b * sq_b + h * sq_h, K + b * sk_b + h * sk_h
    t = tl.arange(0, C)
    row, in_line = line * line_step + t * step, t < length
    _, _, cell, weight = _gates_and_positions(
        q_head, k_head, row, in_line, sq_n, sk_n, gate_scale, shrink, HEAD_DIM, D, NPOS, SUM, DTYPE)
    inside = in_line[:, None] & in_line[None, :]
    width = length * (2 if USES_Q and USES_K else 1)
    at = (head * num_patches + row)[:, None] * width + t[None, :]
    if USES_Q:
        _look_up(
            q_head, row, in_line, sq_n, TABLE, cell, weight, OUT, at, inside, root,
            HEAD_DIM, D, C, NPOS, M, PART, DTYPE)
    if USES_K:
        _look_up(
            k_head, row, in_line, sk_n, TABLE, cell, weight, OUT, at + (length if USES_Q else 0), inside, root,
            HEAD_DIM, D, C, NPOS, M, PART, DTYPE)


@triton.jit
def _value_gradients(
        SOURCE, row, in_line, stride, TABLE, DOUT, at, inside, pos, cell, root,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, C: tl.constexpr, NPOS: tl.constexpr, M: tl.constexpr,
        PART: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):
    """For one source: gradients of the positions, `[C, C]`, of the values at positions below M, `[C, M]`, and at M.

    Each value receives the gradients of the codes that were looked up near it.
    """
    m = tl.arange(0, M)
    slopes = tl.zeros([C, M], DTYPE)
    for part in tl.static_range(0, D, PART):
        source = _load_part(SOURCE, row, stride, in_line, part, HEAD_DIM, PART).to(DTYPE)
        steps = _load_part(TABLE, m + 1, HEAD_DIM, m < NPOS - 1, part, HEAD_DIM, PART)
        steps -= _load_part(TABLE, m, HEAD_DIM, m < NPOS - 1, part, HEAD_DIM, PART)
        slopes += tl.dot(source.to(DTYPE), tl.trans(steps), input_precision=PRECISION, out_dtype=DTYPE)
    dcode = tl.load(DOUT + at, mask=inside, other=0.0) * root
    dpos = dcode * tl.gather(slopes, cell, 1)
    pos = tl.minimum(pos, NPOS - 1.0, propagate_nan=tl.PropagateNan.ALL)
    dz = tl.zeros([C, M], DTYPE)
    for n in range(min(NPOS, M)):
        share = tl.maximum((1.0 - tl.abs(pos - n)).to(DTYPE), 0.0, propagate_nan=tl.PropagateNan.ALL)
        dz += tl.where(m[None, :] == n, tl.sum(dcode * share, 1)[:, None], 0.0)
    share = tl.maximum((pos - (M - 1)).to(DTYPE), 0.0, propagate_nan=tl.PropagateNan.ALL)
    return dpos, dz, tl.sum(dcode * share, 1)


@triton.jit
def _store_gradients(
        DX, dx, source, row, mask, dz, dz_last, TABLE, DTABLE, part, before,
        HEAD_DIM: tl.constexpr, NPOS: tl.constexpr, M: tl.constexpr, PART: tl.constexpr,
        IS_SOURCE: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):
    """Store, or add to what is stored, for PART channels: the gradient of q or k, and of the table if they are used.

    dx is the gradient through the gates. No other program uses this part of DTABLE, which is empty if `before` is 0.
    """
    m, d = tl.arange(0, M), part + tl.arange(0, PART)
    if IS_SOURCE:
        rows = _load_part(TABLE, m, HEAD_DIM, m < NPOS, part, HEAD_DIM, PART)
        dx += tl.dot(dz, rows, input_precision=PRECISION, out_dtype=DTYPE)
        to = DTABLE + m[:, None] * HEAD_DIM + d[None, :]
        in_table = (m < NPOS)[:, None] & (d < HEAD_DIM)[None, :]
        tl.debug_barrier()  # a thread may read what another one stored
        dtable = tl.load(to, mask=in_table & (m < before * M)[:, None], other=0.0)
        dtable += tl.dot(tl.trans(dz), source, input_precision=PRECISION, out_dtype=DTYPE)
        tl.store(to, dtable, mask=in_table)
        if NPOS > M:
            last = tl.load(TABLE + M * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
            dx += dz_last[:, None] * last[None, :]
            to_last = DTABLE + M * HEAD_DIM + d
            dlast = tl.load(to_last, mask=(d < HEAD_DIM) & (d < before * HEAD_DIM), other=0.0)
            tl.store(to_last, dlast + tl.sum(dz_last[:, None] * source, 0), mask=d < HEAD_DIM)
    at = DX + row[:, None] * HEAD_DIM + d[None, :]
    if ADD:
        dx += tl.load(at, mask=mask, other=0.0).to(DTYPE)
    tl.store(at, dx.to(DX.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _backward(
        Q, K, TABLE, DOUT, DQ, DK, DTABLE,
        sq_b, sq_h, sq_n, sk_b, sk_h, sk_n,
        num_heads, num_tokens, num_patches, lines, line_step, step, length, gate_scale, shrink, root,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, C: tl.constexpr, NPOS: tl.constexpr, M: tl.constexpr,
        PART: tl.constexpr, USES_Q: tl.constexpr, USES_K: tl.constexpr, LINES: tl.constexpr, ADD: tl.constexpr,
        SUM: tl.constexpr, GRADIENT_PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):
    """Gradients of q and k for some lines of one head, and their part of the gradient of the table."""
    groups = tl.cdiv(lines, LINES)
    group, head = tl.program_id(0) % groups, (tl.program_id(0) // groups).to(tl.int64)
    b, h = head // num_heads, head % num_heads
    q_head, k_head = Q + b * sq_b + h * sq_h, K + b * sk_b + h * sk_h
    prefix = num_tokens - num_patches
    t = tl.arange(0, C)
    if not ADD:
        if group == 0:  # prefix tokens have no codes
            channels = tl.arange(0, D)
            for n in range(prefix):
                zero_at = (head * num_tokens + n) * HEAD_DIM + channels
                tl.store(DQ + zero_at, tl.zeros([D], DQ.dtype.element_ty), mask=channels < HEAD_DIM)
                tl.store(DK + zero_at, tl.zeros([D], DK.dtype.element_ty), mask=channels < HEAD_DIM)
    in_line = t < length
    inside = in_line[:, None] & in_line[None, :]
    width = length * (2 if USES_Q and USES_K else 1)
    dtable = DTABLE + tl.program_id(0).to(tl.int64) * NPOS * HEAD_DIM
    for line in range(group * LINES, tl.minimum(group * LINES + LINES, lines)):
        row = line * line_step + t * step
        gates, pos, cell, _ = _gates_and_positions(
            q_head, k_head, row, in_line, sq_n, sk_n, gate_scale, shrink, HEAD_DIM, D, NPOS, SUM, DTYPE)
        at = (head * num_patches + row)[:, None] * width + t[None, :]
        dpos = tl.zeros([C, C], DTYPE)
        if USES_Q:
            dpos_q, dz_q, last_q = _value_gradients(
                q_head, row, in_line, sq_n, TABLE, DOUT, at, inside, pos, cell, root,
                HEAD_DIM, D, C, NPOS, M, PART, GRADIENT_PRECISION, DTYPE)
            dpos += dpos_q
        if USES_K:
            dpos_k, dz_k, last_k = _value_gradients(
                k_head, row, in_line, sk_n, TABLE, DOUT, at + (length if USES_Q else 0), inside, pos, cell, root,
                HEAD_DIM, D, C, NPOS, M, PART, GRADIENT_PRECISION, DTYPE)
            dpos += dpos_k
        dpos = tl.where(pos > NPOS - 1.0, 0.0, dpos)
        dgates = tl.cumsum(dpos, axis=1) * shrink  # the gate of patch j is part of all positions up to j
        dlogits = dgates * gates * (1.0 - gates) * gate_scale
        to_row = head * num_tokens + prefix + row
        before = line - group * LINES
        for part in tl.static_range(0, D, PART):  # registers do not suffice for all channels of a long head at once
            mask = in_line[:, None] & (part + tl.arange(0, PART) < HEAD_DIM)[None, :]
            q = _load_part(q_head, row, sq_n, in_line, part, HEAD_DIM, PART).to(DTYPE)
            k = _load_part(k_head, row, sk_n, in_line, part, HEAD_DIM, PART).to(DTYPE)
            dq = tl.dot(dlogits, k, input_precision=GRADIENT_PRECISION, out_dtype=DTYPE)
            _store_gradients(
                DQ, dq, q, to_row, mask, dz_q if USES_Q else dpos, last_q if USES_Q else t, TABLE, dtable, part,
                before, HEAD_DIM, NPOS, M, PART, USES_Q, ADD, GRADIENT_PRECISION, DTYPE)
            dk = tl.dot(tl.trans(dlogits), q, input_precision=GRADIENT_PRECISION, out_dtype=DTYPE)
            _store_gradients(
                DK, dk, k, to_row, mask, dz_k if USES_K else dpos, last_k if USES_K else t, TABLE, dtable, part,
                before + (1 if USES_Q else 0), HEAD_DIM, NPOS, M, PART, USES_K, ADD, GRADIENT_PRECISION, DTYPE)


def tiles_for(head_dim: int, length: int, npos: int) -> Dict[str, int]:
    """Padded sizes: channels of a head, patches of a line, cells; and channels at a time."""
    d = padded(head_dim)
    return {'D': d, 'C': padded(length), 'M': padded(npos - 1), 'PART': min(d, PART)}


def _axes(height: int, width: int, shrink_x: float, shrink_y: float) -> Tuple[Dict[str, object], Dict[str, object]]:
    """Lines along x (rows) and along y (columns), as the kernels are told of them."""
    return (
        dict(lines=height, line_step=width, step=1, length=width, shrink=shrink_x),
        dict(lines=width, line_step=1, step=width, length=height, shrink=shrink_y),
    )


def _launch(kernel, lines, axis, q, k, tensors, table, num_tokens, mode, gate_scale, **constants) -> None:
    """For so many lines of all heads, of q and k without prefix tokens."""
    batch, num_heads, num_patches, head_dim = q.shape
    with torch.cuda.device_of(q):
        kernel[(lines * batch * num_heads,)](
            q, k, table, *tensors, *(t.stride(n) for t in (q, k) for n in range(3)),
            num_heads, num_tokens, num_patches, **axis, gate_scale=gate_scale, root=axis['shrink'] ** 0.5,
            HEAD_DIM=head_dim, NPOS=table.shape[0], **tiles_for(head_dim, axis['length'], table.shape[0]),
            USES_Q='q' in mode, USES_K='k' in mode, DTYPE=dtype_of(table), **PRECISIONS[q.element_size() > 2],
            **codes_options(axis['length'], q.element_size(), len(mode), 'ADD' in constants), **constants)


@torch.library.custom_op('timm_sape::axis_codes_triton', mutates_args=())
@without_autocast
def triton_axis_codes(
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
    num_tokens = q.shape[2]
    q, k = patches_of(height, width, *dense_rows(q, k))
    codes = empty_codes(q, height, width, mode)
    tables = (t.to(codes[0].dtype) for t in wide(table_x, table_y))
    for out, table, axis in zip(codes, tables, _axes(height, width, shrink_x, shrink_y)):
        _launch(_forward, axis['lines'], axis, q, k, (out,), table, num_tokens, mode, gate_scale)
    return codes


@torch.library.custom_op('timm_sape::axis_codes_triton_backward', mutates_args=())
@without_autocast
def triton_axis_codes_backward(
        grad_x: torch.Tensor,
        grad_y: torch.Tensor,
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
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tokens = q.shape[2]
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k)]
    patches = patches_of(height, width, *dense_rows(q, k))
    axes = _axes(height, width, shrink_x, shrink_y)
    tables = (t.to(grad_x.dtype) for t in wide(table_x, table_y))
    for add, (grad, table, axis) in enumerate(zip((grad_x, grad_y), tables, axes)):
        groups = -(-axis['lines'] // LINES)
        parts = grad.new_empty(groups * q.shape[0] * q.shape[1], *table.shape)
        tensors = grad.contiguous(), *grads[:2], parts
        _launch(
            _backward, groups, axis, *patches, tensors, table, num_tokens, mode, gate_scale, LINES=LINES, ADD=bool(add))
        grads.append(parts.sum(0))
    return tuple(g.to(t.dtype) for g, t in zip(grads, (q, k, table_x, table_y)))


register_codes(triton_axis_codes, triton_axis_codes_backward)
