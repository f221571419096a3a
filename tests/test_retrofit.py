"""examples/retrofit.py, on tiny models and a handful of images."""
import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from timm.utils import random_seed

from example_tools import check_mirroring, load_script, watch_fine_tuning
from timm_sape.grid import Grid
from timm_sape.lab.evaluate import Predictions
from timm_sape.lab.experiment import lock, shape_of, trained_models
from timm_sape.lab.intervals import corrected_intervals
from timm_sape.loading import load_model

KWARGS = {'img_size': 32, 'patch_size': 8, 'embed_dim': 32, 'depth': 2, 'num_heads': 2}
MODELS = ('not fine-tuned', 'unchanged', 'rpb')


def load():
    return load_script(Path(__file__).parents[1] / 'examples' / 'retrofit.py')


@pytest.fixture
def example():
    return load()


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    """`data`: dark and bright images, some in between. `runs`: an experiment, RoPE with two seeds and APE with one."""
    root = tmp_path_factory.mktemp('made')
    rng = np.random.default_rng(0)
    for split, number in (('train', 32), ('held_out', 10), ('test', 15)):
        for label, level in (('dark', 100), ('bright', 150)):
            folder = root / 'data' / split / label
            folder.mkdir(parents=True)
            for i in range(number):
                pixels = rng.normal(level + rng.normal(0, 25), 60, (32, 32, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f'{i}.png')
    example = load()
    for label, name, seed in (('RoPE-2D', 'vit_tiny_rope2d', 1), ('RoPE-2D', 'vit_tiny_rope2d', 2),
                              ('APE', 'vit_tiny_ape', 1)):
        random_seed(seed)
        config = {'model': name, 'num_classes': 2, 'seed': seed, 'model_kwargs': KWARGS, 'mean': [0.1, 0.2, 0.3]}
        model = timm.create_model(name, num_classes=2, **KWARGS)
        folder = root / 'runs' / label / f'seed{seed}'
        folder.mkdir(parents=True)
        (folder / 'config.yaml').write_text(yaml.safe_dump(config))
        (folder / 'run.json').write_text(json.dumps({'label': label, 'status': 'finished'}))
        state = {'arch': name, 'state_dict': model.state_dict(), 'args': argparse.Namespace(**config)}
        path = folder / 'last.pth.tar'
        torch.save(state, path)
        example.fine_tune(model, *example.train_images(str(root / 'data'), path), 40, 3e-3, 'base')
        torch.save({**state, 'state_dict': model.state_dict()}, path)
    return root


@pytest.fixture
def data(made, tmp_path):
    return shutil.copytree(made / 'data', tmp_path / 'data')


@pytest.fixture
def runs(made, tmp_path):
    return shutil.copytree(made / 'runs', tmp_path / 'runs')


@pytest.fixture
def start(example, data, runs, tmp_path, monkeypatch):
    def run(*options):
        command = [
            'retrofit.py', runs, '--data-dir', data, '--output', tmp_path / 'new', '--bases', 'RoPE-2D', 'APE',
            '--encodings', 'rpb', '--sizes', '32', '48', '--epochs', '1', '--seeds', '1', *options]
        monkeypatch.setattr(sys, 'argv', list(map(str, command)))
        example.main()
    return run


def read(folder):
    return list(map(json.loads, (folder / 'retrofit.jsonl').read_text().splitlines()))


def never(*args):
    raise AssertionError('measured again')


@pytest.mark.full
def test_it_continues_and_refuses_what_does_not_fit(example, start, runs, data, tmp_path, monkeypatch, capsys):
    new, measure = tmp_path / 'new', example.measure
    path = new / 'retrofit.jsonl'

    def interrupted(run, name, *rest):
        if name == 'rpb':  # all that came before is in the tables, what is missing leaves an empty cell
            text = (new / 'retrofit.md').read_text()
            assert '| not fine-tuned | extrapolate |' in text and '| unchanged | yarn+log |' in text
            assert '| rpb | 48 px | 0 |  |  |  |  |  |  |' in text
            assert (new / 'retrofit.png').read_bytes().startswith(b'\x89PNG')
            assert 'RoPE-2D,2,not fine-tuned,48,test' in (new / 'retrofit.csv').read_text()
            raise KeyboardInterrupt
        return measure(run, name, *rest)

    monkeypatch.setattr(example, 'measure', interrupted)
    start('--seeds')  # none: the bases only
    assert len(path.read_text().splitlines()) == 3
    with pytest.raises(KeyboardInterrupt):
        start()
    before = path.read_text().splitlines()
    assert len(before) == 4  # three bases, and one unchanged
    path.write_text('\n'.join(before)[:-20])  # the last line is cut off
    monkeypatch.setattr(example, 'measure', measure)
    start()
    lines = path.read_text().splitlines()
    assert lines[:3] == before[:3] and json.loads(lines[3])['rows'] == json.loads(before[3])['rows']
    expected = [('RoPE-2D', 1, MODELS), ('RoPE-2D', 2, MODELS[:1]), ('APE', 1, MODELS)]
    assert sorted((line['base'], line['seed'], line['model']) for line in read(new)) == sorted(
        (base, seed, model) for base, seed, models in expected for model in models)

    monkeypatch.setattr(example, 'measure', never)
    done = path.read_text()
    start('--sizes', '48', '32')  # the own size is known from the checkpoint
    assert path.read_text() == done
    image, checkpoint = data / 'test' / 'dark' / 'new.png', runs / 'APE' / 'seed1' / 'last.pth.tar'

    def refused(text, *options):
        capsys.readouterr()
        with pytest.raises(SystemExit, match='2'):
            start(*options)
        assert text in capsys.readouterr().err and path.read_text() == done

    refused('has epochs 1, now it is 2. Use the former, or name another --output', '--epochs', '2')
    refused('has sizes [32, 48], now it is [32, 64]', '--sizes', '32', '64')
    refused('must contain 32, the size that the bases were trained at', '--sizes', '48')
    refused('Use 40x40 or 48x48', '--sizes', '32', '44')
    refused('it has 1, 2', '--seeds', '9')
    refused('must be 1 or more', '--num-images', '0')
    refused("'lookhere' has no neutral form", '--encodings', 'lookhere')
    image.write_bytes((data / 'test' / 'dark' / '1.png').read_bytes())
    refused("has images {'train': '64 files")
    image.unlink()
    state = torch.load(checkpoint, weights_only=False)
    torch.save(state, checkpoint)  # another file with the same weights
    start()
    next(iter(state['state_dict'].values())).add_(1)
    torch.save(state, checkpoint)
    refused('APE, seed 1, not fine-tuned has weights')

    # a cell of the first table, by hand
    tested = [row for line in read(new) if line['base'] == 'RoPE-2D' and line['model'] == 'not fine-tuned'
              for row in line['rows'] if (row['split'], row['size']) == ('test', 48)]
    top1, kept = (
        f'{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}' for values in (
            [row['top1'] for row in tested], [100 * (row['top1'] - 50) / (row['own_top1'] - 50) for row in tested]))
    assert f'| {top1} ({kept}) ' in (new / 'retrofit.md').read_text()


def test_fine_tuning_mirrors_left_and_right_and_the_rate_only_falls(example, monkeypatch):
    watched, images = watch_fine_tuning(example, 2, monkeypatch), torch.rand(96, 1, 2, 2)
    example.fine_tune(watched.model, images, torch.zeros(96, dtype=torch.long), 2, 0.1, '')
    rates = watched.rates
    assert len(rates) == 6 and rates == sorted(rates, reverse=True) and rates[-1] < 0.02 < 0.09 < rates[0]
    check_mirroring(images, watched.images)


@pytest.mark.full
def test_all_models_of_a_seed_are_trained_on_the_same_batches(example, data, runs, monkeypatch):
    drawn = []

    def fine_tune(model, *args):
        drawn.append(torch.rand(3))
        return model

    monkeypatch.setattr(example, 'fine_tune', fine_tune)
    monkeypatch.setattr(example, 'sweep_rules', lambda *args: [])
    run = next(run for run in trained_models(runs) if run.label == 'RoPE-2D')
    args = argparse.Namespace(data_dir=str(data), epochs=1, lr=1e-3)
    for name in ('unchanged', 'rpb', 'sape2_k'):
        example.measure(run, name, args, 32)
    assert len(drawn) == 3 and all(numbers.equal(drawn[0]) for numbers in drawn)


def test_models_that_another_process_works_on_are_left_to_it(example, start, tmp_path, monkeypatch, capsys):
    held = lock(tmp_path / 'new' / '.locks' / 'RoPE-2D-seed1-not fine-tuned')
    order = []

    def measure(run, name, args, own_size):
        order.append((run.label, run.seed, name))
        return {'layers': None, 'rows': []}

    def slept(seconds):
        nonlocal held
        if held is not None:
            assert len(order) == 6
            os.close(held)  # the other process was killed
            held = None

    monkeypatch.setattr(example, 'measure', measure)
    monkeypatch.setattr(example, 'write_tables', lambda lines, settings, args: (args.output / 'retrofit.md').touch())
    monkeypatch.setattr(example.time, 'sleep', slept)
    start()
    assert len(order) == len(set(order)) == 7 and order[-1] == ('RoPE-2D', 1, 'not fine-tuned')
    assert 'waiting for another start' in capsys.readouterr().err


def test_the_rule_is_chosen_on_held_out_images(example, runs, data, monkeypatch):
    best = {20: 'ntk', 30: 'yarn'}  # of 20 held-out and 30 test images

    def predict(model, batches):
        labels = torch.cat([labels for _, labels in batches])
        own = model.patch_embed.img_size == (32, 32)
        right = own or model.pos_enc_kwargs['rope2d']['resolution'] == best[len(labels)]
        chosen = torch.where(torch.arange(len(labels)) % 2 == 0, labels, labels if right else 1 - labels)
        return Predictions(torch.eye(2)[chosen], labels, 0)

    monkeypatch.setattr(example, 'predict', predict)
    checkpoint = runs / 'RoPE-2D' / 'seed1' / 'last.pth.tar'
    rules = example.choices(checkpoint, load_model(str(checkpoint)))
    args = argparse.Namespace(data_dir=str(data), sizes=[64, 32], choose_images=20, num_images=30)
    rows = example.sweep_rules(str(checkpoint), checkpoint, rules, args, 32)
    held_out = {row['rule']: row['top1'] for row in rows if (row['split'], row['size']) == ('held_out', 64)}
    assert list(held_out) == list(rules) and held_out['ntk'] == 100 and held_out['yarn'] == 50
    test = [row for row in rows if row['split'] == 'test']
    assert [(row['size'], row['rule'], row['top1']) for row in test] == [(32, 'extrapolate', 100), (64, 'ntk', 50)]


def test_larger_images_are_fewer_and_the_first_of_the_same(example, runs, data, monkeypatch):
    seen = {}

    def predict(model, batches):
        labels = torch.cat([labels for _, labels in batches])
        seen[model.patch_embed.img_size[0], len(labels)] = labels
        right = torch.arange(len(labels)) < 3  # the first three of the draw
        return Predictions(torch.eye(2)[torch.where(right, labels, 1 - labels)], labels, 0)

    monkeypatch.setattr(example, 'predict', predict)
    checkpoint = runs / 'APE' / 'seed1' / 'last.pth.tar'
    args = argparse.Namespace(data_dir=str(data), sizes=[32, 64, 128], choose_images=20, num_images=24)
    rows = example.sweep_rules(
        str(checkpoint), checkpoint, example.choices(checkpoint, load_model(str(checkpoint))), args, 32)
    test = {row['size']: row for row in rows if row['split'] == 'test'}
    assert {size: row['num_images'] for size, row in test.items()} == {32: 24, 64: 24, 128: 6}
    assert seen[128, 6].equal(seen[32, 24][:6])
    assert {size: row['own_top1'] for size, row in test.items()} == {32: 12.5, 64: 12.5, 128: 50}


def test_all_sizes_show_the_whole_height_and_width(example, data, runs, monkeypatch):
    """Of images that are not square, too."""
    wide = np.zeros((32, 96, 3), np.uint8)
    wide[:, :24] = wide[:, -24:] = 255
    for path in (data / 'held_out').glob('*/*.png'):
        Image.fromarray(wide).save(path)
    seen = []

    def predict(model, batches):
        (images, labels), *_ = batches
        seen.append(images)
        return SimpleNamespace(logits=torch.eye(2)[labels], labels=labels)

    monkeypatch.setattr(example, 'predict', predict)
    checkpoint = runs / 'APE' / 'seed1' / 'last.pth.tar'
    args = argparse.Namespace(data_dir=str(data), sizes=[32], choose_images=20, num_images=4)
    rules = example.choices(checkpoint, load_model(str(checkpoint)))
    example.sweep_rules(str(checkpoint), checkpoint, rules, args, 32)
    row = seen[0][0, 0, 16]
    assert row[0] > row[16] and row[-1] > row[16]


@pytest.mark.parametrize('name', ['rpb', 'cope'])
def test_an_encoding_is_added_to_a_base_without_changing_it(name, example, runs):
    checkpoint = runs / 'RoPE-2D' / 'seed1' / 'last.pth.tar'
    base, model = load_model(str(checkpoint)), example.add_encoding(checkpoint, name)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images), base(images), rtol=0, atol=1e-5)
    assert set(model.pos_enc.split('+')) == {'rope2d', f'auto_{name}'}


def test_a_graft_is_shown_the_same_part_of_images(example, runs):
    checkpoint = runs / 'RoPE-2D' / 'seed1' / 'last.pth.tar'
    state = torch.load(checkpoint, weights_only=False)
    own = {'mean': (.1, .2, .3), 'std': (.4, .5, .6), 'crop_pct': .5, 'interpolation': 'nearest'}
    vars(state['args']).update(own)
    torch.save(state, checkpoint)
    for model in (load_model(str(checkpoint)), example.add_encoding(checkpoint, 'rpb')):
        cfg = model.pretrained_cfg
        assert {key: tuple(cfg[key]) if key in ('mean', 'std') else cfg[key] for key in own} == own


@pytest.mark.parametrize('pooling', [{'fc_norm': True}, {'fc_norm': False}, {'class_token': False}], ids=str)
def test_a_graft_reads_the_class_as_its_base(pooling, example, runs):
    checkpoint = runs / 'RoPE-2D' / 'seed1' / 'last.pth.tar'
    kwargs = {**KWARGS, **pooling}
    model = timm.create_model('vit_tiny_rope2d', num_classes=2, global_pool='avg', **kwargs)
    config = {'model': 'vit_tiny_rope2d', 'num_classes': 2, 'gp': 'avg', 'model_kwargs': kwargs}
    (checkpoint.parent / 'config.yaml').write_text(yaml.safe_dump(config))
    torch.save({
        'arch': 'vit_tiny_rope2d', 'state_dict': model.state_dict(), 'args': argparse.Namespace(**config)}, checkpoint)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = load_model(str(checkpoint))(images)
        torch.testing.assert_close(
            example.add_encoding(checkpoint, 'rpb').eval()(images), expected, rtol=0, atol=1e-5)


def test_classes_are_numbered_as_in_the_training(example, data, runs):
    checkpoint = runs / 'APE' / 'seed1' / 'last.pth.tar'
    names = data / 'names.txt'
    for order in (['bright', 'dark'], ['dark', 'bright']):
        names.write_text('\n'.join(order))
        state = torch.load(checkpoint, weights_only=False)
        state['args'].class_map = str(names)
        torch.save(state, checkpoint)
        found = example.open_split(str(data), 'test', checkpoint)
        assert {found.files[i][1]: found[i][1] for i in range(len(found))} == {
            name: label for label, name in enumerate(order)}


def test_models_of_two_sizes_are_refused(runs):
    """Where a comparison takes the size or the chance level of the first for that of all."""
    trained = trained_models(runs)
    assert shape_of(trained) == (32, 32, 2)
    checkpoint = runs / 'APE' / 'seed1' / 'last.pth.tar'
    kwargs = {**KWARGS, 'img_size': (16, 64)}
    model = timm.create_model('vit_tiny_ape', num_classes=2, **kwargs)
    torch.save({
        'arch': 'vit_tiny_ape', 'state_dict': model.state_dict(),
        'args': argparse.Namespace(num_classes=2, model_kwargs=kwargs)}, checkpoint)
    with pytest.raises(ValueError, match='APE 16x64, 2 classes, RoPE-2D 32x32, 2 classes; choose among them'):
        shape_of(trained)


def test_each_part_has_its_rule(example, runs):
    checkpoint = runs / 'RoPE-2D' / 'seed1' / 'last.pth.tar'
    alone = example.choices(checkpoint, load_model(str(checkpoint)))
    assert len(alone) == 8
    assert list(example.choices(checkpoint, example.add_encoding(checkpoint, 'fire'), 'fire')) == list(alone)
    model = example.add_encoding(checkpoint, 'rpe2d')  # has `slopes`, too, which is left out
    found = example.choices(checkpoint, model, 'rpe2d')
    assert list(found) == [f'{rule}, rpe2d {own}' for rule in alone for own in ('extrapolate', 'rescale')]
    kwargs = found['yarn+log, rpe2d rescale']
    assert kwargs['logit_scaling'] == 'log' and kwargs['ref_grid_size'] == (4, 4)
    assert {part: given['resolution'] for part, given in kwargs['pos_enc_kwargs'].items()} == {
        'rope2d': 'yarn', 'auto_rpe2d': 'rescale'}
    assert kwargs['pos_enc_kwargs']['auto_rpe2d']['init'] == model.pos_enc_kwargs['auto_rpe2d']['init'] == 0
    assert list(example.choices(
        runs / 'APE' / 'seed1' / 'last.pth.tar', example.add_encoding(
            runs / 'APE' / 'seed1' / 'last.pth.tar', 'pape'), 'pape')) == [
        'own, pape extrapolate', 'own, pape rescale', 'own+log, pape extrapolate', 'own+log, pape rescale']


def test_what_a_graft_has_become(example, runs):
    model = example.add_encoding(runs / 'RoPE-2D' / 'seed1' / 'last.pth.tar', 'fire').eval()
    encodings = [dict(block.attn.named_modules())['encodings.auto_fire'] for block in model.blocks]
    with torch.no_grad():
        encodings[1].gate.weight.fill_(0.02)
        bias = encodings[1](torch.zeros(1), grid=Grid(4, 4, 1), hook='position_bias')[..., 1:, 1:]
    first, second = example.contributions(model, 'fire', torch.randn(2, 3, 32, 32))
    assert first == {'gate': 0, 'spread': 0} and second['gate'] == pytest.approx(2)
    assert second['spread'] == pytest.approx(bias.std(dim=-1).mean().item(), rel=1e-4) and second['spread'] > 0
    assert encodings[1].gate.weight.item() == pytest.approx(0.02)  # as before
    assert example.contributions(model, 'cpb', torch.randn(1, 3, 32, 32)) == 2 * [{'gate': None, 'spread': None}]


def test_each_table_is_corrected_for_all_its_cells(example):
    values = {
        ('A', 32): {1: 5., 2: 5.5, 3: 5.1}, ('B', 32): {1: 6., 2: 6.6, 3: 6.},
        ('A', 48): {1: 5., 2: 5.5, 3: 5.1}, ('B', 48): {1: 7., 2: 7.4, 3: 7.5}}

    def find(column, size, name):
        return {seed: 'own' if column == 'rule' else value for seed, value in values.get((name, size), {}).items()}

    table = example.compare('top1', ['A', 'B', 'C'], 'A', [32, 48], find)
    assert [(row['model'], row['size'], row['seeds']) for row in table] == [
        ('B', '32 px', 3), ('B', '48 px', 3), ('C', '32 px', 0), ('C', '48 px', 0)]
    _, paired, _ = corrected_intervals(values['B', 48], values['A', 48], 4)
    assert table[1]['corrected, pairs'] == '[{:+.1f}, {:+.1f}]'.format(*paired)
    assert not any(list(table[2].values())[3:])
