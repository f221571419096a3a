"""`sincos1d`: sinusoids along the raster."""
import pytest
import torch

import reference_sincos1d as reference
import timm_sape
from harness import assert_near, create, make_tokens, where
from timm_sape import Grid
from timm_sape.encodings.sincos1d import SinusoidalPositionEncoding1d
from token_checks import MUTANTS, PLAIN, RULES, TRAINED_GRID_IGNORED, TermTests

compute = SinusoidalPositionEncoding1d.compute


def along_columns(self, grid, device, dtype):
    table = compute(self, grid, device, dtype)
    return table.unflatten(0, (grid.width, grid.height)).transpose(0, 1).flatten(0, 1)


def sines_first(*args):
    return compute(*args).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class TestSincos1d(TermTests):
    name = 'sincos1d'
    variants = RULES
    mutants = {
        **MUTANTS,
        'along columns': (PLAIN, (SinusoidalPositionEncoding1d, 'compute', along_columns)),
        'all sines first': (PLAIN, (SinusoidalPositionEncoding1d, 'compute', sines_first)),
        'trained grid ignored': TRAINED_GRID_IGNORED,
    }

    def expected(self, encoding, tokens, grid):
        ref = encoding.ref_grid_size if encoding.rule == 'rescale' else None
        return reference.sincos1d(tokens, grid.size, ref_grid_size=ref, **where(grid))


@pytest.mark.parametrize('length', [1, 3])
def test_rescaled_index(length):
    """Twice as many patches, half the step: every second one has an old position. Extrapolated, the first ones have."""
    for rule, kept in (('rescale', slice(0, None, 2)), ('extrapolate', slice(0, length))):
        encoding = create('sincos1d', (length, 1), resolution=rule)
        old, new = (encoding(make_tokens(grid), grid=grid, hook='embed') for grid in (Grid(length, 1), Grid(length, 2)))
        assert_near(new[kept], old, 1e-12)


def test_products_are_relative_along_the_raster():
    """Nothing about it is 2-D: the last patch of a row is next to the first one of the next."""
    table = create('sincos1d', (4, 5))(torch.zeros(1, 20, 16), grid=Grid(4, 5), hook='embed')
    products = table @ table.T
    assert_near(products[1:, 1:], products[:-1, :-1], 1e-12)
    assert products[4, 5] == pytest.approx(products[0, 1].item())  # (0, 4) and (1, 0), (0, 0) and (0, 1)
    assert products[0, 5] < 0.95 * products[0, 1]  # (0, 0) and (1, 0)


@pytest.mark.parametrize('dim, keywords, text', [
    (7, {}, "'sincos1d' needs an even embed dim, got 7. Choose another embed_dim"),
    (8, {'resolution': 'resize'}, "resolution must be 'extrapolate' or 'rescale', got 'resize'"),
])
def test_wrong_values(dim, keywords, text):
    with pytest.raises(ValueError, match=text):
        timm_sape.create_encoding('sincos1d', dim=dim, num_heads=1, grid_size=(3, 5), **keywords)
