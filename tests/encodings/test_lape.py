"""`lape`: a learned table that is normed anew in each layer."""
import copy

import pytest
import torch
import torch.nn.functional as F

import reference_lape as reference
import timm_sape
from harness import assert_near, compare, create, initial_models, inputs_of, make_images, make_model, where
from timm_sape import Grid, checkpoints
from timm_sape.encodings.lape import LayerAdaptivePositionEncoding
from token_checks import MUTANTS, PLAIN, TokenTests

layer_norm, interpolate, layer_embed = F.layer_norm, F.interpolate, LayerAdaptivePositionEncoding.layer_embed


def create_lape(grid_size, num_prefix_tokens=0, **kwargs):
    """With 3 layers, and a table so small that the eps of the norms matters."""
    encoding = create('lape', grid_size, num_prefix_tokens, depth=3, **kwargs)
    with torch.no_grad():
        encoding.table.mul_(0.01)
    return encoding


def terms_of(encoding, grid):
    return encoding(torch.zeros(1), grid=grid, hook='layer_embed')


def unchained(self, grid):
    table = self.resized('table', grid)
    return torch.cat([norm(table) for norm in self.norms])


def norms_reversed(self, grid):
    twin = copy.copy(self)
    twin._modules = {'norms': self.norms[::-1]}
    return layer_embed(twin, grid)


def without_antialias(*args, **kwargs):
    return interpolate(*args, **{**kwargs, 'antialias': False})


def bilinear(*args, **kwargs):
    return interpolate(*args, **{**kwargs, 'mode': 'bilinear'})


class TestLape(TokenTests):
    name = 'lape'
    acts_on = ('tokens in each layer',)
    mutants = {
        'another eps': (PLAIN, (F, 'layer_norm', lambda *args: layer_norm(*args[:-1], 1e-5))),
        'each norm on the table': (PLAIN, (LayerAdaptivePositionEncoding, 'layer_embed', unchained)),
        'norms in another order': (PLAIN, (LayerAdaptivePositionEncoding, 'layer_embed', norms_reversed)),
        'the table itself first': (PLAIN, (
            LayerAdaptivePositionEncoding, 'layer_embed',
            lambda self, grid: torch.cat([self.resized('table', grid), layer_embed(self, grid)[:-1]]))),
        'not resampled but cut': ({'grid_size': (2, 5), 'num_prefix_tokens': 2, 'own_size': (3, 5)}, (
            LayerAdaptivePositionEncoding, 'resample',
            lambda self, name, table, old, new: table[:, :2 + new[0] * new[1]])),
        'resampled without antialias': (
            {'grid_size': (2, 3), 'num_prefix_tokens': 2, 'own_size': (6, 10)}, (F, 'interpolate', without_antialias)),
        'linear': (
            {'grid_size': (6, 10), 'num_prefix_tokens': 2, 'own_size': (3, 5)}, (F, 'interpolate', bilinear)),
        'kept patches in raster order': MUTANTS['kept patches in raster order'],
    }

    def new(self, *args, **keywords):
        return create_lape(*args, **keywords)

    def actual(self, encoding, tokens, grid):
        return terms_of(encoding, grid)

    def expected(self, encoding, tokens, grid):
        weights, biases = zip(*((norm.weight, norm.bias) for norm in encoding.norms))
        return reference.lape(encoding.table, weights, biases, encoding.grid_size, grid.size, **where(grid))

    def test_paths_to_another_grid(self):
        """A dynamic size and `set_grid_size` follow one rule. Loading does too: see the contracts."""
        grid, trained = Grid(4, 7, 1), create_lape((3, 5), 1)
        moved = copy.deepcopy(trained)
        moved.set_grid_size((4, 7))
        assert torch.equal(terms_of(moved, grid), terms_of(trained, grid))
        assert moved.table.shape == (1, 29, 16) and torch.equal(moved.table[:, :1], trained.table[:, :1])


# --- properties ------------------------------------------------------------------------------------------------------

def test_chain_of_norms():
    """p_l is LN_l of p_(l-1). At first each has mean 0 and variance 1, so eps only matters in the first norm."""
    for model in initial_models('lape', depth=4, reg_tokens=3):
        encoding = model.encodings['lape']
        terms, previous = terms_of(encoding, Grid(4, 4, 4)), encoding.table[0]
        assert terms.shape == (4, 20, 64) and len(encoding.norms) == 4
        for term, norm in zip(terms, encoding.norms):
            assert_near(term, norm(previous), 1e-6)
            assert term.mean(-1).abs().max() < 1e-6
            variance = previous.var(-1, unbiased=False)
            assert_near(term.var(-1, unbiased=False), variance / (variance + 1e-6), 1e-5)
            previous = term
        assert_near(terms.var(-1, unbiased=False), torch.ones(4, 20), 0.01)


def test_scale_of_the_table_is_forgotten():
    encoding, grid = create_lape((3, 5), 1), Grid(3, 5, 1)
    with torch.no_grad():
        encoding.table.mul_(1000)
        terms = terms_of(encoding, grid)
        encoding.table.mul_(7).add_(3)
    assert_near(terms_of(encoding, grid), terms, 1e-7)


@pytest.mark.parametrize('patch_drop_rate', [0.0, 0.5])
def test_for_attention_alone(patch_drop_rate):
    """Attention sees LN1(x) + p_l, including prefix rows. Stem, residual path and MLP do not see p."""
    model = make_model('lape', reg_tokens=2, patch_drop_rate=patch_drop_rate).double().train()
    plain = make_model('nope', reg_tokens=2).double()
    images = make_images(dtype=torch.float64)
    terms = terms_of(model.encodings['lape'], Grid(4, 4, 3))
    torch.manual_seed(1)
    stem, position = model.embed(images)
    kept = torch.arange(16).expand(2, -1) if patch_drop_rate == 0 else position.grid.keep_indices
    rows = torch.cat([torch.arange(3).expand(2, -1), 3 + kept], dim=1)  # [B, P+K]
    expected = plain.embed(images)[0].gather(1, rows[..., None].expand(-1, -1, 64))
    assert_near(stem, expected, 1e-12)
    modules = [m for block in model.blocks for m in (block, block.attn.qkv, block.attn.proj, block.mlp)]
    torch.manual_seed(1)
    seen = inputs_of(modules, model, images)
    for i, block in enumerate(model.blocks):
        tokens, qkv, proj, mlp = seen[4 * i:4 * i + 4]
        assert_near(qkv, block.norm1(tokens) + terms[i][rows], 1e-10)
        assert_near(mlp, block.norm2(tokens + block.attn.proj(proj)), 1e-10)


def test_norms_go_with_their_layers():
    """A truncated model keeps the norms of its layers, which still add the same."""
    model = make_model('lape', depth=4)
    terms = terms_of(model.encodings['lape'], Grid(4, 4, 1))
    model.prune_intermediate_layers([1])
    norms = [name for name in model.state_dict() if 'norms' in name and name.endswith('weight')]
    assert norms == ['encodings.lape.norms.0.weight', 'encodings.lape.norms.1.weight']
    assert torch.equal(terms_of(model.encodings['lape'], Grid(4, 4, 1)), terms[:2])


# --- precision -------------------------------------------------------------------------------------------------------

def test_float32():
    """A large grid in single against double precision."""
    grid, encoding = Grid(24, 32, 1), create_lape((24, 32), 1)
    terms = terms_of(copy.deepcopy(encoding).float(), grid)
    assert terms.dtype == torch.float32
    assert_near(terms, terms_of(encoding, grid), 1e-5)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('grid_size, tolerance', [((3, 5), 1e-5), ((6, 4), 0.02)])  # a resampled table is rounded
def test_half_models(grid_size, tolerance, dtype):
    """Terms are computed in float32 from the parameters of a half model."""
    grid = Grid(*grid_size, 1)
    encoding = create_lape((3, 5), 1, dtype=torch.float32).to(dtype)
    terms = terms_of(encoding, grid)
    assert terms.dtype == torch.float32
    assert_near(terms, terms_of(copy.deepcopy(encoding).double(), grid), tolerance)


def test_autocast():
    """Autocast does not affect the terms, and changes gradients little."""
    grid, encoding = Grid(3, 5, 1), create_lape((3, 5), 1, dtype=torch.float32)
    expected = terms_of(encoding, grid)
    with torch.autocast('cpu', torch.bfloat16):
        terms = terms_of(encoding, grid)
    assert terms.dtype == torch.float32 and torch.equal(terms, expected)
    compare(terms, expected, dict(encoding.named_parameters()), 0.02)


# --- compositions, checkpoints and initial values --------------------------------------------------------------------

@pytest.mark.parametrize('pos_enc, text', [
    ('ape+lape', "'lape' cannot be combined with 'ape': it is 'ape' passed from layer to layer"),
    ('auto_ape+auto_lape', "'auto_lape' cannot be combined with 'ape': it is 'ape' passed from layer to layer"),
])
def test_wrong_compositions(pos_enc, text):
    with pytest.raises(ValueError, match=text):
        make_model(pos_enc)


@pytest.mark.parametrize('saved', [{'img_size': 48, 'reg_tokens': 0}, {'img_size': (32, 48), 'reg_tokens': 3}])
def test_other_prefix_tokens(saved):
    """On the loading path that resamples and on the one that does not."""
    state = make_model('lape', **saved).state_dict()
    model = make_model('lape', reg_tokens=4)
    rows = state['encodings.lape.table'].shape[1]
    with pytest.raises(ValueError, match=f"The table of 'lape' has {rows} rows, not 5 for the prefix tokens"):
        checkpoints.filter_state_dict(dict(state), model)
    with pytest.raises(ValueError, match='encodings.lape.table .* instead of .*This loading path resizes nothing'):
        model.load_state_dict(state)


def test_initial_values():
    for model in initial_models('lape', img_size=(128, 64), reg_tokens=4, depth=3):
        encoding = model.encodings['lape']
        assert encoding.table.shape == (1, 5 + 16 * 8, 64)
        assert encoding.table.std().item() == pytest.approx(0.02, rel=0.05)
        assert abs(encoding.table.mean().item()) < 0.001 and encoding.table.abs().max() < 2
        assert len(encoding.norms) == 3
        for norm in encoding.norms:
            assert norm.eps == 1e-6
            assert torch.equal(norm.weight, torch.ones(64)) and torch.equal(norm.bias, torch.zeros(64))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64])
def test_initial_values_in_other_dtypes(dtype):
    """Drawn in float32: in half precision some of what timm's function draws is infinite."""
    encoding = timm_sape.create_encoding('lape', dim=256, num_heads=4, grid_size=(40, 40), dtype=dtype)
    assert encoding.table.dtype == dtype and encoding.table.double().std().item() == pytest.approx(0.02, rel=0.05)
    assert encoding.table.abs().max() < 0.12
