"""mrope: rotation of pairs of channels by time, y and x in turn."""
import pytest
import timm
import torch
from timm.layers import RotaryEmbeddingMRope
from timm.models import save_for_hf

import reference_mrope
from harness import assert_near, catches, create
from model_checks import build, check_model, images
from rotation_checks import CASES, SIZES, FixedTableTests, ResolutionTests
from timm_sape import Grid
from timm_sape.encodings import base, mrope


def blocks_from_x(self, grid, device, dtype):
    t, h, w = self.section
    k = torch.arange(self.head_dim // 2, device=device, dtype=dtype)
    frequencies = 10000 ** (-2 * k / self.head_dim)
    y, x = grid.coordinates(device, dtype).unbind(-1)
    return x[:, None] * (frequencies * ((t <= k) & (k < t + w))) + y[:, None] * (frequencies * (t + w <= k))


class TestMrope(ResolutionTests, FixedTableTests):
    name = 'mrope'
    reference = reference_mrope
    multiple = 2
    rotate_half = True

    # --- equations

    @pytest.mark.parametrize('section', [[2, 1, 3], (1, 2, 1)])
    def test_section(self, section):
        self.check(*CASES['3x5, 6 kept'], section=section)
        self.check((2, 4), 0, None, section=section)

    @pytest.mark.parametrize('case', ['3x5 and 5 prefix tokens', '1x7', '3x5, 6 kept'])
    @pytest.mark.parametrize('section', [None, [2, 1, 3], (0, 5, 1)], ids=str)
    def test_contiguous(self, section, case):
        self.check(*CASES[case], layout='contiguous', **({} if section is None else {'section': section}))

    def test_contiguous_rescaled_and_gated(self):
        self.check((3, 5), 1, None, (6, 2), layout='contiguous')
        self.check(*CASES['3x5, 6 kept'], init=0.7, layout='contiguous')

    def test_mutant_of_the_contiguous_layout(self, monkeypatch):
        catches(
            lambda: self.check(*CASES['3x5'], layout='contiguous'), monkeypatch, mrope.MultimodalRotaryEncoding,
            'compute_angles', blocks_from_x)

    def test_timms_layer_in_place_of_ours(self, monkeypatch):
        """The comparison notices that timm's layer rounds to float32, and ignores the trained grid."""
        layer = RotaryEmbeddingMRope(SIZES['head_dim'], dtype=torch.float64)
        monkeypatch.setattr(
            base.FixedRotaryEncoding, 'rotation_of_grid', lambda self, grid: layer.get_embed(list(grid.size)))
        with pytest.raises(AssertionError, match='off by'):
            self.check(*CASES['3x5'])
        with pytest.raises(AssertionError, match='off by'):
            self.check((3, 5), 1, None, (6, 2))


# --- timm ------------------------------------------------------------------------------------------------------------

RECTANGLES = [(3, 5), (5, 3), (1, 7), (7, 1), (4, 4), (1, 1), (14, 14), (9, 16)]


@pytest.mark.parametrize('head_dim', [6, 8, 12, 64, 72, 74])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_same_as_timm(dtype, head_dim):
    """Ours is timm's default section for these head dims, and any other section means the same."""
    for section in (None, (0, 1, 2), (8, 12, 12), (2, 9, 3), (5, 1, 40)):
        layer = RotaryEmbeddingMRope(head_dim, **({} if section is None else {'mrope_section': section}), dtype=dtype)
        for grid_size in RECTANGLES:
            encoding = create('mrope', grid_size, heads=1, head_dim=head_dim, dtype=dtype, section=section)
            actual = encoding(torch.zeros(1), grid=Grid(*grid_size), hook='rotation')
            assert_near(actual, layer.get_embed(list(grid_size)), 3e-6)


def test_default_section_is_even():
    """For larger heads timm's default gives all further pairs to time, so they are not rotated."""
    for head_dim in (64, 72, 80, 96, 128):
        encoding = create('mrope', heads=1, head_dim=head_dim)
        t, h, w = encoding.section
        assert t + h + w == head_dim // 2 and 0 <= t - w <= 1 and t >= h >= w
        turned = encoding.angles(Grid(3, 5))[-1] != 0
        assert turned.sum() == h + w
        of_timm = RotaryEmbeddingMRope(head_dim).get_embed([3, 5])[-1, :head_dim // 2] != 0
        assert of_timm.sum() == min(24, h + w)


@pytest.mark.parametrize('head_dim, section', [(128, (16, 24, 24)), (64, (8, 12, 12)), (64, None)])
def test_contiguous_blocks(head_dim, section):
    """Pairs of time do not turn, those of y follow y alone, those of x x alone; frequencies fall over all pairs."""
    encoding = create('mrope', heads=1, head_dim=head_dim, layout='contiguous', section=section)
    t, h, w = encoding.section
    angles = encoding.angles(Grid(2, 2))  # from (0, 0) to (0, 1), (1, 0) and (1, 1)
    frequencies = torch.tensor([10000 ** (-2 * k / head_dim) for k in range(head_dim // 2)], dtype=torch.float64)
    zero = torch.zeros_like(frequencies)
    along_y = torch.cat([zero[:t], frequencies[t:t + h], zero[t + h:]])
    along_x = torch.cat([zero[:t + h], frequencies[t + h:]])
    assert_near(angles, torch.stack([zero, along_x, along_y, along_x + along_y]), 1e-14)


# --- properties ------------------------------------------------------------------------------------------------------

def test_layouts_agree_on_three_pairs():
    """One pair for each axis is the same in turn and in blocks; with more it is not."""
    for head_dim, same in ((6, True), (12, False)):
        tables = [
            create('mrope', heads=1, head_dim=head_dim, layout=layout)(
                torch.zeros(1), grid=Grid(3, 5), hook='rotation')
            for layout in ('interleaved', 'contiguous')]
        assert torch.equal(*tables) == same


# --- models ----------------------------------------------------------------------------------------------------------

def test_model_of_the_contiguous_layout(tmp_path):
    """The keyword is saved with the model."""
    keywords = {'layout': 'contiguous', 'section': [0, 2, 2]}
    check_model('mrope', '{}', keywords)
    model = build('mrope', keywords)
    save_for_hf(model, tmp_path, safe_serialization=True)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    assert torch.equal(loaded(images()), model(images()))
    assert (loaded(images()) - build('mrope')(images())).abs().max() > 1e-3


# --- keywords --------------------------------------------------------------------------------------------------------

SECTION = r"'mrope': section must be integers \(t, h, w\), h and w of 1 or more"


@pytest.mark.parametrize('keywords, message', [
    ({'dim': 8, 'heads': 2}, (
        "'mrope' needs a head dim of 6 or more, a pair for each axis, got 4. Choose another num_heads")),
    *[({'section': section}, SECTION) for section in (
        4, 'thw', (4, 4), (4, 4, 4, 4), (1, 0, 4), (1, 4, 0), (-1, 2, 3), (1, 2, 3.0), (1, True, 3), (None, 2, 2), {})],
    ({'layout': 'chunked'}, "'mrope': layout must be 'interleaved' or 'contiguous', got 'chunked'"),
    ({'layout': 'contiguous', 'section': (1, 2, 2)}, (
        r"'mrope': in the contiguous layout the 6 pairs of a head dim of 12 must each follow an axis, but "
        r'section=\(1, 2, 2\) makes 5')),
])
def test_wrong_input(keywords, message):
    with pytest.raises(ValueError, match=message):
        create('mrope', **{'dim': 24, 'heads': 2, **keywords})
