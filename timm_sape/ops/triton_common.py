"""What the files with Triton kernels share."""
from typing import List

import torch
import triton

__all__ = ['dense_rows', 'padded']


def padded(width: int) -> int:
    """The width of a block that holds so many channels."""
    return max(16, triton.next_power_of_2(width))


def dense_rows(*tensors: torch.Tensor) -> List[torch.Tensor]:
    """Bring tensors into the layout that kernels read: channels side by side, and offsets within a head in 32 bits."""
    return [
        t if t.stride(-1) == 1 and t.shape[-2] * t.stride(-2) < 2 ** 31 else t.contiguous() for t in tensors]
