"""Two claims of the SaPE2 paper, tested on the models of an experiment: is it better at other resolutions, and when the
image is shifted?

    timm-sape experiment train_configs/cpu_cifar10/plan.yaml --data-dir cifar10_10k --output runs --script train.py
    python examples/claims.py runs --data-dir cifar10_10k --output claims

Each model is tested at each size, by each rule that its encoding has for other sizes, and on images moved up, down, to
the left and to the right. A model that is better everywhere is not better at that: so the changes from the trained size
and from images in their place are compared, with those of the baseline at the same seed.
"""
import argparse
import csv
from pathlib import Path
from statistics import mean, stdev

import timm_sape  # noqa: F401  registers the models
from timm_sape.analysis.inputs import load_model, open_dataset
from timm_sape.analysis.shifts import shift_sweep
from timm_sape.analysis.sweep import sweep
from timm_sape.bench import markdown
from timm_sape.experiment.report import mean_interval


def named(rows, model, seed):
    """Rows of a sweep with the name in the experiment for the path of the checkpoint."""
    return [{**row, 'model': model, 'seed': seed} for row in rows]


def tables(rows, at, start, value, baseline):
    """Two tables, a line for each model: mean ± standard deviation of a value over seeds; and by how much more it has
    changed than the baseline since `start`, in points, with the 95 % interval of the paired differences.

    Args:
        rows: One for each model, seed and place.
        at: The column that tells the place, such as 'shift'.
        start: The place from which changes count.
        value: The column that is looked at.
        baseline: A model.
    """
    values = {}  # by model, place and seed
    for row in rows:
        values.setdefault(row['model'], {}).setdefault(row[at], {})[row['seed']] = row[value]
    places = list(dict.fromkeys(row[at] for row in rows))
    means, changes = [], []
    for model, by_place in values.items():
        means.append({'model': model, **{
            f'{place} px': f'{mean(seeds.values()):.1f}' + (f' ± {stdev(seeds.values()):.1f}' if len(seeds) > 1 else '')
            for place, seeds in by_place.items()}})
        if model == baseline:
            continue
        line = {'model': model}
        for place in places:
            if place == start:
                continue
            pairs = [
                (by_place[place][seed] - by_place[start][seed])
                - (values[baseline][place][seed] - values[baseline][start][seed])
                for seed in by_place[place] if seed in values[baseline][place]]
            middle, low, high = mean_interval(pairs)
            line[f'{place} px'] = f'{middle:+.1f} [{low:+.1f}, {high:+.1f}]'
        changes.append(line)
    return means, changes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('runs', type=Path, help='folder that `timm-sape experiment` has written')
    parser.add_argument('--data-dir', required=True, help='test images')
    parser.add_argument('--output', type=Path, required=True, help='folder for two CSV files')
    parser.add_argument('--sizes', type=int, nargs='+', default=[24, 28, 40, 48, 64], help='besides the trained one')
    parser.add_argument('--shifts', type=int, nargs='+', default=[1, 2, 4, 8], help='pixels')
    parser.add_argument('--models', nargs='+', help='rows of the experiment (default: all)')
    parser.add_argument('--baseline', default='APE')
    parser.add_argument('--num-images', type=int, help='(default: all)')
    args = parser.parse_args()

    checkpoints = sorted(args.runs.glob('*/seed*/last.pth.tar'))
    if args.models:
        checkpoints = [path for path in checkpoints if path.parts[-3] in args.models]
    if not any(path.parts[-3] == args.baseline for path in checkpoints):
        parser.error(f'{args.runs} has no checkpoint of {args.baseline}, seedN/last.pth.tar')
    options = dict(num_images=args.num_images, batch_size=250)
    resolutions, shifts = [], []
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        data = open_dataset(args.data_dir)
        own_size = load_model(str(checkpoints[0])).patch_embed.img_size[0]
        sizes = sorted({own_size, *args.sizes})
        for path in checkpoints:
            *_, model, seed, _ = path.parts
            resolutions += named(sweep([str(path)], data, sizes, **options), model, int(seed[4:]))
            shifts += named(shift_sweep([str(path)], data, [0, *args.shifts], **options), model, int(seed[4:]))
    except (ValueError, OSError) as e:
        parser.error(str(e))

    for name, rows in (('resolutions', resolutions), ('shifts', shifts)):
        with open(args.output / f'{name}.csv', 'w', newline='') as f:
            writer = csv.DictWriter(f, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    for row in resolutions:  # a rule is a line of its own
        row['model'] += f', {row["policy"]}' if row['policy'] in ('extrapolate', 'rescale') else ''
    for title, rows, at, start, value in (
            ('Top-1 at other sizes', resolutions, 'height', own_size, 'top1'),
            ('Top-1 of shifted images', shifts, 'shift', 0, 'top1'),
            ('How often shifted images keep their class', shifts, 'shift', 0, 'same')):
        means, changes = tables(rows, at, start, value, args.baseline)
        print(f'\n{title}, in percent, mean ± standard deviation over seeds:\n\n{markdown(means)}')
        print(f'\nChange from {start} px, minus that of {args.baseline}, in points, 95 % interval:\n')
        print(markdown(changes) if changes else '')


if __name__ == '__main__':
    main()
