"""The rotation of DINOv3 in float64 loops (Siméoni et al., 2025, and its published code; the paper has no equation).

Positions lie between -1 and 1 on any grid, so no trained grid plays a part.
"""
import math

from loops import rotated


def angle(
        dim, grid_size, base=100.0, normalize='separate', shift=(0.0, 0.0), jitter=(1.0, 1.0), rescale=1.0):
    """2 pi c / base^(2k/(d/2)), for c = y in the first d/4 pairs, for c = x in the others.

    `shift`, `jitter` and `rescale` are what training drew, not the limits it drew from.
    """
    height, width = grid_size
    by_y, by_x = {
        'separate': (height, width), 'max': (max(grid_size),) * 2, 'min': (min(grid_size),) * 2}[normalize]

    def turn(h, t, row, column):
        axis, k = divmod(t, dim // 4)
        c = ((row + 0.5) / by_y, (column + 0.5) / by_x)[axis]
        c = 2 * c - 1
        c = (c + shift[axis]) * jitter[axis] * rescale
        return 2 * math.pi * c / base ** (2 * k / (dim / 2))

    return turn


def rotate(x, grid_size, *, gate=1, num_prefix_tokens=0, keep_indices=None, **keywords):
    """Pair t is the channels t and t + d/2."""
    plain = angle(x.shape[-1], grid_size, **keywords)
    return rotated(
        x, lambda *place: gate * plain(*place), grid_size, num_prefix_tokens, keep_indices, rotate_half=True)
