"""What the Triton kernels can do, known without importing Triton. `.ci/check_spills.py` compiles the kernels for it."""
from typing import NamedTuple

import torch

__all__ = ['FAST_FLOAT64', 'LIMITS', 'MIN_CAPABILITY', 'Limits', 'limits_of', 'shared_memory']

MIN_CAPABILITY = 8.0  # the least compute capability of an NVIDIA GPU that Triton supports
# Of GPUs that compute float64 half as fast as float32 (A100, H100, B200). Others take 32 times as long, or 64.
FAST_FLOAT64 = (8, 0), (9, 0), (10, 0)


class Limits(NamedTuple):
    """The largest sizes that the kernels are compiled and checked for."""
    head_dim: int
    code: int  # channels of the codes


LIMITS = {  # by the bits of a number of q
    16: Limits(head_dim=128, code=64),
    32: Limits(head_dim=64, code=32),
}


def limits_of(dtype: torch.dtype) -> Limits:
    """For q of this dtype. float64, which only the interpreter takes, has the limits of float32."""
    return LIMITS[16 if dtype.itemsize <= 2 else 32]


def shared_memory(code: int) -> int:
    """KiB that a program needs at most, by the channels of the wider codes.

    A GPU has 227 (H100), 163 (A100) or 99 (others).
    """
    return 99 if code <= 32 else 163
