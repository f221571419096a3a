"""RoPE-Mixed in float64 loops (Heo et al., 'Rotary Position Embedding for Vision Transformer', ECCV 2024).

Its mixed learnable frequency, theta_x and theta_y for each head and pair. With `ref_grid_size`, positions are those in
the trained grid.
"""
from loops import rescaled, rotated


def rotate(x, grid_size, *, freqs, ref_grid_size=None, gate=1, **where):
    """Pair t of head h, the channels 2t and 2t + 1, turns by x * freqs[0, h, t] + y * freqs[1, h, t]."""
    ref_height, ref_width = ref_grid_size or grid_size
    to_y, to_x = rescaled(grid_size[0], ref_height), rescaled(grid_size[1], ref_width)
    fx, fy = freqs[0], freqs[1]
    return rotated(
        x, lambda h, t, row, column: gate * (to_x(column) * fx[h, t] + to_y(row) * fy[h, t]), grid_size, **where)
