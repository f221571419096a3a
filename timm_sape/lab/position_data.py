"""CIFAR-10-Position, a RandAugment that keeps positions, and balanced subsets of CIFAR-10.

The first two are from Bruintjes and van Gemert, 'Learning to Adapt to Position Bias in Vision Transformer Classifiers',
Secs. 5.1, 5.2 and App. G (code at github.com/rjbruin/position-shap). In CIFAR-10-Position, half of the sixteen classes
depend on where the object is: eight of them are pairs (class, corner).

The authors' code draws the corner, and so the label, whenever an image is read, even in the test set. Here a seed fixes
both, so that two runs see the same data, and the data set can be written to files.
"""
import functools
import hashlib
import itertools
import json
import os
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from PIL import Image
from timm.data import RandAugment, rand_augment_transform
from torch.utils.data import Dataset, Subset
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.datasets.folder import is_image_file

from ..checks import is_integer
from ..loading.images import read_image

__all__ = [
    'CIFAR10Position',
    'CORNERS',
    'GEOMETRIC_OPS',
    'load_cifar10_splits',
    'position_preserving_rand_augment',
    'shrink_to_corner',
    'write_position_dataset',
    'write_subset',
]

# Sorted by name, as readers of folders number classes.
CORNERS = ('bottom-left', 'bottom-right', 'top-left', 'top-right')

# The operations of timm that move pixels.
GEOMETRIC_OPS = frozenset(
    ('Rotate', 'ShearX', 'ShearY', 'TranslateX', 'TranslateY', 'TranslateXRel', 'TranslateYRel'))

_ORDERS = tuple(itertools.permutations(range(len(CORNERS))))
# The file in a folder that we wrote which says how it was made.
_RECORDS = {'CIFAR-10-Position': 'cifar10_position.json', 'CIFAR-10 subset': 'cifar10_subset.json'}


def shrink_to_corner(image: Image.Image, corner: str) -> Image.Image:
    """Halve an image and paste it into a corner of a black frame of the original size.

    The interpolation is bilinear without antialiasing, as in the authors' code: each pixel is the mean of four. It is
    rounded to the nearest integer; the authors round down. (Pillow's `BILINEAR` uses antialiasing and blurs more.) If a
    side is odd, the last row or column is dropped.

    As a transform: `functools.partial(shrink_to_corner, corner='top-left')`.

    Args:
        image: Of mode RGB or L, at least 2 x 2 pixels.
        corner: One of `CORNERS`.

    Returns:
        An image of the same size and mode.

    Raises:
        ValueError: If the image or the corner is not valid.
    """
    if corner not in CORNERS:
        raise ValueError(f'unknown corner {corner!r}; choose from {", ".join(CORNERS)}')
    if not isinstance(image, Image.Image):
        raise ValueError(
            f'shrink_to_corner needs a PIL image, got {type(image).__name__}; use a data set without a transform')
    if image.mode not in ('RGB', 'L'):
        raise ValueError(f"shrink_to_corner needs mode RGB or L, got {image.mode}; use image.convert('RGB') first")
    width, height = image.width // 2, image.height // 2
    if min(width, height) < 1:
        raise ValueError(f'an image of {image.width} x {image.height} pixels cannot be halved; use at least 2 x 2')
    small = image.crop((0, 0, 2 * width, 2 * height)).reduce(2)
    frame = Image.new(image.mode, image.size)
    left = image.width - width if corner.endswith('right') else 0
    top = image.height - height if corner.startswith('bottom') else 0
    frame.paste(small, (left, top))
    return frame


def _corner_number(seed: int, index: int) -> int:
    """Choose the corner of image `index`. Every four consecutive images use all four corners, in a random order.

    The order comes from a hash, because random generators of libraries may change between versions.
    """
    block, place = divmod(index, len(CORNERS))
    drawn = int(hashlib.sha256(f'{seed} {block}'.encode()).hexdigest(), 16)
    return _ORDERS[drawn % len(_ORDERS)][place]


class CIFAR10Position(Dataset):
    """CIFAR-10-Position: each image at half its size in a corner. Two classes are split by corner, which makes 16.

    The corner depends only on the seed and the index. Images 4 * b to 4 * b + 3 use the four corners, so the corners
    are equally frequent: exactly (up to one image) in the whole data set; up to two images in a class whose images are
    consecutive, as in folders; and up to chance otherwise (1250 +- 27 images of a class per corner in the original
    order of CIFAR-10).

    Labels are the ten classes in order, with each of the two classes replaced by four, in the order of `CORNERS`. By
    default, 0 to 3 are 'airplane bottom-left', 'airplane bottom-right', 'airplane top-left' and 'airplane top-right', 4
    to 7 are the same for 'automobile', 8 is 'bird' and 15 is 'truck'. If the ten names are sorted, so are the 16, and a
    folder of them is read with the same labels.

    Args:
        dataset: Pairs of a PIL image and a label from 0 to 9, by index, such as torchvision's `CIFAR10`.
        position_classes: Names or labels of the two classes to split.
        seed: 0 or more.
        class_names: Names of the ten classes. Default: attribute `classes` of the data set.
        transform: Applied after the image is put into its corner. timm's `create_loader` sets it.

    Attributes:
        classes: Names of the 16 classes.
        position_labels: The eight labels that depend on the corner.

    Raises:
        ValueError: If there are not ten class names, or two position classes among them, or the seed is not valid. On
            access, if an image is not a PIL image or a label is out of range.
    """

    def __init__(
            self,
            dataset: Dataset,
            *,
            position_classes: Sequence[Union[int, str]] = (0, 1),
            seed: int = 0,
            class_names: Optional[Sequence[str]] = None,
            transform: Optional[Callable] = None,
    ) -> None:
        names = getattr(dataset, 'classes', None) if class_names is None else class_names
        if names is None:
            raise ValueError(f'{type(dataset).__name__} does not name its classes; give class_names, ten of them')
        names = list(names)
        if len(names) != 10 or len(set(names)) != 10:
            raise ValueError(
                f'CIFAR-10-Position is made from ten classes, got {len(names)}: {", ".join(map(str, names))}. '
                'Choose another source.')
        for given in position_classes:
            if given not in names and not (is_integer(given, 0) and given < 10):
                raise ValueError(f'unknown position class {given!r}; choose from {", ".join(names)}, or from 0 to 9')
        split = [names.index(given) if given in names else given for given in position_classes]
        if len(split) != 2 or split[0] == split[1]:
            raise ValueError(f'position_classes must be two different classes, got {list(position_classes)}')
        if not is_integer(seed, 0):
            raise ValueError(f'seed must be an integer of at least 0, got {seed!r}')
        self.dataset = dataset
        self.seed = seed
        self.transform = transform
        self.position_classes: Tuple[str, ...] = tuple(names[label] for label in split)
        self.classes = []
        self.position_labels: Tuple[int, ...] = ()
        self._labels = []  # per original class, the label of each corner
        for name in names:
            start = len(self.classes)
            if name in self.position_classes:
                self.classes += [f'{name} {corner}' for corner in CORNERS]
                self._labels.append(range(start, start + len(CORNERS)))
                self.position_labels += tuple(self._labels[-1])
            else:
                self.classes.append(name)
                self._labels.append((start,) * len(CORNERS))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Tuple[Union[Image.Image, torch.Tensor], int]:
        index = range(len(self))[index]  # allows negative indices, and raises IndexError
        image, label = self.dataset[index]
        if not 0 <= label < 10:
            raise ValueError(f'image {index} has label {label}, but labels of CIFAR-10 go from 0 to 9; renumber them')
        number = _corner_number(self.seed, index)
        image = shrink_to_corner(image, CORNERS[number])
        if self.transform is not None:
            image = self.transform(image)
        return image, self._labels[label][number]


def load_cifar10_splits(root: Union[str, os.PathLike]) -> Dict[str, Dataset]:
    """Open CIFAR-10, or folders of other images.

    Args:
        root: Contains `cifar-10-batches-py`, as torchvision's `CIFAR10` stores it; or `train` and at least one of
            `test`, `val`, `validation`, each with a folder per class.

    Returns:
        The data set of each split, by the name of its folder, without transforms. For torchvision's CIFAR-10, the names
        are `train` and `test`.

    Raises:
        ValueError: If the directory contains neither, or the data are damaged; on access, if an image of a folder
            cannot be read, or has more than 8 bits for each channel.
    """
    root = Path(root)
    batches = root / CIFAR10.base_folder
    if batches.is_dir():
        try:
            return {split: CIFAR10(root, train=split == 'train') for split in ('train', 'test')}
        except RuntimeError as e:  # a wrong checksum
            raise ValueError(
                f'{batches} is not complete; delete it, then fetch it with torchvision.datasets.CIFAR10({str(root)!r}, '
                'download=True)') from e
    splits = [split for split in ('train', 'test', 'val', 'validation') if (root / split).is_dir()]
    if len(splits) < 2 or splits[0] != 'train':
        raise ValueError(
            f'{root} has neither {CIFAR10.base_folder} nor train/ and test/ (or val/); name a directory that does')
    try:
        return {split: _Folders(root / split, loader=read_image, is_valid_file=_is_image) for split in splits}
    except (FileNotFoundError, ValueError) as e:  # there is no class, or a class has no images
        raise ValueError(f'{root} is not a folder of images, SPLIT/CLASS/IMAGE: {e}') from e


class _Folders(ImageFolder):
    """torchvision's data set without hidden folders, such as .ipynb_checkpoints."""

    def find_classes(self, directory: Union[str, os.PathLike]) -> Tuple[List[str], Dict[str, int]]:
        names = [name for name in super().find_classes(directory)[0] if not name.startswith('.')]
        return names, {name: index for index, name in enumerate(names)}


def _is_image(path: str) -> bool:
    return is_image_file(path) and not Path(path).name.startswith('.')


def write_position_dataset(
        splits: Mapping[str, CIFAR10Position],
        folder: Union[str, os.PathLike],
        *,
        force: bool = False,
        progress: Optional[Callable[[int, int], None]] = None,
) -> Dict[str, Dict[str, int]]:
    """Write data sets as PNG files, `<folder>/<split>/<class>/<index>.png`, which timm and torchvision can read.

    The files are written to a temporary directory beside the folder and renamed when complete, so an interrupt leaves
    the folder as it was. `cifar10_position.json` in the folder says how the data were made.

    Args:
        splits: Data sets by name, such as 'train' and 'test', without transforms.
        folder: Created if missing, with its parents.
        force: Replace a folder that this function wrote. Other folders are never replaced.
        progress: Called after each image with the number of images done, and of all images.

    Returns:
        Number of images per class, for each split.

    Raises:
        ValueError: If there is no split, a split has a transform, the splits have different settings, a split has no
            image of some class (readers of folders would number the others differently), or the folder must not be
            replaced.
    """
    first = next(iter(splits.values()), None)
    if first is None:
        raise ValueError("there is nothing to write; pass splits, such as {'train': CIFAR10Position(...)}")
    how = dict(classes=first.classes, position_classes=first.position_classes, seed=first.seed)
    for split, dataset in splits.items():
        if dataset.transform is not None:
            raise ValueError(f'{split!r} has a transform, which cannot be stored in files; create it without one')
        if dict(classes=dataset.classes, position_classes=dataset.position_classes, seed=dataset.seed) != how:
            raise ValueError(f'{split!r} has other classes or another seed than the split before it; use the same')
    return _write_folders('CIFAR-10-Position', splits, how, folder, force, progress)


def write_subset(
        splits: Mapping[str, Dataset],
        per_class: Mapping[str, int],
        folder: Union[str, os.PathLike],
        *,
        held_out: int = 0,
        force: bool = False,
        progress: Optional[Callable[[int, int], None]] = None,
) -> Dict[str, Dict[str, int]]:
    """Write the first images of each class as PNG files, in the same way as `write_position_dataset`.

    Args:
        splits: Data sets by name, from `load_cifar10_splits`.
        per_class: How many images of each class to write, for each split.
        folder: Created if missing, with its parents.
        held_out: How many images of each class to write as a further split, `held_out`: those of `train` that follow
            the first ones. To choose hyperparameters by, without a look at the test images.
        force: Replace a folder that this function wrote. Other folders are never replaced.
        progress: Called after each image with the number of images done, and of all images.

    Returns:
        Number of images per class, for each split.

    Raises:
        ValueError: If a class has too few images, a split does not exist, splits have different classes, `held_out` is
            negative or without `train`, or the folder must not be replaced.
    """
    if not is_integer(held_out, 0):
        raise ValueError(f'held_out must be 0 or more images per class, got {held_out!r}')
    if held_out and 'train' not in per_class:
        raise ValueError("held_out images follow the first ones of 'train'; per_class must say how many those are")
    subsets, classes = {}, None
    for split, count in per_class.items():
        if split not in splits:
            raise ValueError(f'there is no split {split!r}; choose from {", ".join(splits)}')
        if not is_integer(count, 1):
            raise ValueError(f'the number of images per class must be 1 or more, got {count!r} for {split!r}')
        dataset = splits[split]
        classes = dataset.classes if classes is None else classes
        if dataset.classes != classes:
            raise ValueError(f'{split!r} has other classes than the split before it')
        kept = {label: [] for label in range(len(classes))}
        for index, label in enumerate(dataset.targets):
            kept[label].append(index)
        parts = {split: slice(0, count)}
        if held_out and split == 'train':
            parts['held_out'] = slice(count, count + held_out)
        least = min(kept, key=lambda label: len(kept[label]))
        asked = max(part.stop for part in parts.values())
        if len(kept[least]) < asked:
            raise ValueError(
                f'{split!r} has {len(kept[least])} images of {classes[least]!r}, and {asked} were asked for')
        for name, part in parts.items():
            subsets[name] = Subset(dataset, sorted(index for indices in kept.values() for index in indices[part]))
    how = dict(classes=classes, per_class={**per_class, **({'held_out': held_out} if held_out else {})})
    return _write_folders('CIFAR-10 subset', subsets, how, folder, force, progress)


def _write_folders(
        what: str,
        splits: Mapping[str, Dataset],
        how: Dict,
        folder: Union[str, os.PathLike],
        force: bool,
        progress: Optional[Callable[[int, int], None]],
) -> Dict[str, Dict[str, int]]:
    folder = Path(folder).resolve()  # a link itself is not replaced
    _check_replaceable(what, folder, force)
    counts, classes = {}, how['classes']
    done, total = 0, sum(map(len, splits.values()))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='.timm-sape-', dir=folder.parent) as staging:
        new, old = Path(staging, 'new'), Path(staging, 'old')
        for split, dataset in splits.items():
            for name in classes:
                (new / split / name).mkdir(parents=True)
            count = Counter()
            for index in range(len(dataset)):
                image, label = dataset[index]
                image.save(new / split / classes[label] / f'{index:05}.png')
                count[label] += 1
                done += 1
                if progress is not None:
                    progress(done, total)
            counts[split] = {name: count[label] for label, name in enumerate(classes)}
            missing = [name for name, images in counts[split].items() if not images]
            if missing:
                raise ValueError(
                    f'{split!r} has no image of {missing[0]!r}, so that readers of folders would number its classes '
                    'differently; give a source with more images, or another seed')
        (new / _RECORDS[what]).write_text(json.dumps({**how, 'splits': list(splits)}, indent=1) + '\n')
        _check_replaceable(what, folder, force)  # again, because it may have been filled in the meantime
        try:
            if folder.exists():
                os.replace(folder, old)
            os.replace(new, folder)
        except BaseException:  # including an interrupt
            if old.exists() and not folder.exists():
                os.replace(old, folder)
            raise
    return counts


def _check_replaceable(what: str, folder: Path, force: bool) -> None:
    """Raise ValueError unless the folder is empty, or contains only what we wrote."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f'nothing written: {folder} is a file; name a directory')
    names, record = set(os.listdir(folder)), _RECORDS[what]
    if not names:
        return
    if record not in names:
        raise ValueError(f'nothing written: {folder} is not empty and is not a {what}; name another directory')
    if not force:
        raise ValueError(f'nothing written: {folder} exists; --force (force=True) replaces it')
    try:
        written = json.loads((folder / record).read_text())
        ours = {record, *(f'{split}/{name}' for split in written['splits'] for name in written['classes'])}
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f'nothing written: {folder / record} cannot be read; remove {folder} yourself') from e
    for path in sorted(path.relative_to(folder) for path in folder.rglob('*') if not path.is_dir()):
        is_image = str(path.parent) in ours and re.fullmatch(r'\d{5,}\.png', path.name)
        if not is_image and str(path) not in ours:
            raise ValueError(f'nothing written: {folder} would be replaced as a whole; move {path} out of it first')


def _one_bit_at_least(level_fn: Callable, level: float, hparams: Dict) -> Tuple[int]:
    return max(1, level_fn(level, hparams)[0]),


def position_preserving_rand_augment(config_str: str = 'rand-m9-mstd0.5-inc1') -> RandAugment:
    """Create timm's RandAugment without the operations that move pixels, `GEOMETRIC_OPS`.

    Everything else is as in timm: the number of operations per image, their magnitude and probability, and the ratios
    of their weights. The default has the operations that the authors use: AutoContrast, Equalize, Invert,
    PosterizeIncreasing, SolarizeIncreasing, SolarizeAdd, ColorIncreasing, ContrastIncreasing, BrightnessIncreasing and
    SharpnessIncreasing. There is one difference: timm may posterize to 0 bits, which gives a black image, and an error
    in Pillow 13. Here at least one bit is kept.

    Use this in your own training scripts. `--aa` of train.py takes only a string, and among the sets of timm only `3a`
    moves nothing: `rand-m9-mstd0.5-inc1-t3a` has SolarizeIncreasing, Desaturate and GaussianBlur, and the policy `3a`
    of AutoAugment has Solarize, Desaturate and GaussianBlurRand. With both, `--color-jitter` of train.py stays active.
    The default set, `tweights`, `t3aw`, AugMix and the other policies of AutoAugment rotate and shear, and so does any
    name that timm does not know, because timm silently uses the default set. The other transforms of train.py move
    pixels, too; turn them off with `--scale 1 1 --ratio 1 1 --hflip 0 --crop-pct 1`.

    Args:
        config_str: As for timm's `rand_augment_transform`.

    Returns:
        A transform of PIL images. It draws from `numpy.random` and `random`, as timm's does.

    Raises:
        ValueError: If timm cannot read the string.
    """
    try:
        augment = rand_augment_transform(config_str)
    except (AssertionError, ValueError) as e:
        raise ValueError(
            f"{config_str!r} is not a RandAugment of timm ({e}); write it like 'rand-m9-mstd0.5-inc1'") from e
    kept = [i for i, op in enumerate(augment.ops) if op.name not in GEOMETRIC_OPS]
    for op in augment.ops:
        if op.name.startswith('Posterize'):
            op.level_fn = functools.partial(_one_bit_at_least, op.level_fn)
    weights = augment.choice_weights
    if weights is not None:
        weights = weights[kept] / weights[kept].sum()
    return RandAugment([augment.ops[i] for i in kept], augment.num_layers, weights)
