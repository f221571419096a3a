"""Each encoding against its equations (references.py), its properties and its initial values."""
import copy
import functools
import itertools

import pytest
import timm
import torch
import torch.nn as nn
from timm.layers import PatchDropoutWithIndices
from timm.layers.pos_embed_sincos import apply_rot_embed_cat

import references
import timm_sape
from references import assert_near
from timm_sape.attention import PosEncAttention
from timm_sape.grid import Grid
from timm_sape.ops import contextual, contextual_op

HEADS, HEAD_DIM = 2, 8  # with 4 channels, all frequencies of a rotation are 1
DIM = HEADS * HEAD_DIM
SAPE2 = ('sape2_k', 'sape2_q', 'sape2_qk')
CONTENT = (*SAPE2, 'cope')
ROTATIONS = ('rope2d', 'rope2d_mixed')
ALONE = [name for name in timm_sape.list_encodings() if timm_sape.get_encoding(name).alone]


def create(name, grid_size, num_prefix_tokens=0, ref_grid_size=None, dtype=torch.float64, **keywords):
    """An encoding in which every parameter matters: none is zero, none small."""
    if name in SAPE2:
        keywords = {'bias_scale': 'learned', **keywords}
    if name == 'cope':
        keywords = {'npos': 7, **keywords}  # fewer than there are patches, so that the last one is reached
    encoding = timm_sape.create_encoding(
        name,
        dim=DIM,
        num_heads=HEADS,
        grid_size=grid_size,
        num_prefix_tokens=num_prefix_tokens,
        ref_grid_size=ref_grid_size,
        dtype=dtype,
        **keywords,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in encoding.parameters():
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


def make_qk(grid, dtype=torch.float64):
    batch, num_patches = (1, grid.num_patches) if grid.keep_indices is None else grid.keep_indices.shape
    generator = torch.Generator().manual_seed(3)
    qk = torch.randn(
        2, batch, HEADS, grid.num_prefix_tokens + num_patches, HEAD_DIM, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in qk]


def values_like(q):
    values = torch.randn(q.shape[1:], generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return values.to(q).expand_as(q)


def product(name, encoding, q, k, grid):
    """What the package makes of q and k: a bias; of rotations, which nobody sees from outside, attention."""
    if name in CONTENT:
        return encoding.content_bias(q, k, grid)
    layer = PosEncAttention(DIM, num_heads=HEADS)
    layer.set_encodings({name: encoding})
    layer.qkv = layer.proj = nn.Identity()
    return layer(torch.stack([q, k, values_like(q)]).permute(1, 3, 0, 2, 4).flatten(2), grid)


def reference(name, encoding, q, k, grid):
    """The same from the equations."""
    where = {'num_prefix_tokens': grid.num_prefix_tokens, 'keep_indices': grid.keep_indices}
    if name in SAPE2:
        bias = references.sape2_bias(
            q, k, encoding.table_x, encoding.table_y, grid.size,
            mode=name[len('sape2_'):], ref_grid_size=encoding.ref_grid_size, **where)
        return torch.stack([encoding.gain[h] * bias[:, h] for h in range(HEADS)], dim=1)
    if name == 'cope':
        ref_num_patches = encoding.ref_grid_size[0] * encoding.ref_grid_size[1]
        return references.cope_bias(q, k, encoding.table, grid.size, ref_num_patches=ref_num_patches, **where)
    out = references.attention(*rotate(name, encoding, q, k, grid.size, **where), values_like(q))
    return out.transpose(1, 2).flatten(2)


def rotate(name, encoding, q, k, grid_size, **where):
    if name == 'rope2d':
        return [references.rope2d(x, grid_size, **where) for x in (q, k)]
    return [references.rope2d_mixed(x, encoding.freqs, grid_size, **where) for x in (q, k)]


def gradients(output, inputs):
    """Gradients of a weighted sum of all entries."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return torch.autograd.grad(output, inputs, weights.to(output))


def check(name, grid_size, num_prefix_tokens, num_keep, ref_grid_size, **keywords):
    """Value and every gradient in float64."""
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = create(name, grid_size, num_prefix_tokens, ref_grid_size, **keywords)
    if name in CONTENT:
        assert encoding.ref_grid_size == (ref_grid_size or grid_size)
    q, k = make_qk(grid)
    inputs = {'q': q, 'k': k, **dict(encoding.named_parameters())}
    actual, expected = (f(name, encoding, q, k, grid) for f in (product, reference))
    assert_near(actual, expected, 1e-10)
    for what, a, b in zip(inputs, gradients(actual, list(inputs.values())), gradients(expected, list(inputs.values()))):
        assert_near(a, b, 1e-10, f'gradient of {what}')


CASES = {  # grid, prefix tokens, kept patches, trained grid
    '3x5': ((3, 5), 0, None, None),
    '3x5 and 5 prefix tokens': ((3, 5), 5, None, None),
    '1x7': ((1, 7), 1, None, None),
    '7x1': ((7, 1), 1, None, None),
    '4x4': ((4, 4), 1, None, None),
    '1x1': ((1, 1), 1, None, None),
    '1x1 alone': ((1, 1), 0, None, None),
    '3x5, 8 kept': ((3, 5), 1, 8, None),
    '7x1, 3 kept': ((7, 1), 0, 3, None),
    '3x5 trained on 6x2': ((3, 5), 1, None, (6, 2)),
    '1x7 trained on 4x4': ((1, 7), 0, None, (4, 4)),
    '4x4 trained on 3x5, 6 kept': ((4, 4), 5, 6, (3, 5)),
}


@pytest.mark.parametrize('name, case', [
    (name, case) for name in (*CONTENT, *ROTATIONS) for case in CASES
    if name in CONTENT or case != '1x1 alone'  # one token: attention has nothing to choose from
])
def test_equations(name, case):
    check(name, *CASES[case])


@pytest.mark.parametrize('npos', [2, 3])
def test_positions_beyond_the_last_count_as_the_last(npos):
    check('sape2_k', (3, 5), 1, None, None, npos=npos)
    check('sape2_q', (1, 7), 0, 5, (2, 9), npos=npos)
    check('cope', (3, 5), 1, None, None, npos=npos)


@pytest.mark.parametrize('num_prefix_tokens, num_prefix_rows', [(0, 0), (1, 1), (5, 5), (1, 0), (5, 0)])
def test_ape(num_prefix_tokens, num_prefix_rows):
    encoding = create('ape', (3, 5), num_prefix_tokens)
    x = torch.randn(2, num_prefix_tokens + 15, DIM, dtype=torch.float64)
    pos_embed = torch.randn(1, num_prefix_rows + 15, DIM, dtype=torch.float64, requires_grad=True)
    factor, term = encoding.embed(x, Grid(3, 5, num_prefix_tokens), pos_embed)
    assert factor is None
    actual, expected = x + term, references.ape(x, pos_embed, num_prefix_tokens)
    assert_near(actual, expected, 1e-10)
    assert_near(gradients(actual, pos_embed)[0], gradients(expected, pos_embed)[0], 1e-10, 'gradient')


@pytest.mark.parametrize('grid_size', [(5, 3), (2, 9), (6, 10), (1, 1)])
@pytest.mark.parametrize('num_prefix_tokens, num_prefix_rows', [(0, 0), (2, 2), (2, 0)])
def test_ape_on_another_grid(grid_size, num_prefix_tokens, num_prefix_rows):
    encoding = create('ape', (3, 5), num_prefix_tokens)
    pos_embed = torch.randn(1, num_prefix_rows + 15, DIM, dtype=torch.float64)
    x = torch.zeros(1, num_prefix_tokens + grid_size[0] * grid_size[1], DIM, dtype=torch.float64)
    _, term = encoding.embed(x, Grid(*grid_size, num_prefix_tokens), pos_embed)
    table = references.resampled(pos_embed, (3, 5), grid_size, num_prefix_rows)
    assert_near(term, references.ape(x, table, num_prefix_tokens), 1e-5)  # timm resamples in float32


def test_nope_acts_nowhere():
    encoding = create('nope', (3, 5))
    assert encoding.acts_on() == ()
    assert not list(encoding.parameters())
    assert encoding.embed(torch.randn(1, 15, DIM), Grid(3, 5), None) == (None, None)


@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.parametrize('qk_norm', [True, False])
@pytest.mark.parametrize('names', [('cope', 'rope2d_mixed', 'sape2_q'), ('rope2d', 'sape2_k')])
def test_attention_layer(names, qk_norm, fused):
    """A bias sees q and k after their norms, before their rotation, unscaled; biases add."""
    torch.manual_seed(0)
    grid = make_grid((3, 4), num_prefix_tokens=1, num_keep=7)
    layer = PosEncAttention(DIM, num_heads=HEADS, qkv_bias=True, qk_norm=qk_norm, norm_layer=nn.LayerNorm).double()
    layer.fused_attn = fused
    encodings = {name: create(name, (3, 4), 1) for name in names}
    layer.set_encodings(encodings)
    x = torch.randn(3, 8, DIM, dtype=torch.float64, requires_grad=True)

    qkv = layer.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM))  # [B, N, 3, h, d]
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    q, k = layer.q_norm(q), layer.k_norm(k)
    bias = sum(reference(name, encodings[name], q, k, grid) for name in names if name in CONTENT)
    for name in names:
        if name in ROTATIONS:
            q, k = rotate(
                name, encodings[name], q, k, grid.size, num_prefix_tokens=1, keep_indices=grid.keep_indices)
    out = references.attention(q, k, v, bias=bias)
    expected = layer.proj(out.transpose(1, 2).flatten(2))

    actual = layer(x, grid)
    assert_near(actual, expected, 1e-10)
    inputs = {'x': x, **dict(layer.named_parameters())}
    for what, a, b in zip(
            inputs, gradients(actual, list(inputs.values())), gradients(expected, list(inputs.values()))):
        assert_near(a, b, 1e-10, f'gradient of {what}')


class Widened(nn.Module):
    def forward(self, x):
        return x.float()


@pytest.mark.parametrize('name, hook', [('sape2_k', 'distances'), ('sape2sq_k', 'channels'), ('cope', 'content_bias')])
def test_widening_norms(name, hook):
    """On a GPU autocast runs norms in float32. Encodings and attention get q and k as narrow as v all the same."""
    grid = make_grid((3, 4), num_prefix_tokens=1)
    layer = PosEncAttention(DIM, num_heads=HEADS, qkv_bias=True)
    encoding = create(name, (3, 4), 1, dtype=torch.float32)
    layer.set_encodings({name: encoding})
    x = torch.randn(2, 13, DIM)
    dtypes, function = set(), getattr(encoding, hook)
    setattr(encoding, hook, lambda q, k, *args: dtypes.update((q.dtype, k.dtype)) or function(q, k, *args))
    with torch.autocast('cpu', torch.bfloat16):
        expected = layer(x, grid)
        layer.q_norm = layer.k_norm = Widened()
        actual = layer(x, grid)
    assert dtypes == {torch.bfloat16}
    assert torch.equal(actual, expected)


# --- the reference comparison must be able to fail -------------------------------------------------------------------

def exclusive_sum(gates):
    return gates.flip(-1).cumsum(-1).flip(-1) - gates


def look_up(shift=0, linear=True, slope=True):
    def mutant(z, pos):
        last = z.shape[-1] - 1
        pos = (pos + shift).clamp(min=0, max=last)
        cell = pos.detach().long().clamp(max=last - 1)
        weight = pos - cell
        weight = weight if slope else 0.5 * (weight + weight.detach())
        return torch.lerp(z.gather(-1, cell), z.gather(-1, cell + 1), weight if linear else 0 * weight)
    return mutant


def swapping(function):
    return lambda q, k, *args, **kwargs: function(k, q, *args, **kwargs)


def without(function, keyword):
    return lambda *args, **kwargs: function(*args, **{**kwargs, keyword: None})


def distances(p, squared=False):
    def mutant(codes):
        difference = codes.unsqueeze(-2) - codes.unsqueeze(-3)
        return difference.square().sum(-1) if squared else difference.abs().pow(p).sum(-1)
    return mutant


def pad_behind(self, bias):
    return torch.nn.functional.pad(bias, (0, self.num_prefix_tokens, 0, self.num_prefix_tokens))


def in_order(function):
    def mutant(self, tokens):
        return function(Grid(*self.size, self.num_prefix_tokens, self.keep_indices.sort().values), tokens)
    return mutant


def transposed_coordinates(self, device=None, dtype=None):
    return coordinates(self, device, dtype).flip(-1)


def columns_alike(self, device=None, dtype=None):
    return coordinates(self, device, dtype) * torch.tensor([1, 0])


def half_layout(angles, rotate_half):
    angles = torch.cat([angles, angles], dim=-1)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def turned_back(angles, rotate_half):
    return rotation_table(-angles, rotate_half)


coordinates = Grid.coordinates
rotation_table = timm_sape.encodings.base.rotation_table
ops = timm_sape.ops

MUTANTS = {  # encoding, case, [(owner, attribute, replacement)]
    'prefix sum': ('sape2_k', '3x5', [(contextual, '_suffix_sum', lambda gates: gates.cumsum(-1))]),
    'sum without the patch itself': ('sape2_q', '3x5', [(contextual, '_suffix_sum', exclusive_sum)]),
    'cope, prefix sum': ('cope', '3x5', [(contextual_op, '_suffix_sum', lambda gates: gates.cumsum(-1))]),
    'one cell too far': ('sape2_k', '3x5', [(contextual, '_interpolate', look_up(shift=1))]),
    'no interpolation': ('cope', '3x5, 8 kept', [(contextual, '_interpolate', look_up(linear=False))]),
    'half the gradient of the positions': ('sape2_k', '3x5', [(contextual, '_interpolate', look_up(slope=False))]),
    'q and k swapped': ('sape2_k', '3x5', [(ops, 'axis_codes', swapping(ops.axis_codes))]),
    'q and k swapped, mode qk': ('sape2_qk', '3x5', [(ops, 'axis_codes', swapping(ops.axis_codes))]),
    'cope, q and k swapped': ('cope', '3x5', [
        (ops, 'recomputed_contextual_bias', swapping(ops.recomputed_contextual_bias))]),
    'squared distance': ('sape2_k', '3x5', [(ops.distances, 'pairwise_distance', distances(2, squared=True))]),
    'city-block distance': ('sape2_k', '3x5', [(ops.distances, 'pairwise_distance', distances(1))]),
    'prefix behind': ('sape2_k', '4x4', [(Grid, 'pad_prefix', pad_behind)]),
    'no prefix rule': ('sape2_k', '4x4', [(Grid, 'pad_prefix', lambda self, bias: bias)]),
    'cope, prefix behind': ('cope', '4x4', [(Grid, 'pad_prefix', pad_behind)]),
    'kept patches in raster order': ('sape2_k', '3x5, 8 kept', [
        (Grid, 'scatter', in_order(Grid.scatter)), (Grid, 'gather', in_order(Grid.gather))]),
    'dropped patches counted': ('sape2_k', '3x5, 8 kept', [
        (contextual, '_is_kept', lambda grid, like: like.new_ones(like.shape[0], grid.num_patches))]),
    'cope, dropped patches counted': ('cope', '3x5, 8 kept', [
        (contextual, '_is_kept', lambda grid, like: like.new_ones(like.shape[0], grid.num_patches))]),
    'trained grid ignored': ('sape2_k', '3x5 trained on 6x2', [
        (ops, 'axis_codes', without(ops.axis_codes, 'ref_grid_size'))]),
    'cope, trained grid ignored': ('cope', '3x5 trained on 6x2', [
        (ops, 'recomputed_contextual_bias', without(ops.recomputed_contextual_bias, 'ref_num_patches'))]),
    'rope2d, x and y swapped': ('rope2d', '3x5', [(Grid, 'coordinates', transposed_coordinates)]),
    'rope2d, pairs d/2 apart': ('rope2d', '3x5', [(timm_sape.encodings.base, 'rotation_table', half_layout)]),
    'rope2d, turned back': ('rope2d', '3x5', [(timm_sape.encodings.base, 'rotation_table', turned_back)]),
    'rope2d, columns not counted': ('rope2d', '4x4', [(Grid, 'coordinates', columns_alike)]),
    'rope2d_mixed, x and y swapped': ('rope2d_mixed', '3x5', [(Grid, 'coordinates', transposed_coordinates)]),
    'rope2d_mixed, rows of kept patches in raster order': ('rope2d_mixed', '3x5, 8 kept', [
        (Grid, 'keep_rows', in_order(Grid.keep_rows))]),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    name, case, patches = MUTANTS[mutant]
    for patch in patches:
        monkeypatch.setattr(*patch)
    with pytest.raises(AssertionError, match='off by|instead of'):
        check(name, *CASES[case])


# --- precision -------------------------------------------------------------------------------------------------------

def flat_regions(grid, noise):
    """q and k of an image of two flat regions with little texture, such as an object before a wall."""
    generator = torch.Generator().manual_seed(5)
    y, x = torch.meshgrid(torch.arange(grid.height), torch.arange(grid.width), indexing='ij')
    sign = torch.where((x + y >= grid.width // 2) & (x > 1), 1., -1.).flatten()[:, None].double()
    base = torch.randn(2, 2, HEADS, 1, HEAD_DIM, generator=generator, dtype=torch.float64)
    texture = torch.randn(2, 2, HEADS, grid.num_patches, HEAD_DIM, generator=generator, dtype=torch.float64)
    return [x.requires_grad_() for x in base * sign + noise * texture]


@pytest.mark.parametrize('image', ['random', 'flat regions', 'duplicated rows'])
@pytest.mark.parametrize('name', [*CONTENT, *ROTATIONS])
def test_float32(name, image):
    """Single against double precision, value and every gradient."""
    grid = make_grid((8, 8))
    encoding = create(name, (8, 8))
    qk = make_qk(grid) if image == 'random' else flat_regions(grid, 0.01)
    if image == 'duplicated rows':
        rows = [0, 0, 2, 3, 3, 3, 6, 7]
        qk = [x.detach().unflatten(2, (8, 8))[:, :, rows].flatten(2, 3).requires_grad_() for x in qk]
    single = copy.deepcopy(encoding).float()
    qk32 = [x.detach().float().requires_grad_() for x in qk]

    expected, actual = product(name, encoding, *qk, grid), product(name, single, *qk32, grid)
    assert actual.dtype == torch.float32
    assert_near(actual, expected, 1e-5)
    # Neighbours that differ by 1 % take two of float32's seven digits from the direction of their difference.
    tolerance = 1e-5 if image == 'random' else 1e-4
    names = ['q', 'k', *dict(encoding.named_parameters())]
    for what, a, b in zip(
            names,
            gradients(actual, [*qk32, *single.parameters()]),
            gradients(expected, [*qk, *encoding.parameters()])):
        assert_near(a, b, tolerance, f'gradient of {what}')


@pytest.mark.parametrize('name', CONTENT)
def test_equations_on_flat_regions(name):
    """As `test_equations`, where distances are small beside the codes."""
    grid = make_grid((3, 5))
    encoding = create(name, (3, 5))
    q, k = flat_regions(grid, 0.01)
    inputs = [q, k, *encoding.parameters()]
    actual, expected = (f(name, encoding, q, k, grid) for f in (product, reference))
    assert_near(actual, expected, 1e-10)
    for a, b in zip(gradients(actual, inputs), gradients(expected, inputs)):
        assert_near(a, b, 1e-10, 'gradient')


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('name', SAPE2)
def test_constant_image(name, dtype):
    """All patches alike: no bias, and a gradient of zero rather than of rounding noise or NaN."""
    torch.manual_seed(0)
    for (height, width), dim in itertools.product(((3, 5), (1, 7), (7, 1), (6, 7)), (4, 32)):
        encoding = timm_sape.create_encoding(
            name, dim=2 * dim, num_heads=2, grid_size=(height, width), dtype=dtype, table_std=1.0)
        q, k = (
            torch.randn(3, 2, 1, dim, dtype=dtype).repeat(1, 1, 1 + height * width, 1).requires_grad_()
            for _ in range(2))
        bias = encoding.content_bias(q, k, Grid(height, width, 1))
        assert (bias == 0).all()
        for grad in gradients(bias, [q, k, *encoding.parameters()]):
            assert (grad == 0).all()


@pytest.mark.parametrize('name', CONTENT)
def test_duplicated_patches(name):
    """Patches that cannot be told apart share a row of the bias; gradients are those of the equations."""
    grid = make_grid((4, 4))
    encoding = create(name, (4, 4))
    q, k = (
        x.detach().unflatten(2, (4, 4))[:, :, [0, 1, 1, 1]].flatten(2, 3).requires_grad_() for x in make_qk(grid))
    inputs = [q, k, *encoding.parameters()]
    actual, expected = (f(name, encoding, q, k, grid) for f in (product, reference))
    if name in SAPE2:
        assert (actual.unflatten(2, (4, 4)).unflatten(4, (4, 4))[:, :, 1, 2, 3, 2] == 0).all()
    assert_near(actual, expected, 1e-10)
    for a, b in zip(gradients(actual, inputs), gradients(expected, inputs)):
        assert_near(a, b, 1e-10, 'gradient')


@pytest.mark.parametrize('magnitude', [1e2, 1e3, 1e4])
@pytest.mark.parametrize('name', CONTENT)
def test_large_logits(name, magnitude):
    grid = make_grid((4, 4), num_prefix_tokens=1)
    encoding = create(name, (4, 4), 1, dtype=torch.float32)
    q, k = make_qk(grid, dtype=torch.float32)
    scale = (magnitude / (q @ k.mT).abs().max()).sqrt().detach()
    bias = encoding.content_bias(q * scale, k * scale, grid)
    assert bias.isfinite().all() and bias.abs().max() > 0
    for grad in gradients(bias, [q, k, *encoding.parameters()]):
        assert grad.isfinite().all()


@pytest.mark.parametrize('name', CONTENT)
def test_nan_stays_nan(name):
    """A run that diverges sees its loss become NaN; on a GPU, an index out of NaN would end the process instead."""
    grid = make_grid((3, 3))
    q, k = (x.detach().float() for x in make_qk(grid))
    q[0, 0, 4, 0] = float('nan')
    bias = create(name, (3, 3), dtype=torch.float32).content_bias(q, k, grid)
    assert bias[0, 0, 4].isnan().any()
    assert bias[0, 1].isfinite().all()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name', CONTENT)
def test_half_precision_inputs(name, dtype):
    """Computed in float32 from the given values on, with float32 parameters and with those of a half model."""
    grid = make_grid((4, 4), num_prefix_tokens=1, num_keep=9)
    q, k = (x.detach() for x in make_qk(grid, dtype=dtype))
    for encoding in (create(name, (4, 4), 1, dtype=torch.float32), create(name, (4, 4), 1).to(dtype)):
        bias = encoding.content_bias(q, k, grid)
        assert bias.dtype == torch.float32
        assert_near(bias, encoding.float().content_bias(q.float(), k.float(), grid), 1e-6)


@pytest.mark.parametrize('name', CONTENT)
def test_autocast(name):
    """Autocast neither reaches the gates nor what follows, forwards and backwards."""
    grid = make_grid((4, 4), num_prefix_tokens=1)
    encoding = create(name, (4, 4), 1, dtype=torch.float32)
    q, k = make_qk(grid, dtype=torch.float32)
    inputs = [q, k, *encoding.parameters()]
    expected = encoding.content_bias(q, k, grid)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        actual = encoding.content_bias(q, k, grid)
    assert actual.dtype == torch.float32
    assert_near(actual, expected, 1e-6)
    for a, b in zip(gradients(actual, inputs), gradients(expected, inputs)):
        assert_near(a, b, 1e-6, 'gradient')


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name', ROTATIONS)
def test_angles_in_half_models(name, dtype):
    """Tables stay in float32 and q in its dtype: only the outcome of a rotation is rounded."""
    encoding = create(name, (3, 5), dtype=torch.float32).to(dtype)
    for grid in (make_grid((3, 5)), make_grid((6, 4))):
        assert encoding.rotation(grid).dtype == torch.float32
        assert product(name, encoding, *make_qk(grid, dtype=dtype), grid).dtype == dtype


# --- properties ------------------------------------------------------------------------------------------------------

def permuted(x, order, axis):
    """Rows (axis 0) or columns (axis 1) of a 4 x 5 image in another order, `[B, h, 20, d]`."""
    return x.unflatten(2, (4, 5)).index_select(2 + axis, order).flatten(2, 3)


@pytest.mark.parametrize('zeroed, axis', [('table_y', 0), ('table_x', 1)])
@pytest.mark.parametrize('name', SAPE2)
def test_sape2_axis_is_blind_to_the_other(name, zeroed, axis):
    """The x bias alone moves along with permuted rows, and does not with permuted columns; the y bias likewise."""
    grid = make_grid((4, 5))
    encoding = create(name, (4, 5))
    nn.init.zeros_(getattr(encoding, zeroed))
    q, k = make_qk(grid)
    bias = encoding.content_bias(q, k, grid)
    for moved, blind in ((axis, True), (1 - axis, False)):
        order = torch.tensor([2, 0, 3, 1] if moved == 0 else [1, 4, 0, 3, 2])
        actual = encoding.content_bias(permuted(q, order, moved), permuted(k, order, moved), grid)
        expected = permuted(permuted(bias, order, moved).mT, order, moved).mT
        assert torch.allclose(actual, expected, atol=1e-9) == blind


@pytest.mark.parametrize('name', SAPE2)
def test_sape2_is_a_distance(name):
    grid = make_grid((3, 5), num_prefix_tokens=2, num_keep=9)
    encoding = create(name, (3, 5), 2, bias_scale='one')
    bias = encoding.content_bias(*make_qk(grid), grid)
    assert_near(bias, bias.mT, 1e-14)
    assert (bias >= 0).all()
    assert (bias.diagonal(dim1=2, dim2=3) == 0).all()
    assert (bias[:, :, :2] == 0).all() and (bias[..., :2] == 0).all()
    between = bias[:, :, 2:, 2:]
    assert (between[:, :, ~torch.eye(9, dtype=torch.bool)] > 0).all()
    assert (between.unsqueeze(-1) + between.unsqueeze(2) >= between.unsqueeze(3) - 1e-12).all()  # triangles


@pytest.mark.parametrize('name', [*CONTENT, *ROTATIONS])
def test_images_of_a_batch_do_not_meet(name):
    grid = make_grid((3, 5), num_prefix_tokens=1, num_keep=6)
    encoding = create(name, (3, 5), 1)
    q, k = make_qk(grid)
    together = product(name, encoding, q, k, grid)
    for b in range(3):
        one = Grid(3, 5, 1, grid.keep_indices[b:b + 1])
        alone = product(name, encoding, q[b:b + 1], k[b:b + 1], one)
        assert_near(alone, together[b:b + 1], 1e-13)


@pytest.mark.parametrize('name', CONTENT)
def test_all_patches_kept_is_none_dropped(name):
    """In another order: the bias moves along with the patches."""
    grid = make_grid((3, 5), num_keep=15)
    encoding = create(name, (3, 5))
    q, k = make_qk(grid)
    bias = encoding.content_bias(q, k, make_grid((3, 5)))
    actual = encoding.content_bias(grid.gather(q), grid.gather(k), grid)
    assert_near(actual, grid.keep_pairs(bias), 1e-13)
    assert not torch.allclose(actual, bias)


@pytest.mark.parametrize('grid_size', [(3, 5), (6, 2)])
@pytest.mark.parametrize('name', ROTATIONS)
def test_rotation_table(name, grid_size):
    """What timm makes of the table is the rotation of the equations, on the encoding's own grid and on another one."""
    encoding = create(name, (3, 5))
    q, k = make_qk(make_grid(grid_size))
    table = encoding.rotation(make_grid(grid_size))
    for x, expected in zip((q, k), rotate(name, encoding, q, k, grid_size)):
        assert_near(apply_rot_embed_cat(x, table), expected, 1e-12)


@pytest.mark.parametrize('name', ROTATIONS)
def test_rotation_is_relative(name):
    """One q and one k at all places: lengths stay, and q.k is a function of the offset. Of q alone it is not."""
    grid = make_grid((4, 5))
    q, k = (x[:, :, :1].expand_as(x) for x in make_qk(grid))
    table = create(name, (4, 5)).rotation(grid)
    rotated_q, rotated_k = apply_rot_embed_cat(q, table), apply_rot_embed_cat(k, table)
    assert_near(rotated_q.norm(dim=-1), q.norm(dim=-1), 1e-12)
    assert not torch.allclose(rotated_q, q)
    logits = (rotated_q @ rotated_k.mT).unflatten(2, (4, 5)).unflatten(4, (4, 5))  # [B, h, y, x, y', x']
    shifted = logits[:, :, 1:, 1:, 1:, 1:]
    assert_near(shifted, logits[:, :, :-1, :-1, :-1, :-1], 1e-12)
    assert not torch.allclose(logits[:, :, 1:, :, :-1], logits[:, :, :-1, :, 1:])  # up is not down
    assert not torch.allclose(logits[:, :, :, 1:, :, :-1], logits[:, :, :, :-1, :, 1:])  # left is not right


@pytest.mark.parametrize('name', [*CONTENT, *ROTATIONS])
def test_three_roads_to_another_grid(name):
    """A dynamic size, `set_grid_size` and construction for the new grid follow one rule."""
    trained, grid = create(name, (3, 5), 1), make_grid((4, 7), num_prefix_tokens=1)
    resized = copy.deepcopy(trained)
    resized.set_grid_size((4, 7))
    keywords = {'ref_grid_size': (3, 5)} if name in CONTENT else {}
    built = create(name, (4, 7), 1, **keywords)
    built.load_state_dict(trained.state_dict())
    qk = make_qk(grid)
    expected = product(name, trained, *qk, grid)
    assert_near(expected, reference(name, trained, *qk, grid), 1e-10)
    for encoding in (resized, built):
        assert torch.equal(product(name, encoding, *qk, grid), expected)


@pytest.mark.parametrize('name', SAPE2)
def test_sape2_keeps_its_scale_on_other_grids(name):
    """The mean bias is that of the trained grid; without rescaling it would grow with the size of the grid."""
    torch.manual_seed(0)
    create = functools.partial(
        timm_sape.create_encoding, name, dim=64, num_heads=4, table_std=1.0, dtype=torch.float64)
    trained = create(grid_size=(7, 8))

    @torch.no_grad()
    def mean_bias(encoding):
        q, k = torch.randn(2, 4, 4, encoding.grid_size[0] * encoding.grid_size[1], 16, dtype=torch.float64)
        return encoding.content_bias(q, k, Grid(*encoding.grid_size)).mean().item()

    expected = mean_bias(trained)
    for size in ((14, 16), (14, 8), (5, 12)):
        encoding = create(grid_size=size, ref_grid_size=(7, 8))
        encoding.load_state_dict(trained.state_dict())
        assert mean_bias(encoding) == pytest.approx(expected, rel=0.04)
    assert mean_bias(create(grid_size=(14, 16))) > 1.3 * expected


class Shuffle(PatchDropoutWithIndices):
    """Drops nothing, but changes the order of the patches, image by image."""

    def forward(self, x):
        p = self.num_prefix_tokens
        keep_indices = torch.stack([torch.randperm(x.shape[1] - p) for _ in range(x.shape[0])])
        patches = x[:, p:].gather(1, keep_indices[:, :, None].expand(-1, -1, x.shape[-1]))
        return torch.cat([x[:, :p], patches], dim=1), keep_indices


@pytest.mark.parametrize('name', ALONE)
def test_order_of_kept_patches(name):
    """The class token does not see in which order patches stand in the sequence."""
    torch.manual_seed(0)
    model = timm.create_model(f'test_vit_{name}', img_size=(24, 40), patch_size=8, patch_drop_rate=0.1).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        x = torch.randn(3, 3, 24, 40, dtype=torch.float64)
        expected = model(x)
        model.patch_drop = Shuffle(0.1, num_prefix_tokens=1)
        assert_near(model(x), expected, 1e-10)


# --- keywords and initial values -------------------------------------------------------------------------------------

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
@pytest.mark.parametrize('name', SAPE2)
def test_sape2_scales(name, keywords, gate_scale, bias_scale):
    encoding = timm_sape.create_encoding(
        name, dim=DIM, num_heads=HEADS, grid_size=(2, 3), dtype=torch.float64, table_std=1.0, **keywords)
    grid = make_grid((2, 3))
    q, k = make_qk(grid)
    bias = references.sape2_bias(
        q, k, encoding.table_x, encoding.table_y, (2, 3), mode=name[len('sape2_'):], gate_scale=gate_scale)
    assert_near(encoding.content_bias(q, k, grid), bias_scale * bias, 1e-10)
    learned = keywords.get('bias_scale') == 'learned'
    assert set(dict(encoding.named_parameters())) == {'table_x', 'table_y', *(['gain'] if learned else [])}
    assert encoding.no_weight_decay() == set(dict(encoding.named_parameters()))


@pytest.mark.parametrize('keywords, ref_grid_size, npos_y, npos_x', [
    ({}, None, 4, 6),
    ({}, (7, 2), 8, 3),
    ({'npos': 9}, None, 9, 9),
    ({'npos': 9}, (7, 2), 9, 9),
])
def test_sape2_table_sizes(keywords, ref_grid_size, npos_y, npos_x):
    """By default one row for each count: a row of W patches can be counted to W."""
    encoding = create('sape2_k', (3, 5), ref_grid_size=ref_grid_size, **keywords)
    assert encoding.table_y.shape == (npos_y, HEAD_DIM)
    assert encoding.table_x.shape == (npos_x, HEAD_DIM)


@pytest.mark.parametrize('name, keywords, text', [
    ('sape2_k', {'preset': 'paper'}, "unknown preset 'paper'.*'appendix', 'equations'"),
    ('sape2_q', {'gate_scale': 'learned'}, "sape2_q.*gate_scale must be 'head_dim', 'one' or a number, got 'learned'"),
    ('sape2_k', {'gate_scale': [1.0]}, r'gate_scale must be .*, got \[1.0\]'),
    ('sape2_k', {'gate_scale': True}, 'gate_scale must be .*, got True'),
    ('sape2_k', {'gate_scale': float('nan')}, 'gate_scale must be .*, got nan'),
    ('sape2_k', {'bias_scale': 'two'}, "bias_scale must be 'head_dim', 'one', 'learned' or a number, got 'two'"),
    ('sape2_k', {'bias_scale': float('inf')}, 'bias_scale must be .*, got inf'),
    ('sape2_k', {'bias_init': 1.0}, "bias_init is the initial value of a learned gain. Add bias_scale='learned'"),
    ('sape2_k', {'bias_scale': 'learned', 'bias_init': 'one'}, "bias_init must be a number, got 'one'"),
    ('sape2_k', {'bias_scale': 2.0, 'bias_init': 1.0}, 'bias_init is the initial value of a learned gain'),
    ('sape2_k', {'npos': 1}, 'npos to be an integer of 2 or more, got 1'),
    ('sape2_k', {'npos': 7.0}, 'npos to be an integer of 2 or more, got 7.0'),
    ('sape2_k', {'npos': True}, 'npos to be an integer of 2 or more, got True'),
    ('sape2_k', {'table_std': 0}, 'positive table_std, got 0'),
    ('sape2_k', {'table_std': -0.02}, 'positive table_std, got -0.02'),
    ('sape2_k', {'table_std': 'small'}, "positive table_std, got 'small'"),
    ('cope', {'npos': 1}, "'cope' needs npos to be an integer of 2 or more, got 1"),
    ('cope', {'npos': '64'}, "'cope' needs npos to be an integer of 2 or more, got '64'"),
])
def test_wrong_keywords(name, keywords, text):
    with pytest.raises(ValueError, match=text):
        timm_sape.create_encoding(name, dim=DIM, num_heads=HEADS, grid_size=(3, 5), **keywords)


@pytest.mark.parametrize('name', ROTATIONS)
@pytest.mark.parametrize('head_dim', [3, 6])
def test_rotation_refuses_head_dims(name, head_dim):
    with pytest.raises(ValueError, match=f'{name}.*multiple of 4, got {head_dim}. Choose another num_heads'):
        timm_sape.create_encoding(name, dim=2 * head_dim, num_heads=2, grid_size=(3, 5))


def built(pos_enc, **kwargs):
    torch.manual_seed(0)
    return timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, **kwargs)


@pytest.mark.parametrize('name', SAPE2)
def test_initial_sape2(name):
    model = timm.create_model(f'test_vit_{name}')
    tables = [t for b in model.blocks for e in (b.attn.encodings[name],) for t in (e.table_x, e.table_y)]
    assert [list(t.shape) for t in tables] == [[11, 16]] * 4
    values = torch.stack(tables)
    assert values.std().item() == pytest.approx(0.02, rel=0.1)
    assert abs(values.mean().item()) < 0.003
    assert values.abs().max() < 0.1
    assert len({t[0, 0].item() for t in tables}) == 4  # drawn one by one


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize('name', ['sape2_k', 'rpb', 'lape'])
def test_initial_values_in_other_dtypes(name, dtype):
    """Drawn in float32: in half precision some of what timm's function draws is infinite."""
    encoding = timm_sape.create_encoding(name, dim=256, num_heads=4, grid_size=(40, 40), dtype=dtype)
    for table in (p for p in encoding.parameters() if p.ndim > 1):
        assert table.dtype == dtype and table.double().std().item() == pytest.approx(0.02, rel=0.05)
        assert table.abs().max() < 0.12


@pytest.mark.parametrize('std', [1e-6, 0.5, 3.0])
def test_initial_sape2_tables(std):
    encoding = timm_sape.create_encoding('sape2_k', dim=256, num_heads=2, grid_size=(40, 40), table_std=std)
    values = torch.cat([encoding.table_x, encoding.table_y])
    assert values.std().item() == pytest.approx(std, rel=0.05) and values.abs().max() < 6 * std


def test_initial_sape2_by_keyword():
    keywords = {'sape2_k': {'table_std': 0.5, 'bias_scale': 'learned', 'bias_init': 0.25}}
    model = built('sape2_k', pos_enc_kwargs=keywords)
    encodings = [b.attn.encodings['sape2_k'] for b in model.blocks]
    values = torch.stack([t for e in encodings for t in (e.table_x, e.table_y)])
    assert values.std().item() == pytest.approx(0.5, rel=0.1)
    assert all(torch.equal(e.gain, torch.full((4,), 0.25)) for e in encodings)
    encodings[0].reset_parameters()
    assert encodings[0].table_x.std().item() == pytest.approx(0.5, rel=0.2)


def test_initial_cope():
    model = timm.create_model('test_vit_cope')
    tables = [block.attn.encodings['cope'].table for block in model.blocks]
    assert [list(t.shape) for t in tables] == [[64, 16]] * 2
    assert all((t == 0).all() for t in tables)


def test_initial_rope2d_mixed():
    """10^(-4t/d) long in a direction of its own for each layer and head, and again at right angles to it."""
    model = built('rope2d_mixed')
    freqs = torch.stack([block.attn.encodings['rope2d_mixed'].freqs for block in model.blocks]).detach()
    assert freqs.shape == (2, 2, 4, 8)  # layer, axis, head, pair
    expected = torch.tensor([10 ** (-4 * t / 16) for t in range(4)] * 2)
    assert_near(freqs.norm(dim=1), expected.expand(2, 4, 8), 1e-6)
    (fx, gx), (fy, gy) = (freqs[:, i].split(4, dim=-1) for i in range(2))
    assert_near(gx, -fy, 1e-6)
    assert_near(gy, fx, 1e-6)
    directions = torch.atan2(fy, fx)
    assert_near(directions, directions[..., :1].expand_as(directions), 1e-6)
    assert len({round(a, 4) for a in directions[..., 0].flatten().tolist()}) == 8
    wide = timm_sape.create_encoding('rope2d_mixed', dim=256, num_heads=64, grid_size=(3, 5)).freqs[:, :, 0]
    quadrants = {(x > 0, y > 0) for x, y in wide.T.tolist()}
    assert len(quadrants) == 4  # the directions go all the way round


def test_initial_ape():
    model = built('ape')
    assert model.pos_embed.shape == (1, 101, 64)
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.pos_embed.abs().max() < 0.1


def test_same_backbone():
    """Siblings of one seed start from one backbone: they differ in their encodings alone."""
    plain = built('nope').state_dict()
    for name in ALONE:
        state = built(name).state_dict()
        assert all(torch.equal(state[key], value) for key, value in plain.items())
        own = 'pos_embed' if name == 'ape' else f'encodings.{name}.'
        assert all(own in key for key in state.keys() - plain.keys())


def test_same_images():
    """Siblings of one seed leave the generator, which shuffles the images, where timm's own ViT leaves it."""
    def left_by(name):
        torch.manual_seed(0)
        timm.create_model(name)
        return torch.get_rng_state()

    assert torch.equal(left_by('vit_tiny_patch16_224'), left_by('vit_tiny_sape2_k_ape'))
    assert torch.equal(left_by('vit_tiny_patch16_224'), left_by('vit_tiny_sape2_k_graft'))
    expected = left_by('test_vit_nope')
    assert all(torch.equal(left_by(f'test_vit_{name}'), expected) for name in ALONE)


def test_what_is_drawn_next_is_new():
    """Not the numbers that the tables were drawn from."""
    torch.manual_seed(0)
    model = timm.create_model('test_vit_sape2_k_ape')
    model.reset_classifier(10)
    table = model.blocks[0].attn.encodings['sape2_k'].table_x.flatten()
    pair = torch.stack([table, model.head.weight.flatten()[:len(table)]])
    assert torch.corrcoef(pair)[0, 1].abs() < 0.5
