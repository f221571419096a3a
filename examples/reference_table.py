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
all that the table needs; once a run is in both, its folder may be deleted. Each measure names its training, so if a run
is trained again, it is measured again. `row` writes what is known of one model to a file, if all its seeds are trained
and measured. `merge` adds such a file to another folder, if it was trained as the plan says, on the same images, and
that folder has no other training of it:

    python examples/reference_table.py row 'RoPE-2D' --output reference_runs --file rope2d.json
    python examples/reference_table.py merge rope2d.json --output results/cpu_cifar10/reference
"""
import argparse
import csv
import hashlib
import json
import re
import signal
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from statistics import mean

import timm
import torch
from scipy.stats import dunnett

from timm_sape.analysis import position_shap
from timm_sape.cli.common import where_scripts_are
from timm_sape.lab.experiment import (
    ARCHIVE,
    alone,
    archive_runs,
    check_splits,
    import_modules,
    load_plan,
    make_slots,
    notes_of,
    read_results,
    refuse_begun_otherwise,
    rows_of,
    run_all,
    script_options,
    summary_table,
    trained_with,
    write_text,
)
from timm_sape.lab.intervals import corrected_cells, spread
from timm_sape.lab.machine import about
from timm_sape.lab.shifts import shift_sweep
from timm_sape.lab.sweep import sweep
from timm_sape.lab.tables import markdown, write_csv
from timm_sape.loading import image_size_of, load_images, load_model, open_dataset, preprocessing

ROOT = Path(__file__).parents[1]
PLAN = ROOT / 'train_configs' / 'cpu_cifar10' / 'reference.yaml'
COSTS = ROOT / 'results' / 'cost_xeon.csv'  # of `timm-sape bench`
MEASURES = 'measures.jsonl'
SHARES = (1, 0.5)  # of the recipe's learning rate
TRIAL_SEED = 20  # of no other plan
SCALES = (1.5, 2)  # of the trained size
SHIFT = 4  # pixels
TESTED = 1500  # images for each size and rule
EXPLAINED = 512  # images for Position-SHAP


def trials_of(run):
    """The trainings that choose the learning rate of a run, by rate."""
    found = {}
    for share in SHARES:
        rate = run.config['lr'] * share
        epochs = max(1, run.config['epochs'] // 2)
        # evaluated after the last epoch only
        options = dict(lr=rate, epochs=epochs, val_interval=epochs, val_split='held_out', seed=TRIAL_SEED)
        found[rate] = run._replace(
            label=f'{run.label}, trial at {rate:g}', seed=TRIAL_SEED, config={**run.config, **options})
    return found


def chosen_rates(plan, output):
    """The learning rate of each model, by label. Models whose trials have not ended, or all diverged, have none.

    A tie is decided by chance: train.py's averages of equal accuracies differ in their last digits.
    """
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


def read_plan(path, options=None):
    """The plan, with the modules imported that register its models and encodings, as train.py does it."""
    plan = load_plan(path, options)
    import_modules(plan.runs)
    return plan


def device_of(plan):
    return plan.runs[0].config.get('device', 'cuda')


def measure(checkpoint, data_dir, device):
    """Measure what the table shows beside accuracy."""
    data, model = open_dataset(data_dir, split='test'), load_model(checkpoint).to(device)
    options = dict(batch_size=250, device=device, progress=False)
    sizes = [tuple(round(scale * side) for side in image_size_of(model)) for scale in SCALES]
    rows = sweep([checkpoint], data, sizes, num_images=TESTED, **options)  # a rotation has eight rules
    shifted, = shift_sweep([checkpoint], data, [SHIFT], **options)
    data.transform = preprocessing(model)
    images = load_images(data, 250, EXPLAINED, shuffle=True)
    return {
        **{f'top1_{row["height"]}px_{row["rule"]}': row['top1'] for row in rows},
        f'top1_shifted_{SHIFT}px': shifted['top1'],
        f'same_shifted_{SHIFT}px': shifted['same'],
        'position_shap': round(position_shap(model, images, device=device).value, 4),
    }


def training_of(result):
    """What tells a training from others with the same options: a hash of its losses and accuracy."""
    return _digest(result.epochs)[:12]


def read_measures(output):
    path = output / MEASURES
    lines = list(map(json.loads, path.read_text().splitlines())) if path.exists() else []
    for line in lines:
        if not {'training', 'position_shap'} <= line.keys():
            raise ValueError(
                f'{path}: the measures of {line["model"]}, seed {line["seed"]} are of an earlier version; remove the '
                'line, and `run` measures again')
    return {(line['model'], line['seed']): line for line in lines}


def measures_of(runs, output):
    """The measures of runs, by label and seed, without those of another training."""
    lines, found = read_measures(output), {}
    for run, result in zip(runs, read_results(runs, output)):
        line = lines.get((run.label, run.seed))
        if line is not None and line['training'] == training_of(result):
            found[run.label, run.seed] = line
    return found


def keep_measures(lines, output):
    """Add lines to the measures, in place of those of the same label and seed."""
    path = output / MEASURES
    with alone(path):
        lines = {**read_measures(output), **{(line['model'], line['seed']): line for line in lines}}
        write_text(path, ''.join(json.dumps(line) + '\n' for line in lines.values()))


def refuse_unmeasured(runs, measures, advice):
    missing = [run.name for run in runs if (run.label, run.seed) not in measures]
    if missing:
        raise ValueError(f'there are no measures of this training of: {", ".join(missing)}; {advice}')


def tell(line):
    print(f'{datetime.now():%H:%M:%S} {line}', file=sys.stderr, flush=True)


def train(args):
    """Train and measure model by model. Returns the number of runs that did not finish."""
    if not args.script.is_file():
        raise ValueError(f"there is no {args.script}; --script names timm's train.py; {where_scripts_are()}")
    plan = read_plan(args.plan, script_options(args.script))
    check_splits(('train', 'held_out', 'test'), args.data_dir)
    device = device_of(plan)
    slots = make_slots(device, args.jobs)
    options = dict(script=args.script, data_dir=args.data_dir, slots=slots, tell=tell)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stop the runs, as after Ctrl-C
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
        results, measured = read_results(runs, args.output), measures_of(runs, args.output)
        failed += sum(result.status != 'finished' for result in results)
        for each, result in zip(runs, results):
            checkpoint = each.folder(args.output) / 'last.pth.tar'
            if (each.label, each.seed) in measured or result.status != 'finished' or not checkpoint.exists():
                continue
            line = {'model': each.label, 'seed': each.seed, 'training': training_of(result)}
            line |= measure(str(checkpoint), args.data_dir, device) | {'measured_on': about(torch.device(device))}
            keep_measures([line], args.output)
    return failed


def table(args):
    """Write reference.csv, a row per run, and reference.md, a row per model, the most accurate first."""
    plan, costs = read_plan(args.plan), _read_costs(args.costs)
    rates = chosen_rates(plan, args.output)
    if plan.baseline not in rates:
        raise ValueError(f'{args.output} has no finished trials of {plan.baseline!r}; name the folder of `run`')
    planned = plan.labels
    comparisons = len(planned) - 1  # of the whole plan, also while it is being trained
    trials = [trial for label in rates for trial in trials_of(plan.select([label], None)[0]).values()]
    plan = with_rates(plan, rates)
    refuse_begun_otherwise([*plan.runs, *trials], args.output)
    rows, measures = rows_of(plan, args.output), measures_of(plan.runs, args.output)
    num_seeds = len({run.seed for run in plan.runs})
    columns = sorted({key for line in measures.values() for key in line} - {'model', 'seed', 'training'})
    names = {run.label: timm.create_model(run.config['model'], device='meta', **run.config['model_kwargs']).pos_enc
             for run in plan.runs[:len(plan.labels)]}
    write_csv([{
        **row, 'pos_enc': names[row['model']], 'lr': rates[row['model']],
        **{key: measures.get((row['model'], row['seed']), {}).get(key) for key in columns},
    } for row in rows], args.output / f'{args.plan.stem}.csv')
    top1 = {label: {row['seed']: row['top1'] for row in rows if row['model'] == label and row['top1'] is not None}
            for label in plan.labels}
    sizes = sorted({int(found[1]) for found in (re.match(r'top1_(\d+)px_', key) for key in columns) if found})
    bases = {label: _baseline_of(label, plan.baseline, planned) for label in plan.labels}
    intervals = _dunnett({label: top1[label] for label in top1 if bases[label] in ('', plan.baseline)}, plan.baseline)
    beside = []
    for label in sorted(plan.labels, key=lambda label: -mean(top1[label].values() or [0])):
        own = [line for (model, seed), line in measures.items() if model == label and seed in top1[label]]
        compared = corrected_cells(top1[label], top1.get(bases[label], {}), comparisons, digits=2)
        beside.append({
            'model': label,
            'pos_enc': f'`{names[label]}`',
            'learning rate': f'{rates[label]:g}',
            'top-1 (%)': spread(list(top1[label].values())),
            'seeds': f'{len(top1[label])} of {num_seeds}',
            'minus': bases[label],
            **{key: cell for key, cell in compared.items() if key != 'shown'},
            'Dunnett': intervals.get(label, ''),
            **{f'{size} px, best rule (%)': _best_rule(own, f'top1_{size}px_') for size in sizes},
            f'shifted by {SHIFT} px (%)': spread([line[f'top1_shifted_{SHIFT}px'] for line in own], 1),
            'same class if shifted (%)': spread([line[f'same_shifted_{SHIFT}px'] for line in own], 1),
            'P-SHAP': spread([line['position_shap'] for line in own], 3),
            **_costs(names[label], costs),
        })
    trained = sum(map(bool, top1.values()))
    about_rows = (
        f'{trained} of {len(planned)} rows{" so far" if trained < len(planned) else ""}. Intervals are corrected for '
        f'{comparisons} comparisons, those of Dunnett for {len(intervals)} with {plan.baseline}. {trained_with(rows)}. '
        f'Step and memory, at 224 px: {costs[0]["notes"]}; empty: not measured there')
    about_columns = f'P-SHAP is Position-SHAP of {EXPLAINED} test images in random order, or of all if there are fewer.'
    text = '\n\n'.join([
        summary_table(rows, plan.baseline), notes_of(rows, plan.baseline), about_columns, markdown(beside), about_rows,
    ]) + '\n'
    (args.output / f'{args.plan.stem}.md').write_text(text)
    print(text)
    return 0


def _baseline_of(label, baseline, labels):
    """What a row is compared with: 'X, NOTE' with the baseline of that note if there is one, as '4 heads' has.

    The baseline itself is compared with nothing, ''.
    """
    if label == baseline:
        return ''
    _, comma, note = label.partition(', ')
    alike = f'{baseline}{comma}{note}'
    return alike if alike in labels and alike != label else baseline


def _dunnett(top1, baseline):
    """Simultaneous 95 % intervals of the differences from the baseline (Dunnett 1955), by label.

    One standard deviation for all models is estimated from all runs. So they are narrower than those of each model by
    itself, and wrong where models differ in it.
    """
    samples = {label: list(values.values()) for label, values in top1.items() if label != baseline and len(values) > 1}
    if not samples or len(top1[baseline]) < 2:
        return {}
    found = dunnett(*samples.values(), control=list(top1[baseline].values()), rng=0).confidence_interval()
    return {label: f'[{low:+.1f}, {high:+.1f}]' for label, low, high in zip(samples, found.low, found.high)}


def _read_costs(path):
    """The rows of a file of `timm-sape bench`."""
    with open(path, newline='') as f:
        rows = list(csv.DictReader(f))
    if not rows or not {'setting', 'pos_enc', 'notes'} <= rows[0].keys():
        raise ValueError(f'{path} is no file of `timm-sape bench`; name one by --costs')
    return rows


def _costs(pos_enc, rows):
    """Time and memory of a training step of ViT-S at 224 pixels as ratios to APE, if the rows have them.

    A table beside another encoding costs nothing that could be measured, so `ape+X` has the figures of `X`.
    """
    wanted = set(pos_enc.removeprefix('ape+').split('+'))  # in any order
    row = next((row for row in rows if row['setting'] == '224/16' and set(row['pos_enc'].split('+')) == wanted), {})
    return {
        heading: f'{float(row[key]):.2f}' if row.get(key) else ''
        for heading, key in (('step, ViT-S', 'step_ratio'), ('memory, ViT-S', 'step_peak_ratio'))}


def _best_rule(lines, prefix):
    """Mean and standard deviation of the rule with the best mean, and its name unless there is only one."""
    of_lines = [{key[len(prefix):] for key in line if key.startswith(prefix)} for line in lines]
    rules = sorted(set.intersection(*of_lines)) if lines else []  # a newer version may have more
    values = {rule: [line[prefix + rule] for line in lines] for rule in rules}
    best = max(rules, key=lambda rule: sum(values[rule]), default='own')
    return ' '.join([*([] if best == 'own' else [best]), spread(values.get(best, []), 1)])


def write_row(args):
    """Write all that is known of one model to a file, with its main figures on top for people."""
    plan = load_plan(args.plan)
    rates = chosen_rates(plan, args.output)
    first = plan.select([args.label], None)[0]
    if args.label not in rates:
        raise ValueError(f'{args.output} has no finished trials of {args.label!r}; name the folder of `run`')
    runs = with_rates(plan, {args.label: rates[args.label]}).runs
    refuse_begun_otherwise([*trials_of(first).values(), *runs], args.output)
    results = read_results(runs, args.output)
    missing = [run.name for run, result in zip(runs, results) if result.status != 'finished']
    if missing:
        raise ValueError(f'not finished: {", ".join(missing)}; `run --models {args.label!r}` continues')
    measures = measures_of(runs, args.output)
    refuse_unmeasured(runs, measures, f'`run --models {args.label!r}` measures those that have checkpoints')
    with tempfile.TemporaryDirectory() as scratch:
        archive_runs([*trials_of(first).values(), *runs], args.output, Path(scratch, ARCHIVE))
        lines = [json.loads(line) for line in Path(scratch, ARCHIVE).read_text().splitlines()]
    row = {
        'plan': args.plan.stem,
        'model': args.label,
        'entrypoint': first.config['model'],
        'learning_rate': rates[args.label],
        'top1': {run.seed: list(result.epochs.values())[-1]['eval_top1'] for run, result in zip(runs, results)},
        **{key: '; '.join(dict.fromkeys(result.record.seen(key) for result in results))
           for key in ('hardware', 'commit', 'torch', 'timm', 'timm_sape')},
        'sha256_of_args': {f'{line["label"]}, seed {line["seed"]}': _digest(line['args']) for line in lines},
        'runs': lines,
        'measures': list(measures.values()),
    }
    args.file.write_text(json.dumps(row, ensure_ascii=False, indent=1) + '\n')
    print(f'{args.file}: {args.label}, {len(runs)} seeds, {spread(list(row["top1"].values()))} %')
    return 0


def _digest(options):
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()


def merge(args):
    """Add the rows of files to a folder, if they were made as the plan says."""
    plan = load_plan(args.plan)
    for path in args.files:
        try:
            row = json.loads(path.read_text())
            label, rate, lines, measures = (row[key] for key in ('model', 'learning_rate', 'runs', 'measures'))
            hashes = {f'{line["label"]}, seed {line["seed"]}': _digest(line['args']) for line in lines}
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f'{path} is no file of `row` ({type(e).__name__}: {e})') from e
        if hashes != row.get('sha256_of_args'):
            raise ValueError(f'{path}: the options of a run are not those that it was written with')
        first = plan.select([label], None)[0]
        runs = with_rates(plan, {label: rate}).runs
        expected = [*trials_of(first).values(), *runs]
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / ARCHIVE).write_text(''.join(json.dumps(line) + '\n' for line in lines))
            refuse_begun_otherwise(expected, folder)
            if chosen_rates(plan, folder).get(label) != rate:
                raise ValueError(f'{path}: its trials do not choose the rate {rate:g}')
            unfinished = [
                run.name for run, result in zip(expected, read_results(expected, folder))
                if result.status != 'finished' and run.seed != TRIAL_SEED]
            if unfinished:
                raise ValueError(f'{path}: not finished: {", ".join(unfinished)}')
            keep_measures(measures, folder)
            found = measures_of(runs, folder)
            refuse_unmeasured(runs, found, f'write {path} again')
            archive_runs(expected, folder, args.output / ARCHIVE)
        known = measures_of(runs, args.output)
        keep_measures([line for key, line in found.items() if key not in known], args.output)
        print(f'{args.output}: {label}, {len(expected) - len(SHARES)} seeds')
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--plan', type=Path, default=PLAN, help='the models and seeds (default: %(default)s)')
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser('run', help='train and measure what is missing')
    training.add_argument('--script', type=Path, default=Path('train.py'), help="timm's train.py")
    training.add_argument('--jobs', type=int, help='trainings at a time (default: one per core, or per GPU)')
    training.add_argument('--data-dir', type=Path, required=True, help='has train, held_out and test')
    training.add_argument('--models', nargs='+', metavar='LABEL', help='only these (default: all)')
    tables = commands.add_parser('table', help='write the table from what there is')
    tables.add_argument('--costs', type=Path, default=COSTS, help='of `timm-sape bench` (default: %(default)s)')
    single = commands.add_parser('row', help='write a file of one model')
    single.add_argument('label', metavar='LABEL', help='of the plan')
    single.add_argument('--file', type=Path, required=True, help='to write')
    merging = commands.add_parser('merge', help='add files of single models')
    merging.add_argument('files', nargs='+', type=Path, metavar='FILE', help='files that `row` wrote')
    for command, function in (
            (training, train), (tables, table), (single, write_row), (merging, merge)):
        command.add_argument('--output', type=Path, required=True, help='folder of the runs')
        command.set_defaults(function=function)
    args = parser.parse_args()
    try:
        sys.exit(1 if args.function(args) else 0)
    except (ValueError, OSError) as e:
        parser.error(str(e))


if __name__ == '__main__':
    main()
