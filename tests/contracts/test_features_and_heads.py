"""timm's ways to features, and what follows them: pooling and heads."""
import itertools

import pytest
import torch
import torch.nn as nn

from common import GRIDS, PATCH
from contract_tools import ONE_GRID, Contracts, gradients, same

contracts = Contracts()


@contracts.add
def forward_features(make):
    model = make()
    x = make.images()
    features = model.forward_features(x)
    assert features.shape == (2, 5 + make.grid[0] * make.grid[1], 32)
    same(model.forward_head(features), model(x), 'head of the features', tol=1e-6)
    model.norm.weight.data.fill_(1)
    model.norm.bias.data.zero_()
    same(model.forward_features(x).mean(-1), torch.zeros(features.shape[:2]), 'mean of the normed features')
    same(model.forward_features(x[1:]), model.forward_features(x)[1:], 'one image of the batch')


@contracts.add(grids=ONE_GRID, takes_long=True)
def forward_intermediates(make):
    """timm's contract, argument by argument."""
    x = make.images()
    model = make(depth=3)
    height, width = make.grid
    outputs = []
    handles = [block.register_forward_hook(lambda m, args, out: outputs.append(out)) for block in model.blocks]
    features = model.forward_features(x)
    for handle in handles:
        handle.remove()

    final, maps = model.forward_intermediates(x)
    same(final, features, 'final features', tol=1e-6)
    assert len(maps) == 3
    for y, out in zip(maps, outputs):
        assert y.is_contiguous()
        same(y, out[:, 5:].transpose(1, 2).unflatten(2, make.grid), 'NCHW', tol=1e-6)
    flags = list(itertools.product((False, True), repeat=6))
    for indices, taken in ((2, (1, 2)), ([0], (0,)), ([-3, 1], (0, 1)), ((0, 2), (0, 2))):
        for norm, stop_early, nlc, prefix, as_dict, only in flags if taken == (0, 1) else flags[:1]:
            fmt = 'NLC' if nlc else 'NCHW'
            out = model.forward_intermediates(
                x, indices=indices, norm=norm, stop_early=stop_early, output_fmt=fmt, return_prefix_tokens=prefix,
                output_dict=as_dict, intermediates_only=only)
            expected = [model.norm(outputs[i]) if norm else outputs[i] for i in taken]
            prefixes = [y[:, :5] for y in expected]
            expected = [y[:, 5:] for y in expected]
            if fmt == 'NCHW':
                expected = [y.transpose(1, 2).reshape(2, 32, height, width) for y in expected]
            last = model.norm(outputs[max(taken) if stop_early else -1])
            if as_dict:
                keys = {'image_intermediates'}
                keys |= {'image_intermediates_prefix'} if prefix else set()
                keys |= set() if only else {'image_features'}
                assert out.keys() == keys
                actual_last, actual_prefixes = out.get('image_features'), out.get('image_intermediates_prefix')
                actual = out['image_intermediates']
            else:
                actual_last, actual = (None, out) if only else out
                actual_prefixes = [pair[1] for pair in actual] if prefix else None
                actual = [pair[0] for pair in actual] if prefix else actual
            assert isinstance(actual, list) and len(actual) == len(expected)
            for a, b in zip(actual, expected):
                same(a, b, f'intermediates {indices}', tol=1e-6)
            for a, b in zip(actual_prefixes or [], prefixes):
                same(a, b, f'prefix of {indices}', tol=1e-6)
            if not only:
                same(actual_last, last, f'final features of {indices}', tol=1e-6)
    normed, (pair,) = model.forward_intermediates(
        x, indices=1, norm=True, output_fmt='NLC', return_prefix_tokens=True)
    same(torch.cat(pair[::-1], dim=1), model.forward_features(x), 'last intermediate, normed', tol=1e-6)
    with pytest.raises(ValueError, match="must be 'NCHW' or 'NLC'"):
        model.forward_intermediates(x, output_fmt='NHWC')
    with pytest.raises(AssertionError):
        model.forward_intermediates(x, indices=[3])
    bare = make(class_token=False, reg_tokens=0, global_pool='avg')
    assert bare.forward_intermediates(x, return_prefix_tokens=True, intermediates_only=True)[0].ndim == 4
    assert bare.forward_intermediates(x, return_prefix_tokens=True, output_dict=True).keys() == {
        'image_features', 'image_intermediates'}


@contracts.add(grids=GRIDS[:2], takes_long=True)
def features_only(make):
    """`timm.create_model(..., features_only=True)` gives the maps of the whole model, and has no unused parameters."""
    x = make.images()
    maps = make(depth=3).forward_intermediates(x, intermediates_only=True)
    for indices in ((0, 1, 2), (0,), (1,), (-1,)):
        net = make(depth=3, features_only=True, out_indices=indices)
        assert net.feature_info.channels() == [32] * len(indices)
        assert net.feature_info.reduction() == [PATCH] * len(indices)
        out = net(x)
        assert len(out) == len(indices)
        for y, i in zip(out, indices):
            same(y, maps[i], f'features {indices}', tol=1e-6)
        gradients(net, sum(y.square().sum() for y in out))
    assert len(make(depth=4, features_only=True)(x)) == 3  # timm's default for its own ViT
    y = make.images(grid=(4, 6))
    net, model = (make(dynamic_img_size=True, **kwargs) for kwargs in (dict(features_only=True, out_indices=(1,)), {}))
    same(net(y)[0], model.forward_intermediates(y, intermediates_only=True)[1], 'features of another size', tol=1e-6)


@contracts.add(grids=GRIDS[:2], takes_long=True)
def prune_intermediate_layers(make):
    x = make.images()
    maps = make(depth=3).forward_intermediates(x, intermediates_only=True)
    for indices, taken in ((1, [2]), ([0, 1], [0, 1]), ([0], [0]), ([-2], [1])):
        model = make(depth=3)
        assert model.prune_intermediate_layers(indices, prune_norm=True) == taken
        assert len(model.blocks) == max(taken) + 1, f'{len(model.blocks)} blocks are left'
        assert isinstance(model.head, nn.Identity) and isinstance(model.norm, nn.Identity)
        for y, i in zip(model.forward_intermediates(x, indices=taken, intermediates_only=True), taken):
            same(y, maps[i], f'pruned to {indices}', tol=1e-6)
        assert model(x).shape == (2, 5 + make.grid[0] * make.grid[1], 32)
        gradients(model, model.forward_features(x).square().sum())
    model = make(depth=3)
    model.prune_intermediate_layers([2], prune_head=False)
    same(model(x), make(depth=3)(x), 'pruned to all', tol=1e-6)


@contracts.add(grids=ONE_GRID, takes_long=True)
def get_intermediate_layers(make):
    x = make.images()
    model = make(depth=3)
    for n, reshape, norm in itertools.product((1, 2, [0, 2]), (False, True), (False, True)):
        fmt = 'NCHW' if reshape else 'NLC'
        expected = model.forward_intermediates(x, n, norm=norm, output_fmt=fmt, output_dict=True,
                                               return_prefix_tokens=True)
        for a, b in zip(model.get_intermediate_layers(x, n, reshape=reshape, norm=norm),
                        expected['image_intermediates'], strict=True):
            same(a, b, 'intermediate layers', tol=1e-6)
        pairs = model.get_intermediate_layers(x, n, reshape=reshape, norm=norm, return_prefix_tokens=True)
        for (_, prefix), b in zip(pairs, expected['image_intermediates_prefix'], strict=True):
            same(prefix, b, 'prefix of intermediate layers', tol=1e-6)
    same(model.get_intermediate_layers(x, 1, norm=True)[0], model.forward_features(x)[:, 5:], 'last layer', tol=1e-6)


@contracts.add(grids=ONE_GRID)
def reset_classifier(make):
    x = make.images()
    model = make()
    features = model.forward_features(x)
    model.reset_classifier(7)
    assert model.num_classes == 7 and model(x).shape == (2, 7) and model.get_classifier() is model.head
    same(model.forward_features(x), features, 'features after a new head', tol=1e-6)
    model.reset_classifier(0, 'avg')
    same(model(x), features[:, 5:].mean(1), 'pooled features', tol=1e-6)
    model.reset_classifier(0, '')
    same(model(x), features, 'features without a pool', tol=1e-6)
    mapped = make(global_pool='map')
    features = mapped.forward_features(x)
    mapped.reset_classifier(5, 'avg')
    assert mapped.attn_pool is None and mapped(x).shape == (2, 5)
    same(mapped.forward_features(x), features, 'features without attention pool', tol=1e-6)


@contracts.add(grids=GRIDS[:2], takes_long=True)
def pooling(make):
    by_hand = {
        '': lambda model, y: y,
        'token': lambda model, y: y[:, 0],
        'avg': lambda model, y: y[:, 5:].mean(1),
        'max': lambda model, y: y[:, 5:].amax(1),
        'avgmax': lambda model, y: (y[:, 5:].mean(1) + y[:, 5:].amax(1)) / 2,
        'map': lambda model, y: model.attn_pool(y[:, 5:]),
        'prr': lambda model, y: model.attn_pool(y),
    }
    x = make.images()
    for mode, pool in by_hand.items():
        model = make(global_pool=mode)
        expected = model.head(model.fc_norm(pool(model, model.forward_features(x))))
        same(model(x), expected, f'pooling {mode!r}')
        same(model.forward_head(model.forward_features(x)), expected, f'pooling {mode!r}')
        gradients(model, model(x).square().sum())


test_contract = contracts.test()
