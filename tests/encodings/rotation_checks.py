"""Tests that all rotations share, as classes to derive from."""
import copy
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
import torch.nn as nn
from timm.layers.pos_embed_sincos import apply_rot_embed_cat

import timm_sape
from harness import (
    assert_near,
    assert_offsets_alone,
    attend,
    catches,
    check_rescaling,
    compare,
    create,
    gradients,
    make_flat_regions,
    make_grid,
    make_qkv,
    where,
)
from loops import attention
from model_checks import (
    AttentionEncodingTests,
    FixedTests,
    LearnedTests,
    check_trained_grid_is_saved,
    initial_model,
    own_encodings,
)
from timm_sape import Grid, ops
from timm_sape.attention import PosEncAttention
from timm_sape.encodings.base import rotary
from timm_sape.position import LayerEncodings, Position

SIZES = {'heads': 2, 'head_dim': 12}  # six pairs of channels, so that mrope has two for each axis
CASES = {  # grid, prefix tokens, kept patches
    '3x5': ((3, 5), 0, None),
    '3x5 and 5 prefix tokens': ((3, 5), 5, None),
    '1x7': ((1, 7), 1, None),
    '7x1': ((7, 1), 0, None),
    '7x1 and a prefix token': ((7, 1), 1, None),
    '4x4': ((4, 4), 1, None),
    '1x1': ((1, 1), 1, None),
    '1x1 alone': ((1, 1), 0, None),
    '3x5, 6 kept': ((3, 5), 1, 6),
    '3x5, 8 kept': ((3, 5), 1, 8),
    '7x1, 3 kept': ((7, 1), 0, 3),
}
TRAINED_ON = {  # grid, prefix tokens, kept patches, trained grid
    '3x5 trained on 6x2': ((3, 5), 1, None, (6, 2)),
    '1x7 trained on 4x4': ((1, 7), 0, None, (4, 4)),
    '4x4 trained on 3x5, 6 kept': ((4, 4), 5, 6, (3, 5)),
}
IMAGES = ['random', 'flat regions', 'duplicated rows']


def own_parameters(encoding):
    """What the reference needs to know about the encoding: its parameters, and its gate if it has one."""
    given = {name: p for name, p in encoding.named_parameters() if name != 'gate.weight'}
    return given if encoding.gate is None else {**given, 'gate': 100 * encoding.gate.weight[0]}


def turned(q, k, encoding, grid):
    """q and k after the rotation in an attention layer."""
    layer = LayerEncodings({encoding.name: encoding}, needs_position=True)
    return layer._rotated(q, k, Position(grid))


def logits_between(encoding, grid_size, token):
    """Logits between identical patches, `[h, H, W, H, W]`. `token` is q and k of one of them, `[2, 1, h, d]`."""
    grid = Grid(*grid_size)
    q, k = turned(*(x[:, :, None].expand(-1, -1, grid.num_patches, -1) for x in token), encoding, grid)
    return (q @ k.mT)[0].unflatten(-1, grid_size).unflatten(-3, grid_size)


def one_token(**random):
    """Random q and k of one patch, for `logits_between`."""
    return torch.randn(2, 1, SIZES['heads'], SIZES['head_dim'], dtype=torch.float64, **random)


def check_turn_in_half(new, dtype):
    """Matrices are float32, under autocast too, and q keeps its dtype, so only the result is rounded."""
    exact = new((3, 5), dtype=torch.float32)
    encoding = copy.deepcopy(exact).to(dtype)
    exact.load_state_dict(encoding.state_dict())  # the rounded parameters
    for grid in (make_grid((3, 5)), make_grid((6, 4)), make_grid((3, 5), 1, 6)):
        q, k, _ = make_qkv(grid, **SIZES, dtype=dtype)
        expected = exact(q.float(), k.float(), grid=grid, hook='turn')
        for autocast in (False, True):
            with torch.autocast('cpu', dtype, enabled=autocast):
                found = encoding(q, k, grid=grid, hook='turn')
            for a, b in zip(found, expected):
                assert torch.equal(a, b.to(dtype))


# --- what must be noticed --------------------------------------------------------------------------------------------

def swap_axes(self, device=None, dtype=None, coordinates=Grid.coordinates):
    return coordinates(self, device, dtype).flip(-1)


def columns_alike(self, device=None, dtype=None, coordinates=Grid.coordinates):
    return coordinates(self, device, dtype) * torch.tensor([1, 0])


def raster_order(self, table, keep_rows=Grid.keep_rows):
    if self.keep_indices is None:
        return table
    return keep_rows(Grid(*self.size, self.num_prefix_tokens, self.keep_indices.sort().values), table)


def first_rows(self, table):
    """Replaces `Grid.keep_rows`. Takes the right number of rows, but always the first ones."""
    return table if self.keep_indices is None else table[..., :self.keep_indices.shape[1], :]


def other_layout(angles, rotate_half, rotation_table=rotary.rotation_table):
    return rotation_table(angles, not rotate_half)


def turned_back(angles, rotate_half, rotation_table=rotary.rotation_table):
    return rotation_table(-angles, rotate_half)


def inverse(s, cayley=ops.cayley):
    return cayley(-s)


def of_patches_alone(turn):
    """A method `turn` that leaves prefix tokens as they are."""
    def broken(self, q, k, grid):
        p = grid.num_prefix_tokens
        return tuple(torch.cat([t[:, :, :p], new[:, :, p:]], dim=2) for t, new in zip((q, k), turn(self, q, k, grid)))
    return broken


def exponential_of_minus(a, exp=ops.matrix_exp):
    return exp(-a)


PLACE_MUTANTS = {  # case, (owner, attribute, replacement)
    'x and y swapped': ('4x4', (Grid, 'coordinates', swap_axes)),
    'columns not counted': ('4x4', (Grid, 'coordinates', columns_alike)),
}
KEPT_MUTANTS = {
    'rows of kept patches in raster order': ('3x5, 6 kept', (Grid, 'keep_rows', raster_order)),
    'first rows for kept patches': ('3x5, 6 kept', (Grid, 'keep_rows', first_rows)),
}
TABLE_MUTANTS = {
    'turned back': ('3x5', (rotary, 'rotation_table', turned_back)),
    'other layout': ('3x5', (rotary, 'rotation_table', other_layout)),
}


# --- tests -----------------------------------------------------------------------------------------------------------

class RotationTests(AttentionEncodingTests):
    """What every rotation must pass.

    Attributes:
        reference: The module of its reference, with a function `rotate`.
        keywords: Keywords of the encoding and of the reference in these tests.
        float32_tolerance: Of values and gradients, for tokens as large as random ones.
    """
    reference: ModuleType
    keywords = {}
    float32_tolerance = 1e-5

    def new(self, grid_size, num_prefix_tokens=0, **keywords):
        """The encoding with large parameters."""
        return create(self.name, grid_size, num_prefix_tokens, **{**SIZES, **self.keywords, **keywords})

    def check(
            self, grid_size, num_prefix_tokens=0, num_keep=None, trained_on=None, *, rescale=True, made_for=None,
            init=None, **keywords):
        """Attention and every gradient in float64.

        Args:
            trained_on: The trained grid. Positions are rescaled to it, unless `rescale` is False.
            made_for: The encoding's own grid, if it is a different one.
            init: Initial value of a gate. A gated encoding keeps its initial values: the gate multiplies all angles.
            keywords: For the encoding and for the reference.
        """
        grid = make_grid(grid_size, num_prefix_tokens, num_keep, batch=2)
        given = {} if trained_on is None else {'ref_grid_size': trained_on}
        mode = {'resolution': 'rescale'} if given and rescale else {}
        name, gate = (self.name, {}) if init is None else (f'auto_{self.name}', {'init': init, 'random': False})
        encoding = create(
            name, made_for or grid_size, num_prefix_tokens, **SIZES, **given, **mode, **gate,
            **{**self.keywords, **keywords})
        q, k, v = make_qkv(grid, **SIZES)
        inputs = {'q': q, 'k': k, 'v': v, **dict(encoding.named_parameters())}
        options = {**(given if mode else {}), **keywords}
        expected = self.attended(q, k, v, encoding, grid, **options)
        if q.shape[2] == 1:  # attention has nothing to choose from
            inputs = {'v': v}
        compare(attend(encoding, q, k, v, grid), expected, inputs)

    def attended(self, q, k, v, encoding, grid, **options):
        """Attention after the rotation, according to the reference."""
        return attention(*(self.rotate(x, encoding, grid, **options) for x in (q, k)), v)

    def rotate(self, x, encoding, grid, **options):
        """`[B, h, N, d]` after the rotation, according to the reference."""
        return self.reference.rotate(
            x, grid.size, **where(grid), **own_parameters(encoding), **{**self.keywords, **options})

    # --- equations

    @pytest.mark.one_of(2)
    @pytest.mark.parametrize('case', CASES)
    def test_equations(self, case):
        self.check(*CASES[case])

    def test_another_grid(self):
        """On a grid that it was not made for, the angles are those of the reference, which knows one grid only."""
        self.check((2, 4), 1, made_for=(3, 5))
        self.check((3, 5), 0, 7, made_for=(4, 4))

    def test_gate(self):
        """The gate multiplies the angles, not their sines."""
        self.check(*CASES['3x5, 6 kept'], init=0.7)

    @pytest.mark.one_of(2)
    @pytest.mark.parametrize('qk_norm', [True, False])
    @pytest.mark.parametrize('fused', [True, False])
    def test_attention_layer(self, qk_norm, fused):
        """q and k are rotated after their norms. Prefix tokens and v are not rotated."""
        torch.manual_seed(0)
        grid = make_grid((3, 4), num_prefix_tokens=1, num_keep=7, batch=2)
        heads, head_dim = SIZES['heads'], SIZES['head_dim']
        encoding = self.new((3, 4), 1)
        layer = PosEncAttention(
            heads * head_dim, num_heads=heads, qkv_bias=True, qk_norm=qk_norm, norm_layer=nn.LayerNorm).double()
        layer.fused_attn = fused
        layer.encodings = LayerEncodings({self.name: encoding}, needs_position=True)
        x = torch.randn(2, 8, heads * head_dim, dtype=torch.float64, requires_grad=True)

        qkv = layer.qkv(x).unflatten(-1, (3, heads, head_dim))  # [B, N, 3, h, d]
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
        expected = self.attended(layer.q_norm(q), layer.k_norm(k), v, encoding, grid)
        expected = layer.proj(expected.transpose(1, 2).flatten(2))
        compare(layer(x, position=Position(grid)), expected, {'x': x, **dict(layer.named_parameters())})

    @pytest.mark.one_of(3)
    def test_mutants_are_caught(self, mutant, monkeypatch):
        """If the package is broken like this, the comparison with the equations fails."""
        case, patch = self.mutants[mutant]
        catches(lambda: self.check(*CASES[case]), monkeypatch, *patch)

    # --- properties

    def test_images_apart(self):
        """Each image of a batch gives the same result as it does alone."""
        grid = make_grid((3, 5), 1, 6)
        encoding = self.new((3, 5), 1)
        q, k, v = make_qkv(grid, **SIZES)
        together = attend(encoding, q, k, v, grid)
        for b in range(3):
            one = Grid(3, 5, 1, grid.keep_indices[b:b + 1])
            assert_near(attend(encoding, *(x[b:b + 1] for x in (q, k, v)), one), together[b:b + 1], 1e-13)

    def test_other_grid(self):
        """Images of another size, `set_grid_size` and building the encoding for that size give the same."""
        trained, grid = self.new((3, 5), 1), make_grid((4, 7), 1)
        resized = copy.deepcopy(trained)
        resized.set_grid_size((4, 7))
        built = self.new((4, 7), 1)
        built.load_state_dict(trained.state_dict())
        q, k, v = make_qkv(grid, **SIZES)
        expected = attend(trained, q, k, v, grid)
        assert_near(expected, self.attended(q, k, v, trained, grid), 1e-10)
        for encoding in (resized, built):
            assert torch.equal(attend(encoding, q, k, v, grid), expected)

    # --- precision

    @pytest.mark.parametrize('image', IMAGES)
    def test_float32(self, image):
        """The value and every gradient in float32 against float64."""
        grid = make_grid((8, 8))
        encoding = self.new((8, 8))
        q, k, v = make_qkv(grid, **SIZES)
        if image != 'random':
            q, k = make_flat_regions(grid, **SIZES)
            v = v.detach().expand_as(q)
        if image == 'duplicated rows':
            rows = [0, 0, 2, 3, 3, 3, 6, 7]
            q, k = (x.detach().unflatten(2, (8, 8))[:, :, rows].flatten(2, 3).requires_grad_() for x in (q, k))
        single = copy.deepcopy(encoding).float()
        q32, k32 = (x.detach().float().requires_grad_() for x in (q, k))

        expected, actual = attend(encoding, q, k, v, grid), attend(single, q32, k32, v.float(), grid)
        assert actual.dtype == torch.float32
        tolerance = self.float32_tolerance
        assert_near(actual, expected, tolerance)
        # Neighbours that differ by 1 % take two of float32's seven digits from the direction of their difference.
        tolerance *= 1 if image == 'random' else 10
        for what, a, b in zip(
                ['q', 'k', *dict(encoding.named_parameters())],
                gradients(actual, [q32, k32, *single.parameters()]),
                gradients(expected, [q, k, *encoding.parameters()])):
            assert_near(a, b, tolerance, f'gradient of {what}')


class RelativeTests:
    """For a rotation after which logits depend on offsets alone."""

    def test_translation(self):
        """The logit between two patches does not change when both move by the same offset."""
        token = one_token(generator=torch.Generator().manual_seed(0))
        for grid_size in ((4, 6), (1, 7), (7, 1)):
            assert_offsets_alone(logits_between(self.new(grid_size), grid_size, token))
        assert timm_sape.get_encoding(self.name).relative

    def test_directions(self):
        """q.k tells up from down and left from right."""
        token = one_token(generator=torch.Generator().manual_seed(0))
        logits = logits_between(self.new((4, 5)), (4, 5), token)
        assert not torch.allclose(logits[:, 1:, :, :-1], logits[:, :-1, :, 1:])
        assert not torch.allclose(logits[:, :, 1:, :, :-1], logits[:, :, :-1, :, 1:])


class RotaryTests(RelativeTests, RotationTests):
    """A rotation of pairs of channels by a table of angles.

    Attributes:
        multiple: What the head dim must be a multiple of.
    """
    multiple = 4
    mutants = {**PLACE_MUTANTS, **KEPT_MUTANTS, **TABLE_MUTANTS}

    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    def test_half(self, dtype):
        """The table stays in float32 and q keeps its dtype, so only the result of a rotation is rounded."""
        encoding = self.new((3, 5), dtype=torch.float32).to(dtype)
        for grid in (make_grid((3, 5)), make_grid((6, 4)), make_grid((3, 5), 1, 6)):
            assert encoding(torch.zeros(1), grid=grid, hook='rotation').dtype == torch.float32
            q, k, v = make_qkv(grid, **SIZES, dtype=dtype)
            assert attend(encoding, q, k, v, grid).dtype == dtype

    @pytest.mark.parametrize('head_dim', [3, 6])
    def test_head_dims(self, head_dim):
        message = f"'{self.name}' needs a head dim that is a multiple of {self.multiple}, got {head_dim}. Choose"
        with pytest.raises(ValueError, match=message) if head_dim % self.multiple else nullcontext():
            create(self.name, heads=2, head_dim=head_dim)


class TableTests(RotaryTests):
    """A rotation that is nothing but its table of angles.

    Attributes:
        rotate_half: Whether channels t and t + d/2 are a pair, rather than 2t and 2t + 1.
    """
    rotate_half = False

    @pytest.mark.parametrize('grid_size, num_keep', [((3, 5), None), ((6, 2), None), ((3, 5), 6), ((6, 2), 5)])
    def test_rotation_table(self, grid_size, num_keep):
        """With this table, timm's function rotates as the equations say, on the encoding's own grid and on another."""
        encoding, grid = self.new((3, 5)), make_grid(grid_size, 0, num_keep, batch=2)
        table = encoding(torch.zeros(1), grid=grid, hook='rotation')
        for x in make_qkv(grid, **SIZES)[:2]:
            actual = apply_rot_embed_cat(x, table, half=encoding.rotate_half)
            assert_near(actual, self.rotate(x, encoding, grid), 1e-12)

    def test_norms(self):
        """Each vector and each pair of channels keeps its length. Prefix tokens do not change at all."""
        grid = Grid(3, 5, 2)
        x = make_qkv(grid, **SIZES)[0]
        out, _ = turned(x, x, self.new((3, 5), 2), grid)
        assert_near(out.norm(dim=-1), x.norm(dim=-1), 1e-14)
        half = SIZES['head_dim'] // 2
        for t in range(half):
            pair = (t, t + half) if self.rotate_half else (2 * t, 2 * t + 1)
            assert_near(out[..., pair].norm(dim=-1), x[..., pair].norm(dim=-1), 1e-14)
        assert torch.equal(out[:, :, :2], x[:, :, :2])
        assert (out[:, :, 3:] - x[:, :, 3:]).abs().max() > 0.1


class FixedTableTests(FixedTests, TableTests):
    """A rotation without parameters. Its reference has a function `angle`, too.

    Attributes:
        by_head: Whether each head has angles of its own.
        angle_tolerance: Of the angles in float32.
    """
    by_head = False
    angle_tolerance = 1e-6

    def angle(self, encoding):
        return self.reference.angle(encoding.head_dim, (3, 5))

    def check_initial_values(self, layer, encoding):
        angle = self.angle(encoding)
        expected = torch.tensor([[
            [angle(h, t, y, x) for t in range(encoding.head_dim // 2)] for y in range(3) for x in range(5)]
            for h in range(encoding.num_heads)], dtype=torch.float64)
        assert_near(encoding.angles(Grid(3, 5)), expected if self.by_head else expected[0], self.angle_tolerance)


class ResolutionTests:
    """For a rotation that has the keyword `resolution`."""

    @pytest.mark.parametrize('case', TRAINED_ON)
    def test_trained_grid_makes_no_difference(self, case):
        self.check(*TRAINED_ON[case], rescale=False)

    def test_rescaled(self):
        """Positions are rescaled to the trained grid, whatever grid the encoding is made for."""
        self.check((3, 5), 1, None, (6, 2))
        self.check((2, 4), 0, 5, (3, 3), made_for=(1, 2))
        check_rescaling(self.name, 'rotation', **SIZES)

    def test_trained_grid_is_saved(self):
        check_trained_grid_is_saved(self.name)

    def test_wrong_resolution(self):
        message = f"'{self.name}': resolution must be 'extrapolate', 'rescale', 'ntk' or 'yarn', got 'resize'"
        with pytest.raises(ValueError, match=message):
            create(self.name, heads=2, head_dim=12, resolution='resize')


class MixedTests:
    """For a rotation with the frequencies `freqs` of RoPE-Mixed, `[2, h, d/2]`."""

    @pytest.mark.parametrize('again', [False, True])
    def test_initial_values(self, again):
        """Frequencies are 10^(-4t/d) long, along a direction of each layer and head, and at right angles to it."""
        model = initial_model(self.name, again)
        freqs = torch.stack([encoding.freqs for encoding in own_encodings(model, self.name)]).detach()
        assert freqs.shape == (2, 2, 4, 8)  # layer, axis, head, pair
        expected = torch.tensor([10 ** (-4 * t / 16) for t in range(4)] * 2)
        assert_near(freqs.norm(dim=1), expected.expand(2, 4, 8), 1e-6)
        (fx, gx), (fy, gy) = (freqs[:, i].split(4, dim=-1) for i in range(2))
        assert_near(gx, -fy, 1e-6)
        assert_near(gy, fx, 1e-6)
        directions = torch.atan2(fy, fx)
        assert_near(directions, directions[..., :1].expand_as(directions), 1e-6)
        assert len({round(a, 4) for a in directions[..., 0].flatten().tolist()}) == 8
        wide = timm_sape.create_encoding(self.name, dim=256, num_heads=64, grid_size=(3, 5)).freqs[:, :, 0]
        quadrants = {(x > 0, y > 0) for x, y in wide.T.tolist()}
        assert len(quadrants) == 4  # the directions go all the way round


class BasisTests(ResolutionTests, LearnedTests, RotaryTests):
    """A rotation by a table, after each head's tokens are multiplied by a matrix that it learns by `ops.cayley`."""
    mutants = {**RotaryTests.mutants, 'inverse matrices': ('3x5', (ops, 'cayley', inverse))}

    @pytest.mark.one_of(2)
    @pytest.mark.parametrize('case', [case for case in CASES if case != '1x1'])  # alone, there is no offset
    def test_equations(self, case):
        self.check(*CASES[case])

    def test_gate(self):
        """The gate multiplies the angles, not their sines."""
        encoding, grid = create(f'auto_{self.name}', (3, 5), 1, **SIZES), make_grid((3, 5), 1, 6, batch=2)
        encoding.gate.weight.data.fill_(0.007)
        q, k, v = make_qkv(grid, **SIZES)
        expected = self.attended(q, k, v, encoding, grid)
        compare(attend(encoding, q, k, v, grid), expected, {'q': q, 'k': k, **dict(encoding.named_parameters())})

    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    def test_turn_in_half(self, dtype):
        check_turn_in_half(self.new, dtype)

    def test_gate_of_zero(self):
        """Then any matrix does nothing, with prefix tokens either."""
        encoding, grid = create(f'auto_{self.name}', (3, 5), 2, **SIZES), make_grid((3, 5), 2, 6)
        encoding.gate.weight.data.zero_()
        q, k, v = make_qkv(grid, **SIZES)
        assert_near(attend(encoding, q, k, v, grid), attention(q, k, v), 1e-12)


class BlockTests(LearnedTests, RotationTests):
    """A rotation of blocks of channels by exponentials. Its `keywords` give the `block_size`."""
    mutants = {**KEPT_MUTANTS, 'turned back': ('3x5', (ops, 'matrix_exp', exponential_of_minus))}

    def test_norms(self):
        """Each block of channels keeps its length. Prefix tokens do not change at all."""
        grid = Grid(3, 5, 2)
        x = make_qkv(grid, **SIZES)[0]
        out, _ = turned(x, x, self.new((3, 5), 2), grid)
        before, after = (y.unflatten(-1, (-1, self.keywords['block_size'])) for y in (x, out))
        assert_near(after.norm(dim=-1), before.norm(dim=-1), 1e-13)
        assert torch.equal(out[:, :, :2], x[:, :, :2])
        assert (out[:, :, 3:] - x[:, :, 3:]).abs().max() > 0.1

    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    def test_half(self, dtype):
        assert self.new((3, 5), dtype=torch.float32).to(dtype).blocks(Grid(6, 4)).dtype == torch.float32
        check_turn_in_half(self.new, dtype)
