"""Evaluation: statistics against counting and published numbers; sweeps and comparisons on tiny models and images."""
import argparse
import contextlib
import csv
import gc
import io
import json
import math
import os
import shlex
import shutil
import sys
import warnings
from fractions import Fraction
from functools import partial
from pathlib import Path
from unittest import mock

import matplotlib.image
import numpy as np
import pytest
import timm
import torch
import torch.nn as nn
from PIL import Image
from safetensors.torch import save_file
from timm.data import ImageDataset, create_transform
from timm.models import save_for_hf
from torch.utils.data import IterableDataset
from torchvision.transforms import v2

from common import Executed, randomize
import timm_sape
from timm_sape import cli
from timm_sape.lab import adapt as adapt_module
from timm_sape.lab import compare as compare_module
from timm_sape.lab import shifts as shifts_module
from timm_sape.lab import sweep as sweep_module
from timm_sape.lab.adapt import adapt, adapted_table
from timm_sape.lab.compare import compare, comparison_table
from timm_sape.lab.evaluate import (
    accuracy,
    expected_calibration_error,
    holm,
    mcnemar,
    mcnemar_p,
    negative_log_likelihood,
    predict,
    same_random_weights,
    top_k_correct,
    wilson_interval,
)
from timm_sape.lab.figures_sweep import plot_sweep
from timm_sape.lab.shifts import shift_sweep, shift_table
from timm_sape.lab.sweep import sweep, sweep_table
from timm_sape.lab.tables import markdown
from timm_sape.cli import compare as compare_command
from timm_sape.cli import files
from timm_sape.cli import sweep as sweep_command
from timm_sape.cli.common import CommandError
from timm_sape.loading import (
    image_size_of,
    load_images,
    load_model,
    number_classes,
    open_dataset,
    preprocessing,
)

PATCH = 8
CLASSES = 3


# Statistics


@pytest.mark.parametrize('successes, n, expected', [
    # Newcombe, 'Two-sided confidence intervals for the single proportion', Statistics in Medicine 1998, method 3
    (81, 263, (.2553, .3662)),
    (15, 148, (.0624, .1605)),
    (0, 20, (0, .1611)),
    (1, 29, (.0061, .1718)),
])
def test_wilson_interval_as_published(successes, n, expected):
    assert wilson_interval(successes, n) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize('successes, n', [(0, 1), (1, 1), (3, 7), (7, 7), (499, 1000), (49999, 50000)])
def test_wilson_interval_solves_its_equation(successes, n):
    low, high = wilson_interval(successes, n)
    z = 1.959964
    assert 0 <= low <= successes / n <= high <= 1 and low < high
    for p in (low, high):  # z standard errors at p away from the share
        assert (successes / n - p) ** 2 == pytest.approx(z ** 2 * p * (1 - p) / n, rel=1e-5, abs=1e-14)


def exact_p(b, c):
    """Both tails of b + c fair coins, by integer arithmetic."""
    n = b + c
    tail = sum(math.comb(n, k) for k in range(n + 1) if abs(2 * k - n) >= abs(b - c))
    return float(Fraction(tail, 2 ** n))


def test_mcnemar_by_enumeration():
    for b in range(12):
        for c in range(12):
            assert mcnemar_p(b, c) == pytest.approx(exact_p(b, c), rel=1e-12)
    assert mcnemar_p(0, 0) == mcnemar_p(7, 7) == 1
    assert mcnemar_p(0, 5) == pytest.approx(2 / 32)


@pytest.mark.parametrize('b, c', [(700, 800), (1000, 1001), (0, 900), (1500, 1900)])
def test_mcnemar_of_big_counts(b, c):
    assert mcnemar_p(b, c) == mcnemar_p(c, b) == pytest.approx(exact_p(b, c), rel=1e-9)


def test_mcnemar_of_very_big_counts():
    b, c = 5_000_000, 5_010_000  # so many that the normal distribution with continuity correction is exact enough
    expected = math.erfc((c - b - 1) / math.sqrt(b + c) / math.sqrt(2))
    assert mcnemar_p(b, c) == pytest.approx(expected, rel=1e-4)
    assert mcnemar_p(5_000_000, 5_000_001) == pytest.approx(1, rel=1e-8)
    assert mcnemar_p(0, 10 ** 6) == 0  # below the smallest float


def test_mcnemar_counts():
    first = torch.tensor([1, 1, 1, 0, 0, 1], dtype=torch.bool)
    second = torch.tensor([1, 0, 0, 1, 0, 0], dtype=torch.bool)
    assert mcnemar(first, second) == (3, 1, pytest.approx(exact_p(3, 1)))


def test_holm_by_hand():
    # .01 * 4, .03 * 2, then .04 * 1, which must not be less than the one before
    assert holm([.01, .04, .03, .005]) == pytest.approx([.03, .06, .06, .02])
    assert holm([.7, .6]) == [1, 1] and holm([.2]) == [.2] and holm([]) == []


def logits_of(probabilities):
    return torch.tensor(probabilities).log()


def test_calibration_by_hand():
    logits = logits_of([[.9, .1], [.92, .08], [.4, .6], [.55, .45]])
    labels = torch.tensor([0, 1, 1, 0])
    # of 15 bins .9 and .92 share one, confidence .91, accuracy .5; .6 (the end of its bin) and .55 too, .575 and 1
    assert expected_calibration_error(logits, labels) == pytest.approx((.41 * 2 + .425 * 2) / 4, abs=1e-6)
    assert expected_calibration_error(logits, labels, 1) == pytest.approx(abs(.7425 - .75), abs=1e-6)
    expected = -(math.log(.9) + math.log(.08) + math.log(.6) + math.log(.55)) / 4
    assert negative_log_likelihood(logits, labels) == pytest.approx(expected, rel=1e-6)


def test_calibration_is_that_of_plain_loops():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(200, 4, generator=generator)
    labels = torch.randint(4, (200,), generator=generator)
    probabilities = logits.double().softmax(1)
    expected = 0
    for m in range(15):
        rows = [i for i in range(200) if m / 15 < probabilities[i].max() <= (m + 1) / 15]
        gaps = [float(probabilities[i].max()) - float(probabilities[i].argmax() == labels[i]) for i in rows]
        expected += abs(sum(gaps)) / 200
    assert expected_calibration_error(logits, labels) == pytest.approx(expected, rel=1e-9)


def test_certain_models_are_calibrated_or_not():
    logits = torch.tensor([[1e4, 0.], [1e4, 0.]])
    assert expected_calibration_error(logits, torch.tensor([0, 0])) == 0
    assert expected_calibration_error(logits, torch.tensor([1, 1])) == 1


def test_top_k_by_hand():
    logits = torch.tensor([[3., 2, 1, 0], [0, 1, 2, 3], [1, 0, 3, 2]])
    labels = torch.tensor([0, 1, 3])
    assert top_k_correct(logits, labels).tolist() == [True, False, False]
    assert top_k_correct(logits, labels, 2).tolist() == [True, False, True]
    assert top_k_correct(logits, labels, 5).all()
    equal, which = torch.zeros(3, 10), torch.tensor([0, 8, 9])
    assert top_k_correct(equal, which).tolist() == [True, False, False]  # as argmax
    assert top_k_correct(equal, which, 9).tolist() == [True, True, False]
    assert accuracy(logits, labels, 2) == (pytest.approx(2 / 3), *wilson_interval(2, 3))


@pytest.mark.parametrize('call, text', [
    (lambda: wilson_interval(3, 2), 'got 3 of 2'),
    (lambda: wilson_interval(0, 0), 'n at least 1'),
    (lambda: mcnemar_p(-1, 2), 'Counts must be 0 or more'),
    (lambda: mcnemar(torch.ones(2).bool(), torch.ones(3).bool()), 'must have seen the same images'),
    (lambda: accuracy(torch.ones(2, 3), torch.ones(3)), r'got \[2, 3\] and \[3\]'),
    (lambda: accuracy(torch.ones(0, 3), torch.ones(0)), 'at least 1'),
    (lambda: accuracy(torch.ones(1, 3), torch.tensor([-1])), 'no labels.*one sub-folder of images per class'),
    (lambda: accuracy(torch.ones(1, 3), torch.tensor([3])), 'labels up to 3, but the model has 3 classes.*train'),
    (lambda: accuracy(torch.tensor([[0, math.nan]]), torch.tensor([0])), 'not finite. Leave half precision out'),
    (lambda: expected_calibration_error(torch.ones(1, 3), torch.tensor([0]), 0), 'bins must be at least 1'),
])
def test_statistics_say_what_is_wrong(call, text):
    with pytest.raises(ValueError, match=text):
        call()


# Predictions


class Sum(nn.Module):
    """Logits [s, -s, 0] of the sum s of an image, slow on the first batch."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.wait = lambda: None

    def forward(self, x):
        assert not self.training and not torch.is_grad_enabled()
        self.calls += 1
        self.wait()
        s = x.sum((1, 2, 3))
        return torch.stack([s, -s, torch.zeros_like(s)], 1)


def batches(*sizes):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 3, 4, 4, generator=generator), torch.arange(n) % 3) for n in sizes]


def test_predict():
    loader = batches(4, 4, 2)
    found = predict(Sum().train(), loader)
    sums = torch.cat([x for x, _ in loader]).sum((1, 2, 3))
    assert found.logits.dtype == torch.float32 and found.labels.dtype == torch.int64
    assert torch.allclose(found.logits, torch.stack([sums, -sums, 0 * sums], 1))
    assert found.labels.tolist() == [0, 1, 2, 0, 0, 1, 2, 0, 0, 1]


@pytest.mark.parametrize('sizes, speed', [((4, 4, 4, 2), 8 / (2 + 3)), ((4, 2), 4 / 1), ((4,), 4 / 1)])
def test_predict_times_full_batches_without_the_first(sizes, speed, monkeypatch):
    model, clock = Sum(), [0.0]
    model.wait = lambda: clock.__setitem__(0, clock[0] + model.calls)  # 1, 2, 3 seconds
    monkeypatch.setattr('timm_sape.lab.evaluate.now', lambda device: clock[0])

    def loading():
        for batch in batches(*sizes):
            clock[0] += 100  # outside of the timed part
            yield batch

    found = predict(model, loading())
    assert found.images_per_second == pytest.approx(speed)


def test_predict_shows_what_takes_long(capsys, monkeypatch):
    model, clock = Sum(), [0.0]
    model.wait = lambda: clock.__setitem__(0, clock[0] + 1.5)
    monkeypatch.setattr('tqdm.std.time', lambda: clock[0])
    predict(model, batches(2), progress='quick')
    predict(model, batches(2, 2, 2, 2))
    assert capsys.readouterr().err.strip() == ''
    predict(model, batches(2, 2, 2, 2), progress='slow')
    printed = capsys.readouterr()
    assert 'slow: ' in printed.err and '/4 [' in printed.err and not printed.out


def test_predict_amp():
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    exact, half = (predict(model, batches(4), amp=amp).logits for amp in (False, True))
    assert half.dtype == torch.float32 and torch.equal(half, half.bfloat16().float())
    assert not torch.equal(exact, half) and torch.allclose(exact, half, atol=0.05)


def test_predict_says_what_is_wrong():
    images = torch.randn(2, 3, 4, 4)
    with pytest.raises(ValueError, match='logits that are not finite'):  # a class would be predicted all the same
        predict(Sum(), [(math.nan * images, torch.tensor([-1, -1]))], labelled=False)
    with pytest.raises(ValueError, match='There are no images'):
        predict(Sum(), [])
    with pytest.raises(ValueError, match='no labels'):
        predict(Sum(), [(images, torch.tensor([-1, -1]))])
    with pytest.raises(ValueError, match='labels up to 9, but the model has 3 classes'):
        predict(Sum(), [(images, torch.tensor([0, 9]))])
    model = Sum()

    def too_much():
        raise torch.OutOfMemoryError('CUDA out of memory')

    model.wait = too_much
    with pytest.raises(ValueError, match=r'\[2, 3, 4, 4\] does not fit into the memory.*smaller batch size'):
        predict(model, [(images, torch.tensor([0, 1]))])


# Sweeps and comparisons


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    """8 images of each class, all different and wider than high."""
    root = tmp_path_factory.mktemp('images')
    generator = np.random.default_rng(0)
    for i in range(CLASSES):
        folder = root / 'val' / f'class{i}'
        folder.mkdir(parents=True)
        for n in range(8):
            rough = Image.fromarray(generator.integers(0, 256, (4, 6, 3), dtype=np.uint8))
            rough.resize((60 + n, 40), Image.BICUBIC).save(folder / f'{n}.png')
    return root


def make(pos_enc, seed=0, **kwargs):
    torch.manual_seed(seed)
    sizes = dict(num_classes=CLASSES, img_size=48, patch_size=PATCH)
    if pos_enc is None:
        return randomize(timm.create_model('test_vit', **{**sizes, **kwargs}))
    return randomize(timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, **{**sizes, **kwargs}))


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """Folders of saved models."""
    root = tmp_path_factory.mktemp('models')
    for pos_enc in ('rope2d', 'sincos2d', 'ape+sape2_k', 'nope'):
        save_for_hf(make(pos_enc), root / pos_enc)
    keywords = {'alibi2d': {'distance': 'manhattan', 'resolution': 'rescale'}, 'sincos2d': {}}
    save_for_hf(make('alibi2d+sincos2d', pos_enc_kwargs=keywords, img_size=(48, 64)), root / 'two')
    save_for_hf(make(None), root / 'timm')
    save_for_hf(timm.create_model('test_resnet', num_classes=CLASSES), root / 'convolutions')
    return {path.name: str(path) for path in root.iterdir()}


@pytest.fixture
def seen(monkeypatch):
    """Records the models that a sweep or a comparison evaluates, with their images."""
    calls = []

    def spy(model, loader, *args):
        calls.append((model, torch.cat([x for x, _ in loader])))
        return predict(model, loader, *args)

    for module in (sweep_module, compare_module):
        monkeypatch.setattr(module, 'predict', spy)
    return calls


def rules_of(name):
    rules = timm_sape.get_encoding(name).rules
    return [*rules, *(f'{rule}+log' for rule in rules)]


@pytest.mark.full
def test_sweep_of_every_rule(images, folders, seen):
    data = open_dataset(images)
    sizes = [48, (32, 64), (80, 80), 48]
    rows = sweep([folders['rope2d'], 'local-dir:' + folders['sincos2d']], data, sizes, progress=False)
    key = [(row['model'], row['rule'], row['height'], row['width'], row['patches']) for row in rows]
    assert key == [
        (model, rule, *size)
        for name, model in (('rope2d', folders['rope2d']), ('sincos2d', f'local-dir:{folders["sincos2d"]}'))
        for rule in rules_of(name)
        for size in ((48, 48, 36), (32, 64, 32), (80, 80, 100))]
    assert list(rows[0]) == [
        'model', 'rule', 'height', 'width', 'images', 'patches', 'num_images', 'top1', 'top1_low', 'top1_high',
        'top5', 'images_per_second']
    for row, (model, x) in zip(rows, seen):
        size = row['height'], row['width']
        rule, _, factor = row['rule'].partition('+')
        assert x.shape[-2:] == model.patch_embed.img_size == size
        assert model.encodings[model.pos_enc].rule == rule
        assert model.logit_scaling == ('log' if factor else 'constant')
        assert {encoding.ref_grid_size for encoding in model.position_encodings().values()} == {(6, 6)}
        assert row['num_images'] == 24 and row['top5'] is None and row['images_per_second'] > 0  # of three classes

        # the same without files: the trained model, set to the size
        pos_enc = model.pos_enc
        other = make(pos_enc, pos_enc_kwargs={pos_enc: {'resolution': rule}}, logit_scaling=model.logit_scaling)
        other.set_input_size(size)
        with torch.no_grad():
            logits = other.eval()(x)
        labels = torch.arange(CLASSES).repeat_interleave(8)
        right = int((logits.argmax(1) == labels).sum())
        assert row['top1'] == pytest.approx(100 * right / 24, abs=1e-3)
        assert (row['top1_low'], row['top1_high']) == pytest.approx(
            [100 * p for p in wilson_interval(right, 24)], abs=1e-3)
    at_home = [row['top1'] for row in rows if row['height'] == 48]
    assert len(set(at_home[:8])) == 1 and len(set(at_home[8:])) == 1 and len(at_home) == 12
    table = sweep_table(rows).splitlines()
    assert len(table) == 2 + 12 * 3 and '| 32x64 | 32 |' in table[3] and '[' in table[3]


def test_sweep_shows_the_same_content_at_each_size(images, folders, seen):
    sweep([folders['nope']], open_dataset(images), [48, (96, 48), (48, 192)], rules=['own'], progress=False)
    data = open_dataset(images, transform=create_transform((48, 192), crop_mode='center', mean=[.5] * 3, std=[.5] * 3))
    other = torch.stack([x for x, _ in data])
    small = [nn.functional.interpolate(x, (12, 12), mode='area') for x in (*(x for _, x in seen), other)]
    distances = [(small[0] - x).abs().mean().item() for x in small[1:]]
    assert max(distances[:2]) < 0.03 and distances[2] > 0.3  # the last is timm's usual crop
    # the central 90 % of height and width
    transform = v2.Compose([
        v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Resize((53, 53), antialias=True),
        v2.CenterCrop(48), v2.Normalize((.5,), (.5,))])
    expected = transform(Image.open(images / 'val' / 'class0' / '0.png'))
    assert (seen[0][1][0] - expected).abs().mean() < 0.02


def test_sweep_can_crop_as_validate_does(images, folders, seen):
    data = open_dataset(images)
    sweep([folders['nope']], data, [48], crop_mode='center', rules=['own'], progress=False)
    compare([folders['nope']], data, progress=False)
    assert torch.equal(seen[0][1], seen[1][1])
    sweep([folders['nope']], data, [48], rules=['own'], progress=False)
    assert not torch.equal(seen[0][1], seen[2][1])


def test_sweep_of_models_with_one_rule(images, folders, seen):
    models = [folders['timm'], folders['ape+sape2_k'], folders['nope']]
    rows = sweep(models, open_dataset(images), [48, (32, 64)], num_images=5, progress=False)
    ours = [('own', 5)] * 2 + [('own+log', 5)] * 2
    assert [(row['rule'], row['num_images']) for row in rows] == [('timm', 5)] * 2 + ours * 2
    assert torch.equal(seen[2][1], seen[6][1])  # the same images for all models
    model = make(None)
    model.set_input_size((32, 64))
    with torch.no_grad():
        assert torch.allclose(model.eval()(seen[1][1]), seen[1][0](seen[1][1]), atol=1e-4)


def test_random_weights_are_the_same_in_all_rows(images, seen):
    sweep(['test_vit_rope2d@random'], open_dataset(images), [160], num_images=2, progress=False, rules=['ntk', 'yarn'])
    (one, x), (other, _) = seen
    assert one.encodings['rope2d'].rule != other.encodings['rope2d'].rule
    assert torch.equal(one.head.weight, other.head.weight) and torch.equal(one(x), other(x))  # on its own grid
    sweep(['test_vit_nope@random'], open_dataset(images), [160], num_images=1, seed=1, rules=['own'], progress=False)
    assert not torch.equal(seen[-1][0].head.weight, one.head.weight)


def test_sweep_of_two_encodings_with_other_keywords(images, folders, seen):
    rows = sweep([folders['two']], open_dataset(images), [32], num_images=3, progress=False)
    rules = [  # sincos2d has no slopes, and is rescaled beside them
        'alibi2d=extrapolate,sincos2d=extrapolate', 'alibi2d=rescale,sincos2d=rescale',
        'alibi2d=slopes,sincos2d=rescale', 'alibi2d=rescale,sincos2d=extrapolate',
        'alibi2d=slopes,sincos2d=extrapolate']
    assert [row['rule'] for row in rows] == [*rules, *(f'{rule}+log' for rule in rules)]
    for (model, _), row in zip(seen, rows):
        rule = row['rule'].removesuffix('+log')
        assert model.pos_enc_kwargs['alibi2d']['distance'] == 'manhattan'
        assert {e.ref_grid_size for e in model.position_encodings().values()} == {(6, 8)}
        assert rule == ','.join(f'{name}={model.encodings[name].rule}' for name in ('alibi2d', 'sincos2d'))


@pytest.mark.parametrize('pos_enc, heads', [('rope2d', 0), ('alibi2d', 4), ('sape2_k', 20), ('irpe_qkv', 20)])
def test_memory_that_a_sweep_needs(pos_enc, heads, images, seen, tmp_path, monkeypatch):
    """Logits [B, h, N, N] if they depend on the content, [h, N, N] if not, none if attention is fused."""
    save_for_hf(make(pos_enc), tmp_path / 'model')
    data = open_dataset(images)
    need = 4 * (5 * 400 * 9 * 64 + heads * 400 ** 2)

    def run(memory, num_images=None):
        monkeypatch.setattr(sweep_module, 'memory_size', lambda: int(memory))
        rules = ['rescale' if pos_enc in ('rope2d', 'alibi2d') else 'own']
        sweep([f'{tmp_path}/model'], data, [48, 160], batch_size=5, num_images=num_images, rules=rules, progress=False)

    with pytest.raises(ValueError, match=(
            'model at 160x160 has 400 patches, which take .* GB in a batch of 5, and this machine has .* GB. '
            'Use a smaller size or a smaller batch.')):
        run(0.99 * need)
    assert not seen
    run(0.99 * need, num_images=1)
    run(1.01 * need, num_images=5)


def test_memory_that_explicit_attention_needs(monkeypatch):
    """There are logits of each image, and patches that are not square."""
    model = make('rope2d', img_size=(32, 64), patch_size=(8, 16))
    for fused, heads in (True, 0), (False, 20):
        for block in model.blocks:
            block.attn.fused_attn = fused
        need = 4 * (5 * 24 * 9 * 64 + heads * 24 ** 2)
        monkeypatch.setattr(sweep_module, 'memory_size', lambda: need)
        sweep_module.check_memory('m', [(24, 128)], model, 5)
        monkeypatch.setattr(sweep_module, 'memory_size', lambda: need - 1)
        with pytest.raises(ValueError, match='m at 24x128 has 24 patches'):
            sweep_module.check_memory('m', [(24, 128)], model, 5)


@pytest.mark.parametrize('run', [
    lambda *args, **kwargs: adapt(*args, [(64, 64)], **kwargs),
    lambda spec, *args, **kwargs: sweep([spec], *args, [64], **kwargs)], ids=['adapt', 'sweep'])
def test_a_batch_has_no_more_images_than_there_are(run, images, folders, monkeypatch):
    monkeypatch.setattr(sweep_module, 'memory_size', lambda: 1)
    for num_images, batch in (None, 24), (5, 5), (100, 24):
        with pytest.raises(ValueError, match=f'64x64 has 64 patches, .* in a batch of {batch}, and this machine'):
            run(folders['nope'], open_dataset(images), num_images=num_images, progress=False)


@pytest.mark.filterwarnings('ignore:.* and the images have 3, so')
@pytest.mark.parametrize('num_classes', [5, 6])
def test_top_5_of_five_classes_says_nothing(num_classes, images, seen, tmp_path):
    save_for_hf(make('nope', num_classes=num_classes), tmp_path / 'model')
    arguments = [f'{tmp_path}/model'], open_dataset(images)
    rows = compare(*arguments, progress=False) + sweep(*arguments, [48], rules=['own'], progress=False)
    assert [row['top5'] is None for row in rows] == [num_classes == 5] * 2
    for row, (model, x) in zip(rows, seen, strict=True):
        with torch.no_grad():
            logits = model(x)
        for k in (1, 5) if num_classes > 5 else (1,):
            found = [row[name] for name in (f'top{k}', f'top{k}_low', f'top{k}_high') if name in row]
            expected = accuracy(logits, torch.arange(CLASSES).repeat_interleave(8), k)
            assert found == pytest.approx([100 * part for part in expected[:len(found)]], abs=1e-3)


def test_patches_of_a_sweep_that_are_not_square(images, tmp_path):
    save_for_hf(make('nope', img_size=(32, 64), patch_size=(8, 16)), tmp_path / 'model')
    row, = sweep([f'{tmp_path}/model'], open_dataset(images), [(24, 128)], rules=['own'], num_images=1, progress=False)
    assert row['patches'] == 24


def test_sweep_of_some_rules(images, folders, seen):
    """Of each model those that it has."""
    data = open_dataset(images)
    models = [folders['two'], folders['rope2d'], folders['nope']]
    rows = sweep(models, data, [32], num_images=3, rules=['own', 'ntk', 'rescale+log'], progress=False)
    assert [(row['model'], row['rule']) for row in rows] == [
        (folders['two'], 'alibi2d=rescale,sincos2d=rescale+log'), (folders['rope2d'], 'ntk'),
        (folders['rope2d'], 'rescale+log'), (folders['nope'], 'own')]
    with pytest.raises(ValueError, match='timm has none of the rules own, ntk. It has timm.$'):
        sweep([folders['rope2d'], folders['timm']], data, [32], rules=['own', 'ntk'], progress=False)
    assert len(seen) == 4


@pytest.mark.full
@pytest.mark.parametrize('kind', ['bare', 'training'])
def test_sweep_of_files_that_do_not_tell_the_trained_grid(kind, images, seen, tmp_path):
    if kind == 'bare':
        torch.manual_seed(0)
        model = timm.create_model('test_vit_rope2d', num_classes=CLASSES)
        torch.save(model.state_dict(), tmp_path / 'model.pth')
        spec, patch = f'test_vit_rope2d@{tmp_path / "model.pth"}', model.patch_embed.patch_size[0]
    else:
        model, patch = make('rope2d'), PATCH
        kwargs = dict(pos_enc='rope2d', img_size=48, patch_size=PATCH)
        args = argparse.Namespace(num_classes=CLASSES, model_kwargs=kwargs)
        checkpoint = {'arch': 'test_vit_nope', 'state_dict': model.state_dict(), 'args': args}
        torch.save(checkpoint, tmp_path / 'last.pth.tar')
        spec = str(tmp_path / 'last.pth.tar')
    rows = sweep([spec], open_dataset(images), [(2 * patch, 3 * patch)], num_images=3, progress=False)
    assert [row['rule'] for row in rows] == rules_of('rope2d')
    assert {e.ref_grid_size for model, _ in seen for e in model.position_encodings().values()} == {
        model.patch_embed.grid_size}


def test_compare(images, folders, seen):
    models = [folders['rope2d'], 'local-dir:' + folders['ape+sape2_k'], folders['two'], folders['timm']]
    rows = compare(models, open_dataset(images), progress=False)
    assert [row['model'] for row in rows] == models
    labels = torch.arange(CLASSES).repeat_interleave(8)
    correct, p_values = [], []
    for row, (model, x) in zip(rows, seen):
        with torch.no_grad():
            logits = load_model(row['model'])(x)
        right = logits.argmax(1) == labels
        correct.append(right)
        assert (row['height'], row['width']) == tuple(x.shape[-2:]) == tuple(model.patch_embed.img_size)
        assert row['top1'] == pytest.approx(100 * right.float().mean().item(), abs=1e-3)
        assert row['nll'] == pytest.approx(negative_log_likelihood(logits, labels), abs=1e-3)
        assert row['ece'] == pytest.approx(100 * expected_calibration_error(logits, labels), abs=0.1)
        assert row['parameters'] == sum(p.numel() for p in make(
            getattr(model, 'pos_enc', None), img_size=model.patch_embed.img_size).parameters())
    assert {rows[0][name] for name in ('wins', 'losses', 'mcnemar_p', 'holm_p')} == {None}
    for row, right in zip(rows[1:], correct[1:]):
        wins = sum(a and not b for a, b in zip(right.tolist(), correct[0].tolist()))
        losses = sum(b and not a for a, b in zip(right.tolist(), correct[0].tolist()))
        assert (row['wins'], row['losses']) == (wins, losses)
        p_values.append(exact_p(wins, losses))
        assert row['mcnemar_p'] == pytest.approx(p_values[-1])
    assert any(row['wins'] != row['losses'] for row in rows[1:])
    assert [row['holm_p'] for row in rows[1:]] == pytest.approx(holm(p_values))
    table = comparison_table(rows).splitlines()
    assert table[0].count('|') == 12 and all(line.count('|') == 12 for line in table) and 'p (Holm)' in table[0]


def test_compare_of_fewer_models_has_fewer_columns(images, folders):
    data = open_dataset(images)
    two = compare([folders['nope'], folders['rope2d']], data, num_images=6, progress=False)
    assert 'holm_p' not in two[0] and two[1]['mcnemar_p'] is not None
    assert 'Holm' not in comparison_table(two) and '| p |' in comparison_table(two)
    for p, text in (0.001, '0.001'), (0.00002, '2.0e-05'):
        assert f'| {text} |' in comparison_table([two[0], {**two[1], 'mcnemar_p': p}])
    one = compare([folders['nope'], folders['nope']], data, num_images=6, progress=False)
    assert len(one) == 1 and '| p |' not in comparison_table(one)


@pytest.mark.parametrize('module, run', [
    (adapt_module, lambda spec, *args, **kwargs: adapt(
        spec, *args, [(64, 64)], agreement=True, rules=['own'], **kwargs)),
    (compare_module, lambda spec, *args, **kwargs: compare([spec], *args, **kwargs)),
    (shifts_module, lambda spec, *args, **kwargs: shift_sweep([spec], *args, [1], **kwargs)),
    (sweep_module, lambda spec, *args, **kwargs: sweep([spec], *args, [64], rules=['own'], **kwargs)),
], ids=['adapt', 'compare', 'shifts', 'sweep'])
def test_the_seed_draws_the_images(module, run, images, folders, monkeypatch):
    drawn = []

    def spy(model, loader, *args, **kwargs):
        drawn.append(loader.dataset.indices)
        return predict(model, loader, *args, **kwargs)

    monkeypatch.setattr(module, 'predict', spy)
    for seed in (3, 4):
        data = open_dataset(str(images))
        run(folders['nope'], data, num_images=6, seed=seed, progress=False)
        expected = load_images(data, 1, 6, seed=seed).dataset.indices
        assert drawn and all(indices == expected for indices in drawn)
        drawn.clear()


def test_what_is_wrong_is_said_before_the_work(images, folders, seen):
    data = open_dataset(images)
    one = [folders['rope2d']]
    for call, text in (
            (lambda: sweep(one, data, [48, 50]), 'does not divide the size 50x50. Use 48x48 or 56x56.$'),
            (lambda: sweep(one, data, [(48, 3)]), 'does not divide the size 48x3. Use 48x8.$'),
            (lambda: sweep([folders['timm']], data, [(33, 48)]), 'the size 33x48. Use 32x48 or 40x48.$'),
            (lambda: sweep(one, data, [0]), 'does not divide the size 0x0. Use 8x8.$'),
            (lambda: sweep([], data, [48]), 'at least one model and one size'),
            (lambda: sweep(one, data, []), 'at least one model and one size'),
            (lambda: sweep(one, data, [48], crop_mode='border'), "must be squash or center, got 'border'"),
            (lambda: sweep(one, data, [(48, 64)], crop_mode='center'), "at 48x64 than at a square size. Use 'squash'"),
            (lambda: sweep([folders['convolutions']], data, [48]), 'convolutions has no patches'),
            (lambda: sweep([*one, 'vit_small_rope9d'], data, [48]), 'no model, file or folder'),
            (lambda: compare([], data), 'at least one model'),
            (lambda: compare([*one, folders['convolutions']], data), 'convolutions has no patches'),
            (lambda: compare([*one, 'vit_small_rope9d'], data), 'no model, file or folder')):
        with pytest.raises(ValueError, match=text) as e:
            call()
        assert '\n' not in str(e.value)
    assert not seen


def test_rules_that_cannot_be_loaded_are_noticed_before_the_work(images, folders, seen, monkeypatch):
    def load(spec, **kwargs):
        if kwargs.get('pos_enc_kwargs') == {'rope2d': {'resolution': 'yarn'}}:
            raise ValueError('no yarn')
        return load_model(spec, **kwargs)

    monkeypatch.setattr(sweep_module, 'load_model', load)
    with pytest.raises(ValueError, match='no yarn'):
        sweep([folders['nope'], folders['rope2d']], open_dataset(images), [48], progress=False)
    assert not seen


# Figures


def curve(model, rule, sizes, top1):
    return [
        {'model': model, 'rule': rule, 'height': h, 'width': w, 'top1': t, 'top1_low': t - 2, 'top1_high': t + 2}
        for (h, w), t in zip(sizes, top1)]


@pytest.mark.parametrize('suffix', ['png', 'svg', 'pdf'])
def test_figure(suffix, tmp_path):
    sizes = [(160, 160), (224, 224), (224, 448), (448, 224)]
    rows = [row for i in range(5) for rule in ('extrapolate', 'slopes+log') for row in curve(
        f'/some/long/folder/model_{i}', rule, sizes, [60 + i, 70 + i, 50 + 3 * i, 40 + 3 * i])]
    path = tmp_path / f'sweep.{suffix}'
    plot_sweep(rows, path)
    if suffix == 'png':
        picture = matplotlib.image.imread(path)
        assert min(picture.shape[:2]) > 500 and picture.std() > 0.05
    elif suffix == 'svg':
        text = path.read_text()
        assert text.count('<!-- /some/long/folder/model_') == 10
        assert '<!-- 224x448 -->' in text and '<!-- top-1 accuracy (%), 95 % interval -->' in text
    else:
        assert path.read_bytes().startswith(b'%PDF')


def test_figure_of_square_sizes_has_a_scale(tmp_path):
    plot_sweep(curve('model', 'timm', [(224, 224), (160, 160)], [70, 60]), tmp_path / 'sweep.svg')
    text = (tmp_path / 'sweep.svg').read_text()
    assert '<!-- 224 -->' in text and '<!-- image size (px) -->' in text


# Files


def test_files_are_written_all_or_none(tmp_path):
    first, second = tmp_path / 'a.csv', tmp_path / 'b.json'

    def interrupted(path):
        path.write_text('half')
        raise KeyboardInterrupt

    for error, writer in ((KeyboardInterrupt, interrupted), (CommandError, lambda path: path.read_text())):
        with pytest.raises(error):
            files.write_files({first: lambda path: path.write_text('all'), second: writer}, force=False)
        assert not list(tmp_path.iterdir())
    write = {path: lambda path: path.write_text('all') for path in (first, second)}
    files.write_files(write, force=False)
    assert [path.read_text() for path in (first, second)] == ['all', 'all']
    umask = os.umask(0)
    os.umask(umask)
    assert first.stat().st_mode & 0o777 == 0o666 & ~umask  # as for any other file
    assert sorted(tmp_path.iterdir()) == [first, second]


def test_files_that_are_there_are_kept_unless_forced(tmp_path):
    path = tmp_path / 'a.csv'
    path.write_text('mine')
    writes = {path: lambda path: path.write_text('yours')}
    for refused in (
            lambda: files.write_files(writes, force=False),
            lambda: files.check_outputs([path], False, ('.csv',))):
        with pytest.raises(CommandError, match='--force overwrites what is there: .*a.csv'):
            refused()
    assert path.read_text() == 'mine'

    def interrupted(path):
        path.write_text('half')
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_files({path: interrupted}, force=True)
    assert path.read_text() == 'mine'
    files.check_outputs([path], True, ('.csv',))
    files.write_files(writes, force=True)
    assert path.read_text() == 'yours' and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path):
    tmp_path.joinpath('deep').mkdir()
    link, target = tmp_path / 'link.csv', tmp_path / 'deep' / 'table.csv'
    link.symlink_to(target)
    for text in ('first', 'second'):  # it may lead to nothing
        files.write_files({link: lambda path: path.write_text(text)}, force=True)
        assert link.is_symlink() and target.read_text() == text
    with pytest.raises(CommandError, match='--force'):
        files.write_files({link: lambda path: path.write_text('third')}, force=False)
    assert list(tmp_path.joinpath('deep').iterdir()) == [target]
    loop = tmp_path / 'loop.csv'
    loop.symlink_to(loop)
    files.write_files({loop: lambda path: path.write_text('text')}, force=True)
    assert loop.read_text() == 'text'


def test_tables_that_others_can_read(tmp_path):
    rows = [{'name': 'a|b', 'value': math.inf}, {'name': None, 'value': math.nan}, {'name': 'c', 'value': 1.5}]
    files.table_writer(rows, 'notes', '')(tmp_path / 'a.json')
    found = json.loads((tmp_path / 'a.json').read_text(), parse_constant=lambda name: pytest.fail(name))
    assert found['rows'] == [{'name': 'a|b', 'value': None}, {'name': None, 'value': None}, rows[2]]
    assert markdown(rows[:2]).splitlines()[2:] == [r'| a\|b | inf |', '|  | nan |']
    assert markdown([{'name': 'a\nb'}]).splitlines()[2:] == ['| a b |']


def share(column, percent):
    return {column: percent, f'{column}_low': percent - 5, f'{column}_high': percent + 4}


SIZE = {'model': 'm', 'rule': 'ntk', 'height': 32, 'width': 48}


@pytest.mark.parametrize('table, row, line', [
    (comparison_table, {
        **SIZE, **share('top1', 50.), **share('top5', 90.), 'nll': 1.25, 'ece': 12.5, 'wins': 7, 'losses': 2,
        'mcnemar_p': .25, 'holm_p': .5, 'parameters': 1234, 'images_per_second': 9.5},
     'm | 32x48 | 50.0 [45.0, 54.0] | 90.0 [85.0, 94.0] | 1.250 | 12.5 | 7/2 | 0.250 | 0.500 | 1,234 | 9.5'),
    (sweep_table, {
        **SIZE, **share('top1', 50.), 'top5': 90., 'images': 'squash', 'patches': 24, 'images_per_second': 9.5},
     'm | ntk | 32x48 | 24 | 50.0 [45.0, 54.0] | 90.0 | 9.5'),
    (shift_table, {'model': 'm', 'shift': 2, **share('top1', 50.), **share('same', 90.)},
     'm | 2 | 50.0 [45.0, 54.0] | 90.0 [85.0, 94.0]'),
    (adapted_table, {
        **SIZE, **share('score', 50.), **share('difference', 20.), 'measure': 'top1', 'wins': 7, 'losses': 2,
        'chosen': True, 'images_per_second': 9.5},
     '32x48 | **ntk** | 50.0 [45.0, 54.0] | +20.0 [+15.0, +24.0] | 7/2 | 9.5'),
], ids=['compare', 'sweep', 'shifts', 'adapt'])
def test_each_column_has_its_own_figures(table, row, line):
    assert table([row, row]).splitlines()[2:] == [f'| {line} |'] * 2


def test_a_file_that_came_in_between_is_kept(tmp_path):
    path = tmp_path / 'a.csv'

    def write(staged):
        staged.write_text('ours')
        path.write_text('mine')

    with pytest.raises(CommandError, match='--force'):
        files.write_files({path: write}, force=False)
    assert path.read_text() == 'mine' and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize('name, suffixes, text', [
    ('a.txt', files.TABLES, 'a.txt must end in .csv or .json or .md'),
    ('a', files.TABLES, 'must end in'),
    ('a.png', files.TABLES, 'must end in'),
    ('a.csv', files.FIGURES, 'must end in .png or .svg or .pdf'),
    ('none/a.csv', files.TABLES, 'there is no directory .*none to write a.csv to'),
    ('folder.csv', files.TABLES, 'folder.csv is a directory; name a file'),
    ('a.pdf', files.FIGURES, r'a.pdf needs matplotlib: pip install matplotlib, or leave it out'),
    ('closed/a.csv', files.TABLES, 'closed is not writable; name another directory for a.csv'),
])
def test_outputs_are_checked(name, suffixes, text, tmp_path, monkeypatch):
    monkeypatch.setattr(files, 'find_spec', lambda name: None)
    (tmp_path / 'closed').mkdir()
    monkeypatch.setattr(os, 'access', lambda path, mode: Path(path).name != 'closed')  # root may write everywhere
    (tmp_path / 'folder.csv').mkdir()
    with pytest.raises(CommandError, match=text):
        files.check_outputs([None, tmp_path / name], True, suffixes)
    files.check_outputs([None], False, suffixes)


# The command line


@pytest.fixture
def main(monkeypatch):
    monkeypatch.setattr(cli, 'COMMANDS', (sweep_command, compare_command))
    return cli.main


def read_csv(path):
    rows = list(csv.DictReader(path.read_text().splitlines()))
    notes, = {row['notes'] for row in rows}
    assert 'batch 8, float32' in notes and 'torch' in notes
    return rows


def test_sweep_command(main, images, folders, tmp_path, capsys):
    out = tmp_path / 'sweep.csv', tmp_path / 'sweep.svg'
    args = [
        'sweep', folders['rope2d'], '--data-dir', str(images), '--sizes', '48', '32X64', '--batch-size', '8',
        '--workers', '0', '--output', str(out[0]), '--plot', str(out[1])]
    assert main(args) == 0
    printed = capsys.readouterr()
    assert '| 32x64 | 32 |' in printed.out and '24 images of' in printed.out and not printed.err
    rows = read_csv(out[0])
    assert [(row['rule'], row['height'], row['width']) for row in rows] == [
        (rule, *size) for rule in rules_of('rope2d') for size in (('48', '48'), ('32', '64'))]
    assert out[1].read_text().count('rope2d, ') == 8
    assert main([*args, '--force', '--rules', 'yarn', 'ntk+log', '--num-images', '9']) == 0
    assert {row['rule'] for row in read_csv(out[0])} == {'yarn', 'ntk+log'}
    assert main([*args, '--force', '--rules', 'slopes']) == 2
    assert 'has none of the rules slopes. It has extrapolate, rescale, ntk, yarn, extrapolate+log' in (
        capsys.readouterr().err)
    assert main([*args, '--force']) == 0
    capsys.readouterr()

    before = [path.read_text() for path in out]
    assert main([*args[:-2], '--plot', str(tmp_path / 'other.svg')]) == 2  # the table exists already
    err = capsys.readouterr().err
    assert err == f'timm-sape: nothing written; --force overwrites what is there: {out[0]}\n'
    assert [path.read_text() for path in out] == before and not (tmp_path / 'other.svg').exists()
    assert main([*args, '--force', '--num-images', '9']) == 0
    assert {row['num_images'] for row in read_csv(out[0])} == {'9'}
    assert set(tmp_path.iterdir()) == set(out)


@pytest.mark.parametrize('command', ['compare {}', 'sweep {} --sizes 48 --rules own', 'shifts {} --by 1'])
def test_options_of_the_data_reach_the_work(command, images, folders, capsys):
    found = []
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, inputs: found.extend(
        [torch.is_autocast_enabled('cpu')] if isinstance(module, nn.Linear) else []))
    options = ['--data-dir', str(images), '--workers', '0']
    try:
        for extra, text in (([], 'float32'), (['--amp'], 'bfloat16 autocast')):
            found.clear()
            assert cli.main([*command.format(folders['nope']).split(), *options, *extra]) == 0
            assert set(found) == {bool(extra)} and f'24 images of {images}/val, batch 64, {text};' in (
                capsys.readouterr().out)
    finally:
        handle.remove()


def test_images_are_drawn_by_the_seed_of_the_command(main, images, folders, tmp_path):
    found = []
    for seed in ('1', '1', '2'):
        args = ['compare', folders['rope2d'], '--data-dir', str(images), '--num-images', '5', '--workers', '0']
        assert main([*args, '--seed', seed, '--output', str(tmp_path / 'a.json'), '--force']) == 0
        table = json.loads((tmp_path / 'a.json').read_text())
        found.append(table['rows'][0]['nll'])
        assert f'drawn with seed {seed}' in table['notes']
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize('suffix', ['csv', 'json', 'md'])
def test_compare_command(suffix, main, images, folders, tmp_path, capsys):
    out = tmp_path / f'table.{suffix}'
    models = [folders['rope2d'], folders['nope'], folders['timm']]
    assert main([
        'compare', *models, '--data-dir', str(images), '--split', 'val', '--batch-size', '8', '--workers', '0',
        '--output', str(out)]) == 0
    printed = capsys.readouterr().out
    assert f'against {models[0]}, p (Holm) corrected for 2 tests' in printed
    if suffix == 'csv':
        assert [row['model'] for row in read_csv(out)] == models and read_csv(out)[0]['holm_p'] == ''
    elif suffix == 'json':
        read = json.loads(out.read_text())
        assert [row['model'] for row in read['rows']] == models and 'Wilson' in read['notes']
        assert read['rows'][0]['holm_p'] is None and 0 < read['rows'][1]['holm_p'] <= 1
    else:
        assert out.read_text() == printed and printed.startswith('| model | size (px) | top-1 (%) |')


def test_names_without_weights_are_pointed_out(main, images, capsys):
    args = ['--data-dir', str(images), '--num-images', '3', '--batch-size', '8', '--workers', '0']
    assert main(['compare', 'test_vit_rope2d', *args]) == 0
    assert capsys.readouterr().err == (
        'timm-sape: test_vit_rope2d has no pretrained weights and runs with random ones; ignore its accuracy\n')


@pytest.mark.parametrize('command', [
    'compare {}', 'sweep {} --sizes 160 --rules own', 'shifts {} --by 1', 'adapt {} --sizes 160 --agreement',
    'pshap {}'])
def test_each_command_points_out_random_weights(command, images, capsys):
    options = ['--data-dir', str(images), '--num-images', '2', '--workers', '0']
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of the number of classes
        assert cli.main([*command.format('test_vit_nope').split(), *options]) == 0
    assert 'test_vit_nope has no pretrained weights and runs with random ones' in capsys.readouterr().err


def test_weights_of_a_file_are_not_called_random(main, images, tmp_path, capsys):
    """Nor those that the user called random."""
    save_file(timm.create_model('test_vit', num_classes=CLASSES).state_dict(), tmp_path / 'a.safetensors')
    args = ['--data-dir', str(images), '--num-images', '3', '--workers', '0']
    file = f'{tmp_path}/a.safetensors'
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of the number of classes
        for name in (f'test_vit.r160_in1k@{file}', 'test_vit.r160_in1k@random'):
            assert main(['compare', name, *args]) == 0
            assert not capsys.readouterr().err
    assert main(['compare', f'test_vit.r161_in1k@{file}', *args]) == 2
    assert capsys.readouterr().err == (
        'timm-sape: test_vit.r161_in1k: Invalid pretrained tag (r161_in1k) for test_vit.\n')


@pytest.mark.parametrize('args, text', [
    (['sweep', '{rope2d}', '--sizes', '50'], 'does not divide the size 50x50. Use 48x48 or 56x56.'),
    (['sweep', '{rope2d}', '--sizes', '8x100000000'], '--sizes: an image of 8 x 100000000 pixels takes 9.6 GB'),
    (['sweep', '{rope2d}', '--sizes', '48x64', '--crop-mode', 'center'], "Use 'squash'."),
    (['sweep', '{rope2d}', '--sizes', '48', '--output', 'none/a.csv'], 'there is no directory'),
    (['sweep', '{rope2d}', '--sizes', '48', '--plot', 'a.csv'], 'must end in .png or .svg or .pdf'),
    (['compare', '{rope2d}', '--output', 'a.png'], 'must end in .csv or .json or .md'),
    (['compare', '{rope2d}', '--batch-size', '0'], '--batch-size must be at least 1, got 0'),
    (['compare', '{rope2d}', '--num-images', '0'], '--num-images must be at least 1, got 0'),
    (['compare', '{rope2d}', '--workers', '-1'], '--workers must be at least 0, got -1'),
    (['compare', '{rope2d}', '--device', 'warp'], '--device warp: '),
    (['compare', '{rope2d}', '--split', 'test9'], "has no folder 'test9'. Its folders: val."),
    (['compare', '{rope2d}', '--dataset', 'cifar10'], "Unknown data set 'cifar10'. Write e.g. torch/cifar10"),
    (['compare', '{rope2d}', '--dataset', 'trch/cifar10'], "Unknown data set 'trch/cifar10'. Write e.g. torch/cifar10"),
    (['compare', '{rope2d}', '--data-dir', '{image}'], 'The images have no labels'),
    (['compare', '{rope2d}', '--data-dir', 'nowhere'], "There is no image or folder 'nowhere'."),
    (['compare', '{rope2d}', '{few}'], 'the model has 2 classes, from 0 on. Use a model that was trained on these'),
    (['compare', 'vit_small_rope9d'], 'There is no model, file or folder'),
], ids=lambda value: '' if isinstance(value, str) else ' '.join(value))
def test_commands_say_what_is_wrong_in_one_line(args, text, main, images, folders, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if '{few}' in args:
        save_for_hf(make('nope', num_classes=2), tmp_path / 'few')
    named = dict(folders, few=str(tmp_path / 'few'), image=str(images / 'val' / 'class0' / '0.png'))
    args = [named.get(arg[1:-1], arg) for arg in args]
    if '--data-dir' not in args:
        args += ['--data-dir', str(images)]
    if '--workers' not in args:
        args += ['--workers', '0']
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert not out and text in err and err.startswith('timm-sape: ') and err.count('\n') == 1


@pytest.mark.parametrize('error, text', [
    (MemoryError(), 'timm-sape: there is not enough memory; give a smaller size, or fewer images at a time'),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), 'there is not enough memory'),
    (Image.DecompressionBombError('Image size (7 pixels) exceeds limit'), 'exceeds limit; give a smaller size, or le'),
])
def test_lack_of_memory(error, text, main, images, folders, capsys, monkeypatch):
    monkeypatch.setattr(compare_module, 'predict', mock.Mock(side_effect=error))
    assert main(['compare', folders['rope2d'], '--data-dir', str(images), '--workers', '0']) == 2
    err = capsys.readouterr().err
    assert text in err and err.count('\n') == 1


def test_an_image_that_cannot_be_read_in_another_process(main, folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr('torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL', 0.1)  # seconds
    (tmp_path / 'a.png').write_text('no image')
    assert main(['compare', folders['nope'], '--data-dir', str(tmp_path / 'a.png'), '--workers', '1']) == 2
    err = capsys.readouterr().err
    assert 'a.png is not an image that can be read' in err and err.count('\n') == 1 and 'Traceback' not in err
    gc.collect()  # ends the process while the interval is short


@pytest.mark.parametrize('damage', [lambda data: data[:len(data) // 2], lambda data: b'no image'])
def test_a_file_of_a_folder_that_cannot_be_read(damage, main, images, folders, tmp_path, capsys):
    """Unlike in timm, no other image takes its place. A damaged file that is not read does not matter."""
    shutil.copytree(images, tmp_path / 'data')
    path = tmp_path / 'data' / 'val' / 'class1' / '7.png'  # the next one is of class2
    path.write_bytes(damage(path.read_bytes()))
    args = ['compare', folders['nope'], '--data-dir', str(tmp_path / 'data'), '--workers', '0']
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f'timm-sape: {path} is not an image that can be read: ') and err.count('\n') == 1
    data = open_dataset(tmp_path / 'data')
    assert len(data) == 3 * 8 and [data[i][1] for i in (0, 14, 16)] == [0, 1, 2]


def test_data_sets_that_are_not_there(main, tmp_path, capsys, monkeypatch):
    args = ['sweep', 'test_vit_nope', '--sizes', '32', '--data-dir', str(tmp_path), '--dataset']
    assert main([*args, 'torch/mnist', '--split', 'train']) == 2
    err = capsys.readouterr().err
    where, command = err.split(' Fetch it: ')
    assert where == f"timm-sape: No torch/mnist in '{tmp_path}'." and err.count('\n') == 1
    python, option, code = shlex.split(command)
    asked = []
    monkeypatch.setattr('timm.data.create_dataset', lambda *args, **kwargs: asked.append((args, kwargs)))
    exec(code, {})
    assert asked == [(('torch/mnist', str(tmp_path), 'train'), {'download': True})]

    monkeypatch.setitem(sys.modules, 'datasets', None)  # as if it were not installed
    assert main([*args, 'hfds/user/name']) == 2
    err = capsys.readouterr().err
    assert err.startswith('timm-sape: No images in ') and 'datasets' in err and err.count('\n') == 1


def test_images_without_classes(main, images, tmp_path, capsys):
    """timm reads a folder of images as a single class."""
    shutil.copytree(images / 'val' / 'class1', tmp_path / 'flat')
    data = open_dataset(tmp_path / 'flat')
    assert len(data) == 8 and {label for _, label in data} == {-1}
    assert main(['compare', 'test_vit_nope', '--data-dir', str(tmp_path / 'flat'), '--workers', '0']) == 2
    assert 'label' in capsys.readouterr().err
    shutil.copytree(images / 'val', tmp_path / 'both')
    shutil.copy(tmp_path / 'flat' / '0.png', tmp_path / 'both')
    with pytest.raises(ValueError, match='has images next to the folders of its classes'):
        open_dataset(tmp_path / 'both')


@pytest.fixture
def lacking(images, tmp_path):
    """Images without those of the first class, which has an empty folder; train/ has all."""
    shutil.copytree(images / 'val', tmp_path / 'data' / 'val')
    shutil.copytree(images / 'val', tmp_path / 'data' / 'train')
    for path in (tmp_path / 'data' / 'val' / 'class0').iterdir():
        path.unlink()
    return tmp_path / 'data'


@pytest.mark.parametrize('given', ['', 'val'])
@pytest.mark.parametrize('empty', [True, False])
def test_missing_classes_are_numbered_as_in_training(given, empty, lacking, folders, recwarn, monkeypatch):
    if not empty:
        (lacking / 'val' / 'class0').rmdir()
    monkeypatch.chdir(lacking / given)
    data = open_dataset('.')
    assert {label for _, label in data} == {1, 2} and len(data) == 16
    assert data.reader.class_to_idx == {'class0': 0, 'class1': 1, 'class2': 2}
    compare([folders['nope']], data, progress=False)
    assert not recwarn.list


@pytest.mark.parametrize('train, val', [('training', 'valid'), ('train', 'validation'), ('training', 'eval')])
def test_names_of_splits_are_those_of_train_py(train, val, lacking, folders):
    """Else all images were measured, those for training among them."""
    (lacking / 'train').rename(lacking / train)
    (lacking / 'val').rename(lacking / val)
    for split in ('', 'val'):
        data = open_dataset(lacking, split=split)
        assert {label for _, label in data} == {1, 2} and len(data) == 16
        assert data.reader.class_to_idx == {'class0': 0, 'class1': 1, 'class2': 2}
    with pytest.raises(ValueError, match="has no folder 'test'. Its folders: "):
        open_dataset(lacking, split='test')


def test_the_split_test_is_taken_if_there_is_no_other(lacking):
    (lacking / 'val').rename(lacking / 'test')
    data = open_dataset(lacking)
    assert {label for _, label in data} == {1, 2} and len(data) == 16


def test_names_of_a_saved_models_classes(images, folders, tmp_path):
    """They number the folders of images, if they name all of them."""
    names = {'other order': ['class2', 'class0', 'class1'], 'more': [*'abc', 'class2', 'class1', 'class0'],
             'words': ['cat', 'dog', 'fox'], 'gaps': {'5': 'class0', '1': 'class1', '2': 'class2'}}
    expected = {'other order': (1, 2, 0), 'more': (5, 4, 3), 'words': (0, 1, 2), 'gaps': (5, 1, 2)}
    for name, label_names in names.items():
        folder = shutil.copytree(folders['nope'], tmp_path / name)
        config = json.loads((folder / 'config.json').read_text())
        (folder / 'config.json').write_text(json.dumps({**config, 'label_names': label_names}))
        data = open_dataset(images)
        with pytest.warns(UserWarning, match='words have none of the classes of the images, so the labels may') if (
                name == 'words') else contextlib.nullcontext():
            number_classes(data, [str(folder)])
        assert {label: data.reader.class_to_idx[label] for label in ('class0', 'class1', 'class2')} == dict(
            zip(('class0', 'class1', 'class2'), expected[name])), name
    with pytest.raises(ValueError, match='in different ways, .* by the label_names that they were saved with'):
        compare([folders['nope'], str(tmp_path / 'other order')], open_dataset(images), progress=False)
    (folder / 'config.json').write_text(json.dumps({**config, 'label_names': ['class0', 'class2', 'fox']}))
    with pytest.raises(ValueError, match='gaps have only some of the classes of the images, not class1. Give a'):
        compare([str(folder)], open_dataset(images), progress=False)


def test_train_py_numbers_the_classes_anew(images, folders, tmp_path):
    """Whatever `label_names` the model has that it started from. By these all labels were another class's, silently."""
    model = load_model(folders['nope'])
    model.head.weight.data.zero_()
    model.head.bias.data.copy_(torch.eye(CLASSES)[0])  # it predicts the first class
    labels = {'label_names': ['class2', 'class0', 'class1'], 'label_descriptions': {'class2': 'the first'}}
    timm_sape.hub.save(model, tmp_path / 'base', model_config=labels)
    shutil.copytree(images, tmp_path / 'data')
    for n in range(4):
        (tmp_path / 'data' / 'val' / 'class0' / f'{n}.png').unlink()
    base = f'local-dir:{tmp_path}/base'
    path = checkpoint(tmp_path / 'last.pth.tar', base, model)
    for name, labels, top1 in (
            (base, ['class2', 'class0', 'class1'], 40), (path, None, 20), (f'{base}@{path}', None, 20),
            (f'test_vit_nope@{path}', None, 20)):
        kwargs = dict(img_size=48, patch_size=PATCH) if name.startswith('test_vit') else {}
        assert load_model(name, **kwargs).pretrained_cfg.get('label_names') == labels
        data = open_dataset(tmp_path / 'data')
        number_classes(data, [name])
        right = [label for _, label in data].count(0)
        assert 100 * right / len(data) == top1, name
    timm_sape.hub.save(load_model(path), tmp_path / 'tuned')  # its config claims no other order, either
    assert 'the first' in (tmp_path / 'base' / 'config.json').read_text()
    assert 'the first' not in (tmp_path / 'tuned' / 'config.json').read_text()
    timm_sape.hub.save(load_model(f'{base}@{tmp_path}/tuned/model.safetensors'), tmp_path / 'again')
    for name in ('tuned', 'again'):
        assert compare([str(tmp_path / name)], data, progress=False)[0]['top1'] == 20
    name = f'test_vit_nope@{tmp_path}/base/model.safetensors'  # its order is that of its folder
    timm_sape.hub.save(load_model(name, img_size=48, patch_size=PATCH), tmp_path / 'copy')
    assert compare([str(tmp_path / 'copy')], data, progress=False)[0]['top1'] == 40


@pytest.mark.parametrize('label_names, dataset, text', [
    (['class2', 'class0', 'class1'], 'torch/folder', 'in another order than .* Measure on a folder of images, without'),
    (['class2', 'class0', 'class1'], 'hfds/some', 'in another order than .* Give a class map: --class-map FILE'),
    (['class0', 'class1', 'class2'], 'torch/folder', ''), (['class0', 'class1', 'class2'], 'hfds/some', ''),
])
def test_names_of_classes_and_other_data_sets(label_names, dataset, text, images, folders, tmp_path, monkeypatch):
    """All labels were another class's, silently."""
    timm_sape.hub.save(load_model(folders['nope']), tmp_path / 'saved', model_config={'label_names': label_names})
    if dataset == 'hfds/some':
        monkeypatch.setattr(
            'timm_sape.loading.images.create_dataset', lambda *args, **kwargs: ImageDataset(str(images / 'val')))
    data = open_dataset(images, dataset)
    with pytest.raises(ValueError, match=text) if text else contextlib.nullcontext():
        compare([str(tmp_path / 'saved')], data, progress=False)


def test_names_of_the_classes_of_a_model_on_the_hub(images, monkeypatch):
    monkeypatch.setattr('timm_sape.loading.models.why_unreachable', lambda: None)
    monkeypatch.setattr(
        'timm_sape.loading.classes.load_model_config_from_hf',
        lambda name: ({'label_names': ['class2', 'class0', 'class1']}, name, {}))
    data = open_dataset(images)
    number_classes(data, ['hf-hub:someone/model'])
    assert data.reader.class_to_idx == {'class2': 0, 'class0': 1, 'class1': 2}


def test_a_file_beside_a_config(images, folders, tmp_path):
    """NAME@FOLDER/model.safetensors measures what FOLDER does."""
    model = load_model(folders['nope'])
    model.pretrained_cfg.update(mean=(0.1, 0.2, 0.3), crop_pct=1.0)
    timm_sape.hub.save(model, tmp_path / 'saved', model_config={'label_names': ['class2', 'class0', 'class1']})
    found = []
    for name in (str(tmp_path / 'saved'), f'{folders["nope"]}@{tmp_path}/saved/model.safetensors'):
        data = open_dataset(images)
        number_classes(data, [name])
        found.append((data.reader.class_to_idx, str(preprocessing(load_model(name)))))
    assert found[0] == found[1] and found[0][0]['class2'] == 0 and '0.1' in found[0][1]
    for config in ('{"architectures": ["ViT"]}', '[]', '{"architecture": "test_vit_nope", "pretrained_cfg": null}'):
        (tmp_path / 'saved' / 'config.json').write_text(config)  # of another library
        assert '0.1' not in str(preprocessing(load_model(name)))


@pytest.mark.parametrize('names', [('Cat', 'cat'), ('1', '01')])
def test_names_that_timm_orders_at_random(names, images, tmp_path):
    for name in names:
        shutil.copytree(images / 'val' / 'class0', tmp_path / 'data' / name)
    data = open_dataset(tmp_path / 'data')
    with pytest.raises(ValueError, match='orders the classes .* at random, so their numbers may change .* Rename one'):
        number_classes(data, ['test_vit_nope@random'])
    (tmp_path / 'map.txt').write_text('\n'.join(names))
    data = open_dataset(tmp_path / 'data', class_map=str(tmp_path / 'map.txt'))
    assert data.reader.class_to_idx == {names[0]: 0, names[1]: 1}


@pytest.mark.parametrize('split', ['trian', 'Train', 'held_out', 'train[:50%]'])
def test_a_split_that_torchvision_does_not_have(split, tmp_path):
    """timm takes any word but its names for train and val as 'test'."""
    for dataset in ('torch/cifar10', 'torch/MNIST', 'torch/qmnist'):
        with pytest.raises(ValueError, match=f'{dataset} has no split .* Use train or test'):
            open_dataset(tmp_path, dataset, split)
    with pytest.raises(ValueError, match='No torch/cifar10 in'):
        open_dataset(tmp_path, 'torch/cifar10', 'validation')


def test_classes_that_are_not_in_training(lacking):
    (lacking / 'val' / 'class1').rename(lacking / 'val' / 'other')
    with pytest.raises(ValueError, match='has not, so they have no number: other. Move'):
        open_dataset(lacking)
    with pytest.warns(UserWarning, match="has some classes of .*train', but also other. So its classes are numbered"):
        data = open_dataset(lacking / 'val')  # another train/ may be beside a folder
    assert data.reader.class_to_idx == {'class2': 0, 'other': 1}
    (lacking / 'val' / 'class2').rename(lacking / 'val' / 'last')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert open_dataset(lacking / 'val').reader.class_to_idx == {'last': 0, 'other': 1}
    (lacking / 'val' / 'last').rename(lacking / 'val' / 'class2')
    shutil.rmtree(lacking / 'train')
    (lacking / 'train').mkdir()
    assert open_dataset(lacking).reader.class_to_idx == {'class2': 0, 'other': 1}


def test_numbers_of_classes_that_are_a_guess(lacking, folders):
    """Each command warns, as no train/ says which classes are missing."""
    shutil.rmtree(lacking / 'train')
    options = ['--data-dir', str(lacking), '--workers', '0']
    for command in (
            ['compare', folders['nope']], ['sweep', folders['nope'], '--sizes', '48'],
            ['shifts', folders['nope'], '--by', '1'], ['pshap', folders['nope']]):
        with pytest.warns(UserWarning, match='nope has 3 classes, and the images have 2, so their labels may be wrong'):
            assert cli.main([*command, *options]) == 0
    adapt = ['adapt', folders['nope'], '--sizes', '64', *options]
    with pytest.warns(UserWarning, match='nope has 3 classes, and the images have 2'):
        cli.main(adapt)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert cli.main([*adapt, '--agreement']) == 0


def test_hidden_files_are_no_images(images, tmp_path):
    shutil.copytree(images, tmp_path / '.data')
    folder, expected = tmp_path / '.data' / 'val', open_dataset(images)
    for name in ('.ipynb_checkpoints/0-checkpoint.png', 'class1/.ipynb_checkpoints/0.png', 'class1/._0.png', '._0.png'):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b'no image')
    data = open_dataset(tmp_path / '.data')
    assert data.reader.class_to_idx == expected.reader.class_to_idx
    assert [label for _, label in data] == [label for _, label in expected]
    shutil.copytree(folder, tmp_path / 'train')
    shutil.copytree(images / 'val', tmp_path / 'val')
    assert open_dataset(tmp_path).reader.class_to_idx == expected.reader.class_to_idx
    for name in ('class0', 'class1', 'class2'):
        (folder / name).rename(folder / f'.{name}')
    with pytest.raises(ValueError, match='No images in .*: all of them are hidden'):
        open_dataset(tmp_path / '.data')


def test_images_of_kinds_that_timm_does_not_look_for(images, tmp_path):
    """Of these nothing was said, and the figures were those of the others."""
    shutil.copytree(images, tmp_path / 'data')
    folder = tmp_path / 'data' / 'val' / 'class1'
    for name in ('0.webp', '1.BMP', '2.PNG', '.3.webp', 'notes.txt'):
        Image.new('RGB', (8, 8)).save(folder / name, 'PNG')
    with pytest.warns(UserWarning, match=r"^2 images in .*val', such as .*/[01]\.\w*, are left out, as in train.py"):
        assert len(open_dataset(tmp_path / 'data')) == 8 * CLASSES + 1


def test_a_folder_with_the_name_of_a_model(images, folders, tmp_path, monkeypatch, capsys):
    """Random weights were measured, without a word."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders['nope'], 'test_vit_nope')
    with pytest.raises(ValueError, match='Write local-dir:test_vit_nope for the latter, and test_vit_nope@random or'):
        load_model('test_vit_nope')
    assert load_model('local-dir:test_vit_nope').num_classes == CLASSES
    assert load_model('test_vit_nope@random').num_classes == 1000
    Path('test_vit_ape').mkdir()  # has no model in it
    with pytest.warns(UserWarning, match='1000 classes'):
        cli.main(['compare', 'test_vit_ape', '--data-dir', str(images), '--workers', '0'])
    assert 'test_vit_ape has no pretrained weights and runs with random ones' in capsys.readouterr().err


# --- checkpoints of train.py ------------------------------------------------------------------------------------------

def checkpoint(path, name, model, kwargs=None, **args):
    args = argparse.Namespace(**{'model': name, 'num_classes': CLASSES, 'model_kwargs': kwargs or {}, **args})
    torch.save({'arch': name, 'args': args, 'state_dict': model.state_dict()}, path)
    return str(path)


def test_checkpoint_of_a_saved_model(folders, tmp_path):
    """Its weights are those of the checkpoint, not those that training began with."""
    name = f'local-dir:{folders["ape+sape2_k"]}'
    model = timm.create_model(name, pretrained=True)
    for p in model.parameters():
        p.data += 1
    assert_same_state(load_model(checkpoint(tmp_path / 'last.pth.tar', name, model)), model)


@pytest.mark.parametrize('name, options', [
    ('test_vit_rope2d', {'dynamic_img_size': True}), ('test_naflexvit_rope2d', {})])
def test_file_of_a_saved_model_of_any_size(name, options, tmp_path):
    """timm's folder declares the size that the architecture was made for, beside that of the model.

    train.py trains at the former.
    """
    model = randomize(timm.create_model(name, num_classes=CLASSES, img_size=(32, 64), patch_size=8, **options))
    save_for_hf(model, tmp_path / 'saved', safe_serialization=True)
    found = load_model(
        f'{tmp_path}/saved@{tmp_path}/saved/model.safetensors', pos_enc_kwargs={'rope2d': {'resolution': 'rescale'}})
    assert found.ref_grid_size == (4, 8)
    assert tuple(found.pretrained_cfg['input_size']) == (3, 32, 64)
    x = torch.randn(2, 3, 32, 64)
    torch.testing.assert_close(found(x), model.eval()(x))
    path = checkpoint(tmp_path / 'last.pth.tar', f'local-dir:{tmp_path}/saved', model, img_size=None, input_size=None)
    declared = timm.get_pretrained_cfg(name).input_size
    assert tuple(load_model(path).pretrained_cfg['input_size']) == declared != (3, 32, 64)


def test_bare_file_of_a_saved_model_of_one_channel(tmp_path):
    model = randomize(timm.create_model(
        'test_vit_ape', num_classes=CLASSES, img_size=(32, 64), patch_size=8, in_chans=1))
    timm_sape.hub.save(model, tmp_path / 'saved')
    file = f'{tmp_path}/saved@{tmp_path}/saved/model.safetensors'
    found = load_model(file)
    assert tuple(found.pretrained_cfg['input_size']) == (1, 32, 64)
    x = torch.randn(2, 1, 32, 64)
    torch.testing.assert_close(found(x), model.eval()(x))
    torch.testing.assert_close(load_model(file, in_chans=3)(x.expand(-1, 3, -1, -1)), model(x))


@pytest.mark.parametrize('dataset', ['torch/image_folder', 'torch/folder'])
def test_folders_by_the_loader_of_torchvision(dataset, images):
    found, expected = open_dataset(images, dataset), open_dataset(images)
    assert [found[i][1] for i in range(len(found))] == [expected[i][1] for i in range(len(expected))]


@pytest.mark.one_of(2)
@pytest.mark.parametrize('command', [
    ['compare', '{rope2d}'], ['sweep', '{rope2d}', '--sizes', '48'], ['shifts', '{rope2d}', '--by', '1'],
    ['pshap', '{rope2d}', '--num-images', '8'], ['adapt', '{rope2d}', '--sizes', '64', '--agreement']],
    ids=lambda command: command[0])
def test_results_are_kept_if_nobody_reads_the_table(command, images, folders, tmp_path, monkeypatch):
    """As in `timm-sape ... | head`, or where a terminal cannot show a name."""
    def unable(*args, file=None, **kwargs):
        if file in (None, sys.stdout):
            raise RuntimeError('cannot print')

    monkeypatch.setattr('builtins.print', unable)
    output = '--table' if command[0] == 'adapt' else '--output'
    arguments = [argument.format(**folders) for argument in command]
    with contextlib.suppress(RuntimeError):  # adapt says it in a line, and returns 2
        assert cli.main([*arguments, '--data-dir', str(images), output, str(tmp_path / 'rows.csv')]) == 2
    assert (tmp_path / 'rows.csv').read_text().count('\n') > 1


@pytest.mark.parametrize('size', [(16, 64), (16, 32)])
def test_checkpoint_knows_the_size_of_the_images(size, tmp_path):
    """A table of 2x8 patches must not be taken for one of 4x4."""
    kwargs = dict(img_size=size, patch_size=PATCH)
    model = timm.create_model('test_vit_ape', num_classes=CLASSES, **kwargs)
    path = checkpoint(tmp_path / 'last.pth.tar', 'test_vit_ape', model, kwargs=kwargs)
    assert_same_state(load_model(path), model)
    model.set_input_size((32, 32))
    assert_same_state(load_model(path, img_size=32), model)


@pytest.mark.parametrize('args', [{'img_size': 64}, {'input_size': [3, 64, 64], 'img_size': 32}], ids=str)
@pytest.mark.parametrize('name, kwargs', [('test_naflexvit_rope2d', {}), ('test_vit_ape', {'dynamic_img_size': True})])
def test_checkpoint_of_a_model_for_any_size(name, kwargs, args, tmp_path):
    model = timm.create_model(name, num_classes=CLASSES, patch_size=PATCH, **kwargs).eval()
    path = checkpoint(
        tmp_path / 'last.pth.tar', name, model, kwargs={**kwargs, 'patch_size': PATCH}, in_chans=None, **args)
    found, x = load_model(path), torch.randn(1, 3, 64, 64)
    assert image_size_of(found) == (64, 64)
    torch.testing.assert_close(found(x), model(x))


@pytest.mark.parametrize('first, own', [(True, None), (False, False), (True, False)])
def test_checkpoint_knows_the_layout_of_patches(first, own, tmp_path):
    """Weights are for patches as train.py's loader made them, whatever the model says of itself."""
    kwargs = {'img_size': 32, 'patch_size': PATCH, **({} if own is None else {'patchify_channels_last': own})}
    model = randomize(timm.create_model('test_naflexvit_rope2d', num_classes=CLASSES, **kwargs)).eval()
    path = checkpoint(
        tmp_path / 'last.pth.tar', 'test_naflexvit_rope2d', model, kwargs, naflex_loader=True, naflex_max_seq_len=16,
        naflex_patchify_channels_first=first)
    x = torch.randn(2, 3, 32, 32)
    patches = x.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))  # [B, C, H, ph, W, pw]
    patches = patches.permute(*((0, 2, 4, 1, 3, 5) if first else (0, 2, 4, 3, 5, 1))).flatten(3).flatten(1, 2)
    n = 32 // PATCH
    coord = torch.cartesian_prod(torch.arange(n), torch.arange(n)).expand(2, -1, -1)
    torch.testing.assert_close(load_model(path)(x), model(patches, coord))


@pytest.mark.parametrize('suffix', ['safetensors', 'pth'])
def test_a_file_without_a_classifier(suffix, tmp_path):
    model = timm.create_model('test_vit_rope2d', num_classes=0)
    path = str(tmp_path / f'weights.{suffix}')
    save_file(model.state_dict(), path) if suffix == 'safetensors' else torch.save(model.state_dict(), path)
    found = load_model(f'test_vit_rope2d@{path}')
    assert found.num_classes == 0
    assert_same_state(found, model)
    with pytest.raises(ValueError, match='no classes, only features'):
        predict(found, [(torch.zeros(1, 3, 160, 160), torch.zeros(1))])


@pytest.mark.parametrize('classes', [0, CLASSES, 7])
@pytest.mark.parametrize('prefix', ['local-dir:', ''])
def test_a_folder_with_the_weights_of_a_file(prefix, classes, folders, tmp_path, monkeypatch):
    """The folder says what the model is; its path may have an @."""
    shutil.copytree(folders['rope2d'], tmp_path / 'a@b')
    model = timm.create_model(f'local-dir:{folders["rope2d"]}', num_classes=classes)
    save_file(model.state_dict(), tmp_path / 'weights.safetensors')
    monkeypatch.chdir(tmp_path)
    for name in ('a@b', folders['rope2d']):
        assert load_model(prefix + name).num_classes == CLASSES
    found = load_model(f'{prefix}{folders["rope2d"]}@weights.safetensors')
    assert found.num_classes == classes and image_size_of(found) == image_size_of(model)
    assert_same_state(found, model)
    path = checkpoint(tmp_path / 'last.pth.tar', 'test_vit_rope2d', model, num_classes=classes)
    assert_same_state(load_model(f'{prefix}{folders["rope2d"]}@{path}'), model)
    saved, drawn = load_model(folders['rope2d']), load_model(f'{prefix}{folders["rope2d"]}@random')
    assert (saved.head.weight != drawn.head.weight).any()


@pytest.mark.parametrize('spec, kwargs', [
    ('test_vit_nope@{file}', {}), ('test_vit_rope1d@{file}', {}), ('local-dir:{nope}@{file}', {}),
    ('{file}', {'pos_enc': 'nope'}), ('test_vit_rope2d@{file}', {'pos_enc': 'rope1d'}),
    ('test_vit_nope@{saved}/model.safetensors', dict(patch_size=PATCH, img_size=48)),
    ('test_vit_nope@{saved}/pytorch_model.bin', dict(patch_size=PATCH, img_size=48)),
])
def test_a_file_that_says_its_encoding(spec, kwargs, folders, tmp_path):
    """`rope2d` leaves no trace in the weights, so they would load into each of these."""
    sizes = dict(patch_size=PATCH, img_size=48)
    model = timm.create_model('test_vit_rope2d', num_classes=CLASSES, **sizes)
    path = checkpoint(tmp_path / 'last.pth.tar', 'test_vit_rope2d', model, kwargs=sizes)
    save_for_hf(model, tmp_path / 'saved', safe_serialization='both')
    with pytest.raises(ValueError, match='was trained with pos_enc rope2d.*, which cannot be changed to'):
        load_model(spec.format(file=path, nope=folders['nope'], saved=tmp_path / 'saved'), **kwargs)


def test_a_file_that_says_its_encoding_in_models_that_have_it(folders, tmp_path):
    sizes = dict(patch_size=PATCH, img_size=48)
    model = timm.create_model('test_vit_rope2d', num_classes=CLASSES, **sizes)
    path = checkpoint(tmp_path / 'last.pth.tar', 'test_vit_rope2d', model, kwargs=sizes)
    rescale = {'pos_enc_kwargs': {'rope2d': {'resolution': 'rescale'}}, 'ref_grid_size': (6, 6)}
    for name in ('test_vit_rope2d', 'test_naflexvit_rope2d', f'local-dir:{folders["rope2d"]}'):
        assert load_model(f'{name}@{path}', **rescale).pos_enc == 'rope2d'
    assert load_model(path, pos_enc='rope2d').pos_enc == 'rope2d'
    saved = f'{folders["rope2d"]}/pytorch_model.bin'
    assert load_model(f'test_naflexvit_rope2d@{saved}', **sizes).pos_enc == 'rope2d'
    sizes['depth'] = 1
    ape = timm.create_model('vit_tiny_rope2d_ape', num_classes=CLASSES, **sizes)
    path = checkpoint(tmp_path / 'ape.pth.tar', 'vit_tiny_rope2d_ape', ape, kwargs=sizes)
    with pytest.raises(ValueError, match='cannot be changed to ape'):
        load_model(f'vit_tiny_patch16_224@{path}')
    for name in ('vit_tiny_ape', 'of_my_own'):  # the latter is registered elsewhere
        torch.save({**torch.load(path, weights_only=False), 'arch': name}, path)
        assert_same_state(load_model(f'vit_tiny_patch16_224@{path}'), ape)


def test_what_the_caller_declares_for_a_file(tmp_path):
    """It was dropped, silently: 3x5 patches can be 5x3 or 1x15, and the message says to declare the size."""
    model = make('ape', img_size=(24, 40))
    torch.save(model.state_dict(), tmp_path / 'weights.pth')
    load = partial(load_model, f'test_vit_ape@{tmp_path / "weights.pth"}', img_size=32, patch_size=PATCH)
    with pytest.raises(ValueError, match=r'say what it was trained on: pretrained_cfg_overlay=dict\(.* input_size='):
        load()
    others = {name: 2 * value for name, value in model.state_dict().items()}  # the file is what was asked for
    found = load(pretrained_cfg_overlay={'input_size': (3, 24, 40), 'mean': (0.1, 0.2, 0.3), 'state_dict': others})
    model.set_input_size((32, 32))
    assert_same_state(found, model)
    assert found.pretrained_cfg['mean'] == (0.1, 0.2, 0.3)


def test_a_classifier_of_two_heads_is_that_of_the_file(tmp_path):
    model = timm.create_model('deit_tiny_distilled_patch16_224', num_classes=CLASSES, depth=1)
    save_file(model.state_dict(), tmp_path / 'weights.safetensors')
    assert_same_state(load_model(f'deit_tiny_distilled_patch16_224@{tmp_path}/weights.safetensors', depth=1), model)


@pytest.mark.parametrize('args, size', [
    ({'img_size': 64}, (64, 64)), ({'input_size': [3, 64, 32], 'img_size': 32}, (64, 32)),
    ({'img_size': None}, (160, 160)), ({}, (32, 48)),
    ({'naflex_loader': True, 'naflex_max_seq_len': 26}, (40, 40)),
    ({'naflex_loader': False, 'naflex_max_seq_len': 26, 'img_size': 64}, (64, 64)),
], ids=str)
@pytest.mark.parametrize('name, kwargs', [
    ('test_naflexvit_rope2d_ape', {}), ('vit_tiny_rope2d_ape', {'dynamic_img_size': True, 'depth': 1}),
    ('test_naflexvit_ape', {}), ('vit_tiny_patch16_224', {'dynamic_img_size': True, 'depth': 1}),
])
def test_checkpoint_of_a_model_that_was_made_for_another_size(name, kwargs, args, size, tmp_path):
    """train.py validates at its own --img-size, and leaves to the model what it was made for."""
    if 'naflex_loader' in args and 'naflex' not in name:
        return
    if size == (160, 160) and name.startswith('vit_tiny'):
        size = (224, 224)
    kwargs = {**kwargs, 'img_size': (32, 48), 'patch_size': PATCH}
    model = randomize(timm.create_model(name, num_classes=CLASSES, **kwargs)).eval()
    path = checkpoint(tmp_path / 'last.pth.tar', name, model, kwargs=kwargs, in_chans=None, **args)
    found, x = load_model(path), torch.randn(1, 3, *size)
    assert image_size_of(found) == size
    torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-4)
    found = load_model(path, img_size=(32, 48))  # and nothing was resized on the way
    torch.testing.assert_close(found(x[:, :, :32, :32]), model(x[:, :, :32, :32]), rtol=1e-4, atol=1e-4)
    assert_same_state(found, model)


def test_checkpoint_of_the_naflex_loader_shows_whole_images(tmp_path):
    """timm's transform for it crops nothing, whatever --crop-pct is."""
    name, kwargs = 'test_naflexvit_rope2d', {'img_size': 32, 'patch_size': PATCH}
    model = timm.create_model(name, num_classes=CLASSES, **kwargs)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 48, 3), dtype=np.uint8))
    for naflex_loader in (True, False):
        path = checkpoint(
            tmp_path / 'last.pth.tar', name, model, kwargs=kwargs, img_size=32, crop_pct=0.5,
            naflex_loader=naflex_loader, naflex_max_seq_len=16)
        found = load_model(path)
        config = timm.data.resolve_model_data_config(found)
        whole = create_transform(32, naflex=True, patch_size=PATCH, max_seq_len=16, **{
            key: config[key] for key in ('mean', 'std', 'interpolation', 'crop_pct')})(image)
        assert whole.shape == (3, 32, 32) and torch.equal(preprocessing(found)(image), whole) is naflex_loader


@pytest.fixture
def mapped(images, tmp_path):
    """A checkpoint of a model that predicts class 0; by its class map that is the last folder, a fifth of images."""
    shutil.copytree(images, tmp_path / 'data')
    for n in range(4):
        (tmp_path / 'data' / 'val' / 'class2' / f'{n}.png').unlink()
    (tmp_path / 'map.txt').write_text('class2\nclass1\nclass0\n')
    sizes = dict(img_size=48, patch_size=PATCH)
    model = timm.create_model('test_vit_ape', num_classes=CLASSES, **sizes)
    model.head.bias.data[0] = 1e3
    path = checkpoint(tmp_path / 'last.pth.tar', 'test_vit_ape', model, sizes, class_map=str(tmp_path / 'map.txt'))
    checkpoint(tmp_path / 'without.pth.tar', 'test_vit_ape', model, sizes)
    return path


@pytest.mark.parametrize('command, text', [
    ('compare {}', '| 20.0 ['), ('sweep {} --sizes 48', '| 20.0 ['), ('shifts {} --by 1', '| 20.0 ['),
    ('pshap {}', '| all | 20 | 4 |'), ('adapt {} --sizes 64', 'gets 20.0 % of the labels right')])
def test_class_map_of_a_checkpoint(command, text, mapped, tmp_path, capsys):
    arguments = [*command.format(mapped).split(), '--data-dir', str(tmp_path / 'data'), '--workers', '0']
    cli.main(arguments)
    assert text in ''.join(capsys.readouterr())
    (tmp_path / 'other.txt').write_text('class0\nclass1\nclass2\n')
    code = cli.main([*arguments, '--class-map', str(tmp_path / 'other.txt')])
    said = ''.join(capsys.readouterr())
    assert text.replace('20.0', '40.0').replace('20 | 4', '20 | 8') in said
    assert code or f', class map {tmp_path}/other.txt, batch' in said


def test_class_map_that_is_not_there(mapped, tmp_path):
    (tmp_path / 'map.txt').rename(tmp_path / 'data' / 'val' / 'map.txt')
    data = open_dataset(tmp_path / 'data')
    with pytest.raises(ValueError, match='The class map .*map.txt cannot be read: .*Give it by --class-map FILE'):
        compare([mapped], data, progress=False)
    open_dataset(tmp_path / 'data', class_map='map.txt')  # beside the classes, as for train.py
    with pytest.raises(ValueError, match='The class map other.txt cannot be read'):
        open_dataset(tmp_path / 'data', class_map='other.txt')
    (tmp_path / 'empty.txt').touch()
    with pytest.raises(ValueError, match='has none of the classes in'):
        open_dataset(tmp_path / 'data', class_map=str(tmp_path / 'empty.txt'))


def test_class_map_of_one_of_two_models(mapped, tmp_path):
    data = open_dataset(tmp_path / 'data')
    models = [mapped, str(tmp_path / 'without.pth.tar')]
    with pytest.raises(ValueError, match='in different ways, by the class maps that they were trained with'):
        compare(models, data, progress=False)
    assert [compare([model], data, progress=False)[0]['top1'] for model in models] == [20, 40]  # one at a time
    data = open_dataset(tmp_path / 'data', class_map=str(tmp_path / 'map.txt'))
    assert [row['top1'] for row in compare(models, data, progress=False)] == [20, 20]
    (tmp_path / 'part.txt').write_text('class2\n\nclass1\n')
    with pytest.warns(UserWarning, match='8 of 20 images in .* left out, because the class map has no .*: class0.$'):
        data = open_dataset(tmp_path / 'data', class_map=str(tmp_path / 'part.txt'))
    assert sorted(label for _, label in data) == 4 * [0] + 8 * [2]  # as in train.py, others are left out


def test_class_map_is_saved_with_the_model(mapped, tmp_path):
    """Else the labels of what `adapt` has saved would be permuted, silently."""
    assert load_model(mapped).pretrained_cfg['label_names'] == ['class2', 'class1', 'class0']
    timm_sape.hub.save(load_model(mapped), tmp_path / 'saved')
    timm_sape.hub.save(load_model(str(tmp_path / 'without.pth.tar')), tmp_path / 'without')
    top1 = [
        compare([str(tmp_path / name)], open_dataset(tmp_path / 'data'), progress=False)[0]['top1']
        for name in ('saved', 'without')]
    assert top1 == [20, 40]


def test_class_map_with_gaps_is_saved_with_the_model(mapped, tmp_path):
    """By numbers, as timm allows it. Its line without a name is the number of no class."""
    (tmp_path / 'map.txt').write_text('class2\n\nclass1\nclass0\n')
    sizes = dict(img_size=48, patch_size=PATCH)
    model = timm.create_model('test_vit_ape', num_classes=4, **sizes)
    model.head.bias.data[0] = 1e3
    checkpoint(mapped, 'test_vit_ape', model, sizes, class_map=str(tmp_path / 'map.txt'), num_classes=4)
    assert load_model(mapped).pretrained_cfg['label_names'] == {0: 'class2', 2: 'class1', 3: 'class0'}
    timm_sape.hub.save(load_model(mapped), tmp_path / 'saved')
    data = open_dataset(tmp_path / 'data')
    assert compare([str(tmp_path / 'saved')], data, progress=False)[0]['top1'] == 20


class Reader(list):
    """Images as timm's readers of data sets without files give them."""
    class_to_idx = {'a': 0, 'b': 1}

    def __getitem__(self, index):
        data, label = super().__getitem__(index)
        if not data:
            raise AssertionError  # as timm's reader of hfds
        return io.BytesIO(data), label


def test_an_image_of_a_data_set_that_cannot_be_read(images, monkeypatch):
    """timm takes the next one and its label, with a line in the log."""
    good = (images / 'val' / 'class1' / '7.png').read_bytes()
    reader = Reader([(good, 0), (b'no image', 1), (good, None), (b'', 1)])
    monkeypatch.setattr(
        'timm_sape.loading.images.create_dataset', lambda *args, **kwargs: ImageDataset('', reader=reader))
    data = open_dataset(images, 'hfds/some', transform=v2.ToImage())
    assert data[0][0].shape[0] == 3 and [data[i][1] for i in (0, 2)] == [0, -1]
    with pytest.raises(ValueError, match='Image 1 of the data set is not an image that can be read'):
        data[1]
    with pytest.raises(ValueError, match='Image 3 of the data set is not an image that can be read: there is none'):
        data[3]


def test_a_checkpoint_of_a_model_that_is_not_registered(tmp_path):
    torch.save({'arch': 'my_vit', 'state_dict': {}}, tmp_path / 'last.pth.tar')
    with pytest.raises(ValueError, match="last.pth.tar is of 'my_vit', which is not registered.*by --import MODULE"):
        load_model(str(tmp_path / 'last.pth.tar'))


@pytest.mark.parametrize('name', ['{}', 'test_vit_ape@{}'])
def test_nothing_in_a_file_is_executed(name, tmp_path):
    file = tmp_path / 'last.pth.tar'
    torch.save({'arch': 'test_vit_ape', 'state_dict': {}, 'epoch': Executed(str(tmp_path / 'trap'))}, file)
    with pytest.raises(ValueError, match='cannot be read safely|can be read safely'):
        load_model(name.format(file))
    assert not (tmp_path / 'trap').exists()


def test_a_file_that_is_gone(images, tmp_path):
    shutil.copytree(images, tmp_path / 'data')
    data = open_dataset(tmp_path / 'data')
    path = tmp_path / 'data' / 'val' / 'class0' / '0.png'
    path.unlink()
    with pytest.raises(ValueError, match=f"There is no file '{path}'"):
        data[0]


class Stream(IterableDataset):
    transform = None

    def __len__(self):
        return 4

    def __iter__(self):
        return iter([(torch.zeros(3, 4, 4), 0)] * 4)


@pytest.mark.parametrize('draw', [{'num_images': 2}, {'shuffle': True}])
def test_no_images_are_drawn_from_a_stream(draw):
    """The number was ignored, or the subset had no items."""
    assert [len(labels) for _, labels in load_images(Stream(), 3)] == [3, 1]
    with pytest.raises(ValueError, match='No images can be drawn at random from a data set that is read as a stream'):
        load_images(Stream(), 3, **draw)


def test_images_are_drawn_in_the_order_of_the_data_set(images):
    labels = [
        [label for _, batch in load_images(open_dataset(images, transform=v2.ToImage()), 1, 12, **options)
         for label in batch.tolist()]
        for options in ({}, {'shuffle': True})]
    assert labels[0] == sorted(labels[0]) == sorted(labels[1]) != labels[1]


def test_class_map_of_other_data_sets(mapped, images, monkeypatch):
    with pytest.raises(ValueError, match='A class map numbers the folders of images'):
        open_dataset(images, 'torch/image_folder', class_map='map.txt')
    asked = []
    monkeypatch.setattr(
        'timm_sape.loading.images.create_dataset',
        lambda *args, **kwargs: asked.append(kwargs['class_map']) or ImageDataset(*args[1:2]))
    data = open_dataset(images, 'hfds/some')
    with pytest.raises(ValueError, match='was trained with a class map. Give it, too: --class-map .*map.txt'):
        compare([mapped], data, progress=False)
    number_classes(open_dataset(images, 'hfds/some', class_map='map.txt'), [mapped])
    assert asked == [None, 'map.txt']


def test_class_map_of_a_checkpoint_and_a_data_set_of_torchvision(mapped, images, tmp_path):
    """All labels were another class's, silently."""
    data = open_dataset(images, 'torch/folder')
    with pytest.raises(ValueError, match='trained with a class map. It does not apply to .* without --dataset'):
        compare([mapped], data, progress=False)
    checkpoint_of = torch.load(mapped, weights_only=False)
    checkpoint_of['args'].dataset = 'torch/folder'  # then train.py itself ignores the map
    torch.save(checkpoint_of, mapped)
    compare([mapped], data, progress=False)
    data = [data[i] for i in range(len(data))]  # a data set of the caller's own
    number_classes(data, [mapped])


def test_images_of_16_bits_in_a_data_set_of_torchvision(tmp_path):
    """They became white, silently."""
    (tmp_path / 'val' / 'class0').mkdir(parents=True)
    Image.new('I;16', (32, 32), 300).save(tmp_path / 'val' / 'class0' / '0.png')
    with pytest.raises(ValueError, match='0.png has integers of more than 8 bits'):
        open_dataset(tmp_path, 'torch/folder', 'val')[0]


def test_a_checkpoint_of_images_in_another_mode(tmp_path):
    model = timm.create_model('test_vit_nope', num_classes=CLASSES)
    path = checkpoint(tmp_path / 'last.pth.tar', 'test_vit_nope', model, input_img_mode='HSV')
    with pytest.warns(UserWarning, match='was trained on images of mode HSV. Here it gets them as RGB'):
        load_model(path)


@pytest.mark.parametrize('dataset', ['torch/folder', 'torch/image_folder'])
@pytest.mark.parametrize('split', ['', 'tset'])
def test_a_split_that_is_not_there(dataset, split, images, tmp_path):
    """Not silently all splits, whose names would be the classes."""
    for name in ('train', 'test'):
        shutil.copytree(images / 'val', tmp_path / name)
    with pytest.raises(ValueError, match="has no folder '(validation|tset)'. Its folders: test, train"):
        open_dataset(tmp_path, dataset, split)
    assert len(open_dataset(tmp_path, dataset, 'test')) == len(open_dataset(images))
    assert len(open_dataset(tmp_path / 'test', dataset)) == len(open_dataset(images))


def assert_same_state(found, expected):
    expected = expected.state_dict()
    assert found.state_dict().keys() == expected.keys()
    for key, value in found.state_dict().items():
        assert torch.equal(value, expected[key]), key


def test_checkpoint_has_averaged_weights(tmp_path):
    model, averaged = (timm.create_model('test_vit_ape', num_classes=CLASSES) for _ in range(2))
    path = checkpoint(tmp_path / 'last.pth.tar', 'test_vit_ape', model)
    torch.save({**torch.load(path, weights_only=False), 'state_dict_ema': averaged.state_dict()}, path)
    assert_same_state(load_model(path), averaged)


@pytest.mark.parametrize('given, expected', [('', 'bilinear'), (None, 'bilinear'), ('nearest', 'nearest')])
def test_preprocessing_of_a_checkpoint(given, expected, tmp_path):
    name = 'vit_base_patch16_224_miil.in21k'
    kwargs = dict(img_size=32, embed_dim=64, depth=1, num_heads=2)
    path = checkpoint(
        tmp_path / 'last.pth.tar', name, timm.create_model(name, num_classes=CLASSES, **kwargs), interpolation=given)
    assert load_model(path, **kwargs).pretrained_cfg['interpolation'] == expected


def test_options_of_train_py_that_preprocessing_depends_on(tmp_path):
    given = dict(mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6], interpolation='nearest', crop_pct=0.7, crop_mode='border')
    path = checkpoint(
        tmp_path / 'last.pth.tar', 'test_vit_ape', timm.create_model('test_vit_ape', num_classes=CLASSES), **given)
    found = load_model(path).pretrained_cfg
    assert {key: found[key] for key in given} == given


@pytest.mark.parametrize('channels', [1, 3])
def test_preprocessing_of_channels(channels, images, tmp_path):
    torch.save(timm.create_model('test_vit_ape', in_chans=channels).state_dict(), tmp_path / 'weights.pth')
    model = load_model(f'test_vit_ape@{tmp_path / "weights.pth"}')
    x, _ = open_dataset(images, transform=preprocessing(model))[0]
    assert x.shape == (channels, 160, 160)
    assert model(x[None]).shape == (1, 1000)


@pytest.mark.parametrize('seed', [str(2 ** 63), '-1', '1.5', ''])
def test_seeds_that_are_none(seed, main, capsys):
    with pytest.raises(SystemExit) as e:
        main(['compare', 'model', '--data-dir', 'data', f'--seed={seed}'])
    assert e.value.code == 2
    assert 'is not a seed; write an integer from 0 to 9223372036854775807' in capsys.readouterr().err


@pytest.mark.parametrize('sizes', ['0', '-8', '4x4x4', 'big', '48x', ''])
def test_sizes_that_are_none(sizes, main, capsys):
    with pytest.raises(SystemExit) as e:
        main(['sweep', 'model', '--data-dir', 'data', f'--sizes={sizes}'])
    assert e.value.code == 2
    assert 'is not a size; write e.g. 224, or 224x448 for height x width' in capsys.readouterr().err


@pytest.mark.parametrize('command', ['sweep', 'compare'])
def test_help(command, main, capsys):
    with pytest.raises(SystemExit) as e:
        main([command, '--help'])
    assert e.value.code == 0
    out = capsys.readouterr().out
    assert out.count(f'\n  timm-sape {command} ') == {'sweep': 5, 'compare': 3}[command] and '--force' in out


@pytest.mark.parametrize('at', ['work', 'writing'])
def test_interrupt(at, main, images, folders, tmp_path, capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        if at == 'writing':
            Path(args[1]).write_text('half')
        raise KeyboardInterrupt

    monkeypatch.setattr(
        *(('timm_sape.lab.compare.predict',) if at == 'work' else ('timm_sape.lab.tables.write_csv',)), interrupted)
    assert main([
        'compare', folders['nope'], '--data-dir', str(images), '--workers', '0', '--output',
        str(tmp_path / 'a.csv')]) == 130
    assert capsys.readouterr().err == 'timm-sape: interrupted\n'
    assert not list(tmp_path.iterdir())


def test_random_weights_change_no_other_random_numbers():
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    with same_random_weights(3):
        drawn = torch.rand(4)
    assert torch.equal(torch.rand(4), expected) and not torch.equal(drawn, expected)
    with same_random_weights(3):
        assert torch.equal(torch.rand(4), drawn)


def test_random_weights_do_not_depend_on_other_models(images):
    data = open_dataset(str(images))
    both = compare(['test_vit_nope', 'test_vit_ape'], data, num_images=6, seed=3, progress=False)
    alone = compare(['test_vit_ape'], data, num_images=6, seed=3, progress=False)
    assert alone[0]['nll'] == both[1]['nll'] != compare(
        ['test_vit_ape'], data, num_images=6, seed=4, progress=False)[0]['nll']
    both = shift_sweep(['test_vit_nope', 'test_vit_ape'], data, [1, 20], seed=3, progress=False)
    alone = shift_sweep(['test_vit_ape'], data, [1, 20], seed=3, progress=False)
    assert alone == both[2:] != shift_sweep(['test_vit_ape'], data, [1, 20], seed=4, progress=False)


def test_notes_name_the_split_and_what_was_drawn(images, folders, tmp_path, main, capsys):
    shutil.copytree(images / 'val', tmp_path / 'both' / 'val')
    shutil.copytree(images / 'val', tmp_path / 'both' / 'test')
    command = ['compare', folders['nope'], '--data-dir', f'{tmp_path}/both', '--workers', '0', '--num-images']
    for arguments, text in (
            (['24'], f'24 images of {tmp_path}/both/val, batch'),
            (['900'], f'24 images of {tmp_path}/both/val, batch'),
            (['6'], f'6 images of {tmp_path}/both/val, drawn with seed 0, batch'),
            (['6', '--split', 'test'], f'6 images of {tmp_path}/both/test, drawn with seed 0, batch'),
            (['24', '--dataset', 'torch/image_folder'],
             f'24 images of torch/image_folder {tmp_path}/both validation, batch')):
        assert main([*command, *arguments]) == 0
        assert text in capsys.readouterr().out
