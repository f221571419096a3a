"""Options of subcommands that run models on images."""
import argparse
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Sequence, Tuple

from .common import CommandError, where_raised

__all__ = [
    'MODELS_HELP',
    'add_data_options',
    'add_image_options',
    'add_pos_enc_option',
    'add_rules_option',
    'check_device',
    'check_images_fit',
    'chosen_encoding',
    'image_size',
    'loading',
    'measured_on',
    'named',
    'readable',
    'seed',
    'seen',
    'size',
    'warn_untrained',
]

MODELS_HELP = (
    'a name that timm knows, hf-hub:USER/REPOSITORY, local-dir:FOLDER or the folder, a checkpoint of train.py, '
    'NAME@FILE with weights, or NAME@random; averaged weights of a file (--model-ema) are preferred')


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the images, and for running models on them; named as in timm's validate.py."""
    parser.add_argument(
        '--data-dir', required=True, metavar='DIR',
        help='folder with a sub-folder of images per class, or with such a folder per split; or the root of --dataset')
    parser.add_argument('--dataset', default='', metavar='NAME', help='e.g. torch/cifar10 (default: a folder)')
    parser.add_argument(
        '--split', default='', metavar='NAME',
        help="which part of the data, by train.py's names (default: validation, or else test)")
    parser.add_argument(
        '--class-map', default='', metavar='FILE',
        help='numbers the classes, as for train.py (default: the one that a checkpoint was trained with, or none)')
    parser.add_argument('--num-images', type=int, metavar='N', help='use N images, drawn at random (default: all)')
    parser.add_argument(
        '--seed', type=seed, default=0, help='of the random draw, and of random weights (default: %(default)s)')
    parser.add_argument('--batch-size', type=int, default=64, metavar='N', help='(default: %(default)s)')
    parser.add_argument(
        '--workers', type=int, default=min(4, os.cpu_count() or 1), metavar='N',
        help='processes that load images (default: %(default)s)')
    parser.add_argument('--device', default='cpu', help='cpu, cuda, ... (default: %(default)s)')
    parser.add_argument('--amp', action='store_true', help='bfloat16 autocast')


def add_rules_option(parser: argparse.ArgumentParser) -> None:
    """Add the option to try only some of the rules for other sizes."""
    parser.add_argument(
        '--rules', nargs='+', metavar='RULE',
        help='only these: extrapolate, rescale, ntk, yarn, slopes, own (where there is no choice), each also with '
             '+log; with several encodings, alibi2d=rescale,rope2d=ntk (default: all)')


def seed(text: str) -> int:
    """A seed that torch accepts.

    Raises:
        argparse.ArgumentTypeError: If it is not one.
    """
    if not text.isdecimal() or int(text) >= 2 ** 63:
        raise argparse.ArgumentTypeError(f'{text!r} is not a seed; write an integer from 0 to {2 ** 63 - 1}')
    return int(text)


def size(text: str) -> Tuple[int, int]:
    """Height and width of an argument such as 224 or 224x448.

    Raises:
        argparse.ArgumentTypeError: If it is no size.
    """
    sides = _sides(text)
    return sides[0], sides[-1]


def _sides(text: str) -> Tuple[int, ...]:
    """One or two numbers of an argument such as 224 or 224x448.

    Raises:
        argparse.ArgumentTypeError: If it is no size.
    """
    sides = text.lower().split('x')
    if not all(side.isdecimal() and int(side) > 0 for side in sides) or len(sides) > 2:
        raise argparse.ArgumentTypeError(f'{text!r} is not a size; write e.g. 224, or 224x448 for height x width')
    return tuple(map(int, sides))


def add_image_options(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add the options of subcommands that look at one image."""
    parser.add_argument(
        '--image', required=required, metavar='FILE',
        help="squashed to the model's image size, without the border that its crop_pct hides")
    parser.add_argument(
        '--img-size', nargs='+', type=_sides, metavar='SIZE',
        help="pixels, 224, or height and width, 224x448 or 224 448 (default: the model's)")


def add_pos_enc_option(parser: argparse.ArgumentParser) -> None:
    """Add the option to choose the encoding of an untrained model."""
    parser.add_argument(
        '--pos-enc', metavar='NAME',
        help='encoding of MODEL, which must be one of ours, e.g. test_vit_pos_enc@random; also one from --import')


def chosen_encoding(pos_enc: Optional[str]) -> Dict[str, str]:
    """A value of `--pos-enc` as an argument of `load_model`; none if it was not given."""
    return {} if pos_enc is None else {'pos_enc': pos_enc}


def named(args: argparse.Namespace) -> str:
    """The model, with the encoding that `--pos-enc` has chosen for it."""
    return args.model if args.pos_enc is None else f'{args.model} with {args.pos_enc}'


def image_size(args: argparse.Namespace) -> Optional[Sequence[int]]:
    """Height and width from `--img-size`, None without it.

    Raises:
        CommandError: If there are more than two numbers, or such an image is too large for this machine.
    """
    if args.img_size is None:
        return None
    sides = [side for sides in args.img_size for side in sides]
    if len(sides) > 2:
        raise CommandError('--img-size takes one number, or height and width')
    _check_image('--img-size', (sides[0], sides[-1]))
    return sides[0], sides[-1]


def seen(image: str, size: Optional[Sequence[int]]) -> str:
    """An image and the size from `--img-size`, for notes."""
    return image if size is None else f'{image} at {size[0]}x{size[1]}'


def check_images_fit(sizes: Sequence[Tuple[int, int]], options: Dict[str, Any]) -> None:
    """Check that images of each size fit into memory, as many as are loaded at a time.

    Args:
        sizes: (height, width) from `--sizes`.
        options: As `loading` returns them.

    Raises:
        CommandError: If they do not.
    """
    most = options['batch_size'] * (1 + 2 * options['workers'])  # each process loads two batches ahead
    number = min(most, len(options['data']), options['num_images'] or most)
    for height, width in sizes:
        image, memory = _check_image('--sizes', (height, width))
        if memory is not None and number * image > memory:
            raise CommandError(
                f'--sizes: {number} images of {height} x {width} pixels, which are loaded at a time, take '
                f'{number * image / 1e9:,.1f} GB, and this machine has {memory / 1e9:,.1f} GB; give a smaller '
                '--batch-size or fewer --workers')


def _check_image(option: str, size: Tuple[int, int]) -> Tuple[int, Optional[int]]:
    """The bytes that an image takes, and those of this machine.

    Raises:
        CommandError: If it is too large for this machine.
    """
    from ..lab.machine import memory_size

    height, width = size
    image, memory = 12 * height * width, memory_size()
    if memory is not None and 16 * image > memory:
        raise CommandError(
            f'{option}: an image of {height} x {width} pixels takes {image / 1e9:,.1f} GB, a model many times that, '
            f'and this machine has {memory / 1e9:,.1f} GB; give a smaller size')
    return image, memory


def check_device(device: str) -> None:
    """
    Raises:
        CommandError: If no model can run on the device.
    """
    import torch

    try:
        torch.zeros(1, device=device).item()  # 'meta' holds no numbers
    except (AssertionError, RuntimeError) as e:
        raise CommandError(f'--device {device}: {_one_line(e)}; name a device that can run models') from e


def loading(args: argparse.Namespace) -> Dict[str, Any]:
    """The data options as arguments of functions of `lab`, with the data set opened.

    Raises:
        CommandError: If a value is out of range, or no model can run on the device.
        ValueError: If there are no such data.
    """
    import torch

    from ..loading import open_dataset

    for name, least in (('num_images', 1), ('batch_size', 1), ('workers', 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise CommandError(f'--{name.replace("_", "-")} must be at least {least}, got {value}')
    check_device(args.device)
    torch.manual_seed(args.seed)  # for random weights
    return {
        'data': open_dataset(args.data_dir, args.dataset, args.split, class_map=args.class_map),
        **{name: getattr(args, name) for name in ('batch_size', 'num_images', 'workers', 'seed', 'device', 'amp')},
    }


def measured_on(args: argparse.Namespace, data, num_images: int) -> str:
    """What was measured, and where, in one line: the number of images, and the data set that `loading` has opened."""
    import torch

    from ..lab.machine import about

    if args.dataset:
        where = f'{args.dataset} {args.data_dir} {args.split or "validation"}'
    else:
        where = data.reader.root if hasattr(data, 'reader') else args.data_dir  # the folder of a split, or one image
    if args.num_images is not None and args.num_images < len(data):
        where += f', drawn with seed {args.seed}'
    if args.class_map:
        where += f', class map {args.class_map}'
    return (
        f'{num_images} images of {where}, batch {args.batch_size}, {"bfloat16 autocast" if args.amp else "float32"}; '
        f'{about(torch.device(args.device))}')


def warn_untrained(models: Sequence[str]) -> None:
    """Say on stderr which names have no pretrained weights. timm builds such models without a word."""
    import timm
    from timm.models import is_model_pretrained

    for model in models:
        if '@' in model or Path(model).is_file():  # NAME@FILE, NAME@random, or a checkpoint
            continue
        if timm.is_model(model.split('.')[0]) and not is_model_pretrained(model):
            print(
                f'timm-sape: {model} has no pretrained weights and runs with random ones; ignore its accuracy',
                file=sys.stderr)


@contextmanager
def readable() -> Iterator[None]:
    """Turn errors about models and data, and lack of memory, into one line for the user."""
    from PIL import Image

    try:
        yield
    except (ValueError, OSError) as e:
        raise CommandError(_in_own_encoding(e) + _one_line(e)) from e
    except Image.DecompressionBombError as e:
        raise CommandError(f'{_one_line(e)}; give a smaller size, or leave the image out') from e
    except (MemoryError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and "can't allocate memory" not in str(e):  # as torch says it on a CPU
            raise
        raise CommandError('there is not enough memory; give a smaller size, or fewer images at a time') from e


def _in_own_encoding(e: Exception) -> str:
    """Where an encoding of the user's own raised an error, and which; empty if it was none of them."""
    from ..encodings import get_encoding, list_encodings

    modules = {cls.__module__ for cls in map(get_encoding, list_encodings())}
    files = {getattr(sys.modules.get(name), '__file__', None) for name in modules if not name.startswith('timm_sape.')}
    where = where_raised(e, files.__contains__)
    return where and f'{where}{type(e).__name__}: '


def _one_line(e: Exception) -> str:
    text = str(e).strip()
    if 'Original Traceback' in text:  # from a process that loads images; the last line is the message
        text = text.splitlines()[-1]
    return ' '.join(text.split())
