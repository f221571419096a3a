"""What SaPE2's attention costs by each backend, beside plain attention and the code printed in the paper's Appendix D.

The operator alone over N, and whole models beside APE. Each backend is checked against float64 before it is timed; all
take turns with plain attention, so that what else the machine does falls on both.
"""
import gc
import statistics
import sys
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Sequence, Tuple

import torch
import torch.nn.functional as F

from ..analysis.figures import new_figure
from .bench import _peak_megabytes, _saved_bytes, _seconds, bench_encodings
from ..functional import sape2_attention
from ..ops.backend import choose_backend, using_backend

__all__ = ['SIZES', 'appendix_attention', 'batch_and_heads', 'bench_models', 'bench_operator', 'plot_memory']

SIZES = {  # N: batch and heads, so many that a step takes seconds at most; the grid is square, the head dim 64
    64: (32, 6),
    196: (8, 6),
    576: (2, 6),
    1024: (1, 6),
    4096: (1, 3),
}
HEAD_DIM = 64
LARGEST_CHECKED = 1024  # float64 with everything stored takes too long beyond
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}


def appendix_attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table_x: torch.Tensor,
        table_y: torch.Tensor,
        grid_size: Tuple[int, int],
) -> torch.Tensor:
    """Appendix D of the SaPE2 paper step by step, mode 'k', everything stored as there.

    Corrected where it would not run: the positions that index are integers, and H may differ from W.

    Args:
        q: Queries without prefix tokens, `[B, h, N, d]`.
        k: Keys, likewise.
        v: Values, likewise.
        table_x: `[W+1, d]`.
        table_y: `[H+1, d]`.
        grid_size: (H, W).

    Returns:
        `[B, h, N, d]`.
    """
    scale = q.shape[-1] ** -0.5
    lines = q.unflatten(2, grid_size), k.unflatten(2, grid_size)  # [B, h, H, W, d]
    bias = 0
    for table, along_y in ((table_x, False), (table_y, True)):
        queries, keys = (t.transpose(2, 3) if along_y else t for t in lines)
        gates = (scale * queries @ keys.transpose(-2, -1)).sigmoid()
        pos = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=table.shape[0] - 1)
        below, above = pos.floor(), pos.ceil()
        found = keys @ table.T
        part = pos - below
        codes = found.gather(-1, above.long()) * part + found.gather(-1, below.long()) * (1 - part)
        codes = (codes.transpose(2, 3) if along_y else codes).flatten(2, 3)  # [B, h, N, W or H]
        bias = bias + torch.cdist(codes, codes)
    return (scale * q @ k.transpose(-2, -1) + bias).softmax(dim=-1) @ v


def batch_and_heads(n: int, device: torch.device) -> Tuple[int, int]:
    """Of `SIZES`, on a GPU 32 times as many images, or as many as Appendix D fits into 16 GiB with: some 80 bytes for
    each logit. With fewer it would be the launching of kernels that is timed."""
    batch, heads = SIZES[n]
    return min(32 * batch, 2 ** 34 // (80 * heads * n ** 2)) if device.type == 'cuda' else batch, heads


def _implementations(backends: Sequence[str], side: int) -> Dict[str, Callable]:
    def plain(q, k, v, table_x, table_y):
        return F.scaled_dot_product_attention(q, k, v)

    def appendix(*tensors):
        return appendix_attention(*tensors, (side, side))

    def by(name):
        return lambda *tensors: sape2_attention(*tensors, (side, side), backend=name)

    return {'plain': plain, 'appendix': appendix, **{name: by(name) for name in backends}}


def _inputs(batch: int, heads: int, side: int, device: torch.device, dtype: torch.dtype) -> List[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, device=device, generator=generator)

    # strided as in a model: parts of one projection
    q, k, v = draw(batch, side * side, 3, heads, HEAD_DIM).to(dtype).permute(2, 0, 3, 1, 4)
    tables = [draw(side + 1, HEAD_DIM).to(dtype) * 0.1 for _ in range(2)]
    return [t.detach().requires_grad_() for t in (q, k, v, *tables)]


def _gradients(function: Callable, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    out = function(*inputs)
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)
    return [out, *(g for g in grads if g is not None)]


def _error(function: Callable, exact: Callable, inputs: Sequence[torch.Tensor]) -> float:
    """Largest deviation of output and gradients from float64, relative to the largest entry of each."""
    inputs = [t.detach()[:1, :1] if t.ndim == 4 else t.detach() for t in inputs]
    weights = torch.linspace(-1, 1, HEAD_DIM, device=inputs[0].device)
    found = _gradients(lambda *x: function(*x) * weights.to(x[0].dtype), [t.clone().requires_grad_() for t in inputs])
    wide = _gradients(lambda *x: exact(*x) * weights.double(), [t.double().requires_grad_() for t in inputs])
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wide))


def bench_operator(
        backends: Sequence[str],
        sizes: Sequence[int] = tuple(SIZES),
        device: str = 'cpu',
        repeats: int = 9,
        dtype: torch.dtype = torch.float32,
) -> Iterator[Dict[str, object]]:
    """Measure SaPE2's attention, forward, and forward and backward, over N. Prints a line for each row on stderr.

    Args:
        backends: What to measure, beside plain attention and Appendix D; left out, with a note, where one cannot do it.
        sizes: Keys of `SIZES`.
        device: Where.
        repeats: Runs of each; the medians count.
        dtype: Of q, k and v.

    Yields:
        One row for each N and implementation: ratios to plain attention and to Appendix D, peak memory of forward and
        backward above the inputs, and what is kept between them.

    Raises:
        ValueError: If a backend cannot run here at all.
        RuntimeError: If a backend is off by more than rounding.
    """
    device = torch.device(device)
    for name in backends:  # one that can do nothing is not left out without a word
        choose_backend(name, torch.empty(1, 1, 1, HEAD_DIM, device=device, dtype=dtype), (1, 1))
    for n in sizes:
        batch, heads = batch_and_heads(n, device)
        side = round(n ** 0.5)
        inputs = _inputs(batch, heads, side, device, dtype)
        able = []
        for name in backends:
            try:
                able.append(choose_backend(name, inputs[0], (side, side)))
            except ValueError as e:
                print(f'N={n:<5} {name:<10} left out: {e}', file=sys.stderr)
        functions = _implementations(able, side)
        errors = {}
        if n <= LARGEST_CHECKED:
            exact = _implementations(['reference'], side)['reference']
            for name in (*able, 'appendix'):
                errors[name] = _error(functions[name], exact, inputs)
                if name in able and not errors[name] < TOLERANCE[dtype]:
                    raise RuntimeError(
                        f'backend {name!r} at N={n} is off by {errors[name]:.1e} of float64, so it was not timed.')

        def forward(function):
            with torch.no_grad():
                function(*inputs)

        def both(function):
            _gradients(function, inputs)

        times = {what: {name: [] for name in functions} for what in ('forward', 'both')}
        for what, step in (('forward', forward), ('both', both)):
            for repeat in range(repeats + 1):
                for name, function in functions.items():
                    seconds = _seconds(lambda: step(function), device)
                    if repeat:  # the first time is different
                        times[what][name].append(seconds)
        for name, function in functions.items():
            row = {'n': n, 'batch': batch, 'heads': heads, 'backend': name}
            row['error'] = float(f'{errors[name]:.1e}') if name in errors else None
            for what, taken in times.items():
                row[f'{what}_s'] = round(statistics.median(taken[name]), 5)
                for base in ('plain', 'appendix'):
                    ratio = statistics.median(a / b for a, b in zip(taken[name], taken[base]))
                    row[f'{what}_vs_{base}'] = round(ratio, 3)
            gc.collect()
            peak = _peak_megabytes(lambda: both(function), device)
            row['peak_mb'] = None if peak is None else round(peak, 1)
            row['saved_mb'] = round(_saved_bytes(lambda: function(*inputs), inputs) / 2 ** 20, 2)
            print(
                f'N={n:<5} {name:<10} forward x{row["forward_vs_plain"]}  forward+backward x{row["both_vs_plain"]}  '
                f'peak {row["peak_mb"]} MB  saved {row["saved_mb"]} MB', file=sys.stderr)
            yield row


def bench_models(backends: Sequence[str], settings: Sequence[str], **kwargs) -> Iterator[Dict[str, object]]:
    """Measure whole models against the APE model: SaPE2 by each backend, and `sape2sq`, which has but one way.

    Args:
        backends: Of SaPE2's attention.
        settings: Keys of `bench.SETTINGS`.
        kwargs: Further arguments of `bench_encodings`.

    Yields:
        The rows of `bench_encodings`, each with its backend.
    """
    ways = [*(('ape+sape2_k', backend) for backend in backends), ('ape+sape2sq_k', None)]
    for setting in settings:
        for pos_enc, backend in ways:
            with using_backend(backend):
                row, = bench_encodings([pos_enc], [setting], **kwargs)
            yield {'setting': setting, 'pos_enc': pos_enc, 'backend': backend, **row}


def plot_memory(rows: Sequence[Dict[str, object]], path: Path) -> None:
    """Peak memory over N as a picture, a line for each implementation.

    Raises:
        ImportError: If matplotlib is not there.
    """
    figure = new_figure(6, 4)
    axes = figure.subplots()
    for name in dict.fromkeys(row['backend'] for row in rows):
        points = [
            (row['n'], row['peak_mb'] / (row['batch'] * row['heads']))
            for row in rows if row['backend'] == name and row['peak_mb']]
        if points:
            axes.plot(*zip(*points), marker='o', label=name)
    axes.set(
        xscale='log', yscale='log', xlabel='N', ylabel='MB per head and image',
        title='Peak memory of attention, forward and backward')
    axes.legend()
    figure.savefig(path, dpi=150)
