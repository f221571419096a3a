"""`cape`: sinusoids of positions that are moved and scaled at random in training."""
import copy
import functools
import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import reference_cape as reference
import timm_sape
from breakages import in_raster_order, x_before_y
from harness import (
    GRIDS, KEPT, assert_near, catches, check_first_tokens, compare, create, embed, make_grid, make_images, make_model,
    make_tokens, where)
from timm_sape import Grid
from timm_sape.encodings.cape import ContinuousAugmentedPositionEncoding
from token_checks import MUTANTS, PLAIN, PREFIXED, TermTests

STILL = {'max_global_shift': 0, 'max_local_shift': 0, 'max_scale': 1}  # no augmentation
Cape = ContinuousAugmentedPositionEncoding
pad, positions = F.pad, Cape._positions


def linspace_positions(self, grid, device, dtype):
    """As with linspace, where a single patch is at -1."""
    _, step = positions(self, grid, device, dtype)
    y, x = (torch.linspace(-1, 1, size, dtype=dtype) for size in grid.size)
    return torch.stack(torch.meshgrid(y, x, indexing='ij'), dim=-1).flatten(0, 1), step


class TestCape(TermTests):
    """In evaluation mode."""
    name = 'cape'
    mutants = {
        'x and y swapped': ({'grid_size': (4, 4)}, (Grid, 'coordinates', x_before_y)),
        'prefix tokens scaled': (PREFIXED, (
            F, 'pad', lambda x, widths, value=0: pad(x, widths, value=16 ** 0.5 if value else 0))),
        'patches not scaled': (PREFIXED, (Cape, 'mix', lambda self, x, term, grid: (x, term))),
        'one row at -1': ({'grid_size': (1, 5)}, (Cape, '_positions', linspace_positions)),
        'augmented in evaluation': (PLAIN, (nn.Module, 'eval', lambda self: self.train())),
        'kept patches in raster order': MUTANTS['kept patches in raster order'],
    }

    def expected(self, encoding, tokens, grid):
        return reference.cape(tokens, grid.size, **where(grid))

    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize('grid_size', [(3, 5), (6, 4)])
    def test_half_models(self, grid_size, dtype):
        """The term of a half model is computed in float32, in training too. The factor does not widen tokens."""
        grid = Grid(*grid_size, 1)
        encoding = create('cape', (3, 5), 1, dtype=torch.float32).to(dtype)
        wide = copy.deepcopy(encoding).double()(make_tokens(grid), grid=grid, hook='embed')
        for training in (False, True):
            tokens = make_tokens(grid, dtype=dtype)
            term = encoding.train(training)(tokens, grid=grid, hook='embed')
            assert term.dtype == torch.float32
            if not training:
                assert_near(term, wide, 1e-5)
            weighted, same = encoding(tokens, term, grid=grid, hook='mix')
            assert weighted.dtype == dtype and same is term

    def test_in_a_model(self):
        check_first_tokens('cape', self.expected, pos_enc_kwargs={'cape': STILL})


# --- augmentation ----------------------------------------------------------------------------------------------------

def check_augmentation(grid_size, num_prefix_tokens=0, num_keep=None, **keywords):
    """Training mode against the equations, with the random numbers that it has drawn."""
    drawn, rand = [], torch.rand

    def recorded(*size, **kwargs):
        drawn.append(rand(*size, **kwargs))
        return drawn[-1]

    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = create('cape', grid_size, num_prefix_tokens, **keywords).train()
    limits = {'max_global_shift': 0.5, 'max_local_shift': 0.5, 'max_scale': 1.4, **keywords}
    tokens = make_tokens(grid, batch=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'rand', recorded)
        torch.manual_seed(0)
        actual = embed(encoding, tokens, grid)
    given = {}
    for name, limit, shape in (
            ('global_shift', limits['max_global_shift'], (3, 2)),
            ('local_shift', limits['max_local_shift'], (3, grid.num_patches, 2)),
            ('log_scale', math.log(limits['max_scale']), (3,))):
        if limit:
            given[name] = limit * (2 * drawn.pop(0).reshape(shape) - 1)
    assert not drawn, 'too much drawn'
    compare(actual, reference.cape(tokens, grid.size, **where(grid), **given), {'tokens': tokens})


@pytest.mark.parametrize('num_prefix_tokens', [0, 5])
@pytest.mark.parametrize('grid_size', GRIDS)
def test_augmented_equations(grid_size, num_prefix_tokens):
    check_augmentation(grid_size, num_prefix_tokens)


@pytest.mark.parametrize('case', KEPT)
def test_augmented_equations_of_kept_patches(case):
    check_augmentation(*case)


@pytest.mark.parametrize('keywords', [
    {**STILL, 'max_global_shift': 2}, {**STILL, 'max_local_shift': 0.1}, {**STILL, 'max_scale': 3.0},
    {'max_global_shift': 0}, {'max_local_shift': 0}, {'max_scale': 1}, STILL])
def test_augmented_equations_by_keyword(keywords):
    check_augmentation((3, 4), 1, **keywords)


def displacements(grid, batch=400, **keywords):
    """The displacement of each patch, computed from the phases of the waves, `[B, H*W, 2]`."""
    torch.manual_seed(0)
    dim = 4096  # so that successive waves have about the same length
    encoding = create('cape', grid.size, dim=dim, **keywords)
    tokens = torch.zeros(batch, grid.num_patches, dim, dtype=torch.float64)
    waves = []
    for training in (True, False):
        term = encoding.train(training)(tokens, grid=grid, hook='embed')
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
    assert abs(torch.corrcoef(moved[:, 0].T)[0, 1]) < 0.15  # y and x are independent


def test_local_shift():
    """One for each image, patch and axis, in distances of neighbors: here 1 along y and 2/3 along x."""
    moved = displacements(Grid(3, 4), **{**STILL, 'max_local_shift': 0.5})
    check_uniform(moved[..., 0], 0.5)
    check_uniform(moved[..., 1], 0.5 * 2 / 3)
    correlation = torch.corrcoef(moved.flatten(1).T) - torch.eye(24)
    assert correlation.abs().max() < 0.25
    moved = displacements(Grid(1, 4), **{**STILL, 'max_local_shift': 0.5})  # along y there is no neighbor
    assert moved[..., 0].abs().max() < 1e-9 and moved[..., 1].abs().max() > 0.3


def test_scale():
    """One for each image and both axes, its logarithm uniform."""
    grid = Grid(3, 4)
    moved = displacements(grid, **{**STILL, 'max_scale': 1.4})
    place = torch.tensor([[-1 + y, -1 + 2 * x / 3] for y in range(3) for x in range(4)], dtype=torch.float64)
    scale = 1 + (moved * place).sum((1, 2)) / place.square().sum()  # [B]
    assert_near(moved, (scale - 1)[:, None, None] * place, 1e-9)
    check_uniform(scale.log(), math.log(1.4))


def test_augmentation_is_for_training():
    """It differs between images and between passes. In evaluation mode there is none, and no random number is drawn."""
    grid = Grid(3, 5, 2)
    encoding, tokens = create('cape', (3, 5), 2).train(), make_tokens(grid)
    torch.manual_seed(0)
    first, second = (encoding(tokens, grid=grid, hook='embed') for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(encoding(tokens, grid=grid, hook='embed'), first)
    assert (first - second).abs().max() > 0.1 and (first[0] - first[1]).abs().max() > 0.1
    assert (first[:, :2] == 0).all()
    still = create('cape', (3, 5), 2, **STILL).train()
    state = torch.get_rng_state()
    term = encoding.eval()(tokens, grid=grid, hook='embed')
    assert torch.equal(still(tokens, grid=grid, hook='embed'), term)
    assert torch.equal(torch.get_rng_state(), state)
    assert (first - term).abs().max() > 0.1


@pytest.mark.parametrize('checkpointing', [False, True])
def test_augmentation_with_gradient_checkpointing(checkpointing):
    """The backward pass uses the random numbers of the forward pass."""
    model = make_model('cape').train()
    model.set_grad_checkpointing(checkpointing)
    x = make_images()
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
    encoding = create('cape', (3, 5), 1).train()
    compiled = torch.compile(
        lambda x, height, width: encoding(x, grid=Grid(height, width, 1), hook='embed'), fullgraph=True,
        backend='eager')
    for size in ((3, 5), (4, 6)):
        tokens = make_tokens(Grid(*size, 1))
        torch.manual_seed(0)
        term = encoding(tokens, grid=Grid(*size, 1), hook='embed')
        torch.manual_seed(0)
        assert_near(compiled(tokens, *size), term, 1e-12)
        assert not torch.equal(compiled(tokens, *size), term)


def scales_first(self, grid, batch, device, dtype):
    position, step = self._positions(grid, device, dtype)
    shift = 0.5 * (2 * torch.rand(batch, 1, 2, dtype=dtype) - 1)
    local = 0.5 * step * (2 * torch.rand(batch, grid.num_patches, 2, dtype=dtype) - 1)
    return position * (math.log(1.4) * (2 * torch.rand(batch, 1, 1, dtype=dtype) - 1)).exp() + shift + local


def steps_of_one_axis(self, grid, device, dtype):
    position, step = positions(self, grid, device, dtype)
    return position, step[:1]


TRAINED = functools.partial(check_augmentation, (3, 5))
AUGMENTED_MUTANTS = {  # what is checked, owner, attribute, replacement
    'scaled before it is shifted': (TRAINED, Cape, '_augmented', scales_first),
    'steps of one axis for both': (TRAINED, Cape, '_positions', steps_of_one_axis),
    'kept patches in raster order': (
        functools.partial(check_augmentation, (3, 5), 1, 8), Grid, 'keep_tokens', in_raster_order(Grid.keep_tokens)),
}


@pytest.mark.parametrize('mutant', AUGMENTED_MUTANTS)
def test_mutants_are_caught_in_training(mutant, monkeypatch):
    check, *patch = AUGMENTED_MUTANTS[mutant]
    catches(check, monkeypatch, *patch)


# --- properties ------------------------------------------------------------------------------------------------------

def own_table(grid_size):
    grid = Grid(*grid_size)
    return create('cape', grid_size)(make_tokens(grid), grid=grid, hook='embed').unflatten(0, grid_size)


def test_products_of_waves_are_relative():
    """All rows have the same norm, and the product of two is a function of the offset."""
    table = own_table((4, 5))
    assert_near(table.square().sum(-1), torch.full((4, 5), 8.0), 1e-12)
    products = torch.einsum('yxc,vuc->yxvu', table, table)
    assert_near(products[1:, 1:, 1:, 1:], products[:-1, :-1, :-1, :-1], 1e-12)
    assert not torch.allclose(products[0, 0], products[1, 1])


def test_turned_upside_down():
    """Positions are symmetric about the center: half a turn takes each wave to its conjugate. Not so in sincos2d."""
    table = own_table((4, 5))
    cos, sin = table.flip(0, 1).chunk(2, dim=-1)
    assert torch.allclose(torch.cat([cos, -sin], dim=-1), table)


def test_transposed():
    """Waves have any direction: transposing the grid does not swap halves of the channels, as it does in sincos2d."""
    assert not torch.allclose(own_table((4, 4)), own_table((4, 4)).transpose(0, 1).roll(8, -1))


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('dim, keywords, text', [
    (7, {}, "'cape' needs an even embed dim, got 7. Choose another embed_dim"),
    *((8, {name: value}, f"'cape' needs {name} to be a number of at least 0, got {value!r}")
      for name in ('max_global_shift', 'max_local_shift')
      for value in (-0.1, float('nan'), float('inf'), True, '0.5', None)),
    *((8, {'max_scale': value}, f"'cape' needs max_scale to be a number of at least 1, got {value!r}")
      for value in (0, 0.99, -1.4, float('nan'), float('inf'), True, '1.4', None)),
])
def test_wrong_values(dim, keywords, text):
    with pytest.raises(ValueError, match=text):
        timm_sape.create_encoding('cape', dim=dim, num_heads=1, grid_size=(3, 5), **keywords)


def test_no_gate():
    with pytest.raises(ValueError, match="'auto_cape'.*no neutral form"):
        make_model('auto_cape')
