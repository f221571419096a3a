"""CoPE's bias. This is the one place that chooses between the reference and the operator."""
from typing import Optional

import torch

from ..grid import Grid
from . import reference
from .counting import in_raster_order
from .devices import check_devices
from .torch_contextual import torch_contextual_bias
from .transforms import is_exporting, is_transformed

__all__ = ['contextual_bias']


def contextual_bias(
        q: torch.Tensor,
        k: torch.Tensor,
        table: torch.Tensor,
        grid: Grid,
        *,
        gate_scale: float,
        between: bool = False,
        ref_num_patches: Optional[int] = None,
) -> torch.Tensor:
    """`reference.contextual_bias`, same arguments, by an operator that stores less if it can be used.

    The operator does not support symbolic sizes, q and k of different dtypes and torch.func, and exported graphs may
    contain standard operators only. It computes in the dtype of q, float32 at least, whatever the dtype of the table;
    the reference in the widest of all.

    Raises:
        ValueError: If tensors are on different devices.
    """
    check_devices(q=q, k=k, table=table, keep_indices=grid.keep_indices)
    needs_reference = (
        type(q.shape[2]) is not int  # also in a trace, where sizes are tensors
        or type(grid.num_patches) is not int or q.dtype != k.dtype or is_transformed() or is_exporting())
    if needs_reference:
        return reference.contextual_bias(
            q, k, table, grid, gate_scale=gate_scale, between=between, ref_num_patches=ref_num_patches)
    table = table.to(torch.promote_types(q.dtype, torch.float32))
    shrink = 1.0 if ref_num_patches is None else ref_num_patches / grid.num_patches
    return in_raster_order(
        lambda q, k: torch_contextual_bias(q, k, table, gate_scale, between, shrink), q, k, grid)
