"""rope_nd: each frequency rotates along three directions, 120 degrees apart."""
import math

import pytest
import torch

import reference_rope_nd
from harness import assert_near, create
from rotation_checks import CASES, FixedTableTests, ResolutionTests
from timm_sape import Grid


class TestRopeNd(ResolutionTests, FixedTableTests):
    name = 'rope_nd'
    reference = reference_rope_nd
    multiple = 2
    by_head = True

    @pytest.mark.parametrize('base', [2, 1e4])
    def test_base(self, base):
        self.check(*CASES['3x5, 6 kept'], base=base)
        self.check((2, 4), 0, None, base=base)

    def angle(self, encoding):
        return self.reference.angle(encoding.head_dim, (3, 5), encoding.num_heads)


def wave_vectors(heads, head_dim):
    """(x, y) of each pair, `[h, d/2, 2]`."""
    encoding = create('rope_nd', (2, 2), heads=heads, head_dim=head_dim, random=False)
    angles = encoding.angles(Grid(2, 2)).double()  # [h, 4, d/2]
    return torch.stack([angles[:, 1] - angles[:, 0], angles[:, 2] - angles[:, 0]], dim=-1)


@pytest.mark.parametrize('heads, head_dim', [(2, 6), (3, 66), (1, 12)])
def test_no_direction_is_preferred(heads, head_dim):
    """The squared projections on any direction add up to the same, in each scale of each head."""
    scales = wave_vectors(heads, head_dim).unflatten(1, (3, -1)).transpose(1, 2)  # [h, S, 3, 2]
    lengths = 100 ** (-torch.arange(head_dim // 6, dtype=torch.float64) / (head_dim // 6))
    assert_near(scales.norm(dim=-1), lengths[:, None].expand(heads, -1, 3), 1e-5)
    assert scales.sum(2).abs().max() < 1e-6
    frames = scales.mT @ scales / lengths[:, None, None] ** 2
    assert_near(frames, 1.5 * torch.eye(2, dtype=torch.float64).expand_as(frames), 1e-4)


@pytest.mark.parametrize('head_dim, counts', [
    (2, [1]), (4, [1, 1]), (6, [1, 1, 1]), (8, [2, 1, 1]), (10, [2, 2, 1]), (64, [11, 11, 10])])
def test_any_head_dim(head_dim, counts):
    """The scales of each direction, fastest first."""
    x, y = wave_vectors(1, head_dim)[0].unbind(-1)
    degrees = torch.rad2deg(torch.atan2(y, x)).remainder(360).round().tolist()
    assert degrees == [120 * k for k, count in enumerate(counts) for _ in range(count)]
    expected = [100 ** (-6 * s / head_dim) for count in counts for s in range(count)]
    assert_near(torch.hypot(x, y), torch.tensor(expected, dtype=torch.float64), 1e-5)


def test_directions_of_heads_are_spread_evenly():
    """As lines, all of them together divide the half circle into equal parts."""
    x, y = wave_vectors(5, 6).unbind(-1)
    lines = torch.atan2(y, x).flatten().remainder(math.pi).sort().values
    assert_near(lines.diff(), torch.full((14,), math.pi / 15, dtype=torch.float64), 1e-5)


@pytest.mark.parametrize('base', [1, 0.5, '100', True, float('nan')])
def test_wrong_base(base):
    with pytest.raises(ValueError, match="'rope_nd' needs base to be a number of more than 1, got"):
        create('rope_nd', base=base)
