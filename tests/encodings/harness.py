"""Shared by the tests of single encodings: encodings, grids and inputs that reveal mistakes, and comparisons."""
import itertools

import timm
import torch

import timm_sape
from timm_sape import Grid
from timm_sape.position import LayerEncodings, Position, SharedEncodings

torch.set_num_threads(1)  # these cases are too small for more

GRIDS = [(3, 5), (1, 7), (7, 1), (4, 4), (1, 1)]
KEPT = [((3, 5), 1, 8), ((7, 1), 0, 3), ((1, 7), 5, 7), ((4, 4), 1, 1)]  # grid, prefix tokens, patches that are kept
OTHER_GRIDS = [  # a grid, and the one that the encoding is made for
    ((6, 10), (3, 5)), ((4, 7), (3, 5)), ((2, 3), (3, 5)), ((5, 3), (3, 5)), ((1, 1), (3, 5)), ((4, 3), (1, 7))]


def create(
        name, grid_size=(3, 5), num_prefix_tokens=0, *, heads=2, head_dim=8, dim=None, ref_grid_size=None,
        dtype=torch.float64, random=True, **keywords):
    """An encoding in evaluation mode, whose parameters all matter: none is zero or small.

    Args:
        name: Its name, with `auto_` for a gate.
        grid_size: (H, W) of the grid that it is made for.
        random: False to keep the initial values.
        keywords: Keywords of the encoding, and of the host, such as `depth`.
    """
    encoding = timm_sape.create_encoding(
        name, dim=heads * head_dim if dim is None else dim, num_heads=heads, grid_size=grid_size,
        num_prefix_tokens=num_prefix_tokens, ref_grid_size=ref_grid_size, dtype=dtype, **keywords)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in encoding.parameters() if random else ():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return encoding.eval()


def make_grid(grid_size, num_prefix_tokens=0, num_keep=None, batch=3):
    """With `num_keep`, each image keeps other random patches in a random order."""
    keep_indices = None
    if num_keep is not None:
        generator = torch.Generator().manual_seed(2)
        keep_indices = torch.stack([
            torch.randperm(grid_size[0] * grid_size[1], generator=generator)[:num_keep] for _ in range(batch)])
    return Grid(*grid_size, num_prefix_tokens, keep_indices)


def make_qkv(grid, *, heads=2, head_dim=8, batch=1, dtype=torch.float64):
    """q, k and v, `[B, h, N, d]`, as leaves. If patches were dropped, B is that of the grid."""
    batch, num_patches = (batch, grid.num_patches) if grid.keep_indices is None else grid.keep_indices.shape
    shape = (3, batch, heads, grid.num_prefix_tokens + num_patches, head_dim)
    qkv = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in qkv]


def make_tokens(grid, *, dim=16, batch=2, dtype=torch.float64, seed=5):
    """Tokens, `[B, N, D]`, as a leaf."""
    batch, num_patches = (batch, grid.num_patches) if grid.keep_indices is None else grid.keep_indices.shape
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(batch, grid.num_prefix_tokens + num_patches, dim, generator=generator, dtype=torch.float64)
    return tokens.to(dtype).requires_grad_()


def make_flat_regions(grid, noise=0.01, *, heads=2, head_dim=8, batch=2, dtype=torch.float64):
    """q and k of an image of two flat regions with little texture, such as an object in front of a wall, as leaves.

    One region is larger than the other.
    """
    generator = torch.Generator().manual_seed(5)
    y, x = torch.meshgrid(torch.arange(grid.height), torch.arange(grid.width), indexing='ij')
    sign = torch.where((x + y >= grid.width // 2) & (x > 1), 1., -1.).flatten()[:, None].double()
    base = torch.randn(2, batch, heads, 1, head_dim, generator=generator, dtype=torch.float64)
    texture = torch.randn(2, batch, heads, grid.num_patches, head_dim, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in base * sign + noise * texture]


def where(grid):
    """What the references need to know about a grid."""
    return {'num_prefix_tokens': grid.num_prefix_tokens, 'keep_indices': grid.keep_indices}


def attend(encoding, q, k, v, grid, *, scale=None, x=None, **options):
    """Attention of a layer with only this encoding, `[B, h, N, d]`."""
    layer = LayerEncodings({encoding.name: encoding}, needs_position=True)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return layer(q, k, v, x if x is not None else q.transpose(1, 2).flatten(2), Position(grid), scale=scale, **options)


def embed(encoding, tokens, grid, **given):
    """Tokens of a model with only this encoding, `[B, N, D]`."""
    nothing = {'pos_embed': None, 'images': None, 'patch_size': None, 'object_index': None}
    return SharedEncodings({encoding.name: encoding}).embed(tokens, grid, {**nothing, **given})


def make_model(pos_enc, **kwargs):
    """A small model of 4 x 4 patches with its initial values, in training mode."""
    torch.manual_seed(0)
    return timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, **{'img_size': 32, 'patch_size': 8, **kwargs})


def initial_models(pos_enc, **kwargs):
    """A model as it is built, and one after `init_weights` has drawn everything anew."""
    model = make_model(pos_enc, **kwargs)
    yield model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float('nan'))
    model.init_weights()
    yield model


def make_images(batch=2, size=(32, 32), dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, 3, *size, generator=generator, dtype=torch.float64).to(dtype)


def check_first_tokens(pos_enc, expected, **kwargs):
    """The first block gets `expected(encoding, tokens, grid)`, and kept patches keep their own positions."""
    model = make_model(pos_enc, reg_tokens=4, **kwargs).double()
    plain = make_model('nope', reg_tokens=4).double()
    images, grid = make_images(dtype=torch.float64), Grid(4, 4, 5)
    (encoding,) = model.position_encodings().values()
    whole = expected(encoding, plain.embed(images)[0], grid)
    assert_near(model.embed(images)[0], whole)

    dropping = make_model(pos_enc, reg_tokens=4, patch_drop_rate=0.5, **kwargs).double().train()
    dropping.load_state_dict(model.state_dict())
    tokens, position = dropping.embed(images)
    assert tokens.shape == (2, 5 + 8, 64)
    kept = position.grid.keep_indices[:, :, None].expand(-1, -1, 64)
    assert_near(tokens, torch.cat([whole[:, :5], whole[:, 5:].gather(1, kept)], dim=1))


def inputs_of(modules, model, images):
    """The first arguments of these modules, in the order of their calls in a forward pass."""
    seen = []
    handles = [m.register_forward_pre_hook(lambda module, args: seen.append(args[0])) for m in modules]
    model(images)
    for handle in handles:
        handle.remove()
    return seen


def assert_near(actual, expected, tolerance=1e-10, what='value'):
    """Shapes are equal, and no entry is off by more than `tolerance` times the largest one. NaN always fails."""
    assert actual.shape == expected.shape, f'{what}: {list(actual.shape)} instead of {list(expected.shape)}'
    actual, expected = actual.detach().double(), expected.detach().double()
    same = actual == expected  # infinities
    error = (actual - expected).masked_fill(same, 0).abs().max().item()
    largest = expected.masked_fill(expected.isinf(), 0).abs().max().item()
    assert error <= tolerance * largest, f'{what}: off by {error:.2e} where the largest entry is {largest:.2e}'


def gradients(output, inputs):
    """Gradients of a weighted sum of all entries, 0 for inputs that it does not depend on."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = torch.autograd.grad(output, inputs, weights.to(output), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found)]


def compare(actual, expected, inputs, tolerance=1e-10):
    """Compare values, and the gradients of all inputs, which are given by name."""
    assert_near(actual, expected, tolerance)
    names, inputs = list(inputs), list(inputs.values())
    for what, a, b in zip(names, gradients(actual, inputs), gradients(expected, inputs)):
        assert_near(a, b, tolerance, f'gradient of {what}')


def catches(check, monkeypatch, *patch):
    """The check passes, but fails once `monkeypatch.setattr(*patch)` breaks the package."""
    check()
    monkeypatch.setattr(*patch)
    try:
        check()
    except AssertionError as e:
        assert 'off by' in str(e) or 'instead of' in str(e), e
    else:
        raise AssertionError(f'{patch[1]} is broken, and nothing noticed')


def assert_offsets_alone(logits, tolerance=1e-13):
    """Logits `[h, H, W, H, W]` between identical patches do not change when both patches move by the same offset."""
    for y, x in itertools.product(range(logits.shape[1]), range(logits.shape[2])):
        height, width = logits.shape[1] - y, logits.shape[2] - x
        assert_near(logits[:, y:, x:, y:, x:], logits[:, :height, :width, :height, :width], tolerance)


def check_rescaling(name, hook, **sizes):
    """Positions are rescaled to the trained grid, whatever grid the encoding is made for."""
    def table(grid_size, made_for, **keywords):
        return create(name, made_for, **sizes, **keywords)(torch.zeros(1), grid=Grid(*grid_size), hook=hook)

    rescale = {'resolution': 'rescale'}
    trained = {**rescale, 'ref_grid_size': (3, 1)}
    assert torch.equal(table((3, 1), (6, 2), **trained), table((3, 1), (3, 1)))
    assert torch.equal(table((6, 2), (6, 2), **trained), table((6, 2), (3, 1), **rescale))
    assert not torch.equal(table((6, 2), (6, 2), **trained), table((6, 2), (6, 2)))
