"""cpb: a small MLP computes the bias of each offset."""
import pytest
import torch
from timm.layers import RelPosMlp
from timm.models.vision_transformer_relpos import VisionTransformerRelPos

import reference_cpb
from bias_checks import (
    PAIRS_IN_RASTER_ORDER,
    SIZES,
    DirectedTests,
    LearnedBiasTests,
    bias_of,
    check_layers_are_called,
    transposed,
)
from harness import assert_near, create, where
from model_checks import check_uniform, check_weights_of_vit_relpos, initial_model, own_encodings
from timm_sape import Grid
from timm_sape.encodings import cpb

MODES = ['swin', 'cr']


def by_timm(self, grid):
    """timm's layer instead of ours, made for the grid and the prefix tokens as timm's models make it."""
    layer = timm_mlp(self, grid.num_prefix_tokens)
    layer.set_window_size(grid.size)
    return layer.get_bias()[0]


class TestCpb(DirectedTests, LearnedBiasTests):
    name = 'cpb'
    variants = [{'mode': mode} for mode in MODES]
    keywords = {'hidden': 4}
    model_variants = [{}, {'mode': 'cr', 'hidden': 8, 'drop': 0.125}]
    mutants = {  # arguments of `check`, (owner, attribute, replacement)
        **LearnedBiasTests.mutants,
        'kept patches in raster order': (((3, 5), 1, 8), PAIRS_IN_RASTER_ORDER),
        'p_j - p_i': (((3, 5), 0), (cpb, 'between_patches', transposed)),
        'no sigmoid': (((3, 5), 0), (torch.Tensor, 'sigmoid', lambda self: self)),
        'linear': (((3, 5), 0), (torch.Tensor, 'log1p', lambda self: self)),
    }

    def expected_bias(self, encoding, q, x, grid):
        fc1, fc2 = encoding.mlp.fc1, encoding.mlp.fc2
        parameters = fc1.weight, fc1.bias, fc2.weight, fc2.bias
        return reference_cpb.bias(*parameters, grid.size, encoding.ref_grid_size, mode=encoding.mode, **where(grid))

    def mirror(self, encoding):
        encoding.mlp.fc1.weight[:, 1].neg_()

    def knows_trained_grid(self, variant):
        return variant['mode'] == 'swin'

    @pytest.mark.filterwarnings('ignore::UserWarning:timm')
    @pytest.mark.parametrize('case, text', [
        (((7, 1), 0), 'off by nan'),  # one column
        (((1, 7), 1), 'off by nan'),
        (((6, 6), 0, None, (4, 4)), 'off by'),  # another grid: normalised by that one
    ])
    def test_what_timm_does_otherwise(self, case, text, monkeypatch):
        """With timm's layer instead of ours, the comparison with the equations fails."""
        self.check(*case)
        monkeypatch.setattr(cpb.ContinuousPositionBias, 'position_bias', by_timm)
        with pytest.raises(AssertionError, match=text):
            self.check(*case)


def test_layers_are_called():
    check_layers_are_called('cpb')


# --- timm ------------------------------------------------------------------------------------------------------------

def timm_mlp(encoding, prefix_tokens=0):
    """timm's `RelPosMlp` with the same layers."""
    layer = RelPosMlp(
        encoding.grid_size, encoding.num_heads, encoding.mlp.fc1.out_features, prefix_tokens, mode=encoding.mode,
        dtype=encoding.mlp.fc1.weight.dtype)
    layer.mlp.load_state_dict(encoding.mlp.state_dict())
    return layer.train(encoding.training)


@pytest.mark.parametrize('grid_size', [(4, 4), (14, 14), (3, 5), (2, 9)])
@pytest.mark.parametrize('prefix_tokens', [0, 1, 5])
@pytest.mark.parametrize('mode', MODES)
def test_same_as_timm(mode, prefix_tokens, grid_size):
    """The tolerance is that of float32, in which timm computes coordinates."""
    encoding = create('cpb', grid_size, prefix_tokens, **SIZES, mode=mode, hidden=9)
    expected = timm_mlp(encoding, prefix_tokens).get_bias()
    assert_near(bias_of(encoding, Grid(*grid_size, prefix_tokens)), expected, 1e-6)


@pytest.mark.parametrize('mode', MODES)
def test_dropout_same_as_timm(mode):
    """With the same seed, the same random numbers as timm's layer. In evaluation mode, no dropout."""
    encoding = create('cpb', (4, 4), **SIZES, mode=mode, hidden=9, drop=0.125).train()
    layer, grid = timm_mlp(encoding), Grid(4, 4)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(bias_of(encoding, grid))
        torch.manual_seed(seed)
        assert_near(found[-1], layer.get_bias(), 1e-6)
    assert torch.equal(found[0], found[1]) and not torch.allclose(found[0], found[2])
    plain = create('cpb', (4, 4), **SIZES, mode=mode, hidden=9)
    assert torch.equal(bias_of(encoding.eval(), grid), bias_of(plain, grid))
    assert torch.equal(bias_of(plain.train(), grid), bias_of(plain.eval(), grid))


@pytest.mark.parametrize('shared', [False, True])
@pytest.mark.parametrize('class_token', [False, True])
@pytest.mark.parametrize('rel_pos_type', ['mlp', 'mlp_swin'])
def test_weights_of_vit_relpos(rel_pos_type, class_token, shared):
    mode = 'swin' if rel_pos_type == 'mlp_swin' else 'cr'  # to which the grid means nothing
    check_weights_of_vit_relpos(
        'cpb', rel_pos_type, {'mode': mode, 'hidden': 24}, class_token, shared, saves_grid=mode == 'swin')


# --- initial values --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
@pytest.mark.parametrize('mode', MODES)
def test_initial_values(mode, again):
    """The same distributions as in timm's models."""
    timm_model = VisionTransformerRelPos(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4, rel_pos_dim=512)
    encodings = own_encodings(initial_model('cpb', again, pos_enc_kwargs={'cpb': {'mode': mode}}), 'cpb')
    theirs = dict(timm_model.blocks[0].attn.rel_pos.named_parameters())
    for name, p in encodings[0].named_parameters():
        assert p.shape == theirs[name].shape
        bound = 2 ** -0.5 if 'fc1' in name else 512 ** -0.5
        if p.numel() > 4:
            check_uniform(p, bound)
            check_uniform(theirs[name], bound)
        else:
            assert p.abs().max() <= bound
    names = ['fc1.weight', 'fc1.bias', 'fc2.weight', *(['fc2.bias'] if mode == 'cr' else [])]
    assert [name for name, _ in encodings[0].named_parameters()] == [f'mlp.{name}' for name in names]
    assert not torch.equal(encodings[0].mlp.fc2.weight, encodings[1].mlp.fc2.weight)
    if mode == 'swin':
        patches = bias_of(encodings[0], Grid(4, 4))
        assert 4 < patches.min() < 8 < patches.max() < 12


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords, text', [
    ({'mode': 'rw'}, "'cpb': mode must be 'swin' or 'cr', got 'rw'"),
    ({'mode': None}, "'cpb': mode must be 'swin' or 'cr', got None"),
    ({'mode': ['swin']}, "'cpb': mode must be"),
    ({'hidden': 0}, "'cpb' needs hidden to be a positive integer, got 0"),
    ({'hidden': True}, "'cpb' needs hidden to be a positive integer, got True"),
    ({'hidden': 512.0}, "'cpb' needs hidden to be a positive integer, got 512.0"),
    ({'drop': 1}, "'cpb' needs drop of at least 0 and less than 1, got 1"),
    ({'drop': -0.1}, "'cpb' needs drop of at least 0 and less than 1, got -0.1"),
    ({'drop': float('nan')}, "'cpb' needs drop of at least 0 and less than 1, got nan"),
    ({'drop': False}, "'cpb' needs drop of at least 0 and less than 1, got False"),
    ({'drop': '0'}, "'cpb' needs drop of at least 0 and less than 1, got '0'"),
])
def test_wrong_keywords(keywords, text):
    with pytest.raises(ValueError, match=text):
        create('cpb', **SIZES, **keywords)


@pytest.mark.parametrize('other', [{'mode': 'cr'}, {'hidden': 7}], ids=str)
def test_weights_of_other_keywords_do_not_fit(other):
    state = create('cpb', **SIZES).state_dict()
    with pytest.raises(RuntimeError):
        create('cpb', **SIZES, **other).load_state_dict(state)
