"""rope1d: rotation by the raster index."""
import torch
from timm.layers.pos_embed_sincos import freq_bands

import reference_rope1d
from harness import assert_near, create
from rotation_checks import (
    KEPT_MUTANTS,
    SIZES,
    TABLE_MUTANTS,
    FixedTableTests,
    ResolutionTests,
    logits_between,
    one_token,
)
from timm_sape import Grid


class TestRope1d(ResolutionTests, FixedTableTests):
    name = 'rope1d'
    reference = reference_rope1d
    multiple = 2
    mutants = {**KEPT_MUTANTS, **TABLE_MUTANTS}  # there are no axes to swap


def test_timms_frequencies():
    """In float32, the only dtype of timm's helper."""
    encoding = create('rope1d', (1, 2), **SIZES, dtype=torch.float32)
    expected = freq_bands(SIZES['head_dim'], temperature=10000.0, step=2)
    assert_near(encoding.angles(Grid(1, 2))[1], expected, 1e-6)


def test_raster_alone():
    """The last patch of a row and the first of the next one are as close as any two neighbours."""
    logits = logits_between(create('rope1d', **SIZES), (3, 5), one_token()).flatten(3, 4).flatten(1, 2)
    assert_near(logits[:, 1:, 1:], logits[:, :-1, :-1], 1e-13)
    assert not torch.allclose(logits[:, 0, 5], logits[:, 0, 1])
