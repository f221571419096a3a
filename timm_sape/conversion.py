"""Conversion of checkpoints of timm's rotary ViTs and of its ViTs with relative position to our names."""
from typing import Dict, Mapping

import torch
import torch.nn as nn
import torch.nn.functional as F

from . import ops

__all__ = ['from_timm', 'num_prefix_rows']


def num_prefix_rows(model: nn.Module) -> int:
    """How many rows of `pos_embed` belong to prefix tokens."""
    return 0 if model.no_embed_class else model.num_prefix_tokens


def from_timm(state_dict: Mapping[str, torch.Tensor], model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Rename the entries of timm's rotary and relative-position ViTs. Other checkpoints are returned unchanged.

    Args:
        state_dict: The checkpoint.
        model: A `VisionTransformerPosEnc`. The checkpoint is converted only if the model has the matching encoding,
            `rope2d`, `rope2d_mixed` or `cpb`.
    """
    parts = model.pos_enc.split('+')
    # timm's other rotary models have another base and order of axes. All of them have register tokens.
    is_naver = 'blocks.0.gamma_1' in state_dict and 'cls_token' in state_dict and 'reg_token' not in state_dict
    if is_naver and {'rope2d', 'rope2d_mixed'} & set(parts):
        return _from_naver(state_dict, model)
    if 'cpb' in parts:
        return _from_relpos(state_dict, model)
    return state_dict


def _from_relpos(state_dict: Mapping[str, torch.Tensor], model: nn.Module) -> Dict[str, torch.Tensor]:
    """From timm's `vit_relpos_*`, and `vit_srelpos_*`, whose layers share one MLP, to `cpb` with `mode='cr'`."""
    out = {}
    for key, value in state_dict.items():
        shared = key.removeprefix('shared_rel_pos.')
        if shared != key:
            out.update({f'blocks.{i}.attn.encodings.cpb.{shared}': value for i in range(len(model.blocks))})
        else:
            out[key.replace('.attn.rel_pos.mlp.', '.attn.encodings.cpb.mlp.')] = value
    return out


def _from_naver(state_dict: Mapping[str, torch.Tensor], model: nn.Module) -> Dict[str, torch.Tensor]:
    """From timm's `vit_*_patch16_rope*_224`, which are of its Eva class, to `rope2d` and `rope2d_mixed`.

    If our model has no layer scale, theirs is multiplied into the projections before it. Their mixed frequencies are
    one tensor for all layers, `[2, L, h, d/2]`, and are split. Their `pos_embed` has no rows for prefix tokens, so
    zeros are put in their place.
    """
    out = {}
    for key, value in state_dict.items():
        if key == 'rope.freqs':
            for i in range(value.shape[1]):
                out[f'blocks.{i}.attn.encodings.rope2d_mixed.freqs'] = value[:, i]
        elif key == 'pos_embed' and model.pos_embed is not None:
            out[key] = F.pad(value, (0, 0, num_prefix_rows(model), 0))
        else:
            out[key] = value
    for i in range(len(model.blocks)):
        for n, layer in ((1, 'attn.proj'), (2, 'mlp.fc2')):
            gamma = out.pop(f'blocks.{i}.gamma_{n}', None)
            if gamma is None:
                continue
            if not isinstance(getattr(model.blocks[i], f'ls{n}'), nn.Identity):
                out[f'blocks.{i}.ls{n}.gamma'] = gamma
                continue
            for key in (f'blocks.{i}.{layer}.weight', f'blocks.{i}.{layer}.bias'):
                value, gain = ops.upcast(out[key], gamma)
                out[key] = value * gain.view(-1, *(1,) * (value.ndim - 1))
    return out
