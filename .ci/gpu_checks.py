"""Single checks on a GPU, for .ci/gpu.py. With --device cpu they run small, in Triton's interpreter, as in a test."""
import argparse
import csv
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from functools import partial

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
from timm_sape.hub.errors import described  # noqa: E402
from timm_sape.lab.machine import about  # noqa: E402
from timm_sape.ops import using_backend  # noqa: E402
from timm_sape.ops.triton_limits import limits_of  # noqa: E402

DEVICE = torch.device('cpu' if CPU else 'cuda')
HALF = torch.float16 if CPU else torch.bfloat16  # the interpreter multiplies bfloat16 wrongly
TINY = dict(img_size=16, patch_size=4, depth=1) if CPU else {}
NAMES = ('out', 'q', 'k', 'v', 'table_x', 'table_y', 'bias_scale')
# largest error of the output and of any gradient, as norms relative to float64 on the same rounded inputs
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
# Height, width, head dim, and the grid of the tables where it is another one. Together they use every size of tiles.
SHAPES = {
    '14x14': (14, 14, 64, None),
    '8x8': (8, 8, 64, None),
    '24x24': (24, 24, 64, None),
    '7x20': (7, 20, 32, None),
    '32x32': (32, 32, 128, None),
    '14x14, head dim 80': (14, 14, 80, None),
    '3x64': (3, 64, 64, None),
    '3x64, head dim 128': (3, 64, 128, None),
    '33x5': (33, 5, 64, None),
    '24x24, tables of 14x14': (24, 24, 64, (14, 14)),
    '14x14, tables of 24x24': (14, 14, 64, (24, 24)),
}
MODELS = ('vit_small_ape', 'vit_small_rope2d', 'vit_small_rpb', 'vit_small_sape2_k_ape', 'vit_small_sape2sq_k_ape')


WAYS = ('float32', 'eager', 'compiled', 'reduce-overhead', 'graph', 'checkpointed', 'two streams')


def say(*words):
    print(*words, flush=True)


def make(height, width, head_dim, dtype, batch=2, heads=6, trained=None):
    """q, k, v, both tables and bias_scale, as numbers that the dtype can hold, strided as in timm."""
    generator = torch.Generator().manual_seed(0)
    tokens = 1 + height * width
    # Moved as a whole: parts would lose their strides.
    qkv = torch.randn(batch, tokens, 3, heads, head_dim, generator=generator).to(DEVICE, dtype)
    trained = trained or (height, width)
    tables = (torch.randn(n + 1, head_dim, generator=generator).to(DEVICE, dtype) for n in trained[::-1])
    return [*qkv.permute(2, 0, 3, 1, 4).unbind(0), *tables, torch.rand(heads, generator=generator).to(DEVICE, dtype)]


def attend(inputs, grid_size, mode, backend, dtype, trained=None, seed=0):
    """Output and gradients of a weighted sum of its entries."""
    inputs = [t.detach().to(dtype).requires_grad_() for t in inputs]
    out = sape2_attention(
        *inputs[:5], grid_size=grid_size, mode=mode, bias_scale=inputs[5], num_prefix_tokens=1, ref_grid_size=trained,
        backend=backend)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
    return [out, *torch.autograd.grad(out, inputs, weight)]


def reference(inputs, grid_size, mode, trained=None):
    """What `attend` gives in float64, and the norms that errors are compared with.

    The gain's gradient is a sum whose terms cancel for some losses, so its norm is that of several.
    """
    exact, *several = (
        attend(inputs, grid_size, mode, 'reference', torch.float64, trained, seed) for seed in range(8))
    gains = torch.stack([each[-1].norm() for each in (exact, *several)])
    return exact, [*(t.norm() for t in exact[:-1]), gains.square().mean().sqrt()]


def errors_of(found, expected):
    """Errors of what `attend` found, as norms relative to `reference`."""
    return [((a - b).norm() / size).item() for a, b, size in zip(found, *expected)]


def versions(args):
    import triton

    say(about(DEVICE), 'triton', triton.__version__, 'python', sys.version.split()[0])
    say('C compiler:', next(filter(None, map(shutil.which, ('cc', 'gcc', 'clang'))), None), '(Triton needs one)')
    if not CPU:
        say(torch.cuda.get_device_properties(0))
        torch.ones(2, device=DEVICE).sum().item()


def contact(args):
    """Triton against the reference in float64, for each dtype, shape and mode; the first is the most usual one.

    Nearly all of the time goes into compiling kernels, so --jobs processes do it at a time.
    """
    cases = []
    for dtype in TOLERANCE:
        for shape, (height, width, head_dim, trained) in SHAPES.items():
            name = f'{str(dtype).removeprefix("torch.")}-{shape}'
            if args.only not in (None, name) or CPU and dtype == torch.bfloat16:
                continue
            most = limits_of(dtype)
            code = max(height, width, *(trained or ()))
            cases += [
                (name, dtype, shape, mode) for mode in (('k',) if CPU else ('k', 'q', 'qk'))
                if head_dim <= most.head_dim and code * len(mode) <= most.code]
    if args.jobs > 1:
        with multiprocessing.get_context('spawn').Pool(args.jobs) as pool:
            bad = list(filter(None, pool.imap_unordered(contact_case, cases, chunksize=1)))
    else:
        bad = list(filter(None, map(contact_case, cases)))
    if bad or not cases:
        sys.exit(f'{len(bad)} of {len(cases)} cases failed, or are off by more than {TOLERANCE}: {"; ".join(bad)}')


def contact_case(case):
    """One case of `contact`: its name if it failed, else None."""
    name, dtype, shape, mode = case
    height, width, head_dim, trained = SHAPES[shape]
    inputs = make(height, width, head_dim, dtype, 1 if CPU else 2, 1 if CPU else 6, trained)
    try:
        found = attend(inputs, (height, width), mode, 'triton', dtype, trained)
        errors = errors_of(found, reference(inputs, (height, width), mode, trained))
        is_bad = not all(error < TOLERANCE[dtype] for error in errors)  # max() can lose a NaN
        say(f'{name} {mode}', *(f'{n} {e:.1e}' for n, e in zip(NAMES, errors)), 'BAD' if is_bad else '')
    except Exception as e:  # what one size needs too much of, others may not
        is_bad = True
        say(f'{name} {mode} BAD', described(e))
    return f'{name} {mode}' if is_bad else None


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


# Grid, head dim, and images that fill a GPU.
TILED = [(8, 64, 1024), (14, 64, 256), (24, 64, 64), (64, 64, 4)]
# Own, visit, warps, stages and registers, as in `triton_tiles`; for the codes warps, stages and registers.
FORWARD = [(64, 32, 4, 1, None), (64, 16, 4, 1, None), (64, 64, 4, 1, None), (128, 32, 8, 1, None), (64, 32, 4, 1, 128)]
BACKWARD = [
    (64, 32, 4, 1, None), (64, 32, 4, 2, None), (64, 16, 4, 1, 168), (64, 16, 4, 2, 168), (128, 32, 8, 1, None),
    (128, 32, 8, 2, None)]
SEPARATE = [(64, 32, 4, 1, None), (128, 32, 8, 1, None)]
CODES = {
    16: [(1, 3, None), (1, 3, 168), (1, 3, 128), (1, 1, 168), (2, 3, None)],
    32: [(2, 1, None), (2, 1, 128), (2, 3, None), (4, 1, None)],
    64: [(4, 1, None), (4, 3, None), (8, 1, None)],
}


def tiles(args):
    """Each kernel with other tiles, in a CUDA graph: ms. Compiled by --jobs processes before one of them measures.

    The key pass, and what leaves q, k and v alone, is measured together with the query pass as shipped.
    """
    from timm_sape.ops.triton_common import padded

    chosen = []
    for side, head_dim, batch in [(4, 16, 1)] if CPU else TILED:
        candidates = {'forward': FORWARD, 'queries': BACKWARD, 'keys': BACKWARD, 'codes': CODES[padded(side)]}
        if side > 32:
            candidates.update({f'{p}, {part}': SEPARATE for p in ('queries', 'keys') for part in ('tokens', 'codes')})
        chosen += [
            (side, head_dim, batch, what, c) for what, some in candidates.items() for c in some[:2 if CPU else None]]
    if args.jobs > 1:
        with multiprocessing.get_context('spawn').Pool(args.jobs) as pool:
            keys = [(padded(side), *others) for side, head_dim, batch, *others in chosen]  # of one binary
            different = dict(zip(keys, chosen))
            able = dict(zip(different, pool.map(tiles_compile, different.values(), chunksize=1)))
        chosen = [case for key, case in zip(keys, chosen) if able[key]]
    rows = []
    for side, head_dim, batch, what, candidate in chosen:
        try:
            ms, error = tiles_time(side, head_dim, batch, what, candidate)
            notes = ''
        except Exception as e:  # a tile may need more memory or registers than there are
            ms, error, notes = None, None, described(e)
        names = ('own', 'visit', 'warps', 'stages', 'registers')[2 if what == 'codes' else 0:]
        rows.append({
            'grid': f'{side}x{side}', 'head_dim': head_dim, 'batch': batch, 'what': what,
            'launch': ', '.join(f'{n} {value}' for n, value in zip(names, candidate)),
            'ms': ms and round(ms, 4), 'error': error and f'{error:.1e}', 'notes': notes})
        say(*rows[-1].values())
        write(rows, args.output)
    bad = [row for row in rows if row['error'] and not float(row['error']) < TOLERANCE[HALF]]
    if bad:
        sys.exit(f'off by more than {TOLERANCE[HALF]}: {bad}')


def tiles_compile(case):
    """Whether a kernel compiles and starts."""
    side, head_dim, batch, what, candidate = case
    try:
        tiles_call(side, head_dim, 1, what, candidate)()
    except Exception as e:
        say(*case, described(e)[:100])
        return False
    return True


def tiles_time(side, head_dim, batch, what, candidate):
    """ms, and the difference to what the kernel computes as shipped."""
    call = tiles_call(side, head_dim, batch, what, candidate)
    found, expected = call(), tiles_call(side, head_dim, batch, what, None)()
    errors = [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, expected)]
    error = torch.tensor([0, *errors]).max().item()  # Python's max() can lose a NaN
    return milliseconds(call if CPU else captured(call), 10), error


def tiles_call(side, head_dim, batch, what, candidate):
    """A function that launches a kernel, and returns what it wrote."""
    from timm_sape.ops import triton_codes as codes
    from timm_sape.ops import triton_distances as kernels
    from timm_sape.ops import triton_operators as operators
    from timm_sape.ops import triton_tiles as sizes

    heads = 1 if CPU else 6
    q, k, v, table_x, table_y, gain = make(side, side, head_dim, HALF, batch, heads)
    table_x, table_y = table_x.float(), table_y.float()
    gain = gain.float()
    generator = torch.Generator(DEVICE).manual_seed(1)
    grads = torch.randn(2, batch, heads, side * side, side, device=DEVICE, generator=generator)
    options = side, side, 'k', 0.125, 1.0, 1.0
    if what == 'codes':
        def call():
            before = codes.codes_options
            if candidate is not None:
                codes.codes_options = lambda *_: dict(zip(('num_warps', 'num_stages', 'maxnreg'), candidate))
            try:
                found = operators.triton_axis_codes(q, k, table_x, table_y, *options)
                return *found, *operators.triton_axis_codes_backward(*grads, q, k, table_x, table_y, *options)
            finally:
                codes.codes_options = before

        return call
    both = operators.triton_axis_codes(q, k, table_x, table_y, *options)
    inputs = q, k, v, *both, gain
    if what == 'forward':
        def call():
            before = kernels.forward_tiles
            if candidate is not None:
                kernels.forward_tiles = lambda *_: sizes.Tiles(*candidate)
            try:
                return operators.triton_distance_attention_forward(*inputs, 0.125)
            finally:
                kernels.forward_tiles = before

        return call
    out = operators.triton_distance_attention_forward(*inputs, 0.125)
    grad = torch.randn(q.shape, device=DEVICE, generator=generator).to(HALF)
    is_key, outputs = what.startswith('keys'), sizes.ALL
    if ',' in what:
        outputs = {'tokens': sizes.TOKENS, 'codes': sizes.CODES}[what.split(', ')[1]]

    def call():
        before = kernels.backward_launches

        def launches(*widths):
            if candidate is None:
                return before(*widths)
            launch = sizes.BackwardLaunch(sizes.Tiles(*candidate), is_key, **dict.fromkeys(outputs, True))
            # what writes DELTA and DGAIN comes along
            first = [other for other in before(*widths) if not other.key_pass and (is_key or not launch.tokens)]
            return [*first, launch]

        kernels.backward_launches = launches
        try:
            found = operators.triton_distance_attention_backward(grad, *out, *inputs, 0.125)
        finally:
            kernels.backward_launches = before
        if 'codes' in what:  # a launch that leaves q, k and v alone
            return found[3:5] if is_key else ()
        return found[1:3] if is_key else found[:1]  # of the query pass alone, the gradient of the codes is a part

    return call


def graphs(args):
    """The operator over N in CUDA graphs, so without the time of launching: ms, ratios to plain attention, kernels."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    rows, repeats = [], 2 if CPU else 20
    for side, batch in ((4, 1),) if CPU else ((8, 1024), (14, 256), (24, 64), (32, 32), (64, 4)):
        inputs = [t.requires_grad_() for t in make(side, side, 16 if CPU else 64, HALF, batch, 1 if CPU else 6)]
        grad = torch.randn_like(inputs[0])

        def attention(backend):
            if backend == 'plain':
                return F.scaled_dot_product_attention(*inputs[:3])
            return sape2_attention(
                *inputs[:5], grid_size=(side, side), mode='k', bias_scale=inputs[5], num_prefix_tokens=1,
                backend=backend)

        def forward(backend):
            with torch.no_grad():
                attention(backend)

        def both(backend):
            torch.autograd.grad(attention(backend), inputs[:3] if backend == 'plain' else inputs, grad)

        base = {}
        for backend in ('plain', 'triton'):
            row = {'grid': f'{side}x{side}', 'batch': batch, 'backend': backend, 'notes': ''}
            for what, function in (('forward', forward), ('both', both)):
                call = partial(function, backend)
                ms = milliseconds(call if CPU else captured(call), repeats)
                base.setdefault(what, ms)  # of plain attention, the first
                row.update({f'{what}_ms': round(ms, 4), f'{what}_vs_plain': round(ms / base[what], 3)})
            rows.append(row)
            say(row)
            write(rows, args.output)
            with record(activities=[ProfilerActivity.CPU if CPU else ProfilerActivity.CUDA]) as found:
                both(backend)
            say(found.key_averages().table(
                sort_by=f'self_{"cpu" if CPU else "cuda"}_time_total', row_limit=25, max_name_column_width=70))


def captured(function):
    """A function that replays what a call launches, as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


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
        return self.found(loss)

    def found(self, loss):
        """The loss and all gradients in one vector."""
        grads = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        return torch.cat([loss.detach().view(1), *grads])


def steps(args):
    """Training steps in the ways that people run them: the gradients beside those of float32, and the time."""
    rows, ape_ms, bad = [], {}, []
    batch, repeats = (2, 1) if CPU else (args.batch_size, 10)
    names = ('test_vit_ape', 'test_vit_sape2_k_ape') if CPU else (MODELS[0], *args.models)
    for name in names:
        for backend in args.backends if 'sape2_' in name else (None,):
            with using_backend(backend):
                def training():
                    return Training(name, batch, **TINY)

                plain = training()
                plain.amp = False
                with using_backend('torch' if backend else None):
                    exact = plain.gradients()
                usual = (training().gradients() - exact).norm() / exact.norm()
                tolerance = min(4 * usual.item() + 1e-3, 0.05)  # that of bfloat16 itself, if it is rounding
                for way in args.ways:
                    if CPU and way not in ('float32', 'eager', 'checkpointed'):
                        continue
                    torch.compiler.reset()
                    row = {'model': name, 'backend': backend or '', 'batch': batch, 'way': way}
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
                            if way == 'graph':
                                step, found = graph_of(now)
                            else:
                                step = now.step
                                for _ in range(3 if way == 'reduce-overhead' else 1):  # the third call replays a graph
                                    found = now.gradients()
                            error = ((found - exact).norm() / exact.norm()).item()
                            took = milliseconds(step, repeats)
                        ape_ms.setdefault(way, took)  # of APE, the first model
                        ratio = round(took / ape_ms[way], 3)
                        row.update(error=f'{error:.1e}', ms=round(took, 3), to_ape=ratio, notes='')
                        if not error < (1e-3 if way == 'float32' else tolerance):
                            bad.append(f'{name} {backend} {way}: {error:.1e}')
                    except Exception as e:
                        row['notes'] = described(e)
                        bad.append(f'{name} {backend} {way}: {row["notes"]}')
                    rows.append(row)
                    say(row)
                    write(rows, args.output)
    if bad:
        sys.exit('\n'.join(bad))


def graph_of(training):
    """A training step as one CUDA graph, and the loss and gradients that a replay gives at the initial weights."""
    initial = [p.detach().clone() for p in training.model.parameters()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            training.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    training.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = training.loss()
        loss.backward()
        training.optimizer.step()
    with torch.no_grad():
        for p, value in zip(training.model.parameters(), initial):
            p.copy_(value)
    graph.replay()
    return graph.replay, training.found(loss)


def two_streams(first, second, exact, repeats):
    """Two models at a time on two streams: error of their gradients, and ms for both."""
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    found = []
    for training, stream in zip((first, second), streams):
        with torch.cuda.stream(stream):
            found.append(training.gradients())
    torch.cuda.synchronize()
    error = torch.stack([(f - exact).norm() / exact.norm() for f in found]).max().item()

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
    for function in (versions, contact, small, tiles, graphs, steps, profile, busy):
        command = commands.add_parser(function.__name__, description=function.__doc__)
        command.set_defaults(run=function)
        command.add_argument('--device', choices=('cuda', 'cpu'), default='cuda')
        if function in (contact, tiles):
            command.add_argument('--jobs', type=int, default=1)
        if function is contact:
            command.add_argument('--only', metavar='DTYPE-SHAPE')
        elif function is small:
            command.add_argument('--dtype', choices=('bfloat16', 'float16', 'float32'), default='bfloat16')
        elif function in (tiles, graphs, steps):
            command.add_argument('--output', metavar='FILE')
            if function is steps:
                command.add_argument('--models', nargs='+', default=MODELS[1:], help='beside APE, which comes first')
                command.add_argument('--backends', nargs='+', default=('torch', 'triton'), help='of SaPE2')
                command.add_argument('--ways', nargs='+', default=WAYS)
                command.add_argument('--batch-size', type=int, default=128)
        elif function is busy:
            command.add_argument('command', nargs='+')
    args = parser.parse_args()
    args.run(args)


if __name__ == '__main__':
    main()
