"""Positions counted by content: the gates, sums, look-ups and distances of CoPE and SaPE2, in plain PyTorch.

Everything runs in the dtype of `upcast`, also under autocast: a suffix sum in bfloat16 is off by .02 positions at a
width of 14 and by .12 at 64.
"""
import functools
from contextlib import nullcontext
from typing import Callable, ContextManager, Optional, Tuple, Union

import torch

from ..grid import Grid

__all__ = ['axis_codes', 'contextual_bias', 'no_autocast', 'pairwise_distance', 'upcast']


def upcast(*tensors: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    """Bring tensors to their widest dtype, float32 at least."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def no_autocast(tensor: torch.Tensor) -> ContextManager:
    """Switch autocast off where it is on; a no-op elsewhere, so that exported graphs stay free of it."""
    device_type = tensor.device.type
    if device_type != 'meta' and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def without_autocast(function: Callable) -> Callable:
    """Decorates an operator's implementation: in a compiled graph autocast is on around it, whatever the caller did."""
    @functools.wraps(function)
    def wrapped(tensor, *args):
        with no_autocast(tensor):
            return function(tensor, *args)

    return wrapped


def _suffix_sum(gates: torch.Tensor) -> torch.Tensor:
    """p_m = sum of g_j over j >= m, along the last dim."""
    return gates.flip(-1).cumsum(-1).flip(-1)


def _interpolate(z: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Look fractional positions up in values at integer ones, linearly interpolated.

    The cell of p is [floor(p), floor(p) + 1]. With floor and ceil instead, as printed in the papers, the gradient with
    respect to an integer position would be zero; here it is the slope to the right.

    Args:
        z: Values at the positions 0 ... npos-1, `[..., npos]`, npos >= 2.
        pos: Positions, at most npos-1 count, `[..., M]`.

    Returns:
        `[..., M]`.
    """
    npos = z.shape[-1]
    pos = pos.clamp(max=npos - 1)
    cell = pos.detach().long().clamp(0, npos - 2)  # NaN becomes some integer, and comes out as NaN all the same
    return torch.lerp(z.gather(-1, cell), z.gather(-1, cell + 1), pos - cell)


def contextual_bias(
        q: torch.Tensor,
        k: torch.Tensor,
        table: torch.Tensor,
        grid: Grid,
        *,
        gate_scale: Union[float, torch.Tensor],
        between: bool = False,
        ref_num_patches: Optional[int] = None,
) -> torch.Tensor:
    """CoPE's z_i[p_ij] over the patches in raster order (Golovneva et al. 2024, Eq. 3 to 5).

    Args:
        q: Queries, prefix tokens first, `[B, h, N, d]`.
        k: Keys, `[B, h, N, d]`.
        table: Embeddings of the positions 0 ... npos-1, `[npos, d]`.
        grid: The grid.
        gate_scale: The gates are sigmoid(gate_scale * q.k).
        between: Positions are |p_ij - p_ii|, what was counted between i and j.
        ref_num_patches: Patches of the trained grid, to whose count positions are scaled; None for no rescaling.

    Returns:
        `[B, h, N, N]` in the dtype of `upcast`, zero wherever a prefix token takes part. A dropped patch has gate 0.
    """
    p = grid.num_prefix_tokens
    with no_autocast(q):
        q, k, table = upcast(q[:, :, p:], k[:, :, p:], table)
        q, k = grid.scatter(q), grid.scatter(k)  # [B, h, H*W, d]
        gates = torch.sigmoid(gate_scale * (q @ k.transpose(-2, -1)))  # [B, h, H*W, H*W]
        if grid.keep_indices is not None:
            gates = gates * _is_kept(grid, gates)[:, None, None, :]
        pos = _suffix_sum(gates)
        if between:
            pos = (pos - pos.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)).abs()
        if ref_num_patches is not None:
            pos = pos * (ref_num_patches / grid.num_patches)
        bias = _interpolate(q @ table.T, pos)  # [B, h, H*W, H*W]
        if grid.keep_indices is not None:
            bias = grid.gather(grid.gather(bias).transpose(-2, -1)).transpose(-2, -1)
        return grid.pad_prefix(bias)


def _is_kept(grid: Grid, like: torch.Tensor) -> torch.Tensor:
    """1 where a patch was kept, else 0, `[B, H*W]`."""
    kept = like.new_zeros(grid.keep_indices.shape[0], grid.num_patches)
    return kept.scatter(1, grid.keep_indices, 1.0)


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
) -> Tuple[torch.Tensor, torch.Tensor]:
    """SaPE2's vectors SaPE_x[i] and SaPE_y[i] of each patch (Eq. 9 to 14).

    Args:
        q: Queries, prefix tokens first, `[B, h, N, d]`.
        k: Keys, `[B, h, N, d]`.
        table_x: Embeddings of the positions along a row, `[npos, d]`.
        table_y: Embeddings of the positions along a column, `[npos, d]`.
        grid: The grid.
        mode: 'q', 'k', or 'qk' for the codes of both, concatenated.
        gate_scale: The gates are sigmoid(gate_scale * q.k).
        ref_grid_size: (H0, W0) of the trained grid. Positions along x are scaled by W0/W and codes by sqrt(W0/W),
            likewise along y; None for no rescaling.

    Returns:
        Codes of the patches without prefix tokens, `[B, h, N-P, W]` and `[B, h, N-P, H]` (twice as wide for 'qk'), in
        the dtype of `upcast`. A dropped patch has gate 0 and keeps its entry in the codes of the others.
    """
    p, (height, width) = grid.num_prefix_tokens, grid.size
    with no_autocast(q):
        q, k, table_x, table_y = upcast(q[:, :, p:], k[:, :, p:], table_x, table_y)
        q, k = grid.scatter(q), grid.scatter(k)
        batch, num_heads, _, dim = q.shape
        q_rows = q.reshape(batch, num_heads, height, width, dim)
        k_rows = k.reshape(batch, num_heads, height, width, dim)
        q_cols, k_cols = q_rows.transpose(2, 3), k_rows.transpose(2, 3)
        gates_x = torch.sigmoid(gate_scale * (q_rows @ k_rows.transpose(-2, -1)))  # [B, h, H, W, W]
        gates_y = torch.sigmoid(gate_scale * (q_cols @ k_cols.transpose(-2, -1)))  # [B, h, W, H, H]
        if grid.keep_indices is not None:
            kept = _is_kept(grid, q).reshape(batch, 1, height, width)
            gates_x = gates_x * kept[:, :, :, None, :]
            gates_y = gates_y * kept.transpose(-2, -1)[:, :, :, None, :]
        pos_x = _suffix_sum(gates_x).flatten(2, 3)  # [B, h, H*W, W]
        pos_y = _suffix_sum(gates_y).transpose(2, 3).flatten(2, 3)  # [B, h, H*W, H]
        sources = {'q': (q,), 'k': (k,), 'qk': (q, k)}[mode]
        codes = []
        for pos, table, size, ref in (
                (pos_x, table_x, width, ref_grid_size and ref_grid_size[1]),
                (pos_y, table_y, height, ref_grid_size and ref_grid_size[0]),
        ):
            shrink = 1.0 if ref is None else ref / size
            code = torch.cat([_interpolate(s @ table.T, pos * shrink) for s in sources], dim=-1)
            codes.append(grid.gather(code * shrink ** 0.5))
        return codes[0], codes[1]


def pairwise_distance(codes: torch.Tensor) -> torch.Tensor:
    """Euclidean distance between all rows (SaPE2, Eq. 15).

    Computed from differences, not from products, which would lose the small distances between patches of one region. A
    distance that is no larger than the rounding of the codes is set to zero and has zero gradient, as the diagonal has:
    its direction would be random.

    Args:
        codes: `[..., N, C]`.

    Returns:
        `[..., N, N]`.
    """
    with no_autocast(codes):
        if torch.onnx.is_in_onnx_export():  # ONNX has no cdist
            distance = (codes.unsqueeze(-2) - codes.unsqueeze(-3)).norm(dim=-1)
        else:
            distance = torch.cdist(codes, codes, compute_mode='donot_use_mm_for_euclid_dist')
        noise = 64 * torch.finfo(codes.dtype).eps * codes.detach().norm(dim=-1)  # [..., N]
        return distance.masked_fill(distance <= torch.maximum(noise.unsqueeze(-1), noise.unsqueeze(-2)), 0.0)
