"""Encodings grafted onto timm's ViTs, which have random weights here instead of pretrained ones."""
import copy
import json
import re
import subprocess
import sys
import warnings
from functools import partial

import pytest
import timm
import torch
from safetensors.torch import load_file, save, save_file
from timm.layers import PatchDropout, resample_patch_embed, to_2tuple
from timm.models import get_model_args, resolve_model_input_args, save_for_hf
from timm.models.naflexvit import NaFlexVit

import timm_sape
from hub_server import environment, serve

SMALL = dict(embed_dim=96, num_heads=4)
ARCHITECTURES = {  # by name: arguments that make it small enough for a test, if there are any
    'vit_tiny_patch16_224': SMALL,
    'vit_small_patch32_224': SMALL,
    'vit_base_patch16_siglip_224': SMALL,  # attention pooling
    'vit_base_patch16_siglip_gap_224': SMALL,
    'vit_base_patch16_clip_224': SMALL,  # pre-norm
    'vit_base_patch16_clip_quickgelu_224': SMALL,
    'vit_base_patch16_rpn_224': SMALL,  # norms after attention and MLP
    'vit_base_patch16_gap_224': SMALL,
    'vit_medium_patch16_gap_240': SMALL,
    'vit_wee_patch16_reg1_gap_256': SMALL,
    'vit_betwixt_patch32_clip_224': SMALL,
    'vit_small_patch14_dinov2': SMALL,  # layer scale
    'vit_small_patch14_reg4_dinov2': SMALL,
    'vit_giant_patch14_dinov2': SMALL,  # SwiGLU
    'vit_so150m_patch16_reg4_map_256': SMALL,
    'vit_so150m2_patch16_reg1_gap_256': SMALL,
    'vit_base_mci_224': {},  # a convolutional stem
    'vit_small_r26_s32_224': SMALL,  # a ResNet
    'flexivit_small': SMALL,
    'deit_tiny_patch16_224': SMALL,
    'deit_tiny_distilled_patch16_224': SMALL,
    'deit3_small_patch16_224': SMALL,  # no table row for the class token
    'aimv2_large_patch14_224': SMALL,  # SwiGLU, RMSNorm, no biases
    'beit3_base_patch16_224': SMALL,  # norms inside attention and MLP
    'test_vit': {},
    'test_vit2': {},
    'test_vit3': {},
    'test_vit4': {},
}
ROTARY = timm.list_models(['vit_*_patch16_rope_224', 'vit_*_patch16_rope_*224'])
RELATIVE = timm.list_models(['vit_relpos_*', 'vit_srelpos_*', 'test_vit_relpos'])
NO_NEUTRAL_FORM = ('ape', 'cape', 'lape', 'lookhere', 'nope', 'pemix')
GRAFTABLE = [name for name in timm_sape.list_encodings() if name not in NO_NEUTRAL_FORM]


def randomised(model, seed=0):
    """The model with parameters far from their initial values, so that lost or permuted ones are noticed."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model.eval()


def base_model(name, grid=(4, 6), **kwargs):
    """A timm model of depth 2 for a few patches, with random parameters."""
    stride = re.search(r'(?:patch|_s)(\d+)', name)
    size = [n * int(stride[1] if stride else 16) for n in grid]
    torch.manual_seed(0)  # for what timm draws itself
    model = randomised(timm.create_model(name, depth=2, img_size=size, num_classes=5, **kwargs))
    assert model.patch_embed.grid_size == grid
    return model


def images(model, batch=2):
    torch.manual_seed(1)
    return torch.randn(batch, 3, *model.patch_embed.img_size)


def largest_difference(model, other, x):
    with torch.no_grad():
        return (model(x) - other(x)).abs().max().item()


def assert_same(grafted, model):
    """Both give the same logits of images, within 1e-5, or 1e-10 in float64, and logits do depend on images."""
    x = images(model).to(model.head.weight.dtype)
    assert largest_difference(grafted, model, x) < (1e-5 if x.dtype == torch.float32 else 1e-10)
    with torch.no_grad():
        assert (model(x) - model(x.flip(3))).abs().max() > 1e-3


def gates(model):
    return [p for name, p in model.named_parameters() if name.endswith('gate.weight')]


def assert_felt(grafted, model):
    """With open gates the encodings change the logits. The negative control of `assert_same`."""
    with torch.no_grad():
        for name, p in grafted.named_parameters():
            if '.auto_' in name:
                p.copy_(torch.randn_like(p) if 'gate' not in name else torch.full_like(p, 0.01))
    assert largest_difference(grafted, model, images(model).to(model.head.weight.dtype)) > 1e-4


@pytest.mark.one_of(3)
@pytest.mark.parametrize('dtype', [
    pytest.param(torch.float32, id='float32'), pytest.param(torch.float64, id='float64', marks=pytest.mark.full)])
@pytest.mark.parametrize('name', ARCHITECTURES)
def test_architectures(name, dtype):
    model = base_model(name, dtype=dtype, **ARCHITECTURES[name])
    for pos_enc in ('sape2_k', 'rope2d_mixed', 'irpe_qkv'):
        grafted = timm_sape.graft(model, pos_enc)
        assert grafted.pos_enc == f'ape+auto_{pos_enc}'
        assert_same(grafted, model)
        assert_felt(grafted, model)


@pytest.mark.one_of(3)
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=['float32', 'float64'])
@pytest.mark.parametrize('name', [*ROTARY, *RELATIVE])
def test_converted(name, dtype):
    """The rotary ViTs of naver and the relative-position ViTs, unchanged and with an encoding grafted on.

    timm computes the tables of both kinds in float32 even in a float64 model, so there the results differ by rounding.
    """
    model = base_model(name, dtype=dtype, **SMALL)
    own = {'ape'} if 'ape' in name else set()
    own.add('cpb' if 'relpos' in name else 'rope2d_mixed' if 'mixed' in name else 'rope2d')
    converted = timm_sape.graft(model, 'nope')
    assert set(converted.pos_enc.split('+')) == own
    assert largest_difference(converted, model, images(model).to(dtype)) < 1e-5
    grafted = timm_sape.graft(model, 'sape2_k')
    assert set(grafted.pos_enc.split('+')) == {*own, 'auto_sape2_k'}
    assert_same(grafted, converted)
    assert_felt(grafted, converted)


def test_lists_of_converted():
    assert len(ROTARY) == 12
    assert len(RELATIVE) == 14


def test_converted_trains_as_before():
    """Dropout rates are those of the model, including that of the MLP."""
    kwargs = dict(depth=2, drop_path_rate=0.2, proj_drop_rate=0.1, attn_drop_rate=0.3, drop_rate=0.4)
    for name in ('vit_relpos_small_patch16_224', 'vit_small_patch16_rope_224'):
        model = timm.create_model(name, **kwargs)
        grafted = timm_sape.graft(model, 'nope')
        rates = [
            [getattr(m, 'p', getattr(m, 'drop_prob', None)) for m in (
                net.head_drop, net.blocks[1].attn.attn_drop, net.blocks[1].attn.proj_drop, net.blocks[1].drop_path1,
                net.blocks[1].mlp.drop1)]
            for net in (model, grafted)]
        assert rates[0] == rates[1] and rates[0][1] == 0.3
    mlp = timm_sape.graft('vit_relpos_small_patch16_224', 'nope', depth=2).blocks[0].attn.encodings['cpb'].mlp
    assert mlp.drop1.p == 0.125


@pytest.mark.one_of(2)
@pytest.mark.parametrize('pos_enc', GRAFTABLE)
def test_encodings(pos_enc):
    """Each encoding on one model: neutral at first, learning from the first step on, and effective afterwards.

    The model pools over all patches. (If only the class token is used, a bias between patches has no effect in the last
    layer.)
    """
    model = base_model('test_vit', grid=(3, 5), global_pool='avg')
    grafted = timm_sape.graft(model, pos_enc)
    assert grafted.pos_enc == f'ape+auto_{pos_enc}'
    assert_same(grafted, model)
    wide = base_model('test_vit', grid=(3, 5), global_pool='avg', dtype=torch.float64)
    assert_same(timm_sape.graft(wide, pos_enc), wide)

    x, target = images(model, batch=4), torch.tensor([0, 1, 2, 3])
    optimizer = torch.optim.AdamW(grafted.parameters(), lr=1e-3)
    new = {name: p for name, p in grafted.named_parameters() if '.auto_' in name}
    torch.nn.functional.cross_entropy(grafted(x), target).backward()
    learning = {name for name, p in new.items() if p.grad is not None and p.grad.abs().max() > 0}
    for encoding in grafted.position_encodings():
        if '.auto_' in encoding:
            assert any(name.startswith(f'{encoding}.') for name in learning), f'{encoding} stands still'
    optimizer.step()
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(grafted(x), target).backward()
    still = {name for name, p in new.items() if p.grad is None or not p.grad.abs().max() > 0}
    assert not still
    assert largest_difference(grafted, model, x) > 1e-4


def test_a_zero_on_zeros_would_not_learn():
    """The reason why the gate of an encoding that starts from zeros starts at 1."""
    with pytest.raises(ValueError, match="'auto_cope': init=0 on parameters that start at 0 would never learn"):
        timm_sape.graft('test_vit', 'cope', {'cope': {'init': 0}})
    assert [gate.item() for gate in gates(timm_sape.graft('test_vit', 'cope', depth=2))] == pytest.approx([0.01, 0.01])
    assert [gate.item() for gate in gates(timm_sape.graft('test_vit', 'sape2_k', depth=2))] == [0, 0]


def test_parts_and_keywords():
    model = base_model('test_vit')
    grafted = timm_sape.graft(model, 'sape2+ape+rope2d', {'sape2_k': {'preset': 'equations'}, 'rope2d': {'init': 0.0}})
    assert grafted.pos_enc == 'ape+auto_rope2d+auto_sape2_k'
    assert grafted.pos_enc_kwargs == {
        'auto_rope2d': {'init': 0.0}, 'auto_sape2_k': {'init': 0, 'preset': 'equations'}}
    assert_same(grafted, model)
    half_open = timm_sape.graft(model, 'auto_rope2d', {'auto_rope2d': {'init': 0.5}})
    assert largest_difference(half_open, model, images(model)) > 1e-4


def test_a_model_without_a_table():
    model = base_model('test_vit', pos_embed='none')
    grafted = timm_sape.graft(model, 'sincos2d')
    assert grafted.pos_enc == 'auto_sincos2d' and grafted.pos_embed is None
    assert_same(grafted, model)
    with pytest.raises(ValueError, match="'ape' cannot be grafted: it is timm's own table, which this base does not"):
        timm_sape.graft(model, 'ape+sape2_k')


def test_model_is_left_alone_and_its_state_is_kept():
    model = base_model('test_vit', drop_path_rate=0.1)
    model.reset_classifier(7, 'avg')
    model.set_input_size((64, 32))
    model.blocks[0].requires_grad_(False)
    randomised(model).train().double()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    grafted = timm_sape.graft(model, 'sape2_k')
    assert grafted.training and grafted.cls_token.dtype == torch.float64
    assert grafted.num_classes == 7 and grafted.global_pool == 'avg' and grafted.patch_embed.img_size == (64, 32)
    assert grafted.blocks[1].drop_path1.drop_prob == model.blocks[1].drop_path1.drop_prob > 0
    for name, p in grafted.named_parameters():
        frozen = name.startswith('blocks.0.') and '.auto_' not in name
        assert p.requires_grad is not frozen, name
    with torch.no_grad():
        for p in grafted.parameters():
            p.add_(1)
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert type(model) is timm.models.VisionTransformer


def test_converted_with_other_arguments():
    """Arguments that the class it is converted to has, too."""
    for name, kwargs in (
            ('vit_small_patch16_rope_224', dict(global_pool='map')),
            ('vit_small_patch16_rope_mixed_224', dict(global_pool='avg', init_values=None)),
            ('vit_relpos_medium_patch16_cls_224', dict(fc_norm=True, qk_norm=True, init_values=None, rel_pos_dim=24)),
            ('vit_relpos_medium_patch16_cls_224', dict(norm_layer=partial(torch.nn.LayerNorm, eps=0.1)))):
        model = base_model(name, **{**SMALL, **kwargs})
        assert largest_difference(timm_sape.graft(model, 'nope'), model, images(model)) < 1e-5


def test_conversion_keeps_what_is_frozen_and_takes_any_size():
    model = base_model('vit_srelpos_small_patch16_224', **SMALL).requires_grad_(False)
    model.head.requires_grad_(True)
    grafted = timm_sape.graft(model, 'sape2_k')
    trained = {name for name, p in grafted.named_parameters() if p.requires_grad and 'auto_' not in name}
    assert trained == {'head.weight', 'head.bias'}

    dynamic = timm.create_model(
        'vit_graft', base='vit_relpos_small_patch16_224', pos_enc='nope', depth=1, dynamic_img_size=True)
    assert dynamic(torch.randn(1, 3, 48, 80)).shape == (1, 1000)


def test_rule_for_other_sizes_of_what_the_base_has():
    kwargs = {'pos_enc_kwargs': {'rope2d': {'resolution': 'rescale'}}}
    model = base_model('vit_small_patch16_rope_224', **SMALL)
    grafted = timm_sape.graft(model, 'rope2d', **kwargs)
    assert grafted.pos_enc_kwargs == kwargs['pos_enc_kwargs']
    assert largest_difference(grafted, model, images(model)) < 1e-5


@pytest.mark.parametrize('base, pos_enc, kwargs', [
    ('vit_small_patch16_rope_224', 'rope2d', {'pos_enc_kwargs': {'rope2d': {'resolution': 'rescale'}}}),
    ('vit_tiny_patch16_224', 'sape2_k', {'logit_scaling': 'log'}),
    ('vit_small_patch16_dinov3', 'nope', {'logit_scaling': 'log'}),
])
def test_rule_for_other_sizes_of_what_the_base_has_at_once(base, pos_enc, kwargs, tmp_path):
    """A model that is created by name at another size than its weights is as one that is resized after loading."""
    model = base_model(base, (4, 4), **SMALL)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(20)  # otherwise attention is so flat that a factor on its logits does nothing
    save_for_hf(model, str(tmp_path / 'base'), safe_serialization=True)
    size = dict(img_size=(128, 96), pretrained=True)
    shape = dict(SMALL, depth=2, num_classes=5, **size)
    cfg = dict(state_dict=model.state_dict(), num_classes=5, input_size=(3, 64, 64), custom_load=False)
    expected = timm_sape.graft(model, pos_enc, **kwargs)
    x = torch.randn(2, 3, 128, 96, generator=torch.Generator().manual_seed(0))
    without = timm_sape.graft(model, 'nope')
    if 'naflex' not in expected.__class__.__module__:
        expected.set_input_size((128, 96))
        without.set_input_size((128, 96))
    assert (expected(x) - without(x)).abs().max() > 1e-3

    for grafted in (
            timm.create_model('vit_graft', base=base, pos_enc=pos_enc, pretrained_cfg_overlay=cfg, **shape, **kwargs),
            timm_sape.graft(base, pos_enc, pretrained_cfg_overlay=cfg, **shape, **kwargs),
            timm_sape.graft(f'local-dir:{tmp_path / "base"}', pos_enc, **size, **kwargs)):
        assert grafted.ref_grid_size == expected.ref_grid_size == (4, 4)
        torch.testing.assert_close(grafted.eval()(x), expected(x), rtol=0, atol=1e-5)

    del cfg['input_size']
    for create in (partial(timm.create_model, 'vit_graft', base=base, pos_enc=pos_enc), partial(
            timm_sape.graft, base, pos_enc)):
        given = create(pretrained_cfg_overlay=cfg, ref_grid_size=(4, 4), **shape, **kwargs)
        torch.testing.assert_close(given.eval()(x), expected(x), rtol=0, atol=1e-5)
        if model.pos_embed is not None:
            assert create(pretrained_cfg_overlay=cfg, **shape, **kwargs).ref_grid_size == (4, 4)  # that of the table
            continue
        with pytest.raises(ValueError, match=r'ref_grid_size=\(H, W\)'):
            create(pretrained_cfg_overlay=cfg, **shape, **kwargs)


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'vit_small_patch16_dinov3', 'vit_tiny_r_s16_p8_224'])
def test_trained_grid_of_a_file(name):
    """Of patches of another size than the name's, and of a stem that rounds up."""
    size, patch = (126, {}) if '_s16_' in name else (64, {'patch_size': 8})
    model = randomised(timm.create_model(name, depth=2, img_size=size, num_classes=5, **patch, **SMALL))
    grid = model.patch_embed.grid_size
    cfg = dict(state_dict=model.state_dict(), num_classes=5, input_size=(3, size, size), custom_load=False)
    kwargs = dict(SMALL, depth=2, num_classes=5, pretrained=True, logit_scaling='log', **patch)
    full = {**timm.get_pretrained_cfg(name).to_dict(), **cfg}
    for now in (size, 192):
        for source in (dict(pretrained_cfg_overlay=cfg), dict(pretrained_cfg=full)):
            assert timm_sape.graft(name, 'sape2_k', img_size=now, **source, **kwargs).ref_grid_size == grid
            assert timm.create_model(
                'vit_graft', base=name, pos_enc='sape2_k', img_size=now, **source, **kwargs).ref_grid_size == grid


@pytest.mark.parametrize('base', ['vit_small_patch16_rope_224', 'vit_small_patch16_dinov3'])
def test_a_base_without_its_rotation(base):
    """A module without parameters leaves nothing in a state dict, so the graft rotated again."""
    model = base_model(base, **SMALL)
    model.rope = None
    with pytest.raises(ValueError, match='differs from what .* makes with the same arguments: rope is gone'):
        timm_sape.graft(model, 'sape2_k')


def test_a_saved_graft_without_its_encodings(tmp_path):
    """They were made anew, silently."""
    grafted = timm_sape.graft(base_model('vit_tiny_patch16_224', **SMALL), 'sape2_k')
    save_for_hf(grafted, str(tmp_path / 'graft'), safe_serialization=True)
    path = tmp_path / 'graft' / 'model.safetensors'
    entries = {name: t for name, t in load_file(path).items() if 'encodings.' not in name}
    save_file(entries, path)
    with pytest.raises(ValueError, match='does not fit .*it lacks blocks.0.attn.encodings.auto_sape2_k'):
        timm.create_model(f'local-dir:{tmp_path / "graft"}', pretrained=True)


def test_arguments_of_the_graft_itself():
    """They are not timm's, and are taken with a name and with a model."""
    torch.manual_seed(0)
    base = timm.create_model('test_vit', img_size=64).eval()
    for model, kwargs in ((base, {}), ('test_vit', {'img_size': 64})):
        grafted = timm_sape.graft(model, 'nope', logit_scaling='log', ref_grid_size=(4, 4), **kwargs).eval()
        assert grafted.logit_scaling == 'log' and grafted._model_args['ref_grid_size'] == [4, 4]
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(timm_sape.graft(base, 'nope', logit_scaling='log').eval()(images), base(images))


def test_modes_are_kept():
    model = timm.create_model('deit_tiny_distilled_patch16_224', depth=2, patch_drop_rate=0.25)
    model.set_distilled_training(True)
    model.set_grad_checkpointing(True)
    model.blocks[0].eval()
    grafted = timm_sape.graft(torch.compile(model, backend='eager'), 'sape2_k')
    assert grafted.grad_checkpointing and grafted.distilled_training and grafted.patch_drop.prob == 0.25
    assert grafted.training and not grafted.blocks[0].training and grafted.blocks[1].mlp.training
    assert [out.shape for out in grafted(torch.randn(2, 3, 224, 224))] == [(2, 1000)] * 2


def test_config_is_kept():
    overlay = dict(mean=(0.1, 0.2, 0.3), hf_hub_id='', url='')
    model = timm.create_model('test_vit', pretrained_cfg_overlay=overlay, depth=1)
    assert timm_sape.graft(model, 'rope2d').pretrained_cfg['mean'] == (0.1, 0.2, 0.3)


def test_a_size_that_patches_do_not_divide():
    """SigLIP's 384 with patches of 14: timm crops the rest."""
    model = randomised(timm.create_model('vit_tiny_patch16_224', img_size=72, depth=2, **SMALL))
    assert_same(timm_sape.graft(model, 'ope'), model)  # 'ope' uses the image itself
    grafted = timm_sape.graft(model, 'sape2_k')
    assert_same(grafted, model)
    grafted.set_input_size((72, 72))
    with pytest.raises(ValueError, match='does not divide'):
        grafted.set_input_size((73, 73))


def test_a_size_that_the_patches_do_not_divide_is_told(tmp_path):
    """Only where the user gives it: timm has weights for such sizes."""
    create = partial(timm_sape.graft, 'vit_tiny_patch16_224', 'rope2d', depth=1)
    with pytest.warns(UserWarning, match=r'16x16 pixels do not divide .*100\).* Give img_size=\(64, 112\)'):
        timm_sape.hub.save(create(img_size=(64, 100)), tmp_path / 'graft')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        create(img_size=(64, 112))
        create()
        create(img_size=(64, 100), dynamic_img_size=True, dynamic_img_pad=True)
        timm_sape.hub.load(tmp_path / 'graft')


@pytest.mark.parametrize(('name', 'kwargs'), [
    ('vit_betwixt_patch16_rope_reg4_gap_256', {}),
    ('eva02_tiny_patch14_224', {}),
    ('vit_small_patch16_rope_224', dict(rope_temperature=50.)),
    ('vit_small_patch16_rope_224', dict(rope_shift_coords=0.1)),
    ('vit_small_patch16_rope_224', dict(rope_grid_offset=0.5)),
    ('vit_small_patch16_rope_224', dict(rope_grid_indexing='ij')),
    ('vit_small_patch16_rope_224', dict(rope_rotate_half=True)),
    ('vit_small_patch16_rope_224', dict(ref_feat_shape=(7, 7))),
    ('vit_small_patch16_rope_224', dict(global_pool='map', attn_pool_num_heads=2)),
])
def test_eva_without_a_plain_twin_becomes_a_naflexvit(name, kwargs):
    base = timm.create_model(name, depth=2, num_classes=5, **kwargs).eval()
    grafted = timm_sape.graft(base, 'sape2_k')
    assert isinstance(grafted, timm_sape.NaFlexVitPosEnc) and 'Rotary' in grafted.base_position
    x = torch.randn(2, 3, *base.default_cfg['input_size'][1:])
    torch.testing.assert_close(grafted(x), base(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', [
    'vit_tiny_patch16_224', 'vit_small_patch16_rope_224', 'vit_small_patch16_dinov3', 'vit_pe_core_tiny_patch16_384'])
def test_whatever_timm_makes_by_default(name, monkeypatch, tmp_path):
    """Environment variables have timm build a NaFlexVit. A graft is one of the model that there is."""
    folders = {}
    for is_naflex in (False, True):
        monkeypatch.setenv('TIMM_USE_NAFLEX', str(int(is_naflex)))
        monkeypatch.setattr(timm.models.vision_transformer, '_USE_NAFLEX_DEFAULT', is_naflex)
        model = randomised(timm.create_model(name, depth=2, img_size=64, num_classes=5))
        assert isinstance(model, NaFlexVit) == is_naflex
        x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
        grafted = timm_sape.graft(model, 'sape2_k')
        assert largest_difference(grafted, model, x) < 2e-5
        folders[tmp_path / str(is_naflex)] = grafted
    for is_naflex in (False, True):  # whatever it is when they are loaded
        monkeypatch.setenv('TIMM_USE_NAFLEX', str(int(is_naflex)))
        monkeypatch.setattr(timm.models.vision_transformer, '_USE_NAFLEX_DEFAULT', is_naflex)
        for folder, grafted in folders.items():
            save_for_hf(grafted, str(folder), safe_serialization=True)
            loaded = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
            assert type(loaded) is type(grafted) and largest_difference(loaded, grafted, x) < 1e-6


@pytest.mark.parametrize('name, kwargs, message', [
    ('resnet18', {}, 'ResNet cannot be grafted'),
    ('vit_base_patch16_18x2_224', {}, 'does not support ParallelThingsBlock'),
    ('vit_pwee_patch16_reg1_gap_256', {}, 'does not support ParallelScalingBlock'),
    ('vit_dwee_patch16_reg1_gap_256', {}, 'does not support DiffAttention'),
    ('vit_small_patch16_rope_224', dict(attn_only_layer_scale=True), 'Eva cannot be converted if .* it lacks'),
    ('vit_small_patch16_rope_224', dict(use_post_transformer_norm=False), 'Eva cannot be converted .* it lacks norm'),
    (
        'vit_small_patch16_rope_ape_224', dict(no_embed_class=False),
        'Eva cannot be converted .* it has pos_embed .*, leave it out: no_embed_class.$'),
    ('vit_relpos_small_patch16_224', dict(rel_pos_type='bias'), 'only rel_pos_type=.mlp. can be converted'),
    ('vit_relpos_small_patch16_224', dict(rel_pos_type='mlp_swin'), 'only rel_pos_type=.mlp. can be converted'),
    (
        'test_vit_ape', {},
        "is already a model of timm_sape, with 'ape'.*pos_enc='ape\\+auto_sape2_k', .*'init': 0.*_overlay={'mean': "),
    ('vit_small_patch16_rope_224', dict(use_post_norm=True), 'EvaBlockPostNorm'),
    ('vit_small_patch16_dinov3', dict(use_rot_pos_emb=False), 'its rotation is None, but RotaryEmbeddingDino'),
    ('test_vit', dict(features_only=True), "create_model.'vit_graft', features_only=True, base='test_vit'"),
])
def test_refused(name, kwargs, message):
    depth = {} if name == 'resnet18' else {'depth': 2}
    with pytest.raises(ValueError, match=message):
        timm_sape.graft(name, 'sape2_k', **depth, **kwargs)


def test_a_rotation_that_the_graft_would_not_have():
    """The same without weights, and with those of a file."""
    base = dict(base='vit_small_patch16_dinov3', use_rot_pos_emb=False, depth=2)
    overlay = dict(state_dict=timm.create_model(base['base'], use_rot_pos_emb=False, depth=2).state_dict())
    for weights in ({}, dict(pretrained=True, pretrained_cfg_overlay=overlay, num_classes=0)):
        with pytest.raises(ValueError, match='its rotation is None, but RotaryEmbeddingDino'):
            timm.create_model('vit_graft', pos_enc='sape2_k', **base, **weights)


def test_a_graft_is_not_grafted_again():
    grafted = timm_sape.graft('test_vit', 'rope2d', depth=2)
    with pytest.raises(ValueError, match="with all encodings, base='test_vit', pos_enc='ape.auto_rope2d.auto_sape2_k'"):
        timm_sape.graft(grafted, 'sape2_k')
    # without use_naflex=True it would be a plain ViT, which load_state_dict(..., strict=False) gives only its blocks
    grafted = timm_sape.graft('test_vit', 'rope2d', depth=2, use_naflex=True)
    with pytest.raises(ValueError, match="base='test_vit', use_naflex=True, pos_enc='auto_rope2d.auto_sape2_k'"):
        timm_sape.graft(grafted, 'sape2_k')


@pytest.mark.parametrize('change', [
    lambda model: model.prune_intermediate_layers([0]),
    lambda model: model.prune_intermediate_layers([0], prune_norm=True),
    lambda model: model.reset_classifier(3, 'max')], ids=['head pruned', 'norm pruned', 'max pooling'])
@pytest.mark.parametrize('name', ['test_vit_relpos', 'vit_small_patch16_rope_mixed_ape_224'])
def test_a_converted_model_is_saved_as_it_is(name, change, tmp_path):
    """It may have what the class of its base cannot be built with."""
    grafted = timm_sape.graft(base_model(name, embed_dim=96, num_heads=4), 'cope')
    change(grafted)
    x = images(grafted)
    save_for_hf(randomised(grafted), str(tmp_path), safe_serialization=True)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    assert torch.equal(loaded(x), grafted(x))
    assert type(loaded.norm) is type(grafted.norm) and loaded.global_pool == grafted.global_pool


@pytest.mark.parametrize('name', NO_NEUTRAL_FORM)
def test_encodings_that_are_refused(name):
    if name == 'nope':  # nothing to add
        assert timm_sape.graft('test_vit', name, depth=2).pos_enc == 'ape'
        return
    with pytest.raises(ValueError, match="no neutral form|is .ape. passed from layer to layer|has 'ape' already"):
        timm_sape.graft('test_vit', name, depth=2)


def test_changed_models_are_refused():
    with pytest.raises(ValueError, match='was not made by timm.create_model'):
        timm_sape.graft(timm.models.VisionTransformer(depth=1, embed_dim=64, num_heads=2), 'sape2_k')
    model = timm.create_model('test_vit')
    model.blocks = model.blocks[:2]
    with pytest.raises(ValueError, match='it lacks blocks.2.*Graft it first, then change it'):
        timm_sape.graft(model, 'sape2_k')
    model = timm.create_model('test_vit')
    model.blocks[3].mlp.act = torch.nn.ReLU()
    with pytest.raises(ValueError, match=r'blocks.3.mlp.act is ReLU\(\), not GELU'):
        timm_sape.graft(model, 'sape2_k')
    for change, message in (
            (lambda model: setattr(model, 'pool_include_prefix', True), 'model.pool_include_prefix is True, not False'),
            (lambda model: setattr(model.blocks[1].attn, 'scale', 1.), 'blocks.1.attn.scale is 1.0, not'),
            (lambda model: setattr(model.blocks[1].mlp.fc2, 'weight', model.blocks[0].mlp.fc2.weight), 'are one param'),
            (lambda model: model.bfloat16().norm.float(), r'norm.weight is torch.float32, cls_token is torch.bfloat16'),
            (lambda model: setattr(model.norm, 'eps', 1.), 'norm.eps is 1.0, not 1e-06'),
            (lambda model: setattr(model.patch_embed.proj, 'stride', (8, 8)), r'proj.stride is \(8, 8\), not \(16, 16'),
            (lambda model: setattr(model, 'extra', torch.nn.Identity()), r'extra is Identity\(\), not NoneType'),
            (lambda model: setattr(model, 'patch_drop', torch.nn.Dropout(.5)), r'patch_drop is Dropout\(p=0.5'),
            (lambda model: model.norm.register_forward_hook(lambda *args: None), 'norm has hooks'),
            (lambda model: model.register_full_backward_hook(lambda *args: None), 'it has hooks'),
            (lambda model: model.norm.register_forward_pre_hook(lambda *args: None), 'norm has hooks'),
            (lambda model: model.norm.register_full_backward_pre_hook(lambda *args: None), 'norm has hooks'),
            (lambda model: setattr(model.blocks[0], 'forward', model.blocks[1].forward), '0 has a forward of its own')):
        model = timm.create_model('test_vit')
        change(model)
        with pytest.raises(ValueError, match=message):
            timm_sape.graft(model, 'sape2_k')
    model = timm.create_model('naflexvit_base_patch16_gap', depth=1, rope_type='axial')
    model.rope.ref_feat_shape = (14, 14)
    with pytest.raises(ValueError, match=r'rope.ref_feat_shape is \(14, 14\), not None'):
        timm_sape.graft(model, 'sape2_k')
    model = timm.create_model('test_vit')
    model.forward = model.forward  # as accelerate leaves it
    assert timm_sape.graft(model, 'sape2_k').pos_enc == 'ape+auto_sape2_k'
    with pytest.raises(ValueError, match='FeatureGetterNet cannot be grafted'):
        timm_sape.graft(timm.create_model('test_vit', features_only=True), 'sape2_k')
    with pytest.raises(ValueError, match='img_size: arguments of timm.create_model go with the name of a model'):
        timm_sape.graft(timm.create_model('test_vit'), 'sape2_k', img_size=64)


@pytest.mark.parametrize('kwargs, message', [
    ({}, 'vit_graft needs a base'),
    (dict(base='test_vit'), 'vit_graft needs a base and encodings'),
    (dict(base='vit_smal_patch16_224', pos_enc='sape2_k'), "not a model of timm. Did you mean 'vit_small_patch16_224'"),
    (dict(base='test_vit', pos_enc='auto_ape'), "'auto_ape' cannot be grafted: the base already has 'ape'"),
    (dict(base='test_vit_relpos', pos_enc='cpb', pos_enc_kwargs={'cpb': {'mode': 'swin'}}), "base's own encoding"),
    (dict(base='test_vit', pos_enc='rope2d', pos_enc_kwargs={'cope': {'npos': 3}}), "'cope', which is not a part of"),
    (dict(base='test_vit', pos_enc='rope2d', pos_enc_kwargs={'rope2d': {'npos': 3}}), "'auto_rope2d' has no keyword"),
    (dict(base='test_vit', pos_enc='pemix+sincos2d'), "'pemix' cannot be grafted: it has no neutral form"),
    (dict(base='test_vit', pos_enc='rope2d+rope2d_mixed'), 'two rotations'),
    (dict(base='test_vit_relpos', pos_enc='auto_cpb'), "'auto_cpb' cannot be grafted: the base already has 'cpb'"),
    (dict(base='test_vit_ape', pos_enc='rope2d'), 'is not a model of timm. Did you mean'),
    (dict(base='local-dir:x', pos_enc='rope2d'), 'It must be an architecture; timm_sape.graft takes saved models'),
    (dict(base=5, pos_enc='rope2d'), 'base=5 is not a model of timm'),
    (dict(base='test_vit', pos_enc='rope2d', pos_enc_kwargs='x'), 'pos_enc_kwargs must map parts to their keywords'),
    (dict(base='test_vit', pos_enc='rope2d', pos_enc_kwargs={'rope2d': 5}), 'pos_enc_kwargs must map parts to their'),
    (dict(base='test_vit', pos_enc='cope', pos_enc_kwargs={'cope': {'npos': 3}, 'auto_cope': {}}), 'under two names'),
    (dict(base='test_vit', pos_enc='sape2_k', ref_grid_size=3), 'ref_grid_size must be'),
    (dict(base='test_vit', pos_enc='sape3'), "Unknown position encoding 'sape3'"),
])
def test_wrong_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model('vit_graft', **kwargs)


# ---- saved, and built again

CONVERTED = ('vit_small_patch16_rope_mixed_ape_224', 'vit_srelpos_small_patch16_224', 'vit_relpos_base_patch16_rpn_224')


@pytest.mark.one_of(4)
@pytest.mark.parametrize('name', [*ARCHITECTURES, *CONVERTED])
def test_saved_and_loaded(name, tmp_path):
    grafted = timm_sape.graft(base_model(name, **ARCHITECTURES.get(name, SMALL)), 'sape2_k')
    assert_felt(grafted, copy.deepcopy(grafted))  # this opens the gates of `grafted`
    save_for_hf(grafted, str(tmp_path), safe_serialization=True)
    config = json.loads((tmp_path / 'config.json').read_text())
    assert config['architecture'] == 'vit_graft' and config['model_args']['base'] == name
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    assert type(loaded) is type(grafted) and loaded.pos_enc == grafted.pos_enc
    x = images(grafted)
    with torch.no_grad():
        assert torch.equal(loaded(x), grafted(x))
    assert get_model_args(loaded) == {**get_model_args(grafted), 'img_size': get_model_args(loaded)['img_size']}
    with pytest.raises(ValueError, match='cannot be changed to .*auto_cope.* when it is loaded'):
        timm.create_model(f'local-dir:{tmp_path}', pretrained=True, pos_enc='cope')


def test_a_saved_config_opens_no_other_file(tmp_path):
    grafted = timm_sape.graft(base_model('test_vit'), 'sape2_k')
    save_for_hf(grafted, str(tmp_path), safe_serialization=True)
    config = json.loads((tmp_path / 'config.json').read_text())
    config['model_args']['checkpoint_path'] = str(tmp_path / 'model.safetensors')
    (tmp_path / 'config.json').write_text(json.dumps(config))
    with pytest.raises(TypeError, match='checkpoint_path'):
        timm.create_model(f'local-dir:{tmp_path}', pretrained=True)


def test_loaded_at_another_size(tmp_path):
    grafted = timm_sape.graft(base_model('test_vit'), 'sape2_k+rpb')
    assert_felt(grafted, copy.deepcopy(grafted))
    save_for_hf(grafted, str(tmp_path), safe_serialization=True)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, img_size=(80, 48)).eval()
    grafted.set_input_size((80, 48))
    assert largest_difference(loaded, grafted, images(grafted)) < 1e-6


def test_weights_from_a_file(tmp_path):
    """`--pretrained-path` of train.py: weights of a graft, or of its base."""
    model = base_model('test_vit')
    grafted = timm_sape.graft(model, 'sape2_k')
    assert_felt(grafted, model)
    for name, saved in (('base', model), ('grafted', grafted)):
        torch.save({'state_dict': saved.state_dict()}, tmp_path / f'{name}.pth')
        kwargs = dict(
            pretrained=True, depth=2, img_size=(64, 96), num_classes=5,
            pretrained_cfg_overlay=dict(file=str(tmp_path / f'{name}.pth'), num_classes=5, input_size=(3, 64, 96)))
        for loaded in (
                timm.create_model('vit_graft', base='test_vit', pos_enc='sape2_k', **kwargs),
                timm.create_model('test_vit_sape2_k_graft', **kwargs)):
            assert largest_difference(loaded.eval(), saved, images(model)) < 1e-6
    torch.save({k: v for k, v in grafted.state_dict().items() if 'blocks.1.attn.enc' not in k}, tmp_path / 'base.pth')
    with pytest.raises(ValueError, match='it lacks blocks.1.attn.encodings.auto_sape2_k'):
        timm.create_model('vit_graft', base='test_vit', pos_enc='sape2_k', **{
            **kwargs, 'pretrained_cfg_overlay': dict(file=str(tmp_path / 'base.pth'), num_classes=5)})


@pytest.mark.parametrize('name, saved_at, rename', [
    ('flexivit_small', (4, 6), {}),  # has its own way of resampling
    ('deit3_small_patch16_224', (4, 6), {'.ls1.gamma': '.gamma_1', '.ls2.gamma': '.gamma_2'}),  # as published
    ('vit_base_patch16_siglip_gap_224', (2, 3), {}),  # published with a pool that the model does not have
    ('vit_small_patch16_rope_ape_224', (2, 3), {}),  # converted
])
def test_files_of_bases_are_read_as_timm_reads_them(name, saved_at, rename, tmp_path):
    model = base_model(name, saved_at, in_chans=1, **SMALL)
    state = model.state_dict()
    for new, old in rename.items():
        state = {key.replace(new, old): value for key, value in state.items()}
    if 'siglip' in name:
        pooled = timm.create_model(name.replace('_gap', ''), depth=2, img_size=32, **SMALL).state_dict()
        state.update({key: value for key, value in pooled.items() if key.startswith('attn_pool.')})
    torch.save(state, tmp_path / 'base.pth')
    kwargs = dict(
        pretrained=True, depth=2, img_size=(96, 48), num_classes=5, in_chans=1, **SMALL,
        pretrained_cfg_overlay=dict(
            file=str(tmp_path / 'base.pth'), custom_load=False, num_classes=5,
            input_size=(1, *model.patch_embed.img_size)))
    stock = timm.create_model(name, **kwargs).eval()
    x = torch.randn(2, 1, 96, 48, generator=torch.Generator().manual_seed(0))
    for pos_enc in ('sape2_k', 'nope'):
        assert stock(x).std() > 1e-2
        seeded = []
        for pretrained in (True, False):
            torch.manual_seed(2)
            seeded.append(timm.create_model('vit_graft', base=name, pos_enc=pos_enc, **{
                **kwargs, 'pretrained': pretrained}).eval())
        assert largest_difference(seeded[0], stock, x) < 1e-5
        added = [key for key in seeded[0].state_dict() if '.auto_' in key and 'extra_state' not in key]
        assert bool(added) == (pos_enc == 'sape2_k')
        for key in added:  # drawn as without a file
            assert torch.equal(seeded[0].state_dict()[key], seeded[1].state_dict()[key])
    others = {**kwargs, 'in_chans': 3, 'num_classes': 7}  # timm adapts both
    grafted = timm.create_model('vit_graft', base=name, pos_enc='sape2_k', **others)
    stock = timm.create_model(name, **others)
    for key, value in stock.patch_embed.state_dict().items():
        assert torch.equal(grafted.patch_embed.state_dict()[key], value)
    assert grafted.head.weight.shape == (7, 96)


@pytest.mark.parametrize('shape', [
    dict(reg_tokens=1), dict(reg_tokens=2), dict(reg_tokens=2, img_size=(32, 128)),
    dict(reg_tokens=2, no_embed_class=True)])
def test_rows_of_registers_as_a_naflexvit(shape, tmp_path, monkeypatch):
    """timm would lose them."""
    name = 'vit_tiny_patch16_224'
    shape = {**SMALL, 'img_size': 64, 'depth': 2, 'num_classes': 5, **shape}
    model = randomised(timm.create_model(name, **shape))
    cfg = dict(state_dict=model.state_dict(), num_classes=5, input_size=(3, *model.patch_embed.img_size))
    grafted = timm.create_model(
        'vit_graft', base=name, pos_enc='sape2_k', use_naflex=True, pretrained=True, pretrained_cfg_overlay=cfg,
        **shape)
    assert largest_difference(grafted.eval(), model, images(model)) < 1e-5
    ruled = timm.create_model(
        'vit_graft', base=name, pos_enc='sape2_k', use_naflex=True, pretrained=True, pretrained_cfg_overlay=cfg,
        logit_scaling='log', **shape)
    assert largest_difference(ruled.eval(), model, images(model)) < 1e-5
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    if 'no_embed_class' in shape:
        assert_same(timm_sape.graft(f'local-dir:{tmp_path}', 'sape2_k', use_naflex=True, pretrained=True).eval(), model)
        assert_same(timm_sape.graft(
            name, 'sape2_k', use_naflex=True, pretrained=True, pretrained_cfg_overlay=cfg, **shape).eval(), model)
    elif model.patch_embed.grid_size == (4, 4):
        with pytest.raises(ValueError, match='rows for register tokens in its table, which timm loses'):
            timm_sape.graft(f'local-dir:{tmp_path}', 'sape2_k', use_naflex=True, pretrained=True)
        monkeypatch.setattr(timm.models.vision_transformer, '_USE_NAFLEX_DEFAULT', True)
        with pytest.raises(ValueError, match='rows for register tokens in its table, which timm loses'):
            timm_sape.graft(f'local-dir:{tmp_path}', 'sape2_k', pretrained=True)


@pytest.fixture
def own_source(monkeypatch):
    """Stands in for the Hub: called with a model, whose weights are then timm's own pretrained ones."""
    def serve_from_now_on(model):
        monkeypatch.setattr(timm.models._builder, 'load_state_dict_from_hf', lambda *args, **kwargs: {
            name: value.clone() for name, value in model.state_dict().items()})

    return serve_from_now_on


def test_rows_of_registers_of_the_base_itself(own_source, tmp_path):
    shape = dict(SMALL, depth=1, reg_tokens=2, num_classes=1000)
    plain = randomised(timm.create_model('vit_tiny_patch16_224', **shape))
    own_source(plain)
    kwargs = dict(use_naflex=True, pretrained=True, **shape)
    for create in (
            partial(timm.create_model, 'vit_graft', base='vit_tiny_patch16_224', pos_enc='sape2_k'),
            partial(timm.create_model, 'vit_tiny_sape2_k_graft'),
            partial(timm_sape.graft, 'vit_tiny_patch16_224', 'sape2_k')):
        with pytest.raises(ValueError, match='rows for register tokens in its table, which timm loses'):
            create(**kwargs)
    # a NaFlexVit that was saved has no such rows to lose
    model = randomised(timm.create_model('vit_tiny_patch16_224', use_naflex=True, **shape))
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    cfg, x = dict(state_dict=model.state_dict()), images(plain)
    for grafted in (
            timm_sape.graft(f'local-dir:{tmp_path}', 'sape2_k', pretrained=True),
            timm_sape.graft('vit_tiny_patch16_224', 'sape2_k', pretrained_cfg_overlay=cfg, **kwargs)):
        assert largest_difference(grafted.eval(), model, x) < 1e-5


@pytest.mark.parametrize('name, grid', [
    ('naflexvit_base_patch16_gap', (24, 24)), ('naflexvit_base_patch16_radio_v3', (32, 32)),
    ('vit_base_patch16_radio_v3', (32, 32))])
def test_trained_grid_of_a_table_of_another_size(name, grid, own_source, tmp_path):
    """All ways to load one set of weights agree on the grid that its images had."""
    kwargs = {} if 'naflexvit' in name else {'use_naflex': True}
    model = timm.create_model(name, depth=1, embed_dim=32, num_heads=2, **kwargs)
    assert tuple(model.embeds.pos_embed.shape[1:3]) != grid
    sized = timm.create_model(name, img_size=(160, 128), depth=1, embed_dim=32, num_heads=2, **kwargs)
    assert timm_sape.graft(sized, 'nope', logit_scaling='log').ref_grid_size == (10, 8)  # what it was made for
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    own_source(model)
    kwargs.update(depth=1, embed_dim=32, num_heads=2, pretrained=True)
    cfg = dict(state_dict=model.state_dict())
    for grafted in (
            timm_sape.graft(model, 'nope', logit_scaling='log'),
            timm_sape.graft(f'local-dir:{tmp_path}', 'nope', logit_scaling='log', pretrained=True),
            *(create(logit_scaling='log', **source, **kwargs) for source in ({}, {'pretrained_cfg_overlay': cfg})
              for create in (partial(timm_sape.graft, name, 'nope'), partial(
                  timm.create_model, 'vit_graft', base=name, pos_enc='nope')))):
        assert grafted.ref_grid_size == grid


def test_a_rule_does_not_change_the_class(monkeypatch, own_source):
    monkeypatch.setattr(timm.models.vision_transformer, '_USE_NAFLEX_DEFAULT', True)
    model = timm.create_model('vit_tiny_patch16_224', depth=1, use_naflex=False, **SMALL)
    own_source(model)
    for source in ({}, {'pretrained_cfg_overlay': {'state_dict': model.state_dict()}}):
        for kwargs in ({}, {'logit_scaling': 'log'}, {'logit_scaling': 'log', 'ref_grid_size': (14, 14)}):
            grafted = timm_sape.graft(
                'vit_tiny_patch16_224', 'nope', pretrained=True, depth=1, **source, **kwargs, **SMALL)
            assert isinstance(grafted, NaFlexVit)


GRAFTS = {
    'graft': timm_sape.graft,
    'vit_graft': lambda base, pos_enc, **kwargs: timm.create_model('vit_graft', base=base, pos_enc=pos_enc, **kwargs),
}


@pytest.mark.parametrize('changed', [{'img_size': 128}, {'patch_size': 8}])
def test_sizes_that_timm_does_not_adapt(changed, own_source):
    own_source(timm.create_model('vit_tiny_patch16_224', depth=1, use_naflex=False, **SMALL))
    with pytest.raises(ValueError, match='does not adapt .* another size .* Leave out img_size and patch_size'):
        GRAFTS['vit_graft'](
            'vit_tiny_patch16_224', 'nope', pretrained=True, depth=1, use_naflex=True, **changed, **SMALL)


@pytest.mark.parametrize('graft', GRAFTS)
@pytest.mark.parametrize('name, changed', [
    ('eva02_tiny_patch14_224', {}), ('eva02_tiny_patch14_224', dict(img_size=112)),
    ('eva02_tiny_patch14_224', dict(img_size=(112, 168), in_chans=1)),
    ('eva02_tiny_patch14_224', dict(patch_size=16, img_size=256)),
    ('vit_small_patch16_dinov3', dict(patch_size=8, img_size=64)),
    ('vit_small_patch16_rope_ape_224', dict(rope_temperature=1000., img_size=112)),
])
def test_pretrained_eva_at_another_size(name, changed, graft, own_source):
    """As timm's own class does it: only that adapts the weights."""
    shape = dict(depth=1, **SMALL)
    own_source(randomised(timm.create_model(name, use_naflex=False, **shape)))
    base = timm.create_model(name, pretrained=True, num_classes=5, use_naflex=False, **shape, **changed).eval()
    grafted = GRAFTS[graft](name, 'sape2_k', pretrained=True, num_classes=5, **shape, **changed).eval()
    assert isinstance(grafted, NaFlexVit)
    with torch.no_grad():
        for model in (base, grafted):
            model.head.weight.copy_(torch.linspace(-1, 1, model.head.weight.numel()).view_as(model.head.weight))
            model.head.bias.zero_()
    x = torch.randn(2, changed.get('in_chans', 3), *base.patch_embed.img_size)
    torch.testing.assert_close(grafted(x), base(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('graft', GRAFTS)
def test_pretrained_strict_reaches_the_base(graft, own_source):
    own_source(timm.create_model('vit_tiny_patch16_224', depth=1, **SMALL))
    kwargs = dict(pretrained=True, init_values=1e-3, depth=1, **SMALL)
    GRAFTS[graft]('vit_tiny_patch16_224', 'sape2_k', pretrained_strict=False, **kwargs)
    with pytest.raises(RuntimeError, match='Missing key'):
        GRAFTS[graft]('vit_tiny_patch16_224', 'sape2_k', **kwargs)


def test_deprecated_names():
    """They have no config of their own, and would silently get the default mean and std."""
    grafted = timm_sape.graft('vit_tiny_patch16_224_in21k', 'nope', depth=1, **SMALL)
    assert grafted.pretrained_cfg['tag'] == 'augreg_in21k' and grafted.num_classes == 21843
    with pytest.raises(ValueError, match='no config in timm, such as a deprecated one'):
        GRAFTS['vit_graft']('vit_tiny_patch16_224_in21k', 'nope', depth=1, **SMALL)


def test_a_seed_means_the_same_with_pretrained_weights(own_source):
    """A new head and what is grafted start as without them, and the base is built once."""
    shape = dict(SMALL, depth=1)
    own_source(timm.create_model('vit_tiny_patch16_224', **shape))
    built = []

    def start(pretrained):
        torch.manual_seed(0)
        model = timm.create_model(
            'vit_graft', base='vit_tiny_patch16_224', pos_enc='sape2_k', num_classes=5, pretrained=pretrained, **shape)
        built.append(torch.rand(()))
        return [model.head.weight, *(p for name, p in model.named_parameters() if '.encodings.auto_' in name)]

    assert all(map(torch.equal, start(False), start(True))) and built[0] == built[1]


def test_files_with_other_heads_and_channels_are_resized_as_timm_does():
    """FlexiViT resizes its table bilinearly. Undeclared numbers of classes and channels must not hide that."""
    shape = dict(SMALL, depth=1)
    for other in ({'num_classes': 5}, {'in_chans': 1}):
        model = randomised(timm.create_model('flexivit_small', **other, **shape))
        kwargs = dict(
            pretrained=True, img_size=160, pretrained_cfg_overlay={'state_dict': model.state_dict()}, **other, **shape)
        table = timm.create_model('flexivit_small', **kwargs).pos_embed
        grafted = timm.create_model('vit_graft', base='flexivit_small', pos_enc='nope', **kwargs)
        torch.testing.assert_close(grafted.pos_embed, table)


def test_a_background_class_is_left_out_once():
    shape = dict(SMALL, depth=1)
    model = randomised(timm.create_model('vit_tiny_patch16_224', num_classes=1001, **shape))
    cfg = dict(state_dict=model.state_dict(), label_offset=1, num_classes=1000)
    x = images(model)
    for kwargs in ({}, {'logit_scaling': 'log'}):
        for create in (partial(timm_sape.graft, 'vit_tiny_patch16_224', 'nope'), partial(
                timm.create_model, 'vit_graft', base='vit_tiny_patch16_224', pos_enc='nope')):
            grafted = create(pretrained=True, pretrained_cfg_overlay=cfg, **kwargs, **shape).eval()
            torch.testing.assert_close(grafted(x), model(x)[:, 1:], rtol=0, atol=1e-4)


def test_configs_that_are_given_whole_or_by_tag(tmp_path):
    """The graft has the base's config, under its own name, with what was given on top."""
    shape = dict(SMALL, depth=1)
    model = randomised(timm.create_model('vit_tiny_patch16_384', num_classes=21843, **shape))
    cfg = dict(state_dict=model.state_dict(), num_classes=21843)
    args = resolve_model_input_args(
        'vit_graft', {}, base='vit_tiny_patch16_384', pos_enc='nope', pretrained_cfg_overlay=cfg, **shape)
    for kwargs in ({}, {'logit_scaling': 'log'}):
        grafted = timm.create_model(pretrained=True, **args, **kwargs)
        assert grafted.patch_embed.img_size == (384, 384) and grafted.pretrained_cfg['mean'] == (0.5, 0.5, 0.5)
        full = dict(timm.get_pretrained_cfg('vit_tiny_patch16_384').to_dict(), **cfg, custom_load=False)
        by_tag = {'pretrained_cfg': 'augreg_in21k_ft_in1k', 'pretrained_cfg_overlay': cfg}
        for given in ({'pretrained_cfg': full}, by_tag):
            for create in (partial(timm_sape.graft, 'vit_tiny_patch16_384', 'nope'), partial(
                    timm.create_model, 'vit_graft', base='vit_tiny_patch16_384', pos_enc='nope')):
                grafted = create(pretrained=True, **given, **kwargs, **shape)
                assert grafted.pretrained_cfg['architecture'] == 'vit_graft'
                assert grafted.pretrained_cfg['mean'] == (0.5, 0.5, 0.5)
                timm_sape.hub.save(grafted, str(tmp_path / f'{len(list(tmp_path.iterdir()))}'))


def test_a_checkpoint_beside_pretrained_weights(own_source, tmp_path):
    """It replaces them, also where the number of channels is another one."""
    shape = dict(SMALL, depth=1, use_naflex=True)
    own_source(timm.create_model('vit_tiny_patch16_224', **shape))
    model = randomised(timm.create_model('vit_tiny_patch16_224', in_chans=1, **shape))
    path = str(tmp_path / 'model.pth')
    torch.save(model.state_dict(), path)
    grafted = timm_sape.graft(
        'vit_tiny_patch16_224', 'nope', pretrained=True, in_chans=1, checkpoint_path=path, **shape)
    assert largest_difference(grafted.eval(), model, torch.randn(2, 1, 224, 224)) < 1e-5


@pytest.mark.parametrize('name', ['test_vit_rpb_ape', 'test_vit_rpb_graft', 'vit_graft'])
def test_formats_that_only_timm_reads(name, tmp_path):
    kwargs = dict(base='test_vit', pos_enc='rpb') if name == 'vit_graft' else {}
    with pytest.raises(ValueError, match='custom_load, such as .npz files. Load them into the model of timm'):
        timm.create_model(name, pretrained=True, pretrained_cfg_overlay=dict(
            file=str(tmp_path / 'weights.npz'), custom_load=True), **kwargs)


def test_a_convolutional_stem_at_another_size(tmp_path):
    """The grid of the table follows from the stride of the whole stem, not of its last layer."""
    model = randomised(timm.create_model('vit_tiny_r_s16_p8_224', depth=2, img_size=(64, 128), **SMALL))
    assert model.patch_embed.grid_size == (2, 4)
    grafted = timm_sape.graft(model, 'nope')
    save_for_hf(grafted, str(tmp_path), safe_serialization=True)
    x = torch.randn(2, 3, 256, 256, generator=torch.Generator().manual_seed(0))
    for size in ((128, 64), (128, 128), (64, 128)):
        loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, img_size=size).eval()
        again = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
        again.set_input_size(size)
        assert largest_difference(loaded, again, x[:, :, :size[0], :size[1]]) < 1e-5
        assert torch.equal(loaded.pos_embed, model.pos_embed) == (size == (64, 128))


def test_graft_without_memory():
    """In the context of torch, too, in which all new tensors are on the meta device."""
    with torch.device('meta'):
        grafted = timm_sape.graft('test_vit', 'sape2_k')
    assert all(p.is_meta and p.requires_grad for p in grafted.parameters())


@pytest.mark.parametrize('channels', [1, 4])
def test_a_saved_graft_with_a_convolutional_stem_of_other_channels(channels, tmp_path):
    """timm's function for such models makes the stem from `in_chans` before its builder would fill that in."""
    model = randomised(timm.create_model('vit_tiny_r_s16_p8_224', depth=2, img_size=64, in_chans=channels, **SMALL))
    grafted = randomised(timm_sape.graft(model, 'sape2_k'))
    timm_sape.hub.save(grafted, tmp_path / 'saved')
    loaded = timm_sape.hub.load(tmp_path / 'saved').eval()
    x = torch.randn(1, channels, 64, 64, generator=torch.Generator().manual_seed(0))
    assert largest_difference(loaded, grafted, x) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize('name, size', [('vit_tiny_r_s16_p8_224', 126), ('vit_small_r26_s32_224', 90)])
def test_a_convolutional_stem_that_rounds_up(name, size, tmp_path):
    model = randomised(timm.create_model(name, depth=2, img_size=size, num_classes=5, **SMALL))
    assert 32 * model.patch_embed.grid_size[0] > size
    grafted = timm_sape.graft(model, 'sape2_k')
    assert_same(grafted, model)
    save_for_hf(grafted, str(tmp_path), safe_serialization=True)
    assert_same(timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval(), model)
    model = randomised(timm.create_model(
        name, depth=2, img_size=size, num_classes=5, dynamic_img_size=True, **SMALL))
    grafted = timm_sape.graft(model, 'sape2_k')
    assert grafted.patch_size == (32, 32)
    for side in (size, 96, 120, 224):
        x = torch.randn(1, 3, side, 96, generator=torch.Generator().manual_seed(0))
        assert largest_difference(grafted, model, x) < 2e-5


@pytest.mark.parametrize('name', ['vit_small_patch16_dinov3', 'eva02_tiny_patch14_224', 'naflexvit_base_patch16_gap'])
def test_another_patch_size_of_a_saved_naflexvit(name, tmp_path):
    """Its patch embedding is a linear layer, which does not show whether its patches were square."""
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    for was in (16, (8, 32)):
        shape = dict(SMALL, embed_dim=64) if 'naflexvit' in name else {}
        size = {} if 'naflexvit' in name else dict(img_size=64)
        model = randomised(timm.create_model(name, depth=2, patch_size=was, num_classes=5, **shape, **size))
        grafted = timm_sape.graft(model, 'sape2_k')
        save_for_hf(grafted, str(tmp_path), safe_serialization=True)
        for now in (8, 16):
            loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, patch_size=now).eval()
            weight = grafted.embeds.proj.weight.detach().unflatten(1, (*to_2tuple(was), 3)).permute(0, 3, 1, 2)
            expected = resample_patch_embed(weight, [now, now]).permute(0, 2, 3, 1).flatten(1)
            torch.testing.assert_close(loaded.embeds.proj.weight, expected)
            assert loaded(x).isfinite().all()


@pytest.mark.parametrize('given', [
    dict(pos_enc='sape2_k'), dict(pos_enc='ape+auto_sape2_k'),
    dict(pos_enc_kwargs={'auto_sape2_k': {'preset': 'equations'}}),
    dict(pos_enc='auto_sape2_k', pos_enc_kwargs={'sape2_k': {'preset': 'equations', 'init': 0.5}})])
def test_a_saved_graft_under_the_names_of_the_call_that_made_it(given, tmp_path):
    model = base_model('test_vit')
    grafted = timm_sape.graft(model, 'sape2_k', {'sape2_k': {'preset': 'equations'}})
    assert_felt(grafted, model)
    save_for_hf(grafted, str(tmp_path), safe_serialization=True)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, **given)
    assert_same(loaded.eval(), grafted)
    assert loaded.pos_enc_kwargs.keys() == grafted.pos_enc_kwargs.keys()
    with pytest.raises(ValueError, match='cannot be changed to'):
        timm.create_model(f'local-dir:{tmp_path}', pretrained=True, pos_enc='sape2_q')
    with pytest.raises(ValueError, match='cannot be changed to'):
        timm.create_model(
            f'local-dir:{tmp_path}', pretrained=True, pos_enc='sape2_k',
            pos_enc_kwargs={'sape2_k': {'preset': 'appendix'}})


def test_a_saved_rule_is_kept_under_another_spelling(tmp_path):
    kwargs = {'rope2d': {'resolution': 'rescale'}}
    grafted = timm_sape.graft(base_model('vit_small_patch16_rope_224', **SMALL), 'sape2_k+rope2d', kwargs)
    save_for_hf(grafted, str(tmp_path), safe_serialization=True)
    for pos_enc in ('sape2_k', 'auto_sape2_k+rope2d'):
        loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, pos_enc=pos_enc)
        assert loaded.pos_enc_kwargs == grafted.pos_enc_kwargs


@pytest.mark.parametrize('left_out', ['blocks.1.', 'blocks.1.mlp.fc1.weight', ''])
def test_a_file_that_train_py_declares_no_classes_for(left_out):
    """timm loads whatever fits then. An incomplete file would leave random weights."""
    shape = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=10)
    base = randomised(timm.create_model('vit_tiny_patch16_224', **shape))
    entries = {k: v for k, v in base.state_dict().items() if not left_out or not k.startswith(left_out)}
    kwargs = dict(
        shape, base='vit_tiny_patch16_224', pos_enc='sape2_k', pretrained=True,
        pretrained_cfg_overlay=dict(state_dict=entries, num_classes=-1))
    if left_out:
        with pytest.raises(ValueError, match=f'it lacks {left_out}'):
            timm.create_model('vit_graft', **kwargs)
    else:
        with pytest.warns(UserWarning, match='head.weight .* but timm drops it and the head stays random'):
            loaded = timm.create_model('vit_graft', **kwargs)
        assert torch.equal(loaded.blocks[1].mlp.fc1.weight, base.blocks[1].mlp.fc1.weight)


@pytest.mark.parametrize('pool', ['avg', 'token'])
def test_another_pool_is_saved_and_loaded(pool, tmp_path):
    model = timm_sape.graft(base_model('vit_small_patch16_rope_224'), 'rpb')
    model.reset_classifier(5, pool)
    save_for_hf(model, tmp_path, safe_serialization=True)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True)
    assert_same(loaded.eval(), model.eval())


@pytest.mark.parametrize('name', ['vit_small_patch16_rope_224', 'vit_pe_core_tiny_patch16_384'])
def test_another_pool_than_an_attention_pool(name, tmp_path):
    """The attention pool of Eva includes the prefix tokens, its other pools leave them out."""
    base = base_model(name, global_pool='map')
    grafted = timm_sape.graft(base, 'sape2_k')
    assert_same(grafted, base)
    for model in (base, grafted):
        model.reset_classifier(5, 'avg')
    grafted.head.load_state_dict(base.head.state_dict())
    assert_same(grafted.eval(), base.eval())
    save_for_hf(grafted, tmp_path, safe_serialization=True)
    assert_same(timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval(), base)


def test_optimizer_groups_of_an_eva_as_a_naflexvit():
    base = timm.create_model('vit_small_patch16_rope_mixed_224', depth=1, rope_shift_coords=.1)
    grafted = timm_sape.graft(base, 'sape2_k')
    assert 'rope.freqs' in base.no_weight_decay() & grafted.no_weight_decay()
    assert re.match(grafted.group_matcher()['stem'], 'rope.freqs')
    base = timm.create_model('vit_pe_core_tiny_patch16_384', depth=1, img_size=64)
    for model in (base, timm_sape.graft(base, 'sape2_k')):
        assert re.match(model.group_matcher()['stem'], 'norm_pre.weight')


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'vit_small_patch16_rope_224', 'vit_small_patch16_dinov3'])
def test_rate_of_patch_dropout_as_it_is_now(name):
    base = timm.create_model(name, depth=1, img_size=64, patch_drop_rate=.25)
    base.patch_drop.prob = .75
    tokens = [model.train().forward_features(images(base)).shape for model in (base, timm_sape.graft(base, 'nope'))]
    assert tokens[0] == tokens[1]


def test_patch_dropout_as_it_is_now():
    """The current patch dropout counts, not that of creation."""
    for created, now in ((0.25, 0.75), (0, 0.5)):
        model = base_model('test_vit', patch_drop_rate=created)
        model.patch_drop = PatchDropout(now, num_prefix_tokens=1)
        grafted = timm_sape.graft(model.train(), 'sape2_k')
        shapes = {m.forward_features(images(model)).shape for m in (model, grafted)}
        assert shapes == {(2, 1 + round(24 * (1 - now)), 64)}
    grafted.patch_drop = model.patch_drop
    with pytest.raises(ValueError, match='PatchDropout, which does not tell .*PatchDropoutWithIndices'):
        grafted(images(model))
    for name, nothing in (('test_vit', torch.nn.Identity()), ('naflexvit_base_patch16_gap', None)):
        model = timm.create_model(name, img_size=64, depth=1, embed_dim=64, num_heads=2, patch_drop_rate=0.5)
        model.patch_drop = nothing
        grafted = timm_sape.graft(model.train(), 'sape2_k')
        assert grafted.forward_features(torch.randn(2, 3, 64, 64)).shape[1] == grafted.num_prefix_tokens + 16


# ---- the pretrained weights of the base, from a Hub on this machine

DOWNLOAD = """
import argparse
import timm
import torch
import timm_sape
torch.set_num_threads(1)

def same(model, base, **kwargs):
    size = model.patch_embed.img_size
    x = torch.randn(2, model.in_chans, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), base.eval()(x), rtol=0, atol=1e-5)
    assert model.pos_enc == 'ape+auto_sape2_k'

plain = timm.create_model('test_vit', pretrained=True)
assert plain.head.weight.mean() > 0.9  # those of the Hub
same(timm.create_model('test_vit_sape2_k_graft', pretrained=True), plain)
same(timm.create_model('test_vit_sape2_k_graft.r160_in1k', pretrained=True), plain)
same(timm.create_model('vit_graft', base='test_vit', pos_enc='sape2_k', pretrained=True), plain)
same(timm.create_model('vit_graft', base='test_vit.r160_in1k', pos_enc='sape2_k', pretrained=True), plain)
same(timm_sape.graft('test_vit.r160_in1k', 'sape2_k', pretrained=True), plain)

# the grid of the weights is that of their size, in patches of theirs
larger = dict(pretrained=True, img_size=320, patch_size=8, logit_scaling='log')
assert timm.create_model('test_vit_sape2_k_graft', **larger).ref_grid_size == (10, 10)
assert timm_sape.graft('test_vit.r160_in1k', 'sape2_k', **larger).ref_grid_size == (10, 10)

# adapted as timm does, head apart, which is new
kwargs = dict(pretrained=True, num_classes=5, in_chans=1, img_size=(96, 64))
adapted = timm.create_model('test_vit', **kwargs)
for name, more in (('test_vit_sape2_k_graft', {}), ('vit_graft', dict(base='test_vit', pos_enc='sape2_k'))):
    model = timm.create_model(name, **kwargs, **more)
    model.head.load_state_dict(adapted.head.state_dict())
    same(model, adapted)

# as train.py and validate.py resolve --model and --model-kwargs
for name, more in (('test_vit_sape2_k_graft', {}), ('vit_graft', dict(base='test_vit', pos_enc='sape2_k'))):
    same(timm.create_model(pretrained=True, **timm.models.resolve_model_input_args(name, {}, **more)), plain)

cfg = timm.create_model('test_vit_sape2_k_graft').pretrained_cfg
assert cfg['hf_hub_id'] == 'timm/test_vit.r160_in1k' and cfg['architecture'] == 'test_vit_sape2_k_graft'
try:
    timm.create_model('vit_tiny_sape2_k_graft.augreg_in21k', pretrained=True)
except OSError as e:
    print(type(e).__name__)
"""


def test_pretrained_weights_of_the_base(tmp_path):
    torch.manual_seed(0)
    base = timm.create_model('test_vit')
    torch.nn.init.ones_(base.head.weight)
    with serve(token='secret') as hub:
        hub.repos['timm/test_vit.r160_in1k'] = {'private': False, 'commits': {}, 'branches': {}}
        hub.commit('timm/test_vit.r160_in1k', {'model.safetensors': save(base.state_dict())})
        done = subprocess.run(
            [sys.executable, '-c', DOWNLOAD], env=environment(hub, tmp_path / 'cache'), capture_output=True, text=True,
            timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ['RepositoryNotFoundError']


def test_entrypoints_have_the_tags_of_their_bases():
    for name in timm.list_models('*_graft', exclude_filters=['vit_graft']):
        size = name.split('_')[1] if name.startswith('vit') else None
        base = f'vit_{size}_patch16_224' if size else 'test_vit'
        ours, theirs = ({
            cfg.tag: (cfg.hf_hub_id, cfg.mean, cfg.num_classes, cfg.custom_load)
            for cfg in timm.models.get_arch_pretrained_cfgs(arch).values()} for arch in (name, base))
        assert ours == theirs and len(ours) >= 1
        assert list(ours) == list(theirs)  # the default tag is the same


def test_pickles_of_whole_models_name_a_path_that_stays():
    """Models that were pickled whole, which torch allows, name their class by the module that it was first in."""
    model = timm_sape.graft('deit_tiny_distilled_patch16_224', 'rope2d')
    assert type(model) is timm_sape.grafting.VisionTransformerDistilledPosEnc
