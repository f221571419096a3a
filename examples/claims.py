"""Two claims of the SaPE2 paper, tested on the models of an experiment: is it better at other resolutions, and when the
image is shifted?

    timm-sape experiment train_configs/cpu_cifar10/plan.yaml --data-dir cifar10_10k --output runs --script train.py
    python examples/claims.py runs --data-dir cifar10_10k --output claims

Each model is tested at each size, by each rule that its encoding has for other sizes, and on images moved up, down, to
the left and to the right. A model that is better everywhere is not better at that, and one that knows more has more to
lose. So what counts is how much of its accuracy above chance a model keeps, in percent of what it has at the trained
size and in place, minus what the baseline keeps at the same seed.
"""
import argparse
from pathlib import Path

import torch

import timm_sape  # noqa: F401  registers the models
from timm_sape.analysis.inputs import load_model, open_dataset
from timm_sape.lab.shifts import shift_sweep
from timm_sape.lab.sweep import sweep
from timm_sape.lab.machine import about
from timm_sape.lab.tables import markdown, write_csv
from timm_sape.lab.experiment import difference, spread, trained_models


def lines_of(rows, at, value):
    """Values by line of the table, place and seed. Each rule for other sizes has a line of its own."""
    values = {}
    for row in rows:
        rule = row.get('policy')
        line = f'{row["model"]}, {rule}' if rule in ('extrapolate', 'rescale') else row['model']
        values.setdefault(line, {}).setdefault(row[at], {})[row['seed']] = row[value]
    return values


def show(title, values, baseline):
    """Mean ± standard deviation over seeds; and the paired differences to the baseline with their 95 % intervals."""
    base = values[next(line for line in values if line in (baseline, f'{baseline}, extrapolate'))]
    places = list(base)
    print(f'\n{title}, mean ± standard deviation over seeds:\n')
    print(markdown([
        {'model': line, **{f'{place} px': spread(own[place].values(), 1) for place in places}}
        for line, own in values.items()]))
    others = [{'model': line, **{
        f'{place} px': difference([own[place][s] - base[place][s] for s in own[place] if s in base[place]], 1)
        for place in places}} for line, own in values.items() if own is not base]
    if others:
        print(f'\nThe same minus {baseline}, seed by seed, with 95 % intervals, each for itself:\n\n{markdown(others)}')


def kept(values, start, chance):
    """How much of the accuracy above chance that it has at `start` each run keeps at other places, in percent."""
    return {line: {place: {
        seed: 100 * (value - chance) / max(own[start][seed] - chance, 1e-9) for seed, value in seeds.items()
    } for place, seeds in own.items() if place != start} for line, own in values.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('runs', type=Path, help='folder that `timm-sape experiment` has written')
    parser.add_argument('--data-dir', required=True, help='test images')
    parser.add_argument('--output', type=Path, required=True, help='folder for two CSV files')
    parser.add_argument('--sizes', type=int, nargs='+', default=[24, 28, 40, 48, 64], help='besides the trained one')
    parser.add_argument('--shifts', type=int, nargs='+', default=[1, 2, 4, 8], help='pixels')
    parser.add_argument('--fill', default='reflect', help='what comes in at the side (default: %(default)s)')
    parser.add_argument('--models', nargs='+', help='rows of the experiment besides the baseline (default: all)')
    parser.add_argument('--baseline', default='APE', help='(default: %(default)s)')
    parser.add_argument('--num-images', type=int, help='(default: all)')
    args = parser.parse_args()

    resolutions, shifts = [], []
    try:
        trained = trained_models(args.runs, args.models and [args.baseline, *args.models])
        if args.baseline not in {run.label for run in trained}:
            raise ValueError(f'{args.runs} has no finished run of {args.baseline!r}; name another --baseline')
        args.output.mkdir(parents=True, exist_ok=True)
        data = open_dataset(args.data_dir)
        model = load_model(str(trained[0].checkpoint))
        own_size, chance = model.patch_embed.img_size[0], 100 / model.num_classes
        sizes = sorted({own_size, *args.sizes})
        options = dict(num_images=args.num_images, batch_size=250)
        measured_on = about(torch.device('cpu'))
        for label, seed, checkpoint in trained:
            about_run = {'model': label, 'seed': seed}  # for the path
            resolutions += [{**row, **about_run} for row in sweep([str(checkpoint)], data, sizes, **options)]
            shifts += [{**row, **about_run} for row in shift_sweep(
                [str(checkpoint)], data, [0, *args.shifts], fill=args.fill, **options)]
            notes = f'{shifts[0]["num_images"]} images; {measured_on}'
            write_csv(resolutions, args.output / 'resolutions.csv', notes)
            write_csv(shifts, args.output / 'shifts.csv', notes)
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
