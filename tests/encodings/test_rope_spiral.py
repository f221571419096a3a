"""rope_spiral: groups of channels rotate along directions spread over the half plane."""
import pytest
import torch

import reference_rope_spiral
from harness import assert_near, create
from rotation_checks import CASES, FixedTableTests, ResolutionTests
from timm_sape import Grid


class TestRopeSpiral(ResolutionTests, FixedTableTests):
    name = 'rope_spiral'
    reference = reference_rope_spiral

    @pytest.mark.parametrize('keywords', [{'num_directions': 2}, {'max_freq': 0.5}], ids=str)
    def test_keywords(self, keywords):
        self.check(*CASES['3x5, 6 kept'], **keywords)


def test_six_directions():
    angle = reference_rope_spiral.angle(24, (3, 5), num_directions=6)
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
    ({'num_directions': 3}, 'needs num_directions to be an even number of 2 or more, got 3'),
    ({'num_directions': 2.0}, 'needs num_directions to be an even number of 2 or more, got 2.0'),
    ({'max_freq': 0}, "'rope_spiral' needs max_freq to be a positive number, got 0"),
    ({'max_freq': True}, "'rope_spiral' needs max_freq to be a positive number, got True"),
])
def test_wrong_keywords(keywords, message):
    with pytest.raises(ValueError, match=message):
        create('rope_spiral', **keywords)
