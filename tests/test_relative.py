"""Encodings of offsets: each against its equations (references_relative.py), its properties and its initial values."""
import copy
import math

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import RelPosBias, RelPosMlp
from timm.models.vision_transformer_relpos import VisionTransformerRelPos

import references_relative as references
import timm_sape
from common import awaken
from references import assert_near
from timm_sape.encodings import cpb, pape, rpb, shaw, t5
from timm_sape.grid import Grid

torch.set_num_threads(1)

HEADS, HEAD_DIM = 2, 3
DIM = HEADS * HEAD_DIM
NAMES = ('cpb', 'pape', 'rpb', 'shaw', 't5')
CONTENT = ('pape', 'shaw')
SCALE = 0.3  # of the logits, for `channels`


def create(name, grid_size, num_prefix_tokens=0, ref_grid_size=None, dtype=torch.float64, **keywords):
    """An encoding whose parameters are all large, in evaluation mode."""
    encoding = timm_sape.create_encoding(
        name, dim=DIM, num_heads=HEADS, grid_size=grid_size, num_prefix_tokens=num_prefix_tokens,
        ref_grid_size=ref_grid_size, dtype=dtype, **keywords)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return encoding.eval()


def make_grid(grid_size, num_prefix_tokens=0, num_keep=None):
    """With `num_keep`, other patches are dropped from each of 2 images, and the order is random."""
    keep_indices = None
    if num_keep is not None:
        generator = torch.Generator().manual_seed(2)
        keep_indices = torch.stack([
            torch.randperm(grid_size[0] * grid_size[1], generator=generator)[:num_keep] for _ in range(2)])
    return Grid(*grid_size, num_prefix_tokens, keep_indices)


def make_inputs(grid, dtype=torch.float64, dim=DIM, heads=HEADS):
    """q, k and the tokens."""
    batch, num_patches = (1, grid.num_patches) if grid.keep_indices is None else grid.keep_indices.shape
    num_tokens = grid.num_prefix_tokens + num_patches
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(batch, num_tokens, dim, generator=generator, dtype=torch.float64).to(dtype)
        .unflatten(-1, shape).transpose(1, -2).squeeze(1).requires_grad_()
        for shape in ((heads, -1), (heads, -1), (1, dim))]


def product(name, encoding, inputs, grid):
    """The bias that is added to the logits."""
    q, k, x = inputs
    if name == 'shaw':
        return encoding.content_bias(q, k, grid)
    if name == 'pape':
        a, b = encoding.channels(q, k, x, grid, SCALE)
        assert a.shape == b.shape == (*q.shape[:3], 6) and a.dtype == b.dtype == q.dtype
        return SCALE * a @ b.mT
    return encoding.position_bias(grid)


def reference(name, encoding, inputs, grid):
    q, _, x = inputs
    tables = dict(encoding.named_parameters())
    prefix = grid.num_prefix_tokens
    if name == 'rpb':
        return references.rpb(encoding.table, grid.size, encoding.grid_size, prefix)
    if name == 'cpb':
        fc1, fc2 = encoding.mlp.fc1, encoding.mlp.fc2
        return references.cpb(
            fc1.weight, fc1.bias, fc2.weight, fc2.bias, grid.size, encoding.ref_grid_size, prefix, mode=encoding.mode)
    if name == 't5':
        return references.t5(tables, grid.size, prefix, distance=encoding.distance)
    if name == 'shaw':
        return references.shaw(
            q, tables, grid.size, prefix, grid.keep_indices, clip=encoding.clip, distance=encoding.distance)
    return references.pape(
        x, encoding.w_p, encoding.w_a, encoding.w_b, grid.size,
        encoding.ref_grid_size if encoding.rescales else None, prefix, grid.keep_indices)


def gradients(output, inputs):
    """Gradients of a weighted sum of all entries."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return torch.autograd.grad(output, inputs, weights.to(output))


def check(name, grid_size, num_prefix_tokens=0, num_keep=None, own_size=None, **keywords):
    """Value and every gradient in float64, of an encoding made for `own_size`."""
    if name == 'cpb':
        keywords = {'hidden': 4, **keywords}
    if name == 'pape':
        keywords = {'num_parabolas': 2, **keywords}
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = create(name, own_size or grid_size, num_prefix_tokens, **keywords)
    inputs = make_inputs(grid)
    actual, expected = (f(name, encoding, inputs, grid) for f in (product, reference))
    assert_near(actual, expected, 1e-10)
    given = dict(encoding.named_parameters())
    given |= {'shaw': {'q': inputs[0]}, 'pape': {'x': inputs[2]}}.get(name, {})
    for what, a, b in zip(given, gradients(actual, list(given.values())), gradients(expected, list(given.values()))):
        assert_near(a, b, 1e-10, f'gradient of {what}')


GRIDS = [(3, 5), (1, 7), (7, 1), (4, 4), (1, 1)]
VARIANTS = [
    ('rpb', {}), ('cpb', {}), ('cpb', {'mode': 'cr'}), ('t5', {}), ('t5', {'distance': 'raster'}), ('shaw', {}),
    ('shaw', {'clip': 1}), ('shaw', {'clip': 9}), ('shaw', {'distance': 'raster', 'clip': 6}), ('pape', {}),
    ('pape', {'num_parabolas': 1})]


@pytest.mark.parametrize('grid_size, num_prefix_tokens', [*zip(GRIDS, (0, 1, 5, 1, 0)), ((3, 5), 5)])
@pytest.mark.parametrize('name, keywords', VARIANTS)
def test_equations(name, keywords, grid_size, num_prefix_tokens):
    check(name, grid_size, num_prefix_tokens, **keywords)


OTHER = [((6, 9), (3, 5)), ((2, 3), (3, 5)), ((5, 3), (3, 5)), ((1, 1), (3, 5)), ((4, 3), (1, 7)), ((3, 2), (4, 1))]
OTHER_VARIANTS = [*VARIANTS[:-1], ('pape', {'resolution': 'rescale'})]


@pytest.mark.parametrize('grid_size, own_size', OTHER)
@pytest.mark.parametrize('name, keywords', [
    v for v in OTHER_VARIANTS if v[0] in ('rpb', 'cpb') or 'resolution' in v[1]])
def test_equations_on_another_grid(name, keywords, grid_size, own_size):
    if name != 'rpb' and grid_size == (6, 9):
        grid_size = (4, 6)
    check(name, grid_size, 1, None, own_size, **keywords)


@pytest.mark.parametrize('name, keywords', [v for v in OTHER_VARIANTS if v[0] in ('t5', 'shaw') or not v[1]])
def test_equations_on_another_grid_where_they_do_not_know_it(name, keywords):
    check(name, (4, 3), 1, None, (3, 5), **keywords)


@pytest.mark.parametrize('grid_size, num_prefix_tokens, num_keep', [
    ((3, 5), 1, 8), ((7, 1), 0, 3), ((1, 7), 5, 4), ((4, 4), 0, 16), ((3, 3), 2, 2)])
@pytest.mark.parametrize('name, keywords', [v for v in OTHER_VARIANTS if v[0] in CONTENT])
def test_equations_with_kept_patches(name, keywords, grid_size, num_prefix_tokens, num_keep):
    check(name, grid_size, num_prefix_tokens, num_keep, (3, 5), **keywords)


# --- timm's layers ---------------------------------------------------------------------------------------------------

def timm_bias(encoding):
    """timm's `RelPosBias` with the same table."""
    layer = RelPosBias(encoding.grid_size, encoding.num_heads).to(encoding.table.dtype)
    layer.relative_position_bias_table.data.copy_(encoding.table)
    return layer


def timm_mlp(encoding, prefix_tokens=0):
    """timm's `RelPosMlp` with the same layers."""
    layer = RelPosMlp(
        encoding.grid_size, encoding.num_heads, encoding.mlp.fc1.out_features, prefix_tokens, mode=encoding.mode,
        dtype=encoding.mlp.fc1.weight.dtype)
    layer.mlp.load_state_dict(encoding.mlp.state_dict())
    return layer.train(encoding.training)


@pytest.mark.parametrize('grid_size', [(4, 4), (14, 14), (3, 5), (7, 1), (1, 1)])
def test_rpb_is_that_of_timm(grid_size):
    """On one grid without prefix tokens; the rows of the table stand in the same order."""
    encoding = create('rpb', grid_size)
    assert_near(encoding.position_bias(Grid(*grid_size)), timm_bias(encoding).get_bias()[0], 1e-14)


@pytest.mark.parametrize('grid_size', [(4, 4), (14, 14), (3, 5), (2, 9)])
@pytest.mark.parametrize('prefix_tokens', [0, 1, 5])
@pytest.mark.parametrize('mode', ['swin', 'cr'])
def test_cpb_is_that_of_timm(mode, prefix_tokens, grid_size):
    """The coordinates of timm have been through float32."""
    encoding = create('cpb', grid_size, prefix_tokens, mode=mode, hidden=9)
    expected = timm_mlp(encoding, prefix_tokens).get_bias()[0]
    assert_near(encoding.position_bias(Grid(*grid_size, prefix_tokens)), expected, 1e-6)


@pytest.mark.parametrize('mode', ['swin', 'cr'])
def test_cpb_drops_as_timm_does(mode):
    """In training alone, at the rate of `drop`, the same numbers from the same seed."""
    encoding = create('cpb', (4, 4), mode=mode, hidden=9, drop=0.125).train()
    layer = timm_mlp(encoding)
    biases = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        biases.append(encoding.position_bias(Grid(4, 4)))
        torch.manual_seed(seed)
        assert_near(biases[-1], layer.get_bias()[0], 1e-6)
    assert torch.equal(biases[0], biases[1]) and not torch.allclose(biases[0], biases[2])
    plain = create('cpb', (4, 4), mode=mode, hidden=9)
    assert torch.equal(encoding.eval().position_bias(Grid(4, 4)), plain.position_bias(Grid(4, 4)))
    assert torch.equal(plain.train().position_bias(Grid(4, 4)), plain.eval().position_bias(Grid(4, 4)))


def by_timm(self, grid):
    """timm's layer in the place of ours, made for the grid and the prefix tokens as its own models make it."""
    if isinstance(self, rpb.RelativePositionBias):
        layer = RelPosBias(self.grid_size, self.num_heads, grid.num_prefix_tokens).to(self.table.dtype)
        with torch.no_grad():
            layer.relative_position_bias_table[:len(self.table)] = self.table
    else:
        layer = timm_mlp(self, grid.num_prefix_tokens)
    layer.set_window_size(grid.size)
    return layer.get_bias()[0]


@pytest.mark.filterwarnings('ignore::UserWarning:timm')
@pytest.mark.parametrize('name, case, text', [
    ('rpb', ((3, 5), 5), None),  # no more than one prefix token
    ('rpb', ((3, 5), 1), 'off by'),  # and that has a bias
    ('rpb', ((6, 6), 0, None, (4, 4)), 'off by'),  # another grid: other places, and linear between them
    ('cpb', ((7, 1), 0), 'off by nan'),  # one column
    ('cpb', ((1, 7), 1), 'off by nan'),
    ('cpb', ((6, 6), 0, None, (4, 4)), 'off by'),  # another grid: normalised by that one
])
def test_what_timm_does_otherwise(name, case, text, monkeypatch):
    """With timm's layer in the place of ours, the comparison with the equations fails."""
    check(name, *case)
    monkeypatch.setattr(timm_sape.get_encoding(name), 'position_bias', by_timm)
    with pytest.raises(AssertionError, match=text):
        check(name, *case)


def test_timm_refuses_other_sizes():
    """Its models with relative positions take images of one size, ours any."""
    model = VisionTransformerRelPos(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2)
    with pytest.raises(AssertionError):
        model(torch.zeros(1, 3, 32, 48))


@pytest.mark.parametrize('shared', [False, True])
@pytest.mark.parametrize('rel_pos_type, class_token', [
    ('mlp', False), ('mlp', True), ('mlp_swin', False), ('mlp_swin', True), ('bias', False)])
def test_weights_of_vit_relpos(rel_pos_type, class_token, shared):
    """Renamed, they give the same logits, on rectangular grids too, and with a class token where it has no bias."""
    torch.manual_seed(0)
    same = dict(
        img_size=(24, 40), patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5, class_token=class_token,
        global_pool='token' if class_token else 'avg', init_values=0.5, fc_norm=True)
    source = VisionTransformerRelPos(
        rel_pos_type=rel_pos_type, rel_pos_dim=24, shared_rel_pos=shared, **same).eval()
    name = 'rpb' if rel_pos_type == 'bias' else 'cpb'
    keywords = {} if name == 'rpb' else {name: {'mode': 'swin' if 'swin' in rel_pos_type else 'cr', 'hidden': 24}}
    model = timm.create_model(
        'test_vit_nope', pos_enc=name, pos_enc_kwargs=keywords, no_embed_class=True, **same).eval()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    state = {}
    for key, value in source.state_dict().items():
        key = key.replace('relative_position_bias_table', 'table')
        if key.startswith('shared_rel_pos.'):
            state |= {key.replace('shared_rel_pos', f'blocks.{i}.attn.encodings.{name}'): value for i in range(2)}
        else:
            state[key.replace('.rel_pos.', f'.encodings.{name}.')] = value
    own = {key: value for key, value in model.state_dict().items() if key.endswith('_extra_state')}
    assert bool(own) == (rel_pos_type != 'mlp')  # the grid is nothing to mode='cr'
    model.load_state_dict(state | own)
    x = torch.randn(2, 3, 24, 40)
    expected = source(x)
    assert_near(model(x), expected, 1e-5)
    other = timm.create_model('test_vit_nope', no_embed_class=True, **same).eval()
    other.load_state_dict({k: v for k, v in state.items() if 'encodings' not in k})
    assert (other(x) - expected).abs().max() > 1e-3 * expected.abs().max()


# --- the reference comparison must be able to fail -------------------------------------------------------------------

def transposed(values, grid):
    return between_patches(values, grid).mT


def columns_first(values, grid):
    values = values.unflatten(0, (2 * grid.height - 1, 2 * grid.width - 1)).flip(1)
    return between_patches(values.flatten(0, 1), grid)


def pad_behind(self, bias):
    return F.pad(bias, (0, self.num_prefix_tokens, 0, self.num_prefix_tokens))


def pad_tokens_behind(self, table):
    return F.pad(table, (0, 0, 0, self.num_prefix_tokens))


def aligned(values, size, mode):
    return interpolate(values, size=size, mode=mode, align_corners=True)


def bilinear(values, size, mode):
    return interpolate(values, size=size, mode='bilinear')


def one_sign(offset):
    return bucket(-offset.abs())


def other_sign(offset):
    return bucket(-offset)


def in_order(function):
    def mutant(self, tokens):
        grid = self if self.keep_indices is None else Grid(
            *self.size, self.num_prefix_tokens, self.keep_indices.sort().values)
        return function(grid, tokens)
    return mutant


def clipped_sooner(self, low, high):
    return clamp(self, low + 1, high - 1)


def not_scaled(self, q, *args):
    return along(self, q * self.head_dim ** 0.5, *args)


def coordinates_swapped(self, device=None, dtype=None):
    return coordinates(self, device, dtype).flip(-1)


def always_own(self, grid):
    return None


def own_table(self, name, grid):
    return getattr(self, name)[:(2 * grid.height - 1) * (2 * grid.width - 1)]


def with_factors(*factors):
    return lambda self, x, grid: form(self, x, grid) * torch.tensor(factors, dtype=x.dtype)


between_patches, bucket, coordinates = rpb.between_patches, t5.bucket, Grid.coordinates
interpolate, clamp = F.interpolate, torch.Tensor.clamp
along, form = shaw.RelativePositionRepresentations._along, pape.ParabolicPositionEncoding._form

MUTANTS = {  # encoding, arguments of `check`, [(owner, attribute, replacement)]
    'rpb, p_j - p_i': ('rpb', ((3, 5), 0), [(rpb, 'between_patches', transposed)]),
    'rpb, x mirrored': ('rpb', ((3, 5), 0), [(rpb, 'between_patches', columns_first)]),
    'rpb, prefix behind': ('rpb', ((3, 5), 1), [(Grid, 'pad_prefix', pad_behind)]),
    'rpb, corners aligned': ('rpb', ((4, 7), 0, None, (3, 5)), [(F, 'interpolate', aligned)]),
    'rpb, bilinear': ('rpb', ((4, 7), 0, None, (3, 5)), [(F, 'interpolate', bilinear)]),
    'rpb, not resampled': ('rpb', ((2, 3), 0, None, (3, 5)), [(rpb.RelativePositionBias, 'resized', own_table)]),
    'cpb, p_j - p_i': ('cpb', ((3, 5), 0), [(cpb, 'between_patches', transposed)]),
    'cpb, no prefix rule': ('cpb', ((3, 5), 1), [(Grid, 'pad_prefix', pad_behind)]),
    'cpb, no sigmoid': ('cpb', ((3, 5), 0), [(torch.Tensor, 'sigmoid', lambda self: self)]),
    'cpb, linear': ('cpb', ((3, 5), 0), [(torch.Tensor, 'log1p', lambda self: self)]),
    't5, one half for both signs': ('t5', ((3, 5), 0), [(t5, 'bucket', one_sign)]),
    't5, signs swapped': ('t5', ((3, 5), 0), [(t5, 'bucket', other_sign)]),
    't5, prefix behind': ('t5', ((3, 5), 1), [(Grid, 'pad_prefix', pad_behind)]),
    't5, one threshold off': ('t5', ((1, 14), 0), [(t5, 'THRESHOLDS', (8, 11, 16, 23, 32, 46, 64, 91))]),
    'shaw, clipped sooner': ('shaw', ((3, 5), 0), [(torch.Tensor, 'clamp', clipped_sooner)]),
    'shaw, not scaled': ('shaw', ((3, 5), 0), [(shaw.RelativePositionRepresentations, '_along', not_scaled)]),
    'shaw, x and y swapped': ('shaw', ((4, 4), 0), [(Grid, 'coordinates', coordinates_swapped)]),
    'shaw, prefix behind': ('shaw', ((3, 5), 1), [(Grid, 'pad_prefix', pad_behind)]),
    'shaw, rows of kept patches in raster order': ('shaw', ((3, 5), 1, 8), [
        (Grid, 'keep_rows', in_order(Grid.keep_rows))]),
    'pape, x and y swapped': ('pape', ((4, 4), 0), [(Grid, 'coordinates', coordinates_swapped)]),
    'pape, no softplus': ('pape', ((3, 5), 0), [(F, 'softplus', lambda a: a)]),
    'pape, prefix behind': ('pape', ((3, 5), 1), [(Grid, 'pad_tokens', pad_tokens_behind)]),
    'pape, rows of kept patches in raster order': ('pape', ((3, 5), 1, 8), [
        (Grid, 'keep_rows', in_order(Grid.keep_rows))]),
    'pape, trained grid ignored': ('pape', ((4, 7), 0, None, (3, 5)), [
        (pape.ParabolicPositionEncoding, 'rescaling', always_own)]),
    'pape, to the other side': ('pape', ((3, 5), 0), [
        (pape.ParabolicPositionEncoding, '_form', with_factors(1, 1, 1, -1, -1))]),
    'pape, no product of dy and dx': ('pape', ((3, 5), 0), [
        (pape.ParabolicPositionEncoding, '_form', with_factors(1, 0, 1, 1, 1))]),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    name, case, patches = MUTANTS[mutant]
    keywords = {'resolution': 'rescale'} if name == 'pape' else {}
    for owner, attribute, replacement in patches:
        monkeypatch.setattr(owner, attribute, replacement)
    with pytest.raises(AssertionError, match='off by|instead of'):
        check(name, *case, **keywords)


# --- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name, keywords', VARIANTS)
def test_float32(name, keywords):
    """Single against double precision, value and every gradient."""
    grid = make_grid((8, 8), 1)
    encoding = create(name, (8, 8), 1, **keywords)
    single = copy.deepcopy(encoding).float()
    inputs = make_inputs(grid)
    inputs32 = [x.detach().float().requires_grad_() for x in inputs]
    expected, actual = product(name, encoding, inputs, grid), product(name, single, inputs32, grid)
    assert actual.dtype == torch.float32
    assert_near(actual, expected, 1e-5)
    parameters, parameters32 = dict(encoding.named_parameters()), list(single.parameters())
    for what, a, b in zip(
            parameters, gradients(actual, parameters32), gradients(expected, list(parameters.values()))):
        assert_near(a, b, 2e-5, f'gradient of {what}')


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name, keywords', [v for v in OTHER_VARIANTS if v[0] != 'pape'])
def test_half(name, keywords, dtype):
    """Computed in float32 from what is given in half precision, by itself or under autocast."""
    grid = make_grid((4, 6), 1)
    encoding = create(name, (3, 5), 1, **keywords)
    with torch.no_grad():
        for low in (copy.deepcopy(encoding).to(dtype), encoding.float()):
            inputs = make_inputs(grid, dtype)
            with torch.autocast('cpu', dtype, enabled=low is encoding):
                actual = product(name, low, inputs, grid)
            wide = copy.deepcopy(low).double()
            expected = product(name, wide, [x.double() for x in inputs], grid)
            assert actual.dtype == torch.float32
            # resampled tables are rounded to the dtype that they are kept in
            assert_near(actual, expected, 0.01 if name == 'rpb' and low is not encoding else 1e-5)


def folded(encoding, inputs, grid, dtype, autocast=False):
    """The bias as attention computes it: products of half precision summed in single precision."""
    q, k, x = inputs
    with torch.autocast('cpu', dtype, enabled=autocast):
        a, b = encoding.channels(q, k, x, grid, SCALE)
    assert a.dtype == b.dtype == dtype and a.shape[-1] == b.shape[-1] == 21
    return SCALE * (a.float() @ b.float().mT)


def check_folded(size, dtype, autocast=False, large=False, **keywords):
    """The largest bias, its largest error, and that where it matters; p, a and b are of the order of 1 if `large`."""
    encoding = timm_sape.create_encoding('pape', dim=64, num_heads=2, grid_size=(14, 14), **keywords)
    torch.manual_seed(0)
    encoding.reset_parameters()
    if large:
        for name, p in encoding.named_parameters():
            nn.init.normal_(p, std=1 / 2 if name == 'w_p' else 1 / 8)
    with torch.no_grad():
        low = encoding if autocast else copy.deepcopy(encoding).to(dtype)
        grid = make_grid(size, 1)
        q, k, x = make_inputs(grid, dtype, 64)
        inputs = q, k, x.float() if autocast else x
        a, b = copy.deepcopy(low).double().channels(*(x.double() for x in inputs), grid, SCALE)
        expected = SCALE * a @ b.mT
        actual = folded(low, inputs, grid, dtype, autocast)
    assert (actual[..., 0] == 0).all() and (actual[..., 0, :] == 0).all()
    error = (actual.double() - expected).abs()
    return expected.abs().max().item(), error.max().item(), error[expected.abs() < 20].max().item()


@pytest.mark.parametrize('autocast', [False, True])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_pape_in_half_precision(dtype, autocast):
    largest, error, near = check_folded((14, 14), dtype, autocast)
    assert largest > 200 and error < 0.01 and near < 1e-3
    largest, error, near = check_folded((14, 14), dtype, autocast, num_parabolas=4, large=True)
    assert largest > 500 and error < 0.01 and near < 2e-3
    largest, error, near = check_folded((40, 40), dtype, autocast)  # far beyond the trained grid
    assert largest > 1000 and error < 0.05 and near < 1e-3
    largest, error, near = check_folded((40, 30), dtype, autocast, resolution='rescale')
    assert largest > 200 and error < 0.01 and near < 1e-3
    largest, error, near = check_folded((1, 14), dtype, autocast)
    assert error < 0.01


def one_part(x, dtype, num):
    return [x, *[torch.zeros_like(x)] * (num - 1)]


def rounded_late(x, dtype, num):
    """The five numbers stay as they are; what is made of them has two parts."""
    if x.shape[-1] == 5:
        return x, torch.zeros_like(x)
    first, second, *_ = parts(x, dtype, 2)
    return [first, second, *[torch.zeros_like(x)] * (num - 2)]


parts = pape._parts


@pytest.mark.parametrize('mutant, worse', [(one_part, 100), (rounded_late, 3)])
def test_pape_in_half_precision_needs_care(mutant, worse, monkeypatch):
    """The negative controls of the test above."""
    _, _, near = check_folded((14, 14), torch.bfloat16)
    monkeypatch.setattr(pape, '_parts', mutant)
    _, _, near_then = check_folded((14, 14), torch.bfloat16)
    assert near_then > worse * near


@pytest.mark.parametrize('dtype, tolerance', [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_pape_gradients_in_half_precision(dtype, tolerance):
    torch.manual_seed(0)
    grid = make_grid((14, 14), 1)
    encoding = timm_sape.create_encoding('pape', dim=16, num_heads=2, grid_size=(14, 14), num_parabolas=3)
    q, k, x = inputs = make_inputs(grid, torch.float32, 16)
    low_x = x.detach().to(dtype).requires_grad_()
    low = [q.to(dtype), k.to(dtype), low_x]
    weight = torch.randn(1, 2, 197, 197, generator=torch.Generator().manual_seed(0)) / 197
    wide = (product('pape', encoding, inputs, grid) * weight).sum()
    expected = torch.autograd.grad(wide, [x, *encoding.parameters()])
    narrow = (folded(encoding, low, grid, dtype) * weight).sum()
    for a, b in zip(torch.autograd.grad(narrow, [low_x, *encoding.parameters()]), expected):
        assert (a.float() - b).norm() < tolerance * b.norm()


# --- properties ------------------------------------------------------------------------------------------------------

def same_token(inputs):
    return [x[..., :1, :].expand_as(x) for x in inputs]


@pytest.mark.parametrize('name, keywords', OTHER_VARIANTS)
def test_logits_depend_on_offsets_alone(name, keywords):
    """Moved by a row and a column, nothing changes; up is not down and left is not right."""
    grid = make_grid((4, 5))
    encoding = create(name, (3, 5), **keywords)
    logits = product(name, encoding, same_token(make_inputs(grid)), grid).reshape(-1, HEADS, 4, 5, 4, 5)
    assert_near(logits[:, :, 1:, 1:, 1:, 1:], logits[:, :, :-1, :-1, :-1, :-1], 1e-12)
    differs = 1e-3 * logits.abs().max()
    assert (logits[:, :, 1:, :, :-1] - logits[:, :, :-1, :, 1:]).abs().max() > differs
    assert (logits[:, :, :, 1:, :, :-1] - logits[:, :, :, :-1, :, 1:]).abs().max() > differs
    assert (logits[:, 0] - logits[:, 1]).abs().max() > differs


MIRRORED = {  # what a mirrored image is to an encoding: parameters that trade places
    'rpb': lambda e: e.table.copy_(e.table.unflatten(0, (5, 9)).flip(1).flatten(0, 1)),
    'cpb': lambda e: e.mlp.fc1.weight[:, 1].neg_(),
    't5': lambda e: e.table_x.copy_(torch.cat([e.table_x[:1], e.table_x[17:], e.table_x[16:17], e.table_x[1:16]])),
    'shaw': lambda e: e.table_x.copy_(e.table_x.flip(0)),
    'pape': lambda e: e.w_p[..., 1].neg_(),
}


@pytest.mark.parametrize('name', NAMES)
def test_mirrored(name):
    """Of an image turned left to right, the bias is that of an encoding turned likewise, and of no other."""
    grid = make_grid((3, 5))
    encoding = create(name, (3, 5))
    inputs = make_inputs(grid)
    expected = product(name, encoding, inputs, grid).reshape(-1, HEADS, 3, 5, 3, 5).flip(3, 5)
    turned = [x.unflatten(-2, (3, 5)).flip(-2).flatten(-3, -2) for x in inputs]
    plain = product(name, encoding, turned, grid).reshape(expected.shape)
    assert (plain - expected).abs().max() > 0.1 * expected.abs().max()
    with torch.no_grad():
        MIRRORED[name](encoding)
    assert_near(product(name, encoding, turned, grid).reshape(expected.shape), expected, 1e-12)


@pytest.mark.parametrize('name', CONTENT)
def test_order_of_kept_patches(name):
    """All are kept, in another order: the bias moves along with them."""
    grid = make_grid((3, 5), 1, 15)
    encoding = create(name, (3, 5), 1)
    whole = Grid(3, 5, 1)
    q, k, x = make_inputs(grid)
    back = torch.cat([torch.zeros(2, 1, dtype=torch.long), 1 + grid.keep_indices.argsort(1)], dim=1)
    in_order = [
        t.gather(-2, (back[:, None, :, None] if t.ndim == 4 else back[..., None]).expand_as(t)) for t in (q, k, x)]
    expected = grid.keep_pairs(product(name, encoding, in_order, whole))
    actual = product(name, encoding, [q, k, x], grid)
    assert_near(actual, expected, 1e-12)
    assert not torch.allclose(actual, product(name, encoding, [q, k, x], whole))


def test_t5_buckets():
    """Exact below 8, then wider and wider, the two signs apart; what begins at 91 never ends."""
    offset = torch.arange(-300, 301)
    found = t5.bucket(offset).tolist()
    assert found == [references.t5_bucket(delta) for delta in offset.tolist()]
    back, forward = found[300::-1], found[300:]
    assert back[:8] == list(range(8)) and forward[1:] == [16 + index for index in back[1:]]
    assert [back.index(index) for index in range(16)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    assert back == sorted(back) and max(back) == 15 and len(set(found)) == 31  # no distance 0 forward
    log = torch.log(torch.arange(8, 128).float() / 8) / math.log(128 / 8) * 8  # as in the published code
    assert back[8:128] == (8 + log.long()).clamp(max=15).tolist()
    encoding = create('t5', (200, 1))
    bias = encoding.position_bias(Grid(200, 1))[:, 0]  # [h, N]
    assert (bias[:, 91:] == bias[:, 91:92]).all() and (bias[:, 90] != bias[:, 91]).all()


def test_t5_is_shared_by_all_layers():
    model = timm.create_model('test_vit_nope', pos_enc='t5', img_size=32, patch_size=8)
    own = [name for name in model.state_dict() if 't5' in name]
    assert own == ['encodings.t5.table_y', 'encodings.t5.table_x']


def test_raster_and_axis_agree_on_one_row():
    """In one row there is one distance, the other one being 0."""
    for name, zero in (('t5', 0), ('shaw', 2)):
        raster, axis = create(name, (1, 7), distance='raster'), create(name, (1, 7))
        with torch.no_grad():
            axis.table_x.copy_(raster.table)
            axis.table_y[zero] = 0
        grid = make_grid((1, 7), 1)
        inputs = make_inputs(grid)
        assert_near(product(name, axis, inputs, grid), product(name, raster, inputs, grid), 1e-14)


def test_shaw_is_clipped():
    """Beyond the clip all offsets are alike, up to it no two are."""
    grid = make_grid((1, 9))
    for clip in (1, 2, 4):
        bias = create('shaw', (1, 9), clip=clip).content_bias(*make_inputs(grid)[:2], grid)[..., 4, :]  # the middle one
        distinct = bias[0, 0].unique()
        assert len(distinct) == 2 * clip + 1
        assert (bias[..., 4 + clip:] == bias[..., 4 + clip:5 + clip]).all()


def test_pape_decays():
    """Without a side that it leans to, a patch sees itself best and others the less, the farther they are."""
    encoding = create('pape', (9, 9))
    nn.init.zeros_(encoding.w_b)
    grid = make_grid((9, 9))
    bias = product('pape', encoding, make_inputs(grid), grid).reshape(1, HEADS, 81, 9, 9)[:, :, 40]
    assert bias[..., 4, 4].abs().max() < 1e-12
    for ray in (bias[..., 4, 4:], bias[..., 4:, 4], bias.diagonal(dim1=-2, dim2=-1)[..., 4:]):
        assert (ray.diff() < 0).all() and (ray.diff().diff() < 0).all()
    assert_near(bias, bias.flip(-2, -1), 1e-12)


def test_pape_leans():
    """The maximum of one parabola is at b/(2a), on either side."""
    encoding = create('pape', (1, 99), num_parabolas=1)
    grid = make_grid((1, 99))
    inputs = make_inputs(grid)
    bias = product('pape', encoding, inputs, grid)  # [1, h, N, N]
    a, b = (torch.einsum('bnd,hmd->bhn', inputs[2], w) for w in (encoding.w_a, encoding.w_b))
    offset = b / (2 * F.softplus(a)) / encoding.w_p[:, 0, 1, None]  # x_i - x_j
    place = torch.arange(99) - offset
    inside = (place > 0) & (place < 98)
    assert inside.sum() > 50 and (offset[inside] > 1).any() and (offset[inside] < -1).any()
    assert ((bias.argmax(-1) - place).abs()[inside] <= 0.5 + 1e-9).all()


def test_rpb_keeps_what_it_is_on_another_grid():
    """A constant stays one, the offset of 0 stays in the middle, and a mirrored table becomes a mirrored one."""
    encoding = create('rpb', (3, 5))
    for new in ((6, 9), (2, 3), (1, 1), (8, 2)):
        shape = [2 * size - 1 for size in new]
        table = encoding.resample('table', torch.ones_like(encoding.table), (3, 5), new)
        assert_near(table, torch.ones(shape[0] * shape[1], HEADS, dtype=torch.float64), 1e-12)
        table = encoding.resample('table', encoding.table, (3, 5), new)
        assert_near(table[len(table) // 2], encoding.table[len(encoding.table) // 2], 1e-12)
        mirrored = encoding.resample('table', encoding.table.flip(0), (3, 5), new)
        assert_near(mirrored, table.flip(0), 1e-12)
        assert table.is_contiguous() and table.shape == (shape[0] * shape[1], HEADS)
        low = encoding.resample('table', encoding.table.bfloat16(), (3, 5), new)
        assert low.dtype == torch.bfloat16


@pytest.mark.parametrize('name, keywords', OTHER_VARIANTS)
def test_three_roads_to_another_grid(name, keywords):
    """A dynamic size, `set_grid_size` and construction for the new grid follow one rule."""
    trained, grid = create(name, (3, 5), 1, **keywords), make_grid((4, 7), 1)
    inputs = make_inputs(grid)
    expected = product(name, trained, inputs, grid)
    moved = copy.deepcopy(trained)
    moved.set_grid_size((4, 7))
    assert torch.equal(product(name, moved, inputs, grid), expected)
    if name == 'rpb':
        assert moved.table.shape == (7 * 13, HEADS) and moved.grid_size == (4, 7)
        return  # it is resampled as it is loaded: a contract
    built = create(name, (4, 7), 1, ref_grid_size=(3, 5), **keywords)
    built.load_state_dict(trained.state_dict())
    assert torch.equal(product(name, built, inputs, grid), expected)
    state = trained.state_dict()
    knows = name == 'cpb' and not keywords or 'resolution' in keywords
    assert ('_extra_state' in state) == knows
    if knows:
        assert state['_extra_state'].tolist() == [3, 5]
        other = create(name, (4, 7), 1, **keywords)
        assert (product(name, other, inputs, grid) - expected).abs().max() > 1e-3 * expected.abs().max()


# --- keywords and initial values -------------------------------------------------------------------------------------

@pytest.mark.parametrize('name, keywords, text', [
    ('cpb', {'mode': 'rw'}, "'cpb': mode must be one of 'swin', 'cr', got 'rw'"),
    ('cpb', {'mode': None}, "'cpb': mode must be one of 'swin', 'cr', got None"),
    ('cpb', {'mode': ['swin']}, "'cpb': mode must be one of"),
    ('cpb', {'hidden': 0}, "'cpb' needs hidden to be a positive integer, got 0"),
    ('cpb', {'hidden': True}, "'cpb' needs hidden to be a positive integer, got True"),
    ('cpb', {'hidden': 512.0}, "'cpb' needs hidden to be a positive integer, got 512.0"),
    ('cpb', {'drop': 1}, "'cpb' needs drop of at least 0 and less than 1, got 1"),
    ('cpb', {'drop': -0.1}, "'cpb' needs drop of at least 0 and less than 1, got -0.1"),
    ('cpb', {'drop': float('nan')}, "'cpb' needs drop of at least 0 and less than 1, got nan"),
    ('cpb', {'drop': False}, "'cpb' needs drop of at least 0 and less than 1, got False"),
    ('cpb', {'drop': '0'}, "'cpb' needs drop of at least 0 and less than 1, got '0'"),
    ('t5', {'distance': 'both'}, "'t5': distance must be 'axis' or 'raster', got 'both'"),
    ('t5', {'distance': None}, "'t5': distance must be 'axis' or 'raster', got None"),
    ('shaw', {'distance': 2}, "'shaw': distance must be 'axis' or 'raster', got 2"),
    ('shaw', {'clip': 0}, "'shaw' needs clip to be an integer of at least 1, got 0"),
    ('shaw', {'clip': True}, "'shaw' needs clip to be an integer of at least 1, got True"),
    ('shaw', {'clip': 2.0}, "'shaw' needs clip to be an integer of at least 1, got 2.0"),
    ('shaw', {'clip': float('nan')}, "'shaw' needs clip to be an integer of at least 1, got nan"),
    ('pape', {'num_parabolas': 0}, "'pape' needs num_parabolas to be a positive integer, got 0"),
    ('pape', {'num_parabolas': True}, "'pape' needs num_parabolas to be a positive integer, got True"),
    ('pape', {'num_parabolas': 50.0}, "'pape' needs num_parabolas to be a positive integer, got 50.0"),
    ('pape', {'resolution': 'resize'}, "resolution must be 'extrapolate' or 'rescale', got 'resize'"),
    ('rpb', {'resolution': 'rescale'}, "'rpb' has no keyword 'resolution'"),
])
def test_wrong_keywords(name, keywords, text):
    with pytest.raises(ValueError, match=text):
        timm_sape.create_encoding(name, dim=DIM, num_heads=HEADS, grid_size=(3, 5), **keywords)


@pytest.mark.parametrize('name, keywords, other', [
    ('t5', {}, {'distance': 'raster'}), ('shaw', {}, {'distance': 'raster'}), ('shaw', {}, {'clip': 3}),
    ('cpb', {}, {'mode': 'cr'}), ('cpb', {}, {'hidden': 7}), ('pape', {}, {'num_parabolas': 49})])
def test_weights_of_other_keywords_do_not_fit(name, keywords, other):
    state = create(name, (3, 5), **keywords).state_dict()
    with pytest.raises(RuntimeError):
        create(name, (3, 5), **other).load_state_dict(state)


def built(pos_enc, init=False, **kwargs):
    torch.manual_seed(0)
    model = timm.create_model('test_vit_nope', pos_enc=pos_enc, **{'img_size': 32, 'patch_size': 8, **kwargs})
    if init:
        model.init_weights()
    return model


def check_uniform(values, bound):
    assert values.abs().max() <= bound and values.abs().max() > 0.95 * bound
    assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert abs(values.mean().item()) < 0.15 * bound


@pytest.mark.parametrize('init', [False, True])
def test_initial_values(init):
    """Of the model as it is built, and as `init_weights` makes it again: width 64, 4 heads, 2 layers, grid 4 x 4."""
    model = built('rpb', init, img_size=160)
    tables = torch.stack([block.attn.encodings['rpb'].table for block in model.blocks])
    assert tables.shape == (2, 39 * 39, 4)
    assert tables.std().item() == pytest.approx(0.02, rel=0.03)
    assert tables.abs().max() < 0.12 and abs(tables.mean().item()) < 8e-4  # 4.4 deviations
    assert len(tables[:, 0].unique()) == 8  # drawn one by one

    timm_model = VisionTransformerRelPos(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4, rel_pos_dim=512)
    for mode in ('swin', 'cr'):
        model = built('cpb', init, pos_enc_kwargs={'cpb': {'mode': mode}})
        encodings = [block.attn.encodings['cpb'] for block in model.blocks]
        theirs = dict(timm_model.blocks[0].attn.rel_pos.named_parameters())
        for name, p in encodings[0].named_parameters():
            assert p.shape == theirs[name].shape
            bound = 2 ** -0.5 if 'fc1' in name else 512 ** -0.5
            if p.numel() > 4:
                check_uniform(p, bound)
                check_uniform(theirs[name], bound)
            else:
                assert p.abs().max() <= bound
        names = ['fc1.weight', 'fc1.bias', 'fc2.weight', *(['fc2.bias'] if mode == 'cr' else [])]
        assert [name for name, _ in encodings[0].named_parameters()] == [f'mlp.{name}' for name in names]
        assert not torch.equal(encodings[0].mlp.fc2.weight, encodings[1].mlp.fc2.weight)
        if mode == 'swin':
            patches = encodings[0].position_bias(Grid(4, 4))
            assert 4 < patches.min() < 8 < patches.max() < 12

    for distance, names in (('axis', ['table_y', 'table_x']), ('raster', ['table'])):
        encoding = built('t5', init, pos_enc_kwargs={'t5': {'distance': distance}}).encodings['t5']
        assert [name for name, _ in encoding.named_parameters()] == names
        for table in encoding.parameters():
            assert table.shape == (32, 4)
            assert table.std().item() == pytest.approx(1 / 8, rel=0.2) and table.abs().max() > 2 / 8

    for keywords, names in (({'clip': 50}, ['table_y', 'table_x']), ({'distance': 'raster'}, ['table'])):
        model = built('shaw', init, pos_enc_kwargs={'shaw': keywords})
        encodings = [block.attn.encodings['shaw'] for block in model.blocks]
        assert [name for name, _ in encodings[0].named_parameters()] == names
        values = torch.cat([p.flatten() for encoding in encodings for p in encoding.parameters()])
        assert encodings[0].get_parameter(names[0]).shape == (2 * keywords.get('clip', 2) + 1, 16)
        assert values.std().item() == pytest.approx(1 / 4, rel=0.15) and values.abs().max() > 2 / 4

    model = built('pape', init)
    for block in model.blocks:
        encoding = block.attn.encodings['pape']
        assert encoding.w_p.shape == (4, 50, 2) and encoding.w_a.shape == encoding.w_b.shape == (4, 50, 64)
        check_uniform(encoding.w_p, 2 ** -0.5 / 2)  # 16^(-1/4) is 1/2
        check_uniform(encoding.w_a, 1 / 8)
        check_uniform(encoding.w_b, 1 / 8 / 2)


@pytest.mark.parametrize('name', NAMES)
def test_number_of_parameters(name):
    """What the documentation says that an encoding adds; none of it has weight decay."""
    plain = sum(p.numel() for p in built('nope', img_size=(32, 48)).parameters())
    model = built(name, img_size=(32, 48))
    adds = eval(timm_sape.get_encoding(name).adds, {'L': 2, 'H': 4, 'W': 6, 'D': 64, 'd': 16, 'h': 4})
    assert sum(p.numel() for p in model.parameters()) - plain == adds
    own = {key for key, _ in model.named_parameters() if f'encodings.{name}.' in key}
    assert own and own <= model.no_weight_decay()


# --- in a model ------------------------------------------------------------------------------------------------------

MODELS = [
    *((name, {}) for name in NAMES), ('cpb', {'mode': 'cr', 'hidden': 8, 'drop': 0.125}),
    ('t5', {'distance': 'raster'}), ('shaw', {'distance': 'raster', 'clip': 3}),
    ('pape', {'resolution': 'rescale', 'num_parabolas': 3})]


def tiny(pos_enc, keywords=None, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(
        'test_vit_nope', pos_enc=pos_enc, pos_enc_kwargs=keywords or {}, **{
            'img_size': (24, 40), 'patch_size': 8, 'embed_dim': 32, 'num_heads': 2, 'depth': 2, 'num_classes': 3,
            'reg_tokens': 4, 'global_pool': 'avg', 'fc_norm': False, **kwargs})


def step(model, x):
    model.zero_grad()
    loss = model(x).float().square().sum()
    loss.backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert loss.isfinite() and not missing, missing
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize('composition', ['{}', 'ape+{}', 'rope2d+{}'])
@pytest.mark.parametrize('name, keywords', MODELS)
def test_model(name, keywords, composition):
    """Five prefix tokens; patches dropped; in bfloat16; another size: it runs, learns, and position matters."""
    model = awaken(tiny(composition.format(name), {name: keywords}, dynamic_img_size=True, patch_drop_rate=0.5))
    x = torch.randn(2, 3, 24, 40)
    for grads in (step(model.train(), x), step(model.eval(), x), step(model.eval(), torch.randn(2, 3, 16, 56))):
        assert all(grad.abs().max() > 0 for key, grad in grads.items() if f'encodings.{name}.' in key)
    out = model(x)
    plain = tiny(composition.replace('+{}', '').replace('{}', 'nope'))
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if f'encodings.{name}.' not in k})
    assert (plain.eval()(x) - out).abs().max() > 5e-3
    low = copy.deepcopy(model).bfloat16()
    assert (low(x.bfloat16()).float() - out).norm() < 0.05 * out.norm()
    step(low.train(), x.bfloat16())


@pytest.mark.parametrize('name, keywords', MODELS)
def test_gate(name, keywords):
    """At 0 the model is the one without it; after one step of Adam everything learns."""
    auto = f'auto_{name}'
    model = tiny(auto, {auto: {**keywords, 'init': 0}})
    x = torch.randn(2, 3, 24, 40)
    assert (model.eval()(x) - tiny('nope').eval()(x)).abs().max() < 1e-6
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step(model, x)
    optimizer.step()
    assert all(grad.abs().max() > 0 for key, grad in step(model, x).items() if f'encodings.{auto}.' in key)
    assert all(abs(p.item()) > 1e-4 for key, p in model.named_parameters() if key.endswith('gate.weight'))


def test_pape_gate():
    """The one hook that gates itself: a gate of w is w times the bias."""
    grid = make_grid((3, 5), 1)
    encoding, gated = create('pape', (3, 5), 1), create('auto_pape', (3, 5), 1)
    gated.load_state_dict({**encoding.state_dict(), 'gate.weight': torch.tensor([-0.005])})
    inputs = make_inputs(grid)
    expected = product('pape', encoding, inputs, grid)
    assert_near(product('pape', gated, inputs, grid), -0.5 * expected, 1e-7)
