"""Tensors of different devices: a ValueError that says which tensor is where."""
import pytest
import torch

import timm_sape
from common import Maker
from harness import attend, create, make_grid, make_qkv
from operators import NAMES, make_inputs, strictest
from timm_sape import ops
from timm_sape.functional import sape2_attention, sape2_bias

BACKENDS = [None, 'reference', 'torch', 'cpp', 'triton']
GRID, N = (2, 3), 7


def arguments(elsewhere, **kwargs):
    """Keywords of `sape2_attention`, one of them on the meta device."""
    tensors = {**dict(zip(NAMES, make_inputs(GRID))), **kwargs}
    tensors = {name: t.to('meta') if name == elsewhere else t for name, t in tensors.items()}
    return {**tensors, 'grid_size': GRID, 'num_prefix_tokens': 1}


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('backend', BACKENDS)
def test_attention(backend, name):
    with pytest.raises(ValueError, match=f'must be on the same device, got .*{name} on meta'):
        sape2_attention(**arguments(name), backend=backend)
    device, dtype, _ = strictest(backend)
    there = {key: x.to(device, dtype) if isinstance(x, torch.Tensor) else x for key, x in arguments(None).items()}
    sape2_attention(**there, backend=backend)


OPTIONS = {
    'attn_mask': torch.ones(N, N, dtype=torch.bool),
    'gate_scale': torch.tensor([0.3], dtype=torch.float64),
    'keep_indices': torch.arange(6)[None],
}


@pytest.mark.parametrize('name', OPTIONS)
@pytest.mark.parametrize('is_causal', [False, True])
def test_options_of_attention(name, is_causal):
    """Dropped patches that lie elsewhere were silently used: the result was wrong."""
    kwargs = {name: OPTIONS[name], 'is_causal': is_causal}
    text = 'mask' if name == 'attn_mask' else name
    with pytest.raises(ValueError, match=f'must be on the same device, got .*{text} on meta'):
        sape2_attention(**arguments(name, **{name: OPTIONS[name]}), is_causal=is_causal)
    sape2_attention(**arguments(None), **kwargs)


@pytest.mark.parametrize('name', ['q', 'k', 'table_x', 'table_y', 'gate_scale', 'keep_indices'])
def test_bias(name):
    kwargs = {option: OPTIONS[option] for option in ('gate_scale', 'keep_indices')}
    kwargs = {k: v for k, v in arguments(name, **kwargs).items() if k not in ('v', 'bias_scale')}
    with pytest.raises(ValueError, match=f'must be on the same device, got .*{name} on meta'):
        sape2_bias(**kwargs)
    sape2_bias(**{k: v for k, v in arguments(None).items() if k not in ('v', 'bias_scale')})


@pytest.mark.parametrize('name', ['q', 'k', 'table', 'keep_indices'])
def test_cope(name):
    q, k, *_ = make_inputs(GRID)
    tensors = {'q': q, 'k': k, 'table': q[0, 0], 'keep_indices': OPTIONS['keep_indices']}
    moved = {**tensors, name: tensors[name].to('meta')}
    for given, fails in ((moved, True), (tensors, False)):
        keep_indices = given['keep_indices'] if name == 'keep_indices' else None
        args = given['q'], given['k'], given['table'], timm_sape.Grid(*GRID, 1, keep_indices)
        if fails:
            with pytest.raises(ValueError, match=f'must be on the same device, got .*{name} on meta'):
                ops.contextual_bias(*args, gate_scale=0.5)
        else:
            ops.contextual_bias(*args, gate_scale=0.5)


@pytest.mark.parametrize('encoding, table', [('sape2_k', 'table_x'), ('sape2_qk', 'table_x'), ('cope', 'table')])
def test_modules(encoding, table):
    """An encoding that was left behind when the model moved."""
    module, grid = create(encoding, GRID, 1), make_grid(GRID, 1)
    q, k, v = make_qkv(grid)
    attend(module, q, k, v, grid)
    with pytest.raises(ValueError, match=f'must be on the same device, got q on cpu, .*{table} on meta'):
        attend(module.to('meta'), q, k, v, grid)


@pytest.mark.parametrize('pos_enc', ['sape2_k', 'cope'])
def test_models(pos_enc):
    make_model = Maker(pos_enc)
    model = make_model()
    model(make_model.images())
    model.blocks[1].attn.encodings.to('meta')
    with pytest.raises(ValueError, match='must be on the same device'):
        model(make_model.images())


@pytest.mark.parametrize('backend', [None, 'reference', 'torch'])
def test_all_elsewhere(backend):
    """On the meta device alone everything has its shape and dtype."""
    inputs = [t.to('meta') for t in make_inputs(GRID)]
    *tensors, bias_scale = inputs
    out = sape2_attention(*tensors, GRID, bias_scale=bias_scale, num_prefix_tokens=1, backend=backend)
    assert out.is_meta and out.shape == inputs[2].shape and out.dtype == inputs[2].dtype
