"""`timm-sape configs`: write the training recipes to a directory."""
import argparse
import functools
import shutil
from pathlib import Path

from .common import CommandError, add_command
from .files import interruptible, write_files

__all__ = ['add']


def add(commands) -> None:
    parser = add_command(
        commands, 'configs', interruptible(_configs),
        summary="Write the training recipes, YAML files for timm's train.py, to a directory.",
        examples="""\
examples:
  timm-sape configs train_configs
  python train.py --config train_configs/smoke/test_vit_sape2_k.yaml --data-dir ROOT""",
    )
    parser.add_argument('dir', metavar='DIR', type=Path, help='where to write them; created if missing')
    parser.add_argument('--force', action='store_true', help='overwrite existing files')


def _configs(args: argparse.Namespace) -> int:
    source = _configs_source()
    names = sorted(p.relative_to(source) for p in source.rglob('*') if p.suffix in ('.md', '.yaml'))
    writers = {args.dir / name: functools.partial(shutil.copyfile, source / name) for name in names}
    write_files(writers, args.force)
    print(*writers, sep='\n')
    return 0


def _configs_source() -> Path:
    """The folder of the recipes: a wheel has it inside the package, a checkout beside it."""
    package = Path(__file__).resolve().parents[1]
    for path in (package / 'train_configs', package.parent / 'train_configs'):
        if path.is_dir():
            return path
    raise CommandError(
        f'this installation has no training recipes at {package}; reinstall it with `pip install --force-reinstall '
        'timm-sape`')
