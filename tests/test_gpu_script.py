""".ci/gpu: its commands exist, its checks run on a CPU in small, and it goes on where it stopped."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from example_tools import load_script
from timm_sape.cli import make_parser

ROOT = Path(__file__).parents[1]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setenv('TIMM_SCRIPTS', '/scripts')
    monkeypatch.setenv('CIFAR10', '/cifar10')
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    module = load_script(ROOT / '.ci' / 'gpu.py')
    monkeypatch.setattr(module, 'machine', lambda: 'GPU, versions, commit')
    return module


def call(gpu, monkeypatch, *args):
    monkeypatch.setattr(sys, 'argv', ['gpu', *map(str, args)])
    with pytest.raises(SystemExit) as e:
        gpu.main()
    return e.value.code


def test_commands(gpu, tmp_path, monkeypatch, capsys):
    """Files that the commands name exist, and `timm-sape` knows the options."""
    assert not call(gpu, monkeypatch, tmp_path / 'out', '--dry-run')
    commands = capsys.readouterr().out.splitlines()
    assert len(commands) == 28
    for command in commands:
        for file in re.findall(r'(?:tests|train_configs|examples|\.ci)/[\w./]+', command):
            assert (ROOT / file).is_file(), command
        _, _, ours = command.partition(' -m timm_sape ')
        if ours and not ours.startswith('run '):
            make_parser().parse_args(ours.split())


def test_goes_on_where_it_stopped(gpu, tmp_path, monkeypatch, capsys):
    out = tmp_path / 'out'
    repaired = tmp_path / 'repaired'
    monkeypatch.setattr(gpu, 'stages', lambda out: {
        'contact': [('once', 'echo once', 1)],
        'tests': [('broken', f'echo why; ls {repaired}', 1), ('slow', 'sleep 60', 1), ('later', 'true', 30)]})
    assert call(gpu, monkeypatch, out, 'contact', '--minutes', '0.05', 'tests') == 'Failed: broken, slow'
    printed = capsys.readouterr().out
    assert re.search('once +ok', printed) and re.search(r'broken +FAILED \(2\)', printed) and 'why' in printed
    assert re.search(r'slow +FAILED \(out of time\)', printed) and 'Left for the next call: later' in printed

    repaired.touch()
    monkeypatch.setattr(gpu, 'stages', lambda out: {
        'contact': [('once', 'false', 1)],
        'tests': [('broken', f'ls {repaired}', 1), ('slow', 'true', 1), ('later', 'true', 30)]})
    assert not call(gpu, monkeypatch, out)
    printed = capsys.readouterr().out
    assert re.search('once +done before', printed) and printed.count(' ok, ') == 3

    monkeypatch.setattr(gpu, 'machine', lambda: 'another GPU')
    assert call(gpu, monkeypatch, out) == 'Failed: once'
    assert capsys.readouterr().out.count(' ok, ') == 3


def test_status_says_what_is_left(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, 'stages', lambda out: {'tests': [('soon', 'true', 1), ('later', 'true', 30)], 'epoch': []})
    assert call(gpu, monkeypatch, tmp_path / 'out', '--minutes', '0.05') == 75
    assert 'Left for the next call: later' in capsys.readouterr().out
    monkeypatch.delenv('CIFAR10')
    assert call(gpu, monkeypatch, tmp_path / 'out', 'epoch') == 2
    assert 'epoch: set TIMM_SCRIPTS and CIFAR10' in capsys.readouterr().err


@pytest.mark.full
def test_nothing_without_a_gpu(gpu, tmp_path, monkeypatch):
    """The tests would pass, with kernels that are interpreted."""
    monkeypatch.undo()
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    assert 'nothing was tried' in call(gpu, monkeypatch, tmp_path / 'out', 'tests')
    assert not list((tmp_path / 'out').glob('*.ok'))


def test_a_step_that_hangs_leaves_time_for_others(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, 'stages', lambda out: {'tests': [('hangs', 'sleep 60', .1), ('later', 'true', 1)]})
    assert call(gpu, monkeypatch, tmp_path / 'out', '--minutes', '1') == 'Failed: hangs'
    assert re.search('later +ok', capsys.readouterr().out)


@pytest.mark.full
def test_a_step_without_time_left_ends_what_it_started(gpu, tmp_path, monkeypatch):
    """Trainings have sessions of their own. They would keep the GPU if the experiment had no chance to end them."""
    begun, ended = tmp_path / 'begun', tmp_path / 'ended'
    (tmp_path / 'step.py').write_text(
        'import signal, sys, time\n'
        f'signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(open({str(ended)!r}, "w").close())))\n'
        f'open({str(begun)!r}, "w").close()\n'
        'time.sleep(60)\n')
    monkeypatch.setattr(gpu, 'stages', lambda out: {
        'plans': [('trains', f'{sys.executable} {tmp_path}/step.py; true', 1)]})
    monkeypatch.setenv('TIMM_SCRIPTS', 'x')
    monkeypatch.setenv('CIFAR10', 'x')
    assert call(gpu, monkeypatch, tmp_path / 'out', '--minutes', '1') == 'Failed: trains'
    assert begun.exists() and ended.exists()


def test_nothing_more_where_the_first_kernel_fails(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, 'stages', lambda out: {'contact': [('first', 'false', 1), ('contact', 'true', 1)]})
    assert 'nothing else was tried' in call(gpu, monkeypatch, tmp_path / 'out')
    assert not list((tmp_path / 'out').glob('*.ok'))
    assert call(gpu, monkeypatch, tmp_path / 'out', 'unknown') == 2


@pytest.mark.full
@pytest.mark.parametrize('check', ['versions', 'contact', 'graphs', 'tiles', 'steps', 'profile'])
def test_checks(check, tmp_path):
    """On a CPU the kernels are interpreted, and what wants a GPU is left out."""
    path = [] if check not in ('graphs', 'tiles', 'steps') else ['--output', str(tmp_path / 'rows.csv')]
    done = subprocess.run(
        [sys.executable, '.ci/gpu_checks.py', check, '--device', 'cpu', *path],
        capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {'graphs': 2, 'tiles': 8, 'steps': 9}
    assert not path or len((tmp_path / 'rows.csv').read_text().splitlines()) == 1 + rows[check]
