"""SaPE2's attention by each backend against its equations: outputs and all gradients."""
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import timm_sape
from harness import assert_near
from operators import BACKENDS, FAST, FULL_WITHOUT_GPU, HALVES, check, device_of, make_inputs, run, strictest
from timm_sape import ops
from timm_sape.functional import sape2_attention

GRIDS = [((3, 5), 0), ((3, 5), 5), ((1, 7), 1), ((7, 1), 0), ((4, 4), 1), ((1, 1), 1)]


@pytest.mark.interpreted
@pytest.mark.one_of(4)
@pytest.mark.parametrize('mode', ['q', 'k', 'qk'])
@pytest.mark.parametrize('grid, num_prefix_tokens', GRIDS)
@pytest.mark.parametrize('backend', BACKENDS)
def test_equations(backend, grid, num_prefix_tokens, mode):
    check(backend, make_inputs(grid, num_prefix_tokens), grid, num_prefix_tokens, mode=mode)


@pytest.mark.interpreted
@pytest.mark.one_of(4)
@pytest.mark.parametrize('backend, dtype', [(backend, torch.float32) for backend in FAST] + HALVES)
@pytest.mark.parametrize('grid, num_prefix_tokens', GRIDS)
def test_precision(backend, dtype, grid, num_prefix_tokens):
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    check(backend, make_inputs(grid, num_prefix_tokens), grid, num_prefix_tokens, dtype, tolerance)


@pytest.mark.parametrize('backend', FAST)
@pytest.mark.parametrize('ref_grid_size', [(2, 7), (6, 4)])
def test_another_grid(backend, ref_grid_size):
    check(backend, make_inputs((3, 5), npos=5), (3, 5), 1, ref_grid_size=ref_grid_size)


@pytest.mark.parametrize('backend', BACKENDS)
def test_slope_at_whole_positions(backend):
    """Gates of exactly 1/2: of the positions 2, 3/2, 1 and 1/2 one is whole and one is the last. The slope is that to
    the right, which is 0 at the last position."""
    inputs = make_inputs((4, 4), npos=3)
    inputs[0].zero_()
    check(backend, inputs, (4, 4), 1)


@pytest.mark.parametrize('backend', FAST)
def test_dropped_patches(backend):
    keep = torch.tensor([[7, 2, 11, 14], [0, 13, 5, 3]])
    inputs = make_inputs((3, 5), batch=2)
    inputs[:3] = [t[:, :, :5] for t in inputs[:3]]
    check(backend, inputs, (3, 5), 1, keep_indices=keep)


@pytest.mark.parametrize('batch, heads, num_patches', [(2, 2, 0), (0, 2, 15), (2, 0, 15)])
@pytest.mark.parametrize('backend', BACKENDS)
def test_nothing_to_attend_to(backend, batch, heads, num_patches):
    """Without patches, images or heads the output is empty and all gradients are zero."""
    keep = torch.arange(num_patches).expand(batch, -1) if num_patches == 0 else None
    inputs = make_inputs((3, 5), 0, batch=2)
    inputs[:3] = [t[:batch, :heads, :num_patches] for t in inputs[:3]]
    inputs[5] = inputs[5][:heads]
    out, grads = run(sape2_attention, inputs, device=device_of(backend), backend=backend, grid_size=(3, 5),
                     keep_indices=keep)
    assert out.shape == inputs[2].shape
    for grad, given in zip(grads, inputs):
        assert grad.shape == given.shape and not grad.any()


@pytest.mark.parametrize('backend', FAST)
def test_scales(backend):
    check(backend, make_inputs((3, 4), heads=3, dim=6), (3, 4), 1, scale=0.7, gate_scale=1.3)


@pytest.mark.parametrize('backend', FAST)
def test_learned_gate_scale(backend):
    device, dtype, tolerance = strictest(backend)

    def gradient(backend, *args):
        scale = torch.tensor(0.4).to(*args).requires_grad_()
        *tensors, bias_scale = [t.to(*args) for t in make_inputs((3, 4))]
        out = sape2_attention(
            *tensors, (3, 4), bias_scale=bias_scale, num_prefix_tokens=1, gate_scale=scale, backend=backend)
        return torch.autograd.grad(out.square().sum(), scale)[0].cpu()

    assert_near(gradient(backend, device, dtype), gradient('reference', torch.float64), tolerance)


@pytest.mark.parametrize('backend', FAST)
@pytest.mark.parametrize('bias_scale', [0.0, -1.5, torch.tensor(2.0)])
def test_number_as_bias_scale(backend, bias_scale):
    device, dtype, tolerance = strictest(backend)

    def output(backend, *args):
        *tensors, _ = [t.to(*args) for t in make_inputs((3, 4))]
        scale = bias_scale.to(*args) if isinstance(bias_scale, torch.Tensor) else bias_scale
        return sape2_attention(*tensors, (3, 4), bias_scale=scale, num_prefix_tokens=1, backend=backend).cpu()

    assert_near(output(backend, device, dtype), output('reference', torch.float64), tolerance)


@pytest.mark.parametrize('backend', FAST)
def test_poisoned_memory(backend):
    """Every entry of every result is written: what was in the memory before does not show."""
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        inputs = make_inputs((3, 5), 2, dim=5)
        kwargs = dict(grid_size=(3, 5), num_prefix_tokens=2)
        out, grads = run(sape2_attention, inputs, torch.float32, device_of(backend), backend=backend, **kwargs)
        assert out.isfinite().all() and all(g.isfinite().all() for g in grads)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize('where', ['q', 'first k', 'last k', 'table_x'])
@pytest.mark.parametrize('backend', BACKENDS)
def test_nan_is_not_hidden(backend, where):
    """NaN in q shows in the output of that token, NaN in a key in all outputs. NaN at position 0 of a table, which each
    line looks up, shows in all outputs but that of the prefix token."""
    device, dtype, _ = strictest(backend)
    *tensors, scale = [t.to(device, dtype) for t in make_inputs((3, 5))]
    poisoned, seen = {
        'q': (tensors[0][:, :, -1], -1),
        'first k': (tensors[1][:, :, 0], slice(None)),
        'last k': (tensors[1][:, :, -1], slice(None)),
        'table_x': (tensors[3][0], slice(1, None)),
    }[where]
    poisoned.fill_(torch.nan)
    out = sape2_attention(*tensors, (3, 5), bias_scale=scale, num_prefix_tokens=1, backend=backend)
    assert out[:, :, seen].isnan().all()


class NoGradient(torch.autograd.Function):
    """A copy whose gradient is None."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize('backend', ['reference', 'torch'])
def test_change_in_place(backend):
    """The output may be changed in place. (Compiled backward passes need it, so there PyTorch raises, as for SDPA.)"""
    inputs = [t.requires_grad_() for t in make_inputs((3, 5))]
    *tensors, scale = inputs
    found = []
    for change in (torch.relu, torch.relu_):
        out = change(sape2_attention(*tensors, (3, 5), bias_scale=scale, num_prefix_tokens=1, backend=backend))
        found.append(torch.autograd.grad(out.square().sum(), inputs))
    for a, b in zip(*found):
        assert_near(a, b)


@pytest.mark.parametrize('backend', BACKENDS)
def test_no_gradient(backend):
    """The output may be used where no gradient comes from: then the arguments get none from here."""
    device, dtype, _ = strictest(backend)
    inputs = [t.to(device, dtype).requires_grad_() for t in make_inputs((3, 5))]
    *tensors, scale = inputs
    out = sape2_attention(*tensors, (3, 5), bias_scale=scale, num_prefix_tokens=1, backend=backend)
    (NoGradient.apply(out).sum() + sum(t.sum() for t in inputs)).backward()
    assert all(torch.equal(t.grad, torch.ones_like(t)) for t in inputs)


def attention(backend, grid=(3, 5), npos=None, dtype=torch.float32, **made_of_q_and_k):
    """Attention with further keywords, each given as a function of q and k."""
    *tensors, scale = (t.to(device_of(backend), dtype) for t in make_inputs(grid, npos=npos))
    keywords = {name: make(*tensors[:2]) for name, make in made_of_q_and_k.items()}
    return ops.sape2_attention(
        *tensors, timm_sape.Grid(*grid, 1), mode='k', gate_scale=0.4, bias_scale=scale, scale=0.3, backend=backend,
        **keywords).cpu()


@pytest.mark.parametrize('backend', [*FAST[:2], pytest.param('triton', marks=FULL_WITHOUT_GPU)])
@pytest.mark.parametrize('rotated', [lambda q, k: (q, -k), lambda q, k: (-q, k)], ids=['k', 'q'])
def test_one_of_both_is_rotated(backend, rotated):
    assert_near(attention(backend, rotated=rotated), attention('reference', rotated=rotated), 1e-5)


def test_rotated_tensors_of_another_dtype():
    """By the reference, which is chosen."""
    def rotated(q, k):
        return q.double(), k.double()

    assert torch.equal(attention(None, rotated=rotated), attention('reference', rotated=rotated))
    for backend in FAST:
        with pytest.raises(ValueError, match='only the reference supports q, k and v of different dtypes'):
            attention(backend, rotated=rotated)


@pytest.mark.parametrize('factor, npos', [(16, None), (1, 34)])
def test_limits_of_triton(factor, npos):
    """They are for q and k as they are multiplied, and for tables, which may be longer than the grid."""
    with pytest.raises(ValueError, match='a head dim of 64 and codes of 32 entries at most'):
        attention(
            'triton', npos=npos, rotated=lambda q, k: (q.repeat(1, 1, 1, factor), k.repeat(1, 1, 1, factor)))


def test_limits_of_triton_are_those_of_the_keys_for_the_codes():
    """In float32 codes have 32 entries at most, in bfloat16 64."""
    with pytest.raises(ValueError, match='in torch.float32 its kernels take .* codes of 32 entries at most'):
        attention('triton', (3, 40), dtype=torch.bfloat16, axis_keys=lambda q, k: (k.float(), k.float()))


@pytest.mark.parametrize('rotated', [False, True])
@pytest.mark.parametrize('backend', [*BACKENDS[:-1], pytest.param('triton', marks=FULL_WITHOUT_GPU)])
def test_strides_of_what_is_kept(backend, rotated):
    """Hooks may give back what is kept for the backward pass with other strides."""
    device, dtype, _ = strictest(backend)
    leaves = [t.to(device, dtype).requires_grad_() for t in make_inputs((2, 3))]

    def gradients(pack):
        q, k = leaves[:2]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = ops.sape2_attention(
                *leaves[:5], timm_sape.Grid(2, 3, 1), mode='qk', gate_scale=0.4, bias_scale=leaves[5], scale=0.3,
                rotated=(q.cos(), k.cos()) if rotated else None, backend=backend)
        return torch.autograd.grad(out.sin().sum(), leaves)

    expected = gradients(lambda t: t)
    for pack in (
            lambda t: t.mT.contiguous().mT if t.ndim > 1 else t,
            lambda t: torch.cat([t, t], dim=-1)[..., :t.shape[-1]] if t.ndim > 1 else t):
        for a, b in zip(gradients(pack), expected):
            assert_near(a, b, 1e-6)


class Operators(TorchDispatchMode):
    """The names of those that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize('backend, dtype, mode', [
    *(('cpp', dtype, mode) for dtype in (None, torch.bfloat16) for mode in ('k', 'qk')),
    ('triton', None, 'qk'),
    pytest.param('triton', None, 'k', marks=FULL_WITHOUT_GPU),
    *(pytest.param('triton', torch.float16, mode, marks=pytest.mark.full) for mode in ('k', 'qk')),
    *(pytest.param('triton', torch.bfloat16, mode, marks=FULL_WITHOUT_GPU) for mode in ('k', 'qk'))])
def test_as_one_operator_or_two(backend, dtype, mode):
    """Both run the same kernels. Only gradients of q and k differ by how sums of two or three parts are rounded.

    Nothing else is computed: no gradients that are zero, and no sums of two gradients if the operator is one.
    """
    device, strict, tolerance = strictest(backend)
    dtype, tolerance = (strict, tolerance) if dtype is None else (dtype, 4 * torch.finfo(dtype).eps)
    grid, found, names = timm_sape.Grid(3, 5, 2), [], []
    inputs = make_inputs((3, 5), 2)
    for rotated in (False, True):
        q, k, v = (t.to(device, dtype).requires_grad_() for t in inputs[:3])
        tables = [t.to(device, torch.promote_types(dtype, torch.float32)).requires_grad_() for t in inputs[3:]]
        with Operators() as operators:
            out = ops.sape2_attention(
                q, k, v, *tables[:2], grid, mode=mode, gate_scale=0.4, bias_scale=tables[2], scale=0.3,
                ref_grid_size=(2, 5), rotated=(q.clone(), k.clone()) if rotated else None, backend=backend)
            grads = torch.autograd.grad(out.double().square().sum(), (q, k, v, *tables))
        found.append((out, *grads))
        names.append(operators.names)
    one, codes, attention = {
        'triton': ('sape2_attention_triton', 'axis_codes_triton', 'distance_attention_triton'),
        'cpp': ('sape2_attention_cpp', 'axis_codes_cpp', 'distance_attention_cpp')}[backend]
    assert [[name[11:] for name in run if name.startswith('timm_sape::')] for run in names] == [
        [one, f'{one}_backward'], [codes, attention, f'{attention}_backward', f'{codes}_backward']]
    assert 'aten::zeros' not in names[0] + names[1]
    assert [run.count('aten::add.Tensor') for run in names] == [0, 2]
    for i, (one, two) in enumerate(zip(*found)):
        if i in (1, 2):
            assert_near(one, two, tolerance)
        else:
            assert torch.equal(one, two)
