"""alibi2d: a bias that falls linearly with the distance."""
import itertools
import math

import pytest
import torch

import reference_alibi2d
from bias_checks import CASES, FIXED_SIZES, ONE_AXIS_ALONE, FixedBiasTests, bias_of, unchanged_when_mirrored
from harness import create
from timm_sape import Grid
from timm_sape.encodings import alibi2d

MANHATTAN = {'distance': 'manhattan'}


class TestAlibi2d(FixedBiasTests):
    name = 'alibi2d'
    reference = reference_alibi2d
    variants = [MANHATTAN]
    mutants = {  # case, (owner, attribute, replacement)
        **FixedBiasTests.mutants,
        'one axis alone': ('3x5', ONE_AXIS_ALONE),
        'slopes of twice as many heads': ('3x5', (
            alibi2d, 'slopes_for_any_heads', lambda num_heads, geometric: geometric(2 * num_heads)[:num_heads])),
    }

    def test_gate(self):
        self.check(*CASES['3x5, 6 kept'], init=0.7)


def test_slopes_by_hand():
    """ALiBi's own example, and what its rule gives for the 12 heads of a ViT-B."""
    def slopes(num_heads):
        return (-bias_of(create('alibi2d', (2, 2), heads=num_heads, head_dim=1), Grid(2, 2))[0, :, 0, 1]).tolist()

    assert slopes(8) == pytest.approx([1 / n for n in (2, 4, 8, 16, 32, 64, 128, 256)])
    assert slopes(12) == pytest.approx([2 ** -i for i in range(1, 9)] + [2 ** -0.5, 2 ** -1.5, 2 ** -2.5, 2 ** -3.5])


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


@pytest.mark.parametrize('keywords, message', [
    *[({'distance': d}, "'alibi2d': distance must be 'euclidean' or 'manhattan', got")
      for d in ('chessboard', None, 2, ['euclidean'])],
])
def test_wrong_input(keywords, message):
    with pytest.raises(ValueError, match=message):
        create('alibi2d', **{'dim': 24, 'heads': 2, **keywords})
