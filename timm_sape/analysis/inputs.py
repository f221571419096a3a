"""Load the models and images that users name on a command line."""
import difflib
import math
import os
import threading
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import timm
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from PIL import Image
from timm.data import ImageDataset, create_dataset, create_transform, resolve_model_data_config
from timm.data.dataset_factory import _search_split
from timm.data.loader import adapt_to_chs
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.readers.class_map import load_class_map
from timm.data.readers.reader_image_folder import find_images_and_targets
from timm.layers import to_2tuple
from timm.models import get_model_input_config, is_model_pretrained, load_state_dict
from timm.models._helpers import _torch_load
from timm.models._hub import load_model_config_from_hf, load_model_config_from_path
from timm.models.naflexvit import NaFlexVit
from timm.utils.misc import natural_key
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.transforms import Compose, Grayscale
from torchvision.transforms.v2 import RGB
from torchvision.transforms.v2.functional import center_crop

from .. import hub
from ..checkpoints import module_names, refuse_other_encoding
from ..encodings import list_encodings
from ..entrypoints import SIZES
from ..host import PosEncModel

__all__ = [
    'ImageFile',
    'check_classes',
    'check_numbering',
    'image_size_of',
    'in_order',
    'load_images',
    'load_model',
    'native_preprocessing',
    'number_classes',
    'open_dataset',
    'patch_ratio',
    'patch_size_of',
    'preprocessing',
    'split_folder',
]

# The options of timm's train.py that preprocessing depends on. Its checkpoints contain all of them.
PREPROCESSING = ('mean', 'std', 'interpolation', 'crop_pct', 'crop_mode')

WHAT_IS_DATA = 'Give an image, a folder of images, one with CLASS/IMAGE or val/CLASS/IMAGE, or the root of a `dataset`.'


class _Source(NamedTuple):
    """Where a model comes from: a name that timm knows, a file of weights, arguments and config."""
    name: str
    file: Optional[str]
    kwargs: Dict[str, Any]
    cfg: Dict[str, Any]
    trained: Optional[str] = None
    """The model whose weights are in the file, if the file says so. It has the same arguments."""
    class_map: str = ''
    """The file that numbered the classes in train.py."""


def load_model(model: str, img_size: Union[None, int, Tuple[int, int]] = None, **kwargs) -> torch.nn.Module:
    """Load a model, in eval mode.

    Args:
        model: One of

            - a name that timm knows, such as `vit_small_sape2_k` or `vit_small_patch16_224.augreg_in21k_ft_in1k`, with
              pretrained weights if there are any, else with random ones;
            - `hf-hub:USER/REPOSITORY`;
            - `local-dir:FOLDER`, a folder written by `timm_sape.hub.save` or `timm.models.save_for_hf`, or just
              `FOLDER`;
            - a checkpoint of timm's train.py, which names its model;
            - `NAME@FILE`, a model and a file with its weights, where NAME may be a folder. If the file has no
              classifier, neither has the model;
            - `NAME@random`, a model with random weights.

            If a file also has averaged weights (`--model-ema`), these are used. train.py's summary is of them, too,
            unless it ran with `--model-ema-force-cpu`.
        img_size: Image size in pixels, or (height, width). Encodings follow their rules for another grid. Default: the
            model's own size; of a checkpoint of train.py the one that it validates at, which for its NaFlex loader is
            the largest square of at most `--naflex-max-seq-len` patches.
        kwargs: Passed to `timm.create_model`.

    Raises:
        ValueError: If there is no such model, or two of that name, one of timm and one in a folder; the file does not
            fit it or says that its model has another encoding; or the Hub cannot be reached.
    """
    source = _find(model)
    kwargs = {**source.kwargs, **kwargs}
    if img_size is not None:
        kwargs['img_size'] = to_2tuple(img_size)
    if source.file is not None:
        try:
            weights = load_state_dict(source.file)
        except Exception as e:  # a file of another kind can raise anything
            raise ValueError(f'{source.file} has no weights that can be read safely: {hub.described(e)}') from e
        overlay = {**source.cfg, 'file': source.file, 'source': ''}  # else timm would prefer weights on the Hub
        if source.class_map and os.path.isfile(source.class_map):  # it may be found only beside images
            overlay['label_names'] = in_order(_read_class_map(source.class_map))
        cfg = _pretrained_cfg(source.name)
        head, stem = (
            next((weights[name].shape for layer in module_names(entry) if (name := f'{layer}.weight') in weights), ())
            for entry in (cfg.get('classifier'), cfg.get('first_conv')))
        if len(head) > 0:
            kwargs.setdefault('num_classes', head[0])
        elif len(stem) > 0 and cfg.get('classifier'):  # the names are timm's, so there would be a head
            kwargs.setdefault('num_classes', 0)
        if len(stem) > 2:  # with two axes it is that of NaFlexVit, for flattened patches
            kwargs.setdefault('in_chans', stem[1])
        # Same number of classes and channels as in the file, so that timm adapts neither the head nor the stem.
        overlay['num_classes'] = kwargs.get('num_classes', cfg.get('num_classes', 1000))
        kwargs.update(pretrained=True, pretrained_cfg_overlay=overlay)
    elif 'pretrained' not in kwargs:
        kwargs['pretrained'] = ':' in source.name or is_model_pretrained(source.name)
    from_hub = kwargs['pretrained'] and source.file is None and not source.name.startswith('local-dir:')
    unreachable = None
    try:
        with _no_retries() if from_hub else nullcontext() as unreachable:
            found = timm.create_model(source.name, **kwargs).eval()
    except LocalEntryNotFoundError as e:
        others = '' if ':' in source.name else f' Write {model}@FILE for weights in a file, {model}@random for none.'
        raise ValueError(
            f'{model} is not in the cache, and {constants.ENDPOINT} cannot be reached '
            f'({hub.described(unreachable or e)}).{others}') from e
    except (RuntimeError, TypeError, KeyError, AttributeError, AssertionError, OSError) as e:
        raise ValueError(f'{model}: {hub.described(e)}') from e
    if source.trained is not None and (source.trained != source.name or 'pos_enc' in kwargs):
        _refuse_other_encoding(found, source)
    return found


def _refuse_other_encoding(model: torch.nn.Module, source: _Source) -> None:
    """Refuse weights that were trained with another encoding, which may fit if it has no parameters.

    Raises:
        ValueError: If they were.
    """
    try:
        with torch.device('meta'):
            trained = timm.create_model(source.trained, **source.kwargs)
    except Exception:  # it may be registered in the user's code alone: then NAME decides
        return
    if not isinstance(trained, PosEncModel):
        return
    if isinstance(model, PosEncModel):
        now = {'pos_enc': model.pos_enc, 'pos_enc_kwargs': model.pos_enc_kwargs}
    else:  # of timm, which has no encoding without parameters
        now = {'pos_enc': 'ape' if 'ape' in trained.pos_enc.split('+') else 'nope'}
    was = {'pos_enc': trained.pos_enc, 'pos_enc_kwargs': trained.pos_enc_kwargs}
    refuse_other_encoding(
        source.file, {'pretrained_model_args': was, **now},
        fix='Leave pos_enc out, and before @ name a model of this encoding.')


def _pretrained_cfg(name: str) -> Mapping[str, Any]:
    """The pretrained config of a model, or of a folder; empty if timm has none."""
    if name.startswith('local-dir:'):
        config = _read_config(Path(name.removeprefix('local-dir:')))
        return config.get('pretrained_cfg', config)  # old timm wrote its entries directly
    cfg = timm.get_pretrained_cfg(name)
    return {} if cfg is None else vars(cfg)


@contextmanager
def _no_retries() -> Iterator[Optional[Exception]]:
    """If the Hub does not answer, have timm take files from the cache or fail at once. Gives the reason, or None.

    The switch is one for the whole process, as timm has no argument for it.
    """
    unreachable = hub.why_unreachable()
    if unreachable is None:
        yield None
        return
    with _offline:
        was_offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        try:
            yield unreachable
        finally:
            constants.HF_HUB_OFFLINE = was_offline


_offline = threading.Lock()  # so that each thread restores what was there before all of them


def _find(model: str) -> _Source:
    path = Path(model)
    if model.startswith(('hf-hub:', 'hf_hub:')):
        return _Source(model, None, {}, {})
    if path.is_file():
        return _from_checkpoint(model)
    is_whole = Path(model.removeprefix('local-dir:')).is_dir()  # its path may have an @
    name, at, file = (model, '', '') if is_whole else model.partition('@')
    folder = Path(name.removeprefix('local-dir:'))
    if name.startswith('local-dir:') or folder.is_dir() and not timm.is_model(name):
        _read_config(folder)
        name = f'local-dir:{folder}'
    elif is_whole and (folder / 'config.json').is_file():
        raise ValueError(
            f'{name!r} is a model that timm knows, and there is a folder of that name with a saved model. Write '
            f'local-dir:{name} for the latter, and {name}@random or {name}.TAG for the former.')
    elif not timm.is_model(name.split('.')[0]):
        close = (timm.list_models(f'{name}*') or timm.list_models(f'*{name}*'))[:3]
        close = close or difflib.get_close_matches(name, timm.list_models())
        hint = f'Did you mean {" or ".join(close)}?' if close else 'timm.list_models() has all names.'
        raise ValueError(f'There is no model, file or folder {name!r}. {why_unknown(name) or hint}')
    if at and file == 'random':
        return _Source(name, None, {'pretrained': False}, {})
    if at and not Path(file).is_file():
        raise ValueError(f'There is no file {file!r}.')
    return _from_checkpoint(file, name) if at else _Source(name, None, {}, {})


def _read_config(folder: Path) -> Dict[str, Any]:
    if not (folder / 'config.json').is_file():
        raise ValueError(f'{folder} is a folder without config.json. {_checkpoint_hint(folder)}')
    return hub.read_config(str(folder), folder / 'config.json')


def _checkpoint_hint(folder: Path) -> str:
    """Advice for a folder that is not a saved model. It may be one of train.py, with several checkpoints."""
    found = [path for name in ('model_best.pth.tar', 'last.pth.tar', '*.pth.tar') for path in sorted(folder.glob(name))]
    return f'Name a checkpoint in it: {found[0]}' if found else 'Name a folder that timm_sape.hub.save has written.'


def why_unknown(name: str) -> str:
    """The reason why there is no model of this name, if it looks like one of ours; else an empty string.

    `timm.create_model` only says that the name is unknown. We could register an entrypoint that raises this, but timm
    would list it as a model.
    """
    size = next((size for size in SIZES if name.startswith(f'{size}_')), None)
    encoding = name.removeprefix(f'{size}_')
    if encoding not in list_encodings(aliases=True) and encoding.endswith('_ape'):
        encoding = f'ape+{encoding.removesuffix("_ape")}'
    if size is None or not set(encoding.split('+')) <= set(list_encodings(aliases=True)):
        return ''
    try:
        with torch.device('meta'):
            timm.create_model(f'{size}_pos_enc', pos_enc=encoding)
    except ValueError as e:
        return str(e)
    return (
        f"It has no name of its own: timm.create_model('{size}_pos_enc', pos_enc={encoding!r}), or in a command "
        f'{size}_pos_enc@random --pos-enc {encoding}.')


def _from_checkpoint(file: str, name: Optional[str] = None) -> _Source:
    """The arguments in a checkpoint of train.py, and its model's name if none is given."""
    checkpoint = None
    if not file.endswith('.safetensors'):
        try:
            checkpoint = _torch_load(file)
        except Exception as e:  # a file of another kind can raise anything
            raise ValueError(f'{file} is not a checkpoint that can be read safely: {hub.described(e)}') from e
    checkpoint = checkpoint if isinstance(checkpoint, dict) else {}
    name = name or checkpoint.get('arch')
    if name is None:
        raise ValueError(f'{file} does not name its model. Write NAME@{file}, e.g. vit_small_sape2_k@{file}')
    args = getattr(checkpoint.get('args'), '__dict__', {})
    kwargs = dict(args.get('model_kwargs') or {})
    for ours, theirs in (('num_classes', 'num_classes'), ('in_chans', 'in_chans'), ('global_pool', 'gp')):
        if args.get(theirs) is not None:
            kwargs[ours] = args[theirs]
    cfg = {key: args[key] for key in PREPROCESSING if args.get(key) not in (None, '')}  # train.py's default is ''
    channels, *size = args.get('input_size') or (3,)
    size, made_for = size or args.get('img_size'), kwargs.get('img_size')
    if args.get('naflex_loader') or made_for and not size and 'img_size' in args:
        try:
            with torch.device('meta'):
                model = timm.create_model(name, **kwargs)
        except (RuntimeError, TypeError, OSError) as e:
            raise ValueError(f'{file}: {hub.described(e)}') from e
        size = model.pretrained_cfg['input_size'][1:]  # train.py does not know what the model was made for
        if args.get('naflex_loader'):
            cfg['crop_pct'] = 1.0  # its loader shows whole images
            size = [side * math.isqrt(args['naflex_max_seq_len']) for side in patch_ratio(model, name)]
    if made_for and size:
        kwargs['img_size'] = to_2tuple(size)  # if they differ, it takes images of any size
    if made_for or size:  # the former decides about a learned table
        cfg['input_size'] = (args.get('in_chans') or channels, *to_2tuple(made_for or size))
    folder = Path(file).parent
    saved = Path(file).name in ('model.safetensors', 'pytorch_model.bin') and (folder / 'config.json').is_file()
    trained = f'local-dir:{folder}' if saved else checkpoint.get('arch')
    is_torchvision = (args.get('dataset') or '').startswith('torch/')  # for which train.py ignores the class map
    return _Source(name, file, kwargs, cfg, trained, '' if is_torchvision else args.get('class_map') or '')


def preprocessing(model: torch.nn.Module, img_size: Optional[Sequence[int]] = None, **overrides):
    """timm's preprocessing of images for inference.

    Args:
        model: The model.
        img_size: (height, width) in pixels. Default: the model's image size.
        overrides: Entries of its data config to replace, such as `crop_mode='squash'`, which shows the central
            crop_pct of both the height and the width.

    Returns:
        A transform from PIL images to normalized tensors `[C, height, width]`.

    Raises:
        ValueError: If the model takes images with neither 1 nor 3 channels.
    """
    to_channels, config = _data_config(model)
    if img_size is not None:
        overrides['input_size'] = (config['input_size'][0], *img_size)
    return Compose([to_channels, create_transform(**{**config, **overrides}, is_training=False)])


def native_preprocessing(model: torch.nn.Module, max_patches: int):
    """Preprocessing that keeps the aspect ratio of each image, for a NaFlexVit.

    The image is the central crop_pct of its height and of its width, as with `crop_mode='squash'` in `preprocessing`.
    It is resized to as many whole patches as fit into `max_patches`.

    Args:
        model: timm's NaFlexVit, or ours.
        max_patches: The most patches of an image.

    Returns:
        A transform from PIL images to a dict of patches, as `load_images` collates them with `max_patches`.

    Raises:
        ValueError: If the model takes no patches, or neither 1 nor 3 channels.
    """
    if not isinstance(model, NaFlexVit) or not model.embeds.is_linear:
        raise ValueError(
            f'{type(model).__name__} takes no images of different shapes in a batch. Use a NaFlexVit, such as '
            'naflexvit_small_rope2d; the weights of vit_small_rope2d fit it: naflexvit_small_rope2d@FILE.')
    if len(set(model.embeds.patch_size)) > 1:
        height, width = model.embeds.patch_size
        raise ValueError(f"timm's transform to patches has square ones, the model {height}x{width}.")
    to_channels, config = _data_config(model)
    to_patches = create_transform(
        **config,
        is_training=False,
        naflex=True,
        patch_size=model.embeds.patch_size[0],
        max_seq_len=max_patches,
        patchify=True,
        patchify_channels_last=model.embeds.channels_last,
    )
    return Compose([to_channels, partial(_central_part, share=config['crop_pct']), to_patches])


def _central_part(image: Image.Image, share: float) -> Image.Image:
    return center_crop(image, [max(round(share * side), 1) for side in (image.height, image.width)])


def _data_config(model: torch.nn.Module) -> Tuple[torch.nn.Module, Dict[str, Any]]:
    """What gives an image the channels of the model, and timm's data config at the model's image size."""
    config = resolve_model_data_config(model)
    channels, *size = get_model_input_config(model)['input_size']
    first = dict(model.named_modules()).get(str((getattr(model, 'pretrained_cfg', None) or {}).get('first_conv')))
    channels = getattr(first, 'in_channels', channels)  # the config may be wrong if weights came from a bare file
    if channels not in (1, 3):
        raise ValueError(
            f'The model takes images with {channels} channels, but image files have 1 or 3. Use a model for 3.')
    for statistic in ('mean', 'std'):
        config[statistic] = adapt_to_chs(config[statistic], channels)
    config['input_size'] = (channels, *size)
    return Grayscale() if channels == 1 else RGB(), config


def image_size_of(model: torch.nn.Module) -> Tuple[int, int]:
    """(height, width) in pixels of the images that a model was created for, or trained on."""
    return tuple(get_model_input_config(model)['input_size'][1:])


def patch_ratio(model: torch.nn.Module, name: str = '') -> Tuple[int, int]:
    """(height, width) in pixels for which a model has one patch.

    Args:
        model: The model.
        name: What the message calls it. Default: its class.

    Raises:
        ValueError: If the model has no patches.
    """
    if isinstance(model, PosEncModel):
        return model.patch_size
    embedding = model.embeds if isinstance(model, NaFlexVit) else getattr(model, 'patch_embed', None)
    if not hasattr(embedding, 'feat_ratio'):
        raise ValueError(f'{name or type(model).__name__} has no patches. Use a Vision Transformer.')
    return embedding.feat_ratio(as_scalar=False)


def patch_size_of(model: torch.nn.Module) -> Tuple[int, int]:
    """Height and width, in pixels, of the patches that a model cuts images into.

    Raises:
        ValueError: If the model has no patches, they overlap, or several layers compute them.
    """
    if isinstance(model, NaFlexVit):
        return model.embeds.patch_size
    projection = getattr(getattr(model, 'patch_embed', None), 'proj', None)
    sizes = [getattr(projection, name, None) for name in ('kernel_size', 'stride')]
    if not isinstance(projection, torch.nn.Conv2d) or sizes[0] != sizes[1] or hasattr(model.patch_embed, 'backbone'):
        raise ValueError(
            f'{type(model).__name__} does not cut images into separate patches, so they cannot be moved. Use a plain '
            'Vision Transformer.')
    return sizes[0]


class ImageFile(Dataset):
    """A data set of one image, without a label (-1).

    Args:
        path: The file.
        transform: Applied to the image.

    Raises:
        ValueError: On access, if the file cannot be read.
    """

    def __init__(self, path: Union[str, os.PathLike], transform=None) -> None:
        self.path = path
        self.transform = transform

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int):
        if index != 0:
            raise IndexError(index)
        try:
            opened = Image.open(self.path)
            image = opened.convert('RGB')
        except FileNotFoundError as e:
            raise ValueError(f'There is no file {str(self.path)!r}.') from e
        except Exception as e:  # Pillow raises many types for damaged files
            raise ValueError(f'{self.path} is not an image that can be read: {e}') from e
        if opened.mode.startswith(('I', 'F')):  # convert has clipped its values to 0 to 255
            raise ValueError(
                f"{self.path} has integers of more than 8 bits or floats (Pillow's mode {opened.mode}), which would "
                'become white or black. Save it with 8 bits for each channel.')
        return (image if self.transform is None else self.transform(image)), -1


class _ImageFolder(ImageDataset):
    """timm's data set, except that hidden files and folders are left out, and an unreadable file is an error.

    timm takes the next file instead, perhaps of another class. That is fine for training, but wrong for an evaluation.

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

    def __getitem__(self, index: int):
        path, label = self.reader.samples[index]
        image, _ = ImageFile(path, self.transform)[0]
        return image, label


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


def in_order(class_to_idx: Mapping[str, int]) -> Optional[List[str]]:
    """Names of classes in the order of their numbers. None if these are not 0, 1, 2, ..., or belong to no names."""
    names = sorted(class_to_idx, key=class_to_idx.get)
    is_plain = '' not in class_to_idx and [class_to_idx[name] for name in names] == list(range(len(names)))
    return names if is_plain else None


def _numbers_by_name(data: _ImageFolder, root: Path, is_split: bool) -> Dict[str, int]:
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
    others = {name for _, name in data.files} - trained
    if not others:
        return _numbered(trained)
    if is_split and any(trained):  # not only images without classes
        raise ValueError(
            f'{str(root)!r} has classes that {str(train)!r} has not, so they have no number: '
            f'{", ".join(sorted(others)[:5])}. Move them elsewhere, or give a class map.')
    return data.by_name


def _read_class_map(file: str, root: str = '') -> Dict[str, int]:
    """The index of each class, as train.py reads it.

    Raises:
        ValueError: If there is no such file, or it has no classes.
    """
    try:
        return load_class_map(file, root)
    except Exception as e:  # timm asserts, and a pickle can raise anything
        raise ValueError(
            f'The class map {file} cannot be read: {hub.described(e)}. Give it by --class-map FILE (in Python '
            'open_dataset(..., class_map=FILE)).') from e


def split_folder(root: Path, split: str) -> Optional[Path]:
    """The folder that train.py takes for a split, say `valid` for `validation`. None if there is none."""
    found = Path(_search_split(str(root), split))
    return found if found != root and found.is_dir() else None


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
        ValueError: If there is no such data or class map, or a split has classes that `train` has not; on access, if a
            file in a folder cannot be read.
    """
    root = Path(data)
    if class_map and (dataset.startswith('torch/') or root.is_file()):
        raise ValueError('A class map numbers the folders of images, or the classes of hfds/NAME. Leave it out.')
    if not dataset and root.is_file():
        return ImageFile(data, transform)
    if not root.is_dir():
        raise ValueError(f'There is no image or folder {data!r}. {WHAT_IS_DATA}')
    if dataset and '/' not in dataset:
        raise ValueError(f'Unknown data set {dataset!r}. Write e.g. torch/cifar10, or nothing for a folder of images.')
    in_folders = dataset.split('/')[-1] in ('folder', 'image_folder')  # its splits are folders in the root
    if in_folders:  # timm would take the root itself, and the splits for classes
        names = [split or 'validation']
    else:
        names = [split] if split else ['validation', 'test']
    splits = [folder for name in names if (folder := split_folder(root, name)) is not None]
    if (in_folders or not dataset) and not splits and (split or split_folder(root, 'train') is not None):
        there = ', '.join(sorted(entry.name for entry in root.iterdir() if entry.is_dir())) or 'none'
        raise ValueError(f'{data} has no folder {split or ", ".join(names)!r}. Its folders: {there}.')
    if not dataset:
        root = splits[0] if splits else root
    try:
        if dataset:
            found = create_dataset(
                dataset, str(root), split or 'validation', search_split=in_folders, class_map=class_map or None)
        else:
            found = _ImageFolder(root)
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
        found.number(_read_class_map(class_map, str(root)) if class_map else found.by_name)
    found.class_map = class_map
    found.transform = transform
    return found


def number_classes(data: Dataset, models: Sequence[str]) -> None:
    """Number the classes of images as the models do.

    Those that train.py trained with `--class-map` name the file. Saved models may have `label_names`, the names of all
    folders of images in their order.

    Args:
        data: From `open_dataset`. If a class map was given there, it stays.
        models: Names as for `load_model`.

    Raises:
        ValueError: If a class map cannot be read, or the models number the classes in different ways.
    """
    given = getattr(data, 'class_map', None)
    if given or given is None and not hasattr(data, 'reader'):  # one image, or a data set of the caller's own
        return
    sources = {model: _find(model) for model in models}
    if not isinstance(data, _ImageFolder):
        # torchvision's data sets have no reader, and train.py no class map for them
        fix = 'Give it, too: --class-map {}.' if hasattr(data, 'reader') else (
            'It does not apply to a data set of torchvision: measure on a folder of images, without --dataset.')
        for model, source in sources.items():
            if source.class_map:
                raise ValueError(f'{model} was trained with a class map. {fix.format(source.class_map)}')
        return
    if '' in data.by_name:
        return
    numbers = {
        model: _read_class_map(source.class_map, data.reader.root) if source.class_map else _numbers_by_labels(
            source.name, data.by_name)
        for model, source in sources.items()}
    first = next(iter(numbers))
    for model in numbers:
        if numbers[model] != numbers[first]:
            raise ValueError(
                f'{first} and {model} number the classes in different ways, by the class maps that they were trained '
                'with, by the label_names that they were saved with, or by the order of names. Measure them one at a '
                'time, or give one map for both: --class-map FILE.')
    data.number(numbers[first])


def _numbers_by_labels(name: str, by_name: Dict[str, int]) -> Dict[str, int]:
    """The index of each class in the `label_names` of a saved model. If they do not name all classes: `by_name`."""
    if name.startswith('local-dir:'):
        cfg, *_ = load_model_config_from_path(name.removeprefix('local-dir:'))
    elif ':' in name:
        try:
            with _no_retries():
                cfg, *_ = load_model_config_from_hf(name.partition(':')[2])
        except Exception:  # load_model says what is wrong
            return by_name
    else:
        return by_name
    labels = cfg.get('label_names') or ()  # timm has dicts, too, of numbers and names
    numbers = {label: index for index, label in (labels.items() if isinstance(labels, dict) else enumerate(labels))}
    return {label: int(index) for label, index in numbers.items()} if by_name.keys() <= numbers.keys() else by_name


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
    """
    if shuffle or num_images is not None and num_images < len(data):
        picked = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:num_images]
        data = Subset(data, (picked if shuffle else picked.sort().values).tolist())
    collate = None if max_patches is None else NaFlexCollator(max_patches)
    return DataLoader(data, batch_size=batch_size, num_workers=workers, collate_fn=collate)


def check_numbering(data: Dataset, model: torch.nn.Module, name: str) -> None:
    """Warn if a model has another number of classes than the images, whose numbers are a guess without a class map.

    Args:
        data: The images.
        model: The model.
        name: What the message calls it.
    """
    classes = getattr(getattr(data, 'reader', data), 'class_to_idx', None) or {}  # torchvision's have no reader
    num_classes = getattr(model, 'num_classes', 0)
    if '' in classes or classes != getattr(data, 'by_name', classes):
        return
    if num_classes and classes and len(classes) != num_classes:
        warnings.warn(
            f'{name} has {num_classes} classes, and the images have {len(classes)}, so their labels may be wrong: they '
            'are numbered in the order of their names. If some are missing, put train/ with all of them beside the '
            'folder, or give a class map.')


def check_classes(labels: torch.Tensor, num_classes: int) -> None:
    """Check that a model has the classes of all labels.

    Args:
        labels: Class indices of any shape.
        num_classes: Number of classes of the model.

    Raises:
        ValueError: If a label is too large.
    """
    if labels.max() >= num_classes:
        raise ValueError(
            f'There are labels up to {labels.max().item()}, but the model has {num_classes} classes, from 0 on. '
            'Use a model that was trained on these classes.')
