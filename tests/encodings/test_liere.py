"""liere: rotation by exponentials of skew-symmetric matrices."""
import copy

import pytest
import torch

import reference_liere as reference
import rotation_checks
import timm_sape
from harness import assert_near, attend, catches, compare, create, make_grid, make_qkv, where
from loops import attention
from model_checks import (
    build,
    check_learns,
    check_masks,
    check_model,
    check_neutral_start,
    check_number_of_parameters,
    check_uniform,
    images,
    initial_model,
    own_encodings,
)
from rotation_checks import CASES, IMAGES, own_parameters
from timm_sape import Grid, ops
from timm_sape.encodings import liere

SIZES = {'heads': 2, 'head_dim': 12}
BLOCKS = {'block_size': 4}
DEFAULT = {'heads': 2, 'head_dim': 16}  # two blocks of the default size


def check(
        grid_size, num_prefix_tokens=0, num_keep=None, trained_on=None, *, rescale=False, made_for=None, init=None,
        sizes=SIZES, block_size=4):
    """Attention and every gradient in float64."""
    grid = make_grid(grid_size, num_prefix_tokens, num_keep, batch=2)
    keywords = {} if trained_on is None else {'ref_grid_size': trained_on}
    keywords |= {'resolution': 'rescale'} if rescale else {}
    name, keywords = ('liere', keywords) if init is None else ('auto_liere', {**keywords, 'init': init})
    encoding = create(
        name, made_for or grid_size, num_prefix_tokens, **sizes, **keywords, block_size=block_size, random=init is None)
    q, k, v = make_qkv(grid, **sizes)
    inputs = {'q': q, 'k': k, 'v': v, **dict(encoding.named_parameters())}
    options = {
        **where(grid), **own_parameters(encoding), 'block_size': block_size or sizes['head_dim'],
        'trained_on': trained_on or made_for, 'rescale': rescale}
    expected = attention(*(reference.rotate(x, grid_size, **options) for x in (q, k)), v)
    compare(attend(encoding, q, k, v, grid), expected, {'v': v} if q.shape[2] == 1 else inputs)


# --- equations -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('case', CASES)
def test_equations(case):
    check(*CASES[case])


@pytest.mark.parametrize('block_size', [2, 3, 6, 12, None])
def test_block_sizes(block_size):
    check(*CASES['3x5, 6 kept'], block_size=block_size)


def test_default_block_size():
    check((2, 3), 1, sizes=DEFAULT, block_size=8)
    assert timm_sape.encoding_keywords('liere')['block_size'] == 8


def test_another_grid():
    """On a grid that it was not made for, the distance of two rows stays that of the trained grid."""
    check((2, 4), 1, made_for=(3, 5))
    check((3, 5), 0, 7, made_for=(4, 4))
    check((3, 5), 1, None, (6, 2))
    check((4, 4), 5, 6, (3, 1), made_for=(2, 2))


def test_rescaled():
    check((3, 5), 1, None, (6, 2), rescale=True)
    check((2, 4), 0, 5, (3, 3), made_for=(1, 2), rescale=True)


def test_gate():
    """The gate multiplies what the exponentials are of."""
    check(*CASES['3x5, 6 kept'], init=0.7)


@pytest.mark.parametrize('qk_norm', [True, False])
@pytest.mark.parametrize('fused', [True, False])
def test_attention_layer(qk_norm, fused):
    rotation_checks.check_attention_layer('liere', reference.rotate, qk_norm, fused, **BLOCKS)


def transposed(a, exp=ops.matrix_exp):
    return exp(-a)


MUTANTS = {  # case, (owner, attribute, replacement)
    'turned back': ('3x5', (ops, 'matrix_exp', transposed)),
    'x and y swapped': ('3x5', rotation_checks.AXES_SWAPPED),
    'columns not counted': ('4x4', rotation_checks.COLUMNS_ALIKE),
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
    """Each block of channels keeps its length. Prefix tokens do not change at all."""
    grid = Grid(3, 5, 2)
    x = make_qkv(grid, **SIZES)[0]
    out = rotation_checks.turned(x, create('liere', (3, 5), 2, **SIZES, **BLOCKS), grid)
    assert_near(out.unflatten(-1, (3, 4)).norm(dim=-1), x.unflatten(-1, (3, 4)).norm(dim=-1), 1e-13)
    assert torch.equal(out[:, :, :2], x[:, :, :2])
    assert (out[:, :, 3:] - x[:, :, 3:]).abs().max() > 0.1


def test_relative_if_matrices_commute():
    """With blocks of 2 the logits depend on offsets alone, as those of `rope2d_mixed`; with larger ones they do not."""
    token = rotation_checks.one_token(generator=torch.Generator().manual_seed(0))
    change = []
    for block_size in (2, 4):
        encoding = create('liere', (4, 6), **SIZES, block_size=block_size)
        logits = rotation_checks.logits_between(encoding, (4, 6), token)
        change.append((logits[:, 1:, 1:, 1:, 1:] - logits[:, :-1, :-1, :-1, :-1]).abs().max())
    assert change[0] < 1e-12 and change[1] > 0.1
    assert not timm_sape.get_encoding('liere').relative


def test_blocks_of_two_are_mixed_rotations():
    """Pair t turns by the same angle as that of `rope2d_mixed` with these frequencies."""
    encoding = create('liere', (3, 5), **SIZES, block_size=2)
    mixed = create('rope2d_mixed', (3, 5), **SIZES)
    of_y, of_x = -encoding.entries.detach()[..., 0]  # an entry above the diagonal is minus the sine
    mixed.freqs.data.copy_(torch.stack([of_x / 4, of_y / 2]))
    q, k, v = make_qkv(grid := make_grid((3, 5), 1, 6), **SIZES)
    assert_near(attend(encoding, q, k, v, grid), attend(mixed, q, k, v, grid), 1e-12)


def test_images_apart():
    rotation_checks.check_images_apart('liere', **BLOCKS)


def test_other_grid():
    """Images of another size, `set_grid_size` and loading into a model of that size give the same."""
    trained, grid = create('liere', (3, 5), 1, **SIZES, **BLOCKS), make_grid((4, 7), 1)
    resized = copy.deepcopy(trained)
    resized.set_grid_size((4, 7))
    built = create('liere', (4, 7), 1, **SIZES, **BLOCKS)
    built.load_state_dict(trained.state_dict())
    q, k, v = make_qkv(grid, **SIZES)
    for encoding in (resized, built):
        assert torch.equal(attend(encoding, q, k, v, grid), attend(trained, q, k, v, grid))


# --- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('image', IMAGES)
def test_float32(image):
    rotation_checks.check_float32('liere', image, **BLOCKS)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half(dtype):
    """Matrices are float32 and q keeps its dtype, so only the result is rounded."""
    exact = create('liere', (3, 5), **SIZES, **BLOCKS, dtype=torch.float32)
    encoding = copy.deepcopy(exact).to(dtype)
    exact.load_state_dict(encoding.state_dict())  # the rounded parameters
    for grid in (make_grid((3, 5)), make_grid((6, 4)), make_grid((3, 5), 1, 6)):
        assert encoding.blocks(grid).dtype == torch.float32
        q, k, _ = make_qkv(grid, **SIZES, dtype=dtype)
        turned = encoding(q, k, grid=grid, hook='turn')
        expected = exact(q.float(), k.float(), grid=grid, hook='turn')
        for a, b in zip(turned, expected):
            assert torch.equal(a, b.to(dtype))


# --- models ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
def test_initial_values(again):
    """Entries above the diagonals are uniform in 0 to 2 pi, others in each layer and head."""
    model = initial_model('liere', again)
    entries = torch.stack([encoding.entries for encoding in own_encodings(model, 'liere')]).detach()
    assert entries.shape == (2, 2, 4, 2, 28)  # layer, axis, head, block, entry
    check_uniform(entries - torch.pi, torch.pi)
    assert entries.unique().numel() > 800


def test_number_of_parameters():
    check_number_of_parameters('liere')


@pytest.mark.parametrize('composition', ['{}', 'ape+{}'])
def test_model(composition):
    check_model('liere', composition)


def test_learns():
    check_learns('liere')


def test_neutral_start():
    check_neutral_start('liere')


def test_masks():
    check_masks('liere')


def test_trained_grid_is_saved():
    """With either rule, because positions are divided by its size."""
    for keywords in ({}, {'resolution': 'rescale'}):
        trained = build('liere', keywords, dynamic_img_size=True)
        small = build('liere', keywords, img_size=(16, 24), ref_grid_size=(3, 5))
        small.load_state_dict(trained.state_dict())
        expected = trained(images(16, 24))
        assert_near(small(images(16, 24)), expected, 1e-6)
        small.set_input_size(img_size=(24, 40))
        assert_near(small(images()), trained(images()), 1e-6)
        assert any(key.endswith('_extra_state') for key in trained.state_dict())
        other = build('liere', keywords, img_size=(16, 24))
        assert (other(images(16, 24)) - expected).abs().max() > 1e-3


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords, message', [
    ({'resolution': 'resize'}, "'liere': resolution must be 'extrapolate' or 'rescale', got 'resize'"),
    ({'scale': 1}, "'liere' has no keyword 'scale'"),
    ({'block_size': 1}, "'liere' needs block_size to be an integer of 2 or more, got 1"),
    ({'block_size': 4.0}, "'liere' needs block_size to be an integer of 2 or more, got 4.0"),
    ({'block_size': True}, "'liere' needs block_size to be an integer of 2 or more, got True"),
    ({'block_size': 5}, "'liere' needs a head dim that is a multiple of block_size=5, got 8. Choose another num_heads"),
])
def test_wrong_keywords(keywords, message):
    with pytest.raises(ValueError, match=message):
        create('liere', **keywords)


@pytest.mark.parametrize('other', ['rope2d', 'rope2d_mixed'])
def test_one_rotation(other):
    with pytest.raises(ValueError, match='two rotations, liere and rope2d'):
        timm_sape.encodings.parse_pos_enc(f'liere+{other}')


def test_registered_from_its_file():
    assert timm_sape.get_encoding('liere').__module__ == liere.__name__
