"""The quick start, run like a user does but shorter, writes the promised files, and its figures are right."""
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image

import timm_sape
from example_tools import load_script

SCRIPT = Path(__file__).parent.parent / 'examples' / 'quickstart.py'
NUMBER = r'-?\d+\.\d+'


@pytest.fixture(scope='module')
def quickstart():
    return load_script(SCRIPT)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """The output of the script, and the folder that it was started in."""
    folder = tmp_path_factory.mktemp('quickstart')
    (folder / 'out').mkdir()
    (folder / 'out' / 'mine.txt').write_text('of the user')
    command = [sys.executable, str(SCRIPT), '--epochs', '1', '--seeds', '1', '--output', 'out']
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, encoding='utf-8', timeout=300)
    assert done.returncode == 0, done.stderr
    return done, folder


def rows(text):
    """Rows of the Markdown tables: from names to means and the values of all seeds."""
    found = re.findall(rf'^\| ([^|]+) \| ({NUMBER})(?: ± {NUMBER})? \| ([^|]+) \|$', text, flags=re.MULTILINE)
    return {name: (float(mean), [float(v) for v in values.split(', ')]) for name, mean, values in found}


@pytest.mark.full
def test_tables(run):
    table = rows(run[0].stdout)
    assert len(table) == 7
    for name in ('no position', 'APE', 'SaPE2(K)+APE'):
        mean, seeds = table[name]
        assert seeds == [mean] and 0 < mean <= 100
    for name in ('SaPE2 bias, trained', 'SaPE2 bias, untrained'):
        mean, seeds = table[name]
        assert seeds == [mean] and 0 <= mean <= 1
    # These two do not depend on training. The first is nearly the definition of ink, the second hardly beats chance.
    assert 0.9 < table['difference of the pixels'][0] < 1
    assert 0.5 < table['distance on the grid'][0] < 0.8


@pytest.mark.full
def test_progress_and_files(run):
    done, folder = run
    assert '3/3' in done.stderr and 'SaPE2(K)+APE, seed 0' in done.stderr and 'loss=' in done.stderr
    named = re.findall(r'^(out\S+): ', done.stdout, flags=re.MULTILINE)
    assert len(named) == 3 and all((folder / path).exists() for path in named)
    assert (folder / 'out' / 'mine.txt').read_text() == 'of the user'


@pytest.mark.full
def test_picture(run):
    picture = np.asarray(Image.open(run[1] / 'out' / 'figure4.png').convert('RGB')).astype(int)
    assert min(picture.shape[:2]) >= 600
    red, green, blue = picture[..., 0], picture[..., 1], picture[..., 2]
    is_green = (green > red + 20) & (green > blue + 20)
    assert is_green.mean() > 0.05 and len(np.unique(picture[is_green], axis=0)) > 100  # maps with many shades
    is_red, is_blue = (red > 200) & (green < 50) & (blue < 50), (blue > 200) & (green < 50) & (red < 50)
    assert is_red.sum() > 500 and is_blue.sum() > 500  # the two patches are marked


@pytest.mark.full
def test_checkpoint(run, quickstart, monkeypatch):
    """Another process loads the model in two ways. Both give the same logits, and the accuracy in the table."""
    done, folder = run
    monkeypatch.chdir(folder)
    command = re.search(r'timm\.create_model\("(local-dir:\S+)", pretrained=True\)', done.stdout)
    model = timm.create_model(command[1], pretrained=True)
    assert isinstance(model, timm_sape.VisionTransformerPosEnc) and model.pos_enc == 'ape+sape2_k'
    last = timm.create_model(
        quickstart.SAPE2, checkpoint_path=f'out/training/{quickstart.SAPE2}/seed0/last.pth.tar', **quickstart.SIZE)

    digits = quickstart.load_digits()
    _, images, _, labels = quickstart.train_test_split(
        digits.images, digits.target, test_size=500, stratify=digits.target, random_state=0)
    data = timm.data.resolve_model_data_config(model)
    assert data['input_size'] == (1, 8, 8) and tuple(data['mean']) == (0.5,)
    inputs, labels = next(iter(quickstart.make_loader(images, labels, batch_size=500)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the script
    try:
        logits, again = quickstart.predict(model, inputs), quickstart.predict(last, inputs)
    finally:
        torch.set_num_threads(threads)
    assert logits.shape == (500, 10) and logits.std() > 0
    assert torch.equal(logits, again)
    top1 = (logits.argmax(dim=1) == labels).float().mean().item() * 100
    assert top1 == pytest.approx(rows(done.stdout)['SaPE2(K)+APE'][0], abs=0.051)


def test_training(quickstart, tmp_path, monkeypatch):
    """Each step is of one batch, at a rate that rises for a tenth of the epochs, and then falls."""
    model, rates = torch.nn.Linear(4, 3), []
    loader = [(torch.randn(n, 4), torch.randint(3, (n,))) for n in (5, 2)]

    def check(optimizer, args, kwargs):
        images, labels = loader[len(rates) % 2]
        expected = torch.autograd.grad(F.cross_entropy(model(images), labels), list(model.parameters()))
        torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))
        rates.append(optimizer.param_groups[0]['lr'])

    def create(*args, **kwargs):
        optimizer = create_optimizer(*args, **kwargs)
        optimizer.register_step_pre_hook(check)
        return optimizer

    create_optimizer = quickstart.create_optimizer_v2
    monkeypatch.setattr(quickstart, 'create_optimizer_v2', create)
    quickstart.train(model.eval(), loader, 10, tmp_path, mock.Mock())
    assert model.training and len(rates) == 20
    assert rates[0] < rates[1] < rates[2] and rates[2:] == sorted(rates[2:], reverse=True) and rates[-1] < rates[2] / 20


def test_position_bias_is_what_the_model_adds(quickstart, monkeypatch):
    monkeypatch.setenv('TIMM_SAPE_BACKEND', 'reference')  # the other backends never compute the bias itself
    model = timm.create_model(quickstart.SAPE2, **quickstart.SIZE).eval()
    added = []
    for encoding in model.position_encodings().values():
        if encoding.overrides('content_bias'):
            torch.nn.init.normal_(encoding.table_x)
            torch.nn.init.normal_(encoding.table_y)
    bias = timm_sape.ops.sape2._bias
    monkeypatch.setattr(timm_sape.ops.sape2, '_bias', lambda *args: added.append(bias(*args)) or added[-1])
    inputs = torch.rand(2, 1, 8, 8)
    before = quickstart.predict(model, inputs)
    expected = torch.stack(added).mean(dim=(0, 2)).numpy()
    assert expected.shape == (2, 64, 64) and expected.max() > 1
    np.testing.assert_array_equal(quickstart.position_bias(model, inputs), expected)
    assert not any(block.attn._forward_hooks for block in model.blocks)
    assert torch.equal(quickstart.predict(model, inputs), before)


def test_ink_auroc(quickstart):
    ink = np.array([[True, True, True, False, False]])
    near = np.array([0., 1., 2., 3., 4.])  # seen from patch 0
    distance = np.stack([near, *np.full((4, 5), 9.)])[None]
    assert quickstart.ink_auroc(distance, ink, [0]) == 1
    assert quickstart.ink_auroc(-distance, ink, [0]) == 0
    half = distance.copy()
    half[0, 0, 1:] = 5, 3, 4, 4  # the nearest patch is the patch itself, which does not count
    assert quickstart.ink_auroc(half, ink, [0]) == 0.5
    both = np.concatenate([distance, half]), np.concatenate([ink, ink])
    assert quickstart.ink_auroc(*both, [0, 0]) == 0.75


def test_row_of_several_seeds(quickstart, capsys):
    quickstart.print_row('a model', [90., 92., 97.], 1)
    printed = capsys.readouterr().out
    assert printed == '| a model | 93.0 ± 3.6 | 90.0, 92.0, 97.0 |\n'
    assert rows(printed) == {'a model': (93.0, [90.0, 92.0, 97.0])}


@pytest.mark.parametrize('arguments', [['--epochs', '0'], ['--seeds', '0'], ['--epoch', 'x']])
def test_wrong_arguments(quickstart, monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, 'argv', ['quickstart.py', *arguments])
    with pytest.raises(SystemExit) as error:
        quickstart.main()
    assert error.value.code == 2
    assert '--epochs' in capsys.readouterr().err
