"""Experiments, with a stand-in for train.py that writes what timm's writes and takes a fraction of a second."""
import contextlib
import csv
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import timm
import torch
import yaml
from PIL import Image

from example_tools import load_script
from timm_sape.analysis.figures import new_figure
from timm_sape.loading import split_folder
from timm_sape.cli import main
from timm_sape.lab import experiment, intervals, machine
from timm_sape.lab.experiment import records, report, results, runner, trial
from timm_sape.lab.experiment.plan import Plan, Run, load_plan, script_options

CHECKOUT = Path(__file__).parents[1]
EPOCHS = 4

# Behaves like timm's train.py, seen from outside: options come from a YAML file, logs go to stderr, the header of the
# summary is written again after a resume, checkpoints are first written to another file, and Ctrl-C counts as the
# normal end. `model_kwargs` tell it how to behave.
STAND_IN = r"""
import argparse, os, pickle, shutil, sys, time, zipfile
import yaml

config_parser = argparse.ArgumentParser(add_help=False)
config_parser.add_argument('-c', '--config')
parser = argparse.ArgumentParser()
parser.add_argument('--data-dir')
parser.add_argument('--dataset', default='')
parser.add_argument('--dataset-download', action='store_true')
parser.add_argument('--train-split', default='train')
parser.add_argument('--val-split', default='validation')
parser.add_argument('--val-interval', type=int, default=1)
parser.add_argument('--output')
parser.add_argument('--experiment')
parser.add_argument('--resume', default='')
parser.add_argument('--seed', type=int, default=42)
parser.add_argument('--model')
parser.add_argument('--model-kwargs', default={})
parser.add_argument('--gp')
parser.add_argument('--sched', default='cosine')
parser.add_argument('--device-modules', nargs='+')
parser.add_argument('--device', default='cuda')
parser.add_argument('--epochs', type=int, default=300)
parser.add_argument('--warmup-epochs', type=int, default=5)
parser.add_argument('--warmup-lr', type=float, default=1e-5)
parser.add_argument('--warmup-prefix', action='store_true')
parser.add_argument('-b', '--batch-size', type=int, default=128)
parser.add_argument('--lr', type=float)
parser.add_argument('--scale', type=float, nargs='+', default=[0.08, 1.0])
parser.add_argument('--log-interval', type=int, default=50)
parser.add_argument('-j', '--workers', type=int, default=4)
known, rest = config_parser.parse_known_args()
parser.set_defaults(**yaml.safe_load(open(known.config)))
args = parser.parse_args(rest)

be = args.model_kwargs
folder = os.path.join(args.output, args.experiment)
os.makedirs(folder, exist_ok=True)
if be.get('other_timm'):
    raise ImportError("cannot import name 'x' from 'timm.utils' (/packages/timm/utils/__init__.py)")
print(f'Model {args.model} created', file=sys.stderr)
if be.get('reject'):
    raise TypeError("__init__() got an unexpected keyword argument 'reject'")
first = 0
if args.resume:
    with zipfile.ZipFile(args.resume) as z:
        name = [n for n in z.namelist() if n.endswith('data.pkl')][0]
        first = pickle.loads(z.read(name))['epoch'] + 1
with open(os.path.join(folder, 'args.yaml'), 'w') as f:
    yaml.safe_dump(args.__dict__, f)


def note(what):
    with open(os.environ['STAND_IN_NOTES'], 'a') as f:
        f.write(f'{folder} {what} {time.time()} {os.getpid()} {os.environ.get("OMP_NUM_THREADS")} '
                f'{os.environ.get("CUDA_VISIBLE_DEVICES")}\n')


header = True
try:
    for epoch in range(first, args.epochs + (args.warmup_epochs if args.warmup_prefix else 0)):
        note(f'epoch-{epoch}')
        for wait in range(3000 if epoch == 2 else 0):
            if not os.path.exists(be.get('until_gone', '')):
                break
            time.sleep(0.01)
        if be.get('crash') == epoch and not args.resume:
            print('Traceback (most recent call last):\n  File "train.py", line 1', file=sys.stderr)
            print('torch.OutOfMemoryError: no memory left\n  and a hint', file=sys.stderr)
            sys.exit(1)
        if be.get('quit') == epoch and not args.resume:
            raise KeyboardInterrupt
        for step in range(4):
            time.sleep(be.get('sleep', 0.002))
            print(f'Train: {epoch} [{step:>4d}/4 ({25 * (step + 1):>3d}%)]  Loss: 2.3 (2.3)  Time: 0.500s,  9/s  '
                  f'(0.6s, 9/s)', file=sys.stderr, flush=True)
        loss = float('nan') if be.get('nan', 99) <= epoch else 2 - epoch / 10
        top1 = be.get('top1', {}).get(args.seed, 50) + epoch - args.epochs + 1
        top1 -= 10 * (be.get('best_rate', args.lr) != args.lr)
        with open(os.path.join(folder, 'summary.csv'), 'a') as f:
            f.write('epoch,train_loss,eval_loss,eval_top1,eval_top5,lr\n' if header else '')
            f.write(f'{epoch},{loss},{loss},{top1},{top1 + 40},0.001\n')
        header = False
        if be.get('die') == epoch and not args.resume:
            os.kill(os.getpid(), 9)  # between the summary and the checkpoint
        tmp, last = os.path.join(folder, 'tmp.pth.tar'), os.path.join(folder, 'last.pth.tar')
        shutil.copyfile(os.path.join(os.environ['STAND_IN_CHECKPOINTS'], str(epoch)), tmp)
        if os.path.exists(last):
            os.unlink(last)
        os.replace(tmp, last)
except KeyboardInterrupt:
    pass
note('end')
"""


def cells(line):
    return [cell.strip() for cell in line.split('|')[1:-1]]


def begin(arguments):
    def command():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored from the start in what a shell runs with &
        sys.exit(main(arguments))

    process = multiprocessing.get_context('fork').Process(target=command)
    process.start()
    return process



class Lab:
    """A folder with a stand-in, data, a recipe and a plan."""

    def __init__(self, folder):
        self.folder = folder
        self.output = folder / 'out'
        self.script = folder / 'train.py'
        self.script.write_text(STAND_IN)
        self.notes_file = folder / 'notes'
        self.notes_file.touch()
        for split, count in (('train', 2), ('test', 16)):
            (folder / 'data' / split / 'a').mkdir(parents=True)
            for i in range(count):
                Image.new('RGB', (2, 2)).save(folder / 'data' / split / 'a' / f'{i}.png')
        (folder / 'small').mkdir()
        self.recipe(epochs=EPOCHS, device='cpu', val_split='test', batch_size=8)
        self.plan({'A': 'test_vit_ape', 'B': 'test_vit_nope'})

    def recipe(self, **options):
        (self.folder / 'small' / 'recipe.yaml').write_text(yaml.safe_dump(options))

    def plan(self, models, **keys):
        written = {'recipe': 'small/recipe.yaml', 'models': models, 'seeds': [1, 2], **keys}
        (self.folder / 'plan.yaml').write_text(yaml.safe_dump(written, sort_keys=False))

    def arguments(self, *options):
        return [
            'experiment', *map(str, (
                self.folder / 'plan.yaml', '--output', self.output, '--data-dir', self.folder / 'data', '--script',
                self.script, '--jobs', 2, *options))]

    def __call__(self, *options):
        return main(self.arguments(*options))

    def begin(self, *options):
        """Run the command in a process of its own, which can be killed."""
        return begin(self.arguments(*options))

    def wait_for(self, text, seconds=120):
        deadline = time.time() + seconds
        while text not in self.notes_file.read_text():
            assert time.time() < deadline, self.notes_file.read_text()
            time.sleep(0.01)

    def notes(self):
        """(run, what, time, process, threads, GPU), in order."""
        lines = [line.rsplit(' ', 5) for line in self.notes_file.read_text().splitlines()]
        return [
            (folder.removeprefix(f'{self.output}/'), what, float(at), int(process), *rest)
            for folder, what, at, process, *rest in lines]

    def epochs(self):
        """How often each epoch of each run was started."""
        return Counter((note[0], note[1]) for note in self.notes() if note[1] != 'end')

    def rows(self):
        with open(self.output / 'plan.csv', newline='') as f:
            return {(row['model'], int(row['seed'])): row for row in csv.DictReader(f)}

    def line(self, label):
        """Cells of a line of the table."""
        lines = (self.output / 'plan.md').read_text().splitlines()
        return cells(next(line for line in lines if line.startswith(f'| {label} ')))

    def summary(self, run):
        return (self.output / run / 'summary.csv').read_text()

    def kill_trainings(self):
        for process in {note[3] for note in self.notes()}:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass


@pytest.fixture(scope='session')
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp('checkpoints')
    for epoch in range(EPOCHS + 2):
        torch.save({'epoch': epoch, 'version': 2, 'state_dict': {}}, folder / str(epoch))
    return folder


@pytest.fixture
def lab(tmp_path, checkpoints, monkeypatch):
    monkeypatch.setattr(runner, 'POLL', 0.02)
    monkeypatch.setenv('STAND_IN_NOTES', str(tmp_path / 'notes'))
    monkeypatch.setenv('STAND_IN_CHECKPOINTS', str(checkpoints))
    handler = signal.getsignal(signal.SIGTERM)
    lab = Lab(tmp_path)
    yield lab
    signal.signal(signal.SIGTERM, handler)
    lab.kill_trainings()


def assert_whole(lab, runs=('A/seed1', 'A/seed2', 'B/seed1', 'B/seed2')):
    """Each epoch is in the summary once, whatever happened."""
    for run in runs:
        lines = lab.summary(run).splitlines()
        assert [line.split(',')[0] for line in lines] == ['epoch', *map(str, range(EPOCHS))]
    assert {row['status'] for row in lab.rows().values()} == {'finished'}


# -- results


def test_experiment(lab, capsys):
    lab.plan(
        {
            'A': {'model': 'test_vit_ape', 'model_kwargs': {'top1': {1: 50, 2: 52, 3: 57}}},
            'B': {'model': 'test_vit_nope', 'model_kwargs': {'top1': {1: 51, 2: 55, 3: 59}}},
            'C': 'test_vit_rope2d',
        }, seeds=[1, 2, 3], baseline='B')
    assert lab('--threads', 3) == 0
    out, err = capsys.readouterr()

    # by hand: B has mean 55, deviations -4 0 4; A 53, -3 -1 4; C 50, 0 0 0. A - B is -1 -3 -2: mean -2, deviation 1.
    # C - B is -1 -5 -9: mean -5, deviation 4. t is 4.3027, and of two samples 2.7764
    def around(mean, half):
        return f'[{mean - half:.2f}, {mean + half:+.2f}]'

    half, unpaired = 4.302653 / math.sqrt(3), 2.776445 * math.sqrt(2 / 3)
    assert lab.line('B')[:6] == ['B', '55.00 ± 4.00', '', '', '95.00 ± 4.00', '3']
    assert lab.line('A')[:6] == [
        'A', '53.00 ± 3.61', f'-2.00 {around(-2, half)}', around(-2, unpaired * math.sqrt((32 + 26) / 4)),
        '93.00 ± 3.61', '3']
    assert lab.line('C')[:6] == [
        'C', '50.00 ± 0.00', f'-5.00 {around(-5, 4 * half)}', around(-5, unpaired * math.sqrt(32 / 4)),
        '90.00 ± 0.00', '3']
    table = (lab.output / 'plan.md').read_text()
    assert table.splitlines()[2].startswith('| B ') and 'difference from B' in table and table in out + '\n'
    assert 'not corrected for 2 comparisons' in table and '3 threads' in table

    row = lab.rows()['A', 3]
    expected = dict(
        recipe='small', status='finished', top1='57.0', top5='97.0', best_top1='57.0', train_loss='1.7', epochs='4',
        epochs_planned='4', starts='1', error='', entrypoint='test_vit_ape', torch=torch.__version__,
        timm=timm.__version__)
    assert {key: row[key] for key in expected} == expected
    assert '3 threads' in row['hardware'] and row['python'] and float(row['minutes']) < 1
    if (CHECKOUT / '.git').exists():
        assert re.fullmatch(r'[0-9a-f]{7,}(-dirty)?', row['commit'])

    kept = {path.name for path in (lab.output / 'A' / 'seed3').iterdir()}
    assert kept == {'args.yaml', 'config.yaml', 'last.pth.tar', 'run.json', 'summary.csv', 'train.log'}
    told = yaml.safe_load((lab.output / 'A' / 'seed3' / 'args.yaml').read_text())
    assert told['seed'] == 3 and told['device_modules'] == ['timm_sape'] and told['batch_size'] == 8
    assert (lab.output / 'plan.png').read_bytes().startswith(b'\x89PNG')
    assert {note[4] for note in lab.notes()} == {'3'}
    assert list(dict.fromkeys(note[0] for note in lab.notes()))[:2] in (['A/seed1', 'B/seed1'], ['B/seed1', 'A/seed1'])
    assert 'A, seed 1: finished' in err

    before = lab.notes_file.read_text()
    assert lab() == 0 and lab.notes_file.read_text() == before  # nothing is repeated


@pytest.fixture
def reference(lab, monkeypatch):
    """Calls the example of the reference table on a plan of three models. C diverges."""
    example = load_script(CHECKOUT / 'examples' / 'reference_table.py')
    measured = {
        'top1_48px_own': 40., 'top1_64px_own': 30., 'top1_shifted_4px': 45., 'same_shifted_4px': 90.,
        'position_shap': .25}
    monkeypatch.setattr(example, 'measure', lambda checkpoint, data_dir, device: dict(measured))
    lab.recipe(epochs=EPOCHS, device='cpu', val_split='test', batch_size=8, lr=.001)
    lab.plan({
        'A': {'model': 'test_vit_ape', 'model_kwargs': {'best_rate': .001, 'top1': {1: 50, 2: 52}}},
        'B': {'model': 'test_vit_rpb', 'model_kwargs': {'best_rate': .0005, 'top1': {1: 60, 2: 64}}},
        'C': {'model': 'test_vit_rope2d', 'model_kwargs': {'nan': 0}}})
    shutil.copytree(lab.folder / 'data' / 'test', lab.folder / 'data' / 'held_out')
    # the stand-in knows keywords that models do not
    create = timm.create_model
    monkeypatch.setattr(timm, 'create_model', lambda name, device, **kwargs: create(name, device=device))

    def call(command, *options, output=lab.output):
        monkeypatch.setattr(sys, 'argv', [
            'reference_table.py', '--plan', str(lab.folder / 'plan.yaml'), command, '--output', str(output),
            *map(str, options)])
        with pytest.raises(SystemExit) as exit:
            example.main()
        return exit.value.code

    call.measured = measured
    call.training = ['run', '--data-dir', lab.folder / 'data', '--script', lab.script, '--jobs', 2]
    return call


def test_reference_table(lab, reference, capsys):
    """Each model's rate is the better one on held-out images, by trainings that the table does not show."""
    assert reference('table') == 2 and "no finished trials of 'A'" in capsys.readouterr().err
    (lab.folder / 'data' / 'held_out').rename(lab.folder / 'elsewhere')
    assert reference(*reference.training) == 2 and "has no folder 'held_out'" in capsys.readouterr().err
    (lab.folder / 'elsewhere').rename(lab.folder / 'data' / 'held_out')
    assert reference(*reference.training) == 1  # C diverges at both rates
    err = capsys.readouterr().err
    assert 'A: learning rate 0.001\n' in err and 'B: learning rate 0.0005\n' in err and 'C: no trial finished' in err
    for label, rate in (('A', .001), ('B', .0005)):
        for seed in (1, 2):
            config = yaml.safe_load((lab.output / label / f'seed{seed}' / 'config.yaml').read_text())
            assert (config['lr'], config['val_split'], config['epochs']) == (rate, 'test', EPOCHS)
        for tried in ('0.001', '0.0005'):
            config = yaml.safe_load((lab.output / f'{label}-trial-at-{tried}' / 'seed20' / 'config.yaml').read_text())
            assert (config['lr'], config['val_split'], config['epochs']) == (float(tried), 'held_out', EPOCHS // 2)

    before = lab.notes_file.read_text()
    for folder in lab.output.glob('[ABC]*'):
        shutil.rmtree(folder)  # the two files of lines are enough
    assert reference(*reference.training) == 1 and lab.notes_file.read_text() == before
    capsys.readouterr()
    assert reference('table') == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith('| B ')][0].startswith('| B | 62.00 ± 2.83 | +11.00')
    # Three rows in the plan, so two differences to correct for, 97.5 % each. By hand: 10 and 12, mean 11, deviation
    # sqrt(2), t 25.4517; of two samples, deviations sqrt(2) and sqrt(8), t 6.20535. With one finished row besides the
    # baseline Dunnett's is the common interval of two samples, t 4.30265.
    half, unpaired, dunnett = (
        25.4517 * math.sqrt(2 / 2), 6.20535 * math.sqrt((2 + 8) / 2), 4.30265 * math.sqrt((2 + 8) / 2))
    costs = next(
        row for row in csv.DictReader((CHECKOUT / 'results' / 'cost_xeon.csv').read_text().splitlines())
        if (row['setting'], row['pos_enc']) == ('224/16', 'rpb'))
    assert (
        f'| B | `rpb` | 0.0005 | 62.00 ± 2.83 | 2 of 2 | A | +11.00 | [{11 - half:+.1f}, {11 + half:+.1f}] | '
        f'[{11 - unpaired:+.1f}, {11 + unpaired:+.1f}] | [{11 - dunnett:+.1f}, {11 + dunnett:+.1f}] | '
        '40.0 ± 0.0 | 30.0 ± 0.0 | 45.0 ± 0.0 | 90.0 ± 0.0 | 0.250 ± 0.000 | '
        f'{float(costs["step_ratio"]):.2f} | {float(costs["step_peak_ratio"]):.2f} |') in lines
    assert 'trial' not in (lab.output / 'plan.md').read_text()
    found = {(row['lr'], row['position_shap']) for (label, _), row in lab.rows().items() if label == 'B'}
    assert found == {('0.0005', '0.25')} and ' – ' not in (lab.output / 'plan.md').read_text()


def test_files_that_the_reference_table_needs(lab, reference, tmp_path, capsys):
    assert reference('run', '--data-dir', str(lab.folder / 'data'), '--script', str(tmp_path / 'none.py')) == 2
    assert "none.py; --script names timm's train.py; timm's wheel has none" in capsys.readouterr().err
    assert reference('table', '--costs', str(lab.folder / 'plan.yaml')) == 2
    assert 'plan.yaml is no file of `timm-sape bench`; name one by --costs' in capsys.readouterr().err


@pytest.mark.full
def test_rows_are_compared_with_the_baseline_of_their_note(lab, reference, capsys):
    """B has four heads, and so has a row of the baseline."""
    lab.plan({
        'A': {'model': 'test_vit_ape', 'model_kwargs': {'top1': {1: 50, 2: 52}}},
        'A, 4 heads': {'model': 'test_vit_ape', 'model_kwargs': {'top1': {1: 53, 2: 57}}},
        'B, 4 heads': {'model': 'test_vit_rpb', 'model_kwargs': {'top1': {1: 60, 2: 64}}},
        'B, gate 0': {'model': 'test_vit_rpb', 'model_kwargs': {'top1': {1: 40, 2: 42}}}})
    assert reference(*reference.training) == 0 and reference('table') == 0
    table = capsys.readouterr().out.split('\n\n')[3]
    found = {cells[0]: cells[5:7] for cells in (line.strip('| ').split(' | ') for line in table.splitlines()[2:])}
    assert found['B, 4 heads'] == ['A, 4 heads', '+7.00'] and found['B, gate 0'] == ['A', '-10.00']
    assert found['A, 4 heads'] == ['A', '+4.00']
    dunnett, = (line.split(' | ')[9] for line in table.splitlines() if line.startswith('| B, 4 heads'))
    assert not dunnett.strip()  # Dunnett's comparisons have one control


def test_the_best_rule_is_that_of_the_best_mean():
    example = load_script(CHECKOUT / 'examples' / 'reference_table.py')
    lines = [{'top1_48px_rescale': 50., 'top1_48px_ntk': 40.}, {'top1_48px_rescale': 60., 'top1_48px_ntk': 61.}]
    assert example._best_rule(lines, 'top1_48px_') == 'rescale 55.0 ± 7.1'
    lines[1]['top1_48px_yarn'] = 99.  # not all have it
    assert example._best_rule(lines, 'top1_48px_') == 'rescale 55.0 ± 7.1'


def test_modules_of_a_plan_are_imported(lab, reference, tmp_path, monkeypatch, capsys):
    """They register encodings of one's own. train.py imports them too, but models are measured in this process."""
    models = {'A': {'model': 'test_vit_ape', 'model_kwargs': {'top1': {1: 50, 2: 52}}}}
    lab.plan(models, args={'device_modules': ['timm_sape', 'my_own_encoding']})
    assert reference(*reference.training) == 2
    assert 'A: device_modules has my_own_encoding, which cannot be imported' in capsys.readouterr().err
    assert not lab.output.exists()
    (tmp_path / 'my_own_encoding.py').touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    assert reference(*reference.training) == 0
    assert sys.modules.pop('my_own_encoding').__file__ == str(tmp_path / 'my_own_encoding.py')
    assert reference('table') == 0 and 'my_own_encoding' in sys.modules


def train_again(lab, reference):
    """Train B once more with the same options but other losses, in the same folder; its measures differ, too."""
    shutil.rmtree(lab.output / 'B')
    path = lab.output / 'runs.jsonl'
    path.write_text(''.join(line for line in path.read_text().splitlines(True) if '"label": "B"' not in line))
    lab.script.write_text(STAND_IN.replace('2 - epoch / 10', '2 - epoch / 9'))
    reference.measured['top1_48px_own'] = 41.
    assert reference(*reference.training, '--models', 'B') == 0


@pytest.mark.full
def test_measures_are_of_the_training_beside_them(lab, reference, tmp_path, capsys):
    """What is trained again is measured again. A row needs measures of all its seeds."""
    assert reference(*reference.training) == 1
    path = lab.output / 'measures.jsonl'
    before = path.read_text().splitlines(True)
    train_again(lab, reference)
    after = path.read_text().splitlines(True)
    found = [(line['model'], line['seed'], line['top1_48px_own']) for line in map(json.loads, after)]
    assert found == [('A', 1, 40.), ('A', 2, 40.), ('B', 1, 41.), ('B', 2, 41.)]
    capsys.readouterr()
    for lines in ([*after[:2], after[3]], [*after[:2], before[2], after[3]]):
        path.write_text(''.join(lines))
        assert reference('row', 'B', '--file', tmp_path / 'B') == 2 and not (tmp_path / 'B').exists()
        assert "no measures of this training of: B, seed 1; `run --models 'B'` measures" in capsys.readouterr().err
        assert reference('table') == 0 and '| 41.0 | 30.0 |' in capsys.readouterr().out  # of seed 2 alone


@pytest.mark.full
def test_measures_of_an_earlier_version(lab, reference, capsys):
    assert reference(*reference.training) == 1
    path = lab.output / 'measures.jsonl'
    path.write_text(path.read_text().replace('"training"', '"pshap"', 1))
    assert reference('table') == 2
    assert 'measures of A, seed 1 are of an earlier version; remove the line, and `run` measures' in (
        capsys.readouterr().err)


def test_rows_are_added_with_their_own_measures(lab, reference, tmp_path, capsys):
    assert reference(*reference.training) == 1
    merged = tmp_path / 'merged'
    rows = []
    for name in ('first', 'second'):
        assert reference('row', 'B', '--file', tmp_path / name) == 0
        rows.append(json.loads((tmp_path / name).read_text()))
        if name == 'first':
            assert reference('merge', tmp_path / name, output=merged) == 0
            train_again(lab, reference)
    before = [(merged / name).read_text() for name in ('runs.jsonl', 'measures.jsonl')]
    capsys.readouterr()
    assert reference('merge', tmp_path / 'second', output=merged) == 2
    assert f'{merged}/runs.jsonl has another training of B, seed 1' in capsys.readouterr().err
    for measures in (rows[0]['measures'], rows[1]['measures'][:1]):
        (tmp_path / 'mixed').write_text(json.dumps({**rows[1], 'measures': measures}))
        assert reference('merge', tmp_path / 'mixed', output=tmp_path / 'new') == 2
        assert 'B, seed 2; write ' in capsys.readouterr().err and not (tmp_path / 'new').exists()
    for output in (merged, tmp_path / 'new'):
        assert reference('merge', tmp_path / 'first', output=output) == 0
        assert [(output / name).read_text() for name in ('runs.jsonl', 'measures.jsonl')] == before


@pytest.mark.full
def test_rows_of_others_are_added(lab, reference, tmp_path, capsys):
    assert reference(*reference.training) == 1
    for label in 'AB':
        assert reference('row', label, '--file', tmp_path / label) == 0
    assert f'{tmp_path / "B"}: B, 2 seeds, 62.00 ± 2.83 %' in capsys.readouterr().out
    assert reference('row', 'C', '--file', tmp_path / 'C') == 2 and "trials of 'C'" in capsys.readouterr().err
    merged = tmp_path / 'merged'
    merged.mkdir()
    assert reference('merge', tmp_path / 'A', tmp_path / 'B', output=merged) == 0
    assert reference('merge', tmp_path / 'B', output=merged) == 0  # again changes nothing
    assert reference('table', output=merged) == reference('table') == 0
    for name in ('plan.csv', 'plan.md'):
        assert (merged / name).read_text() == (lab.output / name).read_text()

    def refused(change, message):
        row = json.loads((tmp_path / 'B').read_text())
        change(row)
        (tmp_path / 'changed').write_text(json.dumps(row))
        before = {path.name: path.read_text() for path in merged.iterdir() if path.is_file()}
        assert reference('merge', tmp_path / 'changed', output=merged) == 2
        assert message in capsys.readouterr().err
        assert {path.name: path.read_text() for path in merged.iterdir() if path.is_file()} == before

    def other_rate(row):
        row['learning_rate'] = .001

    def other_seed(row):
        row['runs'] = [line for line in row['runs'] if line['seed'] != 2]
        del row['sha256_of_args']['B, seed 2']

    refused(lambda row: row['runs'][0]['args'].update(lr=.1), 'are not those that it was written with')
    refused(lambda row: row.pop('runs'), 'is no file of `row`')
    refused(other_rate, 'was started with lr 0.0005, now it is 0.001')
    refused(other_seed, 'not finished: B, seed 2')
    refused(
        lambda row: row['runs'][0]['starts'][0]['images'].update(train='1 files, 0'),
        "has other images of 'train' than runs in")
    refused(lambda row: row.update(model='D'), "the plan has no model 'D'")


@pytest.mark.parametrize('name', ['summary.csv', 'last.pth.tar'])
def test_a_training_of_somebody_else(name, lab, capsys):
    """It was taken for a run, and its results for those of the plan's model."""
    folder = lab.output / 'A' / 'seed1'
    folder.mkdir(parents=True)
    (folder / name).write_text('epoch,train_loss,eval_loss,eval_top1\n0,1,1,60\n')
    assert lab() == 2 and not lab.epochs()
    assert f'{folder / name} is not of this experiment: {folder} has no config.yaml. Name' in capsys.readouterr().err


@pytest.mark.full
def test_tables_again(lab, capsys):
    assert lab('--models', 'A', '--seeds', 1) == 0
    assert set(lab.epochs()) == {('A/seed1', f'epoch-{i}') for i in range(EPOCHS)}
    assert lab.line('A')[5] == '1 of 2 (1 waiting)' and lab.line('B')[1:] == ['', '', '', '', '0 of 2 (2 waiting)', '']
    first = {path.name: path.read_bytes() for path in lab.output.iterdir() if path.is_file()}
    assert set(first) == {'plan.csv', 'plan.md', 'plan.png'}
    for name in first:
        (lab.output / name).unlink()
    (lab.output / 'A' / 'seed1' / 'last.pth.tar').unlink()  # results are kept without checkpoints
    capsys.readouterr()
    assert main(['experiment', str(lab.folder / 'plan.yaml'), '--output', str(lab.output), '--tables']) == 0
    assert {path.name: path.read_bytes() for path in lab.output.iterdir() if path.is_file()} == first
    assert capsys.readouterr().out == first['plan.md'].decode()
    assert not list(lab.output.glob('.timm-sape-*'))
    before = lab.notes_file.read_text()
    assert lab('--models', 'A', '--seeds', 1) == 0 and lab.notes_file.read_text() == before


# -- folders and the archive


def test_folders_need_no_quotes(lab):
    lab.plan({'APE, rate .5 (a+b)': 'test_vit_ape', 'É 1': 'test_vit_nope'}, seeds=[1])
    assert lab() == 0
    assert {path.name for path in lab.output.iterdir() if path.is_dir()} == {'.locks', 'APE-rate-.5-a-b', 'É-1'}
    assert {path.name for path in (lab.output / '.locks').iterdir()} >= {'APE-rate-.5-a-b-seed1', 'É-1-seed1'}
    assert lab.rows()['APE, rate .5 (a+b)', 1]['status'] == 'finished'  # tables have the unchanged label
    assert [run.label for run in experiment.trained_models(lab.output)] == ['APE, rate .5 (a+b)', 'É 1']
    before = lab.notes_file.read_text()
    assert lab() == 0 and lab.notes_file.read_text() == before


def archived(lab, kept):
    return [json.loads(line) for line in (kept / 'runs.jsonl').read_text().splitlines()]


def test_archive(lab, capsys):
    lab.plan({
        'B, 2': {'model': 'test_vit_nope', 'model_kwargs': {'top1': {1: 51.123456, 2: 0}}}, 'A': 'test_vit_ape',
        'nan': {'model': 'test_vit_nope', 'model_kwargs': {'nan': 1}}})
    assert lab('--models', 'B, 2') == 0 and lab('--models', 'nan', '--seeds', 2) == 1
    kept = lab.folder / 'new' / 'kept'
    capsys.readouterr()
    assert lab('--archive', lab.folder / 'some', '--models', 'B, 2', '--seeds', 2) == 0
    assert capsys.readouterr().out == f'{lab.folder}/some/runs.jsonl: 1 of 1 runs\n'
    assert [(run['label'], run['seed']) for run in archived(lab, lab.folder / 'some')] == [('B, 2', 2)]
    assert lab('--tables', '--models', 'A') == 2
    assert '--tables writes those of the whole plan; leave --models and --seeds out' in capsys.readouterr().err
    assert lab('--archive', kept) == 0
    assert capsys.readouterr().out == f'{kept}/runs.jsonl: 3 of 6 runs\n'
    assert {path.name for path in kept.iterdir()} == {'.locks', 'runs.jsonl'}
    assert lab('--models', 'A') == 0 and lab('--archive', kept) == 0
    text = (kept / 'runs.jsonl').read_text()
    assert lab('--archive', kept) == 0 and (kept / 'runs.jsonl').read_text() == text  # nothing is stored twice
    runs = archived(lab, kept)
    assert [(run['label'], run['seed'], run['status']) for run in runs] == [
        ('A', 1, 'finished'), ('A', 2, 'finished'), ('B, 2', 1, 'finished'), ('B, 2', 2, 'finished'),
        ('nan', 2, 'diverged')]
    assert runs[2]['epochs'] == {
        'epoch': [0, 1, 2, 3], 'train_loss': [2.0, 1.9, 1.8, 1.7], 'eval_loss': [2.0, 1.9, 1.8, 1.7],
        'eval_top1': [48.123456, 49.123456, 50.123456, 51.123456],
        'eval_top5': [88.123456, 89.123456, 90.123456, 91.123456], 'lr': [0.001] * 4}
    assert runs[4]['epochs']['train_loss'][:2] == [2.0, None] and 'NaN' not in text
    folder = lab.output / 'B-2' / 'seed1'
    assert runs[0]['args'] == yaml.safe_load((lab.output / 'A' / 'seed1' / 'config.yaml').read_text())
    assert json.loads((folder / 'run.json').read_text()) == {key: runs[2][key] for key in (
        'label', 'status', 'error', 'starts')}

    # the same tables from the archive, and nothing is trained again
    assert lab('--tables') == 0
    tables = {name: (lab.output / name).read_bytes() for name in ('plan.csv', 'plan.md', 'plan.png')}
    assert main(['experiment', str(lab.folder / 'plan.yaml'), '--output', str(kept), '--tables']) == 0
    assert {name: (kept / name).read_bytes() for name in tables} == tables
    assert lab.rows()['B, 2', 2]['top1'] == '0.0'
    before = lab.notes_file.read_text()
    done = '--output', kept, '--models', 'A', 'B, 2', '--seeds', '1', '2'
    capsys.readouterr()
    assert lab(*done, '--dry-run') == 0 and capsys.readouterr().out.splitlines()[-1].startswith('0 minutes to go')
    assert lab(*done) == 0 and lab.notes_file.read_text() == before
    assert lab('--output', kept) == 1  # missing runs are repeated, but diverged ones are not
    new = lab.notes_file.read_text().removeprefix(before)
    assert f'{kept}/nan/seed1 epoch-0' in new and 'seed2' not in new and 'A/' not in new


def test_a_folder_is_newer_than_its_line(lab):
    """Where both are in one place, as if a run of an archive was trained again. Without the folder, the line counts."""
    assert lab('--models', 'A', '--seeds', 1) == 0
    run = load_plan(lab.folder / 'plan.yaml').runs[0]
    with open(run.folder(lab.output) / 'train.log', 'a') as f:
        f.write('Train: 3 [   3/4 (100%)]  Loss: 2.3 (2.3)  Time: 0.05s, 9/s (0.05s, 9/s)  LR: 0.1  Data: 0.0 (0.02)')
    assert lab('--archive', lab.output) == 0
    path = lab.output / 'runs.jsonl'
    path.write_text(path.read_text().replace('"finished"', '"crashed"'))
    for status in ('finished', 'crashed'):
        result, = results.read_results([run], lab.output)
        assert (result.status, result.loading) == (status, 40)
        shutil.rmtree(run.folder(lab.output), ignore_errors=True)


@pytest.mark.full
def test_archive_guards_its_runs(lab, capsys):
    """It refuses other options and other images, as folders do."""
    kept = lab.folder / 'kept'
    assert lab('--seeds', 1) == 0 and lab('--archive', kept) == 0
    lab.plan({'A': {'model': 'test_vit_ape', 'lr': 0.5}, 'B': 'test_vit_nope'})
    for mode in ([], ['--dry-run'], ['--tables'], ['--archive', kept]):
        capsys.readouterr()
        assert lab('--output', kept, *mode) == 2
        assert f'A, seed 1 in {kept} was started with lr None, now it is 0.5; name another --output, or remove its ' \
               f'line from {kept}/runs.jsonl' in capsys.readouterr().err
    assert lab('--output', lab.folder / 'other', '--models', 'A', '--seeds', 1) == 0
    text = (kept / 'runs.jsonl').read_text()
    assert lab('--output', lab.folder / 'other', '--archive', kept) == 2
    err = capsys.readouterr().err
    assert 'runs.jsonl has A, seed 1 with lr None, and in' in err and 'it is 0.5; name another folder' in err
    assert (kept / 'runs.jsonl').read_text() == text
    lab.plan({'A': 'test_vit_ape', 'B': 'test_vit_nope'})
    (lab.folder / 'data' / 'train' / 'a' / '1.png').unlink()
    assert lab('--output', kept, '--seeds', 2) == 2
    assert f'A, seed 1 in {kept}/runs.jsonl was trained on other images' in capsys.readouterr().err


def test_archive_is_written_by_one_process_at_a_time(lab, monkeypatch):
    """Another one that archives in between waits, and no line is lost."""
    assert lab() == 0
    runs, path = load_plan(lab.folder / 'plan.yaml').runs, lab.folder / 'kept' / 'runs.jsonl'
    write, threads = results.write_text, []

    def write_late(path, text):
        if not threads:
            threads.append(threading.Thread(target=results.archive_runs, args=(runs[2:], lab.output, path)))
            threads[0].start()
            threads[0].join(0.5)
        write(path, text)

    monkeypatch.setattr(results, 'write_text', write_late)
    results.archive_runs(runs[:2], lab.output, path)
    threads[0].join()
    assert len(archived(lab, path.parent)) == 4


@pytest.mark.full
def test_archive_does_not_mix_trainings(lab, capsys):
    """Another training of a run that is there, or runs on other images, are refused."""
    kept, other = lab.folder / 'kept', lab.folder / 'other'
    assert lab('--seeds', 1) == 0 and lab('--archive', kept) == 0
    text = (kept / 'runs.jsonl').read_text()
    shutil.copytree(lab.output, other)
    summary = other / 'A' / 'seed1' / 'summary.csv'
    summary.write_text(summary.read_text().replace('1.7', '1.6'))
    assert lab('--output', other, '--archive', kept) == 2
    assert f'{kept}/runs.jsonl has another training of A, seed 1' in capsys.readouterr().err
    shutil.rmtree(other)
    (lab.folder / 'data' / 'train' / 'a' / '1.png').unlink()
    assert lab('--output', other, '--seeds', 2) == 0 and lab('--output', other, '--archive', kept) == 2
    assert f"A, seed 2 has other images of 'train' than runs in {kept}/runs.jsonl" in capsys.readouterr().err
    assert (kept / 'runs.jsonl').read_text() == text


def test_an_archive_has_a_line_for_each_run(lab, capsys):
    """Also where a label has what Python takes for the end of a line."""
    label, kept = 'A\u2028B', lab.folder / 'kept'
    lab.plan({label: 'test_vit_ape'})
    assert lab('--seeds', 1) == 0 and lab('--archive', kept) == 0
    assert list(results.read_archive(kept / 'runs.jsonl')) == [(label, 1)]


@pytest.mark.one_of(2)
@pytest.mark.parametrize('line', ['{"label": "A"', '{"label": "A"}', '[]', '{"epochs": {"epoch": [1], "lr": []}}'])
def test_archives_that_cannot_be_read(lab, line, capsys):
    kept = lab.folder / 'kept'
    assert lab('--seeds', 1) == 0 and lab('--archive', kept) == 0
    with open(kept / 'runs.jsonl', 'a') as f:
        f.write(line)
    for mode in ('--tables', '--dry-run'):
        capsys.readouterr()
        assert lab('--output', kept, mode) == 2
        err = capsys.readouterr().err
        assert 'runs.jsonl, line 3, is not a run' in err and err.count('\n') == 1


def test_a_run_that_an_archive_has_twice(lab, capsys):
    """The second line replaced the first, silently."""
    kept = lab.folder / 'kept'
    assert lab('--seeds', 1) == 0 and lab('--archive', kept) == 0
    lines = (kept / 'runs.jsonl').read_text()
    (kept / 'runs.jsonl').write_text(lines + lines.splitlines()[0] + '\n')
    capsys.readouterr()
    assert lab('--output', kept, '--tables') == 2
    assert 'runs.jsonl has A, seed 1 in line 3 and before; remove one of the lines' in capsys.readouterr().err


def test_crashed_and_diverged(lab, capsys):
    lab.plan({
        'A': 'test_vit_ape',
        'crash': {'model': 'test_vit_nope', 'model_kwargs': {'crash': 2}},
        'nan': {'model': 'test_vit_nope', 'model_kwargs': {'nan': 1, 'sleep': 0.1}},
        'die': {'model': 'test_vit_nope', 'model_kwargs': {'die': 3}},
        'quit': {'model': 'test_vit_nope', 'model_kwargs': {'quit': 2}},
        'reject': {'model': 'test_vit_nope', 'model_kwargs': {'reject': 1}},
        'other': {'model': 'test_vit_nope', 'model_kwargs': {'other_timm': 1}},
    }, seeds=[1])
    assert lab() == 1
    table, rows = (lab.output / 'plan.md').read_text(), lab.rows()
    assert {label: row['status'] for (label, _), row in rows.items()} == {
        'A': 'finished', 'crash': 'crashed', 'nan': 'diverged', 'die': 'crashed', 'quit': 'crashed',
        'reject': 'crashed', 'other': 'crashed'}
    assert rows['crash', 1]['error'] == 'torch.OutOfMemoryError: no memory left'
    assert rows['nan', 1]['error'] == 'train_loss is nan in epoch 1 (the first is 0)'
    assert rows['die', 1]['error'] == 'killed by SIGKILL, perhaps because memory ran out'
    assert rows['quit', 1]['error'] == 'ended after 2 of 4 epochs'  # though its exit code is 0
    assert "unexpected keyword argument 'reject'" in rows['reject', 1]['error']
    assert rows['other', 1]['error'].startswith(
        f'train.py does not fit timm {timm.__version__}; use train.py of tag v{timm.__version__}: ImportError: ')
    assert '- crash, seed 1: crashed after 2 of 4 epochs, torch.OutOfMemoryError: no memory left' in table
    assert lab.line('nan')[1:6] == ['', '', '', '', '0 of 1 (1 diverged)']
    assert lab.epochs()['nan/seed1', 'epoch-3'] == 0  # it was ended
    assert not rows['nan', 1]['top1'] and not rows['crash', 1]['top1']
    assert '6 of 7 runs are not finished' in capsys.readouterr().err

    notes = len(lab.notes())
    assert lab() == 1  # crashed runs are resumed, diverged ones are not
    rows = lab.rows()
    assert [rows[label, 1]['status'] for label in ('A', 'crash', 'die', 'quit', 'nan', 'reject')] == [
        'finished', 'finished', 'finished', 'finished', 'diverged', 'crashed']
    again = [note[:2] for note in lab.notes()[notes:]]
    assert sorted(again) == [
        ('crash/seed1', 'end'), ('crash/seed1', 'epoch-2'), ('crash/seed1', 'epoch-3'), ('die/seed1', 'end'),
        ('die/seed1', 'epoch-3'), ('quit/seed1', 'end'), ('quit/seed1', 'epoch-2'), ('quit/seed1', 'epoch-3')]
    assert rows['nan', 1]['starts'] == '1' and rows['crash', 1]['starts'] == '2' and rows['crash', 1]['top1'] == '50.0'
    assert [line.split(',')[0] for line in lab.summary('die/seed1').splitlines()] == ['epoch', '0', '1', '2', '3']


# -- interruptions


def plan_of_two(lab, **kwargs):
    lab.plan({
        'A': {'model': 'test_vit_ape', 'model_kwargs': kwargs},
        'B': {'model': 'test_vit_nope', 'model_kwargs': kwargs},
    })


@pytest.fixture
def gate(lab):
    """A file for which trainings stop in epoch 2, until it is deleted, however slow the machine is."""
    gate = lab.folder / 'gate'
    gate.touch()
    plan_of_two(lab, until_gone=str(gate))
    return gate


def test_reboot(lab, gate):
    command = lab.begin()
    lab.wait_for('A/seed1 epoch-2')
    command.kill()
    lab.kill_trainings()
    command.join()
    time.sleep(0.05)
    gate.unlink()
    with open(lab.output / 'A' / 'seed1' / 'summary.csv', 'a') as f:
        f.write('3,1.')
    assert lab() == 0
    assert_whole(lab)
    begun = lab.epochs()
    assert begun['A/seed1', 'epoch-0'] == begun['A/seed1', 'epoch-1'] == 1 and begun['A/seed1', 'epoch-2'] == 2
    assert begun['B/seed2', 'epoch-0'] == 1
    record = json.loads((lab.output / 'A' / 'seed1' / 'run.json').read_text())
    assert [start['epoch'] for start in record['starts']] == [0, 2]
    assert all(0 <= start['seconds'] < 30 for start in record['starts'])
    assert lab.rows()['A', 1]['starts'] == '2'


def test_trainings_outlive_the_command(lab, gate, monkeypatch):
    command = lab.begin()
    lab.wait_for('A/seed1 epoch-1')
    command.kill()
    command.join()
    work = runner.work

    def listening(waiting, slots, locks, start, tell, *rest):
        def listen(message):
            if message.startswith('waiting for another start of this experiment'):
                gate.unlink()
            tell(message)
        work(waiting, slots, locks, start, listen, *rest)

    monkeypatch.setattr(runner, 'work', listening)
    assert lab() == 0
    assert_whole(lab)
    assert set(lab.epochs().values()) == {1}  # none was trained twice
    assert most_at_once(lab) == 2
    assert not gate.exists()  # it said that it waits


@pytest.mark.parametrize('number, code', [
    (signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.full)])
def test_interrupted(lab, gate, number, code):
    command = lab.begin()
    lab.wait_for('A/seed1 epoch-1')
    os.kill(command.pid, number)
    command.join(60)
    assert command.exitcode == code
    for process in {note[3] for note in lab.notes()}:
        deadline = time.time() + 20
        with pytest.raises(ProcessLookupError):
            while time.time() < deadline:  # the system may take a while to remove it
                os.kill(process, 0)
                time.sleep(0.01)
    assert lab.rows()['A', 1]['status'] == 'interrupted' and lab.rows()['A', 2]['status'] == 'waiting'
    assert lab.line('A')[5] == '0 of 2 (1 interrupted, 1 waiting)'
    gate.unlink()
    assert lab() == 0
    assert_whole(lab)
    assert lab.epochs()['A/seed1', 'epoch-0'] == 1


def most_at_once(lab):
    spans = {}
    for _, _, at, process, *_ in lab.notes():
        first, _ = spans.setdefault(process, (at, at))
        spans[process] = first, at
    return max(sum(a <= t < b for a, b in spans.values()) for t, _ in spans.values())


def test_two_starts_at_once(lab):
    plan_of_two(lab, sleep=0.05)
    commands = [lab.begin(), lab.begin()]
    for command in commands:
        command.join(60)
        assert command.exitcode == 0
    assert_whole(lab)
    assert set(lab.epochs().values()) == {1} and len({note[3] for note in lab.notes()}) == 4
    assert most_at_once(lab) == 2  # the slots are those of the machine, not of a command


def test_running_is_seen(lab, gate):
    command = lab.begin('--models', 'A', '--seeds', 1)
    lab.wait_for('A/seed1 epoch-1')
    plan = load_plan(lab.folder / 'plan.yaml')
    assert [row['status'] for row in experiment.rows_of(plan, lab.output)] == ['running', *3 * ['waiting']]
    gate.unlink()
    command.join(60)
    assert [row['status'] for row in experiment.rows_of(plan, lab.output)] == ['finished', *3 * ['waiting']]


# -- remains of a killed train.py


def test_summary_as_it_is_left(tmp_path):
    tmp_path.joinpath('summary.csv').write_text(
        'epoch,train_loss,eval_top1\n0,2,10\n1,1.9,11\nepoch,train_loss,eval_top1\n1,1.8,12\n2,1.')
    rows = records.read_summary(tmp_path)
    assert {epoch: row['eval_top1'] for epoch, row in rows.items()} == {0: '10', 1: '12'}
    records.write_summary(tmp_path, rows)
    assert tmp_path.joinpath('summary.csv').read_text() == 'epoch,train_loss,eval_top1\n0,2,10\n1,1.8,12\n'
    assert records.read_summary(tmp_path / 'none') == {}
    tmp_path.joinpath('summary.csv').write_text('1,1.8,12\n2,1.7,13\n')  # somebody removed the lines above
    assert records.read_summary(tmp_path) == {}


def test_a_summary_whose_columns_change(tmp_path):
    """The cells of later rows were read as those of other columns, silently."""
    tmp_path.joinpath('summary.csv').write_text(
        'epoch,train_loss,eval_top1\n0,2,10\n1,1.9,11\nepoch,train_loss,eval_loss,eval_top1,lr\n1,1.8,1.7,12,.1\n'
        'epoch,train_lo')  # cut off
    rows = records.read_summary(tmp_path)
    assert rows == {
        0: {'epoch': '0', 'train_loss': '2', 'eval_top1': '10', 'eval_loss': '', 'lr': ''},
        1: {'epoch': '1', 'train_loss': '1.8', 'eval_top1': '12', 'eval_loss': '1.7', 'lr': '.1'},
    }
    assert records.not_finite(rows) is None
    records.write_summary(tmp_path, rows)
    assert records.read_summary(tmp_path) == rows


@pytest.mark.parametrize('key', ['train_loss', 'eval_loss'])
@pytest.mark.parametrize('loss', ['nan', 'inf'])
def test_losses_that_are_not_finite(key, loss):
    rows = {epoch: {'train_loss': '2', 'eval_loss': '2'} for epoch in range(3)}
    rows[1][key] = loss
    assert records.not_finite(rows) == f'{key} is {loss} in epoch 1 (the first is 0)'


def test_checkpoints_as_they_are_left(tmp_path, checkpoints):
    def put(name, epoch, size=None):
        (tmp_path / f'{name}.pth.tar').write_bytes((checkpoints / str(epoch)).read_bytes()[:size])

    assert records.last_checkpoint(tmp_path) == (None, 0)
    put('tmp', 0, 100)
    assert records.last_checkpoint(tmp_path) == (None, 0)  # of the first epoch, not written to its end
    put('tmp', 2)
    put('checkpoint-1', 1)
    put('recovery-4-10', 4)
    assert records.last_checkpoint(tmp_path) == (tmp_path / 'tmp.pth.tar', 3)  # `last` was removed, not yet replaced
    put('last', 3, 0)
    put('tmp', 3, 100)
    assert records.last_checkpoint(tmp_path) == (tmp_path / 'checkpoint-1.pth.tar', 2)  # others were lost in a reboot
    put('checkpoint-1', 1, 100)
    with pytest.raises(RuntimeError, match='no checkpoint can be read, such as checkpoint-1.pth.tar'):
        records.last_checkpoint(tmp_path)


def test_a_damage_that_torch_has_no_words_for(tmp_path, monkeypatch):
    (tmp_path / 'last.pth.tar').write_bytes(b'broken')
    monkeypatch.setattr(torch, 'load', Mock(side_effect=EOFError('')))
    with pytest.raises(RuntimeError, match=r'no checkpoint can be read, such as last.pth.tar \(EOFError: \)'):
        records.last_checkpoint(tmp_path)


def test_checkpoints_that_cannot_be_read_are_not_lost(lab):
    assert lab('--models', 'A', '--seeds', 1) == 0
    folder = lab.output / 'A' / 'seed1'
    (folder / 'run.json').write_text('')
    assert lab('--models', 'A', '--seeds', 1) == 0 and len(lab.epochs()) == EPOCHS  # finished, as the checkpoint says
    (folder / 'run.json').unlink()
    (folder / 'last.pth.tar').write_bytes(b'broken')
    assert lab('--models', 'A', '--seeds', 1) == 1
    assert 'no checkpoint can be read' in lab.rows()['A', 1]['error']
    assert (folder / 'last.pth.tar').read_bytes() == b'broken' and len(lab.epochs()) == EPOCHS


RUN = {'status': 'finished', 'error': '', 'starts': None}


@pytest.mark.full
@pytest.mark.parametrize('said', [
    [], None, RUN, {**RUN, 'starts': [{}]}, {**RUN, 'starts': [{'began': '2026-01-01'}]}], ids=str)
def test_records_that_say_nothing(lab, said):
    only = '--models', 'A', '--seeds', 1
    assert lab(*only) == 0
    (lab.output / 'A' / 'seed1' / 'run.json').write_text(json.dumps(said))
    assert lab('--tables') == 0
    assert lab(*only) == 0 and lab.rows()['A', 1]['status'] == 'finished' and len(lab.epochs()) == EPOCHS


@pytest.mark.one_of(2)
@pytest.mark.parametrize('content', [b'a: [', bytes(50), b'- 1', b'\xff'])
def test_options_that_cannot_be_read(lab, content, capsys):
    assert lab('--models', 'A', '--seeds', 1) == 0
    folder = lab.output / 'A' / 'seed1'
    (folder / 'config.yaml').write_bytes(content)
    for mode in ([], ['--tables']):
        assert lab(*mode) == 2
        assert f'config.yaml cannot be read; remove {folder}' in capsys.readouterr().err


HEAD = b'epoch,train_loss,eval_top1\n'


@pytest.mark.one_of(3)
@pytest.mark.parametrize('content', [
    b'', bytes(100), b'\xff\xfe', HEAD + b'2,1.8,49\n' + bytes(50), HEAD + b'3,abc,50\n', HEAD + b'3,1.7,5x0\n'],
    ids=['empty', 'NULs', 'no text', 'half', 'no loss', 'no accuracy'])
def test_lost_summaries(lab, content):
    """The rest of a summary after a reboot is not shown as the result, and does not stop other runs."""
    assert lab('--models', 'A') == 0
    folder = lab.output / 'A' / 'seed1'
    (folder / 'summary.csv').write_bytes(content)
    assert lab('--tables') == 0 and lab.line('A')[5] == '1 of 2 (1 interrupted)'
    assert lab() == 1 and {run for run, row in lab.rows().items() if row['status'] != 'finished'} == {('A', 1)}
    assert lab.rows()['A', 1]['error'] == f'summary.csv has lost rows; remove {folder} to begin again'
    assert lab.epochs()['A/seed1', 'epoch-3'] == 1


# -- the slots


class Job:
    def __init__(self, thing, slot, held):
        self.thing, self.held, self.stopped = thing, held, False

    def ended(self):
        return False

    def stop(self):
        os.close(self.held)
        self.stopped = True
        raise OSError(f'disk full at {self.thing}')


def test_all_are_stopped(tmp_path, monkeypatch):
    jobs = []

    def start(*args):
        jobs.append(Job(*args))
        return jobs[-1]

    def sleep(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner.time, 'sleep', sleep)
    slots = [runner.Slot(name, '', {}) for name in 'abc']
    with pytest.raises(OSError, match='disk full'):
        runner.work([1, 2, 3, 4], slots, tmp_path, start, print)
    assert [job.stopped for job in jobs] == [True] * 3


@contextlib.contextmanager
def handled_by(handler):
    """Ctrl-C and SIGTERM, which must have this handler in the end as well."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
        assert {signal.getsignal(number) for number in before} == {handler}
    finally:
        for number, own in before.items():
            signal.signal(number, own)


@pytest.mark.parametrize('number, error', [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_interrupted_while_a_training_begins(tmp_path, number, error):
    """The signal comes when the process runs, and `start` has not yet returned it."""
    stopped = []

    class Begun(Job):
        def stop(self):
            os.close(self.held)
            stopped.append(self.thing)

    def start(*args):
        signal.raise_signal(number)
        return Begun(*args)

    def end(*_):
        raise error

    with handled_by(end), pytest.raises(error):
        runner.work([1, 2], [runner.Slot(name, '', {}) for name in 'ab'], tmp_path, start, print)
    assert stopped == [1]  # no other has begun
    assert records.lock(tmp_path / 'a') is not None


def test_trainings_that_a_thread_starts(tmp_path):
    """Only the main thread may have handlers of signals."""
    begun = []

    def start(thing, slot, held):
        begun.append(thing)
        return False

    with ThreadPoolExecutor() as pool:
        pool.submit(runner.work, [1], [runner.Slot('a', '', {})], tmp_path, start, print).result()
    assert begun == [1]


@pytest.mark.parametrize('when, number', [(1, signal.SIGTERM), (3, signal.SIGINT), (None, None)])
def test_handlers_of_signals_are_restored(monkeypatch, when, number):
    """Also if a signal comes while they are exchanged; and none is lost if the handler of another returns."""
    came, calls, real = [], [], signal.signal

    def end(number, _):
        came.append(number)
        if number == signal.SIGTERM or when:
            raise SystemExit

    def exchange(*args):
        before = real(*args)
        calls.append(args)
        if len(calls) == when:
            signal.raise_signal(number)
        return before

    both = [signal.SIGINT, signal.SIGTERM]
    with handled_by(end), monkeypatch.context() as patch:
        patch.setattr(signal, 'signal', exchange)
        with pytest.raises(SystemExit), runner._undisturbed():
            for n in both:
                signal.raise_signal(n)
    assert when or came == both


def test_what_cannot_be_started_is_not_held(lab, monkeypatch):
    def start(*args):
        raise OSError('disk full')

    monkeypatch.setattr(runner, '_start', start)
    assert lab() == 2
    locks = list((lab.output / '.locks').iterdir())
    assert len(locks) == 2 and None not in map(records.lock, locks)


# -- statistics


@pytest.mark.parametrize('confidence, dof, t', [
    (0.95, 1, 12.7062), (0.95, 2, 4.30265), (0.95, 3, 3.18245), (0.95, 4, 2.77645), (0.95, 9, 2.26216),
    (0.95, 30, 2.04227), (0.99, 1, 63.6567), (0.99, 5, 4.03214), (0.8, 2, 1.88562)])
def test_student(confidence, dof, t):
    values = range(dof + 1)
    mean, low, high = intervals.mean_interval(values, confidence)
    standard_error = statistics.stdev(values) / math.sqrt(dof + 1)
    assert [(mean - low) / standard_error, (high - mean) / standard_error] == pytest.approx([t, t], rel=2e-6)  # printed


def test_mean_interval():
    mean, low, high = intervals.mean_interval([1, 2, 6])  # deviations -2 -1 3, variance 7
    assert (mean, low, high) == pytest.approx((3, 3 - 4.302653 * math.sqrt(7 / 3), 3 + 4.302653 * math.sqrt(7 / 3)))
    assert intervals.mean_interval([2.5]) == (2.5, -math.inf, math.inf)


def test_unpaired_interval():
    low, high = intervals.unpaired_interval([1, 2, 6], [0, 1, 2, 1])  # squares 14 and 2, of 5 degrees of freedom
    half = 2.570582 * math.sqrt(16 / 5 * (1 / 3 + 1 / 4))
    assert (low, high) == pytest.approx((2 - half, 2 + half))
    assert intervals.unpaired_interval([2.5], [1.5]) == (-math.inf, math.inf)


def test_intervals_are_corrected_and_equal_values_are_no_certainty():
    low, high = {1: 50., 2: 50.4, 3: 50.2}, {1: 60., 2: 60.5, 3: 60.1}
    gain, *ends = intervals.corrected_intervals(high, low, 8)
    assert intervals.corrected_cells(high, low, 8) == {
        'difference': f'{gain:+.1f}', 'corrected, pairs': '[{:+.1f}, {:+.1f}]'.format(*ends[0]),
        'corrected, not paired': '[{:+.1f}, {:+.1f}]'.format(*ends[1]), 'shown': 'yes'}
    assert intervals.corrected_cells(low, high, 8)['shown'] == 'yes'  # to be behind
    assert intervals.corrected_cells(high, low, 100_000)['shown'] == 'no'
    wide = {1: 0., 2: 50., 3: 100.}
    gains = {seed: x + 1 + seed / 10 for seed, x in wide.items()}
    assert intervals.corrected_cells(gains, wide, 1)['shown'] == 'no'  # one interval excludes 0, the other does not
    equal = intervals.corrected_cells({seed: x + 5 for seed, x in low.items()}, low, 1)
    assert equal['corrected, pairs'] == 'no spread' and equal['shown'] == 'no'
    assert list(intervals.corrected_cells({1: 3.}, {1: 1.}, 1).values()) == ['+2.0', '', '', '']
    flat = [row(model, seed, top1) for model, top1 in (('A', 50.), ('B', 51.)) for seed in (1, 2)]
    assert '| +1.00 no spread | no spread |' in report.summary_table(flat, 'A')
    assert intervals.corrected_cells(high, low, 8, digits=2)['difference'] == f'{gain:+.2f}'
    assert list(intervals.corrected_cells({}, {1: 1.}, 1).values()) == ['', '', '', '']


def row(model, seed, top1, status='finished'):
    return dict(
        model=model, seed=seed, top1=top1, top5=None, status=status, minutes=2.0, epochs=4, epochs_planned=4, error='',
        loading=None, gpu_utilisation=None)


def test_differences_are_of_seeds_that_both_have():
    rows = [row('A', 1, 50.0), row('A', 2, 60.0), row('A', 3, None, 'diverged'), row('B', 2, 63.0), row('B', 3, 99.0)]
    lines = report.summary_table(rows, 'A').splitlines()
    assert lines[2] == '| A | 55.00 ± 7.07 |  |  |  | 2 of 3 (1 diverged) | 2.0 |'
    assert lines[3] == '| B | 81.00 ± 25.46 | +3.00 (1 of 2 seeds) |  |  | 2 | 2.0 |'
    assert lines[4:] == ['', '- A, seed 3: diverged after 4 of 4 epochs, ']


def test_rows_of_runs(monkeypatch):
    """The best epoch need not be the last, not every epoch is evaluated, and a run may have been started twice."""
    config = {'model': 'vit_tiny_ape', 'epochs': 6, 'warmup_epochs': 0, 'cooldown_epochs': 0}
    plan = Plan('recipe', 'A', [Run('A', seed, config) for seed in (1, 2)])
    epochs = {
        'finished': {
            1: {'eval_top1': 30., 'train_loss': 2.}, 3: {'eval_top1': 40., 'train_loss': 1.},
            5: {'eval_top1': 20., 'train_loss': .5}},
        'running': {3: {'eval_top1': 50., 'train_loss': 1.}}}
    starts = [{'began': '1st', 'commit': 'a', 'seconds': 60}, {'began': '2nd', 'commit': 'b', 'seconds': 30}]
    found = [
        results.Result(status, records.Record('A', status, starts=starts), config, of_run, None)
        for status, of_run in epochs.items()]
    monkeypatch.setattr(report, 'read_results', lambda runs, output: found)
    done, running = report.rows_of(plan, Path())
    assert (done['top1'], done['best_top1'], done['train_loss'], done['epochs']) == (20, 40, .5, 6)
    assert (done['starts'], done['began'], done['commit'], done['minutes']) == (2, '1st', 'a; b', 1.5)
    assert (running['top1'], running['best_top1'], running['epochs']) == (None, None, 4)


def test_ctrl_c_does_not_reach_git(tmp_path, monkeypatch):
    """Where it has to wait for us, the answer of a killed git was taken for that of a folder without one."""
    git = tmp_path / 'git'
    git.write_text(f'#!{sys.executable}\nimport os\nprint(os.getpgrp())\n')
    git.chmod(0o755)
    (tmp_path / '.git').mkdir()
    monkeypatch.setattr(machine.timm_sape, '__file__', str(tmp_path / 'timm_sape' / '__init__.py'))
    monkeypatch.setenv('PATH', f'{tmp_path}{os.pathsep}{os.environ["PATH"]}')
    assert int(machine.commit()) != os.getpgrp()


def test_the_commit_is_that_of_the_start(lab, monkeypatch):
    """The checkout may change while an experiment runs."""
    commits = iter(['1111111', '2222222'])
    monkeypatch.setattr(runner, 'commit', lambda: next(commits))
    lab.plan({'A': 'test_vit_ape', 'B': 'test_vit_nope'}, seeds=[1])
    assert lab('--jobs', 1) == 0
    assert {row['commit'] for row in lab.rows().values()} == {'1111111', '2222222'}


def curves(lab, monkeypatch):
    """The figure of an experiment."""
    figures = []
    monkeypatch.setattr(report, 'new_figure', lambda *size: figures.append(new_figure(*size)) or figures[0])
    experiment.plot_curves(load_plan(lab.folder / 'plan.yaml'), lab.output, lab.folder / 'curves.svg')
    return figures[0]


@pytest.mark.full
def test_curves_leave_out_what_failed(lab, monkeypatch):
    lab.plan({
        'A': {'model': 'test_vit_ape', 'model_kwargs': {'top1': {1: 49, 2: 53}}},
        'nan': {'model': 'test_vit_nope', 'model_kwargs': {'nan': 1}}})
    assert lab() == 1
    top1, loss = curves(lab, monkeypatch).axes
    assert [line.get_label() for line in top1.lines] == ['A (2)', 'nan (0)']
    assert list(top1.lines[0].get_xdata()) == [1, 2, 3, 4] and list(top1.lines[0].get_ydata()) == [48, 49, 50, 51]
    assert top1.collections[0].get_paths()[0].get_extents().intervaly.tolist() == [46, 53]  # from seed 1 to seed 2
    assert list(loss.lines[0].get_ydata()) == [2, 1.9, 1.8, 1.7] and not len(loss.lines[1].get_xdata())
    summary = lab.output / 'A' / 'seed2' / 'summary.csv'
    summary.write_text(''.join(summary.read_text().splitlines(True)[:-1]))  # the last epoch is not there yet
    top1, _ = curves(lab, monkeypatch).axes
    assert list(top1.lines[0].get_xdata()) == [1, 2, 3]


@pytest.mark.one_of(3)
@pytest.mark.parametrize('length', [1, 26, 36, 100])
def test_the_legend_fits(lab, length, monkeypatch):
    lab.plan({f'{i}' + (length - 1) * 'e': 'test_vit_ape' for i in range(5)}, seeds=[1])
    figure = curves(lab, monkeypatch)
    figure.draw_without_rendering()  # before matplotlib 3.11 the layout is still that for the dpi of the file
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1 and 0 <= box.y0
    assert all(box.y1 <= axes.get_tightbbox().y0 + 1 for axes in figure.axes)


def test_labels_are_no_formulas(lab):
    lab.plan({'$_{$': 'test_vit_ape'}, seeds=[1])
    assert lab() == 0 and (lab.output / 'plan.png').exists()


# -- the plan and the machine


def test_later_options_beat_earlier_ones(lab):
    lab.recipe(
        epochs=9, lr=1, model='test_vit_nope', model_kwargs={'x': 1, 'y': 1}, seed=7, data_dir='of an args.yaml',
        warmup_epochs=3)
    lab.plan(
        {'A': {'lr': 3, 'model_kwargs': {'y': 3}}, 'B': 'test_vit_ape'}, seeds=[5],
        args={'lr': 2, 'batch_size': 2, 'model_kwargs': {'z': 2}})
    plan = load_plan(lab.folder / 'plan.yaml', script_options(lab.script))
    a, b = plan.runs
    assert a == experiment.Run('A', 5, dict(
        device_modules=['timm_sape'], epochs=9, lr=3, batch_size=2, model='test_vit_nope', seed=5, warmup_epochs=3,
        model_kwargs={'x': 1, 'y': 3, 'z': 2}))
    assert b.config['lr'] == 2 and b.config['model'] == 'test_vit_ape'
    for options, epochs in (
            ({}, 9), ({'warmup_prefix': True}, 12), ({'cooldown_epochs': 2}, 11), ({'lr_cycle_limit': 2}, 18),
            ({'sched': 'step', 'cooldown_epochs': 2}, 9), ({'sched': 'none', 'sched_on_updates': True}, 9)):
        assert a._replace(config={**a.config, **options}).epochs == epochs
    assert (plan.recipe, plan.baseline, plan.labels) == ('small', 'A', ['A', 'B'])


WRONG = {
    'no seeds': (dict(seeds=[]), 'has no seeds'),
    'seed twice': (dict(seeds=[1, 1]), 'seeds has a seed twice'),
    'seed of text': (dict(seeds=['1']), 'seeds must be a list of integers'),
    'one seed': (dict(seeds=3), 'seeds must be a list of integers'),
    'models as a list': (dict(models=['test_vit_ape']), 'lines of LABEL: MODEL'),
    'baseline': (dict(baseline='C'), "the baseline 'C' is not one of the models, A"),
    'key': (dict(model='x'), "there is no option 'model'; 'models' is one"),
    'option': (dict(args={'learning-rate': 1, 'lr': 1}), "there is no option 'learning-rate'"),
    'near option': (dict(models={'A': {'model': 'test_vit_ape', 'epoch': 3}}), "'epoch'; 'epochs' is one"),
    'ours': (dict(args={'seed': 1}), 'the command sets seed itself'),
    'resume': (dict(models={'A': {'resume': 'x'}}), 'the command sets resume itself'),
    'label': (dict(models={'../A': 'test_vit_ape'}), 'can be the name of a folder'),
    'number': (dict(models={3: 'test_vit_ape'}), 'put it in quotes'),
    'a name of a file': (dict(models={'plan.csv': 'test_vit_ape'}), 'must not be the name of a file of this'),
    'same folder': (
        dict(models={'A, b': 'test_vit_ape', 'a (B)': 'test_vit_ape'}), "its folder would be 'a-B', as that of 'A, b'"),
    'no letter': (dict(models={'++': 'test_vit_ape'}), 'a label must have a letter or a digit'),
    'a name of the archive': (dict(models={'(runs.jsonl)': 'test_vit_ape'}), 'must not be the name of a file'),
    'long label': (dict(models={'漢' * 67: 'test_vit_ape'}), 'at most 200 bytes'),
    'model of another type': (dict(models={'A': {'model': 5}}), 'model must be a name (in quotes if it is a number)'),
    'models of one row': (dict(models={'A': {'model': ['test_vit_ape']}}), 'must be a name (in quotes if it is a num'),
    'baselines': (dict(baseline=['A']), "the baseline ['A'] is not one of the models, A"),
    'no model': (dict(models={'A': {'lr': 1}}), 'neither the recipe nor the plan sets `model`'),
    'nothing': (dict(models={'A': None}), '(or, for a model, just its name), got None'),
    'kwargs': (dict(models={'A': {'model': 'test_vit_ape', 'model_kwargs': 'x=1'}}), 'model_kwargs must be a mapping'),
    'kwarg with an option': (
        dict(args={'model_kwargs': {'global_pool': 'avg'}}), 'write `gp: avg` beside model_kwargs, not in it'),
    'epochs': (dict(args={'epochs': 0}), 'args: epochs must be a number (without quotes) of 1 or more, got 0'),
    'epochs as text': (dict(args={'epochs': '4'}), "epochs must be a number (without quotes) of 1 or more, got '4'"),
    'rate as text': (dict(args={'warmup_lr': '1e-5'}), 'YAML reads warmup_lr as text: write 1.0e-5, not 1e-5'),
    'schedule': (dict(args={'sched': 'cosin'}), "timm cannot make this schedule: Unknown scheduler 'cosin'"),
    'modules as text': (
        dict(args={'device_modules': 'timm_sape'}), 'device_modules must be a list of names, such as [timm_sape]'),
    'module of another type': (dict(args={'device_modules': [5]}), 'such as [timm_sape], got [5]'),
    'recipe': (dict(recipe='none.yaml'), 'cannot read'),
    'recipe of another type': (dict(recipe=['a']), 'recipe must be the path of a file'),
    'unknown model': (dict(models={'A': 'vit_smal_ape'}), "A: there is no model 'vit_smal_ape'"),
    'plugin': (dict(args={'device_modules': ['no_such_plugin']}), 'no_such_plugin, which cannot be imported'),
    'split': (dict(args={'val_split': 'val'}), "has no folder 'val', and train.py would use all of it instead"),
    'no split': (dict(args={'val_split': None}), 'val_split must be a name (in quotes if it is a number), got None'),
    'null workers': (dict(args={'workers': None}), 'workers must be a number (without quotes) of 0 or more, got None'),
    'negative workers': (dict(models={'A': {'workers': -1}}), "model 'A': workers must be a number"),
    'workers as a switch': (dict(args={'workers': True}), 'workers must be a number (without quotes) of 0 or more'),
    'no interval': (dict(args={'val_interval': 0}), 'val_interval must be a number (without quotes) of 1 or'),
    'null interval': (dict(args={'val_interval': None}), 'val_interval must be a number'),
    'batches': (dict(args={'batch_size': [8]}), 'batch_size must be a number (without quotes) of 1 or more, got [8]'),
    'batch as text': (dict(args={'batch_size': '8'}), 'batch_size must be a number (without quotes) of 1'),
    'unknown data': (dict(args={'dataset': 'trch/cifar10'}), "args: Unknown data set 'trch/cifar10'. Write e.g. torch"),
    'data of torchvision': (
        dict(args={'dataset': 'Torch/CIFAR10'}), "data has no data set Torch/CIFAR10, split 'train': Dataset not"),
    'data without a prefix': (dict(models={'A': {'dataset': 'folder'}}), "Unknown data set 'folder'"),
    'split of folders by torchvision': (
        dict(args={'dataset': 'torch/image_folder', 'val_split': 'val'}), "has no folder 'val', and train.py would"),
    'config': (dict(args={'config': 'other.yaml'}), 'args: train.py would ignore config; write its options here'),
    'no optimizer': (dict(args={'no_resume_opt': True}), 'with no_resume_opt an interrupted run would go on with'),
    'data as a list': (dict(args={'dataset': ['torch/cifar10']}), 'dataset must be a name'),
    'null data': (dict(args={'dataset': None}), 'dataset must be a name (in quotes if it is a number), got None'),
    'rates': (dict(args={'lr': [0.1, 0.2]}), 'args: lr must be a number, got [0.1, 0.2]'),
    'nested rate': (dict(args={'lr': {'base': 0.1}}), "args: lr must be a number, got {'base': 0.1}"),
    'rate in words': (dict(args={'lr': 'high'}), "args: lr must be a number, got 'high'"),
    'rate as a switch': (dict(args={'lr': True}), 'args: lr must be a number, got True'),
    'null warmup': (dict(args={'warmup_epochs': None}), 'warmup_epochs must not be null; leave it out for the'),
    'half an epoch': (dict(args={'warmup_epochs': 0.5}), 'args: warmup_epochs must be an integer, got 0.5'),
    'null switch': (dict(args={'dataset_download': None}), 'dataset_download must not be null; leave it out'),
    'switch in words': (dict(args={'dataset_download': 'yes'}), "dataset_download must be true or false, got 'yes'"),
    'one item': (dict(args={'scale': 0.5}), 'scale must be a list, each item a number, such as [1, 2], got 0.5'),
    'items as text': (dict(args={'scale': ['1e-1', 1]}), 'scale must be a list, each item a number, such as'),
    'text as a list': (dict(args={'gp': ['avg']}), "args: gp must be text, got ['avg']"),
    'list of args': (dict(args=[]), 'args: it must be options of train.py'),
    'list of kwargs': (dict(args={'model_kwargs': []}), 'model_kwargs must be a mapping'),
    'numbered kwargs': (dict(args={'model_kwargs': {1: 2}}), 'model_kwargs must be a mapping'),
    'no modules': (dict(args={'device_modules': ''}), 'device_modules must be a list of names'),
    'named data': (
        dict(args={'dataset': 'torch/cifar10'}),
        "data has no data set torch/cifar10, split 'train': Dataset not found or corrupted."),
    'device': (dict(args={'device': 'foo'}), "the plan has device 'foo', which torch does not know"),
    'no device': (dict(args={'device': None}), "device must not be null; leave it out for the default, 'cuda'"),
    'cuda': (dict(args={'device': 'cuda'}), 'torch sees no GPU here'),
}


def test_hints_name_what_is_text(lab, capsys):
    lab.plan({'A': 'test_vit_ape'}, args={'sched': 'cosin', 'warmup_lr': '1e-5'})
    assert lab() == 2
    err = capsys.readouterr().err
    assert "Unknown scheduler 'cosin'" in err and 'as text' not in err


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path, monkeypatch):
    def full(*args):
        raise OSError('no space left')

    monkeypatch.setattr('os.replace', full)
    with pytest.raises(OSError, match='no space'):
        records.write_text(tmp_path / 'summary.csv', 'text')
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_texts_are_utf8_whatever_the_locale(lab):
    lab.plan({'APE ±': 'test_vit_ape'}, seeds=[1])
    path = lab.folder / 'plan.yaml'
    path.write_text(path.read_text().replace('\\xB1', '±'), encoding='utf-8')
    assert '±' in path.read_text(encoding='utf-8')
    env = {**os.environ, 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0', 'LC_ALL': 'POSIX'}
    code = f'from timm_sape.lab.experiment import load_plan; print(ascii(load_plan({str(path)!r}).baseline))'
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout == f'{ascii("APE ±")}\n', done.stderr


@pytest.mark.full
def test_tables_are_utf8_whatever_the_locale(lab):
    env = {**os.environ, 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0', 'LC_ALL': 'POSIX'}
    plan = Path(__file__).parents[1] / 'train_configs' / 'cpu_cifar10' / 'repository.yaml'
    shutil.copytree(plan.parents[2] / 'results' / 'cpu_repository', lab.output)
    command = [sys.executable, '-m', 'timm_sape', 'experiment', plan, '--output', lab.output, '--tables']
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and r'\xb1' in done.stdout, done.stderr
    assert '±' in (lab.output / 'repository.md').read_text(encoding='utf-8')


def test_folders_that_train_py_takes_for_a_split(tmp_path):
    for name in ('val', 'test', 'training'):
        (tmp_path / name).mkdir()
    for split in ('train', 'training', 'val', 'validation', 'eval', 'test'):
        found = split_folder(tmp_path, split)
        assert found == tmp_path / {'train': 'training', 'validation': 'val', 'eval': 'val'}.get(split, split)
    assert split_folder(tmp_path, 'held_out') is None
    assert runner.images_in(['validation', 'held_out'], tmp_path).keys() == {'validation'}


@pytest.mark.parametrize('name', WRONG)
def test_wrong_plans(lab, name, capsys, monkeypatch):
    keys, message = WRONG[name]
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    lab.plan(**{'models': {'A': 'test_vit_ape'}, **keys})
    assert lab() == 2
    err = capsys.readouterr().err
    assert message in err and err.count('\n') == 1 and not lab.output.exists()


@pytest.mark.parametrize('text, message', [
    ('models:\n  A: x\n  A: y\n', "'A' is there twice"), ('models: [', 'is not YAML'), ('- 1', 'must be a mapping')])
def test_files_that_are_no_plans(lab, text, message, capsys):
    (lab.folder / 'plan.yaml').write_text(text)
    assert lab() == 2
    err = capsys.readouterr().err
    assert message in err and err.count('\n') == 1


@pytest.mark.parametrize('options, message', [
    (['--models', 'C'], "the plan has no model 'C'; it has A, B"), (['--seeds', '3'], 'the plan has no seed 3'),
    (['--jobs', '0'], '--jobs must be at least 1'), (['--threads', '0'], '--threads must be at least 1'),
    (['--script', 'none.py'], "--script names timm's train.py"), (['--tables'], 'has no run of'),
    (['--script', 'none.py'], f'--branch v{timm.__version__} '), (['--data-dir', 'none'], 'none does not exist')])
def test_wrong_arguments(lab, options, message, capsys):
    assert lab(*options) == 2
    err = capsys.readouterr().err
    assert message in err and err.count('\n') == 1


def test_no_data(lab, capsys):
    assert main(['experiment', str(lab.folder / 'plan.yaml'), '--output', 'x', '--script', str(lab.script)]) == 2
    assert '--data-dir is missing' in capsys.readouterr().err


def test_data_that_have_a_name(lab):
    lab.plan({
        'A': {'model': 'test_vit_ape', 'dataset': 'torch/image_folder'},
        'B': {'model': 'test_vit_ape', 'dataset': 'torch/cifar10', 'dataset_download': True},  # train.py downloads it
    }, seeds=[1])
    assert lab() == 0


@pytest.mark.parametrize('output, label', [('data/train', 'A'), ('data/test/x', 'A'), ('data', 'test')])
def test_output_among_the_images(lab, output, label, capsys):
    lab.plan({label: 'test_vit_ape'})
    assert lab('--output', lab.folder / output) == 2
    assert 'would be among the images; name another --output' in capsys.readouterr().err


def test_files_of_somebody_else(lab, capsys):
    lab.output.mkdir()
    (lab.output / 'plan.csv').write_text('mine')
    assert lab() == 2
    assert 'plan.csv exists and is not of this experiment' in capsys.readouterr().err
    assert [path.name for path in lab.output.rglob('*')] == ['plan.csv']


def test_a_script_that_is_none(lab, capsys):
    lab.script.write_text('def (')
    assert lab() == 2
    assert 'is not a Python script' in capsys.readouterr().err
    lab.script.write_text('from elsewhere import main; main()')
    assert script_options(lab.script) is None


@pytest.mark.one_of(2)
@pytest.mark.parametrize('mode', [[], ['--dry-run'], ['--tables']])
def test_other_options_than_it_was_begun_with(lab, mode, capsys):
    lab.recipe(epochs=EPOCHS, device='cpu', val_split='test', batch_size=8, lr=0.1, workers=1)
    assert lab('--models', 'A', '--seeds', 1) == 0
    before = {path: path.read_bytes() for path in lab.output.rglob('*') if path.is_file()}
    lab.recipe(epochs=EPOCHS, device='cpu', val_split='test', batch_size=8, lr=0.2, workers=2)
    capsys.readouterr()
    assert lab(*mode) == 2
    err = capsys.readouterr().err
    assert 'A, seed 1 in ' in err and 'was started with lr 0.1, now it is 0.2' in err and err.count('\n') == 1
    assert {path: path.read_bytes() for path in lab.output.rglob('*') if path.is_file()} == before
    lab.recipe(epochs=EPOCHS, device='cpu', val_split='test', batch_size=8, lr=0.1, workers=2)
    assert lab('--models', 'A', '--seeds', 1) == 0  # workers do not matter


def test_images_are_described_without_hidden_files(tmp_path):
    """The digest is that of runs that are recorded in results. An image is read by train.py even if it is hidden."""
    for name in ('a/0.png', 'a/1.png', 'b/0.png'):
        (tmp_path / 'train' / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'train' / name).write_bytes(b'123')
    described = {'train': '3 files, 3fdf1186864f'}
    assert runner.images_in(['train'], tmp_path) == described
    for name in ('.DS_Store', 'a/.DS_Store', 'b/.cache/notes.txt'):
        (tmp_path / 'train' / name).parent.mkdir(exist_ok=True)
        (tmp_path / 'train' / name).touch()
    assert runner.images_in(['train'], tmp_path) == described
    (tmp_path / 'train' / 'b' / '.cache' / '0.PNG').touch()
    assert runner.images_in(['train'], tmp_path)['train'].startswith('4 files, ')


@pytest.mark.parametrize('change', [
    lambda data: (data / 'train' / 'a' / '1.png').unlink(),
    lambda data: (data / 'test' / 'a' / '0.png').write_bytes(b'another size'),
], ids=['one less', 'another'])
def test_other_images_than_it_was_begun_with(lab, change, capsys):
    """Otherwise the runs of a row would differ in their data."""
    assert lab('--models', 'A', '--seeds', 1) == 0
    recorded = json.loads((lab.output / 'A' / 'seed1' / 'run.json').read_text())['starts'][0]['images']
    assert recorded.keys() == {'train', 'test'} and recorded['train'].startswith('2 files, ')
    before = {path: path.read_bytes() for path in lab.output.rglob('*') if path.is_file()}
    change(lab.folder / 'data')
    capsys.readouterr()
    assert lab('--models', 'B', '--seeds', 2) == 2
    err = capsys.readouterr().err
    assert 'seed1 was trained on other images' in err
    assert 'name the folder used then, or another folder for the runs' in err
    for path, content in before.items():
        assert path.suffix in ('.csv', '.md', '.png') or path.read_bytes() == content


def test_notes_tell_all_epochs(lab):
    lab.plan({'A': 'test_vit_ape', 'B': {'model': 'test_vit_nope', 'epochs': 2}}, seeds=[1])
    assert lab() == 0
    assert 'recipe small, 2 or 4 epochs; after' in (lab.output / 'plan.md').read_text()


def test_places_on_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(runner, 'hardware', str)
    for name in ('CUDA_VISIBLE_DEVICES', 'CUDA_DEVICE_ORDER'):
        monkeypatch.delenv(name, raising=False)
    slots = runner.make_slots('cuda', jobs=2)
    order = {'CUDA_DEVICE_ORDER': 'PCI_BUS_ID'}
    assert [slot.env for slot in slots] == [{'CUDA_VISIBLE_DEVICES': gpu, **order} for gpu in '0101']
    assert [slot.hardware for slot in slots] == ['cuda:0', 'cuda:1'] * 2 and len({slot.name for slot in slots}) == 4
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '3,GPU-5')
    assert [slot.env for slot in runner.make_slots('cuda:0', threads=4)] == [
        {'OMP_NUM_THREADS': '4', 'CUDA_VISIBLE_DEVICES': gpu, **order} for gpu in ('3', 'GPU-5')]


def test_how_busy_gpus_are(lab, monkeypatch, capsys):
    """With a stand-in for nvidia-smi, which only knows GPU-5."""
    stand_in = lab.folder / 'bin' / 'nvidia-smi'
    stand_in.parent.mkdir()
    stand_in.write_text(
        '#!/bin/sh\n[ "$1 $2 $3" = "-i GPU-5 --query-gpu=utilization.gpu" ] || { echo no such GPU; exit 6; }\n'
        'echo 40\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv('PATH', f'{stand_in.parent}:{os.environ["PATH"]}')
    assert [runner.gpu_utilisation(gpu) for gpu in ('GPU-5', 'GPU-6')] == [40, None]
    monkeypatch.setattr(runner, 'POLL', 0.02)
    monkeypatch.setattr(runner, 'GPU_POLL', 0)  # on every check, the first of which comes before a run can end
    slots = [runner.Slot(f'place-{gpu}', 'a GPU', {'CUDA_VISIBLE_DEVICES': gpu}) for gpu in ('GPU-5', 'GPU-6')]
    monkeypatch.setattr(experiment, 'make_slots', lambda *args: slots)
    assert lab('--seeds', 1) == 0
    rows = lab.rows()
    known, = (label for label, seed in rows if rows[label, seed]['gpu_utilisation'])
    assert rows[known, 1]['gpu_utilisation'] == '40.0' and lab.line(known)[-2:] == ['40.00', '']
    assert lab.line('B' if known == 'A' else 'A')[-2:] == ['', ''] and 'GPU busy (%)' in capsys.readouterr().out
    path = lab.output / known / 'seed1' / 'run.json'
    stored = json.loads(path.read_text())
    assert stored['starts'][0]['gpu_utilisation'] == 40
    stored['starts'] = [
        {**stored['starts'][0], 'seconds': seconds, 'gpu_utilisation': used} for seconds, used in ((30, 80), (10, 40))]
    path.write_text(json.dumps(stored))
    assert records.Record.read(path.parent).gpu_utilisation == 70
    monkeypatch.setenv('PATH', '')
    assert runner.gpu_utilisation('GPU-5') is None


def test_waiting_for_images(tmp_path):
    assert records.loading_share(tmp_path) is None
    line = ('Train: {} [{:>4d}/312 ({}%)]  Loss: 1.79 (2.03)  Time: 0.057s,  562.18/s  ({}s,  467.80/s)  '
            'LR: 1.495e-03  Data: 0.000 ({})\n')
    (tmp_path / 'train.log').write_text(
        'Created AdamW\n' + line.format(0, 300, 96, 0.5, 0.1) + line.format(0, 311, 100, 0.068, 0.010)
        + 'Test: [   0/15]  Time: 0.1 (0.1)\n' + line.format(1, 311, 100, 0.05, 0.02) + line.format(2, 0, 0, 1.0, 0.9))
    assert records.loading_share(tmp_path) == 40  # the last whole epoch


def test_trained_models(lab, tmp_path):
    with pytest.raises(ValueError, match='has no finished runs'):
        experiment.trained_models(lab.output)
    assert lab('--seeds', 2) == 0 and lab('--models', 'B', '--seeds', 1) == 0
    (lab.output / 'A' / 'seed1').mkdir()
    (lab.output / 'A' / 'seed1' / 'last.pth.tar').write_bytes(b'interrupted')
    shutil.copytree(lab.output / 'A' / 'seed2', lab.output / 'A' / 'seed2_old')
    found = experiment.trained_models(lab.output)
    assert [run[:2] for run in found] == [('A', 2), ('B', 1), ('B', 2)] and all(run[2].is_file() for run in found)
    assert [run[:2] for run in experiment.trained_models(lab.output, ['B', 'A'])] == [('B', 1), ('B', 2), ('A', 2)]
    with pytest.raises(ValueError, match="no finished run of 'C'; it has A, B"):
        experiment.trained_models(lab.output, ['C'])


def test_places_on_a_cpu(monkeypatch):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(8)), raising=False)
    threads = torch.get_num_threads()
    try:
        assert len(runner.make_slots('cpu')) == 8 and len(runner.make_slots('cpu', threads=3)) == 2
        assert len(runner.make_slots('cpu', jobs=3, threads=16)) == 3 and len(runner.make_slots('cpu', threads=16)) == 1
    finally:
        torch.set_num_threads(threads)


# -- the estimate


def test_dry_run(lab, capsys):
    lab.plan({'A': 'test_vit_ape', 'B': 'test_vit_nope'}, seeds=[1, 2, 3])
    assert lab('--dry-run') == 0
    out = capsys.readouterr().out
    assert not lab.output.exists()
    found = cells(out.splitlines()[2])
    # 4 epochs of 4 steps of .5 s, and of 16 test images, 2 batches at a third: 4 * (2 + 1 / 3) = 9.3 s; and the start
    assert found[:6] == ['A', '3', '0', '', '4', '0.500']
    assert 9.3 / 60 - 0.05 <= float(found[6]) <= (9.3 + 5) / 60
    assert float(found[7]) == pytest.approx(3 * float(found[6]), abs=0.15)
    assert out.splitlines()[-1] == '0 minutes to go, 2 at a time'
    notes = lab.notes()
    assert {note[1] for note in notes} <= {'epoch-0', 'epoch-1', 'epoch-2', 'epoch-3', 'end'}

    assert lab('--seeds', 1) == 0
    capsys.readouterr()
    plan = load_plan(lab.folder / 'plan.yaml')
    for run in plan.runs[:2]:
        path = run.folder(lab.output) / 'run.json'
        stored = json.loads(path.read_text())
        stored['starts'][0]['seconds'] = 600
        path.write_text(json.dumps(stored))
    begun = next(run for run in plan.runs if run.name == 'B, seed 2')
    begun.folder(lab.output).mkdir()
    (begun.folder(lab.output) / 'config.yaml').write_text(yaml.safe_dump(begun.config))
    (begun.folder(lab.output) / 'summary.csv').write_text('epoch,train_loss\n0,2\n')
    before = lab.notes_file.read_text()
    assert lab('--dry-run') == 0
    out = capsys.readouterr().out
    assert [cells(line) for line in out.splitlines()[2:4]] == [
        ['A', '3', '1', '', '', '', '10.0', '20.0'], ['B', '3', '1', '1', '', '', '10.0', '17.5']]
    assert out.splitlines()[-1] == '20 minutes to go, 2 at a time' and lab.notes_file.read_text() == before


@pytest.mark.one_of(2)
@pytest.mark.parametrize('workers, first, steps', [(0, 3, 40), (3, 9, 40), (3, 9, 12)])
def test_steps_that_were_loaded_ahead_do_not_count(lab, workers, first, steps, capsys, monkeypatch):
    # as if batches came in groups of three
    lab.script.write_text(STAND_IN.replace('range(4)', f'range({steps})').replace('/4 (', f'/{steps} (').replace(
        '0.500s', f'{{3 * (step >= {first} and step % 3 == 2):.3f}}s'))
    seen, stop = [], trial._Trial.stop
    monkeypatch.setattr(trial._Trial, 'stop', lambda self: seen.append(len(self.steps)) or stop(self))
    lab.plan({'A': {'model': 'test_vit_ape', 'model_kwargs': {'sleep': 0.05}}}, seeds=[1], args={'workers': workers})
    assert lab('--dry-run') == 0
    assert cells(capsys.readouterr().out.splitlines()[2])[4:6] == [str(steps), '1.000']
    enough = min(steps, 12 + first * (workers > 0))
    assert enough <= seen[0] <= steps and (seen[0] < 40 or steps < 40)  # and not to the end


def test_dry_run_counts_the_images_of_each_model(lab, capsys, monkeypatch):
    number = {'test': 16_000, 'train': 160_000}
    monkeypatch.setattr(trial, 'create_dataset', lambda *args, split, **kwargs: range(number[split]))
    lab.plan({
        'A': 'test_vit_ape', 'none': {'model': 'test_vit_nope', 'val_split': ''},
        'many': {'model': 'test_vit_ape', 'val_split': 'train'}}, seeds=[1])
    assert lab('--dry-run') == 0
    # 4 evaluations of 2000 batches, of .5 s / 3 each, take 22.2 minutes
    minutes = [float(cells(line)[6]) for line in capsys.readouterr().out.splitlines()[2:5]]
    assert minutes == pytest.approx([22.4, 0.2, 222.4], abs=0.2)


def test_dry_run_finds_what_cannot_be_trained(lab, capsys):
    lab.plan({
        'A': 'test_vit_ape', 'B': {'model': 'test_vit_nope', 'model_kwargs': {'reject': 1}}}, seeds=[1])
    assert lab('--dry-run') == 1
    out, err = capsys.readouterr()
    assert "TypeError: __init__() got an unexpected keyword argument 'reject'" in out.splitlines()[3]
    assert 'cannot run some of the models' in err and not lab.output.exists()


# -- a balanced subset


@pytest.fixture
def images(tmp_path):
    for split, counts in (('train', (3, 5)), ('test', (2, 2))):
        for name, count in zip('ab', counts):
            (tmp_path / 'all' / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new('RGB', (2, 2), (i, 0, 0)).save(tmp_path / 'all' / split / name / f'{i}.png')
    return ['data', 'cifar10-subset', '--source', str(tmp_path / 'all'), '--output', str(tmp_path / 'some')]


def test_subset_of_three_splits(images, tmp_path, capsys):
    """Two numbers of images leave none for a third split."""
    shutil.copytree(tmp_path / 'all' / 'test', tmp_path / 'all' / 'val')
    assert main([*images, '--per-class', '3', '1']) == 2
    assert 'has train, test, val. --per-class is for train and one other' in capsys.readouterr().err
    assert not (tmp_path / 'some').exists()


def test_subset(images, tmp_path, capsys):
    assert main([*images, '--per-class', '3', '1']) == 0
    assert capsys.readouterr().out.splitlines() == [
        f'{tmp_path}/some/train: 6 images, 2 classes', f'{tmp_path}/some/test: 2 images, 2 classes']
    reds = {
        (folder.parent.name, folder.name): [Image.open(file).getpixel((0, 0))[0] for file in sorted(folder.iterdir())]
        for folder in (tmp_path / 'some').glob('*/*')}
    assert reds == {('test', 'a'): [0], ('test', 'b'): [0], ('train', 'a'): [0, 1, 2], ('train', 'b'): [0, 1, 2]}
    record = json.loads((tmp_path / 'some' / 'cifar10_subset.json').read_text())
    assert record == {'classes': ['a', 'b'], 'per_class': {'train': 3, 'test': 1}, 'splits': ['train', 'test']}
    assert main([*images, '--per-class', '1', '1']) == 2 and '--force' in capsys.readouterr().err
    assert main([*images, '--per-class', '1', '1', '--force']) == 0
    assert len(list((tmp_path / 'some').glob('*/*/*'))) == 4


def test_held_out_images_are_of_no_other_split(images, tmp_path, capsys):
    assert main([*images, '--per-class', '1', '1', '--held-out', '2']) == 0
    assert f'{tmp_path}/some/held_out: 4 images, 2 classes' in capsys.readouterr().out
    reds = {
        folder.parent.name: sorted(Image.open(file).getpixel((0, 0))[0] for file in folder.iterdir())
        for folder in (tmp_path / 'some').glob('*/a')}
    assert reds == {'train': [0], 'held_out': [1, 2], 'test': [0]}
    record = json.loads((tmp_path / 'some' / 'cifar10_subset.json').read_text())
    assert record['per_class'] == {'train': 1, 'test': 1, 'held_out': 2}
    assert main([*images, '--per-class', '2', '1', '--held-out', '2', '--force']) == 2
    assert "'train' has 3 images of 'a', and 4 were asked for" in capsys.readouterr().err
    assert main([*images, '--per-class', '2', '1', '--held-out', '-1', '--force']) == 2
    assert 'held_out must be 0 or more' in capsys.readouterr().err


@pytest.mark.parametrize('options, message', [
    ([], 'needs --per-class'), (['--per-class', '4', '1'], "'train' has 3 images of 'a', and 4 were asked for"),
    (['--per-class', '0', '1'], 'must be 1 or more'),
    (['--per-class', '1', '1', '--seed', '0'], '--seed is not for cifar10-subset')])
def test_wrong_subsets(images, options, message, tmp_path, capsys):
    assert main([*images, *options]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count('\n') == 1 and not (tmp_path / 'some').exists()


def test_other_classes_and_no_subset(tmp_path, images, capsys):
    assert main([images[0], 'cifar10-position', *images[2:], '--per-class', '1', '1']) == 2
    assert '--per-class is not for cifar10-position' in capsys.readouterr().err
    (tmp_path / 'all' / 'test' / 'c').mkdir()
    Image.new('RGB', (2, 2)).save(tmp_path / 'all' / 'test' / 'c' / '0.png')
    assert main([*images, '--per-class', '1', '1']) == 2
    assert "'test' has other classes" in capsys.readouterr().err


# -- ours and timm's


PLANS = sorted(path for path in CHECKOUT.glob('train_configs/*/*.yaml') if 'models' in yaml.safe_load(path.read_text()))


@pytest.mark.parametrize('path', PLANS, ids=lambda path: f'{path.parent.name}/{path.stem}')
def test_plans_of_ours(path):
    lines = (Path(__file__).parent / 'data' / 'train_py_args.txt').read_text().splitlines()
    plan = load_plan(path, dict.fromkeys(line for line in lines if not line.startswith('#')))
    assert plan.baseline == plan.labels[0] == {
        'pooling': 'APE, pooled', 'half_rate': 'APE, rate .00075',
        'half_rate_ablations': 'APE, rate .00075', 'pairs': 'APE, rate .00075', 'lape': 'RoPE-2D',
        'repository': 'APE, no LayerScale', 'long_seeds': 'APE, 4 heads',
        'long_lape': 'RoPE-2D, 4 heads', 'long_lape_seeds': 'RoPE-2D, 4 heads'}.get(path.stem, 'APE')
    for run in plan.runs[:len(plan.labels)]:
        config = run.config
        assert config['model_kwargs']['img_size'] == config['img_size']
        model = timm.create_model(  # of one layer, which is quicker
            config['model'], num_classes=config['num_classes'], global_pool=config.get('gp'),
            **{**config['model_kwargs'], 'depth': 1})
        assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_plans_are_there():
    assert {f'{path.parent.name}/{path.stem}': load_plan(path).recipe for path in PLANS} == {
        'cpu_cifar10/plan': 'cpu_cifar10', 'cpu_cifar10/ablations': 'cpu_cifar10',
        'cpu_cifar10/pooling': 'cpu_cifar10', 'cpu_cifar10/rates': 'cpu_cifar10',
        'cpu_cifar10/half_rate': 'cpu_cifar10', 'cpu_cifar10/half_rate_ablations': 'cpu_cifar10',
        'cpu_cifar10/pairs': 'cpu_cifar10', 'cpu_cifar10/lape': 'cpu_cifar10',
        'cpu_cifar10/foreground': 'cpu_cifar10',
        'cpu_cifar10/repository': 'cpu_cifar10', 'cpu_cifar10/reference': 'cpu_cifar10',
        'cpu_cifar10/long': 'cpu_cifar10', 'cpu_cifar10/long_seeds': 'cpu_cifar10',
        'cpu_cifar10/long_lape': 'cpu_cifar10', 'cpu_cifar10/long_lape_seeds': 'cpu_cifar10',
        'gpu_cifar10/plan': 'deit_cifar10', 'gpu_cifar10/paper': 'paper_cifar10',
        'gpu_cifar10/repository': 'repository_cifar10', 'gpu_cifar10/reference': 'deit_cifar10'}


def test_reference_plans_have_the_same_rows():
    """On a GPU all rows have the six heads of ViT-S, so there are none of four beside those of two."""
    small, large = (
        {run.label: run.config for run in load_plan(CHECKOUT / 'train_configs' / folder / 'reference.yaml').runs}
        for folder in ('cpu_cifar10', 'gpu_cifar10'))
    assert list(large) == [label for label in small if not label.endswith(', 4 heads')] + ['LookHere']
    for label, config in large.items():
        if label in small:
            assert config['model'].replace('small', 'tiny') == small[label]['model'], label
            for key in ('pos_enc', 'pos_enc_kwargs'):
                assert config['model_kwargs'].get(key) == small[label]['model_kwargs'].get(key), label


@pytest.mark.skipif('TIMM_SCRIPTS' not in os.environ, reason="set TIMM_SCRIPTS to the directory of timm's train.py")
def test_with_timms_train_py(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, 'POLL', 0.05)
    generator = torch.Generator().manual_seed(0)
    for split, count in (('train', 24), ('test', 8)):
        for name in 'ab':
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(256, (32, 32, 3), generator=generator, dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(tmp_path / split / name / f'{i}.png')
    recipe = yaml.safe_load((CHECKOUT / 'train_configs' / 'smoke' / 'test_vit_ape.yaml').read_text())
    recipe.update(epochs=3, num_classes=2, batch_size=8, workers=0, warmup_epochs=0)
    (tmp_path / 'recipe.yaml').write_text(yaml.safe_dump(recipe))
    (tmp_path / 'plan.yaml').write_text(yaml.safe_dump({
        'recipe': 'recipe.yaml', 'seeds': [1], 'models': {
            'APE': 'test_vit_ape', 'SaPE2': {
                'model': 'test_vit_sape2_k', 'model_kwargs': {'pos_enc_kwargs': {'sape2_k': {'preset': 'equations'}}}},
            'NaN': {'model': 'test_vit_ape', 'lr': 1e30}}}))
    output = tmp_path / 'out'
    script = Path(os.environ['TIMM_SCRIPTS']) / 'train.py'
    arguments = ['experiment', *map(str, (
        tmp_path / 'plan.yaml', '--output', output, '--data-dir', tmp_path, '--script', script, '--jobs', 1))]
    command = begin(arguments)
    summary, deadline = output / 'APE' / 'seed1' / 'summary.csv', time.time() + 120
    while not summary.exists() or not (summary.parent / 'last.pth.tar').exists():
        assert command.is_alive() and time.time() < deadline
        time.sleep(0.01)
    os.kill(command.pid, signal.SIGINT)
    command.join()
    assert command.exitcode == 130
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert main(arguments) == 1
    finally:
        signal.signal(signal.SIGTERM, handler)
    rows = {row['model']: row for row in experiment.rows_of(load_plan(tmp_path / 'plan.yaml'), output)}
    assert [rows[label]['status'] for label in ('APE', 'SaPE2', 'NaN')] == ['finished', 'finished', 'diverged']
    assert rows['APE']['starts'] == 2 and rows['APE']['epochs'] == 3 and rows['SaPE2']['starts'] == 1
    assert [line.split(',')[0] for line in summary.read_text().splitlines()] == ['epoch', '0', '1', '2']
    assert 'from epoch' not in (summary.parent / 'train.log').read_text()[:100]
    told = yaml.safe_load((output / 'SaPE2' / 'seed1' / 'args.yaml').read_text())
    assert told['model_kwargs']['pos_enc_kwargs'] == {'sape2_k': {'preset': 'equations'}}
    assert 0 <= rows['SaPE2']['top1'] <= 100 and rows['SaPE2']['top5'] == 100
