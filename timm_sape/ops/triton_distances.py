"""`distance_attention` as Triton kernels: nothing N x N is written to memory, and nothing is added atomically.

Forward, a program owns a tile of queries, visits all keys tile by tile, and keeps a running softmax. Backward, one
kernel runs in two passes. In the query pass a program owns queries and visits keys, for the gradient of q. In the key
pass it owns keys and visits queries, for the gradients of k and v. The gradient of the codes has a part from R w and a
part from R^T w (see `torch_distances`); each pass computes one of them.

Squared distances are s_i + s_j - 2 w_i.w_j with s = |w|^2. If q has 16 bits, the codes are centred and each is the sum
of two fp16 numbers, 22 bits together, stored side by side. Tensor cores multiply them as several products, see
`_distance`. If q is float32, the product is computed in float64. A squared distance below TOLERANCE * (s_i + s_j) is
rounding error and counts as 0.

If q is float32, q.k and grad.v are summed in float64 too, and then rounded. The passes compute them in tiles of other
shapes. If they differed in the last digit of a logit of 10^4, the probabilities of a row would not sum to 1.
"""
from typing import Dict, Tuple

import torch
import triton
import triton.language as tl

from .distances import empty_gradients, empty_out, empty_rows
from .triton_common import dense_rows, dtype_of, load_rows, padded, to_tf32
from .triton_prepare import PreparedCodes
from .triton_tiles import Tiles, backward_launches, forward_tiles

__all__ = ['attention_backward', 'attention_forward']

# New values of these do not compile a kernel anew.
SIZES = ['num_heads', 'num_tokens', 'num_prefix', 'width_x', 'width_y']
LOG2E = tl.constexpr(1.4426950408889634)
MAX_SHORT_CODE = 4  # codes of so few channels are subtracted channel by channel

# The parameters of `_forward` and `_backward`, by groups. Names with _i belong to the tokens that a program owns, names
# with _j to those that it visits. A name with D in front is the gradient of what follows.
#
# Tensors of all heads, one row for each token:
#   Q, K, V                 [B, h, N, d], with any strides but that of the channels, which is 1
#   OUT, DOUT               [B, h, N, d], likewise; all that follow are contiguous
#   WX, WY                  codes along x and along y in units of UNIT, [B*h, N, CX] and [B*h, N, CY]; with SPLIT both
#                           parts side by side
#   SX, SY                  squared norms of the codes, [B*h, N], in the dtype in which products are summed; NO_CODE for
#                           prefix tokens
#   DWX, DWY                gradients of the codes, not in units, [B*h, N-P, width_x] and [B*h, N-P, width_y]
#   UNIT                    a power of two with SPLIT, else 1, [B*h]
#   GAIN                    factor of the distances, [h] with gain_step 1, [1] with gain_step 0
#   ROW_MAX, ROW_SUM        of the softmax: largest logit of each query (to base 2), and sum over it, [B, h, N]. With
#                           SPLIT the logarithm of the sum is added to the first, and the second is not read
#   DELTA                   sum over keys of p * dp for each query, [B, h, N], written in the query pass
#   DQK                     gradient of q in the query pass, of k in the key pass, [B, h, N, d]
#   DV                      written in the key pass
#   DGAIN                   one part of the gain's gradient from each program of the query pass, [B, h, programs]
# Strides of q, k, v, OUT and DOUT along batch, heads and tokens: sq_b, sq_h, sq_n, sk_b, ..., sv_n, so_b, ..., sd_n
# Sizes: num_heads h, num_tokens N, num_prefix P, and width_x, width_y, the channels of the codes
# scale is the factor of q.k
# Widths, all but HEAD_DIM padded to powers of two:
#   HEAD_DIM, D             d, and padded
#   CX, CY                  channels of the codes; with SPLIT twice as many, for both parts
#   SHORT_X, SHORT_Y        channels of the codes if these are so few that they are subtracted, else 0
# Tiles: OWN, VISIT          tokens, see `Tiles`
# What one launch of `_backward` does, see there: KEY_PASS, DELTA_ONLY, GRAD_TOKENS, GRAD_X, GRAD_Y
# Precision:
#   SPLIT                   whether codes come as two numbers of 16 bits
#   TOLERANCE               squared distances up to this part of s_i + s_j count as 0
#   PRECISION               of products, unless tensor cores multiply 16 bits
#   DTYPE                   of what is computed, unless it has the dtype of SX


@triton.jit
def _load_codes(W, row, inside, WIDTH: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT columns of the codes of a tile, from column FIRST on, then again from column 0."""
    columns = (FIRST + tl.arange(0, COUNT)) % WIDTH
    return tl.load(W + row[:, None] * WIDTH + columns[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _load_factors(
        W, S, row, inside, WIDTH: tl.constexpr, SPLIT: tl.constexpr, TOGETHER: tl.constexpr,
):
    """Of the owned codes: what `_distance` multiplies with the visited ones, and the squared norms."""
    COUNT: tl.constexpr = WIDTH // 2 if SPLIT and not TOGETHER else WIDTH
    factor = _load_codes(W, row, inside, WIDTH, 0, COUNT)
    low_factor = factor
    if SPLIT:
        factor = -2.0 * factor
        low_factor = -2.0 * _load_codes(W, row, inside, WIDTH, WIDTH // 2, COUNT)
    return factor, low_factor, tl.load(S + row, mask=inside, other=0.0)


@triton.jit
def _distance(
        W, S, row_i, row_j, in_i, in_j, factor_i, low_factor_i, s_i,
        SHORT: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, TOGETHER: tl.constexpr,
        TOLERANCE: tl.constexpr, DTYPE: tl.constexpr,
):
    """Distances along one axis from the owned codes to the visited ones, their inverses, and both parts of the latter.

    Distance and inverse are 0 where the distance is no larger than its rounding error, and where one of the tokens has
    no code, unless the other's is NaN.

    With SPLIT and TOGETHER a product has both parts: [high, low] and [low, high] of the owned codes, each with
    [high, low] of the visited ones. This takes fewer products and more registers than high with high, low with high
    and high with low.
    """
    s_j = tl.load(S + row_j, mask=in_j, other=0.0)
    high_j = _load_codes(W, row_j, in_j, WIDTH, 0, WIDTH // 2 if SPLIT and not TOGETHER else WIDTH)
    low_j = high_j
    if SPLIT and not TOGETHER:
        low_j = _load_codes(W, row_j, in_j, WIDTH, WIDTH // 2, WIDTH // 2)
    if (SHORT > 0) & (s_i.dtype == DTYPE):  # a product of such short codes is not precise enough
        square = tl.minimum(s_i, 0.0)[:, None] + tl.minimum(s_j, 0.0)[None, :]
        floor = tl.maximum(s_i, 0.0)[:, None] + tl.maximum(s_j, 0.0)[None, :]
        floor *= 8 * TOLERANCE * TOLERANCE  # the codes have been rounded, their product is not
        for c in tl.static_range(SHORT):
            x_i = tl.load(W + row_i * WIDTH + c, mask=in_i, other=0.0).to(DTYPE)
            x_j = tl.load(W + row_j * WIDTH + c, mask=in_j, other=0.0).to(DTYPE)
            if SPLIT:
                x_i += tl.load(W + row_i * WIDTH + WIDTH // 2 + c, mask=in_i, other=0.0).to(DTYPE)
                x_j += tl.load(W + row_j * WIDTH + WIDTH // 2 + c, mask=in_j, other=0.0).to(DTYPE)
            difference = x_i[:, None] - x_j[None, :]
            square += difference * difference
    else:
        floor = TOLERANCE * s_i[:, None] + TOLERANCE * s_j[None, :]
        square = s_i[:, None] + s_j[None, :]
        if SPLIT:
            square = tl.dot(factor_i, tl.trans(high_j), acc=square)
            square = tl.dot(low_factor_i, tl.trans(high_j), acc=square)
            if not TOGETHER:
                square = tl.dot(factor_i, tl.trans(low_j), acc=square)
        else:
            square -= 2 * tl.dot(
                factor_i.to(s_i.dtype), tl.trans(high_j.to(s_i.dtype)), input_precision='ieee', out_dtype=s_i.dtype)
    is_zero = square <= floor  # NaN stays NaN
    square = square.to(DTYPE)
    if not SPLIT:
        is_zero |= square < 1.2e-38  # about the smallest float32 that a GPU does not take for 0
        square = tl.where(is_zero, 0.0, square)  # it may be -infinity
    inverse = tl.rsqrt(tl.where(is_zero, float('inf'), square))
    return square * inverse, inverse, high_j, low_j


@triton.jit
def _partial_sums(x):
    """Sums over every eighth column, `[tile, 8]`. A thread holds all of these columns, so nothing is exchanged."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]), 1)


@triton.jit
def _add_sums(r, w, low, row_sum, rw, SPLIT: tl.constexpr, FEW_DIGITS: tl.constexpr):
    """Add rowsum(R) to `row_sum` and R w to `rw`.

    The gradient is rowsum(R) w - R w. So both must use the same R, which may be rounded, and w needs many digits. With
    SPLIT, fp16 has too small a range for R. With FEW_DIGITS it is rounded to bfloat16, and w to two such numbers, 16
    bits together: unlike tf32, threads need not exchange these to multiply them.
    """
    if SPLIT and FEW_DIGITS:
        r_16 = r.to(tl.bfloat16)
        r = r_16.to(tl.float32)
        w = w.to(tl.float32) + low.to(tl.float32)
        high = w.to(tl.bfloat16)
        rw = tl.dot(r_16, (w - high.to(tl.float32)).to(tl.bfloat16), acc=rw)
        rw = tl.dot(r_16, high, acc=rw)
    elif SPLIT:
        r = to_tf32(r)  # 16 bits fit into tf32
        rw = tl.dot(r, low.to(tl.float32), acc=rw, input_precision='tf32')
        rw = tl.dot(r, w.to(tl.float32), acc=rw, input_precision='tf32')
    else:
        r = r.to(rw.dtype)
        rw += tl.dot(r, w.to(rw.dtype), input_precision='ieee', out_dtype=rw.dtype)
    return row_sum + _partial_sums(r), rw


@triton.jit
def _store_code_gradient(
        DW, W, row, at, inside, width, gain, row_sum, rw,
        ADD: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, DTYPE: tl.constexpr,
):
    """Store, or add to what is stored: gain * (rowsum(R) w - R w), for the rows `at` of DW."""
    C: tl.constexpr = WIDTH // 2 if SPLIT else WIDTH
    c = tl.arange(0, C)
    w = _load_codes(W, row, inside, WIDTH, 0, C).to(rw.dtype)
    if SPLIT:
        w += _load_codes(W, row, inside, WIDTH, C, C).to(rw.dtype)
    gradient = gain * (tl.sum(row_sum, 1)[:, None] * w - rw).to(DTYPE)
    to = DW + at[:, None] * width + c[None, :]
    mask = inside[:, None] & (c < width)[None, :]
    if ADD:
        gradient += tl.load(to, mask=mask, other=0.0)
    tl.store(to, gradient, mask=mask)


@triton.jit
def _product(a, b, SUM: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr):
    """a b^T, summed in dtype SUM, returned in DTYPE."""
    if SUM != DTYPE:
        a, b = a.to(SUM), b.to(SUM)
    return tl.dot(a, tl.trans(b), input_precision=PRECISION, out_dtype=SUM).to(DTYPE)


@triton.jit
def _logits(
        qk_i, qk_j, distance, in_j, scale, gain,
        MASK: tl.constexpr, SUM: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):
    """Logits to base 2. With MASK they are -inf where a visited token does not exist."""
    logits = _product(qk_i, qk_j, SUM, PRECISION, DTYPE) * scale
    if MASK:
        logits += tl.where(in_j, 0.0, float('-inf'))[None, :]
    return logits + gain * distance


@triton.jit(do_not_specialize=SIZES)
def _forward(
        Q, K, V, OUT, WX, WY, SX, SY, UNIT, GAIN, ROW_MAX, ROW_SUM,
        sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, sv_b, sv_h, sv_n, so_b, so_h, so_n,
        num_heads, num_tokens, scale, gain_step,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, CX: tl.constexpr, CY: tl.constexpr,
        SHORT_X: tl.constexpr, SHORT_Y: tl.constexpr,
        OWN: tl.constexpr, VISIT: tl.constexpr,
        SPLIT: tl.constexpr, TOLERANCE: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):
    """Attention of the owned queries to all keys. For the parameters see above."""
    tiles = tl.cdiv(num_tokens, OWN)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // num_heads, head % num_heads
    i = tl.program_id(0) % tiles * OWN + tl.arange(0, OWN)
    in_i = i < num_tokens
    q = load_rows(Q + b * sq_b + h * sq_h, i, sq_n, in_i, HEAD_DIM, D)
    k_head, v_head = K + b * sk_b + h * sk_h, V + b * sv_b + h * sv_h
    row_i = head * num_tokens + i
    factor_x, low_factor_x, sx_i = _load_factors(WX, SX, row_i, in_i, CX, SPLIT, True)
    factor_y, low_factor_y, sy_i = _load_factors(WY, SY, row_i, in_i, CY, SPLIT, True)
    unit = tl.load(UNIT + head)
    gain, scale_2 = tl.load(GAIN + h * gain_step) * unit * LOG2E, scale * LOG2E
    row_max = tl.full([OWN], float('-inf'), DTYPE)
    row_sum = tl.zeros([OWN, 8], DTYPE)
    out = tl.zeros([OWN, D], DTYPE)
    for start in range(0, num_tokens, VISIT):
        j = start + tl.arange(0, VISIT)
        in_j = j < num_tokens
        k = load_rows(k_head, j, sk_n, in_j, HEAD_DIM, D)
        v = load_rows(v_head, j, sv_n, in_j, HEAD_DIM, D)
        row_j = head * num_tokens + j
        distance_x, _, _, _ = _distance(
            WX, SX, row_i, row_j, in_i, in_j, factor_x, low_factor_x, sx_i,
            SHORT_X, CX, SPLIT, True, TOLERANCE, DTYPE)
        distance_y, _, _, _ = _distance(
            WY, SY, row_i, row_j, in_i, in_j, factor_y, low_factor_y, sy_i,
            SHORT_Y, CY, SPLIT, True, TOLERANCE, DTYPE)
        logits = _logits(q, k, distance_x + distance_y, in_j, scale_2, gain, True, sx_i.dtype, PRECISION, DTYPE)
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        p = tl.exp2(logits - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale[:, None] + _partial_sums(p)
        out = out * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION, out_dtype=DTYPE)
        row_max = new_max
    row_sum = tl.sum(row_sum, 1)
    d = tl.arange(0, D)
    tl.store(
        OUT + b * so_b + h * so_h + i[:, None] * so_n + d[None, :], (out / row_sum[:, None]).to(OUT.dtype.element_ty),
        mask=in_i[:, None] & (d < HEAD_DIM)[None, :])
    if SPLIT:
        row_max += tl.log2(row_sum)
        row_sum = tl.full([OWN], 1.0, DTYPE)
    tl.store(ROW_MAX + row_i, row_max, mask=in_i)
    tl.store(ROW_SUM + row_i, row_sum, mask=in_i)


@triton.jit(do_not_specialize=SIZES)
def _backward(
        Q, K, V, OUT, DOUT, WX, WY, SX, SY, UNIT, GAIN, ROW_MAX, ROW_SUM, DELTA, DQK, DV, DWX, DWY, DGAIN,
        sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, sv_b, sv_h, sv_n, so_b, so_h, so_n, sd_b, sd_h, sd_n,
        num_heads, num_tokens, num_prefix, width_x, width_y, scale, gain_step,
        HEAD_DIM: tl.constexpr, D: tl.constexpr, CX: tl.constexpr, CY: tl.constexpr,
        SHORT_X: tl.constexpr, SHORT_Y: tl.constexpr,
        OWN: tl.constexpr, VISIT: tl.constexpr,
        KEY_PASS: tl.constexpr, DELTA_ONLY: tl.constexpr,
        GRAD_TOKENS: tl.constexpr, GRAD_X: tl.constexpr, GRAD_Y: tl.constexpr,
        SPLIT: tl.constexpr, TOLERANCE: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
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
    in_i = i < num_tokens
    row_i = head * num_tokens + i
    q_head, k_head, v_head = Q + b * sq_b + h * sq_h, K + b * sk_b + h * sk_h, V + b * sv_b + h * sv_h
    dout_head = DOUT + b * sd_b + h * sd_h
    if KEY_PASS:
        qk_i = load_rows(k_head, i, sk_n, in_i, HEAD_DIM, D)
        gv_i = load_rows(v_head, i, sv_n, in_i, HEAD_DIM, D)
    else:
        qk_i = load_rows(q_head, i, sq_n, in_i, HEAD_DIM, D)
        gv_i = load_rows(dout_head, i, sd_n, in_i, HEAD_DIM, D)
        max_i = tl.load(ROW_MAX + row_i, mask=in_i, other=float('inf'))  # makes p 0
        if SPLIT:
            # The sum of p * dp over keys is the sum of DOUT * OUT over channels. If a query attends to one key alone,
            # gradients depend on its last digits, so for float32 a launch of its own sums p * dp.
            out = load_rows(OUT + b * so_b + h * so_h, i, so_n, in_i, HEAD_DIM, D)
            delta_i = tl.sum(gv_i.to(DTYPE) * out.to(DTYPE), 1)
            tl.store(DELTA + row_i, delta_i, mask=in_i)
        else:
            inverse_sum_i = 1.0 / tl.load(ROW_SUM + row_i, mask=in_i, other=1.0)
            if not DELTA_ONLY:
                delta_i = tl.load(DELTA + row_i, mask=in_i, other=0.0)
    factor_x, low_factor_x, sx_i = _load_factors(WX, SX, row_i, in_i, CX, SPLIT, False)
    factor_y, low_factor_y, sy_i = _load_factors(WY, SY, row_i, in_i, CY, SPLIT, False)
    unit = tl.load(UNIT + head)
    # computed as in `_forward`, so the same to the last digit
    plain_gain = tl.load(GAIN + h * gain_step)
    gain, scale_2 = plain_gain * unit * LOG2E, scale * LOG2E
    dqk = tl.zeros([OWN, D], DTYPE)
    dv = tl.zeros([OWN, D], DTYPE)
    dwx = tl.zeros([OWN, CX // 2 if SPLIT else CX], sx_i.dtype)
    dwy = tl.zeros([OWN, CY // 2 if SPLIT else CY], sy_i.dtype)
    r_sum_x = tl.zeros([OWN, 8], sx_i.dtype)
    r_sum_y = tl.zeros([OWN, 8], sy_i.dtype)
    dgain = tl.zeros([OWN, 8], DTYPE)
    mean_distance = tl.zeros([OWN, 8], DTYPE)
    delta = tl.zeros([OWN, 8], DTYPE)
    for start in range(0, num_tokens, VISIT):
        j = start + tl.arange(0, VISIT)
        in_j = j < num_tokens
        row_j = head * num_tokens + j
        if KEY_PASS:
            qk_j = load_rows(q_head, j, sq_n, in_j, HEAD_DIM, D)
            gv_j = load_rows(dout_head, j, sd_n, in_j, HEAD_DIM, D)
        else:
            qk_j = load_rows(k_head, j, sk_n, in_j, HEAD_DIM, D)
            gv_j = load_rows(v_head, j, sv_n, in_j, HEAD_DIM, D)
        distance_x, inverse_x, wx_j, low_x_j = _distance(
            WX, SX, row_i, row_j, in_i, in_j, factor_x, low_factor_x, sx_i,
            SHORT_X, CX, SPLIT, False, TOLERANCE, DTYPE)
        distance_y, inverse_y, wy_j, low_y_j = _distance(
            WY, SY, row_i, row_j, in_i, in_j, factor_y, low_factor_y, sy_i,
            SHORT_Y, CY, SPLIT, False, TOLERANCE, DTYPE)
        distance = distance_x + distance_y
        logits = _logits(qk_i, qk_j, distance, in_j, scale_2, gain, not KEY_PASS, sx_i.dtype, PRECISION, DTYPE)
        if KEY_PASS:
            max_j = tl.load(ROW_MAX + row_j, mask=in_j, other=float('inf'))  # makes p 0
            delta_j = tl.load(DELTA + row_j, mask=in_j, other=0.0)
            p = tl.exp2(logits - max_j[None, :])
            if not SPLIT:
                p *= 1.0 / tl.load(ROW_SUM + row_j, mask=in_j, other=1.0)[None, :]
            if GRAD_TOKENS:
                dv += tl.dot(p.to(gv_j.dtype), gv_j, input_precision=PRECISION, out_dtype=DTYPE)
            dp = _product(gv_i, gv_j, sx_i.dtype, PRECISION, DTYPE) - delta_j[None, :]
        else:
            p = tl.exp2(logits - max_i[:, None])
            if not SPLIT:
                p *= inverse_sum_i[:, None]
            dp = _product(gv_i, gv_j, sx_i.dtype, PRECISION, DTYPE)
            if not DELTA_ONLY:
                dp -= delta_i[:, None]
        dlogits = p * dp
        if DELTA_ONLY:
            delta += _partial_sums(dlogits)
        if GRAD_TOKENS:
            dqk += tl.dot(dlogits.to(qk_j.dtype), qk_j, input_precision=PRECISION, out_dtype=DTYPE)
            if not KEY_PASS:
                dgain += _partial_sums(dlogits * distance)
                mean_distance += _partial_sums(p * distance)
                delta += _partial_sums(dlogits)
        if GRAD_X:
            r_sum_x, dwx = _add_sums(
                dlogits * inverse_x, wx_j, low_x_j, r_sum_x, dwx, SPLIT, qk_j.dtype == tl.bfloat16)
        if GRAD_Y:
            r_sum_y, dwy = _add_sums(
                dlogits * inverse_y, wy_j, low_y_j, r_sum_y, dwy, SPLIT, qk_j.dtype == tl.bfloat16)
    if DELTA_ONLY:
        tl.store(DELTA + row_i, tl.sum(delta, 1), mask=in_i)
    if GRAD_TOKENS:
        d = tl.arange(0, D)
        at, mask = row_i[:, None] * HEAD_DIM + d[None, :], in_i[:, None] & (d < HEAD_DIM)[None, :]
        tl.store(DQK + at, (dqk * scale).to(DQK.dtype.element_ty), mask=mask)
        if KEY_PASS:
            tl.store(DV + at, dv.to(DV.dtype.element_ty), mask=mask)
        else:
            # dlogits should sum to 0 over each row. If DELTA was rounded to 16 bits they do not, and the rest would be
            # multiplied with the mean distance, so that is taken out.
            dgain_i = tl.sum(dgain, 1) - tl.sum(delta, 1) * tl.sum(mean_distance, 1)
            tl.store(DGAIN + tl.program_id(0), tl.sum(tl.where(in_i, dgain_i, 0.0), 0) * unit)
    # The key pass runs second and adds to the stored query-pass gradient.
    at, has_code = head * (num_tokens - num_prefix) + i - num_prefix, in_i & (i >= num_prefix)
    if GRAD_X:
        _store_code_gradient(
            DWX, WX, row_i, at, has_code, width_x, plain_gain, r_sum_x, dwx, KEY_PASS, CX, SPLIT, DTYPE)
    if GRAD_Y:
        _store_code_gradient(
            DWY, WY, row_i, at, has_code, width_y, plain_gain, r_sum_y, dwy, KEY_PASS, CY, SPLIT, DTYPE)


def _constants(
        q: torch.Tensor,
        prepared: PreparedCodes,
        codes_x: torch.Tensor,
        codes_y: torch.Tensor,
) -> Dict[str, object]:
    eps, dtype, split = torch.finfo(codes_x.dtype).eps, dtype_of(codes_x), q.element_size() <= 2
    short_x, short_y = (c.shape[-1] if c.shape[-1] <= MAX_SHORT_CODE else 0 for c in (codes_x, codes_y))
    return {
        'HEAD_DIM': q.shape[-1],
        'D': padded(q.shape[-1]),
        'CX': prepared.wx.shape[-1],
        'CY': prepared.wy.shape[-1],
        'SHORT_X': short_x,
        'SHORT_Y': short_y,
        'SPLIT': split,
        # for float32 (64 eps)^2 times the mean of the two norms; the reference has the larger one
        'TOLERANCE': (64 * eps) ** 2 / 2 if q.dtype == torch.float32 else 16 * eps,
        'PRECISION': 'ieee' if dtype == tl.float64 else 'tf32x3',
        'DTYPE': dtype,
        # for float32 all launches must compute the same logits; the compiler may fuse in one and not in another
        'enable_fp_fusion': split,
    }


def _code_width(constants: Dict[str, object]) -> int:
    """Padded channels of the wider codes."""
    return max(constants['CX'], constants['CY']) // (2 if constants['SPLIT'] else 1)


def _launch(kernel, tiles: Tiles, tokens, others, sizes, constants) -> None:
    """`tokens` are q, k, v, the output and, in the backward pass, its gradient."""
    batch, num_heads, num_tokens, _ = tokens[0].shape
    with torch.cuda.device_of(tokens[0]):
        kernel[(-(-num_tokens // tiles.own) * batch * num_heads,)](
            *tokens, *others, *(step for t in tokens for step in t.stride()[:3]), num_heads, num_tokens, *sizes,
            **constants, OWN=tiles.own, VISIT=tiles.visit, **tiles.options())


def attention_forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        prepared: PreparedCodes,
        codes_x: torch.Tensor,
        codes_y: torch.Tensor,
        bias_scale: torch.Tensor,
        scale: float,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output and, for the backward pass, the largest logit of each row (to base 2) and the sum over it.

    Only for q of 16 bits are these merged into one logarithm: next to a logit of 10^4, digits of the sum are lost.
    """
    q, k, v = dense_rows(q, k, v)
    out = empty_out(v)
    row_max, row_sum = empty_rows(q)
    constants = _constants(q, prepared, codes_x, codes_y)
    tiles = forward_tiles(constants['D'], _code_width(constants), q.element_size())
    gain = bias_scale.to(codes_x.dtype).contiguous()
    _launch(
        _forward, tiles, (q, k, v, out), (*prepared, gain, row_max, row_sum), (scale, int(len(gain) > 1)), constants)
    return out, row_max, row_sum


def attention_backward(
        grad: torch.Tensor,
        out: torch.Tensor,
        row_max: torch.Tensor,
        row_sum: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        prepared: PreparedCodes,
        grad_x: torch.Tensor,
        grad_y: torch.Tensor,
        bias_scale: torch.Tensor,
        scale: float,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v and bias_scale; those of the codes are written to `grad_x` and `grad_y`, contiguous."""
    grad, out, q, k, v = dense_rows(grad, out, q, k, v)
    # hooks on what autograd keeps may have changed strides
    row_max, row_sum, *prepared = (t.contiguous() for t in (row_max, row_sum, *prepared))
    prepared = PreparedCodes(*prepared)
    prefix = q.shape[2] - grad_x.shape[2]
    delta = torch.empty_like(row_max)
    grad_q, grad_k, grad_v = empty_gradients(q, k, v)
    constants = _constants(q, prepared, grad_x, grad_y)
    gain = bias_scale.to(grad_x.dtype).contiguous()
    sizes = prefix, grad_x.shape[-1], grad_y.shape[-1], scale, int(len(gain) > 1)
    launches = backward_launches(constants['D'], _code_width(constants), q.element_size())
    own = next(launch.tiles.own for launch in launches if launch.tokens and not launch.key_pass)
    grad_gain = row_max.new_empty(*q.shape[:2], -(-q.shape[2] // own))
    for launch in launches:
        others = (
            *prepared, gain, row_max, row_sum, delta, grad_k if launch.key_pass else grad_q, grad_v, grad_x, grad_y,
            grad_gain)
        _launch(_backward, launch.tiles, (q, k, v, out, grad), others, sizes, {**constants, **launch.constants()})
    grad_scale = grad_gain.sum(dim=(0, 2) if len(gain) > 1 else None).view(-1)  # [h] or [1]
    return grad_q, grad_k, grad_v, grad_scale.to(bias_scale.dtype)
