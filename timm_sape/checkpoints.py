"""What happens between a checkpoint file and a model: conversion, resizing, and refusal of what does not belong.

As in timm, conversion and resizing happen on the pretrained roads (`pretrained=True`, train.py's `--pretrained-path`,
`local-dir:`, `hf-hub:`), by `filter_state_dict`. On the others (`--initial-checkpoint`, `--resume`, validate.py's
`--checkpoint`) what does not fit is refused, by `refuse_misfit`.
"""
import traceback
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed, to_2tuple
from timm.models.vision_transformer import checkpoint_filter_fn

from . import ops
from .encodings import CoordinateEncoding, ReferenceGridEncoding, ResizedEncoding, encoding_keywords, parse_pos_enc

__all__ = [
    'filter_state_dict',
    'from_timm',
    'misfit',
    'readable_errors',
    'refuse_misfit',
    'refuse_other_encoding',
    'unwrap',
]

ROADS = (
    "timm.create_model(..., pretrained=True, pretrained_cfg_overlay=dict(file=...)), 'local-dir:', 'hf-hub:', "
    'or train.py --pretrained-path')


def filter_state_dict(
        state_dict: Dict[str, torch.Tensor],
        model: nn.Module,
        ref_grid_size: Optional[Sequence[int]] = None,
) -> Dict[str, torch.Tensor]:
    """Make a checkpoint fit a model of the same encodings and another grid, or of timm's naming.

    Args:
        state_dict: The checkpoint.
        model: A `VisionTransformerPosEnc`. Its tables take the size of the checkpoint's, where those are never resized.
        ref_grid_size: The trained grid, if the user gave one; the checkpoint's own must not differ.

    Raises:
        ValueError: If entries are missing or left over outside the head, or have the wrong shape.
    """
    state_dict = from_timm(unwrap(state_dict), model)
    grid = _grid_of_table(state_dict, model)
    if grid is not None and model.patch_size != model.patch_embed.patch_size:
        # timm takes it from the last kernel, and knows nothing of the convolutional stem before that
        pos_embed = resample_abs_pos_embed(
            state_dict['pos_embed'],
            new_size=model.patch_embed.grid_size,
            old_size=grid,
            num_prefix_tokens=_num_prefix_rows(model),
        )
        state_dict = {**state_dict, 'pos_embed': pos_embed}
    state_dict = checkpoint_filter_fn(state_dict, model)

    for key, encoding in _saved_grids(model):
        path, is_reference = key.removesuffix('._extra_state'), isinstance(encoding, ReferenceGridEncoding)
        if key in state_dict and not is_reference:
            _resize(state_dict, path, encoding)
        elif key in state_dict:
            saved = encoding.read_extra_state(state_dict[key])
            if ref_grid_size is not None and saved != tuple(ref_grid_size):
                raise ValueError(
                    f'ref_grid_size={tuple(ref_grid_size)} was given, but the checkpoint was trained on {saved}. '
                    'Leave it out.')
            encoding.set_ref_grid_size(saved)
        elif is_reference and ref_grid_size is not None:
            state_dict[key] = encoding.get_extra_state()
        elif isinstance(encoding, CoordinateEncoding) and model.pretrained_model_args:
            # saved as 'extrapolate', where it did not matter
            encoding.set_ref_grid_size(_grid_of_the_config(model))
            state_dict[key] = encoding.get_extra_state()
        elif is_reference or any(name.startswith(f'{path}.') for name in state_dict):
            fix = 'give ref_grid_size=(H, W)' if is_reference else 'put it there, torch.tensor([H, W])'
            raise ValueError(
                f'The checkpoint does not say on which grid its encodings were trained, it lacks {key}. If they are '
                f'those of pos_enc={model.pos_enc!r}, {fix}.')

    for path, encoding in model.position_encodings().items():
        if isinstance(encoding, CoordinateEncoding) and encoding.saved_grid_size() is None:
            state_dict.pop(f'{path}._extra_state', None)  # saved as 'rescale'; now coordinates go on

    # timm is about to adapt the heads to the number of classes, and this kernel to the number of channels
    heads = tuple(f'{name}.' for name in _names(model.pretrained_cfg['classifier']))
    kernels = tuple(f'{name}.weight' for name in _names(model.pretrained_cfg['first_conv']))
    report = misfit(state_dict, model.state_dict(), ignore=heads, any_shape=kernels)
    if report:
        raise ValueError(f'The checkpoint does not fit the model with pos_enc={model.pos_enc!r}: {report}.')
    return state_dict


def unwrap(state_dict: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The state dict itself, out of what trainers save.

    Raises:
        ValueError: If it is none.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f'The checkpoint is no state dict but a {type(state_dict).__name__}.')
    state_dict = state_dict.get('model', state_dict)
    return state_dict.get('state_dict', state_dict)


def _names(entry: Union[None, str, Sequence[str]]) -> Sequence[str]:
    """Module names out of a config, which has one, several or none."""
    return (entry,) if isinstance(entry, str) else entry or ()


def _saved_grids(model: nn.Module) -> List[Tuple[str, Union[ReferenceGridEncoding, ResizedEncoding]]]:
    """Encodings that save the grid of their parameters, with the names under which they do."""
    return [
        (f'{path}._extra_state', encoding) for path, encoding in model.position_encodings().items()
        if isinstance(encoding, (ReferenceGridEncoding, ResizedEncoding)) and encoding.saved_grid_size() is not None]


def _grid_of_the_config(model: nn.Module) -> Tuple[int, int]:
    """The grid that a saved model was made for, by its config."""
    args = model.pretrained_model_args
    size = to_2tuple(args.get('img_size') or model.pretrained_cfg['input_size'][-2:])
    kernel = to_2tuple(args.get('patch_size') or model.patch_embed.patch_size)
    return _grid_of(model, size, kernel)


def _grid_of(model: nn.Module, size: Tuple[int, int], kernel: Tuple[int, int]) -> Tuple[int, int]:
    """The grid of an image, if the patch embedding ends in another kernel than the model's."""
    strides = (s // k * n for s, k, n in zip(model.patch_size, model.patch_embed.patch_size, kernel))
    height, width = (size // stride for size, stride in zip(size, strides))
    return height, width


def _resize(state_dict: Dict[str, torch.Tensor], path: str, encoding: ResizedEncoding) -> None:
    """Resample the entries of an encoding to its own grid."""
    saved = encoding.read_extra_state(state_dict[f'{path}._extra_state'])
    if saved == encoding.grid_size:
        return
    for name in encoding.RESIZED:
        key = f'{path}.{name}'
        if key in state_dict:
            state_dict[key] = encoding.resample(name, state_dict[key], saved, encoding.grid_size)
    state_dict[f'{path}._extra_state'] = encoding.get_extra_state()


def _num_prefix_rows(model: nn.Module) -> int:
    """How many rows of `pos_embed` are for prefix tokens."""
    return 0 if model.no_embed_class else model.num_prefix_tokens


def _grid_of_table(state_dict: Dict[str, torch.Tensor], model: nn.Module) -> Optional[Tuple[int, int]]:
    """The grid of a `pos_embed`, None if there is none or nothing says what it is.

    timm takes it for square where nothing is known, and fails obscurely if it is not.

    Raises:
        ValueError: If it cannot be square.
    """
    pos_embed, patch = state_dict.get('pos_embed'), state_dict.get('patch_embed.proj.weight')
    if pos_embed is None or model.pos_embed is None or patch is None:
        return None
    rows, num_prefix_rows = pos_embed.shape[1], _num_prefix_rows(model)
    saved_size = model.pretrained_model_args.get('img_size')
    height, width = to_2tuple(saved_size or model.pretrained_cfg['input_size'][-2:])
    grid = _grid_of(model, (height, width), patch.shape[-2:])
    fits = is_known = rows - num_prefix_rows == grid[0] * grid[1]
    if saved_size is None:  # a bare file, perhaps with a declared size that is that of the architecture
        side = round(max(rows - num_prefix_rows, 0) ** 0.5)
        fits = fits or rows == model.pos_embed.shape[1] or rows - num_prefix_rows == side ** 2
    if not fits or rows <= num_prefix_rows:
        raise ValueError(
            f'pos_embed of the checkpoint has {rows} rows, {num_prefix_rows} of them for prefix tokens, as the model '
            f'has it; the others are neither a square grid nor that of a {height}x{width} image. Create the model with '
            'the prefix tokens of the checkpoint (class_token, reg_tokens, no_embed_class), and say what it was '
            'trained on: pretrained_cfg_overlay=dict(file=..., input_size=(3, height, width)).')
    return grid if is_known else None


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

    missing = [k for k in expected if k not in state_dict and not k.startswith(ignore)]
    unexpected = [k for k in state_dict if k not in expected and not k.startswith(ignore)]
    shapes = [
        f'{k} {list(state_dict[k].shape)} instead of {list(v.shape)}' for k, v in expected.items()
        if k in state_dict and state_dict[k].shape != v.shape and k not in any_shape and not k.startswith(ignore)]
    reports = (('it lacks ', missing), ('it has ', unexpected), ('it has ', shapes))
    return '; '.join(what + listed(keys) for what, keys in reports if keys)


def refuse_misfit(model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Say plainly, before anything is loaded, when a checkpoint has other encodings or another grid.

    Args:
        model: A `VisionTransformerPosEnc`.
        state_dict: The checkpoint.
        strict: If False, missing and additional entries are left to torch, which reports them, and only shapes count.

    Raises:
        ValueError: If entries of encodings are missing, left over, or have another shape.
    """
    def position(entries: Mapping[str, Any]) -> Dict[str, Any]:
        return {
            k: v for k, v in entries.items()
            if k == 'pos_embed' or k.startswith('encodings.') or '.attn.encodings.' in k}

    given, expected = position(state_dict), position(model.state_dict())
    if not strict:
        given = {k: v for k, v in given.items() if k in expected}
        expected = {k: v for k, v in expected.items() if k in given}
    report = misfit(given, expected)
    grids = [(encoding.read_extra_state(given[k]), encoding) for k, encoding in _saved_grids(model) if k in given]
    other = [(saved, encoding) for saved, encoding in grids if saved != encoding.saved_grid_size()]
    if not report and other:
        report = f'it was trained on grid {other[0][0]} instead of {other[0][1].saved_grid_size()}'
    if report:
        hint = ' and ref_grid_size (for scripts: --model-kwargs ref_grid_size={},{})'
        other = [saved for saved, encoding in other if isinstance(encoding, ReferenceGridEncoding)]
        as_is = hint.format(*other[0]) if other else ''
        raise ValueError(
            f'The checkpoint does not fit the position encodings of the model (pos_enc={model.pos_enc!r}, grid '
            f'{model.patch_embed.grid_size}): {report}. Nothing is resized on this road. To adapt a checkpoint of the '
            f'same encodings to another size use {ROADS}; to load it as it is, create the model with its pos_enc, '
            f'img_size{as_is}.')


def refuse_other_encoding(variant: str, kwargs: Dict[str, Any]) -> None:
    """The saved config of a `local-dir:` or `hf-hub:` model decides what its parameters mean.

    Two encodings may have the same parameters, or none at all, so weights alone could not tell.

    Args:
        variant: The model's name, for the message.
        kwargs: What the model is about to be built with; `pretrained_model_args` is what it was saved with.

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
        # another rule for other resolutions is a choice, and changes nothing on the trained one
        merged = {name: {**encoding_keywords(name), **keywords} for name, keywords in parts.items()}
        return {name: {k: v for k, v in keywords.items() if k != 'resolution'} for name, keywords in merged.items()}

    if meant(was) != meant(now):
        def spell(parts):
            keywords = {name: values for name, values in parts.items() if values}
            return '+'.join(parts) + (f' with {keywords}' if keywords else '')

        raise ValueError(
            f'The saved model {variant!r} was trained with pos_enc {spell(was)}, which cannot be changed to '
            f'{spell(now)} when it is loaded. Leave pos_enc out, or start from the architecture by its name.')


@contextmanager
def readable_errors(variant: str) -> Iterator[None]:
    """Turn what torch and safetensors say of a file that they cannot read into what has happened.

    They raise anything from KeyError to RuntimeError, so an error counts by where it comes from: timm's readers. What
    the operating system or the network says (OSError) is left as it is.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as e:
        calls = [(f.f_code.co_name, f.f_globals.get('__name__', '')) for f, _ in traceback.walk_tb(e.__traceback__)]
        if any(module.startswith('huggingface_hub') for _, module in calls):
            raise  # of the network, not of the file
        readers = ('load_state_dict', 'load_state_dict_from_path', 'load_state_dict_from_hf')
        if any(name in readers and module.startswith('timm.models') for name, module in calls):
            raise ValueError(
                f'Cannot read the checkpoint for {variant!r}, is it truncated or no checkpoint? ({e})') from e
        raise


def from_timm(state_dict: Mapping[str, torch.Tensor], model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Rename what timm's rotary and relative-position ViTs save; other checkpoints are returned as they are.

    Args:
        state_dict: The checkpoint.
        model: A `VisionTransformerPosEnc`. It is converted only if this has the encoding that it becomes.
    """
    parts = model.pos_enc.split('+')
    # timm's other rotary models, all of which have register tokens, have another base and order of axes
    is_naver = 'blocks.0.gamma_1' in state_dict and 'cls_token' in state_dict and 'reg_token' not in state_dict
    if is_naver and {'rope2d', 'rope2d_mixed'} & set(parts):
        return _convert_naver(state_dict, model)
    if 'cpb' in parts:
        return _convert_relpos(state_dict, model)
    return state_dict


def _convert_relpos(state_dict: Mapping[str, torch.Tensor], model: nn.Module) -> Dict[str, torch.Tensor]:
    """timm's `vit_relpos_*` and `vit_srelpos_*`, whose layers share one MLP, to `cpb` with `mode='cr'`."""
    out = {}
    for key, value in state_dict.items():
        shared = key.removeprefix('shared_rel_pos.')
        if shared != key:
            out.update({f'blocks.{i}.attn.encodings.cpb.{shared}': value for i in range(len(model.blocks))})
        else:
            out[key.replace('.attn.rel_pos.mlp.', '.attn.encodings.cpb.mlp.')] = value
    return out


def _convert_naver(state_dict: Dict[str, torch.Tensor], model: nn.Module) -> Dict[str, torch.Tensor]:
    """timm's `vit_*_patch16_rope*_224` (its Eva class) to `rope2d` and `rope2d_mixed`.

    Their layer scale is folded into the projections before it if the model has none. One tensor holds the mixed
    frequencies of all layers, `[2, L, h, d/2]`. Their `pos_embed` has no rows for prefix tokens: zeros are put there.
    """
    out = {}
    for key, value in state_dict.items():
        if key == 'rope.freqs':
            for i in range(value.shape[1]):
                out[f'blocks.{i}.attn.encodings.rope2d_mixed.freqs'] = value[:, i]
        elif key == 'pos_embed' and model.pos_embed is not None:
            out[key] = F.pad(value, (0, 0, _num_prefix_rows(model), 0))
        else:
            out[key] = value
    for i in range(len(model.blocks)):
        for n, layer in ((1, 'attn.proj'), (2, 'mlp.fc2')):
            gamma = out.pop(f'blocks.{i}.gamma_{n}', None)
            if gamma is None:
                continue
            if isinstance(getattr(model.blocks[i], f'ls{n}'), nn.Identity):
                for key in (f'blocks.{i}.{layer}.weight', f'blocks.{i}.{layer}.bias'):
                    value, gain = ops.upcast(out[key], gamma)
                    out[key] = value * gain.view(-1, *(1,) * (value.ndim - 1))
            else:
                out[f'blocks.{i}.ls{n}.gamma'] = gamma
    return out
