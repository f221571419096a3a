"""pope: lengths of q and k from content, angles between them from position."""
import copy

import pytest
import torch
import torch.nn.functional as F

import reference_pope
import reference_rules
import timm_sape
from harness import assert_near, attend, compare, create, make_grid, make_qkv, where
from loops import attention
from model_checks import LearnedTests, initial_model, own_encodings
from rotation_checks import (
    KEPT_MUTANTS,
    PLACE_MUTANTS,
    SIZES,
    RelativeTests,
    ResolutionTests,
    RotationTests,
    own_parameters,
    turned,
)
from timm_sape import Grid
from timm_sape.encodings.pope import PolarEncoding
from timm_sape.position import LayerEncodings, Position

turn = PolarEncoding.turn


def other_way(self, q, k, grid):
    return turn(self, k, q, grid)[::-1]


def phases_of_prefix(self, q, k, grid):
    """Keys of prefix tokens have phases, too."""
    q, k = turn(self, q, k, grid)
    length, zero = k[:, :, :grid.num_prefix_tokens].chunk(2, dim=-1)
    phases = self.phases[:, None]
    prefix = torch.cat([length * phases.cos(), length * phases.sin()], dim=-1)
    return q, torch.cat([prefix, k[:, :, grid.num_prefix_tokens:]], dim=2)


def off_centre(self, grid, device, dtype, compute=PolarEncoding.compute):
    return compute(self, grid, device, dtype) + 0.1


def expected_logits(q, k, encoding, grid, angle, **options):
    return reference_pope.logits(
        q, k, grid.size, angle, **where(grid), **own_parameters(encoding), **options)


class TestPope(ResolutionTests, LearnedTests, RelativeTests, RotationTests):
    name = 'pope'
    reference = reference_pope
    model_variants = [{}, {'resolution': 'rescale', 'base': 10000.0}]
    mutants = {
        **PLACE_MUTANTS,
        **KEPT_MUTANTS,
        'no softplus': ('3x5', (F, 'softplus', lambda x: x)),
        'phases of queries': ('3x5', (PolarEncoding, 'turn', other_way)),
        'phases of prefix tokens': ('4x4', (PolarEncoding, 'turn', phases_of_prefix)),
        'prefix tokens not in the centre': ('4x4', (PolarEncoding, 'compute', off_centre)),
    }

    def attended(self, q, k, v, encoding, grid, **options):
        angle = reference_pope.axial(q.shape[-1], grid.size, **options)
        return attention(q, k, v, scale=0, bias=expected_logits(q, k, encoding, grid, angle))

    def test_gate(self):
        """The gate multiplies angles and phases, and what softplus changes."""
        self.check((3, 5), 1, 6, init=0.7)
        encoding, grid = create('auto_pope', (3, 5), 1, **SIZES), make_grid((3, 5), 1)
        encoding.gate.weight.data.fill_(0.007)
        q, k, _ = make_qkv(grid, **SIZES)
        turned_q, turned_k = turned(q, k, encoding, grid)
        expected = expected_logits(q, k, encoding, grid, reference_pope.axial(12, (3, 5)))
        compare(turned_q @ turned_k.mT / 12 ** 0.5, expected, {'q': q, 'k': k, **dict(encoding.named_parameters())})

    def test_rescaled(self):
        self.check((3, 5), 1, None, (6, 2))
        self.check((2, 4), 0, 5, (3, 3), made_for=(1, 2))

    def test_base(self):
        self.check((3, 5), 1, base=10000.0)


@pytest.mark.parametrize('size, ref, num_keep', [((6, 2), (3, 4), None), ((4, 5), (3, 3), 7)])
@pytest.mark.parametrize('rule', ['rescale', 'ntk', 'yarn'])
def test_rules(rule, size, ref, num_keep):
    """As for `rope2d` with twice the head dim, which has the same frequencies."""
    encoding = create('pope', size, 1, ref_grid_size=ref, resolution=rule, ramp=(0.1, 0.6), **SIZES)
    grid = make_grid(size, 1, num_keep, batch=2)
    q, k, v = make_qkv(grid, **SIZES)
    angle, factor = reference_rules.rope2d(rule, 24, size, ref, (0.1, 0.6))
    expected = attention(q, k, v, scale=0, bias=expected_logits(q, k, encoding, grid, angle, factor=factor))
    compare(attend(encoding, q, k, v, grid), expected, {'q': q, 'k': k, 'v': v, 'phases': encoding.phases})


def test_ntk_is_a_change_of_base():
    """Of any base: for n frequencies and a grid s times as long, b becomes b * s^(n/(n-1))."""
    for base in (100.0, 10000.0):
        ntk = create('pope', (6, 9), ref_grid_size=(2, 3), resolution='ntk', base=base, **SIZES)
        assert_near(ntk.table, create('pope', (6, 9), base=base * 3 ** (6 / 5), **SIZES).table, 1e-12)


def test_factor_comes_after_softplus():
    """A factor of the logits that is a tensor, as where sizes are symbolic, does the same as one that is a number."""
    encoding, grid = create('pope', (3, 5), 1, **SIZES), Grid(3, 5, 1)
    q, k, v = make_qkv(grid, **SIZES)
    layer = LayerEncodings({'pope': encoding}, needs_position=True)
    out, tensor = (
        layer(q, k, v, q.transpose(1, 2).flatten(2), Position(grid, logit_factor=factor), scale=0.3)
        for factor in (1.7, torch.tensor(1.7, dtype=torch.float64)))
    assert_near(tensor, out, 1e-12)
    parts = [
        layer.logits(q, k, q.transpose(1, 2).flatten(2), Position(grid, logit_factor=factor), 0.3)
        for factor in (1.7, torch.tensor(1.7, dtype=torch.float64))]
    for a, b in zip(*parts):
        assert_near(b, a, 1e-12)
    assert_near(sum(parts[0]).softmax(-1) @ v, out, 1e-12)


def test_without_phases_mirrors_are_alike():
    """The initial values cannot tell left from right or up from down; prefix tokens are no exception."""
    encoding, grid = create('pope', (3, 5), 2, random=False, **SIZES), Grid(3, 5, 2)
    q, k, _ = make_qkv(grid, **SIZES)
    for axis in (0, 1):
        mirrored = torch.arange(15).unflatten(0, (3, 5)).flip(axis).flatten()
        order = torch.cat([torch.arange(2), 2 + mirrored])
        (a, b), (c, d) = (turned(*qk, encoding, grid) for qk in ((q, k), (q[:, :, order], k[:, :, order])))
        assert_near(c @ d.mT, (a @ b.mT)[:, :, order][..., order], 1e-13)
    assert timm_sape.get_encoding('pope').sees_mirror is None


def test_angle_is_position_alone():
    """Whatever the content of a patch, the angle of each of its channels is the same."""
    encoding, grid = create('pope', (3, 5), **SIZES), Grid(3, 5)
    q, k, _ = make_qkv(grid, **SIZES, batch=2)
    for x in turned(q, k, encoding, grid):
        real, imaginary = x.chunk(2, dim=-1)
        angles = torch.atan2(imaginary, real)
        assert_near(angles[0], angles[1], 1e-12)
        assert (x.norm(dim=-1) > 0).all()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half(dtype):
    """Angles and lengths are float32 and q keeps its dtype, so only the result is rounded."""
    exact = create('pope', (3, 5), 1, dtype=torch.float32, **SIZES)
    encoding = copy.deepcopy(exact).to(dtype)
    exact.load_state_dict(encoding.state_dict())  # the rounded parameters
    for grid in (make_grid((40, 30), 1), make_grid((3, 5), 1, 6)):
        q, k, _ = make_qkv(grid, **SIZES, dtype=dtype)
        expected = exact(q.float(), k.float(), grid=grid, hook='turn')
        with torch.autocast('cpu', dtype):
            found = encoding(q, k, grid=grid, hook='turn')
        for a, b in zip(found, expected):
            assert torch.equal(a, b.to(dtype))


@pytest.mark.parametrize('again', [False, True])
def test_initial_values(again):
    """No phases yet, in each layer and head."""
    own = own_encodings(initial_model('pope', again), 'pope')
    assert len(own) == 2
    for encoding in own:
        assert encoding.phases.shape == (4, 16) and not encoding.phases.any()


@pytest.mark.parametrize('base', [1, 0, -2.0, float('nan'), float('inf'), '100', None, True])
def test_wrong_base(base):
    with pytest.raises(ValueError, match="'pope' needs base to be a number of more than 1, got"):
        create('pope', base=base)


def test_odd_head_dim():
    with pytest.raises(ValueError, match="'pope' needs a head dim that is a multiple of 2, got 3. Choose"):
        create('pope', heads=2, head_dim=3)
