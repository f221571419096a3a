"""CoPE's bias as an operator, and the choice between it and the reference."""
import pytest
import torch

import reference_cope
import timm_sape
from harness import assert_near
from timm_sape import ops
from timm_sape.ops import reference
from timm_sape.ops.torch_contextual import torch_contextual_bias


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize('between', [False, True])
@pytest.mark.parametrize('ref_num_patches', [None, 24])
def test_operator_is_the_reference(between, ref_num_patches, monkeypatch):
    """The operator against plain autograd, in chunks of one head and of several."""
    grid = timm_sape.Grid(3, 5, 1)
    q, k, table = draw(2, 3, 16, 8, seed=0), draw(2, 3, 16, 8, seed=1), draw(7, 8, seed=2)
    weights = draw(2, 3, 16, 16, seed=3).detach()
    kwargs = dict(gate_scale=0.7, between=between, ref_num_patches=ref_num_patches)
    expected = reference.contextual_bias(q, k, table, grid, **kwargs)
    expected_grads = torch.autograd.grad((expected * weights).sum(), (q, k, table))
    monkeypatch.setattr('timm_sape.ops.cope.reference.contextual_bias', None)  # the operator must be chosen
    for size in (1, 10 ** 6):
        monkeypatch.setattr('timm_sape.ops.chunks.CHUNK', size)
        found = ops.contextual_bias(q, k, table, grid, **kwargs)
        assert_near(found, expected, 1e-12)
        for a, b in zip(torch.autograd.grad((found * weights).sum(), (q, k, table)), expected_grads):
            assert_near(a, b, 1e-12)


@pytest.mark.parametrize('function', [ops.contextual_bias, reference.contextual_bias])
@pytest.mark.parametrize('between', [False, True])
def test_equations(function, between):
    """Both against the loops, whose bias has CoPE's factor 1/sqrt(d)."""
    loops = reference_cope.cope_between if between else reference_cope.cope_bias
    inputs = draw(2, 2, 9, 4, seed=0), draw(2, 2, 9, 4, seed=1), draw(5, 4, seed=2)
    expected = loops(*inputs, (2, 4), num_prefix_tokens=1)
    found = 0.5 * function(*inputs, timm_sape.Grid(2, 4, 1), gate_scale=0.5, between=between)
    assert_near(found, expected, 1e-10)
    weights = draw(2, 2, 9, 9, seed=3).detach()
    for a, b in zip(torch.autograd.grad(found, inputs, weights), torch.autograd.grad(expected, inputs, weights)):
        assert_near(a, b, 1e-10, 'gradient')


@pytest.mark.parametrize('function', [ops.contextual_bias, reference.contextual_bias])
@pytest.mark.parametrize('between', [False, True])
def test_slope_at_whole_positions(function, between):
    """Gates of exactly 1/2. The slope is that to the right, which is 0 at the last position."""
    loops = reference_cope.cope_between if between else reference_cope.cope_bias
    inputs = draw(1, 2, 6, 4, seed=0), torch.zeros(1, 2, 6, 4, dtype=torch.float64).requires_grad_(), draw(3, 4, seed=2)
    expected = loops(*inputs, (2, 3))
    found = 0.5 * function(*inputs, timm_sape.Grid(2, 3), gate_scale=0.5, between=between)
    weights = draw(1, 2, 6, 6, seed=3).detach()
    for a, b in zip(torch.autograd.grad(found, inputs, weights), torch.autograd.grad(expected, inputs, weights)):
        assert_near(a, b, 1e-10, 'gradient')


@pytest.mark.parametrize('function', [ops.contextual_bias, reference.contextual_bias])
def test_no_patch_is_kept(function):
    inputs = draw(2, 2, 1, 4, seed=0), draw(2, 2, 1, 4, seed=1), draw(3, 4, seed=2)
    grid = timm_sape.Grid(2, 3, 1, torch.zeros(2, 0, dtype=torch.int64))
    bias = function(*inputs, grid, gate_scale=0.5)
    assert bias.shape == (2, 2, 1, 1) and not bias.any()
    assert not any(grad.any() for grad in torch.autograd.grad(bias.sum(), inputs))


def test_nothing_is_stored_but_inputs():
    q, k = (torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(2))
    table = torch.randn(5, 8, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()), lambda t: t):
        ops.contextual_bias(q, k, table, timm_sape.Grid(8, 8), gate_scale=0.3)
    assert kept and max(kept) == q.numel()


def test_opcheck():
    q, k = (torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(2))
    torch.library.opcheck(torch_contextual_bias, (q, k, torch.randn(5, 8, requires_grad=True), 0.3, True, 0.5))
