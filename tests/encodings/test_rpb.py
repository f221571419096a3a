"""rpb: a table with a number for each offset and each head."""
import pytest
import torch
import torch.nn.functional as F
from timm.layers import RelPosBias
from timm.models.vision_transformer_relpos import VisionTransformerRelPos

import reference_rpb
import timm_sape
from bias_checks import (
    KEPT,
    PAIRS_IN_RASTER_ORDER,
    SIZES,
    DirectedTests,
    LearnedBiasTests,
    bias_of,
    check_half,
    transposed,
)
from harness import assert_near, create, make_grid, where
from model_checks import check_weights_of_vit_relpos, initial_model, own_encodings
from timm_sape import Grid
from timm_sape.encodings import rpb


def columns_first(values, grid, between_patches=rpb.between_patches):
    values = values.unflatten(0, (2 * grid.height - 1, 2 * grid.width - 1)).flip(1)
    return between_patches(values.flatten(0, 1), grid)


def aligned(values, size, mode, interpolate=F.interpolate):
    return interpolate(values, size=size, mode=mode, align_corners=True)


def bilinear(values, size, mode, interpolate=F.interpolate):
    return interpolate(values, size=size, mode='bilinear')


def own_table(self, name, grid):
    return getattr(self, name)[:(2 * grid.height - 1) * (2 * grid.width - 1)]


def by_timm(self, grid):
    """timm's layer instead of ours, made for the grid and the prefix tokens as timm's models make it."""
    layer = RelPosBias(self.grid_size, self.num_heads, grid.num_prefix_tokens).to(self.table.dtype)
    with torch.no_grad():
        layer.relative_position_bias_table[:len(self.table)] = self.table
    layer.set_window_size(grid.size)
    return layer.get_bias()[0]


class TestRpb(DirectedTests, LearnedBiasTests):
    name = 'rpb'
    mutants = {  # arguments of `check`, (owner, attribute, replacement)
        **LearnedBiasTests.mutants,
        'kept patches in raster order': (((3, 5), 1, 8), PAIRS_IN_RASTER_ORDER),
        'p_j - p_i': (((3, 5), 0), (rpb, 'between_patches', transposed)),
        'x mirrored': (((3, 5), 0), (rpb, 'between_patches', columns_first)),
        'corners aligned': (((4, 7), 0, None, (3, 5)), (F, 'interpolate', aligned)),
        'bilinear': (((4, 7), 0, None, (3, 5)), (F, 'interpolate', bilinear)),
        'not resampled': (((2, 3), 0, None, (3, 5)), (rpb.RelativePositionBias, 'resized', own_table)),
    }

    def expected_bias(self, encoding, q, x, grid):
        return reference_rpb.bias(encoding.table, grid.size, encoding.grid_size, **where(grid))

    def mirror(self, encoding):
        encoding.table.copy_(encoding.table.unflatten(0, (5, 9)).flip(1).flatten(0, 1))

    @pytest.mark.parametrize('grid_size, num_prefix_tokens, num_keep', KEPT)
    def test_kept_patches_of_its_own_grid(self, grid_size, num_prefix_tokens, num_keep):
        self.check(grid_size, num_prefix_tokens, num_keep)

    def test_a_larger_grid(self):
        """The table is resampled."""
        self.check((6, 9), 1, None, (3, 5))

    @pytest.mark.filterwarnings('ignore::UserWarning:timm')
    @pytest.mark.parametrize('case, text', [
        (((3, 5), 5), None),  # no more than one prefix token
        (((3, 5), 1), 'off by'),  # and that has a bias
        (((6, 6), 0, None, (4, 4)), 'off by'),  # another grid: other places, and linear between them
    ])
    def test_what_timm_does_otherwise(self, case, text, monkeypatch):
        """With timm's layer instead of ours, the comparison with the equations fails."""
        self.check(*case)
        monkeypatch.setattr(rpb.RelativePositionBias, 'position_bias', by_timm)
        with pytest.raises(AssertionError, match=text):
            self.check(*case)

    def test_other_grid(self):
        """An image of another size and `set_grid_size` give the same. The contracts test loading."""
        trained, grid = create('rpb', (3, 5), 1, **SIZES), make_grid((4, 7), 1)
        expected = bias_of(trained, grid)
        trained.set_grid_size((4, 7))
        assert torch.equal(bias_of(trained, grid), expected)
        assert trained.table.shape == (7 * 13, SIZES['heads']) and trained.grid_size == (4, 7)

    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    def test_half(self, dtype):
        """A resampled table is rounded to the dtype of the parameter, so the tolerance is larger."""
        check_half('rpb', dtype, 0.01)


# --- timm ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('grid_size', [(4, 4), (14, 14), (3, 5), (7, 1), (1, 1)])
def test_same_as_timm(grid_size):
    """On one grid without prefix tokens, with the same table."""
    encoding = create('rpb', grid_size, **SIZES)
    layer = RelPosBias(grid_size, SIZES['heads']).double()
    layer.relative_position_bias_table.data.copy_(encoding.table)
    assert_near(bias_of(encoding, Grid(*grid_size)), layer.get_bias(), 1e-14)


def test_timm_refuses_other_sizes():
    """timm's models with relative positions take images of one size only."""
    model = VisionTransformerRelPos(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2)
    with pytest.raises(AssertionError):
        model(torch.zeros(1, 3, 32, 48))


@pytest.mark.parametrize('shared', [False, True])
def test_weights_of_vit_relpos(shared):
    check_weights_of_vit_relpos('rpb', 'bias', {}, class_token=False, shared=shared, saves_grid=True)


# --- properties ------------------------------------------------------------------------------------------------------

def test_resampled_table():
    """Resampling keeps a constant, keeps the value at offset 0, and commutes with mirroring."""
    encoding = create('rpb', (3, 5), **SIZES)
    heads = SIZES['heads']
    for new in ((6, 9), (2, 3), (1, 1), (8, 2)):
        shape = [2 * size - 1 for size in new]
        table = encoding.resample('table', torch.ones_like(encoding.table), (3, 5), new)
        assert_near(table, torch.ones(shape[0] * shape[1], heads, dtype=torch.float64), 1e-12)
        table = encoding.resample('table', encoding.table, (3, 5), new)
        assert_near(table[len(table) // 2], encoding.table[len(encoding.table) // 2], 1e-12)
        mirrored = encoding.resample('table', encoding.table.flip(0), (3, 5), new)
        assert_near(mirrored, table.flip(0), 1e-12)
        assert table.is_contiguous() and table.shape == (shape[0] * shape[1], heads)
        low = encoding.resample('table', encoding.table.bfloat16(), (3, 5), new)
        assert low.dtype == torch.bfloat16


# --- initial values --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
def test_initial_values(again):
    model = initial_model('rpb', again, img_size=160)
    tables = torch.stack([encoding.table for encoding in own_encodings(model, 'rpb')])
    assert tables.shape == (2, 39 * 39, 4)
    assert tables.std().item() == pytest.approx(0.02, rel=0.03)
    assert tables.abs().max() < 0.12 and abs(tables.mean().item()) < 8e-4  # 4.4 deviations
    assert len(tables[:, 0].unique()) == 8  # drawn one by one


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64])
def test_initial_values_in_other_dtypes(dtype):
    """Drawn in float32: in half precision some of what timm's function draws is infinite."""
    encoding = timm_sape.create_encoding('rpb', dim=256, num_heads=4, grid_size=(40, 40), dtype=dtype)
    assert encoding.table.dtype == dtype
    assert encoding.table.double().std().item() == pytest.approx(0.02, rel=0.05)
    assert encoding.table.abs().max() < 0.12


# --- keywords --------------------------------------------------------------------------------------------------------

def test_wrong_keywords():
    with pytest.raises(ValueError, match="'rpb' has no keyword 'resolution'"):
        create('rpb', **SIZES, resolution='rescale')
