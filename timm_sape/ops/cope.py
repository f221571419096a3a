"""CoPE's bias. The one place that chooses what computes it."""
from typing import Optional

import torch

from ..grid import Grid
from . import reference
from .devices import check_devices
from .torch_contextual import torch_contextual_bias
from .transforms import is_transformed

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
    """`reference.contextual_bias`, same arguments and result, by an operator that stores less where it can be used.

    It handles neither dropped patches nor symbolic sizes nor a table wider than q, torch.func does not see through it,
    and exported graphs have only standard operators in them.

    Raises:
        ValueError: If tensors are on different devices.
    """
    check_devices(q=q, k=k, table=table)
    needs_reference = (
        grid.keep_indices is not None or type(grid.num_patches) is not int
        or table.dtype.itemsize > max(q.dtype.itemsize, 4) or is_transformed() or torch.compiler.is_exporting()
        or torch.jit.is_tracing())
    if needs_reference:
        return reference.contextual_bias(
            q, k, table, grid, gate_scale=gate_scale, between=between, ref_num_patches=ref_num_patches)
    p = grid.num_prefix_tokens
    shrink = 1.0 if ref_num_patches is None else ref_num_patches / grid.num_patches
    return grid.pad_prefix(torch_contextual_bias(q[:, :, p:], k[:, :, p:], table, gate_scale, between, shrink))
