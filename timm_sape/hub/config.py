"""config.json: which entries it has, and which values are right."""
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterator, Tuple

import timm

from ..checks import MAX_INTEGER, is_integer, is_number
from ..encodings import parse_pos_enc
from ..version import __version__
from .errors import AGAIN, described, short

CONFIG_NAME = 'config.json'
MAX_LAYERS = 1_000  # no model is deeper
MAX_PIXELS = 20_000  # no side of an image is longer
MAX_LEVELS = 10  # no list or mapping in a config is nested deeper


def _is_size(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(map(_is_pixels, value))


def _is_pixels(value: Any) -> bool:
    return is_integer(value, 1) and value <= MAX_PIXELS


def _is_names(value: Any) -> bool:
    return value is None or isinstance(value, str) or isinstance(value, list) and all(isinstance(v, str) for v in value)


def _is_statistic(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_number, value))


# Checks of entries of config.json: a function that says whether a value is right, and in words what would be. Entries
# may be missing.
MAPPING = (lambda value: isinstance(value, dict)), 'a mapping'
TEXT = (lambda value: isinstance(value, str)), 'a string'
CLASSES = (lambda value: is_integer(value, 0)), 'an integer of 0 or more'
IMAGE = (lambda value: _is_size(value, 3)), f'[channels, height, width], each from 1 to {MAX_PIXELS:,}'
IMAGE_OR_NONE = (lambda value: value is None or _is_size(value, 3)), IMAGE[1]
DATA = {
    'num_classes': CLASSES,
    'input_size': IMAGE,
    'test_input_size': IMAGE_OR_NONE,
    'min_input_size': IMAGE_OR_NONE,
    'fixed_input_size': ((lambda value: isinstance(value, bool)), 'true or false'),
    'interpolation': TEXT,
    'crop_pct': (is_number, 'a number'),
    'crop_mode': TEXT,
    'mean': (_is_statistic, 'a list of numbers'),
    'std': (_is_statistic, 'a list of numbers'),
    'label_offset': ((lambda value: value is None or is_integer(value, 0)), 'an integer of 0 or more, or null'),
    'first_conv': (_is_names, 'a name, a list of names, or null'),
    'classifier': (_is_names, 'a name, a list of names, or null'),
}
FIELDS = {
    '': MAPPING,
    'architecture': TEXT,
    'model_args': MAPPING,
    'model_args.img_size': (
        lambda value: value is None or _is_pixels(value) or _is_size(value, 2),
        f'an integer from 1 to {MAX_PIXELS:,}, or two of them'),
    'model_args.depth': (
        lambda value: value is None or is_integer(value, 1) and value <= MAX_LAYERS,
        f'an integer from 1 to {MAX_LAYERS:,}'),
    'model_args.device': ((lambda value: False), 'left out'),
    'pretrained_cfg': MAPPING,
    'timm_sape': MAPPING,
    'timm_sape.version': TEXT,
    'timm_sape.sha256': TEXT,
    **DATA,  # old timm wrote them here
    **{f'pretrained_cfg.{name}': check for name, check in DATA.items()},
}


def read_config(where: str, file: Path) -> Dict[str, Any]:
    """A config.json whose entries have the right types.

    Args:
        where: Repository or folder, for the message.
        file: The file.

    Raises:
        ValueError: If an entry is wrong, the file was written by a newer version, or names a model or encoding that is
            not registered.
    """
    try:
        config = json.loads(file.read_text(encoding='utf-8'))
    except (ValueError, RecursionError) as e:
        raise ValueError(f'{where}: {CONFIG_NAME} is not JSON ({described(e)}). {AGAIN}') from e
    try:
        entries = dict(entries_of(config))
    except RecursionError as e:
        raise ValueError(f'{where}: {CONFIG_NAME} is nested too deeply, at {e}.') from None
    version = entries.get('timm_sape.version')
    if isinstance(version, str) and _release(version) > _release(__version__):
        raise ValueError(
            f'{where} was written by timm-sape {version}, newer than {__version__}, which is installed: '
            'pip install -U timm-sape.')
    for path, (is_right, what) in FIELDS.items():
        if path in entries and not is_right(entries[path]):
            raise ValueError(f'{where}: {path or "all"} of {CONFIG_NAME} must be {what}, not {short(entries[path])}.')
    for path in ('architecture', *(['pretrained_cfg'] if 'model_args' in config else [])):  # old timm wrote neither
        if path not in config:
            raise ValueError(f'{where}: {CONFIG_NAME} has no {path}. {AGAIN}')
    for path, value in entries.items():
        is_wrong = isinstance(value, int) and abs(value) > MAX_INTEGER or (
            isinstance(value, float) and not math.isfinite(value))
        if path.startswith('model_args.') and is_wrong:
            raise ValueError(f'{where}: {path} of {CONFIG_NAME} is {short(value)}, which no model has. {AGAIN}')
    architecture, args = config['architecture'], config.get('model_args', {})
    if not timm.is_model(architecture):
        raise ValueError(
            f'{where} is a {short(architecture)}, which neither timm {timm.__version__} nor timm-sape '
            f'{__version__} knows. If another package registers it, import that first.')
    try:
        if args.get('pos_enc') is not None:
            parse_pos_enc(args['pos_enc'], args.get('pos_enc_kwargs'))
    except Exception as e:  # encodings of others check their keywords as they like
        raise ValueError(
            f'{where}: timm-sape {__version__} cannot make its position encoding. ({described(e)})') from e
    if 'transformers_version' in config:  # it has saved other weights since, and copied the old checksum
        config.get('timm_sape', {}).pop('sha256', None)
    return config


def check_label_names(config: Dict[str, Any]) -> None:
    """
    Raises:
        ValueError: If `label_names` is a list, and does not have a name of its own for each class.
    """
    names, num_classes = config.get('label_names'), config['num_classes']
    if not isinstance(names, list):  # timm also takes a dict of numbers and names, for some of the classes
        return
    if not num_classes:
        raise ValueError('The model has no classes. Leave label_names out.')
    if len(names) != num_classes or not all(isinstance(name, str) for name in names):
        raise ValueError(f'label_names must be {num_classes} strings, one for each class, got {short(names)}.')
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:  # as of ImageNet's English names
        raise ValueError(
            f'label_names has {twice[0]!r} twice. Give each class a name of its own, such as that of its folder, and '
            'what people read as label_descriptions={name: text}.')


def entries_of(value: Any, path: str = '', level: int = 0) -> Iterator[Tuple[str, Any]]:
    """All values of a config by their path, `'model_args.img_size.0'`; a RecursionError with the path if it is deep."""
    if level > MAX_LEVELS:
        raise RecursionError(path)
    yield path, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from entries_of(item, f'{path}.{key}' if path else str(key), level + 1)


def _release(version: str) -> Tuple[int, ...]:
    """Major and minor version; empty if there are none."""
    match = re.match(r'(\d+)\.(\d+)', version)
    return tuple(map(int, match.groups())) if match else ()
