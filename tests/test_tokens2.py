"""lape, peg, ope and pemix: each against its equations (references_tokens2.py), its properties, its values."""
import copy
import functools
import itertools

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import build_sincos2d_pos_embed
from timm.models.twins import PosConv
from torch.export import Dim

import references_tokens2 as references
import timm_sape
from references import assert_near, resampled
from timm_sape import checkpoints
from timm_sape.encodings import lape, ope, peg, pemix
from timm_sape.grid import Grid

DIM = 8
NAMES = ('lape', 'peg', 'ope', 'pemix')
GRIDS = [(3, 5), (1, 7), (7, 1), (4, 4), (1, 1)]


def create(name, grid_size, num_prefix_tokens=0, ref_grid_size=None, dtype=torch.float64, dim=DIM, **keywords):
    """An encoding in which every parameter matters. The table of lape is small, so that the eps of a norm does too."""
    encoding = timm_sape.create_encoding(
        name, dim=dim, num_heads=2, grid_size=grid_size, num_prefix_tokens=num_prefix_tokens, depth=3,
        ref_grid_size=ref_grid_size, dtype=dtype, **keywords)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in encoding.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.01 * values if path == 'table' else values)
    return encoding


def make_grid(grid_size, num_prefix_tokens=0, num_keep=None):
    """With objects for each of 3 images. With `num_keep`, patches are dropped, and the order is random."""
    generator = torch.Generator().manual_seed(2)
    num_patches, keep_indices = grid_size[0] * grid_size[1], None
    if num_keep is not None:
        keep_indices = torch.stack([torch.randperm(num_patches, generator=generator)[:num_keep] for _ in range(3)])
    objects = torch.randint(-2, 20, (3, num_patches), generator=generator)
    return Grid(*grid_size, num_prefix_tokens, keep_indices, objects)


def make_tokens(grid, dtype=torch.float64):
    num_patches = grid.num_patches if grid.keep_indices is None else grid.keep_indices.shape[1]
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(3, grid.num_prefix_tokens + num_patches, DIM, generator=generator, dtype=torch.float64)
    return tokens.to(dtype).requires_grad_()


def make_term(grid, dtype=torch.float64):
    return make_tokens(grid, dtype).flip(0).detach().requires_grad_()


def product(name, encoding, x, term, grid):
    """What the package makes of tokens (and of the terms of other encodings): tokens, or terms of layers."""
    if name == 'lape':
        return encoding.layer_embed(grid)
    if name == 'peg':
        return x + encoding.after_block(x, grid)
    if name == 'ope':
        factor, own = encoding.embed(x, grid, None)
        assert factor is None
        return x + own
    return encoding.mix(x, term)


def reference(name, encoding, x, term, grid):
    """The same from the equations."""
    p = {'num_prefix_tokens': grid.num_prefix_tokens}
    if name == 'lape':
        table = encoding.table
        if grid.size != encoding.grid_size:
            table = resampled(table, encoding.grid_size, grid.size, grid.num_prefix_tokens)
        return references.lape(table, *zip(*((norm.weight, norm.bias) for norm in encoding.norms)))
    if name == 'peg':
        weight, bias = encoding.conv.weight, encoding.conv.bias
        return references.peg(x, weight, bias, grid.size, keep_indices=grid.keep_indices, **p)
    if name == 'ope':
        ref = encoding.ref_grid_size if encoding.rescales else None
        return x + references.ope(grid.objects, DIM, grid.size, ref_grid_size=ref, **p)
    return references.pemix(x, term, encoding.weight_x, encoding.weight_pe)


def gradients(output, inputs):
    """Gradients of a weighted sum of all entries."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return torch.autograd.grad(output, inputs, weights.to(output))


def check(name, grid_size, num_prefix_tokens=0, num_keep=None, own_size=None, tolerance=1e-10, **keywords):
    """Value and every gradient in float64, of an encoding made for `own_size`."""
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = create(name, own_size or grid_size, num_prefix_tokens, **keywords)
    x, term = make_tokens(grid), make_term(grid)
    inputs = {'lape': {}, 'peg': {'x': x}, 'ope': {'x': x}, 'pemix': {'x': x, 'term': term}}[name]
    inputs = {**inputs, **dict(encoding.named_parameters())}
    actual, expected = (f(name, encoding, x, term, grid) for f in (product, reference))
    assert_near(actual, expected, tolerance)
    for what, a, b in zip(inputs, gradients(actual, list(inputs.values())), gradients(expected, list(inputs.values()))):
        assert_near(a, b, tolerance, f'gradient of {what}')


@pytest.mark.parametrize('num_prefix_tokens', [0, 1, 5])
@pytest.mark.parametrize('grid_size', GRIDS)
@pytest.mark.parametrize('name', NAMES)
def test_equations(name, grid_size, num_prefix_tokens):
    check(name, grid_size, num_prefix_tokens)


@pytest.mark.parametrize('kernel_size', [3, 5])
@pytest.mark.parametrize('grid_size, num_prefix_tokens, num_keep', [
    ((3, 5), 1, 8), ((7, 1), 0, 3), ((1, 7), 5, 7), ((4, 4), 1, 1)])
def test_peg_where_patches_are_dropped(grid_size, num_prefix_tokens, num_keep, kernel_size):
    check('peg', grid_size, num_prefix_tokens, num_keep, kernel_size=kernel_size)
    check('peg', grid_size, num_prefix_tokens, kernel_size=kernel_size)


@pytest.mark.parametrize('grid_size, own_size', [
    ((6, 10), (3, 5)), ((2, 3), (3, 5)), ((1, 1), (3, 5)), ((4, 3), (1, 7))])
@pytest.mark.parametrize('name, keywords', [
    ('peg', {}), ('ope', {'resolution': 'extrapolate'}), ('ope', {'resolution': 'rescale'}), ('lape', {})])
def test_equations_on_another_grid(name, keywords, grid_size, own_size):
    for num_prefix_tokens in (0, 2):
        tolerance = 1e-4 if name == 'lape' else 1e-10  # timm resamples in float32
        check(name, grid_size, num_prefix_tokens, own_size=own_size, tolerance=tolerance, **keywords)


@pytest.mark.parametrize('name, keywords', [('lape', {}), ('peg', {}), ('ope', {}), ('ope', {'resolution': 'rescale'})])
def test_three_roads_to_another_grid(name, keywords):
    """A dynamic size, `set_grid_size` and construction for the new grid follow one rule."""
    grid = make_grid((4, 7), 1)
    x = make_tokens(grid)
    trained = create(name, (3, 5), 1, **keywords)
    expected = product(name, trained, x, None, grid)
    moved = copy.deepcopy(trained)
    moved.set_grid_size((4, 7))
    assert torch.equal(product(name, moved, x, None, grid), expected)
    if name == 'lape':
        assert moved.table.shape == (1, 29, DIM) and torch.equal(moved.table[:, :1], trained.table[:, :1])
        return  # its table is resampled as it is loaded: a contract
    built = create(name, (4, 7), 1, ref_grid_size=(3, 5), **keywords)
    built.load_state_dict(trained.state_dict())
    assert torch.equal(product(name, built, x, None, grid), expected)


# --- objects ---------------------------------------------------------------------------------------------------------

def painted(colours, patch_size=(2, 3), channels=3):
    """Flat patches of some of 4^channels colours, as a model with mean and std of .5 gets them.

    Args:
        colours: Integers `[B, H, W]`.
        patch_size: Height and width of a patch.
        channels: C.
    """
    digits = torch.stack([colours // 4 ** c % 4 for c in range(channels)], dim=1)  # [B, C, H, W]
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
    expected = references.objects(images, grid_size, patch_size, *given)
    actual = found(images, grid_size, patch_size, mean=mean, std=std)
    assert_near(actual, expected, 0)
    return actual


SHAPES = [(3, 5), (1, 7), (7, 1), (4, 4), (1, 1), (9, 12), (2, 16), (17, 3)]


@pytest.mark.parametrize('channels', [1, 2, 3, 5])
@pytest.mark.parametrize('num_colours', [1, 2, 3, 64])
@pytest.mark.parametrize('grid_size', SHAPES)
def test_objects_of_random_pictures(grid_size, num_colours, channels):
    generator = torch.Generator().manual_seed(0)
    colours = torch.randint(num_colours, (3, *grid_size), generator=generator) * 7
    check_objects(painted(colours, channels=channels), grid_size)


@pytest.mark.parametrize('grid_size', [(3, 3), (2, 4), (1, 8)])
def test_objects_of_all_pictures_in_black_and_white(grid_size):
    size = grid_size[0] * grid_size[1]
    colours = torch.tensor(list(itertools.product((0, 3), repeat=size))).view(-1, *grid_size)
    check_objects(painted(colours, (1, 1), 1), grid_size, (1, 1))


def snake(height, width):
    """A way through every second row, from end to end."""
    picture = torch.zeros(height, width, dtype=torch.long)
    picture[::2] = 1
    picture[1::4, -1] = 1
    picture[3::4, 0] = 1
    return picture


def spiral(size):
    """A way to the centre, with a wall between its turns."""
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
    """However many steps it takes from end to end; and of a chessboard, whose fields touch at corners alone."""
    actual = check_objects(painted(picture[None], (1, 1), 1), tuple(picture.shape), (1, 1))
    assert actual.max() + 1 == num_objects
    if num_objects == 2:  # one way and one wall, wherever the walk ends
        assert torch.equal(actual.view(picture.shape) == 0, picture == 1)


def test_objects_by_hand():
    picture = torch.tensor([[5, 5, 5, 5, 5], [5, 9, 9, 5, 2], [5, 5, 2, 2, 2], [9, 5, 2, 5, 2]])
    expected = [[0, 0, 0, 0, 0], [0, 1, 1, 0, 2], [0, 0, 2, 2, 2], [3, 0, 2, 4, 2]]
    assert found(painted(picture[None]), (4, 5)).view(4, 5).tolist() == expected


def test_levels():
    """Quarters of the range, in which the ends and all beyond them take part."""
    colours = torch.tensor([-1.0, -0.01, 0.0, 0.24, 0.26, 0.49, 0.5, 0.74, 0.76, 0.99, 1.0, 7.0, float('nan')])
    for mean, std in ((0.5, 0.5), (0.0, 1), (0.485, 0.229)):
        encoding = timm_sape.create_encoding('ope', dim=8, num_heads=1, grid_size=(2, 2), mean=mean, std=std)
        images = ((colours.double() - mean) / std)[None, None, :, None]
        levels = encoding._levels(images + 1e-12, Grid(13, 1), (1, 1)).flatten().tolist()
        assert levels == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 0]


@pytest.mark.parametrize('mean, std', [
    ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), (0.4, [0.2, 0.5, 1.0]), ([0.1, 0.5, 0.9], 0.3), (0, 1)])
def test_objects_of_noisy_pictures(mean, std):
    """The mean of a patch counts, of the colours as they were before they were normalised."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(4, 3, 12, 15, generator=generator, dtype=torch.float64)
    images = (images - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    some = check_objects(images, (6, 5), mean=mean, std=std)
    assert not torch.equal(some, check_objects(images, (6, 5)))


@pytest.mark.parametrize('missing', [(0, 0), (1, 0), (0, 2), (1, 1)])
def test_objects_at_a_ragged_edge(missing):
    """A patch that reaches beyond the image is filled up with zeros, as the model pads it."""
    generator = torch.Generator().manual_seed(0)
    images = 2 * torch.rand(4, 3, 8, 15, generator=generator, dtype=torch.float64) - 1
    images = images[:, :, :8 - missing[0], :15 - missing[1]]
    actual = check_objects(images, (4, 5))
    padded = F.pad(images, (0, missing[1], 0, missing[0]))
    assert torch.equal(actual, found(padded, (4, 5)))


def test_objects_where_the_rest_is_left_out():
    """As a model does that is grafted onto one of timm's whose patches do not divide the image."""
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
    """The fewest steps that double a way of one until it visits all patches; enough when their number is unknown."""
    for num_patches in (1, 2, 3, 4, 5, 195, 196, 197, 256, 257, 4096, 65536):
        n = ope._num_doublings(num_patches)
        assert 2 ** n >= num_patches and (n == 0 or 2 ** (n - 1) < num_patches)


class FindObjects(nn.Module):
    """Images to objects, for patches of 2 x 3."""

    def __init__(self):
        super().__init__()
        self.encoding = timm_sape.create_encoding('ope', dim=8, num_heads=1, grid_size=(2, 2), mean=[0.5, 0.5, 0.5])

    def forward(self, images):
        return self.encoding.find_objects(images, Grid(-(-images.shape[2] // 2), -(-images.shape[3] // 3)), (2, 3))


def compiled():
    return torch.compile(FindObjects(), fullgraph=True, backend='eager', dynamic=True)


def exported(strict):
    """For whole patches: torch cannot yet export an image that is padded to a multiple, not even timm's own model."""
    shapes = {'images': {0: Dim('batch', max=64), 2: 2 * Dim('height', max=64), 3: 3 * Dim('width', max=64)}}
    images = torch.randn(3, 3, 8, 12)
    return torch.export.export(FindObjects(), (images,), dynamic_shapes=shapes, strict=strict).module()


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


# --- timm ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('grid_size', GRIDS)
def test_peg_is_that_of_twins(grid_size):
    grid = make_grid(grid_size)
    x, encoding = make_tokens(grid), create('peg', grid_size)
    twins = PosConv(DIM, DIM, dtype=torch.float64)
    twins.load_state_dict({f'proj.0.{name}': value for name, value in encoding.conv.state_dict().items()})
    assert_near(product('peg', encoding, x, None, grid), twins(x, grid_size), 1e-12)


def test_peg_of_twins_knows_no_prefix_tokens():
    """With timm's in the place of ours, they are patches: 5 and 3 x 5 of them pass for 4 x 5, in the wrong places."""
    twins = PosConv(DIM, DIM, dtype=torch.float64)
    grid = make_grid((3, 5), 5)
    with pytest.raises(RuntimeError, match='invalid for input of size'):
        twins(make_tokens(grid), grid.size)
    encoding, x = create('peg', (3, 5), 5), make_tokens(grid)
    twins.load_state_dict({f'proj.0.{name}': value for name, value in encoding.conv.state_dict().items()})
    with pytest.raises(AssertionError, match='off by'):
        assert_near(twins(x, (4, 5)), reference('peg', encoding, x, None, grid), 1e-2)


@pytest.mark.parametrize('grid_size', GRIDS)
@pytest.mark.parametrize('dim', [8, 16, 64])
def test_half_of_ope_is_that_of_timm_with_x_first(grid_size, dim):
    encoding = create('ope', grid_size, dim=dim, dtype=torch.float32)
    _, term = encoding.embed(torch.zeros(1), make_grid(grid_size), None)
    y, x = build_sincos2d_pos_embed(grid_size, dim // 2, interleave_sin_cos=True).chunk(2, dim=-1)
    assert_near(term[..., dim // 2:], torch.cat([x, y], dim=-1).expand(3, -1, -1), 1e-6)


# --- the reference comparison must be able to fail -------------------------------------------------------------------

def timm_sincos2d(self, grid, device, dtype):
    return build_sincos2d_pos_embed(grid.size, self.dim // 2, interleave_sin_cos=True, dtype=dtype)


def slower_waves(position, num_channels):
    return waves(position * 0.9, num_channels)


def alternating_waves(position, num_channels):
    return waves(position, num_channels).unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)


def object_last(self, x, grid, pos_embed):
    return None, ope_embed(self, x, grid, pos_embed)[1].roll(DIM // 2, -1)


def unchained(self, grid):
    table = self.resized('table', grid)
    return torch.cat([norm(table) for norm in self.norms])


def norms_reversed(self, grid):
    twin = copy.copy(self)
    twin._modules = {'norms': self.norms[::-1]}
    return layer_embed(twin, grid)


def convolved(self, x, grid, patches=lambda x: x, size=lambda size: size, weight=lambda weight: weight, **kwargs):
    p = grid.num_prefix_tokens
    maps = patches(x[:, p:]).transpose(1, 2).unflatten(2, size(grid.size))
    kwargs = {'padding': 1, **kwargs}
    maps = F.conv2d(maps, weight(self.conv.weight), self.conv.bias, groups=DIM, **kwargs)
    return grid.pad_tokens(maps.flatten(2).transpose(1, 2))


def circular(self, x, grid):
    maps = x[:, grid.num_prefix_tokens:].transpose(1, 2).unflatten(2, grid.size)
    maps = F.conv2d(F.pad(maps, (1, 1, 1, 1), mode='circular'), self.conv.weight, self.conv.bias, groups=DIM)
    return grid.pad_tokens(maps.flatten(2).transpose(1, 2))


def in_sequence(self, tokens):
    """Puts kept patches in the first places, whatever their own are."""
    return F.pad(tokens, (0, 0, 0, self.num_patches - tokens.shape[2]))


waves, layer_norm, doublings, padded = ope._waves, F.layer_norm, ope._num_doublings, F.pad
Lape, Peg = lape.LayerAdaptivePositionEncoding, peg.ConditionalPositionEncoding
Ope, Pemix = ope.ObjectPositionEncoding, pemix.PositionMixer
layer_embed, ope_embed, ope_levels = Lape.layer_embed, Ope.embed, Ope._levels
RESIZED = functools.partial(check, 'lape', (6, 10), 2, own_size=(3, 5), tolerance=1e-4)
TWO_COLUMNS = torch.tensor([[[1, 0, 1]] * 4 + [[1, 1, 1]]])  # one object, from end to end in 10 of 15 patches
NOISY = functools.partial(
    check_objects, 2 * torch.rand(4, 3, 8, 15, generator=torch.Generator().manual_seed(0)) - 1, (4, 5))
RAGGED = functools.partial(
    check_objects, 2 * torch.rand(4, 3, 7, 13, generator=torch.Generator().manual_seed(0)) - 1, (4, 5))

MUTANTS = {  # what is checked, owner, attribute, replacement
    'lape, another eps': (
        functools.partial(check, 'lape', (3, 5)), F, 'layer_norm', lambda *args: layer_norm(*args[:-1], 1e-5)),
    'lape, each norm on the table': (functools.partial(check, 'lape', (3, 5)), Lape, 'layer_embed', unchained),
    'lape, norms in another order': (functools.partial(check, 'lape', (3, 5)), Lape, 'layer_embed', norms_reversed),
    'lape, the table itself first': (
        functools.partial(check, 'lape', (3, 5)), Lape, 'layer_embed',
        lambda self, grid: torch.cat([self.resized('table', grid), layer_embed(self, grid)[:-1]])),
    'lape, not resampled but cut': (
        functools.partial(check, 'lape', (2, 5), 2, own_size=(3, 5), tolerance=1e-4), Lape, 'resample',
        lambda self, name, table, old, new: table[:, :2 + new[0] * new[1]]),
    'lape, resampled without antialias': (
        functools.partial(check, 'lape', (2, 3), 2, own_size=(6, 10), tolerance=1e-4), lape, 'resample_abs_pos_embed',
        functools.partial(lape.resample_abs_pos_embed, antialias=False)),
    'lape, linear': (
        RESIZED, lape, 'resample_abs_pos_embed',
        functools.partial(lape.resample_abs_pos_embed, interpolation='bilinear')),
    'peg, circular': (functools.partial(check, 'peg', (3, 5), 1), Peg, 'after_block', circular),
    'peg, no padding to speak of': (
        functools.partial(check, 'peg', (3, 5), 1), Peg, 'after_block',
        functools.partialmethod(convolved, padding=0, patches=lambda x: x, weight=lambda w: w[:, :, 1:2, 1:2])),
    'peg, kernel turned around': (
        functools.partial(check, 'peg', (3, 5), 1), Peg, 'after_block',
        functools.partialmethod(convolved, weight=lambda w: w.flip(2, 3))),
    'peg, kernel transposed': (
        functools.partial(check, 'peg', (4, 4), 1), Peg, 'after_block',
        functools.partialmethod(convolved, weight=lambda w: w.mT)),
    'peg, width before height': (
        functools.partial(check, 'peg', (3, 5), 1), Peg, 'after_block',
        functools.partialmethod(convolved, size=lambda size: size[::-1])),
    'peg, tokens twice': (
        functools.partial(check, 'peg', (3, 5)), Peg, 'after_block',
        lambda self, x, grid: x + after_block(self, x, grid)),
    'peg, kept patches in sequence': (functools.partial(check, 'peg', (3, 5), 1, 8), Grid, 'scatter', in_sequence),
    'peg, prefix behind': (
        functools.partial(check, 'peg', (3, 5), 1), Grid, 'pad_tokens',
        lambda self, table: F.pad(table, (0, 0, 0, self.num_prefix_tokens))),
    "ope, timm's order of axes": (functools.partial(check, 'ope', (3, 5)), Ope, 'compute', timm_sincos2d),
    'ope, sines and cosines in turn': (functools.partial(check, 'ope', (3, 5)), ope, '_waves', alternating_waves),
    'ope, slower waves': (functools.partial(check, 'ope', (3, 5)), ope, '_waves', slower_waves),
    'ope, object last': (functools.partial(check, 'ope', (3, 5)), Ope, 'embed', object_last),
    'ope, one image for all': (
        functools.partial(check, 'ope', (3, 5)), Ope, 'embed',
        lambda self, x, grid, pos_embed: (None, ope_embed(self, x, grid, pos_embed)[1][:1])),
    'ope, trained grid ignored': (
        functools.partial(check, 'ope', (4, 7), own_size=(3, 5), resolution='rescale'),
        timm_sape.encodings.CoordinateEncoding, 'rescaling', lambda *args: None),
    'ope, one doubling too few': (
        functools.partial(check_objects, painted(TWO_COLUMNS), (5, 3)), ope, '_num_doublings',
        lambda num_patches: doublings(num_patches) - 1),
    'ope, objects touch at corners': (NOISY, ope, '_steps', lambda place: (place[:, None] - place).abs().amax(-1)),
    'ope, first channel alone': (NOISY, Ope, '_levels', lambda *args: ope_levels(*args)[..., :1]),
    'ope, columns first': (
        NOISY, Ope, 'find_objects', lambda self, images, grid, patch_size: find_objects(
            self, images.mT, Grid(grid.width, grid.height), patch_size[::-1]).unflatten(
                1, (grid.width, grid.height)).mT.flatten(1)),
    'ope, rounded': (
        NOISY, Ope, '_levels', lambda self, images, *args: ope_levels(self, images + 0.25, *args)),
    'ope, mean of what there is of a patch': (
        RAGGED, Ope, '_levels', lambda self, images, *args: ope_levels(
            self, F.pad(images, (0, 2, 0, 1), mode='replicate'), *args)),
    'ope, padded above': (
        RAGGED, F, 'pad', lambda images, widths: padded(images, (*widths[:2], *widths[:1:-1]))),
    'pemix, weights swapped': (
        functools.partial(check, 'pemix', (3, 5)), Pemix, 'mix',
        lambda self, x, term: x * self.weight_pe + term * self.weight_x),
    'pemix, position alone weighed': (
        functools.partial(check, 'pemix', (3, 5)), Pemix, 'mix',
        lambda self, x, term: x + 0 * self.weight_x + term * self.weight_pe),
}
after_block, find_objects = Peg.after_block, Ope.find_objects


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    function, *patch = MUTANTS[mutant]
    function()
    monkeypatch.setattr(*patch)
    with pytest.raises(AssertionError, match='off by|instead of'):
        function()


# --- properties ------------------------------------------------------------------------------------------------------

def built(pos_enc, **kwargs):
    torch.manual_seed(0)
    return timm.create_model('test_vit_nope', pos_enc=pos_enc, **{'img_size': 32, 'patch_size': 8, **kwargs})


def initialised(pos_enc, **kwargs):
    """A model as built, and one after `init_weights` has drawn all anew."""
    model = built(pos_enc, **kwargs)
    yield model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float('nan'))
    model.init_weights()
    yield model


def pictures(batch=2, size=(32, 32), dtype=torch.float32):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def seen_by(modules, model, x, **kwargs):
    """What goes into each of them in a forward pass."""
    seen = []
    handles = [m.register_forward_pre_hook(lambda module, args: seen.append(args[0])) for m in modules]
    model(x, **kwargs)
    for handle in handles:
        handle.remove()
    return seen


def test_lape_is_a_chain_of_norms():
    """p_l is LN_l of p_(l-1), with mean 0 and variance 1 at first: the eps weighs in the first alone."""
    for model in initialised('lape', depth=4, reg_tokens=3):
        encoding = model.encodings['lape']
        terms, previous = encoding.layer_embed(Grid(4, 4, 4)), encoding.table[0]
        assert terms.shape == (4, 20, 64) and len(encoding.norms) == 4
        for term, norm in zip(terms, encoding.norms):
            assert_near(term, norm(previous), 1e-6)
            assert term.mean(-1).abs().max() < 1e-6
            variance = previous.var(-1, unbiased=False)
            assert_near(term.var(-1, unbiased=False), variance / (variance + 1e-6), 1e-5)
            previous = term
        assert_near(terms.var(-1, unbiased=False), torch.ones(4, 20), 0.01)


def test_lape_forgets_the_scale_of_its_table():
    encoding = create('lape', (3, 5), 1)
    with torch.no_grad():
        encoding.table.mul_(1000)
        expected = encoding.layer_embed(Grid(3, 5, 1))
        encoding.table.mul_(7).add_(3)
    assert_near(encoding.layer_embed(Grid(3, 5, 1)), expected, 1e-7)


@pytest.mark.parametrize('patch_drop_rate', [0.0, 0.5])
def test_lape_is_for_attention_alone(patch_drop_rate):
    """Attention sees LN1(x) + p_l, prefix rows included; stem, residual path and MLP see no position."""
    model = built('lape', reg_tokens=2, patch_drop_rate=patch_drop_rate).double().train()
    plain = built('nope', reg_tokens=2).double()
    x, encoding = pictures(dtype=torch.float64), model.encodings['lape']
    terms = encoding.layer_embed(Grid(4, 4, 3))
    torch.manual_seed(1)
    stem, position = model._embed(x, None)
    rows = torch.arange(3).expand(2, -1)
    kept = torch.arange(16).expand(2, -1) if patch_drop_rate == 0 else position.grid.keep_indices
    rows = torch.cat([rows, 3 + kept], dim=1)  # [B, P+K]
    expected = plain._embed(x, None)[0].gather(1, rows[..., None].expand(-1, -1, 64))
    assert_near(stem, expected, 1e-12)
    modules = [m for block in model.blocks for m in (block, block.attn.qkv, block.attn.proj, block.mlp)]
    torch.manual_seed(1)
    seen = seen_by(modules, model, x)
    for i, block in enumerate(model.blocks):
        tokens, qkv, proj, mlp = seen[4 * i:4 * i + 4]
        assert_near(qkv, block.norm1(tokens) + terms[i][rows], 1e-10)
        assert_near(mlp, block.norm2(tokens + block.attn.proj(proj)), 1e-10)


def test_lape_loses_norms_with_layers():
    """A model that is cut down keeps the first ones, and what they add."""
    model = built('lape', depth=4)
    terms = model.encodings['lape'].layer_embed(Grid(4, 4, 1))
    model.prune_intermediate_layers([1])
    norms = [name for name in model.state_dict() if 'norms' in name and name.endswith('weight')]
    assert norms == ['encodings.lape.norms.0.weight', 'encodings.lape.norms.1.weight']
    assert torch.equal(model.encodings['lape'].layer_embed(Grid(4, 4, 1)), terms[:2])


def peg_term(picture, encoding):
    """What is added to patches `[D, H, W]` on a grid, likewise."""
    grid = Grid(*picture.shape[1:])
    return encoding.after_block(picture.flatten(1).T[None], grid)[0].T.unflatten(1, grid.size)


def test_peg_moves_with_the_picture():
    """Away from the border; at the border it tells where that is, as of a picture without any content."""
    encoding = create('peg', (6, 7))
    picture = torch.zeros(DIM, 6, 7, dtype=torch.float64)
    picture[:, 1:3, 2:4] = torch.randn(DIM, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    term, moved = peg_term(picture, encoding), peg_term(picture.roll((2, 2), (1, 2)), encoding)
    assert_near(moved[:, 2:, 2:], term[:, :-2, :-2], 1e-12)
    at_border = peg_term(picture.roll((-2, 0), (1, 2)), encoding)
    assert not torch.allclose(at_border[:, :-2], term[:, 2:])
    blank = peg_term(torch.ones(DIM, 6, 7, dtype=torch.float64), encoding)
    inner = encoding.conv.weight.sum((1, 2, 3)) + encoding.conv.bias
    assert_near(blank[:, 1:-1, 1:-1], inner[:, None, None].expand(-1, 4, 5), 1e-12)
    assert not torch.allclose(blank[:, 0], blank[:, 1]) and not torch.allclose(blank[:, :, 0], blank[:, :, 1])
    assert len(blank.detach().flatten(1).T.unique(dim=0)) == 9  # corners, edges, and all else


@pytest.mark.parametrize('axis', [1, 2])
def test_peg_of_a_mirrored_picture(axis):
    """Is mirrored for a kernel that is symmetric, and is not for any other."""
    encoding = create('peg', (4, 5))
    picture = torch.randn(DIM, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert not torch.allclose(peg_term(picture.flip(axis), encoding), peg_term(picture, encoding).flip(axis))
    with torch.no_grad():
        encoding.conv.weight.add_(encoding.conv.weight.flip(axis + 1))
    assert_near(peg_term(picture.flip(axis), encoding), peg_term(picture, encoding).flip(axis), 1e-12)


def test_peg_takes_a_dropped_patch_for_zeros():
    grid = make_grid((3, 5), 2, 8)
    x, encoding = make_tokens(grid), create('peg', (3, 5), 2)
    whole = torch.zeros(3, 17, DIM, dtype=torch.float64)
    index = torch.cat([torch.arange(2).expand(3, -1), 2 + grid.keep_indices], dim=1)[..., None].expand(-1, -1, DIM)
    whole = whole.scatter(1, index, x)
    expected = encoding.after_block(whole, Grid(3, 5, 2)).gather(1, index)
    assert_near(encoding.after_block(x, grid), expected, 1e-12)
    assert (encoding.after_block(x, grid)[:, :2] == 0).all()


def test_peg_follows_the_first_block():
    model, plain = built('peg', depth=3, reg_tokens=4).double(), built('nope', depth=3, reg_tokens=4).double()
    assert list(model.position_encodings()) == ['blocks.0.attn.encodings.peg']
    x, encoding = pictures(dtype=torch.float64), model.blocks[0].attn.encodings['peg']
    (first, second), (expected, _) = (seen_by(m.blocks[:2], m, x) for m in (model, plain))
    assert_near(first, expected, 1e-12)
    after, = seen_by(plain.blocks[1:2], plain, x)
    assert_near(second, reference('peg', encoding, after, None, Grid(4, 4, 5)), 1e-10)
    assert (second - after)[:, 5:].abs().max() > 0.01


def test_waves_of_ope():
    """All rows have one length; patches of one object share one half; products tell the offset of everything."""
    encoding, grid = create('ope', (4, 5), dim=32), make_grid((4, 5))
    term = encoding.embed(torch.zeros(1), grid, None)[1]
    assert_near(term.square().sum(-1), torch.full((3, 20), 16.0), 1e-12)
    objects, places = term.chunk(2, dim=-1)
    for image, rows in zip(grid.objects, objects):
        assert torch.equal(image[:, None] == image, torch.cdist(rows, rows) < 1e-9)
        products = rows @ rows.T
        for offset in image.unique() - image.min():
            some = products[image[:, None] - image == offset]
            assert len(some) == 0 or some.std(correction=0) < 1e-9
    assert torch.equal(places[0], places[1])
    products = torch.einsum('yxc,vuc->yxvu', *2 * [places[0].unflatten(0, (4, 5))])
    assert_near(products[1:, 1:, 1:, 1:], products[:-1, :-1, :-1, :-1], 1e-12)


@pytest.mark.parametrize('pos_enc, kwargs', [
    ('ope', {}), ('auto_ope', {}), ('ope', {'dynamic_img_size': True, 'dynamic_img_pad': True})])
def test_object_index(pos_enc, kwargs):
    """Found in the image if the caller does not say; otherwise what he says, of any integer dtype."""
    model = built(pos_enc, reg_tokens=4, num_classes=5, **kwargs)
    x = painted(torch.randint(4, (2, 4, 4), generator=torch.Generator().manual_seed(0)) * 7, (8, 8))
    x = (x + 0.05 * pictures())[:, :, :29 if kwargs else 32]
    objects = references.objects(x, (4, 4), (8, 8), [0.5] * 3, [0.5] * 3)
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
    model, x = built('ope'), pictures()
    for shape in ((2, 17), (2, 15), (1, 16), (2, 4, 4), (16,)):
        with pytest.raises(ValueError, match=r"'ope' needs object_index to be .* of shape \[B, H\*W\] = \[2, 16\]"):
            model(x, object_index=torch.zeros(shape, dtype=torch.long))
    for wrong in (torch.zeros(2, 16), torch.zeros(2, 16, dtype=torch.complex64), [[0] * 16] * 2):
        with pytest.raises(ValueError, match="'ope' needs object_index to be a tensor of integers"):
            model(x, object_index=wrong)
    with pytest.raises(ValueError, match="object_index= is for encodings that use it, such as 'ope'"):
        built('peg')(x, object_index=torch.zeros(2, 16, dtype=torch.long))
    with pytest.raises(AssertionError, match="'ope' needs grid.objects"):
        model.encodings['ope'].embed(torch.zeros(2, 17, 64), Grid(4, 4, 1), None)


def test_wrong_number_of_channels():
    for in_chans in (1, 4):
        for keywords in ({'mean': [0.5] * 3}, {'std': [0.5] * 3}, {'mean': 0.3}):
            model = built('ope', in_chans=in_chans, pos_enc_kwargs={'ope': keywords})
            x = torch.randn(2, in_chans, 32, 32)
            if keywords == {'mean': 0.3}:
                assert model(x).isfinite().all()
                continue
            with pytest.raises(ValueError, match=f"'ope' has a (mean|std) of 3 channels, but the image has {in_chans}"):
                model(x)


@pytest.mark.parametrize('pos_enc', ['sincos2d', 'ape+sincos2d', 'cape', 'cape+fourier', 'ope', 'ape'])
def test_pemix_starts_as_an_addition(pos_enc):
    """Then it weighs the sum of all terms, and the tokens after all factors; in prefix rows as well."""
    model, plain = built(f'{pos_enc}+pemix', reg_tokens=4).double(), built(pos_enc, reg_tokens=4).double()
    plain.load_state_dict(model.state_dict(), strict=False)
    x = pictures(dtype=torch.float64)
    assert_near(model.eval()(x), plain.eval()(x), 1e-12)
    encoding, (expected, _) = model.encodings['pemix'], plain._embed(x, None)
    scaled, _ = built('nope', reg_tokens=4).double()._embed(x, None)
    with torch.no_grad():
        if 'cape' in pos_enc:
            scaled[:, 5:] *= 8  # the root of 64
        encoding.weight_x.normal_()
        encoding.weight_pe.normal_()
    mixed = references.pemix(scaled, expected - scaled, encoding.weight_x, encoding.weight_pe)
    assert_near(model._embed(x, None)[0], mixed, 1e-10)


# --- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', NAMES)
def test_float32(name):
    """A large grid in single against double precision."""
    grid = make_grid((24, 32), 1)
    encoding = create(name, (24, 32), 1)
    single = copy.deepcopy(encoding).float()
    x, term = make_tokens(grid), make_term(grid)
    actual = product(name, single, x.float(), term.float(), grid)
    assert actual.dtype == torch.float32
    assert_near(actual, product(name, encoding, x, term, grid), 1e-5)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name', NAMES)
def test_half_models(name, dtype):
    """Terms that no content enters are computed in float32 from the parameters of a half model; tokens keep theirs."""
    encoding = create(name, (3, 5), 1, dtype=torch.float32).to(dtype)
    for grid in (make_grid((3, 5), 1), make_grid((6, 4), 1)):
        x, term = make_tokens(grid, dtype), make_term(grid, dtype)
        if name == 'ope':
            actual = encoding.embed(x, grid, None)[1]
            assert_near(actual, references.ope(grid.objects, DIM, grid.size, num_prefix_tokens=1), 1e-5)
        else:
            actual = product(name, encoding, x, term, grid)
            expected = product(name, copy.deepcopy(encoding).double(), x.double(), term.double(), grid)
            of_own_table = name == 'lape' and grid.size == (3, 5)  # another one is rounded when it is resampled
            assert_near(actual, expected, 1e-5 if of_own_table else 0.02)
        assert actual.dtype == (torch.float32 if name in ('lape', 'ope') else dtype)


@pytest.mark.parametrize('name', NAMES)
def test_autocast(name):
    """What content enters is as exact as autocast; the rest it does not reach."""
    grid = make_grid((3, 5), 1)
    encoding = create(name, (3, 5), 1, dtype=torch.float32)
    x, term = make_tokens(grid, torch.float32), make_term(grid, torch.float32)
    inputs = [*encoding.parameters(), *([x] if name == 'ope' else [])]
    expected = product(name, encoding, x, term, grid)
    with torch.autocast('cpu', torch.bfloat16):
        actual = product(name, encoding, x, term, grid)
    assert actual.dtype == torch.float32
    if name == 'peg':
        assert_near(actual, expected, 0.02)
    else:
        assert torch.equal(actual, expected)
    for a, b in zip(gradients(actual, inputs), gradients(expected, inputs)):
        assert_near(a, b, 0.02)


# --- keywords and initial values -------------------------------------------------------------------------------------

@pytest.mark.parametrize('name, dim, keywords, text', [
    *(('peg', 8, {'kernel_size': size}, f"'peg' needs kernel_size to be an odd number of at least 3, got {size!r}")
      for size in (0, 1, 2, 4, -3, 3.0, True, '3', None, float('nan'))),
    *(('ope', dim, {}, f"'ope' needs an embed dim that is a multiple of 8, got {dim}. Choose another embed_dim")
      for dim in (4, 12, 7)),
    ('ope', 8, {'resolution': 'resize'}, "resolution must be 'extrapolate' or 'rescale', got 'resize'"),
    *(('ope', 8, {'mean': mean}, "'ope' needs mean to be a finite number, or a list of them, one per channel, got")
      for mean in (float('nan'), float('inf'), True, '0.5', None, [], [0.5, None, 0.5], [[0.5]])),
    *(('ope', 8, {'std': std}, "'ope' needs std to be a positive number, or a list of them, one per channel, got")
      for std in (0, -0.5, float('nan'), float('inf'), True, None, [], [0.5, 0, 0.5], {'r': 1})),
    ('ope', 8, {'mean': [0.5] * 3, 'std': [0.5]}, "'ope' has a mean of 3 channels and a std of 1. Give as many"),
])
def test_wrong_values(name, dim, keywords, text):
    with pytest.raises(ValueError, match=text):
        timm_sape.create_encoding(name, dim=dim, num_heads=1, grid_size=(3, 5), **keywords)


@pytest.mark.parametrize('pos_enc, text', [
    ('pemix', "mixes tokens with positions but has none for the tokens. Add one, e.g. 'pemix\\+sincos2d'"),
    ('pemix+rope2d', 'has none for the tokens'),
    ('lape+pemix', 'has none for the tokens'),
    ('peg+pemix', 'has none for the tokens'),
    ('auto_pemix+ape', "'auto_pemix'.*no neutral form"),
    ('ape+lape', "'lape' is 'ape' carried from layer to layer"),
    ('auto_ape+auto_lape', "'lape' is 'ape' carried from layer to layer"),
])
def test_wrong_compositions(pos_enc, text):
    with pytest.raises(ValueError, match=text):
        built(pos_enc)


@pytest.mark.parametrize('saved', [{'img_size': 48, 'reg_tokens': 0}, {'img_size': (32, 48), 'reg_tokens': 3}])
def test_lape_of_other_prefix_tokens(saved):
    """On the road that resamples and on the one that does not."""
    state = built('lape', **saved).state_dict()
    model = built('lape', reg_tokens=4)
    rows = state['encodings.lape.table'].shape[1]
    with pytest.raises(ValueError, match=f"The table of 'lape' has {rows} rows, which is not 5 for the prefix tokens"):
        checkpoints.filter_state_dict(dict(state), model)
    with pytest.raises(ValueError, match='encodings.lape.table .* instead of .*Nothing is resized on this road'):
        model.load_state_dict(state)


def test_initial_lape():
    for model in initialised('lape', img_size=(128, 64), reg_tokens=4, depth=3):
        encoding = model.encodings['lape']
        assert encoding.table.shape == (1, 5 + 16 * 8, 64)
        assert encoding.table.std().item() == pytest.approx(0.02, rel=0.05)
        assert abs(encoding.table.mean().item()) < 0.001 and encoding.table.abs().max() < 2
        assert len(encoding.norms) == 3
        for norm in encoding.norms:
            assert norm.eps == 1e-6
            assert torch.equal(norm.weight, torch.ones(64)) and torch.equal(norm.bias, torch.zeros(64))


@pytest.mark.parametrize('kernel_size', [3, 5])
def test_initial_peg(kernel_size):
    for model in initialised('peg', pos_enc_kwargs={'peg': {'kernel_size': kernel_size}}):
        conv, limit = model.blocks[0].attn.encodings['peg'].conv, 1 / kernel_size
        assert conv.weight.shape == (64, 1, kernel_size, kernel_size) and conv.bias.shape == (64,)
        for parameter in (conv.weight, conv.bias):
            assert 0.8 * limit < parameter.abs().max() <= limit
            assert parameter.std().item() == pytest.approx(limit / 3 ** 0.5, rel=0.2)


def test_initial_pemix():
    for model in initialised('ape+pemix'):
        encoding = model.encodings['pemix']
        assert torch.equal(encoding.weight_x, torch.ones(64)) and torch.equal(encoding.weight_pe, torch.ones(64))


@pytest.mark.parametrize('name, acts_on', [
    ('lape', 'tokens in each layer'), ('peg', 'tokens after a block'), ('ope', 'tokens'), ('pemix', 'tokens')])
def test_parameters_added(name, acts_on):
    """As many as the documentation says, none of which decays."""
    model = built(f'{name}+sincos2d', img_size=(32, 48), reg_tokens=2, depth=3)
    (encoding,) = [e for path, e in model.position_encodings().items() if path.endswith(name)]
    num_parameters = sum(p.numel() for p in encoding.parameters())
    symbols = {'H': 4, 'W': 6, 'D': 64, 'P': 3, 'L': 3, 'k': 3, 'none': 0}
    assert num_parameters == eval(encoding.adds.replace('^', '**'), symbols)
    assert encoding.no_weight_decay() == set(dict(encoding.named_parameters()))
    assert encoding.acts_on() == (acts_on,) and not encoding.relative


# --- in a model ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('pos_enc', [
    'lape', 'peg', 'ope', 'ape+peg', 'ape+ope', 'ape+pemix', 'pemix+sincos2d', 'cape+ope+peg+pemix',
    'lape+rope2d+sape2_k', 'lape+ope+peg+pemix'])
def test_model(pos_enc):
    """Any number of prefix tokens, patches dropped, half precision, images of other sizes; gradients everywhere."""
    model = built(pos_enc, img_size=(24, 40), reg_tokens=4, patch_drop_rate=0.5, dynamic_img_size=True, num_classes=3)
    for grid_size in ((3, 5), (4, 6), (1, 7), (7, 1), (1, 1)):
        x = torch.randn(2, 3, 8 * grid_size[0], 8 * grid_size[1])
        for low in (False, True):
            model.to(torch.bfloat16 if low else torch.float32)
            for training in (False, True):
                model.train(training)
                model.zero_grad()
                out = model(x.to(model.cls_token.dtype))
                assert out.shape == (2, 3) and out.isfinite().all()
                out.float().square().sum().backward()
                for name, parameter in model.named_parameters():
                    assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize('name', ['lape', 'peg', 'ope'])
def test_gate(name):
    """At 0 the model is the one without the encoding; it opens, and then all parameters learn."""
    x = pictures()
    plain, model = built('nope'), built(f'auto_{name}', pos_enc_kwargs={f'auto_{name}': {'init': 0}})
    assert_near(model(x), plain(x), 1e-6)
    gates = [gate for path, gate in built(f'auto_{name}').named_parameters() if path.endswith('gate.weight')]
    assert [gate.item() for gate in gates] == [pytest.approx(0.5 / 100)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(x).square().sum().backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, path
    (gate,) = [gate for path, gate in model.named_parameters() if path.endswith('gate.weight')]
    assert gate.abs().item() == pytest.approx(1e-3, rel=1e-3)
