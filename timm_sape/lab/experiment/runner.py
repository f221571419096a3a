"""Run trainings, several at a time, and resume those that were interrupted.

Each run has a lock, and so has each slot, a place for one training on the machine. train.py inherits both locks. While
it lives, no other process starts the same run or uses the same slot, even if the process that started it is gone.
"""
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import yaml
from timm.data import is_img_extension

import timm_sape

from ...loading import split_folder
from ..machine import commit, hardware
from .plan import ARCHIVE, Run
from .records import Record, last_checkpoint, lock, lock_path, not_finite, read_summary, write_summary, write_text
from .results import changed_option, read_archive, read_results

__all__ = [
    'Slot', 'Training', 'images_in', 'make_slots', 'refuse_begun_otherwise', 'refuse_other_images', 'run_all',
    'train_command', 'work',
]

POLL = 0.5  # seconds between checks of what is running
GRACE = 10  # seconds that a process gets to end after SIGTERM
GPU_POLL = 10  # seconds between measurements of GPU utilisation
SMI = 5  # seconds that nvidia-smi gets to answer


class Slot(NamedTuple):
    """A place on the machine for one training at a time.

    Attributes:
        name: Name, also of its lock.
        hardware: Description of the hardware.
        env: Environment variables for the training.
    """
    name: str
    hardware: str
    env: Dict[str, str]


def make_slots(device: str, jobs: Optional[int] = None, threads: Optional[int] = None) -> List[Slot]:
    """Make the slots of this machine.

    Args:
        device: The device that train.py gets, such as 'cpu' or 'cuda'. With 'cuda', all visible GPUs are used.
        jobs: Trainings at a time, per GPU if there are several. Default: 1; on a CPU, cores / threads.
        threads: CPU threads per training. Default: 1 on a CPU, else torch's own.

    Raises:
        ValueError: If the device does not exist.
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
        torch.set_num_threads(threads)  # `hardware` reports it; this process computes nothing
    env = {} if threads is None else {'OMP_NUM_THREADS': str(threads)}
    if kind != 'cuda':
        cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
        count = jobs or (max(1, cores // threads) if kind == 'cpu' else 1)
        return [Slot(f'{host}-{kind}-{i}', hardware(torch.device(device)), env) for i in range(count)]
    visible = os.environ.get('CUDA_VISIBLE_DEVICES')
    names = visible.split(',') if visible else [str(i) for i in range(torch.cuda.device_count())]
    env['CUDA_DEVICE_ORDER'] = os.environ.get('CUDA_DEVICE_ORDER', 'PCI_BUS_ID')  # the order of nvidia-smi
    return [
        Slot(f'{host}-cuda{name}-{job}', hardware(torch.device('cuda', i)), {**env, 'CUDA_VISIBLE_DEVICES': name})
        for job in range(jobs or 1) for i, name in enumerate(names)]


def gpu_utilisation(gpu: str) -> Optional[int]:
    """Ask nvidia-smi for how much of the last moment a kernel ran on a GPU, in percent; None without an answer.

    Args:
        gpu: Number or UUID, as in `CUDA_VISIBLE_DEVICES`.
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
        command: Command line.
        log: File that its output is appended to.
        slot: Where it runs.
        locks: Lock descriptors that it inherits.
    """

    def __init__(self, command: Sequence[str], log: Path, slot: Slot, locks: Sequence[int]) -> None:
        self.log, self.locks = log, locks
        self.gpu = slot.env.get('CUDA_VISIBLE_DEVICES')
        self.log_start = log.stat().st_size if log.exists() else 0
        self.began = time.monotonic()
        root = Path(timm_sape.__file__).resolve().parents[1]
        # train.py must find this package, which may be a checkout. An installed one is found anyway.
        path = [] if root.name in ('site-packages', 'dist-packages') else [str(root)]
        path += filter(None, [os.environ.get('PYTHONPATH')])
        with open(log, 'ab') as f:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=f, stderr=subprocess.STDOUT, pass_fds=locks,
                env={**os.environ, 'PYTHONPATH': os.pathsep.join(path), **slot.env},
                start_new_session=True)  # so that only we get Ctrl-C, and end it properly

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def output(self) -> str:
        with open(self.log, 'rb') as f:
            f.seek(self.log_start)
            return f.read().decode(errors='replace')

    def end(self) -> None:
        """End the process and its children, if still running."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                try:
                    self.process.wait(GRACE)
                except subprocess.TimeoutExpired:
                    pass

    def release(self) -> None:
        """Close the lock descriptors."""
        for descriptor in self.locks:
            os.close(descriptor)

    def error(self) -> str:
        """Why the process ended, in one line."""
        code = self.process.returncode
        if code < 0:
            killed = signal.Signals(-code).name
            return f'killed by {killed}' + (', perhaps because memory ran out' if -code == signal.SIGKILL else '')
        lines = [line.strip() for line in self.output().splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r'[\w.]*(Error|Exception|Interrupt)\b|.*: error: ', line)]
        error = (errors or lines or [f'exit code {code}'])[-1][:500]
        if re.match(r"(ImportError|ModuleNotFoundError): .*'timm['.]", error):
            timm = version('timm')
            return f'train.py does not fit timm {timm}; use train.py of tag v{timm}: {error}'
        return error


class _Begun(Training):
    """A run in progress, with its record."""

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
        """Status and error, once the process has ended."""
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
        record.save(self.folder)
        self.release()
        self.tell(f'{self.run.name}: {status or "interrupted"}' + (f', {error}' if error else ''))


def _is_finished(run: Run, rows: Dict[int, Dict[str, str]], done: int) -> bool:
    return done >= run.epochs and run.epochs - 1 in rows


def refuse_begun_otherwise(runs: Sequence[Run], output: Path) -> None:
    """Raise ValueError if a run was started with options that would give another result, or not by us."""
    for run, result in zip(runs, read_results(runs, output)):
        folder = run.folder(output)
        begun = [*folder.glob('summary.csv'), *folder.glob('*.pth.tar')]
        if begun and not (folder / 'config.yaml').exists():
            raise ValueError(
                f'{begun[0]} is not of this experiment: {folder} has no config.yaml. Name another --output, or move '
                'the folder elsewhere')
        key = changed_option(result.config, run.config)
        if key is not None:
            raise ValueError(
                f'{run.name} in {output} was started with {key} {result.config.get(key)!r}, now it is '
                f'{run.config.get(key)!r}; name another --output, or remove '
                f'{folder if folder.is_dir() else f"its line from {output / ARCHIVE}"}')


def images_in(splits: Iterable[str], data_dir: Path) -> Dict[str, str]:
    """Describe folders of images by a text that differs if the images do.

    It is made from the names of all files, and from the sizes of a thousand of them, because a disk may be slow. Hidden
    files such as .DS_Store are left out, but not images, as train.py reads these.
    """
    found = {}
    for split in splits:
        folder = split_folder(data_dir, split)
        if folder is None:
            continue
        paths = sorted(
            Path(root, name).relative_to(folder)
            for root, _, names in os.walk(folder, followlinks=True) for name in names)
        paths = [
            path for path in paths
            if is_img_extension(path.suffix.lower()) or not any(part.startswith('.') for part in path.parts)]
        digest = hashlib.sha1('\n'.join(path.as_posix() for path in paths).encode())
        for path in paths[::max(1, len(paths) // 1000)]:
            digest.update(f'{(folder / path).stat().st_size} '.encode())
        found[split] = f'{len(paths)} files, {digest.hexdigest()[:12]}'
    return found


def check_splits(splits: Iterable[str], data_dir: Path) -> None:
    """Raise ValueError if there is no folder for a split: train.py would take all images below the data's folder."""
    for split in splits:
        if split_folder(data_dir, split) is None:
            raise ValueError(
                f'{data_dir} has no folder {split!r}; `timm-sape data cifar10-subset --held-out N` writes all')


def refuse_other_images(images: Dict[str, str], output: Path) -> None:
    """Raise ValueError if another run of the experiment was trained on different images."""
    trained = {str(path.parent): Record.read(path.parent) for path in sorted(output.glob('*/seed*/run.json'))}
    for (label, seed), result in read_archive(output / ARCHIVE).items():
        trained[f'{label}, seed {seed} in {output / ARCHIVE}'] = result.record
    for run, record in trained.items():
        for start in record.starts:
            for split, old in start.get('images', {}).items():
                if images.get(split, old) != old:
                    raise ValueError(
                        f'{run} was trained on other images: {split!r} had {old}, and has {images[split]} in '
                        '--data-dir now; name the folder used then, or another folder for the runs')


def work(
        waiting: Sequence[Any],
        slots: Sequence[Slot],
        locks: Path,
        start: Callable[[Any, Slot, int], Any],
        tell: Callable[[str], None],
        changed: Callable[[], None] = lambda: None,
) -> None:
    """Start the waiting jobs in order, each as soon as a slot is free, until all have ended.

    Args:
        waiting: Jobs to start.
        slots: Where they run.
        locks: Folder for the locks of the slots.
        start: Called with a job, a free slot and the descriptor of its lock. Returns a running job with methods `ended`
            and `stop`, which closes the descriptor; False if there is nothing to do; None if another process runs it.
        tell: Called with messages.
        changed: Called when a job has ended.
    """
    waiting, running = list(waiting), {}
    told = False
    try:
        while waiting or running:
            with _undisturbed() as came:
                for slot, job in list(running.items()):
                    if job.ended():
                        del running[slot]
                        changed()
                for slot in slots:
                    if waiting and not came and slot.name not in running:
                        job = _start_first(waiting, slot, locks, start)
                        if job:
                            running[slot.name] = job
                if waiting and not (running or told or came):
                    told = True
                    tell('waiting for another start of this experiment, or for trainings that it left running')
            if waiting or running:
                time.sleep(POLL)
    finally:
        with ExitStack() as stack:  # stops all, even if one raises
            for job in running.values():
                stack.callback(job.stop)


def _start_first(waiting: List[Any], slot: Slot, locks: Path, start: Callable[[Any, Slot, int], Any]) -> Any:
    """Start the first of the waiting jobs that can be started, if the slot is free. Arguments as for `work`.

    Returns:
        The running job, if any. What was started or has nothing to do no longer waits.
    """
    held = lock(locks / slot.name)
    if held is None:
        return None
    job = None
    try:
        for thing in list(waiting):
            job = start(thing, slot, held)
            if job is not None:
                waiting.remove(thing)
            if job:
                return job
    finally:
        if not job:
            os.close(held)
    return None


@contextmanager
def _undisturbed() -> Iterator[List[int]]:
    """Within the block Ctrl-C and SIGTERM have to wait. Gives the list of those that came.

    Else one of them could come after a training has begun and before anything knows that it is to be stopped.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone has handlers of signals
        yield []
        return
    came: List[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    with ExitStack() as stack:  # restores both handlers, even if one raises in between
        stack.callback(lambda: [signal.raise_signal(number) for number in came])
        for number, handler in handlers.items():
            stack.callback(signal.signal, number, handler)
            signal.signal(number, lambda number, _: came.append(number))
        yield came


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
    """Train all runs that are not finished and have not diverged.

    The folder of a run, `Run.folder`, contains args.yaml, summary.csv and checkpoints of train.py, its output
    `train.log`, its options `config.yaml`, and its `Record`. A run that was interrupted or has crashed resumes from its
    last checkpoint. A run is ended if its loss is not finite. Several processes may work on one folder at a time; they
    share the runs.

    Args:
        runs: In the order in which to start them.
        output: Created if missing.
        script: timm's train.py.
        data_dir: Its `--data-dir`.
        slots: From `make_slots`.
        tell: Called with messages.
        changed: Called when a run has ended.

    Raises:
        ValueError: If a run was started with other options or images. Nothing is started then.
    """
    refuse_begun_otherwise(runs, output)
    splits = {split for run in runs for split in run.splits.values()}
    images = images_in(splits, data_dir)
    refuse_other_images(images, output)
    waiting = [
        run for run, result in zip(runs, read_results(runs, output)) if result.status not in ('finished', 'diverged')]

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

    work(waiting, slots, output / '.locks', start, tell, changed)


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
    """Start a run whose lock we hold. Returns False if it has ended."""
    folder = run.folder(output)
    folder.mkdir(parents=True, exist_ok=True)
    record, rows = Record.read(folder), read_summary(folder)
    record.label = run.label
    if record.status == 'finished' and run.epochs - 1 in rows:
        return False
    if record.starts and 'seconds' not in record.starts[-1]:  # the process that started it was killed
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
        record.save(folder)
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
    record.starts.append({  # commit() is called again, because train.py runs the current state of the checkout
        'began': now, 'epoch': done, 'hardware': slot.hardware, 'commit': commit(), 'torch': torch.__version__,
        'timm': version('timm'), 'timm_sape': timm_sape.__version__, 'python': sys.version.split()[0],
        'images': {split: images[split] for split in run.splits.values() if split in images}})
    record.save(folder)
    command = train_command(script, folder / 'config.yaml', data_dir, folder.parent, folder.name)
    command += ['--resume', str(checkpoint)] if checkpoint else []
    tell(f'{run.name}: started' + (f' from epoch {done} of {run.epochs}' if done else '') + f' on {slot.name}')
    return _Begun(run, record, folder, tell, command, folder / 'train.log', slot, locks)
