"""Runs trainings, several at a time, each where it stopped when it was interrupted.

A run belongs to whoever holds the lock of its folder, a place on the machine to whoever holds its. Both locks are
handed on to train.py: as long as it lives, nobody else begins the same run or takes its place, even if the process that
started it is gone.
"""
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import yaml

import timm_sape

from ..machine import commit, hardware
from .plan import Run
from .records import Record, last_checkpoint, lock, lock_path, not_finite, read_summary, write_summary, write_text

__all__ = ['Slot', 'Training', 'make_slots', 'refuse_begun_otherwise', 'run_all', 'train_command', 'work']

POLL = 0.5  # seconds between looks at what runs
GRACE = 10  # seconds that a process has to end when asked to
GPU_POLL = 10  # seconds between looks at how busy a GPU is
SMI = 5  # seconds that nvidia-smi has to answer
# Options that change where and how fast a model is trained. What comes out they change by rounding, and `workers` by
# other draws of augmentation, no more than another seed would.
FREE = ('workers', 'device', 'log_interval', 'checkpoint_hist', 'recovery_interval', 'pin_mem')


class Slot(NamedTuple):
    """A place on the machine for one training at a time.

    Attributes:
        name: Also of its lock.
        hardware: In words.
        env: Environment variables of what runs there.
    """
    name: str
    hardware: str
    env: Dict[str, str]


def make_slots(device: str, jobs: Optional[int] = None, threads: Optional[int] = None) -> List[Slot]:
    """The places that this machine has.

    Args:
        device: What train.py is told, 'cpu', 'cuda' or another. On 'cuda' every visible GPU is used.
        jobs: Trainings at a time, on each GPU if there are several; default: 1, on a CPU cores / threads.
        threads: Of each training; default: 1 on a CPU, else what torch takes.

    Raises:
        ValueError: If there is no such device.
    """
    host = socket.gethostname()
    try:
        kind = torch.device(str(device)).type
    except RuntimeError as e:
        raise ValueError(f'the plan has device {device!r}, which torch does not know; write cpu or cuda') from e
    if kind == 'cuda' and not torch.cuda.is_available():
        raise ValueError(
            'the plan trains on cuda, and torch sees no GPU here; `args: {device: cpu}` in it trains on the CPU')
    if kind == 'cpu' or threads is not None:
        threads = threads or 1
        torch.set_num_threads(threads)  # for the words about the hardware; nothing is computed in this process
    env = {} if threads is None else {'OMP_NUM_THREADS': str(threads)}
    if kind != 'cuda':
        cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
        count = jobs or (max(1, cores // threads) if kind == 'cpu' else 1)
        return [Slot(f'{host}-{kind}-{i}', hardware(torch.device(device)), env) for i in range(count)]
    visible = os.environ.get('CUDA_VISIBLE_DEVICES')
    names = visible.split(',') if visible else [str(i) for i in range(torch.cuda.device_count())]
    env['CUDA_DEVICE_ORDER'] = os.environ.get('CUDA_DEVICE_ORDER', 'PCI_BUS_ID')  # that of nvidia-smi
    return [
        Slot(f'{host}-cuda{name}-{job}', hardware(torch.device('cuda', i)), {**env, 'CUDA_VISIBLE_DEVICES': name})
        for job in range(jobs or 1) for i, name in enumerate(names)]


def gpu_utilisation(gpu: str) -> Optional[int]:
    """In how much of the last moment any kernel ran on a GPU, in percent, as nvidia-smi says; None if it says nothing.

    Args:
        gpu: Its number or UUID, as in `CUDA_VISIBLE_DEVICES`.
    """
    command = ['nvidia-smi', '-i', gpu, '--query-gpu=utilization.gpu', '--format=csv,noheader,nounits']
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=SMI).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return int(told) if told.isdecimal() else None


def train_command(script: Path, config: Path, data_dir: Path, output: Path, experiment: str) -> List[str]:
    return [
        sys.executable, str(script), '--config', str(config), '--data-dir', str(data_dir), '--output', str(output),
        '--experiment', experiment]


class Training:
    """A process of train.py.

    Args:
        command: What is run.
        log: Where its output goes, behind what is there.
        slot: Its place.
        locks: Descriptors that it shall hold.
    """

    def __init__(self, command: Sequence[str], log: Path, slot: Slot, locks: Sequence[int]) -> None:
        self.log, self.locks = log, locks
        self.gpu = slot.env.get('CUDA_VISIBLE_DEVICES')
        self.log_start = log.stat().st_size if log.exists() else 0
        self.began = time.monotonic()
        root = Path(timm_sape.__file__).resolve().parents[1]
        # This package in a checkout, for train.py; where packages are installed it is found without.
        path = [] if root.name in ('site-packages', 'dist-packages') else [str(root)]
        path += filter(None, [os.environ.get('PYTHONPATH')])
        with open(log, 'ab') as f:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=f, stderr=subprocess.STDOUT, pass_fds=locks,
                env={**os.environ, 'PYTHONPATH': os.pathsep.join(path), **slot.env},
                start_new_session=True)  # Ctrl-C is for us, who end it in order

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def output(self) -> str:
        with open(self.log, 'rb') as f:
            f.seek(self.log_start)
            return f.read().decode(errors='replace')

    def end(self) -> None:
        """End it and the processes that it has started, unless it has ended."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                try:
                    self.process.wait(GRACE)
                except subprocess.TimeoutExpired:
                    pass

    def release(self) -> None:
        """Close its locks."""
        for descriptor in self.locks:
            os.close(descriptor)

    def error(self) -> str:
        """Why it has ended, in one line."""
        code = self.process.returncode
        if code < 0:
            killed = signal.Signals(-code).name
            return f'killed by {killed}' + (', for want of memory perhaps' if -code == signal.SIGKILL else '')
        lines = [line.strip() for line in self.output().splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r'[\w.]*(Error|Exception|Interrupt)\b|.*: error: ', line)]
        error = (errors or lines or [f'exit code {code}'])[-1][:500]
        if re.match(r"(ImportError|ModuleNotFoundError): .*'timm['.]", error):
            timm = version('timm')
            return f'train.py and timm {timm} do not fit; take train.py of tag v{timm}: {error}'
        return error


class _Begun(Training):
    """A run that is under way, and its record."""

    def __init__(self, run: Run, record: Record, folder: Path, tell: Callable[[str], None], *args: Any) -> None:
        self.run, self.record, self.folder, self.tell = run, record, folder, tell
        self.gpu_seen: List[int] = []
        super().__init__(*args)
        self.gpu_looked = self.began

    def ended(self) -> bool:
        self._look_at_gpu()
        code = self.process.poll()
        rows = read_summary(self.folder)
        diverged = not_finite(rows)
        if code is None and not diverged:
            return False
        self._close(*(('diverged', diverged) if diverged else self._outcome(rows)))
        return True

    def _look_at_gpu(self) -> None:
        if self.gpu is None or time.monotonic() - self.gpu_looked < GPU_POLL:
            return
        self.gpu_looked = time.monotonic()
        if (seen := gpu_utilisation(self.gpu)) is not None:
            self.gpu_seen.append(seen)

    def _outcome(self, rows: Dict[int, Dict[str, str]]) -> Tuple[str, str]:
        """What it has come to, now that it has ended, and why it is not finished."""
        try:
            done = last_checkpoint(self.folder)[1]
        except RuntimeError as e:
            return 'crashed', str(e)
        if _is_finished(self.run, rows, done):
            return 'finished', ''
        return 'crashed', self.error() if self.process.returncode else f'ended after {done} of {self.run.epochs} epochs'

    def stop(self) -> None:
        self._close(None, '')

    def _close(self, status: Optional[str], error: str) -> None:
        self.end()
        record = self.record
        record.status, record.error = status, error
        record.starts[-1]['seconds'] = round(self.seconds, 1)
        if self.gpu_seen:
            record.starts[-1]['gpu_utilisation'] = round(sum(self.gpu_seen) / len(self.gpu_seen), 1)
        if rows := read_summary(self.folder):
            write_summary(self.folder, rows)
        record.save()
        self.release()
        self.tell(f'{self.run.name}: {status or "interrupted"}' + (f', {error}' if error else ''))


def _is_finished(run: Run, rows: Dict[int, Dict[str, str]], done: int) -> bool:
    return done >= run.epochs and run.epochs - 1 in rows


def refuse_begun_otherwise(runs: Sequence[Run], output: Path) -> None:
    """Refuse runs that were begun with options that would give another result.

    Raises:
        ValueError: If there is one.
    """
    for run in runs:
        path = run.folder(output) / 'config.yaml'
        try:
            old = (yaml.safe_load(path.read_text()) if path.exists() else None) or run.config
        except (yaml.YAMLError, UnicodeDecodeError):
            old = None
        if not isinstance(old, dict):
            raise ValueError(f'{path} cannot be read; remove {path.parent}, and {run.name} begins again')
        for key in (*run.config, *old):
            if key not in FREE and run.config.get(key) != old.get(key):
                raise ValueError(
                    f'{run.name} in {output} was begun with {key} {old.get(key)!r}, now it is {run.config.get(key)!r}; '
                    f'name another --output, or remove {path.parent}')


def images_in(splits: Iterable[str], data_dir: Path) -> Dict[str, str]:
    """What folders of images hold, in words that differ if the images do.

    Names and sizes of files tell, the latter of a thousand of them, since a disk may be slow.
    """
    found = {}
    for split in splits:
        folder = data_dir / split
        paths = sorted(Path(root, name) for root, _, names in os.walk(folder, followlinks=True) for name in names)
        digest = hashlib.sha1('\n'.join(path.relative_to(folder).as_posix() for path in paths).encode())
        for path in paths[::max(1, len(paths) // 1000)]:
            digest.update(f'{path.stat().st_size} '.encode())
        found[split] = f'{len(paths)} files, {digest.hexdigest()[:12]}'
    return found


def refuse_other_images(images: Dict[str, str], output: Path) -> None:
    """Refuse images that other runs of an experiment were not trained on.

    Raises:
        ValueError: If there is such a run.
    """
    for path in sorted(output.glob('*/seed*/run.json')):
        for start in Record(path.parent).starts:
            for split, old in start.get('images', {}).items():
                if images.get(split, old) != old:
                    raise ValueError(
                        f'{path.parent} was trained on other images: {split!r} had {old}, and has {images[split]} in '
                        '--data-dir now; name the folder that it was, or another --output')


def work(
        waiting: Sequence[Any],
        slots: Sequence[Slot],
        locks: Path,
        start: Callable[[Any, Slot, int], Any],
        tell: Callable[[str], None],
        changed: Callable[[], None] = lambda: None,
) -> None:
    """Start what waits, in its order, whenever there is a free place, until all has ended.

    Args:
        waiting: Things to start.
        slots: Places.
        locks: Folder of their locks.
        start: Called with a thing, a free place and a descriptor of its lock, which it closes if it starts something.
            Returns what it has started, with methods `ended` and `stop`; False if nothing is to be done; None if
            somebody else is at it.
        tell: Called with what happens, in words.
        changed: Called when something has ended.
    """
    waiting, running = list(waiting), {}
    told = False
    try:
        while waiting or running:
            for slot, job in list(running.items()):
                if job.ended():
                    del running[slot]
                    changed()
            for slot in slots:
                if not waiting:
                    break
                if slot.name in running:
                    continue
                held = lock(locks / slot.name)
                if held is None:
                    continue
                job = None
                try:
                    for thing in list(waiting):
                        job = start(thing, slot, held)
                        if job is not None:
                            waiting.remove(thing)
                        if job:
                            running[slot.name] = job
                            break
                finally:
                    if not job:
                        os.close(held)
            if waiting and not running and not told:
                told = True
                tell('waiting for another start of this experiment, or for trainings that it left behind')
            if waiting or running:
                time.sleep(POLL)
    finally:
        with ExitStack() as stack:  # which stops all, even if one raises
            for job in running.values():
                stack.callback(job.stop)


def run_all(
        runs: Sequence[Run],
        output: Path,
        *,
        script: Path,
        data_dir: Path,
        slots: Sequence[Slot],
        tell: Callable[[str], None] = lambda line: None,
        changed: Callable[[], None] = lambda: None,
) -> None:
    """Train whatever of these runs is not finished and has not diverged.

    Each has a folder, `<output>/<label>/seed<seed>`, with train.py's args.yaml, summary.csv and checkpoints, its
    output `train.log`, its options `config.yaml`, and `run.json`, which says how it went. One that was interrupted or
    has crashed goes on from its last checkpoint. One whose loss is not finite is ended. Several processes may do this
    in one folder at once; then they share the work.

    Args:
        runs: In order of urgency.
        output: Made if missing.
        script: timm's train.py.
        data_dir: Its `--data-dir`.
        slots: As `make_slots` returns them.
        tell: Called with what happens, in words.
        changed: Called when a run has ended.

    Raises:
        ValueError: If a run was begun with other options or on other images, before any is started.
    """
    refuse_begun_otherwise(runs, output)
    splits = {split for run in runs for split in run.splits.values()}
    images = images_in([split for split in splits if (data_dir / split).is_dir()], data_dir)
    refuse_other_images(images, output)

    def start(run: Run, slot: Slot, held: int):
        mine = lock(lock_path(output, run))
        if mine is None:
            return None
        job = None
        try:
            job = _start(run, output, script, data_dir, images, slot, (mine, held), tell)
        finally:
            if not job:
                os.close(mine)
        return job

    work(runs, slots, output / '.locks', start, tell, changed)


def _start(
        run: Run,
        output: Path,
        script: Path,
        data_dir: Path,
        images: Dict[str, str],
        slot: Slot,
        locks: Sequence[int],
        tell: Callable[[str], None],
) -> Union[_Begun, bool]:
    """Start a run whose lock is ours; False if it has ended."""
    folder = run.folder(output)
    folder.mkdir(parents=True, exist_ok=True)
    record, rows = Record(folder), read_summary(folder)
    if record.status == 'finished' and run.epochs - 1 in rows:
        return False
    if record.starts and 'seconds' not in record.starts[-1]:  # nobody was there when it ended
        log = folder / 'train.log'
        began = datetime.fromisoformat(record.starts[-1]['began']).timestamp()
        record.starts[-1]['seconds'] = round(max(0.0, log.stat().st_mtime - began), 1) if log.exists() else 0
    try:
        checkpoint, done = last_checkpoint(folder)
    except RuntimeError as e:
        ended = 'crashed', f'{e}; remove {folder} to begin again'
    else:
        diverged = not_finite(rows)
        finished = ('finished', '') if _is_finished(run, rows, done) else None
        lost = ('crashed', f'summary.csv has lost rows; remove {folder} to begin again') if done >= run.epochs else None
        ended = ('diverged', diverged) if diverged else finished or lost
    if ended is not None:
        record.status, record.error = ended
        record.save()
        tell(f'{run.name}: {ended[0]}' + (f', {ended[1]}' if ended[1] else ''))
        return False

    kept = {epoch: row for epoch, row in rows.items() if epoch < done}
    if kept:
        write_summary(folder, kept)
    else:
        (folder / 'summary.csv').unlink(missing_ok=True)
    write_text(folder / 'config.yaml', yaml.safe_dump(run.config, sort_keys=False))
    record.status, record.error = None, ''
    now = datetime.now(timezone.utc).isoformat(timespec='seconds')
    record.starts.append({  # each time anew: train.py runs what the checkout is by now
        'began': now, 'epoch': done, 'hardware': slot.hardware, 'commit': commit(), 'torch': torch.__version__,
        'timm': version('timm'), 'timm_sape': timm_sape.__version__, 'python': sys.version.split()[0],
        'images': {split: images[split] for split in run.splits.values() if split in images}})
    record.save()
    command = train_command(script, folder / 'config.yaml', data_dir, folder.parent, folder.name)
    command += ['--resume', str(checkpoint)] if checkpoint else []
    tell(f'{run.name}: started' + (f' from epoch {done} of {run.epochs}' if done else '') + f' on {slot.name}')
    return _Begun(run, record, folder, tell, command, folder / 'train.log', slot, locks)
