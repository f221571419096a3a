"""SaPE2 with squared distances in float64 loops: the codes of the paper's Eq. 9 to 14, and Eq. 15 without its root.

The square is ours.
"""
from loops import content_bias
from reference_sape2 import sape2_codes


def sape2sq_bias(
        q, k, table_x, table_y, grid_size, *, mode, gate_scale, num_prefix_tokens=0, ref_grid_size=None,
        keep_indices=None):
    """|c_i - c_n|^2 for the codes of SaPE2, summed over both axes, 0 wherever a prefix token takes part."""
    p, where = num_prefix_tokens, {'num_prefix_tokens': num_prefix_tokens, 'keep_indices': keep_indices}
    axes = sape2_codes(
        q, k, table_x, table_y, grid_size, mode=mode, gate_scale=gate_scale, ref_grid_size=ref_grid_size, **where)

    def pair(b, h, i, n, place_i, place_n):
        differences = [codes[b][h][i - p] - codes[b][h][n - p] for codes in axes]
        return sum(difference @ difference for difference in differences)

    return content_bias(pair, q.shape[0], q.shape[1], grid_size, **where)
