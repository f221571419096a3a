"""`distance_attention` as Triton kernels: nothing N x N is written to memory, and nothing is added atomically.

Forward, a program owns a tile of queries, visits all keys tile by tile, and keeps a running softmax. Backward, one
kernel runs in two passes. In the query pass a program owns queries and visits keys, for the gradient of q. In the key
pass it owns keys and visits queries, for the gradients of k and v. The gradient of the codes has a part from R w and a
part from R^T w (see `torch_distances`); each pass computes one of them.

Squared distances are s_i + s_j - 2 w_i.w_j with s = |w|^2. If q has 16 bits, the codes are centred and the product is
computed in float32, as three products in tf32: its rounding error is far below that of q. If q is float32, the product
is computed in float64. A squared distance below TOLERANCE * (s_i + s_j) is rounding error and counts as 0.

If q is float32, q.k and grad.v are summed in float64 too, and then rounded. The passes compute them in tiles of other
shapes. If they differed in the last digit of a logit of 10^4, the probabilities of a row would not sum to 1.
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

__all__ = ['triton_distance_attention', 'triton_distance_attention_backward', 'triton_distance_attention_forward']


class Tiles(NamedTuple):
    """How a kernel is launched."""
    own: int  # tokens that a program owns
    visit: int  # tokens that it visits at a time
    warps: int
    stages: int  # of the software pipeline; 1 for none


TILES_64X32_2_STAGES = Tiles(own=64, visit=32, warps=4, stages=2)
TILES_64X32 = Tiles(own=64, visit=32, warps=4, stages=1)
TILES_64X16_2_STAGES = Tiles(own=64, visit=16, warps=4, stages=2)
TILES_64X16 = Tiles(own=64, visit=16, warps=4, stages=1)
TILES_32X16_8_WARPS = Tiles(own=32, visit=16, warps=8, stages=1)
TILES_16X16 = Tiles(own=16, visit=16, warps=4, stages=1)
TILES_16X16_8_WARPS = Tiles(own=16, visit=16, warps=8, stages=1)


class BackwardLaunch(NamedTuple):
    """One launch of `_backward`: its tiles, its pass, and which gradients it computes."""
    tiles: Tiles
    key_pass: bool
    delta_only: bool = False
    tokens: bool = False
    codes_x: bool = False
    codes_y: bool = False

    def constants(self) -> Dict[str, object]:
        return {
            'OWN': self.tiles.own,
            'VISIT': self.tiles.visit,
            'KEY_PASS': self.key_pass,
            'DELTA_ONLY': self.delta_only,
            'GRAD_TOKENS': self.tokens,
            'GRAD_X': self.codes_x,
            'GRAD_Y': self.codes_y,
        }


ALL, TOKENS, CODES = ('tokens', 'codes_x', 'codes_y'), ('tokens',), ('codes_x', 'codes_y')
CODES_X, CODES_Y = ('codes_x',), ('codes_y',)
# The backward pass for q of 16 bits, by padded head dim and padded codes: launches of the query pass, then of the key
# pass. As few launches and as large tiles as there are registers for; `.ci/check_spills.py` compiles them.
BACKWARD_16_BITS = {
    (64, 16): (
        [(ALL, TILES_64X16_2_STAGES)],
        [(ALL, TILES_64X16_2_STAGES)]),
    (64, 32): (
        [(TOKENS, TILES_64X32), (CODES, TILES_64X32)],
        [(TOKENS, TILES_64X32), (CODES, TILES_64X16_2_STAGES)]),
    (64, 64): (
        [(TOKENS, TILES_64X32), (CODES_X, TILES_64X16_2_STAGES), (CODES_Y, TILES_64X16_2_STAGES)],
        [(TOKENS, TILES_64X16_2_STAGES), (CODES_X, TILES_64X16_2_STAGES), (CODES_Y, TILES_64X16_2_STAGES)]),
    (128, 16): (
        [(TOKENS, TILES_64X32), (CODES, TILES_64X32)],
        [(TOKENS, TILES_64X16), (CODES, TILES_64X16_2_STAGES)]),
    (128, 32): (
        [(TOKENS, TILES_64X32), (CODES, TILES_64X16_2_STAGES)],
        [(TOKENS, TILES_64X16), (CODES, TILES_64X16_2_STAGES)]),
    (128, 64): (
        [(TOKENS, TILES_16X16), (CODES_X, TILES_16X16), (CODES_Y, TILES_16X16)],
        [(TOKENS, TILES_16X16_8_WARPS), (CODES_X, TILES_16X16_8_WARPS), (CODES_Y, TILES_16X16_8_WARPS)]),
}
BACKWARD_32_BITS = [(outputs, TILES_32X16_8_WARPS) for outputs in (TOKENS, CODES_X, CODES_Y)]  # of either pass

SIZES = ['num_heads', 'num_tokens', 'num_prefix_tokens']  # new values of these do not compile a kernel anew
LOG2E = tl.constexpr(1.4426950408889634)
MAX_SHORT_CODE = 4  # codes of so few channels are subtracted channel by channel


def forward_tiles(head_dim: int, code: int, itemsize: int) -> Tiles:
    """For a padded head dim, the wider of the padded codes, and the bytes of a number of q."""
    if itemsize > 2:
        return TILES_32X16_8_WARPS
    if head_dim > 64:
        return TILES_64X32 if code <= 32 else TILES_64X16
    return TILES_64X32_2_STAGES


def backward_launches(head_dim: int, code: int, itemsize: int) -> List[BackwardLaunch]:
    """In their order. Arguments as for `forward_tiles`."""
    if itemsize > 2:
        launches = [BackwardLaunch(TILES_32X16_8_WARPS, key_pass=False, delta_only=True)]
        passes = BACKWARD_32_BITS, BACKWARD_32_BITS
    else:
        launches = []
        passes = BACKWARD_16_BITS[max(64, head_dim), code]
    for key_pass, outputs_and_tiles in zip((False, True), passes):
        for outputs, tiles in outputs_and_tiles:
            launches.append(BackwardLaunch(tiles, key_pass, **dict.fromkeys(outputs, True)))
    return launches


# The parameters of `_forward` and `_backward`, by groups. Names with _i belong to the tokens that a program owns, names
# with _j to those that it visits. A name with D in front is the gradient of what follows.
#
# Tensors of all heads, one row for each token:
#   Q, K, V                 [B, h, N, d], with any strides but that of the channels, which is 1
#   OUT, DOUT               [B, h, N, d], contiguous, as are all that follow
#   WX, WY, DWX, DWY        codes along x and along y, [B*h, N, CX] and [B*h, N, CY], 0 for prefix tokens
#   SX, SY                  squared norms of the codes, [B*h, N], in the dtype in which products are summed
#   GAIN                    factor of the distances, [h]
#   ROW_MAX, ROW_SUM        of the softmax: largest logit of each query (to base 2), and sum over it, [B, h, N]
#   DELTA                   sum over keys of p * dp for each query, [B, h, N]
#   DQK                     gradient of q in the query pass, of k in the key pass, [B, h, N, d]
#   DV                      written in the key pass
#   DGAIN                   one part of the gain's gradient for each query, [B, h, N], written in the query pass
# Strides of q, k and v along batch, heads and tokens: sq_b, sq_h, sq_n, sk_b, ..., sv_n
# Sizes: num_heads h, num_tokens N, num_prefix_tokens P; scale is the factor of q.k
# Widths, all but HEAD_DIM padded to powers of two:
#   HEAD_DIM, D             d, and padded
#   CX, CY                  channels of the codes
#   SHORT_X, SHORT_Y        channels of the codes if these are so few that they are subtracted, else 0
# Tiles: OWN, VISIT          tokens, see `Tiles`
# What one launch of `_backward` does, see there: KEY_PASS, DELTA_ONLY, GRAD_TOKENS, GRAD_X, GRAD_Y
# Precision:
#   TOLERANCE               squared distances up to this part of s_i + s_j count as 0
#   PRECISION               of products in the forward pass, and of the same ones in the backward pass
#   GRADIENT_PRECISION      of products of R with codes
#   DTYPE                   of what is computed, unless it has the dtype of SX


@triton.jit
def _distance(
        W, row_i, row_j, in_i, in_j, w_i, w_j, s_i, s_j, biased,
        SHORT: tl.constexpr, WIDTH: tl.constexpr, TOLERANCE: tl.constexpr, PRECISION: tl.constexpr,
        DTYPE: tl.constexpr,
):
    """Distances between two tiles of codes along one axis, and their inverses.

    Both are 0 where not `biased`, and where the distance is no larger than its rounding error.
    """
    norms = s_i[:, None] + s_j[None, :]
    if (SHORT > 0) & (s_i.dtype == DTYPE):  # a product of such short codes is not precise enough
        floor = 0.0 * norms
        square = floor
        for c in tl.static_range(SHORT):
            x_i = tl.load(W + row_i * WIDTH + c, mask=in_i, other=0.0)
            x_j = tl.load(W + row_j * WIDTH + c, mask=in_j, other=0.0)
            difference = x_i[:, None] - x_j[None, :]
            square += difference * difference
    else:
        floor = (TOLERANCE * norms).to(DTYPE)
        w_i, w_j = w_i.to(s_i.dtype), w_j.to(s_j.dtype)
        square = (norms - 2 * tl.dot(w_i, tl.trans(w_j), input_precision=PRECISION, out_dtype=s_i.dtype)).to(DTYPE)
    square = tl.where(biased & ~(square <= floor), square, 0.0)  # NaN stays NaN
    inverse = tl.rsqrt(tl.maximum(tl.maximum(square, floor), 1e-30))
    distance = square * inverse
    return distance, distance * inverse * inverse


@triton.jit
def _to_tf32(x):
    """Round to tf32. Tensor cores would cut off the remaining digits instead."""
    return ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xffffe000).to(tl.float32, bitcast=True)


@triton.jit
def _add_sums(r, w, row_sum, rw, GRADIENT_PRECISION: tl.constexpr):
    """Add rowsum(R) to `row_sum` and R w to `rw`.

    The gradient is the difference of the two. So both must use the same R, which may be rounded, and all digits of w.
    """
    if GRADIENT_PRECISION == 'tf32':
        r = tl.where(r == r, _to_tf32(r), float('nan'))  # rounding would turn NVIDIA's NaN, all ones, into -0
        high = _to_tf32(w)  # if w is NaN, w - high is NaN whatever high became
        rw += tl.dot(r, w - high, input_precision='tf32', out_dtype=rw.dtype)
        rw += tl.dot(r, high, input_precision='tf32', out_dtype=rw.dtype)
    else:
        rw += tl.dot(r, w, input_precision=GRADIENT_PRECISION, out_dtype=rw.dtype)
    return row_sum + tl.sum(r, 1), rw


@triton.jit
def _product(a, b, SUM: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr):
    """a b^T, summed in dtype SUM, returned in DTYPE."""
    if SUM != DTYPE:
        a, b = a.to(SUM), b.to(SUM)
    return tl.dot(a, tl.trans(b), input_precision=PRECISION, out_dtype=SUM).to(DTYPE)


@triton.jit(do_not_specialize=SIZES)
def _forward(
        Q, K, V, WX, WY, SX, SY, GAIN, OUT, ROW_MAX, ROW_SUM,
        sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, sv_b, sv_h, sv_n,
        num_heads, num_tokens, num_prefix_tokens, scale,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, CX: tl.constexpr, CY: tl.constexpr,
        SHORT_X: tl.constexpr, SHORT_Y: tl.constexpr,
        OWN: tl.constexpr, VISIT: tl.constexpr,
        TOLERANCE: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):
    """Attention of the owned queries to all keys. For the parameters see above."""
    tiles = tl.cdiv(num_tokens, OWN)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // num_heads, head % num_heads
    i = tl.program_id(0) % tiles * OWN + tl.arange(0, OWN)
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
    row_max = tl.full([OWN], float('-inf'), DTYPE)
    row_sum = tl.zeros([OWN], DTYPE)
    out = tl.zeros([OWN, D], DTYPE)
    for start in range(0, num_tokens, VISIT):
        j = start + tl.arange(0, VISIT)
        in_j = j < num_tokens
        mask_j = in_j[:, None] & in_d[None, :]
        k = tl.load(K + b * sk_b + h * sk_h + j[:, None] * sk_n + d[None, :], mask=mask_j, other=0.0)
        v = tl.load(V + b * sv_b + h * sv_h + j[:, None] * sv_n + d[None, :], mask=mask_j, other=0.0)
        row_j = head * num_tokens + j
        biased = (i[:, None] != j[None, :]) & (i[:, None] >= num_prefix_tokens) & (j[None, :] >= num_prefix_tokens)
        wx_j = tl.load(WX + row_j[:, None] * CX + cx[None, :], mask=in_j[:, None], other=0.0)
        sx_j = tl.load(SX + row_j, mask=in_j, other=0.0)
        distance, _ = _distance(
            WX, row_i, row_j, in_i, in_j, wx_i, wx_j, sx_i, sx_j, biased, SHORT_X, CX, TOLERANCE, PRECISION, DTYPE)
        wy_j = tl.load(WY + row_j[:, None] * CY + cy[None, :], mask=in_j[:, None], other=0.0)
        sy_j = tl.load(SY + row_j, mask=in_j, other=0.0)
        distance_y, _ = _distance(
            WY, row_i, row_j, in_i, in_j, wy_i, wy_j, sy_i, sy_j, biased, SHORT_Y, CY, TOLERANCE, PRECISION, DTYPE)
        logits = _product(q, k, sx_i.dtype, PRECISION, DTYPE) * scale_2
        logits += gain * (distance + distance_y)
        logits = tl.where(in_j[None, :], logits, float('-inf'))
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        p = tl.exp2(logits - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        out = out * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION, out_dtype=DTYPE)
        row_max = new_max
    tl.store(
        OUT + row_i[:, None] * HEAD_DIM + d[None, :], (out / row_sum[:, None]).to(OUT.dtype.element_ty),
        mask=in_i[:, None] & in_d[None, :])
    tl.store(ROW_MAX + row_i, row_max, mask=in_i)
    tl.store(ROW_SUM + row_i, row_sum, mask=in_i)


@triton.jit(do_not_specialize=SIZES)
def _backward(
        Q, K, V, DOUT, WX, WY, SX, SY, GAIN, ROW_MAX, ROW_SUM, DELTA, DQK, DV, DWX, DWY, DGAIN,
        sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, sv_b, sv_h, sv_n,
        num_heads, num_tokens, num_prefix_tokens, scale,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, CX: tl.constexpr, CY: tl.constexpr,
        SHORT_X: tl.constexpr, SHORT_Y: tl.constexpr,
        OWN: tl.constexpr, VISIT: tl.constexpr,
        KEY_PASS: tl.constexpr, DELTA_ONLY: tl.constexpr,
        GRAD_TOKENS: tl.constexpr, GRAD_X: tl.constexpr, GRAD_Y: tl.constexpr,
        TOLERANCE: tl.constexpr, PRECISION: tl.constexpr, GRADIENT_PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):
    """One pass, or a part of it, of the backward pass. For the parameters see above.

    | | query pass | key pass (KEY_PASS) |
    |---|---|---|
    | owned tokens, i | q and the gradient of the output | k and v |
    | visited tokens, j | k and v | q and the gradient of the output |
    | GRAD_TOKENS | DQK of q, and DGAIN | DQK of k, and DV |
    | GRAD_X, GRAD_Y | sets DWX, DWY | adds to DWX, DWY |

    One launch computes all three, if there are registers for that, or some of them. With DELTA_ONLY it computes DELTA
    instead, which the other launches read.

    The logits and their gradients are formed alike in both passes: `qk` is what their product is made of (q or k), `gv`
    what the product for the gradient of the probabilities is made of (gradient of the output, or v).
    """
    tiles = tl.cdiv(num_tokens, OWN)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // num_heads, head % num_heads
    i = tl.program_id(0) % tiles * OWN + tl.arange(0, OWN)
    d, cx, cy = tl.arange(0, D), tl.arange(0, CX), tl.arange(0, CY)
    in_i, in_d = i < num_tokens, d < HEAD_DIM
    mask_i = in_i[:, None] & in_d[None, :]
    row_i = head * num_tokens + i
    q_head, k_head, v_head = Q + b * sq_b + h * sq_h, K + b * sk_b + h * sk_h, V + b * sv_b + h * sv_h
    dout_head = DOUT + head * num_tokens * HEAD_DIM
    if KEY_PASS:
        qk_i = tl.load(k_head + i[:, None] * sk_n + d[None, :], mask=mask_i, other=0.0)
        gv_i = tl.load(v_head + i[:, None] * sv_n + d[None, :], mask=mask_i, other=0.0)
    else:
        qk_i = tl.load(q_head + i[:, None] * sq_n + d[None, :], mask=mask_i, other=0.0)
        gv_i = tl.load(dout_head + i[:, None] * HEAD_DIM + d[None, :], mask=mask_i, other=0.0)
        max_i = tl.load(ROW_MAX + row_i, mask=in_i, other=0.0)
        inverse_sum_i = 1.0 / tl.load(ROW_SUM + row_i, mask=in_i, other=1.0)
        if not DELTA_ONLY:
            delta_i = tl.load(DELTA + row_i, mask=in_i, other=0.0)
    wx_i = tl.load(WX + row_i[:, None] * CX + cx[None, :], mask=in_i[:, None], other=0.0)
    wy_i = tl.load(WY + row_i[:, None] * CY + cy[None, :], mask=in_i[:, None], other=0.0)
    sx_i = tl.load(SX + row_i, mask=in_i, other=0.0)
    sy_i = tl.load(SY + row_i, mask=in_i, other=0.0)
    gain, scale_2 = tl.load(GAIN + h) * LOG2E, scale * LOG2E  # computed as in `_forward`, so the same to the last digit
    dqk = tl.zeros([OWN, D], DTYPE)
    dv = tl.zeros([OWN, D], DTYPE)
    dwx = tl.zeros([OWN, CX], sx_i.dtype)
    dwy = tl.zeros([OWN, CY], sy_i.dtype)
    r_sum_x = tl.zeros([OWN], sx_i.dtype)
    r_sum_y = tl.zeros([OWN], sy_i.dtype)
    dgain = tl.zeros([OWN], DTYPE)
    mean_distance = tl.zeros([OWN], DTYPE)
    delta = tl.zeros([OWN], DTYPE)
    for start in range(0, num_tokens, VISIT):
        j = start + tl.arange(0, VISIT)
        in_j = j < num_tokens
        mask_j = in_j[:, None] & in_d[None, :]
        row_j = head * num_tokens + j
        if KEY_PASS:
            qk_j = tl.load(q_head + j[:, None] * sq_n + d[None, :], mask=mask_j, other=0.0)
            gv_j = tl.load(dout_head + j[:, None] * HEAD_DIM + d[None, :], mask=mask_j, other=0.0)
        else:
            qk_j = tl.load(k_head + j[:, None] * sk_n + d[None, :], mask=mask_j, other=0.0)
            gv_j = tl.load(v_head + j[:, None] * sv_n + d[None, :], mask=mask_j, other=0.0)
        biased = (i[:, None] != j[None, :]) & (i[:, None] >= num_prefix_tokens) & (j[None, :] >= num_prefix_tokens)
        wx_j = tl.load(WX + row_j[:, None] * CX + cx[None, :], mask=in_j[:, None], other=0.0)
        sx_j = tl.load(SX + row_j, mask=in_j, other=0.0)
        distance_x, inverse_x = _distance(
            WX, row_i, row_j, in_i, in_j, wx_i, wx_j, sx_i, sx_j, biased, SHORT_X, CX, TOLERANCE, PRECISION, DTYPE)
        wy_j = tl.load(WY + row_j[:, None] * CY + cy[None, :], mask=in_j[:, None], other=0.0)
        sy_j = tl.load(SY + row_j, mask=in_j, other=0.0)
        distance_y, inverse_y = _distance(
            WY, row_i, row_j, in_i, in_j, wy_i, wy_j, sy_i, sy_j, biased, SHORT_Y, CY, TOLERANCE, PRECISION, DTYPE)
        distance = distance_x + distance_y
        logits = _product(qk_i, qk_j, sx_i.dtype, PRECISION, DTYPE) * scale_2
        logits += gain * distance
        dp = _product(gv_i, gv_j, sx_i.dtype, PRECISION, DTYPE)
        if KEY_PASS:
            max_j = tl.load(ROW_MAX + row_j, mask=in_j, other=0.0)
            inverse_sum_j = 1.0 / tl.load(ROW_SUM + row_j, mask=in_j, other=1.0)
            delta_j = tl.load(DELTA + row_j, mask=in_j, other=0.0)
            p = tl.exp2(logits - max_j[None, :]) * inverse_sum_j[None, :]
            dp -= delta_j[None, :]
        else:
            p = tl.exp2(logits - max_i[:, None]) * inverse_sum_i[:, None]
            if not DELTA_ONLY:
                dp -= delta_i[:, None]
        p = tl.where(in_i[:, None] & in_j[None, :], p, 0.0)
        dlogits = p * dp
        if DELTA_ONLY:
            delta += tl.sum(dlogits, 1)
        if GRAD_TOKENS:
            dqk += tl.dot(dlogits.to(qk_j.dtype), qk_j, input_precision=PRECISION, out_dtype=DTYPE)
            if KEY_PASS:
                dv += tl.dot(p.to(gv_j.dtype), gv_j, input_precision=PRECISION, out_dtype=DTYPE)
            else:
                dgain += tl.sum(dlogits * distance, 1)
                mean_distance += tl.sum(p * distance, 1)
                delta += tl.sum(dlogits, 1)
        if GRAD_X:
            r = (dlogits * inverse_x).to(sx_i.dtype)
            r_sum_x, dwx = _add_sums(r, wx_j.to(sx_i.dtype), r_sum_x, dwx, GRADIENT_PRECISION)
        if GRAD_Y:
            r = (dlogits * inverse_y).to(sy_i.dtype)
            r_sum_y, dwy = _add_sums(r, wy_j.to(sy_i.dtype), r_sum_y, dwy, GRADIENT_PRECISION)
    if DELTA_ONLY:
        tl.store(DELTA + row_i, delta, mask=in_i)
    if GRAD_TOKENS:
        at = row_i[:, None] * HEAD_DIM + d[None, :]
        tl.store(DQK + at, (dqk * scale).to(DQK.dtype.element_ty), mask=mask_i)
        if KEY_PASS:
            tl.store(DV + at, dv.to(DV.dtype.element_ty), mask=mask_i)
        else:
            # dlogits should sum to 0 over each row. If DELTA was rounded to 16 bits they do not, and the rest would be
            # multiplied with the mean distance, so that is taken out.
            tl.store(DGAIN + row_i, dgain - delta * mean_distance, mask=in_i)
    # The key pass runs second and adds to the stored query-pass gradient.
    if GRAD_X:
        at = row_i[:, None] * CX + cx[None, :]
        dwx = tl.load(GAIN + h) * (r_sum_x[:, None] * wx_i - dwx).to(DTYPE)
        if KEY_PASS:
            dwx += tl.load(DWX + at, mask=in_i[:, None], other=0.0)
        tl.store(DWX + at, dwx, mask=in_i[:, None])
    if GRAD_Y:
        at = row_i[:, None] * CY + cy[None, :]
        dwy = tl.load(GAIN + h) * (r_sum_y[:, None] * wy_i - dwy).to(DTYPE)
        if KEY_PASS:
            dwy += tl.load(DWY + at, mask=in_i[:, None], other=0.0)
        tl.store(DWY + at, dwy, mask=in_i[:, None])


def _prepare(codes: torch.Tensor, num_tokens: int, wide: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    """Codes of all tokens with padded channels, `[B*h, N, C]`, and their squared norms, `[B*h, N]`.

    Without `wide`, they are centred, so that their products lose fewer digits. A code that differs from the mean by
    rounding alone counts as the mean: if all codes are equal, all distances are 0.

    Args:
        codes: `[B, h, N-P, C]`.
        num_tokens: N.
        wide: Whether products are computed in float64.
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
    short_x, short_y = (c.shape[-1] if c.shape[-1] <= MAX_SHORT_CODE else 0 for c in (codes_x, codes_y))
    return {
        'HEAD_DIM': q.shape[-1],
        'D': padded(q.shape[-1]),
        'CX': wx.shape[-1],
        'CY': wy.shape[-1],
        'SHORT_X': short_x,
        'SHORT_Y': short_y,
        # for float32 as in the reference: (64 eps)^2 times the norm of the longer code
        'TOLERANCE': (64 * eps) ** 2 / 2 if q.dtype == torch.float32 else 16 * eps,
        'PRECISION': 'ieee' if wide else 'tf32x3',
        'DTYPE': tl.float64 if wide else tl.float32,
        # for float32 all launches must compute the same logits; the compiler may fuse in one and not in another
        'enable_fp_fusion': q.element_size() <= 2,
    }


def _launch(kernel, tiles: Tiles, tensors, codes_x, scale: float, constants) -> None:
    q, k, v = tensors[:3]
    batch, num_heads, num_tokens, _ = q.shape
    with torch.cuda.device_of(q):
        kernel[(triton.cdiv(num_tokens, tiles.own) * batch * num_heads,)](
            *tensors, *(t.stride(n) for t in (q, k, v) for n in range(3)),
            num_heads, num_tokens, num_tokens - codes_x.shape[-2], scale,
            **constants, num_warps=tiles.warps, num_stages=tiles.stages)


@torch.library.custom_op('timm_sape::distance_attention_triton', mutates_args=())
def triton_distance_attention_forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        codes_x: torch.Tensor,
        codes_y: torch.Tensor,
        bias_scale: torch.Tensor,
        scale: float,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output and, for the backward pass, the largest logit of each row (to base 2) and the sum over it.

    These are not merged into one logarithm, in which the digits of the sum would be lost next to logits of 10^4.
    """
    batch, num_heads, num_tokens, _ = q.shape
    q, k, v = dense_rows(q, k, v)
    (wx, sx), (wy, sy) = (_prepare(c, num_tokens, q.dtype == torch.float32) for c in (codes_x, codes_y))
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    row_max, row_sum = (wx.new_empty(batch, num_heads, num_tokens) for _ in range(2))
    constants = _constants(q, wx, wy, codes_x, codes_y)
    tiles = forward_tiles(constants['D'], max(constants['CX'], constants['CY']), q.element_size())
    gain = bias_scale.to(wx.dtype).expand(num_heads).contiguous()
    _launch(
        _forward, tiles, (q, k, v, wx, wy, sx, sy, gain, out, row_max, row_sum), codes_x, scale,
        dict(constants, OWN=tiles.own, VISIT=tiles.visit))
    return out, row_max, row_sum


@triton_distance_attention_forward.register_fake
def _(q, k, v, codes_x, codes_y, bias_scale, scale):
    rows = codes_x.new_empty(q.shape[:-1])
    return torch.empty_like(v, memory_format=torch.contiguous_format), rows, torch.empty_like(rows)


@torch.library.custom_op('timm_sape::distance_attention_triton_backward', mutates_args=())
def triton_distance_attention_backward(
        grad: torch.Tensor,
        out: torch.Tensor,
        row_max: torch.Tensor,
        row_sum: torch.Tensor,
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
    has_16_bits = q.element_size() <= 2
    # The sum of p * dp over keys is the sum of grad * out over channels. If a query attends to one key alone, gradients
    # depend on its last digits, so for float32 a launch of its own sums p * dp.
    delta = (grad.to(wx.dtype) * out).sum(dim=-1) if has_16_bits else torch.empty_like(row_max)  # [B, h, N]
    grad_q, grad_k, grad_v = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    grad_wx, grad_wy, grad_gain = torch.empty_like(wx), torch.empty_like(wy), torch.empty_like(delta)
    prefix = num_tokens - codes_x.shape[-2]
    constants = _constants(q, wx, wy, codes_x, codes_y)
    gain = bias_scale.to(wx.dtype).expand(num_heads).contiguous()
    constants['GRADIENT_PRECISION'] = 'tf32' if has_16_bits else constants['PRECISION']  # tf32 is finer than bf16
    for launch in backward_launches(constants['D'], max(constants['CX'], constants['CY']), q.element_size()):
        tensors = (
            q, k, v, grad, wx, wy, sx, sy, gain, row_max, row_sum, delta,
            grad_k if launch.key_pass else grad_q, grad_v, grad_wx, grad_wy, grad_gain)
        _launch(_backward, launch.tiles, tensors, codes_x, scale, dict(constants, **launch.constants()))
    grad_codes = [
        g[:, prefix:, :c.shape[-1]].reshape(c.shape) for g, c in ((grad_wx, codes_x), (grad_wy, codes_y))]
    grad_scale = grad_gain.sum(dim=(0, 2))  # [h]
    grad_scale = grad_scale.sum(0, keepdim=True) if bias_scale.shape[0] == 1 else grad_scale
    return grad_q, grad_k, grad_v, *(g.contiguous() for g in grad_codes), grad_scale.to(bias_scale.dtype)


@triton_distance_attention_backward.register_fake
def _(grad, out, row_max, row_sum, q, k, v, codes_x, codes_y, bias_scale, scale):
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, codes_x, codes_y, bias_scale))


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.scale = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output, *tensors)


def _backward_formula(ctx, grad, *_):
    if torch.is_grad_enabled():  # the caller will differentiate the result again
        inputs = ctx.saved_tensors[3:]
        return (*differentiable_gradients(partial(distance_attention, ctx.scale), inputs, (grad,)), None)
    return (*triton_distance_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None)


triton_distance_attention_forward.register_autograd(_backward_formula, setup_context=_setup_context)
register_flops(triton_distance_attention_forward, triton_distance_attention_backward)


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

    Arguments and result are the same. q, k and v have one dtype. For the widths of heads and codes see `triton_limits`.
    """
    return triton_distance_attention_forward(q, k, v, codes_x, codes_y, bias_scale, scale)[0]
