"""Images and data sets, with labels as timm's train.py numbers them."""
import os
import warnings
from pathlib import Path
from typing import BinaryIO, Dict, Iterable, List, Mapping, Optional, Tuple, Union

import torch
from PIL import Image
from timm.data import ImageDataset, create_dataset
from timm.data.dataset_factory import _EVAL_SYNONYM, _TORCH_BASIC_DS, _TRAIN_SYNONYM, _search_split
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.readers.class_map import load_class_map
from timm.data.readers.img_extensions import get_img_extensions
from timm.data.readers.reader_image_folder import find_images_and_targets
from timm.utils.misc import natural_key
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from torchvision.datasets import DatasetFolder

from ..hub.errors import described

__all__ = [
    'ImageFile',
    'ImageFolder',
    'in_order',
    'is_torchvision',
    'load_images',
    'open_dataset',
    'read_class_map',
    'read_image',
    'reads_folders',
    'split_folder',
]

READERS = 'torch', 'hfds', 'hfids', 'tfds', 'wds'  # what the names of data sets begin with in timm
OTHER_KINDS = (  # that timm does not look for, unless told to
    '.avif', '.bmp', '.gif', '.heic', '.heif', '.jfif', '.jp2', '.jpe', '.ppm', '.tga', '.tif', '.tiff', '.webp')
WHAT_IS_DATA = 'Give an image, a folder of images, one with CLASS/IMAGE or val/CLASS/IMAGE, or the root of a `dataset`.'


class ImageFile(Dataset):
    """A data set of one image, without a label (-1).

    Like timm, it does not apply a rotation that EXIF data ask for.

    Args:
        path: The file.
        transform: Applied to the image.

    Raises:
        ValueError: On access, if the file cannot be read, or has more than 8 bits for each channel.
    """

    def __init__(self, path: Union[str, os.PathLike], transform=None) -> None:
        self.path = path
        self.transform = transform

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int):
        if index != 0:
            raise IndexError(index)
        image = read_image(self.path)
        return (image if self.transform is None else self.transform(image)), -1


class StrictImages(ImageDataset):
    """timm's data set, except that an unreadable image is an error.

    timm takes the next image instead, perhaps of another class. That is fine for training, but wrong for an evaluation.

    Raises:
        ValueError: On access, as `ImageFile` does.
    """

    def __getitem__(self, index: int):
        name = f'Image {index} of the data set'
        try:
            file, label, *_ = self.reader[index]
        except FileNotFoundError as e:
            raise ValueError(f'There is no file {e.filename!r}.') from e
        except (OSError, AssertionError, TypeError) as e:  # the latter two if an entry of hfds has no image
            raise ValueError(f'{name} is not an image that can be read: {str(e) or "there is none"}') from e
        with file:
            image = read_image(file, getattr(file, 'name', name))
        return (image if self.transform is None else self.transform(image)), -1 if label is None else label


class ImageFolder(StrictImages):
    """A folder of images per class, without hidden files and folders.

    Args:
        root: The folder.

    Attributes:
        files: The path of each image, and the folder that is its class; empty for images directly in the root.
        by_name: The index of each class, unless a class map says otherwise.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.files = _visible([path for path, _ in self.reader.samples], root)
        if not self.files:
            raise ValueError('all of them are hidden')
        self.by_name = _numbered(name for _, name in self.files)
        found, _ = find_images_and_targets(str(root), types=OTHER_KINDS)
        others = _visible(sorted({path for path, _ in found} - {path for path, _ in self.reader.samples}), root)
        if others:
            warnings.warn(
                f'{len(others)} images in {str(root)!r}, such as {others[0][0]}, are left out, as in train.py: timm '
                f'looks only for {", ".join(get_img_extensions())} in folders. Convert them, or move them elsewhere.')

    def number(self, class_to_idx: Dict[str, int]) -> None:
        """Give each class its index. As in train.py, images are left out whose class has none."""
        samples = [(path, class_to_idx[name]) for path, name in self.files if name in class_to_idx]
        if not samples:
            raise ValueError(f'The class map has none of the classes in {self.reader.root!r}. Give another one.')
        lacking = sorted({name for _, name in self.files} - class_to_idx.keys())
        if lacking:
            warnings.warn(
                f'{len(self.files) - len(samples)} of {len(self.files)} images in {self.reader.root!r} are left out, '
                f'because the class map has no number for their classes: {", ".join(lacking[:5])}.')
        self.reader.class_to_idx, self.reader.samples = class_to_idx, samples


def open_dataset(data: str, dataset: str = '', split: str = '', transform=None, class_map: str = '') -> Dataset:
    """A data set of images and labels.

    Args:
        data: One of

            - a folder with a sub-folder of images per class, or with such a folder per split. If one of these is
              `train` or `training`, its classes are numbered, else those of the split. Hidden files and folders are
              left out;
            - a folder of images, or an image file; labels are then -1;
            - the root folder of `dataset`.
        dataset: Empty for a folder or file, else a name that timm's train.py accepts, such as `torch/cifar10`.
        split: Name of the split; as in train.py, `val`, `valid`, `validation`, `eval` and `evaluation` are one.
            Default: 'validation', or else in a folder `test` if there is one, or else the folder itself.
        transform: Applied to each image.
        class_map: The file that numbers the classes, as for train.py. Default: the one that a checkpoint names, see
            `number_classes`.

    Raises:
        ValueError: If there is no such data or class map, or a split has classes that `train` has not; on access, if an
            image cannot be read, which timm's reader of wds skips instead.
    """
    root = Path(data)
    in_folders = reads_folders(dataset)
    if class_map and (is_torchvision(dataset) or root.is_file()):
        raise ValueError('A class map numbers the folders of images, or the classes of hfds/NAME. Leave it out.')
    if not dataset and root.is_file():
        return ImageFile(data, transform)
    if split and is_torchvision(dataset) and split not in {*_TRAIN_SYNONYM, *_EVAL_SYNONYM, 'test'} and (
            dataset.lower().split('/')[-1] in {*_TORCH_BASIC_DS, 'qmnist'}):  # timm takes any other word for 'test'
        raise ValueError(f'{dataset} has no split {split!r}. Use train or test.')
    if not root.is_dir():
        raise ValueError(f'There is no image or folder {data!r}. {WHAT_IS_DATA}')
    if dataset and in_folders:  # timm would take the root itself, and the splits for classes
        names = [split or 'validation']
    else:
        names = [split] if split else ['validation', 'test']
    splits = [folder for name in names if (folder := split_folder(root, name)) is not None]
    if in_folders and not splits and (split or split_folder(root, 'train') is not None):
        there = ', '.join(sorted(entry.name for entry in root.iterdir() if entry.is_dir())) or 'none'
        raise ValueError(f'{data} has no folder {split or ", ".join(names)!r}. Its folders: {there}.')
    if not dataset:
        root = splits[0] if splits else root
    try:
        if dataset:
            found = create_dataset(
                dataset, str(root), split or 'validation', search_split=in_folders, class_map=class_map or None)
            if isinstance(found, ImageDataset):
                found = StrictImages(str(root), reader=found.reader)
            elif isinstance(found, DatasetFolder):
                found.loader = read_image
        else:
            found = ImageFolder(root)
    except (AssertionError, RuntimeError, ImportError, OSError, KeyError, ValueError) as e:
        if 'download=True' in str(e):  # torchvision's advice, which is useless on a command line
            raise ValueError(
                f'No {dataset} in {str(root)!r}. Fetch it: python -c "from timm.data import create_dataset; '
                f'create_dataset({dataset!r}, {str(root)!r}, {split or "validation"!r}, download=True)"') from e
        where = f'{dataset} in {str(root)!r}, split {split!r}' if dataset else repr(str(root))
        raise ValueError(f'No images in {where}: {e}. {WHAT_IS_DATA}') from e
    if not dataset and '' in found.by_name:
        if len(found.by_name) > 1:
            raise ValueError(f'{str(root)!r} has images next to the folders of its classes. Move them into one.')
        found.by_name = {'': -1}
    elif not dataset and not class_map:
        found.by_name = _numbers_by_name(found, root, bool(splits))
    if not dataset:
        found.number(read_class_map(class_map, str(root)) if class_map else found.by_name)
    found.class_map = class_map
    found.transform = transform
    return found


def reads_folders(dataset: str) -> bool:
    """Whether a data set is a folder of images per class, with such a folder per split.

    Args:
        dataset: Its name in train.py, empty for a folder.

    Raises:
        ValueError: If timm knows no data set of this name. It would read all images below the root, of every split.
    """
    prefix, _, name = dataset.lower().partition('/')
    if dataset and ('/' not in dataset or prefix not in READERS):
        raise ValueError(f'Unknown data set {dataset!r}. Write e.g. torch/cifar10, or nothing for a folder of images.')
    return not dataset or is_torchvision(dataset) and name.split('/')[-1] in ('folder', 'image_folder')


def is_torchvision(dataset: str) -> bool:
    """Whether train.py reads the data set of this name by torchvision."""
    return dataset.lower().startswith('torch/')


def split_folder(root: Path, split: str) -> Optional[Path]:
    """The folder that train.py takes for a split, say `valid` for `validation`. None if there is none."""
    found = Path(_search_split(str(root), split))
    return found if found != root and found.is_dir() else None


def load_images(
        data: Dataset,
        batch_size: int,
        num_images: Optional[int] = None,
        workers: int = 0,
        seed: int = 0,
        shuffle: bool = False,
        max_patches: Optional[int] = None,
) -> DataLoader:
    """Batches of a data set, or of a random subset.

    Args:
        data: The data set.
        batch_size: Images per batch.
        num_images: Number of images to draw at random, None for all.
        workers: Number of processes that load them.
        seed: Seed of the draw.
        shuffle: Return images in random order instead of that of the data set, which is often sorted by class.
        max_patches: As in `native_preprocessing`, if the data set's transform comes from there.

    Raises:
        ValueError: If images are to be drawn from a data set that can only be read from its beginning.
    """
    if isinstance(data, IterableDataset) and (shuffle or num_images is not None):
        raise ValueError(
            'No images can be drawn at random from a data set that is read as a stream, as hfids, tfds and wds are. '
            'Leave out num_images (--num-images) and shuffle; or, as for Position-SHAP by the command, take hfds/NAME '
            'or a folder of images.')
    if shuffle or num_images is not None and num_images < len(data):
        picked = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed), device='cpu')[:num_images]
        data = Subset(data, (picked if shuffle else picked.sort().values).tolist())
    collate = None if max_patches is None else NaFlexCollator(max_patches)
    return DataLoader(data, batch_size=batch_size, num_workers=workers, collate_fn=collate)


def read_image(file: Union[str, os.PathLike, BinaryIO], name: str = '') -> Image.Image:
    """Read an image as RGB.

    Args:
        file: Its path, or an open file.
        name: What messages call it, by default the path.

    Raises:
        ValueError: If it cannot be read, or has more than 8 bits for each channel.
    """
    name = name or str(file)
    try:
        opened = Image.open(file)
        image = opened.convert('RGB')
    except FileNotFoundError as e:
        raise ValueError(f'There is no file {name!r}.') from e
    except Exception as e:  # Pillow raises many types for damaged files
        raise ValueError(f'{name} is not an image that can be read: {e}') from e
    if opened.mode.startswith(('I', 'F')):  # convert has clipped its values to 0 to 255
        raise ValueError(
            f"{name} has integers of more than 8 bits or floats (Pillow's mode {opened.mode}), which would become "
            'white or black. Save it with 8 bits for each channel.')
    return image


def _visible(paths: Iterable[str], root: Path) -> List[Tuple[str, str]]:
    """The paths below a root of which no part is hidden, as .ipynb_checkpoints and ._0.png are, and their folders."""
    found = []
    for path in paths:
        parts = path.removeprefix(f'{root}{os.sep}').split(os.sep)
        if not any(part.startswith('.') for part in parts):
            found.append((path, parts[-2] if len(parts) > 1 else ''))
    return found


def _numbered(names: Iterable[str]) -> Dict[str, int]:
    """The numbers that timm gives to classes."""
    return {name: index for index, name in enumerate(sorted(set(names), key=natural_key))}


def _numbers_by_name(data: ImageFolder, root: Path, is_split: bool) -> Dict[str, int]:
    """The index of each class. Training images beside the folder decide it, as some classes may be missing here.

    Args:
        data: The images.
        root: Their folder.
        is_split: Whether the folder is known to be a split of the same data set as those training images.

    Raises:
        ValueError: If it is one, and has classes that the training images lack.
    """
    train = split_folder(Path(os.path.abspath(root)).parent, 'train')  # of '.', too
    if train is None or train.samefile(root):
        return data.by_name
    trained = {
        name for _, name in _visible((path for path, _ in find_images_and_targets(str(train), sort=False)[0]), train)}
    names = {name for _, name in data.files}
    others = names - trained
    if not others:
        return _numbered(trained)
    if is_split and any(trained):  # not only images without classes
        raise ValueError(
            f'{str(root)!r} has classes that {str(train)!r} has not, so they have no number: '
            f'{", ".join(sorted(others)[:5])}. Move them elsewhere, or give a class map.')
    if names & trained:
        warnings.warn(
            f'{str(root)!r} has some classes of {str(train)!r}, but also {", ".join(sorted(others)[:5])}. So its '
            'classes are numbered on their own. If both are splits of one data set, name the folder above them.')
    return data.by_name


def in_order(class_to_idx: Mapping[str, int]) -> Union[None, List[str], Dict[int, str]]:
    """Names of classes in the order of their numbers. If these are not 0, 1, 2, ..., a dict of numbers and names.

    None if two classes have one number, or no class has a name.
    """
    by_number = {index: name for name, index in sorted(class_to_idx.items(), key=lambda item: item[1]) if name}
    if len(by_number) < len(class_to_idx.keys() - {''}) or not by_number:
        return None
    return [*by_number.values()] if [*by_number] == [*range(len(by_number))] else by_number


def read_class_map(file: str, root: str = '') -> Dict[str, int]:
    """The index of each class, as train.py reads it.

    Raises:
        ValueError: If there is no such file, or it has no classes.
    """
    try:
        return load_class_map(file, root)
    except Exception as e:  # timm asserts, and a pickle can raise anything
        raise ValueError(
            f'The class map {file} cannot be read: {described(e)}. Give it by --class-map FILE (in Python '
            'open_dataset(..., class_map=FILE)).') from e
