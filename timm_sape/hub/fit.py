"""Does config.json describe the model that the weights are of?"""
import json
import threading
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Dict, List, Optional

import timm
import torch
import torch.nn as nn
from safetensors import safe_open
from timm.models._hub import HF_SAFE_WEIGHTS_NAME
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from ..checks import is_integer
from .config import CONFIG_NAME, entries_of
from .errors import AGAIN, described, short


class _TooLarge(Exception):
    """A config describes a far larger model than the weights are of."""


def refuse_misfit(where: str, folder: Path, config: Dict[str, Any]) -> None:
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
        entries = entries_of(config.get('model_args', {}), 'model_args')
        numbers = {path: value for path, value in entries if is_integer(value, 1)}
        largest = max(numbers, key=numbers.get, default=None)
        hint = f' Its largest number is {largest}={numbers[largest]}.' if numbers else ''
        raise ValueError(
            f'{where}: {CONFIG_NAME} describes a model far larger than {HF_SAFE_WEIGHTS_NAME}.{hint} {AGAIN}') from e
    except Exception:  # load says what is wrong, if it cannot build the model either
        return
    if other:
        culprit = wrong_entry(config, folder)
        raise ValueError(
            f'{where}: {culprit}{CONFIG_NAME} describes another model than {HF_SAFE_WEIGHTS_NAME}: {other}. '
            f'{AGAIN}')


def wrong_entry(config: Dict[str, Any], folder: Path) -> str:
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
                return f'{section}.{name} of {CONFIG_NAME} is {short(value)}. '
    return ''


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
