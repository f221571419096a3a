"""The effect of position on attention in a running model, as in Figure 4 of the SaPE2 paper (2025).

Hooks record the arguments of each attention layer. Everything else is computed from these with the layer's own methods.
The model is not changed.
"""
import threading
from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import Attention, AttentionRope, resample_abs_pos_embed
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.eva import EvaAttention
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer_relpos import RelPosAttention

from ..attention import HostsEncodings
from ..grid import Grid
from ..host import PosEncModel
from ..loading import patch_ratio
from ..wrappers import unwrapped

__all__ = [
    'KNOWN',
    'LayerMaps',
    'PositionMaps',
    'attention_distance',
    'hooks_run',
    'layers_that_matter',
    'logits_of',
    'position_maps',
    'record_calls',
    'similarity',
    'watched_module',
]

KNOWN = (HostsEncodings, Attention, AttentionRope, EvaAttention, RelPosAttention)


class LayerMaps(NamedTuple):
    """One attention layer. Tensors cover all tokens, prefix tokens first."""
    index: int
    """Index of the layer, from 0."""
    content: torch.Tensor
    """Logits from content, scale * q.k, `[B, h, N, N]`."""
    position: torch.Tensor
    """What position adds to the logits: biases, and scale * (Rq.Rk - q.k) for a rotation R, `[B, h, N, N]`."""
    attention: torch.Tensor
    """Probabilities, softmax(content + position), `[B, h, N, N]`."""
    vectors: Optional[torch.Tensor]
    """What is added to the patches for this layer alone (by `lape`), `[H*W, D]`. None if nothing is added."""


class PositionMaps(NamedTuple):
    """The result of `position_maps`."""
    grid: Grid
    layers: List[LayerMaps]
    vectors: Optional[torch.Tensor]
    """What is added to the tokens of patches before the first block, `[(B,) H*W, D]`. None if nothing is added."""

    def between_patches(self, logits: torch.Tensor) -> torch.Tensor:
        """The part of `[..., N, N]` that is between patches, `[..., H*W, H*W]`."""
        p = self.grid.num_prefix_tokens
        return logits[..., p:, p:]


def similarity(vectors: torch.Tensor) -> torch.Tensor:
    """From vectors `[..., N, D]` to the cosines between them, `[..., N, N]`."""
    unit = F.normalize(vectors, dim=-1)
    return unit @ unit.transpose(-2, -1)


@torch.compiler.disable  # inside a compiled function `hooks_run` is an error
@torch.no_grad()
def position_maps(
        model: nn.Module,
        images: torch.Tensor,
        layers: Optional[Sequence[int]] = None,
        **kwargs,
) -> PositionMaps:
    """Run a model on images, and return the logits of each attention layer in two parts, from content and position.

    Works for our models with any encoding, and for models of timm of these families: ViT (DeiT, DINOv2, CLIP),
    NaFlexVit, EVA (DINOv3, ViTs with RoPE) and ViTs with relative position.

    Args:
        model: The model, in eval mode.
        images: `[B, C, height, width]`, normalized, as the model gets them.
        layers: Indices of layers, from 0; negative ones count from the last. A layer that is named twice counts once.
            Default: all.
        kwargs: Further arguments of the model, such as `object_index`.

    Raises:
        ValueError: If the model is of another kind, in training mode or has no such layer, `layers` is not a list,
            `images` no tensor, or a mask is given, which maps do not show.
    """
    if not torch.is_tensor(images):
        raise ValueError(
            f'position_maps takes images [B, C, height, width] in a tensor, got {type(images).__name__}.')
    if not isinstance(layers, (list, tuple, range, type(None))):
        raise ValueError(f'layers must be a list of indices, such as [0], got {layers!r}.')
    if kwargs.get('attn_mask') is not None or kwargs.get('is_causal'):
        raise ValueError('position_maps shows attention without a mask. Leave attn_mask and is_causal out.')
    model = unwrapped(model)
    if any(module.training for module in model.modules()):
        raise ValueError('position_maps needs a model without dropout: call model.eval() first.')
    blocks = getattr(model, 'blocks', None)
    attentions = [getattr(block, 'attn', None) for block in blocks] if blocks is not None else []
    if not attentions or not all(isinstance(attn, KNOWN) for attn in attentions):
        kinds = {f'{type(attn).__module__}.{type(attn).__name__}' for attn in attentions if attn is not None}
        raise ValueError(
            f'{type(model).__name__} has {", ".join(sorted(kinds)) or "no attention"} in its blocks, which '
            'position_maps cannot read. Use one of ours, or a ViT, EVA or ViT with relative position of timm.')
    chosen = range(len(attentions)) if layers is None else [_index(layer, len(attentions)) for layer in layers]
    chosen = list(dict.fromkeys(chosen))

    ours = isinstance(model, PosEncModel)
    watched = [watched_module(attentions[i]) for i in chosen] + ([model.encodings] if ours else [])
    with record_calls(watched) as calls:
        model(images, **kwargs)

    found = []
    for i in chosen:
        args, arguments = calls[watched_module(attentions[i])]
        content, position = logits_of(attentions[i], args, arguments)
        terms = args[4].layer_terms if ours else None  # LayerEncodings is called with q, k, v, x and position
        own = None if terms is None else terms[i][..., args[4].grid.num_prefix_tokens:, :]
        found.append(LayerMaps(i, content, position, (content + position).softmax(dim=-1), own))
    if ours:
        (x, grid, given), _ = calls[model.encodings]
        terms = [*model.encodings.terms(x, grid, given), *model.base_terms(x, grid)]
        vectors = sum(terms)[..., grid.num_prefix_tokens:, :] if terms else None
    else:
        grid = _grid(model, images)
        vectors = _table(model, grid)
    if vectors is not None and vectors.ndim == 3 and vectors.shape[0] == 1:
        vectors = vectors[0]
    return PositionMaps(grid, found, vectors)


def layers_that_matter(model: nn.Module) -> range:
    """Layers whose attention between patches affects the class: not the last if the class token is pooled."""
    return range(len(getattr(model, 'blocks', ())) - (getattr(model, 'global_pool', None) == 'token'))


@contextmanager
def record_calls(modules: Sequence[nn.Module]) -> Iterator[Dict[nn.Module, Tuple[tuple, Dict[str, Any]]]]:
    """Within this context, record the positional and keyword arguments that modules are called with, compiled or not.

    Args:
        modules: The modules. If one is called several times, its last call is kept.

    Yields:
        The arguments of each module, once it has been called.
    """
    calls = {}

    def note(module, args, kwargs):
        calls[module] = args, kwargs

    with hooks_run(), ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield calls


_lock, _inside, _stance = threading.Lock(), [], ExitStack()


@contextmanager
def hooks_run() -> Iterator[None]:
    """A context in which compiled models run uncompiled. Otherwise hooks that were registered later would not run.

    It holds for all threads, until the last one leaves it.
    """
    with _lock:
        if not _inside:
            _stance.enter_context(torch.compiler.set_stance('force_eager'))
        _inside.append(True)
    try:
        yield
    finally:
        with _lock:
            _inside.pop()
            if not _inside:
                _stance.close()


def _index(layer: int, depth: int) -> int:
    if not -depth <= layer < depth:
        raise ValueError(f'There is no layer {layer}: the model has {depth}, 0 to {depth - 1}.')
    return layer % depth


def _grid(model: nn.Module, images: torch.Tensor) -> Grid:
    size = tuple(images.shape[-2:])
    height, width = (side // patch for side, patch in zip(size, patch_ratio(model)))
    if getattr(getattr(model, 'patch_embed', None), 'dynamic_img_pad', False):
        height, width = model.patch_embed.dynamic_feat_size(size)
    return Grid(height, width, getattr(model, 'num_prefix_tokens', 0))


def _table(model: nn.Module, grid: Grid) -> Optional[torch.Tensor]:
    """What a model of timm adds to its patches from a table, `[1, H*W, D]`. None if it has none."""
    if isinstance(model, NaFlexVit):
        embeds = model.embeds
        if embeds.pos_embed_type == 'none':
            return None
        table = embeds.proj.weight.new_zeros(1, grid.num_patches, model.embed_dim)  # timm adds to what it is given
        getattr(embeds, f'_apply_{embeds.pos_embed_type}_pos_embed')(table, grid_size=grid.size)
        return table
    table = getattr(model, 'pos_embed', None)
    if table is None:
        return None
    if getattr(model, 'dynamic_img_size', False):
        prefix = table.shape[-2] - model.patch_embed.num_patches  # not all have rows for prefix tokens
        table = resample_abs_pos_embed(table, grid.size, model.patch_embed.grid_size, num_prefix_tokens=prefix)
    return table[..., -grid.num_patches:, :].clone()  # else it would follow the training


def watched_module(attn: nn.Module) -> nn.Module:
    """The module whose arguments determine the logits of an attention layer."""
    return attn.encodings if isinstance(attn, HostsEncodings) else attn


def logits_of(attn: nn.Module, args: tuple, kwargs: dict) -> Tuple[torch.Tensor, torch.Tensor]:
    """The logits of an attention layer in two parts.

    Args:
        attn: The layer, of one of the types in `KNOWN`.
        args: Positional arguments that `watched_module(attn)` was called with.
        kwargs: Keyword arguments that it was called with.

    Returns:
        Logits from content, and what position adds to them, both `[B, h, N, N]`.
    """
    if isinstance(attn, HostsEncodings):
        q, k, _, x, position = args
        return attn.encodings.logits(q, k, x, position, kwargs['scale'])
    x, *rest = args
    batch, num_tokens, _ = x.shape
    if getattr(attn, 'qkv', None) is not None:
        qkv = attn.qkv(x)
        if getattr(attn, 'q_bias', None) is not None:
            qkv = qkv + torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
        q, k, _ = qkv.reshape(batch, num_tokens, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    else:
        heads = attn.num_heads, getattr(attn, 'num_kv_heads', attn.num_heads)
        q, k = (
            project(x).reshape(batch, num_tokens, num_heads, -1).transpose(1, 2)
            for project, num_heads in zip((attn.q_proj, attn.k_proj), heads))
    q, k = attn.q_norm(q), attn.k_norm(k)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    content = attn.scale * q @ k.transpose(-2, -1)
    if isinstance(attn, RelPosAttention):
        shared = kwargs.get('shared_rel_pos', rest[0] if rest else None)
        bias = shared if attn.rel_pos is None else attn.rel_pos.get_bias()
        return content, torch.zeros_like(content) if bias is None else bias.expand_as(content)
    rope = kwargs.get('rope', rest[0] if rest else None) if isinstance(attn, (AttentionRope, EvaAttention)) else None
    if rope is None:
        return content, torch.zeros_like(content)
    p, half = attn.num_prefix_tokens, getattr(attn, 'rotate_half', False)
    q, k = (torch.cat([t[:, :, :p], apply_rot_embed_cat(t[:, :, p:], rope, half=half)], dim=2) for t in (q, k))
    return content, attn.scale * q @ k.transpose(-2, -1) - content


def attention_distance(attention: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Mean attention distance of each head, in patches (Dosovitskiy et al., 'An Image is Worth 16x16 Words', 2021).

    For each patch, the mean of its Euclidean distances to all patches, weighted by its attention to them, without
    prefix tokens. Then the mean over all patches and images.

    Args:
        attention: Probabilities, `[B, h, N, N]`. In half precision they are used in float32.
        grid: The grid, with the `keep_indices` of the patches if some were dropped or their order was changed.

    Returns:
        `[h]`.
    """
    p = grid.num_prefix_tokens
    attention = attention[..., p:, p:].to(torch.promote_types(attention.dtype, torch.float32))
    place = grid.keep_rows(grid.coordinates(attention.device, attention.dtype))  # [N-P, 2] or [B, 1, N-P, 2]
    weighted = (attention * torch.cdist(place, place)).sum(-1) / attention.sum(-1)
    return weighted.mean(dim=(0, 2))
