"""The command line, run as a user runs it, from a directory outside of the package."""
import contextlib
import csv
import gc
import io
import json
import os
import subprocess
import sys
import weakref
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from PIL import Image

import timm_sape
from harness import assert_near
from timm_sape import cli
from timm_sape.lab import bench, bench_naflex, bench_sape2, bench_timm
from timm_sape.cli import main, make_parser
from timm_sape.functional import sape2_attention
from timm_sape.ops.triton_limits import LIMITS

CHECKOUT = Path(__file__).parents[1]
NEEDLE = 'vit_small_sape2_k'

# Prints what a script can see of how it was started, then ends as its arguments say.
SCRIPT = f"""
import json
import sys

import neighbour  # beside the script, so importable as it is for `python SCRIPT`
import timm

seen = dict(
    argv=sys.argv,
    name=__name__,
    file=__file__,
    path=sys.path[0],
    main=sys.modules['__main__'].__dict__ is globals(),
    known=timm.is_model('{NEEDLE}'),
)
print(json.dumps(seen))
if 'raise' in sys.argv:
    raise KeyError('from the script')
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / 'scripts'
    folder.mkdir()
    folder.joinpath('neighbour.py').touch()
    folder.joinpath('show.py').write_text(SCRIPT)
    return Path('scripts', 'show.py')  # relative, as it is mostly given


def run_cli(*args, cwd, program=('-m', 'timm_sape')):
    package_dir = str(Path(timm_sape.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package_dir, os.environ.get('PYTHONPATH')]))
    return subprocess.run(
        [sys.executable, *program, *map(str, args)],
        cwd=cwd, env=dict(os.environ, PYTHONPATH=path), capture_output=True, text=True, timeout=300)


@pytest.mark.full
def test_run_is_like_calling_the_script(tmp_path, script):
    args = ['--help', '-h', '--config', 'x.yaml', '--', '-j', '-1', 'two words', '--version', 'run', '']
    done = run_cli('run', script, *args, cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout) == dict(
        argv=[str(script), *args],
        name='__main__',
        file=str(script),
        path=str((tmp_path / script).parent),
        main=True,
        known=True,
    )


@pytest.mark.full
def test_run_of_a_link(tmp_path, script):
    """Its neighbours are those of the file that it leads to."""
    tmp_path.joinpath('link.py').symlink_to(script)
    done = run_cli('run', 'link.py', cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    seen = json.loads(done.stdout)
    assert (seen['file'], seen['path']) == ('link.py', str(tmp_path / 'scripts'))


@pytest.mark.full
def test_run_lets_exceptions_through(tmp_path, script):
    done = run_cli('run', script, 'raise', cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "KeyError: 'from the script'"


def test_run_without_the_script_says_where_timms_are(tmp_path, capsys):
    assert main(['run', str(tmp_path / 'train.py'), '--help']) == 2
    out, err = capsys.readouterr()
    assert not out and err.count('\n') == 1
    assert 'there is no script' in err
    assert f'git clone --depth 1 --branch v{timm.__version__} ' in err
    assert 'huggingface/pytorch-image-models' in err


def test_run_of_a_directory(tmp_path, capsys):
    assert main(['run', str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count('\n') == 1
    assert 'is a directory' in err and str(tmp_path / 'train.py') in err


# The console script, and whether it has imported slow packages.
CONSOLE = """
import sys
from timm_sape_cli import main
try:
    sys.exit(main())
finally:
    print('imported:', *{'timm', 'torch'} & sys.modules.keys())
"""
COMMANDS = (
    'run', 'configs', 'experiment', 'list', 'bench', 'map', 'pshap', 'probe', 'sweep', 'adapt', 'shifts', 'compare',
    'data')


@pytest.mark.full
def test_a_reader_that_has_read_enough():
    command = f'{sys.executable} -m timm_sape list models "vit_tiny_rope*" | head -n 1'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith('model ') and not done.stderr


@pytest.mark.parametrize(
    'args', [[], ['walk'], ['--help'], ['--version'], *([name, '--help'] for name in COMMANDS)],
    ids=lambda args: ' '.join(args) or 'nothing')
def test_answers_without_importing_torch(args, tmp_path):
    done = run_cli(*args, cwd=tmp_path, program=('-c', CONSOLE))
    *said, imported = done.stdout.splitlines()
    assert imported == 'imported:'
    if args in ([], ['walk']):
        assert done.returncode == 2 and not said and 'usage: timm-sape' in done.stderr
        return
    assert done.returncode == 0 and not done.stderr
    versions = f'timm-sape {timm_sape.__version__}, timm {timm.__version__}, torch {version("torch")}'
    assert said == [versions] if args == ['--version'] else said[0].startswith('usage: timm-sape')


def test_console_script_is_the_program(tmp_path, script):
    """With the real package, whose models are registered, and the script's exit code."""
    assert "\ntimm-sape = 'timm_sape_cli:main'\n" in CHECKOUT.joinpath('pyproject.toml').read_text()
    done = run_cli('run', script, '--help', cwd=tmp_path, program=('-c', CONSOLE))
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout.splitlines()[0])['known']


def test_version_of_the_module(capsys):
    with pytest.raises(SystemExit, match='0'):
        main(['--version'])
    assert capsys.readouterr().out.startswith(f'timm-sape {timm_sape.__version__}, timm {timm.__version__}, torch ')


MINE = """
import neighbour
import timm_sape

@timm_sape.register_encoding({name!r})
class Mine(timm_sape.PositionEncoding):
    'Encoding of my own.'
"""


@pytest.fixture
def modules(tmp_path):
    """Two modules that register an encoding, one here and one in a folder, each next to a module that it imports."""
    for folder, name in ((tmp_path, 'mine_here'), (tmp_path / 'sub', 'mine_there')):
        folder.mkdir(exist_ok=True)
        folder.joinpath(f'{name}.py').write_text(MINE.format(name=name))
        folder.joinpath('neighbour.py').touch()
    return tmp_path


@pytest.mark.parametrize('program', [
    pytest.param(('-m', 'timm_sape'), id='module'), pytest.param(('-c', CONSOLE), id='script', marks=pytest.mark.full)])
def test_import(modules, program):
    """By name and by file, before and after the subcommand, with both ways of starting the program."""
    options = ['list', 'mine*', '--import', 'sub/mine_there.py']
    done = run_cli('--import', 'mine_here', *options, cwd=modules, program=program)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line[:30] for line in lines[1:3]] == ['mine_here   Encoding of my own', 'mine_there  Encoding of my own']


@pytest.mark.full
def test_import_in_other_commands(modules):
    Image.new('RGB', (32, 32)).save(modules / 'image.png')
    probe = ['probe', 'test_vit_nope', '--pos-enc', 'ape+mine_here', '--img-size', '32', '--image', 'image.png']
    done = run_cli(*probe, cwd=modules)
    assert done.returncode == 2 and '--import MODULE' in done.stderr.splitlines()[-1]
    done = run_cli(*probe, '--import', 'mine_here.py', cwd=modules)
    assert '| ape+mine_here |' in done.stdout, done.stderr

    modules.joinpath('build.py').write_text(
        'import sys, timm\nprint(sys.argv[1:], timm.create_model("test_vit_nope", pos_enc=sys.argv[2]).pos_enc)')
    done = run_cli('run', '--import', 'mine_here', 'build.py', '--import', 'ape+mine_here', cwd=modules)
    assert done.stdout == "['--import', 'ape+mine_here'] ape+mine_here\n", done.stderr


@pytest.mark.parametrize('module, message', [
    ('no_such_module', 'there is no such module in {cwd} or among the installed ones; give the path of its file'),
    ('nowhere/mine.py', 'there is no such file'),
    ('a' * 300 + '.py', 'there is no such file'),
    ('raises_here.py', '{cwd}/raises_here.py, line 2, ZeroDivisionError: division by zero'),
    ('wrong_here', 'SyntaxError: '),
    ('lacks_here.py', "{cwd}/lacks_here.py, line 1, ModuleNotFoundError: No module named 'no_such_thing'"),
    ('taken_here.py', "/taken_here.py, line 2, ValueError: Encoding 'ape' is already registered, by timm_sape."),
    ('json.py', 'json is the name of another module too, '),
])
def test_import_says_what_is_wrong(module, message, tmp_path, monkeypatch, capsys):
    files = {
        'raises_here': 'x = 1\nx / 0',
        'wrong_here': 'def',
        'lacks_here': 'import no_such_thing',
        'taken_here': "import timm_sape\ntimm_sape.register_encoding('ape')(timm_sape.PositionEncoding)",
        'json': '',
    }
    for name, text in files.items():
        tmp_path.joinpath(f'{name}.py').write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', list(sys.path))
    assert main(['--import', module, 'list']) == 2
    out, err = capsys.readouterr()
    assert not out and err.count('\n') == 1
    assert err.startswith(f'timm-sape: --import {module}: ') and message.format(cwd=tmp_path) in err


def test_import_hides_no_installed_module(tmp_path, monkeypatch):
    """By a file of the same name beside the module, as `python FILE` would."""
    tmp_path.joinpath('imports_one.py').write_text('import tabnanny\ntabnanny.check')
    tmp_path.joinpath('tabnanny.py').touch()
    monkeypatch.setattr(sys, 'path', list(sys.path))
    monkeypatch.delitem(sys.modules, 'tabnanny', raising=False)
    assert main(['--import', str(tmp_path / 'imports_one.py'), 'list', 'rope2d']) == 0


def test_import_does_not_reach_experiments(capsys):
    assert main(['experiment', 'plan.yaml', '--output', 'x', '--import', 'sub/mine.py']) == 2
    assert 'write `args: {device_modules: [timm_sape, mine]}` in the plan' in capsys.readouterr().err


def recipe_texts(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob('*') if p.suffix in ('.md', '.yaml')}


@pytest.mark.parametrize('args', [
    ['sweep', 'model', '--data-dir', 'data', '--sizes', '32', '--sizes', '48'],
    ['experiment', 'plan.yaml', '--output', 'a', '--seeds', '1', '--seeds', '1'],
    ['map', 'model', '--image', 'a.png', '--img-size', '32', '--img-size', '48', '--output', 'map.png'],
])
def test_a_list_that_is_given_twice(args, capsys):
    with pytest.raises(SystemExit) as e:
        main(args)
    assert e.value.code == 2 and 'given twice; give it once, with all values' in capsys.readouterr().err
    parser = make_parser()
    for _ in range(2):  # the last value of another option counts, as with argparse
        assert parser.parse_args(['probe', 'a', 'b', '--image', 'a.png', '--image=b.png']).image == 'b.png'


def test_output_to_something_else_than_a_file():
    """As in a notebook."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(['list', 'rope2d']) == 0
    assert 'rope2d' in out.getvalue()


@pytest.mark.full
def test_output_that_a_terminal_cannot_show(tmp_path, monkeypatch):
    monkeypatch.setenv('PYTHONIOENCODING', 'ascii')
    done = run_cli('configs', 'grün', cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith('gr\\xfcn/'), done.stderr


def test_output_in_the_home_folder(monkeypatch):
    monkeypatch.setenv('HOME', '/home/user')
    args = make_parser().parse_args(['probe', 'model', '--image', 'a.png', '--output=~/table.csv'])
    assert args.output == Path('/home/user/table.csv')
    args = make_parser().parse_args(['probe', 'model', '--image', 'a.png', '--output', '~nobody-here.csv'])
    assert args.output == Path('~nobody-here.csv')


def test_configs_writes_all_recipes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    target = Path('new', 'place')
    assert main(['configs', str(target)]) == 0
    texts = recipe_texts(target)
    assert texts == recipe_texts(CHECKOUT / 'train_configs')
    assert f'model: {NEEDLE}\n' in texts[f'paper_cifar10/{NEEDLE}.yaml']
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(str(target / name) for name in texts)


def test_configs_overwrites_nothing_unless_forced(tmp_path, capsys):
    mine = tmp_path / 'smoke' / 'test_vit_ape.yaml'
    mine.parent.mkdir()
    mine.write_text('mine')
    other = tmp_path / 'notes.txt'
    other.write_text('keep')

    assert main(['configs', str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert not out and str(mine) in err and '--force' in err
    assert recipe_texts(tmp_path) == {'smoke/test_vit_ape.yaml': 'mine'}

    assert main(['configs', str(tmp_path), '--force']) == 0
    assert recipe_texts(tmp_path) == recipe_texts(CHECKOUT / 'train_configs')
    assert other.read_text() == 'keep'
    assert not list(tmp_path.glob('.*'))  # no temporary directory is left

    capsys.readouterr()
    assert main(['configs', str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith(f', and {len(recipe_texts(tmp_path)) - 5} more\n')


def test_configs_interrupted(tmp_path, monkeypatch):
    (tmp_path / 'smoke').mkdir()
    copied = []

    def interrupted(source, path):
        copied.append(path)
        path.write_text('half')
        if len(copied) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr('shutil.copyfile', interrupted)
    assert main(['configs', str(tmp_path)]) == 130
    assert len(copied) == 3 and not [path for path in tmp_path.rglob('*') if not path.is_dir()]
    assert not list(tmp_path.rglob('.*'))


def test_configs_into_a_file(tmp_path, capsys):
    target = tmp_path / 'file'
    target.touch()
    assert main(['configs', str(target)]) == 2
    assert 'cannot write' in capsys.readouterr().err


@pytest.mark.parametrize('args', [[], ['run'], ['configs'], ['bench']], ids=lambda args: ' '.join(args) or 'nothing')
def test_help(args, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([*args, '--help'])
    assert exit_info.value.code == 0
    assert 'timm-sape' in capsys.readouterr().out


@pytest.mark.parametrize(
    'args', [[], ['run'], ['configs'], ['walk'], ['bench', 'walk']], ids=lambda args: ' '.join(args) or 'nothing')
def test_wrong_usage(args, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(args)
    assert exit_info.value.code == 2
    assert 'usage: timm-sape' in capsys.readouterr().err


COMMANDS_WITHOUT_SCIPY = """
import sys

sys.modules['scipy'] = None  # as if it were not installed
import timm_sape
from timm_sape.cli import main

timm_sape.graft('test_vit', 'sape2_k')
for command in (
        ['experiment', 'plan.yaml', '--output', 'x'], ['compare', 'x', '--data-dir', 'x'],
        ['sweep', 'x', '--sizes', '32', '--data-dir', 'x'], ['shifts', 'x', '--by', '1', '--data-dir', 'x'],
        ['adapt', 'x', '--sizes', '32', '--data-dir', 'x'], ['bench', '--settings']):
    print(main(command))
"""


@pytest.mark.full
def test_commands_without_scipy(tmp_path):
    """They say what to install. Commands that need no statistics work."""
    done = subprocess.run(
        [sys.executable, '-c', COMMANDS_WITHOUT_SCIPY], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ['2'] * 6
    needs = 'timm-sape: this needs scipy, which is not installed: pip install matplotlib pyyaml scipy'
    assert done.stderr.splitlines() == 5 * [needs] + [
        'timm-sape: nothing to measure; give --settings at least one']


def test_a_package_that_is_missing_but_not_optional():
    """No advice to install others hides it."""
    def handler(args):
        raise ModuleNotFoundError("No module named 'inner'", name='inner')

    with pytest.raises(ModuleNotFoundError):
        cli.files.interruptible(handler)(None)


SMALL = ['--repeats', '1', '--batch-size', '2', '--model', 'test_vit_pos_enc']


def read_csv(path):
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert {'torch' in row['notes'] for row in rows} == {True}
    return rows


@pytest.mark.full
def test_bench_sape2(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_sape2, 'SIZES', {16: (1, 2), 36: (1, 1)})
    assert main([
        'bench', 'sape2', *SMALL, '--settings', '32/4', '--backends', 'reference', 'torch',
        '--output', str(tmp_path / 'cost.csv'), '--plot', str(tmp_path / 'memory.svg')]) == 0
    rows = read_csv(tmp_path / 'cost.csv')
    assert [(row['n'], row['backend']) for row in rows] == [
        (n, name) for n in ('16', '36') for name in ('plain', 'appendix', 'reference', 'torch')]
    for row in rows:
        assert float(row['forward_vs_plain']) > 0 and float(row['both_vs_appendix']) > 0
        assert row['backend'] == 'plain' or float(row['error']) < 1e-4
    saved = {row['backend']: float(row['saved_mb']) for row in rows if row['n'] == '36'}
    assert saved['torch'] < saved['reference'] < saved['appendix']
    models = read_csv(tmp_path / 'cost-models.csv')
    assert [(row['pos_enc'], row['backend']) for row in models] == [
        ('ape+sape2_k', 'reference'), ('ape+sape2_k', 'torch'), ('ape+sape2sq_k', '')]
    saved = [float(row['saved_ratio']) for row in models]
    assert saved[0] > saved[2] > saved[1] > 0.9  # which store everything, further channels, nothing
    assert '| ape+sape2_k | torch |' in capsys.readouterr().out
    assert 'appendix' in (tmp_path / 'memory.svg').read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ['cost-models.csv', 'cost.csv', 'memory.svg']


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason='with a GPU the Triton kernels do not run on the CPU')
def test_bench_keeps_what_was_measured(tmp_path, capsys, monkeypatch):
    """If a model runs out of memory, earlier results are kept. A size too large for one backend does not end others."""
    def measure(*args, original=bench_sape2.bench_encodings, **kwargs):
        if os.environ.get('TIMM_SAPE_BACKEND') == 'triton':
            raise torch.OutOfMemoryError
        return original(*args, **kwargs)

    monkeypatch.setattr(bench_sape2, 'SIZES', {16: (1, 1)})
    monkeypatch.setattr(bench_sape2, 'bench_encodings', measure)
    monkeypatch.setitem(LIMITS, 32, (64, 3))
    with pytest.raises(torch.OutOfMemoryError):
        main([
            'bench', 'sape2', *SMALL, '--settings', '32/4', '--backends', 'torch', 'triton',
            '--output', str(tmp_path / 'cost.csv')])
    assert [row['backend'] for row in read_csv(tmp_path / 'cost.csv')] == ['plain', 'appendix', 'torch']
    assert 'N=16    triton     left out: ' in capsys.readouterr().err
    assert [row['backend'] for row in read_csv(tmp_path / 'cost-models.csv')] == ['torch']


def test_batches_on_a_gpu():
    """CPUs keep the batch size of committed figures. On GPUs it is larger, but leaves enough memory for Appendix D."""
    for n, (batch, heads) in bench_sape2.SIZES.items():
        assert bench_sape2.batch_and_heads(n, torch.device('cpu')) == (batch, heads)
        more, same = bench_sape2.batch_and_heads(n, torch.device('cuda'))
        assert batch < more <= 32 * batch and same == heads and more * heads * n ** 2 * 80 <= 2 ** 34


@pytest.mark.parametrize('amp', [False, True])
def test_models_are_checked_as_they_are_timed(amp, monkeypatch):
    """Under autocast, too, if they are timed like that. And without cuDNN's tf32, which would look like our error."""
    seen = []

    def create(*args, original=bench._create):
        model = original(*args)
        model.register_forward_pre_hook(
            lambda *_: seen.append((torch.is_autocast_enabled('cpu'), torch.backends.cudnn.allow_tf32)))
        return model

    monkeypatch.setattr(bench, '_create', create)
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', True)
    args = 'ape', '32/4', torch.device('cpu'), 'test_vit_pos_enc', amp
    error = bench._check(*args)
    assert (1e-3 < error < 5e-2) if amp else error < 1e-5
    assert {enabled for enabled, _ in seen} == {False, amp} and not any(tf32 for _, tf32 in seen)
    assert torch.backends.cudnn.allow_tf32
    monkeypatch.setitem(bench.TOLERANCE, amp, 0)
    with pytest.raises(RuntimeError, match='autocast is off by' if amp else '32/4 is off by'):
        bench._check(*args)


def test_bench_encodings(tmp_path, capsys):
    output = tmp_path / 'cost.json'
    assert main(['bench', *SMALL, '--settings', '32/4', '--pos-enc', 'rope2d', 'cope', '--output', str(output)]) == 0
    found = json.loads(output.read_text())
    nope, cope = (
        sum(p.numel() for p in timm.create_model(name, img_size=32, patch_size=4).parameters())
        for name in ('test_vit_nope', 'test_vit_cope'))
    assert [(row['pos_enc'], row['params_added']) for row in found['rows']] == [('rope2d', 0), ('cope', cope - nope)]
    assert all(row['error'] < 1e-3 and row['forward_ratio'] > 0 and row['step_s'] > 0 for row in found['rows'])
    out = capsys.readouterr().out
    assert '| encoding | 32/4: parameters |' in out and '| `rope2d` | 0 |' in out and found['notes'] in out


def test_ratios_of_bench(monkeypatch):
    """More than 1 where ours takes longer, or more memory."""
    monkeypatch.setattr(bench, 'timed', lambda run, device: run())
    monkeypatch.setattr(bench, 'peak_megabytes', lambda run, device: 100 * run())
    ours, theirs = (SimpleNamespace(device=None, forward=lambda s=s: s, step=lambda s=s: 2 * s) for s in (3., 2.))
    assert bench.compare(ours, theirs, 3) == {
        'forward_s': 3, 'forward_ratio': 1.5, 'step_s': 6, 'step_ratio': 1.5, 'step_peak_mb': 600,
        'step_peak_ratio': 1.5}
    nothing = dict.fromkeys(('forward_ratio', 'step_ratio', 'step_peak_ratio'))
    monkeypatch.setattr(bench, 'compare', lambda *args: nothing)
    monkeypatch.setattr(bench.Runner, 'saved_bytes', lambda self: 300 if self.model.pos_enc == 'rope2d' else 200)
    row, = bench.bench_encodings(['rope2d'], ['32/4'], batch_size=1, model='test_vit_pos_enc')
    assert row['saved_ratio'] == 1.5


def test_ratios_of_bench_naflex(monkeypatch):
    def measured(step, device):
        if len(step.inputs) > 1:
            return 6.
        return 3. if isinstance(step.model, timm_sape.NaFlexVitPosEnc) else 2.

    monkeypatch.setattr(bench_naflex, 'timed', measured)
    monkeypatch.setattr(bench_naflex, 'peak_megabytes', measured)
    row, = bench_naflex.bench_naflex(['rope2d'], 'cpu', 1, size='test_vit')
    assert (row['step_s'], row['to_timm'], row['to_one_by_one'], row['peak_to_timm']) == (3, 1.5, 0.5, 1.5)


@pytest.mark.full
def test_bench_timm(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_timm, 'MODELS', ('test_vit', 'test_vit_relpos'))
    output = tmp_path / 'timm.csv'
    args = ['bench', 'timm', '--repeats', '1', '--batch-size', '2']
    assert main([*args, '--output', str(output)]) == 0
    rows = read_csv(output)
    assert [(row['timm'], row['pos_enc']) for row in rows] == [('test_vit', 'ape'), ('test_vit_relpos', 'cpb')]
    assert all(float(row['error']) < 1e-5 and float(row['step_ratio']) > 0 for row in rows)
    # a wrong model is seen: its attention has a bias
    monkeypatch.setattr(bench_timm, 'graft', lambda base, _: timm_sape.graft(base, 'alibi2d', {'alibi2d': {'init': 1}}))
    with pytest.raises(RuntimeError, match='test_vit: the logits of our model are off by'):
        main(args)


def test_saved_bytes_keeps_nothing():
    """Hooks must not return the tensor: nodes that save their output, such as exp, would then refer to themselves."""
    kept = []

    def function():
        x = torch.ones(1000, requires_grad=True)
        kept.append(weakref.ref(x))
        return (2 * x).exp().exp()

    assert bench.saved_bytes(function, []) == 2 * 4000
    gc.collect()
    assert kept[0]() is None


@pytest.mark.parametrize('args, taken, measured', [
    (['--pos-enc', 'nope'], 'cost.csv', 'timm_sape.lab.bench.bench_encodings'),
    (['timm'], 'cost.csv', 'timm_sape.lab.bench_timm.bench_timm'),
    (['sape2'], 'cost.csv', 'timm_sape.lab.bench_sape2.bench_operator'),
    (['sape2'], 'cost-models.csv', 'timm_sape.lab.bench_sape2.bench_operator'),
    (['sape2', '--plot', 'memory.png'], 'memory.png', 'timm_sape.lab.bench_sape2.bench_operator'),
])
def test_bench_overwrites_nothing_unless_forced(args, taken, measured, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(taken).write_text('mine')
    started = []

    def interrupted(*args, **kwargs):
        started.append(True)
        raise KeyboardInterrupt

    monkeypatch.setattr(measured, interrupted)
    assert main(['bench', *args, '--output', 'cost.csv']) == 2
    assert capsys.readouterr().err == f'timm-sape: nothing written; --force overwrites what is there: {taken}\n'
    assert not started  # the message comes before the work
    assert main(['bench', *args, '--output', 'cost.csv', '--force']) == 130
    assert started and [path.name for path in Path().iterdir()] == [taken] and Path(taken).read_text() == 'mine'


def test_bench_interrupted_while_it_writes(tmp_path, monkeypatch):
    def interrupted(rows, path, notes):
        path.write_text('half')
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('timm_sape.lab.tables.write_csv', interrupted)
    args = ['bench', 'sape2', *SMALL, '--sizes', '--settings', '32/4', '--backends', 'torch', '--output', 'cost.csv']
    Path('cost-models.csv').write_text('mine')
    assert main([*args, '--force']) == 130
    assert [path.name for path in Path().iterdir()] == ['cost-models.csv']
    assert Path('cost-models.csv').read_text() == 'mine'


@pytest.mark.parametrize('size', [(3, 5), (4, 4), (1, 7)])
def test_appendix_d_is_our_attention(size):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, size[0] * size[1], 8, generator=generator, dtype=torch.float64)
    tables = [torch.randn(n + 1, 8, generator=generator, dtype=torch.float64) for n in (size[1], size[0])]
    expected = sape2_attention(q, k, v, *tables, size, backend='reference')
    assert_near(bench_sape2.appendix_attention(q, k, v, *tables, size), expected, 1e-6)


@pytest.mark.parametrize('args, text', [
    (['sape2', '--sizes', '65'], 'unknown size 65; choose from 64, 196'),
    (['sape2', '--backends', 'fast'], "unknown backend 'fast'; choose from reference, torch, cpp, triton"),
    (['sape2', '--pos-enc', 'ape'], '--pos-enc is not for `timm-sape bench sape2`; leave it out'),
    (['sape2', '--settings', '--batch-size', '4'], '--batch-size is for whole models, which --settings chooses'),
    (['naflex', '--batch-size', '9', '--plot', 'x.png'], '--plot, --batch-size are not for `timm-sape bench naflex`'),
    (['naflex', '--model', 'vit_small_rope2d'], 'measured; choose from test_vit_pos_enc, vit_base_pos_enc,'),
    (['timm', '--pos-enc', 'ape'], '--pos-enc is not for'),
    (['timm', '--model', 'test_vit_pos_enc'], '--model is not for'),
    (['sape2', '--plot', 'memory.png'], 'memory.png needs matplotlib'),
    (['sape2', '--plot', 'memory.csv'], 'memory.csv must end in .png'),
    (['sape2', '--plot', 'memory.svg', '--sizes'], 'nothing to plot; give --sizes at least one'),
    (['sape2', '--sizes', '--settings'], 'nothing to measure; give --sizes at least one'),
    (['--settings'], 'nothing to measure; give --settings at least one'),
    (['--sizes', '64'], '--sizes is not for'),
    (['--settings', '31/4'], "unknown setting '31/4'"),
    (['--repeats', '0'], 'must be at least 1'),
    (['--batch-size', '0'], 'must be at least 1'),
    (['--model', 'resnet18'], '--model resnet18: it is none of those that can be measured; see `timm-sape list models'),
    (['--model', 'test_vit_pos*'], '--model test_vit_pos*: it is none of those that can be measured'),
    (['--pos-enc', 'lookhere', '--model', 'vit_tiny_pos_enc', '--settings', '32/4'], "'lookhere' needs 6 heads"),
    (['--pos-enc', 'rope9d'], 'rope9d'),
    (['--output', 'nowhere/cost.csv'], 'there is no directory'),
])
def test_bench_says_what_is_wrong(args, text, capsys, monkeypatch):
    monkeypatch.setattr(cli.files, 'find_spec', lambda name: None)
    assert main(['bench', *args]) == 2
    assert text in capsys.readouterr().err
