"""comrope: rotation by exponentials of skew-symmetric matrices that commute."""
import pytest
import torch

import reference_comrope
import timm_sape
from harness import assert_near, attend, create, make_grid, make_qkv
from model_checks import initial_model, own_encodings
from rotation_checks import CASES, SIZES, BlockTests, RelativeTests
from timm_sape import Grid
from timm_sape.encodings.comrope import CommutingRotaryEncoding


def of_rows(self, grid, blocks=CommutingRotaryEncoding.blocks):
    """Blocks of a transposed image."""
    return blocks(self, Grid(grid.width, grid.height))


class TestComrope(RelativeTests, BlockTests):
    """Form 'ld', the default."""
    name = 'comrope'
    reference = reference_comrope
    keywords = {'form': 'ld', 'block_size': 4}
    mutants = {**BlockTests.mutants, 'x and y swapped': ('3x5', (CommutingRotaryEncoding, 'blocks', of_rows))}


class TestComropeAp(TestComrope):
    keywords = {'form': 'ap', 'block_size': 3}
    model_variants = [{'form': 'ap', 'block_size': 4}]


@pytest.mark.parametrize('keywords', [
    {'form': 'ld', 'block_size': 2}, {'form': 'ld', 'block_size': 12}, {'form': 'ap', 'block_size': 2},
    {'form': 'ap', 'block_size': 6}], ids=str)
def test_keywords(keywords):
    TestComrope().check(*CASES['3x5, 6 kept'], **keywords)


def test_default_keywords():
    assert timm_sape.encoding_keywords('comrope') == {'form': 'ld', 'block_size': 8}


def test_prefix_tokens_are_in_the_middle():
    """A prefix token is turned as the patch in the middle of the image is: not at all."""
    middle = create('comrope', (3, 5), **SIZES, **TestComrope.keywords).blocks(Grid(3, 5))[:, 7]
    assert_near(middle, torch.eye(4, dtype=torch.float64).expand(2, 3, 4, 4), 1e-14)


def test_blocks_of_two_are_mixed_rotations():
    """Pair t turns by the same angle as that of `rope2d_mixed` with these frequencies, and logits are the same."""
    encoding = create('comrope', (3, 5), **SIZES, block_size=2)
    mixed = create('rope2d_mixed', (3, 5), **SIZES)
    of_y, of_x = -encoding.factors.detach()[:, None] * encoding.entries.detach()[..., 0]
    mixed.freqs.data.copy_(torch.stack([of_x / 5, of_y / 3]))
    q, k, v = make_qkv(grid := make_grid((3, 5), 0, 6), **SIZES)
    assert_near(attend(encoding, q, k, v, grid), attend(mixed, q, k, v, grid), 1e-12)


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
