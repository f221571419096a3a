"""`sincos2d`: sinusoids of x and y."""
import copy
import functools

import pytest
import torch
from timm.layers import build_sincos2d_pos_embed

import reference_sincos2d as reference
import timm_sape
from breakages import columns_first, coordinates, in_raster_order, prefix_behind, x_before_y
from harness import (
    GRIDS, KEPT, OTHER_GRIDS, assert_near, catches, check_first_tokens, compare, create, embed, make_grid, make_tokens,
    where)
from timm_sape import Grid
from timm_sape.encodings import CoordinateEncoding
from timm_sape.encodings.sincos2d import SinusoidalPositionEncoding2d

RULES = pytest.mark.parametrize('resolution', ['extrapolate', 'rescale'])


def expected(encoding, tokens, grid):
    ref = encoding.ref_grid_size if encoding.rule == 'rescale' else None
    return reference.sincos2d(tokens, grid.size, ref_grid_size=ref, **where(grid))


def check(grid_size, num_prefix_tokens=0, num_keep=None, own_size=None, **keywords):
    """Value and gradient."""
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = create('sincos2d', own_size or grid_size, num_prefix_tokens, **keywords)
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
    trained, tokens = create('sincos2d', (3, 5), 1, resolution=resolution), make_tokens(grid)
    term = embed(trained, tokens, grid)
    moved = copy.deepcopy(trained)
    moved.set_grid_size((4, 7))
    assert torch.equal(embed(moved, tokens, grid), term)
    built = create('sincos2d', (4, 7), 1, ref_grid_size=(3, 5), resolution=resolution)
    built.load_state_dict(trained.state_dict())
    assert torch.equal(embed(built, tokens, grid), term)


def own_table(grid_size, dim=16, dtype=torch.float64):
    encoding = create('sincos2d', grid_size, dim=dim, dtype=dtype)
    grid = Grid(*grid_size)
    return encoding(make_tokens(grid, dim=dim), grid=grid, hook='embed').unflatten(0, grid_size)  # [H, W, D]


@pytest.mark.parametrize('grid_size', GRIDS)
@pytest.mark.parametrize('dim', [4, 8, 64])
def test_that_of_timm_with_x_first(grid_size, dim):
    y, x = build_sincos2d_pos_embed(grid_size, dim, interleave_sin_cos=True).chunk(2, dim=-1)
    assert_near(own_table(grid_size, dim, torch.float32).flatten(0, 1), torch.cat([x, y], dim=-1), 1e-6)


def timm_sincos2d(swapped=False, **kwargs):
    """timm's function instead of ours."""
    def compute(self, grid, device, dtype):
        table = build_sincos2d_pos_embed(grid.size, self.dim, dtype=dtype, **kwargs)
        return table.roll(self.dim // 2, -1) if swapped else table
    return compute


def corners(self, grid, device, dtype):
    """Rescales the outer patches onto the outer patches."""
    last = [max(size - 1, 1) for size in grid.size]
    scale = [(ref - 1) / n for ref, n in zip(self.ref_grid_size, last)]
    return coordinates(grid, device, dtype) * torch.tensor(scale, dtype=dtype)


PLAIN = functools.partial(check, (3, 5))
RESCALED = functools.partial(check, (4, 7), own_size=(3, 5), resolution='rescale')
MUTANTS = {  # what is checked, owner, attribute, replacement
    'prefix behind': (functools.partial(check, (3, 5), 1), Grid, 'pad_tokens', prefix_behind),
    'x and y swapped': (PLAIN, Grid, 'coordinates', x_before_y),
    'columns first': (PLAIN, Grid, 'coordinates', columns_first),
    'corners aligned': (RESCALED, CoordinateEncoding, 'coordinates', corners),
    'trained grid ignored': (RESCALED, CoordinateEncoding, 'rescaling', lambda *args: None),
    "timm's order of axes": (
        PLAIN, SinusoidalPositionEncoding2d, 'compute', timm_sincos2d(interleave_sin_cos=True)),
    "timm's default layout": (PLAIN, SinusoidalPositionEncoding2d, 'compute', timm_sincos2d(swapped=True)),
    "timm's reverse_coord": (
        PLAIN, SinusoidalPositionEncoding2d, 'compute', timm_sincos2d(interleave_sin_cos=True, reverse_coord=True)),
    "timm's reverse_coord, swapped": (
        PLAIN, SinusoidalPositionEncoding2d, 'compute',
        timm_sincos2d(True, interleave_sin_cos=True, reverse_coord=True)),
    'kept patches in raster order': (
        functools.partial(check, (3, 5), 1, 8), Grid, 'keep_tokens', in_raster_order(Grid.keep_tokens)),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    catches(MUTANTS[mutant][0], monkeypatch, *MUTANTS[mutant][1:])


def test_products_of_waves_are_relative():
    """All rows have the same norm, and the product of two is a function of the offset."""
    table = own_table((4, 5))
    assert_near(table.square().sum(-1), torch.full((4, 5), 8.0), 1e-12)
    products = torch.einsum('yxc,vuc->yxvu', table, table)
    assert_near(products[1:, 1:, 1:, 1:], products[:-1, :-1, :-1, :-1], 1e-12)
    assert not torch.allclose(products[0, 0], products[1, 1])


def test_transposed():
    """Transposing the grid swaps the halves of the channels. Not so in cape, whose waves have any direction."""
    assert torch.allclose(own_table((4, 4)), own_table((4, 4)).transpose(0, 1).roll(8, -1))
    assert_near(own_table((3, 5)), own_table((5, 3)).transpose(0, 1).roll(8, -1), 1e-12)


def test_turned_upside_down():
    """Positions start in a corner: half a turn does not take each wave to its conjugate, as it does in cape."""
    table = own_table((4, 5))
    cos, sin = table.flip(0, 1).chunk(2, dim=-1)
    assert not torch.allclose(torch.cat([cos, -sin], dim=-1), table)


def test_float32():
    """A large grid in single against double precision."""
    grid = Grid(24, 32, 1)
    encoding = create('sincos2d', (3, 5), 1)
    single = copy.deepcopy(encoding).float()
    term, wide = (e(make_tokens(grid), grid=grid, hook='embed') for e in (single, encoding))
    assert term.dtype == torch.float32
    assert_near(term, wide, 1e-4)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('grid_size', [(3, 5), (6, 4)])
def test_half_models(grid_size, dtype):
    """The term of a half model is computed in float32, in training too."""
    grid = Grid(*grid_size, 1)
    encoding = create('sincos2d', (3, 5), 1, dtype=torch.float32).to(dtype)
    wide = copy.deepcopy(encoding).double()(make_tokens(grid), grid=grid, hook='embed')
    for training in (False, True):
        term = encoding.train(training)(make_tokens(grid, dtype=dtype), grid=grid, hook='embed')
        assert term.dtype == torch.float32
        assert_near(term, wide, 1e-5)


def test_autocast():
    """Autocast does not affect the term."""
    for grid in (Grid(3, 5, 1), Grid(6, 4, 1)):
        encoding, tokens = create('sincos2d', (3, 5), 1, dtype=torch.float32), make_tokens(grid, dtype=torch.float32)
        term = encoding(tokens, grid=grid, hook='embed')
        with torch.autocast('cpu', torch.bfloat16):
            assert torch.equal(encoding(tokens, grid=grid, hook='embed'), term)


@pytest.mark.parametrize('dim, keywords, text', [
    (6, {}, "'sincos2d' needs an embed dim that is a multiple of 4, got 6. Choose another embed_dim"),
    (8, {'resolution': 'resize'}, "resolution must be 'extrapolate' or 'rescale', got 'resize'"),
])
def test_wrong_values(dim, keywords, text):
    with pytest.raises(ValueError, match=text):
        timm_sape.create_encoding('sincos2d', dim=dim, num_heads=1, grid_size=(3, 5), **keywords)


def test_where_it_acts():
    assert timm_sape.get_encoding('sincos2d').acts_on() == ('tokens',)


def test_in_a_model():
    check_first_tokens('sincos2d', expected)
