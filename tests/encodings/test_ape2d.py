"""`ape2d`: a learned vector for each row and one for each column."""
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from timm.models.naflexvit import NaFlexEmbeds

import reference_ape2d as reference
import timm_sape
from breakages import in_raster_order, prefix_behind
from harness import (
    GRIDS, KEPT, OTHER_GRIDS, assert_near, catches, check_first_tokens, compare, create, embed, initial_models,
    make_grid, make_tokens, where)
from timm_sape import Grid
from timm_sape.encodings.ape2d import FactoredPositionEncoding

VARIANTS = pytest.mark.parametrize('combine', ['sum', 'concat'])


def expected(encoding, tokens, grid):
    return reference.ape2d(
        tokens, encoding.table_y, encoding.table_x, grid.size, combine=encoding.combine, **where(grid))


def check(grid_size, num_prefix_tokens=0, num_keep=None, own_size=None, **keywords):
    """Value and every gradient."""
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = create('ape2d', own_size or grid_size, num_prefix_tokens, **keywords)
    tokens = make_tokens(grid)
    inputs = {'tokens': tokens, **dict(encoding.named_parameters())}
    compare(embed(encoding, tokens, grid), expected(encoding, tokens, grid), inputs)


@pytest.mark.parametrize('num_prefix_tokens', [0, 1, 5])
@pytest.mark.parametrize('grid_size', GRIDS)
@VARIANTS
def test_equations(combine, grid_size, num_prefix_tokens):
    check(grid_size, num_prefix_tokens, combine=combine)


@pytest.mark.parametrize('case', KEPT)
@VARIANTS
def test_equations_of_kept_patches(combine, case):
    check(*case, combine=combine)


@pytest.mark.parametrize('grid_size, own_size', OTHER_GRIDS)
@VARIANTS
def test_equations_on_another_grid(combine, grid_size, own_size):
    check(grid_size, 1, own_size=own_size, combine=combine)
    check(grid_size, 1, 1, own_size, combine=combine)


@VARIANTS
def test_two_paths_to_another_grid(combine):
    """A dynamic size and `set_grid_size` follow one rule. Loading does too: see the contracts."""
    grid = Grid(4, 7, 1)
    trained, tokens = create('ape2d', (3, 5), 1, combine=combine), make_tokens(grid)
    moved = copy.deepcopy(trained)
    moved.set_grid_size((4, 7))
    assert torch.equal(embed(moved, tokens, grid), embed(trained, tokens, grid))
    assert moved.table_y.shape[0] == 4 and moved.table_x.shape[0] == 7 and moved.table_x.is_contiguous()


@pytest.mark.parametrize('grid_size', [(3, 5), (6, 10), (2, 9), (1, 1), (7, 2)])
def test_sum_is_that_of_naflexvit(grid_size):
    """On its own grid and resampled. timm computes in float32."""
    embeds = NaFlexEmbeds(embed_dim=16, class_token=False, pos_embed='factorized', pos_embed_grid_size=(3, 5))
    encoding = create('ape2d', (3, 5), dtype=torch.float32)
    with torch.no_grad():
        embeds.pos_embed_y.copy_(encoding.table_y[None])
        embeds.pos_embed_x.copy_(encoding.table_x[None])
        term = torch.zeros(1, grid_size[0] * grid_size[1], 16)
        embeds._apply_factorized_pos_embed(term, grid_size)
        assert_near(encoding(term, grid=Grid(*grid_size), hook='embed'), term[0], 1e-6)


interpolate = F.interpolate
ANOTHER_GRID = functools.partial(check, (6, 2), 0, own_size=(3, 5))
MUTANTS = {  # what is checked, owner, attribute, replacement
    'prefix behind': (functools.partial(check, (3, 5), 1), Grid, 'pad_tokens', prefix_behind),
    'tables resized for each other': (ANOTHER_GRID, FactoredPositionEncoding, 'RESIZED', ('table_x', 'table_y')),
    'corners aligned': (ANOTHER_GRID, F, 'interpolate', functools.partial(interpolate, align_corners=True)),
    'nearest row': (ANOTHER_GRID, F, 'interpolate', lambda x, size, mode: interpolate(x, size)),
    'kept patches in raster order': (
        functools.partial(check, (3, 5), 1, 8), Grid, 'keep_tokens', in_raster_order(Grid.keep_tokens)),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    catches(MUTANTS[mutant][0], monkeypatch, *MUTANTS[mutant][1:])


@VARIANTS
def test_separable(combine):
    """The difference between two rows is the same in all columns, whatever the tables."""
    table = create('ape2d', (3, 5), combine=combine)(torch.zeros(1, 15, 16), grid=Grid(3, 5), hook='embed')
    steps = table.unflatten(0, (3, 5)).diff(dim=0)
    assert torch.allclose(steps, steps[:, :1].expand_as(steps))


def test_float32():
    """A large grid in single against double precision."""
    grid = Grid(24, 32, 1)
    encoding = create('ape2d', (3, 5), 1)
    single = copy.deepcopy(encoding).float()
    term, wide = (e(make_tokens(grid), grid=grid, hook='embed') for e in (single, encoding))
    assert term.dtype == torch.float32
    assert_near(term, wide, 1e-4)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('grid_size, tolerance', [((3, 5), 1e-5), ((6, 4), 1e-2)])  # a resampled table keeps its dtype
def test_half_models(grid_size, tolerance, dtype):
    """The term is computed in float32 from the parameters of a half model, in training too."""
    grid = Grid(*grid_size, 1)
    encoding = create('ape2d', (3, 5), 1, dtype=torch.float32).to(dtype)
    wide = copy.deepcopy(encoding).double()(make_tokens(grid), grid=grid, hook='embed')
    for training in (False, True):
        term = encoding.train(training)(make_tokens(grid, dtype=dtype), grid=grid, hook='embed')
        assert term.dtype == torch.float32
        assert_near(term, wide, tolerance)


def test_autocast():
    """Autocast does not affect the term or its gradients."""
    grid = Grid(3, 5, 1)
    encoding, tokens = create('ape2d', (3, 5), 1, dtype=torch.float32), make_tokens(grid, dtype=torch.float32)
    term = encoding(tokens, grid=grid, hook='embed')
    with torch.autocast('cpu', torch.bfloat16):
        actual = encoding(tokens, grid=grid, hook='embed')
    assert actual.dtype == torch.float32
    compare(actual, term, dict(encoding.named_parameters()), 0)


@pytest.mark.parametrize('dim, keywords, text', [
    (8, {'combine': 'product'}, "'ape2d': combine must be 'sum' or 'concat', got 'product'"),
    (8, {'combine': ['sum']}, r"combine must be 'sum' or 'concat', got \['sum'\]"),
    (7, {'combine': 'concat'}, "'ape2d' with combine='concat' needs an even embed dim, got 7. Use 'sum'"),
])
def test_wrong_values(dim, keywords, text):
    with pytest.raises(ValueError, match=text):
        timm_sape.create_encoding('ape2d', dim=dim, num_heads=1, grid_size=(3, 5), **keywords)


@pytest.mark.parametrize('combine, channels', [('sum', 64), ('concat', 32)])
def test_initial_values(combine, channels):
    for model in initial_models('ape2d', img_size=(128, 64), pos_enc_kwargs={'ape2d': {'combine': combine}}):
        encoding = model.encodings['ape2d']
        assert encoding.table_y.shape == (16, channels) and encoding.table_x.shape == (8, channels)
        for table in (encoding.table_y, encoding.table_x):
            assert table.std().item() == pytest.approx(0.02, rel=0.15)
            assert abs(table.mean().item()) < 0.003
        assert encoding.table_y.abs().max() > 0.05  # normal, not uniform


def test_where_it_acts():
    assert timm_sape.get_encoding('ape2d').acts_on() == ('tokens',)


def test_in_a_model():
    check_first_tokens('ape2d', expected)
