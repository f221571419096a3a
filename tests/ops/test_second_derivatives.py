"""Second derivatives: of the reference, of the operators by way of the reference, and optimizers that use them."""
import pytest
import timm
import torch
import torch.nn as nn
from timm.optim import create_optimizer_v2
from torch.autograd import gradcheck, gradgradcheck

import timm_sape
from harness import assert_near
from operators import (
    BACKENDS,
    DEVICE,
    FAST,
    FULL_WITHOUT_GPU,
    NAMES,
    device_of,
    make_inputs,
    second_derivatives_of_distances,
)
from timm_sape import ops
from timm_sape.functional import sape2_attention, sape2_bias
from timm_sape.ops import reference
from timm_sape.ops.backend import using_backend
from timm_sape.ops.cpp_operators import cpp_axis_codes
from timm_sape.ops.torch_codes import torch_axis_codes
from timm_sape.ops.triton_operators import triton_axis_codes

GRID = (2, 3)
# of a GPU Triton has no float64, which finite differences need
CHECKED = BACKENDS if DEVICE == 'cpu' else BACKENDS[:3]


def leaves(**kwargs):
    return [t.requires_grad_() for t in make_inputs(GRID, dim=4, **kwargs)]


def attention(backend, mode='k'):
    def function(*inputs):
        *tensors, bias_scale = inputs
        return sape2_attention(
            *tensors, GRID, bias_scale=bias_scale, num_prefix_tokens=1, mode=mode, backend=backend,
            ref_grid_size=(3, 3))

    return function


@second_derivatives_of_distances
@pytest.mark.parametrize('backend, mode', [
    pytest.param(backend, mode, marks=[pytest.mark.full] if backend == 'triton' else [])
    for backend in CHECKED for mode in (['qk'] if backend == 'triton' else ['q', 'k', 'qk'])])
def test_attention(backend, mode):
    """Against finite differences of the gradients, for all tensors at once."""
    assert gradgradcheck(attention(backend, mode), leaves(), fast_mode=True)


@second_derivatives_of_distances
@pytest.mark.full
@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('backend', CHECKED[1:])
def test_one_tensor_alone(backend, name):
    """The others need no gradient."""
    inputs = [t.detach().requires_grad_(name == other) for other, t in zip(NAMES, leaves())]
    assert gradgradcheck(attention(backend), inputs, fast_mode=True)


@second_derivatives_of_distances
def test_bias():
    q, k, _, table_x, table_y, _ = leaves()
    off_diagonal = ~torch.eye(7, dtype=torch.bool)

    def bias(*inputs):
        return sape2_bias(*inputs, GRID, num_prefix_tokens=1)[:, :, off_diagonal]

    assert gradgradcheck(bias, (q, k, table_x, table_y), fast_mode=True)


@pytest.mark.parametrize('backend, operator', [
    ('torch', torch_axis_codes), ('cpp', cpp_axis_codes),
    pytest.param('triton', triton_axis_codes, marks=FULL_WITHOUT_GPU)])
def test_codes(backend, operator):
    if device_of(backend) == 'cuda':
        pytest.skip('Triton has no float64 on a GPU, which finite differences need')
    q, k, _, table_x, table_y, _ = leaves(num_prefix_tokens=0)

    def codes(*inputs):
        return operator(*inputs, *GRID, 'qk', 0.3, 1.5, 1.0)

    assert gradcheck(codes, (q, k, table_x, table_y), fast_mode=True)
    assert gradgradcheck(codes, (q, k, table_x, table_y), fast_mode=True)


@pytest.mark.parametrize('between', [False, True])
@pytest.mark.parametrize('function', [ops.contextual_bias, reference.contextual_bias])
def test_cope(function, between):
    q, k, *_ = leaves()
    table = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)

    def bias(*inputs):
        return function(
            *inputs, timm_sape.Grid(*GRID, 1), gate_scale=0.5, between=between, ref_num_patches=9)

    assert gradgradcheck(bias, (q, k, table), fast_mode=True)


@second_derivatives_of_distances
@pytest.mark.parametrize('duplicated', [False, True])
@pytest.mark.parametrize('distance, dtype, tolerance', [
    (reference.pairwise_distance, torch.float64, 1e-10), (reference._distance_by_products, torch.float32, 1e-5)])
def test_equal_codes_have_no_second_derivative(distance, dtype, tolerance, duplicated):
    """Where a distance is 0, it has no gradient, and none of higher order: nothing is infinite or NaN there."""
    codes = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    if duplicated:
        codes[3] = codes[1]
    elif dtype == torch.float64:
        assert gradgradcheck(distance, codes.clone().requires_grad_())
    codes.requires_grad_()
    weights = torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    grad, = torch.autograd.grad((weights * distance(codes).square()).sum(), codes, create_graph=True)
    found, = torch.autograd.grad(grad.square().sum(), codes)
    # d/dw of sum of weights |w_i - w_j|^2 is linear: 2 (L + L^T) w
    both = weights + weights.T
    laplacian = 2 * (both.sum(1).diag() - both)
    assert_near(grad, laplacian @ codes, tolerance)
    if not duplicated:
        assert_near(found, 2 * laplacian @ laplacian @ codes, tolerance)
    assert found.isfinite().all()


def hessian_product(backend, dtype):
    device = device_of(backend)
    inputs = [t.to(device, dtype).detach().requires_grad_() for t in make_inputs((3, 4), batch=2)]
    *tensors, bias_scale = inputs
    out = sape2_attention(*tensors, (3, 4), bias_scale=bias_scale, num_prefix_tokens=1, backend=backend)
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    generator = torch.Generator().manual_seed(2)
    along = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in inputs]
    products = torch.autograd.grad(grads, inputs, along)
    return [t.cpu() for t in (*grads, *products)]


@second_derivatives_of_distances
@pytest.mark.parametrize('backend', FAST)
def test_hessian_products(backend):
    """In float32, with the gradients that they belong to: what q contributes through the codes counts once."""
    for a, b in zip(hessian_product(backend, torch.float32), hessian_product('reference', torch.float64)):
        assert_near(a, b, 1e-4)


@pytest.mark.parametrize('backend', BACKENDS)
def test_one_tensor_in_several_places(backend):
    """With `create_graph=True` the gradients are the same as without."""
    x, _, _, table, _, bias_scale = (t.float().to(device_of(backend)).requires_grad_() for t in make_inputs((3, 3)))
    out = sape2_attention(
        x, x, x, table, table, (3, 3), bias_scale=bias_scale, num_prefix_tokens=1, backend=backend).square().sum()
    once = torch.autograd.grad(out, (x, table, bias_scale), retain_graph=True)
    for a, b in zip(torch.autograd.grad(out, (x, table, bias_scale), create_graph=True), once):
        assert_near(a, b, 1e-5)


@pytest.mark.parametrize('backend', FAST)
def test_gradients_that_are_taken_under_autocast(backend):
    """The operators compute in their own dtype, so they do with `create_graph=True`."""
    device = device_of(backend)
    *inputs, bias_scale = (t.float().to(device).requires_grad_() for t in make_inputs((3, 3)))
    out = sape2_attention(*inputs, (3, 3), bias_scale=bias_scale, num_prefix_tokens=1, backend=backend).square().sum()
    expected = torch.autograd.grad(out, inputs, retain_graph=True)
    with torch.autocast(device, torch.bfloat16):
        found = torch.autograd.grad(out, inputs, create_graph=True)
    for a, b in zip(found, expected):
        assert_near(a, b, 1e-5)


def adahessian_step(backend):
    """Names, parameters before and after a step, and the Hessian's diagonal as the optimizer estimates it."""
    torch.manual_seed(0)
    model = timm.create_model(
        'test_vit_sape2_k_ape', img_size=32, patch_size=8, embed_dim=32, num_heads=2, depth=2, num_classes=4,
        global_pool='avg').double()  # a class token has no bias, so the last layer's would not matter
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = create_optimizer_v2(model, opt='adahessian', lr=0.1)
    assert optimizer.is_second_order
    x, y = torch.randn(4, 3, 32, 32, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    with using_backend(backend):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward(create_graph=True)  # as timm's scaler does for such an optimizer
        optimizer.step()
    return before, dict(model.named_parameters()), {name: p.hess for name, p in model.named_parameters()}


@pytest.mark.full
@pytest.mark.filterwarnings('ignore:Using backward.* with create_graph=True')
@pytest.mark.parametrize('backend', [None, *(FAST if DEVICE == 'cpu' else FAST[:2])])
def test_adahessian(backend):
    """timm's `--opt adahessian` trains a model, and the backend makes no difference."""
    _, expected, expected_hessian = adahessian_step('reference')
    before, after, hessian = adahessian_step(backend)
    for name, p in after.items():
        assert (p != before[name]).any(), name
        assert_near(p, expected[name], 1e-8, name)
        assert_near(hessian[name], expected_hessian[name], 1e-8, name)
    assert all(hessian[name].any() for name in hessian if 'table' in name)
