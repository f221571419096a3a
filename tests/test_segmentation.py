"""examples/segmentation.py: the probe against plain loops, and the command on tiny models and images of one colour."""
import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from example_tools import load_script, write_run
from timm_sape.lab.tables import write_csv

KWARGS = {'img_size': 32, 'patch_size': 8, 'embed_dim': 32, 'depth': 2, 'num_heads': 2}
COUNTS = {'train': 24, 'held_out': 12, 'test': 16}  # images of each class


@pytest.fixture
def example():
    return load_script(Path(__file__).parents[1] / 'examples' / 'segmentation.py')


@pytest.fixture
def made(tmp_path):
    """`data`: blue, green and red images. `runs`: two models with random weights."""
    rng = np.random.default_rng(0)
    for split, count in COUNTS.items():
        for channel, label in ((2, 'blue'), (1, 'green'), (0, 'red')):
            folder = tmp_path / 'data' / split / label
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 20, (32, 32, 3)).astype(np.uint8)
                pixels[..., channel] += 200
                Image.fromarray(pixels).save(folder / f'{i}.png')
    for label, name in (('APE', 'vit_tiny_ape'), ('RoPE-2D', 'vit_tiny_rope2d')):
        for seed in (1, 2):
            write_run(tmp_path / 'runs', label, seed, name, 3, KWARGS)
    return tmp_path


@pytest.fixture
def start(example, made, monkeypatch):
    def run(*options):
        command = ['segmentation.py', made / 'runs', '--data-dir', made / 'data', '--output', made / 'maps', *options]
        monkeypatch.setattr(sys, 'argv', list(map(str, command)))
        example.main()
    return run


def read(made):
    with open(made / 'maps.csv', newline='') as f:
        return list(csv.DictReader(f))


def test_boxes_are_within_a_quarter_and_three_quarters_and_anywhere(example):
    masks = example.boxes(2000, (8, 12), 0)
    for axis, side in ((1, 8), (2, 12)):
        lines = masks.any(dim=3 - axis)  # [n, side]
        lengths = lines.sum(dim=1)
        assert set(lengths.tolist()) == set(range(side // 4, 3 * side // 4 + 1))
        assert ((lines[:, 1:] != lines[:, :-1]).sum(dim=1) <= 2).all()  # in one piece
        assert lines.any(dim=0).all() and not lines.all(dim=0).any()
        assert (masks.sum(dim=(1, 2)) == masks.any(dim=1).sum(dim=1) * masks.any(dim=2).sum(dim=1)).all()
    assert not torch.equal(masks, example.boxes(2000, (8, 12), 1))


@pytest.mark.parametrize('scale', [1, 2])
def test_patches_have_the_class_of_the_image_that_they_are_from(example, made, scale):
    model = timm.create_model('vit_tiny_ape', num_classes=3, **KWARGS)
    batches = example.composites(model, str(made / 'data'), 'train', scale)
    assert sum(len(images) for images, _ in batches) == 72 // scale ** 2
    mixed = 0
    for images, labels in batches:
        assert images.shape[2:] == (32 * scale, 32 * scale) and labels.shape[1] == (4 * scale) ** 2
        patches = images.unfold(2, 8, 8).unfold(3, 8, 8).flatten(4)  # [b, 3, H, W, 64]
        colours = 2 - patches.mean(dim=-1).argmax(dim=1).flatten(1)
        assert torch.equal(colours, labels)
        assert (patches.std(dim=-1) < 0.2).all()  # no patch is of two images
        mixed += (labels != labels[:, :1]).any(dim=1).sum()
    assert mixed > 20 // scale ** 2


def test_batches_have_boxes_of_their_own(example, made, monkeypatch):
    load_images, boxes, seeds = example.load_images, example.boxes, []
    monkeypatch.setattr(
        example, 'load_images', lambda data, batch_size, *args, **kwargs: load_images(data, 20, *args, **kwargs))
    monkeypatch.setattr(
        example, 'boxes', lambda count, grid_size, seed: seeds.append(seed) or boxes(count, grid_size, seed))
    example.composites(timm.create_model('vit_tiny_ape', num_classes=3, **KWARGS), str(made / 'data'), 'train', 1)
    assert len(seeds) == len(set(seeds)) == 4


def test_the_probe_is_least_squares_and_place_is_the_share_between_places(example):
    rng = torch.Generator().manual_seed(0)
    features = [torch.randn(2, n, 5, 3, generator=rng, dtype=torch.float64) for n in (4, 3)]  # [L, b, N, D]
    labels = [torch.randint(0, 4, (n, 5), generator=rng) for n in (4, 3)]
    batches = [(torch.full((len(y),), i), y) for i, y in enumerate(labels)]  # the images are the number of the batch
    maps, between = example.fit(lambda images: features[images[0]], batches, 4)
    found = example.scores(lambda images: features[images[0]], maps, batches)
    for layer in range(2):
        rows, targets, places = [], [], {}
        for batch, label in zip(features, labels):
            for image, classes in zip(batch[layer].tolist(), label.tolist()):
                for place, (numbers, k) in enumerate(zip(image, classes)):
                    rows.append([*numbers, 1.])
                    targets.append([float(k == j) for j in range(4)])
                    places.setdefault(place, []).append(numbers)
        rows, targets = np.array(rows), np.array(targets)
        expected = np.linalg.lstsq(rows, targets, rcond=None)[0]
        np.testing.assert_allclose(maps[layer], expected, atol=1e-5)
        means = np.array([np.mean(numbers, axis=0) for numbers in places.values()])
        assert between[layer].item() == pytest.approx(
            100 * means.var(axis=0).sum() / rows[:, :-1].var(axis=0).sum(), rel=1e-9)
        predicted, actual = (rows @ expected).argmax(axis=1), targets.argmax(axis=1)
        shares = [np.sum((predicted == k) & (actual == k)) / np.sum((predicted == k) | (actual == k)) for k in range(4)]
        assert found[layer].item() == pytest.approx(100 * np.mean(shares), rel=1e-5)
    maps, _ = example.fit(lambda images: features[images[0]], batches, 5)  # there is no patch of the fifth class
    assert torch.equal(example.scores(lambda images: features[images[0]], maps, batches), found)


def test_it_finds_what_is_there_and_continues(example, start, made, monkeypatch, capsys):
    start('--models', 'APE')
    whole = (made / 'maps.csv').read_text()
    (made / 'maps.csv').write_text(''.join(whole.splitlines(keepends=True)[:-2]))  # as if it had stopped before seed 2
    start('--models', 'APE')
    assert (made / 'maps.csv').read_text() == whole
    capsys.readouterr()
    start('--models', 'APE')
    first = read(made)
    assert [(row['model'], row['seed'], row['size']) for row in first] == [
        ('pixels', '', '32'), ('pixels', '', '64'),
        *(('APE', str(seed), str(size)) for seed in (1, 2) for size in (32, 64))]
    assert all(float(row['miou']) == 100 for row in first if row['model'] == 'pixels')  # the colour tells
    text = capsys.readouterr().out
    assert '| pixels | 32 px |  | 100.0 |' in text and 'corrected for 0 comparisons' in text
    measured, measure = [], example.measure
    monkeypatch.setattr(example, 'measure', lambda spec, *args, **kwargs: (
        measured.append(Path(spec).parts[-3]), measure(spec, *args, **kwargs))[1])
    start()
    rows = read(made)
    assert measured == ['RoPE-2D', 'RoPE-2D'] and rows[:len(first)] == first
    text = capsys.readouterr().out
    assert text == (made / 'maps.md').read_text() and 'corrected for 2 comparisons' in text
    values = {seed: [float(row['miou']) for row in rows if (row['model'], row['size']) == (model, '64')]
              for seed, model in enumerate(('APE', 'RoPE-2D'))}
    line, = (line for line in text.splitlines() if line.startswith('| RoPE-2D | 64 px | 2 |'))
    assert f'| {np.mean(values[1]) - np.mean(values[0]):+.1f} |' in line


def test_rule_and_layer_are_chosen_on_held_out_images(example, made, monkeypatch):
    """The best layer of the best rule there, at the same size; what is reported is of the test images."""
    built, splits = [], []
    load_model, composites = example.load_model, example.composites

    def load(spec, **kwargs):
        built.append(kwargs)
        return load_model(spec, **kwargs)

    def compose(model, data_dir, split, scale):
        splits.append((split, composites(model, data_dir, split, scale)))
        return splits[-1][1]

    def split_of(batches):
        split, = (split for split, found in splits if found is batches)
        return split

    def fit(read, batches, num_classes):
        assert split_of(batches) == 'train' and num_classes == 3
        return read, torch.tensor([1., 2.])

    def scores(read, maps, batches):
        assert read is maps  # fitted for this rule
        rule = read.__defaults__[0].pos_enc_kwargs.get('rope2d', {}).get('resolution', 'extrapolate')
        of_rule = {'extrapolate': [50., 60.], 'rescale': [10., 90.]}.get(rule, [40., 40.])
        return torch.tensor(of_rule) + {'held_out': 0, 'test': 5, 'train': 30}[split_of(batches)]

    monkeypatch.setattr(example, 'load_model', load)
    monkeypatch.setattr(example, 'composites', compose)
    monkeypatch.setattr(example, 'fit', fit)
    monkeypatch.setattr(example, 'scores', scores)
    small, large = example.measure(str(made / 'runs' / 'RoPE-2D' / 'seed1' / 'last.pth.tar'), str(made / 'data'))
    assert [kwargs['img_size'] for kwargs in built[1:]] == [(32, 32)] + 8 * [(64, 64)]
    columns = 'size', 'rule', 'layer', 'miou', 'miou_held_out', 'place', 'train_images', 'test_images'
    assert [[row[column] for column in columns] for row in (small, large)] == [
        [32, '', 2, 65, 60, 2, 72, 48], [64, 'rescale', 2, 95, 90, 2, 18, 12]]


@pytest.mark.full
def test_what_does_not_fit_is_refused(start, made, capsys):
    def refused(text, *options):
        with pytest.raises(SystemExit, match='2'):
            start(*options)
        assert text in capsys.readouterr().err

    refused("no run of 'none'", '--baseline', 'none')
    refused("no finished run of 'CPB'", '--models', 'CPB')
    record = made / 'runs' / 'APE' / 'seed1' / 'run.json'
    before = record.read_text()
    record.write_text(json.dumps({**json.loads(before), 'starts': [{'began': '', 'images': {'test': '9 files'}}]}))
    refused("was trained on other images: 'test' had 9 files")
    record.write_text(before)
    start('--models', 'APE')
    before = (made / 'maps.csv').read_text()
    folder = made / 'data' / 'test' / 'red'
    (folder / 'new.png').write_bytes((folder / '1.png').read_bytes())
    refused('pixels has images 48 files', '--models', 'RoPE-2D')
    (folder / 'new.png').unlink()
    folder = made / 'data' / 'held_out' / 'red'
    (folder / '1.png').rename(folder / 'new.png')
    refused('has images_held_out 36 files')
    (folder / 'new.png').rename(folder / '1.png')
    checkpoint = made / 'runs' / 'APE' / 'seed2' / 'last.pth.tar'
    state = torch.load(checkpoint, weights_only=False)
    torch.save({**state, 'state_dict': {name: -w for name, w in state['state_dict'].items()}}, checkpoint)
    refused('maps.csv was begun otherwise: APE 2 has weights ', '--models', 'APE')
    assert (made / 'maps.csv').read_text() == before
    with open(made / 'maps.csv', newline='') as f:  # as earlier versions wrote it
        rows = [{key: value for key, value in row.items() if key not in ('weights', 'images_train', 'images_held_out')}
                for row in csv.DictReader(f)]
    write_csv(rows, made / 'maps.csv')
    start('--models', 'APE')
    before = (made / 'maps.csv').read_text()
    start()
    found = read(made)
    assert [row['weights'] == '' for row in found] == [*6 * [True], *4 * [False]]
    assert [{key: row[key] for key in rows[0]} for row in found[:6]] == rows
    (made / 'maps.csv').write_text(before)
    (made / 'data' / 'held_out').rename(made / 'data' / 'other')
    refused("has no folder 'held_out'")
    assert (made / 'maps.csv').read_text() == before
