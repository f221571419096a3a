"""`timm-sape shifts`: accuracy on shifted images."""
import argparse

from .common import add_command
from .data_options import MODELS_HELP, add_data_options, loading, measured_on, readable, warn_untrained
from .files import TABLES, add_output_options, check_outputs, interruptible, table_writer, write_files

__all__ = ['add']


def add(commands) -> None:
    parser = add_command(
        commands, 'shifts', interruptible(_shifts),
        summary='Measure the accuracy of models on shifted images, and how often the predicted class stays the same.',
        examples="""\
examples:
  timm-sape shifts local-dir:output/rope2d vit_small_ape@model.safetensors --data-dir DATA --by 1 4 16
  timm-sape shifts output/exp/model_best.pth.tar --data-dir DATA --by 8 --fill circular --output shifts.csv

Each shift is tried in four directions, up, down, left and right; a row has the mean of the four.""",
    )
    parser.add_argument('models', nargs='+', metavar='MODEL', help=MODELS_HELP)
    parser.add_argument('--by', nargs='+', required=True, type=int, metavar='PIXELS', help='0 or more')
    parser.add_argument(
        '--fill', choices=('reflect', 'replicate', 'circular', 'constant'), default='reflect',
        help='what fills the empty side: the mirrored image, its border, the other side, the mean colour '
             '(default: %(default)s)')
    add_data_options(parser)
    add_output_options(parser)


def _shifts(args: argparse.Namespace) -> int:
    check_outputs([args.output], args.force, TABLES)

    from ..lab.shifts import shift_sweep, shift_table

    with readable():
        options = loading(args)
        warn_untrained(args.models)
        rows = shift_sweep(args.models, shifts=args.by, fill=args.fill, **options)
    table = shift_table(rows)
    notes = f'fill {args.fill}; {measured_on(args, options["data"], rows[0]["num_images"])}'
    write_files({args.output: table_writer(rows, notes, table)}, args.force)
    print(table, notes, sep='\n\n')  # last: it fails if a pipe was closed
    return 0
