"""Model names: which exist, what timm knows of them, what importing costs, and the messages for wrong arguments."""
import inspect
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from timm.models import get_pretrained_cfg, is_model_in_modules, model_entrypoint, save_for_hf

import timm_sape
from timm_sape import vit_pos_enc

# Written out, so that losing a name in the registry makes a test fail. `ADDED` are encodings of this package that are
# newer than this list; they need no change here.
WRITTEN = (
    'alibi2d', 'ape', 'ape2d', 'cape', 'comrope', 'cope', 'cpb', 'fire', 'fourier', 'harope', 'irpe_k', 'irpe_q',
    'irpe_qk', 'irpe_qkv', 'lape', 'liere', 'lookhere', 'mrope', 'nope', 'ope', 'pape', 'pape_ri', 'peg', 'pemix',
    'pope', 'rope1d', 'rope2d', 'rope2d_mixed', 'rope_dinov3', 'rope_golden', 'rope_spiral', 'rpb', 'rpe2d', 'sape2',
    'sape2_k', 'sape2_q', 'sape2_qk', 'sape2sq_k', 'sape2sq_q', 'shaw', 'sincos1d', 'sincos2d', 'string', 't5')
ADDED = {
    name: timm_sape.get_encoding(name) for name in timm_sape.list_encodings(aliases=True)
    if name not in WRITTEN and timm_sape.get_encoding(name).__module__.startswith('timm_sape.')}
ENCODINGS = tuple(sorted({*WRITTEN, *ADDED}))
ON_TOKENS = (  # without `_ape`
    'ape', 'ape2d', 'cape', 'fourier', 'lape', 'nope', 'ope', 'sincos1d', 'sincos2d',
    *(name for name, cls in ADDED.items() if cls.acts_on() == ('tokens',) or not cls.supplements_ape))
WITH_APE = tuple(name for name in ENCODINGS if name not in ON_TOKENS)
SHAPES = {  # width, depth, heads
    'vit_tiny': (192, 12, 3), 'vit_small': (384, 12, 6), 'vit_base': (768, 12, 12), 'test_vit': (64, 2, 4)}
SIZES = tuple(SHAPES)
LEFT_OUT = {'vit_tiny_lookhere', 'vit_tiny_lookhere_ape', *(f'{size}_pemix' for size in SIZES)}  # 3 heads; not alone
for name, cls in ADDED.items():
    LEFT_OUT.update(
        f'{size}_{name}{ape}' for size, (dim, _, heads) in SHAPES.items() for ape in ('', '_ape')
        if not cls.fits(dim, heads) or not (ape or cls.alone))
NAMES = {
    f'{size}_{name}'
    for size in SIZES
    for name in (*ENCODINGS, *(f'{encoding}_ape' for encoding in WITH_APE), 'pos_enc')
} - LEFT_OUT
NAFLEX = {name.replace('vit', 'naflexvit', 1) for name in NAMES}
GRAFTS = {'vit_graft', *(
    f'{size}_{name}_graft'
    for size in (*SIZES, 'vit_large')
    for name in (
        'cope', 'irpe_k', 'rope2d', 'rope2d_mixed', 'rpb', 'sape2', 'sape2_k', 'sape2_q', 'sape2_qk', 'sape2sq_k',
        'shaw'))}


def tiny(encoding='sape2_k', **kwargs):
    encoding = 'pemix_ape' if encoding == 'pemix' else encoding  # it cannot be alone
    return timm.create_model(f'test_vit_{encoding}', **dict(dict(img_size=32), **kwargs))


def in_new_process(script):
    """Run a script in a fresh interpreter that can import the package. Returns the JSON in its last line of output."""
    path = os.pathsep.join([str(Path(timm_sape.__file__).parents[1]), os.environ.get('PYTHONPATH', '')])
    done = subprocess.run(
        [sys.executable, '-c', script],
        env=dict(os.environ, PYTHONPATH=path), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ---- names


def test_names():
    assert set(timm.list_models(module='vit_pos_enc')) == NAMES
    assert set(timm.list_models(module='vit_graft')) == GRAFTS


@pytest.mark.parametrize('pattern,count', [
    ('*sape2*', 4 * 12), ('vit_small_sape2_*', 7), ('*_sape2_k_ape', 4), ('test_vit_rope2d*', 4)])
def test_timm_finds_them_by_pattern(pattern, count):
    ours = [name for name in timm.list_models(pattern) if name in NAMES]
    assert len(ours) == count
    assert ours == timm.list_models(pattern, exclude_filters=['*_graft', '*naflexvit*'])


@pytest.mark.parametrize('name', sorted(NAMES))
def test_entrypoint_is_as_if_written_by_hand(name):
    entrypoint = model_entrypoint(name)
    assert entrypoint.__module__ == 'timm_sape.vit_pos_enc'
    assert entrypoint.__name__ == entrypoint.__qualname__ == name
    assert getattr(vit_pos_enc, name) is entrypoint
    assert vit_pos_enc.__all__.count(name) == 1
    assert is_model_in_modules(name, ['vit_pos_enc'])
    assert 'pretrained' in inspect.signature(entrypoint).parameters

    size = next(size for size in SIZES if name.startswith(f'{size}_'))
    encoding = name[len(size) + 1:]
    width, depth, heads = SHAPES[size]
    for word in (f'width {width}', f'depth {depth}', f'{heads} heads', 'patch 16', encoding.removesuffix('_ape')):
        assert word in entrypoint.__doc__


@pytest.mark.parametrize('name', sorted(NAMES))
def test_default_cfg(name):
    cfg = get_pretrained_cfg(name)
    assert name in vit_pos_enc.default_cfgs
    assert cfg.architecture == name
    assert cfg.input_size == ((3, 160, 160) if name.startswith('test_') else (3, 224, 224))
    assert (cfg.classifier, cfg.first_conv, cfg.num_classes) == ('head', 'patch_embed.proj', 1000)
    assert cfg.fixed_input_size
    assert cfg.mean == cfg.std == (0.5, 0.5, 0.5)
    timms = get_pretrained_cfg('vit_tiny_patch16_224')
    assert (cfg.crop_pct, cfg.crop_mode, cfg.interpolation) == (timms.crop_pct, timms.crop_mode, timms.interpolation)
    assert not cfg.has_weights


@pytest.mark.parametrize('name', sorted(name for name in NAMES if name.startswith('test_vit_')))
def test_entrypoint_builds(name):
    """What `pos_enc` each name stands for; the alias is resolved, the parts are in canonical order."""
    encoding = 'ape' if name == 'test_vit_pos_enc' else name[len('test_vit_'):]
    parts = [encoding.removesuffix('_ape')] + ['ape'] * encoding.endswith('_ape')
    parts = sorted('sape2_k' if part == 'sape2' else part for part in parts)
    model = timm.create_model(name)
    assert model.pos_enc == '+'.join(parts)
    assert (model.pos_embed is not None) == ('ape' in parts)
    assert (model.embed_dim, len(model.blocks), model.blocks[0].attn.num_heads) == (64, 2, 4)
    assert model.patch_embed.patch_size == (16, 16) and model.patch_embed.img_size == (160, 160)
    assert model.pretrained_cfg['architecture'] == name
    with torch.no_grad():
        assert model.eval()(torch.randn(1, 3, 160, 160)).shape == (1, 1000)


@pytest.mark.parametrize('size', [
    'tiny', *(pytest.param(size, marks=pytest.mark.full) for size in ('small', 'base'))])
def test_backbone_is_timms(size):
    """Every model of a size is timm's `vit_<size>_patch16_224`, parameter by parameter, plus its encoding."""
    theirs = timm.create_model(f'vit_{size}_patch16_224', device='meta')
    expected = {name: p.shape for name, p in theirs.named_parameters() if name != 'pos_embed'}
    for encoding in ENCODINGS:
        name = f'vit_{size}_{encoding}' if encoding != 'pemix' else f'vit_{size}_pemix_ape'
        if name not in NAMES:
            continue
        model = timm.create_model(name, device='meta')
        own = {name: p.shape for name, p in model.named_parameters()}
        backbone = {k: v for k, v in own.items() if 'encodings.' not in k and k != 'pos_embed'}
        assert backbone == expected
        assert ('pos_embed' in own) == (encoding in ('ape', 'pemix'))
        assert model.blocks[0].attn.num_heads == theirs.blocks[0].attn.num_heads
        assert type(model.blocks[0].ls1) is type(theirs.blocks[0].ls1)
        assert model.global_pool == theirs.global_pool == 'token'
        assert model.norm.eps == theirs.norm.eps


@pytest.mark.parametrize('name,pos_enc,saved', [
    ('test_vit_ape', 'nope', 'nope'),
    ('test_vit_nope', 'sape2+ape', 'ape+sape2_k'),
    ('test_vit_sape2_k_ape', 'rope2d', 'rope2d'),
    ('test_vit_rope2d', 'sape2_q+rope2d_mixed+ape', 'ape+rope2d_mixed+sape2_q'),
])
def test_pos_enc_overrides_the_entrypoints(name, pos_enc, saved):
    model = timm.create_model(name, img_size=32, pos_enc=pos_enc)
    assert model.pos_enc == saved
    other = timm.create_model('test_vit_pos_enc', img_size=32, pos_enc=saved)
    assert list(model.state_dict()) == list(other.state_dict())


def created_with_warnings(name, **kwargs):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        model = timm.create_model(name, device='meta', **kwargs)
    return model, [str(warning.message) for warning in seen]


@pytest.mark.parametrize('name,pos_enc,lacking', [
    ('vit_tiny_rope2d_ape', 'sape2_k', 'ape and no rope2d'),
    ('vit_tiny_rope2d_ape', 'rope2d+sape2', 'ape'),
    ('vit_small_sape2', 'sape2_q', 'sape2_k'),
    ('test_vit_nope', 'ape', 'nope'),
])
def test_name_of_another_encoding(name, pos_enc, lacking):
    model, messages = created_with_warnings(name, pos_enc=pos_enc)
    size = '_'.join(name.split('_')[:2])
    assert messages == [
        f'{name} is created with pos_enc={pos_enc!r}, so despite its name it has no {lacking}. '
        f'Use {size}_pos_enc, whose name does not state an encoding.']
    assert created_with_warnings(f'{size}_pos_enc', pos_enc=pos_enc)[0].pos_enc == model.pos_enc


@pytest.mark.parametrize('name,pos_enc', [
    *((f'{size}_pos_enc', pos_enc) for size in SIZES for pos_enc in ('nope', 'sape2_k', 'auto_rope2d+ape+cope')),
    ('vit_tiny_rope2d_ape', 'ape+rope2d'),
    ('vit_tiny_rope2d_ape', 'ape+rope2d+sape2_k'),
    ('vit_tiny_rope2d_ape', 'ape+auto_rope2d'),
    ('vit_tiny_sape2', 'sape2_k'),
])
def test_name_of_its_own_encoding(name, pos_enc):
    model, messages = created_with_warnings(name, pos_enc=pos_enc)
    assert messages == []
    assert set(model.pos_enc.split('+')) == set(pos_enc.split('+'))


def test_model_saved_under_another_name_loads_without_a_warning(tmp_path):
    """The warning was given when it was made."""
    with pytest.warns(UserWarning, match='despite its name it has no rope2d'):
        model = timm.create_model('test_vit_rope2d', pos_enc='sape2_k', img_size=32)
    save_for_hf(model, tmp_path, safe_serialization=True)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert timm.create_model(f'local-dir:{tmp_path}', pretrained=True).pos_enc == 'sape2_k'


def test_siblings_start_from_the_same_backbone():
    """With the same seed, models that differ only in their encodings have the same other weights."""
    def build(encoding):
        torch.manual_seed(0)
        return tiny(encoding).state_dict()

    expected = build('nope')
    for encoding in ('rope2d', 'rope2d_mixed', 'cope', 'sape2_k', 'sape2_qk'):
        state = build(encoding)
        for name in expected:
            assert torch.equal(state[name], expected[name]), (encoding, name)


# ---- effects of importing


def test_import_takes_nothing_from_timm():
    """Warnings are errors here: timm warns if a name is overwritten, and loses the tags of that model."""
    script = """
import json, warnings
import timm
from timm.models import _registry as registry

def known():
    return {
        'models': {name: fn.__module__ for name, fn in registry._model_entrypoints.items()},
        'tags': sorted(timm.list_models(include_tags=True)),
        'pretrained': sorted(timm.list_pretrained()),
        'modules': sorted(timm.list_modules()),
    }

before = known()
warnings.simplefilter('error')
import timm_sape
after = known()
print(json.dumps([before, after, timm_sape.list_encodings(aliases=True)]))
"""
    before, after, encodings = in_new_process(script)
    assert tuple(encodings) == ENCODINGS
    assert len(before['models']) > 1000
    assert {name: after['models'][name] for name in before['models']} == before['models']
    assert set(after['models']) - set(before['models']) == NAMES | NAFLEX | GRAFTS
    assert {name.split('.')[0] for name in set(after['tags']) - set(before['tags'])} == NAMES | NAFLEX | GRAFTS
    assert set(before['tags']) <= set(after['tags'])
    pretrained = set(after['pretrained']) - set(before['pretrained'])
    assert {name.split('.')[0] for name in pretrained} == GRAFTS - {'vit_graft'}
    assert set(before['pretrained']) <= set(after['pretrained'])
    assert set(after['modules']) - set(before['modules']) == {'naflexvit_pos_enc', 'vit_graft', 'vit_pos_enc'}
    assert set(before['modules']) <= set(after['modules'])


def test_import_is_silent_and_cheap():
    script = """
import json, os, socket, sys
import timm, torch

built, connected = [], []
init = torch.nn.Module.__init__
def watched(self, *args, **kwargs):
    built.append(type(self).__name__)
    init(self, *args, **kwargs)
torch.nn.Module.__init__ = watched
socket.socket.connect = lambda self, address: connected.append(str(address))

before, seed = set(sys.modules), torch.get_rng_state()
read, write = os.pipe()
stdout, stderr = os.dup(1), os.dup(2)
os.dup2(write, 1), os.dup2(write, 2)
import timm_sape
sys.stdout.flush(), sys.stderr.flush()
os.dup2(stdout, 1), os.dup2(stderr, 2)
os.close(write)
new = {name if name.startswith('torch.') else name.split('.')[0] for name in set(sys.modules) - before}
print(json.dumps(dict(
    printed=os.read(read, 10000).decode(),
    built=built,
    connected=connected,
    cuda=torch.cuda.is_initialized(),
    new=sorted(new - set(sys.stdlib_module_names)),
    random=torch.equal(seed, torch.get_rng_state()),
)))
"""
    seen = in_new_process(script)
    assert seen['printed'] == ''
    assert seen['built'] == []
    assert seen['connected'] == []
    assert not seen['cuda']
    assert seen['random']
    # No plotting, progress bars, data sets, transformers: only what timm imports anyway.
    assert seen['new'] == ['timm_sape', 'torch.utils.flop_counter', 'torch.utils.module_tracker']


# ---- wrong arguments: a ValueError that says what is wrong and what to do


@pytest.mark.parametrize('kwargs,says', [
    (dict(pos_embed='learn'), "pos_enc='ape'"),
    (dict(pos_embed='none'), "'nope'"),
    (dict(block_fn=torch.nn.Identity), 'block_fn= cannot be chosen'),
    (dict(attn_layer='diff'), 'attn_layer= cannot be chosen'),
    (dict(pos_enc='sape3'), "Unknown position encoding 'sape3'. Did you mean 'sape2'"),
    (dict(pos_enc='rope2d+rope2d_mixed'), 'two rotations, rope2d and rope2d_mixed'),
    (dict(pos_enc='ape+nope'), "'nope' means no position encoding"),
    (dict(pos_enc='sape2+sape2_k'), "names 'sape2_k' more than once"),
    (dict(pos_enc='ape+'), 'empty part'),
    (dict(pos_enc_kwargs={'sape2_q': {}}), "'sape2_q', which is not a part of"),
    (dict(pos_enc_kwargs={'sape2_k': {'presets': 'appendix'}}), "no keyword 'presets'. It accepts: .*preset"),
], ids=str)
def test_conflicting_arguments(kwargs, says):
    with pytest.raises(ValueError, match=says):
        tiny(**kwargs)


@pytest.mark.parametrize('kwargs,says', [
    (dict(img_size=-32), r'img_size must be an integer of at least 1, .* got \(-32, -32\)'),
    (dict(img_size=(32, 0)), r'img_size must be an integer of at least 1, .* got \(32, 0\)'),
    (dict(img_size='32'), r"img_size must be .* got \('32', '32'\)"),
    (dict(img_size=32.), r'img_size must be .* got \(32.0, 32.0\)'),
    (dict(img_size=np.int64(32)), r'img_size must be an integer of at least 1, .*Use int'),  # timm fails on it
    (dict(img_size=(3, 32, 32)), r'img_size must be .*two: \(height, width\), got \(3, 32, 32\)'),
    (dict(patch_size=0), r'patch_size must be .* got \(0, 0\)'),
    (dict(patch_size=(16, -4)), r'patch_size must be .* got \(16, -4\)'),
    (dict(patch_size=8.), r'patch_size must be .* got \(8.0, 8.0\)'),
    (dict(img_size=8), r'smaller than patch_size=\(16, 16\).*img_size=\(16, 16\)'),
    (dict(img_size=33), r'does not divide img_size=\(33, 33\).*img_size=\(32, 32\).*dynamic_img_pad=True'),
    (dict(img_size=(32, 41)), r'does not divide img_size=\(32, 41\).*img_size=\(32, 48\)'),
    (dict(img_size=33, dynamic_img_size=True), 'does not divide .*dynamic_img_pad=True'),
    (dict(embed_dim=66), 'embed_dim=66 .* num_heads=4'),
    (dict(embed_dim=-64), 'embed_dim'),
    (dict(num_heads=0), 'num_heads'),
    (dict(num_heads=-4), 'num_heads'),
    (dict(depth=-1), 'depth'),
    (dict(reg_tokens=-1), 'reg_tokens'),
], ids=str)
def test_sizes_that_make_no_model(kwargs, says):
    with pytest.raises(ValueError, match=says):
        tiny(**kwargs)


def test_ref_grid_size_without_a_rule():
    """Someone who gives it to `rope2d` expects its positions to be rescaled."""
    with pytest.warns(UserWarning, match=r"changes nothing .*'rope2d': \{'resolution': 'rescale'\}"):
        tiny('rope2d', ref_grid_size=(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        tiny('rope2d', ref_grid_size=(2, 2), pos_enc_kwargs={'rope2d': {'resolution': 'rescale'}})
        tiny('ape', ref_grid_size=(2, 2))


@pytest.mark.parametrize('ref_grid_size', [(0, 2), (2, -1), (3,), (2, 2, 2), (2.5, 2)], ids=str)
def test_ref_grid_size_that_is_no_grid(ref_grid_size):
    with pytest.raises(ValueError, match='ref_grid_size'):
        tiny(ref_grid_size=ref_grid_size)


@pytest.mark.parametrize('encoding', ['rope2d', 'rope2d_mixed'])
@pytest.mark.parametrize('embed_dim,num_heads,head_dim', [(60, 4, 15), (72, 4, 18)])
def test_head_dim_that_cannot_be_rotated(encoding, embed_dim, num_heads, head_dim):
    with pytest.raises(ValueError, match=f"'{encoding}' needs .* multiple of 4, got {head_dim}. Choose another num_h"):
        tiny(encoding, embed_dim=embed_dim, num_heads=num_heads)


def test_odd_head_dim_is_fine_without_rotation():
    model = tiny('sape2_qk', embed_dim=60, num_heads=4).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, 32, 32)).isfinite().all()


@pytest.mark.parametrize('encoding', ENCODINGS)
def test_image_that_does_not_fit(encoding):
    model = tiny(encoding)
    with pytest.raises(ValueError, match='The image is 32x48, the model is made for 32x32.*dynamic_img_size=True'):
        model(torch.randn(1, 3, 32, 48))
    with pytest.raises(ValueError, match='The image is 33x32, the model is made for 32x32.*set_input_size'):
        model.forward_intermediates(torch.randn(1, 3, 33, 32))


@pytest.mark.parametrize('images', [None, [torch.randn(3, 32, 32)], np.zeros((1, 3, 32, 32), np.float32)])
def test_what_is_no_tensor_of_images(images):
    model = tiny('ape')
    for call in (model, model.forward_features, model.forward_intermediates):
        with pytest.raises(ValueError, match=f'tensor of images .*got {type(images).__name__}'):
            call(images)


@pytest.mark.parametrize('encoding', ENCODINGS)
def test_dynamic_image_that_the_patch_does_not_divide(encoding):
    image = torch.randn(1, 3, 48, 41)
    model = tiny(encoding, dynamic_img_size=True).eval()
    with torch.no_grad():
        assert model.forward_features(image[..., :32]).shape == (1, 1 + 3 * 2, 64)
    with pytest.raises(ValueError, match='48x41, which the patch size 16x16 does not divide.*dynamic_img_pad=True'):
        model(image)

    padding = tiny(encoding, dynamic_img_size=True, dynamic_img_pad=True).eval()
    padding.load_state_dict(model.state_dict())
    with torch.no_grad():
        padded = padding.forward_features(image)
        expected = model.forward_features(torch.nn.functional.pad(image, (0, 7)))
    assert padded.shape == (1, 1 + 3 * 3, 64)
    torch.testing.assert_close(padded, expected, rtol=0, atol=0)


@pytest.mark.parametrize('encoding', ENCODINGS)
def test_naflex_is_refused(encoding):
    naflex = {'patches': torch.zeros(1, 4, 768), 'patch_coord': torch.zeros(1, 4, 2), 'patch_valid': torch.ones(1, 4)}
    model = tiny(encoding, dynamic_img_size=True, use_naflex=False)
    for call in (model, model.forward_features, model.forward_intermediates, model.embed):
        with pytest.raises(ValueError, match=r'images \[B, C, height, width\], not a dict of .*patch_coord.*naflexvit'):
            call(naflex)
    with pytest.raises(ValueError, match='use_naflex=True: .* does not take patches .*naflexvit'):
        tiny(encoding, use_naflex=True)
    with pytest.raises(ValueError, match=r'not \[3, 64, 64\]. Give a single image as image\[None\]'):
        model(torch.zeros(3, 64, 64))


@pytest.mark.parametrize('kwargs', [
    dict(img_size=(32, 40)), dict(patch_size=7), dict(img_size=(-32, 32)), dict(img_size=32.), dict(img_size=64.),
    dict(img_size=[64]), dict(patch_size=8.)], ids=str)
def test_set_input_size_that_does_not_fit_changes_nothing(kwargs):
    model = tiny('sape2_k_ape').eval()
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        before = model(x)
        with pytest.raises(ValueError, match='does not divide|must be an integer'):
            model.set_input_size(**kwargs)
        assert torch.equal(model(x), before)


@pytest.mark.parametrize('kwargs,message', [
    ({'preset': 'equations'}, r"belongs to an encoding: pos_enc_kwargs=\{'sape2_k': \{'preset': ...\}\}"),
    ({'patch_drop_rate': 1.0}, 'patch_drop_rate must be'),
    ({'patch_drop_rate': -0.5}, 'patch_drop_rate must be'),
    ({'ref_grid_size': 14}, r'ref_grid_size must be \(H, W\)'),
    ({'pos_enc_kwargs': {'sape2_k': {'preset': ['equations']}}}, 'unknown preset'),
    ({'img_size': 30, 'dynamic_img_size': True, 'dynamic_img_pad': True}, 'does not divide'),
    ({'pos_enc': 'SaPE2'}, "Did you mean 'sape2'"),
], ids=str)
def test_careless_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model('test_vit_sape2_k', **kwargs)


def test_spaces_around_parts():
    assert timm.create_model('test_vit_pos_enc', pos_enc='sape2 + ape').pos_enc == 'ape+sape2_k'


def test_decorator_without_a_name():
    with pytest.raises(ValueError, match="@register_encoding\\('name'\\)"):
        timm_sape.register_encoding(timm_sape.PositionEncoding)
