"""torch.func and forward mode: ensembles, gradients of single images, derivatives along a direction."""
import copy

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

from common import Maker
from harness import assert_near
from operators import FAST, make_inputs, second_derivatives_of_distances, strictest
from timm_sape.functional import sape2_attention, sape2_bias
from timm_sape.ops.backend import using_backend

POS_ENCS = [
    'sape2_k', 'sape2_q', 'sape2_qk', 'sape2sq_k', 'ape+auto_sape2_k', 'rope2d+sape2_k', 'cope', 'shaw', 'irpe_k',
    'irpe_qkv']


def assert_close(actual, expected, tolerance, what):
    """Within `tolerance` of the largest entry, or of 1."""
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1), what


@pytest.mark.parametrize('pos_enc', POS_ENCS)
def test_ensemble(pos_enc):
    """vmap over models with gradients is the plain loop over them."""
    make_model = Maker(pos_enc)
    models = [make_model().double() for _ in range(3)]
    generator = torch.Generator().manual_seed(0)
    for model in models[1:]:
        for p in model.parameters():
            p.data += 0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    skeleton, x = copy.deepcopy(models[0]).to('meta'), make_model.images().double()

    def loss(params, buffers, x):
        return functional_call(skeleton, (params, buffers), (x,)).square().sum()

    params, buffers = stack_module_state(models)
    losses = vmap(loss, (0, 0, None))(params, buffers, x)
    grads = vmap(grad(loss), (0, 0, None))(params, buffers, x)
    for i, model in enumerate(models):
        expected = model(x).square().sum()
        assert_near(losses[i], expected, 1e-10)
        for (name, p), g in zip(model.named_parameters(), torch.autograd.grad(expected, list(model.parameters()))):
            assert_close(grads[name][i], g, 1e-10, name)
    assert losses.unique().numel() == 3


@pytest.mark.parametrize('pos_enc', ['ape+sape2_k', *POS_ENCS])
def test_gradients_of_single_images(pos_enc):
    make_model = Maker(pos_enc)
    model = make_model()
    x, params = make_model.images(3), dict(model.named_parameters())

    def loss(params, image):
        return functional_call(model, params, image[None]).square().sum()

    found = vmap(grad(loss), (None, 0))(params, x)
    for i, image in enumerate(x):
        expected = torch.autograd.grad(loss(params, image), list(params.values()))
        for name, g in zip(params, expected):
            assert_close(found[name][i], g, 1e-4, name)


@pytest.mark.parametrize('frozen', [True, False])
@pytest.mark.parametrize('pos_enc', ['ape+sape2_k', *POS_ENCS])
def test_forward_derivatives(pos_enc, frozen):
    """Behind an operator without a rule for them they would be zero. By the chain rule <w, J t> = <J^T w, t>."""
    make_model = Maker(pos_enc)
    model = make_model().double().requires_grad_(not frozen)
    x = make_model.images().double()
    t = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, t))).tangent
    assert_near(jvp(model, (x,), (t,))[1], tangent, 1e-10)
    out = model(x.requires_grad_())
    rows = []
    for entry in out.flatten():
        row, = torch.autograd.grad(entry, x, retain_graph=True)
        rows.append((row * t).sum())
    assert_near(tangent, torch.stack(rows).view_as(out), 1e-10)
    step = 1e-6
    with torch.no_grad():
        expected = (model(x + step * t) - model(x - step * t)) / (2 * step)
    assert_near(tangent, expected, 1e-6)


@pytest.mark.parametrize('pos_enc', ['ape+sape2_k', *POS_ENCS])
def test_all_rows_of_a_jacobian_at_once(pos_enc):
    """jacrev is vmap over the gradients that come in. For `cdist` alone torch gives wrong ones."""
    make_model = Maker(pos_enc)
    model = make_model().double()
    x, params = make_model.images(1).double(), dict(model.named_parameters())
    found = jacrev(lambda params: functional_call(model, params, x)[0])(params)
    for i, entry in enumerate(model(x)[0]):
        rows = torch.autograd.grad(entry, list(params.values()), retain_graph=True, materialize_grads=True)
        for name, row in zip(params, rows):
            assert_close(found[name][i], row, 1e-10, name)


def test_jacobian_of_the_bias():
    q, k, table_x, table_y = (t.detach() for t in make_inputs((2, 3), dim=4)[:2] + make_inputs((2, 3), dim=4)[3:5])

    def bias(table_x):
        return sape2_bias(q, k, table_x, table_y, (2, 3), num_prefix_tokens=1).flatten()[::7]

    assert_near(jacrev(bias)(table_x), jacfwd(bias)(table_x), 1e-10)


@pytest.mark.full
@pytest.mark.parametrize('backend', ['eager', 'aot_eager'])
@pytest.mark.parametrize('pos_enc', ['ape+sape2_k', 'ape+cope'])
def test_forward_derivatives_of_compiled_models(pos_enc, backend):
    """A graph that was compiled without forward mode is not used with it, where its operators would lose a part."""
    make_model = Maker(pos_enc)
    model = make_model().double().requires_grad_(False)
    for block in model.blocks:
        block.attn.fused_attn = False
    x = make_model.images().double()
    t = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = jvp(model, (x,), (t,))[1]
    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend)
    assert_near(compiled(x), model(x), 1e-10)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(compiled(forward_ad.make_dual(x, t))).tangent
    assert_near(tangent, expected, 1e-10)


def attention(*inputs, **kwargs):
    *tensors, bias_scale = inputs
    return sape2_attention(*tensors, (2, 3), bias_scale=bias_scale, num_prefix_tokens=1, **kwargs)


@pytest.mark.parametrize('backend', ['eager', pytest.param('aot_eager', marks=pytest.mark.skipif(
    torch.__version__ < (2, 14), reason='torch < 2.14 cannot compile jvp of a slice: its view has no forward view'))])
def test_compiled_forward_derivatives(backend):
    q, *others = make_inputs((2, 3), dim=4)
    t = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def derivative(q, t):
        return jvp(lambda q: attention(q, *others), (q,), (t,))[1]

    torch.compiler.reset()
    assert_near(torch.compile(derivative, backend=backend)(q, t), derivative(q, t), 1e-10)


def test_compiled_vmap():
    """In one graph."""
    q, *others = (t.detach() for t in make_inputs((2, 3), dim=4, batch=3))
    torch.compiler.reset()
    others[:2] = (t[:1] for t in others[:2])

    def of_image(q):
        return attention(q[None], *others)[0]

    found = torch.compile(vmap(of_image), fullgraph=True, backend='aot_eager')(q)
    assert_near(found, torch.stack([of_image(image) for image in q]), 1e-10)


@second_derivatives_of_distances
def test_functional():
    """grad, vjp, vmap, jvp and hessian of `sape2_attention`, which chooses the reference then."""
    inputs = make_inputs((2, 3), dim=4)
    weights = torch.randn(1, 2, 7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(*inputs):
        return (weights * attention(*inputs)).sum()

    with_grad = [t.clone().requires_grad_() for t in inputs]
    expected = torch.autograd.grad(loss(*with_grad), with_grad)
    everything = tuple(range(len(inputs)))
    by_vjp = vjp(attention, *inputs)[1](weights)
    for a, b, e in zip(grad(loss, everything)(*inputs), by_vjp, expected):
        assert_near(a, e, 1e-10)
        assert_near(b, e, 1e-10)
    along = [torch.randn_like(t) for t in inputs]
    slope = jvp(loss, tuple(inputs), tuple(along))[1]
    assert_near(slope, sum((g * t).sum() for g, t in zip(expected, along)), 1e-10)
    # of the table: H t is the derivative of the gradient along t
    table = 3
    found = hessian(loss, table)(*inputs)
    gradient = torch.autograd.grad(loss(*with_grad), with_grad[table], create_graph=True)[0]
    product, = torch.autograd.grad(gradient, with_grad[table], along[table])
    assert_near((found * along[table]).sum((-2, -1)), product, 1e-10)


@pytest.mark.parametrize('pos_enc', ['ape', 'rope2d', 'rpb', 'sape2_k'])
def test_vmap_over_kept_patches(pos_enc):
    make_model = Maker(pos_enc)
    model, x = make_model(), make_model.images(1)
    kept = torch.tensor([[[0, 3, 4]], [[5, 1, 2]]])  # [2, B, K]
    found = vmap(lambda keep_indices: model(x, keep_indices=keep_indices))(kept)
    for out, keep_indices in zip(found, kept):
        assert_near(out, model(x, keep_indices=keep_indices), 1e-5)


@second_derivatives_of_distances
@pytest.mark.parametrize('scale', [0., -0.3])
def test_any_scale(scale):
    """A scale that is not positive is unusual, but is computed, also where the reference is taken."""
    q, k, v, table_x, table_y, gain = make_inputs((2, 3))
    q.requires_grad_()

    def second(backend):
        out = sape2_attention(
            q, k, v, table_x, table_y, (2, 3), num_prefix_tokens=1, scale=scale, bias_scale=gain, backend=backend)
        first, = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        return out, *torch.autograd.grad(first.square().sum(), q)

    bias = sape2_bias(q, k, table_x, table_y, (2, 3), num_prefix_tokens=1)
    expected = (scale * q @ k.mT + gain.view(-1, 1, 1) * bias).softmax(dim=-1) @ v
    found = [second(backend) for backend in ('torch', 'reference')]
    for out, gradient in found:
        assert_near(out, expected, 1e-10)
        assert_near(gradient, found[1][1], 1e-10)


def test_vmap_over_the_functional_api():
    """Each argument may be mapped over, the tables alone as well as everything."""
    sets = [make_inputs((2, 3), dim=4, seed=seed) for seed in range(3)]
    stacked = [torch.stack(t) for t in zip(*sets)]
    expected = torch.stack([attention(*inputs) for inputs in sets])
    assert_near(vmap(attention)(*stacked), expected, 1e-10)
    q, k, v, _, _, gain = sets[0]
    of_tables = vmap(lambda table_x, table_y: attention(q, k, v, table_x, table_y, gain))(*stacked[3:5])
    for i, (*_, table_x, table_y, _) in enumerate(sets):
        assert_near(of_tables[i], attention(q, k, v, table_x, table_y, gain), 1e-10)
    biases = vmap(lambda *args: sape2_bias(*args, (2, 3), num_prefix_tokens=1))(*stacked[:2], *stacked[3:5])
    for bias, (q, k, _, table_x, table_y, _) in zip(biases, sets):
        assert_near(bias, sape2_bias(q, k, table_x, table_y, (2, 3), num_prefix_tokens=1), 1e-10)


@pytest.mark.parametrize('transform', [
    lambda f, x: grad(lambda x: f(x).sum())(x),
    lambda f, x: vmap(f)(x[None]),
    lambda f, x: jvp(f, (x,), (x,)),
    lambda f, x: jacrev(f)(x),
], ids=['grad', 'vmap', 'jvp', 'jacrev'])
@pytest.mark.parametrize('backend', FAST)
def test_operators_are_refused(backend, transform):
    """Not silently wrong: an operator that was requested says what it cannot do."""
    device, dtype, _ = strictest(backend)
    v, *others = (t.to(device, dtype) for t in make_inputs((2, 3)))

    def function(v, **kwargs):
        q, k, table_x, table_y, bias_scale = others
        return attention(q, k, v, table_x, table_y, bias_scale, **kwargs)

    transform(function, v)
    text = 'only the reference supports torch.func and forward mode'
    with pytest.raises(ValueError, match=text):
        transform(lambda v: function(v, backend=backend), v)
    with using_backend(backend), pytest.raises(ValueError, match=text):
        transform(function, v)
    function(v, backend=backend)


@second_derivatives_of_distances
def test_gradient_of_a_forward_derivative():
    """It was NaN: the root of a square of 0 has an infinite gradient."""
    q, k, v, table_x, table_y, _ = make_inputs((3, 4))
    dq = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=q.dtype)

    def loss(q, **backend):
        return sape2_attention(q, k, v, table_x, table_y, (3, 4), num_prefix_tokens=1, **backend).sin().sum()

    found = grad(lambda q: jvp(loss, (q,), (dq,))[1])(q)
    leaf = q.clone().requires_grad_()
    first, = torch.autograd.grad(loss(leaf, backend='reference'), leaf, create_graph=True)
    expected, = torch.autograd.grad((first * dq).sum(), leaf)
    assert_near(found, expected, 1e-11)


@pytest.mark.parametrize('transform', ['vmap', 'jvp', 'create_graph'])
def test_float32_under_autocast(transform):
    """Results keep the dtype and the accuracy of v, as without a transform."""
    inputs = [t.float() for t in make_inputs((3, 4))[:5]]

    def attention(q):
        return sape2_attention(q, *(t.to(q) for t in inputs[1:]), (3, 4), num_prefix_tokens=1)

    def result(q):
        if transform == 'vmap':
            return vmap(attention)(q[None])[0]
        if transform == 'jvp':
            return jvp(attention, (q,), (torch.ones_like(q),))[1]
        leaf = q.clone().requires_grad_()
        return torch.autograd.grad(attention(leaf).sin().sum(), leaf, create_graph=True)[0]

    expected = result(inputs[0].double())
    with torch.autocast('cpu', torch.bfloat16):
        found = result(inputs[0])
    assert found.dtype == torch.float32
    assert_near(found.double(), expected, 1e-5)
