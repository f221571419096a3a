"""What a run's folder says: the rows of its summary.csv, its checkpoints, and how it went."""
import csv
import fcntl
import json
import math
import os
import re
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from timm.utils import load_checkpoint_metadata

from .plan import Run

__all__ = [
    'Record', 'Trained', 'last_checkpoint', 'loading_share', 'lock', 'lock_path', 'not_finite', 'read_summary',
    'status', 'trained_models', 'write_summary', 'write_text',
]

ENDED = ('finished', 'crashed', 'diverged')


class Record:
    """How a run went, kept as `run.json` in its folder.

    Attributes:
        status: One of `ENDED`, or None.
        error: Why it is not finished.
        starts: When, where, with what and on which images it was started, how many seconds it took, and in how much of
            the time any kernel ran on its GPU, in percent, if it had one; one for each time.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / 'run.json'
        try:
            stored = json.loads(self.path.read_text())
        except (FileNotFoundError, ValueError):  # a reboot may leave it empty; what counts can be told without it
            stored = None
        stored = stored if isinstance(stored, dict) else {}
        self.status: Optional[str] = stored.get('status')
        self.error: str = stored.get('error') or ''
        self.starts: List[Dict[str, Any]] = [start for start in stored.get('starts') or () if 'began' in start]

    def save(self) -> None:
        stored = {'status': self.status, 'error': self.error, 'starts': self.starts}
        write_text(self.path, json.dumps(stored, indent=1) + '\n')

    @property
    def seconds(self) -> float:
        return sum(start.get('seconds') or 0 for start in self.starts)

    @property
    def gpu_utilisation(self) -> Optional[float]:
        """In how much of the time any kernel ran on its GPU, in percent; None if it is not known."""
        known = [start for start in self.starts if 'gpu_utilisation' in start and start.get('seconds')]
        if not known:
            return None
        used = sum(start['gpu_utilisation'] * start['seconds'] for start in known)
        return round(used / sum(start['seconds'] for start in known), 1)

    def seen(self, key: str) -> str:
        """What the starts say of something, usually all the same."""
        return '; '.join(dict.fromkeys(str(start[key]) for start in self.starts if key in start))


def write_text(path: Path, text: str) -> None:
    """Beside its place, then into it."""
    beside = path.with_name(f'.{path.name}.{os.getpid()}')
    beside.write_text(text)
    os.replace(beside, path)


def read_summary(folder: Path) -> Dict[int, Dict[str, str]]:
    """Rows of summary.csv by epoch, from 0.

    When train.py resumes, it repeats the header, and an epoch whose checkpoint was not written; the last row counts.
    Those do not count that were not written to their end, whose header is gone, or that a reboot has left half.
    """
    path = folder / 'summary.csv'
    if not path.exists():
        return {}
    rows = {}
    with open(path, newline='', errors='replace') as f:
        for row in csv.DictReader(line for line in f if '\0' not in line):
            if (row.get('epoch') or '').isdecimal() and None not in row.values() and _has_numbers(row):
                rows[int(row['epoch'])] = row
    return dict(sorted(rows.items()))


def _has_numbers(row: Dict[str, str]) -> bool:
    try:
        for key in ('train_loss', 'eval_loss', 'eval_top1', 'eval_top5'):
            float(row.get(key) or 0)
    except ValueError:
        return False
    return True


def loading_share(folder: Path) -> Optional[float]:
    """How much of the time of a step train.py waits for images, in percent, mean of the last epoch in its log; None if
    the log does not say."""
    path = folder / 'train.log'
    text = path.read_text(errors='replace') if path.exists() else ''
    found = re.findall(r'^Train: .* \(100%\)\].* \((\d+\.\d+)s, .* Data: \S+ \((\d+\.\d+)\)', text, re.MULTILINE)
    return round(100 * float(found[-1][1]) / max(float(found[-1][0]), 1e-3), 1) if found else None


def write_summary(folder: Path, rows: Dict[int, Dict[str, str]]) -> None:
    header = list(next(iter(rows.values())))
    lines = [','.join(cells) for cells in (header, *(row.values() for row in rows.values()))]
    write_text(folder / 'summary.csv', '\n'.join(lines) + '\n')


def not_finite(rows: Dict[int, Dict[str, str]]) -> Optional[str]:
    """Says so if a loss is not a number."""
    for epoch, row in rows.items():
        for key in ('train_loss', 'eval_loss'):
            if not math.isfinite(float(row.get(key, 0))):
                return f'{key} is {row[key]} in epoch {epoch} (the first is 0)'
    return None


def last_checkpoint(folder: Path) -> Tuple[Optional[Path], int]:
    """The newest checkpoint that can be read, and how many epochs it has behind it.

    train.py removes `last.pth.tar` before it renames `tmp.pth.tar` to it, so that may be all there is.

    Raises:
        RuntimeError: If there are checkpoints, and none can be read. To begin again would lose them.
    """
    found: Tuple[Optional[Path], int] = (None, 0)
    errors = {}
    for path in sorted(folder.glob('*.pth.tar')):
        if path.name.startswith('recovery'):  # from the middle of an epoch, the rest of which train.py leaves out
            continue
        try:
            epochs = load_checkpoint_metadata(str(path))['epoch'] + 1
        except Exception as e:  # whatever half a file makes torch.load say
            errors[path.name] = e
            continue
        if epochs > found[1]:
            found = path, epochs
    errors.pop('tmp.pth.tar', None)  # not written to its end
    if found[0] is None and errors:
        name, error = next(iter(errors.items()))
        raise RuntimeError(f'no checkpoint can be read, such as {name} ({str(error).splitlines()[0]})')
    return found


def lock_path(output: Path, run: Run) -> Path:
    return output / '.locks' / f'{run.label}-seed{run.seed}'


def lock(path: Path, how: int = fcntl.LOCK_EX) -> Optional[int]:
    """A descriptor of the file that holds it, None if another holds it.

    It is held until all have closed the descriptor who got it, training processes too. So a training whose starter was
    killed keeps what it works on, and nothing is held after a reboot.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def status(run: Run, output: Path, record: Record) -> str:
    """One of `ENDED`, or 'running', 'interrupted', 'waiting'."""
    lost = record.status == 'finished' and run.epochs - 1 not in read_summary(run.folder(output))  # by a reboot
    if record.status in ENDED and not lost:
        return record.status
    path = lock_path(output, run)
    if path.exists():
        descriptor = lock(path, fcntl.LOCK_SH)
        if descriptor is None:
            return 'running'
        os.close(descriptor)
    return 'interrupted' if record.starts else 'waiting'


class Trained(NamedTuple):
    """A finished run of an experiment."""
    label: str
    seed: int
    checkpoint: Path


def trained_models(output: Path, labels: Optional[Sequence[str]] = None) -> List[Trained]:
    """The models that an experiment has trained to the end, by label and seed.

    Args:
        output: Its folder.
        labels: Which, in this order; None for all.

    Raises:
        ValueError: If there is none, or none of a label.
    """
    found = []
    for path in output.glob('*/seed*/last.pth.tar'):
        if Record(path.parent).status == 'finished':
            found.append(Trained(path.parent.parent.name, int(path.parent.name[4:]), path))
    there = sorted({run.label for run in found})
    if not found:
        raise ValueError(f'{output} has no finished runs, LABEL/seedN/last.pth.tar; name a folder of an experiment')
    order = there if labels is None else list(labels)
    for label in order:
        if label not in there:
            raise ValueError(f'{output} has no finished run of {label!r}; it has {", ".join(there)}')
    return sorted((run for run in found if run.label in order), key=lambda run: (order.index(run.label), run.seed))
