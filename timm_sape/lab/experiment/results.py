"""What is known of each run, read from its folder, or from an archive of runs once the folders are gone.

An archive, `runs.jsonl`, has one line per run with all that the tables need and all that repeats the run: label, seed,
status, error, `starts` and `loading` as in the folder, `args` (the options of train.py), and `epochs` (the columns of
summary.csv as lists).
"""
import fcntl
import json
import math
import os
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import yaml

from .plan import ARCHIVE, Run
from .records import ENDED, Record, alone, loading_share, lock, lock_path, read_summary, write_text

__all__ = ['Result', 'archive_runs', 'changed_option', 'read_archive', 'read_results']

# Options that decide where and how fast a model is trained. They change the result by rounding, and `workers` by other
# random augmentation, no more than another seed would.
FREE = ('workers', 'device', 'log_interval', 'checkpoint_hist', 'recovery_interval', 'pin_mem')


class Result(NamedTuple):
    """What is known of a run.

    Attributes:
        status: One of `ENDED`, or 'running', 'interrupted' or 'waiting'.
        record: How it went.
        config: The options of train.py it was started with; None if it was not started.
        epochs: The rows of summary.csv, by epoch from 0. A cell that is not a finite number is None.
        loading: See `loading_share`.
    """
    status: str
    record: Record
    config: Optional[Dict[str, Any]]
    epochs: Dict[int, Dict[str, Optional[float]]]
    loading: Optional[float]


def read_results(runs: Sequence[Run], output: Path) -> List[Result]:
    """Read what is known of runs. A folder is newer than a line of the archive.

    Raises:
        ValueError: If the options of a run, or the archive, cannot be read.
    """
    archived = read_archive(output / ARCHIVE)
    waiting = Result('waiting', Record(), None, {}, None)
    return [
        _read_folder(run, output) if run.folder(output).is_dir() else archived.get((run.label, run.seed), waiting)
        for run in runs]


def _read_folder(run: Run, output: Path) -> Result:
    folder = run.folder(output)
    path = folder / 'config.yaml'
    try:
        config = yaml.safe_load(path.read_text()) if path.exists() else None
        readable = isinstance(config, (dict, type(None)))  # a reboot may leave an empty file
    except (yaml.YAMLError, UnicodeDecodeError):
        readable = False
    if not readable:
        raise ValueError(f'{path} cannot be read; remove {folder}, and {run.name} begins again')
    record = Record.read(folder)
    epochs = {
        epoch: {column: _number(cell) for column, cell in row.items()} for epoch, row in read_summary(folder).items()}
    return Result(_status(run, output, record, epochs), record, config, epochs, loading_share(folder))


def _number(cell: str) -> Optional[float]:
    try:
        number = float(cell)
    except ValueError:
        return None
    return (int(cell) if cell.isdecimal() else number) if math.isfinite(number) else None


def _status(run: Run, output: Path, record: Record, epochs: Dict[int, Any]) -> str:
    lost = record.status == 'finished' and run.epochs - 1 not in epochs  # e.g. by a reboot
    if record.status in ENDED and not lost:
        return record.status
    path = lock_path(output, run)
    if path.exists():
        descriptor = lock(path, fcntl.LOCK_SH)
        if descriptor is None:
            return 'running'
        os.close(descriptor)
    return 'interrupted' if record.starts else 'waiting'


def read_archive(path: Path) -> Dict[Tuple[str, int], Result]:
    """Read an archive by label and seed. A missing file is an empty archive.

    Raises:
        ValueError: If a line cannot be read, or a run has two lines.
    """
    found = {}
    lines = path.read_text(errors='replace').splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            run = json.loads(line)
            columns = run['epochs']
            rows = [dict(zip(columns, cells)) for cells in zip(*columns.values(), strict=True)]
            record = Record(run['label'], run['status'], run['error'], run['starts'])
            key = run['label'], run['seed']
            result = Result(run['status'], record, run['args'], {row['epoch']: row for row in rows}, run['loading'])
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ValueError(f'{path}, line {number}, is not a run ({type(e).__name__}: {e}); restore the file') from e
        if key in found:
            raise ValueError(f'{path} has {key[0]}, seed {key[1]} in line {number} and before; remove one of the lines')
        found[key] = result
    return found


def archive_runs(runs: Sequence[Run], output: Path, path: Path) -> int:
    """Add the runs that have ended to an archive, ordered by label and seed. Other runs in it stay.

    Args:
        runs: Those that have not ended are skipped.
        output: Where they are.
        path: The archive. Another process that writes to it is waited for.

    Returns:
        How many runs were added or replaced.

    Raises:
        ValueError: If the archive has one of the runs with other options, or finished with other results; if it has
            runs on other images; or if a file cannot be read.
    """
    with alone(path):
        archived = read_archive(path)
        ended = {
            (run.label, run.seed): result for run, result in zip(runs, read_results(runs, output))
            if result.status in ENDED}
        for (label, seed), result in ended.items():
            old = archived.get((label, seed))
            key = changed_option(old.config, result.config) if old is not None else None
            if key is not None:
                raise ValueError(
                    f'{path} has {label}, seed {seed} with {key} {old.config.get(key)!r}, and in {output} it is '
                    f'{result.config.get(key)!r}; name another folder, or remove the line')
            if old is not None and old.status == 'finished' and old.epochs != result.epochs:
                raise ValueError(
                    f'{path} has another training of {label}, seed {seed}, with other losses or accuracy than in '
                    f'{output}; name another folder, or remove the line')
        _refuse_mixed_images([*archived.items(), *ended.items()], path)
        archived.update(ended)
        ordered = sorted(archived.items(), key=lambda run: run[0])
        write_text(path, ''.join(_line(label, seed, result) for (label, seed), result in ordered))
    return len(ended)


def _refuse_mixed_images(results: Iterable[Tuple[Tuple[str, int], Result]], path: Path) -> None:
    """Raise ValueError if a run was trained on other images than those before it."""
    images = {}
    for (label, seed), result in results:
        for start in result.record.starts:
            for split, found in start.get('images', {}).items():
                if images.setdefault(split, found) != found:
                    raise ValueError(
                        f'{label}, seed {seed} has other images of {split!r} than runs in {path}: {found}, not '
                        f'{images[split]}; name another folder')


def _line(label: str, seed: int, result: Result) -> str:
    rows = list(result.epochs.values())
    return json.dumps({
        'label': label, 'seed': seed, 'status': result.status, 'error': result.record.error,
        'starts': result.record.starts, 'loading': result.loading, 'args': result.config,
        'epochs': {column: [row[column] for row in rows] for column in (rows[0] if rows else ())},
    }) + '\n'


def changed_option(old: Optional[Dict[str, Any]], new: Optional[Dict[str, Any]]) -> Optional[str]:
    """Find an option with different values that changes what is trained; None if there is none, or a run is unknown."""
    old, new = (json.loads(json.dumps(config, default=str)) for config in (old, new))  # one of them may be archived
    for key in (*old, *new) if old and new else ():
        if key not in FREE and old.get(key) != new.get(key):
            return key
    return None
