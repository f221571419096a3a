"""`timm-sape adapt`: the best rule for a trained model at a size that it was not trained on."""
import argparse
import os
import sys
from pathlib import Path

from .common import CommandError, add_command
from .data_options import (
    MODELS_HELP,
    add_data_options,
    add_rules_option,
    loading,
    measured_on,
    readable,
    size,
    warn_untrained,
)
from .files import TABLES, check_outputs, interruptible, table_writer, write_files

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
predicts at its own size. Differences are to the rule that the model has as it is, on the same images. A model of timm
is converted first, by timm_sape.graft(MODEL, 'nope').""",
    )
    parser.add_argument('model', metavar='MODEL', help=MODELS_HELP)
    parser.add_argument(
        '--sizes', nargs='+', required=True, type=size, metavar='SIZE', help='pixels, 224, or height x width, 224x448')
    parser.add_argument(
        '--agreement', action='store_true', help="ignore labels, if the classes of the images are not the model's")
    parser.add_argument(
        '--output', type=Path, metavar='FOLDER',
        help='save the model with the best rule, at that size; of several sizes each in a folder of its own, 448x448')
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
        if os.path.lexists(folder):
            raise CommandError(f'{folder} exists; name an --output that does not')
    if args.output is not None and args.output.is_file():
        raise CommandError(f'{args.output} is a file; name a folder as --output')

    from ..lab.adapt import adapt, adapted_table, save_adapted, snapshot

    with readable():
        options = loading(args)
        warn_untrained([args.model])
        with snapshot(args.model) as (spec, reason):
            if reason:
                print(f'timm-sape: {args.model} keeps the rule of timm: {reason}', file=sys.stderr)
            found = adapt(spec, sizes=sizes, name=args.model, agreement=args.agreement, rules=args.rules, **options)
            table = adapted_table(found.rows)
            rules = list(dict.fromkeys(row['rule'] for row in found.rows))
            is_top1 = found.measure == 'top1'
            measure = (
                f'top-1 accuracy, {found.at_home:.1f} % at its own size' if is_top1
                else 'agreement with the predictions at its own size')
            notes = (
                f'{args.model}: {measure}; 95 % Wilson intervals; differences from {rules[0]} with 95 % intervals of '
                f'the pairs; {measured_on(args, found.rows[0]["num_images"])}')
            print(table, notes, sep='\n\n')
            if len(rules) == 1:
                print(f'\nThere is one rule, {rules[0]}, so there was nothing to choose.')
            else:
                print('\nThe best rule was chosen on these images, so its figure is too good; measure it on others.')
            if args.table is not None:
                write_files({args.table: table_writer(found.rows, notes, table)}, args.force)
            for size, folder in folders.items():
                row = next(row for row in found.rows if row['best'] and (row['height'], row['width']) == size)
                save_adapted(spec, size, found.best[size], folder, row)
                print(f"{folder}: {row['rule']} at {size[0]}x{size[1]}; timm.create_model('local-dir:{folder}', "
                      'pretrained=True)')
    return 0
