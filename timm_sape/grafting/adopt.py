"""Make a model of timm ours: which encodings the graft has, and which of timm's weights."""
import inspect
from functools import partial
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import torch
import torch.nn as nn
from timm.layers import get_device_dtype
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer
from timm.models.vision_transformer_relpos import ResPostRelPosBlock, VisionTransformerRelPos

from .. import checkpoints
from ..attention import adopt_blocks
from ..conversion import GRID, GridSize, convert_to_naflex, from_timm
from ..encodings import ReferenceGridEncoding, encoding_keywords, get_encoding, is_auto, parse_pos_enc
from ..encodings.base import AUTO
from ..encodings.registry import plain_keywords
from ..host import PosEncModel
from ..naflexvit_pos_enc import NaFlexVitPosEnc
from .bases import OURS, Parts, check_can_be_grafted, own_encodings, position_of_base


def merge_encodings(
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
        base_position: What the base computes by timm's modules, as of `position_of_base`.

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
        # Some may be changed: in eval mode and on the grid that the base was trained on they make no difference.
        meant = {key: value for key, value in keywords.items() if key not in get_encoding(part).changeable_keywords}
        if part in own and not meant.items() <= {**encoding_keywords(part), **own[part]}.items():
            raise ValueError(
                f"pos_enc_kwargs: {part!r} is the base's own encoding, with {own[part]}, which cannot be changed. "
                'Leave its keywords out.')
        parts[part].update(keywords)
    return parse_pos_enc('+'.join(parts) or 'nope', parts)


def adopt(
        model: nn.Module,
        pos_enc: str,
        pos_enc_kwargs: Optional[Mapping[str, Mapping[str, Any]]],
        ref_grid_size: Optional[Tuple[int, int]],
        logit_scaling: str,
        kwargs: Dict[str, Any],
) -> PosEncModel:
    """Make a model that timm has just built ours: its modules stay timm's, and get our classes, as FSDP does it."""
    check_can_be_grafted(model)
    own = own_encodings(model)
    vit = model if isinstance(model, (VisionTransformer, NaFlexVit)) else _rebuild_as_vit(model, kwargs)
    base_position = position_of_base(vit) if isinstance(vit, NaFlexVit) else ''
    parts = merge_encodings(own, pos_enc, pos_enc_kwargs, base_position)
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
        weights = weights_for(vit, model)
        if not kwargs.get('final_norm', True):  # it was pruned; the class of the base cannot be built without it
            weights = {name: value for name, value in weights.items() if not name.startswith(('norm.', 'fc_norm.'))}
        report = checkpoints.misfit(weights, vit.state_dict(), ignore=tuple(added_entries(vit)))
        if report:
            given = sorted(kwargs.keys() - {
                'img_size', 'patch_size', 'in_chans', 'num_classes', 'device', 'dtype', 'depth', 'embed_dim',
                'num_heads', 'global_pool'})
            raise ValueError(
                f'{type(model).__name__} cannot be converted if created with these arguments: {report}. The '
                f'cause is one of these, leave it out: {", ".join(given)}.')
        vit.load_state_dict(weights, strict=False)
    return vit


def _rebuild_as_vit(model: Union[VisionTransformerRelPos, Eva], kwargs: Dict[str, Any]) -> VisionTransformer:
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
        global_pool=kwargs.get('global_pool', model.global_pool),
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


def added_entries(model: PosEncModel) -> List[str]:
    """Names of the entries that the grafted encodings have in the state dict."""
    added = [f'encodings.{part}.' for part in model.pos_enc.split('+') if is_auto(part)]
    return [name for name in model.state_dict() if any(part in name for part in added)]


def weights_for(grafted: PosEncModel, model: nn.Module) -> Dict[str, Any]:
    """The state of a timm model under our names; grids that encodings save, which it has none of, are our own."""
    grids = {name: value for name, value in grafted.state_dict().items() if name.endswith(GRID)}
    return {**grids, **under_our_names(model.state_dict(), grafted)}


def refuse_other_rotation(grafted: PosEncModel, model: nn.Module) -> None:
    """
    Raises:
        ValueError: If timm's NaFlexVit rotates and the base does not, or in another way. No entry would tell.
    """
    of_base, of_graft = (m.rope and type(m.rope).__name__ for m in (model, grafted))
    if of_base != of_graft:
        raise ValueError(
            f'{type(model).__name__} cannot be grafted if created with these arguments: its rotation is {of_base}, but '
            f'{of_graft} where timm builds it as NaFlexVit. Leave out use_rot_pos_emb and rope_type.')


def under_our_names(entries: Mapping[str, torch.Tensor], grafted: PosEncModel) -> Mapping[str, torch.Tensor]:
    """Entries of a base under the names of the graft."""
    if isinstance(grafted, NaFlexVitPosEnc):
        return convert_to_naflex(entries, grafted, grafted.grid_size)
    return from_timm(entries, grafted)


def needs_trained_grid(model: PosEncModel) -> bool:
    """Whether what a graft has of its base, its encoding or all logits, depends on the grid that it was trained on."""
    return any(
        isinstance(encoding, ReferenceGridEncoding) and encoding.saved_grid_size() is not None
        for path, encoding in model.position_encodings().items() if not is_auto(path.rpartition('.')[2]))


def set_trained_grid(model: PosEncModel, grid: GridSize) -> None:
    """Set the grid of what the base has, and of the grafted encodings too: a model has one `ref_grid_size`."""
    with torch.random.fork_rng(devices=[]):  # tables of another size are drawn again
        for encoding in model.position_encodings().values():
            if isinstance(encoding, ReferenceGridEncoding):
                encoding.set_ref_grid_size(grid)
