"""Options of subcommands that run models on a data set."""
import argparse
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Sequence

from .common import CommandError

__all__ = [
    'MODELS_HELP',
    'add_data_options',
    'add_image_options',
    'image_size',
    'loading',
    'measured_on',
    'readable',
    'warn_untrained',
]

MODELS_HELP = (
    'a name that timm knows, hf-hub:USER/REPOSITORY, local-dir:FOLDER or the folder, a checkpoint of train.py, or '
    'NAME@FILE with weights')


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which images, and how models run on them; named as in timm's validate.py."""
    parser.add_argument(
        '--data-dir', required=True, metavar='DIR',
        help='folder with one sub-folder of images per class, or such folders for each split; or the root of --dataset')
    parser.add_argument('--dataset', default='', metavar='NAME', help='e.g. torch/cifar10 (default: a folder)')
    parser.add_argument(
        '--split', default='', metavar='NAME', help='which part of the data (default: val, validation or test)')
    parser.add_argument('--num-images', type=int, metavar='N', help='draw so many images (default: all)')
    parser.add_argument('--seed', type=int, default=0, help='of the draw (default: %(default)s)')
    parser.add_argument('--batch-size', type=int, default=64, metavar='N', help='(default: %(default)s)')
    parser.add_argument(
        '--workers', type=int, default=min(4, os.cpu_count() or 1), metavar='N',
        help='processes that load images (default: %(default)s)')
    parser.add_argument('--device', default='cpu', help='cpu, cuda, ... (default: %(default)s)')
    parser.add_argument('--amp', action='store_true', help='bfloat16 autocast')


def add_image_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of subcommands that look at one image."""
    parser.add_argument('--image', required=True, metavar='FILE', help='squashed to the size of the model')
    parser.add_argument(
        '--img-size', nargs='+', type=int, metavar='N', help="pixels, or height and width (default: the model's)")


def image_size(args: argparse.Namespace) -> Optional[Sequence[int]]:
    """Height and width as `--img-size` says, None if it says nothing.

    Raises:
        CommandError: If it says more than two numbers.
    """
    if args.img_size is not None and len(args.img_size) > 2:
        raise CommandError('--img-size takes one number, or height and width')
    return args.img_size and (args.img_size * 2)[:2]


def loading(args: argparse.Namespace) -> Dict[str, Any]:
    """What the data options say, as arguments of `sweep` and `compare`; the data set is opened.

    Raises:
        CommandError: If a value is out of its range, or there is no such device.
        ValueError: If there are no such data.
    """
    import torch

    from ..analysis.inputs import open_dataset

    for name, least in (('num_images', 1), ('batch_size', 1), ('workers', 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise CommandError(f'--{name.replace("_", "-")} must be at least {least}, got {value}')
    try:
        torch.empty(1, device=args.device)
    except (AssertionError, RuntimeError) as e:
        raise CommandError(f'--device {args.device}: {_one_line(e)}') from e
    torch.manual_seed(args.seed)  # of models without pretrained weights
    return {
        'data': open_dataset(args.data_dir, args.dataset, args.split),
        **{name: getattr(args, name) for name in ('batch_size', 'num_images', 'workers', 'seed', 'device', 'amp')},
    }


def measured_on(args: argparse.Namespace, num_images: int) -> str:
    """What was measured where, in one line."""
    import torch

    from ..lab.machine import about

    data = ' '.join(filter(None, [args.dataset, args.data_dir, args.split]))
    return (
        f'{num_images} images of {data}, batch {args.batch_size}, {"bfloat16 autocast" if args.amp else "float32"}; '
        f'{about(torch.device(args.device))}')


def warn_untrained(models: Sequence[str]) -> None:
    """Say on stderr which names have no pretrained weights behind them, as timm makes such models without a word."""
    import timm
    from timm.models import is_model_pretrained

    for model in models:
        if timm.is_model(model.split('.')[0]) and not is_model_pretrained(model) and not Path(model).exists():
            print(
                f'timm-sape: {model} has no pretrained weights: its speed means something, its accuracy does not',
                file=sys.stderr)


@contextmanager
def readable() -> Iterator[None]:
    """Show what is wrong with models and data in one line."""
    try:
        yield
    except (ValueError, OSError) as e:
        raise CommandError(_one_line(e)) from e


def _one_line(e: Exception) -> str:
    text = str(e).strip()
    if 'Original Traceback' in text:  # a process that loads images sends its traceback, which ends with the message
        text = text.splitlines()[-1]
    return ' '.join(text.split())
