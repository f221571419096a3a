"""Initial values of parameters."""
import torch
from timm.layers import trunc_normal_

__all__ = ['fill_trunc_normal']


def fill_trunc_normal(parameter: torch.Tensor, std: float) -> None:
    """Initialize with timm's `trunc_normal_`, with exactly this standard deviation and in any dtype.

    By default timm's function truncates at +-2, whatever the standard deviation. It also draws in the tensor's dtype,
    and in half precision some of these draws are infinite before they are truncated.
    """
    std = float(std)
    wide = torch.empty_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32), requires_grad=False)
    trunc_normal_(wide, std=std, a=-100 * std, b=100 * std)
    with torch.no_grad():
        parameter.copy_(wide)
