"""rope2d_mixed: rotation by learned mixtures of x and y."""
import pytest
import torch

import reference_rope2d_mixed as reference
import rotation_checks
import timm_sape
from harness import assert_near, catches, check_rescaling, create
from model_checks import (
    check_masks,
    check_model,
    check_neutral_start,
    check_number_of_parameters,
    check_trained_grid_is_saved,
    initial_model,
    own_encodings,
)
from rotation_checks import CASES, IMAGES, SIZES, TRAINED_ON
from timm_sape.encodings import rope2d_mixed


def check(*case, **keywords):
    rotation_checks.check('rope2d_mixed', reference.rotate, *case, **keywords)


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
    check_rescaling('rope2d_mixed', 'rotation', **SIZES)


def test_gate():
    """The gate multiplies the angles, not their sines."""
    rotation_checks.check('auto_rope2d_mixed', reference.rotate, *CASES['3x5, 6 kept'], init=0.7)


@pytest.mark.parametrize('qk_norm', [True, False])
@pytest.mark.parametrize('fused', [True, False])
def test_attention_layer(qk_norm, fused):
    rotation_checks.check_attention_layer('rope2d_mixed', reference.rotate, qk_norm, fused)


@pytest.mark.parametrize('grid_size, num_keep', [((3, 5), None), ((6, 2), None), ((3, 5), 6), ((6, 2), 5)])
def test_rotation_table(grid_size, num_keep):
    rotation_checks.check_table('rope2d_mixed', reference.rotate, grid_size, num_keep)


MUTANTS = {  # case, (owner, attribute, replacement)
    'turned back': ('3x5', rotation_checks.TURNED_BACK),
    'pairs d/2 apart': ('3x5', rotation_checks.OTHER_LAYOUT),
    'x and y swapped': ('3x5', rotation_checks.AXES_SWAPPED),
    'rows of kept patches in raster order': ('3x5, 8 kept', rotation_checks.ROWS_IN_RASTER_ORDER),
    'first rows for kept patches': ('3x5, 6 kept', rotation_checks.FIRST_ROWS),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    """If the package is broken like this, the comparison with the equations fails."""
    case, patch = MUTANTS[mutant]
    catches(lambda: check(*CASES[case]), monkeypatch, *patch)


# --- properties ------------------------------------------------------------------------------------------------------

def test_norms():
    rotation_checks.check_norms('rope2d_mixed', rotate_half=False)


def test_translation():
    rotation_checks.check_translation('rope2d_mixed')
    assert timm_sape.get_encoding('rope2d_mixed').relative


def test_directions():
    rotation_checks.check_directions('rope2d_mixed')


def test_images_apart():
    rotation_checks.check_images_apart('rope2d_mixed')


def test_other_grid():
    rotation_checks.check_other_grid('rope2d_mixed', reference.rotate)


# --- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('image', IMAGES)
def test_float32(image):
    rotation_checks.check_float32('rope2d_mixed', image)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half(dtype):
    rotation_checks.check_half('rope2d_mixed', dtype)


# --- models ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
def test_initial_values(again):
    """Frequencies are 10^(-4t/d) long, along a direction of each layer and head, and at right angles to it."""
    model = initial_model('rope2d_mixed', again)
    freqs = torch.stack([encoding.freqs for encoding in own_encodings(model, 'rope2d_mixed')]).detach()
    assert freqs.shape == (2, 2, 4, 8)  # layer, axis, head, pair
    expected = torch.tensor([10 ** (-4 * t / 16) for t in range(4)] * 2)
    assert_near(freqs.norm(dim=1), expected.expand(2, 4, 8), 1e-6)
    (fx, gx), (fy, gy) = (freqs[:, i].split(4, dim=-1) for i in range(2))
    assert_near(gx, -fy, 1e-6)
    assert_near(gy, fx, 1e-6)
    directions = torch.atan2(fy, fx)
    assert_near(directions, directions[..., :1].expand_as(directions), 1e-6)
    assert len({round(a, 4) for a in directions[..., 0].flatten().tolist()}) == 8
    wide = timm_sape.create_encoding('rope2d_mixed', dim=256, num_heads=64, grid_size=(3, 5)).freqs[:, :, 0]
    quadrants = {(x > 0, y > 0) for x, y in wide.T.tolist()}
    assert len(quadrants) == 4  # the directions go all the way round


def test_number_of_parameters():
    check_number_of_parameters('rope2d_mixed')


@pytest.mark.parametrize('composition', ['{}', 'ape+{}'])
def test_model(composition):
    check_model('rope2d_mixed', composition)


def test_neutral_start():
    check_neutral_start('rope2d_mixed')


def test_masks():
    check_masks('rope2d_mixed')


def test_trained_grid_is_saved():
    check_trained_grid_is_saved('rope2d_mixed')


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('head_dim', [3, 6])
def test_head_dims(head_dim):
    with pytest.raises(ValueError, match=f'rope2d_mixed.*multiple of 4, got {head_dim}. Choose another num_heads'):
        create('rope2d_mixed', heads=2, head_dim=head_dim)


@pytest.mark.parametrize('keywords, message', [
    ({'resolution': 'resize'}, "'rope2d_mixed': resolution must be 'extrapolate', 'rescale', 'ntk' or 'yarn', got 're"),
    ({'scale': 1}, "'rope2d_mixed' has no keyword 'scale'"),
])
def test_wrong_keywords(keywords, message):
    with pytest.raises(ValueError, match=message):
        create('rope2d_mixed', **keywords)


def test_registered_from_its_file():
    assert timm_sape.get_encoding('rope2d_mixed').__module__ == rope2d_mixed.__name__
