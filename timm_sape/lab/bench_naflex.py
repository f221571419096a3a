"""Measure NaFlexVit on batches of mixed sizes: beside timm's own, and beside the plain model one image at a time.

Logits are compared with the plain model's before anything is timed.
"""
import statistics
import sys
from typing import Dict, Iterator, List, Sequence, Tuple

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models.naflexvit import batch_patchify
from timm.optim import create_optimizer_v2

from ..grid import Grid
from .bench import exact_convolutions, peak_megabytes, timed

__all__ = ['DEFAULT_POS_ENCS', 'GRIDS', 'bench_naflex']

PATCH = 16
#: (H, W) of the images of a batch: eight aspect ratios from 1:4 to 3:1, each of at most 196 patches.
GRIDS = ((14, 14), (12, 16), (16, 12), (10, 19), (19, 10), (8, 24), (24, 8), (7, 28))
DEFAULT_POS_ENCS = ('ape', 'rope2d', 'rope2d_mixed', 'rpb', 'cope', 'sape2_k', 'ape+sape2_k', 'sape2sq_k')
TOLERANCE = 1e-4


def _batch(device: torch.device) -> Tuple[List[torch.Tensor], Dict[str, torch.Tensor]]:
    """The images one by one, and as one batch of patches."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(1, 3, h * PATCH, w * PATCH, generator=generator).to(device) for h, w in GRIDS]
    length = max(h * w for h, w in GRIDS)
    patches = torch.zeros(len(images), length, 3 * PATCH ** 2, device=device)
    coord = torch.zeros(len(images), length, 2, dtype=torch.int64, device=device)
    valid = torch.zeros(len(images), length, dtype=torch.bool, device=device)
    for i, (image, (height, width)) in enumerate(zip(images, GRIDS)):
        patches[i, :height * width] = batch_patchify(image, (PATCH, PATCH))[0][0]
        coord[i, :height * width] = Grid(height, width).coordinates(device)
        valid[i, :height * width] = True
    return images, {'patches': patches, 'patch_coord': coord, 'patch_valid': valid}


class _Step:
    """Training steps of one model, on the batch or on its images one after the other."""

    def __init__(self, model: nn.Module, inputs: Sequence, amp: bool) -> None:
        self.model = model.train()
        self.inputs = inputs
        self.device = next(model.parameters()).device
        self.amp = amp
        self.optimizer = create_optimizer_v2(model, 'adamw', lr=1e-4, weight_decay=0.05)

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for x in self.inputs:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
                logits = self.model(x)
            F.cross_entropy(logits.float(), torch.zeros(len(logits), dtype=torch.int64, device=self.device)).backward()
        self.optimizer.step()


def bench_naflex(
        pos_encs: Sequence[str] = DEFAULT_POS_ENCS,
        device: str = 'cpu',
        repeats: int = 5,
        amp: bool = False,
        size: str = 'vit_small',
) -> Iterator[Dict[str, object]]:
    """Measure training steps on one image of each of `GRIDS`. Prints a line per row on stderr.

    Args:
        pos_encs: Encodings to measure.
        device: Where the models run.
        repeats: Steps of each model. The medians of ratios are reported.
        amp: Use bfloat16 autocast.
        size: The part of an entrypoint's name before its encoding.

    Yields:
        One row per encoding: seconds of a step, its ratio to timm's NaFlexVit with its learned table on the same batch
        and to the plain model on the same images one by one, and the ratio of peak memory to timm's.

    Raises:
        RuntimeError: If the logits of the batch are not those of the images one by one.
    """
    device = torch.device(device)
    images, batch = _batch(device)
    name = size.replace('vit', 'naflexvit')
    shape = dict(num_classes=10, global_pool='avg', fc_norm=True, device=device)
    timms = timm.create_model(size if timm.is_model(size) else f'{size}_patch16_224', use_naflex=True, **shape)
    base = _Step(timms, [batch], amp)
    for pos_enc in pos_encs:
        torch.manual_seed(0)
        plain = timm.create_model(
            f'{size}_pos_enc', pos_enc=pos_enc, dynamic_img_size=True, no_embed_class=True, **shape)
        source = dict(pretrained=True, pretrained_cfg_overlay=dict(state_dict=plain.state_dict(), num_classes=10))
        model = timm.create_model(f'{name}_pos_enc', pos_enc=pos_enc, **shape, **source)
        with torch.inference_mode(), exact_convolutions():
            alone = torch.cat([plain.eval()(image) for image in images])
            error = ((model.eval()(batch) - alone).abs().max() / alone.abs().max()).item()
        if not error < TOLERANCE:
            raise RuntimeError(f'pos_enc={pos_enc!r}: logits of the batch are off by {error:.1e}, so it was not timed.')
        step, one_by_one = _Step(model, [batch], amp), _Step(plain, images, amp)
        steps = step, base, one_by_one
        for run in steps:  # warm-up
            run()
        times = [tuple(timed(run, device) for run in steps) for _ in range(repeats)]
        peaks = [peak_megabytes(run, device) for run in (step, base)]
        row = {
            'pos_enc': pos_enc,
            'error': float(f'{error:.1e}'),
            'step_s': round(statistics.median(t for t, _, _ in times), 4),
            'to_timm': round(statistics.median(ours / theirs for ours, theirs, _ in times), 3),
            'to_one_by_one': round(statistics.median(ours / alone for ours, _, alone in times), 3),
            'peak_to_timm': round(peaks[0] / peaks[1], 3) if None not in peaks and peaks[1] > 0 else None,
        }
        print(
            f'{pos_enc:<14} step x{row["to_timm"]} of timm, x{row["to_one_by_one"]} of one by one, peak '
            f'x{row["peak_to_timm"]}', file=sys.stderr)
        yield row
