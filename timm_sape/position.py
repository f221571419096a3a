"""How a model applies its encodings: `SharedEncodings` for the whole model, `LayerEncodings` for each attention layer.

A host model calls them in two places:

    tokens, position = model.encodings(tokens, grid, given)     after its patch embedding and patch dropout
    out = attn.encodings(q, k, v, x, position, scale=...)       in each layer, instead of attention on q, k and v

It also calls `add_before` and `add_after` around each attention layer. For an example see `attention.py`, where timm's
attention layer and block are the hosts.
"""
import operator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers.pos_embed_sincos import apply_rot_embed_cat

from . import ops
from .encodings import PositionEncoding
from .grid import Grid
from .grid_groups import GridGroups

__all__ = ['AnyPosition', 'LayerEncodings', 'MixedPosition', 'Position', 'SharedEncodings']


@dataclass(frozen=True, eq=False)
class Position:
    """What the layers of one forward pass share. All tensors cover only the tokens in the sequence.

    Args:
        grid: The grid.
        rotation: Table of the rotation that all layers share, `[N-P, 2*d]`, `[h, N-P, 2*d]` or `[B, 1|h, N-P, 2*d]`.
        bias: Sum of the biases that all layers share, broadcastable to `[B, h, N, N]`.
        layer_terms: What is added to the input of each attention layer, `[L, (B,) N, D]`.
        layer_rotations: Tables of a rotation of the host's own that differs from layer to layer, like `rotation`,
            `[L, (B,) h, N-P, 2*d]`.
        logit_factor: What q.k is multiplied by in all layers, in addition to the scale: a number, or a tensor `[]` if
            sizes are symbolic. None for 1.
    """
    grid: Grid
    rotation: Optional[torch.Tensor] = None
    bias: Optional[torch.Tensor] = None
    layer_terms: Optional[torch.Tensor] = None
    layer_rotations: Optional[torch.Tensor] = None
    logit_factor: Union[None, float, torch.Tensor] = None

    @property
    def first(self) -> 'Position':
        """Itself, so that code for both kinds of position can look at one."""
        return self

    @property
    def num_prefix_tokens(self) -> int:
        return self.grid.num_prefix_tokens

    def tensors(self) -> Tuple[Optional[torch.Tensor], ...]:
        """All that may have a gradient."""
        return self.rotation, self.bias, self.layer_terms, self.layer_rotations

    def with_tensors(self, *tensors: Optional[torch.Tensor]) -> 'Position':
        """A position on the same grid with these tensors, in the order of `tensors()`."""
        return Position(self.grid, *tensors, logit_factor=self.logit_factor)

    def to(self, *args, **kwargs) -> 'Position':
        """As `torch.Tensor.to`. Libraries that spread a model over devices call it on the arguments of modules."""
        given = *self.tensors(), self.logit_factor
        moved = (t.to(*args, **kwargs) if isinstance(t, torch.Tensor) else t for t in given)
        return Position(self.grid.to(*args, **kwargs), *moved)


@dataclass(frozen=True, eq=False)
class MixedPosition:
    """What the layers share where the images of a batch have grids of their own.

    Wherever torch.compile sees `parts`, it compiles anew for another number of them. So that field is read only under
    `torch.compiler.disable`, by reentrant checkpointing, and by libraries that call `to`.

    Args:
        groups: The groups of images of one grid.
        parts: The position of each group.
        first: The first of them. All have the same fields set.
        rotation: The tables of all groups' rotations as one, `[B, 1|h, N-P, 2*d]`; rows of padding are zero.
        logit_factor: The factors of all groups as one, `[B, 1, N, 1]`. None if there are none.
    """
    groups: GridGroups
    parts: Tuple[Position, ...]
    first: Position
    rotation: Optional[torch.Tensor] = None
    logit_factor: Optional[torch.Tensor] = None

    @classmethod
    def of(cls, groups: GridGroups, parts: Sequence[Position], like: torch.Tensor) -> 'MixedPosition':
        """Merge the positions of all groups; `like` is a tensor of the dtype and on the device of the tokens."""
        position = cls(groups, tuple(parts), parts[0])
        rotations = [part.rotation for part in parts]
        return replace(
            position,
            rotation=None if rotations[0] is None else position.merge_rotations(rotations),
            logit_factor=position.merge_factors([part.logit_factor for part in parts], like))

    @property
    def num_prefix_tokens(self) -> int:
        return self.first.num_prefix_tokens

    def merge_rotations(self, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """One table for the batch, `[B, 1|h, N-P, 2*d]`, out of one for each group, `[(b, 1|h,) n-P, 2*d]`."""
        rows = []
        for table, (b, _), grid in zip(tables, self.groups.shapes, self.groups.grids):
            table = table[(None,) * (4 - table.ndim)].expand(b, -1, -1, -1)  # [b, 1|h, n-P, 2*d]
            rows.append(grid.pad_tokens(table))  # [b, 1|h, n, 2*d]
        return self.groups.merge_heads(rows)[:, :, self.num_prefix_tokens:]

    def merge_factors(
            self,
            factors: Sequence[Union[None, float, torch.Tensor]],
            like: torch.Tensor,
    ) -> Optional[torch.Tensor]:
        """One factor for each query of the batch, `[B, 1, N, 1]`, out of one for each group. 0 for padding."""
        if all(factor is None for factor in factors):
            return None
        dtype = torch.promote_types(like.dtype, torch.float32)
        parts = [
            like.new_ones(shape, dtype=dtype) * (1. if factor is None else factor)
            for shape, factor in zip(self.groups.shapes, factors)]
        return self.groups.merge(parts)[:, None, :, None]

    def tensors(self) -> Tuple[Optional[torch.Tensor], ...]:
        return self.rotation, *(tensor for part in self.parts for tensor in part.tensors())

    def with_tensors(self, *tensors: Optional[torch.Tensor]) -> 'MixedPosition':
        """A copy with other tensors, in the order of `tensors()`."""
        rotation, *rest = tensors
        size = len(rest) // len(self.parts)
        parts = tuple(part.with_tensors(*rest[i * size:(i + 1) * size]) for i, part in enumerate(self.parts))
        return replace(self, parts=parts, first=parts[0], rotation=rotation)

    def to(self, *args, **kwargs) -> 'MixedPosition':
        """As `torch.Tensor.to`. Libraries that spread a model over devices call it for arguments of a module."""
        rotation, factor = (None if t is None else t.to(*args, **kwargs) for t in (self.rotation, self.logit_factor))
        parts = tuple(part.to(*args, **kwargs) for part in self.parts)
        return MixedPosition(self.groups.to(*args, **kwargs), parts, parts[0], rotation, factor)


AnyPosition = Union[Position, MixedPosition]
LOGIT_HOOKS = ('position_bias', 'content_bias', 'channels', 'values')  # they act on logits or probabilities


# torch.fx cannot trace the methods below, because they branch on sizes and on None. `torch.fx.wrap` makes each call one
# node, with any tracer.

@torch.fx.wrap
def _call(module: nn.Module, method: str, *args, **kwargs) -> Any:
    return getattr(module, method)(*args, **kwargs)


def _logit_factor(
        encodings: Iterable[PositionEncoding],
        x: torch.Tensor,
        grid: Grid,
) -> Union[None, float, torch.Tensor]:
    """The product of the factors that encodings have for q.k. The values of x do not matter."""
    factors = [encoding(x, grid=grid, hook='logit_factor') for encoding in encodings if encoding.scales_logits]
    factors = [factor for factor in factors if factor is not None]
    return reduce(operator.mul, factors) if factors else None


class _Encodings(nn.ModuleDict):

    def __init__(self, encodings: Optional[Dict[str, PositionEncoding]] = None) -> None:
        super().__init__(encodings or {})
        self.rotate_half = any(getattr(encoding, 'rotate_half', False) for encoding in self.values())

    def acting_on(self, hook: str) -> List[PositionEncoding]:
        """The encodings that override a hook."""
        return [encoding for encoding in self.values() if encoding.overrides(hook)]


class SharedEncodings(_Encodings):
    """The encodings that a whole model shares."""

    def forward(
            self,
            x: torch.Tensor,
            grid: Grid,
            given: Mapping[str, Any],
    ) -> Tuple[torch.Tensor, Position]:
        """Add position to the tokens, and compute what the layers share.

        Args:
            x: Tokens without position, prefix tokens first, `[B, N, D]`.
            grid: The grid.
            given: What encodings may ask for: `pos_embed`, timm's table `[1, P+H*W, D]` or None, with zeros for the
                prefix tokens if it has no rows for them; `images`, `[B, C, height, width]` or None; `patch_size`,
                height and width of a patch in pixels; `object_index`, the object that each patch belongs to, integers
                `[B, H*W]` or None.

        Returns:
            The tokens with position, `[B, N, D]`, and what the layers share.

        Raises:
            ValueError: If an `object_index` is given and no encoding asks for it.
        """
        return _call(self, '_forward', x, grid, given)

    def _forward(self, x: torch.Tensor, grid: Grid, given: Mapping[str, Any]) -> Tuple[torch.Tensor, Position]:
        return self.embed(x, grid, given), self.position(x, grid)

    def terms(self, x: torch.Tensor, grid: Grid, given: Mapping[str, Any]) -> Iterator[torch.Tensor]:
        """The term that each encoding adds to the tokens, broadcastable to `[B, N, D]`. Arguments as for `forward`."""
        for encoding in self.acting_on('embed'):
            asked = {name: given[name] for name in encoding.asks_for}
            yield encoding(x, grid=grid, hook='embed', **asked)

    def act_on_blocks(self) -> bool:
        """Whether any of them acts inside the blocks, not only on the tokens before the first block."""
        return any(self.acting_on(hook) for hook in ('rotation', 'position_bias', 'layer_embed')) or any(
            encoding.scales_logits for encoding in self.values())

    def embed(self, x: torch.Tensor, grid: Grid, given: Mapping[str, Any]) -> torch.Tensor:
        """The tokens with position, `[B, N, D]`. Arguments as for `forward`."""
        if given['object_index'] is not None and not any('object_index' in e.asks_for for e in self.values()):
            raise ValueError(
                "object_index= is for encodings that use it, such as 'ope'; the model has none. Leave it out.")
        terms = [term.to(x.dtype) for term in self.terms(x, grid, given)]
        if not terms:
            return x
        term = reduce(operator.add, terms)
        dtype = x.dtype
        for encoding in self.acting_on('mix'):
            x, term = encoding(x, term, grid=grid, hook='mix')
        return (x + term).to(dtype)

    def position(self, x: torch.Tensor, grid: Grid) -> Position:
        """What the layers share on this grid. The values of the tokens x, `[B, N, D]`, do not matter."""
        rotation, biases, layer_terms = (
            [encoding(x, grid=grid, hook=hook) for encoding in self.acting_on(hook)]
            for hook in ('rotation', 'position_bias', 'layer_embed'))
        return Position(
            grid,
            rotation[0] if rotation else None,  # at most one: parse_pos_enc refuses two
            reduce(operator.add, biases) if biases else None,
            reduce(operator.add, layer_terms) if layer_terms else None,
            logit_factor=_logit_factor(self.values(), x, grid),
        )


class LayerEncodings(_Encodings):
    """The encodings of one attention layer, and attention with them.

    Args:
        encodings: The encodings that belong to this layer, by name. Shared ones are not among them.
        layer: Index of the layer, from 0.
        rotate_half: Layout of the channel pairs of a rotation that all layers share, or that is the host's own: t and
            t + d/2 instead of 2t and 2t + 1. A rotation among `encodings` brings its own layout.
        needs_position: Whether shared encodings, or a rotation of the host's own, act in this layer, so that it needs a
            `Position`. Whether `encodings` need one is found out here.

    Raises:
        ValueError: If two of the encodings are rotations, or if one adds to the tokens of the whole model.
    """

    def __init__(
            self,
            encodings: Optional[Dict[str, PositionEncoding]] = None,
            *,
            layer: int = 0,
            rotate_half: bool = False,
            needs_position: bool = False,
    ) -> None:
        super().__init__(encodings)
        rotations = [name for name, encoding in self.items() if encoding.rotates()]
        if len(rotations) > 1:
            raise ValueError(f'A layer can have one rotation, got {" and ".join(map(repr, rotations))}. Leave one out.')
        for name, encoding in self.items():
            if not encoding.per_layer and any(encoding.overrides(hook) for hook in ('embed', 'mix', 'layer_embed')):
                raise ValueError(
                    f'{name!r} adds to the tokens of the whole model, and attention would ignore it. Give it to '
                    f'SharedEncodings, which is called before the first layer.')
        self.layer = layer
        self.rotate_half = self.rotate_half or rotate_half
        acts = any(encoding.acts_on() or encoding.scales_logits for encoding in self.values())  # 'nope' does not
        self.needs_position = needs_position or acts

    def forward(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            x: torch.Tensor,
            position: Optional[AnyPosition],
            *,
            scale: float,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
            dropout_p: float = 0.0,
            drop: Optional[Callable[[torch.Tensor], torch.Tensor]] = None,
            fused: bool = True,
    ) -> torch.Tensor:
        """Attention with position: rotations, biases, further channels and terms for values.

        Args:
            q: Queries after q_norm, before any rotation, unscaled, prefix tokens first, `[B, h, N, d]`.
            k: Keys, likewise.
            v: Values, `[B, h, N, d]`.
            x: The normed tokens that q and k were computed from, `[B, N, D]`.
            position: What the layers share. May be None if the layer does not need it.
            scale: Factor of q.k in the logits.
            attn_mask: Added to the logits, or bool with True where attention is allowed; broadcastable to
                `[B, h, N, N]`.
            is_causal: Mask out all later tokens.
            dropout_p: Dropout rate of the probabilities.
            drop: Module that applies this dropout to explicit probabilities, so that hooks on it see them.
            fused: False for an explicit softmax.

        Returns:
            `[B, h, N, d]`, before the projection.

        Raises:
            ValueError: If `position` is missing where the layer needs it, is not a position, or is for another number
                of tokens or, in a batch of several sizes, of images. If `is_causal` is asked for in such a batch.
        """
        return _call(
            self, '_attend', q, k, v, x, position, scale=scale, attn_mask=attn_mask, is_causal=is_causal,
            dropout_p=dropout_p, drop=drop, fused=fused)

    def add_before(self, x: torch.Tensor, position: Optional[AnyPosition]) -> torch.Tensor:
        """The normed tokens before the attention layer, with what encodings add there, `[B, N, D]`."""
        return _call(self, '_add_before', x, position)

    def add_after(self, x: torch.Tensor, position: Optional[AnyPosition]) -> torch.Tensor:
        """The tokens after the block, with what encodings of this layer add there, `[B, N, D]`."""
        return _call(self, '_add_after', x, position)

    def logits(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            x: torch.Tensor,
            position: Position,
            scale: float,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """The logits in two parts, for analysis. `forward` does not call it.

        Args:
            q: As for `forward`, like all other arguments.

        Returns:
            The logits from content, scale * q.k, and what position adds to them: the biases, the products of further
            channels, and scale * (Rq.Rk - q.k) for a rotation R, or for whatever takes the place of q and k: with
            'pope' that includes what softplus changes. Both `[B, h, N, N]`. If a rule for other sizes has a factor for
            q.k, the scale includes it.
        """
        scaled_q, factor = self._scaled(q, position, scale)  # the factor includes the scale
        content = factor * scaled_q @ k.transpose(-2, -1)
        total = torch.zeros_like(content)
        bias = self._bias(q, k, position)
        if bias is not None:
            total = total + bias
        for encoding in self.acting_on('channels'):
            a, b = encoding(q, k, x, grid=position.grid, scale=factor, hook='channels')
            total = total + factor * a @ b.transpose(-2, -1)
        rotated_q, rotated_k = self._rotated(q, k, position)
        if rotated_q is not q:
            rotated_q, _ = self._scaled(rotated_q, position, scale)
            total = total + (factor * rotated_q @ rotated_k.transpose(-2, -1) - content)
        return content, total

    def _attend(
            self, q, k, v, x, position, *, scale, attn_mask, is_causal, dropout_p, drop, fused,
    ) -> torch.Tensor:
        self._check(position, x)
        given = dict(scale=scale, dropout_p=dropout_p, drop=drop, fused=fused)
        if isinstance(position, MixedPosition):
            return self._attend_mixed(q, k, v, x, position, attn_mask, is_causal, given)
        attending = [] if self.acting_on('values') else self.acting_on('attend')[:1]
        bias = None if position is None else self._bias(q, k, position, attending)
        mask = ops.merge_masks(bias, attn_mask, is_causal, x.shape[1], x.device)
        if attn_mask is None:
            return self._attend_masked(q, k, v, x, position, mask, attending, **given)
        mask, is_empty = ops.open_empty_rows(mask)
        return self._attend_masked(q, k, v, x, position, mask, attending, **given).masked_fill(is_empty, 0)

    def _attend_masked(self, q, k, v, x, position, mask, attending, *, scale, dropout_p, drop, fused) -> torch.Tensor:
        if position is None:
            return ops.attend(q, k, v, mask, scale=scale, dropout_p=dropout_p, drop=drop, fused=fused)
        grid, values = position.grid, self.acting_on('values')
        rotated_q, rotated_k = self._rotated(q, k, position)
        rotated_q, scale = self._scaled(rotated_q, position, scale)
        channels = [
            encoding(q, k, x, grid=grid, scale=scale, hook='channels') for encoding in self.acting_on('channels')]
        if not attending and not values:
            return ops.attend(
                rotated_q, rotated_k, v, mask, scale=scale, channels=channels, dropout_p=dropout_p, drop=drop,
                fused=fused)
        rotated_q, rotated_k = ops.append_channels(rotated_q, rotated_k, channels)  # [B, h, N, d+C]
        if attending:
            return attending[0](
                q, k, v, rotated_q, rotated_k, mask=mask, grid=grid, scale=scale, dropout_p=dropout_p, drop=drop,
                fused=fused, hook='attend')
        attn = ops.probabilities(rotated_q, rotated_k, mask, scale=scale)  # [B, h, N, N]
        attn = F.dropout(attn, dropout_p) if drop is None else drop(attn)
        out = attn.to(v.dtype) @ v
        for encoding in values:
            out = out + encoding(attn, grid=grid, hook='values').to(v.dtype)
        return out

    def _attend_mixed(self, q, k, v, x, position, attn_mask, is_causal, given) -> torch.Tensor:
        if is_causal:
            raise ValueError('is_causal=True is not possible for images of several sizes in a batch. Use attn_mask=.')
        if position.first.bias is not None or any(map(self.acting_on, LOGIT_HOOKS)):
            return self._attend_by_group(q, k, v, x, position, attn_mask, given)
        # Rotations, factors and masks are cheap for the whole batch, padding included.
        q, k = self._rotated(q, k, position)
        q, scale = self._scaled(q, position, given['scale'])
        mask = position.groups.is_token()[:, None, None]  # [B, 1, 1, N]
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            mask = mask & attn_mask
        elif attn_mask is not None:
            mask = attn_mask.masked_fill(~mask, float('-inf'))
        mask, is_empty = ops.open_empty_rows(mask)
        out = ops.attend(q, k, v, mask, **{**given, 'scale': scale})
        return out if attn_mask is None else out.masked_fill(is_empty, 0)

    @torch.compiler.disable  # it would be compiled again for other sizes
    def _attend_by_group(self, q, k, v, x, position, attn_mask, given) -> torch.Tensor:
        groups = position.groups
        parts = zip(
            *map(groups.split_heads, (q, k, v)), groups.split(x), position.parts, groups.split_pairs(attn_mask))
        return groups.merge_heads([
            self._attend(q, k, v, x, part, attn_mask=mask, is_causal=False, **given)
            for q, k, v, x, part, mask in parts])

    def _add_before(self, x: torch.Tensor, position: Optional[AnyPosition]) -> torch.Tensor:
        self._check(position, x)
        if position is None or position.first.layer_terms is None:
            return x
        if isinstance(position, MixedPosition):
            return self._by_group(self._add_before, x, position)
        return x + position.layer_terms[self.layer].to(x.dtype)

    def _add_after(self, x: torch.Tensor, position: Optional[AnyPosition]) -> torch.Tensor:
        if isinstance(position, MixedPosition):
            return self._by_group(self._add_after, x, position) if self.acting_on('embed') else x
        for encoding in self.acting_on('embed'):
            x = x + encoding(x, grid=position.grid, hook='embed').to(x.dtype)
        return x

    @staticmethod
    @torch.compiler.disable
    def _by_group(add: Callable, x: torch.Tensor, position: MixedPosition) -> torch.Tensor:
        groups = position.groups
        return groups.merge([add(part, of_part) for part, of_part in zip(groups.split(x), position.parts)])

    def _bias(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            position: Position,
            without: List[PositionEncoding] = (),
    ) -> Optional[torch.Tensor]:
        """The sum of all biases, broadcastable to `[B, h, N, N]`. None if there is none.

        The `content_bias` of encodings in `without` is left out.
        """
        # Biases from geometry are cast to the dtype of q, as everywhere in timm. Those from content stay wide.
        biases = [] if position.bias is None else [position.bias.to(q.dtype)]
        for encoding in self.acting_on('position_bias'):
            biases.append(encoding(q, grid=position.grid, hook='position_bias').to(q.dtype))
        for encoding in self.acting_on('content_bias'):
            if encoding not in without:
                biases.append(encoding(q, k, grid=position.grid, hook='content_bias'))
        return reduce(operator.add, biases) if biases else None

    def _scaled(self, q: torch.Tensor, position: AnyPosition, scale: float) -> Tuple[torch.Tensor, float]:
        """q and the scale, one of them times the factors that rules for other sizes have for q.k."""
        factor = position.logit_factor
        if any(encoding.scales_logits for encoding in self.values()):
            own = self._own_factor(q, position)
            factor = own if factor is None else factor if own is None else own * factor
        if factor is None:
            return q, scale
        # Fused kernels take a number. A size that is symbolic, or not the same for all images, makes a tensor.
        return ((q * factor).to(q.dtype), scale) if isinstance(factor, torch.Tensor) else (q, scale * factor)

    def _own_factor(self, q: torch.Tensor, position: AnyPosition) -> Union[None, float, torch.Tensor]:
        """The factor of this layer's own encodings; for a batch of several sizes `[B, 1, N, 1]`."""
        if isinstance(position, MixedPosition):
            return self._own_factor_by_group(q, position)
        return _logit_factor(self.values(), q, position.grid)

    @torch.compiler.disable
    def _own_factor_by_group(self, q: torch.Tensor, position: MixedPosition) -> Optional[torch.Tensor]:
        return position.merge_factors([self._own_factor(q, part) for part in position.parts], q)

    def _rotated(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            position: AnyPosition,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        for encoding in self.acting_on('turn'):
            if isinstance(position, MixedPosition) and not encoding.turns_alike:
                q, k = self._turned_by_group(encoding, q, k, position)
            else:
                q, k = encoding(q, k, grid=position.first.grid, hook='turn')
        table = self._rotation(q, position)
        if table is None:
            return q, k
        p = position.num_prefix_tokens
        rotated = (apply_rot_embed_cat(t[:, :, p:], table, half=self.rotate_half) for t in (q, k))
        return tuple(torch.cat([t[:, :, :p], patches], dim=2) if p else patches for t, patches in zip((q, k), rotated))

    @staticmethod
    @torch.compiler.disable
    def _turned_by_group(
            encoding: PositionEncoding,
            q: torch.Tensor,
            k: torch.Tensor,
            position: MixedPosition,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        groups = position.groups
        of_groups = zip(groups.split_heads(q), groups.split_heads(k), groups.grids)
        turned = [encoding(q, k, grid=grid, hook='turn') for q, k, grid in of_groups]
        return tuple(map(groups.merge_heads, zip(*turned)))

    def _rotation(self, q: torch.Tensor, position: AnyPosition) -> Optional[torch.Tensor]:
        """Table of the rotation in this layer, `[(B, 1|h,) N-P, 2*d]`."""
        if not self.acting_on('rotation') and position.first.layer_rotations is None:
            return position.rotation
        if isinstance(position, MixedPosition):
            return self._own_rotation_by_group(q, position)
        return self._own_rotation(q, position)

    @torch.compiler.disable
    def _own_rotation_by_group(self, q: torch.Tensor, position: MixedPosition) -> torch.Tensor:
        return position.merge_rotations([self._own_rotation(q, part) for part in position.parts])

    def _own_rotation(self, q: torch.Tensor, position: Position) -> torch.Tensor:
        for encoding in self.acting_on('rotation'):
            return encoding(q, grid=position.grid, hook='rotation')
        return position.layer_rotations[self.layer]

    def _check(self, position: Optional[AnyPosition], x: torch.Tensor) -> None:
        """
        Raises:
            ValueError: If position is missing where the layer needs it, is no `Position`, or is for another number of
                tokens or, in a batch of several sizes, of images.
        """
        if position is not None and not isinstance(position, (Position, MixedPosition)):
            raise ValueError(
                f'position must be what model.embed() returns along with the tokens, got {type(position).__name__}. '
                'Masks are passed as attn_mask=.')
        if isinstance(position, Position) and self.needs_position:
            got, expected = x.shape[1], position.grid.num_tokens
            if type(got) is type(expected) is int and got != expected:  # kernels would read and write out of bounds
                raise ValueError(
                    f'The layer got {got} tokens, its position is for {expected}. Position acts inside the blocks, so '
                    'tokens cannot be added or removed between them. Drop patches by keep_indices=, before the first.')
        if isinstance(position, MixedPosition) and not torch.compiler.is_compiling():  # it would compile for each size
            expected = position.groups.batch_size, position.groups.num_tokens
            if tuple(x.shape[:2]) != expected:
                raise ValueError(
                    f'The layer got {x.shape[0]} images of {x.shape[1]} tokens, its position is for {expected[0]} of '
                    f'{expected[1]}, padding included. Pass on what model.embed() returned along with these tokens.')
        if position is None and self.needs_position:
            raise ValueError(
                'Position acts inside this layer, so a block or attention layer cannot be called with tokens alone. '
                'Call model(images), model.forward_features(images) or model.forward_intermediates(images); to run '
                'blocks one by one: tokens, position = model.embed(images), then block(tokens, position=position).')
