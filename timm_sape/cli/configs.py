"""`timm-sape configs`: the training recipes, written to a directory."""
import argparse
import os
import shutil
import tempfile
from pathlib import Path

from .common import CommandError, add_command
from .files import interruptible

__all__ = ['add']


def add(commands) -> None:
    parser = add_command(
        commands, 'configs', interruptible(_configs),
        summary="Write the training recipes, which are YAML files for timm's train.py, to a directory.",
        examples="""\
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
    package = Path(__file__).resolve().parents[1]
    for path in (package / 'train_configs', package.parent / 'train_configs'):
        if path.is_dir():
            return path
    raise CommandError(
        f'this installation has no training recipes at {package}; reinstall it with `pip install --force-reinstall '
        'timm-sape`')
