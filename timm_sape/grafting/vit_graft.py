"""The architecture of grafts: timm builds `vit_graft` from a base, and so do timm's scripts and the Hub."""
import difflib
import re
import sys
import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Callable, Dict, Mapping, Optional, Tuple, Union

import timm
import torch
import torch.nn as nn
from timm.models import (
    PretrainedCfg,
    generate_default_cfgs,
    get_arch_pretrained_cfgs,
    get_pretrained_cfg,
    is_model,
    is_model_in_modules,
    model_entrypoint,
    register_model,
    resolve_pretrained_cfg,
    split_model_name_tag,
)
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit

from .. import checkpoints
from ..conversion import GridSize, declared_grid, grid_of_table, has_saved_weights
from ..encodings import is_auto, merge_keywords, parse_pos_enc
from ..encodings.base import AUTO
from ..entrypoints import build_by_timm
from ..host import PosEncModel
from ..model_args import as_pair, check_logit_scaling, check_ref_grid_size
from ..naflexvit_pos_enc import NaFlexVitPosEnc
from .adopt import added_entries, adopt, needs_trained_grid, refuse_other_rotation, set_trained_grid, weights_for
from .bases import NAVER, check_can_be_grafted, image_grid, is_naver
from .build_base import OF_THE_CALL, build_base, on_meta, refuse_lost_rows

__all__ = []  # register_model adds each entrypoint

DYNAMIC = ('dynamic_img_size', 'dynamic_img_pad')
# by timm's registry: the last parts of the names of the modules that register models
OUR_MODULES = ('vit_pos_enc', 'naflexvit_pos_enc', 'vit_graft')
SOURCE = ('source', 'url', 'file', 'state_dict', 'hf_hub_id', 'hf_hub_filename')  # keys of a config that locate weights


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
            check_can_be_grafted(eva)
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
            refuse_lost_rows(self.base, model, partial(self._build, False, self.cfg, ('device',)))
        if isinstance(model, Eva) and not is_naver(model):  # by its arguments it is none, whatever its name says
            check_can_be_grafted(model)
            eva = model if self.load_base else None
            self.arguments = {**self.arguments, 'use_naflex': True}
            model = self._build(False, self.cfg)
        model = adopt(
            model, self.pos_enc, self.pos_enc_kwargs, self.ref_grid_size, self.logit_scaling, arguments)
        if self.is_eva and isinstance(model, NaFlexVitPosEnc):
            left_out = ('device', 'final_norm')
            refuse_other_rotation(
                model, eva or on_meta(partial(self._build, False, self.cfg, left_out, use_naflex=False)))
        if eva is not None:
            model.load_state_dict(weights_for(model, eva), strict=False)
        if self.load_base and self.ref_grid_size is None and needs_trained_grid(model):
            set_trained_grid(model, image_grid(self._default_base()))
        return model

    def filter(self, state_dict: Dict[str, torch.Tensor], model: PosEncModel) -> Dict[str, torch.Tensor]:
        """What timm's builder calls for the entries of a checkpoint, which is of a graft or of its base."""
        state_dict = checkpoints.unwrap(state_dict)
        is_of_base = 'pos_enc' not in model.pretrained_model_args and not any(
            'encodings.' in name for name in state_dict)
        ref_grid_size = self.ref_grid_size
        if is_of_base and ref_grid_size is None and needs_trained_grid(model):
            ref_grid_size = self._trained_grid(state_dict, model)
            set_trained_grid(model, ref_grid_size)
        own = model.state_dict()
        added = {name: own[name] for name in added_entries(model)}
        # timm's NaFlexVit loses rows of registers in a plain ViT's table
        is_ours_to_convert = isinstance(model, NaFlexVitPosEnc) and {
            'pos_embed', 'cls_token', 'reg_token'} <= state_dict.keys()
        if is_of_base and not is_ours_to_convert:
            # Weights of the base. Its own entrypoint knows their possible formats and how to resample them.
            try:
                with torch.random.fork_rng(devices=[]):  # a seed has the same effect on all loading paths
                    weights = weights_for(model, self._base_with(state_dict))
                checkpoints.warn_of_lost_head(weights, model)
                return {**weights, **added}
            except (RuntimeError, AttributeError):  # timm's NaFlexVit has the latter for tables that are not square
                pass  # the code below loads it, or raises a better message about what does not fit
        if (is_of_base or not has_saved_weights(model)) and not added.keys() & state_dict.keys():
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
            of_another_size = own is not None and tuple(own.shape[1:3]) != image_grid(base)
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
        return on_meta(partial(self._build, False, self.cfg, OF_THE_CALL))

    def _build(
            self,
            pretrained: bool,
            cfg: PretrainedCfg,
            left_out: Tuple[str, ...] = (),
            **changed,
    ) -> nn.Module:
        arguments = {**{key: value for key, value in self.arguments.items() if key not in left_out}, **changed}
        if arguments.get('in_chans') == cfg.input_size[0] == 3:  # with others timm's hybrids need it
            del arguments['in_chans']  # filled in by timm's builder
        is_relpos = is_model_in_modules(self.base, ('vision_transformer_relpos',))
        # What a base is converted to takes these, but its own class does not.
        if is_relpos:
            arguments = {key: value for key, value in arguments.items() if key not in DYNAMIC}
            if arguments.get('global_pool') in ('avgmax', 'max'):
                del arguments['global_pool']
        if not pretrained and (is_relpos or NAVER.fullmatch(self.base) and not arguments.get('use_naflex')):
            arguments.pop('final_norm', None)
        # set in any case: timm's own default is that of an environment variable
        if is_model_in_modules(self.base, ('vision_transformer',)):
            arguments.setdefault('use_naflex', False)
        if is_model_in_modules(self.base, ('eva',)):
            arguments.setdefault('use_naflex', not NAVER.fullmatch(self.base))
            if 'fc_norm' in arguments and not arguments.get('use_naflex'):  # recorded by what it is converted to
                arguments['use_fc_norm'] = arguments.pop('fc_norm')
        model = build_base(
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
        added = {name: value for name, value in vars(cfg).items() if value != getattr(empty, name)}
        cfg = resolve_pretrained_cfg(variant, base_cfg, added)
    cfg = resolve_pretrained_cfg(variant, replace(cfg, architecture=variant), pretrained_cfg_overlay)
    is_own_source = any(getattr(cfg, key) != getattr(base_cfg, key) for key in SOURCE)
    # others have the size of timm's weights, or that of its dataclass, by default
    declares_size = 'input_size' in (pretrained_cfg_overlay or {}) or cfg.input_size not in (
        base_cfg.input_size, PretrainedCfg().input_size)

    if pretrained:
        checkpoints.refuse_other_heads(
            variant, kwargs, lambda: on_meta(model_entrypoint(name)).blocks[0].attn.num_heads)
    saved = kwargs.get('pretrained_model_args') or {}
    if saved.get('pos_enc_kwargs'):
        given, parts = parse_pos_enc(pos_enc).keys() - {'nope'}, parse_pos_enc(saved['pos_enc']).keys()
        given |= {part for part in parts if not is_auto(part)}  # which the base has
        if {part.removeprefix(AUTO) for part in given} == {part.removeprefix(AUTO) for part in parts}:
            pos_enc_kwargs = merge_keywords(saved['pos_enc_kwargs'], pos_enc_kwargs)
        elif pos_enc_kwargs == saved['pos_enc_kwargs']:  # timm passes them on even if the caller gave another pos_enc
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
        is_new_size = kwargs.get('img_size') is not None and not saved
        if is_new_size and not isinstance(model, NaFlexVitPosEnc) and not model.patch_embed.dynamic_img_pad:
            _warn_of_cropping(as_pair(kwargs['img_size']), model.patch_size, base_cfg.input_size[1:])
        return model

    return build_by_timm(
        build, variant, pretrained and is_own_source, builder.filter, pretrained_cfg=cfg, cache_dir=cache_dir, **kwargs)


def _warn_of_cropping(size: Tuple[int, int], patch_size: Tuple[int, int], default: Tuple[int, int]) -> None:
    """Warn if timm will cut off a part of each image, at a size that is not that of its own weights."""
    fitting = tuple(-(-length // patch) * patch for length, patch in zip(size, patch_size))
    if size not in (fitting, default):
        warnings.warn(
            f'Patches of {patch_size[0]}x{patch_size[1]} pixels do not divide img_size={size}, so the model '
            f'does not see the right or lower edge of an image. Give img_size={fitting}.')


# Entrypoints vit_{size}_{encoding}_graft, with the tags of the plain ViTs that they are grafted onto.
PLAIN_VITS = {
    'vit_tiny': 'vit_tiny_patch16_224',
    'vit_small': 'vit_small_patch16_224',
    'vit_base': 'vit_base_patch16_224',
    'vit_large': 'vit_large_patch16_224',
    'test_vit': 'test_vit',
}
ENCODINGS = (
    'cope', 'irpe_k', 'rope2d', 'rope2d_mixed', 'rpb', 'sape2', 'sape2_k', 'sape2_q', 'sape2_qk', 'sape2sq_k', 'shaw')
NAMES = {f'{size}_{encoding}_graft': (base, encoding) for size, base in PLAIN_VITS.items() for encoding in ENCODINGS}


def _cfgs(name: str, base: str) -> Dict[str, Dict[str, Any]]:
    """The base's configs under our name. Their `hf_hub_id` is the full one of the base."""
    return {
        f'{name}.{cfg.tag}': {key: value for key, value in cfg.to_dict().items() if key not in ('architecture', 'tag')}
        for cfg in get_arch_pretrained_cfgs(base).values()}


default_cfgs = generate_default_cfgs({
    'vit_graft': {},  # has the config of its base, known only when a model is created
    **{key: cfg for name, (base, _) in NAMES.items() for key, cfg in _cfgs(name, base).items()},
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


for _name, (_base, _encoding) in NAMES.items():
    setattr(sys.modules[__name__], _name, register_model(_make_entrypoint(_name, _base, _encoding)))
