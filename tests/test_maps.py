"""Maps of position show what the layers compute."""
from dataclasses import replace

import pytest
import timm
import torch
import torch.nn as nn

import timm_sape
from common import POS_ENCS, ToyLayer, ToyShared, randomize, registered
from harness import assert_near
from timm_sape.analysis import attention_distance, position_maps, similarity
from timm_sape.functional import sape2_bias

SIZE = (24, 40)  # 3 x 5 patches


@pytest.fixture(autouse=True, scope='module')
def third_party():
    with registered(ToyShared, ToyLayer):
        yield


def build(pos_enc, **kwargs):
    kwargs = dict(img_size=SIZE, patch_size=8, reg_tokens=2) | kwargs
    model = timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, **kwargs).double().eval()
    with torch.no_grad():
        return randomize(model)


def images(batch=2, size=SIZE):
    return torch.randn(batch, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def output_of(module, model, x):
    seen = []
    hook = module.register_forward_hook(lambda module, args, out: seen.append((args, out)))
    model(x)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize('mode', ['q', 'k', 'qk'])
def test_bias_is_that_of_the_functional_api(mode):
    model, x = build(f'sape2_{mode}'), images()
    maps = position_maps(model, x, layers=[1])
    block = model.blocks[1]
    encoding = block.attn.encodings[f'sape2_{mode}']
    (tokens,), _ = output_of(block.attn, model, x)
    qkv = block.attn.qkv(tokens).view(2, -1, 3, 4, 16).permute(2, 0, 3, 1, 4)
    q, k = block.attn.q_norm(qkv[0]), block.attn.k_norm(qkv[1])
    expected = sape2_bias(q, k, encoding.table_x, encoding.table_y, (3, 5), mode=mode, num_prefix_tokens=3)
    assert maps.grid.size == (3, 5) and maps.grid.num_prefix_tokens == 3
    assert maps.layers[0].position.shape == (2, 4, 18, 18) and expected.max() > 0.1
    assert_near(maps.layers[0].position, expected, 1e-12)
    assert_near(maps.layers[0].content, q @ k.transpose(-2, -1) / 4, 1e-12)


@pytest.mark.parametrize('pos_enc', POS_ENCS)
def test_attention_is_what_the_layer_computes(pos_enc):
    model, x = build(pos_enc), images()
    maps = position_maps(model, x)
    assert [layer.index for layer in maps.layers] == list(range(len(model.blocks)))
    for layer, block in zip(maps.layers, model.blocks):
        attn = block.attn
        (_, _, v, *_), out = output_of(attn.encodings, model, x)
        found = layer.attention @ v
        for encoding in attn.encodings.acting_on('values'):
            found = found + encoding.values(layer.attention, maps.grid)
        assert_near(found, out, 1e-9)
        _, whole = output_of(attn, model, x)
        assert_near(attn.proj(attn.norm(found.transpose(1, 2).flatten(2))), whole, 1e-9)


@pytest.mark.parametrize('name, kwargs', [
    ('vit_tiny_patch16_224', {'patch_size': (8, 16)}),
    ('vit_small_patch14_reg4_dinov2', {'img_size': 56}),
    ('vit_relpos_small_patch16_224', {}),
    ('vit_srelpos_small_patch16_224', {}),
    ('vit_small_patch16_rope_224', {}),
    ('eva02_tiny_patch14_224', {'img_size': 56}),
    ('eva02_base_patch16_clip_224', {}),
    ('vit_small_patch16_dinov3', {}),
    ('vit_base_patch16_sapiens2', {'embed_dim': 64, 'num_heads': 4, 'num_kv_heads': 2}),  # heads share keys
])
def test_attention_of_stock_models(name, kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, **{'img_size': 64, 'depth': 2} | kwargs).eval()
    for block in model.blocks:
        block.attn.fused_attn = False
    with torch.no_grad():  # or biases are zero
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = torch.randn(1, 3, *model.patch_embed.img_size)
    maps = position_maps(model, x, layers=[-1])
    (expected,), _ = output_of(model.blocks[-1].attn.attn_drop, model, x)
    assert maps.layers[0].index == 1 and maps.grid.size == model.patch_embed.grid_size
    assert_near(maps.layers[0].attention, expected.detach(), 1e-5)
    moves = any(kind in name for kind in ('relpos', 'rope', 'dinov3', 'eva', 'sapiens2'))
    assert bool(maps.layers[0].position.abs().max() > 0) is moves


def test_rotations_do_not_change_what_a_patch_says_to_itself():
    maps = position_maps(build('rope2d'), images())
    for layer in maps.layers:
        assert layer.position.diagonal(dim1=-2, dim2=-1).abs().max() < 1e-12
        assert (layer.position[:, :, :3, :3] == 0).all() and (layer.position[:, :, 3:, 3:].abs().max() > 0.1)


def test_vectors_of_the_tokens():
    model = build('ape+sincos2d')
    maps = position_maps(model, images())
    sincos = build('sincos2d')
    alone = position_maps(sincos, images()).vectors
    assert_near(maps.vectors, model.pos_embed[0, -15:] + alone, 1e-12)
    unit = maps.vectors / maps.vectors.norm(dim=1, keepdim=True)
    assert_near(similarity(maps.vectors), unit @ unit.T, 1e-12)
    assert similarity(position_maps(build('ope'), images()).vectors).shape == (2, 15, 15)
    assert position_maps(build('rope2d'), images()).vectors is None
    assert all(layer.vectors is None for layer in maps.layers)
    lape = build('lape')
    chain = position_maps(lape, images(), layers=[1]).layers[0].vectors
    _, position = lape.embed(images())
    assert chain.shape == (15, 64) and torch.equal(chain, position.layer_terms[1, 3:])
    stock = timm.create_model('vit_tiny_patch16_224', depth=1, img_size=64).eval()
    assert torch.equal(position_maps(stock, torch.zeros(1, 3, 64, 64)).vectors, stock.pos_embed[0, 1:])


@pytest.mark.parametrize('kind', ['learned', 'factorized', 'none'])
@pytest.mark.parametrize('size', [(64, 64), (64, 96)])
def test_vectors_of_timms_naflexvit(kind, size):
    model = timm.create_model(
        'naflexvit_base_patch16_gap', img_size=64, depth=1, embed_dim=64, num_heads=2, pos_embed=kind).double().eval()
    vectors = position_maps(model, images(1, size)).vectors
    of_graft = position_maps(timm_sape.graft(model, 'nope'), images(1, size)).vectors
    if kind == 'none':
        assert vectors is None and of_graft is None
        return
    assert_near(of_graft, vectors, 1e-12)
    prefix = model.num_prefix_tokens
    with torch.no_grad():
        with_table = model.embeds(images(1, size))[0][0, prefix:]
        for name, table in model.embeds.named_parameters():
            if name.startswith('pos_embed'):
                table.zero_()
        without = model.embeds(images(1, size))[0][0, prefix:]
    assert vectors.any()
    assert_near(vectors, with_table - without, 1e-6)  # timm resizes tables in float32


@pytest.mark.parametrize('name, kwargs', [
    ('vit_tiny_patch16_224', {}),
    ('vit_small_patch14_reg4_dinov2', {'patch_size': 16}),
    ('eva02_tiny_patch14_224', {'patch_size': 16}),
])
@pytest.mark.parametrize('size, grid_size, pad', [
    ((64, 32), (4, 2), False),  # as many patches as the model's own grid has
    ((64, 96), (4, 6), False),
    ((32, 64), (2, 4), False),
    ((60, 30), (4, 2), True),
])
def test_vectors_of_timms_models_of_any_size(name, kwargs, size, grid_size, pad):
    model = timm.create_model(
        name, img_size=(32, 64), depth=1, dynamic_img_size=True, dynamic_img_pad=pad, **kwargs).double().eval()
    x = images(1, size)
    maps = position_maps(model, x)
    assert maps.grid.size == grid_size and maps.vectors.any()
    with torch.no_grad():
        (with_table, *_), _ = output_of(model.blocks[0], model, x)
        model.pos_embed.zero_()
        (without, *_), _ = output_of(model.blocks[0], model, x)
    expected = (with_table - without)[0, model.num_prefix_tokens:]
    assert_near(maps.vectors, expected, 1e-6)  # timm resizes tables in float32


@pytest.mark.parametrize('layers, expected', [([0, 0], [0]), ([1, 0, -1], [1, 0])])
def test_a_layer_that_is_named_twice_counts_once(layers, expected):
    maps = position_maps(build('rope2d'), images(), layers=layers)
    assert [layer.index for layer in maps.layers] == expected


def test_the_caller_names_objects():
    model = build('ope')
    index = torch.arange(15).expand(2, -1)
    found = position_maps(model, images(), object_index=index).vectors
    assert (found != position_maps(model, images()).vectors).any()


def test_model_is_left_as_it_was():
    model, x = build('ape+sape2_k'), images()
    before = model(x)
    position_maps(model, x)
    assert torch.equal(model(x), before)
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ValueError, match='made for 24x40'):
        position_maps(model, images(size=(8, 8)))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_attention_distance():
    grid = timm_sape.Grid(1, 3, 1)
    looks_at_itself = torch.eye(4)[None, None]
    assert attention_distance(looks_at_itself, grid).tolist() == [0]
    everywhere = torch.full((1, 1, 4, 4), 0.25)  # (0+1+2)/3, (1+0+1)/3, (2+1+0)/3
    assert_near(attention_distance(everywhere, grid), torch.tensor([8 / 9]), 1e-6)
    heads = torch.cat([looks_at_itself, everywhere], dim=1)
    assert_near(attention_distance(heads, grid), torch.tensor([0, 8 / 9]), 1e-6)


def test_attention_distance_of_patches_in_another_order():
    attention = torch.rand(2, 3, 7, 7, dtype=torch.float64).softmax(-1)  # a class token and 2x3 patches
    grid = timm_sape.Grid(2, 3, 1)
    orders = torch.stack([torch.randperm(6) for _ in range(2)])
    tokens = [[0, *(order + 1).tolist()] for order in orders]
    moved = torch.stack([image[:, kept][:, :, kept] for image, kept in zip(attention, tokens)])
    found = attention_distance(moved, replace(grid, keep_indices=orders))
    assert_near(found, attention_distance(attention, grid), 1e-12)
    one = replace(grid, keep_indices=torch.tensor([[5], [0]]))
    assert attention_distance(torch.ones(2, 3, 2, 2), one).tolist() == [0, 0, 0]


@pytest.mark.parametrize('masked', [dict(attn_mask=torch.ones(17, 17, dtype=torch.bool)), dict(is_causal=True)])
def test_no_masks(masked):
    model = timm.create_model('test_vit_rope2d', img_size=64).eval()
    with pytest.raises(ValueError, match='attention without a mask'):
        position_maps(model, torch.zeros(1, 3, 64, 64), **masked)


@pytest.mark.parametrize('layers', [0, '0', torch.tensor(1)])
def test_layers_that_are_not_a_list(layers):
    with pytest.raises(ValueError, match=r'layers must be a list of indices, such as \[0\], got'):
        position_maps(build('rope2d'), images(), layers)


@pytest.mark.parametrize('layers', [[2], [-3], [0, 7]])
def test_no_such_layer(layers):
    with pytest.raises(ValueError, match='There is no layer .*: the model has 2, 0 to 1'):
        position_maps(timm.create_model('test_vit_ape', depth=2).eval(), torch.zeros(1, 3, 160, 160), layers)


@pytest.mark.parametrize('model', [nn.Linear(2, 2), timm.create_model('test_resnet')])
def test_no_transformer(model):
    with pytest.raises(ValueError, match='which position_maps cannot read'):
        position_maps(model.eval(), torch.zeros(1, 3, 32, 32))


def test_training_mode():
    """Random draws, of `cape` or of dropped patches, would be other ones than those that the model used."""
    with pytest.raises(ValueError, match=r'without dropout: call model.eval\(\) first'):
        position_maps(build('cape').train(), images())
    model = build('cape')
    model.blocks[0].train()
    with pytest.raises(ValueError, match='without dropout'):
        position_maps(model, images())


def test_images_that_are_a_dict():
    with pytest.raises(ValueError, match=r'takes images \[B, C, height, width\] in a tensor, got dict'):
        position_maps(build('ape'), {'patches': images()})


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_attention_distance_in_half(dtype):
    attention = torch.rand(2, 3, 7, 7).softmax(-1).to(dtype)
    grid = timm_sape.Grid(2, 3, 1)
    assert torch.equal(attention_distance(attention, grid), attention_distance(attention.float(), grid))


def test_a_hybrid_of_timm():
    """Patches of its feature map overlap in the image. It has a grid all the same."""
    model = timm.create_model('vit_tiny_r_s16_p8_224', depth=1).eval()
    assert position_maps(model, torch.zeros(1, 3, 224, 224)).grid.size == (7, 7)
