"""Fixed rotations and fixed biases against their equations (references_geometry.py), timm, and their properties."""
import itertools
import math

import pytest
import timm
import torch
import torch.nn as nn
from timm.layers import PatchDropoutWithIndices, RotaryEmbeddingDinoV3, RotaryEmbeddingMRope
from timm.layers.pos_embed_sincos import freq_bands
from timm.optim import create_optimizer_v2

import references
import references_geometry as geometry
import timm_sape
from common import awaken
from references import assert_near
from timm_sape.attention import PosEncAttention
from timm_sape.encodings import (  # registers them
    alibi2d, base, lookhere, mrope, offset_bias, rope1d, rope_dinov3, rpe2d)
from timm_sape.grid import Grid

HEADS, HEAD_DIM = 4, 12  # four heads, the fewest that lookhere has; six pairs, two for each axis of mrope
DIM = HEADS * HEAD_DIM
ROTATIONS = {'rope1d': rope1d, 'mrope': mrope, 'rope_dinov3': rope_dinov3}
BIASES = {'alibi2d': alibi2d, 'rpe2d': rpe2d, 'lookhere': lookhere}
NAMES = [*ROTATIONS, *BIASES]
GATED = [name for name in NAMES if name != 'lookhere']


def create(name, grid_size, num_prefix_tokens=0, dtype=torch.float64, num_heads=HEADS, dim=None, **keywords):
    dim = HEAD_DIM * num_heads if dim is None else dim
    return timm_sape.create_encoding(
        name, dim=dim, num_heads=num_heads, grid_size=grid_size, num_prefix_tokens=num_prefix_tokens, dtype=dtype,
        **keywords)


def make_grid(grid_size, num_prefix_tokens=0, num_keep=None):
    """With `num_keep`, other patches are dropped from each of 2 images, and the order is random."""
    keep_indices = None
    if num_keep is not None:
        generator = torch.Generator().manual_seed(2)
        keep_indices = torch.stack([
            torch.randperm(grid_size[0] * grid_size[1], generator=generator)[:num_keep] for _ in range(2)])
    return Grid(*grid_size, num_prefix_tokens, keep_indices)


def make_qkv(grid, num_heads=HEADS, head_dim=HEAD_DIM):
    batch, num_patches = (1, grid.num_patches) if grid.keep_indices is None else grid.keep_indices.shape
    generator = torch.Generator().manual_seed(3)
    shape = (3, batch, num_heads, grid.num_prefix_tokens + num_patches, head_dim)
    return [x.requires_grad_() for x in torch.randn(shape, generator=generator, dtype=torch.float64)]


def attend(name, encoding, q, k, v, grid):
    """One attention layer that has the encoding and nothing else."""
    layer = PosEncAttention(q.shape[1] * q.shape[-1], num_heads=q.shape[1])
    layer.set_encodings({name: encoding}, getattr(encoding, 'rotate_half', False))
    layer.qkv = layer.proj = nn.Identity()
    torch.manual_seed(7)
    out = layer(torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).flatten(2), grid)
    return out.unflatten(-1, q.shape[1::2]).transpose(1, 2)


def reference(name, q, k, v, grid, gate=1, **keywords):
    """The same from the equations."""
    where = {'num_prefix_tokens': grid.num_prefix_tokens, 'keep_indices': grid.keep_indices}
    equation = getattr(geometry, name.removeprefix('auto_'))
    if name.removeprefix('auto_') in BIASES:
        pair = equation(q.shape[1], grid.size, **keywords)
        bias = gate * geometry.logit_bias(pair, q.shape[1], grid.size, batch=q.shape[0], **where)
        return references.attention(q, k, v, bias=bias)
    angle = equation(q.shape[-1], grid.size, **keywords)
    turn = references.rotated if name.endswith('rope1d') else geometry.rotated_half
    q, k = (turn(x, lambda *args: gate * angle(*args), grid.size, **where) for x in (q, k))
    return references.attention(q, k, v)


def gradients(output, inputs):
    """Gradients of a weighted sum of all entries."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return torch.autograd.grad(output, inputs, weights)


def check(name, grid_size, num_prefix_tokens, num_keep, ref_grid_size=None, own_grid_size=None, **keywords):
    """Value and every gradient in float64.

    With `ref_grid_size`, positions are rescaled to it. With `own_grid_size`, the encoding is made for that one.
    """
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    rescaling = {'ref_grid_size': ref_grid_size} if ref_grid_size else {}
    made = {'resolution': 'rescale', **rescaling} if rescaling else {}
    encoding = create(name, own_grid_size or grid_size, num_prefix_tokens, **made, **keywords)
    q, k, v = make_qkv(grid)
    inputs = {'q': q, 'k': k, 'v': v, **dict(encoding.named_parameters())}
    gate = {} if encoding.gate is None else {'gate': 100 * encoding.gate.weight[0]}
    keywords.pop('init', None)
    actual = attend(name, encoding, q, k, v, grid)
    expected = reference(name, q, k, v, grid, **rescaling, **gate, **keywords)
    assert_near(actual, expected, 1e-10)
    if grid_size == (1, 1):
        inputs = {'v': v} if num_prefix_tokens == 0 else inputs  # attention has nothing to choose from
    for what, a, b in zip(inputs, gradients(actual, list(inputs.values())), gradients(expected, list(inputs.values()))):
        assert_near(a, b, 1e-10, f'gradient of {what}')


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
OPTIONS = {
    'rope_dinov3': [{'base': 30.0}, {'normalize': 'max'}, {'normalize': 'min'}],
    'mrope': [{'section': [2, 1, 3]}, {'section': (1, 2, 1)}],
    'alibi2d': [{'distance': 'manhattan'}],
    'rpe2d': [{'slopes': 'code'}, {'diagonal': True}, {'slopes': 'code', 'diagonal': True}],
    'lookhere': [{'layer': 2, 'depth': 5}, {'layer': 4, 'depth': 5}],
}


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('name', NAMES)
def test_equations(name, case):
    check(name, *CASES[case])


@pytest.mark.parametrize('name, keywords', [(name, keywords) for name in OPTIONS for keywords in OPTIONS[name]])
def test_options(name, keywords):
    check(name, *CASES['3x5, 6 kept'], **keywords)
    check(name, (2, 4), 0, None, **keywords)


@pytest.mark.parametrize('name', GATED)
def test_gate(name):
    """The gate multiplies angles before their sine, and biases; its gradient is theirs."""
    check(f'auto_{name}', *CASES['3x5, 6 kept'], init=0.7)


@pytest.mark.parametrize('name', NAMES)
def test_another_grid(name):
    """On a grid that it was not made for, an encoding extrapolates; the reference knows no other grid."""
    check(name, (2, 4), 1, None, own_grid_size=(3, 5))
    check(name, (3, 5), 0, 7, own_grid_size=(4, 4))


@pytest.mark.parametrize('name', [name for name in NAMES if name != 'rope_dinov3'])
def test_rescaled(name):
    """The trained grid is met, whatever grid the encoding is made for."""
    check(name, (3, 5), 1, None, ref_grid_size=(6, 2))
    check(name, (2, 4), 0, 5, ref_grid_size=(3, 3), own_grid_size=(1, 2))
    near = create(name, (6, 2), resolution='rescale', ref_grid_size=(3, 1))
    hook = 'rotation' if name in ROTATIONS else 'position_bias'
    same_grid = create(name, (3, 1), resolution='rescale')
    assert torch.equal(getattr(near, hook)(Grid(3, 1)), getattr(create(name, (3, 1)), hook)(Grid(3, 1)))
    assert torch.equal(getattr(near, hook)(Grid(6, 2)), getattr(same_grid, hook)(Grid(6, 2)))
    assert not torch.equal(getattr(near, hook)(Grid(6, 2)), getattr(create(name, (6, 2)), hook)(Grid(6, 2)))


@pytest.mark.parametrize('num_heads', [1, 2, 3, 4, 5, 6, 8, 12, 16, 20])
@pytest.mark.parametrize('name', BIASES)
def test_heads(name, num_heads):
    if not timm_sape.get_encoding(name).fits(num_heads, num_heads):
        assert name == 'lookhere'
        return
    for keywords in ({}, *OPTIONS[name]):
        encoding = create(name, (3, 4), num_heads=num_heads, dim=num_heads, **keywords)
        pair = getattr(geometry, name)(num_heads, (3, 4), **keywords)
        expected = geometry.logit_bias(pair, num_heads, (3, 4))[0]
        actual = encoding.position_bias(Grid(3, 4))
        assert torch.equal(actual.isinf(), expected.isinf())
        assert_near(actual.nan_to_num(neginf=1), expected.nan_to_num(neginf=1), 1e-14)


def test_slopes_by_hand():
    """Figures that are printed somewhere."""
    def first_steps(name, num_heads, to, **keywords):
        encoding = create(name, (2, 2), num_heads=num_heads, dim=num_heads, **keywords)
        return (-encoding.position_bias(Grid(2, 2))[:, 1 - to, to]).tolist()

    # ALiBi's own example, and what its rule gives for the 12 heads of a ViT-B
    assert first_steps('alibi2d', 8, 1) == pytest.approx([1 / n for n in (2, 4, 8, 16, 32, 64, 128, 256)])
    assert first_steps('alibi2d', 12, 1) == pytest.approx(
        [2 ** -i for i in range(1, 9)] + [2 ** -0.5, 2 ** -1.5, 2 ** -2.5, 2 ** -3.5])
    for keywords in ({}, {'slopes': 'code'}):  # the same for 8 heads
        assert first_steps('rpe2d', 8, 0, **keywords) == pytest.approx([2 ** -(1 + i) for i in range(8)])
        assert first_steps('rpe2d', 8, 1, **keywords) == pytest.approx([2 ** -(0.5 + i) for i in range(8)])
    assert first_steps('rpe2d', 4, 0) == pytest.approx([1 / 2, 1 / 8, 1 / 32, 1 / 128])
    assert first_steps('rpe2d', 4, 0, slopes='code') == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 16])
    assert first_steps('rpe2d', 6, 0, slopes='code') == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 2, 1 / 8])


# --- timm ------------------------------------------------------------------------------------------------------------

RECTANGLES = [(3, 5), (5, 3), (1, 7), (7, 1), (4, 4), (1, 1), (14, 14), (9, 16)]


@pytest.mark.parametrize('normalize', ['separate', 'max', 'min'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_rope_dinov3_is_timms(dtype, normalize):
    for head_dim, temperature, grid_size in itertools.product((4, 16, 64), (100.0, 7.0), RECTANGLES):
        layer = RotaryEmbeddingDinoV3(head_dim, temperature=temperature, normalize_coords=normalize, dtype=dtype)
        keywords = {'base': temperature, 'normalize': normalize}
        encoding = create('rope_dinov3', grid_size, num_heads=1, dim=head_dim, dtype=dtype, **keywords)
        for encoding in (encoding, create('rope_dinov3', (2, 2), num_heads=1, dim=head_dim, dtype=dtype, **keywords)):
            actual, expected = encoding.rotation(Grid(*grid_size)), layer.get_embed(list(grid_size))
            assert actual.dtype == expected.dtype == dtype
            # timm's coordinates are float32 in any case; over min(H, W), angles go up to 60
            assert_near(actual, expected, 3e-5 if normalize == 'min' else 3e-6)


@pytest.mark.parametrize('head_dim', [6, 8, 12, 64, 72, 74])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_mrope_is_timms(dtype, head_dim):
    """timm's default section is ours in all of these head dims; any other one means the same."""
    for section in (None, (0, 1, 2), (8, 12, 12), (2, 9, 3), (5, 1, 40)):
        layer = RotaryEmbeddingMRope(head_dim, **({} if section is None else {'mrope_section': section}), dtype=dtype)
        for grid_size in RECTANGLES:
            encoding = create('mrope', grid_size, num_heads=1, dim=head_dim, dtype=dtype, section=section)
            assert_near(encoding.rotation(Grid(*grid_size)), layer.get_embed(list(grid_size)), 3e-6)


def test_mrope_default_is_even():
    """For larger heads timm's default gives all further pairs to time, which is not rotated."""
    for head_dim in (64, 72, 80, 96, 128):
        encoding = create('mrope', (3, 5), num_heads=1, dim=head_dim)
        t, h, w = encoding.section
        assert t + h + w == head_dim // 2 and 0 <= t - w <= 1 and t >= h >= w
        turned = encoding.angles(Grid(3, 5))[-1] != 0
        assert turned.sum() == h + w
        of_timm = RotaryEmbeddingMRope(head_dim).get_embed([3, 5])[-1, :head_dim // 2] != 0
        assert of_timm.sum() == min(24, h + w)


def test_rope1d_has_timms_frequencies():
    """In float32, the only dtype that timm's helper knows."""
    encoding = create('rope1d', (1, 2), dtype=torch.float32)
    assert_near(encoding.angles(Grid(1, 2))[1], freq_bands(HEAD_DIM, temperature=10000.0, step=2), 1e-6)


@pytest.mark.parametrize('name, layer', [
    ('rope_dinov3', RotaryEmbeddingDinoV3(HEAD_DIM, dtype=torch.float64)),
    ('mrope', RotaryEmbeddingMRope(HEAD_DIM, dtype=torch.float64))])
def test_timms_layer_in_place_of_ours(name, layer, monkeypatch):
    """It rounds to float32 even in a float64 model, and does not know of the grid that was trained on."""
    monkeypatch.setattr(base.FixedRotaryEncoding, 'rotation', lambda self, grid: layer.get_embed(list(grid.size)))
    with pytest.raises(AssertionError, match='off by'):
        check(name, *CASES['3x5'])
    if name == 'mrope':
        with pytest.raises(AssertionError, match='off by'):
            check(name, (3, 5), 1, None, ref_grid_size=(6, 2))


AUGMENTATIONS = [
    {'shift': 0.3}, {'jitter': 1.7}, {'rescale': 2.0}, {'shift': 0, 'jitter': 1, 'rescale': 1},
    {'shift': 0.3, 'jitter': 1.7, 'rescale': 2.0}, {'shift': 1.5, 'rescale': 1.2, 'normalize': 'max'}]


@pytest.mark.parametrize('keywords', AUGMENTATIONS, ids=str)
def test_augmentation_is_timms(keywords):
    """From one seed, the same positions as timm draws; as large, in one order, and nothing without training."""
    of_timm = {('normalize_coords' if key == 'normalize' else f'{key}_coords'): v for key, v in keywords.items()}
    layer = RotaryEmbeddingDinoV3(16, **of_timm)
    for own_grid_size in ((3, 5), (2, 2)):
        encoding = create('rope_dinov3', own_grid_size, num_heads=1, dim=16, dtype=torch.float32, **keywords)
        for seed in range(3):
            tables = []
            for rotation in (encoding.rotation, lambda grid: layer.get_embed(list(grid.size))):
                torch.manual_seed(seed)
                tables.append(rotation(Grid(3, 5)))
            assert_near(*tables, 3e-6)
        before = encoding.eval().rotation(Grid(3, 5))
        assert torch.equal(before, encoding.rotation(Grid(3, 5)))
        assert_near(before, layer.eval().get_embed([3, 5]), 3e-6)
        encoding.train(), layer.train()


def test_augmentation_equations():
    """In float64, with a gate."""
    grid = make_grid((3, 5), 1, 6)
    q, k, v = make_qkv(grid)
    encoding = create('auto_rope_dinov3', (3, 5), 1, shift=0.4, jitter=1.5, rescale=2.0, init=0.7).train()
    actual = attend('auto_rope_dinov3', encoding, q, k, v, grid)
    torch.manual_seed(7)
    shift = torch.empty(2, dtype=torch.float64).uniform_(-0.4, 0.4)
    jitter = torch.empty(2, dtype=torch.float64).uniform_(-math.log(1.5), math.log(1.5)).exp()
    rescale = torch.empty(1, dtype=torch.float64).uniform_(-math.log(2), math.log(2)).exp()
    expected = reference(
        'rope_dinov3', q, k, v, grid, gate=100 * encoding.gate.weight[0],
        shift=shift.tolist(), jitter=jitter.tolist(), rescale=rescale.item())
    assert_near(actual, expected, 1e-10)
    inputs = [q, k, v, encoding.gate.weight]
    for a, b in zip(gradients(actual, inputs), gradients(expected, inputs)):
        assert_near(a, b, 1e-10, 'gradient')


def test_augmentation_in_a_model():
    """One draw for a forward pass, another for the next, none in eval mode, and none if it is off."""
    tables = []

    def recorded(self, x, table, grid, rotate=PosEncAttention._rotate):
        tables.append(table)
        return rotate(self, x, table, grid)

    off = build('rope_dinov3').train()
    model = build('rope_dinov3', pos_enc_kwargs={'rope_dinov3': {'shift': 0.5, 'jitter': 1.5, 'rescale': 2}}).train()
    model.load_state_dict(off.state_dict())
    state = torch.get_rng_state()
    expected = off(images())
    assert torch.equal(torch.get_rng_state(), state)
    PosEncAttention._rotate, rotate = recorded, PosEncAttention._rotate
    try:
        model(images()), model(images())
    finally:
        PosEncAttention._rotate = rotate
    assert len(tables) == 8 and all(torch.equal(table, tables[0]) for table in tables[:4])
    assert (tables[4] - tables[0]).abs().max() > 1e-3
    assert torch.equal(model.eval()(images()), expected)


# --- properties ------------------------------------------------------------------------------------------------------

def rotated(name, encoding, x, grid):
    """`[B, h, N, d]` as the attention layer turns it."""
    layer = PosEncAttention(x.shape[1] * x.shape[-1], num_heads=x.shape[1])
    layer.rotate_half = encoding.rotate_half
    return layer._rotate(x, encoding.rotation(grid), grid)


@pytest.mark.parametrize('name', ROTATIONS)
def test_rotations_keep_norms(name):
    grid = Grid(3, 5, 2)
    x = make_qkv(grid)[0]
    turned = rotated(name, create(name, (3, 5), 2), x, grid)
    assert_near(turned.norm(dim=-1), x.norm(dim=-1), 1e-14)
    half = HEAD_DIM // 2
    pairs = [(t, t + half) for t in range(half)] if name != 'rope1d' else [(2 * t, 2 * t + 1) for t in range(half)]
    for pair in pairs:
        assert_near(turned[..., pair].norm(dim=-1), x[..., pair].norm(dim=-1), 1e-14)
    assert torch.equal(turned[:, :, :2], x[:, :, :2])
    assert (turned[:, :, 3:] - x[:, :, 3:]).abs().max() > 0.1


def between_patches(name, encoding, grid_size, token):
    """Logits between patches that are all alike, `[h, H, W, H, W]`."""
    grid = Grid(*grid_size)
    if name in BIASES:
        logits = encoding.position_bias(grid)
    else:
        q, k = (rotated(name, encoding, x[:, :, None].expand(-1, -1, grid.num_patches, -1), grid) for x in token)
        logits = (q @ k.mT)[0]
    return logits.unflatten(-1, grid_size).unflatten(-3, grid_size)


@pytest.mark.parametrize('name', NAMES)
def test_translation(name):
    """What two patches are to each other does not change when both move: every logit, to every offset."""
    token = torch.randn(2, 1, HEADS, HEAD_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for grid_size in ((4, 6), (1, 7), (7, 1)):
        logits = between_patches(name, create(name, grid_size), grid_size, token).nan_to_num(neginf=1)
        for y, x in itertools.product(range(grid_size[0]), range(grid_size[1])):
            height, width = grid_size[0] - y, grid_size[1] - x
            assert_near(logits[:, y:, x:, y:, x:], logits[:, :height, :width, :height, :width], 1e-13)
    assert timm_sape.get_encoding(name).relative


def test_rope1d_knows_the_raster_alone():
    """The last patch of a row and the first of the next are neighbours like any two."""
    token = torch.randn(2, 1, HEADS, HEAD_DIM, dtype=torch.float64)
    logits = between_patches('rope1d', create('rope1d', (3, 5)), (3, 5), token).flatten(3, 4).flatten(1, 2)
    assert_near(logits[:, 1:, 1:], logits[:, :-1, :-1], 1e-13)
    assert not torch.allclose(logits[:, 0, 5], logits[:, 0, 1])


@pytest.mark.parametrize('distance', ['euclidean', 'manhattan'])
def test_alibi2d_decays(distance):
    """The further, the less, in every head; the less so, the further down the list of a power of two."""
    bias = create('alibi2d', (5, 7), distance=distance).position_bias(Grid(5, 7))
    pairs = list(itertools.product(itertools.product(range(5), range(7)), repeat=2))
    norm = math.hypot if distance == 'euclidean' else lambda dy, dx: abs(dy) + abs(dx)
    distances = torch.tensor([norm(b[0] - a[0], b[1] - a[1]) for a, b in pairs], dtype=torch.float64)
    order = distances.argsort()
    steps = distances[order].diff()
    for head in bias.flatten(1)[:, order]:
        fall = head.diff()
        assert (fall[steps > 1e-9] < 0).all() and (fall[steps <= 1e-9].abs() < 1e-12).all()
    assert (bias.diagonal(dim1=1, dim2=2) == 0).all()
    assert (bias[:, 0, 1].diff() > 0).all()


@pytest.mark.parametrize('name, keywords', [
    (name, keywords) for name in ('rpe2d', 'lookhere') for keywords in ({}, *OPTIONS[name])])
def test_decay_along_every_direction(name, keywords):
    """Straight on, each step costs the same, what is seen at all."""
    bias = create(name, (7, 7), num_heads=12, dim=12, **keywords).position_bias(Grid(7, 7)).unflatten(1, (7, 7))
    bias = bias.unflatten(3, (7, 7))[:, 3, 3]  # from the patch in the middle, [h, 7, 7]
    for dy, dx in itertools.product((-1, 0, 1), repeat=2):
        if (dy, dx) == (0, 0):
            continue
        steps = torch.stack([bias[:, 3 + n * dy, 3 + n * dx] for n in range(4)], dim=1)  # [h, 4]
        seen = steps.isfinite().all(1)
        assert torch.equal(seen, steps[:, 1].isfinite())
        assert seen.all() or name == 'lookhere'
        assert (steps[seen].diff() < 0).all() and steps[seen].diff(n=2).abs().max() < 1e-12


def flipped(bias, grid_size, axis):
    """Both patches mirrored, `[h, H*W, H*W]`."""
    bias = bias.unflatten(2, grid_size).unflatten(1, grid_size)
    return bias.flip(1 + axis, 3 + axis).flatten(3, 4).flatten(1, 2)


@pytest.mark.parametrize('axis', [0, 1])
def test_flips(axis):
    """alibi2d does not know left from right, nor up from down; the others do, in every head that is directed."""
    def is_blind(name, head, num_heads=12, **keywords):
        bias = create(name, (4, 5), num_heads=num_heads, dim=num_heads, **keywords).position_bias(Grid(4, 5))
        return torch.equal(flipped(bias, (4, 5), axis)[head], bias[head])

    for head in range(12):
        assert is_blind('alibi2d', head) and is_blind('alibi2d', head, distance='manhattan')
        assert not is_blind('rpe2d', head)
        # Mirrored, a triangle around the other axis stays what it is, as does a head that sees everything.
        corner, around_y = head < 4, head in (4, 5)
        around_x = head in (6, 7)
        assert is_blind('lookhere', head) == (not corner and not (around_y if axis == 0 else around_x))


def test_rpe2d_prefers_what_comes_before():
    bias = create('rpe2d', (4, 5)).position_bias(Grid(4, 5))
    before = torch.ones(20, 20, dtype=torch.bool).tril(-1)
    assert_near(bias.mT[:, before], 2 ** 0.5 * bias[:, before], 1e-14)


@pytest.mark.parametrize('num_heads', [4, 6, 8, 12, 16])
@pytest.mark.parametrize('grid_size', [(3, 5), (1, 7), (7, 1), (1, 1), (4, 4)])
def test_lookhere_sees(num_heads, grid_size):
    """Every patch sees itself, so no row is empty; the heads of a group see all between them."""
    bias = create('lookhere', grid_size, 2, num_heads=num_heads, dim=num_heads).position_bias(Grid(*grid_size, 2))
    assert not bias.isnan().any() and bias.max() == 0
    assert (bias.diagonal(dim1=1, dim2=2) == 0).all()
    assert (bias[:, :2] == 0).all() and (bias[:, :, :2] == 0).all()
    for group in bias.split(4)[:-1] if num_heads > 4 else [bias]:
        seen = group.isfinite()[:, 2:, 2:]
        assert seen.any(0).all()
        assert (seen.sum(0).diagonal() == 4).all()
        if grid_size == (4, 4):
            assert not seen.all(2).all(1).any()


@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('kept', [None, 1, 4])
def test_lookhere_is_never_nan(kept, dtype, fused):
    """Forwards and backwards, also where a single patch is kept, without any prefix token to look at."""
    for grid_size in ((3, 5), (1, 7), (7, 1)):
        grid = make_grid(grid_size, 0, kept)
        encoding = create('lookhere', grid_size, dtype=dtype, layer=0, depth=2)
        layer = PosEncAttention(DIM, num_heads=HEADS, dtype=dtype)
        layer.fused_attn = fused
        layer.set_encodings({'lookhere': encoding})
        x = torch.randn(2, kept or grid.num_patches, DIM, dtype=dtype, requires_grad=True)
        out = layer(x, grid)
        out.float().square().sum().backward()
        assert out.isfinite().all() and x.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


def test_lookhere_masks():
    """-inf in the logits is a patch that is not there: changing it changes nothing."""
    encoding = create('lookhere', (3, 5))
    grid = Grid(3, 5)
    q, k, v = (x.detach() for x in make_qkv(grid))
    out = attend('lookhere', encoding, q, k, v, grid)
    changed = v.clone()
    changed[:, :, 0] += 1  # the corner at the top left
    moved = (attend('lookhere', encoding, q, k, changed, grid) - out).abs().amax(-1)[0] > 1e-9  # [h, H*W]
    at_top = torch.arange(15) < 5
    at_left = torch.arange(15) % 5 == 0
    assert moved[0].all()  # looks up and left
    assert torch.equal(moved[1], at_left) and torch.equal(moved[2], at_top)
    assert torch.equal(moved[3], at_top & at_left)


@pytest.mark.parametrize('name', BIASES)
def test_small_buffers(name):
    """Kept is what depends on the offset, 225 times less than all pairs at 32 x 32 patches; it holds no infinity."""
    encoding = create(name, (32, 32), 1, dtype=torch.float32, num_heads=12, dim=12)
    assert [list(buffer.shape) for buffer in encoding.buffers()] == [[12, 63, 63]]
    assert encoding.table.isfinite().all()
    assert encoding.position_bias(Grid(4, 4, 1)).shape == (12, 17, 17)
    assert create(name, (32, 32)).half().table.dtype == torch.float32


# --- models ----------------------------------------------------------------------------------------------------------

def build(pos_enc, awake=True, **kwargs):
    torch.manual_seed(0)
    defaults = dict(
        img_size=(24, 40), patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=3, reg_tokens=4,
        global_pool='avg', fc_norm=False)
    model = timm.create_model('test_vit_nope', pos_enc=pos_enc, **{**defaults, **kwargs}).eval()
    return awaken(model) if awake else model


def images(height=24, width=40):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize('name', NAMES)
def test_initial_values(name):
    """Of the model as built, and as initialised again: nothing to learn, and the tables of the equations."""
    model = build(name, awake=False, depth=5)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in build('nope', depth=5).parameters())
    assert not any('encodings' in key for key in model.state_dict())
    for again in (False, True):
        if again:
            for encoding in model.position_encodings().values():
                encoding.table.fill_(float('nan'))
            model.init_weights()
        encodings = list(model.position_encodings().values())
        assert len(encodings) == (5 if name == 'lookhere' else 1)
        for layer, encoding in enumerate(encodings):
            if name in BIASES:
                keywords = {'layer': layer, 'depth': 5} if name == 'lookhere' else {}
                pair = getattr(geometry, name)(4, (3, 5), **keywords)
                expected = geometry.logit_bias(pair, 4, (3, 5), 5)[0]
                actual = encoding.position_bias(Grid(3, 5, 5))
                assert torch.equal(actual.isinf(), expected.isinf())
                assert_near(actual.nan_to_num(neginf=1), expected.nan_to_num(neginf=1), 1e-6)
            else:
                angle = getattr(geometry, name)(8, (3, 5))
                expected = torch.tensor([
                    [angle(0, t, y, x) for t in range(4)] for y in range(3) for x in range(5)], dtype=torch.float64)
                assert_near(encoding.angles(Grid(3, 5)), expected, 1e-6)


def test_lookhere_layers():
    """linspace(1.5, .5) over the depth; a model that is cut down keeps the factors it was trained with."""
    model = build('lookhere', depth=4)

    def factors():
        return [-block.attn.encodings['lookhere'].position_bias(Grid(3, 5))[3, 0, 1].item() for block in model.blocks]

    assert factors() == pytest.approx([1.5, 1.5 - 1 / 3, 1.5 - 2 / 3, 0.5])
    model.prune_intermediate_layers([1])
    assert factors() == pytest.approx([1.5, 1.5 - 1 / 3])
    assert -build('lookhere', depth=1).blocks[0].attn.encodings['lookhere'].table[3, 2, 5].item() == 1.5


@pytest.mark.parametrize('composed', ['{}', 'ape+{}'])
@pytest.mark.parametrize('name', NAMES)
def test_models(name, composed):
    """Forwards and backwards with 5 prefix tokens, dropping patches, in bfloat16, and on other grids."""
    pos_enc = composed.format(name)
    model = build(pos_enc, dynamic_img_size=True)
    without = build('nope' if composed == '{}' else 'ape')
    assert (model(images()) - without(images())).abs().max() > 1e-3
    dropping = build(pos_enc, patch_drop_rate=0.5).train()
    assert isinstance(dropping.patch_drop, PatchDropoutWithIndices)
    runs = [
        (model, images()), (dropping, images()), (model, images(40, 8)), (model, images(8, 8)), (model, images(56, 48)),
        (build(pos_enc).bfloat16(), images().bfloat16()), (build(pos_enc, dtype=torch.bfloat16), images().bfloat16())]
    for net, x in runs:
        net.zero_grad()
        net(x).float().square().sum().backward()
        assert all(p.grad.isfinite().all() for p in net.parameters())
    with torch.autocast('cpu', torch.bfloat16):
        assert model(images()).isfinite().all()


@pytest.mark.parametrize('name', GATED)
def test_neutral_start(name):
    """A gate of 0 is the model without position; it learns at once, and after a step all parameters do."""
    model = build(f'auto_{name}', awake=False, pos_enc_kwargs={f'auto_{name}': {'init': 0}})
    assert_near(model(images()), build('nope', awake=False)(images()), 1e-6)
    optimizer = create_optimizer_v2(model, 'adam', lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(images()).square().sum().backward()
        assert all(p.grad.abs().max() > 0 for key, p in model.named_parameters() if 'gate' in key)
        optimizer.step()
    assert all(p.grad.abs().max() > 0 for p in model.parameters())


def test_no_gate_before_lookhere():
    with pytest.raises(ValueError, match="'auto_lookhere': 'lookhere' has no neutral form"):
        build('auto_lookhere')


@pytest.mark.parametrize('name', NAMES)
def test_extra_tokens_and_masks(name):
    """A mask and fixed geometry together, in both forms of attention."""
    model = build(name)
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    plain = model(images())
    masked = model(images(), attn_mask=mask)
    assert masked.isfinite().all() and (masked - plain).abs().max() > 1e-3
    for block in model.blocks:
        block.attn.fused_attn = False
    assert_near(model(images(), attn_mask=mask), masked, 1e-5)
    assert_near(model(images(), is_causal=True), masked, 1e-5)


@pytest.mark.parametrize('name', [name for name in NAMES if name != 'rope_dinov3'])
def test_rescale_is_saved(name):
    """The grid that a model was trained on goes with its state, if it matters."""
    rescale = {'pos_enc_kwargs': {name: {'resolution': 'rescale'}}}
    trained = build(name, dynamic_img_size=True, **rescale)
    small = build(name, img_size=(16, 24), ref_grid_size=(3, 5), **rescale)
    small.load_state_dict(trained.state_dict())
    expected = trained(images(16, 24))
    assert_near(small(images(16, 24)), expected, 1e-6)
    small.set_input_size(img_size=(24, 40))
    assert_near(small(images()), trained(images()), 1e-6)
    assert (build(name, dynamic_img_size=True)(images(16, 24)) - expected).abs().max() > 1e-3
    assert any(key.endswith('_extra_state') for key in trained.state_dict())
    assert not any(key.endswith('_extra_state') for key in build(name).state_dict())


# --- wrong input -----------------------------------------------------------------------------------------------------

WRONG = [
    ('rope1d', 6, 2, {}, "'rope1d' needs a head dim that is a multiple of 2, got 3. Choose another num_heads"),
    ('mrope', 10, 2, {}, "'mrope' needs a head dim that is a multiple of 2, got 5"),
    ('mrope', 8, 2, {}, "'mrope' needs a head dim of 6 or more, a pair for each axis, got 4. Choose another num_heads"),
    ('rope_dinov3', 12, 2, {}, "'rope_dinov3' needs a head dim that is a multiple of 4, got 6"),
    ('lookhere', 12, 3, {}, "'lookhere' needs 6 heads or a multiple of 4, got 3. Choose another num_heads"),
    ('lookhere', 10, 10, {}, "'lookhere' needs 6 heads or a multiple of 4, got 10"),
    *[('mrope', 24, 2, {'section': s}, r"'mrope': section must be integers \(t, h, w\), h and w of 1 or more")
      for s in (
          4, 'thw', (4, 4), (4, 4, 4, 4), (1, 0, 4), (1, 4, 0), (-1, 2, 3), (1, 2, 3.0), (1, True, 3), (None, 2, 2),
          {})],
    *[('rope_dinov3', 24, 2, {'base': b}, "'rope_dinov3' needs base to be a positive number, got") for b in (
        0, -1.0, float('nan'), float('inf'), '100', True, None, [100])],
    *[('rope_dinov3', 24, 2, {'normalize': n}, "'rope_dinov3': normalize must be 'separate', 'max' or 'min', got")
      for n in ('mean', None, 1, ['max'])],
    *[('rope_dinov3', 24, 2, {key: value}, f"'rope_dinov3' needs {key} to be a number of at least {least}, or None")
      for key, least, values in (('shift', 0, (-0.1,)), ('jitter', 1, (0.9, 0)), ('rescale', 1, (0.5, -2)))
      for value in (*values, float('nan'), float('inf'), True, '2', [2])],
    *[('alibi2d', 24, 2, {'distance': d}, "'alibi2d': distance must be 'euclidean' or 'manhattan', got")
      for d in ('chessboard', None, 2, ['euclidean'])],
    *[('rpe2d', 24, 2, {'slopes': s}, "'rpe2d': slopes must be 'paper' or 'code', got")
      for s in ('alibi', None, [0.5])],
    *[('rpe2d', 24, 2, {'diagonal': d}, "'rpe2d': diagonal must be True or False, got") for d in (1, None, 'yes')],
    *[(name, 24, 4, {'resolution': 'resize'}, "resolution must be 'extrapolate' or 'rescale'")
      for name in NAMES if name != 'rope_dinov3'],
    *[(name, 24, 4, {'scale': 1}, f"'{name}' has no keyword 'scale'") for name in NAMES],
]


@pytest.mark.parametrize('name, dim, num_heads, keywords, message', WRONG)
def test_wrong_input(name, dim, num_heads, keywords, message):
    with pytest.raises(ValueError, match=message):
        create(name, (3, 5), num_heads=num_heads, dim=dim, **keywords)


def test_lookhere_fits():
    cls = timm_sape.get_encoding('lookhere')
    assert [h for h in range(1, 25) if cls.fits(24, h)] == [4, 6, 8, 12, 16, 20, 24]
    with pytest.raises(ValueError, match="'lookhere' needs 6 heads or a multiple of 4, got 2"):
        build('lookhere', num_heads=2)


# --- the reference comparison must be able to fail -------------------------------------------------------------------

def swap_axes(self, device=None, dtype=None, coordinates=Grid.coordinates):
    return coordinates(self, device, dtype).flip(-1)


def rows_alike(self, grid, device, dtype, offsets=offset_bias.OffsetBiasEncoding.offsets):
    dy, dx = offsets(self, grid, device, dtype)
    return dx.new_zeros(dy.shape), dx


def towards_the_other(table, grid, spread=offset_bias.OffsetBiasEncoding.spread):
    return spread(table, grid).mT


def pad_behind(self, bias):
    return torch.nn.functional.pad(bias, (0, self.num_prefix_tokens, 0, self.num_prefix_tokens))


def neighbours(angles, rotate_half, rotation_table=base.rotation_table):
    return rotation_table(angles, not rotate_half)


def turned_back(angles, rotate_half, rotation_table=base.rotation_table):
    return rotation_table(-angles, rotate_half)


MUTANTS = {  # encoding, case, (owner, attribute, replacement)
    'mrope, x and y swapped': ('mrope', '3x5', (Grid, 'coordinates', swap_axes)),
    'rope_dinov3, x and y swapped': ('rope_dinov3', '4x4', (Grid, 'coordinates', swap_axes)),
    'rope1d, turned back': ('rope1d', '3x5', (base, 'rotation_table', turned_back)),
    'rope1d, other layout': ('rope1d', '3x5', (base, 'rotation_table', neighbours)),
    'mrope, other layout': ('mrope', '3x5', (base, 'rotation_table', neighbours)),
    'rope_dinov3, turned back': ('rope_dinov3', '3x5', (base, 'rotation_table', turned_back)),
    'alibi2d, one axis alone': ('alibi2d', '3x5', (offset_bias.OffsetBiasEncoding, 'offsets', rows_alike)),
    'rpe2d, from the other patch': ('rpe2d', '3x5', (
        offset_bias.OffsetBiasEncoding, 'spread', staticmethod(towards_the_other))),
    'lookhere, from the other patch': ('lookhere', '3x5, 6 kept', (
        offset_bias.OffsetBiasEncoding, 'spread', staticmethod(towards_the_other))),
    'alibi2d, prefix behind': ('alibi2d', '4x4', (Grid, 'pad_prefix', pad_behind)),
    'lookhere, prefix behind': ('lookhere', '1x7', (Grid, 'pad_prefix', pad_behind)),
    'lookhere, corners in another order': ('lookhere', '3x5', (lookhere, 'CORNERS', lookhere.CORNERS[::-1])),
    'lookhere, triangles for corners': ('lookhere', '3x5', (lookhere, 'CORNERS', lookhere.TRIANGLES)),
    'rpe2d, one slope': ('rpe2d', '3x5', (rpe2d, 'STARTS', (0.5, 0.5))),
    'alibi2d, slopes of twice as many heads': ('alibi2d', '3x5', (
        alibi2d, 'slopes_for_any_heads', lambda num_heads, geometric: geometric(2 * num_heads)[:num_heads])),
    'lookhere, kept patches in raster order': ('lookhere', '3x5, 6 kept', (
        Grid, 'keep_pairs', lambda self, logits, keep_pairs=Grid.keep_pairs: keep_pairs(
            Grid(*self.size, self.num_prefix_tokens, self.keep_indices.sort().values), logits))),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    name, case, patch = MUTANTS[mutant]
    check(name, *CASES[case])
    monkeypatch.setattr(*patch)
    with pytest.raises(AssertionError, match='off by|instead of'):
        check(name, *CASES[case])


@pytest.mark.parametrize('name', NAMES)
def test_registered_from_its_file(name):
    assert timm_sape.get_encoding(name).__module__ == {**ROTATIONS, **BIASES}[name].__name__
