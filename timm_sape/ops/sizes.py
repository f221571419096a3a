"""Sizes, which are symbolic while a model is exported or traced."""
import math
from typing import Optional, Sequence, Union

import torch

__all__ = ['is_empty', 'log_of_largest']


def is_empty(x: torch.Tensor) -> bool:
    """Whether a tensor has no entries. One of symbolic sizes has some."""
    return any(type(size) is int and size == 0 for size in x.shape)


def log_of_largest(values: Sequence[float], device: Optional[torch.device] = None) -> Union[float, torch.Tensor]:
    """The natural logarithm of the largest of these sizes or ratios: a number, or a tensor `[]` if one is symbolic."""
    if all(type(value) in (int, float) for value in values):
        return math.log(max(values))
    return torch.stack([torch.ones((), device=device) * value for value in values]).amax(0).log()
