"""`ape`: timm's own table."""
import functools

import pytest
import timm
import torch
import torch.nn.functional as F

import reference_ape as reference
import timm_sape
from breakages import in_raster_order
from harness import GRIDS, assert_near, catches, compare, create, embed, make_grid, make_model, make_tokens, where
from loops import resampled
from timm_sape import Grid, ops

PREFIXES = [0, 1, 5]


def check(grid_size, num_prefix_tokens=0, num_keep=None, own_size=None):
    """Value and every gradient."""
    own_size = own_size or grid_size
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = create('ape', own_size, num_prefix_tokens)
    shape = (1, num_prefix_tokens + own_size[0] * own_size[1], 16)
    pos_embed = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    tokens, table = make_tokens(grid), pos_embed
    if own_size != grid_size:
        table = resampled(pos_embed, own_size, grid_size, num_prefix_tokens)
    actual = embed(encoding, tokens, grid, pos_embed=pos_embed)
    expected = reference.ape(tokens, table, grid_size, **where(grid))
    compare(actual, expected, {'tokens': tokens, 'pos_embed': pos_embed})


@pytest.mark.one_of(2)
@pytest.mark.parametrize('num_prefix_tokens', PREFIXES)
@pytest.mark.parametrize('grid_size', GRIDS)
def test_equations(grid_size, num_prefix_tokens):
    check(grid_size, num_prefix_tokens)


@pytest.mark.parametrize('num_prefix_tokens', PREFIXES)
@pytest.mark.parametrize('grid_size, num_keep', [((3, 5), 8), ((7, 1), 3), ((1, 7), 7), ((4, 4), 1)])
def test_equations_of_kept_patches(grid_size, num_keep, num_prefix_tokens):
    check(grid_size, num_prefix_tokens, num_keep)


@pytest.mark.one_of(2)
@pytest.mark.parametrize('grid_size', [(5, 3), (2, 9), (6, 10), (1, 1)])
@pytest.mark.parametrize('num_prefix_tokens', [0, 2])
def test_equations_on_another_grid(grid_size, num_prefix_tokens):
    check(grid_size, num_prefix_tokens, own_size=(3, 5))
    if grid_size != (1, 1):
        check(grid_size, num_prefix_tokens, 6, own_size=(3, 5))


def check_no_embed_class():
    """The host itself puts zeros before the rows of patches."""
    model = make_model('ape', no_embed_class=True, reg_tokens=2, img_size=(24, 40)).double()
    tokens = torch.randn(2, 3, 5, 64, dtype=torch.float64)  # [B, H, W, D], what the patch embedding returns
    with torch.no_grad():
        positions = model._pos_embed(tokens) - model._with_prefix_tokens(tokens)
    expected = torch.cat([tokens.new_zeros(2, 3, 64), model.pos_embed.detach().expand(2, -1, -1)], dim=1)
    assert_near(positions, expected)


def test_no_embed_class():
    check_no_embed_class()


def test_timms_step_at_another_size():
    model = make_model('ape', dynamic_img_size=True, img_size=(24, 40))
    images = torch.randn(2, 3, 40, 24)
    assert torch.equal(model._pos_embed(model.patch_embed(images)), model.embed(images)[0])


@pytest.mark.parametrize('no_embed_class', [False, True])
def test_table_resized_by_hand(no_embed_class):
    """Along with the patch embedding, as it can be done in timm."""
    kwargs = dict(img_size=32, patch_size=8, no_embed_class=no_embed_class)
    model = make_model('ape', **kwargs).eval()
    size = dict(embed_dim=64, depth=len(model.blocks), num_heads=model.blocks[0].attn.num_heads)
    theirs = timm.create_model('vit_tiny_patch16_224', **size, **kwargs).eval()
    table = torch.nn.Parameter(torch.randn(1, 15 + (not no_embed_class), 64))
    theirs.load_state_dict(model.state_dict())
    for m in (model, theirs):
        m.patch_embed.set_input_size((24, 40))
        m.pos_embed = table
    images = torch.randn(2, 3, 24, 40)
    torch.testing.assert_close(model(images), theirs(images), rtol=0, atol=1e-6)


@pytest.mark.parametrize('rows, num_prefix_tokens', [(37, 1), (17, 5), (16, 1), (18, 1)])
def test_rows_that_are_not_those_of_the_model(rows, num_prefix_tokens):
    """timm raises, too. A table cut or padded to fit would put positions on the wrong tokens."""
    encoding, tokens = create('ape', (4, 4), num_prefix_tokens), torch.zeros(2, num_prefix_tokens + 16, 16)
    with pytest.raises(ValueError, match=f'pos_embed has {rows} rows, but .* 4x4 patches.*set_input_size'):
        embed(encoding, tokens, Grid(4, 4, num_prefix_tokens), pos_embed=torch.zeros(1, rows, 16))


pad, interpolate = F.pad, F.interpolate
KEPT = functools.partial(check, (3, 5), 1, 8)
COARSER = functools.partial(check, (2, 3), 1, own_size=(6, 10))
MUTANTS = {  # what is checked, owner, attribute, replacement
    'prefix behind': (
        check_no_embed_class, F, 'pad', lambda x, widths: pad(x, (0, 0, *widths[:1:-1]))),
    'kept patches in raster order': (KEPT, Grid, 'keep_tokens', in_raster_order(Grid.keep_tokens)),
    'first patches instead of kept ones': (
        KEPT, Grid, 'keep_tokens', lambda self, table: table[:, :1 + 8].expand(3, -1, -1)),
    'resampled without antialias': (
        COARSER, F, 'interpolate', lambda *args, **kwargs: interpolate(*args, **{**kwargs, 'antialias': False})),
    'linear': (COARSER, F, 'interpolate', lambda *args, **kwargs: interpolate(*args, **{**kwargs, 'mode': 'bilinear'})),
    'in float32': (COARSER, ops, 'upcast', lambda x: (x.float(),)),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    catches(MUTANTS[mutant][0], monkeypatch, *MUTANTS[mutant][1:])


def test_where_it_acts():
    assert timm_sape.get_encoding('ape').acts_on() == ('tokens',)


def test_initial_values():
    model = make_model('ape', img_size=160, patch_size=16)
    assert model.pos_embed.shape == (1, 101, 64)
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.pos_embed.abs().max() < 0.1
