"""`sincos2d`: sinusoids of x and y."""
import pytest
import torch
from timm.layers import build_sincos2d_pos_embed

import reference_sincos2d as reference
import timm_sape
from breakages import columns_first, coordinates, x_before_y
from harness import GRIDS, assert_near, create, make_tokens, where
from timm_sape import Grid
from timm_sape.encodings import CoordinateEncoding
from timm_sape.encodings.sincos2d import SinusoidalPositionEncoding2d
from token_checks import MUTANTS, PLAIN, RESCALED, RULES, TRAINED_GRID_IGNORED, TermTests


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


class TestSincos2d(TermTests):
    name = 'sincos2d'
    variants = RULES
    mutants = {
        **MUTANTS,
        'x and y swapped': (PLAIN, (Grid, 'coordinates', x_before_y)),
        'columns first': (PLAIN, (Grid, 'coordinates', columns_first)),
        'corners aligned': (RESCALED, (CoordinateEncoding, 'coordinates', corners)),
        'trained grid ignored': TRAINED_GRID_IGNORED,
        **{name: (PLAIN, (SinusoidalPositionEncoding2d, 'compute', compute)) for name, compute in {
            "timm's order of axes": timm_sincos2d(interleave_sin_cos=True),
            "timm's default layout": timm_sincos2d(swapped=True),
            "timm's reverse_coord": timm_sincos2d(interleave_sin_cos=True, reverse_coord=True),
            "timm's reverse_coord, swapped": timm_sincos2d(True, interleave_sin_cos=True, reverse_coord=True),
        }.items()},
    }

    def expected(self, encoding, tokens, grid):
        ref = encoding.ref_grid_size if encoding.rule == 'rescale' else None
        return reference.sincos2d(tokens, grid.size, ref_grid_size=ref, **where(grid))


def own_table(grid_size, dim=16, dtype=torch.float64):
    encoding = create('sincos2d', grid_size, dim=dim, dtype=dtype)
    grid = Grid(*grid_size)
    return encoding(make_tokens(grid, dim=dim), grid=grid, hook='embed').unflatten(0, grid_size)  # [H, W, D]


@pytest.mark.parametrize('grid_size', GRIDS)
@pytest.mark.parametrize('dim', [4, 8, 64])
def test_that_of_timm_with_x_first(grid_size, dim):
    y, x = build_sincos2d_pos_embed(grid_size, dim, interleave_sin_cos=True).chunk(2, dim=-1)
    assert_near(own_table(grid_size, dim, torch.float32).flatten(0, 1), torch.cat([x, y], dim=-1), 1e-6)


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


@pytest.mark.parametrize('dim, keywords, text', [
    (6, {}, "'sincos2d' needs an embed dim that is a multiple of 4, got 6. Choose another embed_dim"),
    (8, {'resolution': 'resize'}, "resolution must be 'extrapolate' or 'rescale', got 'resize'"),
])
def test_wrong_values(dim, keywords, text):
    with pytest.raises(ValueError, match=text):
        timm_sape.create_encoding('sincos2d', dim=dim, num_heads=1, grid_size=(3, 5), **keywords)
