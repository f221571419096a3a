"""iRPE in float64 loops (Wu et al., 'Rethinking and Improving Relative Position Encoding for Vision Transformer', ICCV
2021).

The piecewise index function is floored, the bucket of queries is that of the opposite offset, and all pairs with a
prefix token share a bucket, as in the published code.
"""
import math

from loops import places, stacked, vectors


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
