"""Files that subcommands write: nothing is overwritten unasked, and nothing is left half-written."""
import argparse
import functools
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Mapping, Optional, Sequence, Tuple

from .common import CommandError

__all__ = ['FIGURES', 'TABLES', 'add_output_options', 'check_outputs', 'interruptible', 'table_writer', 'write_files']

TABLES = ('.csv', '.json', '.md')
FIGURES = ('.png', '.svg', '.pdf')


def add_output_options(parser: argparse.ArgumentParser, plot: str = '') -> None:
    """Add `--output`, `--force`, and `--plot` if there is something to plot.

    Args:
        parser: Of the subcommand.
        plot: What the figure shows, for the help.
    """
    parser.add_argument('--output', type=Path, metavar='FILE', help=f'write the table: {", ".join(TABLES)}')
    if plot:
        parser.add_argument(
            '--plot', type=Path, metavar='FILE', help=f'draw {plot}: {", ".join(FIGURES)} (wants matplotlib)')
    parser.add_argument('--force', action='store_true', help='overwrite files that are there')


def check_outputs(
        paths: Iterable[Optional[Path]],
        force: bool,
        suffixes: Tuple[str, ...] = TABLES + FIGURES,
) -> None:
    """Refuse files that could not be written, before any work is done.

    Args:
        paths: What is to be written; None for what was not asked for.
        force: Whether files that are there may be overwritten.
        suffixes: Those that are known.

    Raises:
        CommandError: If a file is there already, its folder is not, its suffix is unknown, or it is a figure and there
            is no matplotlib.
    """
    paths = [path for path in paths if path is not None]
    for path in paths:
        folder = path.absolute().parent
        if path.suffix.lower() not in suffixes:
            raise CommandError(f'{path} must end in {" or ".join(suffixes)}, which says what is written')
        if not folder.is_dir():
            raise CommandError(f'there is no directory {folder} to write {path.name} to')
        if path.is_dir():
            raise CommandError(f'{path} is a directory; name a file')
        if not os.access(folder, os.W_OK):
            raise CommandError(f'{folder} is not writable; name another directory for {path.name}')
        if path.suffix.lower() in FIGURES and find_spec('matplotlib') is None:
            raise CommandError(f'{path.name} wants matplotlib: pip install matplotlib, or leave it out')
    _refuse_taken(paths, force)


def _refuse_taken(paths: Iterable[Path], force: bool) -> None:
    taken = [str(path) for path in paths if os.path.lexists(path)]
    if taken and not force:
        raise CommandError(f'nothing written; --force overwrites what is there: {", ".join(taken)}')


def write_files(writers: Mapping[Path, Callable[[Path], None]], force: bool) -> None:
    """Write all files or none.

    Each is written to a hidden folder beside its place, then all are renamed into place, so an error, a full disk or
    Ctrl-C leaves no half-written file. Folders that are missing are made.

    Args:
        writers: For each file what writes it, called with a path of the same name elsewhere.
        force: Whether files that are there may be overwritten.

    Raises:
        CommandError: If a file is there already (it may have come since `check_outputs`), or cannot be written.
    """
    _refuse_taken(writers, force)
    try:
        with ExitStack() as stack:
            staged: Dict[Path, Path] = {}
            for path, write in writers.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                folder = tempfile.TemporaryDirectory(prefix='.timm-sape-', dir=path.parent)
                staged[path] = Path(stack.enter_context(folder), path.name)
                write(staged[path])
            _refuse_taken(writers, force)
            for path, ready in staged.items():
                os.replace(ready, path)
    except OSError as e:
        raise CommandError(f'cannot write {path}: {e}') from e


def table_writer(rows: Sequence[Dict[str, Any]], notes: str, table: str) -> Callable[[Path], None]:
    """What `write_files` calls to write rows, in the format that the suffix says.

    Args:
        rows: Plain values by column, the same columns in each.
        notes: What was measured where, in one line: a comment line in CSV, `notes` beside `rows` in JSON.
        table: The same rows as Markdown.
    """
    from ..lab.tables import write_csv

    def write(path: Path) -> None:
        if path.suffix.lower() == '.csv':
            write_csv(rows, path, notes)
        elif path.suffix.lower() == '.json':
            path.write_text(json.dumps({'notes': notes, 'rows': rows}, indent=2) + '\n')
        else:
            path.write_text(f'{table}\n\n{notes}\n')

    return write


def interruptible(handler: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Make Ctrl-C end a subcommand with one line and the exit code that shells give it, 130."""
    @functools.wraps(handler)
    def guarded(args: argparse.Namespace) -> int:
        try:
            return handler(args)
        except KeyboardInterrupt:
            print('timm-sape: interrupted', file=sys.stderr)
            return 130

    return guarded
