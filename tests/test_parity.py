"""Weights of timm's own models give the same logits here, on every loading path.

timm's models are the reference. They have random weights, none of which is trivial: no zero biases, no layer scale of
1e-5, no norm that is the identity. Each comparison is followed by a check that the encoding has an effect at all.
"""
import pytest
import safetensors.torch
import timm
import torch

import timm_sape  # noqa: F401  registers the models

TOLERANCE = dict(rtol=0, atol=1e-5)

ROPE = {  # timm's name: ours
    'vit_small_patch16_rope_224': 'vit_small_rope2d',
    'vit_small_patch16_rope_mixed_224': 'vit_small_rope2d_mixed',
    'vit_small_patch16_rope_ape_224': 'vit_small_rope2d_ape',
    'vit_small_patch16_rope_mixed_ape_224': 'vit_small_rope2d_mixed_ape',
}


@torch.no_grad()
def randomise(model, seed=0):
    """Give every parameter a value that matters, but keeps logits near one."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if 'gamma' in name:
            p.copy_(0.5 + 0.2 * noise)
        elif name == 'rope.freqs':
            p.add_(0.1 * noise)
        elif 'norm' in name and name.endswith('weight'):
            p.copy_(1 + 0.2 * noise)
        elif name.endswith('bias'):
            p.copy_(0.2 * noise)
        elif p.ndim > 1 and name.endswith('weight'):
            p.copy_(noise * p[0].numel() ** -0.5)
        else:  # tokens and position tables
            p.copy_(0.5 * noise)
    # Make attention sharper than with random weights, so that a wrong rotation does not average out.
    for block in model.blocks:
        block.attn.qkv.weight[:2 * model.embed_dim] *= 1.5
    return model.eval()


def timm_model(name, **kwargs):
    return randomise(timm.create_model(name, **kwargs))


def from_file(name, path, overlay=None, **kwargs):
    overlay = dict(file=str(path), **(overlay or {}))
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs).eval()


def images(size=224, batch=2):
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def assert_same(ours, theirs, x):
    """The logits are the same, and varied enough to be worth comparing."""
    expected = theirs(x)
    assert expected.std() > 0.2 and expected.abs().max() < 20
    torch.testing.assert_close(ours(x), expected, **TOLERANCE)
    return expected


@torch.no_grad()
def assert_position_felt(ours, x, expected):
    """The same backbone without encodings gives other logits."""
    bare = timm.create_model('vit_small_nope', depth=len(ours.blocks), img_size=x.shape[-2:]).eval()
    state = {k: v for k, v in ours.state_dict().items() if k in bare.state_dict()}
    assert not bare.load_state_dict(state).missing_keys
    assert (bare(x) - expected).abs().max() > 1e-2


# ---- ape is timm's own ViT


@pytest.mark.parametrize('size', ['tiny', 'small'])
def test_ape_is_timms_vit(size):
    theirs = timm_model(f'vit_{size}_patch16_224')
    ours = timm.create_model(f'vit_{size}_ape').eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert_same(ours, theirs, images(batch=1))


@pytest.mark.parametrize('kwargs', [
    dict(reg_tokens=4),
    dict(reg_tokens=1, no_embed_class=True),
    dict(class_token=False, global_pool='avg'),
    dict(class_token=False, reg_tokens=2, global_pool='max'),
    dict(class_token=False, global_pool='map'),
    dict(init_values=1e-5, qk_norm=True),
    dict(pre_norm=True, qkv_bias=False, num_classes=0),
    dict(img_size=(48, 80), patch_size=(16, 8)),
    dict(img_size=(48, 80), patch_size=(16, 8), dynamic_img_size=True),
    dict(img_size=(48, 80), patch_size=(16, 8), dynamic_img_size=True, dynamic_img_pad=True),
    dict(dynamic_img_size=True, dynamic_img_pad=True),
], ids=lambda kwargs: ','.join(f'{k}={v}' for k, v in kwargs.items()))
def test_ape_is_timms_vit_with(kwargs):
    kwargs = dict(dict(depth=2, img_size=64), **kwargs)
    theirs = timm_model('vit_tiny_patch16_224', **kwargs)
    ours = timm.create_model('vit_tiny_ape', **kwargs).eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert_same(ours, theirs, images((70, 58) if kwargs.get('dynamic_img_pad') else kwargs['img_size']))


@pytest.mark.parametrize('narrow_images', [False, True])
@pytest.mark.parametrize('narrow_model', [False, True])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('kwargs', [{}, dict(class_token=False, global_pool='avg')], ids=['token', 'no token'])
def test_ape_is_timms_vit_under_autocast(kwargs, dtype, narrow_model, narrow_images):
    """To the last bit: tokens keep the model's dtype between the layers, even without a class token."""
    of_model = dtype if narrow_model else torch.float32
    kwargs = dict(depth=2, img_size=64, **kwargs)
    theirs = timm_model('vit_tiny_patch16_224', **kwargs).to(of_model)
    x, found = images((64, 64)).to(dtype if narrow_images else torch.float32), []
    with torch.no_grad(), torch.autocast('cpu', dtype):
        expected = theirs(x)
        for pos_enc in ('ape', 'nope', 'rope2d', 'sincos2d+sape2_k'):
            ours = timm.create_model('vit_tiny_ape', pos_enc=pos_enc, **kwargs).to(of_model).eval()
            ours.blocks[-1].register_forward_hook(lambda block, args, out: found.append(out.dtype))
            if pos_enc == 'ape':
                ours.load_state_dict(theirs.state_dict())
                assert torch.equal(ours(x), expected)
            else:
                ours(x)
    assert found == [of_model] * 4


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
@pytest.mark.parametrize('size', ['tiny', 'small'])
def test_ape_loads_timms_file(size, suffix, tmp_path):
    theirs = timm_model(f'vit_{size}_patch16_224', depth=2)
    path = tmp_path / f'vit{suffix}'
    save = safetensors.torch.save_file if suffix == '.safetensors' else torch.save
    save(theirs.state_dict(), path)
    expected = assert_same(from_file(f'vit_{size}_ape', path, depth=2), theirs, images(batch=1))
    if size == 'small':
        assert_position_felt(theirs, images(batch=1), expected)


@pytest.mark.parametrize('img_size', [64, 128, (48, 80)])
def test_ape_loads_deit_file_of_another_size(img_size, tmp_path):
    """DeiT's files keep the weights under 'model'. The table is resampled as timm does it for its own models."""
    source = timm_model('deit_tiny_patch16_224', depth=2, img_size=96)
    path = tmp_path / 'deit.pth'
    torch.save({'model': source.state_dict()}, path)
    kwargs = dict(overlay=dict(input_size=(3, 96, 96)), depth=2, img_size=img_size)
    theirs = from_file('deit_tiny_patch16_224', path, **kwargs)
    ours = from_file('vit_tiny_ape', path, **kwargs)
    assert_same(ours, theirs, images(img_size))
    assert ours.pos_embed.shape != source.pos_embed.shape
    torch.testing.assert_close(ours.pos_embed, theirs.pos_embed, rtol=0, atol=0)


# ---- timm's rotary models


@pytest.fixture(scope='module')
def rope_file(tmp_path_factory):
    """Each of timm's rotary models, cut to a depth of 3, and its file. Made once."""
    made = {}

    def make(name):
        if name not in made:
            path = tmp_path_factory.mktemp('rope') / f'{name}.pth'
            model = timm_model(name, depth=3)
            torch.save(model.state_dict(), path)
            made[name] = model, path
        return made[name]

    return make


@pytest.mark.parametrize('init_values', [None, 1e-5], ids=['folded', 'renamed'])
@pytest.mark.parametrize('name', ROPE)
def test_rope_file(name, init_values, rope_file):
    """timm's layer scale is folded into the projections of a model that has none, and renamed for one that has."""
    theirs, path = rope_file(name)
    ours = from_file(ROPE[name], path, depth=3, init_values=init_values)
    assert any('gamma' in k for k in ours.state_dict()) == (init_values is not None)
    x = images(batch=1)
    expected = assert_same(ours, theirs, x)
    if init_values is None:
        assert_position_felt(ours, x, expected)


@pytest.mark.full
@pytest.mark.parametrize('name', ROPE)
def test_rope_file_of_full_depth(name, tmp_path):
    theirs = timm_model(name)
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / 'rope.safetensors')
    ours = from_file(ROPE[name], tmp_path / 'rope.safetensors')
    assert len(ours.blocks) == 12
    assert_same(ours, theirs, images(batch=1))


@pytest.mark.parametrize('img_size', [(96, 160), (256, 240)], ids=str)
@pytest.mark.parametrize('name', ROPE)
def test_rope_file_at_another_size(name, img_size, rope_file):
    """Both sides resize when they load: angles continue, and the table of the `_ape` pair is resampled."""
    _, path = rope_file(name)
    theirs = from_file(name, path, depth=3, img_size=img_size)
    ours = from_file(ROPE[name], path, depth=3, img_size=img_size)
    assert_same(ours, theirs, images(img_size, batch=1))


@pytest.mark.parametrize('name', ROPE)
def test_rope_file_with_dynamic_size(name, rope_file):
    _, path = rope_file(name)
    theirs = from_file(name, path, depth=3, dynamic_img_size=True)
    ours = from_file(ROPE[name], path, depth=3, dynamic_img_size=True)
    for img_size in (224, (64, 112), (240, 32)):
        assert_same(ours, theirs, images(img_size, batch=1))


@pytest.mark.parametrize('name', ROPE)
def test_rope_file_as_pretrained_path(name, rope_file):
    """train.py's --pretrained-path passes num_classes=-1, so the head is left out. The features are the same."""
    theirs, path = rope_file(name)
    ours = from_file(ROPE[name], path, overlay=dict(num_classes=-1), depth=3, num_classes=10)
    x = images(batch=1)
    with torch.no_grad():
        expected = theirs.forward_features(x)
        assert expected.std() > 0.2
        torch.testing.assert_close(ours.forward_features(x), expected, **TOLERANCE)
    assert ours.head.weight.shape == (10, 384)

    same_classes = from_file(ROPE[name], path, overlay=dict(num_classes=-1), depth=3)
    assert same_classes.head.weight.shape == theirs.head.weight.shape
    assert not torch.equal(same_classes.head.weight, theirs.head.weight)


def test_rope_file_wrapped_by_a_trainer(rope_file, tmp_path):
    """A checkpoint of train.py: weights under 'state_dict' with DDP's prefix, next to other entries."""
    theirs, _ = rope_file('vit_small_patch16_rope_mixed_ape_224')
    state = {f'module.{k}': v for k, v in theirs.state_dict().items()}
    torch.save({'epoch': 3, 'state_dict': state, 'optimizer': {}}, tmp_path / 'last.pth.tar')
    ours = from_file('vit_small_rope2d_mixed_ape', tmp_path / 'last.pth.tar', depth=3)
    assert_same(ours, theirs, images(batch=1))


def test_rope_weights_of_half_precision_fold_in_single(tmp_path):
    """Folding the layer scale of a half-precision file does not round a second time."""
    theirs = timm_model('vit_small_patch16_rope_224', depth=2)
    state = {name: value.half() for name, value in theirs.state_dict().items()}
    theirs.load_state_dict(state)
    torch.save(state, tmp_path / 'half.pth')
    ours = from_file('vit_small_rope2d', tmp_path / 'half.pth', depth=2)
    assert_same(ours, theirs, images(batch=1))


@pytest.mark.parametrize('name,wrong', [
    ('vit_small_patch16_rope_224', 'vit_small_rope2d_mixed'),
    ('vit_small_patch16_rope_224', 'vit_small_rope2d_ape'),
    ('vit_small_patch16_rope_224', 'vit_small_nope'),
    ('vit_small_patch16_rope_mixed_224', 'vit_small_rope2d'),
    ('vit_small_patch16_rope_mixed_224', 'vit_small_sape2_k'),
    ('vit_small_patch16_rope_ape_224', 'vit_small_rope2d'),
    ('vit_small_patch16_rope_ape_224', 'vit_small_ape'),
    ('vit_small_patch16_rope_mixed_ape_224', 'vit_small_rope2d_mixed'),
    ('vit_small_patch16_rope_mixed_ape_224', 'vit_small_rope2d_ape'),
])
def test_rope_file_does_not_fit_another_encoding(name, wrong, rope_file):
    _, path = rope_file(name)
    with pytest.raises(ValueError, match='checkpoint'):
        from_file(wrong, path, depth=3)


@pytest.mark.parametrize('name,kwargs', [
    ('vit_medium_patch16_rope_reg1_gap_256', dict(embed_dim=512, num_heads=8, reg_tokens=1)),
    ('vit_mediumd_patch16_rope_reg1_gap_256', dict(embed_dim=512, num_heads=8, reg_tokens=1, qkv_bias=False)),
    ('vit_betwixt_patch16_rope_reg4_gap_256', dict(embed_dim=640, num_heads=10, reg_tokens=4)),
])
@pytest.mark.parametrize('init_values', [None, 1e-5])
def test_rope_files_of_other_conventions_are_refused(name, kwargs, init_values, tmp_path):
    """timm's other rotary models have another base and order of axes. Loading them would be wrong without any error."""
    torch.save(timm.create_model(name, depth=1).state_dict(), tmp_path / 'rope.pth')
    with pytest.raises(ValueError, match='checkpoint'):
        from_file(
            'vit_small_rope2d', tmp_path / 'rope.pth',
            depth=1, img_size=256, class_token=False, global_pool='avg', init_values=init_values, **kwargs)


@pytest.mark.parametrize('name,theirs,ours', [
    ('vit_small_patch16_dinov3', dict(img_size=64), dict(pos_enc='rope2d', reg_tokens=4, qkv_bias=False)),
    ('vit_pe_lang_large_patch14_448', dict(img_size=56, embed_dim=384, num_heads=6),
     dict(pos_enc='ape+rope2d', pre_norm=True, patch_size=14, final_norm=False)),
])
def test_rope_files_of_other_conventions_with_a_class_token_are_refused(name, theirs, ours):
    """With their layer scale folded in, all names and shapes would fit."""
    kwargs = dict(img_size=theirs['img_size'], depth=1, num_classes=10)
    state = timm.create_model(name, **{**kwargs, **theirs}).state_dict()
    overlay = dict(state_dict=state, num_classes=10, input_size=(3, kwargs['img_size'], kwargs['img_size']))
    with pytest.raises(ValueError, match='it has blocks.0.gamma_1'):
        timm.create_model(
            'vit_small_pos_enc', pretrained=True, pretrained_cfg_overlay=overlay, global_pool='avg', fc_norm=False,
            **kwargs, **ours)
