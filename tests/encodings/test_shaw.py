"""shaw: a table with a vector for each offset, which is added to k."""
import pytest
import torch

import reference_shaw
from bias_checks import (
    AXES_SWAPPED,
    PAIRS_IN_RASTER_ORDER,
    SIZES,
    DirectedTests,
    LearnedBiasTests,
    bias_of,
    make_inputs,
)
from harness import assert_near, create, make_grid, where
from model_checks import initial_model, own_encodings
from timm_sape.encodings import shaw


def clipped_sooner(self, low, high, clamp=torch.Tensor.clamp):
    return clamp(self, low + 1, high - 1)


def not_scaled(self, q, *args, along=shaw.RelativePositionRepresentations._along):
    return along(self, q * self.head_dim ** 0.5, *args)


class TestShaw(DirectedTests, LearnedBiasTests):
    name = 'shaw'
    variants = [{}, {'clip': 1}, {'clip': 9}, {'distance': 'raster', 'clip': 6}]
    model_variants = [{}, {'distance': 'raster', 'clip': 3}]
    mutants = {  # arguments of `check`, (owner, attribute, replacement)
        **LearnedBiasTests.mutants,
        'kept patches in raster order': (((3, 5), 1, 8), PAIRS_IN_RASTER_ORDER),
        'clipped sooner': (((3, 5), 0), (torch.Tensor, 'clamp', clipped_sooner)),
        'not scaled': (((3, 5), 0), (shaw.RelativePositionRepresentations, '_along', not_scaled)),
        'x and y swapped': (((4, 4), 0), AXES_SWAPPED),
    }

    def expected_bias(self, encoding, q, x, grid):
        tables = dict(encoding.named_parameters())
        return reference_shaw.bias(
            q, tables, grid.size, clip=encoding.clip, distance=encoding.distance, **where(grid))

    def mirror(self, encoding):
        encoding.table_x.copy_(encoding.table_x.flip(0))


# --- properties ------------------------------------------------------------------------------------------------------

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
