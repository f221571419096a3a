"""What the contracts and their negative controls share.

A contract is a promise of timm's ViT that every encoding has to keep. It is a function of a `Maker`, which makes models
of one encoding, and it fails with an AssertionError or with whatever the model raises. With --full each contract runs
for every encoding of the registry and for compositions, on odd grids. So a new encoding is held to all of them at once.

`test_<subject>.py` has the contracts of a subject. `test_<subject>_controls.py` has their negative controls: encodings
or models, broken on purpose, that a contract must reject for the stated reason.
"""
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from timm.layers import set_fused_attn

from common import GRIDS, OFTEN, POS_ENCS, Maker, registered

ONE_GRID = GRIDS[:1]
ALWAYS = [*OFTEN, 'rope2d_mixed', 'ape+auto_rope2d+auto_sape2_k']  # one of each kind


class Contracts(dict):
    """The contracts of one subject, by name."""

    def add(self, fn=None, *, grids=GRIDS, takes_long=False):
        """Decorates a contract. One that is not about positions needs a single grid only.

        With --full each runs for all encodings on all grids. Without, it does so for one encoding of each kind
        (`ALWAYS`) on its first grid, for a third of them on each other grid, and, unless it takes long, on its first
        grid for an eighth of the other encodings, which are not the same for each contract.
        """
        if fn is None:
            return partial(self.add, grids=grids, takes_long=takes_long)
        self[fn.__name__] = fn
        fn.grids = grids
        fn.takes_long = takes_long
        return fn

    def test(self):
        """The test that runs all of them for all encodings."""
        def case(name, pos_enc, grid):
            contract = self[name]
            is_first = grid == contract.grids[0]
            if pos_enc in ALWAYS:
                marks = [] if is_first else [pytest.mark.one_of(3, all_kinds=False)]
            else:
                marks = [pytest.mark.one_of(8) if is_first and not contract.takes_long else pytest.mark.full]
            size = 'x'.join(map(str, grid))
            return pytest.param(name, pos_enc, grid, id=f'{name}-{pos_enc}-{size}', marks=marks)

        @pytest.mark.parametrize('name, pos_enc, grid', [
            case(name, pos_enc, grid) for name in self for pos_enc in POS_ENCS for grid in self[name].grids])
        def test_contract(name, pos_enc, grid):
            self[name](Maker(pos_enc, grid))

        return test_contract


class Control:
    """A broken encoding or model, and how it must fail a contract."""

    def __init__(self, name, contract, match, raises, apply, make):
        self.name = name
        self.contract = contract
        self.match = match
        self.raises = raises
        self.apply = apply
        self.make = make

    def __repr__(self):
        return f'{self.contract}-{self.name}'


class Controls(list):
    """The negative controls of one subject. The name or docstring of each says what is broken in it.

    Args:
        contracts: The contracts of the subject.
    """

    def __init__(self, contracts):
        super().__init__()
        self.contracts = contracts

    def broken_encoding(self, contract, match, raises=AssertionError, **fixed):
        """Decorates an encoding that must fail `contract` with a message that `match` is found in."""
        def add(cls):
            self.append(Control(
                cls.__name__, contract, match, raises, lambda patch: registered(broken=cls), Maker('broken', **fixed)))
            return cls

        return add

    def broken_code(self, contract, match, raises=AssertionError, pos_enc='ape+sape2_k'):
        """Decorates a function that breaks this package by a `monkeypatch`."""
        def add(fn):
            @contextmanager
            def apply(patch):
                fn(patch)
                yield

            self.append(Control(fn.__name__, contract, match, raises, apply, Maker(pos_enc)))
            return fn

        return add

    def broken_model(self, contract, match, raises=AssertionError, pos_enc='ape+sape2_k'):
        """Decorates a function that breaks each model after it was built."""
        def add(fn):
            make = Maker(pos_enc, edit=fn)
            self.append(Control(fn.__name__, contract, match, raises, lambda patch: registered(), make))
            return fn

        return add

    def test(self):
        """The test that each control is rejected."""
        @pytest.mark.parametrize('control', self, ids=repr)
        def test_contract_rejects(control, monkeypatch):
            with control.apply(monkeypatch), pytest.raises(control.raises, match=control.match):
                self.contracts[control.contract](control.make)

        return test_contract_rejects


def same(actual, expected, what, tol=1e-5):
    """Equal up to `tol` times the largest value; a NaN anywhere is a difference."""
    assert actual.shape == expected.shape, f'{what}: {list(actual.shape)} is not {list(expected.shape)}'
    worst = (actual.double() - expected.double()).abs().max()
    assert worst <= tol * expected.double().abs().max().clamp(min=1), f'{what}: differs by {worst:.2g}'


def differ(a, b, what):
    assert (a - b).abs().max() > 1e-3, f'{what}: makes no difference'


def gradients(model, loss):
    """Gradients by name; no parameter may be without one."""
    model.zero_grad()
    loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing, f'no gradient for {missing}'
    unsound = [name for name, p in model.named_parameters() if not p.grad.isfinite().all()]
    assert not unsound, f'gradient is not finite for {unsound}'
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def same_gradients(actual, expected, tol=1e-5):
    assert actual.keys() == expected.keys()
    for name in expected:
        same(actual[name], expected[name], f'gradient of {name}', tol)


@contextmanager
def fused_attention(enable):
    """timm's switch, which is read when a model is built."""
    try:
        set_fused_attn(enable)
        yield
    finally:
        set_fused_attn(True)


def embedded(model, x):
    """What goes into the first block."""
    seen = []
    handle = model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model.forward_features(x)
    handle.remove()
    return seen[0]


def rotated(x, table, num_prefix_tokens, rotate_half):
    """Pairs of channels of the patches turned by the angles of a table, prefix tokens left alone."""
    sin, cos = table.chunk(2, dim=-1)
    patches = x[:, :, num_prefix_tokens:]
    if rotate_half:  # bring partners side by side
        sin, cos, patches = (t.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2) for t in (sin, cos, patches))
    sin, cos = sin[..., ::2], cos[..., ::2]
    patches = torch.view_as_complex(patches.unflatten(-1, (-1, 2)).contiguous())
    patches = torch.view_as_real(patches * torch.complex(cos, sin)).flatten(-2)
    if rotate_half:
        patches = patches.unflatten(-1, (-1, 2)).transpose(-2, -1).flatten(-2)
    return torch.cat([x[:, :, :num_prefix_tokens], patches], dim=2)


def attention_by_hand(attn, x, position, mask=None):
    """One layer without dropout, in plain steps, the prefix rule enforced."""
    grid, rotation = position.grid, position.rotation
    x = x if position.layer_terms is None else x + position.layer_terms[attn.encodings.layer]
    B, N, _ = x.shape
    q, k, v = attn.qkv(x).view(B, N, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4)
    q, k = attn.q_norm(q), attn.k_norm(k)
    p = grid.num_prefix_tokens
    patch = torch.arange(N) >= p
    total = torch.zeros(B, attn.num_heads, N, N)
    turned = q, k
    total = total if position.bias is None else total.where(~(patch[:, None] & patch), total + position.bias)
    for encoding in attn.encodings.values():
        own = torch.zeros(())
        if encoding.overrides('position_bias'):
            own = own + encoding.gated(encoding.position_bias(grid))
        if encoding.overrides('content_bias'):
            own = own + encoding.gated(encoding.content_bias(q, k, grid))
        if encoding.overrides('channels'):
            a, b = encoding.channels(q, k, x, grid, attn.scale)
            own = own + attn.scale * a @ b.transpose(-2, -1)
        if encoding.overrides('turn'):
            turned = encoding.turn(q, k, grid)
        if encoding.overrides('rotation'):
            rotation = encoding.rotation(grid)
        if encoding.prefix_rule:
            own = torch.zeros(()).where(~(patch[:, None] & patch), own)
        total = total + own
    q, k = turned
    if rotation is not None:
        q, k = (rotated(t, rotation, p, attn.encodings.rotate_half) for t in (q, k))
    logits = q @ k.transpose(-2, -1) / attn.head_dim ** 0.5 + total
    if mask is not None:
        logits = logits.masked_fill(~mask, float('-inf')) if mask.dtype == torch.bool else logits + mask
    weights = logits.softmax(dim=-1)
    out = weights @ v
    for encoding in attn.encodings.values():
        if encoding.overrides('values'):
            out = out + encoding.gated(encoding.values(weights, grid))
    return attn.proj(attn.norm(out.transpose(1, 2).flatten(2)))


def check_layers(model, x, mask=None, **kwargs):
    """Compare each attention layer of a forward pass with `attention_by_hand`; `mask` is what `kwargs` amount to."""
    calls = []
    handles = [
        block.attn.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True) for block in model.blocks]
    model(x, **kwargs)
    for handle in handles:
        handle.remove()
    assert len(calls) == len(model.blocks)
    for attn, args, arguments, out in calls:
        same(out, attention_by_hand(attn, *args, arguments['position'], mask), 'attention')

