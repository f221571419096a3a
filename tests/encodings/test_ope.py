"""`ope`: sinusoids of x, of y and of the object that a patch belongs to."""
import copy
import functools
import itertools
import warnings

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import build_sincos2d_pos_embed
from torch.export import Dim

import reference_ope as reference
import timm_sape
from breakages import in_raster_order
from harness import (
    GRIDS, assert_near, catches, check_first_tokens, create, embed, make_images, make_model, make_tokens, where)
from timm_sape import Grid
from timm_sape.encodings import ope
from timm_sape.encodings.ope import ObjectPositionEncoding
from token_checks import DROPPED, MUTANTS, PLAIN, RULES, TRAINED_GRID_IGNORED, TermTests

waves, doublings, pad = ope._waves, ope._num_doublings, F.pad
own_embed, own_levels = ObjectPositionEncoding.embed, ObjectPositionEncoding._levels
own_find_objects = ObjectPositionEncoding.find_objects


def make_objects(grid):
    """An object for each patch of 3 images."""
    return torch.randint(-2, 20, (3, grid.num_patches), generator=torch.Generator().manual_seed(2))


def expected(encoding, tokens, grid, objects):
    ref = encoding.ref_grid_size if encoding.rule == 'rescale' else None
    return reference.ope(tokens, objects, grid.size, ref_grid_size=ref, **where(grid))


def term_of(encoding, grid, objects, dtype=torch.float64):
    tokens = make_tokens(grid, dim=encoding.dim, batch=3, dtype=dtype)
    return encoding(tokens, grid=grid, hook='embed', images=None, patch_size=None, object_index=objects)


def timm_sincos2d(self, grid, device, dtype):
    return build_sincos2d_pos_embed(grid.size, self.dim // 2, interleave_sin_cos=True, dtype=dtype)


def alternating_waves(position, num_channels):
    return waves(position, num_channels).unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)


class TestOpe(TermTests):
    name = 'ope'
    variants = RULES
    mutants = {
        'prefix behind': MUTANTS['prefix behind'],
        "timm's order of axes": (PLAIN, (ObjectPositionEncoding, 'compute', timm_sincos2d)),
        'sines and cosines in turn': (PLAIN, (ope, '_waves', alternating_waves)),
        'slower waves': (PLAIN, (
            ope, '_waves', lambda position, num_channels: waves(position * 0.9, num_channels))),
        'object last': (PLAIN, (
            ObjectPositionEncoding, 'embed', lambda *args, **kwargs: own_embed(*args, **kwargs).roll(8, -1))),
        'one image for all': (PLAIN, (
            ObjectPositionEncoding, 'embed', lambda *args, **kwargs: own_embed(*args, **kwargs)[:1])),
        'trained grid ignored': TRAINED_GRID_IGNORED,
        'kept patches in raster order': (DROPPED, (Grid, 'keep_tokens', in_raster_order(Grid.keep_tokens))),
    }

    def actual(self, encoding, tokens, grid):
        return embed(encoding, tokens, grid, object_index=make_objects(grid))

    def expected(self, encoding, tokens, grid):
        return expected(encoding, tokens, grid, make_objects(grid))

    def term(self, encoding, tokens, grid):
        return term_of(encoding, grid, make_objects(grid), tokens.dtype)

    def test_float32(self):
        """A large grid in single against double precision."""
        grid, encoding = Grid(24, 32, 1), create('ope', (24, 32), 1)
        tokens, objects = make_tokens(grid, batch=3), make_objects(grid)
        out = embed(copy.deepcopy(encoding).float(), tokens.float(), grid, object_index=objects)
        assert out.dtype == torch.float32
        assert_near(out, embed(encoding, tokens, grid, object_index=objects), 1e-5)

    def test_in_a_model(self):
        objects = reference.find_objects(make_images(dtype=torch.float64), (4, 4), (8, 8), [0.5] * 3, [0.5] * 3)
        assert objects.max() > 3
        check_first_tokens('ope', functools.partial(expected, objects=objects))


# --- objects ---------------------------------------------------------------------------------------------------------

def painted(colors, patch_size=(2, 3), channels=3):
    """Flat patches of some of 4^channels colors, as a model with mean and std of .5 gets them.

    Args:
        colors: Integers `[B, H, W]`.
        patch_size: Height and width of a patch.
        channels: C.
    """
    digits = torch.stack([colors // 4 ** c % 4 for c in range(channels)], dim=1)  # [B, C, H, W]
    images = (digits / 4 + 1 / 8 - 0.5) / 0.5
    return images.repeat_interleave(patch_size[0], 2).repeat_interleave(patch_size[1], 3)


def found(images, grid_size, patch_size=(2, 3), dtype=torch.float32, **keywords):
    encoding = timm_sape.create_encoding('ope', dim=8, num_heads=1, grid_size=(2, 2), dtype=dtype, **keywords)
    objects = encoding.find_objects(images, Grid(*grid_size, 3), patch_size)
    assert objects.dtype == torch.int64 and objects.shape == (len(images), grid_size[0] * grid_size[1])
    return objects


def check_objects(images, grid_size, patch_size=(2, 3), mean=0.5, std=0.5):
    num_channels = images.shape[1]
    given = [v if isinstance(v, list) else [v] * num_channels for v in (mean, std)]
    actual = found(images, grid_size, patch_size, mean=mean, std=std)
    assert_near(actual, reference.find_objects(images, grid_size, patch_size, *given), 0)
    return actual


@pytest.mark.parametrize('channels', [1, 2, 3, 5])
@pytest.mark.parametrize('num_colors', [1, 2, 3, 64])
@pytest.mark.parametrize('grid_size', [(3, 5), (1, 7), (7, 1), (4, 4), (1, 1), (9, 12), (2, 16), (17, 3)])
def test_objects_of_random_pictures(grid_size, num_colors, channels):
    generator = torch.Generator().manual_seed(0)
    colors = torch.randint(num_colors, (3, *grid_size), generator=generator) * 7
    check_objects(painted(colors, channels=channels), grid_size)


@pytest.mark.parametrize('grid_size', [(3, 3), (2, 4), (1, 8)])
def test_objects_of_all_pictures_in_black_and_white(grid_size):
    size = grid_size[0] * grid_size[1]
    colors = torch.tensor(list(itertools.product((0, 3), repeat=size))).view(-1, *grid_size)
    check_objects(painted(colors, (1, 1), 1), grid_size, (1, 1))


def snake(height, width):
    """A winding path through every second row."""
    picture = torch.zeros(height, width, dtype=torch.long)
    picture[::2] = 1
    picture[1::4, -1] = 1
    picture[3::4, 0] = 1
    return picture


def spiral(size):
    """A path to the center, with a wall between its turns."""
    picture = torch.zeros(size, size, dtype=torch.long)
    y, x, dy, dx, free = 0, 0, 0, 1, 0
    picture[0, 0] = 1
    while free < 2:
        ahead = [(y + n * dy, x + n * dx) for n in (1, 2)]
        inside = [0 <= v < size and 0 <= u < size for v, u in ahead]
        if inside[0] and not any(picture[place] for place, there in zip(ahead, inside) if there):
            (y, x), free = ahead[0], 0
            picture[y, x] = 1
        else:
            dy, dx, free = dx, -dy, free + 1
    return picture


@pytest.mark.parametrize('picture, num_objects', [
    (snake(9, 9), 5), (snake(11, 4), 6), (snake(15, 16), 8), (snake(9, 7).T, 5), (spiral(9), 2), (spiral(16), 2),
    (torch.zeros(1, 33, dtype=torch.long), 1), (torch.zeros(12, 1, dtype=torch.long), 1),
    (torch.arange(20)[:, None] + torch.arange(20) & 1, 400)])
def test_objects_of_long_ways(picture, num_objects):
    """Objects are found however long they are. On a chessboard fields touch only at corners, so each is an object."""
    actual = check_objects(painted(picture[None], (1, 1), 1), tuple(picture.shape), (1, 1))
    assert actual.max() + 1 == num_objects
    if num_objects == 2:  # a path and a wall, wherever the path ends
        assert torch.equal(actual.view(picture.shape) == 0, picture == 1)


def test_objects_by_hand():
    picture = torch.tensor([[5, 5, 5, 5, 5], [5, 9, 9, 5, 2], [5, 5, 2, 2, 2], [9, 5, 2, 5, 2]])
    objects = [[0, 0, 0, 0, 0], [0, 1, 1, 0, 2], [0, 0, 2, 2, 2], [3, 0, 2, 4, 2]]
    assert found(painted(picture[None]), (4, 5)).view(4, 5).tolist() == objects


def test_levels():
    """Levels are quarters of the range. Its ends and values beyond them belong to the outer levels."""
    colors = torch.tensor([-1.0, -0.01, 0.0, 0.24, 0.26, 0.49, 0.5, 0.74, 0.76, 0.99, 1.0, 7.0, float('nan')])
    for mean, std in ((0.5, 0.5), (0.0, 1), (0.485, 0.229)):
        encoding = timm_sape.create_encoding('ope', dim=8, num_heads=1, grid_size=(2, 2), mean=mean, std=std)
        images = ((colors.double() - mean) / std)[None, None, :, None]
        levels = encoding._levels(images + 1e-12, Grid(13, 1), (1, 1)).flatten().tolist()
        assert levels == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 0]


@pytest.mark.parametrize('mean, std', [
    ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), (0.4, [0.2, 0.5, 1.0]), ([0.1, 0.5, 0.9], 0.3), (0, 1)])
def test_objects_of_noisy_pictures(mean, std):
    """The level is that of a patch's mean color before normalization."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(4, 3, 12, 15, generator=generator, dtype=torch.float64)
    images = (images - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    some = check_objects(images, (6, 5), mean=mean, std=std)
    assert not torch.equal(some, check_objects(images, (6, 5)))


@pytest.mark.parametrize('missing', [(0, 0), (1, 0), (0, 2), (1, 1)])
def test_objects_at_a_ragged_edge(missing):
    """A patch that extends beyond the image is padded with zeros, as in the model."""
    generator = torch.Generator().manual_seed(0)
    images = 2 * torch.rand(4, 3, 8, 15, generator=generator, dtype=torch.float64) - 1
    images = images[:, :, :8 - missing[0], :15 - missing[1]]
    actual = check_objects(images, (4, 5))
    padded = F.pad(images, (0, missing[1], 0, missing[0]))
    assert torch.equal(actual, found(padded, (4, 5)))


def test_objects_where_the_rest_is_left_out():
    """Like a model that is grafted onto one of timm whose patches do not divide the image."""
    images = 2 * torch.rand(4, 3, 9, 17, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1
    assert torch.equal(found(images, (4, 5)), check_objects(images[:, :, :8, :15], (4, 5)))


def test_objects_of_strange_pictures():
    """Numbers within bounds for NaN and infinity, and no gradient."""
    images = torch.randn(2, 3, 8, 15)
    images[0, :, :, 4:7] = float('nan')
    images[1, 0], images[1, 1] = float('inf'), -float('inf')
    objects = found(images.requires_grad_(), (4, 5))
    assert objects.min() == 0 and objects.max() < 20 and not objects.requires_grad


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize('autocast', [False, True])
def test_objects_in_low_precision(dtype, autocast):
    """Exact, though there are more objects than bfloat16 can count."""
    generator = torch.Generator().manual_seed(0)
    images = painted(torch.randint(64, (2, 20, 24), generator=generator))
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        objects = found(images.to(dtype), (20, 24), dtype=dtype)
    assert objects.max() > 256
    assert torch.equal(objects, found(images.double(), (20, 24)))


def test_doublings():
    """The least number of doublings after which a path of one step can visit all patches; enough if that is unknown."""
    for num_patches in (1, 2, 3, 4, 5, 195, 196, 197, 256, 257, 4096, 65536):
        n = ope._num_doublings(num_patches)
        assert 2 ** n >= num_patches and (n == 0 or 2 ** (n - 1) < num_patches)


class FindObjects(nn.Module):
    """From images to objects, for patches of 2 x 3."""

    def __init__(self):
        super().__init__()
        self.encoding = timm_sape.create_encoding('ope', dim=8, num_heads=1, grid_size=(2, 2), mean=[0.5, 0.5, 0.5])

    def forward(self, images):
        return self.encoding.find_objects(images, Grid(-(-images.shape[2] // 2), -(-images.shape[3] // 3)), (2, 3))


def compiled():
    return torch.compile(FindObjects(), fullgraph=True, backend='eager', dynamic=True)


def exported(strict):
    """For images that need no padding: torch cannot export that yet, not even in timm's own model."""
    shapes = {'images': {0: Dim('batch', max=64), 2: 2 * Dim('height', max=64), 3: 3 * Dim('width', max=64)}}
    images = torch.randn(3, 3, 8, 12)
    return torch.export.export(FindObjects(), (images,), dynamic_shapes=shapes, strict=strict).module()


@pytest.mark.full
@pytest.mark.parametrize('graph, sizes', [
    (compiled, [(7, 13), (8, 12), (5, 31)]),
    *((functools.partial(exported, strict), [(8, 12), (6, 30), (4, 6)]) for strict in (False, True))])
def test_objects_as_a_graph(graph, sizes):
    """One graph, no step of which depends on a picture or its size."""
    torch._dynamo.reset()
    find = graph()
    for size in sizes:
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
        assert torch.equal(find(images), FindObjects()(images))
    torch._dynamo.reset()


def find_columns_first(self, images, grid, patch_size):
    objects = own_find_objects(self, images.mT, Grid(grid.width, grid.height), patch_size[::-1])
    return objects.unflatten(1, (grid.width, grid.height)).mT.flatten(1)


TWO_COLUMNS = torch.tensor([[[1, 0, 1]] * 4 + [[1, 1, 1]]])  # one object, from end to end in 10 of 15 patches
NOISY = functools.partial(
    check_objects, 2 * torch.rand(4, 3, 8, 15, generator=torch.Generator().manual_seed(0)) - 1, (4, 5))
RAGGED = functools.partial(
    check_objects, 2 * torch.rand(4, 3, 7, 13, generator=torch.Generator().manual_seed(0)) - 1, (4, 5))
OBJECT_MUTANTS = {  # what is checked, owner, attribute, replacement
    'one doubling too few': (
        functools.partial(check_objects, painted(TWO_COLUMNS), (5, 3)), ope, '_num_doublings',
        lambda num_patches: doublings(num_patches) - 1),
    'objects touch at corners': (NOISY, ope, '_steps', lambda place: (place[:, None] - place).abs().amax(-1)),
    'first channel alone': (NOISY, ObjectPositionEncoding, '_levels', lambda *args: own_levels(*args)[..., :1]),
    'columns first': (NOISY, ObjectPositionEncoding, 'find_objects', find_columns_first),
    'rounded': (
        NOISY, ObjectPositionEncoding, '_levels', lambda self, images, *args: own_levels(self, images + 0.25, *args)),
    'mean of what there is of a patch': (
        RAGGED, ObjectPositionEncoding, '_levels',
        lambda self, images, *args: own_levels(self, F.pad(images, (0, 2, 0, 1), mode='replicate'), *args)),
    'padded above': (RAGGED, F, 'pad', lambda images, widths: pad(images, (*widths[:2], *widths[:1:-1]))),
}


@pytest.mark.parametrize('mutant', OBJECT_MUTANTS)
def test_mutants_of_objects_are_caught(mutant, monkeypatch):
    check, *patch = OBJECT_MUTANTS[mutant]
    catches(check, monkeypatch, *patch)


# --- properties, and timm --------------------------------------------------------------------------------------------

@pytest.mark.parametrize('grid_size', GRIDS)
@pytest.mark.parametrize('dim', [8, 16, 64])
def test_half_is_that_of_timm_with_x_first(grid_size, dim):
    grid, encoding = Grid(*grid_size), create('ope', grid_size, dim=dim, dtype=torch.float32)
    term = term_of(encoding, grid, make_objects(grid), torch.float32)
    y, x = build_sincos2d_pos_embed(grid_size, dim // 2, interleave_sin_cos=True).chunk(2, dim=-1)
    assert_near(term[..., dim // 2:], torch.cat([x, y], dim=-1).expand(3, -1, -1), 1e-6)


def test_waves():
    """All rows have the same norm, patches of an object share half of their channels, products depend on offsets."""
    encoding, grid = create('ope', (4, 5), dim=32), Grid(4, 5)
    images = make_objects(grid)
    term = term_of(encoding, grid, images)
    assert_near(term.square().sum(-1), torch.full((3, 20), 16.0), 1e-12)
    objects, places = term.chunk(2, dim=-1)
    for image, rows in zip(images, objects):
        assert torch.equal(image[:, None] == image, torch.cdist(rows, rows) < 1e-9)
        products = rows @ rows.T
        for offset in image.unique() - image.min():
            some = products[image[:, None] - image == offset]
            assert len(some) == 0 or some.std(correction=0) < 1e-9
    assert torch.equal(places[0], places[1])
    products = torch.einsum('yxc,vuc->yxvu', *2 * [places[0].unflatten(0, (4, 5))])
    assert_near(products[1:, 1:, 1:, 1:], products[:-1, :-1, :-1, :-1], 1e-12)


# --- keywords, and in a model ----------------------------------------------------------------------------------------

@pytest.mark.parametrize('dim, keywords, text', [
    *((dim, {}, f"'ope' needs an embed dim that is a multiple of 8, got {dim}. Choose another embed_dim")
      for dim in (4, 12, 7)),
    (8, {'resolution': 'resize'}, "resolution must be 'extrapolate' or 'rescale', got 'resize'"),
    *((8, {'mean': mean}, "'ope' needs mean to be a finite number, or a list of them, one per channel, got")
      for mean in (float('nan'), float('inf'), True, '0.5', None, [], [0.5, None, 0.5], [[0.5]])),
    *((8, {'std': std}, "'ope' needs std to be a positive number, or a list of them, one per channel, got")
      for std in (0, -0.5, float('nan'), float('inf'), True, None, [], [0.5, 0, 0.5], {'r': 1})),
    (8, {'mean': [0.5] * 3, 'std': [0.5]}, "'ope' has a mean of 3 channels and a std of 1. Give as many"),
])
def test_wrong_values(dim, keywords, text):
    with pytest.raises(ValueError, match=text):
        timm_sape.create_encoding('ope', dim=dim, num_heads=1, grid_size=(3, 5), **keywords)


@pytest.mark.parametrize('pos_enc, kwargs', [
    ('ope', {}), ('auto_ope', {}), ('ope', {'dynamic_img_size': True, 'dynamic_img_pad': True})])
def test_object_index(pos_enc, kwargs):
    """Found in the image if the caller gives none; otherwise those of the caller, in any integer dtype."""
    model = make_model(pos_enc, reg_tokens=4, num_classes=5, **kwargs)
    x = painted(torch.randint(4, (2, 4, 4), generator=torch.Generator().manual_seed(0)) * 7, (8, 8))
    x = (x + 0.05 * make_images())[:, :, :29 if kwargs else 32]
    objects = reference.find_objects(x, (4, 4), (8, 8), [0.5] * 3, [0.5] * 3)
    assert objects.max() > 3
    own = model(x)
    assert torch.equal(model(x, object_index=objects), own)
    assert torch.equal(model(x, object_index=objects.int()), own)
    tokens = model.forward_features(x, object_index=objects)
    assert torch.equal(tokens, model.forward_features(x))
    assert (model(x, object_index=objects.flip(1)) - own).abs().max() > 1e-4
    assert torch.equal(model.forward_intermediates(x, object_index=objects)[0], tokens)
    x.requires_grad_()
    a, b = (torch.autograd.grad(model(x, **given).sum(), x)[0] for given in ({}, {'object_index': objects}))
    assert_near(a, b, 1e-6)


def test_wrong_object_index():
    model, x = make_model('ope'), make_images()
    for shape in ((2, 17), (2, 15), (1, 16), (2, 4, 4), (16,)):
        with pytest.raises(ValueError, match=r"'ope' needs object_index to be .* of shape \[B, H\*W\] = \[2, 16\]"):
            model(x, object_index=torch.zeros(shape, dtype=torch.long))
    for wrong in (torch.zeros(2, 16), torch.zeros(2, 16, dtype=torch.complex64), [[0] * 16] * 2):
        with pytest.raises(ValueError, match="'ope' needs object_index to be a tensor of integers"):
            model(x, object_index=wrong)
    with pytest.raises(ValueError, match="object_index= is for encodings that use it, such as 'ope'"):
        make_model('peg')(x, object_index=torch.zeros(2, 16, dtype=torch.long))


def test_tokens_alone():
    """Without images no objects can be found. A caller can still give them."""
    model, x, objects = make_model('ope'), make_images(), torch.arange(32).view(2, 16) % 5
    tokens, text = model.patch_embed(x), "'ope' finds objects in whole images, but got only tokens"
    with pytest.raises(ValueError, match=text):
        model._pos_embed(tokens)
    with pytest.raises(ValueError, match=text):
        embed(model.encodings['ope'], torch.zeros(2, 17, 64), Grid(4, 4, 1))
    assert torch.equal(model._pos_embed(tokens, object_index=objects), model.embed(x, object_index=objects)[0])


@pytest.mark.parametrize('strict', [False, pytest.param(True, marks=pytest.mark.full)])
def test_object_index_exported(strict):
    """For any number of images."""
    model, batch = make_model('ope').eval(), Dim('batch', max=64)
    given = {'object_index': torch.zeros(2, 16, dtype=torch.long)}
    shapes = {'x': {0: batch}, 'object_index': {0: batch}}
    graph = torch.export.export(model, (make_images(),), given, dynamic_shapes=shapes, strict=strict).module()
    x, objects = make_images(3), torch.arange(48).view(3, 16) % 7
    assert_near(graph(x, object_index=objects), model(x, object_index=objects), 1e-6)


def test_wrong_number_of_channels():
    for in_chans in (1, 4):
        for keywords in ({'mean': [0.5] * 3}, {'std': [0.5] * 3}, {'mean': 0.3}):
            model = make_model('ope', in_chans=in_chans, pos_enc_kwargs={'ope': keywords})
            x = torch.randn(2, in_chans, 32, 32)
            if keywords == {'mean': 0.3}:
                assert model(x).isfinite().all()
                continue
            with pytest.raises(ValueError, match=f"'ope' has a (mean|std) of 3 channels, but the image has {in_chans}"):
                model(x)


def test_images_that_are_normalized_otherwise():
    """A model warns if its config has other statistics than `ope`; those of timm's own ViTs are the default."""
    base = dict(base='deit_tiny_patch16_224', pos_enc='ope', img_size=32, patch_size=8, depth=1)
    statistics = {'mean': [0.485, 0.456, 0.406], 'std': [0.229, 0.224, 0.225]}
    with pytest.warns(UserWarning, match=r'mean \[0.5, 0.5, 0.5\], .* says \[0.485, 0.456, 0.406\], .* Give pos_enc'):
        timm.create_model('vit_graft', **base)
    with pytest.warns(UserWarning, match=r'std \[0.5, 0.5, 0.5\], .* says \[0.2, 0.2, 0.2\]'):
        timm.create_model('test_vit_ope', pretrained_cfg_overlay={'std': (0.2, 0.2, 0.2)})
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        timm.create_model('vit_graft', **base, pos_enc_kwargs={'ope': statistics})
        timm.create_model('test_vit_ope', in_chans=1)
        timm.create_model('vit_tiny_ope', depth=1, features_only=True)
