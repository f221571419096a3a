"""sape2_q, sape2_k, sape2_qk: the distance of what patches count along their rows and columns."""
import copy
import itertools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import bias_checks
import content_checks
import timm_sape
from content_checks import CASES, SIZES, TRAINED_ON, ContentBiasTests, bias_of
from harness import assert_near, attend, catches, create, gradients, make_grid, make_model, make_qkv, where
from model_checks import check_model, check_neutral_start, initial_model, own_encodings
from reference_sape2 import sape2_bias
from timm_sape import Grid
from timm_sape.encodings import sape2
from timm_sape.ops import reference, torch_codes, using_backend

NAMES = ['sape2_k', 'sape2_q', 'sape2_qk']
HEADS, HEAD_DIM = SIZES['heads'], SIZES['head_dim']


def distances(p, squared=False):
    def mutant(codes):
        difference = codes.unsqueeze(-2) - codes.unsqueeze(-3)
        return difference.square().sum(-1) if squared else difference.abs().pow(p).sum(-1)
    return mutant


def in_raster_order(q, k, table_x, table_y, grid, codes=reference.axis_codes, **options):
    grid = Grid(*grid.size, grid.num_prefix_tokens, grid.keep_indices.sort().values)
    return codes(q, k, table_x, table_y, grid, **options)


def along_one_axis(*args, codes=reference.axis_codes, **options):
    codes_x, codes_y = codes(*args, **options)
    return codes_x, 0 * codes_y


CLASS = sape2.SemanticAwarePositionEncoding
ANOTHER_GRID = TRAINED_ON['3x5 and a prefix token, trained on 6x2']
ATTENTION = {**CASES, **TRAINED_ON}
MUTANTS_IN_ATTENTION = {  # kind, arguments of `check_attention`, (owner, attribute, replacement)
    'prefix sum': ('sape2_k', CASES['3x5'], (torch_codes, 'suffix_sum', content_checks.from_the_start)),
    'trained grid ignored': ('sape2_q', ANOTHER_GRID, (CLASS, 'rescaling', content_checks.never_rescaled)),
    'gain forgotten': ('sape2_k', CASES['3x5'], (CLASS, '_gain', lambda self, like: like.new_ones(1))),
    'dropped patches counted': (
        'sape2_k', CASES['3x5, 8 kept'], (reference, '_is_kept', content_checks.no_longer_kept)),
}


class TestSape2(ContentBiasTests):
    kinds = {name: (name, {'bias_scale': 'learned'}) for name in NAMES}
    mutants = {  # kind, arguments of `check`, (owner, attribute, replacement)
        'prefix sum': ('sape2_k', CASES['3x5'], (reference, 'suffix_sum', content_checks.from_the_start)),
        'sum without the patch itself': (
            'sape2_q', CASES['3x5'], (reference, 'suffix_sum', content_checks.without_itself)),
        'one cell too far': (
            'sape2_k', CASES['3x5'], (reference, 'interpolate', content_checks.interpolating(shift=1))),
        'half the gradient of the positions': (
            'sape2_k', CASES['3x5'], (reference, 'interpolate', content_checks.interpolating(slope=False))),
        'q and k swapped': (
            'sape2_k', CASES['3x5'], (reference, 'axis_codes', content_checks.swapping(reference.axis_codes))),
        'q and k swapped, mode qk': (
            'sape2_qk', CASES['3x5'], (reference, 'axis_codes', content_checks.swapping(reference.axis_codes))),
        'y not counted': ('sape2_k', CASES['3x5'], (reference, 'axis_codes', along_one_axis)),
        'squared distance': ('sape2_k', CASES['3x5'], (reference, 'pairwise_distance', distances(2, squared=True))),
        'city-block distance': ('sape2_k', CASES['3x5'], (reference, 'pairwise_distance', distances(1))),
        'prefix behind': ('sape2_k', CASES['4x4'], bias_checks.PREFIX_BEHIND),
        'no prefix rule': ('sape2_k', CASES['4x4'], (
            Grid, 'pad_prefix', lambda self, bias: F.pad(bias, (self.num_prefix_tokens, 0) * 2, value=1))),
        'kept patches in raster order': ('sape2_k', CASES['3x5, 8 kept'], (reference, 'axis_codes', in_raster_order)),
        'dropped patches counted': (
            'sape2_k', CASES['3x5, 8 kept'], (reference, '_is_kept', content_checks.no_longer_kept)),
        'trained grid ignored': ('sape2_k', ANOTHER_GRID, (CLASS, 'rescaling', content_checks.never_rescaled)),
        'gain forgotten': ('sape2_k', CASES['3x5'], (CLASS, '_gain', lambda self, like: like.new_ones(1))),
    }

    def expected_bias(self, encoding, q, k, grid):
        bias = sape2_bias(
            q, k, encoding.table_x, encoding.table_y, grid.size, mode=encoding.mode,
            ref_grid_size=encoding.ref_grid_size, **where(grid))
        gain = [encoding.bias_scale] * HEADS if encoding.gain is None else encoding.gain
        return content_checks.gate_of(encoding) * torch.stack([gain[h] * bias[:, h] for h in range(HEADS)], dim=1)

    def check_attention(self, kind, *case, **keywords):
        content_checks.check_attention(self.maker(kind), self.expected_bias, *case, **keywords)

    @pytest.mark.parametrize('npos', [2, 3])
    def test_positions_beyond_the_last_count_as_the_last(self, npos):
        self.check('sape2_k', (3, 5), 1, npos=npos)
        self.check('sape2_q', (1, 7), 0, 5, (2, 9), npos=npos)

    @pytest.mark.one_of(3, all_kinds=False)
    @pytest.mark.parametrize('case', [
        '3x5', '3x5 and 5 prefix tokens', '1x7', '7x1', '1x1', '3x5, 8 kept', '3x5 trained on 6x2',
        '4x4 trained on 3x5, 6 kept'])
    @pytest.mark.parametrize('backend', ['torch', 'cpp'])
    def test_attention(self, backend, kind, case):
        """A layer has a faster way than to add the bias up."""
        with using_backend(backend):
            self.check_attention(kind, *ATTENTION[case])

    @pytest.mark.parametrize('keywords', [{}, {'bias_scale': -0.7}, {'npos': 3}], ids=str)
    @pytest.mark.parametrize('case', ['3x5 and 5 prefix tokens', '3x5, 8 kept'])
    def test_attention_with_a_gate(self, case, keywords):
        self.check_attention('sape2_k', *CASES[case], gated=True, **keywords)

    @pytest.mark.one_of(3)
    @pytest.mark.parametrize('attention_mutant', MUTANTS_IN_ATTENTION)
    def test_mutants_are_caught_in_attention(self, attention_mutant, monkeypatch):
        kind, case, patch = MUTANTS_IN_ATTENTION[attention_mutant]
        with using_backend('torch'):  # whose sums are in Python
            catches(lambda: self.check_attention(kind, *case), monkeypatch, *patch)

    def test_a_forgotten_gate_is_caught_in_attention(self, monkeypatch):
        with using_backend('torch'):
            catches(
                lambda: self.check_attention('sape2_k', *CASES['3x5'], gated=True), monkeypatch, CLASS, 'gated',
                lambda self, x: x)

    def test_duplicated_patches(self, kind):
        """Patches that cannot be told apart have no distance."""
        bias = content_checks.check_duplicated_patches(self.maker(kind), self.expected_bias)
        assert (bias[:, :, 1, 2, 3, 2] == 0).all()

    def test_autocast(self, kind):
        content_checks.check_autocast(self.maker(kind))


# --- equations -------------------------------------------------------------------------------------------------------

def test_by_hand():
    """One row of three patches, q of zero and so gates of 1/2, one channel, and tables in which e[p] is p and p + 5.

    The counts along x are 3/2, 1 and 1/2. Those along y are 1/2.
    """
    encoding = create('sape2_k', (1, 3), heads=1, head_dim=1, random=False)
    with torch.no_grad():
        encoding.table_x[:, 0] = torch.arange(4)
        encoding.table_y[:, 0] = torch.arange(5, 7)
    q, k = torch.zeros(1, 1, 3, 1).double(), torch.tensor([2., 3., -4.]).double().view(1, 1, 3, 1)
    apart = torch.tensor([[0., 1, 6], [1, 0, 7], [6, 7, 0]]).double()
    expected = apart * (1.5 ** 2 + 1 + 0.5 ** 2) ** 0.5 + apart * 5.5
    assert_near(encoding(q, k, grid=Grid(1, 3), hook='content_bias')[0, 0], expected, 1e-14)


HALF = HEAD_DIM ** -0.5


@pytest.mark.parametrize('keywords, gate_scale, bias_scale', [
    ({}, HALF, 1.0),
    ({'preset': 'appendix'}, HALF, 1.0),
    ({'preset': 'equations'}, 1.0, HALF),
    ({'preset': 'equations', 'gate_scale': 'head_dim'}, HALF, HALF),
    ({'preset': 'equations', 'bias_scale': 'one'}, 1.0, 1.0),
    ({'gate_scale': 'one'}, 1.0, 1.0),
    ({'gate_scale': 0.3}, 0.3, 1.0),
    ({'gate_scale': 2}, 2.0, 1.0),
    ({'bias_scale': 'head_dim'}, HALF, HALF),
    ({'bias_scale': -2.5}, HALF, -2.5),
    ({'bias_scale': 0}, HALF, 0.0),
    ({'bias_scale': 'learned'}, HALF, 1.0),
    ({'bias_scale': 'learned', 'preset': 'equations'}, 1.0, HALF),
    ({'bias_scale': 'learned', 'bias_init': -0.4}, HALF, -0.4),
])
@pytest.mark.parametrize('name', NAMES)
def test_scales(name, keywords, gate_scale, bias_scale):
    """The two scales that the equations and the appendix disagree about."""
    encoding = create(name, (2, 3), **SIZES, table_std=1.0, random=False, **keywords)
    learned = keywords.get('bias_scale') == 'learned'
    assert set(dict(encoding.named_parameters())) == {'table_x', 'table_y', *(['gain'] if learned else [])}
    assert encoding.no_weight_decay() == set(dict(encoding.named_parameters()))
    grid = make_grid((2, 3))
    q, k, _ = make_qkv(grid, **SIZES)
    bias = sape2_bias(
        q, k, encoding.table_x, encoding.table_y, (2, 3), mode=name.removeprefix('sape2_'), gate_scale=gate_scale)
    assert_near(bias_of(encoding, q, k, grid), bias_scale * bias, 1e-10)


# --- images that are hard to compute ---------------------------------------------------------------------------------

@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('name', NAMES)
def test_constant_image(name, dtype):
    """All patches alike: no bias, and a gradient of zero rather than of rounding noise or NaN."""
    torch.manual_seed(0)
    for (height, width), dim in itertools.product(((3, 5), (1, 7), (7, 1), (6, 7)), (4, 32)):
        encoding = create(
            name, (height, width), heads=2, head_dim=dim, dtype=dtype, table_std=1.0, random=False)
        q, k = (
            torch.randn(3, 2, 1, dim, dtype=dtype).repeat(1, 1, 1 + height * width, 1).requires_grad_()
            for _ in range(2))
        bias = bias_of(encoding, q, k, Grid(height, width, 1))
        assert (bias == 0).all()
        for grad in gradients(bias, [q, k, *encoding.parameters()]):
            assert (grad == 0).all()


@pytest.mark.parametrize('backend', ['reference', 'torch'])
def test_factor_of_the_bias_in_half(backend):
    """It keeps the digits that bfloat16 lacks. The output is the probabilities themselves."""
    sizes, grid = {'heads': 2, 'head_dim': 16}, make_grid((3, 5), 1)
    encoding = create('sape2_k', (3, 5), 1, bias_scale=1.003, dtype=torch.float32, **sizes)
    q, k, _ = make_qkv(grid, **sizes, dtype=torch.bfloat16)
    v = torch.eye(16, dtype=torch.bfloat16).expand_as(q)
    expected = attend(copy.deepcopy(encoding).double(), q.double(), k.double(), v.double(), grid)
    with using_backend(backend):
        torch.testing.assert_close(attend(encoding, q, k, v, grid).double(), expected, rtol=0.01, atol=0)


# --- properties ------------------------------------------------------------------------------------------------------

def permuted(x, order, axis):
    """Rows (axis 0) or columns (axis 1) of a 4 x 5 image in another order, `[B, h, 20, d]`."""
    return x.unflatten(2, (4, 5)).index_select(2 + axis, order).flatten(2, 3)


@pytest.mark.parametrize('zeroed, axis', [('table_y', 0), ('table_x', 1)])
@pytest.mark.parametrize('name', NAMES)
def test_an_axis_is_blind_to_the_other(name, zeroed, axis):
    """The x bias alone moves along with permuted rows, and does not with permuted columns; the y bias likewise."""
    grid, encoding = make_grid((4, 5)), TestSape2().new(name, (4, 5))
    nn.init.zeros_(getattr(encoding, zeroed))
    q, k, _ = make_qkv(grid, **SIZES)
    bias = bias_of(encoding, q, k, grid)
    for moved, blind in ((axis, True), (1 - axis, False)):
        order = torch.tensor([2, 0, 3, 1] if moved == 0 else [1, 4, 0, 3, 2])
        actual = bias_of(encoding, permuted(q, order, moved), permuted(k, order, moved), grid)
        expected = permuted(permuted(bias, order, moved).mT, order, moved).mT
        assert torch.allclose(actual, expected, atol=1e-9) == blind


@pytest.mark.parametrize('name', NAMES)
def test_is_a_distance(name):
    grid = make_grid((3, 5), num_prefix_tokens=2, num_keep=9)
    encoding = TestSape2().new(name, (3, 5), 2, bias_scale='one')
    bias = bias_of(encoding, *make_qkv(grid, **SIZES)[:2], grid)
    assert_near(bias, bias.mT, 1e-14)
    assert (bias >= 0).all()
    assert (bias.diagonal(dim1=2, dim2=3) == 0).all()
    assert (bias[:, :, :2] == 0).all() and (bias[..., :2] == 0).all()
    between = bias[:, :, 2:, 2:]
    assert (between[:, :, ~torch.eye(9, dtype=torch.bool)] > 0).all()
    assert (between.unsqueeze(-1) + between.unsqueeze(2) >= between.unsqueeze(3) - 1e-12).all()  # triangles


@pytest.mark.parametrize('zeroed', ['table_x', 'table_y'])
def test_codes_of_q_and_k_are_concatenated(zeroed):
    """So along one axis their squared distances add."""
    grid = make_grid((3, 5), 1)
    q, k, _ = make_qkv(grid, **SIZES)
    square = {}
    for name in NAMES:
        encoding = TestSape2().new(name, (3, 5), 1, bias_scale='one')
        nn.init.zeros_(getattr(encoding, zeroed))
        square[name] = bias_of(encoding, q, k, grid).square()
    assert_near(square['sape2_qk'], square['sape2_q'] + square['sape2_k'], 1e-13)
    assert not torch.allclose(square['sape2_q'], square['sape2_k'])


@pytest.mark.parametrize('name', NAMES)
def test_keeps_its_scale_on_other_grids(name):
    content_checks.check_scale_on_other_grids(name, tolerance=0.04, growth=1.3)


# --- initial values --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords, ref_grid_size, npos_y, npos_x', [
    ({}, None, 4, 6),
    ({}, (7, 2), 8, 3),
    ({'npos': 9}, None, 9, 9),
    ({'npos': 9}, (7, 2), 9, 9),
])
def test_table_sizes(keywords, ref_grid_size, npos_y, npos_x):
    """By default one row for each count: a row of W patches can be counted to W."""
    encoding = create('sape2_k', (3, 5), ref_grid_size=ref_grid_size, **SIZES, **keywords)
    assert encoding.table_y.shape == (npos_y, HEAD_DIM)
    assert encoding.table_x.shape == (npos_x, HEAD_DIM)


@pytest.mark.parametrize('again', [False, True])
@pytest.mark.parametrize('name', NAMES)
def test_initial_values(name, again):
    encodings = own_encodings(initial_model(name, again, img_size=160, patch_size=16), name)
    assert all(encoding.gain is None for encoding in encodings)
    tables = [table for encoding in encodings for table in (encoding.table_x, encoding.table_y)]
    assert [list(table.shape) for table in tables] == [[11, 16]] * 4
    values = torch.stack(tables)
    assert values.std().item() == pytest.approx(0.02, rel=0.1)
    assert abs(values.mean().item()) < 0.003
    assert values.abs().max() < 0.1
    assert len({table[0, 0].item() for table in tables}) == 4  # drawn one by one


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64])
def test_initial_values_in_other_dtypes(dtype):
    """Drawn in float32: in half precision some of what timm's function draws is infinite."""
    encoding = timm_sape.create_encoding('sape2_k', dim=256, num_heads=4, grid_size=(40, 40), dtype=dtype)
    for table in (encoding.table_x, encoding.table_y):
        assert table.dtype == dtype and table.double().std().item() == pytest.approx(0.02, rel=0.05)
        assert table.abs().max() < 0.12


@pytest.mark.parametrize('std', [1e-6, 0.5, 3.0])
def test_initial_tables(std):
    encoding = timm_sape.create_encoding('sape2_k', dim=256, num_heads=2, grid_size=(40, 40), table_std=std)
    values = torch.cat([encoding.table_x, encoding.table_y])
    assert values.std().item() == pytest.approx(std, rel=0.05) and values.abs().max() < 6 * std


def test_initial_values_by_keyword():
    keywords = {'table_std': 0.5, 'bias_scale': 'learned', 'bias_init': 0.25}
    model = make_model('sape2_k', img_size=160, patch_size=16, pos_enc_kwargs={'sape2_k': keywords})
    encodings = own_encodings(model, 'sape2_k')
    values = torch.stack([table for encoding in encodings for table in (encoding.table_x, encoding.table_y)])
    assert values.std().item() == pytest.approx(0.5, rel=0.1)
    assert all(torch.equal(encoding.gain, torch.full((4,), 0.25)) for encoding in encodings)
    encodings[0].reset_parameters()
    assert encodings[0].table_x.std().item() == pytest.approx(0.5, rel=0.2)


# --- models ----------------------------------------------------------------------------------------------------------

KEYWORDS = [{}, {'bias_scale': 'learned', 'npos': 3}]


@pytest.mark.one_of(2)
@pytest.mark.parametrize('composition', ['{}', 'ape+{}', 'rope2d+{}'])
@pytest.mark.parametrize('name, keywords', [
    ('sape2_k', {}), ('sape2_q', {}), ('sape2_qk', {}), ('sape2_k', KEYWORDS[1])], ids=str)
def test_model(name, keywords, composition):
    check_model(name, composition, keywords, least=5e-3)


@pytest.mark.parametrize('name', NAMES)
def test_neutral_start(name):
    check_neutral_start(name, KEYWORDS[1])


@pytest.mark.parametrize('name', NAMES)
def test_where_it_acts(name):
    cls = timm_sape.get_encoding(name)
    assert {hook for hook in (*cls.HOOKS, 'attend') if cls.overrides(hook)} == {'content_bias', 'attend'}


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name, keywords, text', [
    ('sape2_k', {'preset': 'paper'}, "unknown preset 'paper'.*'appendix', 'equations'"),
    ('sape2_q', {'gate_scale': 'learned'}, "sape2_q.*gate_scale must be 'head_dim', 'one' or a number, got 'learned'"),
    ('sape2_k', {'gate_scale': [1.0]}, r'gate_scale must be .*, got \[1.0\]'),
    ('sape2_k', {'gate_scale': True}, 'gate_scale must be .*, got True'),
    ('sape2_k', {'gate_scale': float('nan')}, 'gate_scale must be .*, got nan'),
    ('sape2_k', {'bias_scale': 'two'}, "bias_scale must be 'head_dim', 'one', 'learned' or a number, got 'two'"),
    ('sape2_k', {'bias_scale': float('inf')}, 'bias_scale must be .*, got inf'),
    ('sape2_k', {'bias_scale': 1e39}, r'bias_scale must be .*, got 1e\+39'),  # infinite in float32
    ('sape2_k', {'bias_init': 1.0}, "bias_init is the initial value of a learned gain. Add bias_scale='learned'"),
    ('sape2_k', {'bias_scale': 'learned', 'bias_init': 'one'}, "bias_init must be a number, got 'one'"),
    ('sape2_k', {'bias_scale': 2.0, 'bias_init': 1.0}, 'bias_init is the initial value of a learned gain'),
    ('sape2_k', {'npos': 1}, 'npos to be an integer of 2 or more, got 1'),
    ('sape2_k', {'npos': 7.0}, 'npos to be an integer of 2 or more, got 7.0'),
    ('sape2_k', {'npos': True}, 'npos to be an integer of 2 or more, got True'),
    ('sape2_k', {'table_std': 0}, 'positive table_std, got 0'),
    ('sape2_k', {'table_std': -0.02}, 'positive table_std, got -0.02'),
    ('sape2_k', {'table_std': 'small'}, "positive table_std, got 'small'"),
])
def test_wrong_keywords(name, keywords, text):
    with pytest.raises(ValueError, match=text):
        create(name, **SIZES, **keywords)


@pytest.mark.parametrize('other', [{'npos': 3}, {'bias_scale': 'learned'}], ids=str)
def test_weights_of_other_keywords_do_not_fit(other):
    state = create('sape2_k', **SIZES).state_dict()
    with pytest.raises(RuntimeError):
        create('sape2_k', **SIZES, **other).load_state_dict(state)


def test_default():
    assert timm_sape.get_encoding('sape2') is timm_sape.get_encoding('sape2_k')
