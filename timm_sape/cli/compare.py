"""`timm-sape compare`: compare models on one data set."""
import argparse

from .common import add_command
from .data_options import MODELS_HELP, add_data_options, loading, measured_on, readable, warn_untrained
from .files import TABLES, add_output_options, check_outputs, interruptible, table_writer, write_files

__all__ = ['add']


def add(commands) -> None:
    parser = add_command(
        commands, 'compare', interruptible(_compare),
        summary='Compare models on one data set: accuracy with intervals, paired test, calibration, parameters, speed.',
        examples="""\
examples:
  timm-sape compare local-dir:output/ape local-dir:output/sape2 --data-dir DATA --output comparison.md
  timm-sape compare vit_small_ape@ape.safetensors output/exp/model_best.pth.tar --data-dir DATA --device cuda --amp
  timm-sape compare hf-hub:USER/A hf-hub:USER/B hf-hub:USER/C --data-dir DATA --dataset torch/cifar10 --split test

The first model is the baseline. The others are tested against it by McNemar's exact test, on the images that only one
of the two models gets right. With more than two models, there are also p-values with Holm's correction.

A NaFlexVit sees the central square of each image. `timm-sape sweep --native` shows it whole images at their own aspect
ratio, as validate.py does with --naflex-loader.""",
    )
    parser.add_argument('models', nargs='+', metavar='MODEL', help=MODELS_HELP)
    add_data_options(parser)
    add_output_options(parser)


def _compare(args: argparse.Namespace) -> int:
    check_outputs([args.output], args.force, TABLES)

    from ..lab.compare import compare, comparison_table

    with readable():
        options = loading(args)
        warn_untrained(args.models)
        rows = compare(args.models, **options)
    table = comparison_table(rows)
    notes = 'accuracy with 95 % Wilson intervals; NLL in nats; ECE with 15 bins'
    if len(rows) > 1:
        notes += f'; wins, losses and p (exact McNemar test) against {rows[0]["model"]}'
    if len(rows) > 2:
        notes += f', p (Holm) corrected for {len(rows) - 1} tests'
    notes += f'; {measured_on(args, options["data"], rows[0]["num_images"])}'
    write_files({args.output: table_writer(rows, notes, table)}, args.force)
    print(table, notes, sep='\n\n')  # last: it fails if a pipe was closed
    return 0
