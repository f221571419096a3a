"""Do attention maps separate foreground from background? A measure for Figure 4 of the SaPE2 paper (2025)."""
from typing import NamedTuple

import torch

__all__ = ['Separation', 'separation']


class Separation(NamedTuple):
    """Areas under the ROC curve, 0 to 1, .5 by chance; NaN if an image has no pairs to compare."""
    from_foreground: torch.Tensor
    """P(score to foreground > score to background) for patches of the foreground, `[B, ...]`."""
    from_background: torch.Tensor
    """P(score to background > score to foreground) for patches of the background, `[B, ...]`."""


def separation(scores: torch.Tensor, foreground: torch.Tensor) -> Separation:
    """How well the scores of a patch for the others tell which of these are on its side of the mask.

    For each patch, take all pairs of another patch of its side and a patch of the other side. The share of pairs in
    which the patch of its own side has the higher score, ties counting half, is the area under the ROC curve of that
    row. The result is the mean over the patches of a side: 1 if they always score their own side higher, 0 if always
    the other. The score of a patch for itself does not count.

    Args:
        scores: From patch i (row) to patch j, `[B, ..., N, N]`, higher for what belongs together: logits of attention,
            or -distance. SaPE2's bias is a distance times `bias_scale`.
        foreground: 1 for patches of the foreground, 0 for the background, -1 for patches to leave out, `[B, N]`; may be
            bool.

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
        raise ValueError('Scores that are NaN have no order. Has the model diverged?')
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    sides = [[], []]
    for image, mask in zip(scores, foreground):
        inside, outside = (mask == 1).nonzero()[:, 0], (mask == 0).nonzero()[:, 0]
        sides[0].append(_auroc(image, inside, outside))
        sides[1].append(_auroc(image, outside, inside))
    return Separation(*map(torch.stack, sides))


def _auroc(scores: torch.Tensor, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Mean area under the ROC curve of the rows `own` of `[..., N, N]`."""
    if len(own) < 2 or not len(other):
        return torch.full_like(scores[..., 0, 0], torch.nan)
    rows = scores[..., own, :]  # [..., own, N]
    to_other, to_own = rows[..., other].sort(dim=-1).values, rows[..., own].contiguous()
    lower, not_higher = (torch.searchsorted(to_other, to_own, right=right) for right in (False, True))
    wins = (lower + not_higher).to(scores.dtype) / (2 * len(other))  # [..., own, own]
    wins = wins.masked_fill(torch.eye(len(own), dtype=torch.bool, device=wins.device), 0)
    return wins.sum(dim=(-2, -1)) / (len(own) * (len(own) - 1))
