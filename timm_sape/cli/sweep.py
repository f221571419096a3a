"""`timm-sape sweep`: accuracy and speed at other image sizes."""
import argparse

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
from .files import FIGURES, TABLES, add_output_options, check_outputs, interruptible, table_writer, write_files

__all__ = ['add']


def add(commands) -> None:
    parser = add_command(
        commands, 'sweep', interruptible(_sweep),
        summary='Measure accuracy and speed of models over image sizes, with each rule that their encodings have.',
        examples="""\
examples:
  timm-sape sweep local-dir:output/rope2d --data-dir DATA --sizes 160 224 288 384 --output sweep.csv --plot sweep.svg
  timm-sape sweep vit_small_rope2d@model.safetensors output/exp/model_best.pth.tar --data-dir DATA --sizes 224 224x448
  timm-sape sweep hf-hub:USER/MODEL --data-dir DATA --dataset torch/cifar10 --sizes 32 48 --num-images 1000
  timm-sape sweep naflexvit_small_rope2d@model.safetensors --data-dir DATA --sizes 160 224 --native
  timm-sape sweep local-dir:output/rope2d --data-dir DATA --sizes 224 448 --rules rescale ntk yarn+log

Images are squashed to each size, so that all sizes show the same part of them; for details, in Python:
`from timm_sape.lab.sweep import sweep; help(sweep)`. There is a row for each rule that a model has for other sizes. The
column `rule` has the value of `resolution`. If several encodings have rules it names each, alibi2d=rescale,rope2d=ntk.
+log stands for logit_scaling='log'.""",
    )
    parser.add_argument('models', nargs='+', metavar='MODEL', help=MODELS_HELP)
    parser.add_argument(
        '--sizes', nargs='+', required=True, type=size, metavar='SIZE', help='pixels, 224, or height x width, 224x448')
    parser.add_argument(
        '--crop-mode', choices=('squash', 'center'), default='squash',
        help='center: crop like validate.py, only for square sizes (default: %(default)s)')
    parser.add_argument(
        '--native', action='store_true',
        help='for NaFlexVit: also each image at its own aspect ratio, in at most as many patches as the size has')
    add_rules_option(parser)
    add_data_options(parser)
    add_output_options(parser, plot='top-1 accuracy over image size')


def _sweep(args: argparse.Namespace) -> int:
    check_outputs([args.output], args.force, TABLES)
    check_outputs([args.plot], args.force, FIGURES)

    from ..lab.figures_sweep import plot_sweep
    from ..lab.sweep import sweep, sweep_table

    with readable():
        options = loading(args)
        check_images_fit(args.sizes, options)
        warn_untrained(args.models)
        rows = sweep(
            args.models, sizes=args.sizes, crop_mode=args.crop_mode, native=args.native, rules=args.rules, **options)
    table = sweep_table(rows)
    where = measured_on(args, options['data'], rows[0]['num_images'])
    notes = f'accuracy with 95 % Wilson intervals, crop mode {args.crop_mode}; {where}'
    writers = {args.output: table_writer(rows, notes, table), args.plot: lambda path: plot_sweep(rows, path)}
    write_files(writers, args.force)
    print(table, notes, sep='\n\n')  # last: it fails if a pipe was closed
    return 0
