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
        summary='Measure what encodings cost, beside APE in the same run: time, peak memory, parameters.',
        epilog="""\
examples:
  timm-sape bench --output cost.csv
  timm-sape bench --pos-enc rope2d ape+sape2_k --settings 224/16 --device cuda --amp --batch-size 128

Each model is checked against float64 before it is timed. The table is printed, figures are ratios to `ape`.""",
    )
    parser.add_argument('--pos-enc', nargs='+', metavar='NAME', help='what to measure (default: every encoding)')
    parser.add_argument('--settings', nargs='+', metavar='SIZE/PATCH', help='32/4, 224/16 (default: both)')
    parser.add_argument('--device', default='cpu', help='cpu, cuda, ... (default: %(default)s)')
    parser.add_argument('--batch-size', type=int, default=8, help='images in a step (default: %(default)s)')
    parser.add_argument('--repeats', type=int, default=5, help='steps of each, medians count (default: %(default)s)')
    parser.add_argument('--amp', action='store_true', help='bfloat16 autocast')
    parser.add_argument('--model', default='vit_small_nope', help='one of our entrypoints (default: %(default)s)')
    parser.add_argument('--output', type=Path, metavar='FILE', help='write a CSV file')


def _bench(args: argparse.Namespace) -> int:
    import timm
    import torch

    from . import __version__, bench
    from .encodings import parse_pos_enc

    settings = args.settings or list(bench.SETTINGS)
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
        pos_encs = args.pos_enc or bench.default_pos_encs()
        for pos_enc in pos_encs:
            parse_pos_enc(pos_enc)
    except (AssertionError, RuntimeError, ValueError) as e:
        raise CommandError(str(e)) from e
    if args.output is not None and not args.output.absolute().parent.is_dir():
        raise CommandError(f'there is no directory {args.output.absolute().parent} to write {args.output.name} to')
    rows = bench.bench_encodings(
        pos_encs, settings, args.device, args.batch_size, args.repeats, args.amp, args.model)
    dtype = 'bfloat16 autocast' if args.amp else 'float32'
    notes = (
        f'{args.model}, ratios to ape, batch {args.batch_size}, {dtype}, medians of {args.repeats}; '
        f'{bench.hardware(device)}; torch {torch.__version__}, timm {timm.__version__}, timm-sape {__version__}')
    with tempfile.TemporaryDirectory() as folder:
        path = args.output or Path(folder, 'cost.csv')
        bench.write_csv(rows, path, notes)
        print(bench.cost_table(path))
    return 0
