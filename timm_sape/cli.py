"""The command line: `timm-sape`, and `python -m timm_sape`.

Each subcommand is one function that declares its arguments and names its handler, and one line in `main`.
"""
import argparse
import os
import runpy
import shutil
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import List, Optional

__all__ = ['main']


class CommandError(Exception):
    """A mistake that the user can mend: shown without a traceback, exit code 2."""


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name, those of the process by default.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog='timm-sape',
        description='Vision Transformers with a choice of position encodings, for timm.',
        epilog='`timm-sape COMMAND --help` tells more, with examples. `python -m timm_sape` is the same program.',
    )
    commands = parser.add_subparsers(metavar='COMMAND', required=True)
    _add_run(commands)
    _add_configs(commands)
    _add_bench(commands)

    args = parser.parse_args(argv)
    try:
        return args.handler(args)
    except CommandError as e:
        print(f'timm-sape: {e}', file=sys.stderr)
        return 2


def _add_command(commands, name: str, handler, summary: str, epilog: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=handler)
    return parser


def _add_run(commands) -> None:
    parser = _add_command(
        commands, 'run', _run,
        summary="Run one of timm's scripts, or any other, with this package's models registered.",
        epilog="""\
examples:
  timm-sape run validate.py --model vit_small_sape2_k --checkpoint model_best.pth.tar --data-dir ROOT
  timm-sape run train.py --config train_configs/smoke/test_vit_sape2_k.yaml --data-dir ROOT
  torchrun --nproc-per-node 2 -m timm_sape run train.py --config FILE --data-dir ROOT
  timm-sape run benchmark.py --help      (the help of benchmark.py)""",
    )
    parser.add_argument('script', metavar='SCRIPT', help='path of a Python script')
    parser.add_argument('script_args', metavar='...', nargs=argparse.REMAINDER, help="the script's own arguments")


def _run(args: argparse.Namespace) -> int:
    script = args.script
    if os.path.isdir(script):
        example = os.path.join(script, 'train.py')
        raise CommandError(f"'{script}' is a directory; name a script in it, such as {example}")
    if not os.path.exists(script):
        tag = f'v{version("timm")}'
        raise CommandError(
            f"there is no script '{script}'; timm's wheel has none of timm's scripts, so get those of the installed "
            f'version: git clone --depth 1 --branch {tag} https://github.com/huggingface/pytorch-image-models')

    import timm_sape  # noqa: F401, registers the models

    # As the interpreter sets them for `python SCRIPT ...`. Its safe-path mode has put no directory of ours first.
    sys.argv[:] = [script, *args.script_args]
    if not getattr(sys.flags, 'safe_path', False):  # Python 3.11
        del sys.path[0]
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    runpy.run_path(script, run_name='__main__')
    return 0


def _add_configs(commands) -> None:
    parser = _add_command(
        commands, 'configs', _configs,
        summary="Write the training recipes, which are YAML files for timm's train.py, to a directory.",
        epilog="""\
examples:
  timm-sape configs train_configs
  python train.py --config train_configs/smoke/test_vit_sape2_k.yaml --data-dir ROOT""",
    )
    parser.add_argument('dir', metavar='DIR', type=Path, help='where to write them; made if missing')
    parser.add_argument('--force', action='store_true', help='overwrite files that are there')


def _configs(args: argparse.Namespace) -> int:
    source = _configs_source()
    names = sorted(p.relative_to(source) for p in source.rglob('*') if p.suffix in ('.md', '.yaml'))
    taken = [str(args.dir / name) for name in names if os.path.lexists(args.dir / name)]
    if taken and not args.force:
        raise CommandError('\n  '.join(['nothing written; --force overwrites these files, which are there:', *taken]))

    # All is written aside first, then renamed into place: a full disk or an interrupt leaves no half-written file.
    try:
        args.dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix='.timm-sape-', dir=args.dir) as staging:
            for name in names:
                (args.dir / name).parent.mkdir(parents=True, exist_ok=True)
                staged = Path(staging, name)
                staged.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, staged)
            for name in names:
                os.replace(Path(staging, name), args.dir / name)
    except OSError as e:
        raise CommandError(f'cannot write the recipes to {args.dir}: {e}') from e
    for name in names:
        print(args.dir / name)
    return 0


def _configs_source() -> Path:
    """Where the recipes lie: a wheel carries them inside the package, a checkout has them beside it."""
    package = Path(__file__).resolve().parent
    for path in (package / 'train_configs', package.parent / 'train_configs'):
        if path.is_dir():
            return path
    raise CommandError(
        f'this installation has no training recipes at {package}; reinstall it with `pip install --force-reinstall '
        'timm-sape`')


def _add_bench(commands) -> None:
    parser = _add_command(
        commands, 'bench', _bench,
        summary="Measure what encodings cost beside APE, or SaPE2's attention beside plain attention, in the same run.",
        epilog="""\
examples:
  timm-sape bench --output cost.csv
  timm-sape bench --pos-enc rope2d ape+sape2_k --settings 224/16 --device cuda --amp --batch-size 128
  timm-sape bench sape2 --repeats 9 --output sape2.csv --plot memory.png
  timm-sape bench sape2 --device cuda --amp --batch-size 128 --output sape2.csv

Everything is checked against float64 before it is timed. `encodings` prints a table of ratios to `ape`; `sape2` the
operator over N, and whole models, which with --output go to FILE and, beside it, to a file named -models.""",
    )
    parser.add_argument(
        'what', nargs='?', choices=('encodings', 'sape2'), default='encodings', help='(default: %(default)s)')
    parser.add_argument('--pos-enc', nargs='+', metavar='NAME', help='encodings: what to measure (default: every one)')
    parser.add_argument('--settings', nargs='*', metavar='SIZE/PATCH', help='32/4, 224/16, 384/16 (default: first two)')
    parser.add_argument('--backends', nargs='+', metavar='NAME', help='sape2: reference, torch, triton')
    parser.add_argument('--sizes', nargs='*', type=int, metavar='N', help='sape2: 64, 196, ... (default: up to 4096)')
    parser.add_argument('--device', default='cpu', help='cpu, cuda, ... (default: %(default)s)')
    parser.add_argument('--batch-size', type=int, default=8, help='images in a step (default: %(default)s)')
    parser.add_argument('--repeats', type=int, default=5, help='steps of each, medians count (default: %(default)s)')
    parser.add_argument('--amp', action='store_true', help='bfloat16 autocast')
    parser.add_argument('--model', default='vit_small_nope', help='one of our entrypoints (default: %(default)s)')
    parser.add_argument('--output', type=Path, metavar='FILE', help='write a CSV file')
    parser.add_argument('--plot', type=Path, metavar='FILE', help='sape2: draw memory over N (wants matplotlib)')


def _bench(args: argparse.Namespace) -> int:
    import timm
    import torch

    from . import __version__, bench

    settings = list(bench.DEFAULT_SETTINGS) if args.settings is None else args.settings
    unknown = [s for s in settings if s not in bench.SETTINGS]
    if unknown:
        raise CommandError(f'unknown setting {unknown[0]!r}; choose of {", ".join(bench.SETTINGS)}')
    if min(args.batch_size, args.repeats) < 1:
        raise CommandError('--batch-size and --repeats must be at least 1')
    if not timm.list_models(args.model, module='vit_pos_enc'):
        raise CommandError(f'{args.model!r} is none of our models; see timm.list_models(module="vit_pos_enc")')
    try:
        device = torch.device(args.device)
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError) as e:
        raise CommandError(str(e)) from e
    for path in (args.output, args.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise CommandError(f'there is no directory {path.absolute().parent} to write {path.name} to')
    dtype = 'bfloat16 autocast' if args.amp else 'float32'
    where = (
        f'{dtype}, medians of {args.repeats}; {bench.hardware(device)}; torch {torch.__version__}, '
        f'timm {timm.__version__}, timm-sape {__version__}')
    measure = _bench_sape2 if args.what == 'sape2' else _bench_encodings
    return measure(args, settings, where)


def _bench_encodings(args: argparse.Namespace, settings: List[str], where: str) -> int:
    from . import bench
    from .encodings import parse_pos_enc

    for option in ('backends', 'sizes', 'plot'):
        if getattr(args, option) is not None:
            raise CommandError(f'--{option} belongs to `timm-sape bench sape2`')
    try:
        pos_encs = args.pos_enc or bench.default_pos_encs()
        for pos_enc in pos_encs:
            parse_pos_enc(pos_enc)
    except ValueError as e:
        raise CommandError(str(e)) from e
    rows = bench.bench_encodings(
        pos_encs, settings, args.device, args.batch_size, args.repeats, args.amp, args.model)
    notes = f'{args.model}, ratios to ape, batch {args.batch_size}, {where}'
    with tempfile.TemporaryDirectory() as folder:
        path = args.output or Path(folder, 'cost.csv')
        bench.write_csv(rows, path, notes)
        print(bench.cost_table(path))
    return 0


def _bench_sape2(args: argparse.Namespace, settings: List[str], where: str) -> int:
    import torch

    from . import bench, bench_sape2
    from .ops.backend import BACKENDS

    if args.pos_enc is not None:
        raise CommandError('--pos-enc belongs to `timm-sape bench encodings`')
    sizes = list(bench_sape2.SIZES) if args.sizes is None else args.sizes
    backends = args.backends or ['torch', *(['triton'] if torch.device(args.device).type == 'cuda' else [])]
    for what, given, known in (('size', sizes, bench_sape2.SIZES), ('backend', backends, BACKENDS)):
        unknown = [x for x in given if x not in known]
        if unknown:
            raise CommandError(f'unknown {what} {unknown[0]!r}; choose of {", ".join(map(str, known))}')
    if args.plot is not None and find_spec('matplotlib') is None:
        raise CommandError('--plot wants matplotlib: pip install matplotlib, or leave it out')
    try:
        rows = bench_sape2.bench_operator(
            backends, sizes, args.device, args.repeats, torch.bfloat16 if args.amp else torch.float32)
        models = bench_sape2.bench_models(
            backends, settings, args.device, args.batch_size, args.repeats, args.amp, args.model)
    except ValueError as e:  # a backend that cannot do it
        raise CommandError(str(e)) from e
    output = args.output or Path('sape2.csv')
    notes = (f'attention with head dim {bench_sape2.HEAD_DIM}, {where}', f'{args.model}, ratios to ape, {where}')
    for table, path, note in zip((rows, models), (output, output.with_stem(f'{output.stem}-models')), notes):
        if not table:
            continue
        if args.output is not None:
            bench.write_csv(table, path, note)
        print(bench.markdown(table), note, sep='\n\n', end='\n\n')
    if args.plot is not None and rows:
        bench_sape2.plot_memory(rows, args.plot)
    return 0
