"""`timm-sape data`: make data sets from others."""
import argparse
from pathlib import Path

from .common import CommandError, add_command, refuse_options
from .files import interruptible

__all__ = ['add']


def add(commands) -> None:
    parser = add_command(
        commands, 'data', interruptible(_data),
        summary='Write folders of images: CIFAR-10-Position, which has a known position bias, or a balanced subset of '
                'CIFAR-10.',
        examples="""\
examples:
  timm-sape data cifar10-position --source ROOT --output DIR
  timm-sape data cifar10-position --source ROOT --output DIR --position-classes cat dog --seed 1
  timm-sape data cifar10-subset --source ROOT --output DIR --per-class 1000 400
  python train.py --device-modules timm_sape --model vit_small_ape --data-dir DIR --val-split test --num-classes 16 \\
      --img-size 32 --model-kwargs img_size=32 patch_size=4 \\
      --crop-pct 1 --scale 1 1 --ratio 1 1 --hflip 0 --aa rand-m9-mstd0.5-inc1-t3a

ROOT contains cifar-10-batches-py, or train/ and test/ (or val/) with a folder for each of ten classes.
cifar10-position: each image is halved and put into a corner of a black frame; two classes are split into four each, by
corner. The options in the last line of that command turn off augmentation that moves pixels.
cifar10-subset: the first images of each class; with --held-out, the training images that follow them, too.""",
    )
    parser.add_argument('what', choices=('cifar10-position', 'cifar10-subset'), help='the data set')
    parser.add_argument('--source', type=Path, metavar='ROOT', required=True, help='CIFAR-10, or other images')
    parser.add_argument('--output', type=Path, metavar='DIR', required=True, help='where to write it; may be new')
    parser.add_argument(
        '--position-classes', nargs=2, metavar='CLASS',
        help='cifar10-position: classes to split by corner (default: the first two)')
    parser.add_argument('--seed', type=int, help='cifar10-position: seed for the corners (default: 0)')
    parser.add_argument(
        '--per-class', nargs=2, type=int, metavar=('TRAIN', 'TEST'), help='cifar10-subset: images of each class')
    parser.add_argument(
        '--held-out', type=int, metavar='N',
        help='cifar10-subset: also write the next N training images of each class as held_out, to choose options by')
    parser.add_argument('--force', action='store_true', help='replace what this command wrote there earlier')


def _data(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from ..lab.position_data import CIFAR10Position, load_cifar10_splits, write_position_dataset, write_subset

    subset = args.what == 'cifar10-subset'
    others = ('position_classes', 'seed') if subset else ('per_class', 'held_out')
    refuse_options(args, others, f'not for {args.what}')
    if subset and args.per_class is None:
        raise CommandError('cifar10-subset needs --per-class TRAIN TEST, such as 1000 400')
    try:
        splits = load_cifar10_splits(args.source)
        if subset:
            if len(splits) > 2:
                raise ValueError(
                    f'{args.source} has {", ".join(splits)}. --per-class is for train and one other: move the rest '
                    'elsewhere.')
            per_class = dict(zip(splits, args.per_class))
        else:
            given = args.position_classes or ('0', '1')
            splits = {
                split: CIFAR10Position(
                    dataset,
                    position_classes=[
                        int(name) if name.isdecimal() and name not in dataset.classes else name for name in given],
                    seed=args.seed or 0,
                )
                for split, dataset in splits.items()}
        with tqdm(desc='images', unit='image', delay=2) as bar:
            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            options = dict(force=args.force, progress=progress)
            if subset:
                counts = write_subset(splits, per_class, args.output, held_out=args.held_out or 0, **options)
            else:
                counts = write_position_dataset(splits, args.output, **options)
    except ValueError as e:
        raise CommandError(str(e)) from e
    except OSError as e:
        raise CommandError(f'cannot write {args.output} from {args.source}: {e}') from e
    for split, images in counts.items():
        print(f'{args.output / split}: {sum(images.values())} images, {len(images)} classes')
    return 0
