"""Test two claims of the SaPE2 paper on trained models: is it better at other resolutions and under shifts?

    timm-sape experiment train_configs/cpu_cifar10/plan.yaml --data-dir cifar10_10k --output runs --script train.py
    python examples/claims.py runs --data-dir cifar10_10k --output claims

Each model is tested at each size, with each rule that its encoding has for other sizes, and on images shifted up, down,
left and right. Accuracy itself is no good measure: a model that is better everywhere is not better at this in
particular, and a more accurate model has more to lose. So the measure is the share of its accuracy above chance that a
model keeps, in percent of that at the trained size without a shift, minus what the baseline keeps with the same seed.
Runs that have none above chance there are not in that measure.
"""
import argparse
from pathlib import Path

import torch

import timm_sape  # noqa: F401  registers the models
from timm_sape.lab.experiment import images_in, refuse_other_images, shape_of, trained_models
from timm_sape.lab.intervals import difference, spread
from timm_sape.lab.machine import about
from timm_sape.lab.shifts import shift_sweep
from timm_sape.lab.sweep import sweep
from timm_sape.lab.tables import markdown, write_csv
from timm_sape.loading import open_dataset

RULES = 'own', 'timm', 'extrapolate', 'rescale'  # for other sizes


def lines_of(rows, at, value):
    """Group values by line of the table, then by size or shift (the column `at`), and by seed.

    A line is a model and its rule for other sizes; the rule is empty if the model has only one.
    """
    values = {}
    for row in rows:
        rule = row.get('rule', 'own')
        line = row['model'], '' if rule in RULES[:2] else rule
        values.setdefault(line, {}).setdefault(row[at], {})[row['seed']] = row[value]
    return values


def show(title, values, baseline):
    """Print mean ± standard deviation over seeds, and the paired differences from the baseline with 95 % intervals.

    The baseline has its first rule.
    """
    base = next(own for (model, _), own in values.items() if model == baseline)
    places, names = list(base), {line: ', '.join(filter(None, line)) for line in values}
    counts = {len(own[place]) for own in values.values() for place in places}
    seeds = ' to '.join(map(str, sorted({min(counts), max(counts)})))
    print(f'\n{title}, mean ± standard deviation over {seeds} seeds:\n')
    print(markdown([
        {'model': names[line], **{f'{place} px': spread(list(own[place].values()), 1) for place in places}}
        for line, own in values.items()]))
    others = [{'model': names[line], **{
        f'{place} px': difference([own[place][s] - base[place][s] for s in own[place] if s in base[place]], 1)
        for place in places}} for line, own in values.items() if own is not base]
    if others:
        print(f'\nThe same minus {baseline}, seed by seed, with 95 % intervals, each on its own:\n\n{markdown(others)}')


def kept(values, start, chance):
    """Compute, in percent, how much of its accuracy above chance at `start` each run keeps at other sizes or shifts.

    Runs without any are left out.
    """
    return {line: {place: {
        seed: 100 * (value - chance) / (own[start][seed] - chance)
        for seed, value in seeds.items() if own[start][seed] > chance
    } for place, seeds in own.items() if place != start} for line, own in values.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('runs', type=Path, help='output folder of `timm-sape experiment`')
    parser.add_argument('--data-dir', required=True, help='has test')
    parser.add_argument('--output', type=Path, required=True, help='folder for two CSV files')
    parser.add_argument('--sizes', type=int, nargs='+', default=[24, 28, 40, 48, 64], help='besides the trained one')
    parser.add_argument('--shifts', type=int, nargs='+', default=[1, 2, 4, 8], help='pixels')
    parser.add_argument('--fill', default='reflect', help='what fills the empty side (default: %(default)s)')
    parser.add_argument('--models', nargs='+', help='labels besides the baseline (default: all)')
    parser.add_argument('--baseline', default='APE', help='(default: %(default)s)')
    parser.add_argument('--num-images', type=int, help='(default: all)')
    args = parser.parse_args()

    resolutions, shifts = [], []
    try:
        trained = trained_models(args.runs, args.models and [args.baseline, *args.models])
        if args.baseline not in {run.label for run in trained}:
            raise ValueError(f'{args.runs} has no finished run of {args.baseline!r}; name another --baseline')
        files = [args.output / name for name in ('resolutions.csv', 'shifts.csv')]
        for path in files:
            if path.exists():
                raise ValueError(f'{path} exists; name a new folder')
        refuse_other_images(images_in(['test'], Path(args.data_dir)), args.runs)  # they may be what it was trained on
        own_size, width, num_classes = shape_of(trained)
        if own_size != width:
            raise ValueError(f'the models must be of a square size, not {own_size}x{width}')
        data = open_dataset(args.data_dir, split='test')
        args.output.mkdir(parents=True, exist_ok=True)
        chance = 100 / num_classes
        sizes = sorted({own_size, *args.sizes})
        options = dict(num_images=args.num_images, batch_size=250)
        measured_on = about(torch.device('cpu'))
        for label, seed, checkpoint in trained:
            about_run = {'model': label, 'seed': seed}  # replaces the path of the checkpoint
            shifts += [{**row, **about_run} for row in shift_sweep(
                [str(checkpoint)], data, [0, *args.shifts], fill=args.fill, **options)]
            resolutions += [
                {**row, **about_run} for row in sweep([str(checkpoint)], data, sizes, rules=RULES, **options)]
            notes = f'{shifts[0]["num_images"]} images; {measured_on}'
            for rows, path in zip((resolutions, shifts), files):
                write_csv(rows, path, notes)
    except (ValueError, OSError) as e:
        parser.error(str(e))

    print(notes)
    for what, rows, at, start in (('at other sizes', resolutions, 'height', own_size), ('shifted', shifts, 'shift', 0)):
        top1 = lines_of(rows, at, 'top1')
        show(f'Top-1 in percent, {what}', top1, args.baseline)
        show(f'Top-1 above chance, in percent of that at {start} px, {what}', kept(top1, start, chance), args.baseline)
    same = lines_of([row for row in shifts if row['shift']], 'shift', 'same')
    show('Shifted images that keep their class, in percent', same, args.baseline)


if __name__ == '__main__':
    main()
