"""LieRE in float64 loops (Ostmeier et al., 'LieRE: Lie Rotational Positional Encodings', ICML 2025).

`entries` are those above the diagonals, `[2, h, n, b*(b-1)/2]`: of y, then of x. Positions are divided by those of the
last row and column of the trained grid, and with `rescale` also rescaled to it.
"""
import functools

from loops import exponential, multiplied, rescaled, skew


def rotate(x, grid_size, *, entries, block_size, trained_on=None, rescale=False, gate=1, **where):
    """Block m of head h is multiplied by exp(y A[0, h, m] + x A[1, h, m])."""
    sizes = trained_on or grid_size
    to_y, to_x = (
        rescaled(size, trained) if rescale else (lambda i: i) for size, trained in zip(grid_size, sizes))
    height, width = sizes

    @functools.cache
    def matrices(h, row, column):
        y, x = to_y(row) / max(height - 1, 1), to_x(column) / max(width - 1, 1)
        return [
            exponential(gate * (y * skew(of_y, block_size) + x * skew(of_x, block_size)))
            for of_y, of_x in zip(entries[0, h], entries[1, h])]

    return multiplied(x, matrices, grid_size, **where)
