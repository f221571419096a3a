"""Measure what encodings cost: time, memory and parameters of whole models, relative to APE in the same run.

Each model is checked before it is timed. It alternates with the APE model step by step, so that other load on the
machine affects both.
"""
import ctypes
import gc
import re
import statistics
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, ContextManager, Dict, Iterator, List, Optional, Sequence

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.optim import create_optimizer_v2

from ..encodings import get_encoding, list_encodings
from ..ops.backend import using_backend
from ..vit_pos_enc import VisionTransformerPosEnc
from .machine import now

__all__ = ['DEFAULT_SETTINGS', 'SETTINGS', 'bench_encodings', 'cost_table', 'default_pos_encs']

SETTINGS = {  # ViT-S
    '32/4': dict(img_size=32, patch_size=4),
    '224/16': dict(img_size=224, patch_size=16),
    '384/16': dict(img_size=384, patch_size=16),
}
DEFAULT_SETTINGS = ('32/4', '224/16')
BASELINE = 'ape'
# Largest accepted error of float32 (False) and bfloat16 autocast (True) against float64, relative to the largest entry.
# Autocast rounds in each of twelve layers: on a CPU the error of `ape` at 224/16 is 2.9e-2, and the largest is 3.3e-2.
TOLERANCE = {False: 1e-3, True: 5e-2}


def default_pos_encs() -> List[str]:
    """All encodings, each alone, or with `ape` if it cannot be used alone."""
    return [name if get_encoding(name).alone else f'ape+{name}' for name in list_encodings()]


def _create(pos_enc: str, setting: str, device: torch.device, model: str) -> VisionTransformerPosEnc:
    torch.manual_seed(0)
    return timm.create_model(model, pos_enc=pos_enc, num_classes=10, device=device, **SETTINGS[setting])


def _autocast(device: torch.device, amp: bool) -> ContextManager:
    return torch.autocast(device.type, torch.bfloat16, enabled=amp)


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Without TF32 on GPUs: in the patch embedding it would count as an error of the encoding."""
    cudnn = torch.backends.cudnn
    before, cudnn.allow_tf32 = cudnn.allow_tf32, False
    try:
        yield
    finally:
        cudnn.allow_tf32 = before


def _check(pos_enc: str, setting: str, device: torch.device, model: str, amp: bool) -> float:
    """Compare logits and gradients with float64 and explicit attention, which the tests compare with the equations.

    With `amp`, float32 is checked first, then autocast.

    Returns:
        The largest deviation, relative to the largest entry.

    Raises:
        RuntimeError: If the deviation is more than rounding.
    """
    if amp:
        _check(pos_enc, setting, device, model, amp=False)
    fast = _create(pos_enc, setting, device, model).eval()
    exact = _create(pos_enc, setting, device, model).eval()
    exact.load_state_dict(fast.state_dict())
    exact.double()
    for block in exact.blocks:
        block.attn.fused_attn = False
    size = fast.patch_embed.img_size
    x = torch.randn(2, 3, *size, device=device, generator=torch.Generator(device).manual_seed(0))
    with exact_convolutions():
        with using_backend(None):  # TIMM_SAPE_BACKEND is for the measured model
            expected = exact(x.double())
        with _autocast(device, amp):
            outs = fast(x), expected
        for out in outs:
            out.square().sum().backward()
    pairs = [(p.grad, q.grad) for p, q in zip(fast.parameters(), exact.parameters()) if q.grad is not None]
    # a gradient that is zero except for rounding is compared with the size of the others
    least = 1e-3 * max(b.abs().max().item() for _, b in pairs)
    worst = 0.0
    for a, b in [outs, *pairs]:
        worst = max(worst, ((a.double() - b).abs().max() / b.abs().max().clamp(min=least)).item())
    if not worst < TOLERANCE[amp]:
        raise RuntimeError(
            f'pos_enc={pos_enc!r} at {setting} {"under autocast " if amp else ""}is off by {worst:.1e} of float64, so '
            'it was not timed.')
    return worst


class Runner:
    """Run forward passes and training steps of one model."""

    def __init__(self, model: nn.Module, batch_size: int, amp: bool) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.amp = amp
        self.optimizer = create_optimizer_v2(model, 'adamw', lr=1e-4, weight_decay=0.05)
        self.x = torch.randn(batch_size, 3, *model.patch_embed.img_size, device=self.device)
        self.y = torch.randint(10, (batch_size,), device=self.device)

    def forward(self) -> None:
        self.model.eval()
        with torch.inference_mode(), _autocast(self.device, self.amp):
            self.model(self.x)

    def step(self) -> None:
        self.model.train()
        with _autocast(self.device, self.amp):
            loss = F.cross_entropy(self.model(self.x).float(), self.y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def saved_bytes(self) -> int:
        self.model.train()
        with _autocast(self.device, self.amp):
            return saved_bytes(lambda: self.model(self.x), list(self.model.parameters()))


def timed(fn: Callable[[], None], device: torch.device) -> float:
    start = now(device)
    fn()
    return now(device) - start


def _proc_status(field: str) -> float:
    return int(re.search(rf'{field}:\s+(\d+) kB', Path('/proc/self/status').read_text())[1]) / 1024


def peak_megabytes(fn: Callable[[], None], device: torch.device) -> Optional[float]:
    """Measure the memory that `fn` needs on top of what is in use. None if the system does not tell."""
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fn()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2 ** 20
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # return free memory to the system, or the step would reuse it uncounted
        Path('/proc/self/clear_refs').write_text('5')  # reset the peak to the present size
        before = _proc_status('VmRSS')
        fn()
        return _proc_status('VmHWM') - before
    except (OSError, AttributeError):  # not Linux, or not glibc
        fn()
        return None


def saved_bytes(function: Callable[[], object], known: Sequence[torch.Tensor]) -> int:
    """Count the bytes that autograd keeps for the backward pass: each storage once, without those of `known`."""
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # kept, or the next storage could get the same address
        # Returns None, not the tensor: a node that saves its own output would keep itself alive, with the whole graph.

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        function()
    for tensor in known:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


def compare(ours: Runner, theirs: Runner, repeats: int) -> Dict[str, Optional[float]]:
    """Measure forward passes and training steps of two models in turn: medians of seconds and ratios, peak memory."""
    device = ours.device
    found = {}
    for what in ('forward', 'step'):
        runs = getattr(ours, what), getattr(theirs, what)
        for run in runs:  # warm-up
            run()
        times = [tuple(timed(run, device) for run in runs) for _ in range(repeats)]
        found[f'{what}_s'] = round(statistics.median(a for a, _ in times), 4)
        found[f'{what}_ratio'] = round(statistics.median(a / b for a, b in times), 3)
    peaks = [peak_megabytes(runner.step, device) for runner in (ours, theirs)]
    known = None not in peaks and peaks[1] > 0
    found['step_peak_mb'] = round(peaks[0]) if known else None
    found['step_peak_ratio'] = round(peaks[0] / peaks[1], 3) if known else None
    return found


def bench_encodings(
        pos_encs: Sequence[str],
        settings: Sequence[str] = DEFAULT_SETTINGS,
        device: str = 'cpu',
        batch_size: int = 8,
        repeats: int = 5,
        amp: bool = False,
        model: str = 'vit_small_pos_enc',
) -> Iterator[Dict[str, object]]:
    """Measure whole models relative to the APE model. Prints a line per row on stderr.

    Args:
        pos_encs: Encodings to measure.
        settings: Keys of `SETTINGS`, image size / patch size.
        device: Where the models run.
        batch_size: Images in a step.
        repeats: Steps of each model. The medians are reported.
        amp: Use bfloat16 autocast.
        model: Entrypoint whose `pos_enc` is replaced.

    Yields:
        One row per setting and encoding: parameters added, seconds, and ratios to APE for the forward pass, the
        training step, its peak memory, and the memory kept for its backward pass.

    Raises:
        RuntimeError: If a model deviates from float64 by more than rounding.
    """
    device = torch.device(device)
    for setting in settings:
        base = Runner(_create(BASELINE, setting, device, model), batch_size, amp)
        plain = sum(p.numel() for p in _create('nope', setting, device, model).parameters())
        for pos_enc in pos_encs:
            error = _check(pos_enc, setting, device, model, amp)
            runner = Runner(_create(pos_enc, setting, device, model), batch_size, amp)
            row = {
                'setting': setting,
                'pos_enc': pos_enc,
                'params_added': sum(p.numel() for p in runner.model.parameters()) - plain,
                'error': float(f'{error:.1e}'),
            }
            row.update(compare(runner, base, repeats))
            row['saved_ratio'] = round(runner.saved_bytes() / base.saved_bytes(), 3)
            print(
                f'{setting:>7} {pos_enc:<16} forward x{row["forward_ratio"]}  step x{row["step_ratio"]}  '
                f'peak x{row["step_peak_ratio"]}  saved x{row["saved_ratio"]}  +{row["params_added"]} parameters',
                file=sys.stderr)
            del runner
            yield row


def cost_table(rows: Sequence[Dict[str, object]]) -> str:
    """Format rows of `bench_encodings`, or of a CSV file with them, as a Markdown table with one line per encoding."""
    settings = list(dict.fromkeys(row['setting'] for row in rows))
    head = [f'{s}: {what}' for s in settings for what in ('parameters', 'forward', 'step', 'memory')]
    table = [f'| encoding | {" | ".join(head)} |', '|---|' + '---|' * len(head)]
    for pos_enc in dict.fromkeys(row['pos_enc'] for row in rows):
        cells = [f'`{pos_enc}`']
        for setting in settings:
            row = next((r for r in rows if (r['pos_enc'], r['setting']) == (pos_enc, setting)), None)
            if row is None:
                cells += [''] * 4
                continue
            names = ('forward_ratio', 'step_ratio', 'step_peak_ratio')
            ratios = [f'{float(row[name]):.2f}' if row[name] else '' for name in names]
            cells += [f'{int(row["params_added"]):,}', *ratios]
        table.append(f'| {" | ".join(cells)} |')
    return '\n'.join(table)
