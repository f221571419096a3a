"""Read and write the folder of a run: run.json, the rows of summary.csv, checkpoints, and locks."""
import csv
import fcntl
import hashlib
import json
import math
import os
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from timm.utils import load_checkpoint_metadata

from ...loading import image_size_of, load_model
from .plan import Run

__all__ = [
    'ENDED', 'Record', 'Trained', 'alone', 'hash_of', 'last_checkpoint', 'loading_share', 'lock', 'lock_path',
    'not_finite', 'read_summary', 'shape_of', 'trained_models', 'write_summary', 'write_text',
]

ENDED = ('finished', 'crashed', 'diverged')


@dataclass
class Record:
    """How a run went. It is stored as `run.json` in the folder of the run.

    Attributes:
        label: Label of the model. Empty if the file is missing or damaged.
        status: One of `ENDED`, or None.
        error: Why the run did not finish.
        starts: One entry per start: when, where, with which versions and images, how many seconds it took, and for how
            much of that time a kernel ran on its GPU, in percent.
    """
    label: str = ''
    status: Optional[str] = None
    error: str = ''
    starts: List[Dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> 'Record':
        """Read a record. A missing or damaged file, e.g. after a reboot, gives an empty one."""
        try:
            stored = json.loads((folder / 'run.json').read_text())
        except (FileNotFoundError, ValueError):
            stored = None
        stored = stored if isinstance(stored, dict) else {}
        starts = [start for start in stored.get('starts') or () if 'began' in start]
        return cls(stored.get('label') or '', stored.get('status'), stored.get('error') or '', starts)

    def save(self, folder: Path) -> None:
        write_text(folder / 'run.json', json.dumps(vars(self), indent=1) + '\n')

    @property
    def seconds(self) -> float:
        return sum(start.get('seconds') or 0 for start in self.starts)

    @property
    def gpu_utilisation(self) -> Optional[float]:
        """For how much of the time a kernel ran on the GPU, in percent; None if unknown."""
        known = [start for start in self.starts if 'gpu_utilisation' in start and start.get('seconds')]
        if not known:
            return None
        used = sum(start['gpu_utilisation'] * start['seconds'] for start in known)
        return round(used / sum(start['seconds'] for start in known), 1)

    def seen(self, key: str) -> str:
        """The different values that the starts have for a key, usually one."""
        return '; '.join(dict.fromkeys(str(start[key]) for start in self.starts if key in start))


def write_text(path: Path, text: str) -> None:
    """Write a file beside its place, then move it there, so that it is never half-written."""
    beside = path.with_name(f'.{path.name}.{os.getpid()}')
    try:
        beside.write_text(text, encoding='utf-8')
        os.replace(beside, path)
    except BaseException:  # such as a full disk
        beside.unlink(missing_ok=True)
        raise


def read_summary(folder: Path) -> Dict[int, Dict[str, str]]:
    """Read the rows of summary.csv by epoch, counted from 0.

    When train.py resumes, it repeats the header, perhaps with other columns, and perhaps an epoch; the last row of an
    epoch counts. Each row has all columns; those that its header lacks are empty. Rows that were cut off, e.g. by a
    reboot, are skipped, and so are rows without a header.
    """
    path = folder / 'summary.csv'
    if not path.exists():
        return {}
    rows, header, columns = {}, [], {}
    with open(path, newline='', errors='replace') as f:
        for cells in csv.reader(line for line in f if '\0' not in line):
            if cells[:1] == ['epoch']:
                header = cells
            elif cells and len(cells) == len(header) and cells[0].isdecimal():
                row = dict(zip(header, cells))
                if _has_numbers(row):
                    rows[int(cells[0])] = row
                    columns.update(dict.fromkeys(header, ''))
    return {epoch: {**columns, **row} for epoch, row in sorted(rows.items())}


def _has_numbers(row: Dict[str, str]) -> bool:
    try:
        for key in ('train_loss', 'eval_loss', 'eval_top1', 'eval_top5'):
            float(row.get(key) or 0)
    except ValueError:
        return False
    return True


def loading_share(folder: Path) -> Optional[float]:
    """Read from train.log how much of a step train.py waits for images, in percent.

    Returns:
        The mean over the last complete epoch; None if the log does not contain it.
    """
    path = folder / 'train.log'
    text = path.read_text(errors='replace') if path.exists() else ''
    found = re.findall(r'^Train: .* \(100%\)\].* \((\d+\.\d+)s, .* Data: \S+ \((\d+\.\d+)\)', text, re.MULTILINE)
    return round(100 * float(found[-1][1]) / max(float(found[-1][0]), 1e-3), 1) if found else None


def write_summary(folder: Path, rows: Dict[int, Dict[str, str]]) -> None:
    header = list(next(iter(rows.values())))
    lines = [','.join(cells) for cells in (header, *(row.values() for row in rows.values()))]
    write_text(folder / 'summary.csv', '\n'.join(lines) + '\n')


def not_finite(rows: Dict[int, Dict[str, str]]) -> Optional[str]:
    """Describe the first loss that is not finite; None if all are."""
    for epoch, row in rows.items():
        for key in ('train_loss', 'eval_loss'):
            if not math.isfinite(float(row.get(key) or 0)):
                return f'{key} is {row[key]} in epoch {epoch} (the first is 0)'
    return None


def last_checkpoint(folder: Path) -> Tuple[Optional[Path], int]:
    """Find the newest readable checkpoint and the number of epochs it was trained for.

    train.py removes `last.pth.tar` before it renames `tmp.pth.tar` to it, so `tmp.pth.tar` may be the only one.

    Raises:
        RuntimeError: If there are checkpoints, but none can be read. Starting again would lose them.
    """
    found: Tuple[Optional[Path], int] = (None, 0)
    errors = {}
    for path in sorted(folder.glob('*.pth.tar')):
        if path.name.startswith('recovery'):  # from the middle of an epoch; train.py would skip the rest of it
            continue
        try:
            epochs = load_checkpoint_metadata(str(path))['epoch'] + 1
        except Exception as e:  # torch.load raises many kinds for a damaged file
            errors[path.name] = e
            continue
        if epochs > found[1]:
            found = path, epochs
    errors.pop('tmp.pth.tar', None)  # train.py was still writing it
    if found[0] is None and errors:
        name, error = next(iter(errors.items()))
        reason = f'{type(error).__name__}: {error}'.splitlines()[0]
        raise RuntimeError(f'no checkpoint can be read, such as {name} ({reason})')
    return found


def lock_path(output: Path, run: Run) -> Path:
    folder = run.folder(output)
    return output / '.locks' / f'{folder.parent.name}-{folder.name}'


def lock(path: Path, how: int = fcntl.LOCK_EX) -> Optional[int]:
    """Lock a file and return its descriptor; None if another process holds the lock.

    The lock is held until every process that inherited the descriptor has closed it. So train.py keeps its lock even if
    the process that started it is killed, and a reboot releases all locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process works on a file, and lock it in `.locks` beside it."""
    while (held := lock(path.parent / '.locks' / path.name)) is None:
        time.sleep(0.1)
    try:
        yield
    finally:
        os.close(held)


class Trained(NamedTuple):
    """A finished run of an experiment."""
    label: str
    seed: int
    checkpoint: Path


def trained_models(output: Path, labels: Optional[Sequence[str]] = None) -> List[Trained]:
    """Find the models that an experiment has finished training, ordered by label and seed.

    Args:
        output: Folder of the experiment.
        labels: Which models, in this order; None for all.

    Raises:
        ValueError: If there are none, or none with a given label.
    """
    found = []
    for path in output.glob('*/seed*/last.pth.tar'):
        seed = path.parent.name.removeprefix('seed')
        record = Record.read(path.parent)
        if seed.isdecimal() and record.status == 'finished':  # not a copy such as seed1_old
            found.append(Trained(record.label, int(seed), path))
    there = sorted({run.label for run in found})
    if not found:
        raise ValueError(f'{output} has no finished runs, LABEL/seedN/last.pth.tar; name a folder of an experiment')
    order = there if labels is None else list(labels)
    for label in order:
        if label not in there:
            raise ValueError(f'{output} has no finished run of {label!r}; it has {", ".join(there)}')
    return sorted((run for run in found if run.label in order), key=lambda run: (order.index(run.label), run.seed))


def shape_of(trained: Sequence[Trained]) -> Tuple[int, int, int]:
    """Height and width of the images of trained models, in pixels, and the number of their classes.

    Raises:
        ValueError: If the models differ in that.
    """
    shapes: Dict[Tuple[int, int, int], Trained] = {}
    for run in trained:
        model = load_model(str(run.checkpoint))
        shapes.setdefault((*image_size_of(model), model.num_classes), run)
    if len(shapes) > 1:
        found = ', '.join(f'{run.label} {h}x{w}, {classes} classes' for (h, w, classes), run in shapes.items())
        raise ValueError(f'the models must have one image size and number of classes: {found}; choose among them')
    return next(iter(shapes))


def hash_of(checkpoint: Path) -> str:
    """A hash of the weights, which are the same if a training was repeated."""
    digest = hashlib.sha256()
    for name, tensor in load_model(str(checkpoint)).state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()[:12]
