"""What an encoding costs: time, memory and parameters of a whole model beside those of APE, measured in the same run.

Each model is checked before it is timed. The models take turns with the APE model, step by step, so that what else the
machine does falls on both.
"""
import ctypes
import gc
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Callable, ContextManager, Dict, Iterator, List, Optional, Sequence

import timm
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2

from ..encodings import get_encoding, list_encodings
from ..ops.backend import using_backend
from ..vit_pos_enc import VisionTransformerPosEnc

__all__ = ['DEFAULT_SETTINGS', 'SETTINGS', 'bench_encodings', 'cost_table', 'default_pos_encs']

SETTINGS = {  # ViT-S
    '32/4': dict(img_size=32, patch_size=4),
    '224/16': dict(img_size=224, patch_size=16),
    '384/16': dict(img_size=384, patch_size=16),
}
DEFAULT_SETTINGS = ('32/4', '224/16')
BASELINE = 'ape'
# Of float32 and of bfloat16 autocast against float64, relative to the largest entry. Autocast rounds in each of twelve
# layers: on a CPU `ape` is off by 2.9e-2 at 224/16, and no encoding by more than 3.3e-2.
TOLERANCE = {False: 1e-3, True: 5e-2}


def default_pos_encs() -> List[str]:
    """Each encoding alone, or with `ape` if it means nothing alone."""
    return [name if get_encoding(name).alone else f'ape+{name}' for name in list_encodings()]


def _create(pos_enc: str, setting: str, device: torch.device, model: str) -> VisionTransformerPosEnc:
    torch.manual_seed(0)
    return timm.create_model(model, pos_enc=pos_enc, num_classes=10, device=device, **SETTINGS[setting])


def _autocast(device: torch.device, amp: bool) -> ContextManager:
    return torch.autocast(device.type, torch.bfloat16, enabled=amp)


def _check(pos_enc: str, setting: str, device: torch.device, model: str, amp: bool) -> float:
    """Largest deviation of logits and gradients from float64 with explicit attention, which the tests hold to the
    equations of each encoding, relative to the largest entry. With `amp` that of autocast, and float32 is checked, too.

    Raises:
        RuntimeError: If it is more than rounding.
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
    cudnn = torch.backends.cudnn
    before, cudnn.allow_tf32 = cudnn.allow_tf32, False  # the error is to be ours, not that of the patch embedding
    try:
        with using_backend(None):  # what TIMM_SAPE_BACKEND says is for the one that is measured
            expected = exact(x.double())
        with _autocast(device, amp):
            outs = fast(x), expected
        for out in outs:
            out.square().sum().backward()
    finally:
        cudnn.allow_tf32 = before
    pairs = [(p.grad, q.grad) for p, q in zip(fast.parameters(), exact.parameters()) if q.grad is not None]
    # a gradient that is zero but for rounding is held against the others
    least = 1e-3 * max(b.abs().max().item() for _, b in pairs)
    worst = 0.0
    for a, b in [outs, *pairs]:
        worst = max(worst, ((a.double() - b).abs().max() / b.abs().max().clamp(min=least)).item())
    if not worst < TOLERANCE[amp]:
        raise RuntimeError(
            f'pos_enc={pos_enc!r} at {setting} {"under autocast " if amp else ""}is off by {worst:.1e} of float64, so '
            'it was not timed.')
    return worst


class _Runner:
    """Forward passes and training steps of one model."""

    def __init__(self, model: VisionTransformerPosEnc, batch_size: int, amp: bool) -> None:
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
            return _saved_bytes(lambda: self.model(self.x), list(self.model.parameters()))


def _seconds(fn: Callable[[], None], device: torch.device) -> float:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    fn()
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _proc_status(field: str) -> float:
    return int(re.search(rf'{field}:\s+(\d+) kB', Path('/proc/self/status').read_text())[1]) / 1024


def _peak_megabytes(fn: Callable[[], None], device: torch.device) -> Optional[float]:
    """Memory that `fn` needs on top of what is there, None where the system does not tell."""
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fn()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2 ** 20
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system, or the step would find it there
        Path('/proc/self/clear_refs').write_text('5')  # the peak starts from the present size
        before = _proc_status('VmRSS')
        fn()
        return _proc_status('VmHWM') - before
    except (OSError, AttributeError):  # not Linux, or not glibc
        fn()
        return None


def _saved_bytes(function: Callable[[], object], known: Sequence[torch.Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass, each storage once, without those of `known`."""
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # kept, or its place would be taken by the next one
        # not the tensor: a node that keeps its own output keeps itself, and with it all that led there

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        function()
    for tensor in known:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


def bench_encodings(
        pos_encs: Sequence[str],
        settings: Sequence[str] = DEFAULT_SETTINGS,
        device: str = 'cpu',
        batch_size: int = 8,
        repeats: int = 5,
        amp: bool = False,
        model: str = 'vit_small_nope',
) -> Iterator[Dict[str, object]]:
    """Measure whole models against the APE model. Prints a line for each row on stderr.

    Args:
        pos_encs: What to measure.
        settings: Keys of `SETTINGS`: image size / patch size.
        device: Where.
        batch_size: Images in a step.
        repeats: Steps of each model; the medians count.
        amp: bfloat16 autocast.
        model: Entrypoint whose `pos_enc` is replaced.

    Yields:
        One row for each setting and encoding: parameters added, seconds, and ratios to APE of forward pass, training
        step, peak memory of the step, and what is kept for its backward pass.

    Raises:
        RuntimeError: If a model is off by more than rounding.
    """
    device = torch.device(device)
    for setting in settings:
        base = _Runner(_create(BASELINE, setting, device, model), batch_size, amp)
        plain = sum(p.numel() for p in _create('nope', setting, device, model).parameters())
        for pos_enc in pos_encs:
            error = _check(pos_enc, setting, device, model, amp)
            runner = _Runner(_create(pos_enc, setting, device, model), batch_size, amp)
            row = {
                'setting': setting,
                'pos_enc': pos_enc,
                'params_added': sum(p.numel() for p in runner.model.parameters()) - plain,
                'error': float(f'{error:.1e}'),
            }
            for what in ('forward', 'step'):
                ours, theirs = getattr(runner, what), getattr(base, what)
                ours(), theirs()  # the first time is different
                times = [(_seconds(ours, device), _seconds(theirs, device)) for _ in range(repeats)]
                row[f'{what}_s'] = round(statistics.median(a for a, _ in times), 4)
                row[f'{what}_ratio'] = round(statistics.median(a / b for a, b in times), 3)
            peaks = [_peak_megabytes(r.step, device) for r in (runner, base)]
            known = None not in peaks and peaks[1] > 0
            row['step_peak_mb'] = round(peaks[0]) if known else None
            row['step_peak_ratio'] = round(peaks[0] / peaks[1], 3) if known else None
            row['saved_ratio'] = round(runner.saved_bytes() / base.saved_bytes(), 3)
            print(
                f'{setting:>7} {pos_enc:<16} forward x{row["forward_ratio"]}  step x{row["step_ratio"]}  '
                f'peak x{row["step_peak_ratio"]}  saved x{row["saved_ratio"]}  +{row["params_added"]} parameters',
                file=sys.stderr)
            del runner
            yield row


def cost_table(rows: Sequence[Dict[str, object]]) -> str:
    """Rows of `bench_encodings`, or as they come out of a CSV file, as a Markdown table, one line for each encoding."""
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
