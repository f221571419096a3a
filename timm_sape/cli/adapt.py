"""`timm-sape adapt`: the best rule for a trained model at a size that it was not trained on."""
import argparse
import sys
from pathlib import Path
from typing import Any, Dict

from .common import add_command
from .data_options import (
    MODELS_HELP,
    add_data_options,
    add_rules_option,
    check_images_fit,
    loading,
    measured_on,
    readable,
    size,
    warn_untrained,
)
from .files import TABLES, check_folder, check_outputs, interruptible, table_writer, write_files

__all__ = ['add']


def add(commands) -> None:
    parser = add_command(
        commands, 'adapt', interruptible(_adapt),
        summary='Try the rules for other sizes on a trained model, and save it with the best one. Nothing is trained.',
        examples="""\
examples:
  timm-sape adapt local-dir:output/rope2d --sizes 448 --data-dir DATA --output rope2d_448
  timm-sape adapt vit_small_patch16_224.augreg_in21k_ft_in1k --sizes 384 --data-dir DATA --agreement --output small_384
  timm-sape adapt output/exp/model_best.pth.tar --sizes 288 384 224x448 --data-dir DATA --table rules.csv

The score is accuracy; without labels, or with --agreement, the share of images that get the class that the model itself
predicts at the size that it was trained on. Differences are from the rule that the model has as it is, on the same
images. Another rule is chosen only if it is shown to be better: if the interval of its difference, corrected for the
number of rules, is above 0. A model of timm is converted first, by timm_sape.graft(MODEL, 'nope').

As in sweep, images are squashed to each size, so that all sizes show the same part of them. Accuracy on images that are
not square differs from that of validate.py, which crops them.""",
    )
    parser.add_argument('model', metavar='MODEL', help=MODELS_HELP)
    parser.add_argument(
        '--sizes', nargs='+', required=True, type=size, metavar='SIZE', help='pixels, 224, or height x width, 224x448')
    parser.add_argument(
        '--agreement', action='store_true',
        help="score by the model's own predictions at its trained size, not by labels")
    parser.add_argument(
        '--output', type=Path, metavar='FOLDER',
        help='save the model with the rule that was chosen, at that size, to a new folder; of several sizes each in a '
             'folder of its own, 448x448')
    add_rules_option(parser)
    add_data_options(parser)
    parser.add_argument('--table', type=Path, metavar='FILE', help=f'write the table: {", ".join(TABLES)}')
    parser.add_argument('--force', action='store_true', help='overwrite an existing table')


def _adapt(args: argparse.Namespace) -> int:
    check_outputs([args.table], args.force, TABLES)
    sizes = list(dict.fromkeys(args.sizes))
    folders = {
        size: args.output if len(sizes) == 1 else args.output / f'{size[0]}x{size[1]}'
        for size in sizes} if args.output is not None else {}
    for folder in folders.values():
        check_folder(folder)

    from ..lab.adapt import adapt, adapted_table, chosen_row, num_tried, save_adapted, snapshot

    with readable():
        options = loading(args)
        check_images_fit(sizes, options)
        warn_untrained([args.model])
        with snapshot(args.model) as (spec, reason):
            if reason:
                print(f'timm-sape: {args.model} keeps the rule of timm: {reason}', file=sys.stderr)
            found = adapt(spec, sizes=sizes, name=args.model, agreement=args.agreement, rules=args.rules, **options)
            table = adapted_table(found.rows)
            own = found.rows[0]['rule']
            labelled = found.rows[0]['measure'] == 'top1'
            measure = (
                f'top-1 accuracy, {found.at_home:.1f} % at {found.home}' if labelled
                else f'agreement with its predictions at {found.home}')
            notes = (
                f'{args.model}: {measure}; images squashed; 95 % Wilson intervals; differences from {own} with '
                'intervals of the pairs, all of a size right in 95 % of cases; '
                + measured_on(args, options['data'], found.rows[0]['num_images']))
            # before anything is printed, which fails if a pipe was closed
            write_files({args.table: table_writer(found.rows, notes, table)}, args.force)
            try:
                for size, folder in folders.items():
                    save_adapted(spec, found, size, folder)
            finally:  # what was measured must not be lost
                print(table, notes, sep='\n\n', end='\n\n')
            if not labelled and found.classes_at_home == 1:
                print(
                    f'timm-sape: {args.model} predicts one class for all images at {found.home}, so agreement says '
                    'little; give images of several classes, and a trained model', file=sys.stderr)
            for size in sizes:
                decision = _decision(
                    chosen_row(found, size), own, num_tried(found, size), is_home=size == found.home_size)
                print(f'{size[0]}x{size[1]}: {decision}')
            for size, folder in folders.items():
                print(f"{folder}: {chosen_row(found, size)['rule']} at {size[0]}x{size[1]}; "
                      f"timm.create_model('local-dir:{folder}', pretrained=True)")
    return 0


def _decision(row: Dict[str, Any], own: str, tried: int, is_home: bool) -> str:
    """Which rule was chosen for a size, and why, out of how many; `is_home` at the size that it was trained on."""
    if row['rule'] != own:
        return (
            f"{row['rule']} is better than the model's own rule, {own}. It was chosen on these images, so its figure "
            'is too good; measure it on others.')
    if tried > 1:
        return f"no rule is shown to be better than the model's own, {own}."
    if own == 'timm':
        return 'there is one rule, timm, so there was nothing to choose.'
    if is_home:
        return f'at this size all rules do the same, so only {own} was tried.'
    return f'{own} is the only rule that was tried.'
