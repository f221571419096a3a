"""How long an experiment will take: some steps of each model by train.py itself, and what has been measured already."""
import heapq
import re
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import yaml
from timm.data import create_dataset

from .plan import SPLITS, Run
from .records import Record, read_summary
from .runner import Slot, Training, train_command, work

__all__ = ['estimate']

STEPS = 12  # of each model; the first ones, in which memory is taken and kernels are chosen, do not count
FIRST = 3
AHEAD = 2  # batches that each worker loads before they are asked for; they would hide that loading is slow
PATIENCE = 600  # seconds
STEP = re.compile(r'Train: 0 \[ *(\d+)/(\d+) .*?Time: ([\d.]+)s')


class _Trial(Training):
    """The first steps of a run."""

    def __init__(self, folder: Path, workers: int, *args: Any) -> None:
        super().__init__(*args)
        self.folder, self.startup = folder, None
        self.first = FIRST + AHEAD * workers
        self.enough = STEPS + (self.first if workers else 0)

    def ended(self) -> bool:
        over = self.process.poll() is not None
        self.steps = [(int(count), float(seconds)) for _, count, seconds in STEP.findall(self.output())]
        if self.steps and self.startup is None:
            self.startup = self.seconds
        enough = min(self.enough, self.steps[0][0] if self.steps else 1)  # an epoch may have less
        if not over and len(self.steps) < enough and self.seconds < PATIENCE:
            return False
        self.stop()
        self.failed = '' if self.steps else self.error() if over else f'no step in {PATIENCE} seconds'
        return True

    def stop(self) -> None:
        self.end()
        self.release()
        shutil.rmtree(self.folder, ignore_errors=True)


def estimate(
        runs: Sequence[Run],
        output: Path,
        *,
        script: Path,
        data_dir: Path,
        slots: Sequence[Slot],
        tell: Callable[[str], None] = lambda line: None,
) -> Dict[str, Any]:
    """What is to be done, and how long it will take.

    For a model that has a finished run, the time of that counts. Of the others train.py makes some steps, as many at a
    time as in the experiment, and their mean counts, times the steps of all epochs; evaluating an image is taken to
    be a third of training it. Nothing is written to `output`.

    Returns:
        `rows`, one for each model: `model`; `runs`; `finished`; `epochs_done`, of runs that are not; `steps` of an
        epoch and `step_s`, seconds of one; `run_s`, seconds of a whole run; `to_go_s`, of all its runs; `error`, why
        train.py would not start. And `seconds` of everything, None if a model has an error.
    """
    models: Dict[str, List[Run]] = {}
    for run in runs:
        models.setdefault(run.label, []).append(run)
    records = {run.name: Record(run.folder(output)) for run in runs}
    rows, trials = {}, {}
    for label, own in models.items():
        finished = [records[run.name] for run in own if records[run.name].status == 'finished']
        rows[label] = {
            'model': label, 'runs': len(own), 'finished': len(finished), 'epochs_done': 0, 'steps': None,
            'step_s': None, 'run_s': statistics.mean(r.seconds for r in finished) if finished else None,
            'to_go_s': None, 'error': ''}
    unknown = [own[0] for label, own in models.items() if rows[label]['run_s'] is None]

    with tempfile.TemporaryDirectory(prefix='timm-sape-') as scratch:
        def start(run: Run, slot: Slot, held: int) -> _Trial:
            folder = Path(scratch, run.label)
            folder.mkdir()
            (folder / 'config.yaml').write_text(yaml.safe_dump({**run.config, 'log_interval': 1}))
            command = train_command(script, folder / 'config.yaml', data_dir, folder, 'trial')
            tell(f'{run.label}: measuring')
            log = Path(scratch, f'{run.label}.log')
            trials[run.label] = _Trial(folder, run.config.get('workers', 4), command, log, slot, [held])
            return trials[run.label]

        work(unknown, slots, Path(scratch, '.locks'), start, tell)

    images = 0
    for run in unknown:
        trial, row, config = trials[run.label], rows[run.label], run.config
        if trial.failed:
            row['error'] = trial.failed
            continue
        row['steps'] = trial.steps[0][0]
        counted = trial.steps[trial.first:trial.enough] or trial.steps
        row['step_s'] = statistics.mean(seconds for _, seconds in counted)  # workers may bring several batches at once
        evaluations = run.epochs / config.get('val_interval', 1)
        val_split = config.get('val_split', SPLITS['val_split'])
        if val_split and not images:  # train.py has just opened it, so it is there
            images = len(create_dataset(
                config.get('dataset', ''), root=str(data_dir), split=val_split, class_map=config.get('class_map', '')))
        evaluation = images / config.get('batch_size', 128) * row['step_s'] / 3
        row['run_s'] = trial.startup + run.epochs * row['steps'] * row['step_s'] + evaluations * evaluation

    total, places = None, [0.0] * len(slots)
    for run in runs:
        row, record = rows[run.label], records[run.name]
        if record.status in ('finished', 'diverged'):
            continue
        done = max(read_summary(run.folder(output)), default=-1) + 1
        row['epochs_done'] += done
        if row['run_s'] is not None:
            to_go = row['run_s'] * (1 - min(1, done / run.epochs))
            row['to_go_s'] = (row['to_go_s'] or 0) + to_go
            heapq.heapreplace(places, places[0] + to_go)
    if not any(row['error'] for row in rows.values()):
        total = max(places)
    return {'rows': list(rows.values()), 'seconds': total}
