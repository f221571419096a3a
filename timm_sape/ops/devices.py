"""A check of devices, which torch does not make for custom operators."""
from typing import Union

import torch

__all__ = ['check_devices']


def check_devices(**tensors: Union[torch.Tensor, float, None]) -> None:
    """
    Args:
        tensors: By name. What is not a tensor is left out.

    Raises:
        ValueError: If they are on different devices.
    """
    devices = {name: tensor.device for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    if len(set(devices.values())) > 1:
        found = ', '.join(f'{name} on {device}' for name, device in devices.items())
        raise ValueError(f'All tensors must be on the same device, got {found}. Move them with .to(device).')
