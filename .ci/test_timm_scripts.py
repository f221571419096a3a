"""timm's own train.py and validate.py, unmodified, on real images. .ci/full runs this file and says what it needs."""
import csv
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
import torch

import timm_sape  # noqa: F401  registers the models

SCRIPTS = Path(os.environ['TIMM_SCRIPTS']).resolve()
DATA = Path(os.environ['CIFAR10_SMALL']).resolve()
ROOT = Path(__file__).resolve().parent.parent
SMOKE = ROOT / 'train_configs' / 'smoke'
ROWS = Path(__file__).parent / 'rows'  # rows of the table that .ci/full writes, a file each since tests run in parallel
# without the alias `sape2`, whose models are those of `sape2_k`
MODELS = timm.list_models('test_vit_*', module='vit_pos_enc', exclude_filters=['test_vit_sape2', 'test_vit_sape2_ape'])


def train_command(*args):
    return [
        sys.executable, str(SCRIPTS / 'train.py'), '--config', str(SMOKE / 'test_vit_ape.yaml'),
        '--data-dir', str(DATA), *map(str, args)]


def run(command, **kwargs):
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f'{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}'
    return done.stdout + done.stderr


def summary(folder):
    with open(folder / 'summary.csv') as f:
        return list(csv.DictReader(f))


def train(model, output, *args):
    run(train_command('--model', model, '--output', output, '--experiment', model, *args))
    return summary(output / model)


@pytest.fixture(scope='session')
def output(tmp_path_factory):
    return tmp_path_factory.mktemp('output')


@pytest.mark.parametrize('model', MODELS)
def test_each_model_learns(model, output):
    epochs = train(model, output)
    first, last = float(epochs[0]['train_loss']), float(epochs[-1]['train_loss'])
    top1 = float(epochs[-1]['eval_top1'])
    ROWS.mkdir(exist_ok=True)
    ROWS.joinpath(model).write_text(f'| {model} | {first:.3f} | {last:.3f} | {last / first:.2f} | {top1:.1f} |\n')
    assert len(epochs) == 10
    if model != 'test_vit_nope':  # in the table only for comparison
        assert last <= 0.85 * first
        assert top1 >= 25


def test_validate_reports_what_train_did(output):
    model = 'test_vit_sape2_k_ape'
    if not (output / model).exists():
        train(model, output)
    expected = float(summary(output / model)[-1]['eval_top1'])
    printed = run([
        sys.executable, '-m', 'timm_sape', 'run', str(SCRIPTS / 'validate.py'), '--model', model,
        '--model-kwargs', 'img_size=32', 'patch_size=4', '--img-size', '32', '--num-classes', '10',
        '--data-dir', str(DATA), '--split', 'test', '--checkpoint', str(output / model / 'last.pth.tar'),
        *evaluation_options()])
    assert float(re.search(r'"top1": ([\d.]+)', printed).group(1)) == pytest.approx(expected, abs=1e-6)


def evaluation_options():
    """The recipe's preprocessing as arguments of validate.py, which has the same ones as train.py."""
    import yaml
    recipe = yaml.safe_load((SMOKE / 'test_vit_ape.yaml').read_text())
    options = ['--workers', '0', '--device', 'cpu']
    for key in ('mean', 'std', 'crop_pct', 'interpolation', 'batch_size'):
        if key in recipe:
            value = recipe[key] if isinstance(recipe[key], list) else [recipe[key]]
            options += [f'--{key.replace("_", "-")}', *map(str, value)]
    return options


def test_killed_run_resumes(output):
    model, folder = 'test_vit_sape2_k', output / 'killed'
    log = open(output / 'killed.log', 'w')
    process = subprocess.Popen(
        train_command('--model', model, '--output', output, '--experiment', 'killed', '--log-interval', 1),
        stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.time() + 300
    while not re.search(r'Train: 2 \[ +[1-9]', (output / 'killed.log').read_text()):  # in the middle of epoch 2
        assert process.poll() is None and time.time() < deadline, (output / 'killed.log').read_text()[-3000:]
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert len(summary(folder)) == 2
    printed = run(train_command(
        '--model', model, '--output', output, '--experiment', 'resumed', '--resume', folder / 'last.pth.tar'))
    resumed = summary(output / 'resumed')
    assert 'Restoring optimizer state' in printed
    assert [int(row['epoch']) for row in resumed] == list(range(2, 10))
    # Its first epoch tells: without the weights the loss of epoch 2 is above that of the second epoch of `killed`.
    assert float(resumed[0]['train_loss']) < float(summary(folder)[-1]['train_loss'])


def test_trained_model_survives_saving(output, tmp_path):
    model = 'test_vit_sape2_k_ape'
    if not (output / model).exists():
        train(model, output)
    trained = timm.create_model(
        model, img_size=32, patch_size=4, num_classes=10, checkpoint_path=output / model / 'last.pth.tar').eval()
    timm.models.save_for_hf(trained, tmp_path, safe_serialization=True)
    torch.save(x := torch.randn(4, 3, 32, 32), tmp_path / 'x.pt')
    torch.save(trained(x), tmp_path / 'y.pt')
    run([sys.executable, '-c', (
        'import sys, timm, timm_sape, torch; d = sys.argv[1];'
        "m = timm.create_model(f'local-dir:{d}', pretrained=True).eval();"
        "assert torch.equal(m(torch.load(d + '/x.pt')), torch.load(d + '/y.pt'))"), str(tmp_path)])


def test_one_epoch_of_a_small_model(output):
    epochs = train('vit_small_sape2_k_ape', output, '--epochs', 1, '--warmup-epochs', 0, '--lr', 5e-4)
    assert float(epochs[0]['train_loss']) < math.log(10) and float(epochs[0]['eval_top1']) > 10


def test_fine_tuning_a_graft(output):
    """timm's own test_vit is trained, grafted, fine-tuned with layer-wise learning rates, validated, and saved."""
    base = train('test_vit', output, '--epochs', 3)
    model_kwargs = ['img_size=32', 'patch_size=4', 'base=test_vit', 'pos_enc=sape2_k']
    epochs = train(
        'vit_graft', output, '--model-kwargs', *model_kwargs, '--pretrained',
        '--pretrained-path', output / 'test_vit' / 'last.pth.tar',
        '--epochs', 2, '--warmup-epochs', 0, '--lr', 5e-4, '--layer-decay', 0.75)
    assert float(epochs[0]['train_loss']) < float(base[0]['train_loss']) - 0.1  # it does not start from scratch
    printed = run([
        sys.executable, '-m', 'timm_sape', 'run', str(SCRIPTS / 'validate.py'), '--model', 'vit_graft',
        '--model-kwargs', *model_kwargs, '--img-size', '32', '--num-classes', '10', '--data-dir', str(DATA),
        '--split', 'test', '--checkpoint', str(output / 'vit_graft' / 'last.pth.tar'), *evaluation_options()])
    expected = float(epochs[-1]['eval_top1'])
    assert float(re.search(r'"top1": ([\d.]+)', printed).group(1)) == pytest.approx(expected, abs=1e-6)
    grafted = torch.load(output / 'vit_graft' / 'last.pth.tar', weights_only=False)['state_dict']
    gates = [value.item() for name, value in grafted.items() if name.endswith('auto_sape2_k.gate.weight')]
    # In the last layer only the class token is used, whose bias is 0, so that gate does not learn.
    assert len(gates) > 2 and all(gate != 0 for gate in gates[:-1])
