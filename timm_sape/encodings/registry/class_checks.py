"""What is checked in the class of an encoding when it is registered, so that a slip in it is not silent."""
import difflib
import inspect
from typing import Callable, Type

import torch

from .. import base as base_classes
from ..base import PositionEncoding

GIVEN = 'pos_embed', 'images', 'patch_size', 'object_index'  # what hosts give to `SharedEncodings`
HOST_KEYWORDS = set(inspect.signature(PositionEncoding.__init__).parameters) - {'self'}  # set by the model, not users


def check_class(name: str, cls: Type[PositionEncoding]) -> None:
    """Refuse a class that would do nothing, could not be created, or asks for what its hooks do not get.

    Raises:
        ValueError: With what to write instead.
    """
    for per_layer, hooks in (
            (False, ('mix', 'layer_embed')),
            (True, ('turn', 'content_bias', 'attend', 'channels', 'values'))):
        for hook in hooks:
            if cls.overrides(hook) and cls.per_layer is not per_layer:
                raise ValueError(
                    f'Encoding {name!r} overrides {hook!r}, so its class must set per_layer = {per_layer}.')
    asked = cls.asks_for
    is_known = isinstance(asked, (tuple, list)) and all(element in GIVEN for element in asked)
    if not is_known or asked and (cls.per_layer or not cls.overrides('embed')):
        raise ValueError(
            f"Encoding {name!r}: asks_for is a tuple of some of {', '.join(map(repr, GIVEN))}, for an 'embed' with "
            f'per_layer = False. Its class has asks_for = {asked!r} and per_layer = {cls.per_layer}.')
    if cls.overrides('attend') and not cls.overrides('content_bias'):
        raise ValueError(
            f"Encoding {name!r} overrides 'attend', which only computes the bias of 'content_bias' in another way. "
            "Override 'content_bias' as well.")
    _check_methods(name, cls)
    missing = sorted(getattr(cls, '__abstractmethods__', ()))
    if missing:
        method = getattr(cls, missing[0])
        raise ValueError(
            f'Encoding {name!r}: {cls.__name__} must define {missing[0]}{inspect.signature(method)}: '
            f'{(inspect.getdoc(method) or "it is abstract.").splitlines()[0]}')


def _check_methods(name: str, cls: Type[PositionEncoding]) -> None:
    """Refuse a class that would do nothing, or could not be created, because of a slip."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith(f'{base_classes.__name__}.')]
    users = cls.__mro__[:cls.__mro__.index(bases[0])]
    own = {
        method for base in users for method, value in vars(base).items()
        if callable(value) and not method.startswith('_')} - set(dir(bases[0]))
    hooks = [*PositionEncoding.HOOKS, 'attend', 'logit_factor']
    for method in sorted(own):
        close = difflib.get_close_matches(method, hooks, n=1, cutoff=0.9)
        if close and _takes_arguments(getattr(cls, method)):
            raise ValueError(
                f'Encoding {name!r}: {cls.__name__} has a method {method!r}, which nothing calls. If it is meant to be '
                f'the hook {close[0]!r}, rename it; otherwise give it a name less like that.')
    scales = any('logit_factor' in vars(base) and not is_built_in(base) for base in users)
    if not cls.acts_on() and not scales and (own or any({'__init__', 'forward'} & vars(base).keys() for base in users)):
        hint = 'For a rotation derive it from RotaryEncoding, too.' if 'angles' in own else (
            f'The hooks are {", ".join(PositionEncoding.HOOKS)}: help(timm_sape.PositionEncoding).')
        raise ValueError(
            f'Encoding {name!r}: {cls.__name__} overrides no hook, so it would do nothing. {hint}')
    for hook in filter(cls.overrides, PositionEncoding.HOOKS):
        expected = inspect.signature(getattr(PositionEncoding, hook)).parameters.values()
        given = [parameter for parameter in expected if parameter.kind is not parameter.VAR_KEYWORD]
        tensors = [parameter for parameter in given if parameter.annotation is torch.Tensor]
        others = [parameter.name for parameter in given[1:] if parameter not in tensors]
        asked = cls.asks_for if hook == 'embed' else ()
        try:
            inspect.signature(getattr(cls, hook)).bind(cls, *tensors, **dict.fromkeys([*others, *asked]))
        except TypeError as e:
            raise ValueError(
                f'Encoding {name!r}: the model cannot call {cls.__name__}.{hook} ({e}). Write '
                f'def {hook}({", ".join([*(parameter.name for parameter in given), *asked])}).') from None
        try:
            inspect.signature(cls.forward).bind(
                cls, *tensors or [torch.Tensor], hook=hook, **dict.fromkeys([*others, *asked]))
        except TypeError as e:
            raise ValueError(
                f'Encoding {name!r}: the model cannot call {cls.__name__}.forward ({e}). It runs the hooks: leave it '
                'out, or write def forward(self, x, *tensors, hook, **given).') from None
    parameters = inspect.signature(cls.__init__).parameters.values()
    lacks = HOST_KEYWORDS - {parameter.name for parameter in parameters}
    if lacks and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise ValueError(
            f'Encoding {name!r}: the constructor of {cls.__name__} must take what the model passes, such as '
            f'{sorted(lacks)[0]}. Write def __init__(self, *, ..., **host), and pass it on: super().__init__(**host).')


def _takes_arguments(method: Callable) -> bool:
    """Whether it takes more than `self`, as every hook does."""
    try:
        inspect.signature(method).bind(None, None)
    except TypeError:
        return False
    return True


def is_built_in(cls: type) -> bool:
    """Whether it is a class of this package. Its own tests see to what is checked for others when they are built."""
    return cls.__module__.startswith('timm_sape.')
