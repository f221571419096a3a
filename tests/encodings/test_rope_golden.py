"""rope_golden: each pair of channels of each head rotates along a direction of its own."""
import math

import pytest
import torch

import reference_rope_golden as reference
import rotation_checks
import timm_sape
from harness import assert_near, catches, create
from model_checks import check_fixed, check_masks, check_model, check_neutral_start
from rotation_checks import CASES, IMAGES
from timm_sape import Grid
from timm_sape.encodings import rope_golden


def check(*case, **keywords):
    rotation_checks.check('rope_golden', reference.rotate, *case, **keywords)


# --- equations -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('case', CASES)
def test_equations(case):
    check(*CASES[case])


@pytest.mark.parametrize('keywords', [
    {'min_freq': 1.0, 'max_freq': 5.0}, {'zero_share': 0.25}, {'zero_share': 0.99}, {'min_freq': 2, 'max_freq': 2}],
    ids=str)
def test_keywords(keywords):
    check(*CASES['3x5, 6 kept'], **keywords)
    check((2, 4), 0, None, **keywords)


def test_another_grid():
    """On a grid that it was not made for, the angles are those of the reference, which knows one grid only."""
    check((2, 4), 1, made_for=(3, 5))
    check((3, 5), 0, 7, made_for=(4, 4))


def test_gate():
    """The gate multiplies the angles, not their sines."""
    rotation_checks.check('auto_rope_golden', reference.rotate, *CASES['3x5, 6 kept'], init=0.7)


@pytest.mark.parametrize('qk_norm', [True, False])
@pytest.mark.parametrize('fused', [True, False])
def test_attention_layer(qk_norm, fused):
    rotation_checks.check_attention_layer('rope_golden', reference.rotate, qk_norm, fused)


@pytest.mark.parametrize('grid_size, num_keep', [((3, 5), None), ((6, 2), None), ((3, 5), 6), ((6, 2), 5)])
def test_rotation_table(grid_size, num_keep):
    rotation_checks.check_table('rope_golden', reference.rotate, grid_size, num_keep)


MUTANTS = {  # case, (owner, attribute, replacement)
    'x and y swapped': ('4x4', rotation_checks.AXES_SWAPPED),
    'turned back': ('3x5', rotation_checks.TURNED_BACK),
    'other layout': ('3x5', rotation_checks.OTHER_LAYOUT),
    'rows of kept patches in raster order': ('3x5, 6 kept', rotation_checks.ROWS_IN_RASTER_ORDER),
    'first rows for kept patches': ('3x5, 6 kept', rotation_checks.FIRST_ROWS),
    'another turn': ('3x5', (rope_golden, 'TURN', 2.0)),
    'by raster order of the head': ('3x5', (rope_golden, 'TURN', 2 * rope_golden.TURN)),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    """If the package is broken like this, the comparison with the equations fails."""
    case, patch = MUTANTS[mutant]
    catches(lambda: check(*CASES[case]), monkeypatch, *patch)


# --- properties ------------------------------------------------------------------------------------------------------

def test_norms():
    rotation_checks.check_norms('rope_golden', rotate_half=True)


def test_translation():
    rotation_checks.check_translation('rope_golden')
    assert timm_sape.get_encoding('rope_golden').relative


def test_directions():
    rotation_checks.check_directions('rope_golden')


def test_directions_are_spread_evenly():
    """Between neighbours among the directions of a head there are only a few different gaps, none of them large."""
    encoding = create('rope_golden', (1, 2), heads=3, head_dim=64, min_freq=1, max_freq=1)
    wide = create('rope_golden', (2, 1), heads=3, head_dim=64, min_freq=1, max_freq=1)
    x, y = (e.angles(Grid(*e.grid_size)) for e in (encoding, wide))
    directions = torch.atan2(y[:, 1] - y[:, 0], x[:, 1] - x[:, 0])  # [h, d/2]
    for head in directions.remainder(math.pi):
        gaps = torch.cat([head.sort().values, head.min().view(1) + math.pi]).diff()
        assert gaps.max() < 2 * math.pi / 32 and gaps.min() > 0.3 * math.pi / 32
    assert len(directions.flatten().remainder(math.pi).round(decimals=9).unique()) == 96


def test_images_apart():
    rotation_checks.check_images_apart('rope_golden')


def test_other_grid():
    rotation_checks.check_other_grid('rope_golden', reference.rotate)


# --- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('image', IMAGES)
def test_float32(image):
    rotation_checks.check_float32('rope_golden', image)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half(dtype):
    rotation_checks.check_half('rope_golden', dtype)


# --- models ----------------------------------------------------------------------------------------------------------

def test_initial_values():
    def check_encoding(layer, encoding):
        angle = reference.angle(encoding.head_dim, (3, 5))
        expected = torch.tensor([[
            [angle(h, t, y, x) for t in range(encoding.head_dim // 2)] for y in range(3) for x in range(5)]
            for h in range(encoding.num_heads)], dtype=torch.float64)
        assert_near(encoding.angles(Grid(3, 5)), expected, 3e-6)

    check_fixed('rope_golden', check_encoding)


@pytest.mark.parametrize('composition', ['{}', 'ape+{}'])
def test_model(composition):
    check_model('rope_golden', composition, least=1e-4)


def test_neutral_start():
    check_neutral_start('rope_golden')


def test_masks():
    check_masks('rope_golden')


# --- keywords --------------------------------------------------------------------------------------------------------

def test_head_dims():
    with pytest.raises(ValueError, match='rope_golden.*multiple of 2, got 3. Choose another num_heads'):
        create('rope_golden', heads=2, head_dim=3)


@pytest.mark.parametrize('keywords, message', [
    ({'min_freq': 0}, "'rope_golden' needs numbers 0 < min_freq <= max_freq, got min_freq=0, max_freq=20.0"),
    ({'min_freq': 30}, 'got min_freq=30, max_freq=20.0'),
    ({'max_freq': '20'}, "got min_freq=0.2, max_freq='20'"),
    ({'max_freq': float('nan')}, 'max_freq=nan'),
    ({'zero_share': 1}, "'rope_golden' needs zero_share of at least 0 and less than 1, got 1"),
    ({'zero_share': -0.1}, 'zero_share of at least 0 and less than 1, got -0.1'),
    ({'resolution': 'rescale'}, "'rope_golden' has no keyword 'resolution'"),
])
def test_wrong_keywords(keywords, message):
    with pytest.raises(ValueError, match=message):
        create('rope_golden', **keywords)


def test_registered_from_its_file():
    assert timm_sape.get_encoding('rope_golden').__module__ == rope_golden.__name__
