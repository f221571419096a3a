"""What a hook must return, checked at each call, so that a mistake in an encoding raises an error that names it.

Without the check most mistakes would show up far from their cause, and some not at all: a term without the axis of
layers would be added row by row, a bool bias would count as 0 and 1, and a forgotten `return` would mean no encoding.
"""
import math
from typing import Any, Sequence, Tuple, Union

import torch
import torch.nn as nn

from ...grid import Grid

__all__ = ['check_result']

PAIRS = ('mix', 'turn', 'channels')  # hooks that return two tensors
OF_BIAS = 'grid.between_tokens(bias) turns a bias between all patches into one between the tokens in the sequence.'
OF_TERM = 'grid.pad_tokens(term) adds rows for prefix tokens, grid.keep_tokens(table) takes the tokens in the sequence.'
HINTS = {
    'embed': OF_TERM,
    'layer_embed': f'It needs a term for each layer. {OF_TERM}',
    'turn': 'q and k must have the same number of channels, C of d or more; d if the class has a rotation, too.',
    'rotation': (
        'Prefix tokens have no rows; the columns are the sines of all channels, then their cosines. The angles of a '
        'RotaryEncoding are [(h,) H*W, d/2].'),
    'position_bias': OF_BIAS,
    'content_bias': OF_BIAS,
}


def check_result(
        encoding: nn.Module,
        hook: str,
        found: Any,
        tensors: Sequence[torch.Tensor],
        grid: Grid,
) -> None:
    """Check the number, the dtypes and the shapes of what a hook returned. Symbolic sizes are not looked at.

    Args:
        encoding: The `PositionEncoding`.
        hook: The name of its hook.
        found: What the hook returned.
        tensors: The tensors that it got; any tensor of the model's device if it takes none.
        grid: The grid that it got.

    Raises:
        ValueError: If something is not as the hook's docstring says.
    """
    what = f'{encoding.name!r}: {hook} returned'
    if found is None:
        raise ValueError(f'{what} None. Is a `return` missing?')
    is_pair = isinstance(found, (tuple, list)) and len(found) == 2
    if hook in PAIRS and not is_pair:
        raise ValueError(f'{what} {_described(found)}. It must return two tensors.')
    if hook == 'embed' and found is tensors[0]:
        raise ValueError(f'{what} the tokens that it got. It must return only the term to add to them.')
    for result in found if hook in PAIRS else (found,):
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            raise ValueError(f'{what} {_described(result)}. It must be a tensor of floating-point numbers.')
        if result.is_meta and not tensors[0].is_meta:
            raise ValueError(
                f'{what} a tensor on the meta device, which holds nothing. Compute it on {tensors[0].device}. '
                'A buffer that is not saved has no values after the model was built there: set it in '
                'init_non_persistent_buffers, and call that.')
        if hook in ('turn', 'channels') and result.dtype != tensors[0].dtype:
            raise ValueError(f'{what} {result.dtype}. It must have the dtype of q, {tensors[0].dtype}: .to(q.dtype).')
        axes, sizes, fixed = _expected(encoding, hook, result.ndim, tensors, grid)
        if hook in ('turn', 'channels'):
            num = found[0].shape[-1] if found[0].ndim else 0
            if hook == 'channels' or num > sizes[3] and not encoding.overrides('rotation'):
                sizes = (*sizes[:3], num)
        least = 3 if hook == 'layer_embed' else fixed
        wrong = [
            size for i, (size, expected) in enumerate(zip(reversed(result.shape), reversed(sizes)))
            if not (_same(size, expected) or size == 1 and i >= fixed)]
        if wrong or not least <= result.ndim <= len(sizes):
            hint, own = HINTS.get(hook, ''), math.prod(encoding.grid_size)
            if grid.size != encoding.grid_size and (own in wrong or own + grid.num_prefix_tokens in wrong):
                hint = (
                    "It has the size of the model's own grid. Compute it from `grid`. If it is a parameter, derive the "
                    'class from ResizedEncoding or ReferenceGridEncoding.')
            raise ValueError(
                f'{what} {list(result.shape)}, which {"is not" if fixed else "does not broadcast to"} [{axes}] = '
                f'[{", ".join(map(str, sizes))}], with {grid.num_prefix_tokens} prefix tokens. {hint}'.rstrip())


def _expected(
        encoding: nn.Module,
        hook: str,
        ndim: int,
        tensors: Sequence[torch.Tensor],
        grid: Grid,
) -> Tuple[str, Tuple[Union[int, str], ...], int]:
    """The axes of a result, their sizes, and how many of the last ones must be there: the others may be broadcast."""
    x, h, d = tensors[0], encoding.num_heads, encoding.head_dim
    batch, patches = (1, grid.num_patches) if grid.keep_indices is None else grid.keep_indices.shape
    n = grid.num_tokens
    if hook in ('embed', 'mix'):
        return 'B, N, D', tuple(x.shape), 0
    if hook == 'layer_embed':  # L is not known here: a model may have lost layers since
        images = (batch,) if ndim == 4 else ()
        return 'L, B, N, D' if images else 'L, N, D', ('L', *images, n, encoding.dim), 0
    if hook == 'rotation':
        return 'B, h, N-P, 2*d', (batch, h, patches, 2 * d), 2
    if hook == 'position_bias':
        return 'B, h, N, N', (batch, h, n, n), 0
    if hook == 'content_bias':
        return 'B, h, N, N', (*x.shape[:3], tensors[1].shape[2]), 0
    if hook == 'values':
        return 'B, h, N, d', (*x.shape[:3], d), 0
    return ('B, h, N, d' if hook == 'attend' else 'B, h, N, C'), (*x.shape[:3], d), 4  # turn, channels, attend


def _same(size: Any, other: Any) -> bool:
    """Whether two sizes are the same, as far as they are known."""
    return type(size) is not int or type(other) is not int or size == other


def _described(found: Any) -> str:
    if isinstance(found, torch.Tensor):
        return f'{found.dtype} {list(found.shape)}'
    if isinstance(found, (tuple, list)):
        return f'a {type(found).__name__} of {len(found)}'
    return f'{type(found).__name__} {found!r}'
