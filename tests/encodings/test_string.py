"""string: rotation by learned mixtures of x and y in a learned basis."""
import pytest
import torch

import reference_string
import timm_sape
from harness import assert_near, attend, create, make_grid, make_qkv
from model_checks import initial_model, own_encodings
from rotation_checks import SIZES, BasisTests, MixedTests, of_patches_alone, turned
from timm_sape import Grid
from timm_sape.encodings.cayley_string import CayleyRotaryEncoding


class TestString(MixedTests, BasisTests):
    name = 'string'
    reference = reference_string
    mutants = {
        **BasisTests.mutants,
        'prefix tokens in the old basis': (
            '4x4', (CayleyRotaryEncoding, 'turn', of_patches_alone(CayleyRotaryEncoding.turn))),
    }

    def test_registered_from_its_file(self):
        assert timm_sape.get_encoding('string').__module__ == 'timm_sape.encodings.cayley_string'


def test_norms():
    """The basis is orthogonal, so vectors keep their length. Without positions q.k does not change."""
    grid = Grid(3, 5, 2)
    q, k, _ = make_qkv(grid, **SIZES)
    encoding = create('string', (3, 5), 2, **SIZES)
    assert_near(turned(q, q, encoding, grid)[0].norm(dim=-1), q.norm(dim=-1), 1e-13)
    turned_q, turned_k = encoding(q, k, grid=grid, hook='turn')
    assert_near(turned_q @ turned_k.mT, q @ k.mT, 1e-12)
    assert (turned_q - q).abs().max() > 0.1


def test_without_a_basis_it_is_mixed():
    encoding, mixed = create('string', (3, 5), **SIZES), create('rope2d_mixed', (3, 5), **SIZES)
    encoding.entries.data.zero_()
    mixed.freqs.data.copy_(encoding.freqs)
    q, k, v = make_qkv(grid := make_grid((3, 5), 1, 6), **SIZES)
    assert torch.equal(attend(encoding, q, k, v, grid), attend(mixed, q, k, v, grid))


@pytest.mark.parametrize('again', [False, True])
def test_no_basis_at_first(again):
    assert all((encoding.entries == 0).all() for encoding in own_encodings(initial_model('string', again), 'string'))
