"""iRPE, CoPE between patches and SaPE2 with squared distances: their equations, properties, values and refusals."""
import copy
import math

import pytest
import timm
import torch
import torch.nn as nn

import references
import references_contextual
import timm_sape
from common import PATCH, awaken
from references import assert_near
from timm_sape.attention import PosEncAttention
from timm_sape.encodings import irpe, sape2sq
from timm_sape.grid import Grid
from timm_sape.ops import attend, contextual, contextual_op, probabilities

HEADS, HEAD_DIM = 2, 6  # 1/sqrt(6) is no power of two: rounding with it would show
DIM = HEADS * HEAD_DIM
IRPE = ('irpe_k', 'irpe_q', 'irpe_qk', 'irpe_qkv')
SAPE2SQ = ('sape2sq_k', 'sape2sq_q')
NAMES = (*IRPE, *SAPE2SQ, 'cope')
SCALE = 0.3  # of q.k, as the layer would say; nothing but the channels may depend on it


def create(
        name, grid_size=(3, 5), num_prefix_tokens=0, ref_grid_size=None, dtype=torch.float64, awake=True, gated=False,
        **keywords):
    """An encoding in which every parameter matters: none is zero, none small."""
    if name in SAPE2SQ:
        keywords = {'bias_scale': 'learned', **keywords}
    if name == 'cope':
        keywords = {'npos': 7, 'direction': 'between', **keywords}
    encoding = timm_sape.create_encoding(
        f'auto_{name}' if gated else name, dim=DIM, num_heads=HEADS, grid_size=grid_size,
        num_prefix_tokens=num_prefix_tokens, ref_grid_size=ref_grid_size, dtype=dtype, **keywords)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in encoding.parameters() if awake else ():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return encoding


def make_grid(grid_size, num_prefix_tokens=0, num_keep=None):
    """With `num_keep`, other patches are dropped from each of 3 images, and the order is random."""
    keep_indices = None
    if num_keep is not None:
        generator = torch.Generator().manual_seed(2)
        keep_indices = torch.stack([
            torch.randperm(grid_size[0] * grid_size[1], generator=generator)[:num_keep] for _ in range(3)])
    return Grid(*grid_size, num_prefix_tokens, keep_indices)


def make_tokens(grid, dtype=torch.float64):
    """q, k and v."""
    batch, num_patches = (1, grid.num_patches) if grid.keep_indices is None else grid.keep_indices.shape
    shape = (3, batch, HEADS, grid.num_prefix_tokens + num_patches, HEAD_DIM)
    tokens = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in tokens]


def product(name, encoding, q, k, grid):
    """The bias that the package makes of q and k, whatever the hook."""
    if name in SAPE2SQ:
        a, b = encoding.channels(q, k, None, grid, SCALE)
        return SCALE * (a @ b.mT)
    bias = encoding.gated(encoding.content_bias(q, k, grid))
    return bias.expand(*q.shape[:3], q.shape[2])


def reference(name, encoding, q, k, grid, **keywords):
    """The same from the equations."""
    where = {'num_prefix_tokens': grid.num_prefix_tokens, 'keep_indices': grid.keep_indices}
    gate = 1 if encoding.gate is None else 100 * encoding.gate.weight
    if name in SAPE2SQ:
        bias = references_contextual.sape2sq_bias(
            q, k, encoding.table_x, encoding.table_y, grid.size, mode=name[-1], gate_scale=HEAD_DIM ** -0.5,
            ref_grid_size=encoding.ref_grid_size, **where)
        gain = [encoding.bias_scale] * HEADS if encoding.gain is None else encoding.gain
        return gate * torch.stack([gain[h] * bias[:, h] for h in range(HEADS)], dim=1)
    if name == 'cope':
        ref_num_patches = encoding.ref_grid_size[0] * encoding.ref_grid_size[1]
        return gate * references_contextual.cope_between(
            q, k, encoding.table, grid.size, ref_num_patches=ref_num_patches, **where)
    keywords.pop('shared_heads', None)
    tables = {key: p for key, p in encoding.named_parameters() if key in ('table_k', 'table_q')}
    return gate * references_contextual.irpe_bias(q, k, grid.size, **tables, **where, **keywords)


def gradients(output, inputs):
    """Gradients of a weighted sum of all entries, 0 for what plays no part."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = torch.autograd.grad(output, inputs, weights.to(output), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found)]


def compare(actual, expected, inputs, tolerance=1e-10):
    assert_near(actual, expected, tolerance)
    names, inputs = list(inputs), list(inputs.values())
    for what, a, b in zip(names, gradients(actual, inputs), gradients(expected, inputs)):
        assert_near(a, b, tolerance, f'gradient of {what}')


def check(name, grid_size, num_prefix_tokens, num_keep, ref_grid_size=None, **keywords):
    """Value and every gradient in float64, of the bias, and of what is added to the values."""
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = create(name, ref_grid_size or grid_size, num_prefix_tokens, **keywords)
    q, k, _ = make_tokens(grid)
    own = dict(encoding.named_parameters())
    keywords.pop('gated', None)
    options = keywords if name in IRPE else {}
    table_v = own.pop('table_v', None)
    compare(
        product(name, encoding, q, k, grid), reference(name, encoding, q, k, grid, **options), {'q': q, 'k': k, **own})
    if table_v is not None:
        options = {key: value for key, value in keywords.items() if key in ('method', 'ratio')}
        attn = (q @ k.mT).softmax(dim=-1).detach().requires_grad_()
        expected = references_contextual.irpe_values(
            attn, table_v, grid.size, num_prefix_tokens=num_prefix_tokens, keep_indices=grid.keep_indices, **options)
        compare(encoding.values(attn, grid), expected, {'attn': attn, 'table_v': table_v})


CASES = {  # grid, prefix tokens, kept patches
    '3x5': ((3, 5), 0, None),
    '3x5 and 5 prefix tokens': ((3, 5), 5, None),
    '1x7': ((1, 7), 1, None),
    '7x1': ((7, 1), 1, None),
    '4x4': ((4, 4), 1, None),
    '1x1': ((1, 1), 1, None),
    '1x1 alone': ((1, 1), 0, None),
    '3x5, 8 kept': ((3, 5), 1, 8),
    '7x1, 3 kept': ((7, 1), 0, 3),
    '4x4 and 5 prefix tokens, 6 kept': ((4, 4), 5, 6),
}
TRAINED = {'3x5': (6, 2), '1x7': (4, 4), '4x4 and 5 prefix tokens, 6 kept': (3, 5)}


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('name', NAMES)
def test_equations(name, case):
    check(name, *CASES[case])


@pytest.mark.parametrize('case', TRAINED)
@pytest.mark.parametrize('name', NAMES)
def test_equations_on_another_grid(name, case):
    """iRPE's buckets go on; the others scale to the grid that they were trained on."""
    check(name, *CASES[case], ref_grid_size=TRAINED[case])


@pytest.mark.parametrize('case', ['3x5', '4x4 and 5 prefix tokens, 6 kept'])
@pytest.mark.parametrize('name', NAMES)
def test_equations_with_a_gate(name, case):
    check(name, *CASES[case], gated=True)


@pytest.mark.parametrize('case', ['3x5', '1x7', '3x5, 8 kept'])
@pytest.mark.parametrize('keywords', [
    {'method': 'euclidean'},
    {'method': 'quantized', 'ratio': 3.3},
    {'method': 'cross', 'ratio': 1},
    {'method': 'cross', 'shared_heads': False, 'ratio': 0.7},
    {'method': 'product', 'shared_heads': False, 'ratio': 2.6},
], ids=str)
def test_irpe_methods(keywords, case):
    check('irpe_qkv', *CASES[case], **keywords)


@pytest.mark.parametrize('case', ['3x5', '3x5, 8 kept'])
@pytest.mark.parametrize('shared_heads', [True, False])
@pytest.mark.parametrize('method', irpe.METHODS)
def test_irpe_mode_bias(method, shared_heads, case):
    check('irpe_qk', *CASES[case], mode='bias', method=method, shared_heads=shared_heads)


@pytest.mark.parametrize('keywords', [
    {'bias_scale': 'one'}, {'bias_scale': -0.7}, {'bias_scale': 0}, {'npos': 2}], ids=str)
@pytest.mark.parametrize('name', SAPE2SQ)
def test_sape2sq_keywords(name, keywords):
    check(name, *CASES['3x5, 8 kept'], **keywords)


@pytest.mark.parametrize('preset, gate_scale, bias_scale', [
    ('appendix', HEAD_DIM ** -0.5, 1), ('equations', 1, HEAD_DIM ** -0.5)])
@pytest.mark.parametrize('name', SAPE2SQ)
def test_sape2sq_presets(name, preset, gate_scale, bias_scale):
    encoding = create(name, preset=preset, bias_scale=None)
    grid = make_grid((3, 5))
    q, k, _ = make_tokens(grid)
    bias = references_contextual.sape2sq_bias(
        q, k, encoding.table_x, encoding.table_y, (3, 5), mode=name[-1], gate_scale=gate_scale)
    assert_near(product(name, encoding, q, k, grid), bias_scale * bias, 1e-10)


@pytest.mark.parametrize('npos', [2, 3])
def test_cope_between_positions_beyond_the_last(npos):
    check('cope', *CASES['3x5, 8 kept'], npos=npos)
    check('cope', *CASES['1x7'], npos=npos, ref_grid_size=(2, 9))


@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.parametrize('names', [
    ('irpe_qkv',), ('irpe_k', 'sape2sq_q'), ('cope', 'irpe_q', 'sape2sq_k'), ('irpe_qkv', 'rope2d_mixed', 'sape2sq_k')])
def test_attention_layer(names, fused):
    """What they see is q and k after their norms and before their rotation; they add; values see the probabilities."""
    torch.manual_seed(0)
    dim, head_dim = 16, 8
    grid = make_grid((3, 4), num_prefix_tokens=5, num_keep=7)
    layer = PosEncAttention(dim, num_heads=HEADS, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm).double()
    layer.fused_attn = fused
    encodings = {
        name: timm_sape.create_encoding(
            name, dim=dim, num_heads=HEADS, grid_size=(3, 4), num_prefix_tokens=5, dtype=torch.float64,
            **({'direction': 'between'} if name == 'cope' else {}))
        for name in names}
    layer.set_encodings(encodings)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, dtype=torch.float64) * 0.5)
    x = torch.randn(3, 12, dim, dtype=torch.float64, requires_grad=True)

    where = {'num_prefix_tokens': 5, 'keep_indices': grid.keep_indices}
    q, k, v = layer.qkv(x).unflatten(-1, (3, HEADS, head_dim)).permute(2, 0, 3, 1, 4)
    q, k = layer.q_norm(q), layer.k_norm(k)
    bias, table_v = 0, None
    for name, encoding in encodings.items():
        if name in IRPE:
            tables = dict(encoding.named_parameters())
            table_v = tables.pop('table_v', None)
            bias = bias + references_contextual.irpe_bias(q, k, (3, 4), **tables, **where)
        elif name == 'cope':
            bias = bias + references_contextual.cope_between(q, k, encoding.table, (3, 4), **where)
        elif name in SAPE2SQ:
            bias = bias + references_contextual.sape2sq_bias(
                q, k, encoding.table_x, encoding.table_y, (3, 4), mode=name[-1], gate_scale=head_dim ** -0.5, **where)
    if 'rope2d_mixed' in names:
        freqs = encodings['rope2d_mixed'].freqs
        q, k = (references.rope2d_mixed(y, freqs, (3, 4), **where) for y in (q, k))
    out = references.attention(q, k, v, bias=bias)
    if table_v is not None:
        attn = (q @ k.mT / math.sqrt(head_dim) + bias).softmax(dim=-1)
        out = out + references_contextual.irpe_values(attn, table_v, (3, 4), **where)
    expected = layer.proj(out.transpose(1, 2).flatten(2))
    compare(layer(x, grid), expected, {'x': x, **dict(layer.named_parameters())}, 1e-9)


# --- the reference comparison must be able to fail -------------------------------------------------------------------

IRPE_CLASS, SQUARED_CLASS = irpe.ImageRelativePositionEncoding, sape2sq.SquaredSemanticAwareEncoding
buckets, look_up, g = IRPE_CLASS._buckets, IRPE_CLASS._look_up, IRPE_CLASS._g


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


def without(function, keyword):
    return lambda *args, **kwargs: function(*args, **{**kwargs, keyword: None})


def pad_behind(self, table):
    return torch.nn.functional.pad(table, (0, 0, 0, self.num_prefix_tokens))


def one_axis(function):
    def mutant(*args, **kwargs):
        x, y = function(*args, **kwargs)
        return x, 0 * y
    return mutant


def swapping(function):
    return lambda q, k, *args, **kwargs: function(k, q, *args, **kwargs)


def halved_gradient(self, gain):
    return gated(self, 0.5 * (gain + gain.detach()))


gated, suffix_sum = timm_sape.PositionEncoding.gated, contextual._suffix_sum

MUTANTS = {  # encoding, case, (owner, attribute, replacement)
    'irpe_k, opposite offset': ('irpe_k', '3x5', (IRPE_CLASS, '_buckets', transposed_buckets)),
    'irpe_q, opposite offset': ('irpe_q', '3x5', (IRPE_CLASS, '_buckets', transposed_buckets)),
    'irpe_qkv, opposite offset': ('irpe_qkv', '3x5', (IRPE_CLASS, '_buckets', transposed_buckets)),
    'x and y swapped': ('irpe_k', '3x5', (IRPE_CLASS, '_buckets', columns_first)),
    'kept patches in raster order': ('irpe_qk', '3x5, 8 kept', (IRPE_CLASS, '_buckets', all_patches_in_order)),
    'no sign': ('irpe_k', '4x4', (IRPE_CLASS, '_g', lambda self, distance: g(self, distance.abs()))),
    'clipped': ('irpe_k', '1x7', (IRPE_CLASS, '_g', lambda self, distance: distance.clamp(-3, 3))),
    'not rounded': ('irpe_k', '1x7', (irpe, '_thresholds', lambda ratio: (1, 2, 7))),
    'unscaled': ('irpe_q', '3x5', (IRPE_CLASS, '_look_up', unscaled)),
    'prefix rule': ('irpe_k', '4x4', (
        IRPE_CLASS, 'content_bias',
        lambda self, q, k, grid: content_bias(self, q, k, grid) * (buckets(self, grid, q.device)[0] != 49))),
    'squared, prefix behind': ('sape2sq_k', '3x5 and 5 prefix tokens', (Grid, 'pad_tokens', pad_behind)),
    'squared, one axis': ('sape2sq_k', '3x5', (timm_sape.ops, 'axis_codes', one_axis(timm_sape.ops.axis_codes))),
    'squared, q and k swapped': ('sape2sq_q', '3x5', (
        timm_sape.ops, 'axis_codes', swapping(timm_sape.ops.axis_codes))),
    'squared, trained grid ignored': ('sape2sq_k', '3x5', (
        timm_sape.ops, 'axis_codes', without(timm_sape.ops.axis_codes, 'ref_grid_size'))),
    'squared, half the gradient of the gain': ('sape2sq_k', '3x5', (SQUARED_CLASS, 'gated', halved_gradient)),
    'cope, the patch itself left out': ('cope', '3x5', (
        contextual_op, '_suffix_sum', lambda gates: suffix_sum(gates) - gates)),
    'cope, dropped patches counted': ('cope', '3x5, 8 kept', (
        contextual, '_is_kept', lambda grid, like: like.new_ones(like.shape[0], grid.num_patches))),
    'cope, trained grid ignored': ('cope', '3x5', (
        timm_sape.ops, 'recomputed_contextual_bias',
        without(timm_sape.ops.recomputed_contextual_bias, 'ref_num_patches'))),
    'cope, the sum to the end': ('cope', '3x5', (
        timm_sape.ops, 'recomputed_contextual_bias', without(timm_sape.ops.recomputed_contextual_bias, 'between'))),
}
content_bias = IRPE_CLASS.content_bias


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    name, case, patch = MUTANTS[mutant]
    ref_grid_size = (6, 2) if 'trained grid' in mutant else None
    monkeypatch.setattr(*patch)
    with pytest.raises(AssertionError, match='off by|instead of'):
        check(name, *CASES[case], ref_grid_size=ref_grid_size)


# --- iRPE's buckets --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('ratio', [0.5, 0.7, 1, 1.25, 1.75, 1.9, 2, 2.5, 3.3, 7.7, 20, 33])
def test_piecewise_index_function(ratio):
    """All distances up to 63, both signs, against the formula; whole numbers throughout."""
    encoding = create('irpe_k', ratio=ratio, method='cross')
    distance = torch.arange(-63, 64)
    actual = encoding._g(distance)
    assert actual.dtype == torch.int64
    assert actual.tolist() == [references_contextual.irpe_g(x, ratio) for x in range(-63, 64)]
    assert actual.max() == math.floor(2 * ratio) or 8 * ratio > 63


def test_published_buckets():
    encoding = create('irpe_k')
    assert encoding._g(torch.arange(6)).tolist() == [0, 1, 2, 2, 3, 3]
    assert encoding._g(torch.arange(5, 64)).tolist() == [3] * 59
    assert encoding.num_buckets == 7 * 7 + 1 == len(encoding.table_k)


@pytest.mark.parametrize('method, ratio, used', [
    ('product', 1.9, 50), ('euclidean', 20, 20), ('quantized', 33, 51), ('cross', 20, 56)])
def test_published_counts(method, ratio, used):
    """How many buckets a 14x14 grid with a class token uses: the numbers in the names of the published models."""
    encoding = create('irpe_k', (14, 14), 1, method=method, ratio=ratio)
    found = torch.cat([bucket.flatten() for bucket in encoding._buckets(Grid(14, 14, 1), torch.device('cpu'))]).unique()
    assert len(found) == used
    assert found.min() >= 0 and found.max() == encoding.num_buckets - 1


@pytest.mark.parametrize('grid_size', [(20, 30), (1, 64), (64, 1)])
@pytest.mark.parametrize('method', irpe.METHODS)
def test_large_grids(method, grid_size):
    """One row of the bucket map against the formula, and none out of range."""
    encoding = create('irpe_k', grid_size, 2, method=method)
    maps = encoding._buckets(Grid(*grid_size, 2), torch.device('cpu'))
    height, width = grid_size
    for i in (0, height * width // 2, height * width - 1):
        for j in range(0, height * width, 29):
            a, b = ((n // width, n % width) for n in (i, j))
            assert [m[0, 0, 2 + i, 2 + j].item() for m in maps] == references_contextual.irpe_rows(a, b, method, 1.9)
    assert all(0 <= m.min() and m.max() < encoding.num_buckets for m in maps)


def test_which_offset():
    """On keys and values the bucket is that of query minus key, on queries that of key minus query: written out."""
    encoding = create('irpe_qkv', (4, 4), awake=False)
    one_below = (1 + 3) * 7 + 3  # dy = 1, dx = 0
    with torch.no_grad():
        for table in encoding.parameters():
            table[one_below] = 1
    ones, zeros = torch.ones(1, HEADS, 16, HEAD_DIM), torch.zeros(1, HEADS, 16, HEAD_DIM)
    grid = Grid(4, 4)
    on_keys = encoding.content_bias(ones, zeros, grid)[0, 0].unflatten(1, (4, 4)).unflatten(0, (4, 4))
    on_queries = encoding.content_bias(zeros, ones, grid)[0, 0].unflatten(1, (4, 4)).unflatten(0, (4, 4))
    attn = torch.eye(16, dtype=torch.float64).roll(-4, 0).expand(1, HEADS, 16, 16)  # each looks at the one below it
    values = encoding.values(attn, grid)[0, 0, :, 0].unflatten(0, (4, 4))
    for y in range(4):
        for x in range(4):
            for there in range(4):
                assert (on_keys[y, x, there, x] > 0) == (y - there == 1)
                assert (on_queries[y, x, there, x] > 0) == (there - y == 1)
            assert values[y, x] == 0
    assert (encoding.values(attn.mT, grid)[0, 0, 4:, 0] == 1).all()  # each looks at the one above it


# --- iRPE's properties -----------------------------------------------------------------------------------------------

def bias_map(name, grid_size, **keywords):
    """Bias between patches that all look alike, `[h, H, W, H, W]`."""
    grid = Grid(*grid_size, 2)
    q, k, _ = (x.expand(-1, -1, 2 + grid.num_patches, -1) for x in make_tokens(Grid(1, 1)))
    bias = product(name, create(name, grid_size, 2, **keywords), q, k, grid)
    return bias[0, :, 2:, 2:].unflatten(2, grid_size).unflatten(1, grid_size).detach()


@pytest.mark.parametrize('method', irpe.METHODS)
@pytest.mark.parametrize('name', IRPE)
def test_irpe_is_relative(name, method):
    bias = bias_map(name, (4, 5), method=method)
    assert_near(bias[:, 1:, 1:, 1:, 1:], bias[:, :-1, :-1, :-1, :-1], 1e-14)
    assert not torch.allclose(bias[:, :, :, 0, 0], bias[:, :, :, 1, 1])


@pytest.mark.parametrize('method', irpe.METHODS)
def test_irpe_under_flips(method):
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
    encoding = create('irpe_k', (3, 5), 5, method=method)
    q, k, _ = make_tokens(Grid(3, 5, 5))
    rows = [encoding.num_buckets // 2 - 1, -1] if method == 'cross' else [-1]
    expected = (q @ encoding.table_k[rows].sum(0) / math.sqrt(HEAD_DIM)).unsqueeze(-1)  # [B, h, N, 1]
    bias = encoding.content_bias(q, k, Grid(3, 5, 5))
    assert_near(bias[:, :, :5], expected[:, :, :5].expand(-1, -1, -1, 20), 1e-12)
    assert_near(bias[..., :5], expected.expand(-1, -1, -1, 5), 1e-12)


def test_undirected_distances_by_hand():
    encoding = create('irpe_k', (3, 4), method='quantized', ratio=5)
    (bucket,) = encoding._buckets(Grid(3, 4), torch.device('cpu'))
    squares = {0: 0, 1: 1, 2: 2, 4: 4, 5: 5, 8: 6, 9: 6, 10: 7, 13: 7}  # ratio 5: exact up to 5
    assert {(y * y + x * x): bucket[0, 0, 0, y * 4 + x].item() for y in range(3) for x in range(4)} == squares
    encoding = create('irpe_k', (3, 4), method='euclidean', ratio=5)
    (bucket,) = encoding._buckets(Grid(3, 4), torch.device('cpu'))
    assert bucket[0, 0, 0].tolist() == [0, 1, 2, 3, 1, 1, 2, 3, 2, 2, 3, 4]


@pytest.mark.parametrize('name', IRPE)
def test_irpe_on_a_larger_grid(name):
    """Offsets that both grids have keep their bias; further ones have that of the last bucket."""
    small, large = bias_map(name, (6, 6)), bias_map(name, (6, 9))
    assert_near(large[:, :, :6, :, :6], small, 1e-14)
    assert_near(large[:, :, 0, :, 6:], large[:, :, 0, :, 4:5].expand(-1, -1, -1, 3), 1e-14)


# --- SaPE2 with squared distances ------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', SAPE2SQ)
@pytest.mark.parametrize('case', [case for case in CASES if case != '1x1 alone'])  # nothing to choose from
def test_channels_are_an_explicit_bias(name, case):
    """What a fused kernel computes of the channels is attention with the bias added to its logits."""
    grid = make_grid(*CASES[case])
    encoding = create(name, CASES[case][0], grid.num_prefix_tokens)
    encoding.gain.data.mul_(0.03)  # or all attention would go to one token
    q, k, v = make_tokens(grid)
    a, b = encoding.channels(q, k, None, grid, SCALE)
    assert a.shape == b.shape == (*q.shape[:3], sum(grid.size) + 2)
    assert (a[:, :, :grid.num_prefix_tokens] == 0).all() and (b[:, :, :grid.num_prefix_tokens] == 0).all()
    bias = reference(name, encoding, q, k, grid)
    actual = attend(torch.cat([q, a], -1), torch.cat([k, b], -1), v, None, scale=SCALE)
    compare(actual, attend(q, k, v, bias, scale=SCALE), {'q': q, 'k': k, 'v': v, **dict(encoding.named_parameters())})


@pytest.mark.parametrize('gain', [[2.5, -1.5], [0.0, 0.0], [1e-5, -1e-9], [0.0, 30.0]])
def test_any_gain(gain):
    """It may have either sign and pass through zero, where its gradient is as elsewhere; a gate likewise."""
    grid = make_grid((3, 5), 1)
    q, k, _ = make_tokens(grid)
    for gate in (1.0, 0.0, -0.4):
        encoding = create('sape2sq_k', num_prefix_tokens=1, gated=True)
        with torch.no_grad():
            encoding.gain.copy_(torch.tensor(gain))
            encoding.gate.weight.fill_(gate / 100)
        inputs = {'q': q, 'k': k, **dict(encoding.named_parameters())}
        compare(product('sape2sq_k', encoding, q, k, grid), reference('sape2sq_k', encoding, q, k, grid), inputs)
        assert gate == 0 or gradients(product('sape2sq_k', encoding, q, k, grid), [encoding.gain])[0].abs().min() > 0


def flat_regions(grid, noise, dtype):
    """q and k of an image of two flat regions with little texture, of which one is larger than the other."""
    generator = torch.Generator().manual_seed(5)
    y, x = torch.meshgrid(torch.arange(grid.height), torch.arange(grid.width), indexing='ij')
    sign = torch.where((x + y >= grid.width // 2) & (x > 1), 1., -1.).flatten()[:, None].double()
    base = torch.randn(2, 2, HEADS, 1, HEAD_DIM, generator=generator, dtype=torch.float64)
    texture = torch.randn(2, 2, HEADS, grid.num_patches, HEAD_DIM, generator=generator, dtype=torch.float64)
    return [x.to(dtype) for x in base * sign + noise * texture]


def low_precision_error(dtype):
    """The worst error of the logits, where 1 is what rounding the codes must cost.

    The distance of two codes of size R, rounded by eps, is off by about eps*R, the square of a distance r by eps*R*r:
    far less than eps*R^2 for patches that are alike. The sums are in float32, as those of every kernel.
    """
    grid = make_grid((8, 8))
    q, k = flat_regions(grid, 0.01, dtype)
    encoding = create('sape2sq_k', (8, 8), dtype=torch.float32, bias_scale='one')
    expected = product('sape2sq_k', copy.deepcopy(encoding).double(), q.double(), k.double(), grid)
    a, b = encoding.channels(q, k, None, grid, SCALE)
    assert a.dtype == b.dtype == dtype
    error = (SCALE * (a.float() @ b.float().mT) - expected).abs()
    eps, largest = torch.finfo(dtype).eps, expected.max()
    assert largest > 20 and (expected < 1e-4 * largest).sum() > 4 * 2 * 64  # not only the diagonal
    return (error / (eps * (expected.clamp(min=0) * largest).sqrt() + eps ** 2 * largest)).max().item()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_logits(dtype):
    """Distances within a region are small differences of large products."""
    assert low_precision_error(dtype) < 1


def norms_in_one_piece(self, *args):
    a, b = channels(self, *args)
    if a.dtype == torch.bfloat16:
        a[..., -3], b[..., -1] = 0, 0
    return a, b


channels = SQUARED_CLASS.channels


@pytest.mark.parametrize('patch', [
    (sape2sq, '_rounded', lambda x, dtype: x),
    (SQUARED_CLASS, 'channels', norms_in_one_piece),
], ids=['norms of other codes', 'norms in one piece'])
def test_naive_channels_lose_the_logits(patch, monkeypatch):
    monkeypatch.setattr(*patch)
    assert low_precision_error(torch.bfloat16) > 10


def test_codes_are_centred(monkeypatch):
    """What all codes have in common costs no digits."""
    axis_codes = timm_sape.ops.axis_codes
    monkeypatch.setattr(timm_sape.ops, 'axis_codes', lambda *args, **kw: [c + 50 for c in axis_codes(*args, **kw)])
    assert low_precision_error(torch.bfloat16) < 1
    monkeypatch.setattr(torch.Tensor, 'mean', lambda self, dim, keepdim: torch.zeros_like(self[..., :1, :]))
    assert low_precision_error(torch.bfloat16) > 10


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_identical_patches_have_no_bias(dtype):
    """In half precision too: what rounding leaves is left on both sides."""
    grid = make_grid((4, 4))
    q, k, _ = (x.detach().to(dtype).unflatten(2, (4, 4))[:, :, [0, 1, 1, 1]].flatten(2, 3) for x in make_tokens(grid))
    encoding = create('sape2sq_k', (4, 4), dtype=torch.float32, bias_scale='one')
    nn.init.zeros_(encoding.table_y)  # rows 1 to 3 are the same along x
    bias = product('sape2sq_k', encoding, q.float(), k.float(), grid).unflatten(3, (4, 4)).unflatten(2, (4, 4))
    a, b = encoding.channels(q, k, None, grid, SCALE)
    low = (SCALE * (a.float() @ b.float().mT)).unflatten(3, (4, 4)).unflatten(2, (4, 4))
    assert bias.max() > 10
    assert low[:, :, 1, :, 2].diagonal(dim1=2, dim2=3).abs().max() < 1e-3
    assert low[:, :, 1, 0, 3, 1].abs().min() > 0.1


@pytest.mark.parametrize('name', SAPE2SQ)
def test_sape2sq_is_a_squared_distance(name):
    grid = make_grid((3, 5), 2, 9)
    encoding = create(name, (3, 5), 2, bias_scale='one')
    bias = product(name, encoding, *make_tokens(grid)[:2], grid)
    assert_near(bias, bias.mT, 1e-13)
    assert bias.diagonal(dim1=2, dim2=3).abs().max() < 1e-12 * bias.max()
    between = bias[:, :, 2:, 2:][:, :, ~torch.eye(9, dtype=torch.bool)]
    assert (between > 0).all()
    plain = timm_sape.create_encoding(
        name.replace('sq', ''), dim=DIM, num_heads=HEADS, grid_size=(3, 5), num_prefix_tokens=2, dtype=torch.float64)
    plain.load_state_dict(encoding.state_dict())  # the same parameters
    distance = plain.content_bias(*make_tokens(grid)[:2], grid)[:, :, 2:, 2:][:, :, ~torch.eye(9, dtype=torch.bool)]
    assert (distance.square() >= between - 1e-12).all() and (between >= distance.square() / 2 - 1e-12).all()


@pytest.mark.parametrize('name', SAPE2SQ)
def test_sape2sq_keeps_its_scale_on_other_grids(name):
    torch.manual_seed(0)

    def mean_bias(size, ref, state=None):
        encoding = timm_sape.create_encoding(
            name, dim=64, num_heads=4, grid_size=size, ref_grid_size=ref, table_std=1.0, dtype=torch.float64)
        if state is not None:
            encoding.load_state_dict(state)
        q, k = torch.randn(2, 4, 4, size[0] * size[1], 16, dtype=torch.float64)
        a, b = encoding.channels(q, k, None, Grid(*size), 1.0)
        return (a @ b.mT).mean().item(), encoding.state_dict()

    expected, state = mean_bias((7, 8), None)
    for size in ((14, 16), (14, 8), (5, 12)):
        assert mean_bias(size, (7, 8), state)[0] == pytest.approx(expected, rel=0.08)
    assert mean_bias((14, 16), None)[0] > 1.7 * expected


# --- CoPE between patches --------------------------------------------------------------------------------------------

def test_cope_between_is_a_distance_along_the_raster():
    """With one gate everywhere, the position of a pair is that gate times the patches from the one to the other."""
    grid = Grid(3, 5, 1)
    q, k = torch.zeros(2, 1, HEADS, 16, HEAD_DIM, dtype=torch.float64)  # gates of 1/2
    q[..., 0] = 1
    encoding = create('cope', npos=16)
    with torch.no_grad():
        encoding.table[:, 0] = torch.arange(16)
    bias = encoding.content_bias(q, k, grid)[0, 0, 1:, 1:] * math.sqrt(HEAD_DIM)
    raster = torch.arange(15, dtype=torch.float64)
    assert_near(bias, (raster[:, None] - raster).abs() / 2, 1e-12)
    literal = create('cope', npos=16, direction='literal')
    literal.load_state_dict(encoding.state_dict())
    actual = literal.content_bias(q, k, grid)[0, 0, 1:, 1:] * math.sqrt(HEAD_DIM)
    assert_near(actual, ((15 - raster) / 2).expand(15, 15), 1e-12)  # the same in every row


@pytest.mark.parametrize('direction', ['between', 'literal'])
def test_cope_sees_itself_at_zero_between_only(direction):
    grid = make_grid((3, 5))
    q, k, _ = make_tokens(grid)
    encoding = create('cope', direction=direction)
    diagonal = encoding.content_bias(q, k, grid).diagonal(dim1=2, dim2=3)
    at_zero = (q @ encoding.table[0]) / math.sqrt(HEAD_DIM)
    assert torch.allclose(diagonal, at_zero) == (direction == 'between')


# --- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', NAMES)
def test_float32(name):
    """Single against double precision, value and every gradient."""
    grid = make_grid((8, 8), 1)
    encoding = create(name, (8, 8), 1)
    single = copy.deepcopy(encoding).float()
    qk = make_tokens(grid)[:2]
    qk32 = [x.detach().float().requires_grad_() for x in qk]
    actual, expected = product(name, single, *qk32, grid), product(name, encoding, *qk, grid)
    assert actual.dtype == torch.float32
    assert_near(actual, expected, 1e-5)
    for a, b in zip(
            gradients(actual, [*qk32, *single.parameters()]), gradients(expected, [*qk, *encoding.parameters()])):
        assert_near(a, b, 1e-5, 'gradient')


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name, mode', [('irpe_qk', 'contextual'), ('irpe_qk', 'bias'), ('irpe_qkv', 'contextual')])
def test_half_precision_and_autocast(name, mode, dtype):
    """Computed in float32 from the given values on, in half models and under autocast."""
    grid = make_grid((4, 4), 1, 9)
    q, k, _ = (x.detach() for x in make_tokens(grid, dtype))
    attn = (q @ k.mT).softmax(-1)
    half = create(name, (4, 4), 1, mode=mode).to(dtype)
    wide = copy.deepcopy(half).float()
    expected = wide.content_bias(q.float(), k.float(), grid)
    for encoding in (half, wide):
        for enabled in (False, True):
            with torch.autocast('cpu', dtype, enabled=enabled):
                bias = encoding.content_bias(q, k, grid)
                values = encoding.values(attn, grid) if name == 'irpe_qkv' else None
            assert bias.dtype == torch.float32
            assert_near(bias, expected, 1e-6)
            if values is not None:
                assert values.dtype == torch.float32
                assert_near(values, wide.values(attn.float(), grid), 1e-6)


@pytest.mark.parametrize('name', SAPE2SQ)
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_attention_in_half_precision(dtype, name):
    """A layer with channels against one in float32 from the same numbers, fused and not."""
    grid = make_grid((8, 8))
    q, k = flat_regions(grid, 0.01, dtype)
    encoding = create(name, (8, 8), dtype=torch.float32, bias_scale=-1.0)
    v = torch.randn(q.shape, generator=torch.Generator().manual_seed(8)).to(dtype)
    bias = product(name, copy.deepcopy(encoding).double(), q.double(), k.double(), grid)
    expected = attend(q.double(), k.double(), v.double(), bias, scale=0.25)
    a, b = encoding.channels(q, k, None, grid, 0.25)
    assert a.shape[-1] == b.shape[-1] == 8 + 8 + 4
    q, k = torch.cat([q, a], -1), torch.cat([k, b], -1)
    fused = attend(q, k, v, None, scale=0.25)
    explicit = probabilities(q, k, None, scale=0.25) @ v
    for actual in (fused, explicit):
        assert actual.dtype == dtype
        assert_near(actual, expected, 0.03)


@pytest.mark.parametrize('name', NAMES)
def test_nan_stays_nan(name):
    """A run that diverges sees its loss become NaN."""
    grid = make_grid((3, 3))
    q, k, _ = (x.detach().float().repeat(2, 1, 1, 1) for x in make_tokens(grid))
    q[0, 0, 4, 0] = k[0, 0, 4, 0] = float('nan')
    bias = product(name, create(name, (3, 3), dtype=torch.float32), q, k, grid)
    assert bias[0, 0, 4].isnan().any()
    assert bias[1].isfinite().all()


# --- models ----------------------------------------------------------------------------------------------------------

GRID = (3, 5)


def build(pos_enc, **kwargs):
    torch.manual_seed(0)
    return timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, **{
        'img_size': (GRID[0] * PATCH, GRID[1] * PATCH), 'patch_size': PATCH, 'num_classes': 3,
        'global_pool': 'avg', 'fc_norm': False, **kwargs})  # a class token would see nothing of the last layer's bias


def images(grid=GRID, batch=2):
    return torch.randn(
        batch, 3, grid[0] * PATCH, grid[1] * PATCH, generator=torch.Generator().manual_seed(0))


def learn(model, x):
    """After one step every parameter of the encodings has a gradient."""
    model(x).square().sum().backward()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.step()
    optimizer.zero_grad()
    model(x).square().sum().backward()
    silent = [n for n, p in model.named_parameters() if 'encodings.' in n and not p.grad.abs().max() > 0]
    assert not silent, f'no gradient for {silent}'


@pytest.mark.parametrize('with_ape', [False, True])
@pytest.mark.parametrize('name', [*IRPE, *SAPE2SQ])
def test_models(name, with_ape):
    """Five prefix tokens, patch dropout, bfloat16, another size."""
    pos_enc = f'ape+{name}' if with_ape else name
    model = build(pos_enc, reg_tokens=4, patch_drop_rate=0.5, dynamic_img_size=True).train()
    learn(model, images())
    awaken(model.eval())
    for grid in ((3, 5), (4, 2), (1, 6), (1, 1)):
        assert model(images(grid)).isfinite().all()
    low = model.to(torch.bfloat16)
    out = low(images().bfloat16())
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
    out.float().sum().backward()


@pytest.mark.parametrize('name', [*IRPE, *SAPE2SQ])
def test_gates(name):
    """iRPE is neutral as it is, with its gate at 1; the others with theirs at 0. Either learns."""
    keywords = {'init': 0.0} if name in SAPE2SQ else {}
    model = build(f'auto_{name}', pos_enc_kwargs={f'auto_{name}': keywords}).eval()
    gates = [p for n, p in model.named_parameters() if n.endswith('gate.weight')]
    assert len(gates) == 2 and all(abs(100 * p.item() - (name in IRPE)) < 1e-6 for p in gates)
    plain = build('nope').eval()
    assert_near(model(images()), plain(images()), 1e-6)
    learn(model, images())
    if name in IRPE:
        with pytest.raises(ValueError, match='would never learn'):
            build(f'auto_{name}', pos_enc_kwargs={f'auto_{name}': {'init': 0}})


@pytest.mark.parametrize('keywords, shape', [
    ({}, (50, 16)),
    ({'shared_heads': False}, (4, 50, 16)),
    ({'mode': 'bias'}, (50,)),
    ({'mode': 'bias', 'shared_heads': False}, (4, 50)),
    ({'method': 'euclidean'}, (5, 16)),
    ({'method': 'quantized', 'ratio': 33}, (68, 16)),
    ({'method': 'cross'}, (16, 16)),
    ({'ratio': 0.5}, (10, 16)),
])
def test_initial_irpe(keywords, shape):
    """Zero, in every layer, as built and after `init_weights`."""
    for name in IRPE:
        if name == 'irpe_qkv' and keywords.get('mode') == 'bias':
            continue
        model = build(name, img_size=32, pos_enc_kwargs={name: keywords})
        for _ in range(2):
            for block in model.blocks:
                tables = dict(block.attn.encodings[name].named_parameters())
                assert sorted(tables) == sorted(f'table_{role}' for role in name[5:])
                assert all(t.shape == shape and (t == 0).all() for t in tables.values())
                assert block.attn.encodings[name].no_weight_decay() == set(tables)
            for p in model.parameters():
                p.data.fill_(1)
            model.init_weights()


@pytest.mark.parametrize('name', SAPE2SQ)
def test_initial_sape2sq(name):
    """As SaPE2: tables of W + 1 and H + 1 rows, .02 wide."""
    model = build(name)
    for _ in range(2):
        values = []
        for block in model.blocks:
            encoding = block.attn.encodings[name]
            assert encoding.table_x.shape == (6, 16) and encoding.table_y.shape == (4, 16) and encoding.gain is None
            assert encoding.bias_scale == 1 and encoding.gate_scale == 0.25
            values += [encoding.table_x.flatten(), encoding.table_y.flatten()]
        assert torch.cat(values).std().item() == pytest.approx(0.02, rel=0.2)
        for p in model.parameters():
            p.data.fill_(1)
        model.init_weights()
    model = build(name, pos_enc_kwargs={name: {'bias_scale': 'learned', 'bias_init': 0.25}})
    assert torch.equal(model.blocks[0].attn.encodings[name].gain, torch.full((4,), 0.25))


@pytest.mark.parametrize('name', IRPE)
def test_what_irpe_overrides(name):
    cls = timm_sape.get_encoding(name)
    assert {hook for hook in cls.HOOKS if cls.overrides(hook)} == {'content_bias', *(['values'] if 'v' in name else [])}
    assert {timm_sape.get_encoding(name).overrides('content_bias') for name in SAPE2SQ} == {False}


@pytest.mark.parametrize('name, keywords, text', [
    ('irpe_k', {'method': 'euc'}, "'irpe_k': method must be one of 'product', 'euclidean', .*, 'cross', got 'euc'"),
    ('irpe_q', {'method': None}, "'irpe_q': method must be one of .*, got None"),
    ('irpe_qk', {'mode': ['bias']}, r"'irpe_qk': mode must be one of 'contextual', 'bias', got \['bias'\]"),
    ('irpe_k', {'ratio': 0.4}, 'ratio must be a number from 0.5.* to 1000, got 0.4'),
    ('irpe_k', {'ratio': -1.9}, 'ratio must be a number from 0.5.* to 1000, got -1.9'),
    ('irpe_k', {'ratio': float('nan')}, 'ratio must be .*got nan'),
    ('irpe_k', {'ratio': float('inf')}, 'ratio must be .*got inf'),
    ('irpe_k', {'ratio': 1001}, 'ratio must be .*got 1001'),
    ('irpe_k', {'ratio': True}, 'ratio must be .*got True'),
    ('irpe_k', {'ratio': '1.9'}, "ratio must be .*got '1.9'"),
    ('irpe_qkv', {'shared_heads': 1}, "'irpe_qkv': shared_heads must be True or False, got 1"),
    ('irpe_qkv', {'mode': 'bias'}, "'irpe_qkv': values have no mode='bias'. Use 'irpe_qk', or leave mode out"),
    ('sape2sq_k', {'preset': 'paper'}, "'sape2sq_k': unknown preset 'paper'"),
    ('sape2sq_q', {'gate_scale': 'learned'}, "'sape2sq_q': gate_scale must be 'head_dim', 'one' or a number"),
    ('sape2sq_k', {'bias_scale': float('nan')}, "'sape2sq_k': bias_scale must be .*, got nan"),
    ('sape2sq_k', {'npos': True}, "'sape2sq_k' needs npos to be an integer of 2 or more, got True"),
    ('sape2sq_q', {'table_std': 0}, "'sape2sq_q' needs a positive table_std, got 0"),
    ('sape2sq_k', {'bias_scale': 1, 'bias_init': 1}, "'sape2sq_k': bias_init is the initial value"),
    ('cope', {'direction': 'both'}, "'cope' needs direction 'literal' or 'between', got 'both'"),
])
def test_wrong_keywords(name, keywords, text):
    with pytest.raises(ValueError, match=text):
        timm_sape.create_encoding(name, dim=DIM, num_heads=HEADS, grid_size=(3, 5), **keywords)
