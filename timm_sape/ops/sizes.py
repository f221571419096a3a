"""Logarithms of sizes, which are symbolic while a model is exported or traced."""
import math
from typing import Optional, Sequence, Union

import torch

__all__ = ['log_of_largest']


def log_of_largest(values: Sequence[float], device: Optional[torch.device] = None) -> Union[float, torch.Tensor]:
    """The natural logarithm of the largest of these sizes or ratios: a number, or a tensor `[]` if one is symbolic."""
    if all(type(value) in (int, float) for value in values):
        return math.log(max(values))
    return torch.stack([torch.ones((), device=device) * value for value in values]).amax(0).log()
