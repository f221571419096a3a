"""Work through heads a few at a time, so that the numbers in use fit the caches of a CPU, or the memory of a GPU."""
from typing import Iterator, Tuple

import torch

__all__ = ['chunk_size', 'chunks']

CHUNK = 2 ** 18  # numbers for each thread of a CPU, 1 MB in float32
CHUNK_ON_GPU = 2 ** 25  # a few operations on so many keep it busy; an operator has about ten such tensors at a time


def chunk_size(device: torch.device) -> int:
    """How many numbers are in use at one time, by all threads together."""
    return CHUNK * torch.get_num_threads() if device.type == 'cpu' else CHUNK_ON_GPU


def chunks(batch: int, num_heads: int, size: int, device: torch.device) -> Iterator[Tuple[slice, slice]]:
    """Slices of `[B, h]`, each of as many heads as have `chunk_size()` numbers together, or of one.

    Args:
        batch: B.
        num_heads: h.
        size: Numbers in one head.
        device: Where they are.
    """
    count = max(1, chunk_size(device) // max(1, size))
    images, heads = max(1, count // num_heads), min(count, num_heads)
    for image in range(0, batch, images):
        for head in range(0, num_heads, heads):
            yield slice(image, image + images), slice(head, head + heads)
