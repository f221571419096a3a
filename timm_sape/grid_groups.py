"""Batches of images with grids of their own, as timm's NaFlex loader makes them.

Such a batch is a set of plain batches: images of one grid and one number of patches form a group, and within a group
every encoding does what it does on a plain batch. So an encoding knows nothing of NaFlex, a padded token takes part in
nothing, and no tensor gets larger than the longest sequence makes it.
"""
from dataclasses import dataclass, replace
from typing import Dict, List, Optional, Sequence, Tuple

import torch

from .grid import Grid

__all__ = ['MAX_PATCHES', 'GridGroups', 'grid_sizes', 'group_by_grid']

MAX_PATCHES = 2 ** 16  #: The largest H*W of one image. A wrong coordinate must not make us allocate any larger table.


@dataclass(frozen=True, eq=False)
class GridGroups:
    """The groups of a batch: each has images of one grid and one number of patches.

    Args:
        grids: The grid of each group. If patches are missing, its `keep_indices` are `[b, n-P]`.
        shapes: b images of n tokens in each group.
        index: Where the tokens of all groups, one after the other, are in the batch: `sample * N + token`, int64
            `[sum of b*n]`. Within an image: prefix tokens, then patches in raster order.
        batch_size: B.
        num_tokens: N, padding included.
    """
    grids: Tuple[Grid, ...]
    shapes: Tuple[Tuple[int, int], ...]
    index: torch.Tensor
    batch_size: int
    num_tokens: int

    def to(self, *args, **kwargs) -> 'GridGroups':
        """As `torch.Tensor.to`, for libraries that spread a model over devices."""
        grids = tuple(grid.to(*args, **kwargs) for grid in self.grids)
        return replace(self, grids=grids, index=self.index.to(grids[0].device))

    def split(self, x: torch.Tensor) -> List[torch.Tensor]:
        """The tokens of each group, `[B, N, ...]` to a list of `[b, n, ...]`."""
        parts = x.flatten(0, 1).index_select(0, self.index).split([b * n for b, n in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes)]

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse of `split`, with zeros for padding."""
        flat = torch.cat([part.flatten(0, 1) for part in parts])
        x = flat.new_zeros(self.batch_size * self.num_tokens, *flat.shape[1:])
        return x.index_copy(0, self.index, flat).unflatten(0, (self.batch_size, self.num_tokens))

    def split_heads(self, x: torch.Tensor) -> List[torch.Tensor]:
        """As `split`, `[B, h, N, ...]` to a list of `[b, h, n, ...]`."""
        return [part.transpose(1, 2) for part in self.split(x.transpose(1, 2))]

    def merge_heads(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse of `split_heads`, with zeros for padding."""
        return self.merge([part.transpose(1, 2) for part in parts]).transpose(1, 2)

    def split_pairs(self, mask: Optional[torch.Tensor]) -> List[Optional[torch.Tensor]]:
        """Entries between the tokens of each group, out of a mask that broadcasts to `[B, h, N, N]`."""
        if mask is None:
            return [None] * len(self.grids)
        mask = mask[(None,) * (4 - mask.ndim)].expand(self.batch_size, -1, self.num_tokens, self.num_tokens)
        rows = self.split_heads(mask)  # [b, h|1, n, N]
        columns = (self.index % self.num_tokens).split([b * n for b, n in self.shapes])
        index = (c.view(b, 1, 1, n).expand(*r.shape[:3], -1) for c, r, (b, n) in zip(columns, rows, self.shapes))
        return [r.gather(3, i) for r, i in zip(rows, index)]  # [b, h|1, n, n]

    def is_token(self) -> torch.Tensor:
        """False for padding, `[B, N]`."""
        flags = torch.zeros(self.batch_size * self.num_tokens, dtype=torch.bool, device=self.index.device)
        return flags.index_fill(0, self.index, True).view(self.batch_size, self.num_tokens)


def grid_sizes(coord: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """(H, W) of each image, by its largest coordinates, `[B, 2]`. Arguments as for `group_by_grid`."""
    return coord.masked_fill(~valid[..., None], 0).amax(dim=1) + 1


@torch.compiler.disable  # the groups depend on values
def group_by_grid(
        coord: torch.Tensor,
        valid: torch.Tensor,
        sizes: torch.Tensor,
        num_prefix_tokens: int,
) -> GridGroups:
    """Split a batch into groups.

    Values are copied to the CPU and looked at, so a GPU waits.

    Args:
        coord: (y, x) of each patch, integers, `[B, K, 2]`.
        valid: False for padding, `[B, K]`.
        sizes: (H, W) of each image, integers `[B, 2]`.
        num_prefix_tokens: P, tokens before the patches.

    Returns:
        The groups. All prefix tokens and all valid patches are in one of them.

    Raises:
        ValueError: If coordinates are negative or beyond the grid, two patches of an image have the same ones, or a
            grid has more than `MAX_PATCHES`.
    """
    device = coord.device
    coord, valid, sizes = coord.to('cpu', torch.int64), valid.cpu(), sizes.to('cpu', torch.int64)
    _check(coord, valid, sizes)
    place = (coord[..., 0] * sizes[:, 1:] + coord[..., 1]).masked_fill(~valid, MAX_PATCHES)  # [B, K], padding last
    place, order = place.sort(dim=1)
    repeated = (place[:, 1:] == place[:, :-1]) & (place[:, 1:] < MAX_PATCHES)
    if repeated.any():
        sample, i = (int(index[0]) for index in repeated.nonzero(as_tuple=True))
        y, x = divmod(int(place[sample, i]), int(sizes[sample, 1]))
        raise ValueError(
            f'patch_coord has ({y}, {x}) twice in image {sample} of the batch. Give each patch once. If one is '
            'padding, patch_valid must be False there.')

    members: Dict[Tuple[int, int, int], List[int]] = {}
    for sample, key in enumerate(zip(*sizes.T.tolist(), valid.sum(dim=1).tolist())):
        members.setdefault(key, []).append(sample)
    num_tokens = num_prefix_tokens + coord.shape[1]
    grids, shapes, index = [], [], []
    for (height, width, num_patches), samples in members.items():
        kept = None if num_patches == height * width else place[samples, :num_patches].to(device)
        grids.append(Grid(height, width, num_prefix_tokens, keep_indices=kept, device=device))
        shapes.append((len(samples), num_prefix_tokens + num_patches))
        prefix = torch.arange(num_prefix_tokens, device=order.device).expand(len(samples), -1)
        tokens = torch.cat([prefix, order[samples, :num_patches] + num_prefix_tokens], dim=1)  # [b, n]
        index.append((torch.tensor(samples, device=order.device)[:, None] * num_tokens + tokens).flatten())
    return GridGroups(tuple(grids), tuple(shapes), torch.cat(index).to(device), len(coord), num_tokens)


def _check(coord: torch.Tensor, valid: torch.Tensor, sizes: torch.Tensor) -> None:
    # sides first, because a product of large ones wraps around
    wrong = ((sizes < 1) | (sizes > MAX_PATCHES)).any(dim=1) | (sizes.clamp(max=MAX_PATCHES).prod(dim=1) > MAX_PATCHES)
    if wrong.any():
        sample = int(wrong.nonzero()[0])
        raise ValueError(
            f'Image {sample} of the batch has a grid of {int(sizes[sample, 0])}x{int(sizes[sample, 1])} patches by its '
            f'coordinates, which must be of 1 to {MAX_PATCHES} patches. Check patch_coord: it counts patches, (y, x) '
            'from (0, 0), not pixels.')
    outside = ((coord < 0) | (coord >= sizes[:, None])).any(dim=-1) & valid
    if outside.any():
        sample, i = (int(index[0]) for index in outside.nonzero(as_tuple=True))
        raise ValueError(
            f'patch_coord {tuple(coord[sample, i].tolist())} in image {sample} of the batch is outside its grid of '
            f'{int(sizes[sample, 0])}x{int(sizes[sample, 1])} patches. It must count from (0, 0), and '
            'grid_size, if given, must be (H, W) of each image.')
