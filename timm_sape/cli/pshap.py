"""`timm-sape pshap`: how much the decisions of a model depend on position."""
import argparse
import math
import time
from pathlib import Path
from typing import Any, Dict, List

from .common import CommandError, add_command
from .data_options import (
    MODELS_HELP,
    add_data_options,
    add_pos_enc_option,
    chosen_encoding,
    loading,
    measured_on,
    named,
    readable,
    warn_untrained,
)
from .files import FIGURES, TABLES, add_output_options, check_outputs, interruptible, table_writer, write_files

__all__ = ['add']


def add(commands) -> None:
    parser = add_command(
        commands, 'pshap', interruptible(_pshap),
        summary='Compute Position-SHAP: how much the decisions of a model depend on position, from 0 to 1.',
        examples="""\
examples:
  timm-sape pshap output/exp/model_best.pth.tar --data-dir DATA
  timm-sape pshap hf-hub:USER/MODEL --data-dir DATA --dataset torch/cifar10 --num-images 1000
  timm-sape pshap vit_small_patch16_224 --data-dir DATA --output pshap.csv --plot pshap.png

The value of a model is the mean over correctly classified images. Computing it takes about as long as 18 validation
passes over the same images; the output tells the time. The table has a row per class, --output one per image.""",
    )
    parser.add_argument('model', metavar='MODEL', help=MODELS_HELP)
    add_pos_enc_option(parser)
    add_data_options(parser)
    parser.add_argument(
        '--background', type=int, default=16, metavar='N',
        help='images that each image is explained against (default: %(default)s, as in the paper)')
    parser.add_argument(
        '--per-layer', action='store_true', help='permute positions differently in each layer; only for our models')
    add_output_options(parser, plot='a histogram of the values')


def _pshap(args: argparse.Namespace) -> int:
    check_outputs([args.output], args.force, TABLES)
    check_outputs([args.plot], args.force, FIGURES)
    if args.amp:
        raise CommandError('--amp: Position-SHAP computes small differences, which need float32; leave it out')

    from ..analysis import position_shap
    from ..analysis.figures import draw_histogram
    from ..lab.evaluate import predict
    from ..lab.tables import markdown
    from ..loading import check_numbering, load_images, load_model, number_classes, preprocessing

    with readable():
        options = loading(args)
        data = options['data']
        model = load_model(args.model, **chosen_encoding(args.pos_enc)).to(args.device)
        warn_untrained([args.model])
        number_classes(data, [args.model])
        check_numbering(data, model, args.model)
        data.transform = preprocessing(model)
        batches = load_images(data, args.batch_size, args.num_images, args.workers, args.seed, shuffle=True)
        start = time.monotonic()
        found = position_shap(
            model, batches, background=args.background, batch_size=args.batch_size, per_layer=args.per_layer,
            seed=args.seed, device=args.device, progress='Position-SHAP')
        middle = time.monotonic()
        predict(model, batches, args.device, progress='one validation pass, to compare with')
        passes = (middle - start) / (time.monotonic() - middle)

    # data sets of torchvision have no reader
    class_to_idx = getattr(getattr(data, 'reader', data), 'class_to_idx', None) or {}
    names = {index: name for name, index in class_to_idx.items()}
    summary = _by_class(found, names)
    # A group of images is explained with its other half as background. The last group may be smaller.
    rest = len(found.values) % (2 * args.background)
    halves = ' or '.join(map(str, dict.fromkeys((rest // 2, rest - rest // 2))))
    if rest == len(found.values):
        background = f'{halves} (there are too few images for more)'
    else:
        background = f'{args.background}' + (f', {halves} for the last {rest} images' if rest else '')
    permuted = ', positions permuted in each layer' if args.per_layer else ''
    notes = (
        f'{named(args)}{permuted}, seed {args.seed}, {measured_on(args, data, len(found.values))}, '
        f'background {background}; took {middle - start:.1f} s, as long as {passes:.1f} validation passes')
    if math.isnan(found.value):
        notes += (
            '. There is no value, because '
            + ('its logits of the images that it classifies correctly are constant' if found.correct.any() else
               'no image is classified correctly, and the value is a mean over those that are')
            + ': take a trained model, or more images')
    rows = [
        {'label': label, 'correct': int(correct), 'position': pe, 'image': im, 'pshap': p}
        for label, correct, pe, im, p in zip(*(t.tolist() for t in (
            found.labels, found.correct, found.position, found.image, found.values)))]
    writers = {
        args.output: table_writer(rows, notes, markdown(summary)),
        args.plot: lambda path: draw_histogram(
            found.values[found.correct], found.value, 'P-SHAP of images classified correctly', Path(args.model).name,
        ).savefig(path, dpi=150),
    }
    write_files(writers, args.force)
    print(markdown(summary), notes, sep='\n\n')  # last: it fails if a pipe was closed
    return 0


def _by_class(found, names: Dict[int, str]) -> List[Dict[str, Any]]:
    """Make a row for all images and a row per class."""
    rows = []
    for label in [None, *found.labels.unique().tolist()]:
        picked = found.correct if label is None else found.correct & (found.labels == label)
        count = len(found.labels) if label is None else (found.labels == label).sum().item()
        values = found.values[picked]
        values = values[values.isfinite()]
        spread = values.std().item() / len(values) ** 0.5 if len(values) > 1 else None
        rows.append({
            'class': 'all' if label is None else names.get(label, label),
            'images': count,
            'correct': picked.sum().item(),
            'P-SHAP': f'{values.mean().item():.4f}' if len(values) else '',
            'standard error': '' if spread is None else f'{spread:.4f}',
        })
    return rows
