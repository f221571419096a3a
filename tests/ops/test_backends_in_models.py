"""Models by every backend: gradients, autocast, checkpoints, compiled and exported graphs, training."""
import copy

import pytest
import timm
import torch
import torch.nn as nn

import timm_sape
from common import Maker
from harness import assert_near
from operators import BACKENDS, DEVICE, FAST, FULL_WITHOUT_GPU, device_of, make_inputs, strictest
from timm_sape.ops.backend import using_backend
from timm_sape.ops.cpp_operators import cpp_axis_codes, cpp_distance_attention_forward, cpp_sape2_attention_forward
from timm_sape.ops.sape2 import axis_codes
from timm_sape.ops.torch_codes import torch_axis_codes
from timm_sape.ops.torch_distances import torch_distance_attention
from timm_sape.ops.triton_operators import (
    triton_axis_codes, triton_distance_attention_forward, triton_sape2_attention_forward)

POS_ENCS = ['rope2d+sape2_k', 'pope+sape2_k', *(
    pytest.param(name, marks=pytest.mark.full) for name in (
        'sape2_k', 'sape2_q', 'sape2_qk', 'ape+auto_sape2_k', 'sape2sq_k+sape2_k', 'pape+sape2_k'))]


@pytest.mark.parametrize('backend', FAST)
def test_codes_stay_wide_under_autocast(backend):
    device = device_of(backend)
    q, k, _, table_x, table_y, _ = make_inputs((3, 4))
    inputs = [t.detach().float().to(device).requires_grad_() for t in (q, k, table_x, table_y)]
    found = []
    for enabled in (False, True):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            codes = axis_codes(*inputs, timm_sape.Grid(3, 4, 1), mode='k', gate_scale=0.3, backend=backend)
            found.append([*codes, *torch.autograd.grad(sum(c.sum() for c in codes), inputs)])
    for plain, autocast in zip(*found):
        assert torch.equal(plain, autocast)


@pytest.mark.parametrize('backend, codes_operator, attention_operator, merged_operator', [
    ('torch', torch_axis_codes, torch_distance_attention, None),
    ('cpp', cpp_axis_codes, cpp_distance_attention_forward, cpp_sape2_attention_forward),
    pytest.param(
        'triton', triton_axis_codes, triton_distance_attention_forward, triton_sape2_attention_forward,
        marks=FULL_WITHOUT_GPU),
])
def test_opcheck(backend, codes_operator, attention_operator, merged_operator):
    device, dtype, _ = strictest(backend)
    q, k, v, table_x, table_y, bias_scale = (t.to(device, dtype) for t in make_inputs((3, 4)))
    tensors = [t.clone().requires_grad_() for t in (q, k, v)]
    tables = [t.requires_grad_() for t in (table_x, table_y)]
    for prefix in (0, 1):  # left out, or not
        tokens = [t[:, :, 1 - prefix:].detach().clone().requires_grad_() for t in tensors[:2]]
        torch.library.opcheck(codes_operator, (*tokens, *tables, 3, 4, 'qk', 0.3, 1.0, 0.5))
    codes = [c.detach().requires_grad_() for c in codes_operator(*tensors[:2], *tables, 3, 4, 'k', 0.3, 1.0, 1.0)]
    torch.library.opcheck(attention_operator, (*tensors, *codes, bias_scale.requires_grad_(), 0.3))
    if merged_operator is not None:
        torch.library.opcheck(
            merged_operator,
            (*tensors, *tables, bias_scale.requires_grad_(), (3, 4), 'qk', (0.3, 1.0, 0.5, 0.3)))


@pytest.mark.parametrize('operator, backend', [
    (torch_axis_codes, 'torch'), (cpp_axis_codes, 'cpp'), (triton_axis_codes, 'triton')])
def test_codes_of_patches_after_prefix_tokens(operator, backend):
    """Prefix tokens change nothing, and their gradients are 0, also if memory held something else before."""
    device, dtype, _ = strictest(backend)
    q, k, _, table_x, table_y, _ = (t.to(device, dtype) for t in make_inputs((3, 4)))
    found = []
    for first in (0, 1):
        inputs = [t.detach().clone().requires_grad_() for t in (q[:, :, first:], k[:, :, first:], table_x, table_y)]
        codes = operator(*inputs, 3, 4, 'k', 0.3, 1.0, 1.0)
        torch.full(q.shape, torch.nan, dtype=dtype, device=device)  # freed, and likely used again for the gradients
        grads = torch.autograd.grad(sum((c * c).sum() for c in codes), inputs)
        found.append([*codes, *(g[:, :, 1 - first:] for g in grads[:2]), *grads[2:]])
        if first == 0:
            assert not any(g[:, :, :1].any() or g.isnan().any() for g in grads[:2])
    for a, b in zip(*found):
        assert torch.equal(a, b)


@pytest.mark.parametrize('backend', [
    pytest.param(backend, marks=FULL_WITHOUT_GPU if backend == 'triton' else []) for backend in FAST])
@pytest.mark.parametrize('pos_enc', POS_ENCS)
def test_loss_and_gradients(pos_enc, backend):
    device, dtype, tolerance = strictest(backend)
    make_model = Maker(pos_enc)
    results = []
    for used, *where in (('reference', torch.float64), (backend, device, dtype)):
        model = make_model().to(*where)
        with using_backend(used):
            loss = model(make_model.images().to(*where)).square().sum()
            loss.backward()
        results.append((loss.cpu(), [p.grad.cpu() for p in model.parameters()]))
    assert_near(results[1][0], results[0][0], tolerance)
    for a, b in zip(results[1][1], results[0][1]):
        assert (a - b).abs().max() <= 10 * tolerance * b.abs().max().clamp(min=1)


@pytest.mark.interpreted
@pytest.mark.one_of(2)
@pytest.mark.parametrize('way', ['eager', pytest.param('compiled', marks=pytest.mark.full), 'checkpointed'])
@pytest.mark.parametrize('amp', [True, False])
@pytest.mark.parametrize('backend', BACKENDS)
def test_training_step(backend, amp, way):
    """Loss and gradients on the device that is there, every backend included, against float64 of the same weights."""
    device = 'cpu' if backend == 'cpp' else DEVICE
    make_model = Maker('ape+sape2_k', depth=1)
    model, x, y = make_model().to(device), make_model.images(), torch.tensor([2, 1])
    exact = copy.deepcopy(model).cpu().double()
    with using_backend('reference'):
        expected = nn.functional.cross_entropy(exact(x.double()), y)
    model.set_grad_checkpointing(way == 'checkpointed')
    torch._dynamo.reset()  # or what was compiled of another backend would run
    compiler = 'inductor' if device == 'cuda' else 'aot_eager'  # the former takes a minute on a CPU
    forward = torch.compile(model, fullgraph=True, backend=compiler) if way == 'compiled' else model
    with using_backend(backend):  # backward as well, where checkpoints are computed again
        with torch.autocast(device, torch.bfloat16, enabled=amp):
            loss = nn.functional.cross_entropy(forward(x.to(device)), y.to(device))
        loss.backward()
    expected.backward()
    tolerance = 5e-2 if amp else 1e-5  # of 8 inputs by 'torch' on a CPU none was off by more than 1.9e-2 and 1.2e-6
    assert_near(loss.cpu(), expected, tolerance, 'loss')
    for (what, p), wide in zip(model.named_parameters(), exact.parameters()):
        assert_near(p.grad.cpu(), wide.grad, tolerance, what)


@pytest.mark.parametrize('backend', ['torch', 'cpp'])
def test_exported_graphs_have_no_operator_of_ours(backend):
    make_model = Maker('ape+sape2_k')
    with using_backend(backend):
        program = torch.export.export(make_model(), (make_model.images(),))
    targets = [str(node.target) for node in program.graph.nodes if node.op == 'call_function']
    assert targets and not [t for t in targets if 'timm_sape' in t]


@pytest.mark.parametrize('pos_enc', ['sape2_k', 'cope'])
def test_traces_have_no_operator_of_ours(pos_enc):
    make_model = Maker(pos_enc, depth=1)
    with using_backend('torch'):
        graph = str(torch.jit.trace(make_model(), make_model.images(), check_trace=False).inlined_graph)
    assert 'aten::softmax' in graph or 'aten::scaled_dot_product_attention' in graph
    assert 'timm_sape::' not in graph


@pytest.mark.parametrize('backend, operator', [
    ('torch', 'distance_attention'),
    ('cpp', 'sape2_attention_cpp'),
    pytest.param('triton', 'sape2_attention_triton', marks=[pytest.mark.full, pytest.mark.skipif(
        DEVICE != 'cpu', reason='the comparison is with a model on the CPU')]),
])
def test_compiled_in_one_graph(backend, operator, monkeypatch):
    monkeypatch.setenv('TIMM_SAPE_BACKEND', backend)
    torch._dynamo.reset()
    make_model = Maker('ape+sape2_k')
    model = make_model()
    x = make_model.images()
    expected = model(x)
    graphs = []
    torch.compile(model, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)(x)
    assert f'timm_sape.{operator}.default' in {str(node.target) for node in graphs[0].graph.nodes}
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    assert_near(compiled(x), expected, 1e-5)
    compiled(x).square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for a, p in zip(grads, model.parameters()):
        assert (a - p.grad).abs().max() <= 1e-5 * p.grad.abs().max().clamp(min=1)


def train(backend, steps, jitter=False):
    """Losses of a small model on noise, to which the pattern of its class is added."""
    torch.manual_seed(0)
    model = timm.create_model(
        'test_vit_sape2_k_ape', img_size=32, patch_size=8, embed_dim=32, num_heads=2, depth=2, num_classes=4)
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(4, 3, 32, 32, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if jitter:  # one unit in the last place of what q is made of
        for block in model.blocks:
            weight = block.attn.qkv.weight.data[:32]
            weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))
    losses = []
    with using_backend(backend):
        for _ in range(steps):
            y = torch.randint(4, (16,), generator=generator)
            x = torch.randn(16, 3, 32, 32, generator=generator) + 0.3 * patterns[y]
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.full
@pytest.mark.parametrize('backend', ['torch', 'cpp'])
def test_training_goes_the_same_way(backend):
    """Over 20 steps the fast backend strays no further than 3 times a change in the last place; at step 200 it has
    learned as much."""
    reference, fast = train('reference', 200), train(backend, 200)
    jittered = train('reference', 20, jitter=True)
    strayed, noise = (fast - reference)[:20].abs().max(), (jittered - reference[:20]).abs().max()
    assert strayed <= 3 * noise, f'{strayed:.1e} against {noise:.1e}'
    a, b = fast[-20:].mean(), reference[-20:].mean()
    assert b < 0.8 * reference[:20].mean() and (a - b).abs() <= 0.01 * b, f'{a:.4f} against {b:.4f}'
