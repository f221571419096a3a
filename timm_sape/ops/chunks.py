"""Working through heads a few at a time, so that what is at hand of them at one time fits a cache."""
from typing import Iterator, Tuple

__all__ = ['CHUNK', 'chunks']

CHUNK = 2 ** 18  # numbers, 1 MB in float32


def chunks(batch: int, num_heads: int, size: int) -> Iterator[Tuple[slice, slice]]:
    """Slices of `[B, h]`: as many heads as have `CHUNK` numbers together, one at least.

    Args:
        batch: B.
        num_heads: h.
        size: Numbers in one head.
    """
    count = max(1, CHUNK // size)
    images, heads = max(1, count // num_heads), min(count, num_heads)
    for image in range(0, batch, images):
        for head in range(0, num_heads, heads):
            yield slice(image, image + images), slice(head, head + heads)
