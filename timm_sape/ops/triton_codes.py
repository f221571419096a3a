"""`torch_codes` as Triton kernels: a program computes gates, suffix sums and look-ups of one line of patches.

A line is a row of the grid, for the codes along x, or a column, for those along y. Its C x C gates, positions and
weights stay in registers; the backward pass computes them again. Only there are the positions stored: a second kernel
sums from them the gradients of the values at integer positions, for some patches at a time. The values, `[N, npos]` per
head, are products of the sources with the tables, and plain matrix products outside the kernels. No two programs share
a patch, so nothing is added atomically.
"""
from typing import Dict, List, Tuple

import torch
import triton
import triton.language as tl

from .codes import empty_codes, register_codes, sources_of
from .precision import wide, without_autocast
from .triton_common import dense_rows, dtype_of, padded

__all__ = ['triton_axis_codes', 'triton_axis_codes_backward']

# New values of these do not compile a kernel anew. For Z that costs little: its rows are seldom a multiple of 16 bytes,
# so it could hardly be loaded in vectors anyway.
SIZES = ['num_heads', 'num_patches', 'lines', 'line_step', 'step', 'length', 'z_row', 'z_source', 'Z']
# Whether q has more than 16 bits: precision of products, and dtype of the sums of gates. Distances between the codes of
# neighbours multiply what is lost here.
PRECISIONS = {
    False: {'PRECISION': 'tf32x3', 'SUM': tl.float32},
    True: {'PRECISION': 'ieee', 'SUM': tl.float64},
}

ROWS = 32

# The parameters of the kernels, by groups. A name with D in front is the gradient of what follows.
#
# Tensors:
#   Q, K                    [B, h, H*W, d], with any strides but that of the channels, which is 1
#   Z, DZ                   values at integer positions, one block for each source, [S, B*h, H*W, NPOS]
#   OUT, DOUT               codes, [B*h, H*W, S*length], contiguous
#   DQ, DK                  [B*h, H*W, d], contiguous
#   POS                     positions, [B*h, H*W, length], contiguous
# Strides: sq_b, sq_h, sq_n, sk_b, sk_h, sk_n of q and k along batch, heads and patches; z_row and z_source of Z
# Sizes: num_heads h, num_patches H*W; num_rows B*h*H*W, of which a program of `_backward_values` takes ROWS
# Lines, see `_axes`:
#   lines                   how many there are in a head
#   line_step               from the first patch of a line to that of the next one
#   step, length            from one patch of a line to the next one, and how many patches there are
# Factors: gate_scale of q.k in the gates, shrink of the positions, root (that of shrink) of the codes
# Widths:
#   HEAD_DIM, D             d, and padded
#   C                       length, padded
#   NPOS, M                 integer positions, and the cells between them, padded
#   SOURCES                 1, or 2 for mode 'qk'
# ADD                       whether gradients are added to what is in DQ and DK
# Precision: PRECISION and GRADIENT_PRECISION of products, SUM is the dtype of sums of gates, DTYPE that of the rest


@triton.jit
def _gates_and_positions(
        Q, K, q_line, k_line, sq_n, sk_n, step, length, gate_scale, shrink,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, C: tl.constexpr, NPOS: tl.constexpr,
        PRECISION: tl.constexpr, SUM: tl.constexpr, DTYPE: tl.constexpr,
):
    """q and k of a line, `[C, D]`, and `[C, C]`: gates, positions, their cells, and how far in the cell they are."""
    t, d = tl.arange(0, C), tl.arange(0, D)
    mask = (t[:, None] < length) & (d[None, :] < HEAD_DIM)
    q = tl.load(Q + q_line + t[:, None] * step * sq_n + d[None, :], mask=mask, other=0.0)
    k = tl.load(K + k_line + t[:, None] * step * sk_n + d[None, :], mask=mask, other=0.0)
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=DTYPE) * gate_scale
    gates = tl.where(t[None, :] < length, 1.0 / (1.0 + tl.exp(-logits)), 0.0)
    pos = tl.cumsum(gates.to(SUM), axis=1, reverse=True) * shrink
    cell = tl.maximum(tl.minimum(pos.to(tl.int32), NPOS - 2), 0)
    weight = (tl.minimum(pos, NPOS - 1.0, propagate_nan=tl.PropagateNan.ALL) - cell).to(DTYPE)
    return q, k, gates, pos, cell, weight


@triton.jit(do_not_specialize=SIZES)
def _forward(
        Q, K, Z, OUT,
        sq_b, sq_h, sq_n, sk_b, sk_h, sk_n,
        num_heads, num_patches, lines, line_step, step, length, gate_scale, shrink, root, z_row, z_source,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, C: tl.constexpr, NPOS: tl.constexpr, M: tl.constexpr,
        SOURCES: tl.constexpr, PRECISION: tl.constexpr, SUM: tl.constexpr, DTYPE: tl.constexpr,
):
    """The codes of one line."""
    line, head = tl.program_id(0) % lines, (tl.program_id(0) // lines).to(tl.int64)
    b, h = head // num_heads, head % num_heads
    first = line * line_step
    _, _, _, _, cell, weight = _gates_and_positions(
        Q, K, b * sq_b + h * sq_h + first * sq_n, b * sk_b + h * sk_h + first * sk_n, sq_n, sk_n, step, length,
        gate_scale, shrink, HEAD_DIM, D, C, NPOS, PRECISION, SUM, DTYPE)
    t, m = tl.arange(0, C), tl.arange(0, M)
    patch = head * num_patches + first + t * step
    inside = (t[:, None] < length) & (t[None, :] < length)
    in_z = (t[:, None] < length) & (m[None, :] < NPOS - 1)
    for source in tl.static_range(SOURCES):
        at = Z + source * z_source + patch[:, None] * z_row + m[None, :]
        low = tl.gather(tl.load(at, mask=in_z, other=0.0), cell, 1)
        high = tl.gather(tl.load(at + 1, mask=in_z, other=0.0), cell, 1)
        code = (low + weight * (high - low)) * root
        tl.store(
            OUT + patch[:, None] * (SOURCES * length) + source * length + t[None, :], code, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _backward_tokens(
        Q, K, Z, DOUT, DQ, DK, POS,
        sq_b, sq_h, sq_n, sk_b, sk_h, sk_n,
        num_heads, num_patches, lines, line_step, step, length, gate_scale, shrink, root, z_row, z_source,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, C: tl.constexpr, NPOS: tl.constexpr, M: tl.constexpr,
        SOURCES: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr, GRADIENT_PRECISION: tl.constexpr,
        SUM: tl.constexpr, DTYPE: tl.constexpr,
):
    """Gradients of q and k through the gates, and the positions, for `_backward_values`."""
    line, head = tl.program_id(0) % lines, (tl.program_id(0) // lines).to(tl.int64)
    b, h = head // num_heads, head % num_heads
    first = line * line_step
    q_line, k_line = b * sq_b + h * sq_h + first * sq_n, b * sk_b + h * sk_h + first * sk_n
    _, _, gates, pos, cell, _ = _gates_and_positions(
        Q, K, q_line, k_line, sq_n, sk_n, step, length,
        gate_scale, shrink, HEAD_DIM, D, C, NPOS, PRECISION, SUM, DTYPE)
    PART: tl.constexpr = min(D, 64)
    t, m = tl.arange(0, C), tl.arange(0, M)
    patch = head * num_patches + first + t * step
    inside = (t[:, None] < length) & (t[None, :] < length)
    in_z = (t[:, None] < length) & (m[None, :] < NPOS - 1)
    tl.store(POS + patch[:, None] * length + t[None, :], pos, mask=inside)
    dpos = tl.zeros([C, C], DTYPE)
    for source in tl.static_range(SOURCES):
        dcode = tl.load(
            DOUT + patch[:, None] * (SOURCES * length) + source * length + t[None, :], mask=inside, other=0.0)
        at = Z + source * z_source + patch[:, None] * z_row + m[None, :]
        slopes = tl.load(at + 1, mask=in_z, other=0.0) - tl.load(at, mask=in_z, other=0.0)
        dpos += dcode * tl.gather(slopes, cell, 1)
    dpos = tl.where(pos > NPOS - 1.0, 0.0, dpos * root)
    dgates = tl.cumsum(dpos, axis=1) * shrink  # the gate of patch j is part of all positions up to j
    dlogits = dgates * gates * (1.0 - gates) * gate_scale
    for part in tl.static_range(0, D, PART):  # registers do not suffice for all channels of a long head at once
        d = part + tl.arange(0, PART)
        at = patch[:, None] * HEAD_DIM + d[None, :]
        mask = (t[:, None] < length) & (d[None, :] < HEAD_DIM)
        k = tl.load(K + k_line + t[:, None] * step * sk_n + d[None, :], mask=mask, other=0.0).to(DTYPE)
        dq = tl.dot(dlogits, k, input_precision=GRADIENT_PRECISION, out_dtype=DTYPE)
        if ADD:
            dq += tl.load(DQ + at, mask=mask, other=0.0)
        tl.store(DQ + at, dq, mask=mask)
        q = tl.load(Q + q_line + t[:, None] * step * sq_n + d[None, :], mask=mask, other=0.0).to(DTYPE)
        dk = tl.dot(tl.trans(dlogits), q, input_precision=GRADIENT_PRECISION, out_dtype=DTYPE)
        if ADD:
            dk += tl.load(DK + at, mask=mask, other=0.0)
        tl.store(DK + at, dk, mask=mask)


@triton.jit(do_not_specialize=['num_rows', 'length', 'z_row', 'z_source', 'DZ'])
def _backward_values(
        POS, DOUT, DZ, num_rows, length, root, z_row, z_source,
        ROWS: tl.constexpr, NPOS: tl.constexpr, M: tl.constexpr, SOURCES: tl.constexpr, DTYPE: tl.constexpr,
):
    """Gradient of Z for some patches: each position receives the gradients of the codes that were looked up there."""
    row, m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, M)
    inside = row < num_rows
    for source in tl.static_range(SOURCES):
        dz = tl.zeros([ROWS, M], DTYPE)
        last = tl.zeros([ROWS], DTYPE)  # of position NPOS - 1, for which the tile may have no column
        for t in range(length):
            pos = tl.load(POS + row * length + t, mask=inside, other=0.0)
            pos = tl.minimum(pos, NPOS - 1.0, propagate_nan=tl.PropagateNan.ALL)
            dcode = tl.load(
                DOUT + row * (SOURCES * length) + source * length + t, mask=inside, other=0.0) * root
            share = 1.0 - tl.abs(pos[:, None] - m[None, :]).to(DTYPE)
            dz += dcode[:, None] * tl.maximum(share, 0.0, propagate_nan=tl.PropagateNan.ALL)
            last += dcode * tl.maximum((pos - (NPOS - 2)).to(DTYPE), 0.0, propagate_nan=tl.PropagateNan.ALL)
        at = DZ + source * z_source + row * z_row
        tl.store(at[:, None] + m[None, :], dz, mask=inside[:, None] & (m[None, :] < NPOS - 1))
        tl.store(at + NPOS - 1, last, mask=inside)


def tiles_for(head_dim: int, length: int, npos: int) -> Dict[str, int]:
    """Padded sizes: channels of a head, patches of a line, cells. D is at least C; with a smaller D kernels spill."""
    return {'D': max(padded(head_dim), padded(length)), 'C': padded(length), 'M': padded(npos - 1)}


def warps_for(length: int, itemsize: int) -> int:
    """Warps of a program, by the patches of a line and the bytes of a number of q."""
    return {16: 1, 32: 2 if itemsize <= 2 else 8, 64: 4}[padded(length)]


def _axes(height: int, width: int, shrink_x: float, shrink_y: float) -> Tuple[Dict[str, object], Dict[str, object]]:
    """Lines along x (rows) and along y (columns), as the kernels are told of them."""
    return (
        dict(lines=height, line_step=width, step=1, length=width, shrink=shrink_x),
        dict(lines=width, line_step=1, step=width, length=height, shrink=shrink_y),
    )


def _values(sources: List[torch.Tensor], tables: torch.Tensor) -> torch.Tensor:
    """The values at integer positions along x, then y, for each source, `[S, B, h, H*W, npos_x + npos_y]`."""
    return torch.stack([source.to(tables.dtype) @ tables.T for source in sources])


def _launch(kernel, axis, tensors, z, q, k, npos, gate_scale, **constants) -> None:
    batch, num_heads, _, head_dim = q.shape
    with torch.cuda.device_of(q):
        kernel[(axis['lines'] * batch * num_heads,)](
            q, k, *tensors, *(t.stride(n) for t in (q, k) for n in range(3)),
            num_heads, q.shape[2], **axis, gate_scale=gate_scale, root=axis['shrink'] ** 0.5,
            z_row=z.shape[-1], z_source=z[0].numel(),
            HEAD_DIM=head_dim, NPOS=npos, **tiles_for(head_dim, axis['length'], npos), SOURCES=len(z),
            DTYPE=dtype_of(z), **PRECISIONS[q.element_size() > 2],
            num_warps=warps_for(axis['length'], q.element_size()), **constants)


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
    q, k = dense_rows(q, k)
    codes = empty_codes(q, height, width, mode)
    tables = torch.cat(wide(table_x, table_y)).to(codes[0].dtype)
    z = _values(sources_of(mode, q, k), tables)
    starts = 0, table_x.shape[0]
    for out, table, start, axis in zip(codes, (table_x, table_y), starts, _axes(height, width, shrink_x, shrink_y)):
        _launch(_forward, axis, (z[..., start:], out), z, q, k, table.shape[0], gate_scale)
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
    dense_q, dense_k = dense_rows(q, k)
    tables = torch.cat(wide(table_x, table_y)).to(grad_x.dtype)
    sources = sources_of(mode, dense_q, dense_k)
    z = _values(sources, tables)
    grad_z = torch.empty_like(z)
    grad_q, grad_k = (torch.empty(t.shape, dtype=z.dtype, device=z.device) for t in (q, k))
    npos = table_x.shape[0], table_y.shape[0]
    axes = _axes(height, width, shrink_x, shrink_y)
    for add, (grad, n, start, axis) in enumerate(zip((grad_x, grad_y), npos, (0, npos[0]), axes)):
        grad, length = grad.contiguous(), axis['length']
        pos = grad.new_empty(*q.shape[:3], length, dtype=torch.float64 if q.element_size() > 2 else torch.float32)
        tensors = z[..., start:], grad, grad_q, grad_k, pos
        _launch(
            _backward_tokens, axis, tensors, z, dense_q, dense_k, n, gate_scale,
            ADD=bool(add), GRADIENT_PRECISION='ieee' if q.element_size() > 2 else 'tf32')  # tf32 is finer than 16 bits
        num_rows = pos[..., 0].numel()
        with torch.cuda.device_of(q):
            _backward_values[(triton.cdiv(num_rows, ROWS),)](
                pos, grad, grad_z[..., start:], num_rows, length, axis['shrink'] ** 0.5, z.shape[-1], z[0].numel(),
                ROWS=ROWS, NPOS=n, M=padded(n - 1), SOURCES=len(z), DTYPE=dtype_of(z), num_warps=1)
    grad_tables = torch.zeros_like(tables)
    for grad_source, source, g in zip(sources_of(mode, grad_q, grad_k), sources, grad_z):
        grad_source += g @ tables
        grad_tables += g.flatten(0, -2).T @ source.to(g.dtype).flatten(0, -2)
    grads = grad_q, grad_k, *grad_tables.split(npos)
    return tuple(g.to(t.dtype, memory_format=torch.contiguous_format, copy=True) for g, t in zip(
        grads, (q, k, table_x, table_y)))


register_codes(triton_axis_codes, triton_axis_codes_backward)
