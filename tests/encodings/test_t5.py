"""t5: a table with a number for each bucket of distances and each head, shared by all layers."""
import math

import pytest
import timm
import torch

import reference_t5
from bias_checks import PAIRS_IN_RASTER_ORDER, SIZES, DirectedTests, LearnedBiasTests, bias_of
from harness import assert_near, create, make_grid, where
from model_checks import initial_model, own_encodings
from timm_sape import Grid
from timm_sape.encodings import t5


def one_sign(offset, bucket=t5.bucket):
    return bucket(-offset.abs())


def other_sign(offset, bucket=t5.bucket):
    return bucket(-offset)


class TestT5(DirectedTests, LearnedBiasTests):
    name = 't5'
    variants = model_variants = [{'distance': 'axis'}, {'distance': 'raster'}]
    mutants = {  # arguments of `check`, (owner, attribute, replacement)
        **LearnedBiasTests.mutants,
        'kept patches in raster order': (((3, 5), 1, 8), PAIRS_IN_RASTER_ORDER),
        'one half for both signs': (((3, 5), 0), (t5, 'bucket', one_sign)),
        'signs swapped': (((3, 5), 0), (t5, 'bucket', other_sign)),
        'one threshold off': (((1, 14), 0), (t5, 'THRESHOLDS', (8, 11, 16, 23, 32, 46, 64, 91))),
    }

    def expected_bias(self, encoding, q, x, grid):
        return reference_t5.bias(
            dict(encoding.named_parameters()), grid.size, distance=encoding.distance, **where(grid))

    def mirror(self, encoding):
        back, forward = encoding.table_x.split(16)
        encoding.table_x.copy_(torch.cat([back[:1], forward[1:], forward[:1], back[1:]]))


def test_buckets():
    """One bucket per distance below 8, then wider ones, others for each sign. The last one begins at 91."""
    offset = torch.arange(-300, 301)
    found = t5.bucket(offset).tolist()
    assert found == [reference_t5.bucket(delta) for delta in offset.tolist()]
    back, forward = found[300::-1], found[300:]
    assert back[:8] == list(range(8)) and forward[1:] == [16 + index for index in back[1:]]
    assert [back.index(index) for index in range(16)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    assert back == sorted(back) and max(back) == 15 and len(set(found)) == 31  # no distance 0 forward
    log = torch.log(torch.arange(8, 128).float() / 8) / math.log(128 / 8) * 8  # as in the published code
    assert back[8:128] == (8 + log.long()).clamp(max=15).tolist()
    bias = bias_of(create('t5', (200, 1), **SIZES), Grid(200, 1))[0, :, 0]  # [h, N]
    assert (bias[:, 91:] == bias[:, 91:92]).all() and (bias[:, 90] != bias[:, 91]).all()


def test_raster_and_axis_agree_on_one_row():
    """In one row the distance along the raster is that along x."""
    raster, axis = create('t5', (1, 7), **SIZES, distance='raster'), create('t5', (1, 7), **SIZES)
    with torch.no_grad():
        axis.table_x.copy_(raster.table)
        axis.table_y[0] = 0
    grid = make_grid((1, 7), 1)
    assert_near(bias_of(axis, grid), bias_of(raster, grid), 1e-14)


# --- initial values --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
@pytest.mark.parametrize('distance, names', [('axis', ['table_y', 'table_x']), ('raster', ['table'])])
def test_initial_values(distance, names, again):
    encoding, = own_encodings(initial_model('t5', again, pos_enc_kwargs={'t5': {'distance': distance}}), 't5')
    assert [name for name, _ in encoding.named_parameters()] == names
    for table in encoding.parameters():
        assert table.shape == (32, 4)
        assert table.std().item() == pytest.approx(1 / 8, rel=0.2) and table.abs().max() > 2 / 8


def test_shared_by_all_layers():
    model = timm.create_model('test_vit_pos_enc', pos_enc='t5', img_size=32, patch_size=8)
    own = [name for name in model.state_dict() if 't5' in name]
    assert own == ['encodings.t5.table_y', 'encodings.t5.table_x']


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('distance', ['both', None])
def test_wrong_keywords(distance):
    with pytest.raises(ValueError, match=f"'t5': distance must be 'axis' or 'raster', got {distance!r}"):
        create('t5', **SIZES, distance=distance)


def test_weights_of_other_keywords_do_not_fit():
    state = create('t5', **SIZES).state_dict()
    with pytest.raises(RuntimeError):
        create('t5', **SIZES, distance='raster').load_state_dict(state)
