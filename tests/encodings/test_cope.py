"""cope: what a patch counts along the raster, to its end or between two patches, looked up in a table."""
import math

import pytest
import torch

import bias_checks
import content_checks
from content_checks import CASES, SIZES, TRAINED_ON, ContentBiasTests, bias_of
from harness import assert_near, create, make_grid, make_qkv, where
from model_checks import check_model, check_neutral_as_built, initial_model, own_encodings
from reference_cope import cope_between, cope_bias
from timm_sape import Grid, ops
from timm_sape.encodings import cope
from timm_sape.ops import torch_contextual

DIRECTIONS = ['literal', 'between']
NPOS = 7  # fewer than there are patches, so that the last one is reached


def along_columns(q, k, table, grid, contextual_bias=ops.contextual_bias, **options):
    """`contextual_bias` of patches that are numbered column by column."""
    order = torch.arange(grid.num_patches).view(grid.size).T.flatten()
    bias = contextual_bias(q[:, :, order], k[:, :, order], table, Grid(grid.width, grid.height), **options)
    return bias[:, :, order.argsort()][..., order.argsort()]


def without(keyword, contextual_bias=ops.contextual_bias):
    return lambda *args, **options: contextual_bias(*args, **{**options, keyword: False})


def in_the_order_given(bias_of, q, k, grid):
    p = grid.num_prefix_tokens
    return grid.pad_prefix(bias_of(q[:, :, p:], k[:, :, p:]))


def nearest(pos, npos, cells=torch_contextual.cells):
    cell, weight = cells(pos, npos)
    return cell, 0 * weight


CLASS = cope.ContextualPositionEncoding
ANOTHER_GRID = TRAINED_ON['3x5 and a prefix token, trained on 6x2']


class TestCope(ContentBiasTests):
    kinds = {direction: ('cope', {'direction': direction, 'npos': NPOS}) for direction in DIRECTIONS}
    model_keywords = {direction: {'direction': direction} for direction in DIRECTIONS}
    mutants = {  # direction, arguments of `check`, (owner, attribute, replacement)
        'prefix sum': ('literal', CASES['3x5'], (torch_contextual, 'suffix_sum', content_checks.from_the_start)),
        'the patch itself left out': (
            'between', CASES['3x5'], (torch_contextual, 'suffix_sum', content_checks.without_itself)),
        'no interpolation': (
            'literal', CASES['3x5, 8 kept'], (torch_contextual, 'cells', nearest)),
        'q and k swapped': (
            'literal', CASES['3x5'], (ops, 'contextual_bias', content_checks.swapping(ops.contextual_bias))),
        'along columns': ('literal', CASES['3x5'], (ops, 'contextual_bias', along_columns)),
        'prefix behind': ('literal', CASES['4x4'], bias_checks.PREFIX_BEHIND),
        'counted in the order of the sequence': (
            'literal', CASES['3x5, 8 kept'], (ops.cope, 'in_raster_order', in_the_order_given)),
        'counted between in the order of the sequence': (
            'between', CASES['3x5, 8 kept'], (ops.cope, 'in_raster_order', in_the_order_given)),
        'trained grid ignored': ('literal', ANOTHER_GRID, (CLASS, 'rescaling', content_checks.never_rescaled)),
        'trained grid ignored between': ('between', ANOTHER_GRID, (CLASS, 'rescaling', content_checks.never_rescaled)),
        'to the end instead of between': ('between', CASES['3x5'], (ops, 'contextual_bias', without('between'))),
    }

    def expected_bias(self, encoding, q, k, grid):
        height, width = encoding.ref_grid_size
        bias = cope_between if encoding.direction == 'between' else cope_bias
        bias = bias(q, k, encoding.table, grid.size, ref_num_patches=height * width, **where(grid))
        return content_checks.gate_of(encoding) * bias

    @pytest.mark.parametrize('npos', [2, 3])
    def test_positions_beyond_the_last_count_as_the_last(self, kind, npos):
        self.check(kind, (3, 5), 1, npos=npos)
        self.check(kind, *CASES['3x5, 8 kept'], npos=npos)
        self.check(kind, (1, 7), 1, None, (2, 9), npos=npos)

    @pytest.mark.one_of(2)
    @pytest.mark.parametrize('case', ['3x5 and 5 prefix tokens', '3x5, 8 kept'])
    def test_attention(self, kind, case):
        content_checks.check_attention(self.maker(kind), self.expected_bias, *CASES[case])

    def test_autocast(self, kind):
        content_checks.check_autocast(self.maker(kind))


def new(direction, *args, **keywords):
    return TestCope().new(direction, *args, **keywords)


# --- equations -------------------------------------------------------------------------------------------------------

def test_by_hand():
    """With one gate everywhere, the position of a pair is that gate times the patches from the one to the other."""
    grid = Grid(3, 5, 1)
    q, k = torch.zeros(2, 1, 2, 16, 6, dtype=torch.float64)  # gates of 1/2
    q[..., 0] = 1
    raster = torch.arange(15, dtype=torch.float64)
    positions = {
        'between': (raster[:, None] - raster).abs() / 2,
        'literal': ((15 - raster) / 2).expand(15, 15),  # the same in every row
    }
    for direction, expected in positions.items():
        encoding = new(direction, npos=16)
        with torch.no_grad():
            encoding.table[:, 0] = torch.arange(16)
        assert_near(bias_of(encoding, q, k, grid)[0, 0, 1:, 1:] * math.sqrt(6), expected, 1e-12)


# --- properties ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('direction', DIRECTIONS)
def test_sees_itself_at_zero_between_only(direction):
    grid, encoding = make_grid((3, 5)), new(direction)
    q, k, _ = make_qkv(grid, **SIZES)
    diagonal = bias_of(encoding, q, k, grid).diagonal(dim1=2, dim2=3)
    at_zero = (q @ encoding.table[0]) / math.sqrt(6)
    assert torch.allclose(diagonal, at_zero) == (direction == 'between')


# --- initial values and models ---------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
def test_initial_values(again):
    for encoding in own_encodings(initial_model('cope', again), 'cope'):
        assert encoding.table.shape == (64, 16) and (encoding.table == 0).all()


@pytest.mark.one_of(2)
@pytest.mark.parametrize('composition', ['{}', 'ape+{}', 'rope2d+{}'])
@pytest.mark.parametrize('direction', DIRECTIONS)
def test_model(direction, composition):
    check_model('cope', composition, {'direction': direction, 'npos': NPOS}, least=5e-3)


@pytest.mark.parametrize('direction', DIRECTIONS)
def test_neutral_as_built(direction):
    check_neutral_as_built('cope', {'direction': direction})


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords, text', [
    ({'npos': 1}, "'cope' needs npos to be an integer of 2 or more, got 1"),
    ({'npos': '64'}, "'cope' needs npos to be an integer of 2 or more, got '64'"),
    ({'direction': 'both'}, "'cope': direction must be 'literal' or 'between', got 'both'"),
])
def test_wrong_keywords(keywords, text):
    with pytest.raises(ValueError, match=text):
        create('cope', **SIZES, **keywords)
