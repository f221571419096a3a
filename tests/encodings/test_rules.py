"""Rules for other sizes: rotations by frequencies, slopes, and the factor on the logits."""
import math

import pytest
import torch

import reference_alibi2d
import reference_lookhere
import reference_rpe2d
import reference_rules as reference
import timm_sape
from bias_checks import bias_of
from harness import assert_near, attend, catches, compare, create, make_grid, make_qkv, make_tokens, where
from loops import attention
from timm_sape import Grid
from timm_sape.encodings import FrequencyEncoding, LogitScaling
from timm_sape.position import LayerEncodings, Position, SharedEncodings

SIZES = {'heads': 2, 'head_dim': 12}
ROTATIONS = ['rope1d', 'rope2d', 'rope2d_mixed', 'rope_nd', 'rope_spiral', 'mrope']
SLOPES = {'alibi2d': reference_alibi2d, 'rpe2d': reference_rpe2d, 'lookhere': reference_lookhere}
RULES = ['rescale', 'ntk', 'yarn']
RAMPS = [(1, 32), (0.1, 0.6)]  # the second has pairs below, within and above
CASES = {  # grid, trained grid, prefix tokens, kept patches
    'larger': ((4, 6), (2, 3), 1, None),
    'longer along y': ((5, 3), (2, 3), 2, None),
    'larger along y, smaller along x': ((6, 2), (3, 4), 1, None),
    'smaller': ((2, 3), (3, 5), 0, None),
    'patches dropped': ((4, 5), (3, 3), 1, 7),
    'one patch along y': ((1, 7), (4, 4), 0, None),
    'trained on one row': ((3, 4), (1, 4), 1, None),
}


def check(name, rule, case, ramp=(1, 32), init=None, made_for=None):
    """Attention, and every gradient, in float64."""
    size, ref, prefix, num_keep = CASES[case]
    grid = make_grid(size, prefix, num_keep, batch=2)
    gate = {} if init is None else {'init': init}
    encoding = create(
        name, made_for or size, prefix, ref_grid_size=ref, resolution=rule, ramp=ramp, random=init is None, **gate,
        **SIZES)
    if name == 'rope2d_mixed':  # frequencies above, between and below those of the design
        with torch.no_grad():
            encoding.freqs *= 10 ** torch.linspace(-2, 0.3, 12, dtype=torch.float64).view(2, 1, 6).flip(-1)
    q, k, v = make_qkv(grid, **SIZES)
    inputs = {'q': q, 'k': k, 'v': v, **dict(encoding.named_parameters())}
    first = encoding.freqs if name == 'rope2d_mixed' else SIZES['head_dim']
    gate = {} if init is None else {'gate': 100 * encoding.gate.weight[0]}
    make = getattr(reference, name.removeprefix('auto_'))
    angle_of, factor = make(rule, first, size, ref, ramp, **gate)
    expected = reference.attend(
        q, k, v, angle_of, factor, size, rotate_half=encoding.rotate_half, **where(grid))
    compare(attend(encoding, q, k, v, grid), expected, inputs)


# --- equations -------------------------------------------------------------------------------------------------------

@pytest.mark.one_of(6)
@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('name', ROTATIONS)
def test_equations(name, rule, case):
    check(name, rule, case)


@pytest.mark.parametrize('case', ['larger', 'larger along y, smaller along x', 'patches dropped'])
@pytest.mark.parametrize('name', ROTATIONS)
def test_ramp(name, case):
    check(name, 'yarn', case, ramp=(0.1, 0.6))


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('name, plain', [('string', 'rope2d_mixed'), ('harope', 'rope2d')])
def test_rotations_after_a_matrix(name, plain, rule):
    """They begin as the encodings that they extend, by every rule."""
    size, ref, prefix, _ = CASES['larger along y, smaller along x']
    grid = make_grid(size, prefix, None, batch=2)
    found, expected = (
        create(each, size, prefix, ref_grid_size=ref, resolution=rule, ramp=(0.1, 0.6), random=False, **SIZES)
        for each in (name, plain))
    found.load_state_dict(expected.state_dict(), strict=False)
    q, k, v = make_qkv(grid, **SIZES)
    assert_near(attend(found, q, k, v, grid), attend(expected, q, k, v, grid), 1e-12)


@pytest.mark.parametrize('rule', RULES)
def test_gate(rule):
    """It multiplies the angles, and not the factor of 'yarn'."""
    check('auto_rope2d', rule, 'patches dropped', init=0.7)


@pytest.mark.full
@pytest.mark.parametrize('rule', RULES)
def test_made_for_another_grid(rule):
    """The trained grid counts, not the one that the table is kept for."""
    for name in ROTATIONS:
        check(name, rule, 'larger', made_for=(2, 3))
        check(name, rule, 'larger', made_for=(5, 1))


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('name', SLOPES)
def test_slopes(name, case):
    """Slopes times sqrt(N0 / N), in the patches of the image itself."""
    size, ref, prefix, num_keep = CASES[case]
    grid = make_grid(size, prefix, num_keep, batch=2)
    sizes = {'heads': 4, 'head_dim': 3}
    encoding = create(name, size, prefix, ref_grid_size=ref, resolution='slopes', random=False, **sizes)
    q, k, v = make_qkv(grid, **sizes)
    factor = math.sqrt(ref[0] * ref[1] / (size[0] * size[1]))
    bias = factor * SLOPES[name].bias(4, size, **where(grid))
    assert_near(bias_of(encoding, grid), bias, 1e-14)
    compare(attend(encoding, q, k, v, grid), attention(q, k, v, bias=bias), {'q': q, 'k': k, 'v': v})


MUTANTS = {  # name, rule, case, attribute, replacement
    'highest and lowest exchanged': (
        'rope2d', 'ntk', 'larger', 'frequency_range', lambda self: (100 ** (4 / self.head_dim - 1), 1.)),
    'axes exchanged': (
        'rope2d', 'ntk', 'longer along y', 'rescaling', lambda self, grid: self.ref_grid_size[::-1]),
    'no temperature': ('rope2d', 'yarn', 'larger', 'logit_factor', lambda self, grid: None),
    'square root of the temperature': ('rope2d_mixed', 'yarn', 'larger', 'logit_factor', lambda self, grid: 1.069),
    'temperature of the area': (
        'rope2d_mixed', 'yarn', 'larger', 'stretches', lambda self, grid: [grid.num_patches / 6]),
    'everything rescaled': ('rope1d', 'ntk', 'larger', 'squeeze', lambda self, ratio, squares, turns: ratio),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    name, rule, case, *patch = MUTANTS[mutant]
    catches(lambda: check(name, rule, case), monkeypatch, timm_sape.get_encoding(name), *patch)


# --- properties ------------------------------------------------------------------------------------------------------

class OwnChannels(timm_sape.PositionEncoding):
    """The scale multiplies their product: this hook does not divide by it."""
    name = 'own_channels'

    def channels(self, q, k, x, grid, scale):
        return grid.pad_tokens(q[:, :, grid.num_prefix_tokens:, :3].cos()), k[..., :3].sin()


@pytest.mark.parametrize('symbolic', [False, True])
def test_logits_are_those_of_attention(symbolic):
    """With the factor of 'yarn', and other channels that the factor multiplies if it is a number."""
    rotation = create('rope2d', (2, 3), resolution='yarn', **SIZES)
    encodings = {'rope2d': rotation, 'own': OwnChannels(dim=24, num_heads=2, grid_size=(2, 3))}
    layer, grid = LayerEncodings(encodings, needs_position=True), Grid(4, 6, 1)
    q, k, v = make_qkv(grid, **SIZES)
    x = q.transpose(1, 2).flatten(2)
    factor = rotation.logit_factor(grid)
    position = Position(
        grid, rotation(x, grid=grid, hook='rotation'), logit_factor=torch.tensor(factor) if symbolic else None)
    if symbolic:
        rotation.logit_factor = lambda grid: None
    content, by_position = layer.logits(q, k, x, position, 0.3)
    assert_near((content + by_position).softmax(-1) @ v, layer(q, k, v, x, position, scale=0.3), 1e-12)


def table(name, rule, size, ref, **keywords):
    encoding = create(name, size, ref_grid_size=ref, resolution=rule, **SIZES, **keywords)
    return encoding(torch.zeros(1), grid=Grid(*size), hook='rotation')


def pairs_of(table):
    """[sin, cos] of each pair of channels t and t + d/2 or 2t and 2t + 1, `[N, 2, d]`."""
    return table.unflatten(-1, (2, -1))


def test_ntk_is_between_extrapolation_and_interpolation():
    """The fastest pair of each axis extrapolates, the slowest one is interpolated."""
    size, ref = (6, 9), (2, 3)
    ntk, far, near = (pairs_of(table('rope2d', rule, size, ref)) for rule in ('ntk', 'extrapolate', 'rescale'))
    for axis in (0, 3):  # pairs of x and of y
        fast, slow = slice(2 * axis, 2 * axis + 2), slice(2 * axis + 4, 2 * axis + 6)
        assert_near(ntk[..., fast], far[..., fast], 1e-14)
        assert_near(ntk[..., slow], near[..., slow], 1e-12)
        middle = slice(2 * axis + 2, 2 * axis + 4)
        assert min((ntk - other)[..., middle].abs().max() for other in (far, near)) > 0.01


def test_ramp_has_two_ends():
    size, ref = (6, 9), (2, 3)
    for ramp, rule in (((100, 101), 'rescale'), ((0, 1e-6), 'extrapolate')):
        for name in ROTATIONS:
            assert_near(table(name, 'yarn', size, ref, ramp=ramp), table(name, rule, size, ref), 1e-12)


def test_ntk_of_initial_frequencies_is_a_change_of_base():
    """A mixture of x and y with its initial values: all lengths are those of a series with the changed base."""
    size, ref = (4, 6), (2, 3)
    encoding = create('rope2d_mixed', size, ref_grid_size=ref, resolution='ntk', random=False, **SIZES)
    other = create('rope2d_mixed', size, random=False, **SIZES)
    with torch.no_grad():
        new = torch.tensor([reference.series(t, 3, 10, 2) / reference.series(t, 3, 10) for t in range(3)] * 2)
        other.freqs.copy_(encoding.freqs * new)
    # angles between patches; towards the origin the rule has half a patch more
    a, b = (e.angles(Grid(*size)) for e in (encoding, other))
    assert_near(a - a[:, :1], b - b[:, :1], 1e-6)  # initial values are drawn in float32


@pytest.mark.parametrize('rule', RULES)
def test_frequency_of_zero(rule):
    """It has a gradient, though its logarithm is infinite."""
    encoding = create('rope2d_mixed', (4, 6), ref_grid_size=(2, 3), resolution=rule, **SIZES)
    with torch.no_grad():
        encoding.freqs[:, 0, 2] = 0
    encoding.angles(Grid(4, 6)).square().sum().backward()
    assert encoding.freqs.grad.isfinite().all()


@pytest.mark.parametrize('rule', RULES)
def test_one_frequency(rule):
    """A head dim of 4 has a single frequency along each axis."""
    found = create('rope2d', (4, 6), ref_grid_size=(2, 3), resolution=rule, heads=2, head_dim=4)
    same = 'extrapolate' if rule == 'ntk' else 'rescale'
    expected = create('rope2d', (4, 6), ref_grid_size=(2, 3), resolution=same, heads=2, head_dim=4)
    assert_near(found.table, expected.table, 1e-12)


@pytest.mark.parametrize('name', SLOPES)
def test_slopes_of_squares_are_distances_rescaled(name):
    def bias(rule, size):
        encoding = create(name, size, ref_grid_size=(3, 3), resolution=rule, heads=4, head_dim=3, random=False)
        return bias_of(encoding, Grid(*size))

    assert_near(bias('slopes', (7, 7)), bias('rescale', (7, 7)), 1e-14)
    assert not torch.allclose(bias('slopes', (4, 7)), bias('rescale', (4, 7)))


@pytest.mark.parametrize('name', [n for n in timm_sape.list_encodings() if timm_sape.get_encoding(n).rules])
def test_trained_grid(name):
    """Every rule is the same there, bit for bit, and has no factor. The first rule needs no grid."""
    cls, size = timm_sape.get_encoding(name), (3, 5)
    grid = Grid(*size, 1)
    assert cls.rules[0] == timm_sape.encoding_keywords(name)['resolution'] == 'extrapolate'
    found = {}
    for rule in cls.rules:
        encoding = create(name, (2, 2), 1, ref_grid_size=size, resolution=rule, heads=4, head_dim=24)
        assert rule == 'extrapolate' or encoding.saved_grid_size() == size
        assert not encoding.scales_logits or encoding.logit_factor(grid) is None
        q, k, v = make_qkv(grid, heads=4, head_dim=24)
        if cls.overrides('embed'):
            given = dict.fromkeys(cls.asks_for, torch.zeros(1, 15, dtype=torch.long))
            found[rule] = encoding(make_tokens(grid, dim=96, batch=1), grid=grid, hook='embed', **given)
        else:
            found[rule] = attend(encoding, q, k, v, grid)
    assert all(torch.equal(out, found['extrapolate']) for out in found.values()) and len(found) == len(cls.rules)


# --- the factor on the logits ----------------------------------------------------------------------------------------

def scaling(ref, prefix):
    return LogitScaling(dim=24, num_heads=2, grid_size=(2, 2), num_prefix_tokens=prefix, ref_grid_size=ref)


@pytest.mark.parametrize('case', CASES)
def test_log_scaling(case):
    """q.k times log N / log N0, and every gradient. Patches that were dropped count."""
    size, ref, prefix, num_keep = CASES[case]
    grid = make_grid(size, prefix, num_keep, batch=2)
    q, k, v = make_qkv(grid, **SIZES)
    shared = SharedEncodings({'logit_scaling': scaling(ref, prefix)})
    position = shared.position(q, grid)
    layer = LayerEncodings(needs_position=True)
    factor = math.log(prefix + size[0] * size[1]) / math.log(prefix + ref[0] * ref[1])
    for given in (position, Position(grid, logit_factor=torch.tensor(factor, dtype=torch.float64))):
        actual = layer(q, k, v, q.transpose(1, 2).flatten(2), given, scale=12 ** -0.5)
        expected = attention(q, k, v, scale=factor / math.sqrt(12))
        compare(actual, expected, {'q': q, 'k': k, 'v': v})
    assert shared.act_on_blocks() and not SharedEncodings().act_on_blocks()
    assert given.to('meta').logit_factor.is_meta and position.to('meta').logit_factor == position.logit_factor


def test_log_scaling_of_few_tokens():
    """A single token has nothing to choose from; log 1 must not divide anything."""
    assert scaling((1, 1), 0).logit_factor(Grid(2, 4)) == pytest.approx(3)
    assert scaling((2, 4), 0).logit_factor(Grid(1, 1)) == pytest.approx(1 / 3)
    assert scaling((1, 1), 0).logit_factor(Grid(1, 1)) is None
    assert scaling((2, 4), 0).logit_factor(Grid(4, 2)) == 1


def test_biases_are_not_multiplied():
    """Factors multiply, and only q.k: not the bias, not the channels."""
    grid, prefix = make_grid((4, 6), 1), 1
    q, k, v = make_qkv(grid, **SIZES)
    x = torch.randn(1, 25, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    encodings = {
        'rope2d': create('rope2d', (4, 6), 1, ref_grid_size=(2, 3), resolution='yarn', **SIZES),
        'rpb': create('rpb', (4, 6), 1, **SIZES),
        'shaw': create('shaw', (4, 6), 1, **SIZES),
        'pape': create('pape', (4, 6), 1, num_parabolas=2, **SIZES),
    }
    layer = LayerEncodings(encodings, needs_position=True)
    shared = SharedEncodings({'logit_scaling': scaling((2, 3), prefix)})
    position = shared.position(x, grid)
    angle_of, factor = reference.rope2d('yarn', 12, (4, 6), (2, 3))
    factor *= math.log(25) / math.log(7)

    def expected():
        bias = sum(
            encodings[name](q, *rest, grid=grid, hook=hook)
            for name, hook, *rest in (('rpb', 'position_bias'), ('shaw', 'content_bias', k)))
        a, b = encodings['pape'](q, k, x, grid=grid, scale=1., hook='channels')
        return reference.attend(
            q, k, v, angle_of, factor, (4, 6), bias + a @ b.transpose(-2, -1), num_prefix_tokens=1)

    for fused in (True, False):
        actual = layer(q, k, v, x, position, scale=12 ** -0.5, fused=fused)
        compare(actual, expected(), {'q': q, 'k': k, 'v': v}, 1e-9)
    content, of_position = layer.logits(q, k, x, position, 12 ** -0.5)
    assert_near((content + of_position).softmax(-1) @ v, expected(), 1e-9)


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name, rule, known', [
    ('rope2d', 'slopes', "'extrapolate', 'rescale', 'ntk' or 'yarn'"),
    ('alibi2d', 'ntk', "'extrapolate', 'rescale' or 'slopes'"),
    ('sincos2d', 'yarn', "'extrapolate' or 'rescale'"),
    ('rope1d', None, "'extrapolate', 'rescale', 'ntk' or 'yarn'"),
])
def test_rules_that_an_encoding_lacks(name, rule, known):
    with pytest.raises(ValueError, match=f"'{name}': resolution must be {known}, got {rule!r}"):
        create(name, resolution=rule, heads=2, head_dim=12)


@pytest.mark.parametrize('ramp', [1, (1,), (2, 1), (1, 1), (-1, 2), ('a', 'b'), (1, float('nan')), None, (1, 2, 3)])
def test_wrong_ramps(ramp):
    with pytest.raises(ValueError, match=r"'rope2d': ramp must be two numbers of turns, \[low, high\] with 0 <= low"):
        create('rope2d', ramp=ramp, heads=2, head_dim=12)


def test_every_rule_is_in_the_table_of_encodings():
    """`timm-sape list` and the documents show the phrase."""
    for name in timm_sape.list_encodings():
        cls = timm_sape.get_encoding(name)
        assert all(f'`{rule}`' in cls.on_other_grids for rule in cls.rules[1:]), name
        assert ('resolution' in timm_sape.encoding_keywords(name)) == bool(cls.rules)
        assert issubclass(cls, FrequencyEncoding) == ('ntk' in cls.rules)
