"""timm's attention layer and blocks, extended by position encodings."""
from typing import Optional, Tuple

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block, ResPostBlock

from .position import LayerEncodings, Position

__all__ = ['PosEncAttention', 'PosEncBlock', 'PosEncResPostBlock']


class PosEncAttention(Attention):
    """timm's `Attention` with position encodings.

    timm's constructor builds it. The model then replaces `encodings`, which is empty at first.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.encodings = LayerEncodings()

    def forward(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
            position: Optional[Position] = None,
    ) -> torch.Tensor:
        """
        Args:
            x: Tokens, `[B, N, D]`.
            attn_mask: Added to the logits, or bool with True where attention is allowed; broadcastable to
                `[B, h, N, N]`.
            is_causal: Mask out all later tokens.
            position: What the layers of this forward pass share. None if no encoding acts inside the blocks.

        Returns:
            `[B, N, D]`.

        Raises:
            ValueError: If `position` is missing where an encoding needs it, or is not a `Position`.
        """
        x = self.encodings.add_before(x, position)
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        q, k, v = self.queries_keys_values(x)
        out = self.encodings(
            q, k, v, x, position,
            scale=self.scale,
            attn_mask=attn_mask,
            is_causal=is_causal,
            dropout_p=self.attn_drop.p if self.training else 0.,
            fused=self.fused_attn,
        )  # [B, h, N, d]
        out = self.norm(out.transpose(1, 2).flatten(2))  # [B, N, D]
        if gate is not None:
            out = out * gate
        return self.proj_drop(self.proj(out))

    def queries_keys_values(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From tokens `[B, N, D]` to normed q, normed k, and v, each `[B, h, N, d]`."""
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # [B, h, N, d]
        # Under autocast, norms return q and k in float32. Fused attention would cast them back. Casting them here gives
        # all implementations of attention the same input.
        return self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), v


class PosEncBlock(Block):
    """timm's `Block`, which passes the position on to its attention layer."""

    def forward(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
            position: Optional[Position] = None,
    ) -> torch.Tensor:
        """From tokens `[B, N, D]` to tokens `[B, N, D]`. Arguments as for `PosEncAttention`."""
        y = self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal, position=position)
        x = x + self.drop_path1(self.ls1(y))
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return self.attn.encodings.add_after(x, position)


class PosEncResPostBlock(ResPostBlock):
    """timm's `ResPostBlock` (norms after attention and MLP), which passes the position on to its attention layer."""

    def forward(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
            position: Optional[Position] = None,
    ) -> torch.Tensor:
        """From tokens `[B, N, D]` to tokens `[B, N, D]`. Arguments as for `PosEncAttention`."""
        y = self.attn(x, attn_mask=attn_mask, is_causal=is_causal, position=position)
        x = x + self.drop_path1(self.norm1(y))
        x = x + self.drop_path2(self.norm2(self.mlp(x)))
        return self.attn.encodings.add_after(x, position)
