"""Grafts onto timm's Eva and NaFlexVit models: the base's logits at the start, training, saving."""
import pytest
import timm
import torch
from batches import PATCH, SIZES, batch, pictures
from common import randomize
from timm.models import save_for_hf

import timm_sape
from timm_sape import NaFlexVitPosEnc

SHAPE = dict(depth=2, embed_dim=32, num_heads=4, num_classes=3, img_size=(40, 48), patch_size=PATCH)
# One for each kind of attention layer, MLP, rotation, table and pooling
BASES = {
    'eva_giant_patch14_224': {},
    'eva02_tiny_patch14_224': {},
    'eva02_base_patch14_224': {},
    'vit_pe_core_tiny_patch16_384': {},
    'vit_small_plus_patch16_dinov3': {},
    'vit_base_patch16_sapiens2': dict(num_kv_heads=2),
    'vit_medium_patch16_rope_reg1_gap_256': {},
    'vit_small_patch16_rope_mixed_ape_224': dict(use_naflex=True),
    'naflexvit_base_patch16_parfac_gap': dict(pos_embed_use_grid_sample=True),
    'naflexvit_base_patch16_map': dict(pos_embed_grid_size=None, attn_gated=True),
    'naflexvit_base_patch16_radio_v3': dict(pos_embed_grid_size=(12, 12)),
    'vit_base_patch16_clip_224': dict(use_naflex=True),
}


def pair(name, pos_enc='sape2_k'):
    """A base as NaFlexVit with large random weights, and its graft."""
    torch.manual_seed(0)
    is_flag = 'naflex' not in name
    base = timm.create_model(name, **{**SHAPE, **BASES[name], **({'use_naflex': True} if is_flag else {})}).eval()
    randomize(base)
    return base, timm_sape.graft(base, pos_enc)


@pytest.mark.parametrize('pos_enc', [
    'sape2_k', *(pytest.param(name, marks=pytest.mark.full) for name in ('cope', 'irpe_qkv'))])
@pytest.mark.parametrize('name', BASES)
def test_logits_of_the_base(name, pos_enc):
    """On images, and on patches in raster order, where timm is right; permuted they are still the same."""
    base, grafted = pair(name, pos_enc)
    assert isinstance(grafted, NaFlexVitPosEnc) and grafted.pos_enc == f'auto_{pos_enc}'
    image = torch.cat(pictures([(5, 6), (5, 6)], torch.float32))
    images = pictures(SIZES, torch.float32)
    expected = base(batch(images, padding=3))
    for actual, expected in (
            (grafted(image), base(image)), (grafted(batch(images, padding=3)), expected),
            (grafted(batch(images, padding=3, permute=True)), expected)):
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize('name', BASES)
def test_training_and_saving(name, tmp_path):
    """Every new parameter moves by the second step, and the saved model is the same bit for bit."""
    _, grafted = pair(name)
    given = batch(pictures(SIZES, torch.float32), padding=2)
    new = {key: p for key, p in grafted.named_parameters() if 'encodings.' in key}
    assert new
    if grafted.global_pool == 'token':  # the last layer's bias is zero in the row of the class token
        new = {key: p for key, p in new.items() if not key.startswith('blocks.1.')}
    before = {key: p.detach().clone() for key, p in new.items()}
    optimizer = torch.optim.SGD(grafted.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(grafted(given), torch.arange(len(SIZES)) % 3).backward()
        optimizer.step()
    assert not [key for key, p in new.items() if torch.equal(p, before[key])]

    timm_sape.hub.save(grafted, tmp_path / 'model')
    loaded = timm_sape.hub.load(tmp_path / 'model').eval()
    assert loaded.base_position == grafted.base_position
    assert torch.equal(loaded(given), grafted(given))


@pytest.mark.parametrize('name', BASES)
def test_a_pruned_graft_is_saved_as_it_is(name, tmp_path):
    """And the block that is left computes what it did."""
    _, grafted = pair(name)
    image = torch.cat(pictures([(5, 6)], torch.float32))
    expected, = grafted.forward_intermediates(image, [0], intermediates_only=True)
    grafted.prune_intermediate_layers([0])
    assert torch.equal(grafted.forward_intermediates(image, [0], intermediates_only=True)[0], expected)
    timm_sape.hub.save(grafted, tmp_path / 'model')
    loaded = timm_sape.hub.load(tmp_path / 'model').eval()
    given = batch(pictures(SIZES, torch.float32), padding=2)
    assert len(loaded.blocks) == 1 and torch.equal(loaded(given), grafted(given))


@pytest.mark.parametrize(
    'name', ['eva02_tiny_patch14_224', 'vit_small_plus_patch16_dinov3', 'vit_pe_core_tiny_patch16_384'])
def test_classic_base_and_its_checkpoint(name):
    """A model of timm's Eva class, and its weights from a file, whose table is not square."""
    base = randomize(timm.create_model(name, **SHAPE).eval())
    image = torch.cat(pictures([(5, 6)], torch.float32))
    source = dict(pretrained=True, pretrained_cfg_overlay=dict(state_dict=base.state_dict(), num_classes=3))
    for grafted in (
            timm_sape.graft(base, 'sape2_k'),
            timm.create_model('vit_graft', base=name, pos_enc='sape2_k', **SHAPE, **source).eval()):
        assert isinstance(grafted, NaFlexVitPosEnc)
        torch.testing.assert_close(grafted(image), base(image), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', [
    'naflexvit_base_patch16_gap', 'naflexvit_base_patch16_parfac_gap', 'vit_small_plus_patch16_dinov3',
    'eva02_tiny_patch14_224', 'vit_base_patch16_clip_224'])
def test_pretrained_with_one_channel(name, tmp_path, caplog):
    """The patch embedding is adapted, by whatever way the weights come; timm's NaFlexVit would have random ones."""
    torch.manual_seed(0)
    flag = {'use_naflex': True} if name == 'vit_base_patch16_clip_224' else {}
    base = timm.create_model(name, **SHAPE, **flag).eval()
    weight = timm_sape.graft(base, 'sape2_k').embeds.proj.weight
    expected = weight.unflatten(1, (PATCH, PATCH, 3)).sum(-1).flatten(1)
    save_for_hf(base, tmp_path / 'base', safe_serialization=True)
    torch.save(base.state_dict(), tmp_path / 'model.pth')
    source = dict(pretrained=True, in_chans=1)
    overlay = dict(pretrained_cfg_overlay=dict(file=str(tmp_path / 'model.pth'), num_classes=3))
    if name == 'vit_base_patch16_clip_224':  # timm loads a table that is not square into none
        grafts = [timm.create_model('vit_graft', base=name, pos_enc='sape2_k', **SHAPE, **flag, **source, **overlay)]
    else:
        grafts = [
            timm_sape.graft(f'local-dir:{tmp_path / "base"}', 'sape2_k', **source),
            timm_sape.graft(name, 'sape2_k', **SHAPE, **flag, **source, **overlay),
            timm.create_model('vit_graft', base=name, pos_enc='sape2_k', **SHAPE, **flag, **source, **overlay)]
    for grafted in grafts:
        torch.testing.assert_close(grafted.embeds.proj.weight, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(grafted.blocks[1].mlp.fc2.weight, base.blocks[1].mlp.fc2.weight)
        assert grafted(torch.randn(1, 1, 40, 48)).isfinite().all()
    assert not [record for record in caplog.records if 'random init' in record.message]


@pytest.mark.parametrize('kwargs', [{'rope_jitter_coords': 1.5}, {'patch_drop_rate': 0.4}], ids=' '.join)
def test_augmented_rotation_and_dropped_patches_in_training(kwargs):
    """The base's rotation is augmented as timm does it, and follows the patches that are left."""
    torch.manual_seed(0)
    name = 'vit_small_plus_patch16_dinov3'
    base = randomize(timm.create_model(name, **{**SHAPE, **BASES[name], 'use_naflex': True, **kwargs}))
    grafted = timm_sape.graft(base, 'sape2_k').train()
    base.train()
    image = torch.cat(pictures([(5, 6)] * 2, torch.float32))

    def run(model, seed=1):
        torch.manual_seed(seed)
        return model(image)

    expected = run(base)
    assert not torch.allclose(run(base, seed=2), expected)
    torch.testing.assert_close(run(grafted), expected, rtol=1e-5, atol=1e-5)
    grafted.set_grad_checkpointing()
    logits = run(grafted)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    logits.sum().backward()


@pytest.mark.parametrize(('name', 'pos_enc', 'message'), [
    ('naflexvit_base_patch16_gap', 'ape', r"already has a table of its own \(learned table\).* Leave 'ape' out"),
    ('naflexvit_base_patch16_parfac_gap', 'auto_ape', r'table of its own \(learned tables of rows and columns\)'),
    ('vit_small_plus_patch16_dinov3', 'ape', "which this base does not have. Choose .*'ape2d'"),
    ('vit_small_plus_patch16_dinov3', 'rope2d', r"q and k by itself \(RotaryEmbeddingDinoV3\). Choose .*'sape2_k'"),
])
def test_refused(name, pos_enc, message):
    with pytest.raises(ValueError, match=message):
        timm_sape.graft(name, pos_enc, **SHAPE)


@pytest.mark.parametrize(('name', 'cause'), [
    ('eva02_enormous_patch14_clip_224', 'use_post_norm'), ('deit_tiny_distilled_patch16_224', 'use_naflex')])
def test_what_timm_does_not_build(name, cause):
    for create in (
            lambda **kwargs: timm_sape.graft(name, 'sape2_k', **kwargs),
            lambda **kwargs: timm.create_model('vit_graft', base=name, pos_enc='sape2_k', **kwargs)):
        with pytest.raises(ValueError, match=f'{name}.* cannot be grafted: timm does not build it .*{cause}'):
            create(**SHAPE, use_naflex=True)


def test_what_the_messages_advise():
    grafted = timm_sape.graft('vit_small_plus_patch16_dinov3', 'ape2d+sape2_k', **SHAPE)
    assert grafted.pos_enc == 'auto_ape2d+auto_sape2_k'


def test_table_of_the_base_is_no_ape():
    """A message must not advise to graft `ape`, which is refused for such a base."""
    base, grafted = pair('naflexvit_base_patch16_map')
    with pytest.raises(ValueError, match=r"its entries show pos_enc='auto_sape2_k'\."):
        timm_sape.graft(base, 'rpb').load_state_dict(grafted.state_dict())


def test_card_tells_the_position_of_the_base(tmp_path):
    """`nope` would mean that the model has no position."""
    timm_sape.hub.save(pair('eva02_tiny_patch14_224', 'nope')[1], tmp_path / 'model')
    card = (tmp_path / 'model' / 'README.md').read_text()
    position = 'learned table + RotaryEmbeddingCat'
    assert f"with the position encoding `nope`, and its base's own ({position})." in card
    assert f'- **Position of the base:** {position}\n' in card


@pytest.mark.parametrize(
    'name', ['eva02_tiny_patch14_224', 'naflexvit_base_patch16_parfac_gap', 'naflexvit_base_patch16_radio_v3'])
def test_patches_left_out(name):
    """As in the base with those patches marked invalid; its own encoding goes by the order, so it needs all places."""
    base, grafted = pair(name)
    sizes = [(5, 6), (5, 6), (3, 8), (7, 1)]
    images = pictures(sizes, torch.float32)
    keep = [torch.randperm(h * w)[:h * w * 6 // 10] for h, w in sizes]
    expected = []
    for image, kept in zip(images, keep):
        given = batch([image])
        given['patch_valid'] = torch.zeros_like(given['patch_valid']).index_fill(1, kept, True)
        expected.append(base(given))
    expected = torch.cat(expected)
    actual = grafted(batch(images, keep=keep, padding=3, permute=True))
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
