"""rpe2d: a bias that falls with the Manhattan distance, faster towards patches that come later in the raster."""
import pytest
import torch

import reference_rpe2d
from bias_checks import (
    CASES,
    FIXED_SIZES,
    FROM_THE_OTHER,
    FixedBiasTests,
    bias_of,
    check_decay,
    unchanged_when_mirrored,
)
from harness import assert_near, create
from timm_sape import Grid
from timm_sape.encodings import rpe2d


class TestRpe2d(FixedBiasTests):
    name = 'rpe2d'
    reference = reference_rpe2d
    variants = [{'slopes': 'code'}, {'diagonal': True}, {'slopes': 'code', 'diagonal': True}]
    mutants = {  # case, (owner, attribute, replacement)
        **FixedBiasTests.mutants,
        'from the other patch': ('3x5', FROM_THE_OTHER),
        'one slope': ('3x5', (rpe2d, 'STARTS', (0.5, 0.5))),
    }

    def test_gate(self):
        self.check(*CASES['3x5, 6 kept'], init=0.7)


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


@pytest.mark.parametrize('keywords', [{}, *TestRpe2d.variants], ids=str)
def test_decay(keywords):
    check_decay('rpe2d', **keywords)


@pytest.mark.parametrize('axis', [0, 1])
def test_mirrored(axis):
    """Every head tells left from right and up from down."""
    assert not any(unchanged_when_mirrored('rpe2d', axis))


def test_prefers_what_comes_before():
    bias = bias_of(create('rpe2d', (4, 5), **FIXED_SIZES), Grid(4, 5))[0]
    before = torch.ones(20, 20, dtype=torch.bool).tril(-1)
    assert_near(bias.mT[:, before], 2 ** 0.5 * bias[:, before], 1e-14)


@pytest.mark.parametrize('keywords, message', [
    *[({'slopes': slopes}, "'rpe2d': slopes must be 'paper' or 'code', got") for slopes in ('alibi', None, [0.5])],
    *[({'diagonal': diagonal}, "'rpe2d': diagonal must be True or False, got") for diagonal in (1, None, 'yes')],
])
def test_wrong_input(keywords, message):
    with pytest.raises(ValueError, match=message):
        create('rpe2d', **{'dim': 24, 'heads': 2, **keywords})
