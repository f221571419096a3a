"""Measure what SaPE2's attention costs with each backend, with plain attention, and by the steps of Appendix D.

The operator alone is measured over N, whole models relative to APE. Each backend is checked against float64 before it
is timed. All alternate with plain attention, so that other load on the machine affects all.
"""
import gc
import statistics
import sys
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Sequence, Tuple

import torch
import torch.nn.functional as F

from ..analysis.figures import new_figure
from .bench import bench_encodings, peak_megabytes, saved_bytes, timed
from ..functional import sape2_attention
from ..ops.backend import choose_backend, using_backend

__all__ = ['SIZES', 'appendix_attention', 'batch_and_heads', 'bench_models', 'bench_operator', 'plot_memory']

SIZES = {  # N: batch and heads, chosen so that a step takes seconds at most. The grid is square.
    64: (32, 6),
    196: (8, 6),
    576: (2, 6),
    1024: (1, 6),
    4096: (1, 3),
}
HEAD_DIM = 64
LARGEST_CHECKED = 1024  # beyond this, the float64 reference takes too long
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}


def appendix_attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table_x: torch.Tensor,
        table_y: torch.Tensor,
        grid_size: Tuple[int, int],
) -> torch.Tensor:
    """Compute attention in the steps of Appendix D of the SaPE2 paper, storing everything.

    The printed code does not run. Corrected here: indices are integers, and H may differ from W. And what it multiplies
    is the keys, so that it computes what the others do, mode 'k'; printed are the queries, which cost the same.

    Args:
        q: Queries without prefix tokens, `[B, h, N, d]`.
        k: Keys, `[B, h, N, d]`.
        v: Values, `[B, h, N, d]`.
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
    """Look up batch and heads in `SIZES`.

    On a GPU the batch is 32 times larger, or what Appendix D can process in 16 GiB, at about 80 bytes per logit. With a
    smaller batch, launching kernels would take most of the time.
    """
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

    # the strides of a model, where q, k and v are parts of one projection
    q, k, v = draw(batch, side * side, 3, heads, HEAD_DIM).to(dtype).permute(2, 0, 3, 1, 4)
    tables = [draw(side + 1, HEAD_DIM).to(dtype) * 0.1 for _ in range(2)]
    return [t.detach().requires_grad_() for t in (q, k, v, *tables)]


def _gradients(function: Callable, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    out = function(*inputs)
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)
    return [out, *(g for g in grads if g is not None)]


def _error(function: Callable, exact: Callable, inputs: Sequence[torch.Tensor]) -> float:
    """Compute the largest deviation of output and gradients from float64, relative to the largest entry of each."""
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
    """Measure the forward and the forward and backward pass of SaPE2's attention over N.

    Prints a line per row on stderr.

    Args:
        backends: What to measure, besides plain attention and Appendix D. A backend that does not support some N is
            left out there, with a message.
        sizes: Keys of `SIZES`.
        device: Where to run.
        repeats: Runs of each implementation. The medians are reported.
        dtype: Of q, k and v.

    Yields:
        One row per N and implementation: ratios to plain attention and to Appendix D, peak memory of forward and
        backward pass in addition to the inputs, and memory kept between the two.

    Raises:
        ValueError: If a backend cannot run here at all.
        RuntimeError: If a backend deviates from float64 by more than rounding.
    """
    device = torch.device(device)
    for name in backends:  # raises if a backend supports nothing here
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
                    seconds = timed(lambda: step(function), device)
                    if repeat:  # the first run is the warm-up
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
            peak = peak_megabytes(lambda: both(function), device)
            row['peak_mb'] = None if peak is None else round(peak, 1)
            row['saved_mb'] = round(saved_bytes(lambda: function(*inputs), inputs) / 2 ** 20, 2)
            print(
                f'N={n:<5} {name:<10} forward x{row["forward_vs_plain"]}  forward+backward x{row["both_vs_plain"]}  '
                f'peak {row["peak_mb"]} MB  saved {row["saved_mb"]} MB', file=sys.stderr)
            yield row


def bench_models(backends: Sequence[str], settings: Sequence[str], **kwargs) -> Iterator[Dict[str, object]]:
    """Measure whole models relative to the APE model: SaPE2 with each backend, and `sape2sq`, which needs none.

    Args:
        backends: Backends of SaPE2's attention.
        settings: Keys of `bench.SETTINGS`.
        kwargs: More arguments for `bench_encodings`.

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
    """Draw peak memory over N, a line per implementation.

    Args:
        rows: From `bench_operator`.
        path: Its suffix sets the format.

    Raises:
        ImportError: If matplotlib is not installed.
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
