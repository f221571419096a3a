"""SaPE2's bias, and attention with it. The one place that chooses the backend."""
from typing import Callable, List, Optional, Tuple, Union

import torch
import torch.nn.functional as F

from ..grid import Grid
from . import reference
from .attention import attend, merge_masks
from .backend import choose_backend
from .cpp_operators import cpp_axis_codes, cpp_distance_attention, cpp_sape2_attention
from .devices import check_devices
from .torch_codes import torch_axis_codes
from .torch_distances import torch_distance_attention
from .triton_operators import triton_axis_codes, triton_distance_attention, triton_sape2_attention

__all__ = ['axis_codes', 'sape2_attention', 'sape2_bias']

# The operators of each backend that has any
AXIS_CODES = {'torch': torch_axis_codes, 'cpp': cpp_axis_codes, 'triton': triton_axis_codes}
DISTANCE_ATTENTION = {
    'torch': torch_distance_attention,
    'cpp': cpp_distance_attention,
    'triton': triton_distance_attention,
}
SAPE2_ATTENTION = {'cpp': cpp_sape2_attention, 'triton': triton_sape2_attention}


def sape2_bias(
        q: torch.Tensor,
        k: torch.Tensor,
        table_x: torch.Tensor,
        table_y: torch.Tensor,
        grid: Grid,
        *,
        mode: str,
        gate_scale: Union[float, torch.Tensor],
        ref_grid_size: Optional[Tuple[int, int]] = None,
        axis_keys: Optional[Tuple[torch.Tensor, torch.Tensor]] = None,
) -> torch.Tensor:
    """b^x + b^y of SaPE2 (Eq. 9 to 15) between tokens, by the reference.

    Args:
        q: Queries, prefix tokens first, `[B, h, N, d]`.
        k: Keys, `[B, h, N, d]`.
        table_x: Embeddings of the positions along a row, `[npos, d]`.
        table_y: Embeddings of the positions along a column, `[npos, d]`.
        grid: The grid.
        mode: 'q', 'k' or 'qk'.
        gate_scale: The gates are sigmoid(gate_scale * q.k).
        ref_grid_size: (H0, W0) of the trained grid, None for no rescaling.
        axis_keys: Keys for the codes along x and for those along y, if they are not k, `[B, h, N, d]` in float32 or
            wider.

    Returns:
        `[B, h, N, N]` in the widest dtype of q, k and the tables, float32 at least. Zero in rows and columns of prefix
        tokens.

    Raises:
        ValueError: If tensors are on different devices.
    """
    check_devices(
        q=q, k=k, table_x=table_x, table_y=table_y, gate_scale=gate_scale, keep_indices=grid.keep_indices)
    codes_x, codes_y = axis_codes(
        q, k, table_x, table_y, grid, mode=mode, gate_scale=gate_scale, ref_grid_size=ref_grid_size,
        axis_keys=axis_keys, backend='reference')
    return _bias(codes_x, codes_y, grid)


def sape2_attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table_x: torch.Tensor,
        table_y: torch.Tensor,
        grid: Grid,
        *,
        mode: str,
        gate_scale: Union[float, torch.Tensor],
        bias_scale: torch.Tensor,
        scale: float,
        ref_grid_size: Optional[Tuple[int, int]] = None,
        axis_keys: Optional[Tuple[torch.Tensor, torch.Tensor]] = None,
        rotated: Optional[Tuple[torch.Tensor, torch.Tensor]] = None,
        mask: Optional[torch.Tensor] = None,
        dropout_p: float = 0.0,
        drop: Optional[Callable[[torch.Tensor], torch.Tensor]] = None,
        fused: bool = True,
        backend: Optional[str] = None,
) -> torch.Tensor:
    """softmax(scale * q.k + bias_scale * bias + mask) v, where the bias is that of `sape2_bias`.

    Args:
        q: As for `sape2_bias`, and so are k, the tables, `grid`, `mode`, `gate_scale`, `ref_grid_size` and `axis_keys`.
        v: Values, `[B, h, N, d]`.
        bias_scale: Factor of the bias, `[1]` or `[h]`.
        scale: Factor of q.k.
        rotated: q and k for the product in the logits, `[B, h, N, d+C]`, if it is not made of q and k themselves.
        mask: As `merge_masks` returns it.
        dropout_p: Dropout rate of the probabilities.
        drop: As for `attend`.
        fused: Likewise.
        backend: One of `BACKENDS`; None to choose.

    Returns:
        `[B, h, N, d]` in the dtype of v. Bias and softmax are computed in the dtype of q, float32 at least, whatever
        the dtype of the tables; by the reference in the widest dtype of q, k and the tables, to which a wider v is
        rounded.

    Raises:
        ValueError: If tensors are on different devices, or the requested backend cannot be used.
    """
    rotated_q, rotated_k = rotated or (q, k)
    check_devices(
        q=q, k=k, v=v, table_x=table_x, table_y=table_y, gate_scale=gate_scale, bias_scale=bias_scale, mask=mask,
        keep_indices=grid.keep_indices)
    backend = choose_backend(backend, q if axis_keys is None else axis_keys[0], _widths(table_x, table_y, grid, mode), {
        'a mask or another bias': mask is not None,
        'dropout of the probabilities': dropout_p > 0,
        'attention that is not fused': not fused,
        'q, k and v of different dtypes': len({t.dtype for t in (q, k, v, rotated_q, rotated_k)}) > 1,
    }, head_dim=rotated_q.shape[-1])
    if backend in SAPE2_ATTENTION and rotated_q is q and rotated_k is k and axis_keys is None and (
            options := _operator_options(grid, mode, gate_scale, ref_grid_size)):
        height, width, mode, *factors = options
        return SAPE2_ATTENTION[backend](
            q, k, v, *_wide_tables(q, table_x, table_y), bias_scale, (height, width), mode, (*factors, scale))
    codes_x, codes_y = axis_codes(
        q, k, table_x, table_y, grid, mode=mode, gate_scale=gate_scale, ref_grid_size=ref_grid_size,
        axis_keys=axis_keys, backend=backend)
    if backend == 'reference':
        bias = bias_scale.to(codes_x.dtype).view(-1, 1, 1) * _bias(codes_x, codes_y, grid)
        mask = merge_masks(bias, mask, False, q.shape[2], q.device)
        return attend(rotated_q, rotated_k, v, mask, scale=scale, dropout_p=dropout_p, drop=drop, fused=fused)
    extra = rotated_q.shape[-1] - v.shape[-1]
    padded = F.pad(v, (0, extra)) if extra else v  # the operators want as many channels in v
    out = DISTANCE_ATTENTION[backend](rotated_q, rotated_k, padded, codes_x, codes_y, bias_scale, scale)
    return out[..., :-extra] if extra else out


def axis_codes(
        q: torch.Tensor,
        k: torch.Tensor,
        table_x: torch.Tensor,
        table_y: torch.Tensor,
        grid: Grid,
        *,
        mode: str,
        gate_scale: Union[float, torch.Tensor],
        ref_grid_size: Optional[Tuple[int, int]] = None,
        axis_keys: Optional[Tuple[torch.Tensor, torch.Tensor]] = None,
        backend: Optional[str] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """`reference.axis_codes`, same arguments, by an operator of the backend if it can be used.

    The operators do not support dropped patches, a learned gate scale and symbolic sizes. They compute in the dtype of
    q, float32 at least.

    Args:
        axis_keys: As for `sape2_bias`. Whatever computes the codes takes one k for both axes, so it runs once for each.
        backend: As `choose_backend` returns it; None to choose.
    """
    if backend is None:
        own_k = k if axis_keys is None else axis_keys[0]
        backend = choose_backend(None, own_k, _widths(table_x, table_y, grid, mode), {
            'q and k of different dtypes': axis_keys is None and q.dtype != k.dtype})
    if backend != 'reference':
        table_x, table_y = _wide_tables(q, table_x, table_y)
    if axis_keys is not None:
        (codes_x, _), (_, codes_y) = (
            axis_codes(
                q.to(keys.dtype), keys, table_x, table_y, grid, mode=mode, gate_scale=gate_scale,
                ref_grid_size=ref_grid_size, backend=backend)
            for keys in axis_keys)
        return codes_x, codes_y
    options = None if backend == 'reference' else _operator_options(grid, mode, gate_scale, ref_grid_size)
    if options is None:
        return reference.axis_codes(
            q, k, table_x, table_y, grid, mode=mode, gate_scale=gate_scale, ref_grid_size=ref_grid_size)
    return AXIS_CODES[backend](q, k, table_x, table_y, *options)


def _wide_tables(q: torch.Tensor, *tables: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    """Operators compute in the dtype of q, float32 at least."""
    return tuple(table.to(torch.promote_types(q.dtype, torch.float32)) for table in tables)


def _operator_options(
        grid: Grid,
        mode: str,
        gate_scale: Union[float, torch.Tensor],
        ref_grid_size: Optional[Tuple[int, int]],
) -> Optional[Tuple[int, int, str, float, float, float]]:
    """What the operators for the codes take besides tensors; None if only the reference can compute them."""
    if grid.keep_indices is not None or isinstance(gate_scale, torch.Tensor):
        return None
    height, width = grid.size
    if type(height) is not int or type(width) is not int:
        return None
    ref_height, ref_width = ref_grid_size or grid.size
    return height, width, mode, gate_scale, ref_width / width, ref_height / height


def _widths(table_x: torch.Tensor, table_y: torch.Tensor, grid: Grid, mode: str) -> List[int]:
    """As `choose_backend` wants them."""
    return [max(len(mode) * size, len(table) - 1) for size, table in ((grid.width, table_x), (grid.height, table_y))]


def _bias(codes_x: torch.Tensor, codes_y: torch.Tensor, grid: Grid) -> torch.Tensor:
    return grid.pad_prefix(reference.pairwise_distance(codes_x) + reference.pairwise_distance(codes_y))
