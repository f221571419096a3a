"""Models by the names that users give: of timm, of a folder, of a checkpoint, of the Hub."""
import difflib
import math
import os
import threading
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, NamedTuple, Optional, Tuple, Union

import timm
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from timm.layers import to_2tuple
from timm.models import is_model_pretrained, load_state_dict
from timm.models._helpers import _torch_load
from timm.models._hub import load_model_config_from_path

from ..checkpoints import module_names, refuse_other_encoding
from ..encodings import list_encodings, merge_keywords
from ..entrypoints import SIZES
from ..host import PosEncModel
from ..hub.config import read_config
from ..hub.errors import described, why_unreachable
from .images import in_order, is_torchvision, read_class_map
from .preprocess import patch_ratio

__all__ = ['find_source', 'load_model', 'no_retries', 'why_unknown']

# The options of timm's train.py that preprocessing depends on. Its checkpoints contain all of them.
PREPROCESSING = ('mean', 'std', 'interpolation', 'crop_pct', 'crop_mode')


class Source(NamedTuple):
    """Where a model comes from: a name that timm knows, a file of weights, arguments and config."""
    name: str
    file: Optional[str]
    kwargs: Dict[str, Any]
    cfg: Dict[str, Any]
    trained: Optional[str] = None
    """The model whose weights are in the file, if the file says so. It has the same arguments."""
    class_map: str = ''
    """The file that numbered the classes in train.py."""

    @property
    def labelled_by(self) -> str:
        """The model whose `label_names` number the classes. Empty for train.py, which numbers them anew."""
        if 'label_names' in self.cfg:
            return ''
        in_folder = (self.trained or '').startswith('local-dir:')  # the file lies in the folder of a saved model
        return self.trained if in_folder else self.name


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
              classifier, neither has the model. If it lies in the folder of a saved model, images are prepared as for
              that one;
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
    source = find_source(model)
    if 'pos_enc_kwargs' in kwargs and kwargs.get('pos_enc') in (None, source.kwargs.get('pos_enc')):
        kwargs['pos_enc_kwargs'] = merge_keywords(source.kwargs.get('pos_enc_kwargs'), kwargs['pos_enc_kwargs'])
    kwargs = {**source.kwargs, **kwargs}
    if img_size is not None:
        kwargs['img_size'] = to_2tuple(img_size)
    if source.file is not None:
        try:
            weights = load_state_dict(source.file)
        except Exception as e:  # a file of another kind can raise anything
            raise ValueError(f'{source.file} has no weights that can be read safely: {described(e)}') from e
        overlay = dict(source.cfg)
        if source.class_map and os.path.isfile(source.class_map):  # it may be found only beside images
            overlay['label_names'] = in_order(read_class_map(source.class_map))
        if source.labelled_by not in ('', source.name):  # so that it stays so if it is saved
            labelled, *_ = load_model_config_from_path(source.labelled_by.removeprefix('local-dir:'))
            overlay['label_names'] = labelled.get('label_names')
        overlay.update(kwargs.get('pretrained_cfg_overlay') or {})
        overlay.update(file=source.file, source='', state_dict=None)  # else timm would prefer other weights
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
        with no_retries() if from_hub else nullcontext() as unreachable:
            found = timm.create_model(source.name, **kwargs).eval()
    except LocalEntryNotFoundError as e:
        others = '' if ':' in source.name else f' Write {model}@FILE for weights in a file, {model}@random for none.'
        raise ValueError(
            f'{model} is not in the cache, and {constants.ENDPOINT} cannot be reached '
            f'({described(unreachable or e)}).{others}') from e
    except (RuntimeError, TypeError, KeyError, AttributeError, AssertionError, OSError) as e:
        if isinstance(e, TypeError) and "unexpected keyword argument 'pos_enc" in str(e):
            raise ValueError(
                f'{model} has no choice of encodings. Name one of ours, such as vit_small_pos_enc@random; '
                'timm_sape.graft adds encodings to a ViT of timm.') from e
        raise ValueError(f'{model}: {described(e)}') from e
    if source.trained is not None and (source.trained != source.name or {'pos_enc', 'pos_enc_kwargs'} & kwargs.keys()):
        _refuse_other_encoding(found, source)
    return found


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
        f"It has no name of its own: timm.create_model('{size}_pos_enc', pos_enc={encoding!r}), or in the commands "
        f'map, probe and pshap {size}_pos_enc@random --pos-enc {encoding}.')


def find_source(model: str) -> Source:
    """Where a model comes from.

    Args:
        model: As for `load_model`.

    Raises:
        ValueError: If there is no such model.
    """
    path = Path(model)
    if model.startswith(('hf-hub:', 'hf_hub:')):
        return Source(model, None, {}, {})
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
        return Source(name, None, {'pretrained': False}, {})
    if at and not Path(file).is_file():
        raise ValueError(f'There is no file {file!r}.')
    return _from_checkpoint(file, name) if at else Source(name, None, {}, {})


def _read_config(folder: Path) -> Dict[str, Any]:
    if not folder.is_dir():
        raise ValueError(f'There is no folder {folder}.')
    if not (folder / 'config.json').is_file():
        raise ValueError(f'{folder} is a folder without config.json. {_checkpoint_hint(folder)}')
    return read_config(str(folder), folder / 'config.json')


def _checkpoint_hint(folder: Path) -> str:
    """Advice for a folder that is not a saved model. It may be one of train.py, with several checkpoints."""
    found = [path for name in ('model_best.pth.tar', 'last.pth.tar', '*.pth.tar') for path in sorted(folder.glob(name))]
    return f'Name a checkpoint in it: {found[0]}' if found else 'Name a folder that timm_sape.hub.save has written.'


def _from_checkpoint(file: str, name: Optional[str] = None) -> Source:
    """The arguments in a checkpoint of train.py, and its model's name if none is given."""
    checkpoint = None
    if not file.endswith('.safetensors'):
        try:
            checkpoint = _torch_load(file)
        except Exception as e:  # a file of another kind can raise anything
            raise ValueError(f'{file} is not a checkpoint that can be read safely: {described(e)}') from e
    checkpoint = checkpoint if isinstance(checkpoint, dict) else {}
    name = name or checkpoint.get('arch')
    if name is None:
        raise ValueError(f'{file} does not name its model. Write NAME@{file}, e.g. vit_small_sape2_k@{file}')
    if ':' not in name and not timm.is_model(name.split('.')[0]):
        raise ValueError(
            f'{file} is of {name!r}, which is not registered. If a module of yours does that, import it first; in a '
            'command by --import MODULE.')
    args = getattr(checkpoint.get('args'), '__dict__', {})
    kwargs = dict(args.get('model_kwargs') or {})
    for ours, theirs in (('num_classes', 'num_classes'), ('in_chans', 'in_chans'), ('global_pool', 'gp')):
        if args.get(theirs) is not None:
            kwargs[ours] = args[theirs]
    cfg = {key: args[key] for key in PREPROCESSING if args.get(key) not in (None, '')}  # train.py's default is ''
    if args.get('input_img_mode') not in (None, 'RGB', 'L'):
        warnings.warn(f'{file} was trained on images of mode {args["input_img_mode"]}. Here it gets them as RGB.')
    channels, *size = args.get('input_size') or (3,)
    size, made_for = size or args.get('img_size'), kwargs.get('img_size')
    if args.get('naflex_loader') or made_for and not size and 'img_size' in args:
        try:
            with torch.device('meta'):
                model = timm.create_model(name, **kwargs)
        except (RuntimeError, TypeError, OSError) as e:
            raise ValueError(f'{file}: {described(e)}') from e
        size = model.pretrained_cfg['input_size'][1:]  # train.py does not know what the model was made for
        if args.get('naflex_loader'):
            cfg['crop_pct'] = 1.0  # its loader shows whole images
            size = [side * math.isqrt(args['naflex_max_seq_len']) for side in patch_ratio(model, name)]
            last = not args.get('naflex_patchify_channels_first')
            if model.embeds.channels_last != last:  # the weights are for patches as they were shown
                kwargs['patchify_channels_last'] = last
    if made_for and size:
        kwargs['img_size'] = to_2tuple(size)  # if they differ, it takes images of any size
    if not args and name.startswith('local-dir:'):  # a bare file; train.py trains at the input_size of the folder
        # which for models that take any size is that of the architecture, as timm writes it
        made_for = _read_config(Path(name.removeprefix('local-dir:'))).get('model_args', {}).get('img_size')
        channels = (_pretrained_cfg(name).get('input_size') or (3,))[0]
    if made_for or size:  # the former decides about a learned table
        cfg['input_size'] = (args.get('in_chans') or channels, *to_2tuple(made_for or size))
    saved = _config_beside(Path(file))
    trained = checkpoint.get('arch') if saved is None else f'local-dir:{Path(file).parent}'
    cfg.update({key: saved[key] for key in PREPROCESSING if saved and saved.get(key) is not None})
    if args:  # whatever model train.py starts from, the outputs are those of its own classes
        cfg['label_names'] = cfg['label_descriptions'] = None
    # train.py ignores the class map of torchvision's data sets
    class_map = '' if is_torchvision(args.get('dataset') or '') else args.get('class_map') or ''
    return Source(name, file, kwargs, cfg, trained, class_map)


def _config_beside(file: Path) -> Optional[Mapping[str, Any]]:
    """The config that a model was saved with whose weights the file has. None if there is none that timm can read."""
    if file.name not in ('model.safetensors', 'pytorch_model.bin') or not (file.parent / 'config.json').is_file():
        return None
    try:
        return _pretrained_cfg(f'local-dir:{file.parent}') or {}
    except ValueError:  # of another library
        return None


def _pretrained_cfg(name: str) -> Mapping[str, Any]:
    """The pretrained config of a model, or of a folder; empty if timm has none."""
    if name.startswith('local-dir:'):
        config = _read_config(Path(name.removeprefix('local-dir:')))
        return config.get('pretrained_cfg', config)  # old timm wrote its entries directly
    try:
        cfg = timm.get_pretrained_cfg(name)
    except RuntimeError as e:  # it does not know the tag
        raise ValueError(f'{name}: {e}') from e
    return {} if cfg is None else vars(cfg)


def _refuse_other_encoding(model: torch.nn.Module, source: Source) -> None:
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


@contextmanager
def no_retries() -> Iterator[Optional[Exception]]:
    """If the Hub does not answer, have timm take files from the cache or fail at once. Gives the reason, or None.

    The switch is one for the whole process, as timm has no argument for it.
    """
    unreachable = why_unreachable()
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
