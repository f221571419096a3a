"""Images and grids: rectangles, other sizes than the model's own, padding, and differences of positions."""
import tempfile

import pytest
import timm
import torch
import torch.nn as nn
from timm.models import save_for_hf

from common import GRIDS, HEADS, PATCH
from contract_tools import Contracts, embedded, gradients, rotated, same
from timm_sape import Grid, ResizedEncoding

contracts = Contracts()


@contracts.add
def rectangular(make):
    """A grid is H x W, patches are in raster order, and what a patch contains changes its own token only."""
    height, width = make.grid
    model = make()
    x = make.images()
    features, maps = model.forward_intermediates(x)
    assert [list(y.shape) for y in maps] == [[2, 32, height, width]] * 2
    tokens = model.forward_intermediates(x, output_fmt='NLC', intermediates_only=True)
    for i, j in {(0, width - 1), (height - 1, 0), (height // 2, width // 2)}:
        same(maps[-1][:, :, i, j], tokens[-1][:, i * width + j], 'raster order')
        if any('images' in encoding.asks_for for encoding in model.encodings.values()):
            continue  # its position depends on the patches around it
        changed = x.clone()
        changed[:, :, i * PATCH:(i + 1) * PATCH, j * PATCH:(j + 1) * PATCH] += 1
        rows = (embedded(model, changed) - embedded(model, x)).abs().amax((0, 2)) > 1e-6
        assert rows.nonzero().flatten().tolist() == [5 + i * width + j], f'raster order: {rows}'
    gradients(model, model(x).square().sum())


@contracts.add
def relative(make):
    """An encoding that declares itself relative depends on differences of positions only."""
    model = make()
    for path, encoding in model.position_encodings().items():
        if not encoding.relative:
            continue
        p, grid = 5, Grid(*make.grid, 5)
        token = torch.randn(1, HEADS, 1, 32 // HEADS, generator=torch.Generator().manual_seed(0))
        q = k = token.expand(-1, -1, p + grid.num_patches, -1)
        logits = torch.zeros(1, HEADS, *2 * (p + grid.num_patches,))
        if encoding.overrides('turn'):
            q, k = encoding.turn(q, k, grid)
            logits = q @ k.transpose(-2, -1)
        if encoding.overrides('rotation'):
            table, half = encoding.rotation(grid), encoding.rotate_half
            logits = rotated(q, table, p, half) @ rotated(k, table, p, half).transpose(-2, -1)
        if encoding.overrides('position_bias'):
            logits = logits + encoding.position_bias(grid)
        if encoding.overrides('content_bias'):
            logits = logits + encoding.content_bias(q, k, grid)
        if encoding.overrides('channels'):
            tokens = token.flatten().expand(1, q.shape[2], 32)
            a, b = encoding.channels(q, k, tokens, grid, 1.0)
            logits = logits + a @ b.transpose(-2, -1)
        logits = logits.masked_fill(logits.isneginf(), -99)
        logits = logits[:, :, p:, p:].unflatten(-1, make.grid).unflatten(-3, make.grid)  # [1, h, H, W, H, W]
        if make.grid[0] > 1:
            same(logits[:, :, 1:, :, 1:], logits[:, :, :-1, :, :-1], f'{path}, moved along y')
        same(logits[:, :, :, 1:, :, 1:], logits[:, :, :, :-1, :, :-1], f'{path}, moved along x')


@contracts.add
def dynamic_img_size(make):
    """At its own size the model equals one of fixed size, which refuses the other sizes that this one takes."""
    model, fixed = make(dynamic_img_size=True), make()
    x = make.images()
    own = fixed(x)
    same(model(x), own, 'own size')
    for grid in ((4, 6), (2, 2), (make.grid[1], make.grid[0] + 1)):
        y = make.images(grid=grid)
        assert model(y).isfinite().all()
        assert model.forward_intermediates(y)[1][-1].shape == (2, 32, *grid)
        with pytest.raises(ValueError, match='the model is made for'):
            fixed(y)
        gradients(model, model(y).square().sum())
        same(model(x), own, 'own size after another one')
    with pytest.raises(ValueError, match='does not divide'):
        model(torch.zeros(1, 3, PATCH + 1, PATCH))


@contracts.add(takes_long=True)
def dynamic_img_pad(make):
    """An image that the patch size does not divide gets zeros at the bottom and on the right."""
    model = make(dynamic_img_size=True, dynamic_img_pad=True)
    x = make.images()[:, :, :-3, :-5]
    padded = nn.functional.pad(x, (0, 5, 0, 3))
    assert padded.shape == make.images().shape
    same(model(x), make(dynamic_img_size=True)(padded), 'padded image')
    same(model(padded), make()(padded), 'image without padding')
    assert model.forward_intermediates(x)[1][0].shape == (2, 32, *make.grid)


def resampled(model):
    """Whether it has tables that are resampled for another size, which cannot be undone."""
    resized = [encoding for encoding in model.position_encodings().values() if isinstance(encoding, ResizedEncoding)]
    return resized or model.pos_embed is not None


@contracts.add(takes_long=True)
def set_input_size(make):
    """The same logits as by `dynamic_img_size`. Back at the first size they are as before, but for resampled tables."""
    x = make.images()
    for grid in ((4, 6), (2, 2), (make.grid[1], make.grid[0] + 1)):
        y = make.images(grid=grid)
        model = make()
        own = model(x)
        model.set_input_size(img_size=make.img_size(grid))
        same(model(y), make(dynamic_img_size=True)(y), 'new size')
        gradients(model, model(y).square().sum())
        model.set_input_size(img_size=make.img_size())
        if not resampled(model):
            same(model(x), own, 'size set back', tol=1e-6)


@contracts.add(grids=GRIDS[:2])
def set_patch_size(make):
    """Patches of half the size: the same logits, whether the larger grid is set or met in a forward pass."""
    x = make.images()
    model, dynamic = make(), make(dynamic_img_size=True)
    model.set_input_size(patch_size=PATCH // 2)
    dynamic.set_input_size(img_size=[size // 2 for size in make.img_size()], patch_size=PATCH // 2)
    assert dynamic.patch_embed.grid_size == make.grid
    same(model(x), dynamic(x), 'new patch size')
    with pytest.raises(ValueError, match='does not divide'):
        model.set_input_size(patch_size=PATCH - 1)


OTHER_GRIDS = {(3, 5): [(4, 6), (2, 3)], (4, 4): [(2, 8), (6, 6)], (1, 7): [(5, 3)], (14, 14): []}


@contracts.add(grids=list(OTHER_GRIDS), takes_long=True)
def three_ways(make):
    """Weights give the same on another grid by all three ways to it: a forward pass, `set_input_size`, loading."""
    model = make(dynamic_img_size=True)
    with tempfile.TemporaryDirectory() as folder:
        save_for_hf(model, folder, safe_serialization=True)
        for grid in (*OTHER_GRIDS[make.grid], make.grid):
            y = make.images(grid=grid)
            expected = model(y)
            model_set = make()
            model_set.set_input_size(img_size=make.img_size(grid))
            same(model_set(y), expected, f'set_input_size to {grid}')
            size = {'img_size': make.img_size(grid)}
            loaded = timm.create_model(f'local-dir:{folder}', pretrained=True, dynamic_img_size=False, **size).eval()
            same(loaded(y), expected, f'loaded at {grid}')
            loaded_set = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
            loaded_set.set_input_size(**size)
            same(loaded_set(y), expected, f'loaded, then set to {grid}')
            for step in (model_set, loaded, loaded_set):  # each still knows the trained grid
                with tempfile.TemporaryDirectory() as again:
                    save_for_hf(step, again, safe_serialization=True)
                    copied = timm.create_model(f'local-dir:{again}', pretrained=True).eval()
                    same(copied(y), expected, f'saved again at {grid}')
                    if not resampled(step):
                        back = timm.create_model(
                            f'local-dir:{again}', pretrained=True, img_size=make.img_size(), dynamic_img_size=False)
                        same(back.eval()(make.images()), model(make.images()), f'loaded back from {grid}')


test_contract = contracts.test()
