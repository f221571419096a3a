"""The patch grid: where each token of a sequence is.

Notation of the whole package:

    B batch, h heads, D embed dim, d head dim, L layers
    H x W patch grid, P prefix tokens (class token first, then registers), K patches kept by patch dropout
    N tokens: P + H*W, or P + K

Patches are numbered row by row from the top left (raster order). A position is (y, x) in units of patches. Prefix
tokens come first in the sequence and have no position. *Prefix rule*: a prefix token is never rotated, and every logit
in its row or column gets a bias of zero.
"""
from dataclasses import dataclass, replace
from typing import Any, Optional, Tuple

import torch
import torch.nn.functional as F

__all__ = ['MAX_SIDE', 'Grid', 'check_keep_indices', 'is_grid_size']

#: For an encoding that computes with the whole grid: of more than MAX_PATCHES_UNCHECKED patches, at least one in
#: MAX_PATCHES_PER_KEPT must be kept.
MAX_PATCHES_UNCHECKED, MAX_PATCHES_PER_KEPT = 2 ** 12, 16
MAX_SIDE = 2 ** 14 - 1  # patches along a side, so that no damaged file or slip of a finger asks for huge tables


@dataclass(frozen=True, eq=False)
class Grid:
    """Where the tokens of one forward pass are.

    The model makes one per forward pass and passes it on as an argument, so no module has to store it.

    Args:
        height: H, patches along y.
        width: W, patches along x.
        num_prefix_tokens: P, tokens before the patches.
        keep_indices: If patches were dropped, the raster indices of those that remain, in the order of the sequence,
            int64 `[B, K]`. None if all patches are in the sequence.
        device: Device of the tokens, for tensors that an encoding computes from the grid alone. None for torch's
            default.
    """
    height: int
    width: int
    num_prefix_tokens: int = 0
    keep_indices: Optional[torch.Tensor] = None
    device: Optional[torch.device] = None

    @property
    def size(self) -> Tuple[int, int]:
        """(H, W)."""
        return self.height, self.width

    @property
    def num_patches(self) -> int:
        """H*W, dropped patches included."""
        return self.height * self.width

    @property
    def num_tokens(self) -> int:
        """N, dropped patches left out."""
        kept = self.num_patches if self.keep_indices is None else self.keep_indices.shape[1]
        return self.num_prefix_tokens + kept

    def to(self, *args, **kwargs) -> 'Grid':
        """As `torch.Tensor.to`. Libraries that spread a model over devices call it on the arguments of modules."""
        like = torch.empty(0, device=self.device).to(*args, **kwargs)
        kept = None if self.keep_indices is None else self.keep_indices.to(like.device)
        return replace(self, keep_indices=kept, device=like.device)

    def matches(self, size: Tuple[int, int]) -> bool:
        """Whether this grid has `size` (H, W). False for symbolic sizes, where comparing would add a guard."""
        return type(self.height) is int and type(self.width) is int and self.size == tuple(size)

    def coordinates(self, device=None, dtype=None) -> torch.Tensor:
        """(y, x) of each patch of the whole grid, 0-based, `[H*W, 2]`."""
        y = torch.arange(self.height, device=device, dtype=dtype)
        x = torch.arange(self.width, device=device, dtype=dtype)
        return torch.stack(torch.meshgrid(y, x, indexing='ij'), dim=-1).flatten(0, 1)  # [H*W, 2]

    def pad_tokens(self, table: torch.Tensor) -> torch.Tensor:
        """Add zero rows for the prefix tokens: from rows of patches `[..., N-P, C]` to rows of tokens `[..., N, C]`."""
        p = self.num_prefix_tokens
        return F.pad(table, (0, 0, p, 0)) if p else table

    def pad_prefix(self, bias: torch.Tensor) -> torch.Tensor:
        """Prefix rule for logits: from a bias between patches `[..., N-P, N-P]` to one between tokens `[..., N, N]`."""
        p = self.num_prefix_tokens
        return F.pad(bias, (p, 0, p, 0)) if p else bias

    def between_tokens(self, bias: torch.Tensor) -> torch.Tensor:
        """From a bias between all patches of the grid to one between the tokens in the sequence, by the prefix rule.

        That bias is large where few patches are kept; see `kept_offsets`.

        Args:
            bias: `[H*W, H*W]`, `[h, H*W, H*W]` or `[B, h, H*W, H*W]`.

        Returns:
            `[(h,) N, N]`, or `[B, h|1, N, N]` if patches were dropped.
        """
        return self.keep_pairs(self.pad_prefix(bias))

    def kept_offsets(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """dy and dx of patch j from patch i, both in the sequence, int64 `[B, K, K]`, if patches were dropped."""
        y, x = self.keep_indices // self.width, self.keep_indices % self.width  # [B, K]
        return y[:, None] - y[:, :, None], x[:, None] - x[:, :, None]

    def check_density(self, name: str) -> None:
        """Check that computing with all H*W patches does not take far more memory than the N x N of the tokens.

        Args:
            name: Of the encoding, for the message.

        Raises:
            ValueError: If there are more than `MAX_PATCHES_UNCHECKED` patches, and more than `MAX_PATCHES_PER_KEPT`
                for each that is kept.
        """
        kept = None if self.keep_indices is None else self.keep_indices.shape[1]
        if type(kept) is not int or type(self.num_patches) is not int:
            return
        if self.num_patches > max(MAX_PATCHES_UNCHECKED, MAX_PATCHES_PER_KEPT * kept):
            raise ValueError(
                f'{name!r} computes with all {self.height}x{self.width} = {self.num_patches} patches of the grid, of '
                f'which the sequence has {kept}. Beyond {MAX_PATCHES_UNCHECKED} patches, one in {MAX_PATCHES_PER_KEPT} '
                'must be kept. Drop fewer patches (of a NaFlexVit, check patch_coord), or use an encoding that '
                "computes with the kept ones alone, such as 'rope2d' or 'rpb'.")

    def keep_rows(self, table: torch.Tensor) -> torch.Tensor:
        """Rows of the patches in the sequence: `[(h,) H*W, C]` unchanged, or `[B, h|1, K, C]` if some were dropped."""
        if self.keep_indices is None:
            return table
        table = table[(None,) * (4 - table.ndim)]  # [1, h|1, H*W, C]
        table = table.expand(self.keep_indices.shape[0], -1, -1, -1)
        return table.gather(2, self.keep_indices[:, None, :, None].expand(-1, table.shape[1], -1, table.shape[-1]))

    def keep_tokens(self, table: torch.Tensor) -> torch.Tensor:
        """Rows of the tokens in the sequence: `[(B|1,) P+H*W, C]` unchanged, or `[B, P+K, C]` if some were dropped."""
        if self.keep_indices is None:
            return table
        index = self.kept_tokens()[..., None].expand(-1, -1, table.shape[-1])  # [B, P+K, C]
        return table.expand(index.shape[0], -1, -1).gather(1, index)

    def kept_tokens(self) -> torch.Tensor:
        """Places of the tokens in the sequence among all tokens of the grid, if patches were dropped, `[B, P+K]`."""
        prefix = torch.arange(self.num_prefix_tokens, device=self.keep_indices.device)
        prefix = prefix.expand(self.keep_indices.shape[0], -1)
        return torch.cat([prefix, self.keep_indices + self.num_prefix_tokens], dim=1)

    def keep_pairs(self, logits: torch.Tensor) -> torch.Tensor:
        """From a bias or mask between all tokens of the grid to one between the tokens in the sequence.

        Args:
            logits: Broadcastable to `[B, h, P+H*W, P+H*W]`.

        Returns:
            `logits` unchanged, or `[B, h|1, P+K, P+K]` if patches were dropped.
        """
        if self.keep_indices is None:
            return logits
        index = self.kept_tokens()
        num_tokens, num_keep = self.num_prefix_tokens + self.num_patches, index.shape[1]
        logits = logits[(None,) * (4 - logits.ndim)]
        num_heads = logits.shape[1]
        logits = logits.expand(index.shape[0], -1, num_tokens, num_tokens)
        logits = logits.gather(2, index[:, None, :, None].expand(-1, num_heads, -1, num_tokens))
        return logits.gather(3, index[:, None, None, :].expand(-1, num_heads, num_keep, -1))

    def scatter(self, tokens: torch.Tensor) -> torch.Tensor:
        """Put patch tokens in their places on the grid, with zeros for dropped patches. `keep_rows` takes them back.

        Args:
            tokens: `[B, h, N-P, C]`.

        Returns:
            `[B, h, H*W, C]`.
        """
        if self.keep_indices is None:
            return tokens
        batch, num_heads, _, channels = tokens.shape
        index = self.keep_indices[:, None, :, None].expand(-1, num_heads, -1, channels)
        return tokens.new_zeros(batch, num_heads, self.num_patches, channels).scatter(2, index, tokens)


def is_grid_size(size: Any) -> bool:
    """Whether this is (H, W), two integers of at least 1. For symbolic ones only the lower bound is checked."""
    return isinstance(size, (tuple, list)) and len(size) == 2 and all(
        type(s) is int and 0 < s <= MAX_SIDE or isinstance(s, torch.SymInt) and s > 0 for s in size)


def check_keep_indices(keep_indices: Any, like: torch.Tensor, num_patches: int) -> None:
    """Check that `keep_indices` are distinct patches of the grid.

    Args:
        keep_indices: What should be raster indices of distinct patches, int64 `[B, K]`.
        like: A tensor of this batch size, on the device where they should be.
        num_patches: H*W.

    Raises:
        ValueError: If they are not. On a GPU, and if `torch.func.vmap` maps over them, the values are not looked at.
    """
    batch, is_tensor = like.shape[0], isinstance(keep_indices, torch.Tensor)
    if not is_tensor or keep_indices.dtype != torch.int64 or keep_indices.ndim != 2 or keep_indices.shape[0] != batch:
        got = f'{keep_indices.dtype} {list(keep_indices.shape)}' if is_tensor else type(keep_indices).__name__
        raise ValueError(f'keep_indices must be int64 [B, K] = [{batch}, K], got {got}.')
    if keep_indices.device != like.device:
        raise ValueError(
            f'keep_indices must be on {like.device}, where the tokens are, and is on {keep_indices.device}.')
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return
    if keep_indices.device.type != 'cpu' or torch._C._functorch.is_functorch_wrapped_tensor(keep_indices):
        return  # a look at the values would make a GPU wait, and vmap does not allow it
    if keep_indices.numel() and (keep_indices.min() < 0 or keep_indices.max() >= num_patches):
        raise ValueError(
            f'keep_indices must be from 0 to {num_patches - 1}, as there are {num_patches} patches, got '
            f'{keep_indices.min().item()} to {keep_indices.max().item()}. Prefix tokens do not count.')
    ordered = keep_indices.sort(dim=1).values
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise ValueError('keep_indices has the same patch twice in an image. Name each patch once.')
