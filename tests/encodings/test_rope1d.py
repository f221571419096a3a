"""rope1d: rotation by the raster index."""
import pytest
import torch
from timm.layers.pos_embed_sincos import freq_bands

import reference_rope1d as reference
import rotation_checks
import timm_sape
from harness import assert_near, catches, check_rescaling, create
from model_checks import (
    check_fixed,
    check_masks,
    check_model,
    check_neutral_start,
    check_trained_grid_is_saved,
)
from rotation_checks import CASES, IMAGES, SIZES, TRAINED_ON
from timm_sape import Grid
from timm_sape.encodings import rope1d


def check(*case, **keywords):
    rotation_checks.check('rope1d', reference.rotate, *case, **keywords)


# --- equations -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('case', CASES)
def test_equations(case):
    check(*CASES[case])


def test_another_grid():
    """On a grid that it was not made for, the angles are those of the reference, which knows one grid only."""
    check((2, 4), 1, made_for=(3, 5))
    check((3, 5), 0, 7, made_for=(4, 4))


@pytest.mark.parametrize('case', TRAINED_ON)
def test_trained_grid_makes_no_difference(case):
    check(*TRAINED_ON[case], rescale=False)


def test_rescaled():
    """Positions are rescaled to the trained grid, whatever grid the encoding is made for."""
    check((3, 5), 1, None, (6, 2))
    check((2, 4), 0, 5, (3, 3), made_for=(1, 2))
    check_rescaling('rope1d', 'rotation', **SIZES)


def test_gate():
    """The gate multiplies the angles, not their sines."""
    rotation_checks.check('auto_rope1d', reference.rotate, *CASES['3x5, 6 kept'], init=0.7)


@pytest.mark.parametrize('grid_size, num_keep', [((3, 5), None), ((6, 2), None), ((3, 5), 6), ((6, 2), 5)])
def test_rotation_table(grid_size, num_keep):
    rotation_checks.check_table('rope1d', reference.rotate, grid_size, num_keep)


MUTANTS = {  # case, (owner, attribute, replacement)
    'turned back': ('3x5', rotation_checks.TURNED_BACK),
    'other layout': ('3x5', rotation_checks.OTHER_LAYOUT),
    'rows of kept patches in raster order': ('3x5, 6 kept', rotation_checks.ROWS_IN_RASTER_ORDER),
    'first rows for kept patches': ('3x5, 6 kept', rotation_checks.FIRST_ROWS),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    """If the package is broken like this, the comparison with the equations fails."""
    case, patch = MUTANTS[mutant]
    catches(lambda: check(*CASES[case]), monkeypatch, *patch)


# --- timm ------------------------------------------------------------------------------------------------------------

def test_timms_frequencies():
    """In float32, the only dtype of timm's helper."""
    encoding = create('rope1d', (1, 2), **SIZES, dtype=torch.float32)
    expected = freq_bands(SIZES['head_dim'], temperature=10000.0, step=2)
    assert_near(encoding.angles(Grid(1, 2))[1], expected, 1e-6)


# --- properties ------------------------------------------------------------------------------------------------------

def test_norms():
    rotation_checks.check_norms('rope1d', rotate_half=False)


def test_translation():
    rotation_checks.check_translation('rope1d')
    assert timm_sape.get_encoding('rope1d').relative


def test_directions():
    rotation_checks.check_directions('rope1d')


def test_raster_alone():
    """The last patch of a row and the first of the next one are as close as any two neighbours."""
    token = rotation_checks.one_token()
    logits = rotation_checks.logits_between(create('rope1d', **SIZES), (3, 5), token).flatten(3, 4).flatten(1, 2)
    assert_near(logits[:, 1:, 1:], logits[:, :-1, :-1], 1e-13)
    assert not torch.allclose(logits[:, 0, 5], logits[:, 0, 1])


def test_images_apart():
    rotation_checks.check_images_apart('rope1d')


def test_other_grid():
    rotation_checks.check_other_grid('rope1d', reference.rotate)


# --- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('image', IMAGES)
def test_float32(image):
    rotation_checks.check_float32('rope1d', image)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half(dtype):
    rotation_checks.check_half('rope1d', dtype)


# --- models ----------------------------------------------------------------------------------------------------------

def test_initial_values():
    def check_encoding(layer, encoding):
        angle = reference.angle(8, (3, 5))
        expected = torch.tensor([
            [angle(0, t, y, x) for t in range(4)] for y in range(3) for x in range(5)], dtype=torch.float64)
        assert_near(encoding.angles(Grid(3, 5)), expected, 1e-6)

    check_fixed('rope1d', check_encoding)


@pytest.mark.parametrize('composition', ['{}', 'ape+{}'])
def test_model(composition):
    check_model('rope1d', composition)


def test_neutral_start():
    check_neutral_start('rope1d')


def test_masks():
    check_masks('rope1d')


def test_trained_grid_is_saved():
    check_trained_grid_is_saved('rope1d')


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords, message', [
    ({'dim': 6, 'heads': 2}, "'rope1d' needs a head dim that is a multiple of 2, got 3. Choose another num_heads"),
    ({'resolution': 'resize'}, "resolution must be 'extrapolate', 'rescale', 'ntk' or 'yarn'"),
    ({'scale': 1}, "'rope1d' has no keyword 'scale'"),
])
def test_wrong_input(keywords, message):
    with pytest.raises(ValueError, match=message):
        create('rope1d', **{'dim': 24, 'heads': 4, **keywords})


def test_registered_from_its_file():
    assert timm_sape.get_encoding('rope1d').__module__ == rope1d.__name__
