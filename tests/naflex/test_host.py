"""NaFlexVitPosEnc as a timm model: saving, loading, training, intermediates, and what it refuses."""
import copy
import dataclasses
import random

import pytest
import timm
import torch
from batches import GRID, PATCH, SIZES, Twins, batch, pictures
from common import POS_ENCS, ToyLayer, ToyShared, registered
from timm.data import resolve_model_data_config
from timm.data.naflex_transforms import Patchify
from timm.models.naflexvit import NaFlexVitCfg, batch_patchify
from timm.optim import param_groups_layer_decay
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import timm_sape
from timm_sape import NaFlexVitPosEnc, ops
from timm_sape.analysis import position_maps, probe
from timm_sape.analysis.pshap import position_shap
from timm_sape.conversion import convert_to_naflex
from timm_sape.ops import using_backend
from timm_sape.position import MixedPosition

ACTING = ['nope', 'ape', 'rope2d', 'rope2d_mixed', 'sape2_k', 'cope', 'lape', 'peg', 'irpe_qkv', 'ape+sape2_k']


@pytest.fixture(autouse=True)
def third_party():
    with registered(ToyShared, ToyLayer):
        yield


def small(pos_enc, **kwargs):
    torch.manual_seed(0)
    return timm.create_model('test_naflexvit_pos_enc', **{
        'pos_enc': pos_enc, 'img_size': (40, 48), 'patch_size': PATCH, 'embed_dim': 32, 'depth': 2, 'num_classes': 3,
        'reg_tokens': 1, **kwargs}).eval()


def test_another_default_device():
    model = timm.create_model('test_naflexvit_sape2_k_ape', patch_size=PATCH).eval()
    given = batch(pictures(SIZES, torch.float32))
    expected = model(given)
    with torch.device('meta'):
        torch.testing.assert_close(model(given), expected)


def test_entrypoints_mirror_the_plain_ones():
    plain = set(timm.list_models(module='vit_pos_enc'))
    naflex = set(timm.list_models(module='naflexvit_pos_enc'))
    assert naflex == {name.replace('vit', 'naflexvit', 1) for name in plain}
    model = timm.create_model('naflexvit_tiny_sape2_k_ape')
    assert isinstance(model, NaFlexVitPosEnc) and model.pos_enc == 'ape+sape2_k'
    assert model.default_cfg['first_conv'] == 'embeds.proj' and not model.default_cfg['fixed_input_size']
    for pool in ('token', 'avg', 'avgmax', 'max'):  # the norm is where the plain model has it
        plain, naflex = (
            timm.create_model(name, global_pool=pool) for name in ('test_vit_rope2d', 'test_naflexvit_rope2d'))
        assert (type(plain.norm), type(plain.fc_norm)) == (type(naflex.norm), type(naflex.fc_norm))
    with pytest.warns(UserWarning, match='no rope2d. Use test_naflexvit_pos_enc'):
        timm.create_model('test_naflexvit_rope2d', pos_enc='sape2_k')


@pytest.mark.parametrize('pos_enc', ['string', 'harope'])
def test_what_turns_all_tokens_alike_is_computed_once(pos_enc, monkeypatch):
    model, made, cayley = small(pos_enc), [], ops.cayley
    monkeypatch.setattr(ops, 'cayley', lambda *args: made.append(args) or cayley(*args))
    model(batch(pictures(SIZES, torch.float32)))
    assert len(set(SIZES)) > 2 and len(made) == len(model.blocks)


@pytest.mark.parametrize('pos_enc', ['nope', 'ape', 'rope2d', 'sape2_k', 'ape+rpb'])
def test_same_function_as_the_plain_entrypoint(pos_enc):
    """A file of the plain model loads into its NaFlex twin on the pretrained path, resized where it must be."""
    plain = timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, img_size=64).eval()
    source = dict(pretrained=True, pretrained_cfg_overlay=dict(state_dict=plain.state_dict()))
    naflex = timm.create_model('test_naflexvit_pos_enc', pos_enc=pos_enc, img_size=64, **source).eval()
    image = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(naflex(image), plain(image), rtol=1e-5, atol=1e-5)

    larger = timm.create_model('test_naflexvit_pos_enc', pos_enc=pos_enc, img_size=96, **source).eval()
    plain.set_input_size((96, 96))
    image = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(larger(image), plain(image), rtol=1e-5, atol=1e-5)


def test_oblong_patches():
    """Of images, and of patches with coordinates."""
    shape = dict(pos_enc='ape+sape2_k', img_size=(48, 80), patch_size=(16, 8))
    plain = timm.create_model('test_vit_pos_enc', **shape).eval()
    naflex = timm.create_model(
        'test_naflexvit_pos_enc', pretrained=True, pretrained_cfg_overlay=dict(state_dict=plain.state_dict()),
        **shape).eval()
    images = torch.randn(2, 3, 48, 80)
    patches, _ = batch_patchify(images, (16, 8))
    coord = timm_sape.Grid(3, 10).coordinates().expand(2, -1, -1)
    for found in (naflex(images), naflex(patches, coord)):
        torch.testing.assert_close(found, plain(images), rtol=1e-5, atol=1e-5)


def test_checkpoint_of_another_patch_size_and_convolution():
    plain = timm.create_model('test_vit_rope2d', img_size=64, patch_size=16).eval()
    source = dict(pretrained=True, pretrained_cfg_overlay=dict(state_dict=plain.state_dict()))
    conv = timm.create_model('test_naflexvit_rope2d', img_size=64, embed_proj_type='conv', **source).eval()
    image = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(conv(image), plain(image), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="embed_proj_type='linear'"):
        conv(batch([image[:1]]))
    finer = timm.create_model('test_naflexvit_rope2d', img_size=64, patch_size=8, **source).eval()
    assert finer(image).isfinite().all()


@pytest.mark.parametrize('in_chans', [1, 4])
def test_checkpoint_of_other_channels(in_chans, tmp_path, caplog):
    """As of a convolution: timm itself would drop the weights of a linear layer, and say so in the log only."""
    saved = small('ape+sape2_k')
    torch.save(saved.state_dict(), tmp_path / 'model.pth')
    timm_sape.hub.save(saved, tmp_path / 'model')
    source = dict(pretrained=True, in_chans=in_chans)
    file = dict(file=str(tmp_path / 'model.pth'), num_classes=3)
    for model in (
            small('ape+sape2_k', pretrained_cfg_overlay=file, **source),
            timm.create_model(f'local-dir:{tmp_path / "model"}', **source)):
        weight = saved.embeds.proj.weight.unflatten(1, (PATCH, PATCH, 3))
        expected = weight.sum(-1, keepdim=True) if in_chans == 1 else weight[..., [0, 1, 2, 0]] * 3 / 4
        torch.testing.assert_close(model.embeds.proj.weight, expected.flatten(1), rtol=1e-5, atol=1e-6)
        assert torch.equal(model.embeds.cls_token, saved.embeds.cls_token)
    assert not [record for record in caplog.records if record.levelname == 'WARNING']


def test_checkpoint_of_channels_that_are_not_declared():
    overlay = dict(state_dict=small('rope2d', in_chans=2).state_dict(), num_classes=3)
    with pytest.raises(ValueError, match=r'\[32, 128\] instead of \[32, 64\].* input_size=\(2, height'):
        small('rope2d', in_chans=1, pretrained=True, pretrained_cfg_overlay=overlay)
    small('rope2d', in_chans=1, pretrained=True, pretrained_cfg_overlay={**overlay, 'input_size': (2, 32, 32)})
    for kwargs in (dict(patch_size=4), dict(embed_dim=64)):  # for which channels have nothing to do with it
        overlay = dict(state_dict=small('rope2d', in_chans=2, **kwargs).state_dict(), num_classes=3)
        with pytest.raises(ValueError, match='does not fit the model') as e:
            small('rope2d', in_chans=1, pretrained=True, pretrained_cfg_overlay=overlay)
        assert 'channels' not in str(e.value)


@pytest.mark.one_of(3)
@pytest.mark.parametrize('pos_enc', POS_ENCS)
def test_saved_and_loaded(tmp_path, pos_enc):
    model = small(pos_enc)
    given = batch(pictures(SIZES, torch.float32))
    timm_sape.hub.save(model, tmp_path / 'model')
    loaded = timm_sape.hub.load(tmp_path / 'model').eval()
    assert type(loaded) is NaFlexVitPosEnc and loaded.pos_enc == model.pos_enc
    assert torch.equal(loaded(given), model(given))
    again = timm.create_model(f'local-dir:{tmp_path / "model"}', pretrained=True).eval()
    assert torch.equal(again(given), model(given))
    assert torch.equal(copy.deepcopy(model)(given), model(given))
    assert resolve_model_data_config(loaded)['input_size'] == (3, 40, 48)  # timm's would be that of the architecture


def test_checkpoint_of_other_encodings_is_refused(tmp_path):
    model = small('sape2_k')
    with pytest.raises(ValueError, match='does not fit the position encodings'):
        small('rope2d').load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match='does not fit the position encodings'):
        small('ape').load_state_dict(small('ape', img_size=64).state_dict())
    torch.save(model.state_dict(), tmp_path / 'model.pth')
    with pytest.raises(ValueError, match='does not fit the model'):
        small('rope2d', pretrained=True, pretrained_cfg_overlay=dict(file=str(tmp_path / 'model.pth'), num_classes=3))
    timm_sape.hub.save(model, tmp_path / 'model')
    with pytest.raises(ValueError, match='cannot be changed'):
        timm.create_model(f'local-dir:{tmp_path / "model"}', pretrained=True, pos_enc='rope2d')


def test_table_rows_of_prefix_tokens():
    """They are added to the tokens, times the gate if there is one; not where an encoding weighs positions."""
    for pos_enc in ('ape', 'auto_ape'):
        twins = Twins(pos_enc)
        plain = twins()
        image = torch.cat(pictures([GRID]))
        torch.testing.assert_close(twins.naflex(plain)(image), plain(image))
    twins = Twins('ape+pemix')
    with pytest.raises(ValueError, match='no_embed_class=True'):
        twins.naflex(twins())
    plain = Twins('ape')()
    entries = dict(plain.state_dict(), pos_embed=torch.zeros(1, 29, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match='29 rows'):
        convert_to_naflex(entries, small('ape'))


def test_table_of_two_possible_grids():
    """36 rows: 6x6, or 4x8 and four for registers."""
    shape = dict(pos_enc='ape', patch_size=PATCH, reg_tokens=4, class_token=False, global_pool='avg', fc_norm=False)
    square = timm.create_model('test_vit_pos_enc', img_size=48, no_embed_class=True, **shape).eval()
    oblong = timm.create_model('test_vit_pos_enc', img_size=(32, 64), **shape).eval()
    assert square.pos_embed.shape == oblong.pos_embed.shape

    def load(plain, img_size, **declared):
        overlay = dict(state_dict=plain.state_dict(), **declared)
        return timm.create_model(
            'test_naflexvit_pos_enc', img_size=img_size, pretrained=True, pretrained_cfg_overlay=overlay,
            **shape).eval()

    with pytest.raises(ValueError, match=r'36 rows, .* may be 4x8 or 6x6\. .* input_size=\(3, height, width\)'):
        load(square, (32, 64))
    for model, plain, size in (
            (load(square, 48), square, (48, 48)), (load(oblong, (32, 64), input_size=(3, 32, 64)), oblong, (32, 64))):
        image = torch.randn(2, 3, *size)
        torch.testing.assert_close(model(image), plain(image), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('pos_enc', ACTING)
def test_gradient_checkpointing(pos_enc):
    model = small(pos_enc).double()
    given = batch(pictures(SIZES))
    expected = gradients(model, given)
    model.set_grad_checkpointing()
    for reentrant in (False, True):
        timm.layers.config.set_reentrant_ckpt(reentrant)
        try:
            actual = gradients(model.train(), given)
        finally:
            timm.layers.config.set_reentrant_ckpt(False)
        model.eval()
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, msg=f'{name}, reentrant={reentrant}')


def gradients(model, given):
    model.zero_grad()
    torch.manual_seed(1)
    model({**given, 'patches': given['patches'].clone().requires_grad_()}).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize('pos_enc', ACTING)
def test_patch_dropout_and_keep_indices(pos_enc):
    model = small(pos_enc, patch_drop_rate=0.5).double()
    given = batch(pictures([GRID, (6, 5)]), padding=4)
    model.train()
    for training in (True, False):
        model.train(training).patch_drop.train()  # dropping depends on the mode of this layer alone
        with pytest.raises(ValueError, match='With patches dropped use output_dict=True'):
            model.forward_intermediates(given, output_fmt='NLC')
        model.train(training).patch_drop.eval()
        assert model.forward_intermediates(given, output_fmt='NLC')[0].shape[1] == model.num_prefix_tokens + 34
    model.train()
    taken = model.forward_intermediates({**given, 'keep_indices': torch.tensor([[0, 1], [2, 3]])}, output_fmt='NLC')
    assert taken[0].shape[1] == model.num_prefix_tokens + 2
    torch.manual_seed(0)
    features = model.forward_features(given)
    kept = features['patches'].shape[1] - model.num_prefix_tokens
    assert kept == 17 and features['patch_valid'].shape == (2, kept)
    torch.manual_seed(0)
    index = torch.argsort(torch.randn(2, 34), dim=-1)[:, :17]
    again = model.eval().forward_features({**given, 'keep_indices': index})
    torch.testing.assert_close(again['patches'], features['patches'])
    assert torch.equal(again['patch_valid'], features['patch_valid'])
    model.train()
    model(given).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    model.eval()
    only_padding = torch.stack([torch.arange(30, 34), torch.arange(4)])
    with pytest.raises(ValueError, match='keep_indices keeps no valid patch of image 0 of the batch'):
        model({**given, 'keep_indices': only_padding})


@pytest.mark.parametrize('global_pool, is_padded_first', [('avg', False), ('token', False), ('avg', True)])
def test_patch_dropout_leaves_a_patch_of_each_image(global_pool, is_padded_first):
    """Drawn among padding, as in timm, it left none of some images: their logits did not depend on them, silently."""
    model = small('sape2_k', patch_drop_rate=0.9, global_pool=global_pool, fc_norm=False).train()
    given = batch(pictures([(1, 2), (2, 1), (6, 5)], torch.float32), padding=10)
    if is_padded_first:
        given = {name: value.flip(1) for name, value in given.items()}
    for seed in range(20):
        torch.manual_seed(seed)
        features = model.forward_features(given)
        torch.manual_seed(seed)
        drawn = torch.argsort(torch.randn(given['patch_valid'].shape), dim=-1)[:, :features['patch_valid'].shape[1]]
        valid = given['patch_valid'].gather(1, drawn)
        assert torch.equal(features['patch_valid'][valid.any(1)], valid[valid.any(1)])  # else as drawn
        assert features['patch_valid'].any(dim=1).all()
    assert not valid.any(dim=1).all()


@pytest.mark.parametrize('pos_enc', ACTING)
def test_intermediates(pos_enc):
    model = small(pos_enc)
    given = batch(pictures(SIZES, torch.float32))
    out = model.forward_intermediates(given, output_fmt='NLC', output_dict=True, return_prefix_tokens=True)
    features = model.forward_features(given)
    assert torch.equal(out['image_features'], features['patches'])
    assert torch.equal(out['patch_valid'], given['patch_valid'])
    p = model.num_prefix_tokens
    assert torch.equal(model.norm(out['image_intermediates'][-1]), features['patches'][:, p:])
    assert out['image_intermediates_prefix'][0].shape == (len(SIZES), p, 32)
    with pytest.raises(ValueError, match="output_fmt='NLC'"):
        model.forward_intermediates(given)
    image = torch.randn(2, 3, 40, 48)
    final, maps = model.forward_intermediates(image)
    assert [m.shape for m in maps] == [(2, 32, *GRID)] * 2
    torch.testing.assert_close(final, model.forward_features(image))
    getter = timm.create_model(
        'test_naflexvit_pos_enc', pos_enc=pos_enc, features_only=True, img_size=(40, 48), patch_size=PATCH, depth=2)
    assert [m.shape[-2:] for m in getter(image)] == [GRID] * 2


@pytest.mark.parametrize('pos_enc', ACTING)
def test_attn_mask(pos_enc):
    """A mask of the caller's is for the tokens as given, and is combined with validity."""
    model = small(pos_enc).double()
    given = batch(pictures(SIZES), padding=2, permute=True)
    num_tokens = given['patches'].shape[1] + model.num_prefix_tokens
    everything = torch.ones(num_tokens, num_tokens, dtype=torch.bool)
    torch.testing.assert_close(model(given, attn_mask=everything), model(given))
    torch.testing.assert_close(model(given, attn_mask=torch.zeros(1, 1, num_tokens, num_tokens).double()), model(given))
    with pytest.raises(ValueError, match=r'bool .*or float .*got torch.int64. Use attn_mask.bool\(\)'):
        model(given, attn_mask=everything.long())
    hidden = everything.clone()
    hidden[:, -3:] = False
    hidden[-3:, -3:] = True
    shown = {name: tensor.clone() for name, tensor in given.items()}
    shown['patches'][:, -3:] += 1.
    a, b = (model.forward_features(x, attn_mask=hidden)['patches'][:, 0] for x in (given, shown))
    if not {'cope', 'peg', 'lape'} & set(pos_enc.split('+')) and 'sape2' not in pos_enc:  # others see what is hidden
        torch.testing.assert_close(a, b)
    assert not torch.allclose(*(model.forward_features(x)['patches'][:, 0] for x in (given, shown)))


@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.parametrize('pos_enc', ['nope', 'rope2d', 'sape2_k'])
def test_a_mask_that_leaves_padding_nothing(pos_enc, fused):
    """As timm makes it: rows of padding are forbidden too. They must not become NaN, also not in gradients."""
    timm.layers.set_fused_attn(fused)
    try:
        model = small(pos_enc).double()
    finally:
        timm.layers.set_fused_attn(True)
    given = batch(pictures(SIZES), padding=2, permute=True)
    expected = gradients(model, given)
    is_token = torch.nn.functional.pad(given['patch_valid'], (model.num_prefix_tokens, 0), value=True)
    mask = is_token[:, None, :, None] & is_token[:, None, None]
    for attn_mask in (mask, torch.zeros(mask.shape).double().masked_fill(~mask, -torch.inf)):
        torch.testing.assert_close(model(given, attn_mask=attn_mask), model(given))
        for name, gradient in gradients(model, {**given, 'attn_mask': attn_mask}).items():
            torch.testing.assert_close(gradient, expected[name], msg=name)


def test_misspelt_names_in_a_dict():
    """A misspelt name is refused. Other entries are ignored, as in timm, whose loader adds the length."""
    model = small('rope2d')
    given = batch(pictures(SIZES, torch.float32), padding=2)
    others = {'seq_len': 99, 'label': 3, 'patch_ids': None, 'patch_mask': None}
    assert torch.equal(model({**given, **others}), model(given))
    valid = given.pop('patch_valid')
    with pytest.raises(ValueError, match="The dict has 'patch_vaild', .*Did you mean 'patch_valid'"):
        model({**given, 'patch_vaild': valid})
    with pytest.raises(ValueError, match="The dict has 'patch_mask', .*Padding is False in patch_valid"):
        model({**given, 'patch_mask': valid})


def test_none_in_a_dict_is_not_there():
    model = small('rope2d')
    given = batch(pictures([GRID] * 2, torch.float32))
    mask = torch.randn(32, 32)
    expected = model(given, attn_mask=mask)
    assert not torch.allclose(model(given), expected)
    nothing = dict.fromkeys(['attn_mask', 'patch_valid', 'grid_size', 'keep_indices', 'object_index'])
    torch.testing.assert_close(model({**given, **nothing}, attn_mask=mask), expected)
    torch.testing.assert_close(model({**given, 'attn_mask': mask}, attn_mask=2 * mask), expected)  # the dict has it


@pytest.mark.parametrize('dtype', [torch.uint8, torch.int8, torch.uint16, torch.int32])
def test_coordinates_and_validity_of_any_integers(dtype):
    model = small('sape2_k')
    given = batch(pictures(SIZES, torch.float32), padding=2)
    narrow = {**given, **{name: given[name].to(dtype) for name in ('patch_coord', 'patch_valid')}}
    assert torch.equal(model(narrow), model(given))
    row = torch.arange(128)  # a side that the largest int8 ends
    long = {
        'patches': torch.randn(1, 128, 192), 'patch_coord': torch.stack([row, 0 * row], dim=-1)[None],
        'patch_valid': torch.ones(1, 128, dtype=torch.bool)}
    assert torch.equal(model({**long, 'patch_coord': long['patch_coord'].to(dtype)}), model(long))


@pytest.mark.parametrize('pos_enc', ['ape', 'sape2_k'])
@pytest.mark.parametrize('coordinate', [-1, 9, 10 ** 7])
def test_coordinates_of_padding(coordinate, pos_enc):
    """They may be outside of the grid, and do not make it larger."""
    model = small(pos_enc)
    given = batch(pictures(SIZES, torch.float32), padding=2)
    coord = given['patch_coord'].masked_fill(~given['patch_valid'][..., None], coordinate)
    assert torch.equal(model({**given, 'patch_coord': coord}), model(given))


@pytest.mark.parametrize('pos_enc', ACTING)
def test_autocast_and_bfloat16(pos_enc):
    model = small(pos_enc)
    given = batch(pictures(SIZES, torch.float32))
    expected = model(given)
    with torch.autocast('cpu', torch.bfloat16):
        assert (model(given) - expected).abs().max() < 0.05
    low = model.bfloat16()({**given, 'patches': given['patches'].bfloat16()})
    assert low.dtype == torch.bfloat16 and (low - expected).abs().max() < 0.1
    with torch.autocast('cpu', torch.bfloat16):  # tokens keep the dtype of the weights
        for dtype in (torch.float32, torch.bfloat16):
            low = model({**given, 'patches': given['patches'].to(dtype)})
            assert low.dtype == torch.bfloat16 and (low - expected).abs().max() < 0.1


@pytest.mark.full
@pytest.mark.parametrize('pos_enc', ['rope2d', 'sape2_k'])
def test_compiled(pos_enc):
    model = small(pos_enc)
    compiled = torch.compile(model, backend='aot_eager')
    for sizes in (SIZES, SIZES[1:3]):
        given = batch(pictures(sizes, torch.float32))
        torch.testing.assert_close(compiled(given), model(given), rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize('pos_enc, kwargs', [
    ('rope2d', {'logit_scaling': 'log'}),
    ('string', {}),
    ('rope2d_mixed', {'depth': 12}),  # were they compiled one by one: 47 graphs
])
@pytest.mark.parametrize('checkpointing', [False, True])
def test_compiled_once_for_batches_of_any_sizes(pos_enc, kwargs, checkpointing):
    """Neither the number of groups nor their sizes make new graphs, nor does each layer."""
    model, generator = small(pos_enc, **kwargs), random.Random(0)
    model.set_grad_checkpointing(checkpointing)
    graphs, counts = [], []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, backend=count)
    for _ in range(10):
        sizes = [(generator.randint(2, 7), generator.randint(2, 7)) for _ in range(generator.randint(2, 6))]
        given = batch(pictures(sizes, torch.float32), padding=generator.randint(0, 3))
        torch.testing.assert_close(compiled(given), model(given))
        counts.append(len(graphs))
    assert counts[3] == counts[-1] < 40, counts


def test_blocks_one_by_one():
    model = small('sape2_k+ape')
    given = batch(pictures(SIZES, torch.float32))
    x, position = model.embed(given)
    assert isinstance(position, MixedPosition)
    for block in model.blocks:
        x = block(x, position=position)
    assert torch.equal(model.norm(x), model.forward_features(given)['patches'])
    with pytest.raises(ValueError, match='is_causal'):
        model.blocks[0](x, is_causal=True, position=position)
    with pytest.raises(ValueError, match='model.embed'):
        model.blocks[0](x)


@pytest.mark.parametrize('given', ['images', 'kept patches', 'images of several sizes'])
def test_position_moves_as_a_whole(given):
    """Libraries that spread a model over devices move all that is in a position, and nothing else about it changes."""
    model = small('rope2d+lape+cpb', logit_scaling='log')
    images = torch.randn(2, 3, 48, 32)
    kept = {'keep_indices': torch.tensor([[1, 0], [23, 4]])} if given == 'kept patches' else {}
    sizes = given == 'images of several sizes'
    position = model.embed(batch(pictures(SIZES, torch.float32)) if sizes else images, **kept)[1]

    def leaves(value):
        if dataclasses.is_dataclass(value):
            return [x for field in dataclasses.fields(value) for x in leaves(getattr(value, field.name))]
        return [x for item in value for x in leaves(item)] if isinstance(value, (tuple, list)) else [value]

    moved = position.to('meta')
    assert type(moved) is type(position)
    pairs = list(zip(leaves(position), leaves(moved), strict=True))
    tensors = [new for old, new in pairs if isinstance(old, torch.Tensor)]
    assert tensors and all(tensor.is_meta for tensor in tensors)
    devices = [new for old, new in pairs if isinstance(old, torch.device)]
    assert devices and all(device.type == 'meta' for device in devices)
    assert all(new == old for old, new in pairs if not isinstance(old, (torch.Tensor, torch.device)))


def test_variable_patch_size():
    """With timm's patch interpolator, patches of another size than the model's."""
    model = small('sape2_k', enable_patch_interpolator=True)
    to_patches = Patchify(patch_size=16, flatten_patches=False)
    given = to_patches(torch.randn(3, 64, 96))
    given = {name: tensor[None] for name, tensor in given.items()}
    assert given['patches'].ndim == 5
    logits = model(given)
    order = torch.randperm(24)
    permuted = {name: tensor[:, order] for name, tensor in given.items()}
    torch.testing.assert_close(model(permuted), logits, rtol=1e-5, atol=1e-5)


def test_objects_are_found_in_patches():
    model = small('ope').double()
    images = pictures(SIZES)
    alone = torch.cat([model(image) for image in images])
    torch.testing.assert_close(model(batch(images, permute=True)), alone)
    given = batch(images, keep=[torch.arange(h * w - 1) for h, w in SIZES])
    with pytest.raises(ValueError, match='pass object_index='):
        model(given)


def test_objects_in_patches_of_another_size():
    model = small('ope', enable_patch_interpolator=True, pos_embed_interp_mode='bilinear')
    image = torch.randn(3, 64, 96)
    given = {name: tensor[None] for name, tensor in Patchify(patch_size=16, flatten_patches=False)(image).items()}
    objects = model.encodings['ope'].find_objects(image[None], timm_sape.Grid(4, 6), (16, 16))
    assert torch.equal(model(given), model({**given, 'object_index': objects}))


def test_objects_in_patches_with_channels_first():
    model = small('ope', patchify_channels_last=False)
    image = torch.cat(pictures([GRID, GRID], torch.float32))
    patches, _ = batch_patchify(image, (PATCH, PATCH), channels_last=False)
    coord = timm_sape.Grid(*GRID).coordinates().expand(2, -1, -1)
    for given in (patches, patches.unflatten(2, (3, PATCH, PATCH))):
        torch.testing.assert_close(model(given, coord), model(image), rtol=1e-5, atol=1e-5)


def wrong(**changes):
    given = batch(pictures([GRID, (3, 4)], torch.float32))
    for name, change in changes.items():
        if change is None:
            del given[name]
        else:
            given[name] = change(given[name]) if callable(change) else change
    return given


def at(index, value):
    def change(tensor):
        tensor = tensor.clone()
        tensor[index] = value
        return tensor
    return change


@pytest.mark.parametrize('pos_enc', ['ape', 'rope2d', 'sape2_k', 'lape', 'peg'])
def test_tokens_of_another_batch(pos_enc):
    model = small(pos_enc)
    tokens, position = model.embed(batch(pictures(SIZES, torch.float32)))
    for other in (tokens[:, :-1], torch.cat([tokens, tokens[:, :1]], dim=1), tokens[:-1], tokens.repeat(2, 1, 1)):
        with pytest.raises(ValueError, match=f'got {other.shape[0]} images of {other.shape[1]} tokens, its position'):
            model.blocks[0](other, position=position)
    one = model.embed(batch(pictures(SIZES[:1], torch.float32), padding=2))[1]
    with pytest.raises(ValueError, match='its position is for 1 of'):  # would be added to each image of the batch
        model.blocks[0](tokens, position=one)


@pytest.mark.parametrize(('changes', 'message'), [
    ({'patch_coord': None}, "lacks 'patch_coord'"),
    ({'patches': None}, "lacks 'patches'"),
    ({'patch_coord': at((0, 3), -1)}, r'\(-1, -1\) in image 0 .* outside'),
    ({'patch_coord': at((1, 2), 10 ** 7)}, 'counts patches'),
    ({'patch_coord': at((1, 2), 2 ** 62)}, 'counts patches'),
    ({'patch_coord': at((1, 2), torch.tensor([0, 1]))}, r'\(0, 1\) twice in image 1'),
    ({'patch_coord': lambda c: c.float()}, 'patch_coord must be integers'),
    ({'patch_coord': lambda c: c[:1]}, r'patch_coord must be integers \[2, 30, 2\]'),
    ({'patch_valid': lambda v: v[:, :-1]}, r'patch_valid must be bool or integers \[2, 30\]'),
    ({'patch_valid': lambda v: v.float()}, 'patch_valid must be bool'),
    ({'patch_valid': at(1, False)}, 'False for all patches of image 1'),
    ({'patches': lambda p: p[..., :-1]}, 'they must have 192: 8x8 pixels in 3 channels'),
    ({'patches': lambda p: p[0]}, 'the input must be patches'),
    ({'patches': lambda p: p.unflatten(2, (3, 8, 8))}, r'\[B, K, ph, pw, C\] of 3 channels'),
    ({'patches': torch.zeros(2, 30, 16, 16, 3)}, 'have 768 values, .* enable_patch_interpolator=True'),
    ({'patches': torch.zeros(2, 30, 4, 16, 3)}, r'\[4, 16, 3\] have 192 values, they must have 192: 8x8 pixels'),
    ({'grid_size': torch.tensor([[5, 6], [3, 3]])}, r'\(0, 3\) in image 1 .* outside its grid of 3x3'),
    ({'grid_size': torch.tensor([5, 6])}, 'grid_size must be integers'),
    ({'object_index': torch.zeros(2, 30).long()}, 'object_index= is for encodings that use it'),
    ({'keep_indices': torch.tensor([[0, 1], [2, 40]])}, 'keep_indices must be from 0 to 29, as there are 30 patches'),
    ({'keep_indices': torch.zeros(2, 0).long()}, 'keep_indices keeps no valid patch of image 0 of'),
    ({'keep_indices': torch.tensor([[0, 1], [1, 2]]), 'patch_valid': at((1, slice(0, 3)), False)},
     'keep_indices keeps no valid patch of image 1 of the batch. Keep one at least.'),
    ({'patch_coord': at((1, slice(12, None)), 0), 'patch_valid': None}, r'\(0, 0\) twice .* patch_valid must be False'),
    ({name: lambda t: t[:0] for name in ('patches', 'patch_coord', 'patch_valid')}, r'at least one image .* \[0, 30,'),
    ({**{name: lambda t: t[:, :0] for name in ('patches', 'patch_coord')}, 'patch_valid': None}, r'patch, .* \[2, 0'),
])
def test_wrong_input(changes, message):
    with pytest.raises(ValueError, match=message):
        small('sape2_k')(wrong(**changes))


def test_input_that_is_no_tensor():
    with pytest.raises(ValueError, match='takes images .*, got list without coordinates'):
        small('nope')([torch.zeros(3, 40, 48)])


def test_wrong_arguments():
    model = small('rope2d')
    for given in ({'patch_valid': torch.ones(2, 30).bool()}, {'grid_size': torch.tensor([[5, 6], [5, 6]])}):
        for method in (model, model.forward_features, model.forward_intermediates, model.embed):
            with pytest.raises(ValueError, match='has no effect on images. Leave it out, or give patch_coord='):
                method(torch.randn(2, 3, 40, 48), **given)
    with pytest.raises(ValueError, match='without coordinates'):
        model(torch.randn(2, 30, 192))
    with pytest.raises(ValueError, match='does not divide'):
        model(torch.randn(2, 3, 41, 48))
    assert small('rope2d', dynamic_img_pad=True)(torch.randn(2, 3, 41, 48)).shape == (2, 3)
    for kwargs, message in (
            ({'rope_type': 'axial'}, 'pos_enc= decides'), ({'pos_embed': 'none'}, 'pos_enc= decides'),
            ({'pos_embed_ar_preserving': True}, 'pos_enc= decides'), ({'rope_temperature': 100.}, 'pos_enc= decides'),
            ({'pos_embed_interp_mode': 'bilinear'}, 'pos_enc= decides'),
            ({'cfg': NaFlexVitCfg(rope_type='axial')}, 'rope_type= .* pos_enc= decides'),
            ({'pos_embed_grid_size': (3, 3)}, 'img_size= sets it'),
            ({'img_size': 41}, 'does not divide .* with that, dynamic_img_pad=True pads'),
            ({'patch_drop_rate': 1.5}, 'patch_drop_rate must be'), ({'depth': 0}, 'depth must be an integer'),
            ({'num_heads': 0}, 'num_heads must be an integer'), ({'num_heads': 5}, 'not divisible by num_heads=5'),
            ({'reg_tokens': -1}, 'reg_tokens must be'), ({'dynamic_img_pad': 'yes'}, 'must be True or False'),
            ({'pos_enc': 'rope3d'}, 'Unknown position encoding'), ({'pos_enc_kwargs': {'ape': {}}}, 'not a part of')):
        with pytest.raises(ValueError, match=message):
            small(**{'pos_enc': 'rope2d', **kwargs})
    plain = timm.create_model('test_vit_sape2_k')
    with pytest.raises(ValueError, match='naflexvit'):
        plain(wrong())
    with pytest.raises(ValueError, match='test_naflexvit_'):
        timm.create_model('test_vit_sape2_k', use_naflex=True)


def test_trace_and_export():
    """With images. A trace of patches would hold for their coordinates alone, and an export fails at their values."""
    model, images = small('ape+sape2_k').double(), torch.randn(2, 3, 40, 48, dtype=torch.float64)
    expected = model(images)
    for other in (torch.jit.trace(model, (images,)), torch.export.export(model, (images,)).module()):
        assert (other(images) - expected).abs().max() < 1e-10
    given = batch(pictures(SIZES))
    with pytest.raises(ValueError, match='A batch of patches cannot be traced or exported'):
        torch.jit.trace(model, (given,), strict=False)
    with pytest.raises(ValueError, match='A batch of patches cannot be traced or exported'):
        torch.export.export(model, (given,))
    assert model(images[:0]).shape == (0, 3)


def sizes_of_all_results(model, *args, **kwargs):
    """Numbers of entries of every tensor that a forward and a backward pass compute."""
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    with Sizes():
        model(*args, **kwargs).square().sum().backward()
    return sizes


def draw_patches(batch_size, num_patches, keep):
    return torch.rand(batch_size, num_patches, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :keep]


@pytest.mark.parametrize('missing', [False, True])
@pytest.mark.parametrize('pos_enc', [
    'ape', 'rope2d_mixed', 'ape+sape2_k', 'sape2sq_k', 'rpb', 'cope', 'alibi2d', 'fire', 't5', 'shaw', 'irpe_k'])
def test_nothing_is_larger_than_the_logits(pos_enc, missing):
    """A batch of four shapes, with three quarters of the patches missing or none.

    No tensor has more than B*h*N*N entries, and SaPE2 keeps its operators.
    """
    model = small(pos_enc, embed_dim=64, num_heads=2).train()
    if missing:
        shapes, num_patches = [(24, 24), (12, 48), (48, 12), (18, 32)], 144
        given = batch(pictures(shapes, torch.float32), keep=draw_patches(4, 576, num_patches))
    else:
        shapes, num_patches = [(16, 16), (8, 32), (32, 8), (12, 20)], 256
        given = batch(pictures(shapes, torch.float32))
    num_tokens = model.num_prefix_tokens + num_patches
    assert max(sizes_of_all_results(model, given)) <= len(shapes) * 2 * num_tokens ** 2
    if not missing and pos_enc in ('ape+sape2_k', 'sape2sq_k'):
        with using_backend('torch'), torch.profiler.profile() as found:  # raises where the operator cannot be used
            model(given)
        names = {event.key for event in found.key_averages()}
        assert 'timm_sape::axis_codes' in names


@pytest.mark.parametrize('pos_enc', ['rpb', 'cope', 'alibi2d', 'fire', 't5', 'shaw', 'irpe_k'])
def test_nothing_is_larger_in_the_plain_host_with_patch_dropout(pos_enc):
    model = timm.create_model(
        'test_vit_pos_enc', pos_enc=pos_enc, img_size=192, patch_size=8, embed_dim=64, depth=2, num_heads=8,
        patch_drop_rate=0.75).train()
    assert max(sizes_of_all_results(model, torch.randn(2, 3, 192, 192))) <= 2 * 8 * (1 + 144) ** 2


CORNERS = torch.tensor([[[0, 0], [255, 255]]])


@pytest.mark.parametrize('pos_enc', ['rope2d', 'rpb', 'cope', 'alibi2d', 'lookhere', 'fire', 't5', 'shaw', 'irpe_qkv'])
def test_few_patches_of_a_large_grid(pos_enc):
    """What takes the kept patches alone needs no more than some numbers for each of the others, not for each pair."""
    model = small(pos_enc, num_heads=4)
    assert max(sizes_of_all_results(model, torch.randn(1, 2, 192), CORNERS)) < 2 ** 24


@pytest.mark.parametrize('pos_enc', ['sape2_k', 'sape2sq_k', 'cpb', 'liere', 'toy_shared'])
def test_few_patches_of_a_large_grid_are_refused(pos_enc):
    """Where an encoding computes with the whole grid: it would take gigabytes."""
    model = small(pos_enc, num_heads=4)
    with pytest.raises(ValueError, match=rf"'{pos_enc}' .* 256x256 = 65536 .* the sequence has 2\. .* patch_coord"):
        model(torch.randn(1, 2, 192), CORNERS)


@pytest.mark.parametrize('height, width, keep, fits', [
    (64, 64, 410, True), (64, 64, 1, True), (256, 256, 6554, True), (65, 64, 260, True), (65, 64, 259, False)])
def test_ordinary_patch_dropout_is_not_refused(height, width, keep, fits):
    grid = timm_sape.Grid(height, width, keep_indices=torch.zeros(2, keep, dtype=torch.int64))
    if fits:
        grid.check_density('yours')
    else:
        with pytest.raises(ValueError, match="'yours' computes with all 65x64 = 4160 patches"):
            grid.check_density('yours')


def test_parameter_groups():
    model = small('ape+sape2_k')
    skipped = model.no_weight_decay()
    assert 'embeds.pos_embed' in skipped and 'blocks.0.attn.encodings.sape2_k.table_x' in skipped
    groups = param_groups_layer_decay(model, no_weight_decay_list=skipped)
    assert len(groups) > 4
    assert model.prune_intermediate_layers([0]) == [0] and len(model.blocks) == 1
    assert model.forward_intermediates(torch.randn(1, 3, 40, 48), intermediates_only=True)[0].shape == (1, 32, *GRID)


def test_analysis_of_images():
    """Maps, probes and Position-SHAP see in a NaFlexVit what they see in its plain twin."""
    twins = Twins('ape+sape2_k', torch.float32)
    plain = twins()
    naflex = twins.naflex(plain)
    image = torch.cat(pictures([GRID], torch.float32))
    expected, found = (position_maps(model, image) for model in (plain, naflex))
    assert found.grid.size == GRID
    for ours, theirs in zip(found.layers, expected.layers):
        torch.testing.assert_close(ours.position, theirs.position, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.vectors, expected.vectors)
    rows, like = (probe(model, image) for model in (naflex, plain))
    of_sizes = 'image of another shape', 'image twice as large'  # a NaFlexVit has no size to be set
    kinds = [row for row in like if row.probe not in of_sizes]
    assert [(row.probe, row.what, row.expected) for row in rows] == [
        (row.probe, row.what, row.expected) for row in kinds]
    for ours, theirs in zip(rows, kinds):
        assert abs(ours.change - theirs.change) < 1e-3 + 1e-2 * theirs.change
    batches = [(torch.cat(pictures([GRID] * 4, torch.float32)), torch.tensor([0, 1, 2, 0]))]
    ours, theirs = (position_shap(model, batches, background=2) for model in (naflex, plain))
    torch.testing.assert_close(ours.position, theirs.position, rtol=1e-3, atol=1e-4)
