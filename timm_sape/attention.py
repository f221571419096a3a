"""One attention layer: timm's, plus the encodings that act inside it."""
import operator
from functools import reduce
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn as nn
from timm.layers import Attention, register_notrace_module
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.vision_transformer import Block, ResPostBlock

from . import ops
from .encodings import PositionEncoding
from .grid import Grid

__all__ = ['PosEncAttention', 'PosEncBlock', 'PosEncResPostBlock']


@register_notrace_module
class PosEncAttention(Attention):
    """timm's `Attention` with position in its logits, q, k and values.

    Built as timm builds it; `set_encodings` then gives it the encodings of its layer.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.set_encodings({})

    def set_encodings(self, encodings: Dict[str, PositionEncoding], rotate_half: bool = False) -> None:
        """Give the layer its encodings, by name. Decides once which of them act where.

        Args:
            encodings: Those of this layer alone.
            rotate_half: The layout of the rotation, be it of this layer or shared.
        """
        self.encodings = nn.ModuleDict(encodings)
        self.rotate_half = rotate_half
        self._names = {
            hook: tuple(name for name, encoding in encodings.items() if encoding.overrides(hook))
            for hook in PositionEncoding.HOOKS
        }
        biases = ('position_bias', 'content_bias', 'channels', 'values')
        self._codes_alone = sum(len(self._names[hook]) for hook in biases) == 1

    def acting_on(self, hook: str) -> List[PositionEncoding]:
        """The encodings of this layer that override `hook`."""
        return [self.encodings[name] for name in self._names[hook]]

    def forward(
            self,
            x: torch.Tensor,
            grid: Grid,
            rotation: Optional[torch.Tensor] = None,
            bias: Optional[torch.Tensor] = None,
            pos: Optional[torch.Tensor] = None,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
    ) -> torch.Tensor:
        """
        Args:
            x: Tokens, `[B, N, D]`.
            grid: The grid.
            rotation: Table of the model's rotation, if all layers share one, `[(B, 1, | h,) N-P, 2*d]`.
            bias: Sum of the biases that all layers share, broadcastable to `[B, h, N, N]`.
            pos: Added to x, `[(B,) N, D]`.
            attn_mask: Added to the logits, or bool with True where attention is allowed; broadcastable likewise.
            is_causal: Mask out all later tokens.

        Returns:
            `[B, N, D]`.
        """
        x = x if pos is None else x + pos
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        q, k, v = self._qkv(x)
        dropout_p = self.attn_drop.p if self.training else 0.
        for encoding in self.acting_on('distances')[:1]:
            # Where distances of codes are all that is added to the logits, nothing N x N need be stored.
            only_reference = {
                'a mask': attn_mask is not None or is_causal,
                'dropout of the probabilities': dropout_p > 0,
                'other biases beside it': bias is not None or not self._codes_alone,
                'attention that is not fused': not self.fused_attn,
            }
            backend = ops.choose_backend(None, q, encoding.code_widths(grid), only_reference)
            if backend != 'reference':
                codes_x, codes_y, gain = encoding.distances(q, k, grid, backend)
                q, k = self._rotated(q, k, rotation, grid)
                x = ops.distance_attention(
                    q, k, v, codes_x, codes_y, encoding.gated(gain), grid, scale=self.scale, backend=backend)
                return self._project(x, gate)

        mask = ops.merge_masks(self._bias(q, k, grid, bias), attn_mask, is_causal, x.shape[1], x.device)
        channels = [encoding.channels(q, k, x, grid, self.scale) for encoding in self.acting_on('channels')]
        q, k = self._rotated(q, k, rotation, grid)
        if channels:
            q = torch.cat([q, *(a for a, _ in channels)], dim=-1)
            k = torch.cat([k, *(b for _, b in channels)], dim=-1)  # [B, h, N, d+C]

        if self.fused_attn and not self._names['values']:
            x = ops.attend(q, k, v, mask, scale=self.scale, dropout_p=dropout_p)
        else:
            attn = self.attn_drop(ops.probabilities(q, k, mask, scale=self.scale))  # [B, h, N, N]
            x = attn.to(v.dtype) @ v
            for encoding in self.acting_on('values'):
                x = x + encoding.gated(encoding.values(attn, grid)).to(v.dtype)

        return self._project(x, gate)

    def logits(
            self,
            x: torch.Tensor,
            grid: Grid,
            rotation: Optional[torch.Tensor] = None,
            bias: Optional[torch.Tensor] = None,
            pos: Optional[torch.Tensor] = None,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """What the softmax gets, in two parts, for those who want to look at it. `forward` does not call it.

        Arguments are those of `forward`, and so are the methods that compute it, but in plain attention.

        Returns:
            What content says, scale * q.k, and what position adds to it: biases as they are, products as their
            products, rotations as scale * (Rq.Rk - q.k). Both `[B, h, N, N]`.
        """
        x = x if pos is None else x + pos
        q, k, _ = self._qkv(x)
        content = self.scale * q @ k.transpose(-2, -1)
        position = torch.zeros_like(content)
        bias = self._bias(q, k, grid, bias)
        if bias is not None:
            position = position + bias
        for encoding in self.acting_on('channels'):
            a, b = encoding.channels(q, k, x, grid, self.scale)
            position = position + self.scale * a @ b.transpose(-2, -1)
        rotated_q, rotated_k = self._rotated(q, k, rotation, grid)
        if rotated_q is not q:
            position = position + (self.scale * rotated_q @ rotated_k.transpose(-2, -1) - content)
        return content, position

    def after_block(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        """The tokens after the block, `[B, N, D]`, with what encodings add there."""
        for encoding in self.acting_on('after_block'):
            x = x + encoding.gated(encoding.after_block(x, grid)).to(x.dtype)
        return x

    def _qkv(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # [B, h, N, d]
        # Under autocast norms widen q and k. Fused attention would narrow them again; so does this, for all backends.
        return self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), v

    def _bias(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            grid: Grid,
            shared: Optional[torch.Tensor],
    ) -> Optional[torch.Tensor]:
        """The sum of all biases, None if there is none."""
        # Geometry is rounded to the dtype of q, as everywhere in timm; what depends on content stays wide.
        biases = [] if shared is None else [shared.to(q.dtype)]
        for encoding in self.acting_on('position_bias'):
            biases.append(grid.keep_pairs(encoding.gated(encoding.position_bias(grid))).to(q.dtype))
        for encoding in self.acting_on('content_bias'):
            biases.append(encoding.gated(encoding.content_bias(q, k, grid)))
        return reduce(operator.add, biases) if biases else None

    def _project(self, x: torch.Tensor, gate: Optional[torch.Tensor]) -> torch.Tensor:
        x = x.transpose(1, 2).flatten(2)  # [B, N, D]
        x = self.norm(x)
        if gate is not None:
            x = x * gate
        x = self.proj(x)
        return self.proj_drop(x)

    def _rotated(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            rotation: Optional[torch.Tensor],
            grid: Grid,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        for encoding in self.acting_on('rotation'):
            rotation = grid.keep_rows(encoding.rotation(grid))
        if rotation is None:
            return q, k
        return self._rotate(q, rotation, grid), self._rotate(k, rotation, grid)

    def _rotate(self, x: torch.Tensor, table: torch.Tensor, grid: Grid) -> torch.Tensor:
        p = grid.num_prefix_tokens
        patches = apply_rot_embed_cat(x[:, :, p:], table, half=self.rotate_half)
        return torch.cat([x[:, :, :p], patches], dim=2)  # [B, h, N, d]


class PosEncBlock(Block):
    """timm's `Block`, which hands the grid down to its attention layer."""

    def forward(
            self,
            x: torch.Tensor,
            grid: Grid,
            rotation: Optional[torch.Tensor] = None,
            bias: Optional[torch.Tensor] = None,
            pos: Optional[torch.Tensor] = None,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
    ) -> torch.Tensor:
        """Arguments as for `PosEncAttention`; `[B, N, D]` to `[B, N, D]`."""
        y = self.attn(self.norm1(x), grid, rotation, bias, pos, attn_mask=attn_mask, is_causal=is_causal)
        x = x + self.drop_path1(self.ls1(y))
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return self.attn.after_block(x, grid)


class PosEncResPostBlock(ResPostBlock):
    """timm's `ResPostBlock`, whose norms come after attention and MLP, likewise."""

    def forward(
            self,
            x: torch.Tensor,
            grid: Grid,
            rotation: Optional[torch.Tensor] = None,
            bias: Optional[torch.Tensor] = None,
            pos: Optional[torch.Tensor] = None,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
    ) -> torch.Tensor:
        """Arguments as for `PosEncAttention`; `[B, N, D]` to `[B, N, D]`."""
        y = self.attn(x, grid, rotation, bias, pos, attn_mask=attn_mask, is_causal=is_causal)
        x = x + self.drop_path1(self.norm1(y))
        x = x + self.drop_path2(self.norm2(self.mlp(x)))
        return self.attn.after_block(x, grid)
