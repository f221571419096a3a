"""pape_ri: one parabola of the distance, computed by more channels of q and k."""
import copy

import pytest
import torch
import torch.nn.functional as F

import bias_checks
import reference_pape_ri as reference
import timm_sape
from bias_checks import GRIDS, KEPT, OTHER_GRIDS, SCALE, SIZES, bias_of, make_inputs
from harness import assert_near, catches, compare, create, make_grid, where
from model_checks import (
    check_masks,
    check_model,
    check_neutral_start,
    check_number_of_parameters,
    check_trained_grid_is_saved,
    check_uniform,
    initial_model,
    own_encodings,
)
from timm_sape.encodings import pape_ri

RESCALE = {'resolution': 'rescale'}


def expected_bias(encoding, x, grid):
    ref_grid_size = encoding.ref_grid_size if encoding.rule == 'rescale' else None
    return reference.bias(x, encoding.w_a, encoding.scale, grid.size, ref_grid_size=ref_grid_size, **where(grid))


def check(grid_size, num_prefix_tokens=0, num_keep=None, own_size=None, **keywords):
    """The bias and every gradient in float64, of an encoding made for `own_size`."""
    grid = make_grid(grid_size, num_prefix_tokens, num_keep, batch=2)
    encoding = create('pape_ri', own_size or grid_size, num_prefix_tokens, **SIZES, **keywords)
    inputs = q, _, x = make_inputs(grid, **SIZES)
    a, b = encoding(*inputs, grid=grid, scale=SCALE, hook='channels')
    assert a.shape == b.shape == (*q.shape[:3], 6) and a.dtype == b.dtype == q.dtype
    leaves = {'x': x, **dict(encoding.named_parameters())}
    compare(SCALE * a @ b.mT, expected_bias(encoding, x, grid), leaves)


# --- equations -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('grid_size, num_prefix_tokens', GRIDS)
def test_equations(grid_size, num_prefix_tokens):
    check(grid_size, num_prefix_tokens)


@pytest.mark.parametrize('keywords', [{}, RESCALE], ids=str)
@pytest.mark.parametrize('grid_size, num_prefix_tokens, num_keep', KEPT)
def test_kept_patches(grid_size, num_prefix_tokens, num_keep, keywords):
    """On a grid other than the encoding's own."""
    check(grid_size, num_prefix_tokens, num_keep, (3, 5), **keywords)


@pytest.mark.parametrize('grid_size, own_size', OTHER_GRIDS)
def test_rescaled(grid_size, own_size):
    check(grid_size, 1, None, own_size, **RESCALE)


@pytest.mark.parametrize('keywords', [{}, RESCALE], ids=str)
def test_attention(keywords):
    encoding = create('pape_ri', (4, 4), 1, **SIZES, **keywords)
    grid = make_grid((3, 5), 1, 8, batch=2)
    bias_checks.check_attention(encoding, lambda q, x: expected_bias(encoding, x, grid), grid)


def form_of(change, form=pape_ri.RotationInvariantParabolicEncoding.form):
    return lambda self, x, grid: change(form(self, x, grid))


MUTANTS = {  # arguments of `check`, (owner, attribute, replacement)
    'no softplus': (((3, 5), 0), (F, 'softplus', lambda a: a)),
    'rows not counted': (((3, 5), 0), (
        pape_ri.RotationInvariantParabolicEncoding, 'form',
        form_of(lambda form: form * torch.tensor([0, 1, 1, 1, 1])))),
    'heads alike': (((3, 5), 0), (
        pape_ri.RotationInvariantParabolicEncoding, 'form', form_of(lambda form: form[:, :1].expand_as(form)))),
    'rows of kept patches in raster order': (((3, 5), 1, 8), bias_checks.ROWS_IN_RASTER_ORDER),
    'trained grid ignored': (((4, 7), 0, None, (3, 5)), (
        pape_ri.RotationInvariantParabolicEncoding, 'rescaling', lambda self, grid: None)),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    """If the package is broken like this, the comparison with the equations fails."""
    case, patch = MUTANTS[mutant]
    catches(lambda: check(*case, **RESCALE), monkeypatch, *patch)


def test_gate():
    """This encoding applies its gate itself: a gate of w multiplies the bias by w."""
    grid = make_grid((3, 5), 1)
    encoding, gated = (create(name, (3, 5), 1, **SIZES) for name in ('pape_ri', 'auto_pape_ri'))
    gated.load_state_dict({**encoding.state_dict(), 'gate.weight': torch.tensor([-0.005])})
    inputs = make_inputs(grid, **SIZES)
    assert_near(bias_of(gated, grid, inputs), -0.5 * bias_of(encoding, grid, inputs), 1e-7)


# --- precision -------------------------------------------------------------------------------------------------------

def test_float32():
    bias_checks.check_float32('pape_ri')


@pytest.mark.parametrize('size', [(14, 14), (40, 30), (1, 14)])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half(dtype, size):
    """As attention computes it: products of half precision numbers, summed in float32. `pape` has the other cases."""
    torch.manual_seed(0)
    encoding = timm_sape.create_encoding('pape_ri', dim=64, num_heads=2, grid_size=(14, 14))
    grid = make_grid(size, 1)
    with torch.no_grad():
        low = copy.deepcopy(encoding).to(dtype)
        inputs = make_inputs(grid, heads=2, head_dim=32, dtype=dtype)
        expected = bias_of(copy.deepcopy(low).double(), grid, [t.double() for t in inputs])
        a, b = low(*inputs, grid=grid, scale=SCALE, hook='channels')
        error = (SCALE * (a.float() @ b.float().mT) - expected).abs()
    assert error.max() < 1e-3 + 1e-4 * expected.abs().max()


# --- properties ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('size', [(4, 4), (5, 5)])
def test_rotated_and_mirrored(size):
    """Turning or mirroring an image moves the bias only."""
    grid, encoding = make_grid(size), create('pape_ri', size, **SIZES)
    inputs = make_inputs(grid, **SIZES)
    bias = bias_of(encoding, grid, inputs).view(-1, 2, *size, *size)

    def moved(change):
        turned = [change(t.unflatten(-2, size), (-3, -2)).flatten(-3, -2) for t in inputs]
        return bias_of(encoding, grid, turned).view(bias.shape)

    for change in (torch.rot90, lambda t, dims: t.flip(dims[0]), lambda t, dims: t.flip(dims[1])):
        plain = lambda t, dims: torch.rot90(t, 1, dims) if change is torch.rot90 else change(t, dims)  # noqa: E731
        assert_near(moved(plain), plain(plain(bias, (2, 3)), (4, 5)), 1e-10)


def test_bias_moves_with_kept_patches():
    bias_checks.check_order_of_kept_patches('pape_ri')


def test_decay():
    """The bias is 0 for the patch itself and falls with the distance."""
    grid, encoding = make_grid((9, 9)), create('pape_ri', (9, 9), **SIZES)
    bias = bias_of(encoding, grid, make_inputs(grid, **SIZES)).reshape(-1, SIZES['heads'], 81, 9, 9)[:, :, 40]
    assert bias[..., 4, 4].abs().max() < 1e-12
    for ray in (bias[..., 4, 4:], bias[..., 4:, 4], bias.diagonal(dim1=-2, dim2=-1)[..., 4:]):
        assert (ray.diff() < 0).all()


@pytest.mark.parametrize('keywords', [{}, RESCALE], ids=str)
def test_other_grid(keywords):
    bias_checks.check_other_grid('pape_ri', knows_trained_grid=bool(keywords), **keywords)


# --- initial values --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
def test_initial_values(again):
    encodings = own_encodings(initial_model('pape_ri', again), 'pape_ri')
    for encoding in encodings:
        assert encoding.w_a.shape == (4, 64) and encoding.scale.shape == (4,)
        check_uniform(encoding.w_a, 1 / 8)
        assert encoding.scale.abs().max() <= 2 ** -0.5 / 2  # 16^(-1/4) is 1/2
    assert not torch.equal(encodings[0].scale, encodings[1].scale)
    drawn = torch.cat([create('pape_ri', heads=64, head_dim=16, layer=i).scale for i in range(20)])
    check_uniform(drawn, 2 ** -0.5 / 2)
    assert [name for name, _ in encodings[0].named_parameters()] == ['w_a']
    assert 'scale' in encodings[0].state_dict()


def test_number_of_parameters():
    check_number_of_parameters('pape_ri')


# --- models ----------------------------------------------------------------------------------------------------------

KEYWORDS = [{}, RESCALE]


@pytest.mark.parametrize('composition', ['{}', 'ape+{}', 'rope2d+{}'])
@pytest.mark.parametrize('keywords', KEYWORDS, ids=str)
def test_model(keywords, composition):
    check_model('pape_ri', composition, keywords, least=5e-3)


@pytest.mark.parametrize('keywords', KEYWORDS, ids=str)
def test_neutral_start(keywords):
    check_neutral_start('pape_ri', keywords)


def test_masks():
    check_masks('pape_ri')


def test_trained_grid_is_saved():
    check_trained_grid_is_saved('pape_ri')


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords, text', [
    ({'resolution': 'resize'}, "resolution must be 'extrapolate' or 'rescale', got 'resize'"),
    ({'num_parabolas': 2}, "'pape_ri' has no keyword 'num_parabolas'"),
])
def test_wrong_keywords(keywords, text):
    with pytest.raises(ValueError, match=text):
        create('pape_ri', **SIZES, **keywords)


def test_registered_from_its_file():
    assert timm_sape.get_encoding('pape_ri').__module__ == pape_ri.__name__
