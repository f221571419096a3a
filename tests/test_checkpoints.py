"""Loading weights: which are adapted, which are refused, and what stays the same."""
import argparse
import copy
import json
import os
import re
import warnings
from functools import partial

import pytest
import safetensors.torch
import timm
import torch
from common import OFTEN, POS_ENCS, Maker, images, rarely, registered
from timm.models import load_checkpoint, resume_checkpoint
from timm.models._hub import save_for_hf
from timm.utils import CheckpointSaver, ModelEmaV3
from torch import nn

import timm_sape  # noqa: F401  registers the models
from timm_sape.loading import load_model

A, B, C = (24, 40), (32, 32), (40, 16)  # image sizes; grids of 3x5, 4x4 and 5x2 patches
SAME = dict(rtol=0, atol=1e-6)
OF_TIMM, SMALL = 'vit_tiny_patch16_224', dict(depth=2, embed_dim=64, num_heads=2)


def tiny(pos_enc, size=A, **kwargs):
    """A model of two small blocks with patches of 8x8 and no parameter that is trivially zero. Always the same one."""
    kwargs = dict(dict(img_size=size, patch_size=8, num_classes=10), **kwargs)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, **kwargs)
        return model.eval() if 'checkpoint_path' in kwargs else randomise(model)


@torch.no_grad()
def randomise(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return model.eval()


def from_file(pos_enc, path, size=A, declared=A, overlay=None, **kwargs):
    """Load on the pretrained path. `declared` is the image size that the config gives for the file."""
    overlay = dict(file=str(path), num_classes=10, **(overlay or {}))
    if declared is not None:
        overlay['input_size'] = (3, *declared)
    kwargs = dict(dict(img_size=size, patch_size=8, num_classes=10), **kwargs)
    return timm.create_model(
        'test_vit_pos_enc', pos_enc=pos_enc, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs).eval()


def from_dir(path, **kwargs):
    return timm.create_model(f'local-dir:{path}', pretrained=True, **kwargs).eval()


def save(model_or_state, path):
    state = model_or_state.state_dict() if isinstance(model_or_state, nn.Module) else model_or_state
    (safetensors.torch.save_file if path.suffix == '.safetensors' else torch.save)(state, path)
    return path


def save_dir(model, path):
    """Save as for the Hub. Returns the content of config.json."""
    save_for_hf(model, path, safe_serialization=True)
    return json.loads((path / 'config.json').read_text())


@torch.no_grad()
def logits(model):
    generator = torch.Generator().manual_seed(1)
    in_chans = model.patch_embed.proj.in_channels
    return model(torch.randn(2, in_chans, *model.patch_embed.img_size, generator=generator))


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(state, expected):
    assert list(state) == list(expected)
    for name in expected:
        assert torch.equal(state[name], expected[name]), name


# ---- the pretrained path is strict outside the head


@pytest.mark.parametrize('num_classes', [10, 3], ids=['same head', 'new head'])
@pytest.mark.parametrize('key', [
    'cls_token', 'pos_embed', 'norm.weight', 'blocks.1.attn.qkv.bias', 'patch_embed.proj.weight',
    'blocks.0.attn.encodings.sape2_k.table_y', 'blocks.1.attn.encodings.sape2_k._extra_state'])
def test_missing_entry_is_refused(key, num_classes, tmp_path):
    """timm itself accepts missing entries once the head changes."""
    state = tiny('ape+sape2_k').state_dict()
    del state[key]
    path = save(state, tmp_path / 'w.pth')
    with pytest.raises(ValueError, match=f'it lacks {re.escape(key)}[.]'):
        from_file('ape+sape2_k', path, num_classes=num_classes)


@pytest.mark.parametrize('num_classes', [10, 3], ids=['same head', 'new head'])
@pytest.mark.parametrize('key', ['blocks.2.norm1.weight', 'fc_norm.weight', 'pos_embed', 'encodings.t5.table'])
def test_unexpected_entry_is_refused(key, num_classes, tmp_path):
    path = save(dict(tiny('sape2_k').state_dict(), **{key: torch.zeros(64)}), tmp_path / 'w.safetensors')
    with pytest.raises(ValueError, match=f"pos_enc='sape2_k': it has {re.escape(key)}[.]"):
        from_file('sape2_k', path, num_classes=num_classes)


def test_wrong_shape_is_refused(tmp_path):
    path = save(dict(tiny('nope').state_dict(), **{'norm.weight': torch.zeros(32)}), tmp_path / 'w.pth')
    with pytest.raises(ValueError, match=r'it has norm.weight \[32\] instead of \[64\]'):
        from_file('nope', path)
    path = save(tiny('nope', embed_dim=32), tmp_path / 'w.pth')
    with pytest.raises(ValueError, match=r'it has .*\[32\] instead of \[64\].* more'):
        from_file('nope', path)


@pytest.mark.parametrize('num_classes', [0, 3])
def test_head_of_other_size_is_left_out(num_classes, tmp_path):
    saved = tiny('ape+sape2_k')
    model = from_file('ape+sape2_k', save(saved, tmp_path / 'w.pth'), num_classes=num_classes)
    expected = {k: v for k, v in saved.state_dict().items() if not k.startswith('head.')}
    assert_equal({k: v for k, v in model.state_dict().items() if not k.startswith('head.')}, expected)
    assert logits(model).shape == (2, num_classes or 64)


@pytest.mark.parametrize('name,kwargs', [('test_vit_pos_enc', {}), ('vit_graft', {'base': 'test_vit'})])
def test_head_that_is_dropped_although_it_fits(name, kwargs, tmp_path):
    """timm compares declared numbers of classes instead of shapes, so a head is lost unless its number is declared."""
    kwargs = dict(pos_enc='sape2_k', img_size=A, patch_size=8, **kwargs)
    saved = randomise(timm.create_model(name, num_classes=10, **kwargs))
    overlay = dict(file=str(save(saved, tmp_path / 'w.pth')), input_size=(3, *A))

    def load(num_classes, overlay):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            model = timm.create_model(
                name, num_classes=num_classes, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)
        return model, [str(warning.message) for warning in seen]

    model, (message,) = load(10, overlay)
    assert not torch.equal(model.head.weight, saved.head.weight)
    assert 'head.weight of the checkpoint fits the model, but timm drops it' in message
    advice = re.search(r'pretrained_cfg_overlay=dict\(\.\.\., num_classes=(\d+)\)', message)
    model, messages = load(10, dict(overlay, num_classes=int(advice[1])))
    assert torch.equal(model.head.weight, saved.head.weight) and not messages
    assert not load(3, overlay)[1]  # that does not fit


PARTS = ('nope', 'ape', 'rope2d_mixed', 'cope', 'sape2_k', 'sape2_q', 'sape2_qk', 'ape+sape2_k')


@pytest.mark.parametrize('saved', PARTS)
def test_parameters_of_another_encoding_never_load(saved, tmp_path):
    path = save(tiny(saved), tmp_path / 'w.pth')
    for wanted in PARTS:
        if wanted == saved:
            assert torch.equal(logits(from_file(wanted, path)), logits(tiny(saved)))
            continue
        with pytest.raises(ValueError, match=f'pos_enc={wanted!r}'.replace('+', r'\+')):
            from_file(wanted, path)
        with pytest.raises(ValueError, match=f'pos_enc={wanted!r}'.replace('+', r'\+')):
            tiny(wanted).load_state_dict(tiny(saved).state_dict())


@pytest.mark.parametrize('keywords', [{'bias_scale': 'learned'}, {'npos': 4}], ids=str)
def test_keywords_that_change_the_parameters_never_load(keywords, tmp_path):
    keywords = {'sape2_k': keywords}
    path = save(tiny('sape2_k', pos_enc_kwargs=keywords), tmp_path / 'w.pth')
    with pytest.raises(ValueError, match='does not fit'):
        from_file('sape2_k', path)
    path = save(tiny('sape2_k'), tmp_path / 'w.pth')
    with pytest.raises(ValueError, match='does not fit'):
        from_file('sape2_k', path, pos_enc_kwargs=keywords)


def test_what_a_bare_file_cannot_know(tmp_path):
    """An encoding without parameters leaves no entries: the file of a rotary model loads into `nope`, which differs.

    So does SaPE2's file into a model with another preset. Only a saved config tells them apart, see the tests of
    `local-dir:` below.
    """
    path = save(tiny('rope2d'), tmp_path / 'w.pth')
    assert (logits(from_file('nope', path)) - logits(tiny('rope2d'))).abs().max() > 1e-3
    assert torch.equal(logits(from_file('rope2d', path)), logits(tiny('rope2d')))

    path = save(tiny('sape2_k'), tmp_path / 'w.pth')
    other = from_file('sape2_k', path, pos_enc_kwargs={'sape2_k': {'preset': 'equations'}})
    assert (logits(other) - logits(tiny('sape2_k'))).abs().max() > 1e-4


# ---- files that are not checkpoints


def write_cut(path, keep, legacy=False):
    if path.suffix == '.safetensors':
        safetensors.torch.save_file(tiny('ape').state_dict(), path)
    else:
        torch.save(tiny('ape').state_dict(), path, _use_new_zipfile_serialization=not legacy)
    data = path.read_bytes()
    path.write_bytes(data[:keep] if isinstance(keep, int) else data[:int(keep * len(data))])


BROKEN = {
    'empty.pth': lambda path: write_cut(path, 0),
    'first bytes.pth': lambda path: write_cut(path, 3),
    'half.pth': lambda path: write_cut(path, 0.5),
    'all but the end.pth': lambda path: write_cut(path, -5),
    'half, old format.pth': lambda path: write_cut(path, 0.5, legacy=True),
    'start, old format.pth': lambda path: write_cut(path, 100, legacy=True),
    'empty.safetensors': lambda path: write_cut(path, 0),
    'first bytes.safetensors': lambda path: write_cut(path, 3),
    'half.safetensors': lambda path: write_cut(path, 0.5),
    'all but the end.safetensors': lambda path: write_cut(path, -5),
    'text.pth': lambda path: path.write_text('hello, this is text'),
    'web page.pth': lambda path: path.write_text('<!DOCTYPE html><html></html>'),
    'web page.safetensors': lambda path: path.write_text('<!DOCTYPE html><html></html>'),
    'wrong suffix.pth': lambda path: path.write_bytes(safetensors.torch.save(tiny('ape').state_dict())),
    'wrong suffix.safetensors': lambda path: torch.save(tiny('ape').state_dict(), path),
    'a list.pth': lambda path: torch.save([1, 2], path),
    'a tensor.pth': lambda path: torch.save(torch.ones(3), path),
}


@pytest.mark.parametrize('name', BROKEN)
def test_file_that_cannot_be_read(name, tmp_path):
    BROKEN[name](tmp_path / name)
    with pytest.raises(ValueError, match="checkpoint.*'test_vit_pos_enc'.*(truncated|no checkpoint)"):
        from_file('ape', tmp_path / name)


@pytest.mark.parametrize('content', [{}, {'epoch': 3}, {'state_dict': {}}], ids=str)
def test_file_without_weights(content, tmp_path):
    torch.save(content, tmp_path / 'w.pth')
    with pytest.raises(ValueError, match='it lacks blocks.0.attn'):
        from_file('nope', tmp_path / 'w.pth')


def test_weights_beside_the_name_of_a_model():
    """Of a checkpoint in memory, which timm does not look into."""
    state = tiny('ape').state_dict()
    overlay = dict(state_dict={'model': 'vit_small', 'state_dict': state}, num_classes=10, input_size=(3, *A))
    loaded = timm.create_model(
        'test_vit_pos_enc', pretrained=True, pretrained_cfg_overlay=overlay, img_size=A, patch_size=8, num_classes=10)
    assert_equal(loaded.state_dict(), state)


def test_truncated_local_dir(tmp_path):
    save_dir(tiny('ape'), tmp_path)
    write_cut(tmp_path / 'model.safetensors', 0.5)
    with pytest.raises(ValueError, match="Cannot read the checkpoint for 'test_vit_pos_enc'.*truncated"):
        from_dir(tmp_path)


def test_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        from_file('ape', tmp_path / 'nothing.pth')


# ---- prefix tokens and the grid of a position table


@pytest.mark.parametrize('pos_enc', ['ape', 'sape2_k', 'rope2d'])
@pytest.mark.parametrize('kwargs', [
    dict(reg_tokens=1),
    dict(reg_tokens=4),
    dict(reg_tokens=16),
    dict(class_token=False, reg_tokens=1, global_pool='avg', fc_norm=False),
    dict(class_token=False, global_pool='avg', fc_norm=False),
], ids=str)
def test_wrong_prefix_tokens(pos_enc, kwargs, tmp_path):
    path = save(tiny(pos_enc), tmp_path / 'w.pth')
    with pytest.raises(ValueError, match='prefix tokens|_token'):
        from_file(pos_enc, path, **kwargs)


@pytest.mark.parametrize('reg_tokens', [1, 2, 3, 4, 5])
def test_wrong_prefix_tokens_of_a_small_table(reg_tokens, tmp_path):
    """The rows that remain for patches may make a square by chance, or none may remain."""
    path = save(tiny('ape', (16, 16)), tmp_path / 'w.pth')
    with pytest.raises(ValueError, match='prefix tokens|reg_token'):
        from_file('ape', path, (16, 16), (16, 16), reg_tokens=reg_tokens)


def test_grid_that_nobody_declared(tmp_path):
    """15 patches can be 3x5, 5x3 or 1x15, and the file does not say which."""
    saved = tiny('ape', A)
    path = save(saved, tmp_path / 'w.pth')
    with pytest.raises(ValueError, match=r'16 rows.*neither a square.*input_size=\(3, height, width\)'):
        from_file('ape', path, B, declared=None)
    for size in (A, B, C):
        expected = copy.deepcopy(saved)
        expected.set_input_size(size)
        torch.testing.assert_close(logits(from_file('ape', path, size, declared=A)), logits(expected), **SAME)


@pytest.mark.parametrize('pos_enc,trained,declared', [
    ('ape+rpb', (16, 64), None),
    ('ape+rpb', (16, 64), (16, 64)),
    ('ape+rpb', (16, 64), B),
    ('ape+rpb', A, None),
    ('ape+sape2_k', A, None),
])
def test_grid_that_an_encoding_saved(pos_enc, trained, declared, tmp_path):
    """The table has the grid of an encoding that is resized along, even if its rows are as many as a square's."""
    path = save(tiny(pos_enc, trained), tmp_path / 'w.pth')
    for size in (trained, B, C):
        saved = tiny(pos_enc, trained)
        saved.set_input_size(size)
        loaded = from_file(pos_enc, path, size, declared=declared)
        torch.testing.assert_close(logits(loaded), logits(saved), **SAME)


def test_a_grid_with_as_many_patches_as_the_default_one(tmp_path):
    """The table was resampled from 20x20, the grid of the name, although nobody had said so."""
    model = tiny('ape', (40, 640))  # 5x80 patches
    path = save(model, tmp_path / 'w.pth')
    with pytest.warns(UserWarning, match='to be of 20x20 patches, the default of the name, and resampled to 5x80'):
        from_file('ape', path, (40, 640), declared=None)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        loaded = from_file('ape', path, (40, 640), declared=(40, 640))
        torch.testing.assert_close(logits(loaded), logits(model), **SAME)
        square = from_file('ape', save(tiny('ape', (160, 160)), tmp_path / 's.pth'), (160, 160), declared=None)
        torch.testing.assert_close(logits(square), logits(tiny('ape', (160, 160))), **SAME)


@pytest.mark.parametrize('wrap', [lambda model: nn.Sequential(model), torch.compile])
def test_another_rule_inside_a_wrapper(wrap):
    """The model's own `load_state_dict`, which says more, is not called there."""
    ruled = tiny('rope2d', pos_enc_kwargs={'rope2d': {'resolution': 'rescale'}})
    plain = tiny('rope2d')
    with pytest.raises(RuntimeError, match='Unexpected key.*encodings.rope2d._extra_state'):
        wrap(plain).load_state_dict(wrap(ruled).state_dict())
    with pytest.raises(RuntimeError, match='Missing key.*encodings.rope2d._extra_state'):
        wrap(ruled).load_state_dict(wrap(plain).state_dict())
    assert plain.load_state_dict(ruled.state_dict(), strict=False).unexpected_keys == ['encodings.rope2d._extra_state']


def test_grids_that_contradict_each_other(tmp_path):
    """16 patches: 2x8, where SaPE2's tables are from, or 4x4, if the model was resized before it was saved."""
    path = save(tiny('ape+sape2_k', (16, 64)), tmp_path / 'w.pth')
    for declared in (None, B):
        with pytest.raises(ValueError, match=r'grid may be 2x8 or 4x4\. .*If it is not 2x8.*load_state_dict'):
            from_file('ape+sape2_k', path, B, declared=declared)
    expected = tiny('ape+sape2_k', (16, 64))
    expected.set_input_size(B)
    loaded = from_file('ape+sape2_k', path, B, declared=(16, 64))
    torch.testing.assert_close(logits(loaded), logits(expected), **SAME)


def continued(pos_enc, trained, size, folder):
    """A model saved in a folder, trained further at another size, and the checkpoint that train.py writes of it."""
    save_dir(tiny(pos_enc, trained), folder)
    model = randomise(from_dir(folder, img_size=size), seed=1)
    name, kwargs = f'local-dir:{folder}', {'img_size': size}
    args = argparse.Namespace(model=name, model_kwargs=kwargs, input_size=[3, *size], num_classes=10)
    torch.save({'arch': name, 'state_dict': model.state_dict(), 'args': args}, folder / 'last.pth.tar')
    return model, str(folder / 'last.pth.tar')


@pytest.mark.parametrize('trained,size', [((24, 48), (48, 24)), ((32, 32), (48, 48)), ((32, 32), (16, 64))], ids=str)
@pytest.mark.parametrize('pos_enc', ['ape', 'ape+rope2d', 'ape+rpb', 'lape'])
def test_checkpoints_of_a_training_continued_at_another_size(pos_enc, trained, size, tmp_path):
    """The folder's size is no longer that of the table, even if the table has as many rows."""
    model, file = continued(pos_enc, trained, size, tmp_path)
    for name in (file, f'local-dir:{tmp_path}@{file}'):
        torch.testing.assert_close(logits(load_model(name)), logits(model), **SAME)
    overlay = dict(file=file, source='', input_size=(3, *size), num_classes=10)
    loaded = from_dir(tmp_path, img_size=size, pretrained_cfg_overlay=overlay)
    torch.testing.assert_close(logits(loaded), logits(model), **SAME)


@pytest.mark.parametrize('kwargs', [
    *(dict(pos_enc_kwargs={'rope2d': {'resolution': rule}}) for rule in ('rescale', 'ntk', 'yarn')),
    dict(logit_scaling='log')], ids=str)
def test_rules_start_from_the_size_of_the_continued_training(kwargs, tmp_path):
    model, file = continued('rope2d', (32, 32), (48, 48), tmp_path)
    loaded = load_model(file, **kwargs)
    assert loaded.ref_grid_size == (6, 6)
    torch.testing.assert_close(logits(loaded), logits(model), **SAME)


@pytest.mark.parametrize('kwargs', [
    dict(pos_enc_kwargs={'rope2d': {'resolution': 'rescale'}}), dict(logit_scaling='log')], ids=str)
@pytest.mark.parametrize('host', ['vit', 'naflexvit'])
def test_another_patch_size_than_the_default_one_that_was_saved(host, kwargs, tmp_path):
    """The config does not name the trained patch size, the kernel of the file has it."""
    saved = timm.create_model(f'test_{host}_rope2d', img_size=64, num_classes=10)
    assert 'patch_size' not in save_dir(saved, tmp_path)['model_args'] and saved.grid_size == (4, 4)
    loaded = from_dir(tmp_path, patch_size=8, **kwargs)
    assert loaded.ref_grid_size == (4, 4) and loaded.grid_size == (8, 8)


@pytest.mark.parametrize('last', [1, 2])
def test_a_pruned_model_that_depends_on_its_depth_is_refused(last, tmp_path):
    """LookHere built again with fewer layers would see other distances, with the same weights."""
    saved = timm.create_model('test_vit_lookhere', depth=4, patch_size=8, img_size=32)
    with pytest.warns(UserWarning, match='Save it before, and prune it after loading'):
        saved.prune_intermediate_layers([last], prune_head=False)
    with pytest.raises(ValueError, match='blocks'):
        timm_sape.hub.save(saved, tmp_path / 'model')
    save_dir(saved, tmp_path / 'other')
    with pytest.raises((ValueError, RuntimeError), match='blocks'):
        from_dir(tmp_path / 'other')


@pytest.mark.parametrize('pool', ['token', 'avg'])
@pytest.mark.parametrize('pruned', [dict(prune_head=False), dict(), dict(prune_norm=True)], ids=str)
@pytest.mark.parametrize('name', ['test_vit_lape', 'test_naflexvit_sape2_k'])
def test_a_pruned_model_is_saved_as_it_is(name, pruned, pool, tmp_path):
    saved = randomise(timm.create_model(name, patch_size=8, img_size=32, global_pool=pool))
    saved.prune_intermediate_layers([0], **pruned)
    assert save_dir(saved, tmp_path)['model_args']['depth'] == len(saved.blocks) == 1
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(from_dir(tmp_path)(x), saved(x), **SAME)


@pytest.mark.parametrize('pos_enc', rarely(
    [pos_enc for pos_enc in POS_ENCS if 'toy' not in pos_enc], [*OFTEN, 'lape', 'rope2d_mixed']))
def test_blocks_that_are_left_compute_what_they_did(pos_enc):
    model, x = Maker(pos_enc, depth=3)(), images((3, 5))
    expected, = model.forward_intermediates(x, [1], intermediates_only=True)
    model.prune_intermediate_layers([1])
    found, = model.forward_intermediates(x, [1], intermediates_only=True)
    assert len(model.blocks) == 2 and torch.equal(found, expected)


@pytest.mark.parametrize('name', ['test_vit_rope2d', 'test_naflexvit_rope2d'])
def test_features_without_a_pool(name, tmp_path):
    saved = randomise(timm.create_model(name, global_pool='map', patch_size=8, img_size=32))
    save_for_hf(saved, tmp_path, safe_serialization=True)
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(
        from_dir(tmp_path, num_classes=0, global_pool='')(x), saved.forward_features(x), rtol=0, atol=1e-6)


def test_an_attention_pool_is_not_dropped_in_silence(tmp_path):
    """Only features without a pool do without it."""
    path = save(tiny('rope2d', global_pool='map'), tmp_path / 'w.pth')
    with pytest.raises(ValueError, match='it has attn_pool'):
        from_file('rope2d', path, global_pool='avg', fc_norm=False)


def test_row_of_the_class_token_is_no_patch(tmp_path):
    """16 rows, of 3x5 patches and a class token, must not be taken for 4x4 patches. The saved size is known."""
    save_dir(tiny('ape', A), tmp_path)
    with pytest.raises(ValueError, match='pos_embed'):
        from_dir(tmp_path, no_embed_class=True)


def test_square_grid_needs_no_declaration(tmp_path):
    saved = tiny('ape', B)
    path = save(saved, tmp_path / 'w.pth')
    saved.set_input_size(C)
    torch.testing.assert_close(logits(from_file('ape', path, C, declared=None)), logits(saved), **SAME)


def test_local_dir_declares_its_grid(tmp_path):
    saved = tiny('ape', A)
    save_dir(saved, tmp_path)
    saved.set_input_size(C)
    torch.testing.assert_close(logits(from_dir(tmp_path, img_size=C)), logits(saved), **SAME)


# ---- local-dir: the saved config decides


@pytest.mark.parametrize('saved,wanted', [
    ('nope', 'rope2d'),
    ('rope2d', 'nope'),
    ('ape', 'ape+rope2d'),
    ('sape2_k', 'sape2_q'),
    ('ape+sape2_k', 'ape'),
    ('sape2_k', 'cope+ape'),
])
@pytest.mark.parametrize('pretrained', [True, False])
def test_local_dir_of_another_encoding(saved, wanted, pretrained, tmp_path):
    save_dir(tiny(saved), tmp_path)
    wanted_says = '+'.join(sorted(wanted.split('+')))
    says = re.escape(f"The saved model 'test_vit_pos_enc' was trained with pos_enc {saved}, which cannot be changed to "
                     f'{wanted_says} ')
    with pytest.raises(ValueError, match=says):
        timm.create_model(f'local-dir:{tmp_path}', pretrained=pretrained, pos_enc=wanted)


def test_only_rules_may_be_chosen_anew(tmp_path):
    """An encoding of one's own has a keyword `ramp`, too, which is no rule for other sizes."""
    class Slope(timm_sape.PositionEncoding):
        name = 'slope'

        def __init__(self, *, ramp=1.0, device=None, dtype=None, **host):
            super().__init__(**host)
            self.ramp = ramp

        def position_bias(self, grid):
            distances = torch.arange(grid.num_tokens, device=grid.device, dtype=torch.float32)
            return -self.ramp * (distances[:, None] - distances).abs().expand(self.num_heads, -1, -1)

    with registered(Slope):
        save_dir(tiny('slope'), tmp_path)
        with pytest.raises(ValueError, match="cannot be changed to slope with {'slope': {'ramp': 9.0}}"):
            from_dir(tmp_path, pos_enc_kwargs={'slope': {'ramp': 9.0}})


@pytest.mark.parametrize('name, before, after', [
    ('rope_dinov3', {'normalize': 'max', 'shift': 0.2}, {'shift': None, 'jitter': 1.2, 'rescale': 2}),
    ('cape', {}, {'max_global_shift': 0, 'max_local_shift': 0, 'max_scale': 1}),
    ('cpb', {'hidden': 32, 'drop': 0.125}, {'drop': 0})])
def test_what_is_random_in_training_may_be_chosen_anew(name, before, after, tmp_path):
    saved = randomise(tiny(name, pos_enc_kwargs={name: before} if before else None))
    save_dir(saved, tmp_path)
    loaded = from_dir(tmp_path, pos_enc_kwargs={name: after})
    x = torch.randn(2, 3, *saved.patch_embed.img_size)
    assert torch.equal(loaded.eval()(x), saved.eval()(x)) and loaded.pos_enc_kwargs == {name: {**before, **after}}
    fixed = {'rope_dinov3': {'normalize': 'min'}, 'cpb': {'hidden': 16}}.get(name)
    if fixed:
        with pytest.raises(ValueError, match='which cannot be changed to'):
            from_dir(tmp_path, pos_enc_kwargs={name: {**after, **fixed}})


def test_local_dir_of_an_encoding_with_keywords(tmp_path):
    keywords = {'sape2_k': {'preset': 'equations'}}
    saved = tiny('ape+sape2_k', pos_enc_kwargs=keywords)
    save_dir(saved, tmp_path)
    for same in (
            dict(),
            dict(pos_enc_kwargs={}),
            dict(pos_enc='sape2+ape'),
            dict(pos_enc='ape+sape2_k', pos_enc_kwargs={'sape2': {'preset': 'equations'}}),
    ):
        assert torch.equal(logits(from_dir(tmp_path, **same)), logits(saved))
    for other in (
            dict(pos_enc_kwargs={'sape2_k': {'preset': 'appendix'}}),
            dict(pos_enc='ape+sape2_q', pos_enc_kwargs={}),
            dict(pos_enc='ape+sape2_q'),  # the message must not treat the saved keywords as the user's
            dict(pos_enc='rope2d'),
    ):
        with pytest.raises(ValueError, match='The saved model .* was trained with pos_enc ape.sape2_k'):
            from_dir(tmp_path, **other)


def test_local_dir_with_another_file(tmp_path):
    """The config of one model, the weights of another."""
    save_dir(tiny('sape2_k'), tmp_path / 'k')
    save_dir(tiny('sape2_q'), tmp_path / 'q')
    os.replace(tmp_path / 'q' / 'model.safetensors', tmp_path / 'k' / 'model.safetensors')
    with pytest.raises(ValueError, match='sape2_q.table_x'):
        from_dir(tmp_path / 'k')


# ---- config.json


@pytest.mark.parametrize('name,typed,canonical', [
    ('test_vit_sape2_ape', None, 'ape+sape2_k'),
    ('test_vit_sape2', None, 'sape2_k'),
    ('test_vit_pos_enc', 'sape2+ape', 'ape+sape2_k'),
    ('test_vit_sape2_k', 'ape+sape2_k', 'ape+sape2_k'),
    ('test_vit_ape', 'sape2+rope2d+cope+ape', 'ape+cope+rope2d+sape2_k'),
    ('test_vit_ape', 'nope', 'nope'),
])
def test_config_is_canonical(name, typed, canonical, tmp_path):
    """The saved `pos_enc` has the same form however the encoding was given, or if none was given."""
    kwargs = {} if typed is None else {'pos_enc': typed}
    model = randomise(timm.create_model(name, img_size=A, patch_size=8, num_classes=10, **kwargs))
    config = save_dir(model, tmp_path)
    args = config['model_args']
    assert config['architecture'] == name
    assert args['pos_enc'] == canonical
    assert not args['pos_enc_kwargs']
    assert args.get('ref_grid_size') == ([3, 5] if 'sape2' in canonical else None)
    assert args['img_size'] == [24, 40] and args['patch_size'] == 8
    assert 'backend' not in json.dumps(config)
    again = from_dir(tmp_path)
    assert again.pos_enc == canonical
    assert torch.equal(logits(again), logits(model))


def test_config_keeps_keywords_by_their_canonical_name(tmp_path):
    model = tiny('sape2+cope', pos_enc_kwargs={'sape2': {'npos': 3, 'gate_scale': 0.5}, 'cope': {'npos': 7}})
    args = save_dir(model, tmp_path / 'first')['model_args']
    assert args['pos_enc'] == 'cope+sape2_k'
    assert args['pos_enc_kwargs'] == {'sape2_k': {'npos': 3, 'gate_scale': 0.5}, 'cope': {'npos': 7}}
    again = from_dir(tmp_path / 'first')
    assert torch.equal(logits(again), logits(model))
    assert save_dir(again, tmp_path / 'second')['model_args'] == args


def test_backend_is_no_keyword():
    """A saved backend would be wrong on machines that do not have it."""
    with pytest.raises(ValueError, match="no keyword 'backend'"):
        tiny('sape2_k', pos_enc_kwargs={'sape2_k': {'backend': 'reference'}})


def test_config_after_the_model_has_changed(tmp_path):
    model = tiny('ape+sape2_k')
    model.set_input_size(B)
    model.reset_classifier(3)
    args = save_dir(model, tmp_path)['model_args']
    assert args['img_size'] == [32, 32] and args['num_classes'] == 3
    assert args['ref_grid_size'] == [3, 5]
    assert torch.equal(logits(from_dir(tmp_path)), logits(model))


# ---- the trained grid of encodings that are never resized


@pytest.mark.parametrize('pos_enc', ['sape2_k', 'sape2_q', 'sape2_qk', 'cope', 'ape+sape2_k', 'ape+cope+sape2_k'])
def test_trained_grid_survives(pos_enc, tmp_path):
    """Saved at A, loaded at B, trained on and saved there, loaded at A and C: the trained grid stays that of A.

    At each step the model is what `set_input_size` makes of the one before.
    """
    first = tiny(pos_enc, A)
    assert save_dir(first, tmp_path / 'a')['model_args']['ref_grid_size'] == [3, 5]

    second = from_dir(tmp_path / 'a', img_size=B)
    first.set_input_size(B)
    assert first.ref_grid_size == second.ref_grid_size == (3, 5)
    torch.testing.assert_close(logits(second), logits(first), **SAME)

    randomise(second, seed=2)
    assert save_dir(second, tmp_path / 'b')['model_args']['ref_grid_size'] == [3, 5]
    file = save(second, tmp_path / 'b.pth')
    for size in (B, A, C):
        expected = copy.deepcopy(second)
        expected.set_input_size(size)
        for third in (from_dir(tmp_path / 'b', img_size=size), from_file(pos_enc, file, size, declared=B)):
            assert third.ref_grid_size == (3, 5)
            torch.testing.assert_close(logits(third), logits(expected), **SAME)
            for name, value in third.state_dict().items():
                if name.endswith('_extra_state'):
                    assert value.tolist() == [3, 5]


def test_trained_grid_matters():
    """The same tables with another trained grid are another model. Otherwise the test above could not fail."""
    keywords = {'sape2_k': {'npos': 5}}
    model = tiny('sape2_k', A, pos_enc_kwargs=keywords)
    other = tiny('sape2_k', A, pos_enc_kwargs=keywords, ref_grid_size=(4, 4))
    assert (logits(model) - logits(other)).abs().max() > 1e-4


@pytest.mark.parametrize('pos_enc,keywords', [('cope', {}), ('sape2_k', {'sape2_k': {'npos': 5}})])
def test_trained_grid_travels_where_shapes_fit_anyway(pos_enc, keywords):
    """Tables of the same size for all grids fit anywhere. Their grid matters, and the message says how to give it."""
    saved = tiny(pos_enc, A, pos_enc_kwargs=keywords)
    model = tiny(pos_enc, B, pos_enc_kwargs=keywords)
    with pytest.raises(ValueError, match=r'trained on grid \(3, 5\) instead of \(4, 4\).*ref_grid_size=3,5'):
        model.load_state_dict(saved.state_dict())
    assert model.ref_grid_size == (4, 4)
    model = tiny(pos_enc, B, pos_enc_kwargs=keywords, ref_grid_size=(3, 5))
    model.load_state_dict(saved.state_dict())
    assert model.ref_grid_size == (3, 5)
    saved.set_input_size(B)
    torch.testing.assert_close(logits(model), logits(saved), **SAME)


def test_ref_grid_size_makes_room_on_a_path_without_filter():
    saved = tiny('sape2_k', A)
    model = tiny('sape2_k', B, ref_grid_size=(3, 5))
    model.load_state_dict(saved.state_dict())
    saved.set_input_size(B)
    torch.testing.assert_close(logits(model), logits(saved), **SAME)


@pytest.mark.parametrize('pos_enc', ['sape2_k', 'cope'])
def test_ref_grid_size_unlike_the_checkpoints(pos_enc, tmp_path):
    path = save(tiny(pos_enc, A), tmp_path / 'w.pth')
    says = r'ref_grid_size=\(4, 4\) was given, but the checkpoint was trained on \(3, 5\). Leave it out'
    with pytest.raises(ValueError, match=says):
        from_file(pos_enc, path, B, ref_grid_size=(4, 4))
    assert from_file(pos_enc, path, B, ref_grid_size=(3, 5)).ref_grid_size == (3, 5)
    save_dir(tiny(pos_enc, A), tmp_path)
    with pytest.raises(ValueError, match=says):
        from_dir(tmp_path, ref_grid_size=(4, 4))


# ---- training: CheckpointSaver, EMA, resume


@pytest.mark.parametrize('foreach', [True, False])
@pytest.mark.parametrize('pos_enc', ['ape+sape2_k', 'cope', 'rope2d_mixed'])
def test_train_and_resume(pos_enc, foreach, tmp_path):
    """Trained further at B with an average, saved by timm's saver, and resumed by each function that reads the file."""
    model = from_file(pos_enc, save(tiny(pos_enc, A), tmp_path / 'start.pth'), B)
    start = snapshot(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ema = ModelEmaV3(model, decay=0.5, foreach=foreach)
    for step in (1, 2):
        model.train()(torch.randn(2, 3, *B)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model)
    model.eval()
    key = next((k for k in start if 'encodings' in k and '_extra' not in k), 'norm.bias')
    assert not torch.equal(model.state_dict()[key], start[key])
    assert not torch.equal(model.state_dict()[key], ema.module.state_dict()[key])
    assert ema.module.ref_grid_size == model.ref_grid_size == (None if pos_enc == 'rope2d_mixed' else (3, 5))

    saver = CheckpointSaver(
        model, optimizer, args=argparse.Namespace(model='test_vit_pos_enc'), model_ema=ema,
        checkpoint_dir=tmp_path, recovery_dir=tmp_path)
    saver.save_checkpoint(4, metric=0.5)
    path = tmp_path / 'last.pth.tar'

    grid = dict(ref_grid_size=model.ref_grid_size)
    resumed = tiny(pos_enc, B, **grid)
    state = torch.optim.AdamW(resumed.parameters(), lr=0.01)
    assert resume_checkpoint(resumed, str(path), state) == 5
    assert_equal(resumed.state_dict(), snapshot(model))
    assert len(state.state_dict()['state']) == len(optimizer.state_dict()['state'])

    averaged = tiny(pos_enc, B, **grid)
    assert not any(load_checkpoint(averaged, str(path)))  # timm prefers the average
    assert_equal(averaged.state_dict(), snapshot(ema.module))

    load_checkpoint(averaged, str(path), use_ema=False)
    assert_equal(averaged.state_dict(), snapshot(model))

    fine_tuned = from_file(pos_enc, path, C, declared=B)
    ema.module.set_input_size(C)
    assert fine_tuned.ref_grid_size == model.ref_grid_size
    torch.testing.assert_close(logits(fine_tuned), logits(ema.module), **SAME)

    model.set_input_size(C)
    ema = ModelEmaV3(model)
    ema.set(model)
    assert_equal(ema.module.state_dict(), snapshot(model))


def test_copy_is_checked_against_itself():
    """The hook that refuses unfit checkpoints must check the copy, not the model that was copied."""
    model = tiny('ape', A)
    clone = copy.deepcopy(model)
    clone.set_input_size(B)
    assert clone.load_state_dict(tiny('ape', B).state_dict()) == ([], [])
    assert torch.equal(logits(clone), logits(tiny('ape', B)))
    with pytest.raises(ValueError, match=r'grid \(4, 4\)'):
        clone.load_state_dict(model.state_dict())


def test_pickled_model(tmp_path):
    model = tiny('ape+sape2_k')
    torch.save(model, tmp_path / 'model.pt')
    again = torch.load(tmp_path / 'model.pt', weights_only=False)
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(ValueError, match='does not fit the position encodings of the model'):
        again.load_state_dict(tiny('ape+sape2_k', B).state_dict())


# ---- loading paths without a filter: unfit checkpoints are refused, and none is loaded in part


LOADERS = {
    'load_state_dict': lambda model, path: model.load_state_dict(torch.load(path)),
    'load_checkpoint': lambda model, path: load_checkpoint(model, path),
    'resume_checkpoint': lambda model, path: resume_checkpoint(model, path),
}
MISFITS = [
    (('sape2_k', A), ('sape2_q', A), 'sape2_q.table_x'),
    (('sape2_k', A), ('sape2_k', B), r'table_x \[6, 16\] instead of \[5, 16\]'),
    (('ape', A), ('nope', A), 'it has pos_embed'),
    (('nope', A), ('ape', A), 'it lacks pos_embed'),
    (('ape', A), ('ape', B), r'pos_embed \[1, 16, 64\] instead of \[1, 17, 64\]'),
    (('cope', A), ('ape+cope', A), 'it lacks pos_embed'),
    (('rope2d_mixed', A), ('rope2d', A), 'it has .*rope2d_mixed.freqs'),
]


@pytest.mark.parametrize('loader', LOADERS)
@pytest.mark.parametrize('saved,wanted,says', MISFITS, ids=lambda v: str(v).replace(' ', ''))
def test_misfit_is_refused_before_anything_is_loaded(loader, saved, wanted, says, tmp_path):
    path = str(save(randomise(tiny(*saved), seed=3), tmp_path / 'w.pth'))
    model = tiny(*wanted)
    before = snapshot(model)
    with pytest.raises(ValueError, match=f'{says}.*pretrained=True.*local-dir:.*hf-hub:.*--pretrained-path'):
        LOADERS[loader](model, path)
    assert_equal(model.state_dict(), before)


@pytest.mark.parametrize('saved,wanted,says', MISFITS, ids=lambda v: str(v).replace(' ', ''))
def test_misfit_of_a_checkpoint_path_is_refused(saved, wanted, says, tmp_path):
    path = str(save(tiny(*saved), tmp_path / 'w.pth'))
    with pytest.raises(ValueError, match=f'{says}.*pretrained=True'):
        tiny(*wanted, checkpoint_path=path)


def refused(load):
    with pytest.raises(ValueError) as error:
        load()
    return str(error.value)


def told(message):
    """The arguments that a refusal reads from the entries."""
    return eval(f"dict({re.search(r'; its entries show (.*?)[.] [A-Z]', message)[1]})")


RESCALE = {'resolution': 'rescale'}


@pytest.mark.parametrize('pos_enc,kwargs', [
    ('ape', {}),
    ('sape2_k', {}),
    ('ape+sape2_qk', dict(img_size=(24, 40))),
    ('auto_sape2_k', dict(reg_tokens=4)),
    ('ape+auto_rope2d+cope', dict(embed_dim=96)),
    ('rpb', {}),
    ('lape', {}),
    ('rope2d', dict(pos_enc_kwargs={'rope2d': RESCALE})),
    ('auto_rope2d_mixed', dict(pos_enc_kwargs={'auto_rope2d_mixed': RESCALE})),
], ids=str)
def test_refusal_tells_the_arguments(pos_enc, kwargs, tmp_path):
    """A model of small images and patches, depth and head, loaded into the default model."""
    kwargs = dict(dict(pos_enc=pos_enc, img_size=32, patch_size=4, depth=2, num_classes=10), **kwargs)
    saved = randomise(timm.create_model('vit_tiny_pos_enc', **kwargs))
    path = str(save(saved, tmp_path / 'w.pth'))
    message = refused(lambda: timm.create_model('vit_tiny_pos_enc', checkpoint_path=path))
    if pos_enc == 'ape':
        del kwargs['pos_enc']  # which is the default
    assert told(message) == kwargs
    model = timm.create_model('vit_tiny_pos_enc', checkpoint_path=path, **told(message)).eval()
    assert torch.equal(logits(model), logits(saved))


@pytest.mark.parametrize('pos_enc', ['nope', 'rope2d', 'sincos2d'])
def test_refusal_without_entries_of_encodings(pos_enc, tmp_path):
    """They are all the same, so it must not sound as if there had been none."""
    path = str(save(tiny(pos_enc), tmp_path / 'w.pth'))
    message = refused(lambda: tiny('ape', checkpoint_path=path))
    assert "does not say which encoding it had: none, or one without parameters such as 'rope2d'" in message
    assert 'entries show' not in message
    message = refused(lambda: tiny('ape', B, checkpoint_path=path, reg_tokens=4))
    assert told(message) == {'reg_tokens': 0} and 'does not say which encoding it had' in message
    save(tiny('ape'), tmp_path / 'w.pth')
    assert 'without parameters' not in refused(lambda: tiny('ape', B, checkpoint_path=path))


@pytest.mark.parametrize('name', ['rope2d', 'sincos2d', 'rope2d_mixed', 'fourier'])
@pytest.mark.parametrize('trained,wanted', [('rescale', 'extrapolate'), ('extrapolate', 'rescale')])
def test_refusal_tells_the_rule_for_other_sizes(name, trained, wanted, tmp_path):
    def build(resolution, **kwargs):
        keywords = {name: {'resolution': resolution}, 'sape2_k': {'preset': 'equations'}}
        return tiny(f'{name}+sape2_k', pos_enc_kwargs=keywords, **kwargs)

    saved = build(trained)
    path = str(save(saved, tmp_path / 'w.pth'))
    message = refused(lambda: build(wanted, checkpoint_path=path))
    assert told(message) == {
        'pos_enc_kwargs': {name: {'resolution': trained}, 'sape2_k': {'preset': 'equations'}}}
    assert_equal(tiny(f'{name}+sape2_k', checkpoint_path=path, **told(message)).state_dict(), snapshot(saved))


def test_refusal_tells_the_plain_model_to_rescale(tmp_path):
    path = str(save(tiny('rope2d', pos_enc_kwargs={'rope2d': RESCALE}), tmp_path / 'w.pth'))
    assert "'resolution': 'rescale'" in refused(lambda: timm.create_model(
        'test_vit_rope2d', img_size=A, patch_size=8, num_classes=10, checkpoint_path=path))


def test_refusal_tells_the_trained_grid(tmp_path):
    """Only where that is enough: tables that are never resized fit a model of another size, if it knows the grid."""
    saved = tiny('sape2_k', A)
    path = str(save(saved, tmp_path / 'w.pth'))
    message = refused(lambda: tiny('sape2_k', B, checkpoint_path=path))
    assert told(message) == {'img_size': A}
    assert 'To keep the size of the model, give ref_grid_size=(3, 5) instead of img_size' in message
    model = tiny('sape2_k', B, ref_grid_size=(3, 5), checkpoint_path=path)
    saved.set_input_size(B)
    torch.testing.assert_close(logits(model), logits(saved), **SAME)

    for pos_enc, kwargs in (('sape2_k', dict(patch_size=4)), ('ape+sape2_k', {}), ('rpb+sape2_k', {})):
        path = str(save(tiny(pos_enc, B, **kwargs), tmp_path / 'w.pth'))
        assert 'ref_grid_size=(' not in refused(lambda: tiny(pos_enc, C, checkpoint_path=path))


def test_refusal_tells_how_to_adapt(tmp_path):
    """The line that it advises keeps the head."""
    saved = tiny('ape+sape2_k', A)
    path = str(save(saved, tmp_path / 'w.pth'))
    message = refused(lambda: tiny('ape+sape2_k', B, checkpoint_path=path))
    assert 'pretrained=True, num_classes=N, pretrained_cfg_overlay=dict(file=..., num_classes=N)' in message
    model = timm.create_model(
        'test_vit_pos_enc', pos_enc='ape+sape2_k', img_size=B, patch_size=8, pretrained=True, num_classes=10,
        pretrained_cfg_overlay=dict(file=path, input_size=(3, *A), num_classes=10))
    assert torch.equal(model.head.weight, saved.head.weight)


@pytest.mark.parametrize('pos_enc', PARTS)
def test_fitting_checkpoint_loads_on_every_path(pos_enc, tmp_path):
    saved = randomise(tiny(pos_enc), seed=3)
    path = str(save(saved, tmp_path / 'w.pth'))
    for load in LOADERS.values():
        model = tiny(pos_enc)
        load(model, path)
        assert_equal(model.state_dict(), snapshot(saved))
    model = timm.create_model(
        'test_vit_pos_enc', pos_enc=pos_enc, img_size=A, patch_size=8, num_classes=10, checkpoint_path=path).eval()
    assert torch.equal(logits(model), logits(saved))


@pytest.mark.parametrize('saved,wanted', [
    ('nope', 'sape2_k'), ('sape2_k', 'nope'), ('sape2_k', 'sape2_q'), ('ape', 'nope'), ('nope', 'ape+rope2d_mixed')])
def test_not_strict_is_as_in_torch(saved, wanted):
    """Entries that both have are loaded; the others are reported."""
    state, model = randomise(tiny(saved), seed=3).state_dict(), tiny(wanted)
    before = snapshot(model)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) == set(before) - set(state)
    assert set(unexpected) == set(state) - set(before)
    assert missing or unexpected
    after = model.state_dict()
    for name in before:
        assert torch.equal(after[name], state.get(name, before[name])), name


def test_not_strict_still_refuses_wrong_shapes():
    """As torch does."""
    model = tiny('ape+sape2_k', B)
    before = snapshot(model)
    with pytest.raises(ValueError, match='pos_embed|table_x'):
        model.load_state_dict(tiny('ape+sape2_k', A).state_dict(), strict=False)
    assert_equal(model.state_dict(), before)


def test_partial_checkpoint_without_strict():
    """E.g. a head alone, or nothing."""
    model = tiny('ape+sape2_k')
    bias = torch.randn(10)
    missing, unexpected = model.load_state_dict({'head.bias': bias}, strict=False)
    assert torch.equal(model.head.bias, bias)
    assert set(missing) == set(model.state_dict()) - {'head.bias'} and not unexpected
    assert len(model.load_state_dict({}, strict=False).missing_keys) == len(model.state_dict())


@pytest.mark.parametrize('prefix', ['module.', '_orig_mod.', 'module._orig_mod.'])
def test_prefixes_of_wrappers(prefix, tmp_path):
    """timm removes them where it loads a file. torch never does."""
    saved = randomise(tiny('ape+sape2_k'), seed=3)
    state = {prefix + name: value for name, value in saved.state_dict().items()}
    path = save({'state_dict': state}, tmp_path / 'w.pth')
    model = tiny('ape+sape2_k')
    load_checkpoint(model, str(path))
    assert torch.equal(logits(model), logits(saved))
    assert torch.equal(logits(from_file('ape+sape2_k', path)), logits(saved))

    model = tiny('ape+sape2_k')
    before = snapshot(model)
    for strict in (True, False):
        with pytest.raises(ValueError, match=f"The names of the weights begin with '{prefix}' here. Remove it: "):
            model.load_state_dict(state, strict=strict)
    assert_equal(model.state_dict(), before)


@pytest.mark.parametrize('change', [
    lambda state: {k: v for k, v in state.items() if not k.startswith('head.')},
    lambda state: {k: v for k, v in state.items() if 'encodings' not in k},
    lambda state: {**state, 'loss.weight': torch.ones(1)},
], ids=['no head', 'no encoding', 'a loss'])
@pytest.mark.parametrize('is_nested', [False, True])
def test_prefixes_of_other_checkpoints(change, is_nested):
    """Without strict nothing was loaded, silently."""
    model = tiny('ape+sape2_k')
    state = {f'student.{name}': value for name, value in change(model.state_dict()).items()}
    before = snapshot(model)
    for strict in (True, False):
        with pytest.raises(ValueError, match="entry 'model'" if is_nested else "begin with 'student.' here"):
            model.load_state_dict({'model': state, 'epoch': 3} if is_nested else state, strict=strict)
    assert_equal(model.state_dict(), before)


@pytest.mark.parametrize('pos_enc', ['nope', 'ape', 'ape+sape2_k'])
@pytest.mark.parametrize('key', ['state_dict', 'model'])
def test_weights_one_level_down(pos_enc, key):
    """The message was about encodings; without strict nothing was loaded, silently."""
    model, saved = tiny(pos_enc), tiny(pos_enc).state_dict()
    for strict in (True, False):
        with pytest.raises(ValueError, match=f"but what a trainer saved. The weights are its entry '{key}'."):
            model.load_state_dict({'epoch': 3, 'arch': 'vit', key: saved, 'optimizer': {'state': {}}}, strict=strict)


def test_model_inside_a_wrapper():
    """As DDP holds it: torch itself refuses what does not fit."""
    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.module = model

    saved = Wrapper(randomise(tiny('ape+sape2_k'), seed=3))
    wrapper = Wrapper(tiny('ape+sape2_k'))
    wrapper.load_state_dict(saved.state_dict())
    assert torch.equal(logits(wrapper.module), logits(saved.module))
    with pytest.raises(RuntimeError, match='size mismatch for module.blocks.0.attn.encodings.sape2_k.table_x'):
        Wrapper(tiny('ape+sape2_k', B)).load_state_dict(saved.state_dict())
    missing, unexpected = Wrapper(tiny('cope')).load_state_dict(saved.state_dict(), strict=False)
    assert 'module.blocks.0.attn.encodings.cope.table' in missing
    assert 'module.pos_embed' in unexpected


# ---- adaptation on the pretrained paths


@pytest.mark.parametrize('kwargs', [
    dict(in_chans=1),
    dict(in_chans=4),
    dict(in_chans=1, num_classes=3, img_size=64),
    dict(patch_size=8),
    dict(patch_size=32, img_size=64),
    dict(num_classes=0),
    dict(global_pool='max', fc_norm=False),
], ids=str)
@pytest.mark.parametrize('kind', ['file', 'local-dir'])
def test_adapted_as_timm_adapts_its_own(kind, kwargs, tmp_path):
    """First convolution, patch size, position table and head, compared with timm's ViT on the same path."""
    size = dict(depth=1, img_size=32, num_classes=10)
    source = randomise(timm.create_model('vit_tiny_patch16_224', **size))
    if kind == 'file':
        overlay = dict(file=str(save(source, tmp_path / 'w.pth')), input_size=(3, 32, 32), num_classes=10)
        created = [
            timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **dict(size, **kwargs)).eval()
            for name in ('vit_tiny_patch16_224', 'vit_tiny_ape')]
    else:
        created = []
        for name in ('vit_tiny_patch16_224', 'vit_tiny_ape'):
            model = timm.create_model(name, **size)
            model.load_state_dict(source.state_dict())
            save_dir(model, tmp_path / name)
            created.append(from_dir(tmp_path / name, **kwargs))
    theirs, ours = created
    if 'num_classes' in kwargs:  # a new head is random on both sides
        ours.head.load_state_dict(theirs.head.state_dict())
    assert_equal(ours.state_dict(), theirs.state_dict())
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.parametrize('pos_enc', ['sape2_k', 'rope2d_mixed', 'ape+cope'])
def test_channels_classes_and_size_at_once(pos_enc, tmp_path):
    saved = tiny(pos_enc, A)
    save_dir(saved, tmp_path)
    model = from_dir(tmp_path, in_chans=1, num_classes=3, img_size=B)
    assert model.patch_embed.proj.weight.shape[1] == 1
    torch.testing.assert_close(
        model.patch_embed.proj.weight, saved.patch_embed.proj.weight.sum(1, keepdim=True), rtol=0, atol=1e-6)
    assert logits(model).shape == (2, 3)
    saved.set_input_size(B)
    gray = torch.randn(2, 1, *B, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(
            model.forward_features(gray), saved.forward_features(gray.expand(-1, 3, -1, -1)), rtol=0, atol=1e-5)


def test_features_only_from_a_file(tmp_path):
    saved = tiny('ape+sape2_k')
    features = from_file(
        'ape+sape2_k', save(saved, tmp_path / 'w.pth'), features_only=True, out_indices=(0, 1))
    x = torch.randn(1, 3, *A)
    with torch.no_grad():
        expected = saved.forward_intermediates(x, indices=(0, 1), intermediates_only=True)
        for ours, theirs in zip(features(x), expected, strict=True):
            torch.testing.assert_close(ours, theirs, **SAME)


# ---- damaged grids


@pytest.mark.one_of(3)
@pytest.mark.parametrize('pos_enc', ['sape2_k', 'rpb', 'cope'])
@pytest.mark.parametrize('grid', [
    [float('inf'), 4], [float('nan'), 4], [0, 0], [-1, 4], [2 ** 40, 4], [4], [[4, 4]], 4, [4j, 4], [5, 4.5]], ids=str)
def test_damaged_grid(pos_enc, grid, tmp_path):
    """The same message on every way of loading, which names the entry and says how to mend it."""
    state = tiny(pos_enc).state_dict()
    state[f'blocks.1.attn.encodings.{pos_enc}._extra_state'] = torch.tensor(grid)
    path = save(state, tmp_path / 'w.pth')
    loaders = [lambda: load(tiny(pos_enc), path) for load in LOADERS.values()]
    loaders += [
        lambda: tiny(pos_enc, checkpoint_path=str(path)),
        lambda: from_file(pos_enc, path),
        lambda: tiny(pos_enc).load_state_dict(state, strict=False),
        lambda: nn.Sequential(tiny(pos_enc)).load_state_dict({f'0.{k}': v for k, v in state.items()})]
    (message,) = {refused(loader) for loader in loaders}
    assert f"'{pos_enc}': the grid saved with its parameters, the entry _extra_state, must be (H, W)" in message
    assert message.endswith(
        'The file is damaged, or an average of models with different grids; if you know the grid, set this entry to '
        'torch.tensor([H, W]).')


@pytest.mark.parametrize('pos_enc', ['ape+sape2_k', 'ape+rpb', 'ape+cpb'])
def test_a_table_beside_a_grid_of_floats(pos_enc, tmp_path):
    """As timm's avg_checkpoints.py writes it. It could be loaded at its own size only."""
    saved = tiny(pos_enc)
    path = save({name: entry.float() for name, entry in saved.state_dict().items()}, tmp_path / 'w.pth')
    model = from_file(pos_enc, path, B, declared=None)
    saved.set_input_size(B)
    torch.testing.assert_close(logits(model), logits(saved), **SAME)


@pytest.mark.parametrize('embed, other', [(True, False), (False, True)])
def test_rows_of_prefix_tokens_that_complete_a_square(embed, other, tmp_path):
    """9 prefix tokens and 4x4 patches are as many as 5x5 patches; a table was read as that of the other, silently."""
    side = 5 if embed else 4
    size, options = (8 * side, 8 * side), {'reg_tokens': 8}
    saved = tiny('ape', size, no_embed_class=embed, **options)
    path = save(saved, tmp_path / 'w.pth')
    text = f'has 25 rows. That is {side}x{side} .* Create it with no_embed_class={embed}'
    with pytest.raises(ValueError, match=text):
        from_file('ape', path, size, size, no_embed_class=other, **options)
    torch.testing.assert_close(
        logits(from_file('ape', path, size, size, no_embed_class=embed, **options)), logits(saved), **SAME)
    if other:  # a table of 5x5 patches that has no rows for prefix tokens, and says so
        assert from_file('ape', path, size, (40, 40), no_embed_class=True, **options).pos_embed.shape[1] == 16


def test_a_grid_of_another_shape_without_prefix_tokens(tmp_path):
    """As many patches as the declared grid, 2x8 and 4x4; `rpb` has saved which. No tokens have rows either way."""
    size, options = (16, 64), {'class_token': False, 'global_pool': 'avg'}
    saved = tiny('ape+rpb', size, **options)
    path = save(saved, tmp_path / 'w.pth')
    torch.testing.assert_close(logits(from_file('ape+rpb', path, size, B, **options)), logits(saved), **SAME)


@pytest.mark.parametrize('pos_enc', ['rpb', 'ape2d'])
def test_a_damaged_table_that_would_be_resized(pos_enc, tmp_path):
    state = tiny(pos_enc).state_dict()
    name = next(name for name in state if f'{pos_enc}.table' in name)
    path = save({**state, name: state[name][:-1].flatten()}, tmp_path / 'w.pth')
    with pytest.raises(ValueError, match=f'{name} of the checkpoint cannot be resized from a grid of 3x5 patches'):
        from_file(pos_enc, path, B)


def test_a_grid_without_numbers_beside_another_encoding():
    """The message would have named the grid, and could not read it."""
    state = tiny('rpb').state_dict()
    state['blocks.1.attn.encodings.rpb._extra_state'] = torch.empty(2, dtype=torch.int64, device='meta')
    with pytest.raises(ValueError, match="does not fit the .*pos_enc='sape2_k'"):
        tiny('sape2_k').load_state_dict(state)


# ---- after a failure


def test_failing_load_leaves_nothing_behind(tmp_path):
    """A refused checkpoint must not affect the next model."""
    good, bad = save(tiny('sape2_k'), tmp_path / 'good.pth'), save(tiny('sape2_q'), tmp_path / 'bad.pth')
    write_cut(tmp_path / 'cut.safetensors', 0.5)

    def state():
        return (
            timm.models.get_pretrained_cfg('test_vit_pos_enc').to_dict(), timm.list_models('*'),
            timm_sape.list_encodings(aliases=True), torch.get_default_dtype(), torch.is_grad_enabled())

    before = copy.deepcopy(state())
    for path in (bad, tmp_path / 'cut.safetensors', tmp_path / 'none.pth'):
        with pytest.raises((ValueError, FileNotFoundError)):
            from_file('sape2_k', path, B)
        with pytest.raises((ValueError, FileNotFoundError)):
            from_file('sape2_k', path, B, ref_grid_size=(2, 2))
    assert state() == before
    assert tiny('sape2_k', B).ref_grid_size == (4, 4)
    assert torch.equal(logits(from_file('sape2_k', good)), logits(tiny('sape2_k')))


# ---- mistakes of users


@pytest.mark.parametrize('cast', [
    lambda v: v.half(), lambda v: v.double().mul(3).div(3).float()], ids=['halved', 'averaged'])
def test_every_entry_in_floats(cast, tmp_path):
    """Averaging or casting whole files turns the saved grid into floats too."""
    saved = tiny('ape+sape2_k', A)
    path = save({k: cast(v) for k, v in saved.state_dict().items()}, tmp_path / 'w.pth')
    model = from_file('ape+sape2_k', path, img_size=[64, 64])
    assert model.ref_grid_size == (3, 5)
    same = tiny('ape+sape2_k', A)
    same.load_state_dict(torch.load(path))
    assert same.ref_grid_size == (3, 5) and all(isinstance(size, int) for size in same.ref_grid_size)


def test_grid_of_a_file_of_parameters_alone(tmp_path):
    """A user who knows the trained grid can give it. Otherwise the message asks for it."""
    saved = tiny('sape2_k', A)
    path = save(dict(saved.named_parameters()), tmp_path / 'w.pth')
    with pytest.raises(ValueError, match=r'does not say on which grid.*give ref_grid_size=\(H, W\)'):
        from_file('sape2_k', path)
    model = from_file('sape2_k', path, ref_grid_size=(3, 5))
    torch.testing.assert_close(logits(model), logits(saved), **SAME)


def test_of_another_encoding_no_grid_is_asked_for(tmp_path):
    path = save(tiny('ape+auto_sape2_k', A), tmp_path / 'w.pth')
    with pytest.raises(ValueError, match=r'with pos_enc=.ape\+sape2_k.: it lacks .*it has .*auto_sape2_k'):
        from_file('ape+sape2_k', path)


def test_default_said_aloud(tmp_path):
    """Giving a keyword its default value is no contradiction."""
    saved = tiny('sape2_k')
    timm.models.save_for_hf(saved, tmp_path, safe_serialization=True)
    for keywords in ({'preset': 'appendix'}, {'npos': None}):
        model = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, pos_enc_kwargs={'sape2_k': keywords})
        assert torch.equal(logits(model), logits(saved))
    with pytest.raises(ValueError, match='cannot be changed'):
        timm.create_model(f'local-dir:{tmp_path}', pretrained=True, pos_enc_kwargs={'sape2_k': {'preset': 'equations'}})


# ---- encodings that know their grid, on loading paths that bypass the model


def on_grid(pos_enc, grid, **kwargs):
    """A model in which encodings matter, always the same one."""
    torch.manual_seed(0)
    model = timm.create_model(
        'test_vit_pos_enc', pos_enc=pos_enc, img_size=(8 * grid[0], 8 * grid[1]), patch_size=8, num_classes=3, **kwargs)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


RESCALING = [name for name in timm_sape.list_encodings() if 'resolution' in timm_sape.encoding_keywords(name)]


@pytest.mark.parametrize('name', RESCALING)
def test_trained_grid_through_a_wrapper(name):
    """A wrapper loads into the modules directly. Buffers follow the grid that comes with the weights."""
    kwargs = {'pos_enc_kwargs': {name: {'resolution': 'rescale'}}}
    trained, other = on_grid(name, (3, 5), **kwargs), on_grid(name, (6, 7), **kwargs)
    torch.nn.ModuleDict({'model': other}).load_state_dict(
        torch.nn.ModuleDict({'model': trained}).state_dict())
    x = torch.randn(1, 3, 48, 56)
    trained.set_input_size(img_size=(48, 56))
    assert torch.allclose(other(x), trained(x), atol=1e-6)


@pytest.mark.parametrize('name', ['rpb', 'lape', 'ape2d'])
def test_tables_of_another_grid_through_a_wrapper(name):
    other = on_grid(name, (5, 3) if name != 'ape2d' else (3, 5))
    state = on_grid(name, (3, 5)).state_dict()
    if name == 'ape2d':  # the shapes of its tables tell rows from columns anyway
        state['encodings.ape2d._extra_state'] = torch.tensor([4, 4])
    with pytest.raises(ValueError, match=f"'{name}': the checkpoint is of a grid of .*set_input_size"):
        torch.nn.ModuleDict({'model': other}).load_state_dict({f'model.{k}': v for k, v in state.items()})


@pytest.mark.parametrize('name', ['rope2d', 'rope2d_mixed', 'sincos2d', 'alibi2d', 'fourier', 'pape'])
@pytest.mark.parametrize('trained, used', [('extrapolate', 'rescale'), ('rescale', 'extrapolate')])
def test_rule_for_other_sizes_is_chosen_when_loading(name, trained, used, tmp_path):
    """Train once, evaluate under both rules."""
    model = on_grid(name, (3, 5), pos_enc_kwargs={name: {'resolution': trained}})
    save_for_hf(model, tmp_path, safe_serialization=True)
    x = torch.randn(1, 3, 48, 56)
    outs = {}
    for rule in (trained, used):
        kwargs = {'pos_enc_kwargs': {name: {'resolution': rule}}}
        loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, img_size=(48, 56), **kwargs).eval()
        outs[rule] = loaded(x)
        expected = on_grid(name, (3, 5), **kwargs)
        expected.set_input_size(img_size=(48, 56))
        assert torch.allclose(outs[rule], expected(x), atol=1e-5)
    assert not torch.allclose(outs[trained], outs[used], atol=1e-4)


def test_rescaling_a_bare_file_asks_for_the_grid(tmp_path):
    torch.save(on_grid('rope2d', (3, 5)).state_dict(), tmp_path / 'model.pth')
    kwargs = dict(
        pos_enc='rope2d', img_size=(48, 56), patch_size=8, num_classes=3, pretrained=True,
        pos_enc_kwargs={'rope2d': {'resolution': 'rescale'}},
        pretrained_cfg_overlay=dict(file=str(tmp_path / 'model.pth')))
    with pytest.raises(ValueError, match=r'give ref_grid_size=\(H, W\)'):
        timm.create_model('test_vit_pos_enc', **kwargs)
    assert timm.create_model('test_vit_pos_enc', ref_grid_size=(3, 5), **kwargs).ref_grid_size == (3, 5)
    for name in ('pretrained', 'pretrained_cfg_overlay'):
        del kwargs[name]
    with pytest.raises(ValueError, match=r'pretrained=True.* and give ref_grid_size=\(H, W\), the grid in patches'):
        timm.create_model('test_vit_pos_enc', checkpoint_path=str(tmp_path / 'model.pth'), **kwargs)


@pytest.mark.parametrize('pos_enc', ['ape+rope2d', 'sape2_k', 'rope2d', 'nope'])
def test_files_of_the_other_host(pos_enc, tmp_path):
    """A plain ViT's is converted by a NaFlexVit with pretrained=True. Everything else says what the file is."""
    kwargs = dict(pos_enc=pos_enc, img_size=32, patch_size=8, num_classes=3)
    for name in ('vit', 'naflexvit'):
        torch.save(timm.create_model(f'test_{name}_pos_enc', **kwargs).state_dict(), tmp_path / f'{name}.pth')
    overlay = dict(file=str(tmp_path / 'naflexvit.pth'), num_classes=3)
    for given in ({'checkpoint_path': overlay['file']}, {'pretrained': True, 'pretrained_cfg_overlay': overlay}):
        with pytest.raises(ValueError, match="one of a NaFlexVit, .* begins with 'naflexvit_' instead of 'vit_'"):
            timm.create_model('test_vit_pos_enc', **kwargs, **given)
    with pytest.raises(ValueError, match='one of a plain ViT, .* It is converted by .*pretrained=True'):
        timm.create_model('test_naflexvit_pos_enc', **kwargs, checkpoint_path=tmp_path / 'vit.pth')
    overlay['file'] = str(tmp_path / 'vit.pth')
    timm.create_model('test_naflexvit_pos_enc', **kwargs, pretrained=True, pretrained_cfg_overlay=overlay)


@pytest.mark.parametrize('host', ['vit', 'naflexvit'])
@pytest.mark.parametrize('trained, named, shown', [
    ({'pos_enc_kwargs': {'rope2d': {'resolution': 'rescale'}}},
     {'pos_enc_kwargs': {'rope2d': {'resolution': 'extrapolate'}}}, "'rope2d': {'resolution': 'rescale'}"),
    ({'logit_scaling': 'log'}, None, "logit_scaling='log'")])
def test_a_rule_for_other_sizes_is_not_lost_in_silence(host, trained, named, shown, tmp_path):
    """A file that says it was trained with a rule is loaded into a model with another one: by name, or with a warning.

    A saved folder builds the model with its rule; another one that is named there needs no warning either.
    """
    kwargs = dict(pos_enc='ape+rope2d', img_size=32, patch_size=8, num_classes=3)
    model = timm.create_model(f'test_{host}_pos_enc', **kwargs, **trained)
    torch.save(model.state_dict(), tmp_path / 'x.pth')
    overlay = dict(file=str(tmp_path / 'x.pth'), num_classes=3)

    def warnings_of(name, **given):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            timm.create_model(name, **given, pretrained=True)
        return [str(w.message) for w in caught if 'was trained with' in str(w.message)]

    load = partial(warnings_of, f'test_{host}_pos_enc', **kwargs, pretrained_cfg_overlay=overlay)
    warning, = load()
    assert shown in warning
    assert not load(**trained) and (named is None or not load(**named))
    timm_sape.hub.save(model, tmp_path / 'folder')
    for given in ({}, named or {'logit_scaling': 'constant'}):
        assert not warnings_of(f'local-dir:{tmp_path / "folder"}', **given)


@pytest.mark.parametrize('name', ['lape', 'ape2d'])
def test_resized_tables_of_encodings_of_naflexvit(name, tmp_path):
    """As the table of `ape`, below."""
    save(timm.create_model(f'test_vit_{name}', img_size=(32, 48), patch_size=4), tmp_path / 'x.pth')
    kwargs = dict(patch_size=4, pretrained=True, pretrained_cfg_overlay=dict(file=str(tmp_path / 'x.pth')))
    with pytest.warns(UserWarning, match=r'for 8x12 patches. It is resized to 56x56,.* img_size=\(32, 48\)'):
        timm.create_model(f'test_naflexvit_{name}', **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        timm.create_model(f'test_naflexvit_{name}', img_size=(32, 48), **kwargs)


@pytest.mark.parametrize('saved', [True, False])
def test_channels_of_patches_in_another_order(saved, tmp_path):
    """The saved config says how the weights are laid out, not the model that they are loaded into."""
    model = randomise(timm.create_model('test_naflexvit_rope2d', patchify_channels_last=saved, num_classes=10))
    timm_sape.hub.save(model, tmp_path / 'folder')
    x = torch.randn(1, 3, 32, 48)
    for now in (saved, not saved):
        loaded = from_dir(tmp_path / 'folder', patchify_channels_last=now)
        torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=1e-5)


def test_channels_of_patches_in_a_bare_file(tmp_path):
    """It does not say how they are laid out: as in the model that it is loaded into."""
    kwargs = dict(patchify_channels_last=False, num_classes=10)
    model = randomise(timm.create_model('test_naflexvit_rope2d', **kwargs))
    overlay = dict(file=str(save(model, tmp_path / 'w.pth')), num_classes=10)
    loaded = timm.create_model(
        'test_naflexvit_rope2d', pretrained=True, pretrained_cfg_overlay=overlay, in_chans=1, **kwargs).eval()
    x = torch.randn(1, 1, 32, 48)
    torch.testing.assert_close(loaded(x), model(x.expand(-1, 3, -1, -1)), rtol=0, atol=1e-5)


def test_resized_table_of_naflexvit(tmp_path):
    """It runs at any size, so nothing else would tell that the size of the training was forgotten."""
    for host in ('vit', 'naflexvit'):
        model = timm.create_model(f'test_{host}_ape', img_size=(32, 48), patch_size=4)
        torch.save(model.state_dict(), tmp_path / 'x.pth')
        kwargs = dict(
            patch_size=4, pretrained=True,
            pretrained_cfg_overlay=dict(file=str(tmp_path / 'x.pth'), input_size=(3, 32, 48)))
        with pytest.warns(UserWarning, match=r'for 8x12 patches. It is resized to 56x56,.* img_size=\(32, 48\)'):
            timm.create_model('test_naflexvit_ape', **kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            timm.create_model('test_naflexvit_ape', img_size=(32, 48), **kwargs)


@pytest.mark.parametrize('pos_enc', ['rope2d', 'nope', 'sincos2d'])
@pytest.mark.parametrize('host', ['vit', 'naflexvit'])
def test_another_patch_size_without_entries_of_encodings(host, pos_enc, tmp_path):
    """Nothing but the patch embedding tells that the file does not fit."""
    small = timm.create_model(f'test_{host}_pos_enc', pos_enc=pos_enc, img_size=32, patch_size=4, num_classes=3)
    torch.save(small.state_dict(), tmp_path / 'x.pth')
    with pytest.raises(ValueError, match='does not fit the model .*proj.weight.* its entries show patch_size=4'):
        timm.create_model(
            f'test_{host}_pos_enc', pos_enc=pos_enc, num_classes=3, checkpoint_path=tmp_path / 'x.pth')


@pytest.mark.parametrize('name', ['test_vit_rope2d', 'test_naflexvit_sape2_k'])
def test_no_pretrained_weights(name):
    with pytest.raises(ValueError, match=f"no pretrained weights for '{name}'. Give a file, pretrained_cfg_overlay="):
        timm.create_model(name, pretrained=True)


def test_hooks_may_rename_entries():
    """A library's hook runs before the entries are looked at, as for timm's models."""
    model, other = (timm.create_model('test_vit_sape2_k_ape', num_classes=3) for _ in range(2))

    def rename(module, state_dict, prefix, *_):
        for key in list(state_dict):
            state_dict[key.removeprefix('module.')] = state_dict.pop(key)

    state_dict = {f'module.{key}': value for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="begin with 'module.' here. Remove it"):
        other.load_state_dict(state_dict)
    other.register_load_state_dict_pre_hook(rename)
    other.load_state_dict(state_dict)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())
    larger = timm.create_model('test_vit_sape2_k_ape', num_classes=3, img_size=(96, 160))
    larger.register_load_state_dict_pre_hook(rename)
    before = {key: value.clone() for key, value in larger.state_dict().items()}
    with pytest.raises(ValueError, match='does not fit'):
        larger.load_state_dict(state_dict)
    assert all(torch.equal(value, before[key]) for key, value in larger.state_dict().items())
    assert len(larger._load_state_dict_pre_hooks) == 1


@pytest.mark.parametrize('pos_enc,saved,given,expected', [
    ('rope2d+alibi2d', {'rope2d': {'resolution': 'rescale'}}, {'alibi2d': {'resolution': 'slopes'}},
     {'rope2d': {'resolution': 'rescale'}, 'alibi2d': {'resolution': 'slopes'}}),
    ('rope2d', {'rope2d': {'resolution': 'yarn', 'ramp': [.5, 1.5]}}, {'rope2d': {'resolution': 'yarn'}},
     {'rope2d': {'resolution': 'yarn', 'ramp': [.5, 1.5]}}),
    ('rope2d+sape2_k', {'sape2_k': {'preset': 'equations'}}, {'rope2d': {'resolution': 'rescale'}},
     {'rope2d': {'resolution': 'rescale'}, 'sape2_k': {'preset': 'equations'}}),
], ids=['other part', 'same part', 'fixed keyword'])
def test_keywords_that_are_left_out_stay_as_saved(pos_enc, saved, given, expected, tmp_path):
    """However the model is saved: as a folder, by train.py, or as a graft, whose parts have longer names."""
    model = tiny(pos_enc, B, pos_enc_kwargs=saved)
    save_dir(model, tmp_path / 'folder')
    loaded = from_dir(tmp_path / 'folder', img_size=C, pos_enc_kwargs=given)  # another grid, for which rules differ
    assert loaded.pos_enc_kwargs == expected
    whole = from_dir(tmp_path / 'folder', img_size=C, pos_enc_kwargs=expected)
    torch.testing.assert_close(logits(loaded), logits(whole), rtol=0, atol=0)

    kwargs = dict(img_size=B, patch_size=8, pos_enc=pos_enc, pos_enc_kwargs=saved)
    args = argparse.Namespace(model='test_vit_pos_enc', model_kwargs=kwargs, num_classes=10)
    torch.save(
        {'arch': args.model, 'state_dict': model.state_dict(), 'args': args}, tmp_path / 'last.pth.tar')
    assert load_model(
        str(tmp_path / 'last.pth.tar'), pos_enc_kwargs=given, ref_grid_size=(4, 4)).pos_enc_kwargs == expected

    grafted = timm_sape.graft(timm.create_model(OF_TIMM, img_size=B, **SMALL), pos_enc, pos_enc_kwargs=saved)
    timm_sape.hub.save(grafted, tmp_path / 'graft')
    loaded = from_dir(tmp_path / 'graft', pos_enc_kwargs=given).pos_enc_kwargs
    assert loaded == {f'auto_{part}': {'init': 0, **expected.get(part, {})} for part in pos_enc.split('+')}


def test_keywords_that_contradict_a_checkpoint_of_train_py_are_refused(tmp_path):
    kwargs = dict(img_size=32, patch_size=8, pos_enc_kwargs={'sape2_k': {'preset': 'equations'}})
    model = timm.create_model('test_vit_sape2_k', num_classes=10, **kwargs)
    args = argparse.Namespace(model='test_vit_sape2_k', model_kwargs=kwargs, num_classes=10)
    file = tmp_path / 'last.pth.tar'
    torch.save({'arch': args.model, 'state_dict': model.state_dict(), 'args': args}, file)
    with pytest.raises(ValueError, match='cannot be changed to .*appendix.*Leave pos_enc_kwargs out'):
        load_model(str(file), pos_enc_kwargs={'sape2_k': {'preset': 'appendix'}})


@pytest.mark.parametrize('name,kwargs', [
    ('vit_tiny_ape', {}), ('naflexvit_tiny_ape', {}), ('vit_graft', dict(base=OF_TIMM, pos_enc='rpb')),
    ('vit_graft', dict(base=OF_TIMM, pos_enc='rpb', use_naflex=True))], ids=str)
def test_linear_patch_embedding_of_a_plain_model(name, kwargs, tmp_path):
    """Old checkpoints have it; its inputs are in another order than NaFlexVit's."""
    size = dict(img_size=B, patch_size=8, num_classes=10, **SMALL)
    plain = randomise(timm.create_model(OF_TIMM, **size))
    state = plain.state_dict()
    state['patch_embed.proj.weight'] = state['patch_embed.proj.weight'].flatten(1)
    overlay = dict(file=str(save(state, tmp_path / 'old.pth')), num_classes=10, input_size=(3, *B))
    loaded = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **size, **kwargs).eval()
    x = torch.randn(2, 3, *B)
    torch.testing.assert_close(loaded(x), plain(x), rtol=0, atol=1e-5)


def test_registers_of_dinov2(tmp_path):
    """Its own files name them `register_tokens`, and their table has a row for the class token."""
    kwargs = dict(img_size=28, patch_size=14, reg_tokens=4, init_values=.1, num_classes=0, **SMALL)
    base = randomise(timm.create_model(OF_TIMM, no_embed_class=True, **kwargs))
    state = {**base.state_dict(), 'mask_token': torch.zeros(1, base.embed_dim)}
    state['register_tokens'] = state.pop('reg_token')
    state['pos_embed'] = torch.cat([torch.randn(1, 1, base.embed_dim), state['pos_embed']], dim=1)
    overlay = dict(file=str(save(state, tmp_path / 'dinov2.pth')), num_classes=0, input_size=(3, 28, 28))
    kwargs.update(pretrained=True, pretrained_cfg_overlay=overlay)
    expected, loaded = (
        timm.create_model(name, no_embed_class=True, **kwargs).eval() for name in (OF_TIMM, 'vit_tiny_ape'))
    x = torch.randn(2, 3, 28, 28)
    assert not torch.allclose(expected(x), base(x))  # the row of the class token counts
    torch.testing.assert_close(loaded(x), expected(x), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match='Create the model with no_embed_class=True'):
        timm.create_model('vit_tiny_ape', **kwargs)


@pytest.mark.parametrize('weight', [torch.zeros(4, 3, 2, 2, 2), torch.zeros(0), torch.zeros(64, 7), 'text'], ids=[
    '5-D', 'empty', 'no patch', 'text'])
@pytest.mark.parametrize('name', ['vit_tiny_ape', 'naflexvit_tiny_ape'])
def test_what_is_no_patch_embedding(name, weight, tmp_path):
    state = {**timm.create_model(OF_TIMM, img_size=32, **SMALL).state_dict(), 'patch_embed.proj.weight': weight}
    overlay = dict(file=str(save(state, tmp_path / 'damaged.pth')))
    with pytest.raises(ValueError, match='checkpoint'):
        timm.create_model(name, img_size=32, pretrained=True, pretrained_cfg_overlay=overlay, **SMALL)


@pytest.mark.parametrize('theirs, ours', [
    ('vit_small_patch16_rope_224', 'vit_small_rope2d'),
    ('vit_small_patch16_rope_mixed_224', 'vit_small_rope2d_mixed'),
    ('vit_small_patch16_rope_mixed_224', 'naflexvit_small_sape2_k')])
def test_rotary_weights_of_timm_loaded_directly(theirs, ours, tmp_path):
    """They are refused with two ways to load them, and both ways work."""
    kwargs = dict(img_size=32, depth=1, num_classes=5)
    model = timm.create_model(theirs, **kwargs).eval()
    file, x = str(save(model, tmp_path / 'rope.pth')), torch.randn(1, 3, 32, 32)
    message = r"has blocks.0.gamma_1, .*If it is one .*timm_sape.graft\(NAME, 'nope', .*pretrained_cfg_overlay"
    with pytest.raises(ValueError, match=message):
        timm.create_model(ours, checkpoint_path=file, **kwargs)
    grafted = timm_sape.graft(theirs, 'nope', checkpoint_path=file, **kwargs).eval()
    torch.testing.assert_close(grafted(x), model(x), rtol=0, atol=1e-5)
    if 'rope2d' in ours:
        loaded = timm.create_model(
            ours, pretrained=True, pretrained_cfg_overlay=dict(file=file, num_classes=5), **kwargs).eval()
        torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=1e-5)


def test_gammas_of_other_models(tmp_path):
    """BEiT has them, too, and cannot be grafted. The message does not say that it is a rotary ViT."""
    file = save(timm.create_model('beit_base_patch16_224', depth=1, num_classes=5), tmp_path / 'beit.pth')
    with pytest.raises(ValueError, match="has blocks.0.gamma_1, which timm's plain ViT has not.* If it is one of"):
        timm.create_model('vit_base_rpb', checkpoint_path=str(file), depth=1, num_classes=5)


@pytest.mark.parametrize('name', ['vit_tiny_rope2d', 'vit_tiny_rpb'])
def test_weights_of_timm_in_a_model_of_another_encoding(name, tmp_path):
    file = save(timm.create_model(OF_TIMM, **SMALL), tmp_path / 'plain.pth')
    with pytest.raises(ValueError, match='has pos_embed.* use timm_sape.graft'):
        timm.create_model(name, pretrained=True, pretrained_cfg_overlay=dict(file=str(file)), **SMALL)
