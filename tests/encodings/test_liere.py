"""liere: rotation by exponentials of skew-symmetric matrices."""
import pytest
import torch

import reference_liere
import timm_sape
from harness import assert_near, attend, compare, create, make_grid, make_qkv, where
from loops import attention
from model_checks import build, check_uniform, images, initial_model, own_encodings
from rotation_checks import CASES, PLACE_MUTANTS, SIZES, BlockTests, logits_between, one_token, own_parameters


class TestLiere(BlockTests):
    name = 'liere'
    reference = reference_liere
    keywords = {'block_size': 4}
    mutants = {**PLACE_MUTANTS, **BlockTests.mutants}

    def check(
            self, grid_size, num_prefix_tokens=0, num_keep=None, trained_on=None, *, rescale=False, made_for=None,
            init=None, sizes=SIZES, block_size=4):
        """Attention and every gradient in float64. The trained grid matters with either rule for other sizes."""
        grid = make_grid(grid_size, num_prefix_tokens, num_keep, batch=2)
        keywords = {} if trained_on is None else {'ref_grid_size': trained_on}
        keywords |= {'resolution': 'rescale'} if rescale else {}
        name, keywords = ('liere', keywords) if init is None else ('auto_liere', {**keywords, 'init': init})
        encoding = create(
            name, made_for or grid_size, num_prefix_tokens, **sizes, **keywords, block_size=block_size,
            random=init is None)
        q, k, v = make_qkv(grid, **sizes)
        inputs = {'q': q, 'k': k, 'v': v, **dict(encoding.named_parameters())}
        options = {
            **where(grid), **own_parameters(encoding), 'block_size': block_size or sizes['head_dim'],
            'trained_on': trained_on or made_for, 'rescale': rescale}
        expected = attention(*(self.reference.rotate(x, grid_size, **options) for x in (q, k)), v)
        compare(attend(encoding, q, k, v, grid), expected, {'v': v} if q.shape[2] == 1 else inputs)

    def rotate(self, x, encoding, grid):
        return super().rotate(x, encoding, grid, trained_on=encoding.grid_size)

    # --- equations

    @pytest.mark.parametrize('block_size', [2, 3, 6, 12, None])
    def test_block_sizes(self, block_size):
        self.check(*CASES['3x5, 6 kept'], block_size=block_size)

    def test_default_block_size(self):
        self.check((2, 3), 1, sizes={'heads': 2, 'head_dim': 16}, block_size=8)
        assert timm_sape.encoding_keywords('liere')['block_size'] == 8

    def test_another_grid(self):
        """On a grid that it was not made for, the distance of two rows stays that of the trained grid."""
        super().test_another_grid()
        self.check((3, 5), 1, None, (6, 2))
        self.check((4, 4), 5, 6, (3, 1), made_for=(2, 2))

    def test_rescaled(self):
        self.check((3, 5), 1, None, (6, 2), rescale=True)
        self.check((2, 4), 0, 5, (3, 3), made_for=(1, 2), rescale=True)


# --- properties ------------------------------------------------------------------------------------------------------

def test_relative_if_matrices_commute():
    """With blocks of 2 the logits depend on offsets alone, as those of `rope2d_mixed`; with larger ones they do not."""
    token = one_token(generator=torch.Generator().manual_seed(0))
    change = []
    for block_size in (2, 4):
        encoding = create('liere', (4, 6), **SIZES, block_size=block_size)
        logits = logits_between(encoding, (4, 6), token)
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


# --- models ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
def test_initial_values(again):
    """Entries above the diagonals are uniform in 0 to 2 pi, others in each layer and head."""
    model = initial_model('liere', again)
    entries = torch.stack([encoding.entries for encoding in own_encodings(model, 'liere')]).detach()
    assert entries.shape == (2, 2, 4, 2, 28)  # layer, axis, head, block, entry
    check_uniform(entries - torch.pi, torch.pi)
    assert entries.unique().numel() > 800


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
