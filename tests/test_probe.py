"""Probes: models change as theory predicts, and a broken encoding fails."""
import math
from dataclasses import replace

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F

import timm_sape
from timm_sape.analysis import probe, randomize_encodings
from timm_sape.analysis.probe import ProbeRow, _another_shape, _change
from timm_sape.loading import patch_size_of

MODELS = [
    name if timm_sape.get_encoding(name).alone else f'sincos2d+{name}' for name in timm_sape.list_encodings()
] + ['ape+sape2_k', 'alibi2d+auto_rope2d']


def build(pos_enc, **kwargs):
    torch.manual_seed(0)
    kwargs = dict(img_size=(32, 40), patch_size=8, num_classes=10) | kwargs
    model = timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, **kwargs)
    randomize_encodings(model)
    return model


def picture():
    coarse = torch.randn(2, 3, 8, 10, generator=torch.Generator().manual_seed(0))
    return F.interpolate(coarse, (32, 40), mode='bicubic')


def by_name(rows):
    return {(row.probe, row.what): row for row in rows}


@pytest.mark.parametrize('pos_enc', MODELS)
def test_theorems_hold(pos_enc):
    model = build(pos_enc)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    rows = probe(model, picture())
    tested = [row for row in rows if row.verdict]
    assert tested and [row for row in tested if row.verdict == 'fail'] == []
    assert all(row.change >= 0 for row in rows)
    assert by_name(rows)['image twice as large', 'class logits'].change > 0
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert next(model.parameters()).dtype == torch.float32


def test_what_is_predicted():
    exact, changes = {}, {}
    for pos_enc in ('nope', 'ape', 'rope2d', 'alibi2d', 'sape2_k', 'lape', 'alibi2d+rope2d'):
        for key, row in by_name(probe(build(pos_enc), picture())).items():
            (exact if row.expected == '0' else changes if row.expected else {}).setdefault(pos_enc, set()).add(key)
        assert ('image in a batch', 'class logits') in exact[pos_enc]
    for direction in ('right', 'down'):
        shift = (f'patches shifted {direction}', 'first layer, attention logits')
        assert shift in exact['rope2d'] and shift in exact['alibi2d'] and shift in changes['ape']
        assert shift in changes['lape'] and shift in exact['alibi2d+rope2d']
    assert ('patches permuted', 'class logits') in exact['nope']
    assert all(('patches permuted', 'class logits') in changes[name] for name in ('ape', 'rope2d', 'sape2_k'))
    mirror = ('patches mirrored', 'class logits')
    assert mirror in exact['alibi2d'] and mirror in changes['rope2d'] and mirror in changes['alibi2d+rope2d']
    assert ('rows exchanged', 'first layer, x bias') in exact['sape2_k']
    assert ('rows exchanged', 'first layer, y bias') in changes['sape2_k']
    assert ('patches shifted right', 'first layer, y bias') in exact['sape2_k']
    assert ('patches shifted down', 'first layer, x bias') in exact['sape2_k']


def test_a_broken_encoding_fails(monkeypatch):
    cls = timm_sape.get_encoding('alibi2d')
    compute = cls.compute

    def with_direction(self, grid, device, dtype):
        table = compute(self, grid, device, dtype)
        return table + 0.1 * torch.arange(table.shape[-1], dtype=dtype)

    monkeypatch.setattr(cls, 'compute', with_direction)
    rows = by_name(probe(build('alibi2d'), picture()))
    assert rows['patches mirrored', 'class logits'].verdict == 'fail'
    assert rows['patches shifted right', 'first layer, attention logits'].verdict == 'pass'
    untrained = timm.create_model('test_vit_irpe_k', img_size=(32, 40), patch_size=8)  # its tables start at zero
    assert by_name(probe(untrained, picture()))['patches permuted', 'class logits'].verdict == 'fail'


def test_an_encoding_that_computes_from_its_own_size_fails(monkeypatch):
    """On a grid of as many patches its table has the right size, so nothing else would notice."""
    cls = timm_sape.get_encoding('alibi2d')
    original = cls.position_bias
    monkeypatch.setattr(
        cls, 'position_bias',
        lambda self, grid: original(self, replace(grid, height=self.grid_size[0], width=self.grid_size[1])))
    row = by_name(probe(build('alibi2d'), picture()))['image of another shape', 'class logits, resized or not']
    assert row.verdict == 'fail' and row.change > 1e-4


@pytest.mark.parametrize('size, shape', [((4, 6), (6, 4)), ((4, 4), (2, 8)), ((7, 7), (1, 49)), ((1, 1), None)])
def test_another_shape(size, shape):
    assert _another_shape(*size) == shape


def test_images_that_are_mixed_fail(monkeypatch):
    cls = timm_sape.get_encoding('sape2_k')
    monkeypatch.setattr(cls, 'attend', timm_sape.PositionEncoding.attend)
    monkeypatch.setattr(cls, 'content_bias', lambda self, q, k, grid: (q @ k.mT).mean(dim=0))
    assert by_name(probe(build('sape2_k'), picture()))['image in a batch', 'class logits'].verdict == 'fail'


@pytest.mark.parametrize('axis, direction', [(0, 'down'), (1, 'right')])
def test_absolute_positions_along_one_axis_fail(monkeypatch, axis, direction):
    cls = timm_sape.get_encoding('alibi2d')
    position_bias = cls.position_bias

    def with_places(self, grid):
        bias = position_bias(self, grid)
        places = 0.1 * grid.coordinates(bias.device, bias.dtype)[:, axis]  # [H*W], of the keys
        return bias + grid.between_tokens(places.expand(len(places), -1)[None])

    monkeypatch.setattr(cls, 'position_bias', with_places)
    rows = by_name(probe(build('alibi2d'), picture()))
    verdicts = {
        move: row.verdict for (move, what), row in rows.items()
        if move.startswith('patches shifted') and what == 'first layer, attention logits'}
    other = {'down': 'right', 'right': 'down'}[direction]
    assert verdicts == {f'patches shifted {direction}': 'fail', f'patches shifted {other}': 'pass'}


@pytest.mark.parametrize('seed', range(4))
def test_two_rows_are_exchanged_whatever_the_seed(seed):
    torch.manual_seed(0)
    model = timm.create_model('test_vit_sape2_k', img_size=(16, 24), patch_size=8, num_classes=10)
    randomize_encodings(model)
    rows = probe(model, picture()[:, :, :16, :24], seed)
    assert {row.verdict for row in rows} == {'pass', ''}
    assert by_name(rows)['rows exchanged', 'first layer, y bias'].change > 1e-3


def test_what_moves_nothing_is_left_out():
    model = timm.create_model('test_vit_ape', img_size=(8, 24), patch_size=8, num_classes=10)
    names = {row.probe for row in probe(model, picture()[:, :, :8, :24])}
    assert 'rows exchanged' not in names and 'patches mirrored' in names and 'patches permuted' in names
    model = timm.create_model('test_vit_ape', img_size=8, patch_size=8, num_classes=10)
    assert {row.probe for row in probe(model, picture()[:, :, :8, :8])} == {
        'image in a batch', 'image shifted by half a patch', 'image mirrored', 'image twice as large'}


@pytest.mark.parametrize('patch_size', [8, (4, 8)])
def test_moves_without_a_theorem(patch_size):
    """Their changes are those of the logits of an image that is moved by hand."""
    model, x = build('rope2d', patch_size=patch_size).double().eval(), picture().double()
    rows = by_name(probe(model, x))
    assert {row.verdict for row in rows.values()} == {'pass', ''}
    shifted = torch.cat([x[..., -4:], x[..., :-4]], dim=-1)
    mirrored = x[..., torch.arange(39, -1, -1)]
    resized = build('rope2d', img_size=(64, 80), patch_size=patch_size).double().eval()
    resized.load_state_dict(model.state_dict())
    for what, moved, other in (
            ('image shifted by half a patch', shifted, model), ('image mirrored', mirrored, model),
            ('image twice as large', F.interpolate(x, (64, 80), mode='bilinear'), resized)):
        before, after = model(x), other(moved)
        assert rows[what, 'class logits'].change == pytest.approx(((after - before).norm() / before.norm()).item())


def test_masked_logits_that_move():
    rows = by_name(probe(build('lookhere'), picture()))
    assert rows['patches permuted', 'first layer, attention logits'].change == math.inf


def test_stock_model():
    model = timm.create_model('vit_tiny_patch16_224', depth=2, img_size=64, num_classes=10)
    rows = probe(model, torch.randn(1, 3, 64, 64))
    assert len(rows) == 5 * 3 + 4 and not any(row.verdict for row in rows)


@pytest.mark.parametrize('pos_enc, expected', [('alibi2d', ''), ('ape+alibi2d', 'changes')])
def test_one_layer(pos_enc, expected):
    """The class token has no bias, so for it one layer is the same on permuted patches."""
    model = timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, depth=1, img_size=(32, 40), patch_size=8)
    randomize_encodings(model)
    rows = by_name(probe(model, picture()))
    assert rows['patches permuted', 'class logits'].expected == expected
    assert not any(row.verdict == 'fail' for row in rows.values())


@pytest.mark.parametrize('pos_enc', ['nope', 'sape2_k', 'rope2d'])
def test_a_base_with_a_position_of_its_own(pos_enc):
    """It has a table, which is no encoding of ours, so what holds of the encoding alone need not hold of the graft."""
    base = timm.create_model(
        'naflexvit_base_patch16_gap', img_size=(32, 40), patch_size=8, embed_dim=64, depth=1, num_heads=4,
        num_classes=10)
    rows = probe(timm_sape.graft(base, pos_enc), picture())
    assert {row.probe: row.verdict for row in rows if row.expected} == {'image in a batch': 'pass'}


def test_what_is_wrong():
    with pytest.raises(ValueError, match='Linear does not cut images into separate patches'):
        probe(nn.Linear(2, 2), picture())
    for name in ('pvt_v2_b0', 'vit_small_r26_s32_224'):  # patches that overlap, and those of a feature map
        with torch.device('meta'):
            model = timm.create_model(name)
        with pytest.raises(ValueError, match=f'{type(model).__name__} does not cut images into separate patches'):
            patch_size_of(model)
    with pytest.raises(ValueError, match='The image is 32x33, the model is made for 32x40'):
        probe(build('nope'), picture()[..., :33])
    with pytest.raises(ValueError, match=r'images must be \[B, C, height, width\], got \[3, 32, 40\]'):
        probe(build('nope'), picture()[0])


def test_a_model_that_does_not_pool_is_refused():
    """Its output is in the order of the patches, which the theorems of class logits are not about."""
    with pytest.raises(ValueError, match=r'Class logits must be \[B, classes\], got .* one with global_pool='):
        probe(build('nope', num_classes=0, global_pool=''), picture())


def test_a_model_that_computes_nan_is_refused():
    """Its theorems neither hold nor fail."""
    model = build('ape')
    model.blocks[0].attn.qkv.weight.data[0] = math.nan
    with pytest.raises(ValueError, match='logits that are not finite. Has its training diverged'):
        probe(model, picture())


@pytest.mark.parametrize('change, verdicts', [(4e-8, ('pass', 'fail')), (2e-6, ('fail', 'pass'))])
def test_rounding_is_no_change(change, verdicts):
    """4e-8 is what timm's float32 does to a trained table that is resampled."""
    assert tuple(ProbeRow('', '', change, expected).verdict for expected in ('0', 'changes')) == verdicts


def test_zeros_that_stay_zeros():
    """As the bias of tables that start at zero."""
    assert _change(torch.zeros(3), torch.zeros(3)) == 0


def test_another_default_device():
    model, images = build('ape'), picture()
    expected = probe(model, images)
    with torch.device('meta'):
        randomize_encodings(model, std=0)
        assert probe(model, images) == expected
