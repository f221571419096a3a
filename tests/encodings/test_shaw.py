"""shaw: a table with a vector for each offset, which is added to k."""
import pytest
import torch

import bias_checks
import reference_shaw as reference
import timm_sape
from bias_checks import GRIDS, KEPT, SIZES, bias_of, make_inputs
from harness import assert_near, catches, compare, create, make_grid, where
from model_checks import (
    check_masks,
    check_model,
    check_neutral_start,
    check_number_of_parameters,
    initial_model,
    own_encodings,
)
from timm_sape.encodings import shaw

VARIANTS = [{}, {'clip': 1}, {'clip': 9}, {'distance': 'raster', 'clip': 6}]


def expected_bias(encoding, q, grid):
    tables = dict(encoding.named_parameters())
    return reference.bias(q, tables, grid.size, clip=encoding.clip, distance=encoding.distance, **where(grid))


def check(grid_size, num_prefix_tokens=0, num_keep=None, own_size=None, **keywords):
    """The bias and every gradient in float64, of an encoding made for `own_size`."""
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = create('shaw', own_size or grid_size, num_prefix_tokens, **SIZES, **keywords)
    inputs = make_inputs(grid, **SIZES)
    leaves = {'q': inputs[0], **dict(encoding.named_parameters())}
    compare(bias_of(encoding, grid, inputs), expected_bias(encoding, inputs[0], grid), leaves)


# --- equations -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords', VARIANTS, ids=str)
@pytest.mark.parametrize('grid_size, num_prefix_tokens', GRIDS)
def test_equations(grid_size, num_prefix_tokens, keywords):
    check(grid_size, num_prefix_tokens, **keywords)


@pytest.mark.parametrize('keywords', VARIANTS, ids=str)
@pytest.mark.parametrize('grid_size, num_prefix_tokens, num_keep', KEPT)
def test_kept_patches(grid_size, num_prefix_tokens, num_keep, keywords):
    """On a grid other than the encoding's own."""
    check(grid_size, num_prefix_tokens, num_keep, (3, 5), **keywords)


@pytest.mark.parametrize('keywords', VARIANTS, ids=str)
def test_another_grid(keywords):
    """The grid that it was made for makes no difference."""
    check((4, 3), 1, None, (3, 5), **keywords)


@pytest.mark.parametrize('keywords', VARIANTS, ids=str)
def test_attention(keywords):
    encoding, grid = create('shaw', (3, 5), 1, **SIZES, **keywords), make_grid((3, 5), 1, 8)
    bias_checks.check_attention(encoding, lambda q, x: expected_bias(encoding, q, grid), grid)


def clipped_sooner(self, low, high, clamp=torch.Tensor.clamp):
    return clamp(self, low + 1, high - 1)


def not_scaled(self, q, *args, along=shaw.RelativePositionRepresentations._along):
    return along(self, q * self.head_dim ** 0.5, *args)


MUTANTS = {  # arguments of `check`, (owner, attribute, replacement)
    'clipped sooner': (((3, 5), 0), (torch.Tensor, 'clamp', clipped_sooner)),
    'not scaled': (((3, 5), 0), (shaw.RelativePositionRepresentations, '_along', not_scaled)),
    'x and y swapped': (((4, 4), 0), bias_checks.AXES_SWAPPED),
    'prefix behind': (((3, 5), 1), bias_checks.PREFIX_BEHIND),
    'kept patches in raster order': (((3, 5), 1, 8), bias_checks.PAIRS_IN_RASTER_ORDER),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    """If the package is broken like this, the comparison with the equations fails."""
    case, patch = MUTANTS[mutant]
    catches(lambda: check(*case), monkeypatch, *patch)


# --- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords', VARIANTS, ids=str)
def test_float32(keywords):
    bias_checks.check_float32('shaw', **keywords)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('keywords', VARIANTS, ids=str)
def test_half(keywords, dtype):
    bias_checks.check_half('shaw', dtype, **keywords)


# --- properties ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords', VARIANTS, ids=str)
def test_offsets_alone(keywords):
    bias_checks.check_offsets_alone('shaw', **keywords)


def test_mirrored():
    bias_checks.check_mirrored('shaw', lambda e: e.table_x.copy_(e.table_x.flip(0)))


def test_bias_moves_with_kept_patches():
    bias_checks.check_order_of_kept_patches('shaw')


def test_raster_and_axis_agree_on_one_row():
    """In one row the distance along the raster is that along x."""
    raster, axis = create('shaw', (1, 7), **SIZES, distance='raster'), create('shaw', (1, 7), **SIZES)
    with torch.no_grad():
        axis.table_x.copy_(raster.table)
        axis.table_y[2] = 0
    grid = make_grid((1, 7), 1)
    inputs = make_inputs(grid, **SIZES)
    assert_near(bias_of(axis, grid, inputs), bias_of(raster, grid, inputs), 1e-14)


def test_clip():
    """Offsets beyond the clip share a value. Up to it no two do."""
    grid = make_grid((1, 9))
    for clip in (1, 2, 4):
        encoding = create('shaw', (1, 9), **SIZES, clip=clip)
        bias = bias_of(encoding, grid, make_inputs(grid, **SIZES))[..., 4, :]  # of the one in the middle
        assert len(bias[0, 0].unique()) == 2 * clip + 1
        assert (bias[..., 4 + clip:] == bias[..., 4 + clip:5 + clip]).all()


@pytest.mark.parametrize('keywords', VARIANTS, ids=str)
def test_other_grid(keywords):
    bias_checks.check_other_grid('shaw', **keywords)


# --- initial values --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
@pytest.mark.parametrize('keywords, names', [
    ({'clip': 50}, ['table_y', 'table_x']), ({'distance': 'raster'}, ['table'])], ids=str)
def test_initial_values(keywords, names, again):
    encodings = own_encodings(initial_model('shaw', again, pos_enc_kwargs={'shaw': keywords}), 'shaw')
    assert [name for name, _ in encodings[0].named_parameters()] == names
    values = torch.cat([p.flatten() for encoding in encodings for p in encoding.parameters()])
    assert encodings[0].get_parameter(names[0]).shape == (2 * keywords.get('clip', 2) + 1, 16)
    assert values.std().item() == pytest.approx(1 / 4, rel=0.15) and values.abs().max() > 2 / 4


def test_number_of_parameters():
    check_number_of_parameters('shaw')


# --- models ----------------------------------------------------------------------------------------------------------

KEYWORDS = [{}, {'distance': 'raster', 'clip': 3}]


@pytest.mark.parametrize('composition', ['{}', 'ape+{}', 'rope2d+{}'])
@pytest.mark.parametrize('keywords', KEYWORDS, ids=str)
def test_model(keywords, composition):
    check_model('shaw', composition, keywords, least=5e-3)


@pytest.mark.parametrize('keywords', KEYWORDS, ids=str)
def test_neutral_start(keywords):
    check_neutral_start('shaw', keywords)


def test_masks():
    check_masks('shaw')


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords, text', [
    ({'distance': 2}, "'shaw': distance must be 'axis' or 'raster', got 2"),
    ({'clip': 0}, "'shaw' needs clip to be an integer of at least 1, got 0"),
    ({'clip': True}, "'shaw' needs clip to be an integer of at least 1, got True"),
    ({'clip': 2.0}, "'shaw' needs clip to be an integer of at least 1, got 2.0"),
    ({'clip': float('nan')}, "'shaw' needs clip to be an integer of at least 1, got nan"),
])
def test_wrong_keywords(keywords, text):
    with pytest.raises(ValueError, match=text):
        create('shaw', **SIZES, **keywords)


@pytest.mark.parametrize('other', [{'distance': 'raster'}, {'clip': 3}], ids=str)
def test_weights_of_other_keywords_do_not_fit(other):
    state = create('shaw', **SIZES).state_dict()
    with pytest.raises(RuntimeError):
        create('shaw', **SIZES, **other).load_state_dict(state)


def test_registered_from_its_file():
    assert timm_sape.get_encoding('shaw').__module__ == shaw.__name__
