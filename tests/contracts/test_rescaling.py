"""Contracts in which the trained grid matters, again for encodings that rescale their positions to it."""
import pytest

import timm_sape
from common import Maker
from test_initial_values import contracts as initial_values
from test_numerics import contracts as numerics
from test_saving_and_loading import contracts as saving_and_loading
from test_shapes_and_grids import contracts as shapes_and_grids

CONTRACTS = {**shapes_and_grids, **initial_values, **numerics, **saving_and_loading}
RESCALING = [name for name in timm_sape.list_encodings() if 'resolution' in timm_sape.encoding_keywords(name)]


@pytest.mark.parametrize('pos_enc', RESCALING)
@pytest.mark.parametrize('name', ['dynamic_img_size', 'set_input_size', 'three_ways', 'meta_device', 'half', 'config'])
def test_contract_with_rescaling(name, pos_enc):
    """The trained grid, which such an encoding has to know, is never lost."""
    for grid in CONTRACTS[name].grids[:2]:
        make = Maker(pos_enc, grid, pos_enc_kwargs={pos_enc: {'resolution': 'rescale'}})
        assert make().ref_grid_size == grid
        CONTRACTS[name](make)


@pytest.mark.parametrize('pos_enc', RESCALING)
def test_rescaling_matters(pos_enc):
    y = Maker(pos_enc).images(grid=(4, 6))
    outs = [
        Maker(pos_enc, pos_enc_kwargs={pos_enc: {'resolution': resolution}})(dynamic_img_size=True)(y)
        for resolution in ('extrapolate', 'rescale')]
    assert (outs[0] - outs[1]).abs().max() > 1e-4
