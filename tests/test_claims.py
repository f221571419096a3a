"""Tools for the paper's claims: separation of foreground and background, shifted images, and the two examples that use
them on the models of an experiment."""
import argparse
import csv
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn as nn
from PIL import Image
from sklearn.metrics import roc_auc_score
from timm.models import save_for_hf
from timm.utils import random_seed

from example_tools import load_script, write_run
from timm_sape.analysis import position_shap, separation
from timm_sape.lab import shifts as shifts_module
from timm_sape.lab.evaluate import Predictions, wilson_interval
from timm_sape.lab.shifts import shift_images, shift_sweep, shift_table
from timm_sape.lab.sweep import sweep
from timm_sape.cli import main
from timm_sape.loading import load_images, load_model, open_dataset, preprocessing

EXAMPLES = Path(__file__).parents[1] / 'examples'


# Foreground and background


def plain_separation(scores, mask):
    """The measure computed row by row with scikit-learn: from the foreground, and from the background."""
    means = []
    for side in (1, 0):
        aurocs = []
        for i in np.flatnonzero(mask == side):
            others = np.flatnonzero((mask >= 0) & (np.arange(len(mask)) != i))
            aurocs.append(roc_auc_score(mask[others] == side, scores[i, others]))
        means.append(np.mean(aurocs))
    return means


@pytest.mark.parametrize('ties', [False, True])
def test_separation_is_the_area_under_the_curve_of_each_row(ties):
    torch.manual_seed(0)
    scores = torch.randn(3, 2, 12, 12, dtype=torch.float64)
    scores = scores.round() if ties else scores
    masks = torch.randint(-1, 2, (3, 12))
    found = separation(scores, masks)
    for b in range(3):
        for head in range(2):
            expected = plain_separation(scores[b, head].numpy(), masks[b].numpy())
            assert [part[b, head].item() for part in found] == pytest.approx(expected, abs=1e-12)


def test_separation_of_what_is_known():
    mask = torch.tensor([[True, True, False, False, False]])
    alike = (mask.mT == mask).float()[None] - 5 * torch.eye(5)  # what a patch gives to itself does not count
    assert [part.item() for part in separation(alike, mask)] == [1, 1]
    assert [part.item() for part in separation(-alike, mask)] == [0, 0]
    assert [part.item() for part in separation(torch.ones(1, 5, 5), mask)] == [0.5, 0.5]
    looked_at = mask.float()[:, None].expand(1, 5, 5)  # all look at the foreground
    assert [part.item() for part in separation(looked_at, mask)] == [1, 0]
    assert [part.item() for part in separation(alike.long(), mask.int())] == [1, 1]
    assert [part.item() for part in separation(looked_at.bfloat16(), mask.float())] == [1, 0]


def test_separation_where_there_is_nothing_to_compare():
    found = separation(torch.randn(3, 4, 4), torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0], [1, -1, -1, 1]]))
    assert torch.isnan(torch.stack(found)).tolist() == [[True, True, True], [True, False, True]]


@pytest.mark.parametrize('scores, mask, text', [
    ((1, 5, 5), torch.zeros(1, 4), r'got \[1, 5, 5\] and \[1, 4\]\. Leave prefix tokens out'),
    ((5, 5), torch.zeros(5), 'needs scores'),
    ((2, 3, 4, 5), torch.zeros(2, 5), 'needs scores'),
    ((1, 2, 2), torch.tensor([[2, 0]]), r'1 \(foreground\), 0 \(background\) or -1'),
    ((1, 2, 2), torch.tensor([[0.9, 0.1]]), r'1 \(foreground\), 0 \(background\) or -1'),
])
def test_separation_says_what_is_wrong(scores, mask, text):
    with pytest.raises(ValueError, match=text):
        separation(torch.zeros(scores), mask)


def test_separation_of_what_is_no_number():
    """NaN would be sorted as the highest score. Infinite scores are masked pairs."""
    scores, mask = torch.zeros(1, 3, 3), torch.tensor([[1, 1, 0]])
    assert separation(scores.index_fill(1, torch.tensor(2), -math.inf), mask).from_foreground.item() == 0.5
    with pytest.raises(ValueError, match='Some scores are NaN and cannot be compared'):
        separation(scores.index_fill(1, torch.tensor(2), math.nan), mask)


# Shifts


def test_shifted_images():
    image = torch.arange(12.).view(1, 1, 3, 4)  # rows 0 1 2 3, 4 5 6 7, 8 9 10 11
    assert shift_images(image, 1, 0, 'constant')[0, 0].tolist() == [[0, 0, 0, 0], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert shift_images(image, 0, -2, 'replicate')[0, 0].tolist() == [[2, 3, 3, 3], [6, 7, 7, 7], [10, 11, 11, 11]]
    assert shift_images(image, -1, 1, 'circular').equal(image.roll((-1, 1), (2, 3)))
    assert shift_images(image, 2, 0)[0, 0].tolist() == [[8, 9, 10, 11], [4, 5, 6, 7], [0, 1, 2, 3]]
    for fill in ('reflect', 'replicate', 'circular', 'constant'):
        assert shift_images(image, 0, 0, fill).equal(image)
        assert shift_images(image, -2, 3, fill)[..., 0, 3] == image[..., 2, 0]
    for down, right in (3, 0), (0, -4):
        with pytest.raises(ValueError, match='moves all of a 3x4 image out of it'):
            shift_images(image, down, right, 'constant')
    with pytest.raises(ValueError, match="must be one of reflect, replicate, circular, constant, got 'wrap'"):
        shift_images(image, 1, 0, 'wrap')


class Quadrants(nn.Module):
    """A model that classifies an image by its brightest quarter."""
    num_classes = 4

    def forward(self, images):
        return nn.functional.adaptive_avg_pool2d(images.mean(1), 2).flatten(1)


@pytest.fixture
def spots(tmp_path):
    """Black images of 8 x 8 pixels with a white spot of 2 x 2 in the middle of a quarter, which is the class."""
    for label in range(4):
        pixels = np.zeros((8, 8, 3), dtype=np.uint8)
        y, x = 4 * (label // 2) + 1, 4 * (label % 2) + 1
        pixels[y:y + 2, x:x + 2] = 255
        (tmp_path / 'test' / str(label)).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / 'test' / str(label) / 'spot.png')
    return tmp_path


def test_shift_sweep(spots, monkeypatch):
    size = dict(input_size=(3, 8, 8), crop_pct=1.0)
    model = Quadrants()
    model.pretrained_cfg = size
    monkeypatch.setattr(shifts_module, 'load_model', lambda spec: model)
    monkeypatch.setattr(shifts_module, 'number_classes', lambda data, models: None)  # it looks for a file of the model
    rows = shift_sweep(['a'], open_dataset(str(spots)), [0, 1, 4, 4], fill='replicate', batch_size=3, progress=False)
    assert [(row['model'], row['shift'], row['fill'], row['num_images']) for row in rows] == [
        ('a', shift, 'replicate', 4) for shift in (0, 1, 4)]
    # a pixel keeps a spot within its quarter; four put half of the spots into the next one, and half out of the image,
    # where all are equally dark and the first is chosen, which is right for one of the four
    assert [(row['top1'], row['same']) for row in rows] == [(100, 100), (100, 100), (12.5, 12.5)]
    # four of four images, and half an image of four, rounded to none
    four, none = ([round(100 * end, 3) for end in wilson_interval(n, 4)] for n in (4, 0))
    assert [[row['top1_low'], row['top1_high']] for row in rows] == [four, four, none]
    assert shift_table(rows).splitlines()[-1] == f'| a | 4 | 12.5 [0.0, {none[1]:.1f}] | 12.5 [0.0, {none[1]:.1f}] |'


def test_three_of_four_directions(spots, monkeypatch):
    """The interval of a single image takes its directions for one, here nearly right."""
    model = Quadrants()
    model.pretrained_cfg = dict(input_size=(3, 8, 8))
    monkeypatch.setattr(shifts_module, 'load_model', lambda spec: model)
    monkeypatch.setattr(shifts_module, 'number_classes', lambda data, models: None)
    logits = nn.functional.one_hot(torch.tensor([1, 1, 2, 1, 1]), 4).float().view(1, 20)  # unmoved, and four directions
    monkeypatch.setattr(
        shifts_module, 'predict', lambda *args: Predictions(logits, torch.tensor([1]), 1.))
    row, = shift_sweep(['a'], open_dataset(str(spots)), [2], progress=False)
    expected = [75., *(round(100 * end, 3) for end in wilson_interval(1, 1))]
    for column in ('top1', 'same'):
        assert [row[f'{column}{end}'] for end in ('', '_low', '_high')] == expected


def test_shifts_command(spots, tmp_path, capsys):
    torch.manual_seed(0)
    model = timm.create_model('test_vit_sape2_k_ape', num_classes=4, img_size=32, patch_size=8)
    save_for_hf(model, tmp_path / 'model')
    folder = str(tmp_path / 'model')
    command = ['shifts', folder, '--data-dir', str(spots), '--workers', '0']
    assert main([*command, '--by', '0', '2', '--output', str(tmp_path / 'shifts.csv')]) == 0
    rows = list(csv.DictReader((tmp_path / 'shifts.csv').read_text().splitlines()))
    assert [(row['shift'], row['fill']) for row in rows] == [('0', 'reflect'), ('2', 'reflect')]
    assert rows[0]['same'] == '100.0' and f'4 images of {spots}/test, batch' in capsys.readouterr().out
    for args, text in (
            (['--by', '32'], 'moves all of a 32x32 image out of it'),
            (['--by', '-1'], 'Shifts must be 0 pixels or more'),
            (['--by', '1', '--output', str(tmp_path / 'shifts.csv')], '--force overwrites')):
        assert main([*command, *args]) == 2
        assert text in capsys.readouterr().err
    assert main([*command, '--by', '1', '--fill', 'circular', '--output', str(tmp_path / 'shifts.csv'), '--force']) == 0
    assert [row['fill'] for row in csv.DictReader((tmp_path / 'shifts.csv').read_text().splitlines())] == ['circular']


def test_models_without_classes(spots, tmp_path, capsys):
    save_for_hf(timm.create_model('test_vit_nope', num_classes=0, img_size=32, patch_size=8), tmp_path / 'model')
    assert main(['shifts', str(tmp_path / 'model'), '--data-dir', str(spots), '--workers', '0', '--by', '1']) == 2
    assert 'The model has no classes' in capsys.readouterr().err


def test_more_labels_than_classes(spots, tmp_path, capsys):
    save_for_hf(timm.create_model('test_vit_nope', num_classes=2, img_size=32, patch_size=8), tmp_path / 'model')
    assert main(['shifts', str(tmp_path / 'model'), '--data-dir', str(spots), '--workers', '0', '--by', '1']) == 2
    assert 'labels up to 3, but the model has 2 classes' in capsys.readouterr().err


# Examples


KWARGS = {'img_size': 32, 'patch_size': 4, 'embed_dim': 32, 'depth': 2, 'num_heads': 2}


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """The output of `timm-sape experiment`, with models that have not learned anything."""
    root = tmp_path_factory.mktemp('runs')
    negative = {**KWARGS, 'pos_enc_kwargs': {'sape2_k': {'bias_scale': -1.0}}}
    for label, name, kwargs in (
            ('APE', 'vit_tiny_ape', KWARGS), ('K', 'vit_tiny_sape2_k', KWARGS),
            ('K, negative', 'vit_tiny_sape2_k', negative), ('RoPE', 'vit_tiny_rope2d', KWARGS)):
        for seed in (1, 2, 3):
            write_run(root, label, seed, name, 10, kwargs, status='finished' if seed < 3 else None)
    return root


def load(script):
    return load_script(EXAMPLES / script)


def run(*command):
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=600)


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    """Data of examples/foreground.py, with noise instead of CIFAR-10."""
    root = tmp_path_factory.mktemp('digits')
    rng = np.random.default_rng(0)
    for split in ('train', 'test'):
        for label in range(10):
            (root / 'source' / split / str(label)).mkdir(parents=True)
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / 'source' / split / str(label) / '0.png')
    done = run(EXAMPLES / 'foreground.py', 'data', '--source', root / 'source', '--output', root / 'data',
               '--images', '200', '100', '--ink', 'colour')
    assert done.returncode == 0, done.stderr
    return root / 'data'


@pytest.mark.full
def test_digits_on_textures(digits):
    files = {split: sorted(p.relative_to(digits / split) for p in (digits / split).glob('*/*.png'))
             for split in ('train', 'test', 'masks')}
    assert len(files['train']) == 200 and len(files['test']) == 100 and files['test'] == files['masks']
    assert {path.parts[0] for path in files['train']} == set('0123456789')
    for path in files['test']:
        image, mask = (np.asarray(Image.open(digits / part / path), dtype=float) for part in ('test', 'masks'))
        assert image.shape == (32, 32, 3) and mask.shape == (32, 32) and 0.05 < (mask > 128).mean() < 0.5
        ink = image[mask >= 254]  # of one colour, but for rounding, which no texture is
        assert len(ink) and np.ptp(ink, axis=0).max() <= 4 < np.ptp(image[mask == 0], axis=0).max()


def test_ink_of_texture():
    rng = np.random.default_rng(0)
    texture, ink = rng.uniform(0, 255, (2, 32, 32, 3))
    digit = np.zeros((8, 8))
    digit[2:6, 3:5] = 1
    image, mask = load('foreground.py').paste(texture, digit, rng, ink)
    for value, part in ((1, ink), (0, texture)):
        assert np.abs(image - part)[mask == value].max() < 1e-9
    assert (mask == 1).sum() > 20 and (mask == 0).sum() > 500
    image, mask = load('foreground.py').paste(texture, digit, rng, 255)
    assert (image[mask == 1] == 255).all() and np.abs(image - texture)[mask == 0].max() == 0


@pytest.mark.parametrize('pos_enc, is_distance', [
    ('ape+sape2_k', True), ('sape2_k', True), ('sincos2d+sape2_q', True), ('rope2d+sape2_k', False),
    ('ape+peg', False)])
def test_what_counts_as_a_distance(pos_enc, is_distance):
    """What several encodings add to the logits is no distance, nor a multiple of one."""
    random_seed(0)
    model = timm.create_model('vit_tiny_pos_enc', pos_enc=pos_enc, **KWARGS)
    found = load('foreground.py').scores_of(model, torch.randn(2, 3, 32, 32))
    assert ('distance' in found) == is_distance and ('position' in found) == ('sape2' in pos_enc)
    if is_distance:
        assert found['distance'].max() <= 0 and found['position'].abs().equal(-found['distance'])


@pytest.mark.parametrize('global_pool, layers', [('token', 1), ('avg', 2)])
def test_layers_that_foreground_measures(global_pool, layers):
    """Those whose tables are trained."""
    random_seed(0)
    model = timm.create_model('vit_tiny_sape2_k', num_classes=10, global_pool=global_pool, **KWARGS)
    images = torch.randn(2, 3, 32, 32)
    model(images)[:, 0].sum().backward()
    trained = [block.attn.encodings['sape2_k'].table_x.grad.abs().max() > 0 for block in model.blocks]
    assert trained == [True, layers == 2]
    for scores in load('foreground.py').scores_of(model, images.repeat(51, 1, 1, 1)).values():  # in several batches
        assert scores.shape == (102, layers * 2, 64, 64)


def test_columns_of_foreground_by_hand():
    """The best head is chosen on every other image, with its sign, and measured on the rest."""
    example = load('foreground.py')
    mask = torch.tensor([1, 1, 0, 0])
    same = (mask == mask[:, None]).float()  # its area is 1, that of -same 0, and that of none 1/2
    none = torch.zeros(4, 4)
    scores = torch.stack([torch.stack(heads) for heads in (
        (none, -same), (same, -same), (none, -same), (same, none))])  # [n, heads, N, N]
    assert example.measured(scores, mask.expand(4, -1)) == {
        'from foreground': .4375, 'from background': .4375, 'both': .4375, 'best head': .75}


def test_shuffled_masks_are_those_of_other_images():
    example = load('foreground.py')
    masks = torch.tensor(3 * [[1, 1, 0, 0]] + 3 * [[1, 0, 1, 0]])
    scores = (masks[:, :, None] == masks[:, None]).float()[:, None]
    assert example.measured(scores, masks)['both'] == 1
    # with each of the other five: 12 of 30 are alike, and a mask of the other kind has an area of 1/4
    assert example.shuffled(scores, masks)['both'] == pytest.approx((12 + 18 / 4) / 30, abs=1e-4)


def test_controls_of_foreground():
    example = load('foreground.py')
    areas = {
        ('trained', 'distance', 'own'): .9, ('trained', 'distance', 'shuffled'): .8,
        ('untrained', 'distance', 'own'): .6, ('untrained', 'distance', 'shuffled'): .55,
        ('trained', 'content', 'own'): .4, ('trained', 'logits', 'own'): .35, ('trained', 'keys', 'own'): .2}
    rows = [{'runs': '', 'model': '', 'seed': '', 'state': 'no model', 'score': 'colour', 'mask': 'own', 'both': .7}]
    rows += [
        {'runs': 'r', 'model': 'K', 'seed': seed, 'state': state, 'score': score, 'mask': mask, 'both': both}
        for (state, score, mask), both in areas.items() for seed in (1, 2)]
    row, = example.compared(rows)
    assert {key: cell.split(' ')[0] for key, cell in row.items()} == {
        'trained in': 'r', 'model': 'K', 'own mask - shuffled': '+0.100', 'trained - untrained': '+0.300',
        'distance - content': '+0.500', 'distance - keys': '+0.700', 'distance - colour': '+0.200'}


def test_half_a_patch_of_ink_is_foreground(tmp_path):
    ink = np.zeros((32, 32), np.uint8)
    ink[:2, :4], ink[4:8, :4], ink[8, 0] = 255, 255, 255  # half of a patch, a whole one, and a pixel
    for folder, mode in (('test', 'RGB'), ('masks', 'L')):
        (tmp_path / folder / '0').mkdir(parents=True)
        Image.fromarray(ink).convert(mode).save(tmp_path / folder / '0' / '0.png')
    _, classes = load('foreground.py').read_test(tmp_path, 1)
    assert classes.tolist() == [[{0: 1, 8: 1, 16: -1}.get(i, 0) for i in range(64)]]


@pytest.mark.full
def test_models_see_what_the_mask_shows(digits, runs, tmp_path, monkeypatch):
    example, seen = load('foreground.py'), []
    monkeypatch.setattr(example, 'scores_of', lambda model, inputs: seen.append(inputs) or {})
    example.measure(argparse.Namespace(
        runs=[runs], models=['APE'], data_dir=digits, images=6, output=tmp_path / 'a.csv'))
    pixels = np.stack([np.asarray(image) for image in example.read_test(digits, 6)[0]])
    expected = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=1e-5)


@pytest.mark.full
def test_foreground_example(digits, runs, tmp_path):
    done = run(EXAMPLES / 'foreground.py', 'measure', runs, '--data-dir', digits, '--output', tmp_path / 'a.csv',
               '--images', '40')
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / 'a.csv').read_text().splitlines()))
    notes, = {row['notes'] for row in rows}
    assert notes.startswith('40 images, of 64 patches ') and 'torch' in notes
    found = {(row['model'], row['seed'], row['state'], row['score'], row['mask']): row for row in rows}
    # content and keys of all; position and logits of all but APE; distance of SaPE2
    assert len(found) == len(rows) == 2 * (2 + 2 * 2 * (2 + 5 + 5 + 4))
    for seed in '12':
        for score in ('content', 'keys', 'position', 'logits', 'distance'):
            trained, fresh = (found['K', seed, state, score, 'own'] for state in ('trained', 'untrained'))
            assert trained['both'] == fresh['both']  # nothing was trained: made with the seed of the training
        near, added = (found['K', seed, 'trained', score, 'own'] for score in ('distance', 'position'))
        assert float(near['both']) == pytest.approx(1 - float(added['both']), abs=1e-3)
        other = [found['K, negative', seed, 'trained', score, 'own']['both'] for score in ('distance', 'position')]
        assert other == [near['both']] * 2
    assert float(found['', '', 'no model', 'colour', 'own']['from foreground']) > 0.9
    places = [found['', '', 'no model', 'place', mask] for mask in ('own', 'shuffled')]
    assert float(places[0]['both']) == pytest.approx(float(places[1]['both']), abs=1e-3)
    values = [float(found['K', seed, 'trained', 'distance', 'own']['both']) for seed in '12']
    line = next(line for line in done.stdout.splitlines() if '| K | trained | distance | own |' in line)
    assert line.split(' | ')[7] == f'{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}'
    colour = float(found['', '', 'no model', 'colour', 'own']['both'])
    line = next(line for line in done.stdout.split('Differences')[1].splitlines() if '| K |' in line)
    assert line.split(' | ')[3].startswith('+0.000') and f'{np.mean(values) - colour:+.3f} [' in line


@pytest.mark.full
def test_claims_example(digits, runs, tmp_path):
    done = run(EXAMPLES / 'claims.py', runs, '--data-dir', digits, '--output', tmp_path / 'new', '--sizes', '16', '48',
               '--shifts', '4', '--num-images', '30', '--models', 'RoPE', 'K')
    assert done.returncode == 0, done.stderr
    sizes, moved = (
        list(csv.DictReader((tmp_path / 'new' / f'{name}.csv').read_text().splitlines()))
        for name in ('resolutions', 'shifts'))
    assert {(row['model'], row['rule']) for row in sizes} == {
        ('APE', 'own'), ('K', 'own'), ('RoPE', 'extrapolate'), ('RoPE', 'rescale')}
    assert len(sizes) == 4 * 2 * 3 and len(moved) == 3 * 2 * 2
    top1 = {(row['model'], row['rule'], row['height'], row['seed']): float(row['top1']) for row in sizes}
    changes = [top1['RoPE', 'rescale', '48', seed] - top1['APE', 'own', '48', seed] for seed in '12']
    tables = done.stdout.split('\n\n')

    def cell(title, line):
        table = tables[next(i for i, text in enumerate(tables) if title in text) + 1]
        return next(text for text in table.splitlines() if text.startswith(f'| {line} |')).split(' | ')[-1].rstrip(' |')

    assert cell('Top-1 in percent, at other sizes', 'APE').startswith(
        f'{np.mean([top1["APE", "own", "48", seed] for seed in "12"]):.1f} ± ')
    assert cell('The same minus APE', 'RoPE, rescale').startswith(f'{np.mean(changes):+.1f} [')
    shares = [
        100 * (top1['K', 'own', '48', seed] - 10) / (top1['K', 'own', '32', seed] - 10) for seed in '12'
        if top1['K', 'own', '32', seed] > 10]
    assert cell('in percent of that at 32 px', 'K').startswith(f'{np.mean(shares):.1f}' if shares else '')
    same = [float(row['same']) for row in moved if row['model'] == 'K' and row['shift'] == '4']
    assert cell('keep their class', 'K').startswith(f'{np.mean(same):.1f} ± ')


def test_lines_of_claims(capsys):
    """Each rule of a composition has a line, and a run that has nothing above chance keeps no share of it."""
    example = load('claims.py')
    both = 'alibi2d=extrapolate,rope2d=extrapolate', 'alibi2d=rescale,rope2d=rescale'
    top1 = {
        'RoPE': {'extrapolate': [(50, 40), (60, 35)], 'rescale': [(50, 45), (60, 50)]},
        'both': dict(zip(both, [[(30, 20), (10, 12)], [(30, 25), (10, 9)]])),
        'none': {'own': [(20, 15), (30, 20)]},
    }
    rows = [
        {'model': model, 'rule': rule, 'height': height, 'seed': seed, 'top1': value}
        for model, rules in top1.items() for rule, seeds in rules.items() for seed, values in enumerate(seeds, 1)
        for height, value in zip((32, 64), values)]
    lines = example.lines_of(rows, 'height', 'top1')
    found = example.kept(lines, 32, 10)
    assert found == {
        ('RoPE', 'extrapolate'): {64: {1: 75, 2: 50}}, ('RoPE', 'rescale'): {64: {1: 87.5, 2: 80}},
        ('both', both[0]): {64: {1: 50}}, ('both', both[1]): {64: {1: 75}}, ('none', ''): {64: {1: 50, 2: 50}}}
    example.show('Kept', found, 'both')
    out = capsys.readouterr().out.splitlines()
    assert 'Kept, mean ± standard deviation over 1 to 2 seeds:' in out
    assert f'| both, {both[1]} | 75.0 |' in out and f'| both, {both[1]} | +25.0 |' in out  # minus its first rule
    assert '| none | 50.0 ± 0.0 |' in out and '| RoPE, rescale | +37.5 |' in out


@pytest.mark.full
def test_what_claims_asks_for(digits, runs, tmp_path, monkeypatch, capsys):
    example = load('claims.py')

    def shift_sweep(models, data, shifts, *, fill, **options):
        assert fill == 'constant' and options == {'num_images': 30, 'batch_size': 250}
        return [{'model': '', 'shift': s, 'num_images': 30, 'top1': 50., 'same': 100. - s} for s in shifts]

    def sweep(models, data, sizes, *, rules, **options):
        return [{'model': '', 'rule': 'own', 'height': size, 'num_images': 30, 'top1': 50.} for size in sizes]

    monkeypatch.setattr(example, 'shift_sweep', shift_sweep)
    monkeypatch.setattr(example, 'sweep', sweep)
    command = [
        'claims.py', runs, '--data-dir', digits, '--output', tmp_path / 'new', '--sizes', '16', '--shifts', '4',
        '--fill', 'constant', '--num-images', '30', '--models', 'K']
    monkeypatch.setattr(sys, 'argv', list(map(str, command)))
    example.main()
    same = capsys.readouterr().out.split('keep their class')[1]
    assert '| 4 px |' in same and '0 px' not in same


@pytest.mark.full
def test_claims_are_not_overwritten(digits, runs, tmp_path, monkeypatch, capsys):
    (tmp_path / 'shifts.csv').write_text('precious')
    command = ['claims.py', runs, '--data-dir', digits, '--output', tmp_path, '--num-images', '1', '--models', 'K']
    monkeypatch.setattr(sys, 'argv', list(map(str, command)))
    with pytest.raises(SystemExit, match='2'):
        load('claims.py').main()
    assert 'shifts.csv exists; name a new folder' in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ['shifts.csv']
    assert (tmp_path / 'shifts.csv').read_text() == 'precious'


@pytest.mark.full
def test_what_the_reference_table_measures(digits, runs, tmp_path):
    example = load('reference_table.py')
    checkpoint = str(next(runs.glob('RoPE/seed1/last.pth.tar')))
    for name, split in (('test', 'test'), ('val', 'train')):  # images beside the test images change nothing
        (tmp_path / name).symlink_to(digits / split)
    found = example.measure(checkpoint, tmp_path, 'cpu')
    data = open_dataset(str(digits))
    for size in (48, 64):
        for row in sweep([checkpoint], data, [size], progress=False):
            assert found.pop(f'top1_{size}px_{row["rule"]}') == row['top1']
    moved, = shift_sweep([checkpoint], data, [4], progress=False)
    assert (found.pop('top1_shifted_4px'), found.pop('same_shifted_4px')) == (moved['top1'], moved['same'])
    model, data = load_model(checkpoint), open_dataset(str(digits))
    data.transform = preprocessing(model)
    batches = load_images(data, 50, 512, shuffle=True)
    assert found.pop('position_shap') == round(position_shap(model, batches).value, 4) and not found


@pytest.mark.full
@pytest.mark.parametrize('command, text', [
    (['claims.py', 'RUNS', '--data-dir', 'DIGITS', '--output', 'new', '--baseline', 'Apes'], "finished run of 'Apes'"),
    (['claims.py', 'RUNS', '--data-dir', 'nowhere', '--output', 'new'], "no image or folder 'nowhere'"),
    (['claims.py', 'RUNS', '--data-dir', 'DIGITS', '--output', 'new', '--fill', 'x', '--sizes', '32'], 'fill must be'),
    (['claims.py', 'RUNS', '--data-dir', 'TEST', '--output', 'new', '--sizes', '32'], "has no folder 'test'"),
    (['claims.py', 'DIGITS', '--data-dir', 'DIGITS', '--output', 'new'], 'has no finished runs'),
    (['foreground.py', 'measure', 'RUNS', '--data-dir', 'DIGITS', '--output', 'a', '--models', 'x'], 'it has APE, K'),
    (['foreground.py', 'measure', 'RUNS', '--data-dir', 'DIGITS', '--output', 'no/a.csv'], 'there is no folder no'),
    (['foreground.py', 'measure', 'RUNS', '--data-dir', 'DIGITS', '--output', 'DIGITS'], 'exists; name a new file'),
    (['foreground.py', 'measure', 'RUNS', '--data-dir', 'TEST', '--output', 'a'], 'has no masks; name a folder'),
    (['foreground.py', 'measure', 'RUNS', '--data-dir', 'DIGITS', '--output', 'a', '--images', '0'], 'be 1 or more'),
    (['foreground.py', 'measure', 'RUNS', '--data-dir', 'DIGITS', '--output', 'a', '--images', '5'], 'of 5 other'),
    (['foreground.py', 'data', '--source', 'nowhere', '--output', 'new', '--images', '0', '9'], '--images must be 1'),
    (['foreground.py', 'data', '--source', 'SOURCE', '--output', 'new', '--images', '99', '8'], 'among 8 images of'),
    (['foreground.py', 'data', '--source', 'nowhere', '--output', 'new'], 'nowhere has neither cifar-10-batches-py'),
    (['foreground.py', 'data', '--source', 'nowhere', '--output', 'DIGITS'], 'exists; name a new folder'),
])
def test_examples_say_what_is_wrong(command, text, digits, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    places = {'RUNS': runs, 'DIGITS': digits, 'TEST': digits / 'test', 'SOURCE': digits.parent / 'source'}
    script, *args = (str(places.get(word, word)) for word in command)
    monkeypatch.setattr(sys, 'argv', [script, *args])
    with pytest.raises(SystemExit, match='2'):
        load(script).main()
    assert text in capsys.readouterr().err.splitlines()[-1]
