"""Measure models beside those of timm's that have the same encoding and the same weights.

Logits are compared before anything is timed.
"""
import sys
from typing import Dict, Iterator, Sequence

import timm
import torch
import torch.nn as nn

from ..grafting import graft
from .bench import Runner, compare

__all__ = ['MODELS', 'bench_timm']

#: timm's ViT, then all of its size whose encoding acts inside attention and is one of ours.
MODELS = (
    'vit_small_patch16_224', 'vit_small_patch16_rope_224', 'vit_small_patch16_rope_ape_224',
    'vit_small_patch16_rope_mixed_224', 'vit_small_patch16_rope_mixed_ape_224', 'vit_relpos_small_patch16_224',
    'vit_srelpos_small_patch16_224')
TOLERANCE = 1e-4


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """Large weights: small ones, and a layer scale of 1e-5, would hide what attention does."""
    for name, p in model.named_parameters():
        if p.ndim == 1:
            p.uniform_(0.5, 1)
        elif name.endswith('weight'):
            p.normal_(std=p[0].numel() ** -0.5)


def bench_timm(
        models: Sequence[str] = MODELS,
        device: str = 'cpu',
        batch_size: int = 8,
        repeats: int = 5,
        amp: bool = False,
) -> Iterator[Dict[str, object]]:
    """Measure forward passes and training steps of timm's models and of ours. Prints a line per row on stderr.

    Args:
        models: Names of timm's models that `graft` converts.
        device: Where the models run.
        batch_size: Images in a step.
        repeats: Steps of each model. The medians of ratios are reported.
        amp: Use bfloat16 autocast.

    Yields:
        One row per model: its name, our `pos_enc`, the largest difference of a logit in float32 relative to the largest
        logit, seconds of ours, and ratios to timm's for the forward pass, the training step and its peak memory.

    Raises:
        RuntimeError: If the logits are not timm's.
    """
    device = torch.device(device)
    for name in models:
        torch.manual_seed(0)
        base = timm.create_model(name, num_classes=10, device=device).eval()
        _randomise(base)
        ours = Runner(graft(base, 'nope'), batch_size, amp)
        theirs = Runner(base, batch_size, amp)
        with torch.inference_mode():
            expected = base(ours.x)
            error = ((ours.model(ours.x) - expected).abs().max() / expected.abs().max()).item()
        if not error < TOLERANCE:
            raise RuntimeError(f'{name}: the logits of our model are off by {error:.1e}, so it was not timed.')
        row = {
            'timm': name,
            'pos_enc': ours.model.pos_enc,
            'error': float(f'{error:.1e}'),
            **compare(ours, theirs, repeats),
        }
        print(
            f'{name:<36} forward x{row["forward_ratio"]}  step x{row["step_ratio"]}  peak x{row["step_peak_ratio"]}',
            file=sys.stderr)
        yield row
