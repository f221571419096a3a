"""`sincos1d`: sinusoids along the raster."""
import copy
import functools

import pytest
import torch

import reference_sincos1d as reference
import timm_sape
from breakages import in_raster_order, prefix_behind
from harness import (
    GRIDS, KEPT, OTHER_GRIDS, assert_near, catches, check_first_tokens, compare, create, embed, make_grid, make_tokens,
    where)
from timm_sape import Grid
from timm_sape.encodings import CoordinateEncoding
from timm_sape.encodings.sincos1d import SinusoidalPositionEncoding1d

RULES = pytest.mark.parametrize('resolution', ['extrapolate', 'rescale'])


def expected(encoding, tokens, grid):
    ref = encoding.ref_grid_size if encoding.rule == 'rescale' else None
    return reference.sincos1d(tokens, grid.size, ref_grid_size=ref, **where(grid))


def check(grid_size, num_prefix_tokens=0, num_keep=None, own_size=None, **keywords):
    """Value and gradient."""
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = create('sincos1d', own_size or grid_size, num_prefix_tokens, **keywords)
    tokens = make_tokens(grid)
    compare(embed(encoding, tokens, grid), expected(encoding, tokens, grid), {'tokens': tokens})


@pytest.mark.parametrize('num_prefix_tokens', [0, 1, 5])
@pytest.mark.parametrize('grid_size', GRIDS)
def test_equations(grid_size, num_prefix_tokens):
    check(grid_size, num_prefix_tokens)


@pytest.mark.parametrize('case', KEPT)
def test_equations_of_kept_patches(case):
    check(*case)


@pytest.mark.parametrize('grid_size, own_size', OTHER_GRIDS)
@RULES
def test_equations_on_another_grid(resolution, grid_size, own_size):
    check(grid_size, 1, own_size=own_size, resolution=resolution)
    check(grid_size, 1, 1, own_size, resolution=resolution)


@RULES
def test_three_paths_to_another_grid(resolution):
    """A dynamic size, `set_grid_size` and construction for the new grid follow one rule."""
    grid = Grid(4, 7, 1)
    trained, tokens = create('sincos1d', (3, 5), 1, resolution=resolution), make_tokens(grid)
    term = embed(trained, tokens, grid)
    moved = copy.deepcopy(trained)
    moved.set_grid_size((4, 7))
    assert torch.equal(embed(moved, tokens, grid), term)
    built = create('sincos1d', (4, 7), 1, ref_grid_size=(3, 5), resolution=resolution)
    built.load_state_dict(trained.state_dict())
    assert torch.equal(embed(built, tokens, grid), term)


@pytest.mark.parametrize('length', [1, 3])
def test_rescaled_index(length):
    """Twice as many patches, half the step: every second one has an old position. Extrapolated, the first ones have."""
    for rule, kept in (('rescale', slice(0, None, 2)), ('extrapolate', slice(0, length))):
        encoding = create('sincos1d', (length, 1), resolution=rule)
        old, new = (encoding(make_tokens(grid), grid=grid, hook='embed') for grid in (Grid(length, 1), Grid(length, 2)))
        assert_near(new[kept], old, 1e-12)


compute = SinusoidalPositionEncoding1d.compute


def along_columns(self, grid, device, dtype):
    table = compute(self, grid, device, dtype)
    return table.unflatten(0, (grid.width, grid.height)).transpose(0, 1).flatten(0, 1)


MUTANTS = {  # what is checked, owner, attribute, replacement
    'prefix behind': (functools.partial(check, (3, 5), 1), Grid, 'pad_tokens', prefix_behind),
    'along columns': (functools.partial(check, (3, 5)), SinusoidalPositionEncoding1d, 'compute', along_columns),
    'all sines first': (
        functools.partial(check, (3, 5)), SinusoidalPositionEncoding1d, 'compute',
        lambda *args: compute(*args).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)),
    'trained grid ignored': (
        functools.partial(check, (4, 7), own_size=(3, 5), resolution='rescale'), CoordinateEncoding, 'rescaling',
        lambda *args: None),
    'kept patches in raster order': (
        functools.partial(check, (3, 5), 1, 8), Grid, 'keep_tokens', in_raster_order(Grid.keep_tokens)),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    catches(MUTANTS[mutant][0], monkeypatch, *MUTANTS[mutant][1:])


def test_products_are_relative_along_the_raster():
    """Nothing about it is 2-D: the last patch of a row is next to the first one of the next."""
    table = create('sincos1d', (4, 5))(torch.zeros(1, 20, 16), grid=Grid(4, 5), hook='embed')
    products = table @ table.T
    assert_near(products[1:, 1:], products[:-1, :-1], 1e-12)
    assert products[4, 5] == pytest.approx(products[0, 1].item())  # (0, 4) and (1, 0), (0, 0) and (0, 1)
    assert products[0, 5] < 0.95 * products[0, 1]  # (0, 0) and (1, 0)


def test_float32():
    """A large grid in single against double precision."""
    grid = Grid(24, 32, 1)
    encoding = create('sincos1d', (3, 5), 1)
    single = copy.deepcopy(encoding).float()
    term, wide = (e(make_tokens(grid), grid=grid, hook='embed') for e in (single, encoding))
    assert term.dtype == torch.float32
    assert_near(term, wide, 1e-4)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('grid_size', [(3, 5), (6, 4)])
def test_half_models(grid_size, dtype):
    """The term of a half model is computed in float32, in training too."""
    grid = Grid(*grid_size, 1)
    encoding = create('sincos1d', (3, 5), 1, dtype=torch.float32).to(dtype)
    wide = copy.deepcopy(encoding).double()(make_tokens(grid), grid=grid, hook='embed')
    for training in (False, True):
        term = encoding.train(training)(make_tokens(grid, dtype=dtype), grid=grid, hook='embed')
        assert term.dtype == torch.float32
        assert_near(term, wide, 1e-5)


def test_autocast():
    """Autocast does not affect the term."""
    for grid in (Grid(3, 5, 1), Grid(6, 4, 1)):
        encoding, tokens = create('sincos1d', (3, 5), 1, dtype=torch.float32), make_tokens(grid, dtype=torch.float32)
        term = encoding(tokens, grid=grid, hook='embed')
        with torch.autocast('cpu', torch.bfloat16):
            assert torch.equal(encoding(tokens, grid=grid, hook='embed'), term)


@pytest.mark.parametrize('dim, keywords, text', [
    (7, {}, "'sincos1d' needs an even embed dim, got 7. Choose another embed_dim"),
    (8, {'resolution': 'resize'}, "resolution must be 'extrapolate' or 'rescale', got 'resize'"),
])
def test_wrong_values(dim, keywords, text):
    with pytest.raises(ValueError, match=text):
        timm_sape.create_encoding('sincos1d', dim=dim, num_heads=1, grid_size=(3, 5), **keywords)


def test_where_it_acts():
    assert timm_sape.get_encoding('sincos1d').acts_on() == ('tokens',)


def test_in_a_model():
    check_first_tokens('sincos1d', expected)
