"""The promises of a timm ViT, kept by every encoding.

A contract is a function of a `Maker`, which makes models of one encoding, and fails with an AssertionError, or with
whatever the model raises. All of them run for every encoding of the registry, for compositions, and on odd grids, so
that a new encoding is held to them without a line written here. Each has negative controls in CONTROLS: encodings or
models, broken on purpose, that it must reject for the stated reason.
"""
import copy
import itertools
import json
import pickle
import random
import tempfile
import threading
import time
import weakref
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import torch.nn as nn
from timm.layers import PatchDropoutWithIndices, set_fused_attn, set_reentrant_ckpt
from timm.models import group_parameters, save_for_hf
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models._features import feature_take_indices
from timm.models._manipulate import reinit_non_persistent_buffers
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay, param_groups_weight_decay

from common import GRIDS, HEADS, PATCH, POS_ENCS, Maker, ToyLayer, ToyShared, registered
import timm_sape
from timm_sape import Grid, PositionEncoding, ReferenceGridEncoding, ResizedEncoding, ops, vit_pos_enc
from timm_sape.attention import PosEncAttention, PosEncBlock
from timm_sape.ops.backend import using_backend
from timm_sape.position import LayerEncodings, SharedEncodings
from timm_sape.vit_pos_enc import VisionTransformerPosEnc

CONTRACTS = {}
ONE_GRID = GRIDS[:1]


@pytest.fixture(autouse=True, scope='module')
def third_party():
    with registered(ToyShared, ToyLayer):
        yield


def contract(fn=None, *, grids=GRIDS):
    """Add a contract to the table. Those that are not about positions are content with one grid."""
    if fn is None:
        return partial(contract, grids=grids)
    CONTRACTS[fn.__name__] = fn
    fn.grids = grids
    return fn


def same(actual, expected, what, tol=1e-5):
    """Equal up to `tol` times the largest value; a NaN anywhere is a difference."""
    assert actual.shape == expected.shape, f'{what}: {list(actual.shape)} is not {list(expected.shape)}'
    worst = (actual.double() - expected.double()).abs().max()
    assert worst <= tol * expected.double().abs().max().clamp(min=1), f'{what}: differs by {worst:.2g}'


def differ(a, b, what):
    assert (a - b).abs().max() > 1e-3, f'{what}: makes no difference'


def gradients(model, loss):
    """Gradients by name, all of them there."""
    model.zero_grad()
    loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing, f'no gradient for {missing}'
    unsound = [name for name, p in model.named_parameters() if not p.grad.isfinite().all()]
    assert not unsound, f'gradient is not finite for {unsound}'
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def same_gradients(actual, expected, tol=1e-5):
    assert actual.keys() == expected.keys()
    for name in expected:
        same(actual[name], expected[name], f'gradient of {name}', tol)


def embedded(model, x):
    """What goes into the first block."""
    seen = []
    handle = model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model.forward_features(x)
    handle.remove()
    return seen[0]


def rotated(x, table, num_prefix_tokens, rotate_half):
    """Pairs of channels of the patches turned by the angles of a table, prefix tokens left alone."""
    sin, cos = table.chunk(2, dim=-1)
    patches = x[:, :, num_prefix_tokens:]
    if rotate_half:  # bring partners side by side
        sin, cos, patches = (t.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2) for t in (sin, cos, patches))
    sin, cos = sin[..., ::2], cos[..., ::2]
    patches = torch.view_as_complex(patches.unflatten(-1, (-1, 2)).contiguous())
    patches = torch.view_as_real(patches * torch.complex(cos, sin)).flatten(-2)
    if rotate_half:
        patches = patches.unflatten(-1, (-1, 2)).transpose(-2, -1).flatten(-2)
    return torch.cat([x[:, :, :num_prefix_tokens], patches], dim=2)


def attention_by_hand(attn, x, position, mask=None):
    """One layer without dropout, in plain steps, the prefix rule enforced."""
    grid, rotation = position.grid, position.rotation
    x = x if position.layer_terms is None else x + position.layer_terms[attn.encodings.layer]
    B, N, _ = x.shape
    q, k, v = attn.qkv(x).view(B, N, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4)
    q, k = attn.q_norm(q), attn.k_norm(k)
    p = grid.num_prefix_tokens
    patch = torch.arange(N) >= p
    total = torch.zeros(B, attn.num_heads, N, N)
    total = total if position.bias is None else total.where(~(patch[:, None] & patch), total + position.bias)
    for encoding in attn.encodings.values():
        own = torch.zeros(())
        if encoding.overrides('position_bias'):
            own = own + encoding.gated(encoding.position_bias(grid))
        if encoding.overrides('content_bias'):
            own = own + encoding.gated(encoding.content_bias(q, k, grid))
        if encoding.overrides('channels'):
            a, b = encoding.channels(q, k, x, grid, attn.scale)
            own = own + attn.scale * a @ b.transpose(-2, -1)
        if encoding.overrides('rotation'):
            rotation = encoding.rotation(grid)
        if encoding.prefix_rule:
            own = torch.zeros(()).where(~(patch[:, None] & patch), own)
        total = total + own
    if rotation is not None:
        q, k = (rotated(t, rotation, p, attn.encodings.rotate_half) for t in (q, k))
    logits = q @ k.transpose(-2, -1) / attn.head_dim ** 0.5 + total
    if mask is not None:
        logits = logits.masked_fill(~mask, float('-inf')) if mask.dtype == torch.bool else logits + mask
    weights = logits.softmax(dim=-1)
    out = weights @ v
    for encoding in attn.encodings.values():
        if encoding.overrides('values'):
            out = out + encoding.gated(encoding.values(weights, grid))
    return attn.proj(attn.norm(out.transpose(1, 2).flatten(2)))


def check_layers(model, x, mask=None, **kwargs):
    """Compare each attention layer of a forward pass with `attention_by_hand`; `mask` is what `kwargs` amount to."""
    calls = []
    handles = [
        block.attn.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True) for block in model.blocks]
    model(x, **kwargs)
    for handle in handles:
        handle.remove()
    assert len(calls) == len(model.blocks)
    for attn, args, arguments, out in calls:
        same(out, attention_by_hand(attn, *args, arguments['position'], mask), 'attention')


# Prefix tokens and pooling

def patches_without_prefix(make, **prefix):
    """With the prefix tokens hidden from them, patches come out as in a model that has none."""
    x = make.images()
    kwargs = dict(global_pool='avg', fc_norm=False)
    bare = make(class_token=False, reg_tokens=0, **kwargs)
    model = make(**prefix, **kwargs)
    p = model.num_prefix_tokens
    if model.pos_embed is not None:
        bare.pos_embed.data.copy_(model.pos_embed[:, model.pos_embed.shape[1] - bare.pos_embed.shape[1]:])
    for name, encoding in model.encodings.items():
        if name == 'lape':
            bare.encodings[name].table.data.copy_(encoding.table[:, p:])
    mask = torch.ones(p + make.grid[0] * make.grid[1], p + make.grid[0] * make.grid[1], dtype=torch.bool)
    mask[p:, :p] = False
    same(model.forward_features(x, attn_mask=mask)[:, p:], bare.forward_features(x), 'patches without prefix')
    assert model(x).shape == (2, 3)
    gradients(model, model(x).sum())
    check_layers(model, x)


@contract
def class_token(make):
    for kwargs in (dict(class_token=False), dict(class_token=True), dict(class_token=True, no_embed_class=True)):
        patches_without_prefix(make, reg_tokens=0, **kwargs)


@contract
def register_tokens(make):
    for has_class_token, no_embed_class in itertools.product((False, True), repeat=2):
        patches_without_prefix(make, reg_tokens=4, class_token=has_class_token, no_embed_class=no_embed_class)


@contract
def prefix_rule(make):
    """Prefix tokens are not rotated and have no bias, in a plain model and under patch dropout alike."""
    check_layers(make(), make.images())


@contract(grids=GRIDS[:2])
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


# Arguments of the blocks

@contract(grids=GRIDS[:2])
def qk_norm(make):
    """q and k are normalised before anything looks at them, so their scale does not matter."""
    model = make(qk_norm=True)
    x = make.images()
    check_layers(model, x)
    before = model(x)
    for block in model.blocks:
        block.attn.qkv.weight.data[:64] *= 3
        block.attn.qkv.bias.data[:64] *= 3
    same(model(x), before, 'logits with larger q and k', tol=1e-4)  # LayerNorm's eps, 1e-5 of the variance


@contract(grids=GRIDS[:2])
def scale_attn_norm(make):
    model = make(scale_attn_norm=True)
    check_layers(model, make.images())
    seen = []
    attn = model.blocks[-1].attn
    attn.proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    attn.norm.weight.data.fill_(1)
    attn.norm.bias.data.zero_()
    model(make.images())
    same(seen[0].mean(-1), torch.zeros(seen[0].shape[:2]), 'mean of the normed output')
    same(seen[0].var(-1, unbiased=False), torch.ones(seen[0].shape[:2]), 'variance of the normed output', tol=1e-3)


def dropout(make, name):
    """A rate is silent in eval mode, and random but reproducible in training. Returns the image and a model at 1."""
    x = make.images()
    plain, model = make(), make(**{name: 0.5})
    same(model(x), plain(x), f'{name} in eval mode')
    model.train()
    outs = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        outs.append(model(x))
    same(outs[2], outs[0], f'{name} with the same seed')
    differ(outs[1], outs[0], f'{name} with another seed')
    gradients(model, model(x).square().sum())
    return x, make(**{name: 1.0}).train()


@contract(grids=ONE_GRID)
def position_dropout(make):
    """It follows the encodings of the tokens: at rate 1 nothing is left of either."""
    x, model = dropout(make, 'pos_drop_rate')
    same(embedded(model, x), torch.zeros(2, 20, 32), 'tokens after position dropout')


@contract(grids=ONE_GRID)
def attention_dropout(make):
    """At rate 1 no token sees any other, whether attention is fused or not."""
    for fused in (True, False):
        with fused_attention(fused):
            x, model = dropout(make, 'attn_drop_rate')
        seen = []
        attn = model.blocks[0].attn
        attn.register_forward_hook(lambda module, args, out: seen.append(out))
        model(x)
        same(seen[0], attn.proj.bias.expand(2, 20, 32), 'attention after attention dropout')


def silence_after_blocks(model):
    """Take out what encodings add between blocks, for contracts that look at blocks which do nothing."""
    for encoding in model.position_encodings().values():
        if encoding.overrides('embed') and encoding.per_layer:
            for p in encoding.parameters():
                p.data.zero_()


@contract(grids=ONE_GRID)
def projection_dropout(make):
    x, model = dropout(make, 'proj_drop_rate')
    silence_after_blocks(model)
    same(model.forward_features(x), model.norm(embedded(model, x)), 'features after projection dropout')


@contract(grids=ONE_GRID)
def drop_path(make):
    """The rate grows with depth: the first of two blocks is always there."""
    x, model = dropout(make, 'drop_path_rate')
    _, (first, last) = model.forward_intermediates(x, output_fmt='NLC')
    differ(first, embedded(model, x)[:, 5:], 'first block')
    same(last, first, 'last block after drop path')


@contract(grids=ONE_GRID)
def layer_scale(make):
    model = make(init_values=0.1)
    x = make.images()
    differ(model.forward_features(x), model.norm(embedded(model, x)), 'blocks')
    for block in model.blocks:
        gradient = gradients(model, model(x).sum())
        assert gradient['blocks.0.ls1.gamma'].abs().max() > 0 and gradient['blocks.0.ls2.gamma'].abs().max() > 0
        block.ls1.gamma.data.zero_()
        block.ls2.gamma.data.zero_()
    silence_after_blocks(model)
    same(model.forward_features(x), model.norm(embedded(model, x)), 'features with layer scale 0')


@contract
def attn_mask(make):
    """Bool, additive and causal masks, in every shape and on every road, are what -inf in the logits is."""
    x = make.images()
    num_tokens = 5 + make.grid[0] * make.grid[1]
    generator = torch.Generator().manual_seed(0)
    masks = [
        torch.rand(shape, generator=generator) < 0.7
        for shape in ((num_tokens, num_tokens), (2, 1, num_tokens, num_tokens), (2, 1, 1, num_tokens))]
    for mask in masks:
        mask[..., 0] = True  # no row is empty
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    for fused in (True, False):
        with fused_attention(fused):
            model = make()
        plain = model(x)
        for mask in masks:
            check_layers(model, x, mask, attn_mask=mask)
            out = model(x, attn_mask=mask)
            differ(out, plain, 'attn_mask')
            additive = torch.zeros(mask.shape).masked_fill(~mask, float('-inf'))
            same(model(x, attn_mask=additive), out, 'additive mask')
            check_layers(model, x, mask & causal, attn_mask=mask, is_causal=True)
        check_layers(model, x, mask & causal, attn_mask=additive, is_causal=True)
        features = model.forward_features(x, attn_mask=mask)
        same(model.forward_head(features), out, 'features with a mask')
        same(model.forward_intermediates(x, attn_mask=mask)[0], features, 'intermediates with a mask')
        last = model.get_intermediate_layers(x, attn_mask=mask, norm=True)[0]
        same(last, features[:, 5:], 'intermediate layers with a mask')
        soft = torch.randn(2, HEADS, num_tokens, num_tokens, generator=generator)
        check_layers(model, x, soft, attn_mask=soft)
        check_layers(model, x, causal, is_causal=True)
        same(model(x, is_causal=True), model(x, attn_mask=causal), 'causal mask')
        same(model.forward_intermediates(x, is_causal=True)[0], model.forward_features(x, is_causal=True), 'causal')
        model.set_grad_checkpointing()
        same(model(x, attn_mask=masks[0]), model(x, attn_mask=masks[0].clone()), 'mask with checkpointing')
        check_layers(model, x, masks[0], attn_mask=masks[0])


# Sizes

@contract
def rectangular(make):
    """A grid is H x W, patches stand in raster order, and each of them counts where it stands."""
    height, width = make.grid
    model = make()
    x = make.images()
    features, maps = model.forward_intermediates(x)
    assert [list(y.shape) for y in maps] == [[2, 32, height, width]] * 2
    tokens = model.forward_intermediates(x, output_fmt='NLC', intermediates_only=True)
    for i, j in {(0, width - 1), (height - 1, 0), (height // 2, width // 2)}:
        same(maps[-1][:, :, i, j], tokens[-1][:, i * width + j], 'raster order')
        if any('images' in encoding.asks_for for encoding in model.encodings.values()):
            continue  # what a patch is next to says where it belongs
        changed = x.clone()
        changed[:, :, i * PATCH:(i + 1) * PATCH, j * PATCH:(j + 1) * PATCH] += 1
        rows = (embedded(model, changed) - embedded(model, x)).abs().amax((0, 2)) > 1e-6
        assert rows.nonzero().flatten().tolist() == [5 + i * width + j], f'raster order: {rows}'
    gradients(model, model(x).square().sum())


@contract
def relative(make):
    """An encoding that calls itself relative depends on differences of positions alone."""
    model = make()
    for path, encoding in model.position_encodings().items():
        if not encoding.relative:
            continue
        p, grid = 5, Grid(*make.grid, 5)
        token = torch.randn(1, HEADS, 1, 32 // HEADS, generator=torch.Generator().manual_seed(0))
        q = k = token.expand(-1, -1, p + grid.num_patches, -1)
        logits = torch.zeros(1, HEADS, *2 * (p + grid.num_patches,))
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


@contract
def dynamic_img_size(make):
    """Own size: the model of fixed size. Other sizes: work, in any order; the fixed model says no."""
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


@contract
def dynamic_img_pad(make):
    """An image that the patches do not fill is the image with zeros at the bottom and on the right."""
    model = make(dynamic_img_size=True, dynamic_img_pad=True)
    x = make.images()[:, :, :-3, :-5]
    padded = nn.functional.pad(x, (0, 5, 0, 3))
    assert padded.shape == make.images().shape
    same(model(x), make(dynamic_img_size=True)(padded), 'padded image')
    same(model(padded), make()(padded), 'image without padding')
    assert model.forward_intermediates(x)[1][0].shape == (2, 32, *make.grid)


def resampled(model):
    """Whether it has tables that another size changes for good."""
    resized = [encoding for encoding in model.position_encodings().values() if isinstance(encoding, ResizedEncoding)]
    return resized or model.pos_embed is not None


@contract
def set_input_size(make):
    """The same logits as by `dynamic_img_size`; the way back is exact, but for tables that are resampled."""
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


@contract(grids=GRIDS[:2])
def set_patch_size(make):
    """Patches of half the size: a grid of twice the size, set or met in a forward pass."""
    x = make.images()
    model, dynamic = make(), make(dynamic_img_size=True)
    model.set_input_size(patch_size=PATCH // 2)
    dynamic.set_input_size(img_size=[size // 2 for size in make.img_size()], patch_size=PATCH // 2)
    assert dynamic.patch_embed.grid_size == make.grid
    same(model(x), dynamic(x), 'new patch size')
    with pytest.raises(ValueError, match='does not divide'):
        model.set_input_size(patch_size=PATCH - 1)


OTHER_GRIDS = {(3, 5): [(4, 6), (2, 3)], (4, 4): [(2, 8), (6, 6)], (1, 7): [(5, 3)], (14, 14): []}


@contract(grids=list(OTHER_GRIDS))
def three_roads(make):
    """Weights of one grid mean the same on another, whether they go there in a forward pass, are set, or are loaded."""
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
            for step in (model_set, loaded, loaded_set):  # none of them forgets where the weights come from
                with tempfile.TemporaryDirectory() as again:
                    save_for_hf(step, again, safe_serialization=True)
                    copied = timm.create_model(f'local-dir:{again}', pretrained=True).eval()
                    same(copied(y), expected, f'saved again at {grid}')
                    if not resampled(step):
                        back = timm.create_model(
                            f'local-dir:{again}', pretrained=True, img_size=make.img_size(), dynamic_img_size=False)
                        same(back.eval()(make.images()), model(make.images()), f'loaded back from {grid}')


# Patch dropout

class Keep(PatchDropoutWithIndices):
    """Patch dropout whose draw is known."""

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


@contract
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

    # Some are kept: their order does not matter, nor which ones are kept elsewhere in the batch.
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

    # A dropped patch is a masked one, where no content of it is counted.
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


@contract(grids=GRIDS[:2])
def keep_indices(make):
    """Patches that the caller keeps are those that patch dropout would have left, on every entrance to the model."""
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


@contract(grids=GRIDS[:2])
def patch_dropout_mask(make):
    """A mask is for the whole grid, and its entries go with the patches."""
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


# Calls

def watch_calls(model, x):
    """Parameters that are read while no module that owns them is being called, by name."""
    owners = {}
    for name, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            owners[id(p)] = name, key, module
    inside, outside = [], set()

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
                if id(leaf) in owners and owners[id(leaf)][2] not in inside:
                    is_look = getattr(function, '__name__', '') == '__get__'  # .shape, .dtype, .device
                    if not is_look and function not in (torch.Tensor.size, torch.Tensor.dim):
                        outside.add('.'.join(owners[id(leaf)][:2]))
            return function(*args, **(kwargs or {}))

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda module, args: inside.append(module)))
        handles.append(module.register_forward_hook(lambda module, args, out: inside.remove(module)))
    with Watch():
        model(x)
    for handle in handles:
        handle.remove()
    return outside


@contract(grids=ONE_GRID)
def own_call(make):
    """Parameters of encodings are used inside their own module's call alone, where hooks that load or move them fire.

    `pos_embed`, which belongs to the model, is used inside the model's.
    """
    model, x = make(), make.images()
    outside = watch_calls(model, x)
    assert not outside, f'read outside of its own call: {sorted(outside)}'

    # What accelerate's offloading amounts to: parameters are there while their module is called, and NaN else.
    expected = model(x)
    handles = []
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        values = {name: p.detach().clone() for name, p in own.items()}
        if not values or isinstance(module, VisionTransformer):
            continue

        def load(module, args, own=own, values=values):
            for name, p in own.items():
                p.data = values[name].clone()

        def unload(module, args, out, own=own):
            for p in own.values():
                p.data = torch.full_like(p, float('nan'))

        unload(module, (), None)
        handles += [module.register_forward_pre_hook(load), module.register_forward_hook(unload)]
    same(model(x), expected, 'parameters that are there in their call alone', tol=1e-6)


@contract(grids=GRIDS[:2])
def blocks_alone(make):
    """Blocks called as timm calls them work where position is in the tokens already, and say what to do elsewhere."""
    model, x = make(), make.images()
    tokens, position = model.embed(x)
    acts = position.rotation is not None or position.bias is not None or position.layer_terms is not None
    acts |= any(len(block.attn.encodings) for block in model.blocks)
    mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    if acts:
        for wrong in (
                lambda: model.blocks(tokens), lambda: model.blocks[0](tokens), lambda: model.blocks[0](tokens, mask),
                lambda: model.blocks[0].attn(tokens)):
            with pytest.raises(ValueError, match='position=position'):
                wrong()
    else:
        same(model.norm(model.blocks(tokens)), model.forward_features(x), 'blocks as a sequence', tol=1e-6)
        expected = model.blocks[0](tokens, mask, position=position)
        same(model.blocks[0](tokens, mask), expected, 'block with a mask', tol=1e-6)
        differ(expected, model.blocks[0](tokens), 'mask')
    for wrong in (mask, position.grid):
        with pytest.raises(ValueError, match='Masks are passed as attn_mask='):
            model.blocks[0](tokens, position=wrong)
    if not any('images' in encoding.asks_for for encoding in model.encodings.values()):
        same(model.norm_pre(model._pos_embed(model.patch_embed(x))), tokens, "timm's steps", tol=1e-6)


# Features

@contract
def gradient_checkpointing(make):
    """The same loss and the same gradients, with everything random on, in both forms of it that torch has."""
    kwargs = dict(attn_drop_rate=0.2, proj_drop_rate=0.2, drop_path_rate=0.2, patch_drop_rate=0.2)
    x = make.images()

    def step(model):
        torch.manual_seed(0)
        loss = model(x).square().sum()
        return loss, gradients(model, loss)

    loss, expected = step(make(**kwargs).train())
    model = make(**kwargs).train()
    model.set_grad_checkpointing()
    loss_again, actual = step(model)
    same(loss_again, loss, 'loss', tol=1e-6)
    same_gradients(actual, expected)

    set_reentrant_ckpt(True)
    try:
        same_gradients(step(model)[1], expected)
    finally:
        set_reentrant_ckpt(False)

    model = make()
    loss, expected = step(model)
    model.set_grad_checkpointing()
    same(model.forward_intermediates(x)[0], make().forward_features(x), 'features')
    same_gradients(step(model)[1], expected)


@contract
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


@contract(grids=ONE_GRID)
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


@contract(grids=GRIDS[:2])
def features_only(make):
    """`timm.create_model(..., features_only=True)` gives the maps of the whole model, and holds nothing unused."""
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


@contract(grids=GRIDS[:2])
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


@contract(grids=ONE_GRID)
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


@contract(grids=ONE_GRID)
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


# Initial values, and values that are not there

def poison(model):
    """Fill all there is with NaN."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        tensor.data.fill_(float('nan'))


def check_initial(model, like):
    """All values are there, and those of encodings as large as in `like`."""
    for (name, actual), expected in zip(
            itertools.chain(model.named_parameters(), model.named_buffers()),
            itertools.chain(like.parameters(), like.buffers()), strict=True):
        assert actual.isfinite().all(), f'{name} was not initialised'
        if 'encodings.' in name or name == 'pos_embed':
            a, b = (tensor.square().mean().sqrt().item() for tensor in (actual, expected))
            factor = 1 + 3 * actual.numel() ** -0.5 + 0.5  # few draws spread widely
            assert b / factor <= a <= factor * b, f'{name} starts at {a:.3g} instead of {b:.3g}'


@contract(grids=GRIDS[:2])
def init_weights(make):
    """Every mode gives every parameter and buffer a value, those of encodings the ones that they are built with."""
    for mode in ('', 'jax', 'jax_nlhb', 'moco', 'reset'):
        torch.manual_seed(0)
        fresh = make(awake=False, init_values=0.1, weight_init='' if mode == 'reset' else mode)
        model = make(init_values=0.1)
        poison(model)
        torch.manual_seed(0)
        model.init_weights(mode)
        check_initial(model, fresh)
        once = copy.deepcopy(model)
        torch.manual_seed(0)
        model.init_weights(mode)
        for (name, a), b in zip(model.named_parameters(), once.parameters()):
            assert torch.equal(a, b), f'{name} is not reproducible'
        assert model.eval()(make.images()).isfinite().all()


@contract(grids=ONE_GRID)
def weight_init_skip(make):
    torch.manual_seed(0)
    model = make(awake=False, weight_init='skip')
    poison(model)
    model.init_weights()
    check_initial(model, make(awake=False))
    model = make(awake=False, weight_init='skip')
    poison(model)
    reinit_non_persistent_buffers(model)
    model.load_state_dict(make().state_dict())
    same(model(make.images()), make()(make.images()), 'loaded model', tol=1e-6)


@contract(grids=ONE_GRID)
def fix_init(make):
    """timm's scaling by depth; the encodings start from the values that they start from without it."""
    states = []
    for fix in (False, True):
        torch.manual_seed(0)
        states.append(make(awake=False, fix_init=fix).state_dict())
    for name, plain in states[0].items():
        scaled = name.endswith(('attn.proj.weight', 'mlp.fc2.weight')) and 'encodings.' not in name
        scale = (2 * (int(name.split('.')[1]) + 1)) ** -0.5 if scaled else 1
        same(states[1][name], scale * plain, f'fix_init of {name}', tol=1e-6)


@contract(grids=ONE_GRID)
def same_backbone(make):
    """Models that differ in their encodings alone start from the same backbone, seed by seed."""
    for mode in ('', 'jax', 'moco'):
        states = []
        for maker in (make, Maker('nope', make.grid)):
            torch.manual_seed(3)
            states.append(maker(awake=False, weight_init=mode).state_dict())
        for name, expected in states[1].items():
            assert torch.equal(states[0][name], expected), f'backbone starts elsewhere: {name}'


@contract(grids=GRIDS[:2])
def meta_device(make):
    """Made without memory, then filled from a checkpoint, or initialised."""
    expected = make()
    x = make.images()

    def made(in_context):
        if in_context:
            with torch.device('meta'):
                model = make(awake=False)
        else:
            model = make(awake=False, device='meta')
        assert all(t.is_meta for t in itertools.chain(model.parameters(), model.buffers())), 'memory on the meta device'
        model.to_empty(device='cpu')
        poison(model)
        return model

    def check_buffers(model):
        for (name, actual), buffer in zip(model.named_buffers(), expected.buffers(), strict=True):
            same(actual, buffer, f'buffer {name}', tol=1e-6)

    for in_context in (False, True):
        model = made(in_context)
        reinit_non_persistent_buffers(model)
        model.load_state_dict(expected.state_dict())
        check_buffers(model)
        same(model(x), expected(x), 'filled from a checkpoint', tol=1e-6)
        model = made(in_context)
        model.load_state_dict(expected.state_dict(), assign=True)
        reinit_non_persistent_buffers(model)
        same(model(x), expected(x), 'filled by assignment', tol=1e-6)
        model = made(in_context)
        torch.manual_seed(0)
        model.init_weights()
        check_buffers(model)
        check_initial(model, make(awake=False))


# Parameter groups

@contract(grids=ONE_GRID)
def no_weight_decay(make):
    """No parameter of an encoding decays, whether timm asks by name or by shape, and every name is a parameter's."""
    model = make()
    names = model.no_weight_decay()
    parameters = dict(model.named_parameters())
    assert names - {'dist_token'} <= {*parameters, 'pos_embed'}, 'names of parameters that are not there'
    assert {'cls_token', 'reg_token', 'pos_embed'} <= names
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=names)
    decayed = {id(p) for group in groups if group['weight_decay'] for p in group['params']}
    for name, p in parameters.items():
        assert ('encodings.' in name) <= (id(p) not in decayed), f'{name} has weight decay'
    assert id(model.blocks[0].attn.qkv.weight) in decayed


@contract(grids=ONE_GRID)
def group_matcher(make):
    """Layer-wise rates: what a layer owns is in its group, what all share in the stem's, and nothing in the head's."""
    model = make(depth=3)
    groups = param_groups_layer_decay(model, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5)
    scale = {id(p): group['lr_scale'] for group in groups for p in group['params']}
    parameters = dict(model.named_parameters())
    scale = {name: scale[id(p)] for name, p in parameters.items()}
    assert scale['head.weight'] == 1
    for name in parameters:
        if name.startswith('blocks.'):
            assert scale[name] == scale[f'blocks.{name.split(".")[1]}.attn.qkv.weight'], f'group of {name}'
        elif 'encodings.' in name or name == 'pos_embed':
            assert scale[name] == scale['cls_token'] == min(scale.values()), f'group of {name}'
    assert len({scale[f'blocks.{i}.attn.qkv.weight'] for i in range(3)}) == 3
    coarse = {name for name in parameters if group_parameters(
        model, model.group_matcher(coarse=True), reverse=True)[name] == 0}
    assert {name for name in parameters if name.startswith('encodings.')} <= coarse


# Arithmetic

@contextmanager
def fused_attention(enable):
    """timm's switch, read when a model is built."""
    try:
        set_fused_attn(enable)
        yield
    finally:
        set_fused_attn(True)


@contract
def fused_attention_switch(make):
    x = make.images()
    logits, grads = [], []
    for enable in (True, False):
        with fused_attention(enable):
            model = make()
        assert all(block.attn.fused_attn is enable for block in model.blocks)
        logits.append(model(x))
        grads.append(gradients(model, logits[-1].square().sum()))
    same(logits[1], logits[0], 'logits without fused attention')
    same_gradients(grads[1], grads[0], tol=1e-4)


LOW = {torch.bfloat16: 0.05, torch.float16: 0.007}  # dtype, and the share of the features that rounding may change


def check_low(actual, expected, dtype, what):
    assert actual.isfinite().all(), f'{what}: not finite'
    error = (actual.float() - expected).norm() / expected.norm()
    assert error < LOW[dtype], f'{what} in {dtype}: off by {error:.2g}'


@contract
def autocast(make):
    x = make.images()
    for fused in (True, False):
        with fused_attention(fused):
            model = make()
        features = model.forward_features(x)
        for dtype in LOW:
            with torch.autocast('cpu', dtype):
                check_low(model.forward_features(x), features, dtype, 'autocast')
                loss = model(x).float().square().sum()
            gradients(model, loss)


@contract(grids=GRIDS[:2])
def half(make):
    """`model.half()`, `.bfloat16()`, built with `dtype=`, and back."""
    x = make.images()
    for dtype, fused in itertools.product(LOW, (True, False)):
        with fused_attention(fused):
            expected, model, built = make(), make().to(dtype), make(dtype=dtype)
        for low in (model, built):
            assert {p.dtype for p in low.parameters()} == {dtype}
            features = low.forward_features(x.to(dtype))
            assert features.dtype == dtype
            check_low(features, expected.forward_features(x), dtype, 'half')
            assert low(x.to(dtype)).dtype == dtype
            gradients(low, low(x.to(dtype)).square().sum())
        model.set_input_size(img_size=make.img_size((4, 6)))
        expected.set_input_size(img_size=make.img_size((4, 6)))
        y = make.images(grid=(4, 6))
        check_low(model.forward_features(y.to(dtype)), expected.forward_features(y), dtype, 'half at another size')
        back = make().to(dtype).float()
        check_low(back.forward_features(x), make().forward_features(x), dtype, 'back from half')
        train = make(patch_drop_rate=0.5, attn_drop_rate=0.1).to(dtype).train()
        gradients(train, train(x.to(dtype)).square().sum())
    double = make().double()
    same(double(x.double()), make()(x), 'float64')


@contract
def float32_bias(make):
    """Biases that depend on content are computed in float32 from the low-precision q and k on, in every low mode."""
    x = make.images()
    for dtype, by_autocast in itertools.product(LOW, (True, False)):
        model = make() if by_autocast else make().to(dtype)
        calls = []
        for encoding in model.position_encodings().values():
            if encoding.overrides('content_bias'):
                def recorded(q, k, grid, encoding=encoding, content_bias=encoding.content_bias):
                    bias = content_bias(q, k, grid)
                    calls.append((encoding, q, k, grid, bias))
                    return bias

                encoding.content_bias = recorded
        with using_backend('reference'), torch.autocast('cpu', dtype, enabled=by_autocast):
            model(x if by_autocast else x.to(dtype))
        for encoding, q, k, grid, bias in calls:
            assert q.dtype == dtype and bias.dtype == torch.float32, f'bias is {bias.dtype}'
            del encoding.content_bias
            wide = copy.deepcopy(encoding).double()
            # Distances are roots: what rounding leaves of a zero is about the root of float32's eps.
            same(bias, wide.content_bias(q.double(), k.double(), grid), f'bias computed in {dtype}', tol=1e-4)


# State

@contract(grids=GRIDS[:2])
def deepcopy(make):
    """A copy is whole and separate, and outlives what it was made from."""
    x = make.images()
    model = make()
    expected = model(x)
    twin = copy.deepcopy(model)
    for p in model.parameters():
        p.data.zero_()
    same(twin(x), expected, 'copy', tol=1e-6)
    assert twin.pos_enc == model.pos_enc and twin.ref_grid_size == model.ref_grid_size
    gone = weakref.ref(model)
    del model
    assert gone() is None
    twin.load_state_dict(make().state_dict())
    same(twin(x), expected, 'copy, loaded', tol=1e-6)


@contract(grids=GRIDS[:2])
def pickled(make):
    x = make.images()
    model = make()
    twin = pickle.loads(pickle.dumps(model))
    same(twin(x), model(x), 'pickled model', tol=1e-6)
    twin.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model, Path(folder, 'model.pt'))
        same(torch.load(Path(folder, 'model.pt'), weights_only=False)(x), model(x), 'saved model', tol=1e-6)


@contract(grids=GRIDS[:2])
def state_dict(make):
    """timm's entries and the encodings' own, and nothing else matters."""
    x = make.images()
    model = make()
    state = model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder, 'model.pt'))
        state = torch.load(Path(folder, 'model.pt'), weights_only=True)
    fresh = make(awake=False)
    fresh.load_state_dict(state)
    same(fresh(x), model(x), 'loaded model', tol=1e-6)
    own = {name for name in state if 'encodings.' in name}
    plain = VisionTransformer(
        img_size=make.img_size(), patch_size=PATCH, embed_dim=32, depth=2, num_heads=HEADS, num_classes=3, reg_tokens=4,
        pos_embed='none' if model.pos_embed is None else 'learn')
    assert state.keys() - own == plain.state_dict().keys(), 'entries that are not the encodings own'
    for name in own:
        assert name.split('encodings.')[1].split('.')[0] in model.pos_enc.split('+'), f'{name} is under no name'


@contract(grids=GRIDS[:2])
def config(make):
    """What timm saves is plain JSON, and enough to make the model again."""
    model = make()
    with tempfile.TemporaryDirectory() as folder:
        save_for_hf(model, folder, safe_serialization=True)
        saved = json.loads(Path(folder, 'config.json').read_text())['model_args']
        assert saved['pos_enc'] == '+'.join(sorted(make.pos_enc.split('+')))
        assert saved.get('ref_grid_size') == (model.ref_grid_size and list(model.ref_grid_size))
        loaded = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
    same(loaded(make.images()), model(make.images()), 'model made again', tol=1e-6)


@contract(grids=ONE_GRID)
def threads(make):
    """Eight threads through one model, each with images of its own size."""
    model = make(dynamic_img_size=True)
    batches = [make.images(grid=(2 + i % 3, 3 + i % 2), seed=i) for i in range(8)]
    with torch.inference_mode():
        expected = [model(x) for x in batches]
        actual = [None] * 8
        barrier = threading.Barrier(8)

        def work(i):
            with torch.inference_mode():  # the modes of torch are per thread
                barrier.wait()
                for _ in range(4):
                    actual[i] = model(batches[i])

        workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for a, b in zip(actual, expected):
            assert a is not None, 'a thread died'
            same(a, b, 'result of a thread', tol=1e-6)


def snapshot(model):
    """All that is stored on modules and on the classes of encodings; what may change in place with what is in it."""
    owners = [(name, vars(module)) for name, module in model.named_modules()]
    owners += [(type(m).__name__, vars(type(m))) for m in model.position_encodings().values()]
    stored = {}
    for name, attributes in owners:
        for key, value in attributes.items():
            for item, x in value.items() if isinstance(value, dict) else [('', value)]:
                if isinstance(x, torch.Tensor):
                    content = None if x.is_inference() else x._version
                else:
                    content = copy.copy(x) if isinstance(x, (list, set, dict)) else None
                stored[name, key, item] = x, content
    return stored


@contract
def nothing_stored(make):
    """A forward pass leaves no trace on any module, in evaluation or training, and takes none up."""
    x = make.images()
    for model in (make(dynamic_img_size=True), make(dynamic_img_size=True, patch_drop_rate=0.5).train()):
        before = snapshot(model)
        model(x).sum().backward()
        model(make.images(grid=(4, 6)))
        with torch.inference_mode():
            model(x)
            model(make.images(grid=(2, 7)))
        after = snapshot(model)
        assert after.keys() == before.keys(), f'stored in forward: {after.keys() ^ before.keys()}'
        for key, (value, content) in before.items():
            value_now, content_now = after[key]
            plain = isinstance(value, (int, float, str, tuple)) and value_now == value
            assert (value_now is value or plain) and content_now == content, f'stored in forward: {key}'
        gradients(model, model(x).square().sum())  # no tensor of inference mode is left over


@contract
def deterministic(make):
    """No randomness in evaluation mode, no effect of one image on another, and none of what came before."""
    model = make()
    x = make.images(batch=3)
    state = torch.get_rng_state(), random.getstate()
    out = model(x)
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1], 'random numbers drawn'
    model(make.images(seed=1))
    assert torch.equal(model(x), out), 'another result the second time'
    for i in range(3):
        same(model(x[i:i + 1]), out[i:i + 1], 'one image of the batch')


# Negative controls. What is broken in each stands in its docstring or its name.

class Control:
    """A broken encoding or model, and how it must fail a contract."""

    def __init__(self, name, contract, match, raises, apply, make):
        self.name = name
        self.contract = contract
        self.match = match
        self.raises = raises
        self.apply = apply
        self.make = make

    def __repr__(self):
        return f'{self.contract}-{self.name}'


CONTROLS = []


def broken_encoding(contract, match, raises=AssertionError, **fixed):
    """Decorates an encoding that must fail `contract` with a message like `match`."""
    def add(cls):
        CONTROLS.append(Control(
            cls.__name__, contract, match, raises, lambda patch: registered(broken=cls), Maker('broken', **fixed)))
        return cls

    return add


def broken_code(contract, match, raises=AssertionError, pos_enc='ape+sape2_k'):
    """Decorates a function that breaks this package by a `monkeypatch`."""
    def add(fn):
        @contextmanager
        def apply(patch):
            fn(patch)
            yield

        CONTROLS.append(Control(fn.__name__, contract, match, raises, apply, Maker(pos_enc)))
        return fn

    return add


def broken_model(contract, match, raises=AssertionError, pos_enc='ape+sape2_k'):
    """Decorates a function that breaks each model after it was built."""
    def add(fn):
        make = Maker(pos_enc, edit=fn)
        CONTROLS.append(Control(fn.__name__, contract, match, raises, lambda patch: registered(), make))
        return fn

    return add


@broken_encoding('class_token', 'patches without prefix: differs')
@broken_encoding('register_tokens', 'patches without prefix: differs')
class CountsPrefix(PositionEncoding):
    per_layer = False

    def embed(self, x, grid):
        return torch.outer(torch.arange(x.shape[1], dtype=x.dtype), torch.ones(self.dim).cumsum(0)).sin()


@broken_encoding('class_token', 'does not broadcast to', ValueError)
class ForgetsPrefix(PositionEncoding):
    def position_bias(self, grid):
        position = grid.coordinates(dtype=torch.float32)
        return -torch.cdist(position, position)


@broken_encoding('register_tokens', 'does not broadcast to', ValueError)
class ExpectsClassToken(PositionEncoding):
    def position_bias(self, grid):
        bias = -grid.coordinates(dtype=torch.float32).sum(-1)
        return nn.functional.pad(bias, (min(grid.num_prefix_tokens, 1), 0))[None]


@broken_encoding('prefix_rule', 'attention: differs')
class BiasesPrefix(PositionEncoding):
    per_layer = False

    def position_bias(self, grid):
        num_tokens = grid.num_prefix_tokens + grid.num_patches
        return torch.arange(num_tokens, dtype=torch.float32).expand(num_tokens, -1) < grid.num_prefix_tokens


@broken_code('prefix_rule', 'attention: differs', pos_enc='rope2d')
def rotates_prefix(patch):
    def rotated(self, q, k, position):
        table = torch.cat([position.rotation[-position.grid.num_prefix_tokens:], position.rotation])
        return apply_rot_embed_cat(q, table), apply_rot_embed_cat(k, table)

    patch.setattr(LayerEncodings, '_rotated', rotated)


@broken_code('pooling', "pooling 'avg': differs")
def pools_prefix(patch):
    def pool(self, x, pool_type=None):
        if self.global_pool == 'avg':
            return x.mean(1)
        return VisionTransformer.pool(self, x, pool_type)

    patch.setattr(VisionTransformerPosEnc, 'pool', pool)


@broken_model('qk_norm', 'logits with larger q and k: differs')
def forgets_query_norm(model):
    model.blocks[0].attn.q_norm = nn.Identity()


@broken_code('qk_norm', 'attention: differs')
def biases_before_norm(patch):
    class Attention(PosEncAttention):
        def forward(self, x, attn_mask, is_causal, position):
            qkv = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
            encoding, attend = self.encodings['sape2_k'], self.encodings['sape2_k'].attend
            with pytest.MonkeyPatch.context() as within:
                within.setattr(
                    encoding, 'attend', lambda q, k, *args, **kwargs: attend(qkv[0], qkv[1], *args, **kwargs),
                    raising=False)
                return super().forward(x, position=position)

    patch.setattr(vit_pos_enc, 'PosEncAttention', Attention)


@broken_model('scale_attn_norm', 'mean of the normed output: differs')
def skips_attention_norm(model):
    for block in model.blocks:
        block.attn.norm.forward = lambda x: x


@broken_model('position_dropout', 'tokens after position dropout: differs')
def spares_first_token(model):
    rate = model.pos_drop.p
    model.pos_drop = nn.Identity()
    model.pos_drop.forward = lambda x: torch.cat(
        [x[:, :1], nn.functional.dropout(x[:, 1:], rate, training=model.training)], dim=1)


@broken_encoding('attention_dropout', 'attention after attention dropout: differs')
class ValuesWithoutAttention(PositionEncoding):
    def values(self, attn, grid):
        return attn.new_ones(attn.shape[2], 1)


@broken_model('projection_dropout', 'features after projection dropout: differs')
def projects_without_dropout(model):
    model.blocks[0].attn.proj_drop = nn.Identity()


@broken_model('drop_path', 'last block after drop path: differs')
def keeps_path(model):
    model.blocks[1].drop_path2 = nn.Identity()


@broken_code('layer_scale', 'no gradient for .*ls1.gamma')
def forgets_layer_scale(patch):
    def forward(self, x, attn_mask=None, is_causal=False, position=None):
        x = x + self.attn(self.norm1(x), attn_mask, is_causal, position)
        return x + self.ls2(self.mlp(self.norm2(x)))

    patch.setattr(PosEncBlock, 'forward', forward)


@broken_code('attn_mask', 'attention: differs')
def bias_replaces_mask(patch):
    merge_masks = ops.merge_masks

    def broken(bias, *args):
        return merge_masks(bias, *args) if bias is None else bias

    patch.setattr(ops, 'merge_masks', broken)
    patch.setattr(ops.sape2, 'merge_masks', broken)


@broken_code('attn_mask', 'attention: differs', pos_enc='nope')
def causal_replaces_mask(patch):
    whole = ops.merge_masks

    def merge_masks(bias, attn_mask, is_causal, *args):
        return whole(bias, None if is_causal else attn_mask, is_causal, *args)

    patch.setattr(ops, 'merge_masks', merge_masks)


@broken_encoding('rectangular', 'does not broadcast to', ValueError)
class AssumesSquare(PositionEncoding):
    per_layer = False

    def position_bias(self, grid):
        side = int(grid.num_patches ** 0.5)
        position = Grid(side, side).coordinates(dtype=torch.float32)
        return grid.pad_prefix(-torch.cdist(position, position))


@broken_model('rectangular', 'raster order')
def columns_first(model):
    forward = model.patch_embed.forward
    model.patch_embed.forward = lambda x: forward(x).unflatten(1, (3, 5)).transpose(1, 2).flatten(1, 2)


@broken_encoding('relative', 'moved along y: differs')
class Absolute(PositionEncoding):
    relative = True

    def position_bias(self, grid):
        return grid.pad_prefix(grid.coordinates(dtype=torch.float32)[:, :1].expand(-1, grid.num_patches))


@broken_encoding('relative', 'moved along y: differs')
class TransposesGrid(PositionEncoding):
    """Right on squares only."""
    relative = True

    def position_bias(self, grid):
        position = Grid(grid.width, grid.height).coordinates(dtype=torch.float32)
        return grid.pad_prefix(-torch.cdist(position, position))


@broken_encoding('dynamic_img_size', 'does not broadcast to', ValueError)
@broken_encoding('set_input_size', 'does not broadcast to', ValueError)
class OwnGridOnly(PositionEncoding):
    def __init__(self, **host):
        super().__init__(**host)
        position = Grid(*self.grid_size).coordinates(dtype=torch.float32)
        self.register_buffer('bias', -torch.cdist(position, position), persistent=False)

    def position_bias(self, grid):
        return grid.pad_prefix(self.bias)


@broken_encoding('dynamic_img_size', 'own size after another one: differs')
class RemembersLargestGrid(PositionEncoding):
    largest = 0

    def position_bias(self, grid):
        self.largest = max(self.largest, grid.num_patches)
        position = grid.coordinates(dtype=torch.float32)
        return grid.pad_prefix(-torch.cdist(position, position) * 10 / self.largest)


@broken_model('dynamic_img_pad', 'padded image: differs')
def pads_on_the_left(model):
    forward = model.patch_embed.forward
    model.patch_embed.forward = lambda x: forward(nn.functional.pad(x, (-x.shape[-1] % PATCH, 0)))


@broken_code('dynamic_img_pad', 'must match the size', RuntimeError)
def rounds_grid_down(patch):
    patch.setattr(vit_pos_enc, '_grid', lambda images, patch_size, num_prefix_tokens, **_: Grid(
        images.shape[2] // patch_size[0], images.shape[3] // patch_size[1], num_prefix_tokens))


class Scaled(ReferenceGridEncoding):
    """Sound: positions are scaled to the trained grid."""

    def position_bias(self, grid):
        ref = self.rescaling(grid) or grid.size
        position = grid.coordinates(dtype=torch.float32) * torch.tensor(ref) / torch.tensor(grid.size)
        return grid.pad_prefix(-torch.cdist(position, position))


@broken_encoding('set_input_size', 'new size: differs')
@broken_encoding('set_patch_size', 'new patch size: differs')
@broken_encoding('three_roads', 'set_input_size to .*: differs')
class ReferenceFollowsSize(Scaled):
    def set_grid_size(self, grid_size):
        super().set_grid_size(grid_size)
        self.ref_grid_size = self.grid_size


@broken_encoding('three_roads', 'it was trained on grid', ValueError)
class ReferenceIsNotSaved(Scaled):
    def set_extra_state(self, state):
        pass

    def set_ref_grid_size(self, ref_grid_size):
        pass

    def __init__(self, *, ref_grid_size=None, **host):
        super().__init__(**host)


@broken_encoding('patch_dropout', 'all patches in random order: differs')
class IgnoresKeepIndices(PositionEncoding):
    def content_bias(self, q, k, grid):
        i = torch.arange(q.shape[2] - grid.num_prefix_tokens, dtype=torch.float32)
        return grid.pad_prefix(-(i[:, None] - i).abs())


@broken_encoding('patch_dropout', 'does not broadcast to', ValueError)
class ExpectsAllPatches(PositionEncoding):
    def content_bias(self, q, k, grid):
        position = grid.coordinates(dtype=torch.float32)
        return grid.pad_prefix(-torch.cdist(position, position))


@broken_code('patch_dropout', 'all patches in random order: differs', pos_enc='rope2d')
def rotates_by_order(patch):
    def keep_rows(self, table):
        return table if self.keep_indices is None else table[..., :self.keep_indices.shape[1], :]

    patch.setattr(Grid, 'keep_rows', keep_rows)


@broken_code('keep_indices', 'features of kept patches: differs', pos_enc='ape')
def keeps_the_next_patch(patch):
    keep = vit_pos_enc._keep_patches

    def keep_patches(patch_drop, x, grid, keep_indices):
        return keep(patch_drop, x, grid, keep_indices if keep_indices is None else keep_indices.roll(1, 1))

    patch.setattr(vit_pos_enc, '_keep_patches', keep_patches)


@broken_encoding('own_call', 'read outside of its own call: .*slope')
class ReadsAnotherModule(PositionEncoding):
    """Its linear layer is never called."""

    def __init__(self, **host):
        super().__init__(**host)
        self.slope = nn.Linear(1, self.num_heads)

    def position_bias(self, grid):
        position = grid.coordinates(dtype=torch.float32)
        slope = self.slope.weight + self.slope.bias[:, None]
        return grid.between_tokens(-slope[..., None] * torch.cdist(position, position))


@broken_code('own_call', 'read outside of its own call: .*table', pos_enc='shaw')
def calls_the_method(patch):
    def bias(self, q, k, position, without=()):
        return self['shaw'].content_bias(q, k, position.grid)

    patch.setattr(LayerEncodings, '_bias', bias)


@broken_code('blocks_alone', 'DID NOT RAISE', pytest.fail.Exception, pos_enc='rope2d')
def needs_no_position(patch):
    patch.setattr(SharedEncodings, 'act_on_blocks', lambda self: False)


@broken_code('patch_dropout_mask', 'mask .* under patch dropout: differs', pos_enc='ape')
def mask_stays(patch):
    patch.setattr(Grid, 'keep_pairs', lambda self, logits: logits)


@broken_encoding('gradient_checkpointing', 'gradient of .*: differs')
@broken_encoding('nothing_stored', "stored in forward: .*'calls'")
class CountsCalls(PositionEncoding):
    def __init__(self, **host):
        super().__init__(**host)
        self.calls = 0

    def content_bias(self, q, k, grid):
        self.calls += 1
        return q @ k.transpose(-2, -1) * self.calls


@broken_encoding('forward_features', 'one image of the batch: differs')
@broken_encoding('deterministic', 'one image of the batch: differs')
class MixesBatch(PositionEncoding):
    def content_bias(self, q, k, grid):
        p = grid.num_prefix_tokens
        bias = (q[:, :, p:] @ k[:, :, p:].transpose(-2, -1)).mean(0, keepdim=True)
        return nn.functional.pad(bias, (p, 0, p, 0))


@broken_code('forward_features', 'head of the features: differs')
def normalises_in_the_head(patch):
    head = VisionTransformer.forward_head
    patch.setattr(VisionTransformerPosEnc, 'forward_head', lambda self, x: head(self, self.norm(x)))
    patch.setattr(VisionTransformerPosEnc, 'forward', lambda self, x: head(self, self.forward_features(x)))


@broken_encoding('forward_intermediates', 'final features: differs')
@broken_encoding('deterministic', 'random numbers drawn')
class DrawsInForward(PositionEncoding):
    def position_bias(self, grid):
        return grid.pad_prefix(torch.rand(grid.num_patches, grid.num_patches))


@broken_code('forward_intermediates', 'intermediates .*: differs')
def norms_always(patch):
    whole = VisionTransformerPosEnc.forward_intermediates

    def forward_intermediates(self, x, indices=None, **kwargs):
        return whole(self, x, indices, **{**kwargs, 'norm': indices is not None})

    patch.setattr(VisionTransformerPosEnc, 'forward_intermediates', forward_intermediates)


@broken_code('features_only', 'no gradient for')
@broken_code('prune_intermediate_layers', '3 blocks are left')
def prunes_nothing(patch):
    def prune(self, indices=1, prune_norm=False, prune_head=True):
        VisionTransformer.prune_intermediate_layers(self, 1, prune_norm, prune_head)
        return feature_take_indices(len(self.blocks), indices)[0]

    patch.setattr(VisionTransformerPosEnc, 'prune_intermediate_layers', prune)


@broken_code('get_intermediate_layers', 'intermediate layers: differs')
def forgets_norm(patch):
    whole = VisionTransformer.get_intermediate_layers
    patch.setattr(
        VisionTransformerPosEnc, 'get_intermediate_layers',
        lambda self, x, n=1, norm=False, **kwargs: whole(self, x, n, **kwargs))


@broken_code('reset_classifier', 'features after a new head: differs')
def resets_all(patch):
    def reset_classifier(self, *args):
        VisionTransformer.reset_classifier(self, *args)
        self.init_weights()

    patch.setattr(VisionTransformerPosEnc, 'reset_classifier', reset_classifier)


@broken_encoding('init_weights', 'slope was not initialised')
@broken_encoding('weight_init_skip', 'slope was not initialised')
class InitialisesOnce(PositionEncoding):
    def __init__(self, **host):
        super().__init__(**host)
        self.slope = nn.Parameter(torch.ones(self.num_heads))

    def position_bias(self, grid):
        position = grid.coordinates(dtype=torch.float32)
        return grid.pad_prefix(-self.slope.view(-1, 1, 1) * torch.cdist(position, position))


@broken_encoding('init_weights', 'slope starts at 0 instead of 1')
class InitialisesTwice(InitialisesOnce):
    """One value in the constructor, another later."""

    def reset_parameters(self):
        nn.init.zeros_(self.slope)


@broken_code('fix_init', 'fix_init of .*: differs')
def forgets_fix_init(patch):
    patch.setattr(VisionTransformerPosEnc, 'fix_init_weight', lambda self: None)


@broken_code('same_backbone', 'backbone starts elsewhere', pos_enc='sape2_k')
def draws_before_backbone(patch):
    parse = vit_pos_enc.parse_pos_enc

    def parse_and_draw(pos_enc, pos_enc_kwargs=None):
        torch.rand(0 if pos_enc == 'nope' else 1)
        return parse(pos_enc, pos_enc_kwargs)

    patch.setattr(vit_pos_enc, 'parse_pos_enc', parse_and_draw)


@broken_encoding('meta_device', 'memory on the meta device')
class FillsOnCpu(OwnGridOnly):
    def __init__(self, **host):
        super().__init__(**host)
        self.bias = torch.zeros(self.bias.shape, device='cpu')


@broken_encoding('meta_device', 'buffer .*bias: differs')
class NeverRefills(OwnGridOnly):
    def __init__(self, *, device=None, **host):
        super().__init__(**host)
        self.bias = self.bias.to(device)


@broken_encoding('no_weight_decay', 'slope_2d has weight decay')
class Decays(PositionEncoding):
    names = set()

    def __init__(self, **host):
        super().__init__(**host)
        self.slope_2d = nn.Parameter(torch.ones(2, 2))

    def no_weight_decay(self):
        return self.names


@broken_encoding('no_weight_decay', 'names of parameters that are not there')
class NamesNothing(Decays):
    names = {'slope'}


@broken_code('group_matcher', 'group of encodings.toy_shared', pos_enc='toy_shared')
def forgets_encodings(patch):
    patch.setattr(VisionTransformerPosEnc, 'group_matcher', VisionTransformer.group_matcher)


@broken_code('fused_attention_switch', 'logits without fused attention: differs')
def scales_twice(patch):
    probabilities = ops.probabilities
    patch.setattr(ops.attention, 'probabilities', lambda q, k, mask, scale: probabilities(q, k, mask, scale=scale ** 2))


@broken_encoding('float32_bias', 'bias is torch.bfloat16')
class NarrowBias(PositionEncoding):
    def content_bias(self, q, k, grid):
        return grid.pad_prefix((q @ k.transpose(-2, -1))[:, :, 5:, 5:])


@broken_encoding('float32_bias', 'bias computed in torch.bfloat16: differs')
@broken_encoding('autocast', 'autocast in torch.bfloat16: off by')
@broken_encoding('half', 'half in torch.bfloat16: off by')
class LosesDigits(PositionEncoding):
    """Sums in the dtype of q."""

    def content_bias(self, q, k, grid):
        p = grid.num_prefix_tokens
        total = 300 + q[:, :, p:] @ k[:, :, p:].transpose(-2, -1)
        return grid.pad_prefix(total.float() - 300)


@broken_encoding('half', 'dtype', RuntimeError)
class FixedDtype(PositionEncoding):
    per_layer = False

    def embed(self, x, grid):
        return x @ torch.eye(self.dim)


@broken_encoding('deepcopy', 'copy: differs')
@broken_encoding('pickled', 'pickle', (AttributeError, pickle.PicklingError))
class HoldsClosure(PositionEncoding):
    def __init__(self, **host):
        super().__init__(**host)
        self.slope = nn.Parameter(torch.ones(1))
        self.bias = lambda x: x * self.slope

    def position_bias(self, grid):
        position = grid.coordinates(dtype=torch.float32)
        return grid.pad_prefix(self.bias(-torch.cdist(position, position)))


@broken_encoding('state_dict', 'loaded model: differs')
@broken_encoding('config', 'model made again: differs')
class HidesState(PositionEncoding):
    def __init__(self, **host):
        super().__init__(**host)
        self.slope = torch.rand(1)

    def position_bias(self, grid):
        position = grid.coordinates(dtype=torch.float32)
        return grid.pad_prefix(-self.slope * torch.cdist(position, position))


@broken_encoding('config', 'must be plain JSON', ValueError, pos_enc_kwargs={'broken': {'slope': torch.ones(1)}})
class WantsTensor(PositionEncoding):
    def __init__(self, *, slope=None, **host):
        super().__init__(**host)


@broken_encoding('threads', 'result of a thread: differs')
@broken_encoding('nothing_stored', "stored in forward: .*'height'")
class RemembersHeight(PositionEncoding):
    height = 0

    def content_bias(self, q, k, grid):
        self.height = grid.height
        time.sleep(0.001)
        return q @ k.transpose(-2, -1) * self.height


@broken_encoding('nothing_stored', "stored in forward: .*'cache'")
class FillsCache(PositionEncoding):
    def __init__(self, **host):
        super().__init__(**host)
        self.cache = {}

    def position_bias(self, grid):
        if grid.size not in self.cache:
            position = grid.coordinates(dtype=torch.float32)
            self.cache[grid.size] = grid.pad_prefix(-torch.cdist(position, position))
        return self.cache[grid.size]


@broken_encoding('nothing_stored', "stored in forward: .*'log'")
class AppendsToList(PositionEncoding):
    def __init__(self, **host):
        super().__init__(**host)
        self.log = []

    def position_bias(self, grid):
        self.log.append(grid.size)
        return torch.zeros(1, 1)


@broken_encoding('nothing_stored', "stored in forward: .*'count'")
class WritesBuffer(PositionEncoding):
    def __init__(self, **host):
        super().__init__(**host)
        self.register_buffer('count', torch.zeros(1))

    def position_bias(self, grid):
        self.count += 1
        return self.count[None]


@broken_encoding('nothing_stored', "stored in forward: .*'seen'")
class WritesClass(PositionEncoding):
    seen = 0

    def position_bias(self, grid):
        type(self).seen += 1
        return torch.zeros(1, 1)


@pytest.mark.parametrize('pos_enc', POS_ENCS)
@pytest.mark.parametrize('name', CONTRACTS)
def test_contract(name, pos_enc):
    for grid in CONTRACTS[name].grids:
        CONTRACTS[name](Maker(pos_enc, grid))


RESCALING = [name for name in timm_sape.list_encodings() if 'resolution' in timm_sape.encoding_keywords(name)]


@pytest.mark.parametrize('pos_enc', RESCALING)
@pytest.mark.parametrize('name', ['dynamic_img_size', 'set_input_size', 'three_roads', 'meta_device', 'half', 'config'])
def test_contract_with_rescaling(name, pos_enc):
    """The trained grid, which an encoding then has to know, gets lost on no road."""
    for grid in CONTRACTS[name].grids[:2]:
        make = Maker(pos_enc, grid, pos_enc_kwargs={pos_enc: {'resolution': 'rescale'}})
        assert make().ref_grid_size == grid
        CONTRACTS[name](make)


@pytest.mark.parametrize('pos_enc', RESCALING)
def test_rescaling_matters(pos_enc):
    y = Maker(pos_enc).images(grid=(4, 6))
    outs = [
        Maker(pos_enc, pos_enc_kwargs={pos_enc: {'resolution': resolution}})(dynamic_img_size=True)(y)
        for resolution in ('extrapolate', 'rescale')]
    assert (outs[0] - outs[1]).abs().max() > 1e-4


@pytest.mark.parametrize('control', CONTROLS, ids=repr)
def test_contract_rejects(control, monkeypatch):
    with control.apply(monkeypatch), pytest.raises(control.raises, match=control.match):
        CONTRACTS[control.contract](control.make)


def test_every_contract_has_a_control():
    assert {control.contract for control in CONTROLS} == CONTRACTS.keys()


@pytest.mark.parametrize('pos_enc', POS_ENCS)
def test_encodings_are_awake(pos_enc):
    """The contracts look at models in which position matters: moving the patches moves the prefix tokens."""
    make = Maker(pos_enc)
    model, x = make(), make.images()
    moved, still = (
        model.forward_features(y)[:, :5] for y in (x.unflatten(3, (5, PATCH)).roll(2, 3).flatten(3), x))
    if pos_enc == 'nope':
        same(moved, still, 'nope')
    else:
        assert (moved - still).abs().max() > 1e-2
