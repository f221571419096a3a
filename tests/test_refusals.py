"""Mistakes that no other test makes: each raise of the package that the rest of the suite never reaches."""
import pytest
import timm
import torch
import torch.nn as nn
from timm.models import load_checkpoint
from timm.models.vision_transformer import Block
from torch.nn.utils import prune

import timm_sape
from timm_sape.analysis import position_shap
from timm_sape.attention import adopt_blocks
from timm_sape.checkpoints import unwrap
from timm_sape.cli import main
from timm_sape.lab import bench_naflex, bench_sape2
from timm_sape.lab.position_data import write_subset
from timm_sape.lab.shifts import shift_sweep
from timm_sape.loading import load_model, native_preprocessing, preprocessing

PATCHES = {
    'patches': torch.zeros(1, 4, 3 * 16 * 16),
    'patch_coord': torch.tensor([[[0, 0], [0, 1], [1, 0], [1, 1]]]),
    'patch_valid': torch.ones(1, 4, dtype=torch.bool),
}


def with_another(stem):
    model = timm.create_model('test_vit_ape')
    model.patch_embed = stem
    return model


def pruned(pos_enc):
    model = timm.create_model('test_vit_pos_enc', pos_enc=pos_enc)
    for module in (model, *model.position_encodings().values()):
        for name in {'pos_embed', 'table'} & dict(module.named_parameters(recurse=False)).keys():
            prune.l1_unstructured(module, name, amount=0.5)
    return model


MISTAKES = {
    'a file of JAX': (
        lambda: timm.create_model('test_vit_ape', checkpoint_path='weights.npz'),
        'VisionTransformerPosEnc cannot read weights in .npz'),
    'a file of JAX for NaFlexVit': (
        lambda: load_checkpoint(timm.create_model('test_naflexvit_rope2d'), 'weights.npz'),
        'NaFlexVitPosEnc cannot read weights in .npz'),
    'TorchScript': (lambda: timm.create_model('test_vit_ape', scriptable=True), 'does not work with torch.jit.script'),
    'a stem without a grid': (
        lambda: with_another(nn.Conv2d(3, 64, 16, 16))(torch.zeros(1, 3, 160, 160)), 'is a Conv2d, which does not'),
    "timm's step without encodings": (
        lambda: timm.create_model('test_naflexvit_ape')._forward_embeds(torch.zeros(1, 3, 160, 160), None, None, None),
        'would leave out the encodings. Call `embed`'),
    'a size to be padded': (
        lambda: timm.create_model('test_vit_ape', img_size=(40, 72), dynamic_img_size=True, dynamic_img_pad=True),
        'with that, the model pads images'),
    'a new size to be padded': (
        lambda: timm.create_model(
            'test_vit_ape', img_size=32, dynamic_img_size=True, dynamic_img_pad=True).set_input_size((40, 72)),
        'with that, the model pads images'),
    'a misspelt argument of a base': (
        lambda: timm.create_model('vit_graft', base='vit_small_patch16_dinov3', pos_enc='lape', img_siz=64),
        'img_siz.*If this is about an argument of yours, correct it'),
    'a pruned table': (lambda: pruned('rpb').set_input_size(128), 'blocks.0.attn.encodings.rpb.table is pruned'),
    "timm's table, pruned": (lambda: pruned('ape').set_input_size(128), 'pos_embed is pruned'),
    'weights that are no dict': (lambda: unwrap([1]), 'not a state dict but a list'),
    'no such file': (lambda: load_model('test_vit_ape@nothing.pth'), "no file 'nothing.pth'"),
    'image files of 5 channels': (lambda: preprocessing(timm.create_model('test_vit_ape', in_chans=5)), '5 channels'),
    'oblong patches of any aspect ratio': (
        lambda: native_preprocessing(timm.create_model('test_naflexvit_ape', patch_size=(16, 8)), 64),
        'has square ones, the model 16x8'),
    'position that cannot be moved by layer': (
        lambda: position_shap(timm_sape.graft('eva02_tiny_patch14_224', 'sape2_k'), [], per_layer=True),
        'per_layer=True cannot move'),
    'aliases in a string': (
        lambda: timm_sape.register_encoding('refused', aliases='abc')(
            type('Refused', (timm_sape.PositionEncoding,), {'position_bias': lambda self, grid: None})),
        'must be a sequence of names'),
    'a huge keyword': (
        lambda: timm.create_model('test_vit_sape2_k', pos_enc_kwargs={'sape2_k': {'npos': 10 ** 12}}),
        'larger than any model needs'),
    'another base': (
        lambda: timm.create_model('vit_tiny_sape2_k_graft', base='test_vit'), 'For another base use vit_graft'),
    'a base that became another': (
        lambda: timm.create_model('vit_graft', base='test_vit', pos_enc='sape2_k', base_position='a rotation'),
        "whose own position is 'a rotation'"),
    'indices on another device': (
        lambda: timm.create_model('test_vit_rope2d').forward_features(
            torch.zeros(1, 3, 160, 160), keep_indices=torch.zeros(1, 4, dtype=torch.int64, device='meta')),
        'keep_indices must be on cpu'),
    'coordinates on another device': (
        lambda: timm.create_model('test_naflexvit_rope2d')({**PATCHES, 'patch_coord': torch.zeros(
            1, 4, 2, dtype=torch.int64, device='meta')}),
        'patch_coord must be on cpu'),
    'features of dropped patches': (
        lambda: timm.create_model('test_naflexvit_rope2d', patch_drop_rate=0.5).train().forward_intermediates(
            PATCHES, output_fmt='NLC'),
        'use output_dict=True'),
    'a number for a repository': (lambda: timm_sape.hub.save(None, 'unused', repo_id=3), 'must be OWNER/NAME'),
    'no repository': (lambda: timm_sape.hub.push(None, None), 'repo_id must be OWNER/NAME, got None'),
    'no model': (lambda: timm_sape.hub.save(None, 'unused'), 'must be a model made by timm.create_model, got a None'),
    'a list for a card': (lambda: timm_sape.hub.save(None, 'unused', model_card=['a']), 'model_card must be a dict'),
    'no such split': (lambda: write_subset({'train': []}, {'test': 1}, 'unused'), "no split 'test'"),
    'held out of nothing': (
        lambda: write_subset({'test': []}, {'test': 1}, 'unused', held_out=1), 'per_class must say how many'),
    'unknown fill': (lambda: shift_sweep(['a'], None, [1], fill='wrap'), 'fill must be one of'),
    'nothing to shift': (lambda: shift_sweep([], None, [1]), 'at least one model'),
}


@pytest.mark.parametrize('name', MISTAKES)
def test_is_refused(name):
    make, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_checkpoint_without_a_name_is_refused(tmp_path):
    file = tmp_path / 'bare.pth'
    torch.save({'state_dict': timm.create_model('test_vit_ape').state_dict()}, file)
    with pytest.raises(ValueError, match='does not name its model. Write NAME@'):
        load_model(str(file))


def test_heads_that_are_not_of_the_width_are_refused():
    model = timm.create_model('test_vit')
    model.blocks[0].attn.head_dim = 8
    with pytest.raises(ValueError, match='heads have .* channels, and its tokens'):
        timm_sape.graft(model, 'sape2_k')


def test_model_larger_than_memory_is_refused(monkeypatch):
    def build(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")

    monkeypatch.setattr('timm_sape.entrypoints.build_by_timm', build)
    with pytest.raises(ValueError, match='does not fit into memory. Choose a smaller img_size'):
        timm.create_model('test_vit_ape')


@pytest.mark.parametrize('args, message', [
    (['map', '--gallery', 'g.png', 'x'], 'leave MODEL'),
    (['map', 'x'], 'give --image, --output'),
    (['bench', 'naflex', '--sizes', '64'], '--sizes is not for'),
])
def test_command_is_refused(args, message, capsys):
    assert main(args) == 2 and message in capsys.readouterr().err


def test_nothing_wrong_is_timed(monkeypatch):
    """With a tolerance of 0 each implementation is wrong."""
    monkeypatch.setattr(bench_sape2, 'SIZES', {16: (1, 1)})
    monkeypatch.setattr(bench_sape2, 'TOLERANCE', {torch.float32: 0.})
    with pytest.raises(RuntimeError, match="backend 'torch' at N=16 is off by .* so it was not timed"):
        list(bench_sape2.bench_operator(['torch'], [16], 'cpu', 1))
    monkeypatch.setattr(bench_naflex, 'TOLERANCE', 0.)
    with pytest.raises(RuntimeError, match="pos_enc='rope2d': logits of the batch are off by .* so it was not timed"):
        list(bench_naflex.bench_naflex(['rope2d'], 'cpu', 1, size='test_vit'))


@pytest.mark.parametrize('name, value', [
    ('pos_enc', 'rope2d'), ('pos_enc_kwargs', {}), ('logit_scaling', 'log'), ('ref_grid_size', (2, 2))])
def test_what_a_model_was_built_from_cannot_be_assigned(name, value):
    """It would change nothing but what is saved."""
    model = timm.create_model('test_vit_pos_enc', pos_enc='sape2_k', pos_enc_kwargs={'sape2_k': {'npos': 5}})
    saved = dict(model._model_args)
    with pytest.raises(AttributeError, match=name):
        setattr(model, name, value)
    model.pos_enc_kwargs['sape2_k']['npos'] = 7  # of a copy
    assert model._model_args == saved


def test_a_saved_model_with_another_number_of_heads(tmp_path):
    """Its weights would fit, so they cannot tell."""
    for name, model in (
            ('default', timm.create_model('test_vit_rope2d')), ('chosen', timm.create_model(
                'test_vit_rope2d', num_heads=2)), ('graft', timm_sape.graft('test_vit', 'rope2d')),
            ('other graft', timm_sape.graft('test_vit', 'rope2d', num_heads=4))):
        timm_sape.hub.save(model, tmp_path / name)
        model = timm.create_model(f'local-dir:{tmp_path / name}', pretrained=True)
        heads = model.blocks[0].attn.num_heads
        timm.create_model(f'local-dir:{tmp_path / name}', pretrained=True, num_heads=heads)
        timm.create_model(f'local-dir:{tmp_path / name}', num_heads=8)  # a new model
        with pytest.raises(ValueError, match=f'trained with {heads} heads, not 8. Leave num_heads out'):
            timm.create_model(f'local-dir:{tmp_path / name}', pretrained=True, num_heads=8)


@pytest.mark.parametrize('source', ['checkpoint_path', 'file'])
def test_weights_without_an_encoding_name_graft(source, tmp_path):
    file = str(tmp_path / 'weights.pth')
    torch.save(timm.create_model('vit_tiny_patch16_224', depth=2, num_classes=3, img_size=32).state_dict(), file)
    kwargs = {'checkpoint_path': file} if source == 'checkpoint_path' else {
        'pretrained': True, 'pretrained_cfg_overlay': {'file': file, 'num_classes': 3}}
    with pytest.raises(ValueError, match="weights of timm's own model, use timm_sape.graft"):
        timm.create_model('vit_tiny_sape2_k_ape', depth=2, num_classes=3, img_size=32, **kwargs)


def test_keywords_that_contradict_a_saved_model_are_named(tmp_path):
    timm_sape.hub.save(timm.create_model('test_vit_sape2_k'), tmp_path / 'saved')
    with pytest.raises(ValueError, match='Leave pos_enc_kwargs out'):
        timm.create_model(
            f'local-dir:{tmp_path / "saved"}', pretrained=True, pos_enc_kwargs={'sape2_k': {'npos': 5}})


CHANGES = lambda x: x[:, :-2], lambda x: torch.cat([x, x[:, :1]], dim=1)


def changed_between_blocks(pos_enc, change):
    """A model whose second block gets other tokens than the first returns."""
    model = timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, img_size=32, patch_size=8).eval()
    model.blocks[1].register_forward_pre_hook(lambda block, args: (change(args[0]), *args[1:]))
    return model


@pytest.mark.parametrize('backend', ['reference', 'torch', None])
@pytest.mark.parametrize('pos_enc', ['sape2_k', 'sape2_qk', 'cope', 'rope2d', 'rpb', 'lape'])
def test_tokens_that_are_removed_between_blocks(pos_enc, backend, monkeypatch):
    """The kernels would read and write out of bounds."""
    if backend is not None:
        monkeypatch.setenv('TIMM_SAPE_BACKEND', backend)
    images = torch.randn(1, 3, 32, 32)
    for change in CHANGES:
        with pytest.raises(ValueError, match='tokens cannot be added or removed between them'):
            changed_between_blocks(pos_enc, change)(images)


def test_tokens_may_be_removed_between_blocks_without_position():
    for change in CHANGES:
        assert changed_between_blocks('ape', change)(torch.randn(1, 3, 32, 32)).shape == (1, 1000)


def test_layers_that_share_a_table_are_not_saved(tmp_path):
    model = timm.create_model('test_vit_rpb', img_size=32, patch_size=8)
    first, second = (model.blocks[i].attn.encodings.rpb for i in range(2))
    second.table = first.table
    with pytest.raises(ValueError, match='share memory.*Give each layer a parameter of its own'):
        timm_sape.hub.save(model, tmp_path / 'model')
    second.table = nn.Parameter(first.table.detach().clone())
    timm_sape.hub.save(model, tmp_path / 'model')


def test_blocks_that_no_class_is_known_for():
    class OtherBlock(Block):
        pass

    blocks = [Block(16, 2), OtherBlock(16, 2)]
    with pytest.raises(ValueError, match='No class with encodings is known for OtherBlock.*add it to HOSTS'):
        adopt_blocks(blocks)
    assert type(blocks[0]) is Block  # nothing was changed
