"""Single checks on a GPU, for .ci/gpu.py. With --device cpu they run small, in Triton's interpreter, as in a test."""
import argparse
import csv
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time

CPU = '--device=cpu' in sys.argv or '--device cpu' in ' '.join(sys.argv)
if CPU:
    os.environ['TRITON_INTERPRET'] = '1'  # before Triton is imported
else:
    os.environ.pop('TRITON_INTERPRET', None)

import timm  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import timm_sape  # noqa: E402, F401  registers the models
from timm_sape.functional import sape2_attention  # noqa: E402
from timm_sape.lab.machine import about  # noqa: E402
from timm_sape.ops import using_backend  # noqa: E402

DEVICE = torch.device('cpu' if CPU else 'cuda')
HALF = torch.float16 if CPU else torch.bfloat16  # the interpreter multiplies bfloat16 wrongly
TINY = dict(img_size=16, patch_size=4, depth=1) if CPU else {}
NAMES = ('out', 'q', 'k', 'v', 'table_x', 'table_y', 'bias_scale')
# largest error of the output and of any gradient, as norms relative to float64 on the same rounded inputs
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
SHAPES = {'14x14': (14, 14, 64), '8x8': (8, 8, 64), '24x24': (24, 24, 64), '7x20': (7, 20, 32), '32x32': (32, 32, 128)}
MODELS = ('vit_small_ape', 'vit_small_rope2d', 'vit_small_rpb', 'vit_small_sape2_k_ape', 'vit_small_sape2sq_k_ape')


def say(*words):
    print(*words, flush=True)


def make(height, width, head_dim, dtype, batch=2, heads=6):
    """q, k, v, both tables and bias_scale, as numbers that the dtype can hold, strided as in timm."""
    generator = torch.Generator().manual_seed(0)
    tokens = 1 + height * width
    qkv = torch.randn(batch, tokens, 3, heads, head_dim, generator=generator).to(dtype).permute(2, 0, 3, 1, 4)
    tables = (torch.randn(n + 1, head_dim, generator=generator).to(dtype) for n in (width, height))
    scale = torch.rand(heads, generator=generator).to(dtype)
    return [t.to(DEVICE) for t in (*qkv.unbind(0), *tables, scale)]


def attend(inputs, grid_size, mode, backend, dtype):
    inputs = [t.detach().to(dtype).requires_grad_() for t in inputs]
    out = sape2_attention(
        *inputs[:5], grid_size=grid_size, mode=mode, bias_scale=inputs[5], num_prefix_tokens=1, backend=backend)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad(out, inputs, weight)]


def versions(args):
    import triton

    say(about(DEVICE), 'triton', triton.__version__, 'python', sys.version.split()[0])
    say('C compiler:', next(filter(None, map(shutil.which, ('cc', 'gcc', 'clang'))), None), '(Triton needs one)')
    if not CPU:
        say(torch.cuda.get_device_properties(0))
        torch.ones(2, device=DEVICE).sum().item()


def contact(args):
    """Triton against the reference in float64, for each dtype, shape and mode; the first is the most usual one."""
    bad = 0
    for dtype, tolerance in TOLERANCE.items():
        for shape, (height, width, head_dim) in SHAPES.items():
            name = f'{str(dtype).removeprefix("torch.")}-{shape}'
            if args.only not in (None, name) or CPU and (shape != '7x20' or dtype == torch.bfloat16):
                continue
            if dtype == torch.float32 and max(height, width) > 32 or dtype == torch.float32 and head_dim > 64:
                continue
            inputs = make(height, width, head_dim, dtype, batch=1 if CPU else 2, heads=1 if CPU else 6)
            for mode in ('k',) if CPU else ('k', 'q', 'qk'):
                if mode == 'qk' and 2 * max(height, width) > 32:
                    continue
                found = attend(inputs, (height, width), mode, 'triton', dtype)
                exact = attend(inputs, (height, width), mode, 'reference', torch.float64)
                errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact)]
                is_bad = not max(errors) < tolerance
                bad += is_bad
                say(f'{name} {mode}', *(f'{n} {e:.1e}' for n, e in zip(NAMES, errors)), 'BAD' if is_bad else '')
    if bad:
        sys.exit(f'{bad} cases are off by more than {TOLERANCE}')


def small(args):
    """A forward and a backward pass for compute-sanitizer, under which a kernel takes a hundred times as long."""
    dtype = getattr(torch, args.dtype)
    for height, width, head_dim in ((5, 7, 32), (14, 14, 64)):
        for mode in ('k', 'qk'):
            inputs = make(height, width, head_dim, dtype, batch=1, heads=2)
            found = attend(inputs, (height, width), mode, 'triton', dtype)
            say(args.dtype, f'{height}x{width}', mode, *(f'{t.float().norm().item():.4g}' for t in found))


def milliseconds(function, repeats):
    """Median time of a call."""
    for _ in range(min(3, repeats)):
        function()
    if CPU:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            function()
            times.append(1000 * (time.perf_counter() - start))
        return statistics.median(times)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def write(rows, path):
    if path is not None:
        with open(path, 'w', newline='') as file:
            writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row))
            writer.writeheader()
            writer.writerows({**row, 'notes': row['notes'] or about(DEVICE)} for row in rows)


def tiles(args):
    """The kernels with other tiles: forward and backward in ms, as ratios to plain attention."""
    from timm_sape.ops import triton_distances as kernels

    Tiles, BackwardLaunch = kernels.Tiles, kernels.BackwardLaunch
    as_shipped = kernels.forward_tiles, kernels.backward_launches

    def one_launch(tiles):
        outputs = dict.fromkeys(kernels.ALL, True)
        return lambda *_: [BackwardLaunch(tiles, key_pass=p, **outputs) for p in (False, True)]

    backward = {'shipped': as_shipped[1]}
    for tile in ((64, 32, 4, 1), (64, 32, 4, 2), (128, 32, 8, 1), (128, 32, 8, 2), (64, 16, 4, 1)):
        backward['one launch a pass, {} x {}, {} warps, {} stages'.format(*tile)] = one_launch(Tiles(*tile))
    rows = []
    dtype, repeats = HALF, 2 if CPU else 20
    for height, width, head_dim in ((4, 4, 16),) if CPU else ((14, 14, 64), (24, 24, 64), (64, 64, 64)):
        batch, heads = (1, 1) if CPU else (max(1, 50_000 // (height * width) // 6), 6)
        inputs = [t.requires_grad_() for t in make(height, width, head_dim, dtype, batch, heads)]

        def ours():
            return sape2_attention(
                *inputs[:5], grid_size=(height, width), mode='k', bias_scale=inputs[5], num_prefix_tokens=1,
                backend='triton')

        def plain():
            return F.scaled_dot_product_attention(*inputs[:3])

        grad = torch.randn_like(inputs[0])

        def both(function, used):
            return lambda: torch.autograd.grad(function(), used, grad)

        base = milliseconds(plain, repeats), milliseconds(both(plain, inputs[:3]), repeats)
        expected = attend(inputs, (height, width), 'k', 'reference', torch.float64) if height * width < 1000 else None
        for name, launches in backward.items():
            kernels.backward_launches = launches
            row = {'grid': f'{height}x{width}', 'batch': batch, 'backward': name}
            try:
                if expected is not None:
                    found = attend(inputs, (height, width), 'k', 'triton', dtype)
                    row['error'] = f'{max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected)):.1e}'
                forward_ms, both_ms = milliseconds(ours, repeats), milliseconds(both(ours, inputs), repeats)
                row.update(
                    forward_ms=round(forward_ms, 4),
                    both_ms=round(both_ms, 4),
                    forward_vs_plain=round(forward_ms / base[0], 3),
                    both_vs_plain=round(both_ms / base[1], 3),
                    notes='',
                )
            except Exception as e:  # a tile may need more memory or registers than there are
                row['notes'] = f'{type(e).__name__}: {str(e).splitlines()[0][:100]}'
            finally:
                kernels.backward_launches = as_shipped[1]
            rows.append(row)
            say(row)
            write(rows, args.output)


class Training:
    """Training steps of one model on one batch."""

    def __init__(self, name, batch_size, **kwargs):
        torch.manual_seed(0)
        self.model = timm.create_model(name, num_classes=10, device=DEVICE, **kwargs).train()
        size = kwargs.get('img_size', 224)
        self.x = torch.randn(batch_size, 3, size, size, device=DEVICE)
        self.y = torch.randint(10, (batch_size,), device=DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **({} if CPU else {'capturable': True}))
        self.call = self.model
        self.amp = True

    def loss(self):
        with torch.autocast(DEVICE.type, HALF, enabled=self.amp):
            return F.cross_entropy(self.call(self.x).float(), self.y)

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss

    def gradients(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        grads = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        return torch.cat([loss.detach().view(1), *grads])


def steps(args):
    """Training steps in the ways that people run them: the gradients beside those of float32, and the time."""
    rows, ape_ms, bad = [], {}, []
    batch, repeats = (2, 1) if CPU else (128, 10)
    names = ('test_vit_ape', 'test_vit_sape2_k_ape') if CPU else MODELS
    for name in names:
        for backend in ('torch', 'triton') if 'sape2_' in name else (None,):
            with using_backend(backend):
                def training():
                    return Training(name, batch, **TINY)

                plain = training()
                plain.amp = False
                exact, usual = plain.gradients(), training().gradients()
                tolerance = 4 * ((usual - exact).norm() / exact.norm()).item() + 1e-3  # that of bfloat16 itself
                for way in ('float32', 'eager', 'compiled', 'reduce-overhead', 'graph', 'checkpointed', 'two streams'):
                    if CPU and way not in ('float32', 'eager', 'checkpointed'):
                        continue
                    torch.compiler.reset()
                    row = {'model': name, 'backend': backend or '', 'way': way}
                    try:
                        now = training()
                        now.amp = way != 'float32'
                        if way == 'checkpointed':
                            now.model.set_grad_checkpointing()
                        elif way in ('compiled', 'reduce-overhead'):
                            now.call = torch.compile(now.model, mode='reduce-overhead' if way != 'compiled' else None)
                        if way == 'two streams':
                            error, took = two_streams(now, training(), exact, repeats)
                        else:
                            error = ((now.gradients() - exact).norm() / exact.norm()).item()
                            step = graph_of(now) if way == 'graph' else now.step
                            took = milliseconds(step, repeats)
                        ape_ms.setdefault(way, took)  # of APE, the first model
                        ratio = round(took / ape_ms[way], 3)
                        row.update(error=f'{error:.1e}', ms=round(took, 3), to_ape=ratio, notes='')
                        if not error < tolerance:
                            bad.append(f'{name} {backend} {way}: {error:.1e}')
                    except Exception as e:
                        row['notes'] = f'{type(e).__name__}: {str(e).splitlines()[0][:120]}'
                        bad.append(f'{name} {backend} {way}: {row["notes"]}')
                    rows.append(row)
                    say(row)
                    write(rows, args.output)
    if bad:
        sys.exit('\n'.join(bad))


def graph_of(training):
    """A training step as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            training.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    training.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        training.loss().backward()
        training.optimizer.step()
    return graph.replay


def two_streams(first, second, exact, repeats):
    """Two models at a time on two streams: error of their gradients, and ms for both."""
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    found = []
    for training, stream in zip((first, second), streams):
        with torch.cuda.stream(stream):
            found.append(training.gradients())
    torch.cuda.synchronize()
    error = max(((f - exact).norm() / exact.norm()).item() for f in found)

    def both():
        for training, stream in zip((first, second), streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                training.step()
            torch.cuda.current_stream().wait_stream(stream)

    return error, milliseconds(both, repeats)


def profile(args):
    """Where a step goes: the kernels that take longest, and whether anything waits for the GPU in between."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    for name in ('vit_small_ape', 'vit_small_sape2_k_ape'):
        with using_backend('triton' if 'sape2' in name else None):
            training = Training('test_vit_ape' if CPU else name, 2 if CPU else 128, **TINY)
            for _ in range(3):
                training.step()
            if not CPU:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode('error')
                training.step()
                torch.cuda.set_sync_debug_mode('default')
                say(f'{name}: no operation of a step waits for the GPU')
            activities = [ProfilerActivity.CPU, *([] if CPU else [ProfilerActivity.CUDA])]
            with record(activities=activities) as found:
                for _ in range(1 if CPU else 5):
                    training.step()
            say(found.key_averages().table(
                sort_by=f'self_{"cpu" if CPU else "cuda"}_time_total', row_limit=25, max_name_column_width=70))


def busy(args):
    """Run a command, and say how busy the GPU was: from nvidia-smi, every second."""
    shares, stop = [], threading.Event()

    def watch():
        while not stop.wait(1):
            asked = subprocess.run(
                ['nvidia-smi', '--query-gpu=utilization.gpu', '--format=csv,noheader,nounits'],
                capture_output=True, text=True)
            shares.extend(int(line) for line in asked.stdout.split() if line.isdigit())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.monotonic()
    try:
        code = subprocess.run(args.command).returncode
    finally:
        stop.set()
        watcher.join()
    mean = f'{statistics.mean(shares):.0f} %' if shares else 'unknown'
    say(f'took {time.monotonic() - start:.0f} s, GPU busy {mean} of the time')
    sys.exit(code)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for function in (versions, contact, small, tiles, steps, profile, busy):
        command = commands.add_parser(function.__name__, description=function.__doc__)
        command.set_defaults(run=function)
        command.add_argument('--device', choices=('cuda', 'cpu'), default='cuda')
        if function is contact:
            command.add_argument('--only', metavar='DTYPE-SHAPE')
        elif function is small:
            command.add_argument('--dtype', choices=('bfloat16', 'float16', 'float32'), default='bfloat16')
        elif function in (tiles, steps):
            command.add_argument('--output', metavar='FILE')
        elif function is busy:
            command.add_argument('command', nargs='+')
    args = parser.parse_args()
    args.run(args)


if __name__ == '__main__':
    main()
