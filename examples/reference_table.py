"""A reference table: every encoding at a learning rate chosen for it, tested with seeds that did not choose it.

    timm-sape data cifar10-subset --source ROOT --output cifar10_held_out --per-class 1000 400 --held-out 200
    python examples/reference_table.py run --data-dir cifar10_held_out --output reference_runs --script train.py
    python examples/reference_table.py table --output reference_runs

A learning rate that suits one encoding may ruin another. So each model is first trained for half the epochs at the
recipe's rate and at half of it, and the rate with the higher accuracy on held-out training images is taken. Then the
model is trained with the seeds of the plan and tested on the test images. Measured on the same checkpoints: accuracy
at 1.5 and 2 times the size, with each rule that the encoding has for other sizes; accuracy and unchanged decisions on
images shifted by 4 pixels; and Position-SHAP.

`run` works model by model and continues where it stopped. `runs.jsonl` and `measures.jsonl` in the output folder keep
all that the table needs; once a run is in both, its folder may be deleted.
"""
import argparse
import json
import re
import sys
from datetime import datetime
from pathlib import Path

import torch

from timm_sape.analysis import position_shap
from timm_sape.analysis.inputs import load_images, load_model, open_dataset, preprocessing
from timm_sape.lab.experiment import (
    ARCHIVE,
    archive_runs,
    load_plan,
    make_slots,
    notes_of,
    read_results,
    rows_of,
    run_all,
    script_options,
    summary_table,
)
from timm_sape.lab.intervals import spread
from timm_sape.lab.machine import about
from timm_sape.lab.shifts import shift_sweep
from timm_sape.lab.sweep import sweep
from timm_sape.lab.tables import markdown, write_csv

PLAN = Path(__file__).parents[1] / 'train_configs' / 'cpu_cifar10' / 'reference.yaml'
MEASURES = 'measures.jsonl'
SHARES = (1, 0.5)  # of the recipe's learning rate; the first wins a tie
TRIAL_SEED = 20  # of no other plan
SCALES = (1.5, 2)  # of the trained size
SHIFT = 4  # pixels
EXPLAINED = 512  # images for Position-SHAP


def trials_of(run):
    """The trainings that choose the learning rate of a run, by rate."""
    found = {}
    for share in SHARES:
        rate = run.config['lr'] * share
        epochs = run.config['epochs'] // 2
        # evaluated after the last epoch only
        options = dict(lr=rate, epochs=epochs, val_interval=epochs, val_split='held_out', seed=TRIAL_SEED)
        found[rate] = run._replace(
            label=f'{run.label}, trial at {rate:g}', seed=TRIAL_SEED, config={**run.config, **options})
    return found


def chosen_rates(plan, output):
    """The learning rate of each model, by label. Models whose trials have not ended, or all diverged, have none."""
    rates = {}
    for run in plan.runs[:len(plan.labels)]:
        trials = trials_of(run)
        results = read_results(list(trials.values()), output)
        if all(result.status in ('finished', 'diverged') for result in results):
            accuracy = {
                rate: list(result.epochs.values())[-1]['eval_top1']
                for rate, result in zip(trials, results) if result.status == 'finished'}
            if accuracy:
                rates[run.label] = max(accuracy, key=accuracy.get)
    return rates


def with_rates(plan, rates):
    """The plan's runs at the chosen rates. Runs of models without one are left out."""
    return plan._replace(runs=[
        run._replace(config={**run.config, 'lr': rates[run.label]}) for run in plan.runs if run.label in rates])


def measure(checkpoint, data_dir):
    """Measure what the table shows beside accuracy."""
    data = open_dataset(data_dir)
    model = load_model(checkpoint)
    size = model.patch_embed.img_size[0]
    options = dict(batch_size=250, progress=False)
    rows = sweep([checkpoint], data, [round(scale * size) for scale in SCALES], **options)
    shifted, = shift_sweep([checkpoint], data, [SHIFT], **options)
    data.transform = preprocessing(model)
    explained = position_shap(model, load_images(data, 250, EXPLAINED, 0, 0))
    return {
        **{f'top1_{row["height"]}px_{row["policy"]}': row['top1'] for row in rows},
        f'top1_shifted_{SHIFT}px': shifted['top1'],
        f'same_shifted_{SHIFT}px': shifted['same'],
        'pshap': round(explained.value, 4),
    }


def read_measures(output):
    path = output / MEASURES
    lines = path.read_text().splitlines() if path.exists() else []
    return {(line['model'], line['seed']): line for line in map(json.loads, lines)}


def tell(line):
    print(f'{datetime.now():%H:%M:%S} {line}', file=sys.stderr, flush=True)


def train(args):
    """Train and measure model by model. Returns the number of runs that did not finish."""
    plan = load_plan(args.plan, script_options(args.script))
    slots = make_slots(plan.runs[0].config['device'], args.jobs)
    options = dict(script=args.script, data_dir=args.data_dir, slots=slots, tell=tell)
    failed = 0
    for label in args.models or plan.labels:
        first = plan.select([label], None)[0]
        trials = list(trials_of(first).values())
        run_all(trials, args.output, **options)
        archive_runs(trials, args.output, args.output / ARCHIVE)
        rate = chosen_rates(plan, args.output).get(label)
        if rate is None:
            tell(f'{label}: no trial finished, or one crashed; see train.log in its folder')
            failed += 1
            continue
        tell(f'{label}: learning rate {rate:g}')
        runs = with_rates(plan, {label: rate}).runs
        run_all(runs, args.output, **options)
        archive_runs(runs, args.output, args.output / ARCHIVE)
        failed += sum(result.status != 'finished' for result in read_results(runs, args.output))
        measured = read_measures(args.output)
        for each in runs:
            checkpoint = each.folder(args.output) / 'last.pth.tar'
            if (each.label, each.seed) in measured or not checkpoint.exists():
                continue
            line = {'model': each.label, 'seed': each.seed, **measure(str(checkpoint), args.data_dir)}
            line['measured_on'] = about(torch.device('cpu'))
            with open(args.output / MEASURES, 'a') as f:
                f.write(json.dumps(line, ensure_ascii=False) + '\n')
    return failed


def table(args):
    """Write reference.csv, a row per run, and reference.md, a row per model."""
    plan = load_plan(args.plan)
    rates = chosen_rates(plan, args.output)
    if plan.baseline not in rates:
        raise ValueError(f'{args.output} has no finished trials of {plan.baseline!r}; name the folder of `run`')
    plan = with_rates(plan, rates)
    rows, measures = rows_of(plan, args.output), read_measures(args.output)
    columns = sorted({key for line in measures.values() for key in line} - {'model', 'seed'})
    write_csv([{
        **row, 'lr': rates[row['model']],
        **{key: measures.get((row['model'], row['seed']), {}).get(key) for key in columns},
    } for row in rows], args.output / f'{args.plan.stem}.csv')
    beside = [{
        'model': label,
        'learning rate': f'{rates[label]:g}',
        **{heading: '; '.join(
            f'{policy} {values}' if policy not in ('own', '') else values
            for policy, values in _spreads(measures, label, prefix)) for heading, prefix in _headings(columns)},
    } for label in plan.labels]
    text = f'{summary_table(rows, plan.baseline)}\n\n{markdown(beside)}\n\n{notes_of(rows, plan.baseline)}\n'
    (args.output / f'{args.plan.stem}.md').write_text(text)
    print(text)
    return 0


def _headings(columns):
    """Headings of the table, and what the columns of measures begin with that belong under them."""
    sizes = sorted({int(found[1]) for found in (re.match(r'top1_(\d+)px_', key) for key in columns) if found})
    return [
        *((f'{size} px (%)', f'top1_{size}px_') for size in sizes),
        (f'shifted by {SHIFT} px (%)', f'top1_shifted_{SHIFT}px'),
        ('same class if shifted (%)', f'same_shifted_{SHIFT}px'),
        ('P-SHAP', 'pshap'),
    ]


def _spreads(measures, label, prefix):
    """(Rest of the column's name, mean and standard deviation over seeds) of the columns with a prefix."""
    own = [line for (model, _), line in measures.items() if model == label]
    names = dict.fromkeys(key for line in own for key in line if key.startswith(prefix))
    return [(key[len(prefix):], spread([line[key] for line in own], 3 if prefix == 'pshap' else 1)) for key in names]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--plan', type=Path, default=PLAN, help='the models and seeds (default: %(default)s)')
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser('run', help='train and measure what is missing')
    training.add_argument('--data-dir', type=Path, required=True, help='has train, held_out and test')
    training.add_argument('--script', type=Path, default=Path('train.py'), help="timm's train.py")
    training.add_argument('--models', nargs='+', metavar='LABEL', help='only these (default: all)')
    training.add_argument('--jobs', type=int, help='trainings at a time (default: one per core)')
    tables = commands.add_parser('table', help='write the table from what there is')
    for command, function in ((training, train), (tables, table)):
        command.add_argument('--output', type=Path, required=True, help='folder of the runs; may be new')
        command.set_defaults(function=function)
    args = parser.parse_args()
    try:
        sys.exit(1 if args.function(args) else 0)
    except (ValueError, OSError) as e:
        parser.error(str(e))


if __name__ == '__main__':
    main()
