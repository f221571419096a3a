"""Golden gate RoPE in float64 loops (Jerry Xiong, 'On N-dimensional Rotary Positional Embeddings', 2025).

Each frequency has a direction of its own, turned from the one before by pi over the golden ratio.
"""
import math

from loops import rotated

GOLDEN_RATIO = (1 + math.sqrt(5)) / 2


def angle(dim, grid_size, min_freq=0.2, max_freq=20.0, zero_share=0.0):
    """w_t times the projection of the place on the direction of pair t of head h."""
    height, width = grid_size
    num_pairs = dim // 2
    zeros = min(round(zero_share * num_pairs), num_pairs - 1)

    def frequency(t):
        if t < zeros:
            return 0.0
        last = num_pairs - zeros - 1
        return math.exp(math.log(min_freq) + (t - zeros) / max(last, 1) * math.log(max_freq / min_freq))

    def place(i, size, other):
        """From edge to edge of an image whose area is 4."""
        return 0.0 if size == 1 else (i / (size - 1) - 0.5) * 2 * math.sqrt(size / other)

    def turn(h, t, row, column):
        direction = (h * num_pairs + t) * math.pi / GOLDEN_RATIO
        y, x = place(row, height, width), place(column, width, height)
        return frequency(t) * (math.cos(direction) * x + math.sin(direction) * y)

    return turn


def rotate(x, grid_size, *, gate=1, num_prefix_tokens=0, keep_indices=None, **keywords):
    """Pair t is the channels t and t + d/2."""
    plain = angle(x.shape[-1], grid_size, **keywords)
    return rotated(
        x, lambda *place: gate * plain(*place), grid_size, num_prefix_tokens, keep_indices, rotate_half=True)
