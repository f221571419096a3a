"""Build models of timm, and restore or refuse what timm loses on the way."""
from typing import Callable

import torch
import torch.nn as nn
from timm.models import is_model_in_modules
from timm.models.naflexvit import NaFlexVit

from ..conversion import fit_patch_embedding

OF_THE_CALL = ('img_size', 'patch_size', 'device')  # these need not be those of the weights


def build_base(name: str, build: Callable[..., nn.Module], /, **kwargs) -> nn.Module:
    """Build a model of timm.

    Raises:
        ValueError: If timm is told to build it as NaFlexVit, and does not.
    """
    try:
        return _build_with_channels(build, **kwargs)
    except TypeError as e:
        if not kwargs.get('use_naflex'):
            raise
        raise ValueError(
            f'{name!r} cannot be grafted: timm does not build it as NaFlexVit ({e}). If this is about an argument of '
            'yours, correct it; otherwise choose another base, or leave use_naflex out if you gave it.') from e


def refuse_lost_rows(name: str, model: NaFlexVit, build: Callable[..., nn.Module], /, **kwargs) -> None:
    """
    Raises:
        ValueError: If timm has loaded a plain model's table into a NaFlexVit without the rows of register tokens: it
            adds those of a class token to that token, and those of registers only if there is no class token.
    """
    if model.embeds.cls_token is None or model.embeds.reg_token is None or is_model_in_modules(
            model.pretrained_cfg['architecture'], ('naflexvit',)):
        return
    plain = on_meta(build, **{**kwargs, 'use_naflex': False})
    if plain.pos_embed is not None and not plain.no_embed_class:
        raise ValueError(
            f'{name!r} has rows for register tokens in its table, which timm loses when it builds it as NaFlexVit. '
            "Leave use_naflex out, or create 'vit_graft' with use_naflex=True and the file in pretrained_cfg_overlay.")


def _build_with_channels(build: Callable[..., nn.Module], /, **kwargs) -> nn.Module:
    """Build a model of timm, with its pretrained weights for another number of channels too if it is a NaFlexVit.

    There timm leaves the patch embedding random.
    """
    if not kwargs.get('pretrained') or kwargs.get('in_chans') is None or kwargs.get('checkpoint_path'):
        return build(**kwargs)
    if not isinstance(on_meta(build, **kwargs), NaFlexVit):
        return build(**kwargs)
    model = build(**{**kwargs, 'pretrained': False})
    with torch.random.fork_rng(devices=[]):  # a seed has the same effect on all loading paths
        weights = build(**{key: value for key, value in kwargs.items() if key != 'in_chans'}).state_dict()
    weights['embeds.proj.weight'] = fit_patch_embedding(weights['embeds.proj.weight'], model)
    model.load_state_dict(weights)
    return model


def on_meta(build: Callable[..., nn.Module], /, **kwargs) -> nn.Module:
    """A model without weights, to see what it is. It takes no memory and draws no random numbers."""
    with torch.device('meta'):
        return build(**{key: value for key, value in kwargs.items() if key not in ('pretrained', 'device')})
