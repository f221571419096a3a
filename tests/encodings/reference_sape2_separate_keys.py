"""SaPE2 with separate keys in float64 loops: gates and codes of an axis see k W instead of k, with a W of that axis.

The paper has none of this; the repository that appears to be its authors' has it as `sep_keys`.
"""
from loops import content_bias, stacked, vectors
from reference_sape2 import distance, sape2_codes


def mapped(k, matrix):
    """k W for each token, one number at a time."""
    rows = [list(row.unbind(0)) for row in matrix.unbind(0)]
    return stacked([[[[
        sum(token[a] * rows[a][c] for a in range(len(rows))) for c in range(len(rows))]
        for token in tokens] for tokens in heads] for heads in vectors(k)])


def codes(q, k, table_x, table_y, grid_size, *, key_x, key_y, **options):
    """Along x those of the keys k `key_x`, along y those of the keys k `key_y`."""
    along_x, _ = sape2_codes(q, mapped(k, key_x), table_x, table_y, grid_size, **options)
    _, along_y = sape2_codes(q, mapped(k, key_y), table_x, table_y, grid_size, **options)
    return along_x, along_y


def bias(
        q, k, table_x, table_y, grid_size, *, squared=False, num_prefix_tokens=0, keep_indices=None, **options):
    """Distances of the codes, or squared distances, summed over both axes; 0 wherever a prefix token takes part."""
    where = {'num_prefix_tokens': num_prefix_tokens, 'keep_indices': keep_indices}
    axes, p = codes(q, k, table_x, table_y, grid_size, **where, **options), num_prefix_tokens

    def pair(b, h, i, n, place_i, place_n):
        pairs = [(axis[b][h][i - p], axis[b][h][n - p]) for axis in axes]
        return sum((a - c) @ (a - c) if squared else distance(a, c) for a, c in pairs)

    return content_bias(pair, q.shape[0], q.shape[1], grid_size, **where)
