"""Tests and checks of single encodings in whole models, with 5 prefix tokens on 3 x 5 patches."""
import copy

import pytest
import timm
import torch
from timm.layers import PatchDropoutWithIndices
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from timm.optim import create_optimizer_v2

import timm_sape
from common import randomize
from harness import assert_near


def images(height=24, width=40):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def build(pos_enc, keywords=None, random=True, **kwargs):
    """A small model in evaluation mode, whose parameters all matter.

    Args:
        pos_enc: Its encodings.
        keywords: Keywords of the last encoding.
        random: False to keep the initial values.
    """
    torch.manual_seed(0)
    defaults = dict(
        img_size=(24, 40), patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=3, reg_tokens=4,
        global_pool='avg', fc_norm=False)
    keywords = {pos_enc.split('+')[-1]: keywords} if keywords else {}
    model = timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, pos_enc_kwargs=keywords, **{**defaults, **kwargs})
    return randomize(model.eval()) if random else model.eval()


def own_encodings(model, name):
    """The encodings of this name: one of the model, or one in each block."""
    return [encoding for encoding in model.position_encodings().values() if encoding.name == name]


def step(model, x):
    """Gradients of one training step, which must all be finite."""
    model.zero_grad()
    loss = model(x).float().square().sum()
    loss.backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert loss.isfinite() and not missing, missing
    return {n: p.grad for n, p in model.named_parameters()}


def check_model(name, composition='{}', keywords=None, least=1e-3):
    """The model runs and learns: with all patches or some, on other grids, in bfloat16. And the encoding matters.

    Args:
        composition: What to put the name into, such as 'ape+{}'.
        least: How much the output must change without the encoding.
    """
    pos_enc = composition.format(name)
    model = build(pos_enc, keywords, dynamic_img_size=True, patch_drop_rate=0.5)
    assert isinstance(model.patch_drop, PatchDropoutWithIndices)
    out = model(images())
    plain = build(composition.replace('+{}', '').replace('{}', 'nope'))
    plain.load_state_dict({key: p for key, p in model.state_dict().items() if f'encodings.{name}.' not in key})
    assert (plain(images()) - out).abs().max() > least
    for training, size in ((True, (24, 40)), (False, (24, 40)), (False, (16, 56))):
        grads = step(model.train(training), images(*size))
        assert all(grad.abs().max() > 0 for key, grad in grads.items() if f'encodings.{name}.' in key)
    for size in ((40, 8), (8, 8), (56, 48)):
        step(model.eval(), images(*size))
    low = copy.deepcopy(model).bfloat16()
    assert (low(images().bfloat16()).float() - out).norm() < 0.05 * out.norm()
    for low in (low, build(pos_enc, keywords, dtype=torch.bfloat16)):
        step(low, images().bfloat16())
        step(low.train(), images().bfloat16())
    with torch.autocast('cpu', torch.bfloat16):
        assert model(images()).isfinite().all()


def check_neutral_start(name, keywords=None):
    """With a gate of 0 the encoding does nothing. Gates learn at once, all other parameters after one step."""
    model = build(f'auto_{name}', {**(keywords or {}), 'init': 0}, random=False)
    assert_near(model(images()), build('nope', random=False)(images()), 1e-6)
    optimizer = create_optimizer_v2(model.train(), 'adam', lr=1e-3)
    for _ in range(2):
        grads = step(model, images())
        assert all(grad.abs().max() > 0 for key, grad in grads.items() if key.endswith('gate.weight'))
        optimizer.step()
    assert all(grad.abs().max() > 0 for grad in grads.values())
    gates = [p for key, p in model.named_parameters() if key.endswith('gate.weight')]
    assert gates and all(abs(p.item()) > 1e-4 for p in gates)


def check_learns(name, keywords=None):
    """From the initial values on, all parameters of the encoding learn: with patches dropped, at the second step."""
    model = build(name, keywords, random=False, patch_drop_rate=0.5).train()
    optimizer = create_optimizer_v2(model, 'adam', lr=1e-3)
    for _ in range(2):
        grads = step(model, images())
        optimizer.step()
    own = {key: grad for key, grad in grads.items() if f'encodings.{name}.' in key}
    assert own and all(grad.abs().max() > 0 for grad in own.values())


def check_neutral_as_built(name, keywords=None):
    """The initial values alone do nothing, so the gate stays 1 and learns with the rest; 0 would stay 0 for ever."""
    model = build(f'auto_{name}', keywords, random=False)
    gates = [p for key, p in model.named_parameters() if key.endswith('gate.weight')]
    assert len(gates) == 2 and all(abs(100 * p.item() - 1) < 1e-6 for p in gates)
    assert_near(model(images()), build('nope', random=False)(images()), 1e-6)
    check_learns(f'auto_{name}', keywords)
    with pytest.raises(ValueError, match='would never learn'):
        build(f'auto_{name}', {**(keywords or {}), 'init': 0})


def check_masks(name, keywords=None):
    """A mask works together with the encoding, in fused and in explicit attention."""
    model = build(name, keywords)
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    plain = model(images())
    masked = model(images(), attn_mask=mask)
    assert masked.isfinite().all() and (masked - plain).abs().max() > 1e-3
    for block in model.blocks:
        block.attn.fused_attn = False
    assert_near(model(images(), attn_mask=mask), masked, 1e-5)
    assert_near(model(images(), is_causal=True), masked, 1e-5)


def check_trained_grid_is_saved(name):
    """The grid that a model was trained on is saved in its state dict if positions are rescaled to it."""
    rescale = {'resolution': 'rescale'}
    trained = build(name, rescale, dynamic_img_size=True)
    small = build(name, rescale, img_size=(16, 24), ref_grid_size=(3, 5))
    small.load_state_dict(trained.state_dict())
    expected = trained(images(16, 24))
    assert_near(small(images(16, 24)), expected, 1e-6)
    small.set_input_size(img_size=(24, 40))
    assert_near(small(images()), trained(images()), 1e-6)
    assert (build(name, dynamic_img_size=True)(images(16, 24)) - expected).abs().max() > 1e-3
    assert any(key.endswith('_extra_state') for key in trained.state_dict())
    assert not any(key.endswith('_extra_state') for key in build(name).state_dict())


def check_fixed(name, check_encoding, per_layer=False):
    """The encoding has nothing to learn or save. Its tables are right in a new model and after `init_weights`.

    Args:
        check_encoding: Called with the index of the layer and its encoding.
    """
    model = build(name, random=False, depth=5)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in build('nope', depth=5).parameters())
    assert not any('encodings' in key for key in model.state_dict())
    for again in (False, True):
        encodings = own_encodings(model, name)
        assert len(encodings) == (5 if per_layer else 1)
        if again:
            for encoding in encodings:
                encoding.table.fill_(float('nan'))
            model.init_weights()
        for layer, encoding in enumerate(encodings):
            check_encoding(layer, encoding)


def initial_model(pos_enc, again, **kwargs):
    """A model of width 64 with 4 heads, 2 layers and 4 x 4 patches, new or after `init_weights`."""
    torch.manual_seed(0)
    model = timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, **{'img_size': 32, 'patch_size': 8, **kwargs})
    if again:
        model.init_weights()
    return model


def check_uniform(values, bound):
    assert values.abs().max() <= bound and values.abs().max() > 0.95 * bound
    assert values.std().item() == pytest.approx(bound / 3 ** 0.5, rel=0.1)
    assert abs(values.mean().item()) < 0.15 * bound


def check_number_of_parameters(name):
    """The encoding adds as many parameters as the documentation says. None of them has weight decay."""
    plain = sum(p.numel() for p in initial_model('nope', False, img_size=(32, 48)).parameters())
    model = initial_model(name, False, img_size=(32, 48))
    cls = timm_sape.get_encoding(name)
    assert cls.adds, f'Set {cls.__name__}.adds to the number of parameters, such as "L * h".'
    adds = eval(cls.adds, {'L': 2, 'H': 4, 'W': 6, 'D': 64, 'd': 16, 'h': 4, 'npos': 64})
    assert sum(p.numel() for p in model.parameters()) - plain == adds
    own = {key for key, _ in model.named_parameters() if f'encodings.{name}.' in key}
    assert own and own <= model.no_weight_decay()


def check_weights_of_vit_relpos(name, rel_pos_type, keywords, class_token, shared, saves_grid):
    """Renamed weights of timm's `vit_relpos_*` give the same logits, here on a rectangular grid.

    With a class token too, where timm gives it no bias.
    """
    torch.manual_seed(0)
    same = dict(
        img_size=(24, 40), patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5, class_token=class_token,
        global_pool='token' if class_token else 'avg', init_values=0.5, fc_norm=True)
    source = VisionTransformerRelPos(
        rel_pos_type=rel_pos_type, rel_pos_dim=24, shared_rel_pos=shared, **same).eval()
    model = timm.create_model(
        'test_vit_pos_enc', pos_enc=name, pos_enc_kwargs={name: keywords}, no_embed_class=True, **same).eval()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    state = {}
    for key, value in source.state_dict().items():
        key = key.replace('relative_position_bias_table', 'table')
        if key.startswith('shared_rel_pos.'):
            state |= {key.replace('shared_rel_pos', f'blocks.{i}.attn.encodings.{name}'): value for i in range(2)}
        else:
            state[key.replace('.rel_pos.', f'.encodings.{name}.')] = value
    own = {key: value for key, value in model.state_dict().items() if key.endswith('_extra_state')}
    assert bool(own) == saves_grid
    model.load_state_dict(state | own)
    x = torch.randn(2, 3, 24, 40)
    expected = source(x)
    assert_near(model(x), expected, 1e-5)
    other = timm.create_model('test_vit_nope', no_embed_class=True, **same).eval()
    other.load_state_dict({k: v for k, v in state.items() if 'encodings' not in k})
    assert (other(x) - expected).abs().max() > 1e-3 * expected.abs().max()


# --- classes to derive tests from -------------------------------------------------------------------------------------

class EncodingTests:
    """What every encoding must pass. pytest does not collect this class, but those that are derived from it.

    Attributes:
        name: The name of the encoding.
        mutants: Ways to break the package that the comparison with the equations must notice, by name.
    """
    name: str

    # Parameters of tests whose values are those of the class: `mutants` has those of `mutant`, and so on.
    PARAMETERS = ['mutant']

    def pytest_generate_tests(self, metafunc):
        """pytest calls this for each test."""
        for parameter in self.PARAMETERS:
            if parameter in metafunc.fixturenames:
                metafunc.parametrize(
                    parameter, getattr(self, f'{parameter}s'), ids=lambda value: str(value) if value else 'default')

    def test_unknown_keyword(self):
        with pytest.raises(ValueError, match=f"'{self.name}' has no keyword 'scale'"):
            timm_sape.create_encoding(self.name, dim=48, num_heads=4, grid_size=(3, 5), scale=1)

    def test_registered_from_its_file(self):
        assert timm_sape.get_encoding(self.name).__module__ == f'timm_sape.encodings.{self.name}'


class AttentionEncodingTests(EncodingTests):
    """What every encoding that acts in attention must pass in a model.

    Attributes:
        model_variants: Its keywords in whole models.
        compositions: What to put its name into in whole models.
        least: How much the output of a model must change without the encoding.
    """
    model_variants = [{}]
    compositions = ['{}', 'ape+{}']
    least = 1e-3
    PARAMETERS = [*EncodingTests.PARAMETERS, 'model_variant', 'composition']

    @pytest.mark.one_of(2)
    def test_model(self, model_variant, composition):
        check_model(self.name, composition, model_variant, self.least)

    def test_neutral_start(self, model_variant):
        check_neutral_start(self.name, model_variant)

    def test_masks(self, model_variant):
        check_masks(self.name, model_variant)


class FixedTests:
    """For an encoding without parameters. A subclass has a method `check_initial_values(layer, encoding)`."""

    def test_initial_values(self):
        check_fixed(self.name, self.check_initial_values)


class LearnedTests:
    """For an encoding with parameters."""

    def test_number_of_parameters(self):
        check_number_of_parameters(self.name)

    def test_learns(self, model_variant):
        check_learns(self.name, model_variant)
