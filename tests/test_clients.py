"""What other libraries do with a model, in the same steps: torchvision, torch.distributed.checkpoint and accelerate.

`.ci/clients` runs the libraries themselves, of which accelerate is no requirement of the tests.
"""
from contextlib import contextmanager

import pytest
import timm
import torch
import torch.nn as nn
from timm.utils import AttentionExtract
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torchvision.models.feature_extraction import create_feature_extractor

import timm_sape
from common import HEADS, PATCH, POS_ENCS, Maker, ToyLayer, ToyShared, images, rarely, registered

RESCALING = [name for name in timm_sape.list_encodings() if 'resolution' in timm_sape.encoding_keywords(name)]


@pytest.fixture(autouse=True, scope='module')
def third_party():
    with registered(ToyShared, ToyLayer):
        yield


def check_same(model, expected, x):
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected(x), rtol=0, atol=1e-6)
    assert model.state_dict().keys() == expected.state_dict().keys()


class Wrapped(nn.Module):
    """As adapters and profilers do it: the attributes of what is inside are not there."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize('host', ['vit', 'naflexvit'])
@pytest.mark.parametrize('pos_enc', ['ape', 'ape+auto_rope2d', 'ape+peg', 'ape+sape2_k'])
def test_wrapped_layers(pos_enc, host):
    """Blocks and attention layers in modules of another library: the same logits and gradients, with a mask, too."""
    x, mask = images((3, 5)), torch.zeros(20, 20)
    mask[:, 3] = float('-inf')
    for wrap_attn in (True, False):
        expected, model = (Maker(pos_enc, host=host)() for _ in range(2))
        for i, block in enumerate(model.blocks):
            if wrap_attn:
                block.attn = Wrapped(block.attn)
            else:
                model.blocks[i] = Wrapped(block)
        for m in (expected, model):
            m.train()(x, attn_mask=mask).square().sum().backward()
        grads = {name.replace('.module.', '.'): p.grad for name, p in model.named_parameters()}
        for name, p in expected.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, rtol=0, atol=0)
        with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
            assert torch.equal(model.eval()(x), expected.eval()(x))


@pytest.mark.parametrize('pos_enc', rarely(POS_ENCS))
def test_feature_extractor_of_torchvision(pos_enc):
    make = Maker(pos_enc)
    model, x = make(), make.images()
    features = create_feature_extractor(model, ['norm'])(x)['norm']
    torch.testing.assert_close(features, model.forward_features(x), rtol=0, atol=1e-6)


def rescaling(name):
    return Maker(name, pos_enc_kwargs={name: {'resolution': 'rescale'}})


MAKERS = {name: Maker(name) for name in POS_ENCS} | {f'{name}, rescale': rescaling(name) for name in RESCALING}


@pytest.mark.one_of(4)
@pytest.mark.parametrize('full', [True, False], ids=['full', 'sharded'])
@pytest.mark.parametrize('name', MAKERS)
def test_state_dict_of_torch_distributed(name, full):
    """A full one has an object of torch's own in place of each extra state that is not saved."""
    make, options = MAKERS[name], StateDictOptions(full_state_dict=full)
    expected, model = make(), make(random=False)
    set_model_state_dict(model, get_model_state_dict(expected, options=options), options=options)
    check_same(model, expected, make.images())


@contextmanager
def parameters_on_meta():
    """As accelerate's `init_empty_weights`: a parameter goes to the meta device as soon as a module has it."""
    register_parameter = nn.Module.register_parameter

    def register_empty(module, name, parameter):
        register_parameter(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to('meta'), parameter.requires_grad)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, 'register_parameter', register_empty)
        yield


def set_entries(model, state_dict):
    """As accelerate loads a checkpoint: each entry is the value of a parameter or a buffer."""
    for key, value in state_dict.items():
        path, _, name = key.rpartition('.')
        module = model.get_submodule(path)
        if name in module._parameters:
            module._parameters[name] = nn.Parameter(value)
        else:
            assert name in module._buffers, f'{key} is neither a parameter nor a buffer'
            module._buffers[name] = value


@pytest.mark.parametrize('name', MAKERS)
def test_parameters_without_memory(name):
    """Tables are there all the same, on the device that the constructor was given."""
    make = MAKERS[name]
    expected = make()
    with parameters_on_meta():
        model = make(random=False)
    assert all(p.is_meta for p in model.parameters())
    buffers = dict(model.named_buffers())
    for key, buffer in expected.named_buffers():
        torch.testing.assert_close(buffers[key], buffer, rtol=0, atol=0, msg=lambda m: f'{key}: {m}')
    set_entries(model, expected.state_dict())
    check_same(model, expected, make.images())


@pytest.mark.parametrize('name', RESCALING)
def test_trained_grid_without_memory(name):
    """The grid that comes with the entries counts, not the one that the model was made for."""
    make = rescaling(name)
    expected = make()
    with parameters_on_meta():
        model = make(random=False, img_size=(4 * PATCH, 6 * PATCH))
    set_entries(model, expected.state_dict())
    expected.set_input_size(img_size=(4 * PATCH, 6 * PATCH))
    check_same(model, expected, make.images(grid=(4, 6)))
    assert model.ref_grid_size == make.grid


@pytest.mark.parametrize('pos_enc', ['sape2_k', 'ape2d'])
def test_compile_without_memory(pos_enc):
    """eval() takes over the grids that came with the entries, so that no forward pass has to."""
    make = Maker(pos_enc)
    expected, x = make(), make.images()
    with parameters_on_meta():
        model = make(random=False)
    model.eval()  # before there is anything to take over
    set_entries(model, expected.state_dict())
    model.eval()
    exported = torch.export.export(model, (x,)).module()
    compiled = torch.compile(model, fullgraph=True, backend='eager')
    for found in (exported(x), compiled(x)):
        torch.testing.assert_close(found, expected(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('pos_enc', ['nope', 'rope2d', 'rpb', 'sape2_k', 'cope+sape2_k', 'irpe_qkv'])
def test_probabilities_reach_hooks(pos_enc):
    """`timm.utils.AttentionExtract` hooks the module that drops probabilities."""
    timm.layers.set_fused_attn(False)
    try:
        model = Maker(pos_enc)()
    finally:
        timm.layers.set_fused_attn(True)
    x = images((3, 5))
    expected = model(x)
    found = AttentionExtract(model, method='hook')(x)
    assert len(found) == 2 and all(attn.shape == (2, HEADS, 20, 20) for attn in found.values())
    for attn in found.values():
        torch.testing.assert_close(attn.sum(-1), torch.ones(2, HEADS, 20))
    torch.testing.assert_close(model(x), expected)
    handles = [block.attn.attn_drop.register_forward_hook(lambda *_: 0 * _[2]) for block in model.blocks]
    assert not torch.allclose(model(x), expected)  # what a hook returns takes effect
    for handle in handles:
        handle.remove()
