"""The names of encodings, and the classes behind them."""
import difflib
import fnmatch
import functools
import inspect
import re
from contextlib import nullcontext
from typing import Any, Callable, Dict, List, Sequence, Type, TypeVar

import torch.nn as nn

from ...checks import is_number
from ..base import AUTO, PositionEncoding, RotaryEncoding
from .class_checks import HOST_KEYWORDS, check_class, is_built_in
from .instance_checks import MarkUnset, check_instance

EncodingT = TypeVar('EncodingT', bound=PositionEncoding)

_encodings: Dict[str, Type[PositionEncoding]] = {}
_aliases: Dict[str, str] = {}

# Attributes of the modules that hold encodings by name, `SharedEncodings` and `LayerEncodings`
RESERVED = {
    *dir(nn.ModuleDict), 'act_on_blocks', 'acting_on', 'add_after', 'add_before', 'embed', 'layer', 'logit_scaling',
    'logits', 'needs_position', 'position', 'rotate_half', 'terms', 'training'}


def register_encoding(name: str, *, aliases: Sequence[str] = ()) -> Callable[[Type[EncodingT]], Type[EncodingT]]:
    """Class decorator that registers an encoding, in this package or any other.

    The first line of the class's docstring is its full name, shown by `timm-sape list`. Descriptions of inherited
    keywords are copied from the docstrings of its bases into its own, so that `help` describes all keywords.

    Args:
        name: What users type: lowercase letters, digits and `_`.
        aliases: Other names for it. Models are always saved with `name`.

    Raises:
        ValueError: If a name is taken or malformed, the class is not a `PositionEncoding`, it lacks a method, a method
            looks like a misspelled hook, a hook or the constructor does not take what the model passes, a keyword is
            called `init`, it asks for what the model does not have, it has another name already, or its `per_layer`
            does not fit its hooks. It must be False for `mix`, `layer_embed` and an `embed` that asks for something,
            and True for hooks that get q, k or probabilities.
    """
    if not isinstance(name, str):
        raise ValueError("Write @register_encoding('name'), with the name of the encoding.")

    def register(cls: Type[EncodingT]) -> Type[EncodingT]:
        if not (isinstance(cls, type) and issubclass(cls, PositionEncoding)):
            raise ValueError(f'Encoding {name!r}: {cls!r} is not a subclass of timm_sape.PositionEncoding.')
        check_class(name, cls)
        if cls.name != name and _encodings.get(cls.name) is cls:
            raise ValueError(
                f'Encoding {name!r}: {cls.__name__} is registered as {cls.name!r} already. For a second name write '
                f'@register_encoding({cls.name!r}, aliases=[{name!r}]), or register a subclass.')
        if isinstance(aliases, str):
            raise ValueError(f'Encoding {name!r}: aliases must be a sequence of names, got the string {aliases!r}.')
        names = [name, *aliases]
        for new in names:
            if not isinstance(new, str) or not re.fullmatch(r'[a-z][a-z0-9_]*', new):
                raise ValueError(f'Encoding name {new!r}: use lowercase letters, digits and underscores.')
            if new in RESERVED:
                raise ValueError(
                    f'Encoding name {new!r}: it would hide an attribute of the modules that hold encodings. Choose '
                    'another name.')
            if new.startswith(AUTO):
                raise ValueError(
                    f'Encoding name {new!r}: the prefix {AUTO!r} is reserved for gated encodings. Leave it out.')
            if names.count(new) > 1:
                raise ValueError(f'Encoding {name!r}: {new!r} is given more than once.')
            if new in _encodings or new in _aliases:
                owner = _encodings[_aliases.get(new, new)]
                if (owner.__module__, owner.__qualname__) == (cls.__module__, cls.__qualname__):
                    continue  # the same class again, as when a cell of a notebook is run twice
                raise ValueError(
                    f'Encoding {new!r} is already registered, by {owner.__module__}.{owner.__qualname__}. '
                    'Choose another name.')
        if 'init' in _class_keywords(cls):
            raise ValueError(
                f"Encoding {name!r}: the keyword 'init' is the initial value of the gate of 'auto_{name}'. Choose "
                'another name for yours.')
        cls.name = name
        _describe_inherited_keywords(cls)
        for old in [*names, *(alias for alias, of in _aliases.items() if of == name)]:  # of the same class, run before
            _encodings.pop(old, None)
            _aliases.pop(old, None)
        _encodings[name] = cls
        _aliases.update({alias: name for alias in aliases})
        return cls

    return register


def _describe_inherited_keywords(cls: Type[PositionEncoding]) -> None:
    """If the class has a docstring, add the descriptions of inherited keywords from the docstrings of its bases."""
    doc, inherited = inspect.cleandoc(cls.__doc__ or ''), []
    for keyword in _class_keywords(cls):
        entry = re.compile(rf'^    {keyword}: .*(?:\n {{8}}.*)*', re.MULTILINE)
        if not entry.search(doc):
            found = (entry.search(inspect.cleandoc(base.__doc__ or '')) for base in cls.__mro__[1:])
            inherited += [match[0] for match in found if match][:1]
    if doc and inherited:
        cls.__doc__ = '\n'.join([doc, '', 'Inherited keywords:', *inherited])


def list_encodings(filter: str = '', *, aliases: bool = False) -> List[str]:
    """Sorted names of all encodings.

    Args:
        filter: Wildcard pattern, e.g. `'sape2*'`.
        aliases: Also list aliases, such as `sape2` for `sape2_k`.
    """
    names = sorted([*_encodings, *_aliases] if aliases else _encodings)
    return fnmatch.filter(names, filter) if filter else names


def encoding_title(name: str) -> str:
    """The full name of an encoding, `'Axial 2-D rotary (RoPE-Axial)'`; empty if its class has no docstring."""
    return (get_encoding(name).__doc__ or '').partition('\n')[0].removesuffix('.')


def is_auto(name: str) -> bool:
    """Whether a name is that of a gated encoding, such as `auto_rope2d`."""
    return name.startswith(AUTO)


def resolve(name: str) -> str:
    """The canonical name for a name or alias. A prefix `auto_` is kept.

    Raises:
        ValueError: If the name is no string, unknown, or starts with `auto_` and the encoding cannot be gated.
    """
    if not isinstance(name, str):
        raise ValueError(f"The name of an encoding is a string such as 'rope2d', got {name!r}.")
    plain = name.removeprefix(AUTO)
    plain = _aliases.get(plain, plain)
    if plain not in _encodings:
        prefix = AUTO if is_auto(name) else ''
        close = [prefix + other for other in difflib.get_close_matches(plain.lower(), list_encodings(aliases=True))]
        if re.search(r'[\s,;/&|]', name):
            raise ValueError(f"Unknown position encoding {name!r}. Join names with '+', e.g. 'ape+sape2_k'.")
        own = 'If it is your own, import its module first; on the command line: timm-sape COMMAND --import MODULE.'
        hint = f'Did you mean {" or ".join(map(repr, close))}? {own}' if close else (
            f'{own} Known: {", ".join(list_encodings())}.')
        raise ValueError(f'Unknown position encoding {name!r}. {hint}')
    if not is_auto(name):
        return plain
    cls = _encodings[plain]
    if cls.gate_init is None:
        raise ValueError(f'{name!r}: {plain!r} has no neutral form, so it cannot have a gate. Leave auto_ out.')
    if cls.overrides('rotation') and not issubclass(cls, RotaryEncoding):
        raise ValueError(
            f'{name!r}: the gate of a rotation multiplies its angles. Derive {cls.__name__} from RotaryEncoding.')
    return AUTO + plain


def get_encoding(name: str) -> Type[PositionEncoding]:
    """The class registered under a name. `auto_<name>` has the same class as `<name>`.

    Raises:
        ValueError: If the name is unknown, or starts with `auto_` and the encoding cannot be gated.
    """
    return _encodings[resolve(name).removeprefix(AUTO)]


def is_per_layer(name: str) -> bool:
    """Whether each attention layer has an instance of its own. Every gated rotation does, to have a gate per layer."""
    cls = get_encoding(name)
    return cls.per_layer or is_auto(name) and cls.overrides('rotation')


def create_encoding(name: str, **kwargs) -> PositionEncoding:
    """Build one encoding.

    Args:
        name: Name of the encoding, with the prefix `auto_` for one with a learned gate.
        kwargs: What the model passes (`dim`, `num_heads`, `grid_size`, ..., see `PositionEncoding`), `device`, `dtype`,
            and the encoding's own keywords. A gated encoding also takes `init`, the initial value of its gate.

    Raises:
        ValueError: If the name, a keyword or a value is not accepted.
    """
    check_keywords(name, kwargs.keys() - (HOST_KEYWORDS - {'gate'}))  # `auto_` sets the gate, not the caller
    cls = get_encoding(name)
    if is_auto(name):
        init = kwargs.pop('init', cls.gate_init)
        if not is_number(init):
            raise ValueError(f'{name!r}: init must be a finite number, got {init!r}.')
        if cls.gate_init == 1 and init == 0:
            raise ValueError(
                f'{name!r}: init=0 on parameters that start at 0 would never learn. Leave it out: with the default of '
                '1 the encoding does nothing at the start anyway.')
        kwargs['gate'] = init
    with nullcontext() if is_built_in(cls) else MarkUnset():
        encoding = cls(**kwargs)
    check_instance(name, encoding, kwargs.get('gate'))
    return encoding


def encoding_keywords(name: str) -> Dict[str, Any]:
    """Default values of the keywords that an encoding accepts."""
    cls = get_encoding(name)
    defaults = {'init': cls.gate_init} if is_auto(name) else {}
    return {**defaults, **_class_keywords(cls)}


@functools.cache  # without it, reading signatures takes half the time of building a small model
def _class_keywords(base: Type[PositionEncoding]) -> Dict[str, Any]:
    defaults: Dict[str, Any] = {}
    for cls in reversed(base.__mro__):
        if issubclass(cls, PositionEncoding):
            parameters = inspect.signature(cls.__init__).parameters.values()
            defaults.update({p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY})
    return {keyword: value for keyword, value in defaults.items() if keyword not in HOST_KEYWORDS}


def check_keywords(name: str, keywords) -> None:
    accepted = encoding_keywords(name)
    for keyword in sorted(set(keywords) - accepted.keys()):
        has = f'It accepts: {", ".join(sorted(accepted))}.' if accepted else 'It accepts no keywords.'
        if keyword == 'resolution':
            has = f'It has one rule for other sizes, so leave that out. {has}'
        raise ValueError(f'Position encoding {name!r} has no keyword {keyword!r}. {has}')
