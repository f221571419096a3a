"""The names of encodings, and the parsing of strings such as `pos_enc='ape+auto_rope2d'`."""
import ast
import difflib
import fnmatch
import functools
import inspect
import itertools
import json
import math
import re
from contextlib import nullcontext
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Type, TypeVar

import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..checks import MAX_INTEGER, is_number
from ..grid import Grid
from .base import FixedEncoding, Gate, PositionEncoding, RotaryEncoding
from .hook_results import check_result

__all__ = [
    'create_encoding',
    'encoding_keywords',
    'encoding_title',
    'encodings_table',
    'get_encoding',
    'is_auto',
    'is_per_layer',
    'list_encodings',
    'parse_pos_enc',
    'register_encoding',
]

EncodingT = TypeVar('EncodingT', bound=PositionEncoding)

_encodings: Dict[str, Type[PositionEncoding]] = {}
_aliases: Dict[str, str] = {}

# Attributes of the modules that hold encodings by name, `SharedEncodings` and `LayerEncodings`
RESERVED = {
    *dir(nn.ModuleDict), 'act_on_blocks', 'acting_on', 'add_after', 'add_before', 'embed', 'layer', 'logit_scaling',
    'logits', 'needs_position', 'position', 'rotate_half', 'terms', 'training'}
# Functions that make a tensor without setting it
UNSET = torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.empty_strided
GIVEN = 'pos_embed', 'images', 'patch_size', 'object_index'  # what hosts give to `SharedEncodings`
AUTO = 'auto_'  # prefix of a name: what the encoding contributes is multiplied by a learned scalar, the gate
HOST_KEYWORDS = set(inspect.signature(PositionEncoding.__init__).parameters) - {'self'}  # set by the model, not users


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
            called `init`, it asks for what the model does not have, or its `per_layer` does not fit its hooks: `mix`,
            `layer_embed` and an `embed` that asks for something run once per model, hooks that depend on q, k or
            probabilities run once per layer.
    """
    if not isinstance(name, str):
        raise ValueError("Write @register_encoding('name'), with the name of the encoding.")

    def register(cls: Type[EncodingT]) -> Type[EncodingT]:
        if not (isinstance(cls, type) and issubclass(cls, PositionEncoding)):
            raise ValueError(f'Encoding {name!r}: {cls!r} is not a subclass of timm_sape.PositionEncoding.')
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


def _check_methods(name: str, cls: Type[PositionEncoding]) -> None:
    """Refuse a class that would do nothing, or could not be created, because of a slip."""
    bases = [base for base in cls.__mro__ if base.__module__ == PositionEncoding.__module__]
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
    scales = any('logit_factor' in vars(base) and not _is_built_in(base) for base in users)
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


def _is_built_in(cls: type) -> bool:
    """Whether it is a class of this package. Its own tests see to what is checked for others when they are built."""
    return cls.__module__.startswith('timm_sape.')


def _takes_arguments(method: Callable) -> bool:
    """Whether it takes more than `self`, as every hook does."""
    try:
        inspect.signature(method).bind(None, None)
    except TypeError:
        return False
    return True


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


def encodings_table() -> str:
    """All encodings as a Markdown table, for the documentation."""
    rows = [
        '| name | acts on | relative | attention | parameters added | on another grid | paper |',
        '|---|---|---|---|---|---|---|',
    ]
    for name, cls in sorted(_encodings.items()):
        shown = ', '.join(f'`{n}`' for n in [name, *(alias for alias in _aliases if _aliases[alias] == name)])
        link = f'[link]({cls.paper})' if cls.paper else ''
        acts_on = ', '.join(cls.acts_on()) or 'nothing'
        cells = (shown, acts_on, 'yes' if cls.relative else 'no', cls.attention_kernel(), cls.adds, cls.on_other_grids)
        rows.append(f'| {" | ".join(cells)} | {link} |')
    return '\n'.join(rows)


def is_auto(name: str) -> bool:
    """Whether a name is that of a gated encoding, such as `auto_rope2d`."""
    return name.startswith(AUTO)


def _resolve(name: str) -> str:
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
        hint = f'Did you mean {" or ".join(map(repr, close))}?' if close else f'Known: {", ".join(list_encodings())}.'
        raise ValueError(
            f'Unknown position encoding {name!r}. {hint} If it is your own, import its module first; on the command '
            'line: timm-sape COMMAND --import MODULE.')
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
    return _encodings[_resolve(name).removeprefix(AUTO)]


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
    _check_keywords(name, kwargs.keys() - (HOST_KEYWORDS - {'gate'}))  # `auto_` sets the gate, not the caller
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
    with nullcontext() if _is_built_in(cls) else _MarkUnset():
        encoding = cls(**kwargs)
    _check_instance(name, encoding, kwargs.get('gate'))
    return encoding


class _MarkUnset(TorchDispatchMode):
    """Fill tensors that are made without values with NaN, to find those that a constructor does not set."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in UNSET and not out.is_meta and out.is_floating_point():
            out.fill_(math.nan)
        return out


def _check_instance(name: str, encoding: PositionEncoding, gate: Optional[float]) -> None:
    """Refuse an encoding that would be wrong, or never learn, because of a slip in its constructor."""
    cls = type(encoding)
    if isinstance(encoding, FixedEncoding) and 'table' not in encoding._buffers:
        raise ValueError(f'{name!r}: call self.make_table() at the end of the constructor of {cls.__name__}.')
    if type(encoding.gate) is not (type(None) if gate is None else Gate):
        raise ValueError(
            f'{name!r}: {cls.__name__} sets self.gate, which is the gate of an encoding with {AUTO}. Choose another '
            'name.')
    is_own = not _is_built_in(cls)
    unseen = _unseen_parameter(encoding) if is_own else ''
    if unseen:
        raise ValueError(
            f'{name!r}: {unseen} of {cls.__name__} would neither be trained nor saved, because torch does not see it. '
            'Make it an nn.Parameter, or a list of them an nn.ParameterList or nn.ModuleList.')
    unset = [key for key, t in _tensors(encoding).items() if is_own and t.is_floating_point() and t.isnan().any()]
    if unset:
        raise ValueError(
            f'{name!r}: the constructor of {cls.__name__} does not set {unset[0]}, which holds whatever was in memory. '
            'Set it in reset_parameters, and end the constructor by self.reset_parameters().')
    lost = _lost_buffer(encoding) if is_own else ''
    if lost:
        raise ValueError(
            f'{name!r}: {lost} of {cls.__name__} is not saved, so a model that is built on the meta device and then '
            'loaded has no value for it. Set it in a method init_non_persistent_buffers, which reset_parameters should '
            'call, or save it: persistent=True.')
    ignores = _ignores_gate(encoding) if is_own and gate == 0 else ''
    if ignores:
        raise ValueError(
            f'{name!r}: {ignores} of {cls.__name__} acts although its gate is 0. It must multiply what it adds by '
            'the gate: self.gated(x), before anything is rounded.')
    if gate == 0 and _does_nothing(encoding):
        raise ValueError(
            f'{name!r}: a gate of 0 on an encoding that starts at 0 would never learn. Set gate_init = 1 in '
            f'{cls.__name__}, and leave init out: it does nothing at the start anyway.')


def _tensors(encoding: PositionEncoding) -> Dict[str, torch.Tensor]:
    """Its parameters and buffers by name. Empty if it is built without memory, where they have no values."""
    tensors = dict(itertools.chain(encoding.named_parameters(), encoding.named_buffers()))
    has_values = all(type(t) in (nn.Parameter, torch.Tensor) and not t.is_meta for t in tensors.values())
    return tensors if has_values else {}


def _lost_buffer(encoding: PositionEncoding) -> str:
    """A buffer that is not saved and that timm's `reinit_non_persistent_buffers` does not set. Empty for none."""
    if type(encoding).init_non_persistent_buffers not in (
            PositionEncoding.init_non_persistent_buffers, FixedEncoding.init_non_persistent_buffers):
        return ''
    for path, module in encoding.named_modules():
        known = {'table'} if isinstance(module, FixedEncoding) else set()
        lost = sorted(module._non_persistent_buffers_set - known)
        if lost and (module is encoding or not hasattr(module, 'init_non_persistent_buffers')):
            return f'{path}.{lost[0]}' if path else lost[0]
    return ''


def _unseen_parameter(encoding: PositionEncoding) -> str:
    """An attribute with parameters or layers that no module knows of. Empty if there is none."""
    known = set(map(id, encoding.parameters()))  # some layers list theirs
    for path, module in encoding.named_modules():
        for name, value in vars(module).items():
            items = list(value.values()) if isinstance(value, dict) else value
            for item in items if isinstance(items, (list, tuple)) else [items]:
                tensors = item.parameters() if isinstance(item, nn.Module) else [item]
                # what is no leaf is computed from parameters, as by weight_norm
                if any(isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf and id(t) not in known
                       for t in tensors):
                    return f'{path}.{name}' if path else name
    return ''


def _ignores_gate(encoding: PositionEncoding) -> str:
    """The hook that acts although the gate is 0, of those that apply the gate themselves. Empty if there is none."""
    tensors = _tensors(encoding)
    if not tensors:
        return ''
    like, generator = encoding.gate.weight, torch.Generator().manual_seed(0)
    height, width = (min(size, 4) for size in encoding.grid_size)
    grid = Grid(height, width, encoding.num_prefix_tokens, device=like.device)
    shape = 1, encoding.num_heads, grid.num_prefix_tokens + grid.num_patches, encoding.head_dim
    q, k, v = (torch.randn(shape, generator=generator, device='cpu').to(like) for _ in range(3))
    given = {'grid': grid, 'scale': encoding.head_dim ** -0.5}
    with torch.no_grad():
        for hook in filter(encoding.overrides, ('rotation', 'turn', 'channels', 'attend')):
            expected = q @ k.mT
            if hook == 'rotation':
                found, _ = encoding(q, grid=grid, hook=hook).chunk(2, dim=-1)  # the sines
                expected = torch.zeros_like(found)
            elif hook == 'turn':
                turned_q, turned_k = encoding(q, k, grid=grid, hook=hook)
                found = turned_q @ turned_k.mT
            elif hook == 'channels':
                a, b = encoding(q, k, q.transpose(1, 2).flatten(2), **given, hook=hook)
                found = expected + a @ b.mT
            else:
                expected = (expected * given['scale']).softmax(dim=-1) @ v
                found = encoding(
                    q, k, v, q, k, None, **given, dropout_p=0., drop=nn.Identity(), fused=False, hook=hook)
            tolerance = 64 * torch.finfo(like.dtype).eps * expected.abs().max()
            if (found - expected).abs().max() > tolerance:
                return hook
    return ''


def _does_nothing(encoding: PositionEncoding) -> bool:
    """Whether all that an encoding adds is 0, because all its parameters are. A rotation always does something."""
    own = [t for key, t in _tensors(encoding).items() if type(t) is nn.Parameter and key != 'gate.weight']
    if not own or any(p.any() for p in own):
        return False
    grid = Grid(*encoding.grid_size, encoding.num_prefix_tokens, device=own[0].device)
    tokens = torch.eye(grid.num_prefix_tokens + grid.num_patches, encoding.dim).to(own[0])[None]  # [1, N, D]
    q = tokens.unflatten(-1, (encoding.num_heads, -1)).transpose(1, 2)  # [1, h, N, d]
    given = {
        'embed': (tokens,), 'layer_embed': (), 'position_bias': (), 'content_bias': (q, q),
        'values': ((q @ q.mT).softmax(dim=-1),)}
    hooks = [hook for hook in encoding.HOOKS if encoding.overrides(hook)]
    if encoding.asks_for or not given.keys() >= set(hooks):
        return False
    with torch.no_grad():
        for hook in hooks:
            found = getattr(encoding, hook)(*given[hook], grid=grid)  # not by way of the gate, which is 0
            check_result(encoding, hook, found, given[hook] or (tokens,), grid)
            if found.any():
                return False
    return True


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


def _check_keywords(name: str, keywords) -> None:
    accepted = encoding_keywords(name)
    for keyword in sorted(set(keywords) - accepted.keys()):
        has = f'It accepts: {", ".join(sorted(accepted))}.' if accepted else 'It accepts no keywords.'
        if keyword == 'resolution':
            has = f'It has one rule for other sizes, so leave that out. {has}'
        raise ValueError(f'Position encoding {name!r} has no keyword {keyword!r}. {has}')


def parse_pos_enc(
        pos_enc: str,
        pos_enc_kwargs: Optional[Mapping[str, Mapping[str, Any]]] = None,
) -> Dict[str, Dict[str, Any]]:
    """Split a string such as `'sape2+ape'` into its parts, with aliases resolved.

    Args:
        pos_enc: Names joined by `+`, or `'nope'`.
        pos_enc_kwargs: Keywords of each part, by its name.

    Returns:
        Keywords of each part by its canonical name, sorted by name. A model is saved with `'+'.join` of these names.

    Raises:
        ValueError: If a part is unknown, repeated, empty or in conflict with another, or if keywords are for a part
            that `pos_enc` does not have, are not accepted by their part, or are not plain JSON.
    """
    if not isinstance(pos_enc, str):
        raise ValueError(f"pos_enc must be a string such as 'ape+sape2_k', got {pos_enc!r}.")
    names = [name.strip() for name in pos_enc.split('+')]
    if not all(names):
        raise ValueError(f"pos_enc={pos_enc!r} has an empty part. Write e.g. 'ape+sape2_k', or 'nope' for none.")
    resolved = [_resolve(name) for name in names]
    _check_composition(pos_enc, resolved)

    keywords: Dict[str, Dict[str, Any]] = {name: {} for name in sorted(resolved)}
    given = plain_keywords(pos_enc_kwargs)
    seen = set()
    for name, values in given.items():
        part = _resolve(name)
        if part not in keywords:
            others = [other for other in keywords if other.removeprefix(AUTO) == part.removeprefix(AUTO)]
            hint = f'Write {others[0]!r}, or' if others else 'Leave them out, or'
            raise ValueError(
                f'pos_enc_kwargs has keywords for {name!r}, which is not a part of pos_enc={pos_enc!r}. {hint} put '
                f'{part!r} into pos_enc.')
        if part in seen:
            raise ValueError(f'pos_enc_kwargs has keywords for {part!r} under two names. Give them once.')
        seen.add(part)
        _check_keywords(part, values)
        for keyword, value in values.items():
            if _largest_integer(value) > MAX_INTEGER:
                raise ValueError(
                    f'Position encoding {part!r}: {keyword}={value!r} is larger than any model needs. Give at most '
                    f'{MAX_INTEGER:,}.')
        keywords[part] = values
    return keywords


def _largest_integer(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max(map(_largest_integer, inner), default=abs(value) if isinstance(value, int) else 0)


def _check_composition(pos_enc: str, resolved: List[str]) -> None:
    plain = [name.removeprefix(AUTO) for name in resolved]
    for name in plain:
        if plain.count(name) > 1:
            raise ValueError(f'pos_enc={pos_enc!r} names {name!r} more than once. Name it once.')
    if 'nope' in plain and len(plain) > 1:
        raise ValueError(
            f"pos_enc={pos_enc!r}: 'nope' means no position encoding and cannot be combined. Leave it out.")
    classes = [_encodings[name] for name in plain]
    for name, cls in zip(resolved, classes):
        for other in cls.excludes.keys() & set(plain):
            raise ValueError(
                f'pos_enc={pos_enc!r}: {name!r} cannot be combined with {other!r}: {cls.excludes[other]}. Keep one of '
                'them.')
    rotations = [name for name, cls in zip(resolved, classes) if cls.rotates()]
    if len(rotations) > 1:
        raise ValueError(f'pos_enc={pos_enc!r} has two rotations, {" and ".join(rotations)}. Keep one of them.')
    adds = any(cls.overrides('embed') and not cls.per_layer for cls in classes)
    if any(cls.overrides('mix') for cls in classes) and not adds:
        raise ValueError(
            f'pos_enc={pos_enc!r} mixes tokens with their position terms, but no part adds such a term. '
            "Add one, e.g. 'pemix+sincos2d'.")


def plain_keywords(pos_enc_kwargs: Optional[Mapping[str, Mapping[str, Any]]]) -> Dict[str, Dict[str, Any]]:
    """The keywords of each part, as they are after a round trip through JSON.

    Raises:
        ValueError: If they are not plain JSON, or not a mapping of mappings.
    """
    if isinstance(pos_enc_kwargs, str):
        meant = _meant_by(pos_enc_kwargs) or {'sape2_k': {'preset': 'equations'}}
        raise ValueError(
            f'pos_enc_kwargs must map parts to their keywords, got the text {pos_enc_kwargs!r}. On a command line, '
            f'quote it and the names in it: --model-kwargs "pos_enc_kwargs={meant}".')
    given = _plain_json({} if pos_enc_kwargs is None else pos_enc_kwargs)
    if not isinstance(given, dict) or not all(isinstance(v, dict) for v in given.values()):
        raise ValueError(
            "pos_enc_kwargs must map parts to their keywords, e.g. {'sape2_k': {'preset': 'equations'}}, "
            f'got {pos_enc_kwargs!r}.')
    return given


def _meant_by(text: str) -> Optional[Dict[str, Dict[str, Any]]]:
    """The keywords in a text that is JSON, or that a shell has stripped of its quotes. None if it makes no sense."""
    constants = {'true': 'True', 'false': 'False', 'null': 'None', 'True': 'True', 'False': 'False', 'None': 'None'}

    def quote(match: re.Match) -> str:
        word = match[0]
        return word if word[0] in '\'"' else constants.get(word, repr(word))

    try:
        meant = ast.literal_eval(re.sub(r'"[^"]*"|\'[^\']*\'|(?<![\w.])[A-Za-z_]\w*', quote, text))
    except (SyntaxError, ValueError):
        return None
    return meant if isinstance(meant, dict) and all(isinstance(v, dict) for v in meant.values()) else None


def _plain_json(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as e:
        raise ValueError(f'pos_enc_kwargs must be plain JSON, so that it can be saved, got {value!r}: {e}.') from None
