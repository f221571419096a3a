"""lookhere: each head looks in one direction, and less at distant patches."""
import pytest
import torch

import reference_lookhere
import timm_sape
from bias_checks import FIXED_SIZES, FROM_THE_OTHER, FixedBiasTests, bias_of, check_decay, unchanged_when_mirrored
from harness import assert_near, attend, create, make_grid, make_qkv
from model_checks import build, check_fixed, own_encodings
from timm_sape import Grid
from timm_sape.attention import PosEncAttention
from timm_sape.encodings import lookhere
from timm_sape.position import LayerEncodings, Position


class TestLookhere(FixedBiasTests):
    name = 'lookhere'
    reference = reference_lookhere
    variants = [{'layer': 2, 'depth': 5}, {'layer': 4, 'depth': 5}]
    head_counts = [4, 6, 8, 12, 16, 20]
    mutants = {  # case, (owner, attribute, replacement)
        **FixedBiasTests.mutants,
        'from the other patch': ('3x5, 6 kept', FROM_THE_OTHER),
        'corners in another order': ('3x5', (lookhere, 'CORNERS', lookhere.CORNERS[::-1])),
        'triangles for corners': ('3x5', (lookhere, 'CORNERS', lookhere.TRIANGLES)),
    }

    def test_initial_values(self):
        def check_encoding(layer, encoding):
            expected = self.reference.bias(4, (3, 5), layer=layer, depth=5, num_prefix_tokens=5)
            assert_near(bias_of(encoding, Grid(3, 5, 5)), expected, 1e-6)

        check_fixed('lookhere', check_encoding, per_layer=True)

    def test_neutral_start(self):
        """There is none, so it takes no gate."""
        with pytest.raises(ValueError, match="'auto_lookhere': 'lookhere' has no neutral form"):
            build('auto_lookhere')


# --- properties ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords', [{}, *TestLookhere.variants], ids=str)
def test_decay(keywords):
    check_decay('lookhere', all_seen=False, **keywords)


@pytest.mark.parametrize('axis', [0, 1])
def test_mirrored(axis):
    """Only heads that see everything, and triangles that point along the other axis, do not change."""
    unchanged = unchanged_when_mirrored('lookhere', axis)
    corners, around_y, around_x, everywhere = unchanged[:4], unchanged[4:6], unchanged[6:8], unchanged[8:]
    assert not any(corners) and all(everywhere)
    assert not any(around_y if axis == 0 else around_x)
    assert all(around_x if axis == 0 else around_y)


@pytest.mark.parametrize('num_heads', [4, 6, 8, 12, 16])
@pytest.mark.parametrize('grid_size', [(3, 5), (1, 7), (7, 1), (1, 1), (4, 4)])
def test_what_is_seen(num_heads, grid_size):
    """Every patch sees itself, so no row is empty. Together, the heads of a group see everything."""
    bias = bias_of(create('lookhere', grid_size, 2, heads=num_heads, head_dim=1), Grid(*grid_size, 2))[0]
    assert not bias.isnan().any() and bias.max() == 0
    assert (bias.diagonal(dim1=1, dim2=2) == 0).all()
    assert (bias[:, :2] == 0).all() and (bias[:, :, :2] == 0).all()
    for group in bias.split(4)[:-1] if num_heads > 4 else [bias]:
        seen = group.isfinite()[:, 2:, 2:]
        assert seen.any(0).all()
        assert (seen.sum(0).diagonal() == 4).all()
        if grid_size == (4, 4):
            assert not seen.all(2).all(1).any()


@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('kept', [None, 1, 4])
def test_never_nan(kept, dtype, fused):
    """Output and gradients are finite, even if a single patch is kept and there are no prefix tokens."""
    dim, heads = 48, FIXED_SIZES['heads']
    for grid_size in ((3, 5), (1, 7), (7, 1)):
        grid = make_grid(grid_size, 0, kept, batch=2)
        encoding = create('lookhere', grid_size, **FIXED_SIZES, dtype=dtype, layer=0, depth=2)
        layer = PosEncAttention(dim, num_heads=heads, dtype=dtype)
        layer.fused_attn = fused
        layer.encodings = LayerEncodings({'lookhere': encoding}, needs_position=True)
        x = torch.randn(2, kept or grid.num_patches, dim, dtype=dtype, requires_grad=True)
        out = layer(x, position=Position(grid))
        out.float().square().sum().backward()
        assert out.isfinite().all() and x.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


def test_unseen_is_masked_out():
    """Changing a patch that a head does not see changes nothing in this head."""
    encoding = create('lookhere', (3, 5), **FIXED_SIZES)
    grid = Grid(3, 5)
    q, k, v = (x.detach() for x in make_qkv(grid, **FIXED_SIZES))
    out = attend(encoding, q, k, v, grid)
    changed = v.clone()
    changed[:, :, 0] += 1  # the corner at the top left
    moved = (attend(encoding, q, k, changed, grid) - out).abs().amax(-1)[0] > 1e-9  # [h, H*W]
    at_top = torch.arange(15) < 5
    at_left = torch.arange(15) % 5 == 0
    assert moved[0].all()  # looks up and left
    assert torch.equal(moved[1], at_left) and torch.equal(moved[2], at_top)
    assert torch.equal(moved[3], at_top & at_left)


# --- models ----------------------------------------------------------------------------------------------------------

def test_layers_of_a_model():
    """Factors go from 1.5 to 0.5. A truncated model keeps the factors that it was trained with."""
    model = build('lookhere', depth=4)

    def factors():
        return [-bias_of(encoding, Grid(3, 5))[0, 3, 0, 1].item() for encoding in own_encodings(model, 'lookhere')]

    assert factors() == pytest.approx([1.5, 1.5 - 1 / 3, 1.5 - 2 / 3, 0.5])
    model.prune_intermediate_layers([1])
    assert factors() == pytest.approx([1.5, 1.5 - 1 / 3])
    assert -build('lookhere', depth=1).blocks[0].attn.encodings['lookhere'].table[3, 2, 5].item() == 1.5


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords, message', [
    ({'dim': 12, 'heads': 3}, "'lookhere' needs 6 heads or a multiple of 4, got 3. Choose another num_heads"),
    ({'dim': 10, 'heads': 10}, "'lookhere' needs 6 heads or a multiple of 4, got 10"),
])
def test_wrong_input(keywords, message):
    with pytest.raises(ValueError, match=message):
        create('lookhere', **{'dim': 24, 'heads': 4, **keywords})


def test_fits():
    cls = timm_sape.get_encoding('lookhere')
    assert [h for h in range(1, 25) if cls.fits(24, h)] == [4, 6, 8, 12, 16, 20, 24]
    with pytest.raises(ValueError, match="'lookhere' needs 6 heads or a multiple of 4, got 2"):
        build('lookhere', num_heads=2)
