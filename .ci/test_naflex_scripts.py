"""timm's train.py and validate.py with --naflex-loader, on real images of mixed sizes and aspect ratios.

Run by .ci/full, which says what it needs. The images are those of CIFAR10_SMALL, cropped and enlarged by
make_mixed_sizes.py.
"""
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_timm_scripts import SCRIPTS, run, summary

ROWS = Path(__file__).parent / 'naflex_rows'  # of the table that .ci/full writes; tests may run side by side
MODELS = ['nope', 'ape', 'rope2d_mixed', 'cope_ape', 'sape2_k', 'sape2_k_ape']
SHAPE = ['img_size=32', 'patch_size=4', 'fc_norm=True']


@pytest.fixture(scope='session')
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('mixed_sizes')
    script = Path(__file__).parent / 'make_mixed_sizes.py'
    subprocess.run([sys.executable, script, os.environ['CIFAR10_SMALL'], folder], check=True)
    return folder


def command(script, data, model, *args, shape=SHAPE):
    return [
        sys.executable, '-m', 'timm_sape', 'run', str(SCRIPTS / script), '--data-dir', str(data), '--model', model,
        '--gp', 'avg', '--model-kwargs', *shape, '--img-size', '32', '--num-classes', '10', '--device', 'cpu',
        '--workers', '1', '-b', '64', '--naflex-loader', '--naflex-max-seq-len', '64', *map(str, args)]


def train(data, output, model, *args, name=None, shape=SHAPE):
    run(command(
        'train.py', data, model, '--train-split', 'train', '--val-split', 'test', '--opt', 'adamw', '--lr', '2e-3',
        '--warmup-epochs', '1', '--sched-on-updates', '--seed', '42', '--naflex-train-seq-lens', '36', '64', '100',
        '--color-jitter', '0', '--smoothing', '0', '--output', output, '--experiment', name or model, *args,
        shape=shape))
    return summary(output / (name or model))


@pytest.fixture(scope='session')
def output(tmp_path_factory):
    return tmp_path_factory.mktemp('output')


@pytest.mark.parametrize('encoding', MODELS)
def test_each_model_learns(encoding, data, output):
    model = f'test_naflexvit_{encoding}'
    epochs = train(data, output, model, '--epochs', '8')
    first, last = float(epochs[0]['train_loss']), float(epochs[-1]['train_loss'])
    top1 = float(epochs[-1]['eval_top1'])
    ROWS.mkdir(exist_ok=True)
    ROWS.joinpath(model).write_text(f'| {model} | {first:.3f} | {last:.3f} | {last / first:.2f} | {top1:.1f} |\n')
    assert last < 0.92 * first and top1 >= 20


def test_validate_and_resume(data, output):
    model = 'test_naflexvit_sape2_k'
    epochs = train(data, output, model, '--epochs', '2', name='short')
    printed = run(command(
        'validate.py', data, model, '--split', 'test', '--checkpoint', output / 'short' / 'last.pth.tar',
        '--crop-pct', '1.0'))
    assert float(re.search(r'"top1": ([\d.]+)', printed).group(1)) == pytest.approx(
        float(epochs[-1]['eval_top1']), abs=1e-6)
    more = train(
        data, output, model, '--epochs', '4', '--resume', output / 'short' / 'last.pth.tar', name='resumed')
    assert [int(row['epoch']) for row in more] == [2, 3]
    # Without the weights its first epoch had 2.19 here, with them 2.09, and the two epochs before 2.21 and 2.11.
    assert float(more[0]['train_loss']) < sum(float(row['train_loss']) for row in epochs) / 2


def test_several_patch_sizes_and_patch_dropout(data, output):
    epochs = train(
        data, output, 'test_naflexvit_sape2_k_ape', '--epochs', '3', '--naflex-patch-sizes', '4', '8', name='patches',
        shape=[*SHAPE, 'enable_patch_interpolator=True', 'patch_drop_rate=0.25'])
    losses = [float(row['train_loss']) for row in epochs]
    assert all(math.isfinite(loss) for loss in losses) and losses[-1] < losses[0]


def test_fine_tuning_a_graft(data, output):
    """A graft onto a plain model of timm's, not pretrained, learns from images of all shapes."""
    shape = ['img_size=32', 'patch_size=4', 'fc_norm=True', 'base=test_vit', 'pos_enc=sape2_k', 'use_naflex=True']
    epochs = train(data, output, 'vit_graft', '--epochs', '3', shape=shape)
    assert float(epochs[-1]['train_loss']) < float(epochs[0]['train_loss'])
