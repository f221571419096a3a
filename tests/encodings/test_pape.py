"""pape: a sum of parabolas of the offset, computed by more channels of q and k."""
import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import reference_pape
import timm_sape
from bias_checks import (
    AXES_SWAPPED,
    ROWS_IN_RASTER_ORDER,
    SCALE,
    SIZES,
    DirectedTests,
    ParabolaTests,
    bias_of,
    make_inputs,
)
from breakages import prefix_behind
from harness import assert_near, create, make_grid, where
from model_checks import check_uniform, initial_model, own_encodings
from timm_sape import Grid
from timm_sape.encodings import pape

RESCALE = {'resolution': 'rescale'}


def with_factors(*factors, form=pape.ParabolicPositionEncoding.form):
    return lambda self, x, grid: form(self, x, grid) * torch.tensor(factors, dtype=x.dtype)


class TestPape(DirectedTests, ParabolaTests):
    name = 'pape'
    variants = [{}, RESCALE, {'num_parabolas': 1}]
    keywords = {'num_parabolas': 2}
    model_variants = [{}, {**RESCALE, 'num_parabolas': 3}]
    mutants = {  # arguments of `check`, (owner, attribute, replacement)
        'x and y swapped': (((4, 4), 0), AXES_SWAPPED),
        'no softplus': (((3, 5), 0), (F, 'softplus', lambda a: a)),
        'prefix behind': (((3, 5), 1), (Grid, 'pad_tokens', prefix_behind)),
        'rows of kept patches in raster order': (((3, 5), 1, 8), ROWS_IN_RASTER_ORDER),
        'trained grid ignored': (((4, 7), 0, None, (3, 5)), (
            pape.ParabolicPositionEncoding, 'rescaling', lambda self, grid: None)),
        'to the other side': (((3, 5), 0), (pape.ParabolicPositionEncoding, 'form', with_factors(1, 1, 1, -1, -1))),
        'no product of dy and dx': (((3, 5), 0), (pape.ParabolicPositionEncoding, 'form', with_factors(1, 0, 1, 1, 1))),
    }

    def expected_bias(self, encoding, q, x, grid):
        ref_grid_size = encoding.ref_grid_size if encoding.rule == 'rescale' else None
        return reference_pape.bias(
            x, encoding.w_p, encoding.w_a, encoding.w_b, grid.size, ref_grid_size=ref_grid_size, **where(grid))

    def mirror(self, encoding):
        encoding.w_p[..., 1].neg_()

    @pytest.mark.parametrize('autocast', [False, True])
    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    def test_half(self, dtype, autocast):
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


# --- properties ------------------------------------------------------------------------------------------------------

def test_decay():
    """With b = 0, the bias is largest for the patch itself and falls with the distance."""
    encoding = create('pape', (9, 9), **SIZES)
    nn.init.zeros_(encoding.w_b)
    grid = make_grid((9, 9))
    bias = bias_of(encoding, grid, make_inputs(grid, **SIZES)).reshape(1, SIZES['heads'], 81, 9, 9)[:, :, 40]
    assert bias[..., 4, 4].abs().max() < 1e-12
    for ray in (bias[..., 4, 4:], bias[..., 4:, 4], bias.diagonal(dim1=-2, dim2=-1)[..., 4:]):
        assert (ray.diff() < 0).all() and (ray.diff().diff() < 0).all()
    assert_near(bias, bias.flip(-2, -1), 1e-12)


def test_lean():
    """The maximum of one parabola is at b/(2a), on either side."""
    encoding = create('pape', (1, 99), **SIZES, num_parabolas=1)
    grid = make_grid((1, 99))
    inputs = make_inputs(grid, **SIZES)
    bias = bias_of(encoding, grid, inputs)  # [1, h, N, N]
    a, b = (torch.einsum('bnd,hmd->bhn', inputs[2], w) for w in (encoding.w_a, encoding.w_b))
    offset = b / (2 * F.softplus(a)) / encoding.w_p[:, 0, 1, None]  # x_i - x_j
    place = torch.arange(99) - offset
    inside = (place > 0) & (place < 98)
    assert inside.sum() > 50 and (offset[inside] > 1).any() and (offset[inside] < -1).any()
    assert ((bias.argmax(-1) - place).abs()[inside] <= 0.5 + 1e-9).all()


# --- precision -------------------------------------------------------------------------------------------------------

def folded(encoding, inputs, grid, dtype, autocast=False):
    """The bias as attention computes it: products of half precision numbers, summed in float32."""
    with torch.autocast('cpu', dtype, enabled=autocast):
        a, b = encoding(*inputs, grid=grid, scale=SCALE, hook='channels')
    assert a.dtype == b.dtype == dtype and a.shape[-1] == b.shape[-1] == 21
    return SCALE * (a.float() @ b.float().mT)


def check_folded(size, dtype, autocast=False, large=False, **keywords):
    """The largest bias, its largest error, and the largest error where the bias is small enough to matter.

    With `large`, p, a and b are of the order of 1.
    """
    encoding = timm_sape.create_encoding('pape', dim=64, num_heads=2, grid_size=(14, 14), **keywords)
    torch.manual_seed(0)
    encoding.reset_parameters()
    if large:
        for name, p in encoding.named_parameters():
            nn.init.normal_(p, std=1 / 2 if name == 'w_p' else 1 / 8)
    with torch.no_grad():
        low = encoding if autocast else copy.deepcopy(encoding).to(dtype)
        grid = make_grid(size, 1)
        q, k, x = make_inputs(grid, heads=2, head_dim=32, dtype=dtype)
        inputs = q, k, x.float() if autocast else x
        expected = bias_of(copy.deepcopy(low).double(), grid, [t.double() for t in inputs])
        actual = folded(low, inputs, grid, dtype, autocast)
    assert (actual[..., 0] == 0).all() and (actual[..., 0, :] == 0).all()
    error = (actual.double() - expected).abs()
    return expected.abs().max().item(), error.max().item(), error[expected.abs() < 20].max().item()


def one_part(x, dtype, num):
    return [x, *[torch.zeros_like(x)] * (num - 1)]


def rounded_late(x, dtype, num, parts=pape._parts):
    """The five numbers are not rounded, and the values computed from them have two parts instead of three."""
    if x.shape[-1] == 5:
        return x, torch.zeros_like(x)
    first, second, *_ = parts(x, dtype, 2)
    return [first, second, *[torch.zeros_like(x)] * (num - 2)]


@pytest.mark.parametrize('mutant, worse', [(one_part, 100), (rounded_late, 3)])
def test_half_needs_care(mutant, worse, monkeypatch):
    """Negative controls of the test above."""
    _, _, near = check_folded((14, 14), torch.bfloat16)
    monkeypatch.setattr(pape, '_parts', mutant)
    _, _, near_then = check_folded((14, 14), torch.bfloat16)
    assert near_then > worse * near


@pytest.mark.parametrize('name', ['pape', 'pape_ri'])
@pytest.mark.parametrize('dtype, longest', [(torch.bfloat16, 513), (torch.float16, 361)])
def test_long_sides_in_half(dtype, longest, name):
    """On sides of even length coordinates ended in .5, which took a digit too many from 258 patches on."""
    for side in (256, 300, longest - 1, longest):
        encoding = create(name, (side, 2), dtype=torch.float32, **SIZES)
        exact, grid = copy.deepcopy(encoding).double(), Grid(side, 2)
        q = torch.zeros(1, SIZES['heads'], 2 * side, SIZES['head_dim'], dtype=dtype)
        x = torch.randn(1, 2 * side, exact.dim, generator=torch.Generator().manual_seed(0)).to(dtype)
        found, expected = (
            a.double() @ b.double().mT for a, b in (
                e(t, t, values, grid=grid, scale=SCALE, hook='channels')
                for e, t, values in ((encoding, q, x), (exact, q.double(), x.double()))))
        places = grid.coordinates(dtype=torch.float64)
        near = torch.cdist(places, places) <= 2
        assert_near(found[..., near], expected[..., near], 0.02)
    with pytest.raises(ValueError, match=f'in {dtype} is exact on grids of up to {longest} .* got 2x{longest + 1}'):
        grid = Grid(2, longest + 1)
        q = torch.zeros(1, SIZES['heads'], grid.num_patches, SIZES['head_dim'], dtype=dtype)
        x = torch.zeros(1, grid.num_patches, exact.dim, dtype=dtype)
        encoding(q, q, x, grid=grid, scale=SCALE, hook='channels')


@pytest.mark.parametrize('dtype, tolerance', [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_gradients_in_half(dtype, tolerance):
    torch.manual_seed(0)
    grid = make_grid((14, 14), 1)
    encoding = timm_sape.create_encoding('pape', dim=16, num_heads=2, grid_size=(14, 14), num_parabolas=3)
    q, k, x = inputs = make_inputs(grid, heads=2, head_dim=8, dtype=torch.float32)
    low_x = x.detach().to(dtype).requires_grad_()
    low = [q.to(dtype), k.to(dtype), low_x]
    weight = torch.randn(1, 2, 197, 197, generator=torch.Generator().manual_seed(0)) / 197
    wide = (bias_of(encoding, grid, inputs) * weight).sum()
    expected = torch.autograd.grad(wide, [x, *encoding.parameters()])
    narrow = (folded(encoding, low, grid, dtype) * weight).sum()
    for a, b in zip(torch.autograd.grad(narrow, [low_x, *encoding.parameters()]), expected):
        assert (a.float() - b).norm() < tolerance * b.norm()


# --- initial values --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
def test_initial_values(again):
    for encoding in own_encodings(initial_model('pape', again), 'pape'):
        assert encoding.w_p.shape == (4, 50, 2) and encoding.w_a.shape == encoding.w_b.shape == (4, 50, 64)
        check_uniform(encoding.w_p, 2 ** -0.5 / 2)  # 16^(-1/4) is 1/2
        check_uniform(encoding.w_a, 1 / 8)
        check_uniform(encoding.w_b, 1 / 8 / 2)


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords, text', [
    ({'num_parabolas': 0}, "'pape' needs num_parabolas to be a positive integer, got 0"),
    ({'num_parabolas': True}, "'pape' needs num_parabolas to be a positive integer, got True"),
    ({'num_parabolas': 50.0}, "'pape' needs num_parabolas to be a positive integer, got 50.0"),
])
def test_wrong_keywords(keywords, text):
    with pytest.raises(ValueError, match=text):
        create('pape', **SIZES, **keywords)


def test_weights_of_other_keywords_do_not_fit():
    state = create('pape', **SIZES).state_dict()
    with pytest.raises(RuntimeError):
        create('pape', **SIZES, num_parabolas=49).load_state_dict(state)
