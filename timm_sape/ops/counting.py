"""Positions as sums of gates: the arithmetic that the PyTorch implementations of SaPE2 and CoPE share."""
from typing import Callable, Tuple

import torch

from ..grid import Grid

__all__ = ['cells', 'gates_of', 'in_raster_order', 'interpolate', 'sources_of', 'suffix_sum']


def in_raster_order(
        bias_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        grid: Grid,
) -> torch.Tensor:
    """A bias between tokens that is computed from the patches in the sequence in their raster order.

    Args:
        bias_of: Maps q and k of these patches, `[B, h, N-P, d]`, to a bias between them, `[B, h, N-P, N-P]`.
        q: Queries, prefix tokens first, `[B, h, N, d]`.
        k: Keys, `[B, h, N, d]`.
        grid: The grid.

    Returns:
        `[B, h, N, N]`, zero for prefix tokens.
    """
    q, k = (t[:, :, grid.num_prefix_tokens:] for t in (q, k))
    if grid.keep_indices is None:
        return grid.pad_prefix(bias_of(q, k))
    order = grid.keep_indices.argsort(dim=1)
    there, back = (Grid(1, order.shape[1], keep_indices=index) for index in (order, order.argsort(dim=1)))
    return grid.pad_prefix(back.keep_pairs(bias_of(there.keep_rows(q), there.keep_rows(k))))


def sources_of(mode: str, q: torch.Tensor, k: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    """The tensors that SaPE2's embeddings are multiplied with."""
    return {'q': (q,), 'k': (k,), 'qk': (q, k)}[mode]


def suffix_sum(gates: torch.Tensor) -> torch.Tensor:
    """p_m = sum of g_j over j >= m, along the last dim."""
    return gates.flip(-1).cumsum(-1).flip(-1)


def interpolate(z: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Values at fractional positions, interpolated linearly between those at integer positions.

    A position p lies in the cell [floor(p), floor(p) + 1]. With floor and ceil, as the papers print it, the gradient at
    an integer position would be zero. Here it is the slope to the right.

    Args:
        z: Values at the positions 0 ... npos-1, `[..., npos]`, npos >= 2.
        pos: Positions, `[..., M]`. Positions beyond npos-1 count as npos-1.

    Returns:
        `[..., M]`.
    """
    npos = z.shape[-1]
    pos = pos.masked_fill(pos >= npos - 1, npos - 1)  # at npos-1 the slope of `clamp` depends on torch's version
    cell = pos.detach().long().clamp(0, npos - 2)  # NaN becomes some integer here; the result is NaN all the same
    return torch.lerp(z.gather(-1, cell), z.gather(-1, cell + 1), pos - cell)


def gates_of(q: torch.Tensor, k: torch.Tensor, gate_scale: float) -> torch.Tensor:
    """sigmoid(gate_scale * q.k) between all patches of a line, `[..., C, C]`. Not for autograd: it works in place."""
    return (q @ k.transpose(-2, -1)).mul_(gate_scale).sigmoid_()


def cells(pos: torch.Tensor, npos: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """The cell of each position, and how far in the cell it is, as in `interpolate`. Not for autograd."""
    cell = pos.long().clamp_(0, npos - 2)
    return cell, pos.clamp(max=npos - 1).sub_(cell.to(pos.dtype))
