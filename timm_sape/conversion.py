"""Conversion of checkpoints: of timm's rotary ViTs and ViTs with relative position, and from one host to another."""
import math
import warnings
from typing import Any, Collection, Dict, Iterable, Mapping, Optional, Sequence, Tuple, Union

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import resample_patch_embed, to_2tuple
from timm.models import PretrainedCfg, adapt_input_conv
from timm.models.vision_transformer import checkpoint_filter_fn

from . import ops
from .encodings import ResizedEncoding
from .encodings.ape import resample_pos_embed

__all__ = [
    'GRID',
    'GridSize',
    'convert_to_naflex',
    'convert_to_plain',
    'declared_grid',
    'fit_patch_embedding',
    'from_timm',
    'grid_of_table',
    'has_saved_weights',
    'saved_grids',
    'short_size',
    'trained_kernel',
    'warn_of_resizing',
]

GRID = '._extra_state'  # suffix of the entry in which an encoding saves its grid

GridSize = Tuple[int, int]


def convert_to_plain(state_dict: Mapping[str, torch.Tensor], model: nn.Module) -> Dict[str, torch.Tensor]:
    """A checkpoint under the names of a `VisionTransformerPosEnc`, with patch embedding and table of its sizes."""
    entries = _with_convolution(from_timm(state_dict, model), model)
    is_dinov2 = 'register_tokens' in entries  # by names of its own, with a table that timm has to split
    if is_dinov2 and model.pos_embed is not None and not model.no_embed_class:
        raise ValueError(
            'The checkpoint is one of DINOv2 with registers, for which its table has no rows. Create the model with '
            'no_embed_class=True.')
    if model.pos_embed is None or is_dinov2 or not {'pos_embed', 'patch_embed.proj.weight'} <= entries.keys():
        return checkpoint_filter_fn(entries, model)
    # Not by timm, which knows neither what encodings have saved nor of a convolutional stem before the last kernel.
    prefix = _num_prefix_rows(model)
    grid = grid_of_table(entries, model, {prefix})
    _refuse_other_prefix_rows(entries, model, grid)
    table = resample_pos_embed(entries.pop('pos_embed'), grid, model.grid_size, prefix)
    return {**checkpoint_filter_fn(entries, model), 'pos_embed': table}


def convert_to_naflex(
        state_dict: Mapping[str, torch.Tensor],
        model: nn.Module,
        grid: Optional[GridSize] = None,
) -> Dict[str, torch.Tensor]:
    """A checkpoint under the names of a `NaFlexVitPosEnc`, with patch embedding and table of its sizes.

    It may be of a plain model. Rows that its table has for prefix tokens are added to these tokens.

    Args:
        state_dict: The checkpoint.
        model: The model.
        grid: The grid of a plain model's table. None to find it out.

    Raises:
        ValueError: If the grid cannot be found out, or rows for prefix tokens cannot be added to them.
    """
    out = _with_convolution(state_dict, model)
    if 'patch_embed.proj.weight' in out:
        rows = out.get('pos_embed')
        tokens = [name for name in ('cls_token', 'reg_token') if name in out]
        num_prefix_tokens = sum(out[name].shape[1] for name in tokens)
        if rows is not None:
            grid = grid or grid_of_table(out, model, {0, num_prefix_tokens})
            split = rows.shape[1] - math.prod(grid)
            if split and model.encodings.acting_on('mix'):
                raise ValueError(
                    f'The checkpoint has a pos_embed with rows for its prefix tokens, which {model.pos_enc!r} weighs '
                    'apart from these tokens, so they cannot be added to them. Train the plain model with '
                    'no_embed_class=True.')
            gate = out.get('encodings.auto_ape.gate.weight')
            of_prefix = rows[:, :split] if gate is None else rows[:, :split] * (100 * gate)
            for name in tokens if split else ():
                out[name] = out[name] + of_prefix[:, :out[name].shape[1]]
                of_prefix = of_prefix[:, out[name].shape[1]:]
            out['embeds.pos_embed'] = out.pop('pos_embed')[:, split:].unflatten(1, grid)
        for name in [*tokens, *(key for key in out if key.startswith('patch_embed.'))]:
            out['embeds.' + name.removeprefix('patch_embed.')] = out.pop(name)
    if 'embeds.proj.weight' in out:
        out['embeds.proj.weight'] = fit_patch_embedding(out['embeds.proj.weight'], model)
    table, own = out.get('embeds.pos_embed'), model.embeds.pos_embed
    if table is not None and own is not None and table.shape[1:3] != own.shape[1:3]:
        old, new = tuple(table.shape[1:3]), model.grid_size
        warn_of_resizing(old, model)
        table = resample_pos_embed(table.flatten(1, 2), old, new)
        out['embeds.pos_embed'] = table.unflatten(1, new)
    return out


def warn_of_resizing(grid: GridSize, model: nn.Module) -> None:
    """Say that a table of a checkpoint, for this grid, is resized twice in a NaFlexVit."""
    size = short_size([length * patch for length, patch in zip(grid, model.patch_size)])
    warnings.warn(
        f"The checkpoint's table is for {_spell([grid])} patches. It is resized to {_spell([model.grid_size])}, the "
        "model's own, and from there to the grid of each image. To keep it as it is, create the model with "
        f'img_size={size}.')


def _with_convolution(state_dict: Mapping[str, torch.Tensor], model: nn.Module) -> Dict[str, torch.Tensor]:
    """A checkpoint of a plain model with its patch embedding as a convolution. Old ones have it as a linear layer.

    That of a NaFlexVit has another name, and its inputs another order.
    """
    weight = state_dict.get('patch_embed.proj.weight')
    if weight is None or weight.ndim != 2:
        return dict(state_dict)
    return {**state_dict, 'patch_embed.proj.weight': weight.unflatten(1, (-1, *trained_kernel(weight, model)))}


def fit_patch_embedding(weight: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """Weights of a patch embedding for the patch size and the channels of a NaFlexVit.

    timm adapts the number of channels of convolutions alone, and would start a linear layer from random weights.

    Args:
        weight: Of a convolution, `[D, C, ph, pw]`, or of a linear layer, `[D, ph*pw*C]`, for the patch size that
            `trained_kernel` finds. C is what the model's config declares for the checkpoint. A saved config says
            whether channels come last; without one it is as in the model.
        model: timm's NaFlexVit or ours.

    Returns:
        The weights in the form that the model has. With another number of channels than declared they stay as they are.
    """
    embeds, channels = model.embeds, _num_channels(model)
    trained = trained_kernel(weight, model)
    if weight.ndim == 2 and weight.shape[1] == math.prod(trained) * channels:
        saved = getattr(model, 'pretrained_model_args', None)
        channels_last = saved.get('patchify_channels_last', True) if saved else embeds.channels_last
        weight = weight.unflatten(1, (*trained, channels) if channels_last else (channels, *trained))
        weight = weight.permute(0, 3, 1, 2) if channels_last else weight
    if weight.ndim != 4:
        return weight
    if weight.shape[2:] != embeds.patch_size:
        weight = resample_patch_embed(weight, list(embeds.patch_size))
    if weight.shape[1] == channels:
        weight = adapt_input_conv(embeds.in_chans, weight, channels)
    if embeds.is_linear:
        weight = (weight.permute(0, 2, 3, 1) if embeds.channels_last else weight).flatten(1)
    return weight


def _num_channels(model: nn.Module) -> int:
    """How many channels the model's config declares for the checkpoint."""
    return (model.pretrained_cfg.get('input_size') or (3,))[0]


def trained_kernel(weight: torch.Tensor, model: nn.Module) -> Tuple[int, int]:
    """(height, width) of the kernel that weights of a patch embedding are for.

    A convolution shows it. For a linear layer a saved config says it, or leaves it to the default of a name: a square.
    """
    if weight.ndim == 4:
        height, width = weight.shape[2:]
        return height, width
    if model.pretrained_model_args and weight.ndim == 2:
        side = math.isqrt(weight.shape[1] // _num_channels(model))
        return to_2tuple(model.pretrained_model_args.get('patch_size') or side)
    return model.embeds.patch_size if hasattr(model, 'embeds') else model.kernel_size


def grid_of_table(entries: Mapping[str, torch.Tensor], model: nn.Module, prefix_rows: Collection[int]) -> GridSize:
    """The grid of a plain model's `pos_embed`.

    It is known if a saved config has the size of the images, or if an encoding that is resized along with the table has
    saved its grid. Otherwise those that have the right number of rows are candidates: what other encodings have saved,
    the declared one, the model's own, and squares. Then

    - the declared one is taken, unless another saved one is a candidate. A warning says so if it is only the default of
      the name and the model's own is a candidate, too;
    - without the declared one, the only candidate is taken.

    Args:
        entries: The checkpoint.
        model: The model that it is loaded into.
        prefix_rows: How many rows of prefix tokens the table may have.

    Raises:
        ValueError: If no grid fits the number of rows, or several do and nothing decides between them.
    """
    rows = entries['pos_embed'].shape[1]
    declared = declared_grid(model, entries['patch_embed.proj.weight'].shape[-2:])
    saved, encodings = saved_grids(entries), model.position_encodings()
    resized = [grid for path, grid in saved.items() if isinstance(encodings.get(path), ResizedEncoding)]
    known = [declared] if _saved_size(model) else resized[:1]
    squares = [(math.isqrt(rows - n),) * 2 for n in prefix_rows if rows > n]
    candidates = known or [*saved.values(), declared, model.grid_size, *squares]
    fits = [grid for grid in dict.fromkeys(candidates) if rows - math.prod(grid) in prefix_rows]
    has = f'pos_embed of the checkpoint has {rows} rows, {" or ".join(map(str, sorted(prefix_rows)))} for prefix tokens'
    say = 'say what it was trained on: pretrained_cfg_overlay=dict(file=..., input_size=(3, height, width)).'
    if not fits:
        expected = f'not {_spell(known)}' if known else (
            f'neither a square grid nor {_spell([declared, model.grid_size])}')
        raise ValueError(
            f'{has}; the others are {expected}. Create the model with the prefix tokens of the checkpoint '
            f'(class_token, reg_tokens, no_embed_class), and {say}')
    others = [grid for grid in saved.values() if grid in fits and grid != declared]
    if len(fits) > 1 and (declared not in fits or others):
        raise ValueError(
            f'{has}; its grid may be {_spell(fits)}. To choose one, {say}' + (
                f' If it is not {_spell(others)}, because the model was resized before it was saved, load it by '
                'load_state_dict into a model of its size, then call set_input_size.' if others else ''))
    if not known and model.grid_size != declared and {model.grid_size, declared} <= {*fits} and _is_default_size(model):
        warnings.warn(
            f'{has}. It is taken to be of {_spell([declared])} patches, the default of the name, and resampled to '
            f'{_spell([model.grid_size])}, which are as many. If it is of those already, {say}')
    return declared if declared in fits else fits[0]


def _is_default_size(model: nn.Module) -> bool:
    """Whether the size that is declared for the weights is the one that their name has by default."""
    default = timm.get_pretrained_cfg(model.pretrained_cfg.get('architecture', '')) or PretrainedCfg()
    return tuple(model.pretrained_cfg['input_size']) == tuple(default.input_size)


def _refuse_other_prefix_rows(entries: Mapping[str, torch.Tensor], model: nn.Module, grid: GridSize) -> None:
    """
    Args:
        entries: The checkpoint of a plain model.
        model: A `VisionTransformerPosEnc`.
        grid: Of the checkpoint's table, if it has as many rows for prefix tokens as the model.

    Raises:
        ValueError: If the table has the size of the declared grid with rows for prefix tokens where the model has none,
            or without where it has some.
    """
    rows, expected = entries['pos_embed'].shape[1], _num_prefix_rows(model)
    declared = declared_grid(model, entries['patch_embed.proj.weight'].shape[-2:])
    other = model.num_prefix_tokens - expected
    if other != expected and grid != declared and rows - other == math.prod(declared):
        raise ValueError(
            f'pos_embed of the checkpoint has {rows} rows. That is {_spell([declared])} with {other} rows for prefix '
            f'tokens, but the model has no_embed_class={model.no_embed_class}, so {expected} of them. Create it with '
            f'no_embed_class={not model.no_embed_class}; or if the checkpoint was trained on {_spell([grid])}, say so: '
            'pretrained_cfg_overlay=dict(file=..., input_size=(3, height, width)).')


def saved_grids(entries: Mapping[str, Any]) -> Dict[str, GridSize]:
    """The grids that encodings have saved with their parameters, by the path of the encoding.

    As in `read_extra_state` of an encoding, which refuses what is no grid, they may be floats.
    """
    return {
        key.removesuffix(GRID): tuple(map(round, value.tolist())) for key, value in entries.items()
        if key.endswith(GRID) and isinstance(value, torch.Tensor) and value.shape == (2,) and not value.is_meta
        and not value.is_complex() and value.isfinite().all()}


def short_size(size: Sequence[int]) -> Union[int, Tuple[int, ...]]:
    """One number for both sides, where they are equal."""
    return size[0] if len(set(size)) == 1 else tuple(size)


def _spell(grids: Iterable[GridSize]) -> str:
    return ' or '.join(f'{height}x{width}' for height, width in dict.fromkeys(grids))


def declared_grid(model: nn.Module, kernel: Tuple[int, int]) -> GridSize:
    """The grid of the images that the model's config declares for a checkpoint, by saved arguments or `input_size`.

    Args:
        model: A `PosEncModel`.
        kernel: The last one of the checkpoint's patch embedding, which need not be the model's.
    """
    size = to_2tuple(_saved_size(model) or model.pretrained_cfg['input_size'][-2:])
    stem = (s // k for s, k in zip(model.patch_size, model.kernel_size))  # its convolutions round up
    height, width = (-(-side // s) // n for side, s, n in zip(size, stem, kernel))
    return height, width


def _saved_size(model: nn.Module) -> Union[None, int, Sequence[int]]:
    """`img_size` of the saved config, if the weights are those that were saved with it."""
    return model.pretrained_model_args.get('img_size') if has_saved_weights(model) else None


def has_saved_weights(model: nn.Module) -> bool:
    """Whether the weights are those that were saved with the config, in a folder or a repository.

    They are not if `pretrained_cfg_overlay` names a file, as for a checkpoint of a training that started from there.
    """
    return model.pretrained_cfg.get('source') in ('local-dir', 'hf-hub')


def _num_prefix_rows(model: nn.Module) -> int:
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
    # timm's other rotary models have another base and order of axes. DINOv3 has register tokens, Perception Encoder a
    # norm before the blocks, and EVA-02 no gamma.
    is_naver = 'blocks.0.gamma_1' in state_dict and 'cls_token' in state_dict and (
        state_dict.keys().isdisjoint({'reg_token', 'norm_pre.weight'}))
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
            out[key] = F.pad(value, (0, 0, _num_prefix_rows(model), 0))
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
