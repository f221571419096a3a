"""The reference: gates, sums, look-ups and distances of CoPE and SaPE2 in plain PyTorch.

Autograd can differentiate it twice (the third derivative of `cdist` is NaN), and torch.func and forward mode work. It
stores everything N x N.
"""
from typing import Optional, Tuple, Union

import torch

from ..grid import Grid
from .counting import in_raster_order, interpolate, sources_of, suffix_sum
from .precision import no_autocast, upcast
from .transforms import is_forward_mode, is_transformed

__all__ = ['axis_codes', 'cdist_is_slow', 'contextual_bias', 'pairwise_distance', 'squares_by_products']


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
    """CoPE's z_i[p_ij] between patches, counted in raster order (Golovneva et al. 2024, Eq. 3 to 5).

    Args:
        q: Queries, prefix tokens first, `[B, h, N, d]`.
        k: Keys, `[B, h, N, d]`.
        table: Embeddings of the positions 0 ... npos-1, `[npos, d]`.
        grid: The grid.
        gate_scale: The gates are sigmoid(gate_scale * q.k).
        between: Use |p_ij - p_ii|, the sum of the gates between i and j, as positions.
        ref_num_patches: Number of patches N0 of the trained grid. Positions are scaled by N0/N; None for no rescaling.

    Returns:
        `[B, h, N, N]` in the widest dtype of q, k and the table, float32 at least. Zero in rows and columns of prefix
        tokens. Dropped patches do not count.
    """
    def bias_of(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        gates = torch.sigmoid(gate_scale * (q @ k.transpose(-2, -1)))  # [B, h, N-P, N-P]
        pos = suffix_sum(gates)
        if between:
            pos = (pos - pos.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)).abs()
        if ref_num_patches is not None:
            pos = pos * (ref_num_patches / grid.num_patches)
        return interpolate(q @ table.T, pos)

    with no_autocast(q):
        q, k, table = upcast(q, k, table)
        return in_raster_order(bias_of, q, k, grid)


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
        ref_grid_size: (H0, W0) of the trained grid. Along x positions are scaled by W0/W and codes by sqrt(W0/W), along
            y likewise; None for no rescaling.

    Returns:
        Codes of the patches, `[B, h, N-P, W]` and `[B, h, N-P, H]` (twice as wide for 'qk'), in the widest dtype of q,
        k and the tables, float32 at least. A dropped patch has gate 0 and keeps its entry in the codes of the others.
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
        pos_x = suffix_sum(gates_x).flatten(2, 3)  # [B, h, H*W, W]
        pos_y = suffix_sum(gates_y).transpose(2, 3).flatten(2, 3)  # [B, h, H*W, H]
        sources = sources_of(mode, q, k)
        codes = []
        for pos, table, size, ref in (
                (pos_x, table_x, width, ref_grid_size and ref_grid_size[1]),
                (pos_y, table_y, height, ref_grid_size and ref_grid_size[0]),
        ):
            shrink = 1.0 if ref is None else ref / size
            code = torch.cat([interpolate(s @ table.T, pos * shrink) for s in sources], dim=-1)
            # as a tensor, because torch.export fails on the root of a symbolic number
            codes.append(grid.keep_rows(code * (code.new_ones(()) * shrink).sqrt()))
        return codes[0], codes[1]


def pairwise_distance(codes: torch.Tensor) -> torch.Tensor:
    """Euclidean distances between all codes (SaPE2, Eq. 15).

    Computed from differences, or on CUDA from products in float64. Products in float32 would lose the small distances
    between patches of one region. A distance no larger than the rounding error of the codes is set to zero and has no
    gradient, whose direction would be random.

    torch's FLOP counter counts cdist, which makes the differences, as 0. The operators count their distances.

    Args:
        codes: `[..., N, C]`.

    Returns:
        `[..., N, N]`.
    """
    with no_autocast(codes):
        if torch.onnx.is_in_onnx_export() or is_forward_mode():  # ONNX has no cdist, cdist no forward mode
            return _distance_by_differences(codes)
        if is_transformed():  # vmap over the gradients of cdist is wrong (torch 2.15)
            return (_distance_by_products if codes.dtype == torch.float32 else _distance_by_differences)(codes)
        if cdist_is_slow(codes):
            return _distance_by_products(codes)
        distance = torch.cdist(codes, codes, compute_mode='donot_use_mm_for_euclid_dist')
        return distance.masked_fill(distance <= _noise(codes, torch.finfo(codes.dtype).eps), 0.0)


def _noise(codes: torch.Tensor, eps: float) -> torch.Tensor:
    """Distances up to this may be rounding errors of the codes, `[..., N, N]`."""
    noise = (64 * eps * codes.detach()).norm(dim=-1)  # the squares of larger numbers may overflow
    noise = noise.clamp(max=torch.finfo(noise.dtype).max ** 0.5)  # less than inf, squared too
    return torch.maximum(noise.unsqueeze(-1), noise.unsqueeze(-2))


def _distance_by_differences(codes: torch.Tensor) -> torch.Tensor:
    return _root((codes.unsqueeze(-2) - codes.unsqueeze(-3)).square().sum(dim=-1), codes)


def _distance_by_products(codes: torch.Tensor) -> torch.Tensor:
    return _root(squares_by_products(codes, codes), codes)


def _root(squares: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Distances between all codes, from their squares."""
    is_noise = squares <= _noise(codes.to(squares.dtype), torch.finfo(codes.dtype).eps).square()
    # the root of 0 has an infinite gradient
    return squares.masked_fill(is_noise, 1.0).to(codes.dtype).sqrt().masked_fill(is_noise, 0.0)


def cdist_is_slow(codes: torch.Tensor) -> bool:
    """On CUDA it starts a block of threads for each distance. For float32 there are `squares_by_products` instead."""
    return codes.is_cuda and codes.dtype == torch.float32


def squares_by_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Squared distances between float32 vectors `[..., N, C]` and `[..., M, C]`, in float64, `[..., N, M]`.

    They are products of two longer vectors, [-2 a, |a|^2, 1] and [b, 1, |b|^2]. Each is off by about 2^-52 of |a|^2 or
    |b|^2, and if the distance is no noise, it is at least 2^-34 of both.
    """
    a, b = a.double(), b.double()
    square_a, square_b = (t.square().sum(dim=-1, keepdim=True) for t in (a, b))
    left = torch.cat([-2 * a, square_a, torch.ones_like(square_a)], dim=-1)
    right = torch.cat([b, torch.ones_like(square_b), square_b], dim=-1)
    return left @ right.mT
