"""Loading checkpoints: load what fits, resize what can be resized, and refuse anything else in plain words.

There are two loading paths, as in timm. The pretrained path (`pretrained=True`, train.py's `--pretrained-path`,
`local-dir:`, `hf-hub:`) converts and resizes, in `filter_state_dict`. The direct path (`load_state_dict`,
`checkpoint_path=`, train.py's `--initial-checkpoint` and `--resume`, validate.py's `--checkpoint`) loads files as they
are, and refuses others in `refuse_misfit`.
"""
import errno
import math
import re
import warnings
from collections import Counter
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple, Union

import torch
import torch.nn as nn

from .conversion import (
    GRID, GridSize, declared_grid, saved_grids, short_size, trained_kernel, warn_of_resizing)
from .encodings import (
    CoordinateEncoding,
    ReferenceGridEncoding,
    ResizedEncoding,
    encoding_keywords,
    get_encoding,
    list_encodings,
    merge_keywords,
    parse_pos_enc,
)
from .encodings.base import AUTO

__all__ = [
    'filter_state_dict',
    'kernel_of',
    'misfit',
    'module_names',
    'refuse_misfit',
    'refuse_other_encoding',
    'refuse_other_heads',
    'refuse_other_host',
    'unreadable',
    'unwrap',
    'warn_of_lost_head',
    'with_saved_keywords',
]

STEMS = 'patch_embed.proj.weight', 'embeds.proj.weight'  # of the plain ViT and of NaFlexVit
# num_classes is that of the file: timm drops a head whose number of classes is not the declared one.
PRETRAINED_CALL = (
    'timm.create_model(..., pretrained=True, num_classes=N, pretrained_cfg_overlay=dict(file=..., num_classes=N))')
PRETRAINED_PATHS = f"{PRETRAINED_CALL}, 'local-dir:', 'hf-hub:', or train.py --pretrained-path"
CONVERT_FOREIGN = (
    'Load them into the model of timm that they are for, and graft that, or save its state_dict() to a file for this '
    'model.')
TABLES = 'pos_embed', 'embeds.pos_embed'  # timm's learned table in its plain ViT and in its NaFlexVit
LOGIT_SCALING = 'encodings.logit_scaling'  # path of that module in a model


def filter_state_dict(
        state_dict: Dict[str, torch.Tensor],
        model: nn.Module,
        ref_grid_size: Optional[Sequence[int]] = None,
) -> Dict[str, torch.Tensor]:
    """Make a checkpoint fit a model of the same encodings and another grid, or of timm's naming.

    Args:
        state_dict: The checkpoint.
        model: A `PosEncModel`. Its tables take the size of the checkpoint's, where those are never resized.
        ref_grid_size: The trained grid, if the user gave one; the checkpoint's own must not differ.

    Raises:
        ValueError: If entries are missing or left over outside the head, or have the wrong shape.
    """
    state_dict = unwrap(state_dict)
    for name in model.state_dict().keys() & state_dict.keys():
        if not isinstance(state_dict[name], torch.Tensor) and not name.endswith(GRID):
            raise ValueError(
                f'{name} of the checkpoint is a {type(state_dict[name]).__name__}. Entries must be tensors: save it '
                'again.')
    try:
        kernel = kernel_of(state_dict, model)
        state_dict = model.convert_checkpoint(state_dict)
    except ValueError:
        raise
    except Exception as e:  # what is no patch embedding fails in many ways
        raise ValueError(
            f'The checkpoint has an entry that cannot be adapted to the model ({e}). Create the model with the '
            'arguments that the checkpoint was trained with.') from e
    for path, encoding in _encodings_that_save_grids(model):
        grid = _trained_grid(state_dict, path, encoding, model, ref_grid_size, kernel)
        if grid is not None:
            if hasattr(model, 'embeds') and isinstance(encoding, ResizedEncoding) and grid != encoding.grid_size:
                warn_of_resizing(grid, model)
            encoding.adapt(grid, state_dict, path)
            state_dict.setdefault(path + GRID, encoding.get_extra_state())
    _drop_other_rules(state_dict, model)
    if model.global_pool == '' and model.attn_pool is None:  # features without a pool, as timm gives them
        state_dict = {name: value for name, value in state_dict.items() if not name.startswith('attn_pool.')}

    # timm will adapt the heads to the number of classes, and the kernel of a plain ViT to the number of channels.
    heads = module_names(model.pretrained_cfg['classifier'])
    kernels = tuple(
        f'{name}.weight' for name in module_names(model.pretrained_cfg['first_conv']) if not hasattr(model, 'embeds'))
    report = misfit(
        state_dict, model.state_dict(), ignore=tuple(f'{name}.' for name in heads), any_shape=kernels)
    if report:
        raise ValueError(
            f'The checkpoint does not fit the model with pos_enc={model.pos_enc!r}: {report}. Create the model with '
            f'the arguments that the checkpoint was trained with.{_hint_of_graft(state_dict, model)}'
            f'{_hint_of_channels(state_dict, model)}')
    warn_of_lost_head(state_dict, model)
    return state_dict


def _drop_other_rules(state_dict: Dict[str, torch.Tensor], model: nn.Module) -> None:
    """Remove what a checkpoint says of rules for other sizes that the model does not have.

    Warn unless they were changed by name: in `pos_enc_kwargs`, or from the `logit_scaling` of a saved config.
    """
    for path, encoding in model.position_encodings().items():
        if not isinstance(encoding, CoordinateEncoding) or encoding.saved_grid_size() is not None:
            continue
        name = path.rpartition('.')[2]
        if state_dict.pop(path + GRID, None) is not None and 'resolution' not in model.pos_enc_kwargs.get(name, {}):
            warnings.warn(
                f"The checkpoint was trained with pos_enc_kwargs={{{name!r}: {{'resolution': 'rescale'}}}}. Without "
                'them the model is another at all sizes but the trained one. If you want its rule, name it: '
                f"pos_enc_kwargs={{{name!r}: {{'resolution': 'extrapolate'}}}}.")
    if model.logit_scaling == 'constant' and state_dict.pop(LOGIT_SCALING + GRID, None) is not None and (
            model.pretrained_model_args.get('logit_scaling') is None):
        warnings.warn(
            "The checkpoint was trained with logit_scaling='log'. Without it the model is another at all sizes but the "
            'trained one.')


def unwrap(state_dict: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The state dict itself, out of what trainers save.

    Raises:
        ValueError: If there is none.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f'The checkpoint is not a state dict but a {type(state_dict).__name__}.')
    for key in ('model', 'state_dict'):
        inner = state_dict.get(key)
        state_dict = inner if isinstance(inner, Mapping) else state_dict  # a trainer's 'model' may be a name
    return state_dict


def kernel_of(state_dict: Mapping[str, Any], model: nn.Module) -> Tuple[int, int]:
    """The patch embedding's kernel of a checkpoint, which need not be the model's."""
    weight = next((state_dict[name] for name in STEMS if name in state_dict), None)
    return model.kernel_size if weight is None else trained_kernel(weight, model)


def module_names(entry: Union[None, str, Sequence[str]]) -> Sequence[str]:
    """Module names out of a config, which has one, several or none."""
    return (entry,) if isinstance(entry, str) else entry or ()


def _encodings_that_save_grids(model: nn.Module) -> List[Tuple[str, Union[ReferenceGridEncoding, ResizedEncoding]]]:
    """The encodings that save the grid of their parameters, by their path in the model."""
    return [
        (path, encoding) for path, encoding in model.encodings_with_grids().items()
        if encoding.saved_grid_size() is not None]


def _trained_grid(
        state_dict: Mapping[str, torch.Tensor],
        path: str,
        encoding: Union[ReferenceGridEncoding, ResizedEncoding],
        model: nn.Module,
        given: Optional[Sequence[int]],
        kernel: Tuple[int, int],
) -> Optional[GridSize]:
    """The grid that the entries of an encoding were trained on. None if the checkpoint has no entries of it.

    Raises:
        ValueError: If nothing says so, or the checkpoint says something else than the user.
    """
    is_reference = isinstance(encoding, ReferenceGridEncoding)
    has_entries = any(name.startswith(f'{path}.') for name in state_dict)
    if not has_entries and any(name != GRID[1:] for name in encoding.state_dict()):
        return None  # it has other encodings, which `misfit` will name
    if path + GRID in state_dict:
        saved = encoding.read_extra_state(state_dict[path + GRID])
        if is_reference and given is not None and saved != tuple(given):
            raise ValueError(
                f'ref_grid_size={tuple(given)} was given, but the checkpoint was trained on {saved}. Leave it out.')
        return saved
    if is_reference and given is not None:
        return tuple(given)
    if is_reference and encoding.chosen_when_loading and model.pretrained_model_args:
        return declared_grid(model, kernel)  # saved with a rule for which the grid did not matter
    if is_reference or has_entries:
        fix = 'give ref_grid_size=(H, W), in patches' if is_reference else 'put it there, torch.tensor([H, W])'
        raise ValueError(
            f'The checkpoint does not say on which grid its encodings were trained, it lacks {path + GRID}. If they '
            f'are those of pos_enc={model.pos_enc!r}, {fix}.')
    return None


def warn_of_lost_head(state_dict: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    """Warn if timm is about to drop a head that would fit: it compares declared numbers of classes, not shapes."""
    declared, own = model.pretrained_cfg['num_classes'], dict(model.named_parameters())
    for name in (f'{head}.weight' for head in module_names(model.pretrained_cfg['classifier'])):
        fits = name in state_dict and name in own and state_dict[name].shape == own[name].shape
        if fits and declared != model.num_classes:
            warnings.warn(
                f'{name} of the checkpoint fits the model, but timm drops it and the head stays random, because '
                f'{declared} classes are declared for the checkpoint. Declare what it has: '
                f'pretrained_cfg_overlay=dict(..., num_classes={model.num_classes}).')


def misfit(
        state_dict: Mapping[str, Any],
        expected: Mapping[str, Any],
        ignore: Tuple[str, ...] = (),
        any_shape: Tuple[str, ...] = (),
) -> str:
    """What keeps a checkpoint from fitting, in words; empty if nothing does.

    Args:
        state_dict: The checkpoint.
        expected: The model's state dict.
        ignore: Beginnings of names that do not matter.
        any_shape: Names of entries that only have to be there.
    """
    def listed(keys: List[str]) -> str:
        return ', '.join(sorted(keys)[:4]) + (f' and {len(keys) - 4} more' if len(keys) > 4 else '')

    def shape(value: Any) -> Union[str, List[int]]:
        return list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__

    missing = [k for k in expected if k not in state_dict and not k.startswith(ignore)]
    unexpected = [k for k in state_dict if k not in expected and not k.startswith(ignore)]
    shapes = [
        f'{k} {shape(state_dict[k])} instead of {shape(v)}' for k, v in expected.items()
        if k in state_dict and shape(state_dict[k]) != shape(v) and k not in any_shape and not k.startswith(ignore)]
    reports = (('it lacks ', missing), ('it has ', unexpected), ('it has ', shapes))
    return '; '.join(what + listed(keys) for what, keys in reports if keys)


def refuse_misfit(model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Before anything is loaded directly, say plainly if a checkpoint has other encodings or another grid.

    Args:
        model: A `PosEncModel`.
        state_dict: The checkpoint.
        strict: If False, only shapes and grids count; missing and additional entries are left to torch, which reports
            them.

    Raises:
        ValueError: If entries of encodings are missing, left over, or have another shape. The message says which
            arguments create a model that fits. Or if all entries are one level down, or have a prefix.
    """
    own = model.state_dict()
    _refuse_wrapped(own, state_dict)
    if strict:
        _refuse_gammas(state_dict)
        refuse_other_host(state_dict, model)

    def position(entries: Mapping[str, Any]) -> Dict[str, Any]:
        # torch.distributed.checkpoint has entries that are not tensors, where an encoding saves no grid
        return {
            k: v for k, v in entries.items() if isinstance(v, torch.Tensor) and (
                k in TABLES or k.startswith('encodings.') or '.attn.encodings.' in k)}

    given, expected = position(state_dict), position(own)
    if not strict:
        given = {k: v for k, v in given.items() if k in expected}
        expected = {k: v for k, v in expected.items() if k in given}
    report, of_other_grids = misfit(given, expected), {}
    for path, encoding in _encodings_that_save_grids(model):
        saved = encoding.read_extra_state(given[path + GRID]) if path + GRID in given else None
        if saved not in (None, encoding.saved_grid_size()):
            report = report or f'it was trained on grid {saved} instead of {encoding.saved_grid_size()}'
            of_other_grids[path] = encoding, saved
    what = 'position encodings of the model' if report else 'model'
    if strict and not report:
        stems = {k: v for k, v in own.items() if k in STEMS and k in state_dict}
        report = misfit({k: state_dict[k] for k in stems}, stems)
    if not report:
        return
    arguments = _differing_arguments(state_dict, model)
    is_silent = arguments.get('pos_enc') == 'nope'  # that is what a file without entries of encodings looks like
    shown = ', '.join(f'{name}={value!r}' for name, value in arguments.items() if not (is_silent and name == 'pos_enc'))
    hint = f'; its entries show {shown}.' if shown else ' (pos_enc, pos_enc_kwargs, img_size, patch_size, ...).'
    if is_silent:
        hint += " The file does not say which encoding it had: none, or one without parameters such as 'rope2d'."
    others = misfit(given, expected, ignore=tuple(f'{path}.' for path in of_other_grids))
    if not others and arguments.keys() <= {'img_size', 'num_classes'} and all(
            isinstance(encoding, ReferenceGridEncoding) for encoding, _ in of_other_grids.values()):
        also = ", and in any case if the base is one of timm's NaFlexVits" if model.base_position else ''
        for height, width in {saved for _, saved in of_other_grids.values()}:
            hint += (
                f' To keep the size of the model{also}, give ref_grid_size=({height}, {width}) instead of img_size '
                f'(scripts: ref_grid_size={height},{width}).')
    lacks_grid = [k for k in expected if k.endswith(GRID) and k not in given]
    adapt = f'use {PRETRAINED_PATHS}' + (
        ', and give ref_grid_size=(H, W), the grid in patches that it was trained on' if lacks_grid else '')
    raise ValueError(
        f'The checkpoint does not fit the {what} (pos_enc={model.pos_enc!r}, grid '
        f'{model.grid_size}): {report}. This loading path resizes nothing. To load the checkpoint as it '
        f'is, create the model with the arguments that it was trained with{hint} Scripts take arguments that have no '
        "option of their own by --model-kwargs; timm's onnx_export.py cannot, so use examples/export.py. To adapt a "
        f'checkpoint of the same encodings to another size, {adapt}.{_hint_of_graft(state_dict, model)}')


def _refuse_gammas(state_dict: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: If it has gammas as timm's rotary ViTs, BEiT and CaiT have them.
    """
    if state_dict.keys() >= {'patch_embed.proj.weight', 'blocks.0.gamma_1'}:
        raise ValueError(
            "The checkpoint has blocks.0.gamma_1, which timm's plain ViT has not. This loading path renames nothing. "
            "If it is one of timm's rotary ViTs, use timm_sape.graft(NAME, 'nope', checkpoint_path=FILE), with timm's "
            'name of the model. vit_*_patch16_rope*_224 can also be loaded into rope2d or rope2d_mixed (with ape, if '
            f'that is in its name) by {PRETRAINED_PATHS}.')


def _refuse_wrapped(expected: Mapping[str, Any], state_dict: Mapping[str, Any]) -> None:
    """
    Args:
        expected: The state dict of the model.
        state_dict: What is to be loaded.

    Raises:
        ValueError: If it has no entry of the model, but they are in one of its values, or have a prefix.
    """
    if not expected.keys().isdisjoint(state_dict):
        return
    for key, value in state_dict.items():
        if isinstance(value, Mapping) and (not expected.keys().isdisjoint(value) or _prefix(expected, value)):
            raise ValueError(f'These are not weights, but what a trainer saved. The weights are its entry {key!r}.')
    prefix = _prefix(expected, state_dict)
    if prefix:
        raise ValueError(
            f'The names of the weights begin with {prefix!r} here. Remove it: {{name.removeprefix({prefix!r}): weight '
            f'for name, weight in weights.items() if name.startswith({prefix!r})}}.')


def _prefix(expected: Mapping[str, Any], state_dict: Mapping[Any, Any]) -> str:
    """What stands before the names of at least half of the expected entries, with the dot; empty if nothing does."""
    found = Counter(
        key[:dot.end()] for key in state_dict if isinstance(key, str) for dot in re.finditer(r'\.', key)
        if key[dot.end():] in expected)
    return next((prefix for prefix, count in found.most_common(1) if 2 * count >= len(expected)), '')


def _hint_of_graft(state_dict: Mapping[str, Any], model: nn.Module) -> str:
    """What to do with weights of timm's own model, which has a table, in a model of other encodings."""
    has, needs = (any('encodings.' in name for name in entries) for entries in (state_dict, model.state_dict()))
    has_table = any(name in state_dict for name in TABLES) and model.pos_enc not in ('ape', 'nope')
    if has or not (needs or has_table) or not any(name in state_dict for name in STEMS):
        return ''
    return " To add encodings to weights of timm's own model, use timm_sape.graft."


def _hint_of_channels(state_dict: Mapping[str, Any], model: nn.Module) -> str:
    """What to do with a linear patch embedding that may be for other channels: its shape does not tell how many."""
    theirs, ours = (weights.get('embeds.proj.weight') for weights in (state_dict, model.state_dict()))
    if theirs is None or theirs.shape == ours.shape or not theirs.ndim == ours.ndim == 2 or len(theirs) != len(ours):
        return ''
    channels, rest = divmod(theirs.shape[1], math.prod(model.kernel_size))
    return '' if rest else (
        f' If it is for images with {channels} channels, say so: '
        f'pretrained_cfg_overlay=dict(file=..., input_size=({channels}, height, width)).')


def refuse_other_host(state_dict: Mapping[str, Any], model: nn.Module) -> None:
    """
    Raises:
        ValueError: If the checkpoint is one of a plain ViT and the model a NaFlexVit, or the other way round.
    """
    is_naflex = hasattr(model, 'embeds')
    if is_naflex and 'patch_embed.proj.weight' in state_dict:
        raise ValueError(
            'The checkpoint is one of a plain ViT, the model is a NaFlexVit, whose entries have other names. It is '
            f'converted by {PRETRAINED_CALL}, or by train.py --pretrained-path. Give the arguments of its training, '
            'img_size and patch_size too.')
    if not is_naflex and 'embeds.proj.weight' in state_dict:
        raise ValueError(
            'The checkpoint is one of a NaFlexVit, the model is a plain ViT, whose entries have other names. Create '
            "the model by the name that begins with 'naflexvit_' instead of 'vit_' (of a graft: with use_naflex=True).")


def _differing_arguments(state_dict: Mapping[str, Any], model: nn.Module) -> Dict[str, Any]:
    """Arguments of `timm.create_model` that the entries of a checkpoint tell, where they are not the model's."""
    entries = {k: v for k, v in state_dict.items() if isinstance(v, torch.Tensor)}

    def shape(name: str) -> Sequence[int]:
        return entries[name].shape if name in entries else ()

    found: Dict[str, Any] = _differing_encodings(entries, model)
    own: Dict[str, Any] = {}
    prefix, holder = ('embeds.', model.embeds) if hasattr(model, 'embeds') else ('', model)
    num_prefix_tokens = 0
    for token, argument in (('cls_token', 'class_token'), ('reg_token', 'reg_tokens')):
        length = shape(prefix + token)[1] if len(shape(prefix + token)) == 3 else 0
        num_prefix_tokens += length
        value = getattr(holder, token, None)
        found[argument], own[argument] = length, 0 if value is None else value.shape[1]
    found['class_token'], own['class_token'] = bool(found['class_token']), bool(own['class_token'])
    kernel = _kernel_size(shape('embeds.proj.weight') or shape('patch_embed.proj.weight'), model.in_chans)
    if kernel is not None:
        found['patch_size'], own['patch_size'] = short_size(kernel), short_size(model.kernel_size)
        grid = _grid_of_entries(entries, num_prefix_tokens, getattr(model, 'no_embed_class', True))
        if grid is not None:
            strides = [s // k * n for s, k, n in zip(model.patch_size, model.kernel_size, kernel)]
            found['img_size'] = short_size([size * stride for size, stride in zip(grid, strides)])
            own['img_size'] = short_size([size * stride for size, stride in zip(model.grid_size, model.patch_size)])
    width = shape(f'{prefix}cls_token') or shape('norm.weight')
    if width:
        found['embed_dim'], own['embed_dim'] = width[-1], model.embed_dim
    blocks = [int(match[1]) for match in (re.match(r'blocks\.(\d+)\.', k) for k in entries) if match]
    if blocks:
        found['depth'], own['depth'] = max(blocks) + 1, len(model.blocks)
    if shape('head.weight'):
        found['num_classes'], own['num_classes'] = shape('head.weight')[0], model.num_classes
    return {name: value for name, value in found.items() if name not in own or own[name] != value}


def _differing_encodings(entries: Mapping[str, torch.Tensor], model: nn.Module) -> Dict[str, Any]:
    """`pos_enc`, `pos_enc_kwargs` and `logit_scaling` as the entries tell them, where they are not the model's."""
    def named(names: Iterable[str]) -> Set[str]:
        matches = (re.search(r'(?:^|\.attn\.)encodings\.(\w+)\.', name) for name in names)
        return {match[1] for match in matches if match} - {'logit_scaling'}

    saved, parts = named(entries), set(model.pos_enc.split('+')) - {'nope'}
    has_ape = any(name in entries for name in TABLES) and not model.base_position  # else it is the base's own table
    if has_ape and 'auto_ape' not in saved:
        saved.add('ape')
    # An encoding without parameters has entries only if it rescales. Without any it may be there or not.
    silent = parts - named(name for name, _ in model.named_parameters()) - {'ape'}
    found: Dict[str, Any] = {}
    if saved - silent != parts - silent:
        found['pos_enc'] = '+'.join(sorted(saved)) or 'nope'
    else:
        saved |= silent

    changed, with_grids = {}, {path.rpartition('.')[2] for path, _ in _encodings_that_save_grids(model)}
    for name in sorted(saved):
        own = model.pos_enc_kwargs.get(name, {})
        has_grid = any(k.endswith(f'encodings.{name}{GRID}') for k in entries)
        is_known = name.removeprefix(AUTO) in list_encodings()
        if is_known and 'resolution' in encoding_keywords(name) and has_grid != (name in with_grids):
            changed[name] = {**own, 'resolution': 'rescale' if has_grid else 'extrapolate'}
    logit_scaling = 'log' if LOGIT_SCALING + GRID in entries else 'constant'
    if logit_scaling != model.logit_scaling:
        found['logit_scaling'] = logit_scaling
    if changed:
        found['pos_enc_kwargs'] = {**{k: v for k, v in model.pos_enc_kwargs.items() if k in saved}, **changed}
    return found


def _grid_of_entries(
        entries: Mapping[str, torch.Tensor],
        num_prefix_tokens: int,
        no_embed_class: bool,
) -> Optional[GridSize]:
    """The grid that a checkpoint says or shows, None if it does neither."""
    for grid in saved_grids(entries).values():
        return grid
    if 'embeds.pos_embed' in entries and entries['embeds.pos_embed'].ndim == 4:
        height, width = entries['embeds.pos_embed'].shape[1:3]
        return height, width
    if 'pos_embed' in entries and entries['pos_embed'].ndim == 3:
        rows = entries['pos_embed'].shape[1] - (0 if no_embed_class else num_prefix_tokens)
        side = math.isqrt(max(rows, 0))
        return (side, side) if side ** 2 == rows > 0 else None
    return None


def _kernel_size(weight: Sequence[int], in_chans: int) -> Optional[Tuple[int, int]]:
    """Height and width of the kernel of a patch embedding with weights of this shape. None if they do not tell."""
    if len(weight) == 4:
        return weight[2], weight[3]
    if len(weight) != 2:
        return None
    side = math.isqrt(weight[1] // in_chans)
    return (side, side) if side ** 2 * in_chans == weight[1] else None


def with_saved_keywords(kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """What a saved model (`local-dir:`, `hf-hub:`) is built with: its own `pos_enc_kwargs` where the caller gives none.

    Args:
        kwargs: The caller's, over those that it was saved with, which are `pretrained_model_args`.

    Raises:
        ValueError: If the caller's `pos_enc_kwargs` are wrong.
    """
    saved, given = kwargs.get('pretrained_model_args') or {}, kwargs.get('pos_enc_kwargs')
    if 'pos_enc' not in saved or parse_pos_enc(saved['pos_enc']).keys() != parse_pos_enc(kwargs['pos_enc']).keys():
        return kwargs
    parse_pos_enc(kwargs['pos_enc'], given)
    return {**kwargs, 'pos_enc_kwargs': merge_keywords(saved.get('pos_enc_kwargs'), given)}


def refuse_other_encoding(
        variant: str,
        kwargs: Dict[str, Any],
        fix: str = '',
) -> None:
    """Refuse to build a saved model (`local-dir:`, `hf-hub:`) with other encodings than it was trained with.

    Two encodings may have the same parameters, or none at all, so weights alone could not tell.

    Args:
        variant: The model's name, for the message.
        kwargs: What the model is about to be built with; `pretrained_model_args` is what it was saved with.
        fix: End of the message where parts differ. Default: to leave out the argument that contradicts.

    Raises:
        ValueError: If they disagree about the encoding.
    """
    saved = kwargs.get('pretrained_model_args') or {}
    if 'pos_enc' not in saved:
        return
    was = parse_pos_enc(saved['pos_enc'], saved.get('pos_enc_kwargs'))
    now = parse_pos_enc(kwargs['pos_enc'])
    if was.keys() == now.keys():
        now = parse_pos_enc(kwargs['pos_enc'], kwargs.get('pos_enc_kwargs'))

    def meant(parts):
        # Rules for other sizes, and what is random in training, may be chosen anew. The gate is loaded.
        merged = {name: {**encoding_keywords(name), **keywords} for name, keywords in parts.items()}
        return {
            name: {k: v for k, v in keywords.items() if k not in ('init', *get_encoding(name).changeable_keywords)}
            for name, keywords in merged.items()}

    if meant(was) != meant(now):
        def spell(parts):
            keywords = {name: values for name, values in parts.items() if values}
            return '+'.join(parts) + (f' with {keywords}' if keywords else '')

        wrong = 'pos_enc_kwargs' if was.keys() == now.keys() else 'pos_enc'
        if not fix or wrong == 'pos_enc_kwargs':
            fix = f'Leave {wrong} out, or start from the architecture by its name.'
        raise ValueError(
            f'The saved model {variant!r} was trained with pos_enc {spell(was)}, which cannot be changed to '
            f'{spell(now)} when it is loaded. {fix}')


def refuse_other_heads(variant: str, kwargs: Mapping[str, Any], find_default: Callable[[], int]) -> None:
    """Like `refuse_other_encoding` for the number of heads, which weights do not show either.

    Args:
        variant: The model's name.
        kwargs: What the caller and the saved config ask for.
        find_default: Finds the number of a model for which neither does.

    Raises:
        ValueError: If a saved model would get another number than it was trained with.
    """
    saved, given = kwargs.get('pretrained_model_args') or {}, kwargs.get('num_heads')
    if 'pos_enc' not in saved or given is None or given == saved.get('num_heads'):
        return
    own = saved.get('num_heads') or find_default()
    if given != own:
        raise ValueError(
            f'The saved model {variant!r} was trained with {own} heads, not {given!r}. Leave num_heads out.')


def unreadable(variant: str, error: Exception) -> Optional[ValueError]:
    """What to say plainly where a file cannot be read. torch and safetensors raise anything, from KeyError on.

    Returns:
        The error to raise. None if `error` comes from the operating system, the network or the Hub and is plain enough
        itself. Only the system's 'Invalid argument' is not: a damaged file can send its reader to before its start.
    """
    package = type(error).__module__.split('.')[0]
    of_the_system = isinstance(error, OSError) and error.errno != errno.EINVAL
    if of_the_system or package in ('huggingface_hub', 'httpx', 'requests'):
        return None
    if 'No pretrained weights exist' in str(error):  # says timm
        return ValueError(
            f'There are no pretrained weights for {variant!r}. Give a file, pretrained_cfg_overlay=dict(file=...) '
            "(scripts: --pretrained-path), or graft the encoding onto timm's weights, timm_sape.graft(...), or "
            'leave pretrained out.')
    return ValueError(
        f'Cannot read the checkpoint for {variant!r}, is it truncated or no checkpoint? Copy or save it again. '
        f'({error})')
