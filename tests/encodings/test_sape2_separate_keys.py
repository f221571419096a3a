"""The keyword `separate_keys` of sape2_q, sape2_k, sape2_qk, sape2sq_q and sape2sq_k."""
import copy

import pytest
import timm
import torch
from timm.models import save_for_hf
from timm.optim import create_optimizer_v2

import bias_checks
import reference_sape2_separate_keys as reference
import tensor_cores
from bias_checks import SIZES, bias_of, make_inputs
from common import randomize
from harness import assert_near, attend, catches, compare, create, gradients, make_grid, make_qkv, where
from loops import attention
from model_checks import (
    build,
    check_masks,
    check_model,
    check_neutral_start,
    images,
    initial_model,
    own_encodings,
    step,
)
from timm_sape.encodings import sape2
from timm_sape.ops.backend import using_backend

NAMES = ['sape2_q', 'sape2_k', 'sape2_qk', 'sape2sq_q', 'sape2sq_k']
ALIVE = [('zero', name) for name in NAMES if not name.endswith('_k')] + [('identity', name) for name in NAMES]
DEAD = ['sape2_k', 'sape2sq_k']
CASES = [  # grid, prefix tokens, kept patches, trained grid
    ((3, 5), 0, None, None), ((3, 5), 5, None, None), ((1, 7), 1, None, None), ((7, 1), 0, None, None),
    ((1, 1), 1, None, None), ((3, 5), 1, 8, None), ((4, 4), 0, 6, (3, 5)), ((3, 5), 1, None, (6, 2))]
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'  # of the Triton kernels
if DEVICE == 'cpu':
    tensor_cores.install()  # products of half precision in Triton's interpreter


def new(name, grid_size, num_prefix_tokens=0, trained_on=None, **keywords):
    """Every parameter is large, W is no longer what it starts as."""
    return create(
        name, trained_on or grid_size, num_prefix_tokens, **{**SIZES, 'separate_keys': 'zero', **keywords})


def expected_bias(encoding, q, k, grid, trained_on=None):
    own = dict(encoding.named_parameters())
    return encoding.bias_scale * reference.bias(
        q, k, own['table_x'], own['table_y'], grid.size, key_x=own['key_x'], key_y=own['key_y'],
        squared=encoding.name.startswith('sape2sq'), mode=encoding.mode, gate_scale=encoding.gate_scale,
        ref_grid_size=trained_on, **where(grid))


def check(name, grid_size, num_prefix_tokens=0, num_keep=None, trained_on=None, **keywords):
    """The bias and every gradient in float64."""
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = new(name, grid_size, num_prefix_tokens, trained_on, **keywords)
    inputs = make_inputs(grid, **SIZES)
    leaves = {'q': inputs[0], 'k': inputs[1], **dict(encoding.named_parameters())}
    compare(bias_of(encoding, grid, inputs), expected_bias(encoding, *inputs[:2], grid, trained_on), leaves)


# --- equations -------------------------------------------------------------------------------------------------------

@pytest.mark.one_of(3, all_kinds=False)
@pytest.mark.parametrize('case', CASES, ids=str)
@pytest.mark.parametrize('name', NAMES)
def test_equations(name, case):
    check(name, *case)


@pytest.mark.parametrize('name', NAMES)
def test_other_keywords(name):
    check(name, (3, 5), 1, 8, preset='equations', npos=3)


@pytest.mark.one_of(4, all_kinds=False)
@pytest.mark.parametrize('case, backend', [
    *((case, backend) for case in CASES for backend in ('reference', 'torch')),
    *(pytest.param(case, 'triton', marks=pytest.mark.full) for case in CASES[1::3])], ids=str)
@pytest.mark.parametrize('name', NAMES[:3])
def test_attention_by_every_backend(name, case, backend):
    """Attention and every gradient. The operators compute the codes of each axis with keys of its own."""
    if backend == 'triton' and DEVICE == 'cuda':
        pytest.skip('Triton has no float64 on a GPU; test_operators_in_half runs there')
    grid_size, num_prefix_tokens, num_keep, trained_on = case
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = new(name, grid_size, num_prefix_tokens, trained_on)
    q, k, v = make_qkv(grid, **SIZES)
    expected = attention(q, k, v, bias=expected_bias(encoding, q, k, grid, trained_on))
    with using_backend(backend):
        actual = attend(encoding, q, k, v, grid)
    leaves = {'v': v} if q.shape[2] == 1 else {'q': q, 'k': k, 'v': v, **dict(encoding.named_parameters())}
    compare(actual, expected, leaves)


@pytest.mark.parametrize('backend', ['reference', 'torch'])
@pytest.mark.parametrize('name', NAMES[:3])
def test_learned_gain_and_gate(name, backend):
    grid = make_grid((3, 4), 1)
    encoding = create(
        f'auto_{name}', (3, 4), 1, separate_keys='identity', bias_scale='learned', init=0.7, **SIZES)
    with torch.no_grad():
        encoding.gate.weight.fill_(0.007)
    q, k, v = make_qkv(grid, **SIZES)
    own = dict(encoding.named_parameters())
    bias = reference.bias(
        q, k, own['table_x'], own['table_y'], (3, 4), key_x=own['key_x'], key_y=own['key_y'], mode=encoding.mode,
        gate_scale=encoding.gate_scale, **where(grid))
    bias = 100 * own['gate.weight'] * own['gain'].view(-1, 1, 1) * bias
    with using_backend(backend):
        compare(attend(encoding, q, k, v, grid), attention(q, k, v, bias=bias), {'q': q, 'k': k, 'v': v, **own})


def swapped(self, k, axis_keys=sape2.SemanticAwareEncoding._axis_keys):
    return axis_keys(self, k)[::-1]


def transposed(self, k):
    return k @ self.key_x.T, k @ self.key_y.T


def one_for_both(self, k):
    return k @ self.key_x, k @ self.key_x


def added(self, k, axis_keys=sape2.SemanticAwareEncoding._axis_keys):
    return tuple(k + keys for keys in axis_keys(self, k))


@pytest.mark.one_of(3)
@pytest.mark.parametrize('name', [
    'sape2_k', *(pytest.param(name, marks=pytest.mark.full) for name in NAMES if name != 'sape2_k')])
@pytest.mark.parametrize('mutant', [swapped, transposed, one_for_both, added])
def test_mutants_are_caught(mutant, name, monkeypatch):
    """If the package is broken like this, the comparison with the equations fails."""
    catches(lambda: check(name, (3, 5), 1), monkeypatch, sape2.SemanticAwareEncoding, '_axis_keys', mutant)


# --- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', NAMES)
def test_float32(name):
    bias_checks.check_float32(name, separate_keys='identity', bias_scale=0.3)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name', NAMES[:3])
def test_half(name, dtype):
    bias_checks.check_half(name, dtype, separate_keys='identity')


@pytest.mark.interpreted
@pytest.mark.one_of(3, all_kinds=False)
@pytest.mark.parametrize('backend', ['torch', 'triton'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name', NAMES[:3])
def test_operators_in_half(name, dtype, backend):
    """Keys stay wide: the operators are as near to float64 as the reference is."""
    grid = make_grid((4, 6), 1)
    low = new(name, (4, 6), 1, head_dim=8).to(dtype)
    q, k, v = make_qkv(grid, heads=2, head_dim=8, dtype=dtype)
    exact = attend(copy.deepcopy(low).double(), q.double(), k.double(), v.double(), grid)

    def error(backend):
        device = DEVICE if backend == 'triton' else 'cpu'
        with using_backend(backend):
            found = attend(low.to(device), q.to(device), k.to(device), v.to(device), grid)
        return (found.cpu().double() - exact).abs().max().item()

    assert error(backend) <= 2 * error('reference') + torch.finfo(dtype).eps


# --- properties ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', NAMES)
def test_identity_starts_as_without_separate_keys(name):
    plain, grid = create(name, (3, 5), 1, **SIZES), make_grid((3, 5), 1)
    encoding = create(name, (3, 5), 1, separate_keys='identity', random=False, **SIZES)
    encoding.load_state_dict(plain.state_dict(), strict=False)
    inputs = make_inputs(grid, **SIZES)
    assert_near(bias_of(encoding, grid, inputs), bias_of(plain, grid, inputs), 1e-14)


def test_zero_starts_sape2_q_from_geometry():
    """Position m of a row of W counts (W - m) / 2, whatever the keys are."""
    encoding, grid = create('sape2_q', (3, 5), separate_keys='zero', random=False, **SIZES), make_grid((3, 5))
    with torch.no_grad():
        encoding.table_x.normal_()
    q, k, _ = make_inputs(grid, **SIZES)
    codes_x, _ = encoding.codes(q, k, grid)
    table = torch.stack([(encoding.table_x[n // 2] + encoding.table_x[(n + 1) // 2]) / 2 for n in (5, 4, 3, 2, 1)])
    assert_near(codes_x, q @ table.T, 1e-14)
    assert torch.equal(encoding.codes(q, 7 * k.flip(2), grid)[0], codes_x)


@pytest.mark.parametrize('backend', ['reference', 'torch'])
@pytest.mark.parametrize('name', DEAD)
def test_zero_is_dead_on_keys(name, backend):
    """Five steps of AdamW move nothing of it: the model is the one without it, for ever."""
    model = build(f'ape+{name}', {'separate_keys': 'zero'}, random=False).train()
    optimizer = create_optimizer_v2(model, 'adamw', lr=1e-2, weight_decay=0.05)
    start = {key: p.clone() for key, p in model.named_parameters() if f'encodings.{name}' in key}
    with using_backend(backend):
        for _ in range(5):
            grads = step(model, images())
            assert not any(grads[key].any() for key in start)
            optimizer.step()
        out = model.eval()(images())
    assert all(torch.equal(model.get_parameter(key), value) for key, value in start.items())
    plain = build('ape', random=False)
    plain.load_state_dict({key: value for key, value in model.state_dict().items() if name not in key})
    assert_near(out, plain(images()), 1e-6)


def test_zero_is_dead_with_triton():
    dtype, tolerance = (torch.float64, 1e-14) if DEVICE == 'cpu' else (torch.float32, 1e-5)
    encoding, grid = create('sape2_k', (3, 5), 1, separate_keys='zero', random=False, **SIZES), make_grid((3, 5), 1)
    q, k, v = make_qkv(grid, **SIZES)
    encoding = encoding.to(DEVICE, dtype)
    with using_backend('triton'):
        out = attend(encoding, *(t.to(DEVICE, dtype) for t in (q, k, v)), grid)
    assert_near(out.cpu(), attention(q, k, v), tolerance)
    assert not any(grad.any() for grad in gradients(out, list(encoding.parameters())))


@pytest.mark.parametrize('separate_keys, name', ALIVE)
def test_other_starts_live(separate_keys, name):
    """Every parameter of it learns within two steps."""
    model = build(f'ape+{name}', {'separate_keys': separate_keys}, random=False).train()
    optimizer = create_optimizer_v2(model, 'adamw', lr=1e-3)
    for _ in range(2):
        grads = step(model, images())
        optimizer.step()
    own = [grad for key, grad in grads.items() if f'encodings.{name}' in key]
    assert len(own) == 2 * 4 and all(grad.abs().max() > 0 for grad in own)


@pytest.mark.parametrize('name', NAMES)
def test_other_grid(name):
    bias_checks.check_other_grid(name, knows_trained_grid=True, separate_keys='identity')


# --- initial values, models ------------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
@pytest.mark.parametrize('separate_keys, value', [('zero', torch.zeros(16, 16)), ('identity', torch.eye(16))])
@pytest.mark.parametrize('name', NAMES)
def test_initial_values(name, separate_keys, value, again):
    model = initial_model(name, again, pos_enc_kwargs={name: {'separate_keys': separate_keys}})
    encodings = own_encodings(model, name)
    assert len(encodings) == 2
    for encoding in encodings:
        assert torch.equal(encoding.key_x, value) and torch.equal(encoding.key_y, value)
        assert 0.015 < encoding.table_x.std() < 0.025
    plain = sum(p.numel() for p in initial_model(name, False).parameters())
    assert sum(p.numel() for p in model.parameters()) - plain == 2 * 2 * 16 ** 2
    assert {key for key, _ in model.named_parameters() if 'key_' in key} <= model.no_weight_decay()


@pytest.mark.one_of(2)
@pytest.mark.parametrize('composition', ['{}', 'ape+{}', 'rope2d+{}'])
@pytest.mark.parametrize('name', NAMES[:3])
def test_model(name, composition):
    check_model(name, composition, {'separate_keys': 'identity'})


@pytest.mark.parametrize('separate_keys, name', ALIVE)
def test_neutral_start(separate_keys, name):
    check_neutral_start(name, {'separate_keys': separate_keys})


@pytest.mark.parametrize('name', NAMES)
def test_masks(name):
    check_masks(name, {'separate_keys': 'zero', 'bias_scale': 0.3})


@pytest.mark.parametrize('name', NAMES)
def test_saved_config(name, tmp_path):
    """The keyword travels with the weights, and weights without it do not fit."""
    model = randomize(initial_model(f'ape+{name}', False, pos_enc_kwargs={name: {'separate_keys': 'zero'}}).eval())
    save_for_hf(model, tmp_path, safe_serialization=True)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    assert loaded.position_encodings().keys() == model.position_encodings().keys()
    assert own_encodings(loaded, name)[0].separate_keys == 'zero'
    x = images(32, 32)
    assert torch.equal(loaded(x), model(x))
    with pytest.raises(ValueError, match=f'does not fit the position encodings of the model .* it has .*{name}.key_x'):
        initial_model(f'ape+{name}', False).load_state_dict(model.state_dict())


@pytest.mark.full
def test_compiled():
    """One graph, forward and backward."""
    model = build('ape+sape2_k', {'separate_keys': 'identity'})
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    assert_near(compiled(images()), model(images()), 1e-5)
    expected = step(model, images())
    model.zero_grad()
    compiled(images()).square().sum().backward()
    for key, p in model.named_parameters():
        assert_near(p.grad, expected[key], 1e-4, key)


@pytest.mark.full
def test_exported():
    """Without our operators, on a grid of another size."""
    model = build('ape+sape2_q', {'separate_keys': 'zero'}, dynamic_img_size=True)
    dim = torch.export.Dim.DYNAMIC
    program = torch.export.export(model, (images(),), dynamic_shapes=({0: dim},))
    assert not any('timm_sape' in str(node.target) for node in program.graph.nodes)
    assert_near(program.module()(images()), model(images()), 1e-5)


@pytest.mark.parametrize('value', ['ones', True, 1, ['zero']])
def test_wrong_value(value):
    with pytest.raises(ValueError, match="'sape2_k': separate_keys must be 'zero', 'identity' or None for none, got"):
        create('sape2_k', separate_keys=value)
