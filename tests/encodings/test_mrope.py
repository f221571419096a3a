"""mrope: rotation of pairs of channels by time, y and x in turn."""
import pytest
import timm
import torch
from timm.layers import RotaryEmbeddingMRope
from timm.models import save_for_hf

import reference_mrope as reference
import rotation_checks
import timm_sape
from harness import assert_near, catches, check_rescaling, create
from model_checks import (
    build,
    check_fixed,
    check_masks,
    check_model,
    check_neutral_start,
    check_trained_grid_is_saved,
    images,
)
from rotation_checks import CASES, IMAGES, SIZES, TRAINED_ON
from timm_sape import Grid
from timm_sape.encodings import base, mrope


def check(*case, **keywords):
    rotation_checks.check('mrope', reference.rotate, *case, **keywords)


# --- equations -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('case', CASES)
def test_equations(case):
    check(*CASES[case])


@pytest.mark.parametrize('section', [[2, 1, 3], (1, 2, 1)])
def test_section(section):
    check(*CASES['3x5, 6 kept'], section=section)
    check((2, 4), 0, None, section=section)


@pytest.mark.parametrize('case', ['3x5 and 5 prefix tokens', '1x7', '3x5, 6 kept'])
@pytest.mark.parametrize('section', [None, [2, 1, 3], (0, 5, 1)], ids=str)
def test_contiguous(section, case):
    check(*CASES[case], layout='contiguous', **({} if section is None else {'section': section}))


def test_contiguous_rescaled_and_gated():
    check((3, 5), 1, None, (6, 2), layout='contiguous')
    rotation_checks.check('auto_mrope', reference.rotate, *CASES['3x5, 6 kept'], init=0.7, layout='contiguous')


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
    check_rescaling('mrope', 'rotation', **SIZES)


def test_gate():
    """The gate multiplies the angles, not their sines."""
    rotation_checks.check('auto_mrope', reference.rotate, *CASES['3x5, 6 kept'], init=0.7)


@pytest.mark.parametrize('grid_size, num_keep', [((3, 5), None), ((6, 2), None), ((3, 5), 6), ((6, 2), 5)])
def test_rotation_table(grid_size, num_keep):
    rotation_checks.check_table('mrope', reference.rotate, grid_size, num_keep)


MUTANTS = {  # case, (owner, attribute, replacement)
    'x and y swapped': ('3x5', rotation_checks.AXES_SWAPPED),
    'turned back': ('3x5', rotation_checks.TURNED_BACK),
    'other layout': ('3x5', rotation_checks.OTHER_LAYOUT),
    'rows of kept patches in raster order': ('3x5, 6 kept', rotation_checks.ROWS_IN_RASTER_ORDER),
    'first rows for kept patches': ('3x5, 6 kept', rotation_checks.FIRST_ROWS),
}


def blocks_from_x(self, grid, device, dtype):
    t, h, w = self.section
    k = torch.arange(self.head_dim // 2, device=device, dtype=dtype)
    frequencies = 10000 ** (-2 * k / self.head_dim)
    y, x = grid.coordinates(device, dtype).unbind(-1)
    return x[:, None] * (frequencies * ((t <= k) & (k < t + w))) + y[:, None] * (frequencies * (t + w <= k))


def test_mutant_of_the_contiguous_layout(monkeypatch):
    catches(
        lambda: check(*CASES['3x5'], layout='contiguous'), monkeypatch, mrope.MultimodalRotaryEncoding,
        'compute_angles', blocks_from_x)


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    """If the package is broken like this, the comparison with the equations fails."""
    case, patch = MUTANTS[mutant]
    catches(lambda: check(*CASES[case]), monkeypatch, *patch)


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


def test_timms_layer_in_place_of_ours(monkeypatch):
    """The comparison notices that timm's layer rounds to float32 in a float64 model, and ignores the trained grid."""
    layer = RotaryEmbeddingMRope(SIZES['head_dim'], dtype=torch.float64)
    monkeypatch.setattr(
        base.FixedRotaryEncoding, 'rotation_of_grid', lambda self, grid: layer.get_embed(list(grid.size)))
    with pytest.raises(AssertionError, match='off by'):
        check(*CASES['3x5'])
    with pytest.raises(AssertionError, match='off by'):
        check((3, 5), 1, None, (6, 2))


# --- properties ------------------------------------------------------------------------------------------------------

def test_layouts_agree_on_three_pairs():
    """One pair for each axis is the same in turn and in blocks; with more it is not."""
    for head_dim, same in ((6, True), (12, False)):
        tables = [
            create('mrope', heads=1, head_dim=head_dim, layout=layout)(
                torch.zeros(1), grid=Grid(3, 5), hook='rotation')
            for layout in ('interleaved', 'contiguous')]
        assert torch.equal(*tables) == same


def test_norms():
    rotation_checks.check_norms('mrope', rotate_half=True)


def test_translation():
    rotation_checks.check_translation('mrope')
    assert timm_sape.get_encoding('mrope').relative


def test_directions():
    rotation_checks.check_directions('mrope')


def test_images_apart():
    rotation_checks.check_images_apart('mrope')


def test_other_grid():
    rotation_checks.check_other_grid('mrope', reference.rotate)


# --- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('image', IMAGES)
def test_float32(image):
    rotation_checks.check_float32('mrope', image)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half(dtype):
    rotation_checks.check_half('mrope', dtype)


# --- models ----------------------------------------------------------------------------------------------------------

def test_initial_values():
    def check_encoding(layer, encoding):
        angle = reference.angle(8, (3, 5))
        expected = torch.tensor([
            [angle(0, t, y, x) for t in range(4)] for y in range(3) for x in range(5)], dtype=torch.float64)
        assert_near(encoding.angles(Grid(3, 5)), expected, 1e-6)

    check_fixed('mrope', check_encoding)


@pytest.mark.parametrize('composition', ['{}', 'ape+{}'])
def test_model(composition):
    check_model('mrope', composition)


def test_model_of_the_contiguous_layout(tmp_path):
    """The keyword is saved with the model."""
    keywords = {'layout': 'contiguous', 'section': [0, 2, 2]}
    check_model('mrope', '{}', keywords)
    model = build('mrope', keywords)
    save_for_hf(model, tmp_path, safe_serialization=True)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    assert torch.equal(loaded(images()), model(images()))
    assert (loaded(images()) - build('mrope')(images())).abs().max() > 1e-3


def test_neutral_start():
    check_neutral_start('mrope')


def test_masks():
    check_masks('mrope')


def test_trained_grid_is_saved():
    check_trained_grid_is_saved('mrope')


# --- keywords --------------------------------------------------------------------------------------------------------

SECTION = r"'mrope': section must be integers \(t, h, w\), h and w of 1 or more"


@pytest.mark.parametrize('keywords, message', [
    ({'dim': 10, 'heads': 2}, "'mrope' needs a head dim that is a multiple of 2, got 5"),
    ({'dim': 8, 'heads': 2}, (
        "'mrope' needs a head dim of 6 or more, a pair for each axis, got 4. Choose another num_heads")),
    *[({'section': section}, SECTION) for section in (
        4, 'thw', (4, 4), (4, 4, 4, 4), (1, 0, 4), (1, 4, 0), (-1, 2, 3), (1, 2, 3.0), (1, True, 3), (None, 2, 2), {})],
    ({'layout': 'chunked'}, "'mrope': layout must be 'interleaved' or 'contiguous', got 'chunked'"),
    ({'layout': 'contiguous', 'section': (1, 2, 2)}, (
        r"'mrope': in the contiguous layout the 6 pairs of a head dim of 12 must each follow an axis, but "
        r'section=\(1, 2, 2\) makes 5')),
    ({'heads': 4, 'resolution': 'resize'}, "resolution must be 'extrapolate', 'rescale', 'ntk' or 'yarn'"),
    ({'heads': 4, 'scale': 1}, "'mrope' has no keyword 'scale'"),
])
def test_wrong_input(keywords, message):
    with pytest.raises(ValueError, match=message):
        create('mrope', **{'dim': 24, 'heads': 2, **keywords})


def test_registered_from_its_file():
    assert timm_sape.get_encoding('mrope').__module__ == mrope.__name__
