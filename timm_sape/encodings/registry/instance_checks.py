"""What is checked in an encoding when it is built, so that a slip in its constructor is not silent."""
import itertools
import math
from typing import Dict, Optional

import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...grid import Grid
from ..base import AUTO, FixedEncoding, Gate, PositionEncoding
from ..base.hook_results import check_result
from .class_checks import is_built_in

# Functions that make a tensor without setting it
UNSET = torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.empty_strided


class MarkUnset(TorchDispatchMode):
    """Fill tensors that are made without values with NaN, to find those that a constructor does not set."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in UNSET and not out.is_meta and out.is_floating_point():
            out.fill_(math.nan)
        return out


def check_instance(name: str, encoding: PositionEncoding, gate: Optional[float]) -> None:
    """Refuse an encoding that would be wrong, or never learn, because of a slip in its constructor."""
    cls = type(encoding)
    if isinstance(encoding, FixedEncoding) and 'table' not in encoding._buffers:
        raise ValueError(f'{name!r}: call self.make_table() at the end of the constructor of {cls.__name__}.')
    if type(encoding.gate) is not (type(None) if gate is None else Gate):
        raise ValueError(
            f'{name!r}: {cls.__name__} sets self.gate, which is the gate of an encoding with {AUTO}. Choose another '
            'name.')
    is_own = not is_built_in(cls)
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
