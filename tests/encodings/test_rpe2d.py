"""rpe2d: a bias that falls with the Manhattan distance, faster towards patches that come later in the raster."""
import pytest
import torch

import bias_checks
import reference_rpe2d as reference
import timm_sape
from bias_checks import CASES, FIXED_SIZES, bias_of, unchanged_when_mirrored
from harness import assert_near, catches, check_rescaling, create
from model_checks import (
    check_fixed,
    check_masks,
    check_model,
    check_neutral_start,
    check_trained_grid_is_saved,
)
from timm_sape import Grid
from timm_sape.encodings import rpe2d

OPTIONS = [{'slopes': 'code'}, {'diagonal': True}, {'slopes': 'code', 'diagonal': True}]


def check(*case, **keywords):
    bias_checks.check_fixed_bias('rpe2d', reference.bias, *case, **keywords)


# --- equations -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('case', CASES)
def test_equations(case):
    check(*CASES[case])


@pytest.mark.parametrize('keywords', OPTIONS, ids=str)
def test_keywords(keywords):
    check(*CASES['3x5, 6 kept'], **keywords)
    check((2, 4), 0, None, **keywords)


def test_gate():
    bias_checks.check_fixed_bias('auto_rpe2d', reference.bias, *CASES['3x5, 6 kept'], init=0.7)


def test_another_grid():
    """On a grid that it was not made for, the bias is that of the reference, which knows one grid only."""
    check((2, 4), 1, None, made_for=(3, 5))
    check((3, 5), 0, 7, made_for=(4, 4))


def test_rescaled():
    """Positions are rescaled to the trained grid, whatever grid the encoding is made for."""
    check((3, 5), 1, None, trained_on=(6, 2))
    check((2, 4), 0, 5, trained_on=(3, 3), made_for=(1, 2))
    check_rescaling('rpe2d', 'position_bias', **FIXED_SIZES)


@pytest.mark.parametrize('num_heads', [1, 2, 3, 4, 5, 6, 8, 12, 16, 20])
def test_number_of_heads(num_heads):
    for keywords in ({}, *OPTIONS):
        bias_checks.check_number_of_heads('rpe2d', reference.bias, num_heads, **keywords)


def test_slopes_by_hand():
    """Against numbers written out."""
    def slopes(num_heads, to, **keywords):
        encoding = create('rpe2d', (2, 2), heads=num_heads, head_dim=1, **keywords)
        return (-bias_of(encoding, Grid(2, 2))[0, :, 1 - to, to]).tolist()

    for keywords in ({}, {'slopes': 'code'}):  # the same for 8 heads
        assert slopes(8, 0, **keywords) == pytest.approx([2 ** -(1 + i) for i in range(8)])
        assert slopes(8, 1, **keywords) == pytest.approx([2 ** -(0.5 + i) for i in range(8)])
    assert slopes(4, 0) == pytest.approx([1 / 2, 1 / 8, 1 / 32, 1 / 128])
    assert slopes(4, 0, slopes='code') == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 16])
    assert slopes(6, 0, slopes='code') == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 2, 1 / 8])


MUTANTS = {  # case, (owner, attribute, replacement)
    'from the other patch': ('3x5', bias_checks.FROM_THE_OTHER),
    'one slope': ('3x5', (rpe2d, 'STARTS', (0.5, 0.5))),
    'kept patches in raster order': ('3x5, 6 kept', bias_checks.PAIRS_IN_RASTER_ORDER),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    """If the package is broken like this, the comparison with the equations fails."""
    case, patch = MUTANTS[mutant]
    catches(lambda: check(*CASES[case]), monkeypatch, *patch)


# --- properties ------------------------------------------------------------------------------------------------------

def test_translation():
    bias_checks.check_translation('rpe2d')


@pytest.mark.parametrize('keywords', [{}, *OPTIONS], ids=str)
def test_decay(keywords):
    bias_checks.check_decay('rpe2d', **keywords)


@pytest.mark.parametrize('axis', [0, 1])
def test_mirrored(axis):
    """Every head tells left from right and up from down."""
    assert not any(unchanged_when_mirrored('rpe2d', axis))


def test_prefers_what_comes_before():
    bias = bias_of(create('rpe2d', (4, 5), **FIXED_SIZES), Grid(4, 5))[0]
    before = torch.ones(20, 20, dtype=torch.bool).tril(-1)
    assert_near(bias.mT[:, before], 2 ** 0.5 * bias[:, before], 1e-14)


def test_small_buffers():
    bias_checks.check_small_buffers('rpe2d')


# --- models ----------------------------------------------------------------------------------------------------------

def test_initial_values():
    def check_encoding(layer, encoding):
        expected = reference.bias(4, (3, 5), num_prefix_tokens=5)
        assert_near(bias_of(encoding, Grid(3, 5, 5)), expected, 1e-6)

    check_fixed('rpe2d', check_encoding)


@pytest.mark.parametrize('composition', ['{}', 'ape+{}'])
def test_model(composition):
    check_model('rpe2d', composition)


def test_neutral_start():
    check_neutral_start('rpe2d')


def test_masks():
    check_masks('rpe2d')


def test_trained_grid_is_saved():
    check_trained_grid_is_saved('rpe2d')


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords, message', [
    *[({'slopes': slopes}, "'rpe2d': slopes must be 'paper' or 'code', got") for slopes in ('alibi', None, [0.5])],
    *[({'diagonal': diagonal}, "'rpe2d': diagonal must be True or False, got") for diagonal in (1, None, 'yes')],
    ({'heads': 4, 'resolution': 'resize'}, "resolution must be 'extrapolate', 'rescale' or 'slopes'"),
    ({'heads': 4, 'scale': 1}, "'rpe2d' has no keyword 'scale'"),
])
def test_wrong_input(keywords, message):
    with pytest.raises(ValueError, match=message):
        create('rpe2d', **{'dim': 24, 'heads': 2, **keywords})


def test_registered_from_its_file():
    assert timm_sape.get_encoding('rpe2d').__module__ == rpe2d.__name__
