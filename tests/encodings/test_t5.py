"""t5: a table with a number for each bucket of distances and each head, shared by all layers."""
import math

import pytest
import timm
import torch

import bias_checks
import reference_t5 as reference
import timm_sape
from bias_checks import GRIDS, KEPT, SIZES, bias_of
from harness import assert_near, catches, compare, create, make_grid, where
from model_checks import (
    check_masks,
    check_model,
    check_neutral_start,
    check_number_of_parameters,
    initial_model,
    own_encodings,
)
from timm_sape import Grid
from timm_sape.encodings import t5

DISTANCES = ['axis', 'raster']


def expected_bias(encoding, grid):
    tables = dict(encoding.named_parameters())
    return reference.bias(tables, grid.size, distance=encoding.distance, **where(grid))


def check(grid_size, num_prefix_tokens=0, num_keep=None, own_size=None, distance='axis'):
    """The bias and every gradient in float64, of an encoding made for `own_size`."""
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = create('t5', own_size or grid_size, num_prefix_tokens, **SIZES, distance=distance)
    compare(bias_of(encoding, grid), expected_bias(encoding, grid), dict(encoding.named_parameters()))


# --- equations -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('distance', DISTANCES)
@pytest.mark.parametrize('grid_size, num_prefix_tokens', GRIDS)
def test_equations(grid_size, num_prefix_tokens, distance):
    check(grid_size, num_prefix_tokens, distance=distance)


@pytest.mark.parametrize('distance', DISTANCES)
@pytest.mark.parametrize('grid_size, num_prefix_tokens, num_keep', KEPT)
def test_kept_patches(grid_size, num_prefix_tokens, num_keep, distance):
    """On a grid other than the encoding's own."""
    check(grid_size, num_prefix_tokens, num_keep, (3, 5), distance=distance)


@pytest.mark.parametrize('distance', DISTANCES)
def test_another_grid(distance):
    """The grid that it was made for makes no difference."""
    check((4, 3), 1, None, (3, 5), distance=distance)


@pytest.mark.parametrize('distance', DISTANCES)
def test_attention(distance):
    encoding, grid = create('t5', (3, 5), 1, **SIZES, distance=distance), make_grid((3, 5), 1, 8)
    bias_checks.check_attention(encoding, lambda q, x: expected_bias(encoding, grid), grid)


def one_sign(offset, bucket=t5.bucket):
    return bucket(-offset.abs())


def other_sign(offset, bucket=t5.bucket):
    return bucket(-offset)


MUTANTS = {  # arguments of `check`, (owner, attribute, replacement)
    'one half for both signs': (((3, 5), 0), (t5, 'bucket', one_sign)),
    'signs swapped': (((3, 5), 0), (t5, 'bucket', other_sign)),
    'prefix behind': (((3, 5), 1), bias_checks.PREFIX_BEHIND),
    'kept patches in raster order': (((3, 5), 1, 8), bias_checks.PAIRS_IN_RASTER_ORDER),
    'one threshold off': (((1, 14), 0), (t5, 'THRESHOLDS', (8, 11, 16, 23, 32, 46, 64, 91))),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    """If the package is broken like this, the comparison with the equations fails."""
    case, patch = MUTANTS[mutant]
    catches(lambda: check(*case), monkeypatch, *patch)


def test_buckets():
    """One bucket per distance below 8, then wider ones, others for each sign. The last one begins at 91."""
    offset = torch.arange(-300, 301)
    found = t5.bucket(offset).tolist()
    assert found == [reference.bucket(delta) for delta in offset.tolist()]
    back, forward = found[300::-1], found[300:]
    assert back[:8] == list(range(8)) and forward[1:] == [16 + index for index in back[1:]]
    assert [back.index(index) for index in range(16)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    assert back == sorted(back) and max(back) == 15 and len(set(found)) == 31  # no distance 0 forward
    log = torch.log(torch.arange(8, 128).float() / 8) / math.log(128 / 8) * 8  # as in the published code
    assert back[8:128] == (8 + log.long()).clamp(max=15).tolist()
    bias = bias_of(create('t5', (200, 1), **SIZES), Grid(200, 1))[0, :, 0]  # [h, N]
    assert (bias[:, 91:] == bias[:, 91:92]).all() and (bias[:, 90] != bias[:, 91]).all()


# --- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('distance', DISTANCES)
def test_float32(distance):
    bias_checks.check_float32('t5', distance=distance)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('distance', DISTANCES)
def test_half(distance, dtype):
    bias_checks.check_half('t5', dtype, distance=distance)


# --- properties ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('distance', DISTANCES)
def test_offsets_alone(distance):
    bias_checks.check_offsets_alone('t5', distance=distance)


def test_mirrored():
    def mirror(encoding):
        back, forward = encoding.table_x.split(16)
        encoding.table_x.copy_(torch.cat([back[:1], forward[1:], forward[:1], back[1:]]))

    bias_checks.check_mirrored('t5', mirror)


def test_bias_moves_with_kept_patches():
    bias_checks.check_order_of_kept_patches('t5')


def test_raster_and_axis_agree_on_one_row():
    """In one row the distance along the raster is that along x."""
    raster, axis = create('t5', (1, 7), **SIZES, distance='raster'), create('t5', (1, 7), **SIZES)
    with torch.no_grad():
        axis.table_x.copy_(raster.table)
        axis.table_y[0] = 0
    grid = make_grid((1, 7), 1)
    assert_near(bias_of(axis, grid), bias_of(raster, grid), 1e-14)


@pytest.mark.parametrize('distance', DISTANCES)
def test_other_grid(distance):
    bias_checks.check_other_grid('t5', distance=distance)


# --- initial values --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
@pytest.mark.parametrize('distance, names', [('axis', ['table_y', 'table_x']), ('raster', ['table'])])
def test_initial_values(distance, names, again):
    encoding, = own_encodings(initial_model('t5', again, pos_enc_kwargs={'t5': {'distance': distance}}), 't5')
    assert [name for name, _ in encoding.named_parameters()] == names
    for table in encoding.parameters():
        assert table.shape == (32, 4)
        assert table.std().item() == pytest.approx(1 / 8, rel=0.2) and table.abs().max() > 2 / 8


def test_number_of_parameters():
    check_number_of_parameters('t5')


# --- models ----------------------------------------------------------------------------------------------------------

def test_shared_by_all_layers():
    model = timm.create_model('test_vit_pos_enc', pos_enc='t5', img_size=32, patch_size=8)
    own = [name for name in model.state_dict() if 't5' in name]
    assert own == ['encodings.t5.table_y', 'encodings.t5.table_x']


@pytest.mark.parametrize('composition', ['{}', 'ape+{}', 'rope2d+{}'])
@pytest.mark.parametrize('distance', DISTANCES)
def test_model(distance, composition):
    check_model('t5', composition, {'distance': distance}, least=5e-3)


@pytest.mark.parametrize('distance', DISTANCES)
def test_neutral_start(distance):
    check_neutral_start('t5', {'distance': distance})


def test_masks():
    check_masks('t5')


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('distance', ['both', None])
def test_wrong_keywords(distance):
    with pytest.raises(ValueError, match=f"'t5': distance must be 'axis' or 'raster', got {distance!r}"):
        create('t5', **SIZES, distance=distance)


def test_weights_of_other_keywords_do_not_fit():
    state = create('t5', **SIZES).state_dict()
    with pytest.raises(RuntimeError):
        create('t5', **SIZES, distance='raster').load_state_dict(state)


def test_registered_from_its_file():
    assert timm_sape.get_encoding('t5').__module__ == t5.__name__
