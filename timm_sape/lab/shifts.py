"""Accuracy of models on shifted images."""
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

from ..loading import check_classes, check_numbering, load_images, load_model, number_classes, preprocessing
from .evaluate import predict, same_random_weights, wilson_interval
from .tables import markdown, with_interval

__all__ = ['FILLS', 'shift_images', 'shift_sweep', 'shift_table']

FILLS = ('reflect', 'replicate', 'circular', 'constant')  # modes of torch.nn.functional.pad


def shift_images(images: torch.Tensor, down: int, right: int, fill: str = 'reflect') -> torch.Tensor:
    """Shift images by whole pixels.

    Args:
        images: `[B, C, height, width]`.
        down: Pixels; negative to shift up.
        right: Pixels; negative to shift left.
        fill: What fills the empty side, a mode of `torch.nn.functional.pad`. 'reflect' mirrors the image, 'replicate'
            repeats its border, 'circular' wraps around, 'constant' is 0, the mean colour of normalized images.

    Returns:
        `[B, C, height, width]`.

    Raises:
        ValueError: If the fill is unknown, or a shift is as large as the image.
    """
    _check_fill(fill)
    height, width = images.shape[-2:]
    if abs(down) >= height or abs(right) >= width:
        raise ValueError(
            f'A shift of {down} and {right} pixels moves all of a {height}x{width} image out of it. Shift by less than '
            'its height and width.')
    pad = max(right, 0), max(-right, 0), max(down, 0), max(-down, 0)
    return F.pad(images, pad, mode=fill)[..., pad[3]:pad[3] + height, pad[1]:pad[1] + width]


def _check_fill(fill: str) -> None:
    if fill not in FILLS:
        raise ValueError(f'fill must be one of {", ".join(FILLS)}, got {fill!r}.')


def shift_sweep(
        models: Sequence[str],
        data: Dataset,
        shifts: Sequence[int],
        *,
        fill: str = 'reflect',
        batch_size: int = 64,
        num_images: Optional[int] = None,
        workers: int = 0,
        seed: int = 0,
        device: str = 'cpu',
        amp: bool = False,
        progress: bool = True,
) -> List[Dict[str, Any]]:
    """Evaluate each model on images shifted up, down, left and right.

    Args:
        models: Names as for `load_model`.
        data: Labelled images from `open_dataset`. Their transform is replaced.
        shifts: Distances in pixels, 0 or more.
        fill: See `shift_images`.
        batch_size: Images in a batch.
        num_images: How many images to draw, the same for all models. None uses all.
        workers: Processes that load images.
        seed: Seed of the draw, and of random weights.
        device: Where the models run.
        amp: Use bfloat16 autocast.
        progress: Show progress bars on stderr.

    Returns:
        One row per model and shift, with these columns. `model`. `shift`: in pixels. `fill`. `num_images`. `top1`: mean
        of the four directions, in percent. `same`: how often the predicted class is that of the unshifted image, in
        percent. `..._low` to `..._high`: their 95 % Wilson intervals, in which the directions of an image count as one.
        There is a row for a shift of 0 only if it is in `shifts`.

    Raises:
        ValueError: If a model cannot be loaded, the images do not fit it, or a shift or the fill is not valid.
    """
    if not models or not shifts:
        raise ValueError('There must be at least one model and one shift.')
    if min(shifts) < 0:
        raise ValueError(f'Shifts must be 0 pixels or more, got {min(shifts)}. Each is tried in four directions.')
    _check_fill(fill)
    ways = {shift: list(dict.fromkeys([(shift, 0), (-shift, 0), (0, shift), (0, -shift)])) for shift in shifts}
    moves = list(dict.fromkeys([(0, 0), *(move for four in ways.values() for move in four)]))
    models = list(dict.fromkeys(models))
    number_classes(data, models)
    for spec in models:  # fail before the work
        check_numbering(data, load_model(spec), spec)
    rows = []
    for spec in models:
        with same_random_weights(seed):
            model = load_model(spec)
        data.transform = preprocessing(model)
        loader = load_images(data, batch_size, num_images, workers, seed)
        found = predict(_Moved(model, moves, fill), loader, device, amp, spec if progress else '')
        logits = found.logits.unflatten(1, (len(moves), -1))  # [n, moves, classes]
        check_classes(found.labels, logits.shape[2])
        chosen = logits.argmax(dim=2)  # [n, moves]
        for shift, four in ways.items():
            here = chosen[:, [moves.index(move) for move in four]]  # [n, 4], of 0 pixels [n, 1]
            row = {'model': spec, 'shift': shift, 'fill': fill, 'num_images': len(found.labels)}
            for column, others in (('top1', found.labels), ('same', chosen[:, 0])):
                share = (here == others[:, None]).double().mean().item()
                # The directions of an image are not independent, and vary no more than a single one.
                low, high = wilson_interval(round(share * len(here)), len(here))
                row.update({
                    name: round(100 * value, 3)
                    for name, value in ((column, share), (f'{column}_low', low), (f'{column}_high', high))})
            rows.append(row)
    return rows


class _Moved(nn.Module):
    """Concatenate the logits of all shifts of each image, so that each image is read once."""

    def __init__(self, model: nn.Module, moves: Sequence[Tuple[int, int]], fill: str) -> None:
        super().__init__()
        self.model = model
        self.num_classes = getattr(model, 'num_classes', None)
        self.moves = moves
        self.fill = fill

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.model(shift_images(images, *move, self.fill)) for move in self.moves], dim=1)


def shift_table(rows: Sequence[Dict[str, Any]]) -> str:
    """Format rows of `shift_sweep` as a Markdown table."""
    return markdown([{
        'model': row['model'],
        'shift (px)': row['shift'],
        'top-1 (%)': with_interval(row, 'top1'),
        'same class as unmoved (%)': with_interval(row, 'same'),
    } for row in rows])
