"""Which encoding gives the best maps of features? Segmentation by a linear probe on frozen models.

    python examples/segmentation.py RUNS --data-dir DATA --output segmentation

RUNS is a folder of `timm-sape experiment` or of `examples/reference_table.py` with checkpoints; its models have learned
to classify whole images. DATA has train/, held_out/ and test/. Here a box in each image is filled from another image
(CutMix, Yun et al. 2019), and a linear map from the features of a patch has to tell the class of the image that this
patch is from. Edges of the box lie between patches of the trained size, and all models see the same boxes.

The map is fitted to the training images by least squares. The measure is the mean over classes of intersection over
union (mIoU) of patches, in percent. Models are tested at their own size and at twice that, with maps fitted at each.
The layer and, at twice the size, the rule for other sizes are chosen on held_out/ for each model, and tested on test/.
`place` is how much of the variance of these features is between places, whatever the image shows, in percent.

For comparison, `pixels` are the numbers of a patch without any model. The command writes OUTPUT.csv, a row for each
model and size, and OUTPUT.md. It continues where it stopped, and refuses other images or weights than those of the rows
that are there; start it once at a time.
"""
import argparse
import csv
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from timm_sape.cli.files import write_files
from timm_sape.lab.experiment import check_splits, hash_of, images_in, refuse_other_images, shape_of, trained_models
from timm_sape.lab.intervals import corrected_cells, spread
from timm_sape.lab.machine import about
from timm_sape.lab.rules import rules_of
from timm_sape.lab.tables import markdown, write_csv
from timm_sape.loading import image_size_of, load_images, load_model, open_dataset, patch_size_of, preprocessing

SCALES = (1, 2)  # of the trained size
IMAGES = {'train': 4000, 'held_out': 1000, 'test': 4000}  # at most, at the trained size
PIXELS = 'pixels'


def boxes(count, grid_size, seed):
    """Masks of a box each, `[n, H, W]`: at a random place, from a quarter to three quarters of each side long."""
    generator = torch.Generator().manual_seed(seed)
    inside = []
    for side in grid_size:
        length = torch.randint(max(1, side // 4), 3 * side // 4 + 1, (count, 1), generator=generator)
        first = (torch.rand(count, 1, generator=generator) * (side - length + 1)).long()
        at = torch.arange(side)
        inside.append((at >= first) & (at < first + length))
    return inside[0][:, :, None] & inside[1][:, None, :]


def composites(model, data_dir, split, scale):
    """Batches of images, `[b, 3, height, width]`, and the classes of their patches, `[b, N]`."""
    own_size = image_size_of(model)
    grid_size = [side // of_patch for side, of_patch in zip(own_size, patch_size_of(model))]
    size = [scale * side for side in own_size]
    data = open_dataset(data_dir, split=split)
    data.transform = preprocessing(model, tuple(size), crop_mode='squash')
    count = min(IMAGES[split], len(data)) // scale ** 2  # about as many patches at each size
    found = []
    for index, (images, labels) in enumerate(load_images(data, 100, count, shuffle=True)):
        masks = boxes(len(images), grid_size, index)
        pixels, patches = (
            masks.repeat_interleave(rows, 1).repeat_interleave(columns, 2) for rows, columns in (
                [side // n for side, n in zip(size, grid_size)], (scale, scale)))
        found.append((
            torch.where(pixels[:, None], images.roll(1, dims=0), images),
            torch.where(patches, labels.roll(1)[:, None, None], labels[:, None, None]).flatten(1)))
    return found


@torch.no_grad()
def features_of(model, images):
    """Features of the patches after each block, `[L, b, N, D]`."""
    return torch.stack(model.forward_intermediates(images, output_fmt='NLC', intermediates_only=True)).double()


def pixels_of(patch_size, images):
    """The numbers of each patch, as the features of a single layer, `[1, b, N, 3*p*p]`."""
    return F.unfold(images, patch_size, stride=patch_size).mT[None].double()


def with_constant(features):
    return F.pad(features, (0, 1), value=1.)


def fit(read, batches, num_classes):
    """Fit a map for each layer.

    Args:
        read: Images to features, `[L, b, N, D]`.
        batches: As `composites` returns them.
        num_classes: K.

    Returns:
        The maps, `[L, D+1, K]`, and for each layer how much of the variance is between places, in percent, `[L]`.
    """
    products = moments = places = squares = 0
    count = sum(len(images) for images, _ in batches)
    for images, labels in batches:
        features = read(images)
        rows = with_constant(features).flatten(1, 2)  # [L, b*N, D+1]
        products = products + rows.mT @ rows
        moments = moments + rows.mT @ F.one_hot(labels.flatten(), num_classes).double()
        places = places + features.sum(dim=1) / count  # [L, N, D]
        squares = squares + features.square().sum(dim=1).mean(dim=1) / count  # [L, D]
    mean = places.mean(dim=1)
    between = (places - mean[:, None]).square().mean(dim=1).sum(dim=-1)
    total = (squares - mean.square()).sum(dim=-1)
    diagonal = products.diagonal(dim1=1, dim2=2)
    # channels that depend on each other would make it singular
    products = products + torch.diag_embed(1e-6 * diagonal + torch.finfo(diagonal.dtype).tiny)
    return torch.linalg.solve(products, moments), 100 * between / total


def scores(read, maps, batches):
    """Mean intersection over union for each layer, in percent, `[L]`. Classes that do not occur are left out."""
    num_layers, _, num_classes = maps.shape
    counts = torch.zeros(num_layers, num_classes ** 2)
    for images, labels in batches:
        predicted = (with_constant(read(images)).flatten(1, 2) @ maps).argmax(dim=-1)  # [L, b*N]
        for count, layer in zip(counts, labels.flatten() * num_classes + predicted):
            count += torch.bincount(layer, minlength=num_classes ** 2)
    counts = counts.view(num_layers, num_classes, num_classes)
    both = counts.diagonal(dim1=1, dim2=2)
    return 100 * (both / (counts.sum(dim=1) + counts.sum(dim=2) - both)).nanmean(dim=-1)


def measure(spec, data_dir, only_pixels=False):
    """Rows of one checkpoint, or of the numbers of its patches."""
    model = load_model(spec)
    rows = []
    for scale in SCALES:
        size = tuple(scale * side for side in image_size_of(model))
        batches = {split: composites(model, data_dir, split, scale) for split in IMAGES}
        if only_pixels:
            readers = {'': lambda images: pixels_of(patch_size_of(model), images)}
        else:
            rules = rules_of(model)
            if scale == 1:
                rules = dict(list(rules.items())[:1])  # there no rule changes anything
            readers = {
                rule: lambda images, model=load_model(spec, img_size=size, **kwargs): features_of(model, images)
                for rule, kwargs in rules.items()}
        found = {rule: fit(read, batches['train'], model.num_classes) for rule, read in readers.items()}
        chosen = {rule: scores(read, found[rule][0], batches['held_out']) for rule, read in readers.items()}
        rule = max(chosen, key=lambda rule: chosen[rule].max())
        layer = int(chosen[rule].argmax())
        maps, between = found[rule]
        rows.append({
            'size': size[0],
            'rule': '' if scale == 1 else rule,
            'layer': '' if only_pixels else layer + 1,
            'miou': round(scores(readers[rule], maps, batches['test'])[layer].item(), 3),
            'miou_held_out': round(chosen[rule][layer].item(), 3),
            'place': round(between[layer].item(), 3),
            'train_images': sum(len(images) for images, _ in batches['train']),
            'test_images': sum(len(images) for images, _ in batches['test']),
        })
    return rows


def counted(values):
    return ', '.join(sorted(set(map(str, values))))


def read_rows(path):
    """The rows of a file. Those of earlier versions do not say of which weights, train/ and held_out/ they are."""
    if not path.exists():
        return []
    with open(path, newline='') as f:
        return [
            {**row, **{key: row.get(key, '') for key in ('images_train', 'images_held_out', 'weights')}}
            for row in csv.DictReader(f)]


def refuse_begun_otherwise(rows, images, weights, path):
    """Raise ValueError if a row was measured with other images or weights."""
    for row in rows:
        key = row['model'], row['seed']
        for column, new in {**images, 'weights': weights.get(key, '')}.items():
            if row[column] and new and row[column] != new:
                raise ValueError(
                    f'{path} was begun otherwise: {" ".join(key).strip()} has {column} {row[column]}, now it is {new}. '
                    'Use the former, or name another --output.')


def _count(seeds, of_baseline):
    both = len(seeds & of_baseline)
    return len(seeds) if both == len(seeds) else f'{len(seeds)}, {both} in common'


def show(rows, baseline):
    """A table for people: the best first, at each size."""
    sizes = sorted({int(row['size']) for row in rows})
    names = list(dict.fromkeys(row['model'] for row in rows))
    seeds = {name: {row['seed'] for row in rows if row['model'] == name} for name in names}
    # a trial of examples/reference_table.py, say, has a seed of its own and is compared with nothing
    compared = [name for name in names if name not in (baseline, PIXELS) and len(seeds[name] & seeds[baseline]) > 1]
    comparisons = len(sizes) * len(compared)
    table = []
    for size in sizes:
        here = {name: [row for row in rows if (row['model'], int(row['size'])) == (name, size)] for name in names}
        values = {name: {row['seed']: float(row['miou']) for row in own} for name, own in here.items()}
        for name in sorted(names, key=lambda name: -sum(values[name].values()) / len(values[name])):
            table.append({
                'model': name,
                'size': f'{size} px',
                'seeds': '' if name == PIXELS else _count(seeds[name], seeds[baseline]),
                'mIoU (%)': spread(list(values[name].values()), 1),
                **corrected_cells(values[name], {} if name == baseline else values[baseline], comparisons),
                'place (%)': spread([float(row['place']) for row in here[name]], 1),
                'layer': counted(row['layer'] for row in here[name]),
                'rule': counted(row['rule'] for row in here[name]),
            })
    machines = '; '.join(dict.fromkeys(row['measured_on'] for row in rows))
    return (
        f'Differences are from {baseline}, in points. A difference is shown if both intervals, corrected for '
        f'{comparisons} comparisons, exclude 0.\n\n{markdown(table)}\n\n{machines}')


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('runs', type=Path, help='folder of an experiment, with checkpoints')
    parser.add_argument('--data-dir', required=True, help='has train, held_out and test')
    parser.add_argument('--output', type=Path, required=True, help='the files without .csv and .md')
    parser.add_argument('--models', nargs='+', help='labels (default: all)')
    parser.add_argument('--baseline', default='APE', help='label (default: %(default)s)')
    args = parser.parse_args()
    path = Path(f'{args.output}.csv')
    try:
        trained = trained_models(args.runs, args.models)
        shape_of(trained)  # raises ValueError if they differ
        rows = read_rows(path)
        check_splits(IMAGES, Path(args.data_dir))
        images = images_in(IMAGES, Path(args.data_dir))
        refuse_other_images(images, args.runs)  # test/ might be what they were trained on
        weights = {(run.label, str(run.seed)): hash_of(run.checkpoint) for run in trained}
        images = {'images' if split == 'test' else f'images_{split}': found for split, found in images.items()}
        refuse_begun_otherwise(rows, images, weights, path)
        if args.baseline not in {run.label for run in trained} | {row['model'] for row in rows}:
            raise ValueError(f'there is no run of {args.baseline!r}; name another --baseline')
        done = {(row['model'], row['seed']) for row in rows}
        waiting = [(PIXELS, '', trained[0]), *((run.label, str(run.seed), run) for run in trained)]
        for name, seed, run in waiting:
            if (name, seed) in done:
                continue
            rows += [
                {'model': name, 'seed': seed, **row, 'measured_on': about(torch.device('cpu')), **images,
                 'weights': weights.get((name, seed), '')}
                for row in measure(str(run.checkpoint), args.data_dir, only_pixels=name == PIXELS)]
            write_files({path: lambda path: write_csv(rows, path)}, force=True)  # at once, as it is all that remains
            print(f'{name} {seed}: done', file=sys.stderr, flush=True)
    except (ValueError, OSError) as e:
        parser.error(str(e))
    text = show(rows, args.baseline)
    Path(f'{args.output}.md').write_text(f'{text}\n')
    print(text)


if __name__ == '__main__':
    main()
