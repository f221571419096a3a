"""Encodings that depend on content, from their equations: one pair of tokens at a time, in float64.

As in `references`: tensors are `[B, h, N, d]` with prefix tokens first, nothing is shared with the package.
"""
import math

import torch

from references import look_up, places, sape2_codes, sigmoid, stacked, vectors


def irpe_g(x, ratio):
    """The piecewise index function, with alpha : beta : gamma = 1 : 2 : 8, floored."""
    alpha, beta, gamma = ratio, 2 * ratio, 8 * ratio
    size = abs(x)
    if size > alpha:
        size = math.floor(min(round(alpha + math.log(size / alpha) / math.log(gamma / alpha) * (beta - alpha)), beta))
    return -size if x < 0 else size


def irpe_rows(a, b, method, ratio):
    """Rows of the table for the offset from b to a, (y, x) each, None for a prefix token.

    Directed results of g go from -n to n, n = floor(beta). Rows of 'cross' are those for dy, then those for dx. The row
    of prefix tokens comes last, of 'cross' last in each half.
    """
    n = math.floor(2 * ratio)
    side = 2 * n + 1
    if a is None or b is None:
        if method == 'cross':
            return [side, 2 * side + 1]
        return [side * side if method == 'product' else n + 1]
    dy, dx = a[0] - b[0], a[1] - b[1]
    if method == 'product':
        return [(irpe_g(dy, ratio) + n) * side + irpe_g(dx, ratio) + n]
    if method == 'euclidean':
        return [irpe_g(round(math.sqrt(dy * dy + dx * dx)), ratio)]
    if method == 'quantized':
        return [irpe_g(dy * dy + dx * dx, ratio)]
    return [irpe_g(dy, ratio) + n, side + 1 + irpe_g(dx, ratio) + n]


def of_head(table, h, is_vector):
    """Rows of the table of one head, which may be that of all."""
    return list((table if table.ndim == (2 if is_vector else 1) else table[h]).unbind(0))


def irpe_bias(
        q, k, grid_size, *, table_k=None, table_q=None, method='product', mode='contextual', ratio=1.9,
        num_prefix_tokens=0, keep_indices=None):
    """(q_i / sqrt(d)) . r_k[I(i, j)] + (k_j / sqrt(d)) . r_q[I(j, i)]; in mode 'bias' r_k[I(i, j)] + r_q[I(j, i)]."""
    root = math.sqrt(q.shape[-1])
    bias = []
    for b, (q_heads, k_heads) in enumerate(zip(vectors(q), vectors(k))):
        place = [None] * num_prefix_tokens + places(b, grid_size, keep_indices)
        bias.append([])
        for h, (qs, ks) in enumerate(zip(q_heads, k_heads)):
            bias[b].append([])
            rows_k, rows_q = (
                None if table is None else of_head(table, h, mode == 'contextual') for table in (table_k, table_q))
            for i, at_i in enumerate(place):
                row = []
                for j, at_j in enumerate(place):
                    terms = []
                    for rows, x, one, other in ((rows_k, qs[i], at_i, at_j), (rows_q, ks[j], at_j, at_i)):
                        for r in [] if rows is None else irpe_rows(one, other, method, ratio):
                            terms.append(rows[r] if mode == 'bias' else x @ rows[r] / root)
                    row.append(sum(terms))
                bias[b][h].append(row)
    return stacked(bias)


def irpe_values(attn, table_v, grid_size, *, method='product', ratio=1.9, num_prefix_tokens=0, keep_indices=None):
    """sum_j attn_ij r_v[I(i, j)]."""
    out = []
    for b, heads in enumerate(attn):
        place = [None] * num_prefix_tokens + places(b, grid_size, keep_indices)
        out.append([])
        for h, weights in enumerate(heads):
            rows = of_head(table_v, h, True)
            out[b].append([
                sum(weights[i, j] * rows[r]
                    for j, at_j in enumerate(place) for r in irpe_rows(at_i, at_j, method, ratio))
                for i, at_i in enumerate(place)])
    return stacked(out)


def cope_between(q, k, table, grid_size, *, num_prefix_tokens=0, ref_num_patches=None, keep_indices=None):
    """z_i[p_ij] / sqrt(d), p_ij the sum of sigmoid(q_i.k_m / sqrt(d)) from the first of i and j to before the last."""
    root = math.sqrt(q.shape[-1])
    height, width = grid_size
    shrink = (ref_num_patches or height * width) / (height * width)
    rows = list(table.unbind(0))
    bias = []
    for b, (q_heads, k_heads) in enumerate(zip(vectors(q), vectors(k))):
        raster = [None] * num_prefix_tokens + [y * width + x for y, x in places(b, grid_size, keep_indices)]
        bias.append([])
        for qs, ks in zip(q_heads, k_heads):
            bias[b].append([])
            for i, at_i in enumerate(raster):
                row = []
                for at_j in raster:
                    pos = torch.zeros((), dtype=q.dtype)
                    if at_i is None or at_j is None:
                        row.append(pos)
                        continue
                    for m, at_m in enumerate(raster):
                        if at_m is not None and min(at_i, at_j) <= at_m < max(at_i, at_j):
                            pos = pos + sigmoid(qs[i] @ ks[m] / root)
                    row.append(qs[i] @ look_up(rows, pos * shrink) / root)
                bias[b][-1].append(row)
    return stacked(bias)


def sape2sq_bias(q, k, table_x, table_y, grid_size, *, num_prefix_tokens=0, **kwargs):
    """|c_i - c_n|^2 for the codes of SaPE2, summed over both axes, 0 wherever a prefix token takes part."""
    axes = sape2_codes(q, k, table_x, table_y, grid_size, num_prefix_tokens=num_prefix_tokens, **kwargs)
    p, (batch, num_heads, num_tokens, _) = num_prefix_tokens, q.shape

    def entry(b, h, i, n):
        if i < p or n < p:
            return torch.zeros((), dtype=q.dtype)
        differences = [codes[b][h][i - p] - codes[b][h][n - p] for codes in axes]
        return sum(difference @ difference for difference in differences)

    return stacked([
        [[[entry(b, h, i, n) for n in range(num_tokens)] for i in range(num_tokens)] for h in range(num_heads)]
        for b in range(batch)])
