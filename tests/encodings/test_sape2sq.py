"""sape2sq_q, sape2sq_k: squared distances of SaPE2's codes, as more channels of q and k."""
import copy

import pytest
import torch
import torch.nn as nn

import content_checks
import timm_sape
from bias_checks import SCALE
from breakages import prefix_behind
from content_checks import CASES, SIZES, TRAINED_ON, ContentBiasTests, bias_of
from harness import (
    assert_near,
    attend,
    catches,
    compare,
    create,
    gradients,
    make_flat_regions,
    make_grid,
    make_qkv,
    make_tokens,
    where,
)
from loops import attention
from model_checks import check_model, check_neutral_start, initial_model, own_encodings
from reference_sape2sq import sape2sq_bias
from timm_sape import Grid, ops
from timm_sape.encodings import sape2sq

NAMES = ['sape2sq_k', 'sape2sq_q']
HEADS, HEAD_DIM = SIZES['heads'], SIZES['head_dim']


def channels_of(encoding, q, k, grid):
    return encoding(q, k, make_tokens(grid), grid=grid, scale=SCALE, hook='channels')


def along_one_axis(*args, codes=ops.axis_codes, **options):
    codes_x, codes_y = codes(*args, **options)
    return codes_x, 0 * codes_y


def halved_gradient(self, gain, gated=timm_sape.PositionEncoding.gated):
    return gated(self, 0.5 * (gain + gain.detach()))


CLASS = sape2sq.SquaredSemanticAwareEncoding


class TestSape2Sq(ContentBiasTests):
    kinds = {name: (name, {'bias_scale': 'learned'}) for name in NAMES}
    mutants = {  # kind, arguments of `check`, (owner, attribute, replacement)
        'prefix behind': ('sape2sq_k', CASES['3x5 and 5 prefix tokens'], (Grid, 'pad_tokens', prefix_behind)),
        'one axis': ('sape2sq_k', CASES['3x5'], (ops, 'axis_codes', along_one_axis)),
        'q and k swapped': ('sape2sq_q', CASES['3x5'], (ops, 'axis_codes', content_checks.swapping(ops.axis_codes))),
        'trained grid ignored': (
            'sape2sq_k', TRAINED_ON['3x5 trained on 6x2'], (CLASS, 'rescaling', content_checks.never_rescaled)),
        'half the gradient of the gain': ('sape2sq_k', CASES['3x5'], (CLASS, 'gated', halved_gradient)),
    }

    def expected_bias(self, encoding, q, k, grid):
        bias = sape2sq_bias(
            q, k, encoding.table_x, encoding.table_y, grid.size, mode=encoding.mode, gate_scale=HEAD_DIM ** -0.5,
            ref_grid_size=encoding.ref_grid_size, **where(grid))
        gain = [encoding.bias_scale] * HEADS if encoding.gain is None else encoding.gain
        return content_checks.gate_of(encoding) * torch.stack([gain[h] * bias[:, h] for h in range(HEADS)], dim=1)

    @pytest.mark.parametrize('keywords', [
        {'bias_scale': 'one'}, {'bias_scale': -0.7}, {'bias_scale': 0}, {'npos': 2}], ids=str)
    def test_keywords(self, kind, keywords):
        self.check(kind, *CASES['3x5, 8 kept'], **keywords)

    @pytest.mark.parametrize('preset, gate_scale, bias_scale', [
        ('appendix', HEAD_DIM ** -0.5, 1), ('equations', 1, HEAD_DIM ** -0.5)])
    def test_presets(self, kind, preset, gate_scale, bias_scale):
        encoding, grid = self.new(kind, (3, 5), preset=preset, bias_scale=None), make_grid((3, 5))
        q, k, _ = make_qkv(grid, **SIZES)
        bias = sape2sq_bias(
            q, k, encoding.table_x, encoding.table_y, (3, 5), mode=encoding.mode, gate_scale=gate_scale)
        assert_near(bias_of(encoding, q, k, grid), bias_scale * bias, 1e-10)

    @pytest.mark.one_of(2)
    @pytest.mark.parametrize('case', [case for case in CASES if case != '1x1 alone'])  # nothing to choose from
    @pytest.mark.parametrize('fused', [True, False])
    def test_attention(self, fused, kind, case):
        """What any kernel computes of the channels is attention with the bias added to its logits."""
        grid = make_grid(*CASES[case])
        encoding = self.new(kind, CASES[case][0], grid.num_prefix_tokens)
        encoding.gain.data.mul_(0.03)  # or all attention would go to one token
        q, k, v = make_qkv(grid, **SIZES)
        a, b = channels_of(encoding, q, k, grid)
        assert a.shape == b.shape == (*q.shape[:3], sum(grid.size) + 2)
        assert (a[:, :, :grid.num_prefix_tokens] == 0).all() and (b[:, :, :grid.num_prefix_tokens] == 0).all()
        bias = self.expected_bias(encoding, q, k, grid)
        expected = attention(q, k, v, scale=SCALE, bias=bias)
        inputs = {'q': q, 'k': k, 'v': v, **dict(encoding.named_parameters())}
        compare(attend(encoding, q, k, v, grid, scale=SCALE, fused=fused), expected, inputs)

    @pytest.mark.parametrize('gain', [[2.5, -1.5], [0.0, 0.0], [1e-5, -1e-9], [0.0, 30.0]])
    def test_any_gain(self, gain):
        """It may have either sign and pass through zero, where its gradient is as elsewhere; a gate likewise."""
        grid = make_grid((3, 5), 1)
        q, k, _ = make_qkv(grid, **SIZES)
        for gate in (1.0, 0.0, -0.4):
            encoding = self.new('sape2sq_k', (3, 5), 1, gated=True)
            with torch.no_grad():
                encoding.gain.copy_(torch.tensor(gain))
                encoding.gate.weight.fill_(gate / 100)
            content_checks.check_bias(encoding, self.expected_bias, grid, (q, k))
            assert gate == 0 or gradients(bias_of(encoding, q, k, grid), [encoding.gain])[0].abs().min() > 0

    def test_a_forgotten_gate_is_caught(self, monkeypatch):
        catches(
            lambda: self.check('sape2sq_k', *CASES['3x5'], gated=True), monkeypatch, CLASS, 'gated',
            lambda self, gain: gain)

    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    def test_half(self, dtype):
        """Distances within a region are small differences of large products."""
        assert low_precision_error(dtype) < 1


def new(name, *args, **keywords):
    return TestSape2Sq().new(name, *args, **keywords)


# --- precision -------------------------------------------------------------------------------------------------------

def low_precision_error(dtype):
    """The worst error of the logits, where 1 is what rounding the codes must cost.

    The distance of two codes of size R, rounded by eps, is off by about eps*R, the square of a distance r by eps*R*r:
    far less than eps*R^2 for patches that are alike. The sums are in float32, as those of every kernel.
    """
    grid = make_grid((8, 8))
    q, k = (x.detach() for x in make_flat_regions(grid, **SIZES, dtype=dtype))
    encoding = new('sape2sq_k', (8, 8), dtype=torch.float32, bias_scale='one')
    with torch.no_grad():
        expected = bias_of(copy.deepcopy(encoding).double(), q.double(), k.double(), grid)
        a, b = channels_of(encoding, q, k, grid)
    assert a.dtype == b.dtype == dtype
    error = (SCALE * (a.float() @ b.float().mT) - expected).abs()
    eps, largest = torch.finfo(dtype).eps, expected.max()
    assert largest > 20 and (expected < 1e-4 * largest).sum() > 4 * 2 * 64  # not only the diagonal
    return (error / (eps * (expected.clamp(min=0) * largest).sqrt() + eps ** 2 * largest)).max().item()


def norms_in_one_piece(self, *args, channels=CLASS.channels, **options):
    a, b = channels(self, *args, **options)
    if a.dtype == torch.bfloat16:
        a[..., -3], b[..., -1] = 0, 0
    return a, b


@pytest.mark.parametrize('patch', [
    (sape2sq, '_rounded', lambda x, dtype: x),
    (CLASS, 'channels', norms_in_one_piece),
], ids=['norms of other codes', 'norms in one piece'])
def test_half_needs_care(patch, monkeypatch):
    """Negative controls of the test above."""
    monkeypatch.setattr(*patch)
    assert low_precision_error(torch.bfloat16) > 10


def test_codes_are_centered(monkeypatch):
    """What all codes have in common costs no digits."""
    axis_codes = ops.axis_codes
    monkeypatch.setattr(ops, 'axis_codes', lambda *args, **kw: [c + 50 for c in axis_codes(*args, **kw)])
    assert low_precision_error(torch.bfloat16) < 1
    monkeypatch.setattr(torch.Tensor, 'mean', lambda self, dim, keepdim: torch.zeros_like(self[..., :1, :]))
    assert low_precision_error(torch.bfloat16) > 10


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_identical_patches_have_no_bias(dtype):
    """In half precision too: what rounding leaves is left on both sides."""
    grid = make_grid((4, 4))
    q, k, _ = (
        content_checks.with_rows(x.to(dtype), (4, 4), [0, 1, 1, 1]).detach() for x in make_qkv(grid, **SIZES))
    encoding = new('sape2sq_k', (4, 4), dtype=torch.float32, bias_scale='one')
    nn.init.zeros_(encoding.table_y)  # rows 1 to 3 are the same along x
    bias = bias_of(encoding, q.float(), k.float(), grid)
    a, b = channels_of(encoding, q, k, grid)
    low = (SCALE * (a.float() @ b.float().mT)).unflatten(3, (4, 4)).unflatten(2, (4, 4))
    assert bias.max() > 10
    assert low[:, :, 1, :, 2].diagonal(dim1=2, dim2=3).abs().max() < 1e-3
    assert low[:, :, 1, 0, 3, 1].abs().min() > 0.1


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_attention_in_half(dtype, name):
    """A layer with channels against one in float64 from the same numbers, fused and not."""
    grid = make_grid((8, 8))
    q, k = (x.detach() for x in make_flat_regions(grid, **SIZES, dtype=dtype))
    encoding = new(name, (8, 8), dtype=torch.float32, bias_scale=-1.0)
    v = torch.randn(q.shape, generator=torch.Generator().manual_seed(8)).to(dtype)
    bias = bias_of(copy.deepcopy(encoding).double(), q.double(), k.double(), grid)
    expected = ops.attend(q.double(), k.double(), v.double(), bias, scale=0.25)
    a, b = encoding(q, k, make_tokens(grid), grid=grid, scale=0.25, hook='channels')
    assert a.shape[-1] == b.shape[-1] == 8 + 8 + 4
    for fused in (True, False):
        actual = attend(encoding, q, k, v, grid, scale=0.25, fused=fused)
        assert actual.dtype == dtype
        assert_near(actual, expected, 0.03)


# --- properties ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', NAMES)
def test_is_a_squared_distance(name):
    """Of both axes together: between half of the square of SaPE2's bias, which adds two distances, and all of it."""
    grid = make_grid((3, 5), 2, 9)
    qk = make_qkv(grid, **SIZES)[:2]
    encoding = new(name, (3, 5), 2, bias_scale='one')
    bias = bias_of(encoding, *qk, grid)
    assert_near(bias, bias.mT, 1e-13)
    assert bias.diagonal(dim1=2, dim2=3).abs().max() < 1e-12 * bias.max()
    between = bias[:, :, 2:, 2:][:, :, ~torch.eye(9, dtype=torch.bool)]
    assert (between > 0).all()
    plain = create(name.replace('sq', ''), (3, 5), 2, **SIZES, bias_scale='one')
    plain.load_state_dict(encoding.state_dict())  # the same parameters
    distance = bias_of(plain, *qk, grid)[:, :, 2:, 2:][:, :, ~torch.eye(9, dtype=torch.bool)]
    assert (distance.square() >= between - 1e-12).all() and (between >= distance.square() / 2 - 1e-12).all()


@pytest.mark.parametrize('name', NAMES)
def test_keeps_its_scale_on_other_grids(name):
    content_checks.check_scale_on_other_grids(name, tolerance=0.08, growth=1.7)


# --- initial values --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
@pytest.mark.parametrize('name', NAMES)
def test_initial_values(name, again):
    """As SaPE2: tables of W + 1 and H + 1 rows, .02 wide."""
    model = initial_model(name, again=False, img_size=(24, 40))
    if again:
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        model.init_weights()
    values = []
    for encoding in own_encodings(model, name):
        assert encoding.table_x.shape == (6, 16) and encoding.table_y.shape == (4, 16) and encoding.gain is None
        assert encoding.bias_scale == 1 and encoding.gate_scale == 0.25
        values += [encoding.table_x.flatten(), encoding.table_y.flatten()]
    assert torch.cat(values).std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize('name', NAMES)
def test_initial_gain(name):
    keywords = {name: {'bias_scale': 'learned', 'bias_init': 0.25}}
    for encoding in own_encodings(initial_model(name, again=False, pos_enc_kwargs=keywords), name):
        assert torch.equal(encoding.gain, torch.full((4,), 0.25))


# --- models ----------------------------------------------------------------------------------------------------------

SMALL = {'bias_scale': 0.1}  # squares of large codes are large, and bfloat16 would show the rounding of q and k


@pytest.mark.one_of(2)
@pytest.mark.parametrize('composition', ['{}', 'ape+{}', 'rope2d+{}'])
@pytest.mark.parametrize('name', NAMES)
def test_model(name, composition):
    check_model(name, composition, SMALL, least=5e-3)


@pytest.mark.parametrize('keywords', [{}, {'bias_scale': 'learned', 'npos': 3}], ids=str)
@pytest.mark.parametrize('name', NAMES)
def test_neutral_start(name, keywords):
    check_neutral_start(name, keywords)


@pytest.mark.parametrize('name', NAMES)
def test_where_it_acts(name):
    """On channels alone, so that attention stays fused."""
    cls = timm_sape.get_encoding(name)
    assert {hook for hook in (*cls.HOOKS, 'attend') if cls.overrides(hook)} == {'channels'}


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name, keywords, text', [
    ('sape2sq_k', {'preset': 'paper'}, "'sape2sq_k': unknown preset 'paper'"),
    ('sape2sq_q', {'gate_scale': 'learned'}, "'sape2sq_q': gate_scale must be 'head_dim', 'one' or a number"),
    ('sape2sq_k', {'bias_scale': float('nan')}, "'sape2sq_k': bias_scale must be .*, got nan"),
    ('sape2sq_k', {'npos': True}, "'sape2sq_k' needs npos to be an integer of 2 or more, got True"),
    ('sape2sq_q', {'table_std': 0}, "'sape2sq_q' needs a positive table_std, got 0"),
    ('sape2sq_k', {'bias_scale': 1, 'bias_init': 1}, "'sape2sq_k': bias_init is the initial value"),
])
def test_wrong_keywords(name, keywords, text):
    with pytest.raises(ValueError, match=text):
        create(name, **SIZES, **keywords)
