"""`distance_attention` as Triton kernels: nothing N x N is ever written to memory, and nothing is added atomically.

One program of `_forward` owns a block of queries, walks over all keys and keeps a running softmax. Backward there are
two kernels of the same body: one owns queries and walks over keys (gradients of q), the other owns keys and walks over
queries (those of k and v). Each adds its half of R w and R^T w to the gradients of the codes, see `distances`.

Squared distances are s_i + s_j - 2 w_i.w_j. For inputs of 16 bits the codes are centred and the product is one of
float32 (three parts of tf32), whose rounding is far below that of the inputs; for float32 it is float64. A squared
distance of less than tol times s_i + s_j is rounding and counts as 0.

For float32 q.k and grad.v are float64, too, before they are rounded: the kernels form them in blocks of other shapes,
and were they to differ in the last digit of a logit of 10^4, the probabilities of a row would not sum to 1.
"""
from functools import partial
from typing import Dict, List, NamedTuple, Tuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .distances import distance_attention, register_flops
from .double_backward import differentiable_gradients
from .triton_common import dense_rows, padded

__all__ = ['triton_distance_attention']


class Blocks(NamedTuple):
    """Launch configuration: rows owned, rows walked over at a time, warps, pipeline stages."""
    own: int
    walk: int
    warps: int
    stages: int


class Part(NamedTuple):
    """What one launch of `_backward` computes, see there, and how."""
    blocks: Blocks
    keys: bool
    rows: bool = False
    tokens: bool = False
    code_x: bool = False
    code_y: bool = False

    def constants(self) -> Dict[str, object]:
        blocks, *flags = self
        names = ('OWN', 'WALK', 'KEYS', 'ROWS', 'TOKENS', 'CODE_X', 'CODE_Y')
        return dict(zip(names, (blocks.own, blocks.walk, *flags)))


SIZES = ['num_heads', 'num_tokens', 'num_prefix_tokens']  # a new one is no reason to compile anew
LOG2E = tl.constexpr(1.4426950408889634)
NARROW = 4  # codes of so many channels are subtracted, channel by channel
QUICK, THIN, SLIM = Blocks(64, 32, 4, 1), Blocks(64, 16, 4, 2), Blocks(64, 16, 4, 1)
WIDE, SMALL, TINY = Blocks(32, 16, 8, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 8, 1)
# Launches of the backward pass for q of 16 bits by head dim and codes: as few, and of blocks as large, as there are
# registers for without spilling. First those that own queries, then keys: t for tokens, x and y for codes.
PARTS = {
    (64, 16): ([('txy', THIN)], [('txy', THIN)]),
    (64, 32): ([('t', QUICK), ('xy', QUICK)], [('t', QUICK), ('xy', THIN)]),
    (64, 64): ([('t', QUICK), ('x', THIN), ('y', THIN)], [('t', THIN), ('x', THIN), ('y', THIN)]),
    (128, 16): ([('t', QUICK), ('xy', QUICK)], [('t', SLIM), ('xy', THIN)]),
    (128, 32): ([('t', QUICK), ('xy', THIN)], [('t', SLIM), ('xy', THIN)]),
    (128, 64): ([('t', SMALL), ('x', SMALL), ('y', SMALL)], [('t', TINY), ('x', TINY), ('y', TINY)]),
}


def forward_blocks(head_dim: int, code: int, itemsize: int) -> Blocks:
    """For a head dim and the wider codes, both padded; `.ci/check_spills.py` compiles them."""
    if itemsize > 2:
        return WIDE
    if head_dim > 64:
        return QUICK if code <= 32 else SLIM
    return Blocks(64, 32, 4, 2)


def backward_parts(head_dim: int, code: int, itemsize: int) -> List[Part]:
    """The launches in their order, arguments as for `forward_blocks`."""
    if itemsize > 2:
        launches = 2 * ([('t', WIDE), ('x', WIDE), ('y', WIDE)],)
        parts = [Part(WIDE, False, rows=True)]
    else:
        launches, parts = PARTS[max(64, head_dim), code], []
    for keys, launch in zip((False, True), launches):
        parts += [Part(blocks, keys, False, *(letter in what for letter in 'txy')) for what, blocks in launch]
    return parts


@triton.jit
def _distance(
        W, row_i, row_j, in_i, in_j, wi, wj, si, sj, ok,
        NARROW: tl.constexpr, PADDED: tl.constexpr, TOL: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):
    """Distances of two blocks of codes and their inverses, both 0 where not `ok` and where rounding leaves nothing."""
    total = si[:, None] + sj[None, :]
    if (NARROW > 0) & (si.dtype == DTYPE):  # products of such short codes would not do
        floor = 0.0 * total
        square = floor
        for c in tl.static_range(NARROW):
            x_i = tl.load(W + row_i * PADDED + c, mask=in_i, other=0.0)
            x_j = tl.load(W + row_j * PADDED + c, mask=in_j, other=0.0)
            difference = x_i[:, None] - x_j[None, :]
            square += difference * difference
    else:
        floor = (TOL * total).to(DTYPE)
        wi, wj = wi.to(si.dtype), wj.to(sj.dtype)
        square = (total - 2 * tl.dot(wi, tl.trans(wj), input_precision=PRECISION, out_dtype=si.dtype)).to(DTYPE)
    square = tl.where(ok & ~(square <= floor), square, 0.0)  # NaN stays
    inverse = tl.rsqrt(tl.maximum(tl.maximum(square, floor), 1e-30))
    distance = square * inverse
    return distance, distance * inverse * inverse


@triton.jit
def _to_tf32(x):
    """Rounded to the digits of tf32. Tensor cores would drop the others, and not tell."""
    return ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xffffe000).to(tl.float32, bitcast=True)


@triton.jit
def _add_sums(r, w, row_sum, rw, GRADIENT: tl.constexpr):
    """Add rowsum(R) and R w. What is wanted is their difference, so both must be of the same R, and of all digits of
    w; those of R itself may be few."""
    if GRADIENT == 'tf32':
        r = tl.where(r == r, _to_tf32(r), float('nan'))  # a NaN of NVIDIA, all ones, would become -0
        high = _to_tf32(w)  # where that is NaN, the difference stays so
        rw += tl.dot(r, w - high, input_precision='tf32', out_dtype=rw.dtype)
        rw += tl.dot(r, high, input_precision='tf32', out_dtype=rw.dtype)
    else:
        rw += tl.dot(r, w, input_precision=GRADIENT, out_dtype=rw.dtype)
    return row_sum + tl.sum(r, 1), rw


@triton.jit
def _product(a, b, SUM: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr):
    """a b^T, summed in dtype SUM."""
    if SUM != DTYPE:
        a, b = a.to(SUM), b.to(SUM)
    return tl.dot(a, tl.trans(b), input_precision=PRECISION, out_dtype=SUM).to(DTYPE)


@triton.jit(do_not_specialize=SIZES)
def _forward(
        Q, K, V, WX, WY, SX, SY, GAIN, OUT, TOP, TOTAL,
        sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, sv_b, sv_h, sv_n,
        num_heads, num_tokens, num_prefix_tokens, scale,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, CX: tl.constexpr, CY: tl.constexpr,
        NARROW_X: tl.constexpr, NARROW_Y: tl.constexpr,
        OWN: tl.constexpr, WALK: tl.constexpr,
        TOL: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):
    blocks = tl.cdiv(num_tokens, OWN)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = head // num_heads, head % num_heads
    i = tl.program_id(0) % blocks * OWN + tl.arange(0, OWN)
    d, cx, cy = tl.arange(0, D), tl.arange(0, CX), tl.arange(0, CY)
    in_i, in_d = i < num_tokens, d < HEAD_DIM
    q = tl.load(
        Q + b * sq_b + h * sq_h + i[:, None] * sq_n + d[None, :], mask=in_i[:, None] & in_d[None, :], other=0.0)
    row_i = head * num_tokens + i
    wx_i = tl.load(WX + row_i[:, None] * CX + cx[None, :], mask=in_i[:, None], other=0.0)
    wy_i = tl.load(WY + row_i[:, None] * CY + cy[None, :], mask=in_i[:, None], other=0.0)
    sx_i = tl.load(SX + row_i, mask=in_i, other=0.0)
    sy_i = tl.load(SY + row_i, mask=in_i, other=0.0)
    gain, scale_2 = tl.load(GAIN + h) * LOG2E, scale * LOG2E
    top = tl.full([OWN], float('-inf'), DTYPE)
    total = tl.zeros([OWN], DTYPE)
    out = tl.zeros([OWN, D], DTYPE)
    for start in range(0, num_tokens, WALK):
        j = start + tl.arange(0, WALK)
        in_j = j < num_tokens
        mask_j = in_j[:, None] & in_d[None, :]
        k = tl.load(K + b * sk_b + h * sk_h + j[:, None] * sk_n + d[None, :], mask=mask_j, other=0.0)
        v = tl.load(V + b * sv_b + h * sv_h + j[:, None] * sv_n + d[None, :], mask=mask_j, other=0.0)
        row_j = head * num_tokens + j
        ok = (i[:, None] != j[None, :]) & (i[:, None] >= num_prefix_tokens) & (j[None, :] >= num_prefix_tokens)
        wx_j = tl.load(WX + row_j[:, None] * CX + cx[None, :], mask=in_j[:, None], other=0.0)
        sx_j = tl.load(SX + row_j, mask=in_j, other=0.0)
        distance, _ = _distance(
            WX, row_i, row_j, in_i, in_j, wx_i, wx_j, sx_i, sx_j, ok, NARROW_X, CX, TOL, PRECISION, DTYPE)
        wy_j = tl.load(WY + row_j[:, None] * CY + cy[None, :], mask=in_j[:, None], other=0.0)
        sy_j = tl.load(SY + row_j, mask=in_j, other=0.0)
        distance_y, _ = _distance(
            WY, row_i, row_j, in_i, in_j, wy_i, wy_j, sy_i, sy_j, ok, NARROW_Y, CY, TOL, PRECISION, DTYPE)
        logits = _product(q, k, sx_i.dtype, PRECISION, DTYPE) * scale_2
        logits += gain * (distance + distance_y)
        logits = tl.where(in_j[None, :], logits, float('-inf'))
        new_top = tl.maximum(top, tl.max(logits, 1))
        p = tl.exp2(logits - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(p, 1)
        out = out * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION, out_dtype=DTYPE)
        top = new_top
    tl.store(
        OUT + row_i[:, None] * HEAD_DIM + d[None, :], (out / total[:, None]).to(OUT.dtype.element_ty),
        mask=in_i[:, None] & in_d[None, :])
    tl.store(TOP + row_i, top, mask=in_i)
    tl.store(TOTAL + row_i, total, mask=in_i)


@triton.jit(do_not_specialize=SIZES)
def _backward(
        Q, K, V, DOUT, WX, WY, SX, SY, GAIN, TOP, TOTAL, DELTA, DA, DV, DWX, DWY, DGAIN,
        sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, sv_b, sv_h, sv_n,
        num_heads, num_tokens, num_prefix_tokens, scale,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, CX: tl.constexpr, CY: tl.constexpr,
        NARROW_X: tl.constexpr, NARROW_Y: tl.constexpr,
        OWN: tl.constexpr, WALK: tl.constexpr,
        KEYS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, CODE_X: tl.constexpr, CODE_Y: tl.constexpr,
        TOL: tl.constexpr, PRECISION: tl.constexpr, GRADIENT: tl.constexpr, DTYPE: tl.constexpr,
):
    """Owns queries, DA is the gradient of q; or, with KEYS, owns keys, DA is that of k, and DV is written too.

    TOKENS, CODE_X and CODE_Y say which of the gradients one launch computes: all, if they fit the registers. With ROWS
    it computes none, but DELTA, which the others read: the sum over keys of p * dp.
    """
    blocks = tl.cdiv(num_tokens, OWN)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = head // num_heads, head % num_heads
    i = tl.program_id(0) % blocks * OWN + tl.arange(0, OWN)
    d, cx, cy = tl.arange(0, D), tl.arange(0, CX), tl.arange(0, CY)
    in_i, in_d = i < num_tokens, d < HEAD_DIM
    mask_i = in_i[:, None] & in_d[None, :]
    row_i = head * num_tokens + i
    q_head, k_head, v_head = Q + b * sq_b + h * sq_h, K + b * sk_b + h * sk_h, V + b * sv_b + h * sv_h
    dout_head = DOUT + head * num_tokens * HEAD_DIM
    if KEYS:
        a_i = tl.load(k_head + i[:, None] * sk_n + d[None, :], mask=mask_i, other=0.0)
        c_i = tl.load(v_head + i[:, None] * sv_n + d[None, :], mask=mask_i, other=0.0)
    else:
        a_i = tl.load(q_head + i[:, None] * sq_n + d[None, :], mask=mask_i, other=0.0)
        c_i = tl.load(dout_head + i[:, None] * HEAD_DIM + d[None, :], mask=mask_i, other=0.0)
        top_i = tl.load(TOP + row_i, mask=in_i, other=0.0)
        share_i = 1.0 / tl.load(TOTAL + row_i, mask=in_i, other=1.0)
        if not ROWS:
            delta_i = tl.load(DELTA + row_i, mask=in_i, other=0.0)
    wx_i = tl.load(WX + row_i[:, None] * CX + cx[None, :], mask=in_i[:, None], other=0.0)
    wy_i = tl.load(WY + row_i[:, None] * CY + cy[None, :], mask=in_i[:, None], other=0.0)
    sx_i = tl.load(SX + row_i, mask=in_i, other=0.0)
    sy_i = tl.load(SY + row_i, mask=in_i, other=0.0)
    gain, scale_2 = tl.load(GAIN + h) * LOG2E, scale * LOG2E  # as in `_forward`, to the last digit
    da = tl.zeros([OWN, D], DTYPE)
    dv = tl.zeros([OWN, D], DTYPE)
    dwx = tl.zeros([OWN, CX], sx_i.dtype)
    dwy = tl.zeros([OWN, CY], sy_i.dtype)
    sum_x = tl.zeros([OWN], sx_i.dtype)
    sum_y = tl.zeros([OWN], sy_i.dtype)
    dgain = tl.zeros([OWN], DTYPE)
    mean_distance = tl.zeros([OWN], DTYPE)
    delta = tl.zeros([OWN], DTYPE)
    for start in range(0, num_tokens, WALK):
        j = start + tl.arange(0, WALK)
        in_j = j < num_tokens
        mask_j = in_j[:, None] & in_d[None, :]
        row_j = head * num_tokens + j
        if KEYS:
            b_j = tl.load(q_head + j[:, None] * sq_n + d[None, :], mask=mask_j, other=0.0)
            e_j = tl.load(dout_head + j[:, None] * HEAD_DIM + d[None, :], mask=mask_j, other=0.0)
        else:
            b_j = tl.load(k_head + j[:, None] * sk_n + d[None, :], mask=mask_j, other=0.0)
            e_j = tl.load(v_head + j[:, None] * sv_n + d[None, :], mask=mask_j, other=0.0)
        ok = (i[:, None] != j[None, :]) & (i[:, None] >= num_prefix_tokens) & (j[None, :] >= num_prefix_tokens)
        wx_j = tl.load(WX + row_j[:, None] * CX + cx[None, :], mask=in_j[:, None], other=0.0)
        sx_j = tl.load(SX + row_j, mask=in_j, other=0.0)
        distance_x, inverse_x = _distance(
            WX, row_i, row_j, in_i, in_j, wx_i, wx_j, sx_i, sx_j, ok, NARROW_X, CX, TOL, PRECISION, DTYPE)
        wy_j = tl.load(WY + row_j[:, None] * CY + cy[None, :], mask=in_j[:, None], other=0.0)
        sy_j = tl.load(SY + row_j, mask=in_j, other=0.0)
        distance_y, inverse_y = _distance(
            WY, row_i, row_j, in_i, in_j, wy_i, wy_j, sy_i, sy_j, ok, NARROW_Y, CY, TOL, PRECISION, DTYPE)
        distance = distance_x + distance_y
        logits = _product(a_i, b_j, sx_i.dtype, PRECISION, DTYPE) * scale_2
        logits += gain * distance
        dp = _product(c_i, e_j, sx_i.dtype, PRECISION, DTYPE)
        if KEYS:
            top_j = tl.load(TOP + row_j, mask=in_j, other=0.0)
            share_j = 1.0 / tl.load(TOTAL + row_j, mask=in_j, other=1.0)
            delta_j = tl.load(DELTA + row_j, mask=in_j, other=0.0)
            p = tl.exp2(logits - top_j[None, :]) * share_j[None, :]
            dp -= delta_j[None, :]
        else:
            p = tl.exp2(logits - top_i[:, None]) * share_i[:, None]
            if not ROWS:
                dp -= delta_i[:, None]
        p = tl.where(in_i[:, None] & in_j[None, :], p, 0.0)
        dlogits = p * dp
        if ROWS:
            delta += tl.sum(dlogits, 1)
        if TOKENS:
            da += tl.dot(dlogits.to(b_j.dtype), b_j, input_precision=PRECISION, out_dtype=DTYPE)
            if KEYS:
                dv += tl.dot(p.to(e_j.dtype), e_j, input_precision=PRECISION, out_dtype=DTYPE)
            else:
                dgain += tl.sum(dlogits * distance, 1)
                mean_distance += tl.sum(p * distance, 1)
                delta += tl.sum(dlogits, 1)
        if CODE_X:
            r = (dlogits * inverse_x).to(sx_i.dtype)
            sum_x, dwx = _add_sums(r, wx_j.to(sx_i.dtype), sum_x, dwx, GRADIENT)
        if CODE_Y:
            r = (dlogits * inverse_y).to(sy_i.dtype)
            sum_y, dwy = _add_sums(r, wy_j.to(sy_i.dtype), sum_y, dwy, GRADIENT)
    if ROWS:
        tl.store(DELTA + row_i, delta, mask=in_i)
    if TOKENS:
        at = row_i[:, None] * HEAD_DIM + d[None, :]
        tl.store(DA + at, (da * scale).to(DA.dtype.element_ty), mask=mask_i)
        if KEYS:
            tl.store(DV + at, dv.to(DV.dtype.element_ty), mask=mask_i)
        else:
            # What was lost of DELTA in 16 bits would not average out here: what the row sums to ought to be 0.
            tl.store(DGAIN + row_i, dgain - delta * mean_distance, mask=in_i)
    # What owns keys is launched second: the half of the queries is there.
    if CODE_X:
        at = row_i[:, None] * CX + cx[None, :]
        dwx = tl.load(GAIN + h) * (sum_x[:, None] * wx_i - dwx).to(DTYPE)
        if KEYS:
            dwx += tl.load(DWX + at, mask=in_i[:, None], other=0.0)
        tl.store(DWX + at, dwx, mask=in_i[:, None])
    if CODE_Y:
        at = row_i[:, None] * CY + cy[None, :]
        dwy = tl.load(GAIN + h) * (sum_y[:, None] * wy_i - dwy).to(DTYPE)
        if KEYS:
            dwy += tl.load(DWY + at, mask=in_i[:, None], other=0.0)
        tl.store(DWY + at, dwy, mask=in_i[:, None])


def _prepare(codes: torch.Tensor, num_tokens: int, wide: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    """Codes in padded rows of all tokens, `[B*h, N, C]`, and their squared norms, `[B*h, N]`.

    They are centred, which saves digits of their products, unless those are wide enough. A code that is the mean but
    for rounding counts as the mean: where all are equal, all distances are 0.
    """
    w = codes.flatten(0, 1)
    if not wide:
        norm = w.norm(dim=-1, keepdim=True)
        w = w - w.mean(dim=-2, keepdim=True)
        w = w * (w.norm(dim=-1, keepdim=True) > 64 * torch.finfo(w.dtype).eps * norm)
    w = F.pad(w, (0, padded(w.shape[-1]) - w.shape[-1], num_tokens - w.shape[-2], 0)).contiguous()
    return w, (w.double() if wide else w).square().sum(dim=-1)


def _constants(
        q: torch.Tensor,
        wx: torch.Tensor,
        wy: torch.Tensor,
        codes_x: torch.Tensor,
        codes_y: torch.Tensor,
) -> Dict[str, object]:
    wide = wx.dtype == torch.float64
    eps = torch.finfo(wx.dtype).eps
    narrow_x, narrow_y = (c.shape[-1] if c.shape[-1] <= NARROW else 0 for c in (codes_x, codes_y))
    return {
        'HEAD_DIM': q.shape[-1],
        'D': padded(q.shape[-1]),
        'CX': wx.shape[-1],
        'CY': wy.shape[-1],
        'NARROW_X': narrow_x,
        'NARROW_Y': narrow_y,
        # for float32 as the reference has it, (64 eps)^2 of the longer code's norm
        'TOL': (64 * eps) ** 2 / 2 if q.dtype == torch.float32 else 16 * eps,
        'PRECISION': 'ieee' if wide else 'tf32x3',
        'DTYPE': tl.float64 if wide else tl.float32,
        # fused here and not there, a product and a sum would differ in the last digit, see above
        'enable_fp_fusion': q.element_size() <= 2,
    }


def _launch(kernel, blocks: Blocks, tensors, codes_x, scale: float, constants) -> None:
    q, k, v = tensors[:3]
    batch, num_heads, num_tokens, _ = q.shape
    with torch.cuda.device_of(q):
        kernel[(triton.cdiv(num_tokens, blocks.own) * batch * num_heads,)](
            *tensors, *(t.stride(n) for t in (q, k, v) for n in range(3)),
            num_heads, num_tokens, num_tokens - codes_x.shape[-2], scale,
            **constants, num_warps=blocks.warps, num_stages=blocks.stages)


@torch.library.custom_op('timm_sape::distance_attention_triton', mutates_args=())
def _attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        codes_x: torch.Tensor,
        codes_y: torch.Tensor,
        bias_scale: torch.Tensor,
        scale: float,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output and, for the backward pass, the largest logit of each row (to base 2) and the sum over it.

    They are kept apart: in the logarithm of their product the sum would lose its digits to logits of 10^4.
    """
    batch, num_heads, num_tokens, _ = q.shape
    q, k, v = dense_rows(q, k, v)
    (wx, sx), (wy, sy) = (_prepare(c, num_tokens, q.dtype == torch.float32) for c in (codes_x, codes_y))
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    top, total = (wx.new_empty(batch, num_heads, num_tokens) for _ in range(2))
    constants = _constants(q, wx, wy, codes_x, codes_y)
    blocks = forward_blocks(constants['D'], max(constants['CX'], constants['CY']), q.element_size())
    gain = bias_scale.to(wx.dtype).expand(num_heads).contiguous()
    _launch(
        _forward, blocks, (q, k, v, wx, wy, sx, sy, gain, out, top, total), codes_x, scale,
        dict(constants, OWN=blocks.own, WALK=blocks.walk))
    return out, top, total


@_attention.register_fake
def _(q, k, v, codes_x, codes_y, bias_scale, scale):
    rows = codes_x.new_empty(q.shape[:-1])
    return torch.empty_like(v, memory_format=torch.contiguous_format), rows, torch.empty_like(rows)


@torch.library.custom_op('timm_sape::distance_attention_triton_backward', mutates_args=())
def _attention_backward(
        grad: torch.Tensor,
        out: torch.Tensor,
        top: torch.Tensor,
        total: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        codes_x: torch.Tensor,
        codes_y: torch.Tensor,
        bias_scale: torch.Tensor,
        scale: float,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, num_heads, num_tokens, _ = q.shape
    q, k, v = dense_rows(q, k, v)
    grad = grad.contiguous()
    (wx, sx), (wy, sy) = (_prepare(c, num_tokens, q.dtype == torch.float32) for c in (codes_x, codes_y))
    narrow = q.element_size() <= 2
    # p * dp summed over keys is grad * out. Where a row is sure of one key, all depends on the last digits of that: in
    # float32 it is summed anew.
    delta = (grad.to(wx.dtype) * out).sum(dim=-1) if narrow else torch.empty_like(top)  # [B, h, N]
    grad_q, grad_k, grad_v = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    grad_wx, grad_wy, grad_gain = torch.empty_like(wx), torch.empty_like(wy), torch.empty_like(delta)
    prefix = num_tokens - codes_x.shape[-2]
    constants = _constants(q, wx, wy, codes_x, codes_y)
    gain = bias_scale.to(wx.dtype).expand(num_heads).contiguous()
    constants['GRADIENT'] = 'tf32' if narrow else constants['PRECISION']  # what bf16 is worth
    for part in backward_parts(constants['D'], max(constants['CX'], constants['CY']), q.element_size()):
        tensors = (
            q, k, v, grad, wx, wy, sx, sy, gain, top, total, delta,
            grad_k if part.keys else grad_q, grad_v, grad_wx, grad_wy, grad_gain)
        _launch(_backward, part.blocks, tensors, codes_x, scale, dict(constants, **part.constants()))
    grad_codes = [
        g[:, prefix:, :c.shape[-1]].reshape(c.shape) for g, c in ((grad_wx, codes_x), (grad_wy, codes_y))]
    grad_scale = grad_gain.sum(dim=(0, 2))  # [h]
    grad_scale = grad_scale.sum(0, keepdim=True) if bias_scale.shape[0] == 1 else grad_scale
    return grad_q, grad_k, grad_v, *(g.contiguous() for g in grad_codes), grad_scale.to(bias_scale.dtype)


@_attention_backward.register_fake
def _(grad, out, top, total, q, k, v, codes_x, codes_y, bias_scale, scale):
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, codes_x, codes_y, bias_scale))


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.scale = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output, *tensors)


def _backward_formula(ctx, grad, *_):
    if torch.is_grad_enabled():  # the caller wants to differentiate the result again
        inputs = ctx.saved_tensors[3:]
        return (*differentiable_gradients(partial(distance_attention, ctx.scale), inputs, (grad,)), None)
    return (*_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None)


_attention.register_autograd(_backward_formula, setup_context=_setup_context)
register_flops(_attention, _attention_backward)


def triton_distance_attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        codes_x: torch.Tensor,
        codes_y: torch.Tensor,
        bias_scale: torch.Tensor,
        scale: float,
) -> torch.Tensor:
    """`torch_distances.torch_distance_attention` on a GPU, or in Triton's interpreter (`TRITON_INTERPRET=1`).

    Arguments and result are the same. q, k and v have one dtype; `triton_limits` says how wide they and the codes may
    be.
    """
    return _attention(q, k, v, codes_x, codes_y, bias_scale, scale)[0]
