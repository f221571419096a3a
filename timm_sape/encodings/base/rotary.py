"""Encodings that rotate q and k."""
from abc import ABC, abstractmethod
from typing import Tuple

import torch

from ... import ops
from ...grid import Grid
from .fixed import FixedEncoding
from .position_encoding import PositionEncoding

__all__ = ['BlockRotaryEncoding', 'FixedRotaryEncoding', 'RotaryEncoding', 'rotation_table']


def rotation_table(angles: torch.Tensor, rotate_half: bool = False) -> torch.Tensor:
    """Sines and cosines in the layout of timm's `apply_rot_embed_cat`.

    Args:
        angles: Angle of each pair of channels in radians, `[..., H*W, d/2]`.
        rotate_half: Pairs are the channels t and t + d/2 instead of 2t and 2t + 1.

    Returns:
        The sines of all channels' angles, then their cosines, `[..., H*W, 2*d]`.
    """
    if rotate_half:
        angles = torch.cat([angles, angles], dim=-1)  # [..., H*W, d]
    else:
        # Not repeat_interleave, which torch.onnx.export(dynamo=False) exports wrongly.
        angles = torch.stack([angles, angles], dim=-1).flatten(-2)  # [..., H*W, d]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class RotaryEncoding(PositionEncoding, ABC):
    """A rotation of q and k. A subclass defines `angles`; a gate multiplies the angles."""
    rotate_half: bool = False  #: Pairs of channels are t and t + d/2 instead of 2t and 2t + 1.

    @abstractmethod
    def angles(self, grid: Grid) -> torch.Tensor:
        """Angle of each pair of channels for each patch of the whole grid, in radians and at least float32.

        Returns:
            `[(h,) H*W, d/2]`.
        """

    def rotation_of_grid(self, grid: Grid) -> torch.Tensor:
        """The table of the whole grid, gated, `[(h,) H*W, 2*d]`."""
        return rotation_table(self.gated(self.angles(grid)), self.rotate_half)

    def rotation(self, grid: Grid) -> torch.Tensor:
        return grid.keep_rows(self.rotation_of_grid(grid))


class FixedRotaryEncoding(FixedEncoding, RotaryEncoding):
    """A rotation without parameters. A subclass defines `compute_angles`."""

    @abstractmethod
    def compute_angles(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """As `angles`, computed on this device and in this dtype, `[(h,) H*W, d/2]`."""

    def compute(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        angles = self.compute_angles(grid, device, dtype)
        # The buffer holds sines and cosines. With a gate, which changes from step to step, it holds the angles.
        return rotation_table(angles, self.rotate_half) if self.gate is None else angles

    def angles(self, grid: Grid) -> torch.Tensor:
        like = self.table_like(grid)
        return self.compute_angles(grid, like.device, like.dtype)

    def rotation_of_grid(self, grid: Grid) -> torch.Tensor:
        table = self.table_for(grid)
        return table if self.gate is None else rotation_table(self.gated(table), self.rotate_half)


class BlockRotaryEncoding(PositionEncoding, ABC):
    """A rotation of q and k in blocks of channels, of any size. A subclass defines `blocks`."""

    @abstractmethod
    def blocks(self, grid: Grid) -> torch.Tensor:
        """The orthogonal matrix of each patch of the whole grid for each block of channels.

        The subclass applies `self.gated` to what the matrices are computed from, so that a gate of 0 makes them 1.

        Returns:
            `[h, H*W, n, b, b]` with n*b = d, in at least float32.
        """

    def turn(self, q: torch.Tensor, k: torch.Tensor, grid: Grid) -> Tuple[torch.Tensor, torch.Tensor]:
        p, dtype = grid.num_prefix_tokens, q.dtype
        with ops.no_autocast(q):
            blocks = self.blocks(grid)
            rows = grid.keep_rows(blocks.flatten(2))  # [(B,) h, N-P, n*b*b]
            blocks = rows.unflatten(-1, blocks.shape[2:])
            qk = torch.stack([q, k])[:, :, :, p:].to(blocks.dtype).unflatten(-1, blocks.shape[-3:-1])
            batch = 'b' if blocks.ndim == 6 else ''
            turned = torch.einsum(f'{batch}hpnij,sbhpnj->sbhpni', blocks, qk).flatten(-2).to(dtype)  # [2, B, h, N-P, d]
        return tuple(torch.cat([t[:, :, :p], patches], dim=2) for t, patches in zip((q, k), turned.unbind(0)))
