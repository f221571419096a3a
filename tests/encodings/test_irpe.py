"""irpe_k, irpe_q, irpe_qk, irpe_qkv: a vector for each bucket of offsets, on keys, queries and values."""
import copy
import math

import pytest
import torch
import torch.nn as nn

import content_checks
import timm_sape
from content_checks import CASES, SIZES, ContentBiasTests, bias_of, gate_of
from harness import assert_near, attend, compare, create, make_grid, make_qkv, where
from loops import attention
from model_checks import check_model, check_neutral_as_built, initial_model, own_encodings
from reference_irpe import irpe_bias, irpe_g, irpe_rows, irpe_values
from timm_sape import Grid
from timm_sape.encodings import irpe

NAMES = ['irpe_k', 'irpe_q', 'irpe_qk', 'irpe_qkv']
CPU = torch.device('cpu')
VARIANTS = [
    {'method': 'euclidean'},
    {'method': 'quantized', 'ratio': 3.3},
    {'method': 'cross', 'ratio': 1},
    {'method': 'cross', 'shared_heads': False, 'ratio': 0.7},
    {'method': 'product', 'shared_heads': False, 'ratio': 2.6},
]


def new(name, *args, **keywords):
    return create(name, *args, **SIZES, **keywords)


def expecting(method='product', mode='contextual', ratio=1.9, **keywords):
    """The bias by the equations, for an encoding with these keywords."""
    def expected_bias(encoding, q, k, grid):
        tables = {key: p for key, p in encoding.named_parameters() if key in ('table_k', 'table_q')}
        bias = irpe_bias(q, k, grid.size, **tables, method=method, mode=mode, ratio=ratio, **where(grid))
        return gate_of(encoding) * bias
    return expected_bias


def expected_values(encoding, attn, grid, method='product', ratio=1.9, **keywords):
    values = irpe_values(attn, encoding.table_v, grid.size, method=method, ratio=ratio, **where(grid))
    return gate_of(encoding) * values


def check_values(name, grid_size, num_prefix_tokens=0, num_keep=None, made_for=None, **keywords):
    """What is added to the values, and every gradient, in float64."""
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = new(name, made_for or grid_size, num_prefix_tokens, **keywords)
    q, k, _ = make_qkv(grid, **SIZES)
    attn = (q @ k.mT).softmax(dim=-1).detach().requires_grad_()
    gate = {} if encoding.gate is None else {'gate': encoding.gate.weight}
    compare(
        encoding(attn, grid=grid, hook='values'), expected_values(encoding, attn, grid, **keywords),
        {'attn': attn, 'table_v': encoding.table_v, **gate})


CLASS = irpe.ImageRelativePositionEncoding
buckets, look_up, g, content_bias = CLASS._buckets, CLASS._look_up, CLASS._g, CLASS.content_bias
values = irpe.ImageRelativePositionEncodingQKV.values


def transposed_buckets(self, grid, device):
    return [bucket.mT for bucket in buckets(self, grid, device)]


def columns_first(self, grid, device):
    flipped = Grid(grid.width, grid.height, grid.num_prefix_tokens, grid.keep_indices)
    return buckets(self, flipped, device)


def all_patches_in_order(self, grid, device):
    num_tokens = grid.num_prefix_tokens + grid.keep_indices.shape[1]
    whole = buckets(self, Grid(*grid.size, grid.num_prefix_tokens), device)
    return [bucket[..., :num_tokens, :num_tokens] for bucket in whole]


def unscaled(self, x, table, maps):
    return look_up(self, x * self.head_dim ** 0.5, table, maps)


def prefix_rule(self, q, k, grid):
    return content_bias(self, q, k, grid) * (buckets(self, grid, q.device)[0] != 49)


def of_the_others(self, attn, grid):
    return values(self, attn.mT, grid)


class TestIrpe(ContentBiasTests):
    kinds = {name: (name, {}) for name in NAMES}
    knows_trained_grid = False
    mutants = {  # kind, arguments of `check`, (owner, attribute, replacement)
        'opposite offset on keys': ('irpe_k', CASES['3x5'], (CLASS, '_buckets', transposed_buckets)),
        'opposite offset on queries': ('irpe_q', CASES['3x5'], (CLASS, '_buckets', transposed_buckets)),
        'opposite offset on all': ('irpe_qkv', CASES['3x5'], (CLASS, '_buckets', transposed_buckets)),
        'x and y swapped': ('irpe_k', CASES['3x5'], (CLASS, '_buckets', columns_first)),
        'kept patches in raster order': ('irpe_qk', CASES['3x5, 8 kept'], (CLASS, '_buckets', all_patches_in_order)),
        'no sign': ('irpe_k', CASES['4x4'], (CLASS, '_g', lambda self, distance: g(self, distance.abs()))),
        'clipped': ('irpe_k', CASES['1x7'], (CLASS, '_g', lambda self, distance: distance.clamp(-3, 3))),
        'not rounded': ('irpe_k', CASES['1x7'], (irpe, '_thresholds', lambda ratio: (1, 2, 7))),
        'unscaled': ('irpe_q', CASES['3x5'], (CLASS, '_look_up', unscaled)),
        'prefix rule': ('irpe_k', CASES['4x4'], (CLASS, 'content_bias', prefix_rule)),
        'probabilities of the others': (
            'irpe_qkv', CASES['3x5'], (irpe.ImageRelativePositionEncodingQKV, 'values', of_the_others)),
    }

    def check(self, kind, *case, gated=False, **keywords):
        content_checks.check(self.maker(kind), expecting(**keywords), *case, gated=gated, **keywords)
        if kind.endswith('v'):
            check_values(f'auto_{kind}' if gated else kind, *case, **keywords)

    def expected_bias(self, encoding, q, k, grid):
        return expecting()(encoding, q, k, grid)

    @pytest.mark.parametrize('case', ['3x5', '1x7', '3x5, 8 kept'])
    @pytest.mark.parametrize('keywords', VARIANTS, ids=str)
    def test_methods(self, keywords, case):
        self.check('irpe_qkv', *CASES[case], **keywords)

    @pytest.mark.parametrize('case', ['3x5', '3x5, 8 kept'])
    @pytest.mark.parametrize('shared_heads', [True, False])
    @pytest.mark.parametrize('method', irpe.METHODS)
    def test_mode_bias(self, method, shared_heads, case):
        self.check('irpe_qk', *CASES[case], mode='bias', method=method, shared_heads=shared_heads)

    @pytest.mark.one_of(2)
    @pytest.mark.parametrize('name', ['irpe_k', 'irpe_q', 'irpe_qk', 'irpe_qkv', 'auto_irpe_qkv'])
    @pytest.mark.parametrize('case', ['3x5 and 5 prefix tokens', '3x5, 8 kept'])
    def test_attention(self, case, name):
        """Attention of a layer, values included."""
        grid = make_grid(*CASES[case])
        encoding = new(name, (3, 5), grid.num_prefix_tokens)
        if encoding.gate is not None:
            nn.init.constant_(encoding.gate.weight, 0.004)
        q, k, v = make_qkv(grid, **SIZES)
        bias = expecting()(encoding, q, k, grid)
        out = attention(q, k, v, bias=bias)
        if 'v' in name:
            attn = (q @ k.mT / math.sqrt(6) + bias).softmax(dim=-1)
            out = out + expected_values(encoding, attn, grid)
        compare(attend(encoding, q, k, v, grid), out, {'q': q, 'k': k, 'v': v, **dict(encoding.named_parameters())})

    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize('name, mode', [('irpe_qk', 'contextual'), ('irpe_qk', 'bias'), ('irpe_qkv', 'contextual')])
    def test_half(self, name, mode, dtype):
        content_checks.check_half(self.maker(name), dtype, mode=mode)

    def test_autocast(self, kind):
        content_checks.check_autocast(self.maker(kind))

    def test_nan_stays_nan(self, kind):
        content_checks.check_nan(self.maker(kind), in_k=True)


# --- buckets ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('ratio', [0.5, 0.7, 1, 1.25, 1.75, 1.9, 2, 2.5, 3.3, 7.7, 20, 33])
def test_piecewise_index_function(ratio):
    """All distances up to 63, both signs, against the formula; whole numbers throughout."""
    actual = new('irpe_k', ratio=ratio, method='cross')._g(torch.arange(-63, 64))
    assert actual.dtype == torch.int64
    assert actual.tolist() == [irpe_g(x, ratio) for x in range(-63, 64)]
    assert actual.max() == math.floor(2 * ratio) or 8 * ratio > 63


def test_published_buckets():
    encoding = new('irpe_k')
    assert encoding._g(torch.arange(6)).tolist() == [0, 1, 2, 2, 3, 3]
    assert encoding._g(torch.arange(5, 64)).tolist() == [3] * 59
    assert encoding.num_buckets == 7 * 7 + 1 == len(encoding.table_k)


@pytest.mark.parametrize('method, ratio, used', [
    ('product', 1.9, 50), ('euclidean', 20, 20), ('quantized', 33, 51), ('cross', 20, 56)])
def test_published_counts(method, ratio, used):
    """How many buckets a 14x14 grid with a class token uses: the numbers in the names of the published models."""
    encoding = new('irpe_k', (14, 14), 1, method=method, ratio=ratio)
    found = torch.cat([bucket.flatten() for bucket in encoding._buckets(Grid(14, 14, 1), CPU)]).unique()
    assert len(found) == used
    assert found.min() >= 0 and found.max() == encoding.num_buckets - 1


@pytest.mark.parametrize('grid_size', [(20, 30), (1, 64), (64, 1)])
@pytest.mark.parametrize('method', irpe.METHODS)
def test_large_grids(method, grid_size):
    """Three rows of the bucket map against the formula, and none out of range."""
    encoding = new('irpe_k', grid_size, 2, method=method)
    maps = encoding._buckets(Grid(*grid_size, 2), CPU)
    height, width = grid_size
    for i in (0, height * width // 2, height * width - 1):
        for j in range(0, height * width, 29):
            a, b = ((n // width, n % width) for n in (i, j))
            assert [m[0, 0, 2 + i, 2 + j].item() for m in maps] == irpe_rows(a, b, method, 1.9)
    assert all(0 <= m.min() and m.max() < encoding.num_buckets for m in maps)


def test_undirected_distances_by_hand():
    (bucket,) = new('irpe_k', (3, 4), method='quantized', ratio=5)._buckets(Grid(3, 4), CPU)
    squares = {0: 0, 1: 1, 2: 2, 4: 4, 5: 5, 8: 6, 9: 6, 10: 7, 13: 7}  # ratio 5: exact up to 5
    assert {(y * y + x * x): bucket[0, 0, 0, y * 4 + x].item() for y in range(3) for x in range(4)} == squares
    (bucket,) = new('irpe_k', (3, 4), method='euclidean', ratio=5)._buckets(Grid(3, 4), CPU)
    assert bucket[0, 0, 0].tolist() == [0, 1, 2, 3, 1, 1, 2, 3, 2, 2, 3, 4]


def test_which_offset():
    """On keys and values the bucket is that of query minus key, on queries that of key minus query: written out."""
    encoding = new('irpe_qkv', (4, 4), random=False)
    one_below = (1 + 3) * 7 + 3  # dy = 1, dx = 0
    with torch.no_grad():
        for table in encoding.parameters():
            table[one_below] = 1
    ones, zeros = torch.ones(1, 2, 16, 6), torch.zeros(1, 2, 16, 6)
    grid = Grid(4, 4)
    on_keys, on_queries = (
        bias_of(encoding, q, k, grid)[0, 0].unflatten(1, (4, 4)).unflatten(0, (4, 4))
        for q, k in ((ones, zeros), (zeros, ones)))
    attn = torch.eye(16, dtype=torch.float64).roll(-4, 0).expand(1, 2, 16, 16)  # each looks at the one below it
    at_below = encoding(attn, grid=grid, hook='values')[0, 0, :, 0].unflatten(0, (4, 4))
    for y in range(4):
        for x in range(4):
            for there in range(4):
                assert (on_keys[y, x, there, x] > 0) == (y - there == 1)
                assert (on_queries[y, x, there, x] > 0) == (there - y == 1)
            assert at_below[y, x] == 0
    at_above = encoding(attn.mT, grid=grid, hook='values')[0, 0, 4:, 0]  # each looks at the one above it
    assert (at_above == 1).all()


# --- properties ------------------------------------------------------------------------------------------------------

def bias_map(name, grid_size, **keywords):
    """Bias between patches that all look alike, `[h, H, W, H, W]`."""
    grid = Grid(*grid_size, 2)
    q, k, _ = (x.expand(-1, -1, 2 + grid.num_patches, -1) for x in make_qkv(Grid(1, 1), **SIZES))
    bias = bias_of(new(name, grid_size, 2, **keywords), q, k, grid)
    return bias[0, :, 2:, 2:].unflatten(2, grid_size).unflatten(1, grid_size).detach()


@pytest.mark.parametrize('method', irpe.METHODS)
@pytest.mark.parametrize('name', NAMES)
def test_offsets_alone(name, method):
    bias = bias_map(name, (4, 5), method=method)
    assert_near(bias[:, 1:, 1:, 1:, 1:], bias[:, :-1, :-1, :-1, :-1], 1e-14)
    assert not torch.allclose(bias[:, :, :, 0, 0], bias[:, :, :, 1, 1])
    assert timm_sape.get_encoding(name).relative


@pytest.mark.parametrize('method', irpe.METHODS)
def test_mirrored(method):
    """Undirected methods do not tell left from right, up from down or rows from columns. The others do."""
    bias = bias_map('irpe_k', (4, 4), method=method)
    undirected = method in ('euclidean', 'quantized')
    assert torch.allclose(bias.flip(2, 4), bias) == undirected
    assert torch.allclose(bias.flip(1, 3), bias) == undirected
    assert torch.allclose(bias.permute(0, 2, 1, 4, 3), bias) == undirected
    mixed = bias[:, 1, 1, 2, 2] - bias[:, 1, 1, 1, 2] - bias[:, 1, 1, 2, 1] + bias[:, 1, 1, 1, 1]
    assert (mixed.abs().max() < 1e-12) == (method == 'cross')  # a function of dy plus one of dx


@pytest.mark.parametrize('method', irpe.METHODS)
def test_prefix_tokens_share_one_bucket(method):
    """Every pair with a prefix token, itself included, has the last row; the other rows have no part in it."""
    encoding, grid = new('irpe_k', (3, 5), 5, method=method), Grid(3, 5, 5)
    q, k, _ = make_qkv(grid, **SIZES)
    rows = [encoding.num_buckets // 2 - 1, -1] if method == 'cross' else [-1]
    expected = (q @ encoding.table_k[rows].sum(0) / math.sqrt(6)).unsqueeze(-1)  # [B, h, N, 1]
    bias = bias_of(encoding, q, k, grid)
    assert_near(bias[:, :, :5], expected[:, :, :5].expand(-1, -1, -1, 20), 1e-12)
    assert_near(bias[..., :5], expected.expand(-1, -1, -1, 5), 1e-12)


@pytest.mark.parametrize('name', NAMES)
def test_larger_grid(name):
    """Offsets that both grids have keep their bias; further ones have that of the last bucket."""
    small, large = bias_map(name, (6, 6)), bias_map(name, (6, 9))
    assert_near(large[:, :, :6, :, :6], small, 1e-14)
    assert_near(large[:, :, 0, :, 6:], large[:, :, 0, :, 4:5].expand(-1, -1, -1, 3), 1e-14)


# --- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_values_in_half(dtype):
    """Computed in float32 from the given probabilities on, in half models and under autocast."""
    grid = make_grid((4, 4), 1, 9)
    q, k, _ = (x.detach() for x in make_qkv(grid, **SIZES, dtype=dtype))
    attn = (q @ k.mT).softmax(-1)
    half = new('irpe_qkv', (4, 4), 1).to(dtype)
    wide = copy.deepcopy(half).float()
    expected = wide(attn.float(), grid=grid, hook='values')
    for encoding in (half, wide):
        for enabled in (False, True):
            with torch.autocast('cpu', dtype, enabled=enabled):
                actual = encoding(attn, grid=grid, hook='values')
            assert actual.dtype == torch.float32
            assert_near(actual, expected, 1e-6)


# --- initial values --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
@pytest.mark.parametrize('keywords, shape', [
    ({}, (50, 16)),
    ({'shared_heads': False}, (4, 50, 16)),
    ({'mode': 'bias'}, (50,)),
    ({'mode': 'bias', 'shared_heads': False}, (4, 50)),
    ({'method': 'euclidean'}, (5, 16)),
    ({'method': 'quantized', 'ratio': 33}, (68, 16)),
    ({'method': 'cross'}, (16, 16)),
    ({'ratio': 0.5}, (10, 16)),
], ids=str)
def test_initial_values(keywords, shape, again):
    """Zero in every layer, as built and after `init_weights`."""
    for name in NAMES:
        if name == 'irpe_qkv' and keywords.get('mode') == 'bias':
            continue
        model = initial_model(name, again=False, pos_enc_kwargs={name: keywords})
        if again:
            for parameter in model.parameters():
                nn.init.ones_(parameter)
            model.init_weights()
        encodings = own_encodings(model, name)
        assert len(encodings) == 2
        for encoding in encodings:
            tables = dict(encoding.named_parameters())
            assert sorted(tables) == sorted(f'table_{role}' for role in name[5:])
            assert all(table.shape == shape and (table == 0).all() for table in tables.values())
            assert encoding.no_weight_decay() == set(tables)


# --- models ----------------------------------------------------------------------------------------------------------

@pytest.mark.one_of(2)
@pytest.mark.parametrize('composition', ['{}', 'ape+{}', 'rope2d+{}'])
@pytest.mark.parametrize('name, keywords', [
    *((name, {}) for name in NAMES), ('irpe_qk', {'mode': 'bias', 'method': 'cross', 'shared_heads': False})], ids=str)
def test_model(name, keywords, composition):
    check_model(name, composition, keywords, least=5e-3)


@pytest.mark.parametrize('name', NAMES)
def test_neutral_as_built(name):
    check_neutral_as_built(name)


@pytest.mark.parametrize('name', NAMES)
def test_where_it_acts(name):
    cls = timm_sape.get_encoding(name)
    hooks = {'content_bias', *(['values'] if 'v' in name else [])}
    assert {hook for hook in (*cls.HOOKS, 'attend') if cls.overrides(hook)} == hooks


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name, keywords, text', [
    ('irpe_k', {'method': 'euc'}, "'irpe_k': method must be 'product', 'euclidean', .* or 'cross', got 'euc'"),
    ('irpe_q', {'method': None}, "'irpe_q': method must be .*, got None"),
    ('irpe_qk', {'mode': ['bias']}, r"'irpe_qk': mode must be 'contextual' or 'bias', got \['bias'\]"),
    ('irpe_k', {'ratio': 0.4}, 'ratio must be a number from 0.5.* to 1000, got 0.4'),
    ('irpe_k', {'ratio': -1.9}, 'ratio must be a number from 0.5.* to 1000, got -1.9'),
    ('irpe_k', {'ratio': float('nan')}, 'ratio must be .*got nan'),
    ('irpe_k', {'ratio': float('inf')}, 'ratio must be .*got inf'),
    ('irpe_k', {'ratio': 1001}, 'ratio must be .*got 1001'),
    ('irpe_k', {'ratio': True}, 'ratio must be .*got True'),
    ('irpe_k', {'ratio': '1.9'}, "ratio must be .*got '1.9'"),
    ('irpe_qkv', {'shared_heads': 1}, "'irpe_qkv': shared_heads must be True or False, got 1"),
    ('irpe_qkv', {'mode': 'bias'}, "'irpe_qkv': values have no mode='bias'. Use 'irpe_qk', or leave mode out"),
])
def test_wrong_keywords(name, keywords, text):
    with pytest.raises(ValueError, match=text):
        create(name, **SIZES, **keywords)
