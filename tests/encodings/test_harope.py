"""harope: rotation by x and y after a learned matrix of each head."""
import pytest
import torch

import reference_harope
import timm_sape
from harness import assert_near, attend, create, make_grid, make_qkv
from model_checks import initial_model, own_encodings
from rotation_checks import SIZES, BasisTests, of_patches_alone
from timm_sape import Grid
from timm_sape.encodings.harope import HeadwiseRotaryEncoding


class TestHarope(BasisTests):
    name = 'harope'
    reference = reference_harope
    float32_tolerance = 3e-5  # singular values up to 10 enlarge all logits
    mutants = {
        **BasisTests.mutants,
        'prefix tokens left alone': (
            '4x4', (HeadwiseRotaryEncoding, 'turn', of_patches_alone(HeadwiseRotaryEncoding.turn))),
    }


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
