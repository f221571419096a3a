"""timm's attention layers and blocks as hosts of encodings."""
from typing import Iterable, List, Optional, Tuple

import torch
import torch.nn as nn
from timm.layers import Attention, AttentionRope
from timm.models.eva import EvaAttention, EvaBlock
from timm.models.vision_transformer import Block, ResPostBlock

from .position import AnyPosition, LayerEncodings

__all__ = [
    'HostsEncodings',
    'PosEncAttention',
    'PosEncAttentionRope',
    'PosEncBlock',
    'PosEncEvaAttention',
    'PosEncEvaBlock',
    'PosEncResPostBlock',
    'adopt_blocks',
    'unknown_blocks',
]


class HostsEncodings(nn.Module):
    """What timm's attention layers have in common once position acts in them.

    A layer is built as timm builds it. The model then replaces `encodings` by the ones of this layer.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.encodings = LayerEncodings()

    def queries_keys_values(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens `[B, N, D]` to normed q, normed k, and v, each `[B, h, N, d]`."""
        if self.qkv is None:
            return self._normed(*(self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj)))
        return self._normed(*self._split(self.qkv(x)))

    def forward(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
            position: Optional[AnyPosition] = None,
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
            ValueError: If `position` is missing where an encoding needs it, is not a position, or is for another number
                of tokens or, in a batch of several sizes, of images.
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
            drop=self.attn_drop,
            fused=self.fused_attn,
        )  # [B, h, N, d]
        out = self.norm(out.transpose(1, 2).flatten(2))  # [B, N, D]
        if gate is not None:
            out = out * gate
        return self.proj_drop(self.proj(out))

    def _normed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        # Under autocast norms widen q and k. Fused attention would narrow them again; doing it here treats all
        # implementations alike.
        return self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), v

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, N, h*d]` to `[B, h, N, d]`."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _split(self, qkv: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """`[B, N, 3*h*d]` to q, k and v, each `[B, h, N, d]`."""
        B, N, _ = qkv.shape
        q, k, v = qkv.reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v  # unpacked, because torch.fx cannot iterate over what unbind returns


class PosEncAttention(HostsEncodings, Attention):
    """timm's `Attention` with position in it."""


class PosEncEvaAttention(HostsEncodings, EvaAttention):
    """timm's `EvaAttention`, whose keys have no bias, with position in it."""

    def queries_keys_values(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.qkv is None or self.q_bias is None:
            return super().queries_keys_values(x)
        qkv = self.qkv(x)
        return self._normed(*self._split(qkv + torch.cat([self.q_bias, self.k_bias, self.v_bias]).to(qkv.dtype)))


class PosEncAttentionRope(HostsEncodings, AttentionRope):
    """timm's `AttentionRope`, whose keys and values may have fewer heads, with position in it.

    Each query head gets a copy of its keys and values, as in timm, so encodings see h heads of each.
    """

    def queries_keys_values(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().queries_keys_values(x)
        return q, *(t.repeat_interleave(self.num_kv_groups, dim=1) if self.num_kv_groups > 1 else t for t in (k, v))


def _encodings_of(attn: nn.Module) -> LayerEncodings:
    """Those of an attention layer, also if it is wrapped, as adapters and profilers do."""
    encodings = getattr(attn, 'encodings', None)
    return next(m for m in attn.modules() if isinstance(m, LayerEncodings)) if encodings is None else encodings


class PosEncBlock(Block):
    """timm's `Block`, which passes the position on to its attention layer."""

    def forward(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
            position: Optional[AnyPosition] = None,
    ) -> torch.Tensor:
        """`[B, N, D]` to `[B, N, D]`; arguments as for its attention layer."""
        y = self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal, position=position)
        x = x + self.drop_path1(self.ls1(y))
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return _encodings_of(self.attn).add_after(x, position)


class PosEncResPostBlock(ResPostBlock):
    """timm's `ResPostBlock` (norms after attention and MLP), which passes the position on to its attention layer."""

    def forward(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
            position: Optional[AnyPosition] = None,
    ) -> torch.Tensor:
        """`[B, N, D]` to `[B, N, D]`; arguments as for its attention layer."""
        y = self.attn(x, attn_mask=attn_mask, is_causal=is_causal, position=position)
        x = x + self.drop_path1(self.norm1(y))
        x = x + self.drop_path2(self.norm2(self.mlp(x)))
        return _encodings_of(self.attn).add_after(x, position)


class PosEncEvaBlock(EvaBlock):
    """timm's `EvaBlock`, likewise."""

    def forward(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
            position: Optional[AnyPosition] = None,
    ) -> torch.Tensor:
        """`[B, N, D]` to `[B, N, D]`; arguments as for its attention layer."""
        y = self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal, position=position)
        x = x + self.drop_path1(y if self.gamma_1 is None else self.gamma_1 * y)
        y = self.mlp(self.norm2(x))
        x = x + self.drop_path2(y if self.gamma_2 is None else self.gamma_2 * y)
        return _encodings_of(self.attn).add_after(x, position)


HOSTS = {
    Attention: PosEncAttention,
    AttentionRope: PosEncAttentionRope,
    Block: PosEncBlock,
    EvaAttention: PosEncEvaAttention,
    EvaBlock: PosEncEvaBlock,
    ResPostBlock: PosEncResPostBlock,
}


def unknown_blocks(blocks: Iterable[nn.Module]) -> List[str]:
    """Names of the classes among blocks and their attention layers that cannot be made hosts."""
    kinds = {type(module) for block in blocks for module in (block, getattr(block, 'attn', None))}
    return sorted(kind.__name__ for kind in kinds - HOSTS.keys() - {type(None)})


def adopt_blocks(blocks: Iterable[nn.Module]) -> None:
    """Make blocks that timm has built hosts of encodings: modules stay timm's and get our classes, as FSDP does it.

    Raises:
        ValueError: If `HOSTS` has no class for a block or its attention layer.
    """
    blocks = list(blocks)
    unknown = unknown_blocks(blocks)
    if unknown:
        raise ValueError(
            f'No class with encodings is known for {", ".join(unknown)}. Write one, as PosEncBlock and PosEncAttention '
            'are for Block and Attention, and add it to HOSTS in timm_sape/attention.py.')
    for block in blocks:
        for module in (block, block.attn):
            module.__class__ = HOSTS[type(module)]
