"""`graft`: of a model in memory, or of one that timm loads by name."""
from functools import partial
from typing import Any, Callable, Dict, Mapping, Optional, Union

import timm
import torch
import torch.nn as nn
from timm.layers import PatchDropout, PatchDropoutWithIndices, get_device_dtype
from timm.models import get_model_args, is_model, is_model_in_modules
from timm.models.deit import VisionTransformerDistilled
from timm.models.naflexvit import NaFlexVit

from .. import checkpoints
from ..encodings import is_auto, parse_pos_enc
from ..host import PosEncModel
from ..wrappers import unwrapped
from .adopt import added_entries, merge_encodings, needs_trained_grid, set_trained_grid, under_our_names, weights_for
from .bases import check_can_be_grafted, image_grid
from .build_base import OF_THE_CALL, build_base, on_meta, refuse_lost_rows


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
            `timm.create_model`: `pretrained=True`, `num_classes`, `img_size`, ... `ref_grid_size` is the trained grid,
            by default that of the model's images. If you load weights by name and give a rule for other sizes for the
            position of the base itself, the default is the grid of the weights.

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
        model = build_base(name, partial(timm.create_model, name), **kwargs)
    elif kwargs:
        raise ValueError(
            f'{", ".join(sorted(kwargs))}: arguments of timm.create_model go with the name of a model, but this is a '
            'model. Leave them out.')
    model = unwrapped(model)
    if isinstance(model, PosEncModel):
        raise ValueError(_already_ours(model, pos_enc, pos_enc_kwargs))
    check_can_be_grafted(model)
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
    needs_grid = ours.get('ref_grid_size') is None and needs_trained_grid(grafted)
    is_file = is_read and ':' not in name and {'pretrained_cfg', 'pretrained_cfg_overlay'} & kwargs.keys()
    if is_file and (needs_grid or args.get('use_naflex')):
        # a file of the caller shows what it was trained on, and timm's NaFlexVit may lose a part of it
        if 'use_naflex' in args:
            kwargs['use_naflex'] = args['use_naflex']
        return timm.create_model(
            'vit_graft', base=name, pos_enc=pos_enc, pos_enc_kwargs=pos_enc_kwargs, **ours, **kwargs)
    was_naflex = is_read and ':' in name and get_model_args(model).get('use_naflex') and not kwargs.get('use_naflex')
    if is_read and isinstance(model, NaFlexVit) and not was_naflex:
        refuse_lost_rows(name, model, partial(timm.create_model, name), **kwargs)
    if needs_grid:
        others = {key: value for key, value in kwargs.items() if key not in OF_THE_CALL}
        trained = on_meta(partial(build_base, name, partial(timm.create_model, name)), **others) if is_read else model
        set_trained_grid(grafted, image_grid(trained))
    weights = weights_for(grafted, model)
    if is_model_in_modules(cfg['architecture'], ('vision_transformer', 'eva')):  # that take this argument
        args['use_naflex'] = isinstance(model, NaFlexVit)
    report = checkpoints.misfit(weights, grafted.state_dict(), ignore=tuple(added_entries(grafted))) or _change(
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
    flags = {
        name: torch.tensor(float(p.requires_grad), device='cpu').expand(p.shape)
        for name, p in model.named_parameters()}
    flags = under_our_names(flags, grafted)
    for name, p in grafted.named_parameters():
        p.requires_grad_(bool(flags[name].any()) if name in flags else True)
    grafted.set_grad_checkpointing(model.grad_checkpointing)
    grafted.patch_drop = nn.Identity()  # also if it was taken away since timm made the base
    grafted.take_patch_drop(getattr(model, 'patch_drop', None))
    if isinstance(model, VisionTransformerDistilled):
        grafted.set_distilled_training(model.distilled_training)
    grafted.train(model.training)
    modules = dict(grafted.named_modules())
    for name, module in model.named_modules():
        if name in modules:
            modules[name].training = module.training


# Attributes of modules that the graft takes over, or that make no difference to what a model computes.
FREE = ('training', 'grad_checkpointing', 'distilled_training', 'fused_attn')
PLAIN = (bool, int, float, str, tuple)
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
    modules, found = dict(on_meta(build).named_modules()), dict(model.named_modules())
    for name in modules:
        if name not in found and name != 'patch_drop':
            return f'{name} is gone'
    for name, module in found.items():
        if any(vars(module)[key] for key in HOOKS):
            return f'{name or "it"} has hooks, which the graft would not have'
        if name == 'patch_drop' and isinstance(module, (PatchDropout, PatchDropoutWithIndices, nn.Identity)):
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
            is_plain = isinstance(then, PLAIN) or then is None and isinstance(now, PLAIN)
            if is_plain and key not in FREE and (type(now) is not type(then) or now != then):
                return f'{name or "model"}.{key} is {now!r}, not {then!r}'
    return ''


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
    parts = merge_encodings(own, pos_enc, pos_enc_kwargs, model.base_position)
    args = get_model_args(model)
    # `vit_graft` needs the former. Without the latter it is another host, with other names for some of its weights.
    base = ''.join(f'{key}={args[key]!r}, ' for key in ('base', 'use_naflex') if args.get(key))
    kwargs = {part: values for part, values in parts.items() if values}
    return (
        f'{name} is already a model of timm_sape, with {model.pos_enc!r}. Create it with all encodings, '
        f'{base}pos_enc={"+".join(parts)!r}, pos_enc_kwargs={kwargs}, '
        f'pretrained_cfg_overlay={seen}, and load its weights with load_state_dict(..., strict=False).')
