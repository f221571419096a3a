"""Checks that the tests of all rotations share. `rotate` is the function of that name in the encoding's reference."""
import copy

import torch
import torch.nn as nn
from timm.layers.pos_embed_sincos import apply_rot_embed_cat

from harness import (
    assert_near,
    assert_offsets_alone,
    attend,
    compare,
    create,
    gradients,
    make_flat_regions,
    make_grid,
    make_qkv,
    where,
)
from loops import attention
from timm_sape import Grid
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


def new(name, grid_size, num_prefix_tokens=0, **keywords):
    """An encoding with large parameters. A gated one keeps its initial values, since the gate multiplies all angles."""
    random = not name.startswith('auto_')
    return create(name, grid_size, num_prefix_tokens, random=random, **{**SIZES, **keywords})


def own_parameters(encoding):
    """What the reference needs to know about the encoding: its parameters, and its gate if it has one."""
    given = {name: p for name, p in encoding.named_parameters() if name != 'gate.weight'}
    return given if encoding.gate is None else {**given, 'gate': 100 * encoding.gate.weight[0]}


def check(
        name, rotate, grid_size, num_prefix_tokens=0, num_keep=None, trained_on=None, *, rescale=True, made_for=None,
        init=None, **keywords):
    """Attention and every gradient in float64.

    Args:
        trained_on: The trained grid. Positions are rescaled to it, unless `rescale` is False.
        made_for: The encoding's own grid, if it is a different one.
        init: Initial value of the gate.
        keywords: For the encoding and for the reference.
    """
    grid = make_grid(grid_size, num_prefix_tokens, num_keep, batch=2)
    given = {} if trained_on is None else {'ref_grid_size': trained_on}
    mode = {'resolution': 'rescale'} if given and rescale else {}
    gate = {} if init is None else {'init': init}
    encoding = new(name, made_for or grid_size, num_prefix_tokens, **given, **mode, **gate, **keywords)
    q, k, v = make_qkv(grid, **SIZES)
    inputs = {'q': q, 'k': k, 'v': v, **dict(encoding.named_parameters())}
    options = {**where(grid), **own_parameters(encoding), **(given if mode else {}), **keywords}
    expected = attention(*(rotate(x, grid.size, **options) for x in (q, k)), v)
    if q.shape[2] == 1:  # attention has nothing to choose from
        inputs = {'v': v}
    compare(attend(encoding, q, k, v, grid), expected, inputs)


def turned(x, encoding, grid):
    """`[B, h, N, d]` after the rotation in an attention layer."""
    rotate_half = getattr(encoding, 'rotate_half', False)
    layer = LayerEncodings({encoding.name: encoding}, rotate_half=rotate_half, needs_position=True)
    return layer._rotated(x, x, Position(grid))[0]


def check_table(name, rotate, grid_size, num_keep=None):
    """With this table, timm's function rotates as the equations say, on the encoding's own grid and on another one."""
    encoding, grid = new(name, (3, 5)), make_grid(grid_size, 0, num_keep, batch=2)
    table = encoding(torch.zeros(1), grid=grid, hook='rotation')
    for x in make_qkv(grid, **SIZES)[:2]:
        expected = rotate(x, grid_size, **where(grid), **own_parameters(encoding))
        assert_near(apply_rot_embed_cat(x, table, half=encoding.rotate_half), expected, 1e-12)


def check_norms(name, rotate_half):
    """A rotation keeps the length of each vector and of each pair of channels. Prefix tokens do not change at all."""
    grid = Grid(3, 5, 2)
    x = make_qkv(grid, **SIZES)[0]
    out = turned(x, new(name, (3, 5), 2), grid)
    assert_near(out.norm(dim=-1), x.norm(dim=-1), 1e-14)
    half = SIZES['head_dim'] // 2
    for t in range(half):
        pair = (t, t + half) if rotate_half else (2 * t, 2 * t + 1)
        assert_near(out[..., pair].norm(dim=-1), x[..., pair].norm(dim=-1), 1e-14)
    assert torch.equal(out[:, :, :2], x[:, :, :2])
    assert (out[:, :, 3:] - x[:, :, 3:]).abs().max() > 0.1


def logits_between(encoding, grid_size, token):
    """Logits between identical patches, `[h, H, W, H, W]`. `token` is q and k of one of them, `[2, 1, h, d]`."""
    grid = Grid(*grid_size)
    q, k = (turned(x[:, :, None].expand(-1, -1, grid.num_patches, -1), encoding, grid) for x in token)
    return (q @ k.mT)[0].unflatten(-1, grid_size).unflatten(-3, grid_size)


def one_token(**random):
    """Random q and k of one patch, for `logits_between`."""
    return torch.randn(2, 1, SIZES['heads'], SIZES['head_dim'], dtype=torch.float64, **random)


def check_translation(name, **keywords):
    """The logit between two patches does not change when both move by the same offset."""
    token = one_token(generator=torch.Generator().manual_seed(0))
    for grid_size in ((4, 6), (1, 7), (7, 1)):
        assert_offsets_alone(logits_between(new(name, grid_size, **keywords), grid_size, token))


def check_directions(name, **keywords):
    """q.k depends on the offset, and tells up from down and left from right."""
    grid = make_grid((4, 5))
    q, k = (x[:, :, :1].expand_as(x) for x in make_qkv(grid, **SIZES)[:2])
    encoding = new(name, (4, 5), **keywords)
    rotated_q, rotated_k = (turned(x, encoding, grid) for x in (q, k))
    assert_near(rotated_q.norm(dim=-1), q.norm(dim=-1), 1e-12)
    assert not torch.allclose(rotated_q, q)
    logits = (rotated_q @ rotated_k.mT).unflatten(2, (4, 5)).unflatten(4, (4, 5))  # [B, h, y, x, y', x']
    assert_near(logits[:, :, 1:, 1:, 1:, 1:], logits[:, :, :-1, :-1, :-1, :-1], 1e-12)
    assert not torch.allclose(logits[:, :, 1:, :, :-1], logits[:, :, :-1, :, 1:])
    assert not torch.allclose(logits[:, :, :, 1:, :, :-1], logits[:, :, :, :-1, :, 1:])


def check_images_apart(name, **keywords):
    """Each image of a batch gives the same result as it does alone."""
    grid = make_grid((3, 5), 1, 6)
    encoding = new(name, (3, 5), 1, **keywords)
    q, k, v = make_qkv(grid, **SIZES)
    together = attend(encoding, q, k, v, grid)
    for b in range(3):
        one = Grid(3, 5, 1, grid.keep_indices[b:b + 1])
        assert_near(attend(encoding, *(x[b:b + 1] for x in (q, k, v)), one), together[b:b + 1], 1e-13)


def check_other_grid(name, rotate, **keywords):
    """Images of another size, `set_grid_size` and building the encoding for that size give the same."""
    trained, grid = new(name, (3, 5), 1, **keywords), make_grid((4, 7), 1)
    resized = copy.deepcopy(trained)
    resized.set_grid_size((4, 7))
    built = new(name, (4, 7), 1, **keywords)
    built.load_state_dict(trained.state_dict())
    q, k, v = make_qkv(grid, **SIZES)
    expected = attend(trained, q, k, v, grid)
    options = {**where(grid), **own_parameters(trained), **keywords}
    assert_near(expected, attention(*(rotate(x, (4, 7), **options) for x in (q, k)), v), 1e-10)
    for encoding in (resized, built):
        assert torch.equal(attend(encoding, q, k, v, grid), expected)


def check_float32(name, image, tolerance=1e-5, **keywords):
    """The value and every gradient in float32 against float64, on one of `IMAGES`."""
    grid = make_grid((8, 8))
    encoding = new(name, (8, 8), **keywords)
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
    assert_near(actual, expected, tolerance)
    # Neighbours that differ by 1 % take two of float32's seven digits from the direction of their difference.
    tolerance *= 1 if image == 'random' else 10
    for what, a, b in zip(
            ['q', 'k', *dict(encoding.named_parameters())],
            gradients(actual, [q32, k32, *single.parameters()]),
            gradients(expected, [q, k, *encoding.parameters()])):
        assert_near(a, b, tolerance, f'gradient of {what}')


def check_half(name, dtype):
    """The table stays in float32 and q keeps its dtype, so only the result of a rotation is rounded."""
    encoding = new(name, (3, 5), dtype=torch.float32).to(dtype)
    for grid in (make_grid((3, 5)), make_grid((6, 4)), make_grid((3, 5), 1, 6)):
        assert encoding(torch.zeros(1), grid=grid, hook='rotation').dtype == torch.float32
        q, k, v = make_qkv(grid, **SIZES, dtype=dtype)
        assert attend(encoding, q, k, v, grid).dtype == dtype


def check_attention_layer(name, rotate, qk_norm, fused, **keywords):
    """q and k are rotated after their norms. Prefix tokens and v are not rotated."""
    torch.manual_seed(0)
    grid = make_grid((3, 4), num_prefix_tokens=1, num_keep=7, batch=2)
    heads, head_dim = SIZES['heads'], SIZES['head_dim']
    encoding = new(name, (3, 4), 1, **keywords)
    layer = PosEncAttention(
        heads * head_dim, num_heads=heads, qkv_bias=True, qk_norm=qk_norm, norm_layer=nn.LayerNorm).double()
    layer.fused_attn = fused
    layer.encodings = LayerEncodings(
        {name: encoding}, rotate_half=getattr(encoding, 'rotate_half', False), needs_position=True)
    x = torch.randn(2, 8, heads * head_dim, dtype=torch.float64, requires_grad=True)

    qkv = layer.qkv(x).unflatten(-1, (3, heads, head_dim))  # [B, N, 3, h, d]
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    options = {**where(grid), **own_parameters(encoding), **keywords}
    q, k = (rotate(y, grid.size, **options) for y in (layer.q_norm(q), layer.k_norm(k)))
    expected = layer.proj(attention(q, k, v).transpose(1, 2).flatten(2))
    compare(layer(x, position=Position(grid)), expected, {'x': x, **dict(layer.named_parameters())})


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


AXES_SWAPPED = Grid, 'coordinates', swap_axes
COLUMNS_ALIKE = Grid, 'coordinates', columns_alike
ROWS_IN_RASTER_ORDER = Grid, 'keep_rows', raster_order
FIRST_ROWS = Grid, 'keep_rows', first_rows
TURNED_BACK = rotary, 'rotation_table', turned_back
OTHER_LAYOUT = rotary, 'rotation_table', other_layout
