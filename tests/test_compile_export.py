"""torch.compile, torch.export and FX tracing of every encoding."""
import operator

import pytest
import timm
import torch
from timm.layers import get_notrace_functions, get_notrace_modules
from timm.models import FeatureGraphNet
from torch.export import Dim
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import timm_sape
from common import FEW, PATCH, POS_ENCS, Maker, ToyLayer, ToyShared, images, rarely, registered

MODELS = timm.list_models('test_vit_*', module='vit_pos_enc')
COMPILED = ['ape+sape2_k', 'cope+rope2d+sape2_qk', 'ape+toy_layer+toy_shared']


@pytest.fixture(autouse=True, scope='module')
def third_party():
    with registered(ToyShared, ToyLayer):
        yield


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(model, x):
    """Logits, and gradients by name."""
    torch.manual_seed(0)
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def check_step(compiled, model, x, tol=1e-5):
    out, grads = step(model, x)
    compiled_out, compiled_grads = step(compiled, x)
    torch.testing.assert_close(compiled_out, out, rtol=tol, atol=tol)
    assert len(compiled_grads) == len(grads)
    for name, grad in grads.items():
        scale = grad.abs().max().clamp(min=1)
        torch.testing.assert_close(
            compiled_grads[f'_orig_mod.{name}'] / scale, grad / scale, rtol=tol, atol=tol, msg=lambda m: f'{name}: {m}')


@pytest.mark.parametrize('pos_enc', rarely(POS_ENCS, FEW))
def test_compile(pos_enc):
    """One graph, forward and backward, at two sizes."""
    model = Maker(pos_enc)(dynamic_img_size=True, depth=1)
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    for grid in ((3, 5), (4, 6)):
        check_step(compiled, model, images(grid))


@pytest.mark.parametrize('pos_enc', ['ape', 'ape+rope2d+rpb', 'ape+sape2_k'])
def test_compile_block_by_block(pos_enc):
    """One graph serves all blocks."""
    model, x = Maker(pos_enc)(depth=3), images((3, 5))
    expected, graphs = model(x), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for block in model.blocks:
        block.compile(fullgraph=True, backend=backend)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    assert len(graphs) == 1


@pytest.mark.parametrize('pos_enc', rarely(COMPILED, COMPILED[:1]))
def test_compile_training(pos_enc):
    """The same with all random operations, patch dropout included, and a mask."""
    model = Maker(pos_enc)(patch_drop_rate=0.5, drop_path_rate=0.2, proj_drop_rate=0.2, depth=1).train()
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    x = images((3, 5))
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    for kwargs in ({}, {'attn_mask': mask, 'is_causal': True}):
        torch.manual_seed(0)
        expected = model(x, **kwargs)
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(x, **kwargs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('pos_enc', rarely(COMPILED, COMPILED[:1]))
def test_compile_autocast(pos_enc):
    """Biases disable autocast locally, yet there is one graph with the same numbers."""
    model = Maker(pos_enc)(depth=1)
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    with torch.autocast('cpu', torch.bfloat16):
        check_step(compiled, model, images((3, 5)))


def test_compile_notices_what_breaks_a_graph():
    """The negative control of the tests above."""
    class Prints(ToyLayer):
        def position_bias(self, grid):
            torch._dynamo.graph_break()
            return super().position_bias(grid)

    with registered(prints=Prints):
        model = Maker('prints')()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            check_step(torch.compile(model, fullgraph=True, backend='aot_eager'), model, images((3, 5)))


@pytest.mark.full
@pytest.mark.parametrize('pos_enc', ['ape+sape2_k', 'cope', 'rope2d_mixed'])
def test_compile_inductor(pos_enc):
    model = Maker(pos_enc)(depth=1)
    check_step(torch.compile(model, fullgraph=True), model, images((3, 5)), tol=1e-4)


def check_graph(program):
    """The graph has only aten operators and arithmetic of sizes."""
    for node in program.graph.nodes:
        if node.op in ('placeholder', 'output'):
            continue
        assert node.op == 'call_function', node.name
        if isinstance(node.target, torch._ops.OpOverload):
            assert node.target.namespace == 'aten', node.target
        else:
            assert node.target.__module__ == operator.add.__module__, node.target


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=[] if 'rope2d' in name else pytest.mark.full) for name in MODELS])
def test_export(name):
    """Exported with a dynamic batch, checked on another one. The test below exports each encoding more generally."""
    model = timm.create_model(name).eval()
    x = torch.randn(2, 3, 160, 160)
    program = torch.export.export(model, (x,), dynamic_shapes={'x': {0: Dim('batch', max=64)}})
    check_graph(program)
    other = torch.randn(3, 3, 160, 160)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(other), model(other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('pos_enc', [
    pytest.param(pos_enc, marks=[] if pos_enc == 'pape' else pytest.mark.full) for pos_enc in POS_ENCS])
def test_export_free_batch(pos_enc):
    """Images of any size are padded, and torch itself finds out what the program takes. It must take one image."""
    model = Maker(pos_enc)(dynamic_img_size=True, dynamic_img_pad=True, depth=1)
    program = torch.export.export(model, (images((4, 6)),), dynamic_shapes={'x': dict.fromkeys((0, 2, 3), Dim.AUTO)})
    with torch.no_grad():
        for grid, batch in (((4, 6), 1), ((7, 3), 3)):
            x = images(grid, batch)[..., 3:]
            torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('pos_enc', rarely(POS_ENCS, FEW))
def test_export_dynamic_size(pos_enc):
    """Exported with dynamic batch, height and width, checked on others."""
    model = Maker(pos_enc)(dynamic_img_size=True, depth=1)
    shapes = {0: Dim('batch', max=64), 2: PATCH * Dim('height', max=64), 3: PATCH * Dim('width', max=64)}
    program = torch.export.export(model, (images((4, 6)),), dynamic_shapes={'x': shapes})
    check_graph(program)
    with torch.no_grad():
        for grid, batch in (((4, 6), 2), ((7, 3), 3), ((3, 5), 1), ((6, 8), 2)):
            x = images(grid, batch)
            torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


def test_export_notices_what_does_not_belong():
    """The negative controls of the tests above: a higher-order operator, and a size that became a constant."""
    class SwitchesAutocast(ToyLayer):
        def position_bias(self, grid):
            with torch.autocast('cpu', enabled=False):
                return super().position_bias(grid)

    class BakesSize(ToyLayer):
        def position_bias(self, grid):
            return super().position_bias(timm_sape.Grid(int(grid.height), int(grid.width), grid.num_prefix_tokens))

    with registered(autocast=SwitchesAutocast, bakes=BakesSize):
        program = torch.export.export(Maker('autocast')(), (images((3, 5)),))
        with pytest.raises(AssertionError, match='submod|wrap_with_autocast'):
            check_graph(program)
        with pytest.raises(AssertionError, match='Guard failed'):  # on the next size
            test_export_dynamic_size('bakes')


def fx_traced(model):
    """The symbolically traced model, returning logits in both modes. timm's leaf modules and functions stay whole."""
    tracer_kwargs = dict(
        leaf_modules=get_notrace_modules(),
        autowrap_functions=get_notrace_functions(),
        param_shapes_constant=True,
    )
    train_nodes, eval_nodes = get_graph_node_names(model, tracer_kwargs=tracer_kwargs)
    return create_feature_extractor(
        model, train_return_nodes=train_nodes[-1:], eval_return_nodes=eval_nodes[-1:], tracer_kwargs=tracer_kwargs)


@pytest.mark.parametrize('pos_enc', rarely(POS_ENCS))
def test_fx(pos_enc):
    model = Maker(pos_enc)()
    x = images((3, 5))
    traced = fx_traced(model)
    for mode in (True, False):
        model.train(mode)
        traced.train(mode)
        out, grads = step(model, x)
        traced.zero_grad()
        (traced_out,) = traced(x).values()
        torch.testing.assert_close(traced_out, out, rtol=1e-5, atol=1e-5)
        traced_out.square().sum().backward()
        traced_grads = {name: p.grad for name, p in traced.named_parameters()}
        assert traced_grads.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(traced_grads[name], grad, rtol=1e-5, atol=1e-5, msg=lambda m: f'{name}: {m}')


@pytest.mark.parametrize('pos_enc', rarely(POS_ENCS))
def test_fx_features(pos_enc):
    """timm's FX feature extractor gives the tokens of each block."""
    model = Maker(pos_enc)()
    x = images((3, 5))
    expected = model.forward_intermediates(
        x, output_fmt='NLC', return_prefix_tokens=True, intermediates_only=True)
    for y, (patches, prefix) in zip(FeatureGraphNet(model, out_indices=(0, 1))(x), expected, strict=True):
        torch.testing.assert_close(y, torch.cat([prefix, patches], dim=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('pos_enc', ['ape+rope2d+sape2_k', 'rpb'])
def test_trace_of_kept_patches(pos_enc):
    """A trace takes other numbers of images, and other patches of each."""
    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, img_size=32, patch_size=8).eval()

        def forward(self, x, kept):
            return self.model.forward_features(x, keep_indices=kept)

    def inputs(batch):
        return torch.randn(batch, 3, 32, 32), torch.stack([torch.randperm(16)[:6] for _ in range(batch)])

    model = Encoder()
    traced = torch.jit.trace(model, inputs(2))
    for batch in (1, 4):
        given = inputs(batch)
        torch.testing.assert_close(traced(*given), model(*given), rtol=0, atol=1e-5)


def test_trace_of_other_sizes():
    """The strides of a table of offsets must not become constants, which may go unnoticed."""
    model = Maker('alibi2d')(dynamic_img_size=True, depth=1)
    traced = torch.jit.trace(model, images((4, 6)))
    for grid in ((3, 8), (7, 3)):
        torch.testing.assert_close(traced(images(grid)), model(images(grid)), rtol=0, atol=1e-5)
