"""M-RoPE in float64 loops (Wang et al., 'Qwen2-VL', 2024, section 2.1; the paper has no equation).

Pairs take turns in following time, y and x, as in timm's `RotaryEmbeddingMRope`, or follow them in three blocks, as in
Qwen2-VL's code. An image is at time 0. With `ref_grid_size`, positions are those in the trained grid.
"""
from loops import rescaled, rotated


def axes_in_turn(num_pairs, section):
    """The pairs go to time, y and x in turn. Once y or x has as many as `section` gives it, its turns go to time."""
    _, most_y, most_x = section or (num_pairs, num_pairs, num_pairs)
    axes = []
    for t in range(num_pairs):
        axis = ('time', 'y', 'x')[t % 3]
        if axis == 'y' and axes.count('y') == most_y or axis == 'x' and axes.count('x') == most_x:
            axis = 'time'
        axes.append(axis)
    return axes


def axes_in_blocks(num_pairs, section):
    """The first pairs go to time, the next to y, the last to x. What is left of even shares goes to time, then to y."""
    if section is None:
        share, left = divmod(num_pairs, 3)
        section = share + (left > 0), share + (left > 1), share
    return ['time'] * section[0] + ['y'] * section[1] + ['x'] * section[2]


def angle(dim, grid_size, ref_grid_size=None, section=None, layout='interleaved'):
    ref_height, ref_width = ref_grid_size or grid_size
    to_y, to_x = rescaled(grid_size[0], ref_height), rescaled(grid_size[1], ref_width)
    axes = {'interleaved': axes_in_turn, 'contiguous': axes_in_blocks}[layout](dim // 2, section)

    def turn(h, t, row, column):
        return {'time': 0.0, 'y': to_y(row), 'x': to_x(column)}[axes[t]] * 10000 ** (-2 * t / dim)

    return turn


def rotate(x, grid_size, *, ref_grid_size=None, section=None, layout='interleaved', gate=1, **where):
    """Pair t is the channels t and t + d/2."""
    plain = angle(x.shape[-1], grid_size, ref_grid_size, section, layout)
    return rotated(x, lambda *place: gate * plain(*place), grid_size, rotate_half=True, **where)
