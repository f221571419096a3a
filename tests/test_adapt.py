"""`timm-sape adapt`: the best rule for a trained model at another size."""
import argparse
import contextlib
import csv
import json
import math
import random
import re
import shutil
import statistics
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from common import randomize
from PIL import Image
from timm.models import save_for_hf

import timm_sape
from timm_sape import cli
from timm_sape.cli import adapt as adapt_command
from timm_sape.lab.adapt import _chance_hits, _check_labels, adapt, adapted_table, snapshot
from timm_sape.lab.compare import compare
from timm_sape.lab.evaluate import Predictions, wilson_interval
from timm_sape.lab.intervals import paired_interval
from timm_sape.lab.rules import distinct_rules, own_rule, rules_of
from timm_sape.loading import load_images, open_dataset, preprocessing

ALL = ['extrapolate', 'rescale', 'ntk', 'yarn']
ALL += [f'{rule}+log' for rule in ALL]
SIZE = (64, 80)


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    """Images of three classes, most of which `make('rope2d')` gets right, and the same without classes."""
    root = tmp_path_factory.mktemp('images')
    generator = np.random.default_rng(0)
    (root / 'flat').mkdir()
    for i in range(24):
        rough = Image.fromarray(generator.integers(0, 256, (6, 7, 3), dtype=np.uint8))
        rough.resize((60, 50), Image.BICUBIC).save(root / 'flat' / f'{i:02}.png')
    logits, _ = logits_of(make('rope2d'), root, (48, 48), 'flat')
    for i, label in enumerate(logits.argmax(1).tolist()):
        label = i % 3 if i < 6 else label
        (root / 'val' / f'class{label}').mkdir(parents=True, exist_ok=True)
        shutil.copy(root / 'flat' / f'{i:02}.png', root / 'val' / f'class{label}')
    return root


def make(pos_enc, name='test_vit_pos_enc', seed=0, num_classes=3, **kwargs):
    torch.manual_seed(seed)
    pos_enc = {'pos_enc': pos_enc} if pos_enc else {}
    model = randomize(timm.create_model(
        name, num_classes=num_classes, img_size=48, patch_size=8, **pos_enc, **kwargs)).eval()
    with torch.no_grad():  # make it undecided between the classes
        x = torch.nn.functional.interpolate(2 * torch.rand(64, 3, 6, 7) - 1, (48, 48), mode='bicubic')
        model.head.bias -= model(x).mean(0)
    return model


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp('models')
    for pos_enc in ('rope2d', 'nope'):
        save_for_hf(make(pos_enc), root / pos_enc, safe_serialization=True)
    keywords = {'rope2d': {'resolution': 'yarn'}, 'sincos2d': {'resolution': 'rescale'}}
    save_for_hf(make('rope2d+sincos2d', pos_enc_kwargs=keywords), root / 'mixed', safe_serialization=True)
    keywords = {'alibi2d': {'resolution': 'slopes'}}
    save_for_hf(make('alibi2d', pos_enc_kwargs=keywords, logit_scaling='log'), root / 'log', safe_serialization=True)
    save_for_hf(make('rope2d', 'test_naflexvit_pos_enc'), root / 'naflex', safe_serialization=True)
    save_for_hf(make(None, 'test_vit'), root / 'timm', safe_serialization=True)
    save_for_hf(make(None, 'test_vit', attn_layer='diff'), root / 'differential', safe_serialization=True)
    rotary = make(None, 'vit_small_patch16_rope_224', depth=1, embed_dim=32, num_heads=2)
    save_for_hf(rotary, root / 'rotary', safe_serialization=True)
    for name in ('flexivit_small', 'vit_base_patch16_radio_v3'):
        save_for_hf(make(None, name, depth=1, embed_dim=32, num_heads=2), root / name, safe_serialization=True)
    return {path.name: str(path) for path in root.iterdir()}


def logits_of(model, images, size, split='val'):
    """By hand: the logits of all images at a size, and their labels."""
    data = open_dataset(images / 'flat' if split == 'flat' else images, transform=preprocessing(
        model, size, crop_mode='squash'))
    x, labels = zip(*load_images(data, 24))
    with torch.no_grad():
        return model(x[0]), labels[0]


def by_hand(folder, rule, size):
    """The model with a rule at a size, by timm alone."""
    rule, _, factor = rule.partition('+')
    keywords = {} if rule in ('own', 'timm') else {'pos_enc_kwargs': {'rope2d': {'resolution': rule}}}
    if rule != 'timm':
        keywords['logit_scaling'] = 'log' if factor else 'constant'
    return timm.create_model(f'local-dir:{folder}', pretrained=True, img_size=size, **keywords).eval()


# --- scores ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('labelled', [True, False, None])
def test_scores(labelled, images, folders):
    """Labelled images, labelled ones whose labels are ignored, and images without labels."""
    data = open_dataset(images if labelled is not None else images / 'flat')
    found = adapt(folders['rope2d'], data, [SIZE, (32, 32)], agreement=labelled is False, progress=False)
    assert {row['measure'] for row in found.rows} == {'top1' if labelled else 'agreement'}
    assert found.home == '48x48, its own size'
    split = 'flat' if labelled is None else 'val'
    own = make('rope2d')
    at_home, labels = logits_of(own, images, (48, 48), split)
    targets = labels if labelled else at_home.argmax(1)
    assert (labels.min() >= 0) == (labelled is not None)
    assert found.at_home == pytest.approx(100 * (at_home.argmax(1) == targets).double().mean().item(), abs=1e-3)

    assert [(row['height'], row['width'], row['rule']) for row in found.rows] == [
        (*size, rule) for size in (SIZE, (32, 32)) for rule in ALL]
    for size in (SIZE, (32, 32)):
        rows = [row for row in found.rows if (row['height'], row['width']) == size]
        right = []
        for row in rows:
            logits, _ = logits_of(by_hand(folders['rope2d'], row['rule'], size), images, size, split)
            right.append(logits.argmax(1) == targets)
            hits = int(right[-1].sum())
            assert row['num_images'] == 24 and row['score'] == pytest.approx(100 * hits / 24, abs=1e-3)
            assert (row['score_low'], row['score_high']) == pytest.approx(
                [100 * p for p in wilson_interval(hits, 24)], abs=1e-3)
            if row is rows[0]:
                columns = 'difference', 'difference_low', 'difference_high', 'wins', 'losses'
                assert {row[column] for column in columns} == {None}
                continue
            wins, losses = int((right[-1] & ~right[0]).sum()), int((right[0] & ~right[-1]).sum())
            assert (row['wins'], row['losses']) == (wins, losses)
            assert row['difference'] == pytest.approx(100 * (wins - losses) / 24, abs=1e-3)
            assert (row['difference_low'], row['difference_high']) == pytest.approx(
                [100 * p for p in paired_interval(wins, losses, 24, 1 - 0.05 / 7)], abs=1e-3)
        chosen = [row for row in rows if row['chosen']]
        better = [row for row in rows[1:] if row['difference_low'] > 0]
        assert chosen == ([max(better, key=lambda row: row['score'])] if better else rows[:1])
        rule = chosen[0]['rule'].partition('+')[0]
        assert found.chosen[size]['pos_enc_kwargs'] == {'rope2d': {'resolution': rule}}
    assert len({row['score'] for row in found.rows}) > 2  # else nothing above could fail
    lines = adapted_table(found.rows).splitlines()
    assert len(lines) == 2 + 16 and sum('**' in line for line in lines) == 2
    assert ('top-1 (%)' if labelled else 'agreement (%)') in lines[0]


@pytest.mark.parametrize('wins, losses, only, chosen', [
    (7, 1, ['rescale'], 'rescale'),
    (7, 1, None, 'extrapolate'),  # of eight rules one may differ so much by chance
    (12, 0, None, 'rescale'),
    (5, 1, ['rescale'], 'extrapolate'),
    (0, 12, None, 'extrapolate'),
    (0, 0, None, 'extrapolate'),
])
def test_own_rule_is_kept_unless_another_is_shown_to_be_better(
        wins, losses, only, chosen, main, images, folders, capsys, monkeypatch):
    """'rescale' wins and loses as told; 'ntk' wins once more, but loses as often as it wins."""
    own = torch.arange(24) < 12
    rescale, ntk = own.clone(), own.clone()
    rescale[12:12 + wins], rescale[:losses] = True, False
    ntk[12:], ntk[:12] = True, False
    right = {'rescale': rescale, 'ntk': ntk}

    def predict(model, *args, **kwargs):
        rule = own_rule(model) if model.grid_size == (8, 8) else 'home'
        hits = torch.ones(24, dtype=bool) if rule == 'home' else right.get(rule, own)
        return Predictions(torch.stack([hits, ~hits], 1).float(), torch.zeros(24, dtype=torch.long), 1.)

    monkeypatch.setattr('timm_sape.lab.adapt.predict', predict)
    rules = [] if only is None else ['--rules', *only]
    assert main(folders['rope2d'], '--sizes', '64', '--data-dir', images, '--output', 'out', *rules) == 0
    printed = capsys.readouterr().out
    assert own_rule(timm.create_model('local-dir:out', pretrained=True)) == chosen
    kept = "\n64x64: no rule is shown to be better than the model's own, extrapolate.\n"
    taken = "\n64x64: rescale is better than the model's own rule, extrapolate. It was chosen on these images, so its"
    assert (kept in printed, taken in printed) == (chosen == 'extrapolate', chosen == 'rescale')
    assert f'| **{chosen}** |' in printed and printed.count('**') == 2 and f'out: {chosen} at 64x64;' in printed
    card = open('out/README.md').read()
    assert ('by its own rule extrapolate, as no other was shown to be better' in card) == (chosen == 'extrapolate')
    assert ('by the rule rescale (timm-sape adapt)' in card) == (chosen == 'rescale')
    assert ('24 images, on which the rule was chosen' in card) == (chosen == 'rescale')


def test_the_best_of_several_rules_is_chosen(images, folders, monkeypatch):
    hits = {'rescale': 22, 'ntk': 24, 'yarn': 23}

    def predict(model, *args, **kwargs):
        right = torch.arange(24) < (hits.get(own_rule(model), 12) if model.grid_size == (8, 8) else 24)
        return Predictions(torch.stack([right, ~right], 1).float(), torch.zeros(24, dtype=torch.long), 1.)

    monkeypatch.setattr('timm_sape.lab.adapt.predict', predict)
    found = adapt(folders['rope2d'], open_dataset(images), [(64, 64)], progress=False)
    assert [row['rule'] for row in found.rows if row['chosen']] == ['ntk']
    assert all(row['difference_low'] > 0 for row in found.rows if row['rule'] in hits)


@pytest.mark.parametrize('num_classes, unlabelled, measure, names', [
    (3, 0, 'top1', ['class0', 'class1', 'class2']), (4, 0, 'top1', None), (3, 1, 'agreement', None)])
def test_labels_that_do_not_tell_all(num_classes, unlabelled, measure, names, images, folders, monkeypatch):
    """Of fewer classes than the model has, and of not all images."""
    labels = torch.arange(24) % 3
    logits = torch.nn.functional.one_hot(labels, num_classes).float()
    labels[:unlabelled] = -1
    monkeypatch.setattr('timm_sape.lab.adapt.predict', lambda *args, **kwargs: Predictions(logits, labels, 1.))
    found = adapt(folders['nope'], open_dataset(images), [SIZE, SIZE], rules=['own'], progress=False)
    row, = found.rows
    assert (row['measure'], found.label_names, found.at_home) == (measure, names, 100)


def test_predictions_at_the_trained_size(main, images, folders, capsys):
    """A model that was saved at another size is compared with what it predicts where it was trained."""
    model = timm.create_model(f'local-dir:{folders["rope2d"]}', pretrained=True, img_size=96, ref_grid_size=(6, 6))
    timm_sape.hub.save(model, 'at_96')
    found = adapt('at_96', open_dataset(images), [SIZE], agreement=True, progress=False)
    assert found.home == '48x48, where it was trained' and found.at_home == 100
    assert [row['score'] for row in found.rows] == [
        row['score'] for row in adapt(folders['rope2d'], open_dataset(images), [SIZE], agreement=True).rows]
    at_48, _ = logits_of(make('rope2d'), images, (48, 48))
    assert found.classes_at_home == len(at_48.argmax(1).unique())
    at_96, _ = logits_of(model.eval(), images, (96, 96))
    assert (at_96.argmax(1) != at_48.argmax(1)).any()  # else no test

    assert main('at_96', '--sizes', '64x80', '--data-dir', images, '--agreement', '--output', 'out') == 0
    assert 'agreement with its predictions at 48x48, where it was trained;' in capsys.readouterr().out
    assert 'agreement with its predictions at 48x48, where it was trained, 24 images' in open('out/README.md').read()
    assert main('at_96', '--sizes', '64x80', '--data-dir', images) == 0
    assert re.search(r'top-1 accuracy, [678]\d\.\d % at 48x48, where it was trained;', capsys.readouterr().out)


@pytest.mark.parametrize('name, default', [
    ('rope2d', 'extrapolate'), ('nope', 'own'), ('log', 'slopes+log'),
    ('mixed', 'rope2d=yarn,sincos2d=rescale'), ('timm', 'timm')])
def test_default_is_the_rule_of_the_model(name, default, images, folders):
    """It comes first, whatever rules are asked for, and is what the model does when nothing is chosen."""
    model = timm.create_model(f'local-dir:{folders[name]}', pretrained=True)
    assert own_rule(model) == default
    only = [] if name == 'timm' else [list(rules_of(model))[-1]]
    found = adapt(
        folders[name], open_dataset(images), [SIZE], rules=only or None, num_images=6, agreement=True, progress=False)
    assert [row['rule'] for row in found.rows] == list(dict.fromkeys([default, *only]))
    plain = timm.create_model(f'local-dir:{folders[name]}', pretrained=True, img_size=SIZE).eval()
    chosen = timm.create_model(
        f'local-dir:{folders[name]}', pretrained=True, img_size=SIZE, **rules_of(model)[default]).eval()
    x = torch.randn(1, 3, *SIZE)
    assert torch.equal(plain(x), chosen(x))


def test_paired_interval():
    """Its formula, its symmetry, its width, and its coverage of the truth."""
    low, high = paired_interval(7, 2, 50)
    first, second = 8 / 52, 3 / 52
    half = 1.959964 * math.sqrt((first + second - (first - second) ** 2) / 52)
    assert (low, high) == pytest.approx((first - second - half, first - second + half), abs=1e-6)
    assert paired_interval(2, 7, 50) == pytest.approx((-high, -low))
    assert paired_interval(0, 0, 50)[0] == -paired_interval(0, 0, 50)[1] < -0.02
    assert paired_interval(3, 0, 3)[1] <= 1 and paired_interval(0, 3, 3)[0] >= -1
    assert paired_interval(7, 2, 50, 0.99)[1] > high
    rng = random.Random(0)
    for p, q, n in ((0.1, 0.05, 100), (0.02, 0.02, 60), (0.3, 0.2, 30)):
        covered = []
        for _ in range(1500):
            draws = [rng.random() for _ in range(n)]
            low, high = paired_interval(sum(d < p for d in draws), sum(p <= d < p + q for d in draws), n)
            covered.append(low <= p - q <= high)
        assert 0.93 < statistics.mean(covered) <= 1


# --- models ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name, rules', [
    ('rope2d', ALL), ('naflex', ALL), ('timm', ['own', 'own+log']), ('rotary', ALL), ('differential', ['timm']),
    ('flexivit_small', ['timm']), ('vit_base_patch16_radio_v3', ['timm'])])
def test_snapshots(name, rules, folders):
    """Of our models, of timm's as ours, and of one that cannot be converted; all compute what the model computes."""
    model = timm.create_model(f'local-dir:{folders[name]}', pretrained=True).eval()
    x = torch.randn(2, 3, *timm.data.resolve_model_data_config(model)['input_size'][1:])
    with snapshot(folders[name]) as (spec, reason):
        copy = timm.create_model(spec, pretrained=True).eval()
        torch.testing.assert_close(copy(x), model(x), rtol=1e-4, atol=1e-5)
        assert list(rules_of(copy)) == rules
        if name == 'timm' or 'vit_' in name:  # timm resizes the tables of the latter in another way than we do
            resized, expected = (
                timm.create_model(each, pretrained=True, img_size=SIZE).eval()
                for each in (spec, f'local-dir:{folders[name]}'))
            x = torch.randn(2, 3, *SIZE)
            torch.testing.assert_close(resized(x), expected(x), rtol=1e-4, atol=1e-5)
    assert ('bilinearly' in reason) == ('vit_' in name)
    assert ('DiffAttention' in reason) == (name == 'differential')
    assert bool(reason) == (rules == ['timm'])


def test_random_weights_are_the_same_for_each_rule(images):
    """Such a name stands for other weights each time it is loaded. On its own size all rules agree with it."""
    with snapshot('test_vit_rope2d@random') as (spec, _):
        found = adapt(spec, open_dataset(images), [(160, 160)], agreement=True, num_images=4, progress=False)
    assert {row['score'] for row in found.rows} == {100.}


def test_a_model_that_predicts_one_class(main, images, folders, capsys):
    """All rules agree with it, which says nothing."""
    model = make('rope2d')
    torch.nn.init.constant_(model.head.bias, 0)
    model.head.bias.data[1] = 1e3
    timm_sape.hub.save(model, 'constant')
    for name, says in (('constant', True), (folders['rope2d'], False)):
        assert main(name, '--sizes', '64', '--data-dir', images / 'flat') == 0
        assert ('predicts one class for all images at 48x48' in capsys.readouterr().err) is says


def test_training_checkpoint(images, tmp_path):
    args = argparse.Namespace(
        num_classes=3, model_kwargs=dict(pos_enc='rope2d', img_size=48, patch_size=8))
    model = make('rope2d')
    torch.save({'arch': 'test_vit_nope', 'state_dict': model.state_dict(), 'args': args}, tmp_path / 'last.pth.tar')
    with snapshot(str(tmp_path / 'last.pth.tar')) as (spec, _):
        found = adapt(spec, open_dataset(images), [SIZE], rules=['rescale'], progress=False)
        assert [row['rule'] for row in found.rows] == ['extrapolate', 'rescale']
        assert {kwargs['ref_grid_size'] for kwargs in found.chosen.values()} == {(6, 6)}


def test_the_trained_size_beside_another(main, images, folders, capsys):
    """There all rules do the same. So nothing was compared, and nothing is said to be no better."""
    assert main(folders['rope2d'], '--sizes', '64', '48', '--data-dir', images) == 0
    of_64, of_48 = capsys.readouterr().out.splitlines()[-2:]
    assert of_64.startswith('64x64: ') and 'the only rule' not in of_64
    assert of_48 == '48x48: at this size all rules do the same, so only extrapolate was tried.'


def test_labels_and_what_was_tried_are_saved(main, images, folders, tmp_path, capsys):
    (tmp_path / 'map.txt').write_text('class2\nclass0\nclass1\n')
    model = make('rope2d')
    for p in (model.head.weight, model.head.bias):
        p.data = p.data[[2, 0, 1]]
    timm_sape.hub.save(model, tmp_path / 'permuted')
    assert main(
        tmp_path / 'permuted', '--sizes', '48', '--rules', 'extrapolate', '--data-dir', images,
        '--class-map', tmp_path / 'map.txt', '--output', tmp_path / 'new' / 'adapted') == 0
    assert '48x48: at this size all rules do the same, so only extrapolate was tried.' in capsys.readouterr().out
    card = (tmp_path / 'new' / 'adapted' / 'README.md').read_text()
    assert 'by the only rule that was tried, extrapolate (' in card
    adapted, expected = (
        compare([str(folder)], open_dataset(images), progress=False)[0]['top1']
        for folder in (tmp_path / 'new' / 'adapted', folders['rope2d']))
    assert adapted == expected > 50


def test_the_table_is_not_lost_if_the_model_cannot_be_saved(main, images, folders, tmp_path, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr('timm_sape.hub.saving.save_for_hf', full)
    monkeypatch.setattr('timm_sape.lab.adapt.snapshot', lambda spec: contextlib.nullcontext((spec, '')))
    assert main(folders['rope2d'], '--sizes', '64', '--data-dir', images, '--rules', 'rescale',
                '--output', tmp_path / 'deep' / 'adapted') == 2
    printed = capsys.readouterr()
    assert '| 64x64 | rescale |' in printed.out.replace('**', '') and 'No space left' in printed.err


def test_a_refused_call_leaves_no_folders(main, images, tmp_path):
    for sizes in (['64'], ['48', '64']):
        assert main('no_such_model', '--sizes', *sizes, '--data-dir', images, '--output', tmp_path / 'a' / 'b') == 2
        assert not (tmp_path / 'a').exists()


# --- several encodings with rules ------------------------------------------------------------------------------------

def test_names_say_what_each_encoding_gets():
    model = timm.create_model('test_vit_pos_enc', pos_enc='ape+rope2d+alibi2d')
    alike = [
        'alibi2d=extrapolate,rope2d=extrapolate', 'alibi2d=rescale,rope2d=rescale', 'alibi2d=slopes,rope2d=rescale',
        'alibi2d=rescale,rope2d=ntk', 'alibi2d=rescale,rope2d=yarn']
    rotations = [f'alibi2d=extrapolate,rope2d={rule}' for rule in ('rescale', 'ntk', 'yarn')]
    found = rules_of(model)
    assert list(found) == [*alike, *rotations, *(f'{rule}+log' for rule in [*alike, *rotations])]
    for rule, kwargs in found.items():
        assert rules_of(model, [rule]) == {rule: kwargs}
        resolutions = {part: keywords['resolution'] for part, keywords in kwargs['pos_enc_kwargs'].items()}
        assert rule.removesuffix('+log') == ','.join(f'{part}={each}' for part, each in resolutions.items())
        assert kwargs['logit_scaling'] == ('log' if rule.endswith('+log') else 'constant')

    assert list(rules_of(model, ['ntk', 'rescale+log'])) == [alike[3], rotations[1], f'{alike[1]}+log']
    other = rules_of(model, ['rope2d=yarn,alibi2d=slopes'])  # is not among those that are tried by themselves
    assert list(other) == ['alibi2d=slopes,rope2d=yarn']
    chosen = timm.create_model('test_vit_pos_enc', pos_enc='ape+rope2d+alibi2d', **other['alibi2d=slopes,rope2d=yarn'])
    assert own_rule(chosen) == 'alibi2d=slopes,rope2d=yarn'
    assert own_rule(model) == alike[0]
    with pytest.raises(ValueError, match="'rope2d=ntk,rope2d=yarn,alibi2d=slopes' has two rules of rope2d. Name one"):
        rules_of(model, ['rope2d=ntk,rope2d=yarn,alibi2d=slopes'])
    with pytest.raises(ValueError, match='none of the rules rope2d=ntk. It has alibi2d=extrapolate,rope2d=ext'):
        rules_of(model, ['rope2d=ntk'])
    single = timm.create_model('test_vit_rope2d_ape')
    assert list(rules_of(single, ['rope2d=ntk+log'])) == ['ntk+log']


@pytest.mark.parametrize('size', [(96, 96), (48, 96)])
def test_rules_that_do_the_same_are_tried_once(size, images, folders):
    """At the trained aspect ratio slopes are rescaled alike; the model's own rule is kept, whichever it is."""
    names = list(rules_of(timm.create_model(f'local-dir:{folders["log"]}', pretrained=True)))
    assert names == ['extrapolate', 'rescale', 'slopes', 'extrapolate+log', 'rescale+log', 'slopes+log']
    for default, left in (('slopes+log', 'rescale+log'), ('extrapolate', 'slopes+log')):
        assert distinct_rules(names, default, (48, 48), (48, 48)) == [default]
        found = distinct_rules(names, default, size, (48, 48))
        same = {'slopes', left} if size == (96, 96) else set()
        assert found == [name for name in names if name not in same]
        for shape in ((96, 64), (64, 96)):
            found = distinct_rules(names, default, shape, (48, 32))
            assert found == [name for name in names if shape == (64, 96) or name not in ('slopes', left)]
    found = adapt(folders['log'], open_dataset(images), [size], agreement=True, num_images=6, progress=False)
    assert len(found.rows) == len(names) - (2 if size == (96, 96) else 0)
    if size == (96, 96):  # the same, indeed
        logits = [timm.create_model(
            f'local-dir:{folders["log"]}', pretrained=True, img_size=size,
            pos_enc_kwargs={'alibi2d': {'resolution': rule}}).eval()(torch.ones(1, 3, *size))
            for rule in ('slopes', 'rescale')]
        torch.testing.assert_close(*logits)


def test_command_with_several_encodings(main, images, folders, capsys):
    rules = ['rope2d=ntk,sincos2d=extrapolate', 'yarn+log']
    assert main(
        folders['mixed'], '--sizes', '64', '--data-dir', images / 'flat', '--output', 'out', '--rules', *rules) == 0
    printed = capsys.readouterr().out
    for rule in ('rope2d=yarn,sincos2d=rescale', rules[0], 'rope2d=yarn,sincos2d=rescale+log'):
        assert f' {rule} |' in printed or f' **{rule}** |' in printed
    assert re.search(r'rule rope2d=\w+,sincos2d=\w+', open('out/README.md').read())


def test_a_trained_size_that_patches_do_not_divide(images, tmp_path):
    """It is the size of the model itself, not what its patches cover."""
    model = randomize(timm.create_model(
        'vit_tiny_patch16_224', num_classes=3, img_size=50, patch_size=8, depth=1, embed_dim=64, num_heads=2))
    timm_sape.hub.save(timm_sape.graft(model, 'nope', logit_scaling='log'), tmp_path / 'graft')
    found = adapt(f'local-dir:{tmp_path / "graft"}', open_dataset(images), [SIZE], agreement=True, progress=False)
    assert found.home == '50x50, where it was trained'


def test_the_trained_size_of_patches_that_are_not_square(images, tmp_path):
    model = randomize(timm.create_model(
        'test_vit_pos_enc', pos_enc='rope2d', pos_enc_kwargs={'rope2d': {'resolution': 'rescale'}}, num_classes=3,
        img_size=96, patch_size=(8, 4), ref_grid_size=(6, 12)))
    timm_sape.hub.save(model, tmp_path / 'model')
    found = adapt(f'local-dir:{tmp_path / "model"}', open_dataset(images), [SIZE], agreement=True, progress=False)
    assert (found.home_size, found.home) == ((48, 48), '48x48, where it was trained')


# --- the command -----------------------------------------------------------------------------------------------------

@pytest.fixture
def main(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, 'COMMANDS', (adapt_command,))
    monkeypatch.chdir(tmp_path)
    return lambda *args: cli.main(['adapt', '--workers', '0', '--batch-size', '8', *map(str, args)])


def test_command(main, images, folders, capsys):
    """The saved model has the best rule at the size, loads by timm, and still knows its trained grid."""
    assert main(folders['rope2d'], '--sizes', '64x80', '--data-dir', images, '--output', 'out', '--table', 't.csv') == 0
    printed = capsys.readouterr()
    differences = 'differences from extrapolate with intervals of the pairs, all of a size right in 95 % of cases; 24'
    assert not printed.err and differences in printed.out
    assert '% at 48x48, its own size;' in printed.out
    rows = list(csv.DictReader(open('t.csv')))
    assert [row['rule'] for row in rows] == ALL
    best, = (row['rule'] for row in rows if row['chosen'] == 'True')
    assert f"out: {best} at 64x80; timm.create_model('local-dir:out', pretrained=True)" in printed.out

    model = timm.create_model('local-dir:out', pretrained=True).eval()
    assert model.patch_embed.img_size == SIZE and own_rule(model) == best
    x = torch.randn(2, 3, *SIZE)
    assert torch.equal(model(x), by_hand(folders['rope2d'], best, SIZE)(x))
    assert timm_sape.hub.load('out').pos_enc == 'rope2d'
    card = open('out/README.md').read()
    assert f'rule {best}' in card and 'top-1, 24 images' in card
    config = open('out/config.json').read()
    assert json.loads(config)['model_args']['ref_grid_size'] == [6, 6]
    assert '/' not in config and folders['rope2d'] not in card  # no folder of this machine
    assert rules_of(model)['rescale']['ref_grid_size'] == (6, 6)  # so it can be adapted again

    assert main(folders['rope2d'], '--sizes', '64', '--data-dir', images, '--output', 'out') == 2
    assert capsys.readouterr().err == 'timm-sape: out exists; name an --output that does not\n'
    assert main(folders['rope2d'], '--sizes', '64', '--data-dir', images, '--table', 't.csv') == 2
    assert 'nothing written; --force overwrites what is there: t.csv' in capsys.readouterr().err


def test_command_at_several_sizes(main, images, folders, capsys):
    assert main(
        folders['rope2d'], '--sizes', '64', '32x48', '--data-dir', images / 'flat', '--output', 'out',
        '--rules', 'rescale') == 0
    assert 'agreement with its predictions at 48x48, its own size;' in capsys.readouterr().out
    for size in ((64, 64), (32, 48)):
        model = timm.create_model('local-dir:out/{}x{}'.format(*size), pretrained=True)
        assert model.patch_embed.img_size == size and own_rule(model) in ('extrapolate', 'rescale')


def test_command_at_one_size_that_is_given_twice(main, images, folders, capsys):
    assert main(folders['nope'], '--sizes', '64', '64x64', '--data-dir', images / 'flat', '--output', 'out') == 0
    assert capsys.readouterr().out.count('\n64x64: ') == 1 and Path('out', 'config.json').is_file()


@pytest.mark.parametrize('name', ['timm', 'rotary', 'naflex', 'nope'])
def test_command_on_models_of_timm_and_others(name, main, images, folders, capsys):
    size = (64, 96)
    assert main(
        folders[name], '--sizes', '64x96', '--data-dir', images, '--agreement', '--num-images', 9, '--output', 'o') == 0
    printed = capsys.readouterr()
    assert not printed.err and '9 images' in printed.out
    model = timm.create_model('local-dir:o', pretrained=True).eval()
    assert isinstance(model, timm_sape.VisionTransformerPosEnc) == (name != 'naflex')
    assert model(torch.randn(1, 3, *size)).shape == (1, 3)
    if name == 'timm' and own_rule(model) == 'own':  # timm's own model at that size
        x = torch.randn(1, 3, *size)
        stock = timm.create_model(f'local-dir:{folders[name]}', pretrained=True, img_size=size).eval()
        torch.testing.assert_close(model(x), stock(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name, text', [
    ('other', r'other gets \S+ % of the labels right at 48x48, its own size, which is not shown to be better than'),
    ('few', r'few has 2 classes, from 0 on'),
    ('many', r'many gets \S+ % of the labels right at 48x48, its own size, which is not shown to be better than'),
])
def test_labels_of_other_classes(name, text, main, images, capsys):
    """By such labels no rule is better than another."""
    model = make('rope2d', num_classes={'other': 3, 'few': 2, 'many': 1000}[name])
    if name == 'other':  # the same classes in another order
        with torch.no_grad():
            for p in model.head.parameters():
                p.copy_(p.roll(1, 0))
    save_for_hf(model, name, safe_serialization=True)
    arguments = [name, '--sizes', '64', '--data-dir', images, '--rules', 'rescale']
    assert main(*arguments) == 2
    printed = capsys.readouterr()
    assert re.search(text, printed.err) and printed.err.count('\n') == 1 and not printed.out
    assert 'Compare with its own predictions instead: --agreement (in Python agreement=True).' in printed.err
    assert main(*arguments, '--agreement') == 0


@pytest.mark.parametrize('labels, predicted, fine', [
    ([0] * 90 + [1] * 10, [0] * 100, False),  # the most frequent class, always
    ([0] * 90 + [1] * 10, [0] * 90 + [1] * 10, True),
    ([0] * 90 + [1] * 10, [0] * 81 + [1] * 9 + [0] * 9 + [1], False),  # independent of the labels
    ([0, 1, 2, 3] * 25, [0] * 100, False),
    ([0, 1, 2, 3] * 25, [0, 1, 0, 1] * 25, True),
    ([1] * 100, [1] * 80 + [0] * 20, True),  # images of one class: chance is one half
    ([0, 1, 2, 3] * 25, [9] * 99 + [3], False),  # one of a hundred
    ([0, 1, 2], [0, 1, 2], False),  # one of six orders
    ([1] * 100, [1] * 55 + [0] * 45, False),
])
def test_chance_of_a_right_label(labels, predicted, fine):
    args = torch.tensor(labels), torch.tensor(predicted), 10, 'm', '32x32'
    if fine:
        _check_labels(*args)
    else:
        with pytest.raises(ValueError, match='not shown to be better than guessing'):
            _check_labels(*args)


def test_chance_hits():
    """Against all permutations."""
    labels, predicted = torch.tensor([0, 0, 0, 1, 1, 3, 2]), torch.tensor([0, 0, 1, 1, 4, 3, 0])
    hits = [sum(a == b for a, b in zip(labels.tolist(), order)) for order in permutations(predicted.tolist())]
    assert _chance_hits(labels, predicted) == pytest.approx((statistics.mean(hits), statistics.pstdev(hits)))


def test_command_with_one_rule(main, images, folders, capsys):
    """It says so, and saves the model at the size all the same."""
    assert main(folders['differential'], '--sizes', '64', '--data-dir', images / 'flat', '--output', 'out') == 0
    printed = capsys.readouterr()
    assert '\n64x64: there is one rule, timm, so there was nothing to choose.\n' in printed.out
    assert 'keeps the rule of timm' in printed.err and 'DiffAttention' in printed.err
    assert timm.create_model('local-dir:out', pretrained=True)(torch.randn(1, 3, 64, 64)).shape == (1, 3)


@pytest.mark.parametrize('args, text', [
    (['--sizes', '50'], r'does not divide the size 50x50. Use 48x48 or 56x56.'),
    (['--sizes', '64', '--rules', 'slopes'], r'rope2d has none of the rules slopes. It has extrapolate, rescale, ntk'),
    (['--sizes', '64', '--rules', 'rescale', 'slopes'], r'rope2d has none of the rules slopes. It has extra'),
    (['--sizes', '64', '--rules', 'rescale', 'yran'], r"There is no rule 'yran'. Rules: extrapolate, ntk, own,"),
    (['--sizes', '64', '--rules', 'rescale+lgo'], r"There is no rule 'rescale+lgo'. After + there is only log"),
    (['--sizes', '64', '--rules', 'rope2d=slopes'], r"rope2d has no rule 'slopes'. It has extrapolate, rescale, ntk"),
    (['--sizes', '64', '--rules', 'rope2d=ntk,alibi2d=slopes'], r'rope2d has none of the rules rope2d=ntk,alibi2d=slo'),
    (['--sizes', '64', '56', '--output', 'file'], r'file/64x64 cannot be created: Not a directory; name another'),
    (['--sizes', '64', '--output', 'file/x'], r'file/x cannot be created: Not a directory; name another --output'),
    (['--sizes', '64', '--output', 'x' * 300], r'cannot be created: File name too long; name another --output'),
    (['--sizes', '64x4096000'], r'--sizes: an image of 64 x 4096000 pixels takes 3.1 GB, a model many times that, and'),
    (['--sizes', '4096', '--workers', '1'], r'--sizes: 24 images of 4096 x 4096 pixels, which are loaded at a time,'),
    (['--sizes', '4096', '--workers', '1', '--num-images', '22'], r'--sizes: 22 images of 4096 x 4096 pixels'),
    (['--sizes', '64', '--table', 'x.txt'], r'x.txt must end in .csv or .json or .md'),
    (['--sizes', '64', '--num-images', '0'], r'--num-images must be at least 1, got 0'),
    (['--sizes', '64', '--data-dir', 'nowhere'], r"There is no image or folder 'nowhere'"),
])
def test_what_is_wrong_is_said(args, text, main, images, folders, capsys, monkeypatch):
    Path('file').touch()
    monkeypatch.setattr('timm_sape.lab.machine.memory_size', lambda: 4 * 10 ** 9)
    assert main(folders['rope2d'], '--data-dir', images, '--output', 'out', *args) == 2
    err = capsys.readouterr().err
    assert text in err and err.count('\n') == 1


def test_models_without_patches_or_classes(main, images, capsys):
    """What a user of the command can do about it."""
    assert main('resnet18@random', '--sizes', '64', '--data-dir', images) == 2
    assert capsys.readouterr().err == 'timm-sape: resnet18@random has no patches. Use a Vision Transformer.\n'
    save_for_hf(timm.create_model('test_vit', num_classes=0), 'features', safe_serialization=True)
    assert main('features', '--sizes', '64', '--data-dir', images) == 2
    err = capsys.readouterr().err
    assert 'Use one with a classifier' in err and 'num_classes' not in err and err.count('\n') == 1
