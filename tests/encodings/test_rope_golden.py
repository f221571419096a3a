"""rope_golden: each pair of channels of each head rotates along a direction of its own."""
import math

import pytest
import torch

import reference_rope_golden
from harness import create
from rotation_checks import CASES, FixedTableTests
from timm_sape import Grid
from timm_sape.encodings import rope_golden


class TestRopeGolden(FixedTableTests):
    name = 'rope_golden'
    reference = reference_rope_golden
    multiple = 2
    rotate_half = True
    least = 1e-4
    by_head = True
    angle_tolerance = 3e-6
    mutants = {
        **FixedTableTests.mutants,
        'another turn': ('3x5', (rope_golden, 'TURN', 2.0)),
        'by raster order of the head': ('3x5', (rope_golden, 'TURN', 2 * rope_golden.TURN)),
    }

    @pytest.mark.parametrize('keywords', [
        {'min_freq': 1.0, 'max_freq': 5.0}, {'zero_share': 0.25}, {'zero_share': 0.99}, {'min_freq': 2, 'max_freq': 2}],
        ids=str)
    def test_keywords(self, keywords):
        self.check(*CASES['3x5, 6 kept'], **keywords)
        self.check((2, 4), 0, None, **keywords)


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
