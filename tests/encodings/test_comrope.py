"""comrope: rotation by exponentials of skew-symmetric matrices that commute."""
import copy

import pytest
import torch

import reference_comrope as reference
import rotation_checks
import timm_sape
from harness import assert_near, attend, catches, create, make_grid, make_qkv
from model_checks import (
    check_learns,
    check_masks,
    check_model,
    check_neutral_start,
    check_number_of_parameters,
    initial_model,
    own_encodings,
)
from rotation_checks import CASES, IMAGES
from timm_sape import Grid, ops
from timm_sape.encodings import comrope

SIZES = {'heads': 2, 'head_dim': 12}
FORMS = {'ld': {'form': 'ld', 'block_size': 4}, 'ap': {'form': 'ap', 'block_size': 3}}


def check(*case, **keywords):
    rotation_checks.check('comrope', reference.rotate, *case, **{**FORMS['ld'], **keywords})


# --- equations -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('case', CASES)
def test_equations(case, form):
    check(*CASES[case], **FORMS[form])


@pytest.mark.parametrize('keywords', [
    {'block_size': 2}, {'block_size': 12}, {'form': 'ap', 'block_size': 2}, {'form': 'ap', 'block_size': 6}], ids=str)
def test_keywords(keywords):
    check(*CASES['3x5, 6 kept'], **keywords)


def test_default_keywords():
    assert timm_sape.encoding_keywords('comrope') == {'form': 'ld', 'block_size': 8}


def test_another_grid():
    """The positions go from edge to edge of any grid, whatever grid the encoding is made for."""
    check((2, 4), 1, made_for=(3, 5))
    check((3, 5), 0, 7, made_for=(4, 4), **FORMS['ap'])


@pytest.mark.parametrize('form', FORMS)
def test_gate(form):
    """The gate multiplies what the exponentials are of."""
    rotation_checks.check('auto_comrope', reference.rotate, *CASES['3x5, 6 kept'], init=0.7, **FORMS[form])


@pytest.mark.parametrize('qk_norm', [True, False])
@pytest.mark.parametrize('fused', [True, False])
def test_attention_layer(qk_norm, fused):
    rotation_checks.check_attention_layer('comrope', reference.rotate, qk_norm, fused, **FORMS['ld'])


def turned_back(a, exp=ops.matrix_exp):
    return exp(-a)


def of_rows(self, grid, blocks=comrope.CommutingRotaryEncoding.blocks):
    """Blocks of a transposed image."""
    return blocks(self, Grid(grid.width, grid.height))


MUTANTS = {  # case, form, (owner, attribute, replacement)
    'turned back': ('3x5', 'ld', (ops, 'matrix_exp', turned_back)),
    'x and y swapped': ('3x5', 'ld', (comrope.CommutingRotaryEncoding, 'blocks', of_rows)),
    'x and y swapped, ap': ('3x5', 'ap', (comrope.CommutingRotaryEncoding, 'blocks', of_rows)),
    'rows of kept patches in raster order': ('3x5, 8 kept', 'ld', rotation_checks.ROWS_IN_RASTER_ORDER),
    'first rows for kept patches': ('3x5, 6 kept', 'ap', rotation_checks.FIRST_ROWS),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    """If the package is broken like this, the comparison with the equations fails."""
    case, form, patch = MUTANTS[mutant]
    catches(lambda: check(*CASES[case], **FORMS[form]), monkeypatch, *patch)


# --- properties ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('form', FORMS)
def test_norms(form):
    """Each block of channels keeps its length. Prefix tokens do not change at all."""
    grid, size = Grid(3, 5, 2), FORMS[form]['block_size']
    x = make_qkv(grid, **SIZES)[0]
    out = rotation_checks.turned(x, create('comrope', (3, 5), 2, **SIZES, **FORMS[form]), grid)
    assert_near(out.unflatten(-1, (-1, size)).norm(dim=-1), x.unflatten(-1, (-1, size)).norm(dim=-1), 1e-13)
    assert torch.equal(out[:, :, :2], x[:, :, :2])
    assert (out[:, :, 3:] - x[:, :, 3:]).abs().max() > 0.1


@pytest.mark.parametrize('form', FORMS)
def test_translation(form):
    rotation_checks.check_translation('comrope', **FORMS[form])
    rotation_checks.check_directions('comrope', **FORMS[form])
    assert timm_sape.get_encoding('comrope').relative


def test_prefix_tokens_are_in_the_middle():
    """A prefix token is turned as the patch in the middle of the image is: not at all."""
    middle = create('comrope', (3, 5), **SIZES, **FORMS['ld']).blocks(Grid(3, 5))[:, 7]
    assert_near(middle, torch.eye(4, dtype=torch.float64).expand(2, 3, 4, 4), 1e-14)


def test_blocks_of_two_are_mixed_rotations():
    """Pair t turns by the same angle as that of `rope2d_mixed` with these frequencies, and logits are the same."""
    encoding = create('comrope', (3, 5), **SIZES, block_size=2)
    mixed = create('rope2d_mixed', (3, 5), **SIZES)
    of_y, of_x = -encoding.factors.detach()[:, None] * encoding.entries.detach()[..., 0]
    mixed.freqs.data.copy_(torch.stack([of_x / 5, of_y / 3]))
    q, k, v = make_qkv(grid := make_grid((3, 5), 0, 6), **SIZES)
    assert_near(attend(encoding, q, k, v, grid), attend(mixed, q, k, v, grid), 1e-12)


def test_images_apart():
    rotation_checks.check_images_apart('comrope', **FORMS['ap'])


def test_other_grid():
    rotation_checks.check_other_grid('comrope', reference.rotate, **FORMS['ld'])


# --- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('image', IMAGES)
def test_float32(image):
    rotation_checks.check_float32('comrope', image, **FORMS['ld'])


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half(dtype):
    """Matrices are float32 and q keeps its dtype, so only the result is rounded."""
    exact = create('comrope', (3, 5), **SIZES, **FORMS['ld'], dtype=torch.float32)
    encoding = copy.deepcopy(exact).to(dtype)
    exact.load_state_dict(encoding.state_dict())  # the rounded parameters
    for grid in (make_grid((3, 5)), make_grid((6, 4)), make_grid((3, 5), 1, 6)):
        assert encoding.blocks(grid).dtype == torch.float32
        q, k, _ = make_qkv(grid, **SIZES, dtype=dtype)
        turned = encoding(q, k, grid=grid, hook='turn')
        for a, b in zip(turned, exact(q.float(), k.float(), grid=grid, hook='turn')):
            assert torch.equal(a, b.to(dtype))


# --- models ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
def test_initial_values(again):
    """Entries as those of P - P^T with a standard normal P, factors standard normal."""
    own = own_encodings(initial_model('comrope', again), 'comrope')
    entries = torch.stack([encoding.entries for encoding in own]).detach()
    assert entries.shape == (2, 4, 2, 28)  # layer, head, block, entry
    assert entries.std().item() == pytest.approx(2 ** 0.5, rel=0.15) and abs(entries.mean().item()) < 0.3
    assert entries.unique().numel() == entries.numel() and entries.abs().max() > 3
    wide = timm_sape.create_encoding('comrope', dim=4096, num_heads=2, grid_size=(3, 5)).factors
    assert wide.shape == (2, 256) and wide.std().item() == pytest.approx(1, rel=0.15) and abs(wide.mean()) < 0.2
    assert all(encoding.factors.std() > 0.1 for encoding in own)


def test_number_of_parameters():
    check_number_of_parameters('comrope')


@pytest.mark.parametrize('composition', ['{}', 'ape+{}'])
def test_model(composition):
    check_model('comrope', composition)


def test_model_of_the_other_form():
    check_model('comrope', '{}', {'form': 'ap', 'block_size': 4})


@pytest.mark.parametrize('keywords', [{}, {'form': 'ap', 'block_size': 4}], ids=str)
def test_learns(keywords):
    check_learns('comrope', keywords)


def test_neutral_start():
    check_neutral_start('comrope')


def test_masks():
    check_masks('comrope')


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords, message', [
    ({'form': 'lp'}, "'comrope': form must be 'ld' or 'ap', got 'lp'"),
    ({'resolution': 'rescale'}, "'comrope' has no keyword 'resolution'"),
    ({'block_size': 1}, "'comrope' needs block_size to be an integer of 2 or more, got 1"),
    ({'block_size': None}, "'comrope' needs block_size to be an integer of 2 or more, got None"),
    ({'block_size': 5}, "'comrope' needs a head dim that is a multiple of block_size=5, got 8"),
    ({'form': 'ap'}, 'needs an even number of blocks, half of them for each axis, got 1 of 8 channels'),
])
def test_wrong_keywords(keywords, message):
    with pytest.raises(ValueError, match=message):
        create('comrope', **keywords)


def test_registered_from_its_file():
    assert timm_sape.get_encoding('comrope').__module__ == comrope.__name__
