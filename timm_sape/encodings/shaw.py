"""Relative position representations (Shaw et al., 'Self-Attention with Relative Position Representations', 2018).

A learned vector for each offset is added to the key; large offsets are clipped. Ours is 2-D: it has a table for dy and
one for dx, and adds their vectors. The original is for sequences, which here means the raster. It costs one product of
the queries with the tables and one look-up of N x N numbers per head. The vectors are never expanded to all N x N
pairs.
"""
import torch
import torch.nn as nn

from .. import ops
from ..checks import is_integer
from ..grid import Grid
from .base import PositionEncoding
from .registry import register_encoding


@register_encoding('shaw')
class RelativePositionRepresentations(PositionEncoding):
    """Relative vectors of Shaw.

    Logits get q_i.(table_y[clip(y_j - y_i)] + table_x[clip(x_j - x_i)]) / sqrt(d), offsets clipped to -clip ... clip.

    The heads of a layer share the tables. Tables are initialized from a normal distribution with std 1/sqrt(d) and get
    no weight decay. Only keys have such vectors; the paper finds that those for values add little, so there are none.
    Computed in at least float32.

    Args:
        clip: Largest distance that is told apart, in patches, 1 or more. Per axis, 2 was best in an independent
            comparison on CIFAR.
        distance: 'axis' as above. 'raster': one table, and distances along the raster as in a text; on another grid the
            same distance is then another offset.

    Raises:
        ValueError: If a value is none of these.
    """
    relative = True
    adds = 'L * 10 * d'
    on_other_grids = 'further offsets are clipped'
    skips_dropped = True
    paper = 'https://arxiv.org/abs/1803.02155'

    def __init__(self, *, clip: int = 2, distance: str = 'axis', device=None, dtype=None, **host) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        if not is_integer(clip, 1):
            raise ValueError(f"'shaw' needs clip to be an integer of at least 1, got {clip!r}.")
        self._require_choice('distance', distance, ('axis', 'raster'))
        self.clip = clip
        self.distance = distance
        for name in ('table_y', 'table_x') if distance == 'axis' else ('table',):
            setattr(self, name, nn.Parameter(torch.empty(2 * clip + 1, self.head_dim, device=device, dtype=dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self.parameters(recurse=False):
            nn.init.normal_(table, std=self.head_dim ** -0.5)

    def content_bias(self, q: torch.Tensor, k: torch.Tensor, grid: Grid) -> torch.Tensor:
        q = q[:, :, grid.num_prefix_tokens:]
        with ops.no_autocast(q):
            if grid.keep_indices is not None:
                dy, dx = (offset[:, None] for offset in grid.kept_offsets())  # [B, 1, K, K]
                if self.distance == 'raster':
                    bias = self._along(q, self.table, dy * grid.width + dx)
                else:
                    bias = self._along(q, self.table_y, dy) + self._along(q, self.table_x, dx)
            elif self.distance == 'raster':
                place = torch.arange(grid.num_patches, device=q.device)
                bias = self._along(q, self.table, place - place[:, None])
            else:
                y, x = grid.coordinates(q.device).unbind(-1)  # [H*W]
                rows, columns = (torch.arange(size, device=q.device) for size in grid.size)
                along_y = self._along(q, self.table_y, rows - y[:, None])[..., :, None]  # [B, h, H*W, H, 1]
                along_x = self._along(q, self.table_x, columns - x[:, None])[..., None, :]  # [B, h, H*W, 1, W]
                bias = (along_y + along_x).flatten(-2)
            return grid.pad_prefix(bias)  # [B, h, N, N]

    def _along(self, q: torch.Tensor, table: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        """The product of each query with the vectors of some offsets.

        Args:
            q: Queries of patches, `[B, h, N-P, d]`.
            table: `[2*clip+1, d]`.
            offset: Of some places from that of the query, int64 `[(B, 1,) N-P, places]`.

        Returns:
            `[B, h, N-P, places]`.
        """
        q, table = ops.upcast(q, table)
        z = (q * self.head_dim ** -0.5) @ table.T  # [B, h, N-P, 2*clip+1]
        index = offset.clamp(-self.clip, self.clip) + self.clip
        return z.gather(-1, index.expand(*z.shape[:-1], -1))  # [B, h, N-P, places]
