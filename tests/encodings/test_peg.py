"""`peg`: a convolution on the grid after the first block."""
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from timm.models.twins import PosConv

import reference_peg as reference
import timm_sape
from breakages import in_raster_order
from harness import (
    GRIDS, assert_near, compare, create, initial_models, inputs_of, make_grid, make_images, make_model, make_tokens,
    where)
from timm_sape import Grid
from timm_sape.encodings.peg import ConditionalPositionEncoding
from timm_sape.position import LayerEncodings, Position
from token_checks import DROPPED, MUTANTS, PLAIN, PREFIXED, TokenTests


def after_block(encoding, tokens, grid):
    """The tokens after a block that has this encoding."""
    return LayerEncodings({'peg': encoding}, needs_position=True).add_after(tokens, Position(grid))


def expected(encoding, tokens, grid):
    return reference.peg(tokens, encoding.conv.weight, encoding.conv.bias, grid.size, **where(grid))


embed = ConditionalPositionEncoding.embed


def convolved(self, x, grid, size=lambda size: size, weight=lambda weight: weight, padding=1):
    maps = x[:, grid.num_prefix_tokens:].transpose(1, 2).unflatten(2, size(grid.size))
    maps = F.conv2d(maps, weight(self.conv.weight), self.conv.bias, groups=16, padding=padding)
    return grid.pad_tokens(maps.flatten(2).transpose(1, 2))


def circular(self, x, grid):
    maps = x[:, grid.num_prefix_tokens:].transpose(1, 2).unflatten(2, grid.size)
    maps = F.conv2d(F.pad(maps, (1, 1, 1, 1), mode='circular'), self.conv.weight, self.conv.bias, groups=16)
    return grid.pad_tokens(maps.flatten(2).transpose(1, 2))


def in_sequence(self, tokens):
    """Puts kept patches in the first places of the grid, wherever they belong."""
    return F.pad(tokens, (0, 0, 0, self.num_patches - tokens.shape[2]))


class TestPeg(TokenTests):
    name = 'peg'
    variants = [{'kernel_size': 3}, {'kernel_size': 5}]
    acts_on = ('tokens after a block',)
    mutants = {
        **{name: (case, (ConditionalPositionEncoding, 'embed', broken)) for name, case, broken in [
            ('circular', PREFIXED, circular),
            ('no padding to speak of', PREFIXED, functools.partialmethod(
                convolved, padding=0, weight=lambda w: w[:, :, 1:2, 1:2])),
            ('kernel turned around', PREFIXED, functools.partialmethod(convolved, weight=lambda w: w.flip(2, 3))),
            ('kernel transposed', {'grid_size': (4, 4)}, functools.partialmethod(convolved, weight=lambda w: w.mT)),
            ('width before height', PREFIXED, functools.partialmethod(convolved, size=lambda size: size[::-1])),
            ('tokens twice', PLAIN, lambda self, x, grid: x + embed(self, x, grid)),
        ]},
        'kept patches in sequence': (DROPPED, (Grid, 'scatter', in_sequence)),
        'kept patches in raster order': (DROPPED, (Grid, 'keep_tokens', in_raster_order(Grid.keep_tokens))),
        'prefix behind': MUTANTS['prefix behind'],
    }

    actual = staticmethod(after_block)
    expected = staticmethod(expected)


# --- timm ------------------------------------------------------------------------------------------------------------

def twins_of(encoding):
    """timm's layer with the same parameters."""
    twins = PosConv(16, 16, dtype=torch.float64)
    twins.load_state_dict({f'proj.0.{name}': value for name, value in encoding.conv.state_dict().items()})
    return twins


@pytest.mark.parametrize('grid_size', GRIDS)
def test_that_of_twins(grid_size):
    grid, encoding = Grid(*grid_size), create('peg', grid_size)
    tokens = make_tokens(grid)
    assert_near(after_block(encoding, tokens, grid), twins_of(encoding)(tokens, grid_size), 1e-12)


def test_that_of_twins_knows_no_prefix_tokens():
    """timm's layer takes them for patches: 5 of them and 3 x 5 patches become 4 x 5 patches in wrong places."""
    grid, encoding = Grid(3, 5, 5), create('peg', (3, 5), 5)
    tokens, twins = make_tokens(grid), twins_of(encoding)
    with pytest.raises(RuntimeError, match='invalid for input of size'):
        twins(tokens, grid.size)
    with pytest.raises(AssertionError, match='off by'):
        assert_near(twins(tokens, (4, 5)), expected(encoding, tokens, grid), 1e-2)


# --- properties ------------------------------------------------------------------------------------------------------

def term_of(picture, encoding):
    """The term that is added to the patches of `picture`, both `[D, H, W]`."""
    grid = Grid(*picture.shape[1:])
    return encoding(picture.flatten(1).T[None], grid=grid, hook='embed')[0].T.unflatten(1, grid.size)


def test_moves_with_the_picture():
    """Away from the border. At the border the term shows position, even for an image without any content."""
    encoding = create('peg', (6, 7))
    picture = torch.zeros(16, 6, 7, dtype=torch.float64)
    picture[:, 1:3, 2:4] = torch.randn(16, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    term, moved = term_of(picture, encoding), term_of(picture.roll((2, 2), (1, 2)), encoding)
    assert_near(moved[:, 2:, 2:], term[:, :-2, :-2], 1e-12)
    at_border = term_of(picture.roll((-2, 0), (1, 2)), encoding)
    assert not torch.allclose(at_border[:, :-2], term[:, 2:])
    blank = term_of(torch.ones(16, 6, 7, dtype=torch.float64), encoding)
    inner = encoding.conv.weight.sum((1, 2, 3)) + encoding.conv.bias
    assert_near(blank[:, 1:-1, 1:-1], inner[:, None, None].expand(-1, 4, 5), 1e-12)
    assert not torch.allclose(blank[:, 0], blank[:, 1]) and not torch.allclose(blank[:, :, 0], blank[:, :, 1])
    assert len(blank.detach().flatten(1).T.unique(dim=0)) == 9  # corners, edges, and all else


@pytest.mark.parametrize('axis', [1, 2])
def test_mirrored_picture(axis):
    """Mirroring the image mirrors the term if the kernel is symmetric, but not otherwise."""
    encoding = create('peg', (4, 5))
    picture = torch.randn(16, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert not torch.allclose(term_of(picture.flip(axis), encoding), term_of(picture, encoding).flip(axis))
    with torch.no_grad():
        encoding.conv.weight.add_(encoding.conv.weight.flip(axis + 1))
    assert_near(term_of(picture.flip(axis), encoding), term_of(picture, encoding).flip(axis), 1e-12)


def test_a_dropped_patch_counts_as_zeros():
    grid = make_grid((3, 5), 2, 8)
    tokens, encoding = make_tokens(grid), create('peg', (3, 5), 2)
    index = torch.cat([torch.arange(2).expand(3, -1), 2 + grid.keep_indices], dim=1)[..., None].expand(-1, -1, 16)
    whole = torch.zeros(3, 17, 16, dtype=torch.float64).scatter(1, index, tokens)
    term = encoding(tokens, grid=grid, hook='embed')
    assert_near(term, encoding(whole, grid=Grid(3, 5, 2), hook='embed').gather(1, index), 1e-12)
    assert (term[:, :2] == 0).all()


def test_follows_the_first_block():
    model, plain = make_model('peg', depth=3, reg_tokens=4).double(), make_model('nope', depth=3, reg_tokens=4).double()
    assert list(model.position_encodings()) == ['blocks.0.attn.encodings.peg']
    images, encoding = make_images(dtype=torch.float64), model.blocks[0].attn.encodings['peg']
    (first, second), (stem, after) = (inputs_of(m.blocks[:2], m, images) for m in (model, plain))
    assert_near(first, stem, 1e-12)
    assert_near(second, expected(encoding, after, Grid(4, 4, 5)), 1e-10)
    assert (second - after)[:, 5:].abs().max() > 0.01


# --- precision -------------------------------------------------------------------------------------------------------

def test_float32():
    """A large grid in single against double precision."""
    grid, encoding = Grid(24, 32, 1), create('peg', (24, 32), 1)
    tokens = make_tokens(grid)
    out = after_block(copy.deepcopy(encoding).float(), tokens.float(), grid)
    assert out.dtype == torch.float32
    assert_near(out, after_block(encoding, tokens, grid), 1e-5)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('grid_size', [(3, 5), (6, 4)])
def test_half_models(grid_size, dtype):
    """The term depends on content, so it has the dtype of the tokens."""
    grid = Grid(*grid_size, 1)
    encoding, tokens = create('peg', (3, 5), 1, dtype=torch.float32).to(dtype), make_tokens(grid, dtype=dtype)
    out = after_block(encoding, tokens, grid)
    assert out.dtype == dtype and encoding(tokens, grid=grid, hook='embed').dtype == dtype
    assert_near(out, after_block(copy.deepcopy(encoding).double(), tokens.double(), grid), 0.02)


def test_autocast():
    """The error is that of autocast, and the tokens stay in float32."""
    grid = Grid(3, 5, 1)
    encoding, tokens = create('peg', (3, 5), 1, dtype=torch.float32), make_tokens(grid, dtype=torch.float32)
    out = after_block(encoding, tokens, grid)
    with torch.autocast('cpu', torch.bfloat16):
        actual = after_block(encoding, tokens, grid)
    assert actual.dtype == torch.float32
    compare(actual, out, dict(encoding.named_parameters()), 0.02)


# --- keywords and initial values -------------------------------------------------------------------------------------

@pytest.mark.parametrize('size', [0, 1, 2, 4, -3, 3.0, True, '3', None, float('nan')])
def test_wrong_kernel_size(size):
    text = f"'peg' needs kernel_size to be an odd number of at least 3, got {size!r}"
    with pytest.raises(ValueError, match=text):
        timm_sape.create_encoding('peg', dim=8, num_heads=1, grid_size=(3, 5), kernel_size=size)


@pytest.mark.parametrize('kernel_size', [3, 5])
def test_initial_values(kernel_size):
    for model in initial_models('peg', pos_enc_kwargs={'peg': {'kernel_size': kernel_size}}):
        conv, limit = model.blocks[0].attn.encodings['peg'].conv, 1 / kernel_size
        assert conv.weight.shape == (64, 1, kernel_size, kernel_size) and conv.bias.shape == (64,)
        for parameter in (conv.weight, conv.bias):
            assert 0.8 * limit < parameter.abs().max() <= limit
            assert parameter.std().item() == pytest.approx(limit / 3 ** 0.5, rel=0.2)
