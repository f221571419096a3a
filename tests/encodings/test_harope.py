"""harope: rotation by x and y after a learned matrix of each head."""
import pytest
import torch

import reference_harope as reference
import rotation_checks
import timm_sape
from harness import assert_near, attend, catches, check_rescaling, compare, create, make_grid, make_qkv, where
from loops import attention
from model_checks import (
    check_learns,
    check_masks,
    check_model,
    check_neutral_start,
    check_number_of_parameters,
    check_trained_grid_is_saved,
    initial_model,
    own_encodings,
)
from rotation_checks import CASES, IMAGES, SIZES, TRAINED_ON
from timm_sape import Grid, ops
from timm_sape.encodings import harope


def check(*case, **keywords):
    rotation_checks.check('harope', reference.rotate, *case, **keywords)


# --- equations -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('case', [case for case in CASES if case != '1x1'])  # alone, there is no offset
def test_equations(case):
    check(*CASES[case])


def test_another_grid():
    """On a grid that it was not made for, the angles are those of the reference, which knows one grid only."""
    check((2, 4), 1, made_for=(3, 5))
    check((3, 5), 0, 7, made_for=(4, 4))


@pytest.mark.parametrize('case', TRAINED_ON)
def test_trained_grid_makes_no_difference(case):
    check(*TRAINED_ON[case], rescale=False)


def test_rescaled():
    """Positions are rescaled to the trained grid, whatever grid the encoding is made for."""
    check((3, 5), 1, None, (6, 2))
    check((2, 4), 0, 5, (3, 3), made_for=(1, 2))
    check_rescaling('harope', 'rotation', **SIZES)


def test_gate():
    """The gate multiplies the angles, not their sines, and the logarithms of the singular values."""
    encoding, grid = create('auto_harope', (3, 5), 1, **SIZES), make_grid((3, 5), 1, 6, batch=2)
    encoding.gate.weight.data.fill_(0.007)
    q, k, v = make_qkv(grid, **SIZES)
    options = {**where(grid), **rotation_checks.own_parameters(encoding)}
    expected = attention(*(reference.rotate(x, (3, 5), **options) for x in (q, k)), v)
    compare(attend(encoding, q, k, v, grid), expected, {'q': q, 'k': k, **dict(encoding.named_parameters())})


def test_gate_of_zero():
    """Then any matrix does nothing, with prefix tokens either: what is left of it is orthogonal."""
    encoding, grid = create('auto_harope', (3, 5), 2, **SIZES), make_grid((3, 5), 2, 6)
    encoding.gate.weight.data.zero_()
    q, k, v = make_qkv(grid, **SIZES)
    assert_near(attend(encoding, q, k, v, grid), attention(q, k, v), 1e-12)


@pytest.mark.parametrize('qk_norm', [True, False])
@pytest.mark.parametrize('fused', [True, False])
def test_attention_layer(qk_norm, fused):
    rotation_checks.check_attention_layer('harope', reference.rotate, qk_norm, fused)


def transposed(s, cayley=ops.cayley):
    return cayley(-s)


def of_patches_alone(self, q, k, grid, turn=harope.HeadwiseRotaryEncoding.turn):
    p = grid.num_prefix_tokens
    return tuple(torch.cat([t[:, :, :p], new[:, :, p:]], dim=2) for t, new in zip((q, k), turn(self, q, k, grid)))


MUTANTS = {  # case, (owner, attribute, replacement)
    'turned back': ('3x5', rotation_checks.TURNED_BACK),
    'pairs d/2 apart': ('3x5', rotation_checks.OTHER_LAYOUT),
    'inverse orthogonal matrices': ('3x5', (ops, 'cayley', transposed)),
    'prefix tokens left alone': ('4x4', (harope.HeadwiseRotaryEncoding, 'turn', of_patches_alone)),
    'x and y swapped': ('3x5', rotation_checks.AXES_SWAPPED),
    'rows of kept patches in raster order': ('3x5, 8 kept', rotation_checks.ROWS_IN_RASTER_ORDER),
    'first rows for kept patches': ('3x5, 6 kept', rotation_checks.FIRST_ROWS),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    """If the package is broken like this, the comparison with the equations fails."""
    case, patch = MUTANTS[mutant]
    catches(lambda: check(*CASES[case]), monkeypatch, *patch)


# --- properties ------------------------------------------------------------------------------------------------------

def test_singular_values():
    """q and k of all tokens are multiplied by a matrix with these singular values."""
    encoding = create('harope', (3, 5), 2, **SIZES)
    one = torch.eye(12, dtype=torch.float64).expand(1, 2, 12, 12)
    found, same = encoding(one, one, grid=Grid(2, 5, 2), hook='turn')
    assert torch.equal(found, same)
    values = torch.linalg.svdvals(found[0])
    assert_near(values, encoding.log_scale.exp().sort(dim=-1, descending=True).values, 1e-12)


def test_without_a_matrix_it_is_axial():
    encoding, axial = create('harope', (3, 5), random=False, **SIZES), create('rope2d', (3, 5), **SIZES)
    q, k, v = make_qkv(grid := make_grid((3, 5), 1, 6), **SIZES)
    assert torch.equal(attend(encoding, q, k, v, grid), attend(axial, q, k, v, grid))


def test_translation():
    rotation_checks.check_translation('harope')
    assert timm_sape.get_encoding('harope').relative


def test_directions():
    """q.k tells up from down and left from right."""
    token = rotation_checks.one_token(generator=torch.Generator().manual_seed(0))
    logits = rotation_checks.logits_between(create('harope', (4, 5), **SIZES), (4, 5), token)
    assert not torch.allclose(logits[:, 1:, :, :-1], logits[:, :-1, :, 1:])
    assert not torch.allclose(logits[:, :, 1:, :, :-1], logits[:, :, :-1, :, 1:])


def test_images_apart():
    rotation_checks.check_images_apart('harope')


def test_other_grid():
    rotation_checks.check_other_grid('harope', reference.rotate)


# --- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('image', IMAGES)
def test_float32(image):
    rotation_checks.check_float32('harope', image, tolerance=3e-5)  # singular values up to 10 enlarge all logits


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half(dtype):
    rotation_checks.check_half('harope', dtype)


# --- models ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
def test_initial_values(again):
    """No matrix yet, in each layer, and the angles of `rope2d`."""
    own = own_encodings(initial_model('harope', again), 'harope')
    assert len(own) == 2
    for encoding in own:
        assert encoding.entries.shape == (2, 4, 120) and encoding.log_scale.shape == (4, 16)
        assert not encoding.entries.any() and not encoding.log_scale.any()
        axial = timm_sape.create_encoding('rope2d', dim=64, num_heads=4, grid_size=(4, 4))
        assert torch.equal(encoding.table, axial.table)


def test_number_of_parameters():
    check_number_of_parameters('harope')


@pytest.mark.parametrize('composition', ['{}', 'ape+{}'])
def test_model(composition):
    check_model('harope', composition)


def test_learns():
    check_learns('harope')


def test_neutral_start():
    check_neutral_start('harope')


def test_masks():
    check_masks('harope')


def test_trained_grid_is_saved():
    check_trained_grid_is_saved('harope')


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('head_dim', [3, 6])
def test_head_dims(head_dim):
    with pytest.raises(ValueError, match=f'harope.*multiple of 4, got {head_dim}. Choose another num_heads'):
        create('harope', heads=2, head_dim=head_dim)


@pytest.mark.parametrize('keywords, message', [
    ({'resolution': 'resize'}, "'harope': resolution must be 'extrapolate', 'rescale', 'ntk' or 'yarn', got 'resize'"),
    ({'scale': 1}, "'harope' has no keyword 'scale'"),
])
def test_wrong_keywords(keywords, message):
    with pytest.raises(ValueError, match=message):
        create('harope', **keywords)


def test_registered_from_its_file():
    assert timm_sape.get_encoding('harope').__module__ == harope.__name__
