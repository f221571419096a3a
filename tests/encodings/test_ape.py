"""`ape`: timm's own table."""
import functools

import pytest
import torch
import torch.nn.functional as F

import reference_ape as reference
import timm_sape
from breakages import in_raster_order
from harness import GRIDS, catches, compare, create, embed, make_grid, make_model, make_tokens, where
from loops import resampled
from timm_sape import Grid, ops

PREFIXES = [(0, 0), (1, 1), (5, 5), (1, 0), (5, 0)]  # prefix tokens, and their rows in the table


def check(grid_size, num_prefix_tokens=0, num_prefix_rows=0, num_keep=None, own_size=None):
    """Value and every gradient."""
    own_size = own_size or grid_size
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = create('ape', own_size, num_prefix_tokens)
    shape = (1, num_prefix_rows + own_size[0] * own_size[1], 16)
    pos_embed = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    tokens, table = make_tokens(grid), pos_embed
    if own_size != grid_size:
        table = resampled(pos_embed, own_size, grid_size, num_prefix_rows)
    actual = embed(encoding, tokens, grid, pos_embed=pos_embed)
    expected = reference.ape(tokens, table, grid_size, **where(grid))
    compare(actual, expected, {'tokens': tokens, 'pos_embed': pos_embed})


@pytest.mark.parametrize('num_prefix_tokens, num_prefix_rows', PREFIXES)
@pytest.mark.parametrize('grid_size', GRIDS)
def test_equations(grid_size, num_prefix_tokens, num_prefix_rows):
    check(grid_size, num_prefix_tokens, num_prefix_rows)


@pytest.mark.parametrize('num_prefix_tokens, num_prefix_rows', PREFIXES)
@pytest.mark.parametrize('grid_size, num_keep', [((3, 5), 8), ((7, 1), 3), ((1, 7), 7), ((4, 4), 1)])
def test_equations_of_kept_patches(grid_size, num_keep, num_prefix_tokens, num_prefix_rows):
    check(grid_size, num_prefix_tokens, num_prefix_rows, num_keep)


@pytest.mark.parametrize('grid_size', [(5, 3), (2, 9), (6, 10), (1, 1)])
@pytest.mark.parametrize('num_prefix_tokens, num_prefix_rows', [(0, 0), (2, 2), (2, 0)])
def test_equations_on_another_grid(grid_size, num_prefix_tokens, num_prefix_rows):
    check(grid_size, num_prefix_tokens, num_prefix_rows, own_size=(3, 5))
    if grid_size != (1, 1):
        check(grid_size, num_prefix_tokens, num_prefix_rows, 6, own_size=(3, 5))


pad, interpolate = F.pad, F.interpolate
KEPT = functools.partial(check, (3, 5), 1, 1, 8)
COARSER = functools.partial(check, (2, 3), 1, 1, own_size=(6, 10))
MUTANTS = {  # what is checked, owner, attribute, replacement
    'prefix behind': (
        functools.partial(check, (3, 5), 1, 0), F, 'pad', lambda x, widths: pad(x, (0, 0, *widths[:1:-1]))),
    'kept patches in raster order': (KEPT, Grid, 'keep_tokens', in_raster_order(Grid.keep_tokens)),
    'first patches instead of kept ones': (
        KEPT, Grid, 'keep_rows', lambda self, table: table[:, None, :8].expand(3, -1, -1, -1)),
    'resampled without antialias': (
        COARSER, F, 'interpolate', lambda *args, **kwargs: interpolate(*args, **{**kwargs, 'antialias': False})),
    'linear': (COARSER, F, 'interpolate', lambda *args, **kwargs: interpolate(*args, **{**kwargs, 'mode': 'bilinear'})),
    'in float32': (COARSER, ops, 'upcast', lambda x: (x.float(),)),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    catches(MUTANTS[mutant][0], monkeypatch, *MUTANTS[mutant][1:])


def test_where_it_acts():
    assert timm_sape.get_encoding('ape').acts_on() == ('tokens',)


def test_initial_values():
    model = make_model('ape', img_size=160, patch_size=16)
    assert model.pos_embed.shape == (1, 101, 64)
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.pos_embed.abs().max() < 0.1
