"""What timm's entrypoints of all hosts have in common: their names, configs, and how their models are built."""
import warnings
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Type

import torch
import torch.nn as nn
from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
from timm.layers import is_scriptable
from timm.models import PretrainedCfg, build_model_with_cfg, resolve_pretrained_cfg

from . import checkpoints
from .checks import is_integer
from .encodings import get_encoding, list_encodings, parse_pos_enc
from .encodings.base import AUTO
from .encodings.ope import ObjectPositionEncoding
from .host import PosEncModel

__all__ = ['SIZES', 'Entrypoint', 'base_cfg', 'build_by_timm', 'entrypoints', 'make_entrypoint']

SIZES = {
    'vit_tiny': dict(embed_dim=192, depth=12, num_heads=3),
    'vit_small': dict(embed_dim=384, depth=12, num_heads=6),
    'vit_base': dict(embed_dim=768, depth=12, num_heads=12),
    'test_vit': dict(embed_dim=64, depth=2, num_heads=4),
}


class Entrypoint(NamedTuple):
    """What the name of a model stands for.

    Attributes:
        name: Of the model.
        size: Key of `SIZES`.
        pos_enc: The encodings, or the default ones if the name does not state any.
        neutral: The model of this size whose name states no encoding.
    """
    name: str
    size: str
    pos_enc: str
    neutral: str


def entrypoints(vit: str = 'vit') -> List[Entrypoint]:
    """All models of a host, in whose names `vit` stands for the kind of model.

    - `{size}_{encoding}`, e.g. vit_small_sape2_k, vit_base_rope2d
    - `{size}_{encoding}_ape`: combined with timm's learned table, for encodings that act in the blocks
    - `{size}_pos_enc`: any set of encodings, given by pos_enc=
    """
    found = []
    for size, shape in SIZES.items():
        named = size.replace('vit', vit)
        neutral = f'{named}_pos_enc'
        found.append(Entrypoint(neutral, size, 'ape', neutral))
        for encoding in list_encodings(aliases=True):
            cls = get_encoding(encoding)
            if not cls.fits(shape['embed_dim'], shape['num_heads']):
                continue
            if cls.alone:
                found.append(Entrypoint(f'{named}_{encoding}', size, encoding, neutral))
            if cls.supplements_ape and (cls.per_layer or not cls.overrides('embed')):
                found.append(Entrypoint(f'{named}_{encoding}_ape', size, f'{encoding}+ape', neutral))
    return found


def base_cfg(size: str, **kwargs) -> Dict[str, Any]:
    """The pretrained config of an entrypoint of this size, with some entries of its own."""
    return {
        'num_classes': 1000,
        'input_size': (3, 160, 160) if size == 'test_vit' else (3, 224, 224),
        'pool_size': None,
        'crop_pct': 0.9,
        'interpolation': 'bicubic',
        'fixed_input_size': True,
        'mean': IMAGENET_INCEPTION_MEAN,
        'std': IMAGENET_INCEPTION_STD,
        'first_conv': 'patch_embed.proj',
        'classifier': 'head',
        **kwargs,
    }


def make_entrypoint(
        cls: Type[PosEncModel],
        entrypoint: Entrypoint,
        description: str,
        **model_args,
) -> Callable[..., PosEncModel]:
    """A function for timm's `register_model`, which belongs to the module of `cls`.

    Args:
        cls: The host.
        entrypoint: What its name stands for.
        description: First words of its docstring.
        model_args: Arguments of `cls` that the caller may replace, besides those of the size and `pos_enc`.
    """
    name, size, pos_enc, neutral = entrypoint

    def create(pretrained: bool = False, **kwargs) -> PosEncModel:
        if name != neutral:
            _warn_of_misnomer(entrypoint, kwargs)
        if pretrained:
            checkpoints.refuse_other_heads(name, kwargs, lambda: SIZES[size]['num_heads'])
        return _create(cls, name, pretrained, **{**SIZES[size], 'pos_enc': pos_enc, **model_args, **kwargs})

    create.__module__ = cls.__module__
    create.__name__ = create.__qualname__ = name
    create.__doc__ = (
        f'{description}, with `pos_enc={pos_enc!r}`{" unless another is given" if name == neutral else ""}.\n\n'
        f'Accepts any argument of `{cls.__name__}` and of `timm.create_model`.')
    return create


def _warn_of_misnomer(entrypoint: Entrypoint, kwargs: Dict[str, Any]) -> None:
    """Warn if a model gets a name that states an encoding which it does not have."""
    given = kwargs.get('pos_enc', entrypoint.pos_enc)
    is_loaded = 'pos_enc' in (kwargs.get('pretrained_model_args') or {})  # then the warning came when it was created
    if is_loaded or not isinstance(given, str):
        return
    lacking = {*parse_pos_enc(entrypoint.pos_enc)} - {part.removeprefix(AUTO) for part in parse_pos_enc(given)}
    if lacking:
        warnings.warn(
            f'{entrypoint.name} is created with pos_enc={given!r}, so despite its name it has no '
            f'{" and no ".join(sorted(lacking))}. Use {entrypoint.neutral}, whose name does not state an encoding.',
            stacklevel=3)


def _create(cls: Type[PosEncModel], variant: str, pretrained: bool, **kwargs) -> PosEncModel:
    """Build a model of ours.

    Raises:
        ValueError: If a saved model is loaded with other encodings than its own, weights do not fit, or the model does
            not fit into memory.
    """
    kwargs = checkpoints.with_saved_keywords(kwargs)
    checkpoints.refuse_other_encoding(variant, kwargs)
    filter_fn = partial(checkpoints.filter_state_dict, ref_grid_size=kwargs.get('ref_grid_size'))
    try:
        return build_by_timm(cls, variant, pretrained, filter_fn, **kwargs)
    except RuntimeError as e:
        if "can't allocate memory" not in str(e):  # as torch says it on a CPU
            raise
        raise ValueError(
            f'{variant} of this size does not fit into memory. Choose a smaller img_size, embed_dim or depth.') from e


def build_by_timm(
        build: Callable[..., nn.Module],
        variant: str,
        pretrained: bool,
        filter_fn: Callable[[Mapping[str, torch.Tensor], nn.Module], Mapping[str, torch.Tensor]],
        **kwargs,
) -> nn.Module:
    """timm's `build_model_with_cfg`, with readable errors while it loads a checkpoint.

    Args:
        build: Makes the model from arguments.
        variant: Name of the model.
        pretrained: Load weights.
        filter_fn: Maps a checkpoint and the model to entries for the model.
        kwargs: For timm's builder and for `build`.

    Raises:
        ValueError: If weights are in a format that only a model of timm's own can read, or cannot be read, or the model
            is to be scriptable.
    """
    cfg = resolve_pretrained_cfg(variant, kwargs.get('pretrained_cfg'), kwargs.get('pretrained_cfg_overlay'))
    is_handed_over = cfg.custom_load and not cfg.state_dict and (
        cfg.file or not cfg.hf_hub_id or cfg.custom_load == 'hf')
    if pretrained and is_handed_over:  # timm would give the file to the model, and nothing would check what fits
        raise ValueError(
            f'{variant} cannot read weights with custom_load, such as .npz files. {checkpoints.CONVERT_FOREIGN}')
    if is_scriptable():
        raise ValueError(
            f'{variant} does not work with torch.jit.script, so it cannot be made with scriptable=True (in train.py '
            '--torchscript). Use torch.compile, torch.export or torch.jit.trace.')
    depth = kwargs.get('depth', 3)
    # timm takes the last 3 layers; an invalid depth is refused later
    out_indices = kwargs.pop('out_indices', min(3, depth) if is_integer(depth, 1) else 3)
    is_reading = False  # a checkpoint: after the model is built, before the entries are filtered

    def build_then_read(**arguments) -> nn.Module:
        nonlocal is_reading
        model = build(**arguments)
        _warn_of_other_statistics(model, cfg)
        is_reading = bool(pretrained)
        return model

    def filter_what_was_read(state_dict, model):
        nonlocal is_reading
        is_reading = False
        return filter_fn(state_dict, model)

    try:
        return build_model_with_cfg(
            build_then_read,
            variant,
            pretrained,
            pretrained_filter_fn=filter_what_was_read,
            feature_cfg=dict(out_indices=out_indices, feature_cls='getter'),
            **kwargs,
        )
    except Exception as e:
        plain = checkpoints.unreadable(variant, e) if is_reading else None
        if plain is None:
            raise
        raise plain from e


def _warn_of_other_statistics(model: PosEncModel, cfg: PretrainedCfg) -> None:
    """`ope` looks at the colours of pixels, so it must know how images were normalized."""
    for encoding in model.encodings.values():
        if not isinstance(encoding, ObjectPositionEncoding):
            continue
        for name in ('mean', 'std'):
            own, images = getattr(encoding, name), list(getattr(cfg, name) or ())
            own = list(own) if isinstance(own, (list, tuple)) else [own] * len(images)
            if len(own) == len(images) and own != images:
                warnings.warn(
                    f"'ope' expects images normalized with {name} {own}, but the model's config says {images}, so it "
                    f"would find other objects. Give pos_enc_kwargs={{'ope': {{'mean': {list(cfg.mean)}, "
                    f"'std': {list(cfg.std)}}}}}.")
                break
