"""Checks of the arguments of models, which may be of any type."""
from typing import Any, Tuple

from .checks import MAX_INTEGER, is_integer, is_number
from .encodings import LOGIT_SCALINGS
from .grid import MAX_SIDE, is_grid_size

__all__ = [
    'as_pair',
    'check_flags',
    'check_integers',
    'check_logit_scaling',
    'check_model_args',
    'check_ref_grid_size',
    'check_sizes',
]


def check_model_args(embed_dim: Any, num_heads: Any, depth: Any, reg_tokens: Any, patch_drop_rate: Any) -> None:
    """Check the sizes of a model.

    Raises:
        ValueError: If one is not a number in its range, or the heads do not divide the embed dim.
    """
    if not is_number(patch_drop_rate) or not 0 <= patch_drop_rate < 1:
        raise ValueError(f'patch_drop_rate must be at least 0 and less than 1, got {patch_drop_rate!r}.')
    for name, value, least, most in (
            ('embed_dim', embed_dim, 1, MAX_INTEGER), ('num_heads', num_heads, 1, MAX_INTEGER),
            ('depth', depth, 1, 1000), ('reg_tokens', reg_tokens, 0, MAX_INTEGER)):
        if not is_integer(value, least) or value > most:
            raise ValueError(f'{name} must be an integer of at least {least} and at most {most:,}, got {value!r}.')
    if embed_dim % num_heads:
        raise ValueError(f'embed_dim={embed_dim} is not divisible by num_heads={num_heads}. Choose another num_heads.')


def check_integers(**sizes) -> None:
    """Check that each is an integer of at least 1, or a pair of them. None of numpy's: they are no JSON.

    Raises:
        ValueError: If one is not.
    """
    for name, size in sizes.items():
        size = as_pair(size)
        if len(size) != 2 or not all(is_integer(s, 1) for s in size):
            fix = ' Use int(...).' if any(hasattr(s, 'item') for s in size) else ''
            raise ValueError(f'{name} must be an integer of at least 1, or two: (height, width), got {size}.{fix}')


def as_pair(size: Any) -> Tuple[Any, ...]:
    """A size as a tuple: one number stands for both sides. Wrong input is returned as it is, for `check_integers`.

    timm's `to_2tuple` iterates over all that can be, and fails for a tensor that is a number.
    """
    return tuple(size) if isinstance(size, (tuple, list)) else (size, size)


def check_sizes(
        img_size,
        patch_size,
        pads: bool = False,
        pad: str = 'dynamic_img_size=True, dynamic_img_pad=True',
) -> None:
    """Check that patches tile an image; both sizes are int or (height, width).

    Args:
        img_size: Image size.
        patch_size: Patch size.
        pads: Whether the model pads images, for the message.
        pad: Arguments of the model by which it would, for the message.

    Raises:
        ValueError: If a size is not a positive integer, the patches do not tile the image, or there are too many.
    """
    check_integers(img_size=img_size, patch_size=patch_size)
    img_size, patch_size = as_pair(img_size), as_pair(patch_size)
    fit = tuple(max(1, round(i / p)) * p for i, p in zip(img_size, patch_size))
    if any(i < p for i, p in zip(img_size, patch_size)):
        raise ValueError(f'img_size={img_size} is smaller than patch_size={patch_size}. Use at least img_size={fit}.')
    if fit != img_size:
        raise ValueError(
            f'patch_size={patch_size} does not divide img_size={img_size}. Use e.g. img_size={fit} or another '
            f'patch_size; with that, {"the model" if pads else pad} pads images of any other size.')
    height, width = (i // p for i, p in zip(img_size, patch_size))
    if max(height, width) > MAX_SIDE or height * width > 2 ** 22:
        raise ValueError(
            f'img_size={img_size} makes {height:,} x {width:,} patches of patch_size={patch_size}, more than any model '
            'can use. Use a smaller img_size or a larger patch_size.')


def check_flags(**flags: Any) -> None:
    """Check that all are True or False.

    Raises:
        ValueError: If one is neither True nor False.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f'{name} must be True or False, got {value!r}.')


def check_logit_scaling(logit_scaling: Any) -> None:
    """Check that `logit_scaling` is known.

    Raises:
        ValueError: If it is not.
    """
    if logit_scaling not in LOGIT_SCALINGS:
        known = ' or '.join(map(repr, LOGIT_SCALINGS))
        raise ValueError(f'logit_scaling must be {known}, got {logit_scaling!r}.')


def check_ref_grid_size(ref_grid_size: Any) -> None:
    """Check that it is None or (H, W).

    Raises:
        ValueError: If it is neither None nor (H, W).
    """
    if ref_grid_size is not None and not is_grid_size(ref_grid_size):
        raise ValueError(
            f'ref_grid_size must be (H, W) in patches, two Python ints from 1 to {MAX_SIDE:,}, got {ref_grid_size!r}.')
