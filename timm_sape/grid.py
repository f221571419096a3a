"""The patch grid: where every token of a sequence stands.

Notation used in the whole package:

    B batch, h heads, D embed dim, d head dim
    H x W patch grid, P prefix tokens (class token first, then registers), K patches kept by patch dropout
    N tokens: P + H*W, or P + K

Patches are numbered row by row from the top left (raster order); a position is (y, x) in units of patches. Prefix
tokens stand first in the sequence and have no position. *Prefix rule*: a prefix token is never rotated, and every logit
in its row or column gets a bias of zero.
"""
from dataclasses import dataclass
from typing import Optional, Tuple

import torch
import torch.nn.functional as F

__all__ = ['Grid']


@dataclass(frozen=True, eq=False)
class Grid:
    """What is known of the positions in one forward pass.

    Made once per forward by the model and handed down as an argument, so that nothing has to be remembered on a module.

    Args:
        height: H, patches along y.
        width: W, patches along x.
        num_prefix_tokens: P, tokens before the patches.
        keep_indices: Raster indices of the patches that patch dropout has kept, in the order of the sequence,
            int64 `[B, K]`. None if all are there.
        objects: Index of the object that each patch of the whole grid belongs to, int64 `[B, H*W]`, for encodings that
            ask for it.
    """
    height: int
    width: int
    num_prefix_tokens: int = 0
    keep_indices: Optional[torch.Tensor] = None
    objects: Optional[torch.Tensor] = None

    @property
    def size(self) -> Tuple[int, int]:
        return self.height, self.width

    @property
    def num_patches(self) -> int:
        return self.height * self.width

    def matches(self, size: Tuple[int, int]) -> bool:
        """Whether this is a grid of `size`; False for symbolic sizes, where asking would become a guard on them."""
        return type(self.height) is int and type(self.width) is int and self.size == tuple(size)

    def coordinates(self, device=None, dtype=None) -> torch.Tensor:
        """(y, x) of each patch of the whole grid, in patches, 0-based, `[H*W, 2]`."""
        y = torch.arange(self.height, device=device, dtype=dtype)
        x = torch.arange(self.width, device=device, dtype=dtype)
        return torch.stack(torch.meshgrid(y, x, indexing='ij'), dim=-1).flatten(0, 1)  # [H*W, 2]

    def pad_tokens(self, table: torch.Tensor) -> torch.Tensor:
        """The prefix rule for tokens: rows of patches `[..., H*W, C]` to rows of all tokens `[..., N, C]`."""
        p = self.num_prefix_tokens
        return F.pad(table, (0, 0, p, 0)) if p else table

    def pad_prefix(self, bias: torch.Tensor) -> torch.Tensor:
        """The prefix rule for logits: `[..., N-P, N-P]` between patches to `[..., N, N]` between tokens."""
        p = self.num_prefix_tokens
        return F.pad(bias, (p, 0, p, 0)) if p else bias

    def keep_rows(self, table: torch.Tensor) -> torch.Tensor:
        """Rows of the kept patches, `[(h,) H*W, C]` to `[B, h|1, K, C]`; the table itself if all patches are there."""
        if self.keep_indices is None:
            return table
        table = table[(None,) * (4 - table.ndim)]  # [1, h|1, H*W, C]
        table = table.expand(self.keep_indices.shape[0], -1, -1, -1)
        return table.gather(2, self.keep_indices[:, None, :, None].expand(-1, table.shape[1], -1, table.shape[-1]))

    def keep_tokens(self, table: torch.Tensor) -> torch.Tensor:
        """Rows of the kept tokens, `[P+H*W, C]` to `[B, P+K, C]`; the table itself if all are there."""
        if self.keep_indices is None:
            return table
        p = self.num_prefix_tokens
        patches = self.keep_rows(table[p:])[:, 0]  # [B, K, C]
        return torch.cat([table[:p].expand(patches.shape[0], -1, -1), patches], dim=1)

    def keep_pairs(self, logits: torch.Tensor) -> torch.Tensor:
        """Entries of the kept tokens, as given if all are there.

        Args:
            logits: Bias or mask for the tokens of the whole grid, broadcastable to `[B, h, P+H*W, P+H*W]`.

        Returns:
            `[B, h|1, P+K, P+K]`.
        """
        if self.keep_indices is None:
            return logits
        prefix = torch.arange(self.num_prefix_tokens, device=self.keep_indices.device)
        prefix = prefix.expand(self.keep_indices.shape[0], -1)
        index = torch.cat([prefix, self.keep_indices + self.num_prefix_tokens], dim=1)  # [B, P+K]
        num_tokens, num_keep = self.num_prefix_tokens + self.num_patches, index.shape[1]
        logits = logits[(None,) * (4 - logits.ndim)]
        num_heads = logits.shape[1]
        logits = logits.expand(index.shape[0], -1, num_tokens, num_tokens)
        logits = logits.gather(2, index[:, None, :, None].expand(-1, num_heads, -1, num_tokens))
        return logits.gather(3, index[:, None, None, :].expand(-1, num_heads, num_keep, -1))

    def scatter(self, tokens: torch.Tensor) -> torch.Tensor:
        """Put patch tokens in their places, `[B, h, N-P, C]` to `[B, h, H*W, C]`, zeros where a patch was dropped."""
        if self.keep_indices is None:
            return tokens
        batch, num_heads, _, channels = tokens.shape
        index = self.keep_indices[:, None, :, None].expand(-1, num_heads, -1, channels)
        return tokens.new_zeros(batch, num_heads, self.num_patches, channels).scatter(2, index, tokens)

    def gather(self, tokens: torch.Tensor) -> torch.Tensor:
        """The inverse of `scatter`: `[B, h, H*W, C]` to `[B, h, N-P, C]`."""
        if self.keep_indices is None:
            return tokens
        index = self.keep_indices[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[-1])
        return tokens.gather(2, index)
