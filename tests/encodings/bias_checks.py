"""Tests and checks that biases on the logits share, first fixed biases, then learned ones."""
import copy
import itertools
from types import ModuleType

import pytest
import torch

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
    make_grid,
    make_qkv,
    make_tokens,
    where,
)
from loops import attention
from model_checks import AttentionEncodingTests, FixedTests, LearnedTests, check_trained_grid_is_saved
from timm_sape import Grid
from timm_sape.encodings.base import OffsetBiasEncoding, between_patches

SCALE = 0.3  # of the logits, for encodings that append channels to q and k


def bias_of(encoding, grid, inputs=()):
    """The bias that an encoding adds to the logits, `[B|1, h, N, N]`. `inputs` are q, k and the tokens."""
    if encoding.overrides('position_bias'):
        bias = encoding(torch.zeros(1), grid=grid, hook='position_bias')
        return bias if bias.ndim == 4 else bias[None]
    if encoding.overrides('content_bias'):
        return encoding(*inputs[:2], grid=grid, hook='content_bias')
    a, b = encoding(*inputs, grid=grid, scale=SCALE, hook='channels')
    return SCALE * a @ b.mT


def make_inputs(grid, *, heads, head_dim, batch=1, dtype=torch.float64):
    """q, k and the tokens, as leaves."""
    q, k, _ = make_qkv(grid, heads=heads, head_dim=head_dim, batch=batch, dtype=dtype)
    return [q, k, make_tokens(grid, dim=heads * head_dim, batch=batch, dtype=dtype)]


# --- what must be noticed --------------------------------------------------------------------------------------------

def swap_axes(self, device=None, dtype=None, coordinates=Grid.coordinates):
    return coordinates(self, device, dtype).flip(-1)


def rows_alike(self, grid, device, dtype, offsets=OffsetBiasEncoding.offsets):
    dy, dx = offsets(self, grid, device, dtype)
    return dx.new_zeros(dy.shape), dx


def towards_the_other(table, grid, spread=OffsetBiasEncoding.spread):
    return spread(table, grid).mT


def pad_behind(self, bias):
    return torch.nn.functional.pad(bias, (0, self.num_prefix_tokens, 0, self.num_prefix_tokens))


def in_raster_order(function):
    """A method of `Grid` that takes the kept patches as if they were in raster order."""
    def mutant(self, *args):
        if self.keep_indices is None:
            return function(self, *args)
        return function(Grid(*self.size, self.num_prefix_tokens, self.keep_indices.sort().values), *args)
    return mutant


def transposed(values, grid, between_patches=between_patches):
    """Replaces `between_patches`. Takes offsets as p_j - p_i."""
    return between_patches(values, grid).mT


ONE_AXIS_ALONE = OffsetBiasEncoding, 'offsets', rows_alike
FROM_THE_OTHER = OffsetBiasEncoding, 'spread', staticmethod(towards_the_other)
PREFIX_BEHIND = Grid, 'pad_prefix', pad_behind
PAIRS_IN_RASTER_ORDER = Grid, 'kept_offsets', in_raster_order(Grid.kept_offsets)
ROWS_IN_RASTER_ORDER = Grid, 'keep_rows', in_raster_order(Grid.keep_rows)
AXES_SWAPPED = Grid, 'coordinates', swap_axes


# --- fixed biases ----------------------------------------------------------------------------------------------------

FIXED_SIZES = {'heads': 4, 'head_dim': 12}  # lookhere needs at least four heads
CASES = {  # grid, prefix tokens, kept patches
    '3x5': ((3, 5), 0, None),
    '3x5 and 5 prefix tokens': ((3, 5), 5, None),
    '1x7': ((1, 7), 1, None),
    '7x1': ((7, 1), 0, None),
    '4x4': ((4, 4), 1, None),
    '1x1': ((1, 1), 1, None),
    '1x1 alone': ((1, 1), 0, None),
    '3x5, 6 kept': ((3, 5), 1, 6),
    '7x1, 3 kept': ((7, 1), 0, 3),
}


def check_decay(name, all_seen=True, **keywords):
    """In each of eight directions, every further step lowers the bias by the same amount, for heads that look there."""
    encoding = create(name, (7, 7), heads=12, head_dim=1, random=False, **keywords)
    bias = bias_of(encoding, Grid(7, 7))[0].unflatten(1, (7, 7))
    bias = bias.unflatten(3, (7, 7))[:, 3, 3]  # from the patch in the middle, [h, 7, 7]
    for dy, dx in itertools.product((-1, 0, 1), repeat=2):
        if (dy, dx) == (0, 0):
            continue
        steps = torch.stack([bias[:, 3 + n * dy, 3 + n * dx] for n in range(4)], dim=1)  # [h, 4]
        seen = steps.isfinite().all(1)
        assert torch.equal(seen, steps[:, 1].isfinite())
        assert seen.all() or not all_seen
        assert seen.any()
        assert (steps[seen].diff() < 0).all() and steps[seen].diff(n=2).abs().max() < 1e-12


def unchanged_when_mirrored(name, axis, **keywords):
    """For each of 12 heads, whether mirroring the image along y (axis 0) or x (axis 1) leaves its bias unchanged."""
    encoding = create(name, (4, 5), heads=12, head_dim=1, random=False, **keywords)
    bias = bias_of(encoding, Grid(4, 5))[0]
    mirrored = bias.unflatten(2, (4, 5)).unflatten(1, (4, 5)).flip(1 + axis, 3 + axis).flatten(3, 4).flatten(1, 2)
    return [torch.equal(a, b) for a, b in zip(bias, mirrored)]


class FixedBiasTests(FixedTests, AttentionEncodingTests):
    """What every bias without parameters must pass, with a keyword `resolution`.

    Attributes:
        reference: The module of its reference, with a function `bias`.
        variants: Keywords other than the default ones.
        head_counts: Numbers of heads that it can have.
    """
    reference: ModuleType
    variants: list
    head_counts = [1, 2, 3, 4, 5, 6, 8, 12, 16, 20]
    mutants = {  # case, (owner, attribute, replacement)
        'prefix behind': ('4x4', PREFIX_BEHIND),
        'kept patches in raster order': ('3x5, 6 kept', PAIRS_IN_RASTER_ORDER),
    }
    PARAMETERS = [*AttentionEncodingTests.PARAMETERS, 'variant', 'head_count']

    def check(
            self, grid_size, num_prefix_tokens=0, num_keep=None, *, trained_on=None, made_for=None, init=None,
            **keywords):
        """The bias, and attention with every gradient, in float64.

        Args:
            trained_on: The trained grid. Positions are rescaled to it.
            made_for: The encoding's own grid, if it is a different one.
            init: Initial value of a gate.
            keywords: For the encoding and for the reference.
        """
        grid = make_grid(grid_size, num_prefix_tokens, num_keep, batch=2)
        given = {} if trained_on is None else {'ref_grid_size': trained_on}
        mode = {'resolution': 'rescale'} if given else {}
        name, gate = (self.name, {}) if init is None else (f'auto_{self.name}', {'init': init})
        encoding = create(
            name, made_for or grid_size, num_prefix_tokens, random=False,
            **FIXED_SIZES, **given, **mode, **gate, **keywords)
        q, k, v = make_qkv(grid, **FIXED_SIZES)
        inputs = {'q': q, 'k': k, 'v': v, **dict(encoding.named_parameters())}
        w = 1 if encoding.gate is None else 100 * encoding.gate.weight[0]
        bias = w * self.reference.bias(FIXED_SIZES['heads'], grid.size, **given, **where(grid), **keywords)
        assert_near(bias_of(encoding, grid), bias, 1e-14)
        if grid_size == (1, 1) and num_prefix_tokens == 0:  # attention has nothing to choose from
            inputs = {'v': v}
        compare(attend(encoding, q, k, v, grid), attention(q, k, v, bias=bias), inputs)

    # --- equations

    @pytest.mark.one_of(2)
    @pytest.mark.parametrize('case', CASES)
    def test_equations(self, case):
        self.check(*CASES[case])

    def test_keywords(self, variant):
        self.check(*CASES['3x5, 6 kept'], **variant)
        self.check((2, 4), 0, None, **variant)

    def test_another_grid(self):
        """On a grid that it was not made for, the bias is that of the reference, which knows one grid only."""
        self.check((2, 4), 1, None, made_for=(3, 5))
        self.check((3, 5), 0, 7, made_for=(4, 4))

    def test_rescaled(self):
        """Positions are rescaled to the trained grid, whatever grid the encoding is made for."""
        self.check((3, 5), 1, None, trained_on=(6, 2))
        self.check((2, 4), 0, 5, trained_on=(3, 3), made_for=(1, 2))
        check_rescaling(self.name, 'position_bias', **FIXED_SIZES)

    def test_number_of_heads(self, head_count):
        for keywords in ({}, *self.variants):
            encoding = create(self.name, (3, 4), heads=head_count, head_dim=1, random=False, **keywords)
            assert_near(bias_of(encoding, Grid(3, 4)), self.reference.bias(head_count, (3, 4), **keywords), 1e-14)

    @pytest.mark.one_of(3)
    def test_mutants_are_caught(self, mutant, monkeypatch):
        """If the package is broken like this, the comparison with the equations fails."""
        case, patch = self.mutants[mutant]
        catches(lambda: self.check(*CASES[case]), monkeypatch, *patch)

    # --- properties

    def test_translation(self):
        """The logit between two patches does not change when both move by the same offset."""
        for grid_size in ((4, 6), (1, 7), (7, 1)):
            bias = bias_of(create(self.name, grid_size, random=False, **FIXED_SIZES), Grid(*grid_size))[0]
            assert_offsets_alone(bias.unflatten(-1, grid_size).unflatten(-3, grid_size))
        assert timm_sape.get_encoding(self.name).relative

    def test_small_buffers(self):
        """The buffer has one number per offset, not one per pair of patches, and none of them is infinite."""
        encoding = create(self.name, (32, 32), 1, heads=12, head_dim=1, dtype=torch.float32)
        assert [list(buffer.shape) for buffer in encoding.buffers()] == [[12, 63, 63]]
        assert encoding.table.isfinite().all()
        assert encoding(torch.zeros(1), grid=Grid(4, 4, 1), hook='position_bias').shape == (12, 17, 17)
        assert create(self.name, (32, 32), **FIXED_SIZES).half().table.dtype == torch.float32

    # --- models

    def check_initial_values(self, layer, encoding):
        expected = self.reference.bias(4, (3, 5), num_prefix_tokens=5)
        assert_near(bias_of(encoding, Grid(3, 5, 5)), expected, 1e-6)

    def test_trained_grid_is_saved(self):
        check_trained_grid_is_saved(self.name)

    # --- keywords

    def test_wrong_resolution(self):
        message = f"'{self.name}': resolution must be 'extrapolate', 'rescale' or 'slopes', got 'resize'"
        with pytest.raises(ValueError, match=message):
            create(self.name, heads=4, resolution='resize')


# --- learned biases --------------------------------------------------------------------------------------------------

SIZES = {'heads': 2, 'head_dim': 3}
GRIDS = [  # grid, prefix tokens
    ((3, 5), 0), ((1, 7), 1), ((7, 1), 5), ((4, 4), 1), ((1, 1), 0), ((3, 5), 5)]
OTHER_GRIDS = [  # grid, own grid
    ((4, 6), (3, 5)), ((2, 3), (3, 5)), ((5, 3), (3, 5)), ((1, 1), (3, 5)), ((4, 3), (1, 7)), ((3, 2), (4, 1)),
    ((4, 3), (3, 5))]
KEPT = [  # grid, prefix tokens, kept patches
    ((3, 5), 1, 8), ((7, 1), 0, 3), ((1, 7), 5, 4), ((4, 4), 0, 16), ((3, 3), 2, 2)]


def check_float32(name, sizes=SIZES, **keywords):
    """The value and every gradient in float32 against float64."""
    grid = make_grid((8, 8), 1)
    encoding = create(name, (8, 8), 1, **sizes, **keywords)
    single = copy.deepcopy(encoding).float()
    inputs = make_inputs(grid, **sizes)
    inputs32 = [x.detach().float().requires_grad_() for x in inputs]
    expected, actual = bias_of(encoding, grid, inputs), bias_of(single, grid, inputs32)
    assert actual.dtype == torch.float32
    assert_near(actual, expected, 1e-5)
    parameters, parameters32 = dict(encoding.named_parameters()), list(single.parameters())
    for what, a, b in zip(
            parameters, gradients(actual, parameters32), gradients(expected, list(parameters.values()))):
        assert_near(a, b, 2e-5, f'gradient of {what}')


def check_half(name, dtype, tolerance=1e-5, **keywords):
    """With half precision inputs, in a half precision model or under autocast, the bias is computed in float32.

    Args:
        tolerance: For a model in half precision.
    """
    grid = make_grid((4, 6), 1)
    encoding = create(name, (3, 5), 1, **SIZES, **keywords)
    with torch.no_grad():
        for low in (copy.deepcopy(encoding).to(dtype), encoding.float()):
            inputs = make_inputs(grid, **SIZES, dtype=dtype)
            with torch.autocast('cpu', dtype, enabled=low is encoding):
                actual = bias_of(low, grid, inputs)
            wide = copy.deepcopy(low).double()
            expected = bias_of(wide, grid, [x.double() for x in inputs])
            assert actual.dtype == torch.float32
            assert_near(actual, expected, 1e-5 if low is encoding else tolerance)


def same_token(inputs):
    return [x[..., :1, :].expand_as(x) for x in inputs]


def check_offsets_alone(name, **keywords):
    """The bias depends on the offset alone. It tells up from down and left from right, and heads differ."""
    grid = make_grid((4, 5))
    encoding = create(name, (3, 5), **SIZES, **keywords)
    logits = bias_of(encoding, grid, same_token(make_inputs(grid, **SIZES)))
    logits = logits.reshape(-1, SIZES['heads'], 4, 5, 4, 5)
    assert_near(logits[:, :, 1:, 1:, 1:, 1:], logits[:, :, :-1, :-1, :-1, :-1], 1e-12)
    differs = 1e-3 * logits.abs().max()
    assert (logits[:, :, 1:, :, :-1] - logits[:, :, :-1, :, 1:]).abs().max() > differs
    assert (logits[:, :, :, 1:, :, :-1] - logits[:, :, :, :-1, :, 1:]).abs().max() > differs
    assert (logits[:, 0] - logits[:, 1]).abs().max() > differs


def check_mirrored(name, mirror):
    """Mirroring the image has the same effect as mirroring the encoding's parameters, and it does have an effect.

    Args:
        mirror: Mirrors the parameters of an encoding from left to right.
    """
    grid = make_grid((3, 5))
    encoding = create(name, (3, 5), **SIZES)
    inputs = make_inputs(grid, **SIZES)
    expected = bias_of(encoding, grid, inputs).reshape(-1, SIZES['heads'], 3, 5, 3, 5).flip(3, 5)
    turned = [x.unflatten(-2, (3, 5)).flip(-2).flatten(-3, -2) for x in inputs]
    plain = bias_of(encoding, grid, turned).reshape(expected.shape)
    assert (plain - expected).abs().max() > 0.1 * expected.abs().max()
    with torch.no_grad():
        mirror(encoding)
    assert_near(bias_of(encoding, grid, turned).reshape(expected.shape), expected, 1e-12)


def check_order_of_kept_patches(name, **keywords):
    """If all patches are kept but in another order, the bias has the same entries in that order."""
    grid = make_grid((3, 5), 1, 15)
    encoding = create(name, (3, 5), 1, **SIZES, **keywords)
    whole = Grid(3, 5, 1)
    inputs = make_inputs(grid, **SIZES)
    back = torch.cat([torch.zeros(3, 1, dtype=torch.long), 1 + grid.keep_indices.argsort(1)], dim=1)
    in_order = [
        t.gather(-2, (back[:, None, :, None] if t.ndim == 4 else back[..., None]).expand_as(t)) for t in inputs]
    expected = grid.keep_pairs(bias_of(encoding, whole, in_order))
    actual = bias_of(encoding, grid, inputs)
    assert_near(actual, expected, 1e-13)
    assert not torch.allclose(actual, bias_of(encoding, whole, inputs))


def check_other_grid(name, knows_trained_grid=False, **keywords):
    """Images of another size, `set_grid_size` and building the encoding for that size give the same.

    Args:
        knows_trained_grid: Whether the bias depends on the trained grid, so that this is saved.
    """
    trained, grid = create(name, (3, 5), 1, **SIZES, **keywords), make_grid((4, 7), 1)
    inputs = make_inputs(grid, **SIZES)
    expected = bias_of(trained, grid, inputs)
    moved = copy.deepcopy(trained)
    moved.set_grid_size((4, 7))
    assert torch.equal(bias_of(moved, grid, inputs), expected)
    built = create(name, (4, 7), 1, ref_grid_size=(3, 5), **SIZES, **keywords)
    built.load_state_dict(trained.state_dict())
    assert torch.equal(bias_of(built, grid, inputs), expected)
    state = trained.state_dict()
    assert ('_extra_state' in state) == knows_trained_grid
    if knows_trained_grid:
        assert state['_extra_state'].tolist() == [3, 5]
        other = create(name, (4, 7), 1, **SIZES, **keywords)
        assert (bias_of(other, grid, inputs) - expected).abs().max() > 1e-3 * expected.abs().max()


def check_layers_are_called(name):
    """Hooks on the layers of the MLP fire, so a library may wrap or replace them."""
    encoding = create(name, **SIZES)
    called = []
    for layer in ('fc1', 'fc2'):
        encoding.mlp.get_submodule(layer).register_forward_hook(lambda *args, layer=layer: called.append(layer))
    bias_of(encoding, Grid(3, 5))
    assert called == ['fc1', 'fc2']


class LearnedBiasTests(LearnedTests, AttentionEncodingTests):
    """What every bias with parameters must pass, if it depends on offsets.

    A subclass has a method `expected_bias(encoding, q, x, grid)`, which calls the reference.

    Attributes:
        variants: Keywords that change the equations, one dictionary for each kind.
        keywords: Keywords that make the loops of the reference quick.
    """
    variants = [{}]
    keywords = {}
    compositions = ['{}', 'ape+{}', 'rope2d+{}']
    least = 5e-3
    mutants = {'prefix behind': (((3, 5), 1), PREFIX_BEHIND)}  # arguments of `check`, (owner, attribute, replacement)
    PARAMETERS = [*AttentionEncodingTests.PARAMETERS, 'variant']

    def new(self, grid_size, num_prefix_tokens=0, **keywords):
        return create(self.name, grid_size, num_prefix_tokens, **SIZES, **{**self.keywords, **keywords})

    def check(self, grid_size, num_prefix_tokens=0, num_keep=None, own_size=None, **keywords):
        """The bias and every gradient in float64, of an encoding made for `own_size`."""
        grid = make_grid(grid_size, num_prefix_tokens, num_keep)
        encoding = self.new(own_size or grid_size, num_prefix_tokens, **keywords)
        q, k, x = make_inputs(grid, **SIZES)
        inputs = {'q': q, 'k': k, 'x': x, **dict(encoding.named_parameters())}
        compare(bias_of(encoding, grid, (q, k, x)), self.expected_bias(encoding, q, x, grid), inputs)

    # --- equations

    @pytest.mark.one_of(2)
    @pytest.mark.parametrize('grid_size, num_prefix_tokens', GRIDS)
    def test_equations(self, grid_size, num_prefix_tokens, variant):
        self.check(grid_size, num_prefix_tokens, **variant)

    @pytest.mark.one_of(2)
    @pytest.mark.parametrize('grid_size, num_prefix_tokens, num_keep', KEPT)
    def test_kept_patches(self, grid_size, num_prefix_tokens, num_keep, variant):
        """On a grid other than the encoding's own."""
        self.check(grid_size, num_prefix_tokens, num_keep, (3, 5), **variant)

    @pytest.mark.one_of(2)
    @pytest.mark.parametrize('grid_size, own_size', OTHER_GRIDS)
    def test_another_grid(self, grid_size, own_size, variant):
        self.check(grid_size, 1, None, own_size, **variant)

    @pytest.mark.one_of(2)
    def test_attention(self, variant):
        """Attention with the bias, and every gradient, in float64."""
        encoding, grid = self.new((4, 4), 1, **variant), make_grid((3, 5), 1, 8)
        q, k, v = make_qkv(grid, **SIZES)
        x = make_tokens(grid, dim=SIZES['heads'] * SIZES['head_dim'], batch=len(q))
        inputs = {'q': q, 'k': k, 'v': v, **dict(encoding.named_parameters())}
        expected = attention(q, k, v, scale=SCALE, bias=self.expected_bias(encoding, q, x, grid))
        compare(attend(encoding, q, k, v, grid, scale=SCALE, x=x), expected, inputs)

    @pytest.mark.one_of(3)
    def test_mutants_are_caught(self, mutant, monkeypatch):
        """If the package is broken like this, the comparison with the equations fails."""
        case, patch = self.mutants[mutant]
        catches(lambda: self.check(*case), monkeypatch, *patch)

    # --- properties

    def test_bias_moves_with_kept_patches(self, variant):
        check_order_of_kept_patches(self.name, **variant)

    def knows_trained_grid(self, variant):
        return 'resolution' in variant

    def test_other_grid(self, variant):
        check_other_grid(self.name, self.knows_trained_grid(variant), **variant)

    # --- precision

    def test_float32(self, variant):
        check_float32(self.name, **variant)

    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    def test_half(self, dtype, variant):
        check_half(self.name, dtype, **variant)


class ParabolaTests(LearnedBiasTests):
    """A bias by parabolas, computed by more channels of q and k, with a keyword `resolution`."""

    @pytest.mark.one_of(3)
    def test_mutants_are_caught(self, mutant, monkeypatch):
        """If the package is broken like this, the comparison with the equations fails."""
        case, patch = self.mutants[mutant]
        catches(lambda: self.check(*case, resolution='rescale'), monkeypatch, *patch)

    def test_number_of_channels(self):
        """In float64, where no sum has to be split into parts."""
        for case in (((3, 5), 1), ((3, 5), 1, 8), ((1, 1), 0)):
            grid = make_grid(*case)
            q, k, x = make_inputs(grid, **SIZES)
            a, b = self.new((3, 5), grid.num_prefix_tokens)(q, k, x, grid=grid, scale=SCALE, hook='channels')
            assert a.shape == b.shape == (*q.shape[:3], 6) and a.dtype == b.dtype == q.dtype

    def test_gate(self):
        """This encoding applies its gate itself: a gate of w multiplies the bias by w."""
        grid = make_grid((3, 5), 1)
        encoding, gated = (create(name, (3, 5), 1, **SIZES) for name in (self.name, f'auto_{self.name}'))
        gated.load_state_dict({**encoding.state_dict(), 'gate.weight': torch.tensor([-0.005])})
        inputs = make_inputs(grid, **SIZES)
        assert_near(bias_of(gated, grid, inputs), -0.5 * bias_of(encoding, grid, inputs), 1e-7)

    def test_trained_grid_is_saved(self):
        check_trained_grid_is_saved(self.name)

    def test_wrong_resolution(self):
        message = f"'{self.name}': resolution must be 'extrapolate' or 'rescale', got 'resize'"
        with pytest.raises(ValueError, match=message):
            create(self.name, **SIZES, resolution='resize')


class DirectedTests:
    """For a bias that tells left from right. A subclass has a method `mirror(encoding)`, which swaps them."""

    def test_offsets_alone(self, variant):
        check_offsets_alone(self.name, **variant)

    def test_mirrored(self):
        check_mirrored(self.name, self.mirror)
