"""A check that operators of our own need, because torch makes none for them."""
from typing import Optional

import torch

__all__ = ['check_devices']


def check_devices(**tensors: Optional[torch.Tensor]) -> None:
    """
    Args:
        tensors: By name; None is left out.

    Raises:
        ValueError: If they are on different devices.
    """
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        found = ', '.join(f'{name} on {device}' for name, device in devices.items())
        raise ValueError(f'All tensors must be on the same device, got {found}.')
