"""`timm-sape map`: draw what position does between the patches of an image."""
import argparse
import math
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from .common import CommandError, add_command, refuse_options
from .data_options import (
    MODELS_HELP,
    add_image_options,
    add_pos_enc_option,
    chosen_encoding,
    image_size,
    named,
    readable,
    seen,
    warn_untrained,
)
from .files import FIGURES, check_outputs, interruptible, table_writer, write_files

__all__ = ['add']

WHAT = {
    'bias': 'what position adds to the logits',
    'attention': 'attention',
    'similarity': 'cosine of position vectors',
    'distance': 'mean attention distance, patches',
}


def add(commands) -> None:
    parser = add_command(
        commands, 'map', interruptible(_map),
        summary='Draw what position does between the patches of an image, as in Figure 4 of the SaPE2 paper.',
        examples="""\
examples:
  timm-sape map output/exp/model_best.pth.tar --image horse.png --output horse.png
  timm-sape map hf-hub:USER/MODEL --image cat.jpg --patches 3,2 7,7 --layers 0 5 -1 --output cat.svg
  timm-sape map local-dir:FOLDER --image cat.jpg --heads all --output heads.pdf --numbers heads.csv
  timm-sape map vit_small_patch16_224 --image cat.jpg --what similarity --output ape.png
  timm-sape map MODEL --image cat.jpg --what distance --output distance.png
  timm-sape map --gallery gallery.png

--what bias: what position adds to the logits of attention; for rotations, scale * (Rq.Rk - q.k). attention: the
probabilities. similarity: cosines of the vectors that are added to the tokens. distance: how far each head looks, for
all layers. A small map shows one row of the matrix: from one patch to all others. --gallery draws every encoding,
also those of --import, in an untrained model of its own; it takes no other options but --force.""",
    )
    parser.add_argument('model', nargs='?', metavar='MODEL', help=MODELS_HELP)
    add_pos_enc_option(parser)
    add_image_options(parser, required=False)
    parser.add_argument('--output', type=Path, metavar='FILE', help='the picture: .png, .svg or .pdf')
    parser.add_argument('--gallery', type=Path, metavar='FILE', help='draw all encodings in one picture instead')
    parser.add_argument('--what', choices=WHAT, help='(default: bias)')
    parser.add_argument(
        '--patches', nargs='+', type=_patch, metavar='X,Y', help='patches to draw a small map for (default: two)')
    parser.add_argument(
        '--layers', nargs='+', type=int, metavar='N',
        help='from 0; -1 is the last (default: -1, or -2 for bias and attention if the class is read from the class '
             'token: then attention between patches in the last layer has no effect on the class)')
    parser.add_argument('--heads', choices=('mean', 'all'), help='(default: mean)')
    parser.add_argument(
        '--cmap', metavar='NAME',
        help='colours by a name that matplotlib knows (default: white to green, or blue to red around 0)')
    parser.add_argument('--numbers', type=Path, metavar='FILE', help='write the numbers: .csv or .json')
    parser.add_argument('--force', action='store_true', help='overwrite existing files')


def _patch(text: str) -> Tuple[int, int]:
    parts = text.split(',')
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f'{text!r} is no patch; write X,Y in patches from the top left, e.g. 3,2')
    return int(parts[0]), int(parts[1])


def _map(args: argparse.Namespace) -> int:
    needed = {'MODEL': args.model, '--image': args.image, '--output': args.output}
    missing = [name for name, value in needed.items() if value is None]
    if args.gallery is not None:
        if args.model is not None:
            raise CommandError('--gallery draws models of its own; leave MODEL out')
        refuse_options(
            args, ('pos_enc', 'image', 'img_size', 'output', 'what', 'patches', 'layers', 'heads', 'cmap', 'numbers'),
            'not for --gallery, which draws models of its own')
        return _gallery(args.gallery, args.force)
    if missing:
        raise CommandError(f'give {", ".join(missing)}; or --gallery FILE for a picture of all encodings')
    with readable():  # a name may be too long
        check_outputs([args.output], args.force, FIGURES)
        check_outputs([args.numbers], args.force, ('.csv', '.json'))
    size = image_size(args)
    if args.what == 'distance':
        refuse_options(
            args, ('layers', 'heads', 'patches', 'cmap'),
            'not for --what distance, which shows all heads of all layers')
    if args.what == 'similarity':
        refuse_options(args, ['heads'], 'not for --what similarity, of vectors that no head divides')
    args.what, args.heads = args.what or 'bias', args.heads or 'mean'

    import torch
    from timm.data import resolve_model_data_config

    from ..analysis import attention_distance, position_maps
    from ..analysis.figures import displayed, draw_attention_distance, draw_maps
    from ..analysis.maps import layers_that_matter
    from ..lab.machine import about
    from ..loading import ImageFile, load_model, patch_ratio, preprocessing

    with readable():
        torch.manual_seed(0)  # for random weights
        model = load_model(args.model, size, **chosen_encoding(args.pos_enc))
        warn_untrained([args.model])
        image, _ = ImageFile(args.image, preprocessing(model, size, crop_mode='squash'))[0]
        config = resolve_model_data_config(model)
        last = -1 if args.what == 'similarity' else len(layers_that_matter(model)) - 1  # -1 for none
        layers = None if args.what == 'distance' else args.layers or [last]
        _check_memory(model, image, layers, args)
        maps = position_maps(model, image[None], layers)

    notes = f'{named(args)}, {seen(args.image, size)}, {WHAT[args.what]}; {about(torch.device("cpu"))}'
    if args.what == 'distance':
        distances = [_without_nan(attention_distance(layer.attention, maps.grid), args.model) for layer in maps.layers]
        rows = [
            {'layer': layer.index, 'head': head, 'distance': distance}
            for layer, found in zip(maps.layers, distances) for head, distance in enumerate(found.tolist())]
        figure = draw_attention_distance(distances, [layer.index for layer in maps.layers])
    else:
        height, width = maps.grid.size
        patch_height, patch_width = patch_ratio(model)
        patches = args.patches or _default_patches(height, width)
        for x, y in patches:
            if x >= width or y >= height:
                raise CommandError(f'there is no patch {x},{y}: x goes from 0 to {width - 1}, y from 0 to {height - 1}')
        titles, matrices = _chosen(args, maps, model)
        rows = _numbers(titles, matrices, width) if args.numbers is not None else []
        with readable():
            figure = draw_maps(
                displayed(image, config['mean'], config['std']), titles, matrices, maps.grid.size, patches,
                WHAT[args.what], args.cmap, patch_height / patch_width)
    writers = {args.output: lambda path: figure.savefig(path, dpi=150)}
    if args.numbers is not None:
        writers[args.numbers] = table_writer(rows, notes, '')
    write_files(writers, args.force)
    print(*writers, sep='\n')
    return 0


def _gallery(path: Path, force: bool) -> int:
    with readable():
        check_outputs([path], force, FIGURES)

    from ..analysis.gallery import draw_gallery, gallery_panels

    figure = draw_gallery(gallery_panels())
    write_files({path: lambda path: figure.savefig(path, dpi=100)}, force)
    print(path)
    return 0


def _default_patches(height: int, width: int) -> List[Tuple[int, int]]:
    """The middle, where the subject often is, and the corner, where it is not. They may be the same."""
    return list(dict.fromkeys([(width // 2, height // 2), (0, 0)]))


def _check_memory(model, image, layers: Optional[List[int]], args: argparse.Namespace) -> None:
    """Refuse maps that do not fit into memory.

    Raises:
        CommandError: If they would not.
    """
    from ..lab.machine import memory_size
    from ..loading import patch_ratio

    blocks, memory = getattr(model, 'blocks', None), memory_size()
    if memory is None or not blocks or not hasattr(blocks[0], 'attn'):
        return  # position_maps says which models it takes
    patches = math.prod(size // patch for size, patch in zip(image.shape[1:], patch_ratio(model)))
    heads = getattr(blocks[0].attn, 'num_heads', 1)
    num_layers = len(blocks) if layers is None else len(layers)
    # As measured: each layer keeps three float32 tensors [h, N, N], four more come and go; a number takes 300 bytes.
    need = 4 * heads * patches ** 2 * (3 * num_layers + 4)
    if args.numbers is not None and layers is not None:
        need += 300 * patches ** 2 * num_layers * (heads if args.heads == 'all' else 1)
    if need > memory:
        raise CommandError(
            f'maps of {num_layers} x {heads} heads between {patches:,} patches take {need / 1e9:,.1f} GB, and this '
            f'machine has {memory / 1e9:,.1f} GB; give a smaller --img-size or fewer --layers')


def _without_nan(numbers, model: str):
    """The same numbers, which may be infinite, as some encodings mask, but not NaN.

    Raises:
        CommandError: If one is.
    """
    if numbers.isnan().any():
        raise CommandError(f'{model} computes NaN; has its training diverged, or is its file damaged?')
    return numbers


def _acts_on_logits(model) -> bool:
    """Whether the model has an encoding that acts on the logits of attention. Before training it may change nothing."""
    from ..host import PosEncModel

    encodings = model.position_encodings().values() if isinstance(model, PosEncModel) else ()
    return any(place.startswith(('q and k', 'logits')) for encoding in encodings for place in encoding.acts_on())


def _chosen(args: argparse.Namespace, maps, model) -> Tuple[List[str], List]:
    """Titles, and matrices between patches, `[H*W, H*W]`."""
    from ..analysis import similarity

    titles, matrices = [], []
    if args.what == 'similarity':
        vectors = {'position vectors': maps.vectors, **{
            f'position vectors, layer {layer.index}': layer.vectors for layer in maps.layers}}
        for title, found in vectors.items():
            if found is not None:
                titles.append(title)
                matrices.append(similarity(_without_nan(found if found.ndim == 2 else found[0], args.model)))
        if not titles:
            raise CommandError(
                f'no encoding of {args.model} adds vectors to its tokens; try --what attention')
        return titles, matrices
    empty = []
    for layer in maps.layers:
        found = maps.between_patches(layer.position if args.what == 'bias' else layer.attention)[0]  # [h, H*W, H*W]
        _without_nan(found, args.model)
        if args.what == 'bias' and not found.any():
            empty.append(layer)
            continue
        if args.heads == 'mean':
            titles.append(f'layer {layer.index}, mean of {len(found)} heads')
            # over the heads that see the patch: some encodings mask patches by -inf
            matrices.append(found.masked_fill(found.isinf(), math.nan).nanmean(0))
        else:
            titles += [f'layer {layer.index}, head {head}' for head in range(len(found))]
            matrices += found.unbind(0)
    if empty:
        where = f'the logits of layer {", ".join(str(layer.index) for layer in empty)} of {args.model}'
        adds = maps.vectors is not None or any(layer.vectors is not None for layer in empty)
        if titles:
            print(f'timm-sape: position adds nothing to {where}; left out', file=sys.stderr)
        elif adds and not _acts_on_logits(model):
            raise CommandError(
                f'an encoding adds vectors to the tokens, and none acts on {where}: use --what similarity')
        else:
            raise CommandError(
                f'position adds nothing to {where}: no encoding acts there, or it starts at zero and has not been '
                'trained. If the class token is pooled, some encodings learn no bias and no gate in the last layer: '
                'try --layers -2, or --what attention')
    return titles, matrices


def _numbers(titles: List[str], matrices: List, width: int) -> List[Dict[str, Any]]:
    return [
        {
            'map': title, 'from_x': i % width, 'from_y': i // width, 'to_x': j % width, 'to_y': j // width,
            'value': value if math.isfinite(value) else None,
        }
        for title, matrix in zip(titles, matrices)
        for i, row in enumerate(matrix.tolist()) for j, value in enumerate(row)]
