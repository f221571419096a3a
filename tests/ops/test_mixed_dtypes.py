"""q, k and v in one dtype and tables in another: every backend takes them, and all agree."""
import pytest
import torch

import reference_cope
import timm_sape
from common import Maker
from harness import assert_near
from operators import BACKENDS, FAST, NAMES, check, device_of, make_inputs, run
from reference_sape2 import sape2_attention as loops
from timm_sape import ops
from timm_sape.functional import sape2_attention, sape2_bias
from timm_sape.ops.backend import using_backend

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
PAIRS = [
    (F64, F32), (F64, BF16), (F32, F64), (F32, BF16), (F32, F16), (BF16, F32), (BF16, F64), (F16, F32), (F16, BF16)]
TOLERANCES = {F64: 1e-10, F32: 1e-5, F16: 1e-2, BF16: 2e-2}


def tolerance_of(dtype, other):
    """What a gradient in `dtype` of a computation with the other one can keep."""
    return max(TOLERANCES[dtype], TOLERANCES[other])


@pytest.mark.interpreted
@pytest.mark.one_of(2)
@pytest.mark.parametrize('of_tables', [True, False])
@pytest.mark.parametrize('dtype, other', PAIRS)
@pytest.mark.parametrize('backend', BACKENDS)
def test_attention(backend, dtype, other, of_tables):
    """Tables, or the gain alone, in another dtype: the output is that of the loops for the rounded values, in the dtype
    of v, and gradients have the dtype of their tensors."""
    device = device_of(backend)
    if device == 'cuda' and dtype == F64:
        pytest.skip('Triton has no float64 on a GPU')
    others = ('table_x', 'table_y') if of_tables else ('bias_scale',)
    grid, kwargs = (2, 3), dict(grid_size=(2, 3), num_prefix_tokens=1)
    mixed = [t.to(other if name in others else dtype) for name, t in zip(NAMES, make_inputs(grid))]
    expected, expected_grads = run(loops, [t.double() for t in mixed], **kwargs)
    out, grads = run(sape2_attention, mixed, device=device, backend=backend, **kwargs)
    assert out.dtype == dtype and [g.dtype for g in grads] == [t.dtype for t in mixed]
    assert_near(out, expected, TOLERANCES[dtype], 'output')
    for name, found, wanted in zip(NAMES[:-1], grads, expected_grads):
        assert_near(found, wanted, tolerance_of(dtype, found.dtype), name)
    # terms of both signs: held against the larger gradient of the tables
    error, scale = (grads[-1].double() - expected_grads[-1]).abs().max(), expected_grads[3].abs().max()
    assert error <= tolerance_of(dtype, grads[-1].dtype) * scale.clamp(min=expected_grads[-1].abs().max().item())


@pytest.mark.parametrize('backend', FAST)
def test_tables_wider_than_q(backend):
    """They are brought to the dtype that the operators compute in, so the result is the same to the last digit."""
    inputs = make_inputs((3, 4))
    single = [t.float() for t in inputs]
    mixed = [t.double() if 'table' in what else t for what, t in zip(NAMES, single)]
    (expected, expected_grads), (found, grads) = (
        run(sape2_attention, tensors, device=device_of(backend), backend=backend, grid_size=(3, 4),
            num_prefix_tokens=1)
        for tensors in (single, mixed))
    assert torch.equal(found, expected) and [g.dtype for g in grads] == [t.dtype for t in mixed]
    for what, a, b in zip(NAMES, grads, expected_grads):
        assert_near(a, b.to(a.dtype), 1e-6, what)


@pytest.mark.parametrize('dtype, other', PAIRS)
def test_bias(dtype, other):
    """In the widest dtype, float32 at least."""
    q, k, _, table_x, table_y, _ = make_inputs((2, 3))
    tensors = q.to(dtype), k.to(dtype), table_x.to(other), table_y.to(other)
    bias = sape2_bias(*tensors, (2, 3), num_prefix_tokens=1)
    assert bias.dtype == torch.promote_types(torch.promote_types(dtype, other), F32)
    exact = sape2_bias(*(t.double() for t in tensors), (2, 3), num_prefix_tokens=1)
    assert_near(bias, exact, 1e-10 if F64 in (dtype, other) else 1e-5)


@pytest.mark.parametrize('backend', BACKENDS)
def test_tables_of_two_dtypes(backend):
    inputs = [t.float() for t in make_inputs((2, 3))]
    inputs[4] = inputs[4].double()
    kwargs = dict(grid_size=(2, 3), num_prefix_tokens=1)
    out, grads = run(sape2_attention, inputs, device=device_of(backend), backend=backend, **kwargs)
    assert grads[3].dtype == F32 and grads[4].dtype == F64
    assert_near(out, run(loops, [t.double() for t in inputs], **kwargs)[0], 1e-5)


@pytest.mark.parametrize('changed', ['q', 'k', 'v'])
def test_q_k_and_v_of_different_dtypes(changed):
    """By the reference, which is chosen; an operator that was requested refuses."""
    inputs = [t.float() for t in make_inputs((2, 3))]
    mixed = [t.double() if name == changed else t for name, t in zip(NAMES, inputs)]
    kwargs = dict(grid_size=(2, 3), num_prefix_tokens=1)
    out, grads = run(sape2_attention, mixed, **kwargs)
    assert out.dtype == mixed[2].dtype and [g.dtype for g in grads] == [t.dtype for t in mixed]
    expected, expected_grads = run(loops, [t.double() for t in mixed], **kwargs)
    assert_near(out, expected, 1e-5)
    for name, a, b in zip(NAMES[:-1], grads, expected_grads):
        assert_near(a, b, 1e-5, name)
    for backend in FAST:
        with pytest.raises(ValueError, match='only the reference supports q, k and v of different dtypes'):
            run(sape2_attention, mixed, device=device_of(backend), backend=backend, **kwargs)


@pytest.mark.parametrize('backend', FAST)
def test_codes_of_q_and_k_of_different_dtypes(backend):
    """By the reference, whatever is fastest."""
    q, k, _, table_x, table_y, _ = (t.to(device_of(backend), F32) for t in make_inputs((2, 3)))
    grid, options = timm_sape.Grid(2, 3, 1), dict(mode='k', gate_scale=0.5)
    expected = ops.axis_codes(q, k.double(), table_x, table_y, grid, backend='reference', **options)
    for found, wanted in zip(ops.axis_codes(q, k.double(), table_x, table_y, grid, **options), expected):
        assert found.dtype == F64 and torch.equal(found, wanted)
    with using_backend(backend), pytest.raises(ValueError, match='only the reference supports q and k of different'):
        ops.axis_codes(q, k.double(), table_x, table_y, grid, **options)


@pytest.mark.parametrize('between', [False, True])
@pytest.mark.parametrize('dtype, other', [*PAIRS, (F32, F32)])
def test_cope(dtype, other, between):
    q, k, *_ = make_inputs((2, 3))
    table = make_inputs((2, 3), seed=1)[0][0, 0, :4]
    inputs = [t.to(d).requires_grad_() for t, d in ((q, dtype), (k, dtype), (table, other))]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    bias = ops.contextual_bias(*inputs, timm_sape.Grid(2, 3, 1), gate_scale=8 ** -0.5, between=between)
    assert bias.dtype == torch.promote_types(dtype, F32)
    equations = reference_cope.cope_between if between else reference_cope.cope_bias
    expected = 8 ** 0.5 * equations(*doubles, (2, 3), num_prefix_tokens=1)
    assert_near(bias, expected, 1e-10 if dtype == F64 else 1e-5)
    grads = torch.autograd.grad(bias.square().sum(), inputs)
    for found, wanted in zip(grads, torch.autograd.grad(expected.square().sum(), doubles)):
        assert_near(found, wanted, tolerance_of(dtype, found.dtype))
    assert [g.dtype for g in grads] == [t.dtype for t in inputs]


def test_cope_with_q_and_k_of_different_dtypes():
    q, k, *_ = make_inputs((2, 3))
    table = make_inputs((2, 3), seed=1)[0][0, 0, :4]
    grid = timm_sape.Grid(2, 3, 1)
    found = ops.contextual_bias(q.float(), k, table, grid, gate_scale=0.5)
    assert found.dtype == F64
    assert_near(found, ops.contextual_bias(q.float().double(), k, table, grid, gate_scale=0.5), 1e-10)


@pytest.mark.parametrize('pos_enc, backend', [
    *((pos_enc, backend) for pos_enc in ('sape2_k', 'sape2_qk') for backend in (None, 'reference', 'torch', 'cpp')),
    *((pos_enc, backend) for pos_enc in ('sape2sq_k', 'cope') for backend in (None, 'reference'))])
@pytest.mark.parametrize('dtype', [F64, BF16])
def test_encodings_left_in_float32(pos_enc, backend, dtype):
    """A model in another dtype than its tables, as frameworks for mixed precision make it."""
    make_model = Maker(pos_enc, depth=1)
    x = make_model.images().to(dtype)

    model = make_model().to(dtype)
    for block in model.blocks:
        block.attn.encodings.float()
    with using_backend(backend):
        out = model(x)
        out.sum().backward()
    assert out.dtype == dtype and all(p.grad.isfinite().all() for p in model.parameters())
    assert_near(out, make_model().double()(x.double()), 1e-10 if dtype == F64 else 6e-2)


@pytest.mark.parametrize('fused', [True, False])
def test_a_mask_that_is_narrower_than_q(fused):
    """It is made wider; nothing else is rounded to its dtype."""
    q, k, v, *_ = (t.float() for t in make_inputs((2, 3)))
    mask = torch.randn(7, 7, generator=torch.Generator().manual_seed(1)).to(BF16)
    found, expected = (ops.attend(q, k, v, m, scale=0.3, fused=fused) for m in (mask, mask.float()))
    assert found.dtype == F32 and torch.equal(found, expected)


@pytest.mark.parametrize('backend', FAST)
def test_narrow_tables_keep_their_digits(backend):
    """Control of the tests above: rounding tables to bfloat16 changes the output by far more than they allow."""
    inputs = make_inputs((2, 3))
    kwargs = dict(grid_size=(2, 3), num_prefix_tokens=1)
    rounded = [t.bfloat16().double() if 'table' in name else t for name, t in zip(NAMES, inputs)]
    expected, _ = run(loops, inputs, **kwargs)
    found, _ = run(sape2_attention, rounded, F32, device_of(backend), backend=backend, **kwargs)
    assert (found - expected).abs().max() > 1e-4 * expected.abs().max()
    check(backend, inputs, (2, 3), 1)
