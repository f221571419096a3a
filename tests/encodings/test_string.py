"""string: rotation by learned mixtures of x and y in a learned basis."""
import pytest
import torch

import reference_string as reference
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
from timm_sape.encodings import cayley_string


def check(*case, **keywords):
    rotation_checks.check('string', reference.rotate, *case, **keywords)


# --- equations -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('case', [case for case in CASES if case != '1x1'])  # alone, no offset depends on the basis
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
    check_rescaling('string', 'rotation', **SIZES)


def test_gate():
    """The gate multiplies the angles, not their sines."""
    encoding, grid = create('auto_string', (3, 5), 1, **SIZES), make_grid((3, 5), 1, 6, batch=2)
    encoding.gate.weight.data.fill_(0.007)
    q, k, v = make_qkv(grid, **SIZES)
    options = {**where(grid), **rotation_checks.own_parameters(encoding)}
    expected = attention(*(reference.rotate(x, (3, 5), **options) for x in (q, k)), v)
    compare(attend(encoding, q, k, v, grid), expected, {'q': q, 'k': k, **dict(encoding.named_parameters())})


def test_gate_of_zero():
    """Then any basis does nothing, with prefix tokens either."""
    encoding, grid = create('auto_string', (3, 5), 2, **SIZES), make_grid((3, 5), 2, 6)
    encoding.gate.weight.data.zero_()
    q, k, v = make_qkv(grid, **SIZES)
    assert_near(attend(encoding, q, k, v, grid), attention(q, k, v), 1e-12)


@pytest.mark.parametrize('qk_norm', [True, False])
@pytest.mark.parametrize('fused', [True, False])
def test_attention_layer(qk_norm, fused):
    rotation_checks.check_attention_layer('string', reference.rotate, qk_norm, fused)


def transposed(s, cayley=ops.cayley):
    return cayley(-s)


def of_patches_alone(self, q, k, grid, turn=cayley_string.CayleyRotaryEncoding.turn):
    p = grid.num_prefix_tokens
    return tuple(torch.cat([t[:, :, :p], new[:, :, p:]], dim=2) for t, new in zip((q, k), turn(self, q, k, grid)))


MUTANTS = {  # case, (owner, attribute, replacement)
    'turned back': ('3x5', rotation_checks.TURNED_BACK),
    'pairs d/2 apart': ('3x5', rotation_checks.OTHER_LAYOUT),
    'the inverse basis': ('3x5', (ops, 'cayley', transposed)),
    'prefix tokens in the old basis': ('4x4', (cayley_string.CayleyRotaryEncoding, 'turn', of_patches_alone)),
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

def test_norms():
    """The basis is orthogonal, so vectors keep their length. Without positions q.k does not change."""
    grid = Grid(3, 5, 2)
    q, k, _ = make_qkv(grid, **SIZES)
    encoding = create('string', (3, 5), 2, **SIZES)
    assert_near(rotation_checks.turned(q, encoding, grid).norm(dim=-1), q.norm(dim=-1), 1e-13)
    turned_q, turned_k = encoding(q, k, grid=grid, hook='turn')
    assert_near(turned_q @ turned_k.mT, q @ k.mT, 1e-12)
    assert (turned_q - q).abs().max() > 0.1


def test_without_a_basis_it_is_mixed():
    encoding, mixed = create('string', (3, 5), **SIZES), create('rope2d_mixed', (3, 5), **SIZES)
    encoding.entries.data.zero_()
    mixed.freqs.data.copy_(encoding.freqs)
    q, k, v = make_qkv(grid := make_grid((3, 5), 1, 6), **SIZES)
    assert torch.equal(attend(encoding, q, k, v, grid), attend(mixed, q, k, v, grid))


def test_translation():
    rotation_checks.check_translation('string')
    assert timm_sape.get_encoding('string').relative


def test_directions():
    rotation_checks.check_directions('string')


def test_images_apart():
    rotation_checks.check_images_apart('string')


def test_other_grid():
    rotation_checks.check_other_grid('string', reference.rotate)


# --- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('image', IMAGES)
def test_float32(image):
    rotation_checks.check_float32('string', image)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half(dtype):
    rotation_checks.check_half('string', dtype)


# --- models ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
def test_initial_values(again):
    """Those of `rope2d_mixed`, and no other basis yet."""
    model = initial_model('string', again)
    assert all((encoding.entries == 0).all() for encoding in own_encodings(model, 'string'))
    freqs = torch.stack([encoding.freqs for encoding in own_encodings(model, 'string')]).detach()
    assert freqs.shape == (2, 2, 4, 8)  # layer, axis, head, pair
    expected = torch.tensor([10 ** (-4 * t / 16) for t in range(4)] * 2)
    assert_near(freqs.norm(dim=1), expected.expand(2, 4, 8), 1e-6)
    (fx, gx), (fy, gy) = (freqs[:, i].split(4, dim=-1) for i in range(2))
    assert_near(gx, -fy, 1e-6)
    assert_near(gy, fx, 1e-6)
    directions = torch.atan2(fy, fx)
    assert_near(directions, directions[..., :1].expand_as(directions), 1e-6)
    assert len({round(a, 4) for a in directions[..., 0].flatten().tolist()}) == 8
    wide = timm_sape.create_encoding('string', dim=256, num_heads=64, grid_size=(3, 5)).freqs[:, :, 0]
    quadrants = {(x > 0, y > 0) for x, y in wide.T.tolist()}
    assert len(quadrants) == 4  # the directions go all the way round


def test_number_of_parameters():
    check_number_of_parameters('string')


@pytest.mark.parametrize('composition', ['{}', 'ape+{}'])
def test_model(composition):
    check_model('string', composition)


def test_learns():
    check_learns('string')


def test_neutral_start():
    check_neutral_start('string')


def test_masks():
    check_masks('string')


def test_trained_grid_is_saved():
    check_trained_grid_is_saved('string')


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('head_dim', [3, 6])
def test_head_dims(head_dim):
    with pytest.raises(ValueError, match=f'string.*multiple of 4, got {head_dim}. Choose another num_heads'):
        create('string', heads=2, head_dim=head_dim)


@pytest.mark.parametrize('keywords, message', [
    ({'resolution': 'resize'}, "'string': resolution must be 'extrapolate', 'rescale', 'ntk' or 'yarn', got 'resize'"),
    ({'scale': 1}, "'string' has no keyword 'scale'"),
])
def test_wrong_keywords(keywords, message):
    with pytest.raises(ValueError, match=message):
        create('string', **keywords)


def test_registered_from_its_file():
    assert timm_sape.get_encoding('string').__module__ == cayley_string.__name__
