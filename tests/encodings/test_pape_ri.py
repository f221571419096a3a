"""pape_ri: one parabola of the distance, computed by more channels of q and k."""
import copy

import pytest
import torch
import torch.nn.functional as F

import reference_pape_ri
import timm_sape
from bias_checks import ROWS_IN_RASTER_ORDER, SCALE, SIZES, ParabolaTests, bias_of, make_inputs
from harness import assert_near, create, make_grid, where
from model_checks import check_uniform, initial_model, own_encodings
from timm_sape.encodings import pape_ri


def form_of(change, form=pape_ri.RotationInvariantParabolicEncoding.form):
    return lambda self, x, grid: change(form(self, x, grid))


class TestPapeRi(ParabolaTests):
    name = 'pape_ri'
    variants = model_variants = [{}, {'resolution': 'rescale'}]
    mutants = {  # arguments of `check`, (owner, attribute, replacement)
        'no softplus': (((3, 5), 0), (F, 'softplus', lambda a: a)),
        'rows not counted': (((3, 5), 0), (
            pape_ri.RotationInvariantParabolicEncoding, 'form',
            form_of(lambda form: form * torch.tensor([0, 1, 1, 1, 1])))),
        'heads alike': (((3, 5), 0), (
            pape_ri.RotationInvariantParabolicEncoding, 'form', form_of(lambda form: form[:, :1].expand_as(form)))),
        'rows of kept patches in raster order': (((3, 5), 1, 8), ROWS_IN_RASTER_ORDER),
        'trained grid ignored': (((4, 7), 0, None, (3, 5)), (
            pape_ri.RotationInvariantParabolicEncoding, 'rescaling', lambda self, grid: None)),
    }

    def expected_bias(self, encoding, q, x, grid):
        ref_grid_size = encoding.ref_grid_size if encoding.rule == 'rescale' else None
        return reference_pape_ri.bias(
            x, encoding.w_a, encoding.scale, grid.size, ref_grid_size=ref_grid_size, **where(grid))

    @pytest.mark.parametrize('size', [(14, 14), (40, 30), (1, 14)])
    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    def test_half(self, dtype, size):
        """As attention computes it: products of half precision numbers, summed in float32. `pape` has more cases."""
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


def test_decay():
    """The bias is 0 for the patch itself and falls with the distance."""
    grid, encoding = make_grid((9, 9)), create('pape_ri', (9, 9), **SIZES)
    bias = bias_of(encoding, grid, make_inputs(grid, **SIZES)).reshape(-1, SIZES['heads'], 81, 9, 9)[:, :, 40]
    assert bias[..., 4, 4].abs().max() < 1e-12
    for ray in (bias[..., 4, 4:], bias[..., 4:, 4], bias.diagonal(dim1=-2, dim2=-1)[..., 4:]):
        assert (ray.diff() < 0).all()


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


def test_one_parabola():
    with pytest.raises(ValueError, match="'pape_ri' has no keyword 'num_parabolas'"):
        create('pape_ri', **SIZES, num_parabolas=2)
