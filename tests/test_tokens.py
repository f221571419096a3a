"""Encodings that act on the tokens: each against its equations (references_tokens.py), its properties, its values."""
import copy
import functools
import math

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import build_sincos2d_pos_embed
from timm.models.naflexvit import NaFlexEmbeds

import references_tokens as references
import timm_sape
from references import assert_near
from timm_sape.encodings import ape2d, cape, fourier, sincos1d, sincos2d
from timm_sape.grid import Grid

DIM = 8
NAMES = ('ape2d', 'cape', 'fourier', 'sincos1d', 'sincos2d')
COORDINATES = ('fourier', 'sincos1d', 'sincos2d')
STILL = {'max_global_shift': 0, 'max_local_shift': 0, 'max_scale': 1}  # cape without augmentation


def create(name, grid_size, num_prefix_tokens=0, ref_grid_size=None, dtype=torch.float64, dim=DIM, **keywords):
    """An encoding whose parameters are all large, in training mode."""
    encoding = timm_sape.create_encoding(
        name, dim=dim, num_heads=2, grid_size=grid_size, num_prefix_tokens=num_prefix_tokens,
        ref_grid_size=ref_grid_size, dtype=dtype, **keywords)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return encoding


def make_tokens(grid, batch=2, dtype=torch.float64, dim=DIM):
    generator = torch.Generator().manual_seed(2)
    num_tokens = grid.num_prefix_tokens + grid.num_patches
    return torch.randn(batch, num_tokens, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def product(encoding, tokens, grid):
    """Tokens as the model makes them of what `embed` returns."""
    factor, term = encoding.embed(tokens, grid, None)
    assert (factor is None) == (not isinstance(encoding, cape.ContinuousAugmentedPositionEncoding))
    return (tokens if factor is None else tokens * factor) + term


def reference(name, encoding, tokens, grid, **drawn):
    size, prefix = grid.size, {'num_prefix_tokens': grid.num_prefix_tokens}
    if name == 'cape':
        return references.cape(tokens, size, **prefix, **drawn)
    if name == 'ape2d':
        return tokens + references.ape2d(
            encoding.table_y, encoding.table_x, size, combine=encoding.combine, **prefix)
    ref = encoding.ref_grid_size if encoding.rescales else None
    if name == 'fourier':
        parameters = (encoding.freqs, encoding.fc1.weight, encoding.fc1.bias, encoding.fc2.weight, encoding.fc2.bias)
        return tokens + references.fourier(*parameters, size, ref_grid_size=ref, **prefix)
    return tokens + getattr(references, name)(tokens.shape[-1], size, ref_grid_size=ref, **prefix)


def gradients(output, inputs):
    """Gradients of a weighted sum of all entries."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return torch.autograd.grad(output, inputs, weights.to(output))


def check(name, grid_size, num_prefix_tokens=0, own_size=None, **keywords):
    """Value and every gradient in float64, of an encoding in evaluation mode made for `own_size`."""
    if name == 'fourier':
        keywords = {'features': 6, 'hidden': 5, **keywords}
    grid = Grid(*grid_size, num_prefix_tokens)
    encoding = create(name, own_size or grid_size, num_prefix_tokens, **keywords).eval()
    tokens = make_tokens(grid)
    inputs = {'tokens': tokens, **dict(encoding.named_parameters())}
    actual, expected = product(encoding, tokens, grid), reference(name, encoding, tokens, grid)
    assert_near(actual, expected, 1e-10)
    for what, a, b in zip(inputs, gradients(actual, list(inputs.values())), gradients(expected, list(inputs.values()))):
        assert_near(a, b, 1e-10, f'gradient of {what}')


GRIDS = [(3, 5), (1, 7), (7, 1), (4, 4), (1, 1)]
VARIANTS = [
    ('ape2d', {}), ('ape2d', {'combine': 'concat'}), ('cape', {}), ('fourier', {}),
    ('fourier', {'features': 2, 'hidden': 1}), ('sincos1d', {}), ('sincos2d', {})]


@pytest.mark.parametrize('num_prefix_tokens', [0, 1, 5])
@pytest.mark.parametrize('grid_size', GRIDS)
@pytest.mark.parametrize('name, keywords', VARIANTS)
def test_equations(name, keywords, grid_size, num_prefix_tokens):
    check(name, grid_size, num_prefix_tokens, **keywords)


OTHER = [((6, 10), (3, 5)), ((4, 7), (3, 5)), ((2, 3), (3, 5)), ((5, 3), (3, 5)), ((1, 1), (3, 5)), ((4, 3), (1, 7))]
OTHER_VARIANTS = [
    *VARIANTS[:2], ('cape', {}),
    *((name, {'resolution': rule}) for name in COORDINATES for rule in ('extrapolate', 'rescale'))]


@pytest.mark.parametrize('grid_size, own_size', OTHER)
@pytest.mark.parametrize('name, keywords', OTHER_VARIANTS)
def test_equations_on_another_grid(name, keywords, grid_size, own_size):
    check(name, grid_size, 1, own_size, **keywords)


@pytest.mark.parametrize('name, keywords', OTHER_VARIANTS)
def test_three_roads_to_another_grid(name, keywords):
    """A dynamic size, `set_grid_size` and construction for the new grid follow one rule."""
    grid = Grid(4, 7, 1)
    trained = create(name, (3, 5), 1, **keywords).eval()
    expected = product(trained, tokens := make_tokens(grid), grid)
    moved = copy.deepcopy(trained)
    moved.set_grid_size((4, 7))
    assert torch.equal(product(moved, tokens, grid), expected)
    if name == 'ape2d':
        assert moved.table_y.shape[0] == 4 and moved.table_x.shape[0] == 7 and moved.table_x.is_contiguous()
        return  # its tables are resampled as they are loaded: a contract
    built = create(name, (4, 7), 1, ref_grid_size=(3, 5), **keywords).eval()
    built.load_state_dict(trained.state_dict())
    assert torch.equal(product(built, tokens, grid), expected)


@pytest.mark.parametrize('keep, length', [([0], 1), ([1], 1), ([0, 2, 4], 3)])
def test_rescaled_index(keep, length):
    """Twice as many patches, half the step: every second one is where a patch was. Going on, all the first ones are."""
    sizes = Grid(length, 1), Grid(length, 2)
    for rule, kept in (('rescale', slice(0, None, 2)), ('extrapolate', slice(0, length))):
        encoding = create('sincos1d', (length, 1), resolution=rule)
        (_, old), (_, new) = (encoding.embed(torch.zeros(1), grid, None) for grid in sizes)
        assert_near(new[kept], old, 1e-12)


# --- timm ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('grid_size', [(3, 5), (6, 10), (2, 9), (1, 1), (7, 2)])
def test_ape2d_is_that_of_naflexvit(grid_size):
    """The sum, on its own grid and resampled. timm computes in float32."""
    embeds = NaFlexEmbeds(embed_dim=DIM, class_token=False, pos_embed='factorized', pos_embed_grid_size=(3, 5))
    encoding = create('ape2d', (3, 5), dtype=torch.float32)
    with torch.no_grad():
        embeds.pos_embed_y.copy_(encoding.table_y[None])
        embeds.pos_embed_x.copy_(encoding.table_x[None])
        expected = torch.zeros(1, grid_size[0] * grid_size[1], DIM)
        embeds._apply_factorized_pos_embed(expected, grid_size)
        _, term = encoding.embed(expected, Grid(*grid_size), None)
    assert_near(term, expected[0], 1e-6)


@pytest.mark.parametrize('grid_size', GRIDS)
@pytest.mark.parametrize('dim', [4, 8, 64])
def test_sincos2d_is_that_of_timm_with_x_first(grid_size, dim):
    _, term = create('sincos2d', grid_size, dim=dim, dtype=torch.float32).embed(torch.zeros(1), Grid(*grid_size), None)
    y, x = build_sincos2d_pos_embed(grid_size, dim, interleave_sin_cos=True).chunk(2, dim=-1)
    assert_near(term, torch.cat([x, y], dim=-1), 1e-6)


def timm_sincos2d(swapped=False, **kwargs):
    """timm's function in the place of ours."""
    def compute(self, grid, device, dtype):
        table = build_sincos2d_pos_embed(grid.size, self.dim, dtype=dtype, **kwargs)
        return table.roll(self.dim // 2, -1) if swapped else table
    return compute


# --- augmentation ----------------------------------------------------------------------------------------------------

def check_augmentation(patch, grid_size, num_prefix_tokens=0, **keywords):
    """cape in training against its equations, with the random numbers that it has drawn."""
    drawn, rand = [], torch.rand

    def recorded(*size, **kwargs):
        drawn.append(rand(*size, **kwargs))
        return drawn[-1]

    grid = Grid(*grid_size, num_prefix_tokens)
    encoding = create('cape', grid_size, num_prefix_tokens, **keywords)
    limits = {'max_global_shift': 0.5, 'max_local_shift': 0.5, 'max_scale': 1.4, **keywords}
    tokens = make_tokens(grid, batch=3)
    with patch.context() as within:
        within.setattr(torch, 'rand', recorded)
        torch.manual_seed(0)
        actual = product(encoding, tokens, grid)
    given = {}
    for name, limit, shape in (
            ('global_shift', limits['max_global_shift'], (3, 2)),
            ('local_shift', limits['max_local_shift'], (3, grid.num_patches, 2)),
            ('log_scale', math.log(limits['max_scale']), (3,))):
        if limit:
            given[name] = limit * (2 * drawn.pop(0).reshape(shape) - 1)
    assert not drawn, 'too much drawn'
    expected = reference('cape', encoding, tokens, grid, **given)
    assert_near(actual, expected, 1e-10)
    assert_near(gradients(actual, tokens)[0], gradients(expected, tokens)[0], 1e-10, 'gradient')


@pytest.mark.parametrize('grid_size', GRIDS)
@pytest.mark.parametrize('num_prefix_tokens', [0, 5])
def test_augmented_equations(monkeypatch, grid_size, num_prefix_tokens):
    check_augmentation(monkeypatch, grid_size, num_prefix_tokens)


@pytest.mark.parametrize('keywords', [
    {**STILL, 'max_global_shift': 2}, {**STILL, 'max_local_shift': 0.1}, {**STILL, 'max_scale': 3.0},
    {'max_global_shift': 0}, {'max_local_shift': 0}, {'max_scale': 1}, STILL])
def test_augmented_equations_by_keyword(monkeypatch, keywords):
    check_augmentation(monkeypatch, (3, 4), 1, **keywords)


def displacements(grid, batch=400, **keywords):
    """By how much each patch is moved, seen from outside: by the phases of waves, `[B, H*W, 2]`."""
    torch.manual_seed(0)
    dim = 4096  # neighbouring waves have about the same length
    encoding = create('cape', grid.size, dim=dim, **keywords)
    tokens = torch.zeros(batch, grid.num_patches, dim, dtype=torch.float64)
    waves = []
    for term in (encoding.train().embed(tokens, grid, None)[1], encoding.eval().embed(tokens, grid, None)[1]):
        waves.append(torch.complex(*term.chunk(2, dim=-1))[..., :2])
    phases = (waves[0] * waves[1].conj()).angle() / math.pi
    rho = 10 ** (1 / (dim / 2 - 1))
    directions = torch.tensor([[1, 0], [rho * math.cos(1), rho * math.sin(1)]], dtype=torch.float64)
    return torch.linalg.solve(directions, phases.mT).mT


def check_uniform(values, limit):
    assert values.abs().max() <= limit + 1e-9
    assert values.max() > 0.97 * limit and values.min() < -0.97 * limit
    assert abs(values.mean()) < 0.1 * limit
    assert values.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.1)


def test_global_shift():
    """One for each image and axis, the same for all patches."""
    moved = displacements(Grid(3, 4), **{**STILL, 'max_global_shift': 0.5})
    assert_near(moved, moved[:, :1].expand_as(moved), 1e-9)
    check_uniform(moved[:, 0, 0], 0.5)
    check_uniform(moved[:, 0, 1], 0.5)
    assert abs(torch.corrcoef(moved[:, 0].T)[0, 1]) < 0.15  # y and x have nothing to do with each other


def test_local_shift():
    """One for each image, patch and axis, in distances of neighbours: here 1 along y and 2/3 along x."""
    moved = displacements(Grid(3, 4), **{**STILL, 'max_local_shift': 0.5})
    check_uniform(moved[..., 0], 0.5)
    check_uniform(moved[..., 1], 0.5 * 2 / 3)
    correlation = torch.corrcoef(moved.flatten(1).T) - torch.eye(24)
    assert correlation.abs().max() < 0.25
    moved = displacements(Grid(1, 4), **{**STILL, 'max_local_shift': 0.5})  # along y there is no neighbour
    assert moved[..., 0].abs().max() < 1e-9 and moved[..., 1].abs().max() > 0.3


def test_scale():
    """One for each image and both axes, its logarithm uniform."""
    grid = Grid(3, 4)
    moved = displacements(grid, **{**STILL, 'max_scale': 1.4})
    place = torch.tensor([[-1 + y, -1 + 2 * x / 3] for y, x in references.patches(grid.size)], dtype=torch.float64)
    scale = 1 + (moved * place).sum((1, 2)) / place.square().sum()  # [B]
    assert_near(moved, (scale - 1)[:, None, None] * place, 1e-9)
    check_uniform(scale.log(), math.log(1.4))


def test_augmentation_is_for_training():
    """Each image has its own, each pass another; in evaluation there is none, and no random number is drawn."""
    grid = Grid(3, 5, 2)
    encoding = create('cape', (3, 5), 2)
    tokens = make_tokens(grid)
    torch.manual_seed(0)
    first, second = (encoding.embed(tokens, grid, None)[1] for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(encoding.embed(tokens, grid, None)[1], first)
    assert (first - second).abs().max() > 0.1 and (first[0] - first[1]).abs().max() > 0.1
    assert (first[:, :2] == 0).all()
    still = create('cape', (3, 5), 2, **STILL)
    state = torch.get_rng_state()
    expected = encoding.eval().embed(tokens, grid, None)[1]
    assert torch.equal(still.embed(tokens, grid, None)[1], expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert (first - expected).abs().max() > 0.1


@pytest.mark.parametrize('checkpointing', [False, True])
def test_augmentation_with_gradient_checkpointing(checkpointing):
    """What is drawn in the forward pass is not drawn again in the backward pass."""
    model = built('cape').train()
    model.set_grad_checkpointing(checkpointing)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    loss = model(x).square().sum()
    state = torch.get_rng_state()
    grad = torch.autograd.grad(loss, model.patch_embed.proj.weight)[0]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    model.set_grad_checkpointing(False)
    plain = model(x).square().sum()
    assert_near(loss, plain, 1e-6)
    assert_near(grad, torch.autograd.grad(plain, model.patch_embed.proj.weight)[0], 1e-5, 'gradient')


def test_augmentation_compiled():
    """One graph with the random numbers in it, at two sizes."""
    encoding = create('cape', (3, 5), 1)
    compiled = torch.compile(
        lambda x, height, width: encoding.embed(x, Grid(height, width, 1), None)[1], fullgraph=True, backend='eager')
    for size in ((3, 5), (4, 6)):
        tokens = make_tokens(Grid(*size, 1))
        torch.manual_seed(0)
        expected = encoding.embed(tokens, Grid(*size, 1), None)[1]
        torch.manual_seed(0)
        assert_near(compiled(tokens, *size), expected, 1e-12)
        assert not torch.equal(compiled(tokens, *size), expected)


# --- the reference comparison must be able to fail -------------------------------------------------------------------

def pad_behind(self, table):
    return F.pad(table, (0, 0, 0, self.num_prefix_tokens))


def transposed_coordinates(self, device=None, dtype=None):
    return coordinates(self, device, dtype).flip(-1)


def columns_first(self, device=None, dtype=None):
    return coordinates(Grid(self.width, self.height), device, dtype).flip(-1)


def corners(self, grid, device, dtype):
    """Rescales the outer patches onto the outer patches."""
    last = [max(size - 1, 1) for size in grid.size]
    scale = [(ref - 1) / n for ref, n in zip(self.ref_grid_size, last)]
    return coordinates(grid, device, dtype) * torch.tensor(scale, dtype=dtype)


def scales_first(self, grid, batch, device, dtype):
    position, step = self._positions(grid, device, dtype)
    shift = 0.5 * (2 * torch.rand(batch, 1, 2, dtype=dtype) - 1)
    local = 0.5 * step * (2 * torch.rand(batch, grid.num_patches, 2, dtype=dtype) - 1)
    return position * (math.log(1.4) * (2 * torch.rand(batch, 1, 1, dtype=dtype) - 1)).exp() + shift + local


def steps_of_one_axis(self, grid, device, dtype):
    position, step = cape_positions(self, grid, device, dtype)
    return position, step[:1]


def linspace_positions(self, grid, device, dtype):
    """As linspace has it: one patch alone stands at -1."""
    _, step = cape_positions(self, grid, device, dtype)
    y, x = (torch.linspace(-1, 1, size, dtype=dtype) for size in grid.size)
    return torch.stack(torch.meshgrid(y, x, indexing='ij'), dim=-1).flatten(0, 1), step


coordinates = Grid.coordinates
interpolate, gelu = F.interpolate, F.gelu
cape_positions = cape.ContinuousAugmentedPositionEncoding._positions
SinCos1d, SinCos2d = sincos1d.SinusoidalPositionEncoding1d, sincos2d.SinusoidalPositionEncoding2d
Factored, Cape = ape2d.FactoredPositionEncoding, cape.ContinuousAugmentedPositionEncoding
Coordinate = timm_sape.encodings.CoordinateEncoding
RESCALED = functools.partial(check, grid_size=(4, 7), own_size=(3, 5), resolution='rescale')

MUTANTS = {  # what is checked, owner, attribute, replacement
    'prefix behind': (functools.partial(check, 'sincos2d', (3, 5), 1), Grid, 'pad_tokens', pad_behind),
    'ape2d, prefix behind': (functools.partial(check, 'ape2d', (3, 5), 1), Grid, 'pad_tokens', pad_behind),
    'ape2d, tables resized for each other': (
        functools.partial(check, 'ape2d', (6, 2), 0, (3, 5)), Factored, 'RESIZED', ('table_x', 'table_y')),
    'ape2d, corners aligned': (
        functools.partial(check, 'ape2d', (6, 2), 0, (3, 5)), F, 'interpolate',
        functools.partial(interpolate, align_corners=True)),
    'ape2d, nearest row': (
        functools.partial(check, 'ape2d', (6, 2), 0, (3, 5)), F, 'interpolate',
        lambda x, size, mode: interpolate(x, size)),
    'sincos1d along columns': (
        functools.partial(check, 'sincos1d', (3, 5)), SinCos1d, 'compute',
        lambda self, grid, device, dtype: compute1d(self, grid, device, dtype).unflatten(
            0, (grid.width, grid.height)).transpose(0, 1).flatten(0, 1)),
    'sincos1d, all sines first': (
        functools.partial(check, 'sincos1d', (3, 5)), SinCos1d, 'compute',
        lambda *args: compute1d(*args).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)),
    'sincos1d, trained grid ignored': (
        functools.partial(RESCALED, 'sincos1d'), Coordinate, 'rescaling', lambda *args: None),
    'sincos2d, x and y swapped': (
        functools.partial(check, 'sincos2d', (3, 5)), Grid, 'coordinates', transposed_coordinates),
    'sincos2d, columns first': (functools.partial(check, 'sincos2d', (3, 5)), Grid, 'coordinates', columns_first),
    'sincos2d, corners aligned': (functools.partial(RESCALED, 'sincos2d'), Coordinate, 'coordinates', corners),
    "sincos2d, timm's order of axes": (
        functools.partial(check, 'sincos2d', (3, 5)), SinCos2d, 'compute', timm_sincos2d(interleave_sin_cos=True)),
    "sincos2d, timm's default layout": (
        functools.partial(check, 'sincos2d', (3, 5)), SinCos2d, 'compute', timm_sincos2d(swapped=True)),
    "sincos2d, timm's reverse_coord": (
        functools.partial(check, 'sincos2d', (3, 5)), SinCos2d, 'compute',
        timm_sincos2d(interleave_sin_cos=True, reverse_coord=True)),
    "sincos2d, timm's reverse_coord, swapped": (
        functools.partial(check, 'sincos2d', (3, 5)), SinCos2d, 'compute',
        timm_sincos2d(True, interleave_sin_cos=True, reverse_coord=True)),
    'fourier, x and y swapped': (
        functools.partial(check, 'fourier', (3, 5)), Grid, 'coordinates', transposed_coordinates),
    'fourier, GELU by tanh': (
        functools.partial(check, 'fourier', (3, 5)), fourier.F, 'gelu', functools.partial(gelu, approximate='tanh')),
    'fourier, no GELU': (functools.partial(check, 'fourier', (3, 5)), fourier.F, 'gelu', lambda x: x),
    'fourier, trained grid ignored': (
        functools.partial(RESCALED, 'fourier'), Coordinate, 'rescaling', lambda *args: None),
    'cape, x and y swapped': (functools.partial(check, 'cape', (4, 4)), Grid, 'coordinates', transposed_coordinates),
    'cape, prefix tokens scaled': (
        functools.partial(check, 'cape', (3, 5), 1), F, 'pad',
        lambda x, pad, value=0: padded(x, pad, value=8 ** 0.5 if value else 0)),
    'cape, one row at -1': (functools.partial(check, 'cape', (1, 5)), Cape, '_positions', linspace_positions),
    'cape, scaled before it is shifted': (
        lambda: check_augmentation(pytest.MonkeyPatch(), (3, 5)), Cape, '_augmented', scales_first),
    'cape, steps of one axis for both': (
        lambda: check_augmentation(pytest.MonkeyPatch(), (3, 5)), Cape, '_positions', steps_of_one_axis),
    'cape, augmented in evaluation': (
        functools.partial(check, 'cape', (3, 5)), nn.Module, 'eval', lambda self: self.train()),
}
compute1d, padded = SinCos1d.compute, F.pad


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    function, *patch = MUTANTS[mutant]
    monkeypatch.setattr(*patch)
    with pytest.raises(AssertionError, match='off by|instead of'):
        function()


# --- properties ------------------------------------------------------------------------------------------------------

def own_table(name, grid_size, **keywords):
    encoding = create(name, grid_size, **keywords).eval()
    tokens = torch.zeros(1, grid_size[0] * grid_size[1], encoding.dim, dtype=torch.float64)
    return encoding.embed(tokens, Grid(*grid_size), None)[1].detach().unflatten(0, grid_size)  # [H, W, D]


@pytest.mark.parametrize('name', ['sincos2d', 'cape'])
def test_products_of_waves_are_relative(name):
    """All rows have one length, and the product of two is a function of the offset."""
    table = own_table(name, (4, 5), dim=16)
    assert_near(table.square().sum(-1), torch.full((4, 5), 8.0), 1e-12)
    products = torch.einsum('yxc,vuc->yxvu', table, table)
    assert_near(products[1:, 1:, 1:, 1:], products[:-1, :-1, :-1, :-1], 1e-12)
    assert not torch.allclose(products[0, 0], products[1, 1])


def test_products_of_sincos1d_are_relative_along_the_raster():
    """Nothing about it is 2-D: the last patch of a row is next to the first one of the next."""
    table = own_table('sincos1d', (4, 5), dim=16).flatten(0, 1)
    products = table @ table.T
    assert_near(products[1:, 1:], products[:-1, :-1], 1e-12)
    assert products[4, 5] == pytest.approx(products[0, 1].item())  # (0, 4) and (1, 0), (0, 0) and (0, 1)
    assert products[0, 5] < 0.95 * products[0, 1]  # (0, 0) and (1, 0)


def test_cape_turned_upside_down():
    """Positions are symmetric about the centre: half a turn takes each wave to its conjugate. Not so in sincos2d."""
    for name, symmetric in (('cape', True), ('sincos2d', False)):
        table = own_table(name, (4, 5), dim=16)
        cos, sin = table.flip(0, 1).chunk(2, dim=-1)
        assert torch.allclose(torch.cat([cos, -sin], dim=-1), table) == symmetric


def test_sincos2d_transposed():
    """Transposing the grid swaps the halves of the channels. Not so in cape, whose waves have any direction."""
    for name, symmetric in (('sincos2d', True), ('cape', False)):
        a, b = own_table(name, (4, 4), dim=16), own_table(name, (4, 4), dim=16).transpose(0, 1).roll(8, -1)
        assert torch.allclose(a, b) == symmetric
    assert_near(own_table('sincos2d', (3, 5)), own_table('sincos2d', (5, 3)).transpose(0, 1).roll(4, -1), 1e-12)


@pytest.mark.parametrize('combine', ['sum', 'concat'])
def test_ape2d_is_separable(combine):
    """A step from row to row is the same in all columns, however the tables are set; fourier can do otherwise."""
    for name, keywords, separable in (('ape2d', {'combine': combine}, True), ('fourier', {}, False)):
        steps = own_table(name, (3, 5), **keywords).diff(dim=0)
        assert torch.allclose(steps, steps[:, :1].expand_as(steps)) == separable


def test_fourier_features_start_as_a_gaussian_of_distance():
    """cos(p W).cos(p' W) + sin(p W).sin(p' W) sums cos((p - p') W), of which the mean is exp(-r^2 / (2 gamma^2))."""
    for gamma in (1.0, 2.5):
        torch.manual_seed(0)
        encoding = timm_sape.create_encoding(
            'fourier', dim=DIM, num_heads=2, grid_size=(3, 5), features=40_000, hidden=1, gamma=gamma)
        for delta in ((0.0, 0.0), (1.0, 0.0), (0.0, -2.0), (2.0, 1.5)):
            mean = (torch.tensor(delta) @ encoding.freqs).cos().mean().item()
            assert mean == pytest.approx(math.exp(-(delta[0] ** 2 + delta[1] ** 2) / (2 * gamma ** 2)), abs=0.02)


def test_content_does_not_matter():
    """Terms are the same for all images."""
    for name in NAMES:
        grid = Grid(3, 5, 1)
        encoding = create(name, (3, 5), 1).eval()
        (_, a), (_, b) = (encoding.embed(x, grid, None) for x in (make_tokens(grid), 2 * make_tokens(grid)))
        assert torch.equal(a, b)


# --- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', NAMES)
def test_float32(name):
    """A large grid in single against double precision. What is added to the tokens is rounded in their dtype."""
    grid = Grid(24, 32, 1)
    encoding = create(name, (3, 5), 1).eval()
    single = copy.deepcopy(encoding).float()
    term, wide = (e.embed(make_tokens(grid), grid, None)[1] for e in (single, encoding))
    assert term.dtype == torch.float32
    assert_near(term, wide, 1e-4)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name', NAMES)
def test_half_models(name, dtype):
    """Terms are computed in float32 from the parameters of a half model, in training too; factors widen no token."""
    encoding = create(name, (3, 5), 1, dtype=torch.float32).to(dtype)
    for grid in (Grid(3, 5, 1), Grid(6, 4, 1)):
        for training in (False, True):
            encoding.train(training)
            factor, term = encoding.embed(make_tokens(grid, dtype=dtype), grid, None)
            assert term.dtype == torch.float32
            assert factor is None or factor.dtype == dtype
        term = encoding.eval().embed(make_tokens(grid, dtype=dtype), grid, None)[1]
        wide = copy.deepcopy(encoding).double().embed(make_tokens(grid), grid, None)[1]
        assert_near(term, wide, 1e-2 if name == 'ape2d' and grid.size != (3, 5) else 1e-5)  # a table keeps its dtype


@pytest.mark.parametrize('name', NAMES)
def test_autocast(name):
    """Autocast does not reach the terms, forwards and backwards."""
    grid = Grid(3, 5, 1)
    encoding = create(name, (3, 5), 1, dtype=torch.float32).eval()
    tokens, parameters = make_tokens(grid, dtype=torch.float32), list(encoding.parameters())
    expected = encoding.embed(tokens, grid, None)[1]
    with torch.autocast('cpu', torch.bfloat16):
        actual = encoding.embed(tokens, grid, None)[1]
    assert torch.equal(actual, expected)
    if parameters:
        for a, b in zip(gradients(actual, parameters), gradients(expected, parameters)):
            assert torch.equal(a, b)


# --- keywords and initial values -------------------------------------------------------------------------------------

@pytest.mark.parametrize('name, dim, keywords, text', [
    ('ape2d', 8, {'combine': 'product'}, "'ape2d': combine must be 'sum' or 'concat', got 'product'"),
    ('ape2d', 8, {'combine': ['sum']}, r"combine must be 'sum' or 'concat', got \['sum'\]"),
    ('ape2d', 7, {'combine': 'concat'}, "'ape2d' with combine='concat' needs an even embed dim, got 7. Use 'sum'"),
    ('sincos1d', 7, {}, "'sincos1d' needs an even embed dim, got 7. Choose another embed_dim"),
    ('sincos2d', 6, {}, "'sincos2d' needs an embed dim that is a multiple of 4, got 6. Choose another embed_dim"),
    *((name, 8, {'resolution': 'resize'}, "resolution must be 'extrapolate' or 'rescale', got 'resize'")
      for name in COORDINATES),
    *(('fourier', 8, {'gamma': gamma}, f"'fourier' needs a positive gamma, got {gamma!r}")
      for gamma in (0, -1.0, float('nan'), float('inf'), True, '2.5', None)),
    *(('fourier', 8, {'features': features}, f"'fourier' needs features .* positive even number, got {features!r}")
      for features in (0, 5, -2, 6.0, True, '6', float('nan'))),
    ('fourier', 7, {}, r"'fourier' needs features \(by default embed_dim\) to be a positive even number, got 7"),
    *(('fourier', 8, {'hidden': hidden}, f"'fourier' needs hidden to be a positive integer, got {hidden!r}")
      for hidden in (0, -1, 4.0, True, '4')),
    ('cape', 7, {}, "'cape' needs an even embed dim, got 7. Choose another embed_dim"),
    *(('cape', 8, {name: value}, f"'cape' needs {name} to be a number of at least 0, got {value!r}")
      for name in ('max_global_shift', 'max_local_shift')
      for value in (-0.1, float('nan'), float('inf'), True, '0.5', None)),
    *(('cape', 8, {'max_scale': value}, f"'cape' needs max_scale to be a number of at least 1, got {value!r}")
      for value in (0, 0.99, -1.4, float('nan'), float('inf'), True, '1.4', None)),
])
def test_wrong_values(name, dim, keywords, text):
    with pytest.raises(ValueError, match=text):
        timm_sape.create_encoding(name, dim=dim, num_heads=1, grid_size=(3, 5), **keywords)


def test_cape_has_no_gate():
    with pytest.raises(ValueError, match="'auto_cape'.*no neutral form"):
        built('auto_cape')


def built(pos_enc, **kwargs):
    torch.manual_seed(0)
    return timm.create_model('test_vit_nope', pos_enc=pos_enc, **{'img_size': 32, 'patch_size': 8, **kwargs})


def initialised(pos_enc, **kwargs):
    """A model as built, and one after `init_weights` has drawn all anew."""
    model = built(pos_enc, **kwargs)
    yield model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float('nan'))
    model.init_weights()
    yield model


@pytest.mark.parametrize('combine, channels', [('sum', 64), ('concat', 32)])
def test_initial_ape2d(combine, channels):
    for model in initialised('ape2d', img_size=(128, 64), pos_enc_kwargs={'ape2d': {'combine': combine}}):
        encoding = model.encodings['ape2d']
        assert encoding.table_y.shape == (16, channels) and encoding.table_x.shape == (8, channels)
        for table in (encoding.table_y, encoding.table_x):
            assert table.std().item() == pytest.approx(0.02, rel=0.15)
            assert abs(table.mean().item()) < 0.003
        assert encoding.table_y.abs().max() > 0.05  # normal, not uniform


@pytest.mark.parametrize('keywords, std, features, hidden', [
    ({}, 0.4, 64, 256), ({'gamma': 5, 'features': 400, 'hidden': 100}, 0.2, 400, 100)])
def test_initial_fourier(keywords, std, features, hidden):
    for model in initialised('fourier', pos_enc_kwargs={'fourier': keywords}):
        encoding = model.encodings['fourier']
        assert encoding.freqs.shape == (2, features // 2)
        assert encoding.freqs.std().item() == pytest.approx(std, rel=0.2)
        assert abs(encoding.freqs.mean().item()) < 0.3 * std
        for layer, shape in ((encoding.fc1, (hidden, features)), (encoding.fc2, (64, hidden))):
            limit = shape[1] ** -0.5
            assert layer.weight.shape == shape and layer.bias.shape == shape[:1]
            for parameter in (layer.weight, layer.bias):
                assert 0.8 * limit < parameter.abs().max() <= limit
                assert parameter.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.2)


@pytest.mark.parametrize('name', NAMES)
def test_parameters_added(name):
    """As many as the documentation says, none of which decays; and one instance for the whole model."""
    model = built(name, img_size=(32, 48))
    (encoding,) = model.position_encodings().values()
    adds = encoding.adds.replace('none', '0')
    num_parameters = sum(p.numel() for p in encoding.parameters())
    assert num_parameters == eval(adds, {'H': 4, 'W': 6, 'D': 64})
    assert encoding.no_weight_decay() == set(dict(encoding.named_parameters()))
    assert encoding.acts_on() == ('tokens',) and not encoding.relative


# --- in a model ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('pos_enc', [*NAMES, *(f'ape+{name}' for name in NAMES), 'cape+fourier+sincos2d'])
def test_model(pos_enc):
    """Any number of prefix tokens, patches dropped, half precision, images of other sizes; gradients everywhere."""
    model = built(pos_enc, img_size=(24, 40), reg_tokens=4, patch_drop_rate=0.5, dynamic_img_size=True, num_classes=3)
    for grid_size in ((3, 5), (4, 6), (1, 7), (7, 1), (1, 1)):
        x = torch.randn(2, 3, 8 * grid_size[0], 8 * grid_size[1])
        for low in (False, True):
            model.to(torch.bfloat16 if low else torch.float32)
            for training in (False, True):
                model.train(training)
                model.zero_grad()
                out = model(x.to(model.cls_token.dtype))
                assert out.shape == (2, 3) and out.isfinite().all()
                out.float().square().sum().backward()
                for name, parameter in model.named_parameters():
                    assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize('name', NAMES)
def test_model_adds_to_the_patches(name):
    """What goes into the first block is tokens times factors plus terms, and dropped patches take theirs along."""
    model = built(name, reg_tokens=4, pos_enc_kwargs={name: STILL} if name == 'cape' else None).double()
    plain = built('nope', reg_tokens=4).double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    (encoding,), grid = model.position_encodings().values(), Grid(4, 4, 5)
    (tokens, _), (expected, _) = model._embed(x, None), plain._embed(x, None)
    expected = reference(name, encoding, expected, grid)
    assert_near(tokens, expected, 1e-10)

    dropping = built(name, reg_tokens=4, patch_drop_rate=0.5, pos_enc_kwargs=model.pos_enc_kwargs or None).double()
    dropping.load_state_dict(model.state_dict())
    tokens, position = dropping.train()._embed(x, None)
    assert tokens.shape == (2, 5 + 8, 64)
    kept = position.grid.keep_indices[:, :, None].expand(-1, -1, 64)
    assert_near(tokens, torch.cat([expected[:, :5], expected[:, 5:].gather(1, kept)], dim=1), 1e-10)


@pytest.mark.parametrize('name', [name for name in NAMES if name != 'cape'])
def test_gate(name):
    """At 0 the model is the one without the encoding; it opens, and then all parameters learn."""
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    plain, model = built('nope'), built(f'auto_{name}', pos_enc_kwargs={f'auto_{name}': {'init': 0}})
    assert_near(model(x), plain(x), 1e-6)
    half = built(f'auto_{name}').encodings[f'auto_{name}']
    assert half.gate.weight.item() == pytest.approx(0.5 / 100)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(x).square().sum().backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, path
    assert model.encodings[f'auto_{name}'].gate.weight.abs().item() == pytest.approx(1e-3, rel=1e-3)
