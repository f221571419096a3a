"""rope_spiral: groups of channels rotate along directions spread over the half plane."""
import pytest
import torch

import reference_rope_spiral as reference
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
from timm_sape.encodings import rope_spiral


def check(*case, **keywords):
    rotation_checks.check('rope_spiral', reference.rotate, *case, **keywords)


# --- equations -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('case', CASES)
def test_equations(case):
    check(*CASES[case])


@pytest.mark.parametrize('keywords', [{'num_directions': 2}, {'max_freq': 0.5}], ids=str)
def test_keywords(keywords):
    check(*CASES['3x5, 6 kept'], **keywords)


def test_six_directions():
    angle = reference.angle(24, (3, 5), num_directions=6)
    expected = torch.tensor([
        [angle(0, t, y, x) for t in range(12)] for y in range(3) for x in range(5)], dtype=torch.float64)
    spiral = create('rope_spiral', (3, 5), num_directions=6, heads=2, head_dim=24)
    assert_near(spiral.angles(Grid(3, 5)), expected, 1e-6)


def test_two_directions_are_axial():
    """Then it is `rope2d`, but for the frequencies."""
    spiral = create('rope_spiral', (3, 5), num_directions=2, max_freq=1, heads=2, head_dim=8)
    angles = spiral.angles(Grid(3, 5)).view(3, 5, 2, 2)
    assert_near(angles[..., 0, 0], torch.arange(3.0)[:, None].expand(3, 5))
    assert_near(angles[..., 1, 0], torch.arange(5.0).expand(3, 5))


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
    check_rescaling('rope_spiral', 'rotation', **SIZES)


def test_gate():
    """The gate multiplies the angles, not their sines."""
    rotation_checks.check('auto_rope_spiral', reference.rotate, *CASES['3x5, 6 kept'], init=0.7)


@pytest.mark.parametrize('qk_norm', [True, False])
@pytest.mark.parametrize('fused', [True, False])
def test_attention_layer(qk_norm, fused):
    rotation_checks.check_attention_layer('rope_spiral', reference.rotate, qk_norm, fused)


@pytest.mark.parametrize('grid_size, num_keep', [((3, 5), None), ((6, 2), None), ((3, 5), 6), ((6, 2), 5)])
def test_rotation_table(grid_size, num_keep):
    rotation_checks.check_table('rope_spiral', reference.rotate, grid_size, num_keep)


MUTANTS = {  # case, (owner, attribute, replacement)
    'turned back': ('3x5', rotation_checks.TURNED_BACK),
    'pairs d/2 apart': ('3x5', rotation_checks.OTHER_LAYOUT),
    'x and y swapped': ('3x5', rotation_checks.AXES_SWAPPED),
    'columns not counted': ('4x4', rotation_checks.COLUMNS_ALIKE),
    'rows of kept patches in raster order': ('3x5, 6 kept', rotation_checks.ROWS_IN_RASTER_ORDER),
    'first rows for kept patches': ('3x5, 6 kept', rotation_checks.FIRST_ROWS),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    """If the package is broken like this, the comparison with the equations fails."""
    case, patch = MUTANTS[mutant]
    catches(lambda: check(*CASES[case]), monkeypatch, *patch)


# --- properties ------------------------------------------------------------------------------------------------------

def test_norms():
    rotation_checks.check_norms('rope_spiral', rotate_half=False)


def test_translation():
    rotation_checks.check_translation('rope_spiral')
    assert timm_sape.get_encoding('rope_spiral').relative


def test_directions():
    rotation_checks.check_directions('rope_spiral')


def test_images_apart():
    rotation_checks.check_images_apart('rope_spiral')


def test_other_grid():
    rotation_checks.check_other_grid('rope_spiral', reference.rotate)


# --- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('image', IMAGES)
def test_float32(image):
    rotation_checks.check_float32('rope_spiral', image)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half(dtype):
    rotation_checks.check_half('rope_spiral', dtype)


# --- models ----------------------------------------------------------------------------------------------------------

def test_initial_values():
    def check_encoding(layer, encoding):
        angle = reference.angle(8, (3, 5))
        expected = torch.tensor([
            [angle(0, t, y, x) for t in range(4)] for y in range(3) for x in range(5)], dtype=torch.float64)
        assert_near(encoding.angles(Grid(3, 5)), expected, 1e-6)

    check_fixed('rope_spiral', check_encoding)


@pytest.mark.parametrize('composition', ['{}', 'ape+{}'])
def test_model(composition):
    check_model('rope_spiral', composition)


def test_neutral_start():
    check_neutral_start('rope_spiral')


def test_masks():
    check_masks('rope_spiral')


def test_trained_grid_is_saved():
    check_trained_grid_is_saved('rope_spiral')


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('head_dim', [3, 6])
def test_head_dims(head_dim):
    with pytest.raises(ValueError, match=f'rope_spiral.*multiple of 4, got {head_dim}. Choose another num_heads'):
        create('rope_spiral', heads=2, head_dim=head_dim)


@pytest.mark.parametrize('head_dim, default, most', [
    (4, 2, 2), (8, 2, 2), (12, 4, 4), (16, 4, 4), (24, 4, 6), (64, 4, 16)])
def test_no_direction_is_lost(head_dim, default, most):
    """All that are asked for are there, if unevenly; more than fit are refused."""
    def directions(**keywords):
        spiral = create('rope_spiral', (5, 5), heads=2, head_dim=head_dim, random=False, **keywords)
        angles = spiral.angles(Grid(5, 5)).double().view(5, 5, -1)
        along_y, along_x = angles[1, 0] - angles[0, 0], angles[0, 1] - angles[0, 0]
        return {round(angle, 4) for angle in torch.atan2(along_y, along_x).remainder(torch.pi).tolist()}

    assert len(directions()) == default
    for num_directions in range(2, most + 1, 2):
        found = sorted(directions(num_directions=num_directions))
        assert found == pytest.approx([i * torch.pi / num_directions for i in range(num_directions)], abs=1e-3)
    for num_directions in (most + 2, 64):
        with pytest.raises(ValueError, match=(
                f'num_directions={num_directions}: a head dim of {head_dim} has room for {most}. '
                f'Use num_directions={most}, or fewer num_heads')):
            create('rope_spiral', heads=2, head_dim=head_dim, num_directions=num_directions)


@pytest.mark.parametrize('keywords, message', [
    ({'resolution': 'resize'}, "'rope_spiral': resolution must be .* 'ntk' or 'yarn', got 'resize'"),
    ({'scale': 1}, "'rope_spiral' has no keyword 'scale'"),
    ({'num_directions': 3}, 'needs num_directions to be an even number of 2 or more, got 3'),
    ({'num_directions': 2.0}, 'needs num_directions to be an even number of 2 or more, got 2.0'),
    ({'max_freq': 0}, "'rope_spiral' needs max_freq to be a positive number, got 0"),
    ({'max_freq': True}, "'rope_spiral' needs max_freq to be a positive number, got True"),
])
def test_wrong_keywords(keywords, message):
    with pytest.raises(ValueError, match=message):
        create('rope_spiral', **keywords)


def test_registered_from_its_file():
    assert timm_sape.get_encoding('rope_spiral').__module__ == rope_spiral.__name__
