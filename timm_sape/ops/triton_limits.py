"""What the Triton kernels can do, known without importing Triton. `.ci/check_spills.py` compiles the kernels for it."""
from typing import NamedTuple

import torch

__all__ = ['FAST_FLOAT64', 'LIMITS', 'MIN_CAPABILITY', 'MISCOMPILED_ON', 'Limits', 'limits_of', 'shared_memory']

MIN_CAPABILITY = 8.0  # the least compute capability of an NVIDIA GPU that Triton supports
# Of GPUs that compute float64 half as fast as float32 (A100, H100). Others take 32 times as long, or 64.
FAST_FLOAT64 = (8, 0), (9, 0)
# There (B200, B300) Triton 3.6 to 3.8 compile two products that are added to one accumulator in a loop into wrong code,
# and the gradient of the codes is such a sum: https://github.com/triton-lang/triton/issues/10821
MISCOMPILED_ON = 10


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


def shared_memory(head_dim: int, code: int, itemsize: int) -> int:
    """KiB that a program needs at most, by the channels of a head and of the wider codes, and the bytes of q's dtype.

    A GPU has 227 (H100), 163 (A100) or 99 (others).
    """
    return 99 if head_dim <= 64 and code <= (32 if itemsize <= 2 else 16) else 163
