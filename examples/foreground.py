"""Does SaPE2's bias tell foreground from background? Figure 4 of its paper, measured on masks known by construction.

    python examples/foreground.py data --source ROOT --output digits
    timm-sape experiment train_configs/cpu_cifar10/foreground.yaml --data-dir digits --output runs --script train.py
    python examples/foreground.py measure runs --data-dir digits --output foreground.csv

`data` pastes scikit-learn's handwritten digits, in ink of one colour, anywhere onto images of CIFAR-10 in ROOT, which
are mere texture here: the label is the digit. Beside the images it writes the masks of the test images. `measure` asks
of each model: does the score that a patch gives to others say which of them are on its side of the mask? The scores are
SaPE2's bias, negated, as it is a distance; the content logits q.k of plain attention, in the same model and in others;
and, to show how much there is to be had without any model, differences of colour and distances on the grid. Each is
asked again with the masks of other images, and before training.
"""
import argparse
import csv
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import timm
import torch
import torch.nn.functional as F
import yaml
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timm.utils import random_seed
from torchvision.datasets import ImageFolder
from tqdm import tqdm

import timm_sape  # noqa: F401  registers the models
from timm_sape.analysis import position_maps, separation
from timm_sape.analysis.inputs import load_model, preprocessing
from timm_sape.bench import markdown
from timm_sape.position_data import load_cifar10_splits

SIDE, PATCH = 32, 4
DIGIT = 24  # pixels; three for each of the eight of scikit-learn's
COLUMNS = ('from foreground', 'from background', 'mean of heads', 'best head')
CONTRAST = 120  # least difference of the ink to the mean colour behind it, of 255 * sqrt(3)


def paste(texture, digit, rng):
    """A digit `[8, 8]`, 0 to 1, somewhere on a texture `[32, 32, 3]`, 0 to 255: the image, and the share of ink in each
    pixel `[32, 32]`."""
    ink = F.interpolate(torch.from_numpy(digit)[None, None], (DIGIT, DIGIT), mode='bicubic', align_corners=False)
    ink = ink[0, 0].clamp(0, 1).numpy()
    mask = np.zeros((SIDE, SIDE))
    y, x = rng.integers(0, SIDE - DIGIT + 1, 2)
    mask[y:y + DIGIT, x:x + DIGIT] = ink
    behind = (texture * mask[..., None]).sum((0, 1)) / mask.sum()
    while np.linalg.norm((colour := rng.integers(0, 256, 3)) - behind) < CONTRAST:
        pass
    return texture + (colour - texture) * mask[..., None], mask


def write_data(source, output, counts, seed):
    """`output/{train,test}/DIGIT/INDEX.png`, and `output/masks/DIGIT/INDEX.png` of the test images."""
    digits = load_digits()
    parts = train_test_split(
        digits.images / 16, digits.target, test_size=500, stratify=digits.target, random_state=0)  # [n, 8, 8]
    rng = np.random.default_rng(seed)
    for (split, textures), images, labels, count in zip(source.items(), parts[:2], parts[2:], counts):
        for index in tqdm(range(count), desc=split, delay=2):
            i, texture = rng.integers(len(images)), textures[int(rng.integers(len(textures)))][0]
            image, mask = paste(np.asarray(texture.convert('RGB'), dtype=float), images[i], rng)
            pictures = {split: image, 'masks': 255 * mask} if split != 'train' else {split: image}
            for folder, pixels in pictures.items():
                path = output / folder / str(labels[i]) / f'{index:05}.png'
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.round().astype(np.uint8)).save(path)


def read_test(folder, count):
    """Some of the test images, and which of their patches are ink `[n, N]`: 1 at half or more, 0 at none, else -1."""
    dataset = ImageFolder(folder / 'test')
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[:count].tolist()
    images, shares = [], []
    for i in order:
        path = Path(dataset.samples[i][0])
        mask = np.asarray(Image.open(folder / 'masks' / path.parent.name / path.name), dtype=np.float32) / 255
        shares.append(F.avg_pool2d(torch.from_numpy(mask)[None], PATCH).flatten())
        images.append(dataset[i][0])
    share = torch.stack(shares)
    return images, torch.where(share >= 0.5, 1, torch.where(share == 0, 0, -1))


def without_model(images):
    """What needs no model: minus the difference of the mean colours of patches, and minus their distance."""
    pixels = torch.stack([torch.from_numpy(np.array(image)).float() for image in images])  # [n, 32, 32, 3]
    colours = F.avg_pool2d(pixels.permute(0, 3, 1, 2), PATCH).flatten(2).mT  # [n, N, 3]
    side = torch.arange(SIDE // PATCH, dtype=torch.float)
    places = torch.cartesian_prod(side, side).expand(len(images), -1, -1)  # [n, N, 2]
    return {'colour': -torch.cdist(colours, colours), 'place': -torch.cdist(places, places)}


@torch.no_grad()
def scores_of(model, images):
    """Maps of all layers and heads, `[n, L * h, N, N]`, by what they are."""
    found = {'content': [], 'bias': []}
    for batch in images.split(100):
        maps = position_maps(model.eval(), batch)
        for kind, layers in (
                ('content', [layer.content for layer in maps.layers]),
                ('bias', [-layer.position for layer in maps.layers])):  # a distance, so the nearer the more alike
            found[kind].append(maps.between_patches(torch.cat(layers, dim=1)))
    found = {kind: torch.cat(parts) for kind, parts in found.items()}
    return {kind: scores for kind, scores in found.items() if scores.any()}


def measured(scores, foreground):
    """Areas under the ROC curve in the columns of the table; `scores` are `[n, heads, N, N]`."""
    mean_map = separation(scores.mean(1), foreground)
    heads = separation(scores, foreground)
    heads = (heads.from_foreground.nanmean(0) + heads.from_background.nanmean(0)) / 2  # [heads]
    either = torch.maximum(heads, 1 - heads)  # a head may as well look for what is unlike
    values = mean_map.from_foreground.nanmean(), mean_map.from_background.nanmean(), either.mean(), either.max()
    return {column: round(value.item(), 4) for column, value in zip(COLUMNS, values)}


def measure(args):
    images, foreground = read_test(args.data_dir, args.images)
    masks = {'own': foreground, 'shuffled': foreground.roll(1, 0)}
    rows = []

    def add(scores, **about):
        for mask, sides in masks.items():
            rows.append({**about, 'mask': mask, **measured(scores, sides)})

    for score, values in without_model(images).items():
        add(values[:, None], runs='', model='', seed='', state='no model', score=score)
    checkpoints = [path for runs in args.runs for path in sorted(runs.glob('*/seed*/last.pth.tar'))]
    if args.models:
        checkpoints = [path for path in checkpoints if path.parts[-3] in args.models]
    if not checkpoints:
        raise ValueError('there are no such models; name folders that `timm-sape experiment` has written')
    for path in tqdm(checkpoints, unit='model'):
        model = load_model(str(path))
        config = yaml.safe_load((path.parent / 'config.yaml').read_text())
        transform = preprocessing(model)
        inputs = torch.stack([transform(image) for image in images])
        random_seed(config['seed'])
        fresh = timm.create_model(config['model'], num_classes=config['num_classes'], **config['model_kwargs'])
        for state, each in (('trained', model), ('untrained', fresh)):
            for score, values in scores_of(each, inputs).items():
                *_, runs, label, seed, _ = path.parts
                add(values, runs=runs, model=label, seed=int(seed[4:]), state=state, score=score)
    with open(args.output, 'w', newline='') as f:
        writer = csv.DictWriter(f, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(markdown(summary(rows)))


def summary(rows):
    """Mean ± standard deviation over seeds."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in ('runs', 'model', 'state', 'score', 'mask')), []).append(row)
    table = []
    for (runs, model, state, score, mask), own in groups.items():
        line = {'trained on': runs, 'model': model, 'state': state, 'score': score, 'mask': mask}
        for column in COLUMNS:
            values = [row[column] for row in own]
            line[column] = f'{mean(values):.3f}' + (f' ± {stdev(values):.3f}' if len(values) > 1 else '')
        table.append(line)
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest='command', required=True)
    data = commands.add_parser('data', help='write images and masks')
    data.add_argument('--source', type=Path, required=True, help='CIFAR-10, as torchvision stores it or as folders')
    data.add_argument('--output', type=Path, required=True, help='a new folder')
    data.add_argument('--images', type=int, nargs=2, default=(10000, 2000), metavar=('TRAIN', 'TEST'))
    data.add_argument('--seed', type=int, default=0)
    at = commands.add_parser('measure', help='measure the models of experiments')
    at.add_argument('runs', type=Path, nargs='+', help='folders that `timm-sape experiment` has written')
    at.add_argument('--data-dir', type=Path, required=True, help='what `data` has written')
    at.add_argument('--output', type=Path, required=True, help='CSV file')
    at.add_argument('--models', nargs='+', help='rows of the experiments (default: all)')
    at.add_argument('--images', type=int, default=500, help='test images that are looked at')
    args = parser.parse_args()
    try:
        if args.command == 'measure':
            return measure(args)
        if args.output.exists():
            raise ValueError(f'{args.output} is there already; name a new folder')
        splits = list(load_cifar10_splits(args.source).values())[:2]
        write_data(dict(zip(('train', 'test'), splits)), args.output, args.images, args.seed)
    except (ValueError, OSError) as e:
        parser.error(str(e))


if __name__ == '__main__':
    main()
