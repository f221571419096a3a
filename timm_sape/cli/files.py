"""Write the files of subcommands: never overwrite without --force, never leave a half-written file."""
import argparse
import functools
import json
import math
import os
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Mapping, Optional, Sequence, Tuple

from .common import CommandError

__all__ = [
    'FIGURES',
    'TABLES',
    'add_output_options',
    'check_folder',
    'check_outputs',
    'interruptible',
    'table_writer',
    'write_files',
]

TABLES = ('.csv', '.json', '.md')
FIGURES = ('.png', '.svg', '.pdf')
OPTIONAL = ('matplotlib', 'scipy', 'yaml')  # what the extra `lab` installs


def add_output_options(parser: argparse.ArgumentParser, plot: str = '') -> None:
    """Add `--output` and `--force`, and `--plot` if there is something to plot.

    Args:
        parser: Parser of the subcommand.
        plot: What the figure shows, for the help. Empty for no figure.
    """
    parser.add_argument('--output', type=Path, metavar='FILE', help=f'write the table: {", ".join(TABLES)}')
    if plot:
        parser.add_argument(
            '--plot', type=Path, metavar='FILE', help=f'draw {plot}: {", ".join(FIGURES)} (needs matplotlib)')
    parser.add_argument('--force', action='store_true', help='overwrite existing files')


def check_outputs(paths: Iterable[Optional[Path]], force: bool, suffixes: Tuple[str, ...]) -> None:
    """Check that files can be written, before any work is done.

    Args:
        paths: Files to write; None for those that were not asked for.
        force: Whether existing files may be overwritten.
        suffixes: Supported suffixes.

    Raises:
        CommandError: If a file exists, its folder does not exist or is not writable, its suffix is not supported, or it
            is a figure and matplotlib is not installed.
    """
    paths = [path for path in paths if path is not None]
    for path in paths:
        folder = path.absolute().parent
        if path.suffix.lower() not in suffixes:
            raise CommandError(f'{path} must end in {" or ".join(suffixes)}, which sets the format')
        if not folder.is_dir():
            raise CommandError(f'there is no directory {folder} to write {path.name} to; create it')
        if path.is_dir():
            raise CommandError(f'{path} is a directory; name a file')
        if not os.access(folder, os.W_OK):
            raise CommandError(f'{folder} is not writable; name another directory for {path.name}')
        if path.suffix.lower() in FIGURES and find_spec('matplotlib') is None:
            raise CommandError(f'{path.name} needs matplotlib: pip install matplotlib, or leave it out')
    _refuse_taken(paths, force)


def check_folder(folder: Path) -> None:
    """Check that a folder can be created, before any work is done.

    Raises:
        CommandError: If it exists or cannot be created.
    """
    if os.path.lexists(folder):
        raise CommandError(f'{folder} exists; name an --output that does not')
    made = []  # and the missing folders that it is to be in
    try:
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                path.mkdir()
                made.append(path)
    except OSError as e:
        raise CommandError(f'{folder} cannot be created: {e.strerror}; name another --output') from e
    finally:
        for path in reversed(made):
            path.rmdir()


def _refuse_taken(paths: Iterable[Path], force: bool) -> None:
    taken = [str(path) for path in paths if os.path.lexists(path)]
    if taken and not force:
        if len(taken) > 5:
            taken[5:] = [f'and {len(taken) - 5} more']
        raise CommandError(f'nothing written; --force overwrites what is there: {", ".join(taken)}')


def write_files(writers: Mapping[Optional[Path], Callable[[Path], None]], force: bool) -> None:
    """Write all files or none.

    Each file is written to a hidden folder beside its place, then all are renamed. So an error, a full disk or Ctrl-C
    leaves no half-written file. Missing folders are created.

    Args:
        writers: A function per file. It is called with a temporary path that has the same name. A file of None, which
            was not asked for, is left out.
        force: Whether existing files may be overwritten.

    Raises:
        CommandError: If a file exists (perhaps since `check_outputs`) or cannot be written.
    """
    writers = {path: write for path, write in writers.items() if path is not None}
    _refuse_taken(writers, force)
    try:
        with ExitStack() as stack:
            staged: Dict[Path, Path] = {}
            for path, write in writers.items():
                target = Path(os.path.realpath(path))  # where a link leads; unlike resolve, it accepts a loop
                target.parent.mkdir(parents=True, exist_ok=True)
                folder = tempfile.TemporaryDirectory(prefix='.timm-sape-', dir=target.parent)
                staged[target] = Path(stack.enter_context(folder), path.name)
                write(staged[target])
            _refuse_taken(writers, force)
            for path, ready in staged.items():
                os.replace(ready, path)
    except OSError as e:
        raise CommandError(f'cannot write {path}: {e}') from e


def table_writer(rows: Sequence[Dict[str, Any]], notes: str, table: str) -> Callable[[Path], None]:
    """Make a function for `write_files` that writes rows in the format of the suffix.

    Args:
        rows: Plain values by column. All rows have the same columns.
        notes: What was measured where, in one line. In CSV it is a column, in JSON it is beside `rows`.
        table: The rows as Markdown.
    """
    from ..lab.tables import write_csv

    def write(path: Path) -> None:
        if path.suffix.lower() == '.csv':
            write_csv(rows, path, notes)
        elif path.suffix.lower() == '.json':
            content = {'notes': notes, 'rows': list(map(_finite, rows))}
            path.write_text(json.dumps(content, indent=2, allow_nan=False) + '\n', encoding='utf-8')
        else:
            path.write_text(f'{table}\n\n{notes}\n', encoding='utf-8')

    return write


def _finite(row: Dict[str, Any]) -> Dict[str, Any]:
    """The row with None for numbers that JSON does not have."""
    return {
        column: None if isinstance(value, float) and not math.isfinite(value) else value
        for column, value in row.items()}


def interruptible(handler: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Wrap the handler of a subcommand, so that it ends with one line instead of a traceback in two cases.

    On Ctrl-C the exit code is 130, as in shells. A missing optional package becomes a CommandError.
    """
    @functools.wraps(handler)
    def guarded(args: argparse.Namespace) -> int:
        try:
            return handler(args)
        except KeyboardInterrupt:
            print('timm-sape: interrupted', file=sys.stderr)
            return 130
        except ModuleNotFoundError as e:
            package = (e.name or '').partition('.')[0]
            if package not in OPTIONAL:
                raise
            raise CommandError(
                f'this needs {package}, which is not installed: pip install matplotlib pyyaml scipy') from e

    return guarded
