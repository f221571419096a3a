"""Analysis, preprocessing, saving and grafting see the model inside what training loops and adapters wrap it in."""
from copy import deepcopy

import pytest
import timm
import torch
import torch.nn as nn
from timm.utils import ModelEma, ModelEmaV2, ModelEmaV3
from torch.optim.swa_utils import AveragedModel

import timm_sape  # noqa: F401  registers the models
from common import randomize
from harness import assert_near
from timm_sape.analysis import position_maps, position_shap, probe
from timm_sape.analysis.maps import hooks_run
from timm_sape.loading import image_size_of, patch_ratio, patch_size_of, preprocessing


class Adapter(nn.Module):
    """As peft: an attribute that the wrapper lacks is that of the model."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def __getattr__(self, name):
        return super().__getattr__(name) if name == 'base_model' else getattr(self.base_model, name)

    def get_base_model(self):
        return self.base_model

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


def compiled(model):
    model = torch.compile(model, backend='eager')
    model(images(1))  # hooks that are registered from now on do not run in what is compiled
    return model


def compiled_in_place(model):
    model.compile(backend='eager')
    model(images(1))
    return model


def compiled_blocks(model):
    for block in model.blocks:
        block.compile(backend='eager')
    model(images(1))
    return model


WRAPPERS = [Adapter, nn.DataParallel, ModelEmaV3, compiled, compiled_in_place, compiled_blocks]


def build(pos_enc):
    model = timm.create_model(
        'test_vit_pos_enc', pos_enc=pos_enc, img_size=(16, 24), patch_size=8, num_classes=5, depth=2).double().eval()
    with torch.no_grad():
        return randomize(model)


def images(batch):
    return torch.randn(batch, 3, 16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.one_of(6)
@pytest.mark.parametrize('wrap', WRAPPERS)
@pytest.mark.parametrize('pos_enc', ['sincos2d+ope', 'ape+sape2_k', 'lape', 'rope2d'])
def test_analysis_of_a_wrapped_model(pos_enc, wrap):
    model, x = build(pos_enc), images(6)
    wrapped = wrap(deepcopy(model))
    expected, found = position_maps(model, x), position_maps(wrapped, x)
    vectors = [(maps.vectors, *(layer.vectors for layer in maps.layers)) for maps in (expected, found)]
    for before, after in zip(*vectors):
        assert (before is None) is (after is None)
        if before is not None:
            assert_near(after, before, 1e-12)
    for before, after in zip(expected.layers, found.layers):
        assert_near(after.attention, before.attention, 1e-12)
        assert_near(after.position, before.position, 1e-12)
    labels = model(x).argmax(1)
    for per_layer in (False, True):
        before, after = (
            position_shap(m, [(x, labels)], background=2, per_layer=per_layer).values for m in (model, wrapped))
        assert_near(after, before, 1e-10)
    before, after = probe(model, x[:1]), probe(wrapped, x[:1])
    assert [row[:2] + (row.expected, row.verdict) for row in after] == [
        row[:2] + (row.expected, row.verdict) for row in before]


class Changed(nn.Module):
    """A user's wrapper that computes something else, although its parts have usual names."""

    def __init__(self, model):
        super().__init__()
        self.module, self.patch_embed = model, model.patch_embed

    def forward(self, x):
        return 5 * self.module(3 * x.flip(-1) + 1)


def test_a_wrapper_that_computes_something_else_is_called():
    model, x = build('ape'), images(6)
    wrapped, labels = Changed(model).eval(), torch.arange(6) % 5
    found, inner = (position_shap(m, [(x, labels)], background=2) for m in (wrapped, model))
    with torch.no_grad():
        assert torch.equal(found.correct, wrapped(x).argmax(1) == labels)
    assert not torch.equal(found.position, inner.position)
    with pytest.raises(ValueError, match='which position_maps cannot read'):
        position_maps(wrapped, x)


def test_a_head_of_the_users_own():
    model, x = build('ape'), images(6)
    expected = position_shap(model, [(x, torch.arange(6) % 5)], background=2)
    head = model.head
    model.reset_classifier(0)
    model.head = head
    assert torch.equal(position_shap(model, [(x, torch.arange(6) % 5)], background=2).position, expected.position)


def test_models_are_compiled_again_after_threads_that_overlap():
    """The stance of torch is one for the process, and each context restores what it found."""
    torch.compiler.reset()  # after too many models torch would compile no other
    model, x = compiled(build('rope2d')), images(1)
    first, second = hooks_run(), hooks_run()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(len(seen)))
    model(x)
    assert not seen, 'a hook that was registered later runs, so the model is no longer compiled'


def test_maps_in_a_compiled_function():
    model, x = build('rope2d'), images(1)
    found = torch.compile(lambda x: position_maps(model, x).layers[0].position, backend='eager')(x)
    assert_near(found, position_maps(model, x).layers[0].position, 1e-12)


def test_objects_of_a_model_inside_a_users_own_wrapper():
    """`ope` finds objects in the image as it was, before its patches are exchanged."""
    class Own(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.patch_embed = model, model.patch_embed

        def forward(self, x, **kwargs):
            return self.model(x, **kwargs)

    model, x = build('ope'), images(6)
    labels = model(x).argmax(1)
    found, expected = (position_shap(m, [(x, labels)], background=2).values for m in (Own(model).eval(), model))
    assert_near(found, expected, 1e-12)


@pytest.mark.parametrize('wrap', [*WRAPPERS, AveragedModel, ModelEmaV2])
def test_preprocessing_of_a_wrapped_model(wrap):
    model = build('rope2d')
    wrapped = wrap(deepcopy(model))
    assert image_size_of(wrapped) == (16, 24)
    assert patch_size_of(wrapped) == patch_ratio(wrapped) == (8, 8)
    assert repr(preprocessing(wrapped)) == repr(preprocessing(model)) and '(16, 24)' in repr(preprocessing(wrapped))


@pytest.mark.parametrize('wrap', [
    Adapter, nn.DataParallel, torch.compile, AveragedModel, ModelEma, ModelEmaV2, ModelEmaV3])
def test_a_wrapped_model_is_saved_and_grafted(wrap, tmp_path):
    model = timm.create_model('test_vit', img_size=32, patch_size=8, num_classes=5).eval()
    x = torch.randn(2, 3, 32, 32)
    wrapped, expected = wrap(deepcopy(model)), model(x)
    timm_sape.hub.save(wrapped, tmp_path / 'saved')
    for found in timm_sape.hub.load(str(tmp_path / 'saved')), timm_sape.graft(wrapped, 'rope2d'):
        assert_near(found.eval()(x), expected, 1e-5)


def test_a_wrapper_that_computes_something_else_is_not_saved(tmp_path):
    """What it computes would be lost without a word."""
    wrapped = Changed(timm.create_model('test_vit'))
    with pytest.raises(ValueError, match='model must be .* got a Changed. Of a wrapper of your own, save'):
        timm_sape.hub.save(wrapped, tmp_path / 'saved')
    with pytest.raises(ValueError, match='Changed cannot be grafted'):
        timm_sape.graft(wrapped, 'rope2d')
    assert not list(tmp_path.iterdir())


def test_bias_of_an_encoding_that_an_adapter_keeps():
    """peft's `modules_to_save` puts a module around the encoding."""
    model = build('sape2_k')
    rows = probe(model, images(1))
    encodings = model.blocks[0].attn.encodings
    encodings._modules['sape2_k'] = Adapter(encodings['sape2_k'])
    assert [row[:2] for row in probe(model, images(1))] == [row[:2] for row in rows]
    assert any(row.what.endswith('x bias') for row in rows)
