"""Rules for other sizes in whole models: saved, chosen when loaded, on both hosts, compiled and exported."""
import itertools
import math

import pytest
import timm
import torch
from batches import SIZES, Twins, batch, pictures
from common import COMPOSITIONS, PATCH, POS_ENCS, Maker, images, randomize
from test_compile_export import check_graph, check_step
from test_onnx import DEPRECATED, check_export
from timm.layers import set_reentrant_ckpt
from timm.models import save_for_hf
from torch.export import Dim

import timm_sape

RULES = {
    name: timm_sape.get_encoding(name).rules for name in timm_sape.list_encodings()
    if timm_sape.get_encoding(name).rules}
GRID, OTHER = (3, 5), (4, 7)


def keywords(name, rule):
    return {'pos_enc_kwargs': {name: {'resolution': rule}}}


NEW = [  # rules with code of their own on the way of a forward pass
    *(('rope2d', keywords('rope2d', rule)) for rule in ('ntk', 'yarn')),
    *(('rope2d_mixed', keywords('rope2d_mixed', rule)) for rule in ('ntk', 'yarn')),
    ('rope1d', keywords('rope1d', 'yarn')),
    ('alibi2d', keywords('alibi2d', 'slopes')),
    ('ape', {'logit_scaling': 'log'}),
    ('ape+rope2d_mixed+sape2_k', {**keywords('rope2d_mixed', 'yarn'), 'logit_scaling': 'log'}),
]
def seldom(cases, *often):
    """Parameters of tests that take ten seconds each: those whose index is not among `often` are marked `full`."""
    return [
        pytest.param(*case, id=f'{case[0]} {[*case[1].values()]}', marks=[] if i in often else pytest.mark.full)
        for i, case in enumerate(cases)]


@pytest.mark.parametrize('pos_enc', ['ape', 'ape2d', 'rpb', 'lape', 'rope2d', 'auto_ape', 'sincos2d'])
def test_resized_in_inference_mode(pos_enc):
    """Tensors that are made in it have no gradients later, some of them without an error."""
    make = Maker(pos_enc, GRID)
    expected, model = make(), make()
    size = OTHER[0] * PATCH, OTHER[1] * PATCH
    expected.set_input_size(size)
    with torch.inference_mode():
        model.set_input_size(size)
    for a, b in zip(step(model, images(OTHER)), step(expected, images(OTHER)), strict=True):
        torch.testing.assert_close(a, b)


# --- the trained grid ------------------------------------------------------------------------------------------------

def step(model, x):
    torch.manual_seed(0)
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.one_of(2)
@pytest.mark.parametrize('host', ['vit', pytest.param('naflexvit', marks=pytest.mark.full)])
@pytest.mark.parametrize('pos_enc', [pos_enc for pos_enc in POS_ENCS if 'toy' not in pos_enc])
def test_nothing_changes_on_the_trained_grid(pos_enc, host):
    """Logits and gradients, bit for bit, with every rule of every encoding, also with patches dropped."""
    make = Maker(pos_enc, GRID, host=host, patch_drop_rate=0.4)
    x = images(GRID)
    plain = make()
    own = plain.pos_enc_kwargs
    with_rules = [name for name in pos_enc.split('+') if timm_sape.get_encoding(name).rules]
    for mode in (False, True):
        expected = step(plain.train(mode), x)
        for rules in itertools.product(*(timm_sape.get_encoding(name).rules for name in with_rules)):
            chosen = {name: {**own.get(name, {}), 'resolution': rule} for name, rule in zip(with_rules, rules)}
            for scaling in ('constant', 'log'):
                model = make(pos_enc_kwargs={**own, **chosen}, logit_scaling=scaling)
                found = step(model.train(mode), x)
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (rules, scaling)


def test_models_without_a_factor_ask_for_none(monkeypatch):
    """Neither a call nor an operation more."""
    def used(*args, **kwargs):
        raise AssertionError('called')

    for cls in (timm_sape.encodings.LogitScaling, timm_sape.FrequencyEncoding):
        monkeypatch.setattr(cls, 'logit_factor', used)
    for pos_enc, kwargs in (('rope2d', keywords('rope2d', 'ntk')), ('rope2d_mixed', {}), ('ape', {})):
        make = Maker(pos_enc, GRID, dynamic_img_size=True, **kwargs)
        make()(images(OTHER))
    with pytest.raises(AssertionError, match='called'):
        Maker('ape', GRID, dynamic_img_size=True, logit_scaling='log')()(images(OTHER))


def test_tables_that_layers_share_are_resized():
    def make():
        model = Maker('rpb', GRID)()
        model.blocks[1].load_state_dict(model.blocks[0].state_dict())
        return model

    model, expected = make(), make()
    first, second = (block.attn.encodings['rpb'] for block in model.blocks)
    second.table = first.table
    for resized in (model, expected):
        resized.set_input_size((OTHER[0] * PATCH, OTHER[1] * PATCH))
    torch.testing.assert_close(model(images(OTHER)), expected(images(OTHER)))


@pytest.mark.parametrize('pos_enc', ['ape', 'ape2d', 'lape', 'rpb', 'cope', 'sape2_k'])
def test_frozen_tables_stay_frozen(pos_enc):
    """Also those of `sape2`, which has other tables where the trained grid is another one."""
    model = Maker(pos_enc, GRID)().requires_grad_(False)
    model.set_input_size((OTHER[0] * PATCH, OTHER[1] * PATCH))
    for encoding in model.position_encodings().values():
        if pos_enc == 'sape2_k':
            encoding.set_ref_grid_size(OTHER)
    assert not [key for key, p in model.named_parameters() if p.requires_grad]


# --- the factor ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('pos_enc', ['nope', 'ape', 'rope2d', 'sape2_k', 'irpe_qkv', 'pape'])
def test_log_scaling_is_another_scale(pos_enc):
    """Of each attention layer, for tokens of both kinds."""
    x = images(OTHER)
    make = Maker(pos_enc, GRID, dynamic_img_size=True, dtype=torch.float64)
    model, plain = make(logit_scaling='log'), make()
    for block in plain.blocks:
        block.attn.scale *= math.log(5 + 4 * 7) / math.log(5 + 3 * 5)
    out = model(x.double())
    torch.testing.assert_close(out, plain(x.double()), rtol=1e-10, atol=1e-10)
    assert (out - make()(x.double())).abs().max() > 1e-4


def test_blocks_need_the_position():
    model = Maker('ape', GRID, logit_scaling='log')()
    with pytest.raises(ValueError, match='cannot be called with tokens alone'):
        model.blocks[0](torch.zeros(1, 20, 32))
    Maker('ape', GRID)().blocks[0](torch.zeros(1, 20, 32))


@pytest.mark.parametrize('value', ['linear', None, True, 1])
@pytest.mark.parametrize('name', ['test_vit_pos_enc', 'test_naflexvit_pos_enc', 'vit_graft'])
def test_other_values(name, value):
    base = {'base': 'test_vit', 'pos_enc': 'nope'} if name == 'vit_graft' else {}
    if value is None:  # timm drops arguments that are None, so the default applies
        assert timm.create_model(name, logit_scaling=None, **base).logit_scaling == 'constant'
        return
    with pytest.raises(ValueError, match=f"logit_scaling must be 'constant' or 'log', got {value!r}"):
        timm.create_model(name, logit_scaling=value, **base)


# --- both hosts ------------------------------------------------------------------------------------------------------

@pytest.mark.one_of(2)
@pytest.mark.parametrize('scaling', ['constant', 'log'])
@pytest.mark.parametrize('pos_enc, rule', [
    *((name, rule) for name, rules in RULES.items() for rule in rules[1:] if name != 'ope'), ('nope', None),
    ('ape', None), ('auto_rope2d', 'yarn'), ('rope2d_mixed+sape2_k', 'yarn')])
def test_each_image_has_the_rule_of_its_own_size(pos_enc, rule, scaling):
    """A batch of images of many sizes on NaFlexVit, against each of them alone on the plain host."""
    name = pos_enc.split('+')[0]
    kwargs = {'logit_scaling': scaling, **({} if rule is None else keywords(name, rule))}
    twins = Twins(pos_enc)
    plain = twins(**kwargs)
    naflex = twins.naflex(plain, **kwargs)
    mixed = pictures(SIZES)
    expected = torch.cat([plain(image) for image in mixed])
    found = naflex(batch(mixed, permute=True, padding=3))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    other = twins(**{**kwargs, 'logit_scaling': 'log' if scaling == 'constant' else 'constant'})
    assert (torch.cat([other(image) for image in mixed]) - expected).abs().max() > 1e-5


def test_factors_of_images_are_not_rounded():
    """In half precision they have all digits, as the number has that images of one size share."""
    model = Maker('nope', GRID, host='naflexvit', logit_scaling='log')().bfloat16()
    _, position = model.embed(batch([image.bfloat16() for image in pictures(SIZES)]))
    expected = [math.log(5 + h * w) / math.log(5 + math.prod(GRID)) for h, w in SIZES]
    assert position.logit_factor[:, 0, 0, 0].tolist() == pytest.approx(expected)


# --- compile and export ----------------------------------------------------------------------------------------------

@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize('pos_enc, kwargs', seldom(NEW))
def test_compile(pos_enc, kwargs, fresh_compiler):
    """One graph, forward and backward, on the trained grid and on two others, where sizes become symbolic."""
    model = Maker(pos_enc, GRID, dynamic_img_size=True, depth=1, **kwargs)()
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    for grid in (GRID, OTHER, (6, 2)):
        check_step(compiled, model, images(grid))


@pytest.mark.parametrize('pos_enc, kwargs', seldom(NEW, 0, 7))
def test_export(pos_enc, kwargs):
    if 'ntk' in str(kwargs) and torch.__version__ < (2, 13):
        pytest.skip('what torch 2.11 and 2.12 export of a power refuses the trained grid, where the base is 1')
    model = Maker(pos_enc, GRID, dynamic_img_size=True, depth=1, **kwargs)()
    shapes = {0: Dim('batch', max=64), 2: PATCH * Dim('height', max=64), 3: PATCH * Dim('width', max=64)}
    program = torch.export.export(model, (images((4, 6)),), dynamic_shapes={'x': shapes})
    check_graph(program)
    with torch.no_grad():
        for grid in ((4, 6), (7, 3), GRID, (2, 4)):
            x = images(grid)
            torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings(*DEPRECATED)
@pytest.mark.parametrize('dynamo', [True, False])
@pytest.mark.parametrize('pos_enc, kwargs', seldom([
    *(case for case in NEW if 'ape' not in case[0]), ('nope', {'logit_scaling': 'log'})]))
def test_onnx(pos_enc, kwargs, dynamo, tmp_path):
    model = Maker(pos_enc, GRID, dynamic_img_size=True, depth=1, **kwargs)()
    check_export(model, tmp_path / 'model.onnx', images((4, 6)), images((7, 3), 3), images(GRID, 1), dynamo=dynamo)


@pytest.mark.parametrize('pos_enc, kwargs', seldom(NEW, *range(8)))
def test_checkpointing_and_autocast(pos_enc, kwargs):
    model = Maker(pos_enc, GRID, dynamic_img_size=True, **kwargs)()
    x = images(OTHER)
    expected = step(model, x)
    model.set_grad_checkpointing()
    for reentrant in (False, True):
        set_reentrant_ckpt(reentrant)
        try:
            found = step(model, x)
        finally:
            set_reentrant_ckpt(False)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with torch.autocast('cpu', torch.bfloat16):
        narrow = model(x)
    assert (narrow - expected[0]).abs().max() < 0.1 * expected[0].abs().max() + 0.05


# --- saving and loading ----------------------------------------------------------------------------------------------

def build(pos_enc, rule=None, **kwargs):
    if rule is not None:
        kwargs.update(keywords(pos_enc, rule))
    return Maker(pos_enc, GRID, **kwargs)()


def load(folder, **kwargs):
    return timm.create_model(f'local-dir:{folder}', pretrained=True, **kwargs).eval()


@pytest.mark.parametrize('name', ['rope2d', 'rope2d_mixed', 'alibi2d', 'sincos2d'])
def test_every_rule_is_chosen_when_loading(name, tmp_path):
    """From every rule to every other one, with the trained parameters."""
    for trained in RULES[name]:
        folder = tmp_path / trained
        save_for_hf(build(name, trained), folder, safe_serialization=True)
        for rule in RULES[name]:
            model = load(folder, img_size=(32, 56), **keywords(name, rule))
            expected = build(name, rule)
            expected.set_input_size((32, 56))
            assert torch.equal(model(images(OTHER)), expected(images(OTHER))), (trained, rule)
            needs_grid = {rule, trained} != {'extrapolate'}  # or needed it when it was saved
            assert model._model_args.get('ref_grid_size') == (list(GRID) if needs_grid else None)


@pytest.mark.parametrize('size', [{'img_size': (32, 56)}, {}])
def test_rule_chosen_after_resizing_and_saving(size, tmp_path):
    """The file counts as trained at its size, unless the trained grid was given before it was saved."""
    save_for_hf(build('rope2d'), tmp_path / 'trained', safe_serialization=True)
    expected = load(tmp_path / 'trained', img_size=(32, 56), **keywords('rope2d', 'rescale'))(images(OTHER))
    for given in ({}, {'ref_grid_size': GRID}):
        resized = load(tmp_path / 'trained', **size, **given)
        if not size:
            resized.set_input_size((32, 56))
        save_for_hf(resized, tmp_path / 'resized', safe_serialization=True)
        again = load(tmp_path / 'resized', **keywords('rope2d', 'rescale'))
        torch.testing.assert_close(again(images(OTHER)), expected if given else resized(images(OTHER)))
    assert (resized(images(OTHER)) - expected).abs().max() > 1e-3


def test_ramp_is_chosen_when_loading(tmp_path):
    save_for_hf(build('rope2d'), tmp_path, safe_serialization=True)
    kwargs = {'pos_enc_kwargs': {'rope2d': {'resolution': 'yarn', 'ramp': [0.1, 0.5]}}}
    model, expected = load(tmp_path, img_size=(32, 56), **kwargs), Maker('rope2d', GRID, **kwargs)()
    expected.set_input_size((32, 56))
    assert torch.equal(model(images(OTHER)), expected(images(OTHER)))
    assert not torch.equal(model(images(OTHER)), load(
        tmp_path, img_size=(32, 56), **keywords('rope2d', 'yarn'))(images(OTHER)))


@pytest.mark.parametrize('pos_enc', ['nope', 'ape', 'rope2d', 'rpb+sape2_k'])
@pytest.mark.parametrize('host', ['vit', 'naflexvit'])
def test_log_scaling_is_chosen_when_loading(host, pos_enc, tmp_path):
    """On and off, and on again from what was saved at another size: N0 is still that of training."""
    for trained in ('constant', 'log'):
        folder = tmp_path / trained
        save_for_hf(Maker(pos_enc, GRID, host=host, logit_scaling=trained)(), folder, safe_serialization=True)
        for scaling in ('constant', 'log'):
            model = load(folder, img_size=(32, 56), logit_scaling=scaling)
            expected = Maker(pos_enc, GRID, host=host, logit_scaling=scaling)()
            if host == 'vit':
                expected.set_input_size((32, 56))
            torch.testing.assert_close(model(images(OTHER)), expected(images(OTHER)), rtol=1e-6, atol=1e-6)
            assert model.logit_scaling == scaling == model._model_args.get('logit_scaling', 'constant')
            again = folder.with_name(f'{trained}-{scaling}')
            save_for_hf(model, again, safe_serialization=True)
            assert torch.equal(load(again)(images(OTHER)), model(images(OTHER)))
            if scaling == 'log':
                assert load(again).ref_grid_size == GRID


def test_bare_files_tell_the_trained_grid(tmp_path):
    """It is among their entries if they had the factor. Else it has to be given."""
    kwargs = dict(pos_enc='rope2d', patch_size=8, num_classes=3, embed_dim=32, depth=2, reg_tokens=4, global_pool='avg')
    for scaling in ('constant', 'log'):
        model = Maker('rope2d', GRID, logit_scaling=scaling)()
        torch.save(model.state_dict(), tmp_path / f'{scaling}.pth')
        model.set_input_size((32, 56))
    expected = model(images(OTHER))

    def load_bare(file, **given):
        overlay = dict(file=str(tmp_path / f'{file}.pth'), num_classes=3)
        return timm.create_model(
            'test_vit_pos_enc', img_size=(32, 56), pretrained=True, pretrained_cfg_overlay=overlay, fc_norm=False,
            **kwargs, **given).eval()

    assert torch.equal(load_bare('log', logit_scaling='log')(images(OTHER)), expected)
    with pytest.raises(ValueError, match=r'lacks encodings.logit_scaling._extra_state.*give ref_grid_size=\(H, W\)'):
        load_bare('constant', logit_scaling='log')
    found = load_bare('constant', logit_scaling='log', ref_grid_size=GRID)
    assert torch.equal(found(images(OTHER)), expected)
    assert not torch.equal(load_bare('log')(images(OTHER)), expected)


@pytest.mark.parametrize('trained, wanted', [('log', 'constant'), ('constant', 'log')])
def test_direct_loading_refuses_another_factor(trained, wanted):
    """The message tells the argument that fits."""
    state = Maker('rope2d', GRID, logit_scaling=trained)().state_dict()
    with pytest.raises(ValueError, match=f"its entries show logit_scaling='{trained}'"):
        Maker('rope2d', GRID, logit_scaling=wanted)().load_state_dict(state)


@pytest.mark.parametrize('rule', ['ntk', 'yarn'])
def test_direct_loading_takes_any_rule_that_has_a_grid(rule):
    """A file tells that it has a rule with a grid, but not which."""
    state = build('rope2d', 'rescale').state_dict()
    model = build('rope2d', rule)
    model.load_state_dict(state)
    with pytest.raises(ValueError, match="its entries show pos_enc_kwargs={'rope2d': {'resolution': 'rescale'}}"):
        build('rope2d').load_state_dict(state)
    with pytest.raises(ValueError, match="its entries show pos_enc_kwargs={'rope2d': {'resolution': 'extrapolate'}}"):
        model.load_state_dict(build('rope2d').state_dict())


# --- grafts ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('base, name', [
    ('test_vit', 'ape'), ('vit_small_patch16_rope_224', 'rope2d'),
    ('vit_small_patch16_rope_mixed_ape_224', 'rope2d_mixed'), ('vit_small_patch16_dinov3', None)])
def test_models_of_timm(base, name, tmp_path):
    """Converted by a graft of nothing: rules of the encodings that they then have, and the factor."""
    sizes = dict(depth=1, embed_dim=32, num_heads=2) if base != 'test_vit' else {}
    stock = randomize(timm.create_model(base, num_classes=3, img_size=64, **sizes)).eval()
    model = timm_sape.graft(stock, 'nope')
    trained = model.grid_size
    save_for_hf(model, tmp_path / 'graft', safe_serialization=True)
    x, y = torch.randn(1, 3, 64, 64), torch.randn(1, 3, 96, 128)
    outs = []
    for rule in (timm_sape.get_encoding(name).rules if name else ()) or (None,):
        for scaling in ('constant', 'log'):
            kwargs = {'logit_scaling': scaling, **({} if rule is None else keywords(name, rule))}
            torch.testing.assert_close(load(tmp_path / 'graft', **kwargs)(x), stock(x), rtol=1e-4, atol=1e-5)
            other = load(tmp_path / 'graft', img_size=(96, 128), **kwargs)
            assert other.ref_grid_size == (
                None if scaling == 'constant' and rule in (None, 'extrapolate') else trained)
            outs.append(other(y))
            save_for_hf(other, tmp_path / f'{rule}-{scaling}', safe_serialization=True)
            assert torch.equal(load(tmp_path / f'{rule}-{scaling}')(y), outs[-1])
    assert len(outs) == 2 * (4 if name in RULES else 1)
    assert all((a - b).abs().max() > 1e-6 for i, a in enumerate(outs) for b in outs[:i])


def test_compositions_build():
    for pos_enc in COMPOSITIONS:
        if 'toy' not in pos_enc:
            Maker(pos_enc, GRID, logit_scaling='log')()(images(GRID))
