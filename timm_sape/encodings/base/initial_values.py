"""Initial values of parameters."""
import torch
from timm.layers import trunc_normal_

__all__ = ['fill_trunc_normal', 'fill_with']


def fill_trunc_normal(parameter: torch.Tensor, std: float) -> None:
    """Initialize with timm's `trunc_normal_`, with exactly this standard deviation and in any dtype.

    By default timm's function truncates at +-2, whatever the standard deviation. It also draws in the tensor's dtype,
    and in half precision some of these draws are infinite before they are truncated. In float32 one in 2^24 is: it
    becomes an end of the range, so the range must be near.
    """
    std = float(std)
    wide = torch.empty_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32), requires_grad=False)
    trunc_normal_(wide, std=std, a=-8 * std, b=8 * std)
    with torch.no_grad():
        parameter.copy_(wide)


def fill_with(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Initialize with these values. Of FSDP2's parameters, which are DTensors, each process sets its own part."""
    if hasattr(parameter, 'device_mesh'):
        from torch.distributed.tensor import distribute_tensor  # some builds of torch have no torch.distributed
        values = distribute_tensor(values, parameter.device_mesh, parameter.placements)  # those of the first process
    with torch.no_grad():
        parameter.copy_(values)
