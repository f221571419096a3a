"""Does SaPE2's bias separate foreground from background? Figure 4 of its paper, measured with known masks.

    python examples/foreground.py data --source ROOT --output digits
    timm-sape experiment train_configs/cpu_cifar10/foreground.yaml --data-dir digits --output runs --script train.py
    python examples/foreground.py measure runs --data-dir digits --output foreground.csv

`data` pastes scikit-learn's handwritten digits at random places onto images of CIFAR-10 in ROOT, which serve only as
texture: the label is the digit. By default the ink is white, as in Larochelle et al., 'An empirical evaluation of deep
architectures' (2007). With `--ink colour` it has a random colour, and with `--ink texture` it is another image, so that
colour helps less. In a few epochs, small models may learn white ink but not the others. `data` also writes the masks
of the test images.

`measure` checks for each model whether the scores that a patch gives to other patches tell which of them are on its
side of the mask. For each layer and head, it computes the area under the ROC curve (`timm_sape.analysis.separation`)
of these scores:

- `position`: what position adds to the attention logits;
- `distance`: where SaPE2 alone acts on the logits, the distance of which `position` is a multiple, negated so that near
  patches score high;
- `content`: q.k, plain attention; `logits`: `content` + `position`, the input of the softmax;
- `keys`: -|k_i - k_j|, for comparison in all models; SaPE2's distance is one between linear functions of k;
- `colour`, `place`: the negated difference of mean colours, and the negated distance on the grid, without a model.

Models that read the class from the class token are measured without their last layer. There, attention between patches
has no effect on the class, so SaPE2's tables keep their initial values.

As controls, all scores are also measured with the masks of other images, and for the models before training.
"""
import argparse
import tempfile
from pathlib import Path
from statistics import mean

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
from timm_sape.analysis.maps import layers_that_matter, record_calls
from timm_sape.encodings import get_encoding, parse_pos_enc
from timm_sape.lab.experiment import trained_models
from timm_sape.lab.intervals import difference, spread
from timm_sape.lab.machine import about
from timm_sape.lab.position_data import load_cifar10_splits
from timm_sape.lab.tables import markdown, write_csv
from timm_sape.loading import image_size_of, load_model, patch_size_of, preprocessing

SIDE, PATCH = 32, 4
DIGIT = 24  # pixels, three times the eight of scikit-learn
COLUMNS = ('from foreground', 'from background', 'both', 'best head')
CONTRAST = 120  # least Euclidean distance of the ink from the mean colour behind it, of at most 255 * sqrt(3)
INKS = {'white': 255, 'colour': None}  # what `paste` gets as `ink`; for 'texture' it is a random image
SHUFFLES = 5  # number of other images whose masks are used for each image


def paste(texture, digit, rng, ink):
    """Paste a digit onto a texture.

    Args:
        texture: Image, 0 to 255, `[32, 32, 3]`.
        digit: Intensity of the digit, 0 to 1, `[8, 8]`.
        rng: numpy's generator, which draws the place and the colour.
        ink: Another texture, or a grey value. None for a random colour that differs from the colours it covers.

    Returns:
        The image, 0 to 255, `[32, 32, 3]`, and the share of ink in each pixel, 0 to 1, `[32, 32]`.
    """
    large = F.interpolate(torch.from_numpy(digit)[None, None], (DIGIT, DIGIT), mode='bicubic', align_corners=False)
    mask = np.zeros((SIDE, SIDE))
    y, x = rng.integers(0, SIDE - DIGIT + 1, 2)
    mask[y:y + DIGIT, x:x + DIGIT] = large[0, 0].clamp(0, 1).numpy()
    covered = mask[..., None]
    if ink is None:
        colour = (texture * covered).sum((0, 1)) / mask.sum()
        while np.linalg.norm((ink := rng.integers(0, 256, 3)) - colour) < CONTRAST:
            pass
    return texture + (ink - texture) * covered, mask


def write_data(source, output, counts, ink, seed):
    """Write `output/{train,test}/DIGIT/INDEX.png`, and `output/masks/DIGIT/INDEX.png` for the test images."""
    digits = load_digits()
    parts = train_test_split(
        digits.images / 16, digits.target, test_size=500, stratify=digits.target, random_state=0)  # [n, 8, 8]
    rng = np.random.default_rng(seed)

    def draw(textures):
        image = textures[int(rng.integers(len(textures)))][0]
        if image.size != (SIDE, SIDE):
            raise ValueError(f'--source has an image of {image.width}x{image.height}; all must be {SIDE}x{SIDE}')
        return np.asarray(image.convert('RGB'), dtype=float)

    for (split, textures), images, labels, count in zip(source.items(), parts[:2], parts[2:], counts):
        for index in tqdm(range(count), desc=split, delay=2):
            i = rng.integers(len(images))
            texture = draw(textures)
            colour = draw(textures) if ink == 'texture' else INKS[ink]
            image, mask = paste(texture, images[i], rng, colour)
            pictures = {split: image, 'masks': 255 * mask} if split != 'train' else {split: image}
            for folder, pixels in pictures.items():
                path = output / folder / str(labels[i]) / f'{index:05}.png'
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.round().astype(np.uint8)).save(path)
        if lacking := sorted({str(n) for n in range(10)} - {path.name for path in (output / split).iterdir()}):
            raise ValueError(
                f'there is no {lacking[0]} among {count} images of {split}/, so train.py would number its classes in '
                'another way; raise --images, or change --seed')


def read_test(folder, count):
    """Read test images, and the class of each patch, `[n, N]`: 1 if at least half of it is ink, 0 if none, else -1."""
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
    """Compute the scores that need no model, `colour` and `place`, each `[n, N, N]`."""
    pixels = torch.stack([torch.from_numpy(np.array(image)).float() for image in images])  # [n, 32, 32, 3]
    colours = F.avg_pool2d(pixels.permute(0, 3, 1, 2), PATCH).flatten(2).mT  # [n, N, 3]
    side = torch.arange(SIDE // PATCH, dtype=torch.float)
    places = torch.cartesian_prod(side, side).expand(len(images), -1, -1)  # [n, N, 2]
    return {'colour': -torch.cdist(colours, colours), 'place': -torch.cdist(places, places)}


def is_distance(pos_enc):
    """Whether position adds to the logits SaPE2's distance alone, times a gain per head."""
    names = [name.removeprefix('auto_') for name in parse_pos_enc(pos_enc)]
    acting = [
        name for name in names if not all(place.startswith('tokens') for place in get_encoding(name).acts_on())]
    return len(acting) == 1 and acting[0].startswith('sape2')


@torch.no_grad()
def scores_of(model, images):
    """Compute the scores of the measured layers and all their heads by name, each `[n, L * h, N, N]`."""
    found = {}
    layers = layers_that_matter(model)
    norms = [model.blocks[layer].attn.k_norm for layer in layers]
    for batch in images.split(100):
        with record_calls(norms) as calls:
            maps = position_maps(model.eval(), batch, layers)
        keys = [norm(*calls[norm][0]) for norm in norms]
        parts = {
            'content': [layer.content for layer in maps.layers],
            'keys': [-torch.cdist(k, k) for k in keys]}
        if any(layer.position.any() for layer in maps.layers):
            parts['position'] = [layer.position for layer in maps.layers]
            parts['logits'] = [layer.content + layer.position for layer in maps.layers]
        if is_distance(model.pos_enc):
            # Of the gain, only the sign matters.
            signs = [layer.position.mean(dim=(0, 2, 3), keepdim=True).sign() for layer in maps.layers]
            parts['distance'] = [-sign * layer.position for sign, layer in zip(signs, maps.layers)]
        for score, each in parts.items():
            found.setdefault(score, []).append(maps.between_patches(torch.cat(each, dim=1)))
    return {score: torch.cat(batches) for score, batches in found.items()}


def measured(scores, foreground):
    """Compute the columns of the table, which are areas under the ROC curve.

    The first three are means over images and heads: for patches of the foreground, of the background, and both. The
    last one is that of the best head. This head, and whether its scores are high for its own side or for the other, is
    chosen on every other image, and measured on the rest.

    Args:
        scores: `[n, heads, N, N]`.
        foreground: `[n, N]`.
    """
    sides = torch.stack(separation(scores, foreground))  # [2, n, heads]
    chosen, held_out = (sides[:, start::2].nanmean(dim=(0, 1)) for start in (0, 1))  # [heads]
    best = (chosen - 0.5).abs().argmax()
    front, back = sides.nanmean(dim=(1, 2))
    values = front, back, (front + back) / 2, held_out[best] if chosen[best] > 0.5 else 1 - held_out[best]
    return {column: round(value.item(), 4) for column, value in zip(COLUMNS, values)}


def shuffled(scores, foreground):
    """As `measured`, but with the masks of other images. The mean over several such masks."""
    found = [measured(scores, foreground.roll(shift, 0)) for shift in range(1, SHUFFLES + 1)]
    return {column: round(mean(each[column] for each in found), 4) for column in COLUMNS}


def measure(args):
    images, foreground = read_test(args.data_dir, args.images)
    if len(images) <= SHUFFLES:
        raise ValueError(f'masks of {SHUFFLES} other images are needed for each, but there are {len(images)} images')
    trained = [(str(runs), *run) for runs in args.runs for run in trained_models(runs, args.models)]
    for _, label, _, checkpoint in trained:
        model = load_model(str(checkpoint))
        size, patch = image_size_of(model), patch_size_of(model)
        if (size, patch) != ((SIDE, SIDE), (PATCH, PATCH)):
            raise ValueError(
                f'{label} takes {size[0]}x{size[1]} pixels in patches of {patch[0]}x{patch[1]}, the masks are for '
                f'{SIDE}x{SIDE} in patches of {PATCH}x{PATCH}; choose others by --models')
        if not layers_that_matter(model):
            raise ValueError(
                f'{label} has one layer and reads the class from the class token, so no layer is left to measure; '
                'choose others by --models')
    counts = [(foreground == side).sum(1).float().mean() for side in (1, 0)]
    notes = (
        f'{len(images)} images, of {foreground.shape[1]} patches {counts[0]:.1f} foreground and {counts[1]:.1f} '
        f'background, the others left out; {about(torch.device("cpu"))}')
    rows = []

    def add(scores, **what):
        for mask, found in (('own', measured(scores, foreground)), ('shuffled', shuffled(scores, foreground))):
            rows.append({**what, 'mask': mask, **found})

    for score, values in without_model(images).items():
        add(values[:, None], runs='', model='', seed='', state='no model', score=score)
    for runs, label, seed, checkpoint in tqdm(trained, unit='model'):
        model = load_model(str(checkpoint))
        config = yaml.safe_load((checkpoint.parent / 'config.yaml').read_text())
        transform = preprocessing(model, crop_pct=1.0)  # the whole image, like the mask
        inputs = torch.stack([transform(image) for image in images])
        random_seed(seed)  # as in train.py
        fresh = timm.create_model(
            config['model'], num_classes=model.num_classes, global_pool=model.global_pool,
            **config.get('model_kwargs', {}))
        for state, each in (('trained', model), ('untrained', fresh)):
            for score, values in scores_of(each, inputs).items():
                add(values, runs=runs, model=label, seed=seed, state=state, score=score)
        write_csv(rows, args.output, notes)
    print(markdown(summary(rows)), f'\n{notes}\n', sep='\n')
    if differences := compared(rows):
        print(f'Differences of `both`, seed by seed, mean with its 95 % interval:\n\n{markdown(differences)}')


def summary(rows):
    """Group the rows that differ only in the seed: mean ± standard deviation of each column."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in ('runs', 'model', 'state', 'score', 'mask')), []).append(row)
    return [{
        'trained in': runs, 'model': model, 'state': state, 'score': score, 'mask': mask,
        **{column: spread([row[column] for row in own], 3) for column in COLUMNS},
    } for (runs, model, state, score, mask), own in groups.items()]


def compared(rows):
    """Compare SaPE2's distance in trained models, measured with the images' own masks, with each control."""
    both = {tuple(row[key] for key in ('runs', 'model', 'seed', 'state', 'score', 'mask')): row['both'] for row in rows}
    colour = both['', '', '', 'no model', 'colour', 'own']
    table = []
    for runs, model in dict.fromkeys((row['runs'], row['model']) for row in rows if row['score'] == 'distance'):
        seeds = [key[2] for key in both if key[:2] == (runs, model) and key[3:] == ('trained', 'distance', 'own')]

        def against(*control):
            return difference([
                both[runs, model, seed, 'trained', 'distance', 'own']
                - (colour if control == ('colour',) else both[(runs, model, seed, *control)]) for seed in seeds], 3)

        table.append({
            'trained in': runs, 'model': model,
            'own mask - shuffled': against('trained', 'distance', 'shuffled'),
            'trained - untrained': against('untrained', 'distance', 'own'),
            'distance - content': against('trained', 'content', 'own'),
            'distance - keys': against('trained', 'keys', 'own'),
            'distance - colour': against('colour'),
        })
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest='command', required=True)
    data = commands.add_parser('data', help='write images and masks')
    data.add_argument('--source', type=Path, required=True, help='CIFAR-10, as torchvision stores it or as folders')
    data.add_argument('--output', type=Path, required=True, help='a new folder')
    data.add_argument('--ink', choices=('white', 'colour', 'texture'), default='white', help='(default: %(default)s)')
    data.add_argument('--images', type=int, nargs=2, default=(10000, 2000), metavar=('TRAIN', 'TEST'))
    data.add_argument('--seed', type=int, default=0)
    at = commands.add_parser('measure', help='measure the models of experiments')
    at.add_argument('runs', type=Path, nargs='+', help='output folders of `timm-sape experiment`')
    at.add_argument('--data-dir', type=Path, required=True, help='output of `data`')
    at.add_argument('--output', type=Path, required=True, help='a new CSV file')
    at.add_argument('--models', nargs='+', help='labels in the experiments (default: all)')
    at.add_argument('--images', type=int, default=500, help='test images to use')
    args = parser.parse_args()
    if np.min(args.images) < 1:
        parser.error('--images must be 1 or more')
    try:
        if args.command == 'measure':
            if not (args.data_dir / 'masks').is_dir():
                raise ValueError(f'{args.data_dir} has no masks; name a folder that `data` wrote')
            if not args.output.parent.is_dir():
                raise ValueError(f'there is no folder {args.output.parent} for {args.output.name}')
            if args.output.exists():
                raise ValueError(f'{args.output} exists; name a new file')
            return measure(args)
        if args.output.exists():
            raise ValueError(f'{args.output} exists; name a new folder')
        splits = list(load_cifar10_splits(args.source).values())[:2]
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix='.foreground-', dir=args.output.parent) as staging:
            new = Path(staging, 'data')  # complete or not at all
            write_data(dict(zip(('train', 'test'), splits)), new, args.images, args.ink, args.seed)
            new.rename(args.output)
    except (ValueError, OSError) as e:
        parser.error(str(e))


if __name__ == '__main__':
    main()
