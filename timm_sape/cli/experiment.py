"""`timm-sape experiment`: train models with several seeds by one recipe."""
import argparse
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import List

from .common import CommandError, add_command, where_scripts_are
from .files import interruptible, write_files

__all__ = ['add']


def add(commands) -> None:
    parser = add_command(
        commands, 'experiment', interruptible(_experiment),
        summary="Train models with several seeds by one recipe, through timm's train.py, and compare them.",
        examples="""\
examples:
  timm-sape experiment train_configs/cpu_cifar10/plan.yaml --data-dir DATA --output output/cpu --dry-run
  timm-sape experiment train_configs/cpu_cifar10/plan.yaml --data-dir DATA --output output/cpu
  timm-sape experiment plan.yaml --data-dir DATA --output DIR --models APE 'SaPE2(K)+APE' --seeds 1
  timm-sape experiment plan.yaml --output DIR --tables
  timm-sape experiment plan.yaml --output DIR --archive KEPT

A plan is a YAML file:

  recipe: ../deit_cifar10/vit_small_ape.yaml     # options of train.py; the path is relative to the plan
  seeds: [1, 2, 3]
  baseline: APE                                  # what the others are compared with; default: the first model
  args: {epochs: 50, amp: true}                  # more options of train.py, for all models
  models:                                        # per row of the table a label, and a model or options of train.py
    APE: vit_small_ape
    SaPE2(K)+APE: vit_small_sape2_k_ape
    equations: {model: vit_small_sape2_k_ape, model_kwargs: {pos_enc_kwargs: {sape2_k: {preset: equations}}}}

If it is interrupted, by Ctrl-C or by a reboot, the same command continues: finished runs are not repeated, the others
resume from their last checkpoint. DIR/LABEL/seedN has the files of train.py, its output train.log and the options
config.yaml; spaces and other special characters of the label become hyphens. DIR/PLAN.csv has a row per run,
DIR/PLAN.md the comparison, DIR/PLAN.png the curves. --archive puts what is worth keeping of the runs into one file,
KEPT/runs.jsonl; --output KEPT --tables makes the same tables from it.""",
    )
    parser.add_argument('plan', type=Path, metavar='PLAN', help='a YAML file, see below')
    parser.add_argument('--output', type=Path, metavar='DIR', required=True, help='folder for the runs; may be new')
    parser.add_argument('--data-dir', type=Path, metavar='DIR', help='images, for train.py')
    parser.add_argument(
        '--script', type=Path, default=Path('train.py'), metavar='FILE', help="timm's train.py (default: %(default)s)")
    parser.add_argument('--models', nargs='+', metavar='LABEL', help='run or archive only these')
    parser.add_argument('--seeds', nargs='+', type=int, metavar='N', help='run or archive only these')
    parser.add_argument(
        '--jobs', type=int, metavar='N',
        help='runs at a time (default: cores / threads); with GPUs, runs at a time on each of them (default: 1)')
    parser.add_argument('--threads', type=int, metavar='N', help='CPU threads per run (default: 1 on a CPU)')
    what = parser.add_mutually_exclusive_group()
    what.add_argument('--dry-run', action='store_true', help='only say what is left to do, and how long it will take')
    what.add_argument('--tables', action='store_true', help='only write the tables and curves again')
    what.add_argument(
        '--archive', type=Path, metavar='KEPT', help='only add the runs that have ended to KEPT/runs.jsonl')


def _experiment(args: argparse.Namespace) -> int:
    for option in ('jobs', 'threads'):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            raise CommandError(f'--{option} must be at least 1')
    try:
        from ..lab import experiment  # noqa: F401
    except ModuleNotFoundError as e:
        if e.name != 'fcntl':
            raise
        raise CommandError('experiments need Linux or macOS, where Python has the module fcntl') from e
    try:
        return _render(args) if args.tables or args.archive else _run(args)
    except ValueError as e:
        raise CommandError(str(e)) from e
    except OSError as e:
        raise CommandError(f'cannot go on: {e}') from e


def _render(args: argparse.Namespace) -> int:
    """Write tables or the archive from the runs that there are."""
    from ..lab.experiment import ARCHIVE, archive_runs, load_plan, refuse_begun_otherwise

    plan = load_plan(args.plan)
    if not _begun(plan, args.output):
        raise CommandError(f'{args.output} has no run of {args.plan}; name the folder of the experiment')
    refuse_begun_otherwise(plan.runs, args.output)
    if args.archive is not None:
        path, runs = args.archive / ARCHIVE, plan.select(args.models, args.seeds)
        print(f'{path}: {archive_runs(runs, args.output, path)} of {len(runs)} runs')
    elif args.models or args.seeds:
        raise CommandError('--tables writes those of the whole plan; leave --models and --seeds out')
    else:
        print(_write_tables(plan, args))
    return 0


def _run(args: argparse.Namespace) -> int:
    from ..lab.experiment import (
        estimate, load_plan, make_slots, refuse_begun_otherwise, rows_of, run_all, script_options)

    if not args.script.is_file():
        raise CommandError(f"there is no {args.script}; --script names timm's train.py; {where_scripts_are()}")
    plan = load_plan(args.plan, script_options(args.script))
    refuse_begun_otherwise(plan.runs, args.output)
    for path in _files(args):
        if path.exists() and not _begun(plan, args.output):
            raise CommandError(f'{path} exists and is not of this experiment; name another --output')
    runs = plan.select(args.models, args.seeds)
    _check_runs(runs, args.data_dir, args.output)
    slots = make_slots(runs[0].config.get('device', 'cuda'), args.jobs, args.threads)
    options = dict(script=args.script, data_dir=args.data_dir, slots=slots, tell=_tell)
    if args.dry_run:
        return _print_estimate(estimate(runs, args.output, **options), len(slots))

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stop the runs, as after Ctrl-C
    try:
        run_all(runs, args.output, changed=lambda: _write_tables(plan, args, curves=False), **options)
    finally:
        table = _write_tables(plan, args)
    print(table)
    asked = {(run.label, run.seed) for run in runs}
    unfinished = [
        row for row in rows_of(plan, args.output)
        if (row['model'], row['seed']) in asked and row['status'] != 'finished']
    if unfinished:
        print(f'timm-sape: {len(unfinished)} of {len(runs)} runs are not finished', file=sys.stderr)
    return 1 if unfinished else 0


def _begun(plan, output: Path) -> bool:
    from ..lab.experiment import read_results
    return any(result.config is not None for result in read_results(plan.runs, output))


def _files(args: argparse.Namespace) -> List[Path]:
    from ..lab.experiment import OUTPUTS
    return [args.output / f'{args.plan.stem}{suffix}' for suffix in OUTPUTS]


def _check_runs(runs: List, data_dir: Path, output: Path) -> None:
    """Refuse what would make every run fail, or worse, train on the wrong images."""
    import timm

    from ..lab.experiment import SPLITS, import_modules
    from ..loading import is_torchvision, split_folder

    if data_dir is None:
        raise CommandError('--data-dir is missing: where are the images?')
    import_modules(runs)
    for run in runs:
        name = run.config['model']
        if ':' not in name and not timm.is_model(name):
            raise CommandError(f'{run.label}: there is no model {name!r}; see timm.list_models()')
        for option, split in run.splits.items():
            if not data_dir.is_dir():
                raise CommandError(f'--data-dir {data_dir} does not exist; name the folder of {split!r}')
            folder = split_folder(data_dir, split)
            if folder is not None and run.folder(output).resolve().is_relative_to(folder.resolve()):
                raise CommandError(f'{run.folder(output)} would be among the images; name another --output')
            if folder is None:
                raise CommandError(
                    f'{data_dir} has no folder {split!r}, and train.py would use all of it instead; set {option} '
                    'in the plan, or name another --data-dir')
    named = {
        (run.config['dataset'], run.config.get(option, default)): run.label
        for run in runs for option, default in SPLITS.items()
        if is_torchvision(run.config.get('dataset', '')) and not run.config.get('dataset_download')}
    for (name, split), label in named.items():
        if not split:
            continue
        try:
            timm.data.create_dataset(name, root=str(data_dir), split=split, download=False)
        except Exception as e:  # torchvision raises many kinds
            raise CommandError(
                f'{label}: {data_dir} has no data set {name}, split {split!r}: {" ".join(str(e).split())}; name '
                'another --data-dir, or write `dataset_download: true` in the plan') from e


def _tell(line: str) -> None:
    from datetime import datetime
    print(f'{datetime.now():%H:%M:%S} {line}', file=sys.stderr, flush=True)


def _print_estimate(found, slots: int) -> int:
    from ..lab.tables import markdown

    def minutes(seconds) -> str:
        return '' if seconds is None else f'{seconds / 60:.1f}'

    print(markdown([{
        'model': row['model'],
        'runs': row['runs'],
        'finished': row['finished'],
        'epochs done of the others': row['epochs_done'] or '',
        'steps an epoch': row['steps'],
        's a step': None if row['step_s'] is None else f'{row["step_s"]:.3f}',
        'minutes a run': minutes(row['run_s']),
        'minutes to go': row['error'] or minutes(row['to_go_s']) or '0',
    } for row in found['rows']]), end='\n\n')
    if found['seconds'] is None:
        print('timm-sape: train.py cannot run some of the models', file=sys.stderr)
        return 1
    print(f'{found["seconds"] / 60:.0f} minutes to go, {slots} at a time')
    return 0


def _write_tables(plan, args: argparse.Namespace, curves: bool = True) -> str:
    """Write the tables and curves under the name of the plan. Returns the table for people."""
    from ..lab.experiment import notes_of, plot_curves, rows_of, summary_table
    from ..lab.tables import write_csv

    rows = rows_of(plan, args.output)
    text = f'{summary_table(rows, plan.baseline)}\n\n{notes_of(rows, plan.baseline)}'
    data, table, figure = _files(args)
    writers = {
        data: lambda path: write_csv(rows, path),  # the rows have columns for everything that the notes say
        table: lambda path: path.write_text(f'{text}\n', encoding='utf-8')}
    if curves and find_spec('matplotlib') is not None:
        writers[figure] = lambda path: plot_curves(plan, args.output, path)
    write_files(writers, force=True)
    return text
