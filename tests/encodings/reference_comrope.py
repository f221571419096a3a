"""ComRoPE in float64 loops (Yu et al., 'ComRoPE: Scalable and Robust Rotary Position Embedding Parameterized by
Trainable Commuting Angle Matrices', CVPR 2025).

`entries` are those above the diagonals, `[h, n, b*(b-1)/2]`. `factors`, `[2, n]`, are of y and of x; without them even
blocks turn with y and odd ones with x.
"""
import functools

from loops import exponential, multiplied, skew


def rotate(x, grid_size, *, entries, factors=None, form='ld', block_size=8, gate=1, **where):
    """Block m of head h is multiplied by the exponential of y B[0, m] + x B[1, m]. Both are multiples of one matrix."""
    height, width = grid_size
    assert (factors is None) == (form == 'ap')

    @functools.cache
    def matrices(h, row, column):
        y, x = (row + 0.5) / height - 0.5, (column + 0.5) / width - 0.5
        blocks = []
        for m in range(entries.shape[1]):
            of_y, of_x = (1 - m % 2, m % 2) if factors is None else factors[:, m]
            base = skew(entries[h, m], block_size)
            blocks.append(exponential(gate * (y * (of_y * base) + x * (of_x * base))))
        return blocks

    return multiplied(x, matrices, grid_size, **where)
