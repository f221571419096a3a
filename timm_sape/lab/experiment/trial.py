"""Estimate how long an experiment will take, from finished runs and from some steps of train.py."""
import heapq
import re
import shutil
import statistics
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import yaml
from timm.data import create_dataset

from .plan import SPLITS, Run
from .results import read_results
from .runner import Slot, Training, train_command, work

__all__ = ['estimate']

STEPS = 12  # per model
FIRST = 3  # steps that are not counted, because memory is allocated and kernels are chosen in them
AHEAD = 2  # batches that each worker loads in advance; they would hide slow loading, so they are not counted either
PATIENCE = 600  # seconds to wait for the first step
STEP = re.compile(r'Train: 0 \[ *(\d+)/(\d+) .*?Time: ([\d.]+)s')


class _Trial(Training):
    """The first steps of a run, to measure them."""

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
        enough = min(self.enough, self.steps[0][0] if self.steps else 1)  # an epoch may be shorter
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
    """Estimate what is left to do and how long it will take.

    If a model has a finished run, that run tells its time. Otherwise train.py trains the model for some steps, as many
    models at a time as in the experiment, and the mean time of a step is multiplied by the number of steps. Evaluating
    an image is assumed to take a third of the time of training it. Nothing is written to `output`.

    Args:
        runs: The runs of the experiment.
        output: As for `run_all`.
        script: As for `run_all`.
        data_dir: As for `run_all`.
        slots: As for `run_all`.
        tell: As for `run_all`.

    Returns:
        `rows`, one per model, with these columns. `model`. `runs`. `finished`. `epochs_done`: in unfinished runs.
        `steps`: per epoch. `step_s`, `run_s`: seconds per step and per run. `to_go_s`: seconds left for all its runs.
        `error`: why train.py does not start. And `seconds` left in total; None if a model has an error.
    """
    models: Dict[str, List[Run]] = {}
    for run in runs:
        models.setdefault(run.label, []).append(run)
    results = {run.name: result for run, result in zip(runs, read_results(runs, output))}
    rows, trials = {}, {}
    for label, own in models.items():
        finished = [results[run.name].record for run in own if results[run.name].status == 'finished']
        rows[label] = {
            'model': label, 'runs': len(own), 'finished': len(finished), 'epochs_done': 0, 'steps': None,
            'step_s': None, 'run_s': statistics.mean(r.seconds for r in finished) if finished else None,
            'to_go_s': None, 'error': ''}
    unknown = [own[0] for label, own in models.items() if rows[label]['run_s'] is None]

    with tempfile.TemporaryDirectory(prefix='timm-sape-') as scratch:
        def start(run: Run, slot: Slot, held: int) -> _Trial:
            folder = run.folder(Path(scratch)).parent
            folder.mkdir()
            (folder / 'config.yaml').write_text(yaml.safe_dump({**run.config, 'log_interval': 1}))
            command = train_command(script, folder / 'config.yaml', data_dir, folder, 'trial')
            tell(f'{run.label}: measuring')
            log = folder.with_name(f'{folder.name}.log')
            trials[run.label] = _Trial(folder, run.config.get('workers', 4), command, log, slot, [held])
            return trials[run.label]

        work(unknown, slots, Path(scratch, '.locks'), start, tell)

    @cache
    def num_images(dataset: str, split: str, class_map: str) -> int:  # they exist: train.py has just opened them
        return len(create_dataset(dataset, root=str(data_dir), split=split, class_map=class_map))

    for run in unknown:
        trial, row, config = trials[run.label], rows[run.label], run.config
        if trial.failed:
            row['error'] = trial.failed
            continue
        row['steps'] = trial.steps[0][0]
        counted = trial.steps[trial.first:trial.enough] or trial.steps
        # not the median, because workers may bring several batches at once
        row['step_s'] = statistics.mean(seconds for _, seconds in counted)
        evaluations = run.epochs / config.get('val_interval', 1)
        val_split = config.get('val_split', SPLITS['val_split'])
        images = num_images(config.get('dataset', ''), val_split, config.get('class_map', '')) if val_split else 0
        evaluation = images / config.get('batch_size', 128) * row['step_s'] / 3
        row['run_s'] = trial.startup + run.epochs * row['steps'] * row['step_s'] + evaluations * evaluation

    places = [0.0] * len(slots)
    for run in runs:
        row, result = rows[run.label], results[run.name]
        if result.status in ('finished', 'diverged'):
            continue
        done = max(result.epochs, default=-1) + 1
        row['epochs_done'] += done
        if row['run_s'] is not None:
            to_go = row['run_s'] * (1 - min(1, done / run.epochs))
            row['to_go_s'] = (row['to_go_s'] or 0) + to_go
            heapq.heapreplace(places, places[0] + to_go)
    failed = any(row['error'] for row in rows.values())
    return {'rows': list(rows.values()), 'seconds': None if failed else max(places)}
