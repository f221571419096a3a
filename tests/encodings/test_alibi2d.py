"""alibi2d: a bias that falls linearly with the distance."""
import itertools
import math

import pytest
import torch

import bias_checks
import reference_alibi2d as reference
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
from timm_sape.encodings import alibi2d

MANHATTAN = {'distance': 'manhattan'}


def check(*case, **keywords):
    bias_checks.check_fixed_bias('alibi2d', reference.bias, *case, **keywords)


# --- equations -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('case', CASES)
def test_equations(case):
    check(*CASES[case])


def test_manhattan():
    check(*CASES['3x5, 6 kept'], **MANHATTAN)
    check((2, 4), 0, None, **MANHATTAN)


def test_gate():
    bias_checks.check_fixed_bias('auto_alibi2d', reference.bias, *CASES['3x5, 6 kept'], init=0.7)


def test_another_grid():
    """On a grid that it was not made for, the bias is that of the reference, which knows one grid only."""
    check((2, 4), 1, None, made_for=(3, 5))
    check((3, 5), 0, 7, made_for=(4, 4))


def test_rescaled():
    """Positions are rescaled to the trained grid, whatever grid the encoding is made for."""
    check((3, 5), 1, None, trained_on=(6, 2))
    check((2, 4), 0, 5, trained_on=(3, 3), made_for=(1, 2))
    check_rescaling('alibi2d', 'position_bias', **FIXED_SIZES)


@pytest.mark.parametrize('num_heads', [1, 2, 3, 4, 5, 6, 8, 12, 16, 20])
def test_number_of_heads(num_heads):
    bias_checks.check_number_of_heads('alibi2d', reference.bias, num_heads)
    bias_checks.check_number_of_heads('alibi2d', reference.bias, num_heads, **MANHATTAN)


def test_slopes_by_hand():
    """ALiBi's own example, and what its rule gives for the 12 heads of a ViT-B."""
    def slopes(num_heads):
        return (-bias_of(create('alibi2d', (2, 2), heads=num_heads, head_dim=1), Grid(2, 2))[0, :, 0, 1]).tolist()

    assert slopes(8) == pytest.approx([1 / n for n in (2, 4, 8, 16, 32, 64, 128, 256)])
    assert slopes(12) == pytest.approx([2 ** -i for i in range(1, 9)] + [2 ** -0.5, 2 ** -1.5, 2 ** -2.5, 2 ** -3.5])


MUTANTS = {  # case, (owner, attribute, replacement)
    'one axis alone': ('3x5', bias_checks.ONE_AXIS_ALONE),
    'prefix behind': ('4x4', bias_checks.PREFIX_BEHIND),
    'slopes of twice as many heads': ('3x5', (
        alibi2d, 'slopes_for_any_heads', lambda num_heads, geometric: geometric(2 * num_heads)[:num_heads])),
    'kept patches in raster order': ('3x5, 6 kept', bias_checks.PAIRS_IN_RASTER_ORDER),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    """If the package is broken like this, the comparison with the equations fails."""
    case, patch = MUTANTS[mutant]
    catches(lambda: check(*CASES[case]), monkeypatch, *patch)


# --- properties ------------------------------------------------------------------------------------------------------

def test_translation():
    bias_checks.check_translation('alibi2d')


@pytest.mark.parametrize('distance', ['euclidean', 'manhattan'])
def test_decay(distance):
    """The bias falls with the distance in every head, and less steeply in each further head."""
    bias = bias_of(create('alibi2d', (5, 7), **FIXED_SIZES, distance=distance), Grid(5, 7))[0]
    pairs = list(itertools.product(itertools.product(range(5), range(7)), repeat=2))
    norm = math.hypot if distance == 'euclidean' else lambda dy, dx: abs(dy) + abs(dx)
    distances = torch.tensor([norm(b[0] - a[0], b[1] - a[1]) for a, b in pairs], dtype=torch.float64)
    order = distances.argsort()
    steps = distances[order].diff()
    for head in bias.flatten(1)[:, order]:
        fall = head.diff()
        assert (fall[steps > 1e-9] < 0).all() and (fall[steps <= 1e-9].abs() < 1e-12).all()
    assert (bias.diagonal(dim1=1, dim2=2) == 0).all()
    assert (bias[:, 0, 1].diff() > 0).all()


@pytest.mark.parametrize('axis', [0, 1])
def test_mirrored(axis):
    """The bias does not tell left from right, nor up from down."""
    assert all(unchanged_when_mirrored('alibi2d', axis))
    assert all(unchanged_when_mirrored('alibi2d', axis, **MANHATTAN))


def test_small_buffers():
    bias_checks.check_small_buffers('alibi2d')


# --- models ----------------------------------------------------------------------------------------------------------

def test_initial_values():
    def check_encoding(layer, encoding):
        expected = reference.bias(4, (3, 5), num_prefix_tokens=5)
        assert_near(bias_of(encoding, Grid(3, 5, 5)), expected, 1e-6)

    check_fixed('alibi2d', check_encoding)


@pytest.mark.parametrize('composition', ['{}', 'ape+{}'])
def test_model(composition):
    check_model('alibi2d', composition)


def test_neutral_start():
    check_neutral_start('alibi2d')


def test_masks():
    check_masks('alibi2d')


def test_trained_grid_is_saved():
    check_trained_grid_is_saved('alibi2d')


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords, message', [
    *[({'distance': d}, "'alibi2d': distance must be 'euclidean' or 'manhattan', got")
      for d in ('chessboard', None, 2, ['euclidean'])],
    ({'heads': 4, 'resolution': 'resize'}, "resolution must be 'extrapolate', 'rescale' or 'slopes'"),
    ({'heads': 4, 'scale': 1}, "'alibi2d' has no keyword 'scale'"),
])
def test_wrong_input(keywords, message):
    with pytest.raises(ValueError, match=message):
        create('alibi2d', **{'dim': 24, 'heads': 2, **keywords})


def test_registered_from_its_file():
    assert timm_sape.get_encoding('alibi2d').__module__ == alibi2d.__name__
