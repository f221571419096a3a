"""Accuracy and speed of models at different image sizes."""
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from timm.layers import to_2tuple
from torch.utils.data import Dataset

from ..encodings import get_encoding
from ..host import PosEncModel
from ..loading import (
    check_numbering,
    load_images,
    load_model,
    native_preprocessing,
    number_classes,
    patch_ratio,
    preprocessing,
)
from .evaluate import accuracy, predict, same_random_weights
from .machine import memory_size
from .rules import rules_of
from .tables import markdown, with_interval

__all__ = ['check_memory', 'check_sizes', 'sweep', 'sweep_table']

CROP_MODES = ('squash', 'center')
NATIVE = 'native'

Size = Tuple[int, int]


class _Variant(NamedTuple):
    """A model with one rule for other sizes, and the arguments of create_model that select the rule."""
    model: str
    rule: str
    kwargs: Dict[str, Any]


def sweep(
        models: Sequence[str],
        data: Dataset,
        sizes: Sequence[Union[int, Size]],
        *,
        batch_size: int = 64,
        num_images: Optional[int] = None,
        workers: int = 0,
        seed: int = 0,
        device: str = 'cpu',
        amp: bool = False,
        crop_mode: str = 'squash',
        native: bool = False,
        rules: Optional[Sequence[str]] = None,
        progress: bool = True,
) -> List[Dict[str, Any]]:
    """Evaluate each model at each size, with each of its rules for other sizes.

    A model is created again for each size, so that its weights are always adapted from the trained ones: tables are
    resampled, positions scaled, and so on. Our models are evaluated with each rule that `rules_of` finds: those of the
    encodings' keyword `resolution`, and the same with `logit_scaling='log'`. Most rules need the trained grid. If the
    file does not contain it, the grid at the default size of the model is used.

    All sizes show the same part of each image. timm's usual transform, `center`, does not: it resizes the image to
    cover the size and crops the rest, so the visible part depends on the aspect ratio. The default here is timm's
    `squash`. It resizes height and width independently to size / crop_pct, with crop_pct of the model, and crops the
    center. So every size shows the central crop_pct of the height and of the width, up to rounding to whole pixels, and
    the image is distorted if its aspect ratio is not that of the size. For square images and sizes, this is the same as
    in timm's validate.py. Use `center` to reproduce results of validate.py on other images, at square sizes, all of
    which show the central square.

    A NaFlexVit can also take each image at its own aspect ratio. With `native`, each size has a second row for that:
    the same part of each image, not distorted, in at most as many patches as the size has. Unlike this, validate.py
    with `--naflex-loader` shows the whole image.

    Args:
        models: Names as for `load_model`.
        data: Labelled images from `open_dataset`. Their transform is replaced.
        sizes: Image sizes in pixels, or (height, width).
        batch_size: Images in a batch.
        num_images: How many images to draw, the same for all models. None uses all.
        workers: Processes that load images.
        seed: Seed of the draw, and of models with random weights.
        device: Where the models run.
        amp: Use bfloat16 autocast.
        crop_mode: 'squash' or 'center', see above.
        native: Also evaluate each image at its own aspect ratio. Only for models of NaFlexVit.
        rules: Names of rules, as `rules_of` has them; of each model those that it has. Default: all.
        progress: Show progress bars on stderr.

    Returns:
        One row per model, rule and size, with these columns. `model`. `rule`: the name of the rule, such as
        'rescale' or 'rescale+log'; 'own' if the encodings have a single one; 'timm' for models of timm. `height` and
        `width`: in pixels. `images`: the crop mode, or 'native'. `patches`: of the size. `num_images`. `top1`, with its
        95 % Wilson interval `top1_low` to `top1_high`, and `top5`: in percent; the latter is None for five classes or
        fewer. `images_per_second`: of the model alone.

    Raises:
        ValueError: If the patch size does not divide a size, a model cannot be loaded, it does not take what `native`
            asks for, has none of the `rules`, does not fit into memory at a size, or the images do not fit the models.
            Sizes and models are checked before anything is evaluated.
    """
    if not models or not sizes:
        raise ValueError('A sweep needs at least one model and one size.')
    if crop_mode not in CROP_MODES:
        raise ValueError(f'crop_mode must be {" or ".join(CROP_MODES)}, got {crop_mode!r}.')
    if native and crop_mode == 'center':
        raise ValueError(
            "At their own aspect ratio images show more than their central square, which crop_mode='center' shows. Use "
            "'squash', so that all rows show the same part of them.")
    pairs: List[Size] = list(dict.fromkeys(to_2tuple(size) for size in sizes))
    for height, width in pairs:
        if crop_mode == 'center' and height != width:
            raise ValueError(
                f"crop_mode='center' would show another part of the images at {height}x{width} than at a square size. "
                "Use 'squash'.")
    number_classes(data, models)
    on_cpu = torch.device(device).type == 'cpu'
    batch = min(batch_size, len(data), num_images or batch_size) if on_cpu else 0
    variants = [
        variant for model in dict.fromkeys(models)
        for variant in _variants(model, data, pairs, batch, native, rules)]
    cases = [
        (variant, size, images) for variant in variants for size in pairs
        for images in ((crop_mode, NATIVE) if native else (crop_mode,))]
    rows = []
    for variant, size, images in cases:
        with same_random_weights(seed):
            model = load_model(variant.model, img_size=size, **variant.kwargs)
        patch_height, patch_width = patch_ratio(model)
        patches = size[0] // patch_height * (size[1] // patch_width)
        if images == NATIVE:
            data.transform = native_preprocessing(model, patches)
        else:
            data.transform = preprocessing(model, size, crop_mode=images)
        loader = load_images(
            data, batch_size, num_images, workers, seed, max_patches=patches if images == NATIVE else None)
        done = f'({len(rows) + 1}/{len(cases)})'
        where = f'{variant.model} {variant.rule} {size[0]}x{size[1]} {images} {done}'
        found = predict(model, loader, device, amp, where if progress else '')
        top1, top5 = accuracy(found.logits, found.labels), accuracy(found.logits, found.labels, 5)
        rows.append({
            'model': variant.model,
            'rule': variant.rule,
            'height': size[0],
            'width': size[1],
            'images': images,
            'patches': patches,
            'num_images': len(found.labels),
            'top1': round(100 * top1.value, 3),
            'top1_low': round(100 * top1.low, 3),
            'top1_high': round(100 * top1.high, 3),
            'top5': round(100 * top5.value, 3) if found.logits.shape[1] > 5 else None,
            'images_per_second': round(found.images_per_second, 1),
        })
    return rows


def _variants(
        spec: str,
        data: Dataset,
        sizes: Sequence[Size],
        batch: int,
        native: bool,
        rules: Optional[Sequence[str]],
) -> List[_Variant]:
    """List the rules of a model, and load it once with each, to fail before the work.

    Raises:
        ValueError: If the model has no patches, the patch size does not divide a size, a batch does not fit into memory
            there, the model takes no patches but `native` asks for it, or it has none of the rules.
    """
    model = load_model(spec)
    check_sizes(spec, sizes, patch_ratio(model, spec))
    check_memory(spec, sizes, model, batch)
    check_numbering(data, model, spec)
    if native:
        native_preprocessing(model, 1)
    variants = [_Variant(spec, rule, kwargs) for rule, kwargs in rules_of(model, rules, spec).items()]
    del model
    for variant in variants:
        load_model(spec, img_size=sizes[0], **variant.kwargs)
    return variants


def check_sizes(spec: str, sizes: Sequence[Size], patch: Size) -> None:
    """Check that patches of this size divide all sizes. timm's own models would silently ignore the remaining pixels.

    Raises:
        ValueError: If they do not, with sizes that would fit.
    """
    for size in sizes:
        if all(s >= p and s % p == 0 for s, p in zip(size, patch)):
            continue
        below = tuple(max(s // p, 1) * p for s, p in zip(size, patch))
        above = tuple(max(-(-s // p), 1) * p for s, p in zip(size, patch))
        fit = ' or '.join(dict.fromkeys(f'{height}x{width}' for height, width in (below, above)))
        raise ValueError(
            f'The patch size {patch[0]}x{patch[1]} of {spec} does not divide the size {size[0]}x{size[1]}. Use {fit}.')


def check_memory(spec: str, sizes: Sequence[Size], model: torch.nn.Module, batch: int) -> None:
    """Check that a model has room for a batch of each size in the memory of this machine.

    Counted are the tokens in a block, and the logits between all tokens where fused attention does not avoid them.

    Args:
        spec: What the message calls the model.
        sizes: (height, width) in pixels, multiples of the patch size.
        model: With patches.
        batch: Images in a batch; 0 if the model runs elsewhere.

    Raises:
        ValueError: If there is not enough memory at a size.
    """
    memory, blocks = memory_size(), getattr(model, 'blocks', None)
    attn = getattr(blocks[0], 'attn', None) if blocks else None
    if memory is None or attn is None or not batch:
        return
    parts = [get_encoding(part) for part in model.pos_enc.split('+')] if isinstance(model, PosEncModel) else []
    of_content = not getattr(attn, 'fused_attn', True) or any(
        part.overrides(hook) for part in parts for hook in ('values', 'content_bias'))
    of_position = any(part.overrides('position_bias') for part in parts)
    matrices = getattr(attn, 'num_heads', 1) * (batch if of_content else of_position)
    patch_height, patch_width = patch_ratio(model)
    for height, width in sizes:
        patches = height // patch_height * (width // patch_width)
        # float32: in a block the MLP has its tokens, and four times as wide what goes into GELU and what comes out
        need = 4 * (batch * patches * 9 * getattr(model, 'embed_dim', 0) + matrices * patches ** 2)
        if need > memory:
            raise ValueError(
                f'{spec} at {height}x{width} has {patches:,} patches, which take {need / 1e9:,.1f} GB in a batch of '
                f'{batch}, and this machine has {memory / 1e9:,.1f} GB. Use a smaller size or a smaller batch.')


def sweep_table(rows: Sequence[Dict[str, Any]]) -> str:
    """Format rows of `sweep` as a Markdown table."""
    return markdown([{
        'model': row['model'],
        'rule': row['rule'],
        'height x width (px)': f'{row["height"]}x{row["width"]}',
        **({'images': row['images']} if any(row['images'] == NATIVE for row in rows) else {}),
        'patches': row['patches'],
        'top-1 (%)': with_interval(row, 'top1'),
        'top-5 (%)': None if row['top5'] is None else f'{row["top5"]:.1f}',
        'images/s': f'{row["images_per_second"]:.1f}',
    } for row in rows])
