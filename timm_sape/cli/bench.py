"""`timm-sape bench`: measure what encodings cost."""
import argparse
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional

from .common import CommandError, add_command, refuse_options
from .data_options import check_device
from .files import FIGURES, TABLES, add_output_options, check_outputs, interruptible, table_writer, write_files

__all__ = ['add']

MODEL = 'vit_small_pos_enc'
BATCH_SIZE = 8
IGNORED = {  # options of others, by what is measured
    'encodings': ('backends', 'sizes', 'plot'),
    'sape2': ('pos_enc',),
    'naflex': ('backends', 'sizes', 'plot', 'settings', 'batch_size'),
    'timm': ('pos_enc', 'backends', 'sizes', 'plot', 'settings', 'model'),
}


def add(commands) -> None:
    parser = add_command(
        commands, 'bench', interruptible(_bench),
        summary="Measure the cost of encodings, SaPE2's attention, NaFlexVit, or ours beside timm's.",
        examples="""\
examples:
  timm-sape bench --output cost.csv
  timm-sape bench --pos-enc rope2d ape+sape2_k --settings 224/16 --device cuda --amp --batch-size 128
  timm-sape bench sape2 --repeats 9 --output sape2.csv --plot memory.png
  timm-sape bench sape2 --device cuda --amp --batch-size 128 --output sape2.csv
  timm-sape bench naflex --output naflex.csv
  timm-sape bench timm --output timm.csv

`encodings` prints a table of ratios to `ape`. `sape2` prints one of the operator over N and one of whole models;
--output FILE writes the second to FILE-models. `naflex` prints steps on eight images of eight sizes, beside timm's
NaFlexVit and beside the same images one by one. `timm` prints timm's own rotary and relative-position ViTs beside ours
with the same weights. Files are written again after each row, so nothing measured is lost if the command ends early.

Results are checked before they are timed: those of `encodings`, and of `sape2` up to N=1024, against float64; the
logits of `naflex` and `timm` against those of the plain model or of timm's, always in float32, even with --amp.

If other processes want the same cores, set OMP_NUM_THREADS=1. With more threads each small operation waits for its last
thread, and SaPE2 in PyTorch, which has dozens of them, looks ten times slower than it is.""",
    )
    parser.add_argument(
        'what', nargs='?', choices=('encodings', 'sape2', 'naflex', 'timm'), default='encodings',
        help='(default: %(default)s)')
    parser.add_argument('--pos-enc', nargs='+', metavar='NAME', help='encodings: what to measure (default: all)')
    parser.add_argument(
        '--settings', nargs='*', metavar='SIZE/PATCH',
        help='sizes of images and patches in pixels: 32/4, 224/16 or 384/16 (default: 32/4 224/16)')
    parser.add_argument('--backends', nargs='+', metavar='NAME', help='sape2: reference, torch, cpp, triton')
    parser.add_argument(
        '--sizes', nargs='*', type=int, metavar='N',
        help='sape2: numbers of patches (default: 64 196 576 1024 4096)')
    parser.add_argument('--device', default='cpu', help='cpu, cuda, ... (default: %(default)s)')
    parser.add_argument('--batch-size', type=int, metavar='N', help=f'images in a step (default: {BATCH_SIZE})')
    parser.add_argument(
        '--repeats', type=int, metavar='N', default=5, help='steps of each, for medians (default: %(default)s)')
    parser.add_argument('--amp', action='store_true', help='bfloat16 autocast')
    parser.add_argument('--model', help=f'one of our models; not for `bench timm` (default: {MODEL})')
    add_output_options(parser, plot='the memory of sape2 over N')


def _bench(args: argparse.Namespace) -> int:
    import timm
    import torch

    from ..lab import bench
    from ..lab.machine import about
    from ..ops.backend import choose_backend

    refuse_options(args, IGNORED[args.what], f'not for `timm-sape bench {args.what}`')
    if args.settings == []:
        refuse_options(args, ('batch_size', 'model'), 'for whole models, which --settings chooses')
    args.batch_size = BATCH_SIZE if args.batch_size is None else args.batch_size
    args.model = args.model or MODEL
    settings = list(bench.DEFAULT_SETTINGS) if args.settings is None else args.settings
    unknown = [s for s in settings if s not in bench.SETTINGS]
    if unknown:
        raise CommandError(f'unknown setting {unknown[0]!r}; choose from {", ".join(bench.SETTINGS)}')
    if min(args.batch_size, args.repeats) < 1:
        raise CommandError('--batch-size and --repeats must be at least 1')
    ours = timm.list_models('*_pos_enc' if args.what == 'naflex' else '', module='vit_pos_enc')
    if args.model not in ours:
        which = f'choose from {", ".join(ours)}' if args.what == 'naflex' else "see `timm-sape list models 'vit_*'`"
        raise CommandError(f'--model {args.model}: it is none of those that can be measured; {which}')
    check_device(args.device)
    dtype = 'bfloat16 autocast' if args.amp else 'float32'
    where = f'{dtype}, medians of {args.repeats}; {about(torch.device(args.device))}'
    if args.what != 'sape2':  # which has a column for it
        where += f'; SaPE2 by {choose_backend(None, torch.zeros(1, 1, 2, 64, device=args.device), (14, 14))!r}'
    measure = {
        'encodings': _bench_encodings, 'sape2': _bench_sape2, 'naflex': _bench_naflex, 'timm': _bench_timm}[args.what]
    try:
        return measure(args, settings, where)
    except ValueError as e:  # an encoding that does not fit the model, or a backend that cannot run here
        raise CommandError(str(e)) from e


def _tabulate(
        rows: Iterable[Dict[str, Any]],
        notes: str,
        markdown: Callable[[List[Dict[str, Any]]], str],
        path: Optional[Path],
        force: bool,
) -> List[Dict[str, Any]]:
    """Measure rows, write all of them after each one, and print them at the end."""
    done = []
    for row in rows:
        done.append(row)
        write_files({path: table_writer(done, notes, markdown(done))}, force or len(done) > 1)
    if done:
        print(markdown(done), notes, sep='\n\n', end='\n\n')
    return done


def _bench_encodings(args: argparse.Namespace, settings: List[str], where: str) -> int:
    from ..encodings import parse_pos_enc
    from ..lab import bench

    pos_encs = args.pos_enc or bench.default_pos_encs()
    for pos_enc in pos_encs:
        parse_pos_enc(pos_enc)
    if not settings:
        raise CommandError('nothing to measure; give --settings at least one')
    check_outputs([args.output], args.force, TABLES)
    rows = bench.bench_encodings(
        pos_encs, settings, args.device, args.batch_size, args.repeats, args.amp, args.model)
    notes = f'{args.model}, ratios to ape, batch {args.batch_size}, {where}'
    _tabulate(rows, notes, bench.cost_table, args.output, args.force)
    return 0


def _bench_naflex(args: argparse.Namespace, settings: List[str], where: str) -> int:
    from ..lab import bench_naflex
    from ..lab.tables import markdown

    check_outputs([args.output], args.force, TABLES)
    size = args.model.removesuffix('_pos_enc')
    rows = bench_naflex.bench_naflex(
        args.pos_enc or bench_naflex.DEFAULT_POS_ENCS, args.device, args.repeats, args.amp, size)
    _tabulate(rows, f'{size}, 8 images of 8 sizes, {where}', markdown, args.output, args.force)
    return 0


def _bench_timm(args: argparse.Namespace, settings: List[str], where: str) -> int:
    from ..lab import bench_timm
    from ..lab.tables import markdown

    check_outputs([args.output], args.force, TABLES)
    rows = bench_timm.bench_timm(bench_timm.MODELS, args.device, args.batch_size, args.repeats, args.amp)
    notes = f"224 pixels, ratios to timm's model, batch {args.batch_size}, {where}"
    _tabulate(rows, notes, markdown, args.output, args.force)
    return 0


def _bench_sape2(args: argparse.Namespace, settings: List[str], where: str) -> int:
    import torch

    from ..lab import bench_sape2
    from ..lab.tables import markdown
    from ..ops.backend import BACKENDS
    from ..ops.cpp_build import find_cpp

    sizes = list(bench_sape2.SIZES) if args.sizes is None else args.sizes
    on = torch.device(args.device).type
    backends = args.backends or [
        'torch', *(['cpp'] if on == 'cpu' and not find_cpp() else []), *(['triton'] if on == 'cuda' else [])]
    for what, given, known in (('size', sizes, bench_sape2.SIZES), ('backend', backends, BACKENDS)):
        unknown = [x for x in given if x not in known]
        if unknown:
            raise CommandError(f'unknown {what} {unknown[0]!r}; choose from {", ".join(map(str, known))}')
    if not sizes and (not settings or args.plot is not None):
        raise CommandError(f'nothing to {"plot" if settings else "measure"}; give --sizes at least one')
    outputs = [args.output, args.output and args.output.with_stem(f'{args.output.stem}-models')]
    check_outputs([path for path, given in zip(outputs, (sizes, settings)) if given], args.force, TABLES)
    check_outputs([args.plot], args.force, FIGURES)
    rows = bench_sape2.bench_operator(
        backends, sizes, args.device, args.repeats, torch.bfloat16 if args.amp else torch.float32)
    notes = f'attention with head dim {bench_sape2.HEAD_DIM}, {where}'
    operator = _tabulate(rows, notes, markdown, outputs[0], args.force)
    write_files({args.plot: lambda path: bench_sape2.plot_memory(operator, path)}, args.force)
    rows = bench_sape2.bench_models(
        backends, settings, device=args.device, batch_size=args.batch_size, repeats=args.repeats, amp=args.amp,
        model=args.model)
    notes = f'{args.model}, ratios to ape, batch {args.batch_size}, {where}'
    _tabulate(rows, notes, markdown, outputs[1], args.force)
    return 0
