"""A measure of how well attention maps separate foreground from background, as Figure 4 of the SaPE2 paper shows it."""
from typing import NamedTuple

import torch

__all__ = ['Separation', 'separation']


class Separation(NamedTuple):
    """Areas under the ROC curve, from 0 to 1, .5 by chance. NaN if an image has no pairs to compare."""
    from_foreground: torch.Tensor
    """P(score to foreground > score to background) for patches of the foreground, `[B, ...]`."""
    from_background: torch.Tensor
    """P(score to background > score to foreground) for patches of the background, `[B, ...]`."""


def separation(scores: torch.Tensor, foreground: torch.Tensor) -> Separation:
    """How well a patch's scores for the other patches tell which of them are on its side of a mask.

    For each patch, take all pairs of another patch on its side and a patch on the other side. The fraction of pairs in
    which the patch on its own side has the higher score, with ties counting half, is the area under the ROC curve of
    that row. The result is the mean over the patches of a side: 1 if they always give their own side higher scores, 0
    if they always give the other side higher scores. A patch's score for itself does not count.

    Args:
        scores: Score of patch i (row) for patch j, `[B, ..., N, N]`, higher for patches that belong together: attention
            logits, or -distance. SaPE2's bias is a distance times `bias_scale`.
        foreground: 1 for foreground, 0 for background, -1 for patches to leave out, `[B, N]`. May be bool.

    Returns:
        Means over the patches of each side, `[B, ...]`.

    Raises:
        ValueError: If the shapes do not fit, the mask has other values, or a score is NaN.
    """
    if scores.ndim < 3 or scores.shape[-1] != scores.shape[-2] or scores.shape[::scores.ndim - 1] != foreground.shape:
        raise ValueError(
            f'separation needs scores [B, ..., N, N] and a mask [B, N], got {list(scores.shape)} and '
            f'{list(foreground.shape)}. Leave prefix tokens out (PositionMaps.between_patches).')
    if not ((foreground == 1) | (foreground == 0) | (foreground == -1)).all():
        raise ValueError('The mask must be 1 (foreground), 0 (background) or -1 (left out).')
    if scores.isnan().any():
        raise ValueError('Some scores are NaN and cannot be compared. Has the model diverged?')
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    sides = [[], []]
    for image, mask in zip(scores, foreground):
        inside, outside = (mask == 1).nonzero()[:, 0], (mask == 0).nonzero()[:, 0]
        sides[0].append(_auroc(image, inside, outside))
        sides[1].append(_auroc(image, outside, inside))
    return Separation(*map(torch.stack, sides))


def _auroc(scores: torch.Tensor, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Mean area under the ROC curve over the rows `own` of the scores `[..., N, N]`, `[...]`."""
    if len(own) < 2 or not len(other):
        return torch.full_like(scores[..., 0, 0], torch.nan)
    rows = scores[..., own, :]  # [..., own, N]
    to_other, to_own = rows[..., other].sort(dim=-1).values, rows[..., own].contiguous()
    lower, not_higher = (torch.searchsorted(to_other, to_own, right=right) for right in (False, True))
    wins = (lower + not_higher).to(scores.dtype) / (2 * len(other))  # [..., own, own]
    wins = wins.masked_fill(torch.eye(len(own), dtype=torch.bool, device=wins.device), 0)
    return wins.sum(dim=(-2, -1)) / (len(own) * (len(own) - 1))
