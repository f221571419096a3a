"""Dropped patches: whoever chooses them, those that are kept carry their own positions, and masks follow them."""
import pytest
import torch
from timm.layers import PatchDropoutWithIndices

from common import GRIDS, HEADS
from contract_tools import Contracts, differ, gradients, same

contracts = Contracts()


class Keep(PatchDropoutWithIndices):
    """Patch dropout that keeps the patches that it is told to."""

    def __init__(self, keep_indices, num_prefix_tokens=5):
        super().__init__(0.5, num_prefix_tokens=num_prefix_tokens)
        self.keep_indices = keep_indices

    def forward(self, x):
        p, index = self.num_prefix_tokens, self.keep_indices
        kept = x[:, p:].gather(1, index[:, :, None].expand(-1, -1, x.shape[-1]))
        return torch.cat([x[:, :p], kept], dim=1), index


def draw(make, keep, batch=2):
    """Raster indices of kept patches in random order, another draw for each image."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(batch, make.grid[0] * make.grid[1], generator=generator).argsort(1)[:, :keep]


@contracts.add
def patch_dropout(make):
    """Patches that are kept carry their own positions."""
    x = make.images()
    num_patches = make.grid[0] * make.grid[1]
    model = make(patch_drop_rate=0.5).train()
    features = model.forward_features(x)
    assert features.shape == (2, 5 + num_patches // 2, 32)
    gradients(model, model(x).square().sum())
    assert model.forward_intermediates(x, output_fmt='NLC')[1][0].shape == (2, num_patches // 2, 32)
    with pytest.raises(ValueError, match='no map to return'):
        model.forward_intermediates(x)
    same(model.eval()(x), make()(x), 'patch dropout in eval mode')

    # All are kept, in random order.
    model = make(patch_drop_rate=1e-20).train()  # 1 - 1e-20 is 1
    assert model.forward_features(x).shape[1] == 5 + num_patches
    differ(model.forward_intermediates(x, output_fmt='NLC')[1][0],
           make().forward_intermediates(x, output_fmt='NLC')[1][0], 'random order')
    same(model(x), make()(x), 'all patches in random order')

    # Some are kept. Their order does not matter, nor do those that are kept of other images in the batch.
    index = draw(make, num_patches // 2)
    model.patch_drop = Keep(index)
    features = model.forward_features(x)
    order = index.argsort(1)
    model.patch_drop = Keep(index.gather(1, order))
    in_order = features[:, 5:].gather(1, order[:, :, None].expand(-1, -1, 32))
    same(model.forward_features(x), torch.cat([features[:, :5], in_order], dim=1), 'kept patches in raster order')
    for i in range(2):
        model.patch_drop = Keep(index[i:i + 1])
        same(model.forward_features(x[i:i + 1]), features[i:i + 1], 'one image of the batch')

    # Dropping a patch is masking it, unless an encoding looks at the content of other patches.
    looks = [
        encoding.overrides(hook) for encoding in model.position_encodings().values()
        for hook in ('content_bias', 'channels')]
    looks += [encoding.overrides('embed') and encoding.per_layer for encoding in model.position_encodings().values()]
    if not any(looks):
        kept = torch.zeros(2, 5 + num_patches, dtype=torch.bool).scatter(1, 5 + index, True)
        kept[:, :5] = True
        masked = make().forward_features(x, attn_mask=kept[:, None, None])
        masked = torch.cat([masked[:, :5], masked[:, 5:].gather(1, index[:, :, None].expand(-1, -1, 32))], dim=1)
        same(features, masked, 'dropped patches')


@contracts.add(grids=GRIDS[:2])
def keep_indices(make):
    """The caller chooses patches: the same as patch dropout with this choice, however the model is called."""
    x = make.images()
    index = draw(make, make.grid[0] * make.grid[1] // 2)
    model, dropping = make(), make(patch_drop_rate=0.5)
    dropping.patch_drop = Keep(index)
    expected = dropping.forward_features(x)
    features = model.forward_features(x, keep_indices=index)
    same(features, expected, 'features of kept patches', tol=1e-6)
    same(model(x, keep_indices=index), model.forward_head(expected), 'logits of kept patches', tol=1e-6)
    final, maps = model.forward_intermediates(x, keep_indices=index, output_fmt='NLC')
    same(final, expected, 'intermediates of kept patches', tol=1e-6)
    assert maps[0].shape == (2, index.shape[1], 32)
    tokens, position = model.embed(x, index)
    for block in model.blocks:
        tokens = block(tokens, position=position)
    same(model.norm(tokens), expected, 'blocks called one by one', tol=1e-6)
    gradients(model, model(x, keep_indices=index).square().sum())
    same(make(patch_drop_rate=0.5).train()(x, keep_indices=index), model(x, keep_indices=index), 'in place of dropout')
    for wrong, says in (
            (index[:1], r'int64 \[B, K\] = \[2, K\]'), (index.float(), 'int64'), ([[0]], 'got list'),
            (index + make.grid[0] * make.grid[1], 'from 0 to'), (index - 99, 'from 0 to'),
            (index[:, :1].expand(-1, 2), 'same patch twice')):
        with pytest.raises(ValueError, match=says):
            model(x, keep_indices=wrong)


@contracts.add(grids=GRIDS[:1])
def no_patch_left(make):
    """Prefix tokens attend to each other if no patch is kept, and without them nothing is left, as in timm."""
    x, nothing = make.images(), torch.zeros(2, 0, dtype=torch.int64)
    for prefix in ({}, dict(class_token=False, reg_tokens=0)):
        model = make(num_classes=0, **prefix)
        features = model.forward_features(x, keep_indices=nothing)
        assert features.shape == (2, model.num_prefix_tokens, 32) and features.isfinite().all()
        gradients(model, features.square().sum())
        assert model(x, keep_indices=nothing).isnan().all(), 'the mean of no patch'


@contracts.add(grids=GRIDS[:2], takes_long=True)
def patch_dropout_mask(make):
    """A mask is for the whole grid; entries of dropped patches are left out."""
    x = make.images()
    num_patches = make.grid[0] * make.grid[1]
    num_tokens = 5 + num_patches
    model, plain = make(patch_drop_rate=1e-20).train(), make()
    model.patch_drop = Keep(draw(make, num_patches))
    generator = torch.Generator().manual_seed(0)
    for shape in (
            (num_tokens, num_tokens), (2, 1, num_tokens, num_tokens), (1, HEADS, num_tokens, num_tokens),
            (2, 1, 1, num_tokens), (1, num_tokens)):
        mask = torch.rand(shape, generator=generator) < 0.7
        mask[..., 0] = True  # no row is empty
        same(model(x, attn_mask=mask), plain(x, attn_mask=mask), f'mask {list(shape)} under patch dropout')
        additive = torch.randn(shape, generator=generator)
        same(model(x, attn_mask=additive), plain(x, attn_mask=additive), f'mask {list(shape)} under patch dropout')


test_contract = contracts.test()
