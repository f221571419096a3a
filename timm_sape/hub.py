"""Save models to a folder or to the Hugging Face Hub, and load them: timm's own files, with a card and with checks.

`timm.create_model('hf-hub:...')` and transformers' `AutoModelForImageClassification` read what `push` writes, once this
package is imported. `load` reads it too, with more checks. For these, config.json has the version of this package that
wrote it and the checksum of the weights:

    "timm_sape": {"version": "0.1.0", "sha256": "..."}

The checksum finds damaged or exchanged files, not attacks: whoever can write to a repository can change both. A commit
hash as `revision=` pins both.
"""
import errno
import json
import math
import os
import re
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import timm
import torch
import torch.nn as nn
from huggingface_hub import CommitInfo, HfApi, constants, get_session, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.sha import git_hash, sha_fileobj
from safetensors import safe_open
from timm.layers import to_2tuple
from timm.models import get_model_input_config, model_entrypoint, save_for_hf
from timm.models._hub import HF_SAFE_WEIGHTS_NAME, generate_readme
from timm.utils import unwrap_model
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from .checks import MAX_INTEGER, is_integer, is_number
from .encodings import get_encoding, parse_pos_enc
from .version import __version__

__all__ = ['load', 'push', 'save']

CONFIG_NAME = 'config.json'
MAX_LAYERS = 1_000  # no model is deeper
MAX_PIXELS = 20_000  # no side of an image is longer
MAX_LEVELS = 10  # no list or mapping in a config is nested deeper
AGAIN = 'Copy it again, or save the model again.'


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


def push(
        model: nn.Module,
        repo_id: str,
        *,
        token: Optional[str] = None,
        revision: Optional[str] = None,
        private: bool = False,
        commit_message: str = 'Add model',
        **description,
) -> CommitInfo:
    """Push a model to the Hub with a card, after checking that it loads back with identical logits.

    The new card replaces an old one; the Hub keeps the history. Files with other names stay, an old pickle for example.

    Args:
        model: A model made by `timm.create_model`, of any architecture.
        repo_id: `OWNER/NAME`, or `NAME` for a repository of your own; created if missing.
        token: Of an account that may write there. Default: the one in `HF_TOKEN` or of `hf auth login`.
        revision: Branch to push to, created if missing. Default: `main`.
        private: Whether a new repository is private.
        commit_message: Message of the commit.
        description: As for `save`: `recipe`, `data`, `results`, `model_card`, `model_config`, `data_config`.

    Returns:
        huggingface_hub's description of the commit.

    Raises:
        ValueError: If the model cannot be saved, does not load back to identical logits, or the Hub refuses it. Nothing
            is pushed then.
        ConnectionError: If the Hub cannot be reached, or the connection breaks off.
    """
    if not isinstance(repo_id, str):
        raise ValueError(f'repo_id must be OWNER/NAME, got {_short(repo_id)}.')
    api = HfApi(token=token, **_library())
    with TemporaryDirectory() as scratch:
        if '/' not in repo_id:
            with _plain_errors(repo_id, revision):
                repo_id = f'{api.whoami()["name"]}/{repo_id}'
        folder = Path(scratch, 'model')
        save(model, folder, repo_id=f'{repo_id}@{revision}' if revision else repo_id, **description)
        with _plain_errors(repo_id, revision):
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            return api.upload_folder(
                repo_id=repo_id, folder_path=folder, revision=revision, commit_message=commit_message)


def save(
        model: nn.Module,
        folder: Union[str, Path],
        *,
        repo_id: Optional[str] = None,
        recipe: Any = None,
        data: Any = None,
        results: Any = None,
        model_card: Optional[Dict[str, Any]] = None,
        model_config: Optional[Dict[str, Any]] = None,
        data_config: Optional[Dict[str, Any]] = None,
) -> None:
    """Save a model as `push` does: safetensors, config.json and a card, which load back to identical logits.

    Args:
        model: A model made by `timm.create_model`, of any architecture.
        folder: A folder that does not exist yet. It appears complete or not at all.
        repo_id: Repository (with `@revision`) that the card names. Default: the card names the folder.
        recipe: How the model was trained, for the card: text, a list, or a dict of names and values.
        data: What it was trained on, likewise.
        results: Its results, likewise.
        model_card: Entries of timm's model cards that replace ours (`description`, `details`, `license`, `tags`,
            `citation` ...). Default license: the one in its config, that of the weights it started from; else unknown.
        model_config: Entries for config.json as in `timm.models.save_for_hf`, e.g. `label_names`, or `model_args` in
            place of arguments that were classes or functions.
        data_config: Preprocessing for config.json, as there.

    Raises:
        ValueError: If the folder exists, an entry of `model_config` or `data_config` is wrong, or the model cannot be
            saved or does not load back to identical logits.
        OSError: If the folder cannot be made or written.
    """
    if not isinstance(repo_id, (str, type(None))):
        raise ValueError(f'repo_id must be OWNER/NAME, got {_short(repo_id)}.')
    for name, given in (('model_card', model_card), ('model_config', model_config), ('data_config', data_config)):
        if given is not None and not isinstance(given, dict):
            raise ValueError(f'{name} must be a dict of entries and values, got {_short(given)}.')
    folder = Path(os.path.expanduser(folder))
    if os.path.lexists(folder):
        raise ValueError(f'{folder} exists. Name a folder that does not.')
    model = unwrap_model(model)
    if not all(value.is_contiguous() for value in model.state_dict().values() if isinstance(value, torch.Tensor)):
        raise ValueError(
            'The model is in a memory format that files do not have (channels_last?). Save '
            'model.to(memory_format=torch.contiguous_format).')
    now = get_model_input_config(model)
    has_size = getattr(model, '_model_args', {}).get('img_size') is not None
    if has_size and not now['fixed_input_size'] and not {'img_size', 'input_size'} & (data_config or {}).keys():
        # timm would record the architecture's usual size for a model that takes any
        data_config = {**(data_config or {}), 'input_size': now['input_size']}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix='.saving-') as scratch:
        staged = Path(scratch, folder.name)
        try:
            save_for_hf(
                model, staged, model_config=model_config, data_config=data_config, safe_serialization=True)
        except OSError:
            raise
        except Exception as e:  # models that timm has not made fail in many ways
            fix = " E.g. act_layer by its name: model_config={'model_args': {'act_layer': 'relu'}}."
            raise ValueError(
                f'The model cannot be saved as timm saves those that timm.create_model makes: {described(e)}'
                f'{fix if "not serializable" in str(e) else ""}') from e
        config = json.loads((staged / CONFIG_NAME).read_text())
        # timm reads it at the root of the config; with this one, transformers would pass it to create_model twice
        config['model_args'].pop('num_classes', None)
        config['timm_sape'] = {'version': __version__, 'sha256': _sha256(staged / HF_SAFE_WEIGHTS_NAME)}
        (staged / CONFIG_NAME).write_text(json.dumps(config, indent=2))
        read_config(str(folder), staged / CONFIG_NAME)
        _check_label_names(config)
        _refuse_other_logits(model, staged, config['pretrained_cfg']['input_size'])

        source = f'hf-hub:{repo_id}' if repo_id else f'local-dir:{folder.name}'
        given = {'Recipe': recipe, 'Data': data, 'Results': results}
        card = _card(model, config, source, {k: v for k, v in given.items() if v is not None})
        readme = generate_readme({**card, **(model_card or {})}, source.split('/')[-1].removeprefix('local-dir:'))
        (staged / 'README.md').write_text(readme, encoding='utf-8')
        staged.rename(folder)


def load(
        repo_id: Union[str, Path],
        *,
        revision: Optional[str] = None,
        token: Optional[str] = None,
        cache_dir: Union[None, str, Path] = None,
        **kwargs,
) -> nn.Module:
    """Load a model from a folder or from the Hub, with checks.

    Like `timm.create_model('hf-hub:...', pretrained=True)`, but only safetensors are read, and only if they have the
    checksum that the Hub and config.json say. No code of the repository is executed. A damaged file is removed from the
    cache, so that the next call downloads it again. Errors are one line.

    If a value in config.json was changed to another valid one, such as another activation, the model is another one. No
    check can see that.

    Args:
        repo_id: A folder that `save` has written, as a path, a string, or with `local-dir:`; or a repository,
            `OWNER/NAME`, with or without `@REVISION`. If there is a folder of that name too, `hf-hub:OWNER/NAME`.
        revision: Branch, tag, or commit hash of a repository.
        token: Of an account that may read it. Default: the one in `HF_TOKEN` or of `hf auth login`.
        cache_dir: Folder for downloads. Default: that of huggingface_hub.
        kwargs: Passed to `timm.create_model`: `num_classes`, `img_size` ...

    Raises:
        ValueError: If there is no such repository, the token is refused, or a file is missing, damaged or wrong, was
            written by a newer version of this package, or names an encoding that is not registered.
        ConnectionError: If the Hub cannot be reached, or the connection breaks off.
        OSError: If the disk is full.
    """
    named = os.fspath(repo_id)
    folder = Path(os.path.expanduser(named.removeprefix('local-dir:')))
    is_folder = named.startswith('local-dir:') or not named.startswith('hf-hub:') and folder.is_dir()
    if is_folder or isinstance(repo_id, Path):
        where = str(folder)
        if revision is not None:
            raise ValueError(f'{where} is a folder and has no revision {revision!r}. Write hf-hub:{where} for the Hub.')
        config = read_config(where, _in_folder(folder, CONFIG_NAME))
        _in_folder(folder, HF_SAFE_WEIGHTS_NAME, config.get('timm_sape', {}).get('sha256'))
    else:
        where, _, at = named.removeprefix('hf-hub:').partition('@')
        if not named.startswith('hf-hub:') and Path(where).is_file():
            raise ValueError(
                f'{where!r} is a file. Create the model with checkpoint_path={where!r}, then timm_sape.hub.save it.')
        if '/' not in where:
            raise ValueError(f'{where!r} is neither an existing folder nor OWNER/NAME of a repository.')
        if at and revision not in (None, at):
            raise ValueError(f'{where}@{at} and revision={revision!r} are two revisions. Give one.')

        def download(name: str, revision: Optional[str], sha256: Optional[str] = None) -> Path:
            with _plain_errors(where, revision, name, unreachable):
                file = hf_hub_download(
                    where, name, revision=revision, token=token, cache_dir=cache_dir,
                    local_files_only=unreachable is not None, **_library())
            _refuse_damage(where, Path(file), sha256)
            return Path(file)

        unreachable = why_unreachable()
        file = download(CONFIG_NAME, at or revision)
        config = read_config(where, file)
        folder = file.parent  # named by the hash of the commit, so the weights come from the same one
        download(HF_SAFE_WEIGHTS_NAME, folder.name, config.get('timm_sape', {}).get('sha256'))
    _refuse_misfit(where, folder, config)
    try:
        return timm.create_model(f'local-dir:{folder}', pretrained=True, **kwargs)
    except OSError:
        raise
    except Exception as e:  # timm does not check the values in a config
        culprit = _culprit(config, folder)
        fix = f'. {AGAIN}' if culprit or not kwargs else ''
        raise ValueError(f'{where}: {culprit}{described(e).rstrip(".")}{fix}') from e


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
        entries = dict(_entries(config))
    except RecursionError as e:
        raise ValueError(f'{where}: {CONFIG_NAME} is nested too deeply, at {e}.') from None
    version = entries.get('timm_sape.version')
    if isinstance(version, str) and _release(version) > _release(__version__):
        raise ValueError(
            f'{where} was written by timm-sape {version}, newer than {__version__}, which is installed: '
            'pip install -U timm-sape.')
    for path, (is_right, what) in FIELDS.items():
        if path in entries and not is_right(entries[path]):
            raise ValueError(f'{where}: {path or "all"} of {CONFIG_NAME} must be {what}, not {_short(entries[path])}.')
    for path in ('architecture', *(['pretrained_cfg'] if 'model_args' in config else [])):  # old timm wrote neither
        if path not in config:
            raise ValueError(f'{where}: {CONFIG_NAME} has no {path}. {AGAIN}')
    for path, value in entries.items():
        is_wrong = isinstance(value, int) and abs(value) > MAX_INTEGER or (
            isinstance(value, float) and not math.isfinite(value))
        if path.startswith('model_args.') and is_wrong:
            raise ValueError(f'{where}: {path} of {CONFIG_NAME} is {_short(value)}, which no model has. {AGAIN}')
    architecture, args = config['architecture'], config.get('model_args', {})
    if not timm.is_model(architecture):
        raise ValueError(
            f'{where} is a {_short(architecture)}, which neither timm {timm.__version__} nor timm-sape '
            f'{__version__} knows. If another package registers it, import that first.')
    try:
        if args.get('pos_enc') is not None:
            parse_pos_enc(args['pos_enc'], args.get('pos_enc_kwargs'))
    except Exception as e:  # encodings of others check their keywords as they like
        raise ValueError(
            f'{where}: timm-sape {__version__} cannot make its position encoding. ({described(e)})') from e
    return config


def _check_label_names(config: Dict[str, Any]) -> None:
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
        raise ValueError(f'label_names must be {num_classes} strings, one for each class, got {_short(names)}.')
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:  # as of ImageNet's English names
        raise ValueError(
            f'label_names has {twice[0]!r} twice. Give each class a name of its own, such as that of its folder, and '
            'what people read as label_descriptions={name: text}.')


def _entries(value: Any, path: str = '', level: int = 0) -> Iterator[Tuple[str, Any]]:
    """All values of a config by their path, `'model_args.img_size.0'`; a RecursionError with the path if it is deep."""
    if level > MAX_LEVELS:
        raise RecursionError(path)
    yield path, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from _entries(item, f'{path}.{key}' if path else str(key), level + 1)


def _in_folder(folder: Path, name: str, sha256: Optional[str] = None) -> Path:
    """A file of a saved model.

    Raises:
        ValueError: If it is missing, or its content has another hash.
    """
    file = folder / name
    if not file.is_file():
        raise ValueError(
            f'{folder} has no {name}.{_no_pickles(name)}' if folder.is_dir() else f'There is no folder {folder}.')
    if sha256 not in (None, _sha256(file)):
        raise ValueError(
            f'{folder}: {name} is not what {CONFIG_NAME} says it is, by its checksum: it was cut off, damaged or '
            'replaced. Copy the folder again.')
    return file


def _no_pickles(name: str) -> str:
    if name != HF_SAFE_WEIGHTS_NAME:
        return ''
    return (
        ' Pickles, which can execute code, are not read. Save the model by timm_sape.hub, or by timm with '
        'safe_serialization=True.')


class _TooLarge(Exception):
    """A config describes a far larger model than the weights are of."""


def _refuse_misfit(where: str, folder: Path, config: Dict[str, Any]) -> None:
    """Refuse a config that does not fit the weights, before a model of that size is built.

    Raises:
        ValueError: If the weights cannot be read, have other classes or shapes, or are far fewer than the model has.
    """
    try:
        shapes = _shapes(folder)
    except Exception as e:  # safetensors has errors of its own
        raise ValueError(
            f'{where}: Cannot read the checkpoint {HF_SAFE_WEIGHTS_NAME}. Is it cut off? ({described(e)}) '
            f'{AGAIN}') from e
    cfg = config.get('pretrained_cfg', config)
    num_classes, offset, heads = config.get('num_classes'), cfg.get('label_offset') or 0, cfg.get('classifier') or ()
    for head in [heads] if isinstance(heads, str) else heads:
        rows = shapes.get(f'{head}.weight', [])[:1]
        if num_classes is not None and rows and rows[0] != num_classes + offset:
            raise ValueError(
                f'{where}: {CONFIG_NAME} has num_classes={num_classes} and label_offset={offset}, but '
                f'{HF_SAFE_WEIGHTS_NAME} has {rows[0]} classes. {AGAIN}')
    try:
        other = _other_shape(config, folder)
    except _TooLarge as e:
        numbers = {
            path: value for path, value in _entries(config.get('model_args', {}), 'model_args') if is_integer(value, 1)}
        largest = max(numbers, key=numbers.get, default=None)
        hint = f' Its largest number is {largest}={numbers[largest]}.' if numbers else ''
        raise ValueError(
            f'{where}: {CONFIG_NAME} describes a model far larger than {HF_SAFE_WEIGHTS_NAME}.{hint} {AGAIN}') from e
    except Exception:  # load says what is wrong, if it cannot build the model either
        return
    if other:
        culprit = _culprit(config, folder)
        raise ValueError(
            f'{where}: {culprit}{CONFIG_NAME} describes another model than {HF_SAFE_WEIGHTS_NAME}: {other}. '
            f'{AGAIN}')


def _shapes(folder: Path) -> Dict[str, List[int]]:
    with safe_open(folder / HF_SAFE_WEIGHTS_NAME, framework='pt') as weights:
        return {name: weights.get_slice(name).get_shape() for name in weights.keys()}


def _other_shape(config: Dict[str, Any], folder: Path) -> str:
    """An entry of the weights that has another shape in the model of the config, in words; empty if there is none.

    The model is built on the meta device, where numbers take no memory.

    Raises:
        _TooLarge: As soon as the model has many more tensors than the weights, or more numbers than these have bytes
            (and than fit into 1 GB). Even on the meta device a million layers would take an hour.
    """
    shapes = _shapes(folder)
    numbers = max((folder / HF_SAFE_WEIGHTS_NAME).stat().st_size, 2 ** 28)
    tensors = 4 * len(shapes) + 1000
    thread = threading.get_ident()  # the hooks see the models of all threads

    def count(module: nn.Module, name: str, tensor: Optional[torch.Tensor]) -> None:
        nonlocal numbers, tensors
        if threading.get_ident() == thread and tensor is not None:
            numbers -= tensor.numel()
            tensors -= 1
            if min(numbers, tensors) < 0:
                raise _TooLarge

    with ExitStack() as stack:
        for register in (register_module_parameter_registration_hook, register_module_buffer_registration_hook):
            stack.callback(register(count).remove)
        scratch = stack.enter_context(TemporaryDirectory())
        Path(scratch, CONFIG_NAME).write_text(json.dumps(config))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.device('meta'))
        state = timm.create_model(f'local-dir:{scratch}').state_dict()
    if 'sha256' not in config.get('timm_sape', {}):
        return ''  # weights that stock timm has written may be converted as they are loaded
    other = [name for name, shape in shapes.items() if name in state and list(state[name].shape) != shape]
    return f'{other[0]} is {list(state[other[0]].shape)}, not {shapes[other[0]]}' if other else ''


def _culprit(config: Dict[str, Any], folder: Path) -> str:
    """The entry that is to blame, in words: without it the config makes a model, or one that fits. Empty if unknown."""
    def rank(config: Dict[str, Any]) -> int:
        try:
            return 1 if _other_shape(config, folder) else 0
        except Exception:  # timm has many
            return 2

    found = rank(config)
    for section in ('model_args', 'pretrained_cfg') if found else ():
        for name, value in config.get(section, {}).items():
            others = {key: item for key, item in config[section].items() if key != name}
            if rank({**config, section: others}) < found:
                return f'{section}.{name} of {CONFIG_NAME} is {_short(value)}. '
    return ''


def why_unreachable() -> Optional[Exception]:
    """Why the Hub does not answer. None if it does.

    huggingface_hub asks seven times for a file that is not in the cache, with 23 seconds of pauses. This asks once.
    """
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as e:  # its type depends on the HTTP client
        return e
    return None


def _library() -> Dict[str, str]:
    return {'library_name': 'timm-sape', 'library_version': __version__}


def _release(version: str) -> Tuple[int, ...]:
    """Major and minor version; empty if there are none."""
    match = re.match(r'(\d+)\.(\d+)', version)
    return tuple(map(int, match.groups())) if match else ()


def _sha256(file: Path) -> str:
    with file.open('rb') as f:
        return sha_fileobj(f).hex()


def described(error: BaseException) -> str:
    """An error in one line that is not too long. It names the type, unless the message is meant for users."""
    text = ' '.join(str(error).split())
    return _cut(text if type(error) is ValueError else f'{type(error).__name__}: {text}', 500)


def _short(value: Any) -> str:
    return _cut(repr(value), 60)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f'{text[:most]} ...'


@torch.no_grad()
def _refuse_other_logits(model: nn.Module, folder: Path, input_size: Sequence[int]) -> None:
    """Load a saved model back, with the device and dtype of the original, and compare the two.

    Args:
        model: The original.
        folder: Where it has been saved.
        input_size: (channels, height, width) of images.

    Raises:
        ValueError: If it cannot be loaded, or if an entry of its state or a logit differs in any bit.
    """
    p = next(model.parameters())
    x = torch.randn(2, *input_size, generator=torch.Generator().manual_seed(0)).to(p)
    modes = [(module, module.training) for module in model.modules()]
    try:
        logits = model.eval()(x)
    finally:
        for module, mode in modes:
            module.training = mode
    if not logits.isfinite().all():
        raise ValueError('Not saved, since its logits for random images are not finite. Has it diverged?')

    try:
        with torch.random.fork_rng(devices=[]):  # saving in the middle of a training must not change the training
            loaded = timm.create_model(f'local-dir:{folder}', pretrained=True)
    except Exception as e:
        raise ValueError(f'Not saved, since it could not be loaded back: {described(e)}') from e
    loaded.to(device=p.device, dtype=p.dtype).eval()
    state = model.state_dict()
    changed = [name for name, value in loaded.state_dict().items() if not torch.equal(value, state[name])]
    if changed:
        dtype = torch.get_default_dtype()
        raise ValueError(
            f'Not saved, since {len(changed)} entries such as {changed[0]} have other values when it is loaded back in '
            f'{dtype}, the default: convert it first, model.to({dtype}).')
    for own, other in zip(model.modules(), loaded.modules()):
        if hasattr(own, 'fused_attn'):  # how attention is computed is not saved: exportable=True, set_fused_attn
            other.fused_attn = own.fused_attn
    again = loaded(x)
    if not torch.equal(again, logits):
        raise ValueError(
            f'Not saved, since its logits differ by up to {(again - logits).abs().max():.2g} when it is loaded back. '
            'Something was changed after timm.create_model that is no parameter: give it to create_model instead. '
            'Or an encoding draws numbers that it does not save: make them a parameter or a persistent buffer.')


def _card(model: nn.Module, config: Dict[str, Any], source: str, given: Dict[str, Any]) -> Dict[str, Any]:
    """The entries that timm makes a card of.

    Args:
        model: The model.
        config: Its config.json.
        source: The name by which `timm.create_model` loads it.
        given: What the user says about it.
    """
    args, cfg = config['model_args'], config['pretrained_cfg']
    details = {
        'Architecture': f'`{config["architecture"]}`',
        'Parameters': f'{sum(p.numel() for p in model.parameters()):,}',
        'Image size': '{} x {}, {} channels'.format(
            *to_2tuple(args.get('img_size') or cfg['input_size'][1:]), cfg['input_size'][0]),
        'Classes': config['num_classes'],
    }
    if 'pos_enc' in args:
        parts = parse_pos_enc(args['pos_enc'], args.get('pos_enc_kwargs'))
        papers = {name: get_encoding(name).paper for name in parts}
        details['Position encoding'] = [
            f'`{name}`' + (f' {keywords}' if keywords else '') + (f', {papers[name]}' if papers[name] else '')
            for name, keywords in parts.items()]
    details.update(given)
    details['Arguments'] = f'`{json.dumps(args)}`'
    details['Written by'] = f'timm-sape {__version__}, timm {timm.__version__}, torch {torch.__version__}'
    encoding = f' with the position encoding `{args["pos_enc"]}`' if 'pos_enc' in args else ''
    is_stock = model_entrypoint(config['architecture']).__module__.startswith('timm.models.')
    needs = '' if is_stock else ' It needs the package timm-sape, whose import registers it with timm.'
    return {
        'tags': ['image-classification', 'timm', 'transformers', *(() if is_stock else ('timm-sape',))],
        'license': cfg.get('license', 'unknown'),
        'description': f'A model for images{encoding}.{needs}',
        'details': details,
        'usage': USAGE.format(source=source, imports='' if is_stock else IMPORT),
    }


IMPORT = 'import timm_sape  # registers the model: without it, timm says "Unknown model"\n'
USAGE = """```python
import timm
{imports}
model = timm.create_model({source!r}, pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
```"""


def _refuse_damage(repo_id: str, file: Path, sha256: Optional[str]) -> None:
    """Remove a damaged file from the cache.

    Args:
        repo_id: For the message.
        file: In the cache, a link to a file whose name is its hash on the Hub: SHA-256, or git's for small files.
            Where there are no links, the file itself, whose hash is not known.
        sha256: The hash in config.json, if it has one.

    Raises:
        ValueError: If its content has another hash.
    """
    link = os.readlink(file) if file.is_symlink() else file.name
    by_the_hub = os.path.basename(link)
    try:
        found = _sha256(file)
        if re.fullmatch('[0-9a-f]{40}', by_the_hub):
            damaged = by_the_hub != git_hash(file.read_bytes())
        else:
            damaged = re.fullmatch('[0-9a-f]{64}', by_the_hub) and by_the_hub != found
    except FileNotFoundError:  # another process shares the cache and has just removed the file, as is done below
        found, damaged = '', True
    if damaged or sha256 not in (None, found):
        for path in (file.parent / link, file) if found else ():
            path.unlink(missing_ok=True)
        raise ValueError(
            f'{repo_id}: {file.name} is not what {"the Hub" if damaged else CONFIG_NAME} says it is, by its checksum: '
            'it was cut off, damaged or replaced. It was removed from the cache. Try again; if that does not help, ask '
            'the owner to push the model again.')


@contextmanager
def _plain_errors(
        repo_id: str,
        revision: Optional[str],
        name: str = 'the model',
        unreachable: Optional[Exception] = None,
) -> Iterator[None]:
    """Turn the many errors of huggingface_hub and its HTTP client into one line.

    Args:
        repo_id: The repository.
        revision: Its revision.
        name: The file to download.
        unreachable: Why the Hub does not answer.
    """
    try:
        yield
    except Exception as e:  # versions of huggingface_hub have different HTTP clients, without a common class of errors
        status = getattr(getattr(e, 'response', None), 'status_code', None)
        if isinstance(e, LocalEntryNotFoundError):  # first, as it is a subclass of EntryNotFoundError
            error = ConnectionError(
                f'{constants.ENDPOINT} cannot be reached ({described(unreachable or e.__cause__ or e)}), and {name} '
                f'of {repo_id} is not in the cache.')
        elif isinstance(e, GatedRepoError):
            error = ValueError(f'{repo_id} is gated: ask for access on its page, and give a token of that account.')
        elif isinstance(e, RepositoryNotFoundError):
            error = ValueError(
                f'There is no repository {repo_id!r} at {constants.ENDPOINT}, or it is private and no token of an '
                'account that may see it was given (token=, HF_TOKEN, `hf auth login`).')
        elif isinstance(e, RevisionNotFoundError):
            error = ValueError(f'{repo_id} has no revision {revision!r}.')
        elif isinstance(e, EntryNotFoundError):
            error = ValueError(f'{repo_id} has no {name}.{_no_pickles(name)}')
        elif isinstance(e, HFValidationError):
            error = ValueError(f'{repo_id!r} is neither an existing folder nor OWNER/NAME of a repository.')
        elif status == 401:
            error = ValueError(
                f'{constants.ENDPOINT} does not accept the token (token=, HF_TOKEN, `hf auth login`): is it whole, and '
                'still valid?')
        elif status == 403:
            error = ValueError(f'The account of the token has no permission for this in {repo_id}.')
        elif getattr(e, 'errno', None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error = OSError(
                e.errno, f'The disk is full, or a limit for files is reached: no room for {name} of {repo_id}. Make '
                'room, or choose another disk by HF_HOME or cache_dir=')
        elif isinstance(e, (ValueError, TypeError)) or getattr(e, 'errno', None) is not None:
            raise
        else:
            reason = f'{type(e).__name__}: {str(e).strip()}'.splitlines()[0]  # the other lines are advice for others
            error = ConnectionError(
                f'The connection to {constants.ENDPOINT} failed ({reason}). Incomplete files are not used; try again.')
        raise error from e
