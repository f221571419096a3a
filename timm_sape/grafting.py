"""Grafting: add an encoding to a pretrained timm ViT, so that the outputs do not change until it has learned something.

    model = timm_sape.graft('vit_small_patch16_224.augreg_in21k_ft_in1k', 'sape2_k', pretrained=True)

The ViT keeps its weights and its own position encoding (timm's table is `ape`). A grafted encoding is `auto_<name>`,
with a learned gate that starts at 0, so the model above is `ape+auto_sape2_k`. If an encoding contributes zero until it
is trained, its gate starts at 1, because with two zeros in a row neither gets a gradient.

Four kinds of models can be grafted:

    timm's VisionTransformer, and its distilled one      any `vit_*`, `deit*`, ... of these classes, as it is
    timm's NaFlexVit, and Eva (DINOv3, EVA-02, ...)      by timm's `use_naflex=True`; they keep their own position
    timm's rotary ViTs, `vit_*_patch16_rope*_224`        converted: their rotation becomes `rope2d` or `rope2d_mixed`
    the relative-position ViTs                           converted: their MLP becomes `cpb` with mode='cr'

The architecture of the result is `vit_graft`, which builds the base by timm's own entrypoint. So what timm saves of a
graft (in a folder, or in a repository on the Hub) is enough to build it again.
"""
import difflib
import inspect
import re
import sys
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Type, Union

import timm
import torch
import torch.nn as nn
from timm.layers import (
    AttentionRope,
    Mlp,
    PatchDropout,
    RelPosMlp,
    RotaryEmbeddingCat,
    RotaryEmbeddingMixed,
    get_device_dtype,
    to_2tuple,
)
from timm.models import (
    PretrainedCfg,
    generate_default_cfgs,
    get_arch_pretrained_cfgs,
    get_model_args,
    get_pretrained_cfg,
    is_model,
    is_model_in_modules,
    model_entrypoint,
    register_model,
    resolve_pretrained_cfg,
    split_model_name_tag,
)
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaBlock
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer
from timm.models.vision_transformer_relpos import ResPostRelPosBlock, VisionTransformerRelPos
from timm.utils import unwrap_model

from . import checkpoints
from .attention import adopt_blocks, unknown_blocks
from .conversion import (
    GridSize,
    convert_to_naflex,
    declared_grid,
    fit_patch_embedding,
    from_timm,
    grid_of_table,
)
from .encodings import ReferenceGridEncoding, encoding_keywords, get_encoding, is_auto, parse_pos_enc
from .encodings.registry import AUTO, plain_keywords
from .entrypoints import build_by_timm
from .host import PosEncModel
from .model_args import check_logit_scaling, check_ref_grid_size
from .naflexvit_pos_enc import NaFlexVitPosEnc
from .vit_pos_enc import VisionTransformerPosEnc

__all__ = ['VisionTransformerDistilledPosEnc', 'graft']  # register_model adds each entrypoint to this


class VisionTransformerDistilledPosEnc(VisionTransformerPosEnc, VisionTransformerDistilled):
    """timm's distilled DeiT with any set of position encodings. Only grafting creates it."""

    def prefix_tokens(self) -> List[nn.Parameter]:
        return [self.cls_token, self.dist_token]


OURS: Dict[Type[nn.Module], Type[nn.Module]] = {
    NaFlexVit: NaFlexVitPosEnc,
    VisionTransformer: VisionTransformerPosEnc,
    VisionTransformerDistilled: VisionTransformerDistilledPosEnc,
}
# Those of timm's Eva class that become a plain ViT, unless use_naflex=True is given.
NAVER = re.compile(r'vit_\w+_patch16_rope(_mixed)?(_ape)?_224')

Parts = Dict[str, Dict[str, Any]]  # keywords of each encoding by its name
DYNAMIC = ('dynamic_img_size', 'dynamic_img_pad')
OF_THE_CALL = ('img_size', 'patch_size', 'device')  # these need not be those of the weights
OUR_MODULES = ('vit_pos_enc', 'naflexvit_pos_enc', 'grafting')
SOURCE = ('source', 'url', 'file', 'state_dict', 'hf_hub_id', 'hf_hub_filename')  # keys of a config that locate weights


def graft(
        model: Union[str, nn.Module],
        pos_enc: str,
        pos_enc_kwargs: Optional[Mapping[str, Mapping[str, Any]]] = None,
        **kwargs,
) -> PosEncModel:
    """Add position encodings to a timm ViT without changing what it computes.

    Args:
        model: A model that `timm.create_model` made, which stays unchanged, or the name of one, with or without a tag.
            Names with `hf-hub:` and `local-dir:` work too.
        pos_enc: Names of encodings joined by `+`. Each gets a gate, whose initial value keeps the model's outputs:
            `'rope2d'` gives `'ape+auto_rope2d'` with `init=0`. `'nope'` adds nothing and only converts the model.
        pos_enc_kwargs: Keywords of each part, keyed by its name with or without `auto_`. An `init` given here replaces
            the neutral one.
        kwargs: `logit_scaling` and `ref_grid_size` are for the grafted model. If `model` is a name, the others are for
            `timm.create_model`: `pretrained=True`, `num_classes`, `img_size`, ... By default `ref_grid_size` is the
            grid of the model's images. But if weights are loaded by name, and `logit_scaling` or a keyword gives a
            rule for other sizes to what the base has, it is the grid of those weights.

    Returns:
        A new model on the same device, in the same dtype and mode, with copies of the weights: a
        `VisionTransformerPosEnc`, or a `NaFlexVitPosEnc` of a base of timm's Eva class, of NaFlexVit, or if
        `use_naflex=True` is among the keywords.

    Raises:
        ValueError: If the model cannot be grafted. If its parameters or layers were changed since timm made it, or it
            has hooks or patched methods. (Only hooks of modules are looked for. Others, and buffers that are not saved,
            are not copied.) If the model has all that is to be added. If an encoding has no neutral form (`lookhere`,
            `cape`, `pemix`), or cannot be combined with the model's own. If a rule needs the grid that the weights were
            trained on, and nothing says what it is.
    """
    ours = {key: kwargs.pop(key) for key in ('logit_scaling', 'ref_grid_size') if key in kwargs}
    if not pos_enc or not isinstance(pos_enc, str):
        raise ValueError(f"pos_enc must name encodings to add, e.g. 'sape2_k', got {pos_enc!r}.")
    name = model if isinstance(model, str) else None
    if name is not None:
        if kwargs.get('features_only'):
            raise ValueError(
                'graft returns a whole model. For features: ' + (
                    'save the graft by timm_sape.hub.save, then '
                    "timm.create_model('local-dir:...', pretrained=True, features_only=True)." if ':' in name else
                    f"timm.create_model('vit_graft', features_only=True, base={name!r}, pos_enc={pos_enc!r}, ...)."))
        model = _build_base(name, partial(timm.create_model, name), **kwargs)
    elif kwargs:
        raise ValueError(
            f'{", ".join(sorted(kwargs))}: arguments of timm.create_model go with the name of a model, but this is a '
            'model. Leave them out.')
    model = unwrap_model(model)
    if isinstance(model, PosEncModel):
        raise ValueError(_already_ours(model, pos_enc, pos_enc_kwargs))
    _check_kind(model)
    cfg = getattr(model, 'pretrained_cfg', None) or {}
    if not is_model(cfg.get('architecture') or ''):
        raise ValueError(
            f'This {type(model).__name__} was not made by timm.create_model, so it has no name by which a saved graft '
            'could be built again. Create it with timm.create_model and load its weights into that.')

    args = {**getattr(model, '_model_args', {}), **get_model_args(model)}
    if isinstance(model, NaFlexVit) and not is_model_in_modules(cfg['architecture'], ('naflexvit',)):
        args['use_naflex'] = True
    grafted = timm.create_model(
        'vit_graft',
        pretrained_cfg=dict(cfg, architecture='vit_graft'),
        **{**args, **get_device_dtype(model), 'base': cfg['architecture'], 'pos_enc': pos_enc},
        pos_enc_kwargs=pos_enc_kwargs,
        **ours,
    )
    adds = any(map(is_auto, parse_pos_enc(grafted.pos_enc)))
    if not (adds or pos_enc_kwargs or ours or 'nope' in parse_pos_enc(pos_enc)):
        raise ValueError(
            f'{cfg["architecture"]!r} has {pos_enc!r} already, so nothing would be added. Name other encodings, or '
            "'nope' to convert the model without adding any.")
    is_read = kwargs.get('pretrained') and not kwargs.get('checkpoint_path')
    needs_grid = ours.get('ref_grid_size') is None and _needs_trained_grid(grafted)
    is_file = is_read and ':' not in name and {'pretrained_cfg', 'pretrained_cfg_overlay'} & kwargs.keys()
    if is_file and (needs_grid or args.get('use_naflex')):
        # a file of the caller shows what it was trained on, and timm's NaFlexVit may lose a part of it
        if 'use_naflex' in args:
            kwargs['use_naflex'] = args['use_naflex']
        return timm.create_model(
            'vit_graft', base=name, pos_enc=pos_enc, pos_enc_kwargs=pos_enc_kwargs, **ours, **kwargs)
    was_naflex = is_read and ':' in name and get_model_args(model).get('use_naflex') and not kwargs.get('use_naflex')
    if is_read and isinstance(model, NaFlexVit) and not was_naflex:
        _refuse_lost_rows(name, model, partial(timm.create_model, name), **kwargs)
    if needs_grid:
        others = {key: value for key, value in kwargs.items() if key not in OF_THE_CALL}
        trained = _on_meta(partial(_build_base, name, partial(timm.create_model, name)), **others) if is_read else model
        _set_trained_grid(grafted, _image_grid(trained))
    weights = _weights_for(grafted, model)
    if is_model_in_modules(cfg['architecture'], ('vision_transformer', 'eva')):  # that take this argument
        args['use_naflex'] = isinstance(model, NaFlexVit)
    report = checkpoints.misfit(weights, grafted.state_dict(), ignore=tuple(_added(grafted))) or _change(
        model, partial(timm.create_model, cfg['architecture'], **args))
    if report:
        raise ValueError(
            f'The model differs from what timm.create_model({cfg["architecture"]!r}) makes with the same arguments: '
            f'{report}. Graft it first, then change it.')
    grafted.load_state_dict(weights, strict=False)
    _copy_settings(grafted, model)
    return grafted


def _copy_settings(grafted: PosEncModel, model: nn.Module) -> None:
    """Copy from a base to its graft what is not in a state dict: which parameters are trained, modes, patch dropout."""
    flags = {name: torch.tensor(float(p.requires_grad)).expand(p.shape) for name, p in model.named_parameters()}
    flags = _renamed(flags, grafted)
    for name, p in grafted.named_parameters():
        p.requires_grad_(bool(flags[name].any()) if name in flags else True)
    grafted.set_grad_checkpointing(model.grad_checkpointing)
    grafted.take_patch_drop(getattr(model, 'patch_drop', None))
    if isinstance(model, VisionTransformerDistilled):
        grafted.set_distilled_training(model.distilled_training)
    grafted.train(model.training)
    modules = dict(grafted.named_modules())
    for name, module in model.named_modules():
        if name in modules:
            modules[name].training = module.training


def _build_base(name: str, build: Callable[..., nn.Module], /, **kwargs) -> nn.Module:
    """Build a model of timm.

    Raises:
        ValueError: If timm is told to build it as NaFlexVit, and does not.
    """
    try:
        return _build_with_channels(build, **kwargs)
    except TypeError as e:
        if not kwargs.get('use_naflex'):
            raise
        raise ValueError(f'{name!r} cannot be grafted: timm does not build it as NaFlexVit ({e}).') from e


def _refuse_lost_rows(name: str, model: NaFlexVit, build: Callable[..., nn.Module], /, **kwargs) -> None:
    """
    Raises:
        ValueError: If timm has loaded a plain model's table into a NaFlexVit without the rows of register tokens: it
            adds those of a class token to that token, and those of registers only if there is no class token.
    """
    if model.embeds.cls_token is None or model.embeds.reg_token is None or is_model_in_modules(
            model.pretrained_cfg['architecture'], ('naflexvit',)):
        return
    plain = _on_meta(build, **{**kwargs, 'use_naflex': False})
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
    if not isinstance(_on_meta(build, **kwargs), NaFlexVit):
        return build(**kwargs)
    model = build(**{**kwargs, 'pretrained': False})
    with torch.random.fork_rng(devices=[]):  # a seed has the same effect on all loading paths
        weights = build(**{key: value for key, value in kwargs.items() if key != 'in_chans'}).state_dict()
    weights['embeds.proj.weight'] = fit_patch_embedding(weights['embeds.proj.weight'], model)
    model.load_state_dict(weights)
    return model


def _on_meta(build: Callable[..., nn.Module], /, **kwargs) -> nn.Module:
    """A model without weights, to see what it is. It takes no memory and draws no random numbers."""
    with torch.device('meta'):
        return build(**{key: value for key, value in kwargs.items() if key not in ('pretrained', 'device')})


# Attributes of modules that the graft takes over, or that make no difference to what a model computes.
FREE = ('training', 'grad_checkpointing', 'distilled_training', 'fused_attn')
HOOKS = '_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks'


def _change(model: nn.Module, build: Callable[[], nn.Module]) -> str:
    """What was changed in a model since timm made it, in words, as far as a state dict does not tell. Else empty.

    Args:
        model: The model.
        build: Builds it again.
    """
    (first, start), *_ = model.named_parameters()
    names: Dict[nn.Parameter, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if p in names:
            return f'{names[p]} and {name} are one parameter'
        if p.dtype != start.dtype:
            return f'{name} is {p.dtype}, {first} is {start.dtype}'
        names[p] = name
    modules = dict(_on_meta(build).named_modules())
    for name, module in model.named_modules():
        if any(vars(module)[key] for key in HOOKS):
            return f'{name or "it"} has hooks, which the graft would not have'
        if isinstance(module, PatchDropout) or name == 'patch_drop':
            continue  # the graft takes it over
        if type(module) is not type(modules.get(name)):
            now, then = (
                type(m).__name__ if m is None or any(m.children()) else str(m) for m in (module, modules.get(name)))
            return f'{name or "it"} is {now}, not {then}'
        for key, now in vars(module).items():
            method = getattr(type(module), key, None)
            # accelerate leaves a method set to itself
            if callable(method) and key not in vars(modules[name]) and now != method.__get__(module):
                return f'{name or "it"} has a {key} of its own, which the graft would not have'
        for key, then in vars(modules[name]).items():
            now = getattr(module, key, None)
            if isinstance(then, (bool, int, float, str, tuple)) and key not in FREE and (
                    type(now) is not type(then) or now != then):
                return f'{name or "model"}.{key} is {now!r}, not {then!r}'
    return ''


def _needs_trained_grid(model: PosEncModel) -> bool:
    """Whether what a graft has of its base, its encoding or all logits, depends on the grid that it was trained on."""
    return any(
        isinstance(encoding, ReferenceGridEncoding) and encoding.saved_grid_size() is not None
        for path, encoding in model.position_encodings().items() if not is_auto(path.rpartition('.')[2]))


def _image_grid(model: nn.Module) -> GridSize:
    """(H, W) of the images that a model of timm is for."""
    if not isinstance(model, NaFlexVit):
        return tuple(model.patch_embed.grid_size)
    # its table may have any size
    size = to_2tuple(get_model_args(model).get('img_size') or model.pretrained_cfg['input_size'][-2:])
    return tuple(side // patch for side, patch in zip(size, model.embeds.patch_size))


def _set_trained_grid(model: PosEncModel, grid: GridSize) -> None:
    """Set the grid of what the base has, and of the grafted encodings too: a model has one `ref_grid_size`."""
    with torch.random.fork_rng(devices=[]):  # tables of another size are drawn again
        for encoding in model.position_encodings().values():
            if isinstance(encoding, ReferenceGridEncoding):
                encoding.set_ref_grid_size(grid)


def _already_ours(
        model: PosEncModel,
        pos_enc: str,
        pos_enc_kwargs: Optional[Mapping[str, Mapping[str, Any]]],
) -> str:
    """The message that says why a model of this package is not grafted, and how to add encodings to it instead."""
    cfg = getattr(model, 'pretrained_cfg', {})
    name = cfg.get('architecture', type(model).__name__)
    # the new model would otherwise have the defaults of its name, and see images of another brightness
    seen = {key: cfg[key] for key in ('mean', 'std') if key in cfg}
    own = parse_pos_enc(model.pos_enc, model.pos_enc_kwargs)
    parts = _merge(own, pos_enc, pos_enc_kwargs, model.base_position)
    base = get_model_args(model).get('base')  # which `vit_graft` needs
    base = f'base={base!r}, ' if base else ''
    kwargs = {part: values for part, values in parts.items() if values}
    return (
        f'{name} is already a model of timm_sape, with {model.pos_enc!r}. Create it with all encodings, '
        f'{base}pos_enc={"+".join(parts)!r}, pos_enc_kwargs={kwargs}, '
        f'pretrained_cfg_overlay={seen}, and load its weights with load_state_dict(..., strict=False).')


def _added(model: PosEncModel) -> List[str]:
    """Names of the entries that the grafted encodings have in the state dict."""
    added = [f'encodings.{part}.' for part in model.pos_enc.split('+') if is_auto(part)]
    return [name for name in model.state_dict() if any(part in name for part in added)]


def _weights_for(grafted: PosEncModel, model: nn.Module) -> Dict[str, Any]:
    """The state of a timm model under our names; grids that encodings save, which it has none of, are our own."""
    grids = {name: value for name, value in grafted.state_dict().items() if name.endswith('._extra_state')}
    return {**grids, **_renamed(model.state_dict(), grafted)}


def _renamed(entries: Mapping[str, torch.Tensor], grafted: PosEncModel) -> Mapping[str, torch.Tensor]:
    """Entries of a base under the names of the graft."""
    if isinstance(grafted, NaFlexVitPosEnc):
        return convert_to_naflex(entries, grafted, grafted.grid_size)
    return from_timm(entries, grafted)


def _check_kind(model: nn.Module) -> None:
    """
    Raises:
        ValueError: If the model cannot be grafted, with the reason.
    """
    what = f'{type(model).__name__} cannot be grafted'
    if not isinstance(model, (VisionTransformer, VisionTransformerRelPos, NaFlexVit, Eva)):
        raise ValueError(
            f"{what}: it is none of timm's VisionTransformer, NaFlexVit and Eva, nor a ViT of relative position. "
            "Choose one of these, such as 'vit_small_patch16_224'.")
    if isinstance(model, (VisionTransformer, NaFlexVit)) or isinstance(model, Eva) and not _is_naver(model):
        kinds = unknown_blocks(model.blocks) or [type(model).__name__] * (type(model) not in {*OURS, Eva})
        attn = getattr(model.blocks[0], 'attn', None)
        if kinds or attn is None:
            kinds = kinds or [type(model.blocks[0]).__name__]
            raise ValueError(
                f'{what}: timm_sape does not support {" and ".join(kinds)}. Choose a model with plain blocks, such as '
                "'vit_small_patch16_224'.")
        if attn.num_heads * attn.head_dim != model.embed_dim:
            raise ValueError(
                f'{what}: its {attn.num_heads} heads have {attn.num_heads * attn.head_dim} channels, and its tokens '
                f'{model.embed_dim}. Choose a model where these are equal.')
    elif isinstance(model, VisionTransformerRelPos):
        mlps = [model.shared_rel_pos, *(block.attn.rel_pos for block in model.blocks)]
        if any(mlp is not None and not (isinstance(mlp, RelPosMlp) and mlp.mode == 'cr') for mlp in mlps):
            raise ValueError(
                f"{what}: of timm's relative positions only rel_pos_type='mlp' can be converted (to 'cpb'). Choose a "
                'model that has it.')


def _is_naver(model: Eva) -> bool:
    """Whether it is one of the rotary ViTs that become plain ones."""
    rope, attn, mlp = model.rope, model.blocks[0].attn, model.blocks[0].mlp
    is_axial = type(rope) is RotaryEmbeddingCat and rope.temperature == 100 and rope.ref_feat_shape is None and (
        rope.grid_offset == 0 and not rope.in_pixels)
    is_rotary = (is_axial or type(rope) is RotaryEmbeddingMixed) and rope.grid_indexing == 'xy' and not rope.aug_active
    is_plain = {type(block) for block in model.blocks} == {EvaBlock} and isinstance(attn, AttentionRope) and (
        type(mlp) is Mlp and not attn.rotate_half and attn.qkv is not None and model.reg_token is None) and (
        attn.gate is None and (model.attn_pool is None or model.attn_pool.num_heads == attn.num_heads))
    norms = (model.norm_pre, mlp.norm, attn.norm, attn.q_norm, attn.k_norm) if is_plain else ()
    return is_rotary and is_plain and all(isinstance(norm, nn.Identity) for norm in norms)


def _rebuilt(model: Union[VisionTransformerRelPos, Eva], kwargs: Dict[str, Any]) -> VisionTransformer:
    """timm's VisionTransformer with the sizes of a model of another class.

    Args:
        model: The other model.
        kwargs: The arguments that it was created with. Those that VisionTransformer accepts too are passed on.
    """
    block = model.blocks[0]
    layer_scale = block if isinstance(model, Eva) or isinstance(block, ResPostRelPosBlock) else block.ls1
    args = dict(
        img_size=model.patch_embed.img_size,
        patch_size=model.patch_embed.patch_size,
        in_chans=model.in_chans,
        num_classes=model.num_classes,
        global_pool=model.global_pool,
        embed_dim=model.embed_dim,
        depth=len(model.blocks),
        num_heads=block.attn.num_heads,
        mlp_ratio=block.mlp.fc1.out_features / model.embed_dim,
        qkv_bias=block.attn.qkv.bias is not None,
        qk_norm=not isinstance(block.attn.q_norm, nn.Identity),
        init_values=getattr(layer_scale, 'init_values', None),
        class_token=model.cls_token is not None,
        no_embed_class=getattr(model, 'no_embed_class', False),
        fc_norm=not isinstance(model.fc_norm, nn.Identity),
        pool_include_prefix=getattr(model, 'attn_pool', None) is not None,
        norm_layer=partial(type(block.norm1), eps=block.norm1.eps),
        block_fn=ResPostBlock if isinstance(block, ResPostRelPosBlock) else Block,
        **get_device_dtype(model),
    )
    accepted = inspect.signature(VisionTransformer.__init__).parameters.keys() - args.keys()
    vit = VisionTransformer(**args, **{k: v for k, v in kwargs.items() if k in accepted})
    vit.attn_pool_includes_prefix = vit.pool_include_prefix
    return vit


def _own_encodings(model: nn.Module) -> Parts:
    """The position that a timm model has by itself, as far as it is an encoding of ours."""
    if isinstance(model, NaFlexVit):
        return {}
    own: Parts = {} if getattr(model, 'pos_embed', None) is None else {'ape': {}}
    if isinstance(model, Eva):
        own['rope2d_mixed' if model.rope_mixed else 'rope2d'] = {}
    elif isinstance(model, VisionTransformerRelPos):
        mlp = (model.shared_rel_pos or model.blocks[0].attn.rel_pos).mlp
        own['cpb'] = {'mode': 'cr', 'hidden': mlp.fc1.out_features, 'drop': mlp.drop1.p}
    return own


def _base_position(model: nn.Module) -> str:
    """What a NaFlexVit has by itself and goes on computing by timm's modules, in words."""
    table = {'none': [], 'learned': ['learned table'], 'factorized': ['learned tables of rows and columns']}
    rotation = [] if model.rope is None else [type(model.rope).__name__]
    return ' + '.join([*table[model.embeds.pos_embed_type], *rotation]) or 'none'


def _merge(
        own: Parts,
        pos_enc: str,
        pos_enc_kwargs: Optional[Mapping[str, Mapping[str, Any]]],
        base_position: str,
) -> Parts:
    """The encodings of a grafted model: those of the base, and the requested ones with gates.

    Args:
        own: Encodings of ours that the base has.
        pos_enc: As for `graft`.
        pos_enc_kwargs: As for `graft`.
        base_position: What the base computes by timm's modules, as of `_base_position`.

    Raises:
        ValueError: If a part has no neutral form, contradicts the keywords of the base's own encoding of this name, or
            cannot be combined with those of the base.
    """
    for name in pos_enc.split('+') if isinstance(pos_enc, str) else ():
        plain = name.strip().removeprefix(AUTO)
        if get_encoding(plain).gate_init is None and plain != 'nope':
            raise ValueError(
                f'{plain!r} cannot be grafted: it has no neutral form to start from. Train a model with it from '
                'scratch.')

    def placed(name: str) -> str:
        """The name of a part in the grafted model. It may be given by an alias, with or without `auto_`."""
        name, = parse_pos_enc(name)
        return name if name in own or is_auto(name) else AUTO + name

    parts = {name: dict(keywords) for name, keywords in own.items()}
    for name in parse_pos_enc(pos_enc).keys() - {'nope'}:
        part = placed(name)
        if part.removeprefix(AUTO) in own and part not in own:
            raise ValueError(f'{name!r} cannot be grafted: the base already has {name.removeprefix(AUTO)!r}.')
        if part == 'auto_ape':
            if base_position.startswith('learned'):
                raise ValueError(
                    f"'ape' cannot be grafted: the base already has a table of its own ({base_position}), which it "
                    "keeps. Leave 'ape' out.")
            raise ValueError(
                "'ape' cannot be grafted: it is timm's own table, which this base does not have. Choose one with a "
                "table of its own, such as 'ape2d'.")
        parts.setdefault(part, {} if get_encoding(name).gate_init == 1 else {'init': 0})
    seen = set()
    for name, keywords in plain_keywords(pos_enc_kwargs).items():
        part = placed(name)
        if part not in parts:
            raise ValueError(
                f'pos_enc_kwargs has keywords for {name!r}, which is not a part of pos_enc={pos_enc!r}. Leave them '
                'out, or add it to pos_enc.')
        if part in seen:
            raise ValueError(f'pos_enc_kwargs has keywords for {part!r} under two names. Give them once.')
        seen.add(part)
        # The rule for other sizes may be changed: it makes no difference on the grid that the base was trained on.
        meant = {key: value for key, value in keywords.items() if key not in get_encoding(part).rule_keywords}
        if part in own and not meant.items() <= {**encoding_keywords(part), **own[part]}.items():
            raise ValueError(
                f"pos_enc_kwargs: {part!r} is the base's own encoding, with {own[part]}, which cannot be changed. "
                'Leave its keywords out.')
        parts[part].update(keywords)
    return parse_pos_enc('+'.join(parts) or 'nope', parts)


def _adopt(
        model: nn.Module,
        pos_enc: str,
        pos_enc_kwargs: Optional[Mapping[str, Mapping[str, Any]]],
        ref_grid_size: Optional[Tuple[int, int]],
        logit_scaling: str,
        kwargs: Dict[str, Any],
) -> PosEncModel:
    """Make a model that timm has just built ours: its modules stay timm's, and get our classes, as FSDP does it."""
    _check_kind(model)
    own = _own_encodings(model)
    vit = model if isinstance(model, (VisionTransformer, NaFlexVit)) else _rebuilt(model, kwargs)
    base_position = _base_position(vit) if isinstance(vit, NaFlexVit) else ''
    parts = _merge(own, pos_enc, pos_enc_kwargs, base_position)
    vit.__class__ = OURS[type(vit)]
    adopt_blocks(vit.blocks)
    if isinstance(vit, NaFlexVitPosEnc):
        vit.base_position = base_position
        rotations = [name for name in parts if get_encoding(name).rotates()]
        if vit.rope is not None and rotations:
            raise ValueError(
                f'{rotations[0]!r} cannot be grafted: the base rotates q and k by itself ({base_position}). Choose an '
                "encoding that does not rotate, such as 'sape2_k'.")
    vit._set_encodings(
        parts, ref_grid_size, kwargs.get('device'), kwargs.get('dtype'), logit_scaling=logit_scaling)
    if vit is not model:
        weights = _weights_for(vit, model)
        report = checkpoints.misfit(weights, vit.state_dict(), ignore=tuple(_added(vit)))
        if report:
            given = sorted(kwargs.keys() - {
                'img_size', 'patch_size', 'in_chans', 'num_classes', 'device', 'dtype', 'depth', 'embed_dim',
                'num_heads', 'global_pool'})
            raise ValueError(
                f'{type(model).__name__} cannot be converted if created with these arguments: {report}. The '
                f'cause is one of these, leave it out: {", ".join(given)}.')
        vit.load_state_dict(weights, strict=False)
    return vit


@dataclass
class _Builder:
    """Builds one grafted model from its base. timm's `build_model_with_cfg` calls the methods.

    Attributes:
        base: Architecture of the base, without a tag.
        cfg: Its pretrained config, with the caller's overlay applied.
        pos_enc: As for `graft`.
        pos_enc_kwargs: As for `graft`.
        ref_grid_size: (H, W) of the grid that never-resized encodings were trained on. None if the caller gave none.
        logit_scaling: As for `VisionTransformerPosEnc`.
        cache_dir: Where downloads go.
        load_base: Whether the base is built with its own pretrained weights.
        declares_size: Whether the caller has said for which size of images the weights are.
        arguments: Of the base, known when timm calls `build`.
        is_eva: Whether it must compute what timm's Eva class does, known then too.
        strict: `pretrained_strict` of the caller. None if not given.
    """
    base: str
    cfg: PretrainedCfg
    pos_enc: str
    pos_enc_kwargs: Optional[Mapping[str, Mapping[str, Any]]]
    ref_grid_size: Optional[Tuple[int, int]]
    logit_scaling: str
    cache_dir: Optional[str]
    load_base: bool
    declares_size: bool
    arguments: Dict[str, Any] = field(default_factory=dict)
    is_eva: bool = False
    strict: Optional[bool] = None

    def build(self, **arguments) -> PosEncModel:
        """What timm's builder calls for the model."""
        self.arguments = arguments if self.strict is None else {**arguments, 'pretrained_strict': self.strict}
        self.is_eva = is_model_in_modules(self.base, ('eva',)) and not arguments.get('use_naflex')
        eva = None  # with the weights, which timm adapts to other sizes and channels for this class alone
        if self.load_base and self.is_eva and not NAVER.fullmatch(self.base):
            with torch.random.fork_rng(devices=[]):  # a seed has the same effect on all loading paths
                eva = self._build(True, self.cfg, use_naflex=False)
            _check_kind(eva)
        try:
            model = self._build(self.load_base and eva is None, self.cfg)
        except RuntimeError as e:
            of_other_sizes = set(re.findall(r'size mismatch for (\S+):', str(e)))
            if not of_other_sizes or not of_other_sizes <= {'embeds.pos_embed', 'embeds.proj.weight'}:
                raise
            raise ValueError(
                f'timm does not adapt the weights of {self.base!r} to another size of images or patches when it builds '
                'a NaFlexVit of a plain ViT. Leave out img_size and patch_size, or use_naflex. A NaFlexVit takes '
                'images of any size as it is.') from e
        if self.load_base and eva is None and isinstance(model, NaFlexVit):
            _refuse_lost_rows(self.base, model, partial(self._build, False, self.cfg, ('device',)))
        if isinstance(model, Eva) and not _is_naver(model):  # by its arguments it is none, whatever its name says
            _check_kind(model)
            eva = model if self.load_base else None
            self.arguments = {**self.arguments, 'use_naflex': True}
            model = self._build(False, self.cfg)
        model = _adopt(
            model, self.pos_enc, self.pos_enc_kwargs, self.ref_grid_size, self.logit_scaling, arguments)
        if eva is not None:
            model.load_state_dict(_weights_for(model, eva), strict=False)
        if self.load_base and self.ref_grid_size is None and _needs_trained_grid(model):
            _set_trained_grid(model, _image_grid(self._default_base()))
        return model

    def filter(self, state_dict: Dict[str, torch.Tensor], model: PosEncModel) -> Dict[str, torch.Tensor]:
        """What timm's builder calls for the entries of a checkpoint, which is of a graft or of its base."""
        state_dict = checkpoints.unwrap(state_dict)
        is_of_base = 'pos_enc' not in model.pretrained_model_args and not any(
            'encodings.' in name for name in state_dict)
        ref_grid_size = self.ref_grid_size
        if is_of_base and ref_grid_size is None and _needs_trained_grid(model):
            ref_grid_size = self._trained_grid(state_dict, model)
            _set_trained_grid(model, ref_grid_size)
        own = model.state_dict()
        added = {name: own[name] for name in _added(model)}
        # timm's NaFlexVit loses rows of registers in a plain ViT's table
        is_ours_to_convert = isinstance(model, NaFlexVitPosEnc) and {
            'pos_embed', 'cls_token', 'reg_token'} <= state_dict.keys()
        if is_of_base and not is_ours_to_convert:
            # Weights of the base. Its own entrypoint knows their possible formats and how to resample them.
            try:
                with torch.random.fork_rng(devices=[]):  # a seed has the same effect on all loading paths
                    weights = _weights_for(model, self._base_with(state_dict))
                checkpoints.warn_of_lost_head(weights, model)
                return {**weights, **added}
            except (RuntimeError, AttributeError):  # timm's NaFlexVit has the latter for tables that are not square
                pass  # the code below loads it, or raises a better message about what does not fit
        if not added.keys() & state_dict.keys():
            state_dict = {**state_dict, **added}
        return checkpoints.filter_state_dict(state_dict, model, ref_grid_size)

    def _trained_grid(self, state_dict: Mapping[str, torch.Tensor], model: PosEncModel) -> GridSize:
        """The grid that a file of the caller was trained on: what was declared, else that of its table.

        Raises:
            ValueError: If it has no table, and the size of the base is not that of the model.
        """
        kernel = checkpoints.kernel_of(state_dict, model)
        by_size = declared_grid(model, kernel)
        table = state_dict.get('embeds.pos_embed', state_dict.get('pos_embed'))
        if self.declares_size or table is None and by_size == model.grid_size:
            return by_size
        if table is None:
            raise ValueError(
                'The rule for other sizes needs the grid that the weights were trained on, which this file does not '
                'say. Give ref_grid_size=(H, W), in patches, or the size of the images: pretrained_cfg_overlay=dict('
                'file=..., input_size=(3, height, width)).')
        if table.ndim == 4:
            base = self._default_base()
            own = base.embeds.pos_embed if isinstance(base, NaFlexVit) else None
            # the table of some bases, such as RADIO, has another size than their images
            of_another_size = own is not None and tuple(own.shape[1:3]) != _image_grid(base)
            return by_size if of_another_size else tuple(table.shape[1:3])
        tokens = [state_dict[name].shape[1] for name in ('cls_token', 'dist_token', 'reg_token') if name in state_dict]
        return grid_of_table(state_dict, model, {0, sum(tokens)})

    def _base_with(self, state_dict: Dict[str, torch.Tensor]) -> nn.Module:
        """The base with these weights and their numbers of classes and input channels, which timm adapts later."""
        heads, kernels = (
            [state_dict[f'{name}.weight'] for name in checkpoints.module_names(names) if f'{name}.weight' in state_dict]
            for names in (self.cfg.classifier, self.cfg.first_conv))
        channels = kernels[0].shape[1] if kernels and kernels[0].ndim == 4 else self.cfg.input_size[0]
        source = replace(self.cfg, **{
            **dict.fromkeys(SOURCE),
            'state_dict': dict(state_dict),
            # train.py declares -1 classes, and timm would then load whatever fits and leave the rest random
            'num_classes': len(heads[0]) if heads else max(self.cfg.num_classes, 0),
            'label_offset': 0,
            'input_size': (channels, *self.cfg.input_size[1:]),
        })
        return self._build(True, source, left_out=('num_classes', 'in_chans'))

    def _default_base(self) -> nn.Module:
        """The base for the size of images that its config declares, without weights."""
        return _on_meta(partial(self._build, False, self.cfg, OF_THE_CALL))

    def _build(
            self,
            pretrained: bool,
            cfg: PretrainedCfg,
            left_out: Tuple[str, ...] = (),
            **changed,
    ) -> nn.Module:
        arguments = {**{key: value for key, value in self.arguments.items() if key not in left_out}, **changed}
        if arguments.get('in_chans') == cfg.input_size[0]:
            del arguments['in_chans']  # filled in by timm's builder
        if is_model_in_modules(self.base, ('vision_transformer_relpos',)):
            # what it is converted to takes images of any size, but its own class does not
            arguments = {key: value for key, value in arguments.items() if key not in DYNAMIC}
        # set in any case: timm's own default is that of an environment variable
        if is_model_in_modules(self.base, ('vision_transformer',)):
            arguments.setdefault('use_naflex', False)
        if is_model_in_modules(self.base, ('eva',)):
            arguments.setdefault('use_naflex', not NAVER.fullmatch(self.base))
            if 'fc_norm' in arguments and not arguments.get('use_naflex'):  # recorded by what it is converted to
                arguments['use_fc_norm'] = arguments.pop('fc_norm')
        model = _build_base(
            self.base,
            model_entrypoint(self.base),
            pretrained=pretrained,
            pretrained_cfg=replace(cfg, architecture=self.base),
            cache_dir=self.cache_dir,
            **arguments,
        )
        if self.is_eva and isinstance(model, NaFlexVit) and model.attn_pool is not None:
            # as in Eva; NaFlexVit's attention pool would leave the class token out
            model.pool_include_prefix = model.attn_pool_includes_prefix = True
        return model


def _known_base(base: Any) -> str:
    """The architecture of a base, without its tag.

    Raises:
        ValueError: If timm has no such model.
    """
    name, _ = split_model_name_tag(base) if isinstance(base, str) else ('', '')
    if is_model(name) and not is_model_in_modules(name, OUR_MODULES):
        if get_pretrained_cfg(name) is None:
            raise ValueError(
                f'base={base!r} is a name that has no config in timm, such as a deprecated one. Give the current name, '
                f'with its tag: timm.create_model({base!r}) prints it in a warning.')
        return name
    close = difflib.get_close_matches(name, [n for n in timm.list_models() if not is_model_in_modules(n, OUR_MODULES)])
    hint = f'Did you mean {" or ".join(map(repr, close))}?' if close else "See timm.list_models('*vit*')."
    if ':' in name:
        hint = 'It must be an architecture; timm_sape.graft takes saved models.'
    raise ValueError(f'base={base!r} is not a model of timm. {hint}')


def _create(
        variant: str,
        base: str,
        pos_enc: str,
        pos_enc_kwargs: Optional[Mapping[str, Mapping[str, Any]]] = None,
        pretrained: bool = False,
        pretrained_cfg: Optional[Union[str, Dict[str, Any], PretrainedCfg]] = None,
        pretrained_cfg_overlay: Optional[Dict[str, Any]] = None,
        cache_dir: Optional[str] = None,
        ref_grid_size: Optional[Tuple[int, int]] = None,
        logit_scaling: str = 'constant',
        base_position: Optional[str] = None,
        **kwargs,
) -> PosEncModel:
    """Build a grafted model by timm's builder.

    By default the base's own entrypoint loads weights from the base's own source. If the caller names another source (a
    saved model, an overlay), they come from there and may be those of a graft or of its base.
    """
    name = _known_base(base)
    check_ref_grid_size(ref_grid_size)
    check_logit_scaling(logit_scaling)
    if variant == 'vit_graft' and isinstance(pretrained_cfg, str):  # a tag of the base
        base, pretrained_cfg = f'{name}.{pretrained_cfg}', None
    cfg = resolve_pretrained_cfg(variant, pretrained_cfg)
    if variant != 'vit_graft' and f'{name}.{cfg.tag}' in get_arch_pretrained_cfgs(name):
        base = f'{name}.{cfg.tag}'  # our entrypoints have the tags of their bases
    base_cfg = get_pretrained_cfg(base) or PretrainedCfg()
    if variant == 'vit_graft' and cfg.classifier is None and not kwargs.get('pretrained_model_args'):
        # the empty config of this name, with what the caller has added
        empty = PretrainedCfg()
        entries = {entry.name: getattr(cfg, entry.name) for entry in fields(cfg)}
        added = {name: value for name, value in entries.items() if value != getattr(empty, name)}
        cfg = resolve_pretrained_cfg(variant, base_cfg, added)
    cfg = resolve_pretrained_cfg(variant, replace(cfg, architecture=variant), pretrained_cfg_overlay)
    is_own_source = any(getattr(cfg, key) != getattr(base_cfg, key) for key in SOURCE)
    # others have the size of timm's weights, or that of its dataclass, by default
    declares_size = 'input_size' in (pretrained_cfg_overlay or {}) or cfg.input_size not in (
        base_cfg.input_size, PretrainedCfg().input_size)

    if pretrained:
        checkpoints.refuse_other_heads(
            variant, kwargs, lambda: _on_meta(model_entrypoint(name)).blocks[0].attn.num_heads)
    saved = kwargs.get('pretrained_model_args') or {}
    if saved.get('pos_enc') != pos_enc and saved.get('pos_enc_kwargs') and pos_enc_kwargs == saved['pos_enc_kwargs']:
        # timm passes the saved keywords on even if the caller gave another pos_enc; here it may be spelled otherwise
        given, parts = parse_pos_enc(pos_enc).keys() - {'nope'}, parse_pos_enc(saved['pos_enc']).keys()
        given |= {part for part in parts if not is_auto(part)}  # which the base has
        if {part.removeprefix(AUTO) for part in given} != {part.removeprefix(AUTO) for part in parts}:
            pos_enc_kwargs = None
    builder = _Builder(
        name, cfg, pos_enc, pos_enc_kwargs, ref_grid_size, logit_scaling, cache_dir,
        load_base=pretrained and not is_own_source, declares_size=declares_size,
        strict=kwargs.get('pretrained_strict'))

    def build(**arguments) -> PosEncModel:
        model = builder.build(**arguments)
        if base_position not in (None, getattr(model, 'base_position', None)):
            raise ValueError(
                f'The graft was saved with a base whose own position is {base_position!r}. This version of timm builds '
                f'{name!r} with {getattr(model, "base_position", "another one")!r}, so it would be another function.')
        checkpoints.refuse_other_encoding(variant, {
            'pretrained_model_args': saved, 'pos_enc': model.pos_enc, 'pos_enc_kwargs': model.pos_enc_kwargs})
        return model

    return build_by_timm(
        build, variant, pretrained and is_own_source, builder.filter, pretrained_cfg=cfg, cache_dir=cache_dir, **kwargs)


# Entrypoints vit_{size}_{encoding}_graft, with the tags of the plain ViTs that they are grafted onto.
BASES = {
    'vit_tiny': 'vit_tiny_patch16_224',
    'vit_small': 'vit_small_patch16_224',
    'vit_base': 'vit_base_patch16_224',
    'vit_large': 'vit_large_patch16_224',
    'test_vit': 'test_vit',
}
ENCODINGS = (
    'cope', 'irpe_k', 'rope2d', 'rope2d_mixed', 'rpb', 'sape2', 'sape2_k', 'sape2_q', 'sape2_qk', 'sape2sq_k', 'shaw')


def _cfgs(name: str, base: str) -> Dict[str, Dict[str, Any]]:
    """The base's configs under our name. Their `hf_hub_id` is the full one of the base."""
    cfgs = {key: cfg.to_dict() for key, cfg in get_arch_pretrained_cfgs(base).items()}
    return {
        f'{name}.{cfg["tag"]}': {key: value for key, value in cfg.items() if key not in ('architecture', 'tag')}
        for cfg in cfgs.values()}


def _names() -> Dict[str, Tuple[str, str]]:
    return {f'{size}_{encoding}_graft': (base, encoding) for size, base in BASES.items() for encoding in ENCODINGS}


default_cfgs = generate_default_cfgs({
    'vit_graft': {},  # has the config of its base, known only when a model is created
    **{key: cfg for name, (base, _) in _names().items() for key, cfg in _cfgs(name, base).items()},
})


@register_model
def vit_graft(
        pretrained: bool = False,
        base: str = '',
        pos_enc: str = '',
        pos_enc_kwargs: Optional[Mapping[str, Mapping[str, Any]]] = None,
        **kwargs,
) -> PosEncModel:
    """A timm ViT with further position encodings behind gates; see `graft`.

    Args:
        pretrained: Load the weights of the base, or of a saved graft if one is loaded. `pretrained_cfg_overlay` may
            name a source of either.
        base: Name of a timm model, with or without a tag, e.g. `'vit_small_patch14_reg4_dinov2.lvd142m'`.
        pos_enc: As for `graft`, but it may also name only what the base has: saved models that were just converted do.
        pos_enc_kwargs: As for `graft`.
        kwargs: For the base's entrypoint, and any other argument of `timm.create_model`.

    Raises:
        ValueError: As `graft`.
    """
    if not base or not pos_enc:
        raise ValueError(
            "vit_graft needs a base and encodings to add to it: timm.create_model('vit_graft', "
            "base='vit_small_patch16_224', pos_enc='sape2_k'); for scripts --model-kwargs base=... pos_enc=...")
    return _create('vit_graft', base, pos_enc, pos_enc_kwargs, pretrained=pretrained, **kwargs)


def _make_entrypoint(name: str, base: str, encoding: str) -> Callable[..., PosEncModel]:
    def entrypoint(pretrained: bool = False, **kwargs) -> PosEncModel:
        if 'base' in kwargs:
            raise ValueError(f'{name} is grafted onto {base}. For another base use vit_graft.')
        return _create(name, base, **{'pos_enc': encoding, **kwargs}, pretrained=pretrained)

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__doc__ = (
        f"timm's `{base}` with {encoding!r} grafted onto it, gate included, and the pretrained tags of that model."
        '\n\nArguments are those of `vit_graft` except `base`.')
    return entrypoint


for _name, (_base, _encoding) in _names().items():
    setattr(sys.modules[__name__], _name, register_model(_make_entrypoint(_name, _base, _encoding)))
