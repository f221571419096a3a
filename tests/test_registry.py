"""Names: which can be registered, which users can type, and third-party encodings in a model."""
import argparse
import inspect
import json
import re
import shlex
import warnings
from abc import ABC, abstractmethod

import pytest
import timm
import torch
import torch.nn as nn
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.utils import ParseKwargs

import timm_sape
from harness import assert_near
from timm_sape import PositionEncoding, create_encoding, list_encodings, register_encoding
from timm_sape.encodings import registry
from timm_sape.encodings.base import rotation_table
from timm_sape.position import LayerEncodings, SharedEncodings

HOST = dict(dim=64, num_heads=4, grid_size=(4, 4), num_prefix_tokens=1)

pytestmark = pytest.mark.usefixtures('own_registry')


def build(pos_enc, pos_enc_kwargs=None, model='test_vit_pos_enc', **kwargs):
    kwargs = {'img_size': 32, 'patch_size': 8, **kwargs}
    return timm.create_model(model, pos_enc=pos_enc, pos_enc_kwargs=pos_enc_kwargs, **kwargs)


# --- names -----------------------------------------------------------------------------------------------------------

def test_known_encodings():
    names = list_encodings()
    assert names == sorted(names)
    assert {'ape', 'cope', 'nope', 'rope2d', 'rope2d_mixed', 'sape2_k', 'sape2_q', 'sape2_qk'} <= set(names)
    assert len(names) >= 42
    assert 'sape2' not in names
    assert list_encodings(aliases=True) == sorted([*names, *registry.names._aliases])
    assert {'sape2_k', 'sape2_q', 'sape2_qk'} <= set(list_encodings('sape2*'))
    assert not {'ape', 'rope2d'} & set(list_encodings('sape2*'))
    assert 'sape2' in list_encodings('sape2*', aliases=True)
    assert list_encodings('rope2d') == ['rope2d']
    assert list_encodings('no such*') == []


@pytest.mark.parametrize('name', list_encodings(aliases=True))
def test_created_by_name(name):
    encoding = create_encoding(name, **HOST)
    assert isinstance(encoding, PositionEncoding)
    assert type(encoding) is registry.get_encoding(name)
    assert type(encoding).__doc__ and type(encoding).adds and type(encoding).on_other_grids  # the documentation's table


@pytest.mark.parametrize('name', list_encodings())
def test_help(name):
    """`help` of an encoding begins with its full name and describes all keywords, including those of its bases."""
    doc = inspect.getdoc(registry.get_encoding(name))
    title = registry.encoding_title(name)
    assert 5 < len(title) <= 52 and doc.startswith(f'{title}.') and doc.count('\n\nInherited keywords:\n') <= 1
    assert [registry.encoding_title(other) for other in list_encodings()].count(title) == 1
    for keyword in timm_sape.encoding_keywords(name):
        assert len(re.findall(rf'^    {keyword}: \S', doc, re.MULTILINE)) == 1, keyword


def test_help_of_a_third_party():
    class Base(timm_sape.CoordinateEncoding):
        """Not registered.

        Args:
            strength: How much,
                or how little.
            colour: Overridden below.
        """
        def __init__(self, *, strength=1.0, colour='red', **host):
            super().__init__(**host)

        def position_bias(self, grid):
            return torch.zeros(())

    @register_encoding('mine')
    class Mine(Base):
        """My own.

        Args:
            colour: Of mine.
        """
        def __init__(self, *, colour='blue', **host):
            super().__init__(**host)

    @register_encoding('silent')
    class Silent(Mine):
        pass

    assert registry.encoding_title('mine') == 'My own' and registry.encoding_title('silent') == ''
    assert Mine.__doc__.startswith('My own.\n\nArgs:\n    colour: Of mine.\n\nInherited keywords:\n    resolution: ')
    assert Mine.__doc__.endswith('\n    strength: How much,\n        or how little.')
    assert Silent.__doc__ is None and inspect.getdoc(Silent) == Mine.__doc__


def test_sape2_is_sape2_k():
    assert registry.get_encoding('sape2') is registry.get_encoding('sape2_k')


def test_register():
    @register_encoding('mine', aliases=('my_own', 'm2'))
    class Mine(PositionEncoding):
        pass

    for name in ('mine', 'my_own', 'm2'):
        assert type(create_encoding(name, **HOST)) is Mine
    assert 'mine' in list_encodings()
    assert {'mine', 'my_own', 'm2'} <= set(list_encodings(aliases=True))
    assert 'm2' not in list_encodings()
    assert build('m2+ape').pos_enc == 'ape+mine'
    assert Mine.__name__ == 'Mine'  # the decorator returns the class


@pytest.mark.parametrize('name, aliases, taken', [
    ('ape', (), 'ape'),
    ('sape2', (), 'sape2'),
    ('mine', ('cope',), 'cope'),
    ('mine', ('fine', 'sape2'), 'sape2'),
])
def test_taken_names(name, aliases, taken):
    before = list_encodings(aliases=True)
    with pytest.raises(ValueError, match=f"'{taken}' is already registered"):
        register_encoding(name, aliases=aliases)(type('Mine', (PositionEncoding,), {}))
    assert list_encodings(aliases=True) == before


@pytest.mark.parametrize('aliases', [('mine',), ('fine', 'fine')])
def test_one_name_twice(aliases):
    before = list_encodings(aliases=True)
    with pytest.raises(ValueError, match=f"'{aliases[0]}'"):
        register_encoding('mine', aliases=aliases)(type('Mine', (PositionEncoding,), {}))
    assert list_encodings(aliases=True) == before


def test_a_second_name():
    cls = register_encoding('mine')(type('Mine', (PositionEncoding,), {}))
    message = r"registered as 'mine' already. .*\('mine', aliases=\['yours'\]\), or .*subclass"
    with pytest.raises(ValueError, match=message):
        register_encoding('yours')(cls)
    assert cls.name == 'mine' and 'yours' not in list_encodings()
    assert register_encoding('mine')(cls) is cls  # a cell of a notebook, run twice
    register_encoding('yours')(type('Yours', (cls,), {}))
    assert (cls.name, registry.get_encoding('yours').name) == ('mine', 'yours')


def test_taken_name_says_by_whom():
    with pytest.raises(ValueError, match=r"'sape2'.*by timm_sape.encodings.sape2.*PositionEncodingK. Choose another"):
        register_encoding('sape2')(type('Mine', (PositionEncoding,), {}))
    register_encoding('mine')(type('Mine', (PositionEncoding,), {}))
    with pytest.raises(ValueError, match="'mine' is already registered"):
        register_encoding('mine')(type('Other', (PositionEncoding,), {}))


def test_a_cell_run_again():
    """A class of the same name from the same module replaces the old one, as in a notebook."""
    for _ in range(2):
        cls = register_encoding('mine', aliases=('too',))(type('Mine', (PositionEncoding,), {}))
        assert timm_sape.get_encoding('mine') is timm_sape.get_encoding('too') is cls


@pytest.mark.parametrize('first, second', [
    (('mine', ('too',)), ('too', ())), (('mine', ()), ('too', ('mine',))), (('mine', ('too',)), ('mine', ()))])
def test_a_cell_run_again_with_other_names(first, second):
    """A name is of the last class that has it, and in no list twice; an alias that was taken away is gone."""
    for name, aliases in (first, second):
        cls = register_encoding(name, aliases=aliases)(type('Mine', (PositionEncoding,), {}))
    names = [name for name in list_encodings(aliases=True) if name in ('mine', 'too')]
    assert len(names) == len(set(names)) and {second[0], *second[1]} <= set(names)
    assert all(timm_sape.get_encoding(each) is cls for each in (second[0], *second[1]))
    assert ('too' in names) is (second[0] != 'mine')


def test_what_authors_forget():
    """Each has a message in one line: a required method, the table, tokens that are missing in a bias."""
    class Forgetful(timm_sape.FixedEncoding):
        pass

    with pytest.raises(ValueError, match=r'Forgetful must define compute\(self, grid: .*: The table of a whole grid'):
        register_encoding('mine')(Forgetful)

    class NoDocstring(PositionEncoding, ABC):
        @abstractmethod
        def table(self, grid):
            pass

        def embed(self, x, grid):
            return self.table(grid)

    with pytest.raises(ValueError, match=r'NoDocstring must define table\(self, grid\): it is abstract'):
        register_encoding('mine')(NoDocstring)

    class NoTable(timm_sape.FixedEncoding):
        def compute(self, grid, device, dtype):
            return grid.coordinates(device, dtype)

    register_encoding('mine')(NoTable)
    with pytest.raises(ValueError, match=r"'mine': call self.make_table\(\) at the end of the constructor of NoTable"):
        build('mine')

    class NoPrefix(PositionEncoding):
        def position_bias(self, grid):
            return torch.zeros(grid.num_patches, grid.num_patches)

    register_encoding('yours')(NoPrefix)
    says = r"'yours': position_bias returned \[16, 16\],.* = \[1, 4, 17, 17\], with 1 prefix .* grid.between_tokens"
    with pytest.raises(ValueError, match=says):
        build('yours')(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize('name', ['', 'Mine', 'my-own', 'my own', 'ape+mine', '2d', '_mine', 'my.own', 'mine\n'])
def test_malformed_names(name):
    before = list_encodings(aliases=True)
    for kwargs in (dict(name=name), dict(name='mine', aliases=(name,)), dict(name='mine', aliases=(1,))):
        with pytest.raises(ValueError, match='use lowercase letters, digits and underscores'):
            register_encoding(**kwargs)(type('Mine', (PositionEncoding,), {}))
    assert list_encodings(aliases=True) == before


@pytest.mark.parametrize('cls', [nn.Module, dict, lambda **host: None, PositionEncoding(**HOST)])
def test_not_an_encoding(cls):
    with pytest.raises(ValueError, match="'mine'.*is not a subclass of timm_sape.PositionEncoding"):
        register_encoding('mine')(cls)
    assert 'mine' not in list_encodings()


@pytest.mark.parametrize('hook, per_layer', [
    ('mix', True), ('layer_embed', True), ('content_bias', False), ('attend', False), ('channels', False),
    ('values', False), ('turn', False)])
def test_shared_where_it_cannot_be(hook, per_layer):
    says = f"'mine' overrides '{hook}', so its class must set per_layer = {not per_layer}"
    with pytest.raises(ValueError, match=says):
        register_encoding('mine')(type('Mine', (PositionEncoding,), {
            'per_layer': per_layer, hook: lambda self, *args: None}))
    assert 'mine' not in list_encodings()


def test_a_factor_of_the_logits_needs_no_flag():
    class Sharper(PositionEncoding):
        per_layer = False

        def logit_factor(self, grid):
            return 3.

    register_encoding('mine')(Sharper)
    plain, mine = build('nope'), build('mine')
    mine.load_state_dict(plain.state_dict())
    for block in plain.blocks:
        block.attn.scale *= 3
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(mine(x), plain(x))


@pytest.mark.parametrize('members, says', [
    ({'position_bia': lambda self, grid: None}, "'position_bia', which nothing calls.*hook 'position_bias', rename it"),
    ({'position_bias': lambda self, grid: None, 'content_bais': lambda *args: None}, "the hook 'content_bias', rename"),
    ({'my_bias': lambda self, grid: None}, 'overrides no hook, so it would do nothing. The hooks are embed, mix'),
    (
        {'position_bias': lambda self, grid: None, '__init__': lambda self, *, slope=0.1: None},
        r'must take what the model passes, such as depth\..*super\(\).__init__\(\*\*host\)'),
    (
        {'position_bias': lambda self, q, grid: None},
        r"cannot call Mine.position_bias \(missing a required argument: 'q'\). Write def position_bias\(self, grid\)"),
    ({'content_bias': lambda self, q, grid: None}, r'Write def content_bias\(self, q, k, grid\)'),
    ({'embed': lambda self, x: None}, r'Write def embed\(self, x, grid\)'),
    ({'attend': lambda *args, **kwargs: None}, "'attend', which only computes .*Override 'content_bias' as well"),
])
def test_slips_that_would_be_silent_or_a_riddle(members, says):
    with pytest.raises(ValueError, match=says):
        register_encoding('mine')(type('Mine', (PositionEncoding,), members))
    assert 'mine' not in list_encodings()


@pytest.mark.parametrize('name, text', [
    ('sape2k', "Unknown position encoding 'sape2k'. Did you mean .*'sape2_k'"),
    ('rope', "Unknown position encoding 'rope'. Did you mean .*'rope2d'"),
    ('auto_rope2', "Unknown position encoding 'auto_rope2'. Did you mean .*'auto_rope2d'"),
    ('APE', "Unknown position encoding 'APE'"),
    ('ape rope2d', "Unknown position encoding 'ape rope2d'. Join names with '[+]'"),
    ('ape,rope2d', "Join names with '[+]', e.g. 'ape[+]sape2_k'"),
    ('xyzzy', "Unknown position encoding 'xyzzy'. If it is your own, .* Known: alibi2d, ape, .*sape2_qk"),
])
def test_unknown_names(name, text):
    for create in (lambda: create_encoding(name, **HOST), lambda: build(name), lambda: build(f'ape+{name}')):
        with pytest.raises(ValueError, match=text):
            create()


@pytest.mark.parametrize('name', [None, 5, ['ape']])
def test_a_name_is_a_string(name):
    for look_up in (create_encoding, timm_sape.get_encoding, timm_sape.encoding_keywords):
        with pytest.raises(ValueError, match="The name of an encoding is a string such as 'rope2d', got"):
            look_up(name)


def test_unknown_name_says_how_to_import():
    with pytest.raises(ValueError, match='If it is your own, import its module first; .*: timm-sape .* --import'):
        registry.get_encoding('my_encoding')


@pytest.mark.parametrize('name, keyword, text', [
    ('sape2_k', 'gate', "'sape2_k' has no keyword 'gate'. It accepts: "
        'bias_init, bias_scale, gate_scale, npos, preset, separate_keys, table_std'),
    ('cope', 'preset', "'cope' has no keyword 'preset'. It accepts: bias_scale, direction, npos"),
    ('rope2d', 'base', "'rope2d' has no keyword 'base'. It accepts: ramp, resolution"),
    ('ape', 'init', "'ape' has no keyword 'init'. It accepts no keywords"),
    ('cape', 'resolution', "no keyword 'resolution'. It has one rule for other sizes, so leave that out."),
    ('auto_ape', 'gate', "'auto_ape' has no keyword 'gate'. It accepts: init"),
    ('nope', 'npos', "'nope' has no keyword 'npos'. It accepts no keywords"),
])
def test_unknown_keywords(name, keyword, text):
    with pytest.raises(ValueError, match=text):
        create_encoding(name, **HOST, **{keyword: 1})
    with pytest.raises(ValueError, match=text):
        build(name, {name: {keyword: 1}})


@pytest.mark.parametrize('host, message', [
    (dict(num_heads=5), 'is not divisible by num_heads=5'), (dict(grid_size=4), r'grid_size must be \(H, W\).*got 4'),
    (dict(grid_size=(4, 4, 4)), r'grid_size must be \(H, W\)'), (dict(num_heads=0), 'not divisible by num_heads=0'),
    (dict(grid_size='ab'), r"grid_size must be \(H, W\).*got 'ab'")])
@pytest.mark.parametrize('name', ['ape', 'sape2_k', 'rope2d', 'auto_rpb'])
def test_the_host_is_checked(name, host, message):
    with pytest.raises(ValueError, match=message):
        create_encoding(name, **{**HOST, **host})


@pytest.mark.parametrize('keyword', ['dim', 'grid_size', 'layer', 'ref_grid_size', 'device'])
def test_keywords_of_the_host_are_not_for_users(keyword):
    with pytest.raises(ValueError, match=f"'cope' has no keyword '{keyword}'. It accepts: bias_scale, direction, npos"):
        build('cope', {'cope': {keyword: 1}})


def test_keywords_of_base_classes_are_accepted():
    class Base(PositionEncoding):
        def __init__(self, *, strength=1.0, **host):
            super().__init__(**host)
            self.strength = strength

        def position_bias(self, grid):
            return torch.zeros(())

    @register_encoding('mine')
    class Mine(Base):
        def __init__(self, *, colour='red', **host):
            super().__init__(**host)
            self.colour = colour

    encoding = create_encoding('mine', strength=2.0, colour='blue', **HOST)
    assert (encoding.strength, encoding.colour) == (2.0, 'blue')
    with pytest.raises(ValueError, match="'mine' has no keyword 'size'. It accepts: colour, strength."):
        create_encoding('mine', size=3, **HOST)


# --- what users type -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('typed, saved', [
    ('nope', 'nope'),
    ('sape2', 'sape2_k'),
    ('sape2+ape', 'ape+sape2_k'),
    (' sape2 + ape', 'ape+sape2_k'),
    ('ape+sape2_k', 'ape+sape2_k'),
    ('sape2_q+rope2d+ape+cope', 'ape+cope+rope2d+sape2_q'),
    ('rope2d_mixed+ape', 'ape+rope2d_mixed'),
])
def test_one_spelling(typed, saved):
    model = build(typed)
    assert model.pos_enc == saved
    assert '+'.join(registry.parse_pos_enc(typed)) == saved


def test_one_spelling_of_keywords():
    expected = {'sape2_k': {'bias_scale': 'learned', 'npos': 9}}
    for part in ('sape2', 'sape2_k'):
        keywords = {part: {'npos': 9, 'bias_scale': 'learned'}, 'ape': {}}
        model = build('sape2+ape', keywords)
        assert model.pos_enc_kwargs == expected
        assert json.loads(json.dumps(model.pos_enc_kwargs)) == expected
        assert keywords == {part: {'npos': 9, 'bias_scale': 'learned'}, 'ape': {}}  # not changed
    encoding = model.blocks[1].attn.encodings['sape2_k']
    assert encoding.table_x.shape == (9, 16) and encoding.gain is not None


def test_keywords_are_copied():
    keywords = {'sape2_k': {'npos': 9}}
    model = build('sape2_k', keywords)
    keywords['sape2_k']['npos'] = 3
    assert model.pos_enc_kwargs == {'sape2_k': {'npos': 9}}


@pytest.mark.parametrize('pos_enc, pos_enc_kwargs, text', [
    ('rope2d+rope2d_mixed', None, 'two rotations, rope2d and rope2d_mixed. Keep one'),
    ('rope2d+ape+rope2d_mixed', None, 'two rotations'),
    ('nope+ape', None, "'nope' means no position encoding and cannot be combined"),
    ('sape2_k+nope', None, "'nope' means no position encoding and cannot be combined"),
    ('ape+ape', None, "names 'ape' more than once"),
    ('sape2+ape+sape2_k', None, "names 'sape2_k' more than once"),
    ('nope+nope', None, "names 'nope' more than once"),
    ('', None, "pos_enc='' has an empty part. Write e.g. 'ape\\+sape2_k', or 'nope' for none"),
    ('+ape', None, "pos_enc='\\+ape' has an empty part"),
    ('ape+', None, 'has an empty part'),
    ('ape++cope', None, 'has an empty part'),
    (3, None, "pos_enc must be a string such as 'ape\\+sape2_k', got 3"),
    (['ape', 'cope'], None, 'pos_enc must be a string'),
    ('ape', {'cope': {'npos': 9}}, "keywords for 'cope', which is not a part of pos_enc='ape'"),
    ('ape+cope', {'sape2': {}}, "keywords for 'sape2', which is not a part of"),
    ('ape', {'capo': {}}, "Unknown position encoding 'capo'"),
    ('sape2_k', {'sape2': {'npos': 9}, 'sape2_k': {'npos': 9}}, "'sape2_k' under two names. Give them once"),
    ('cope', {'npos': 9}, "must map parts to their keywords, e.g. .*, got {'npos': 9}"),
    ('cope', {'cope': 9}, 'must map parts to their keywords'),
    ('cope', ['npos'], 'must map parts to their keywords'),
    ('cope', {'cope': {'npos': torch.tensor(9)}}, 'must be plain JSON, so that it can be saved.*Tensor'),
    ('cope', {'cope': {'npos': {9}}}, 'must be plain JSON.*set'),
    ('cope', {'cope': {'npos': nn.Linear}}, 'must be plain JSON'),
])
def test_conflicts(pos_enc, pos_enc_kwargs, text):
    """Refused before anything is built."""
    with pytest.raises(ValueError, match=text):
        build(pos_enc, pos_enc_kwargs)
    with pytest.raises(ValueError, match=text):
        registry.parse_pos_enc(pos_enc, pos_enc_kwargs)


def parsed(*words):
    """Words after `--model-kwargs`, as timm's scripts parse them."""
    parser = argparse.ArgumentParser()
    parser.add_argument('--model-kwargs', nargs='*', action=ParseKwargs)
    return parser.parse_args(['--model-kwargs', *words]).model_kwargs['pos_enc_kwargs']


@pytest.mark.parametrize('text, meant', [
    ('{sape2_k:{preset:equations}}', {'sape2_k': {'preset': 'equations'}}),
    ('{sape2_k: {npos: 9, bias_scale: -1e-3}}', {'sape2_k': {'npos': 9, 'bias_scale': -1e-3}}),
    ('{"rope_dinov3": {"rescale": null}, "irpe_k": {"shared_heads": false}}',
        {'rope_dinov3': {'rescale': None}, 'irpe_k': {'shared_heads': False}}),
    ('preset:equations', {'sape2_k': {'preset': 'equations'}}),  # unclear what is meant, so the message has an example
    ('{npos:9}', {'sape2_k': {'preset': 'equations'}}),
    ('{{{', {'sape2_k': {'preset': 'equations'}}),
])
def test_keywords_that_lost_their_quotes(text, meant):
    """The message contains the words to type, which timm's parser and a shell understand."""
    arrived = parsed(f'pos_enc_kwargs={text}')
    assert arrived == text  # timm did not understand it
    with pytest.raises(ValueError, match='must map parts to their keywords, got the text') as error:
        registry.parse_pos_enc('sape2_k', arrived)
    option, words = shlex.split(re.search('--model-kwargs .*', str(error.value))[0].removesuffix('.'))
    assert option == '--model-kwargs' and parsed(words) == meant


def test_third_party_rotation_conflicts():
    register_encoding('spin')(type('Spin', (PositionEncoding,), {'rotation': lambda self, grid: None}))
    with pytest.raises(ValueError, match='two rotations, spin and rope2d'):
        build('spin+rope2d')


# --- third-party encodings at work -----------------------------------------------------------------------------------

class Toy(PositionEncoding):
    """An encoding that knows its layer, and has a parameter that is different in each instance."""

    def __init__(self, *, strength=1.0, layer=0, device=None, dtype=None, **host):
        super().__init__(layer=layer, **host)
        self.strength = strength
        self.weight = nn.Parameter(torch.full((1,), 1.0 + layer, device=device, dtype=dtype))

    @property
    def amount(self):
        return self.strength * self.weight


class Embed(Toy):
    """Tokens of the lower rows are larger; each channel gets its own number."""
    per_layer = False

    def embed(self, x, grid):
        return self.amount * torch.arange(self.dim, dtype=x.dtype)

    def mix(self, x, term, grid):
        y = grid.coordinates(dtype=x.dtype)[:, 0]
        factor = torch.cat([torch.ones(grid.num_prefix_tokens, dtype=x.dtype), 1 + self.amount * y])[:, None]
        return x * factor, term


class FactorOnly(Toy):
    """Adds zeros, because `mix` is called only if something is added to the tokens."""
    per_layer = False

    def embed(self, x, grid):
        return torch.zeros(self.dim, dtype=x.dtype)

    def mix(self, x, term, grid):
        return x * (self.amount + 2), term


class Rotation(Toy):
    """The first pair of channels is rotated by x, the last by y, the others not at all."""

    def angles(self, grid):
        y, x = grid.coordinates(dtype=self.weight.dtype).unbind(-1)
        return torch.stack([x, *[0 * x] * (self.head_dim // 2 - 2), y], dim=-1) * self.amount

    def rotation(self, grid):
        return rotation_table(self.angles(grid))


class RotationPerHead(Rotation):
    def rotation(self, grid):
        per_head = torch.arange(1, 1 + self.num_heads, dtype=self.weight.dtype)[:, None, None]
        return rotation_table(per_head * self.angles(grid))


class Turn(Toy):
    """q and k are longer in columns further to the right."""
    per_layer = True

    def turn(self, q, k, grid):
        x = torch.cat([q.new_zeros(grid.num_prefix_tokens), grid.coordinates(dtype=q.dtype)[:, 1]])
        factor = 1 + self.amount * x[:, None]
        return q * factor, k * factor


class TurnBeforeRotation(Turn, Rotation):
    pass


class PositionBias(Toy):
    """Prefers keys to the left."""

    def position_bias(self, grid):
        x = grid.coordinates(dtype=self.weight.dtype)[:, 1]
        return grid.pad_prefix(self.amount * (x[:, None] - x).clamp(min=0))


class PositionBiasPerHead(PositionBias):
    def position_bias(self, grid):
        per_head = torch.arange(1, 1 + self.num_heads, dtype=self.weight.dtype)[:, None, None]
        return per_head * super().position_bias(grid)


class ContentBias(Toy):
    """Adds a channel of the query and a channel of the key, whatever the scale of the logits."""
    per_layer = True

    def content_bias(self, q, k, grid):
        return self.amount * (q[..., :1] + 3 * k[..., 1:2].mT)


class ContentBiasOfAllHeads(ContentBias):
    def content_bias(self, q, k, grid):
        return super().content_bias(q, k, grid).mean(1, keepdim=True)


class Values(Toy):
    """The expected column of the keys, in the first channel of each head."""
    per_layer = True

    def values(self, attn, grid):
        x = torch.cat([attn.new_zeros(grid.num_prefix_tokens), grid.coordinates(dtype=attn.dtype)[:, 1]])
        return (self.amount * (attn @ x))[..., None] * torch.eye(self.head_dim, dtype=attn.dtype)[0]


def shared(cls):
    return type('Shared' + cls.__name__, (cls,), {'per_layer': False})


def per_layer(cls):
    return type('PerLayer' + cls.__name__, (cls,), {'per_layer': True})


def forward_by_hand(model, x, encodings):
    """timm's ViT in plain operations. The encoding of layer i, `encodings[i]`, acts through its only hook."""
    grid = timm_sape.Grid(4, 4, 1)
    tokens = model.patch_embed(x)
    tokens = torch.cat([model.cls_token.expand(len(x), -1, -1), tokens], dim=1)
    term = 0
    if encodings[0].overrides('embed'):
        tokens, term = encodings[0].mix(tokens, encodings[0].embed(tokens, grid), grid)
    tokens = tokens + term
    if model.pos_embed is not None:
        tokens = tokens + model.pos_embed
    for block, encoding in zip(model.blocks, encodings):
        qkv = block.attn.qkv(block.norm1(tokens)).reshape(len(x), 17, 3, 4, 16)
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))  # [B, h, N, d]
        bias = torch.zeros(1, dtype=x.dtype)
        if encoding.overrides('position_bias'):
            bias = encoding.position_bias(grid)
        if encoding.overrides('content_bias'):
            bias = encoding.content_bias(q, k, grid)
        if encoding.overrides('turn'):
            q, k = encoding.turn(q, k, grid)
        if encoding.overrides('rotation'):
            table = encoding.rotation(grid)
            q, k = (torch.cat([t[:, :, :1], apply_rot_embed_cat(t[:, :, 1:], table)], dim=2) for t in (q, k))
        attn = (q @ k.mT / 4 + bias).softmax(dim=-1)
        out = attn @ v
        if encoding.overrides('values'):
            out = out + encoding.values(attn, grid)
        tokens = tokens + block.attn.proj(out.transpose(1, 2).reshape(len(x), 17, 64))
        tokens = tokens + block.mlp(block.norm2(tokens))
    return model.norm(tokens)


TOYS = [
    Embed, FactorOnly, shared(Rotation), per_layer(Rotation), shared(RotationPerHead), per_layer(RotationPerHead),
    shared(PositionBias), per_layer(PositionBias), shared(PositionBiasPerHead), per_layer(PositionBiasPerHead),
    ContentBias, ContentBiasOfAllHeads, Values, Turn, TurnBeforeRotation,
]


@pytest.mark.parametrize('pos_enc, fused', [('a_toy', True), ('a_toy+ape', False), ('z_toy+ape', True)])
@pytest.mark.parametrize('cls', TOYS, ids=lambda cls: cls.__name__)
def test_hooks(cls, pos_enc, fused):
    """A new encoding acts in a model as computed by hand, alone, and combined with `ape`, before and after it."""
    name = pos_enc.split('+')[0]
    register_encoding(name)(cls)
    torch.manual_seed(0)
    model = build(pos_enc, {name: {'strength': 0.3}}).double().eval()
    for block in model.blocks:
        block.attn.fused_attn = fused
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    instances = [m for m in model.modules() if isinstance(m, cls)]
    assert len(instances) == (2 if cls.per_layer else 1)
    encodings = instances if cls.per_layer else instances * 2

    actual, expected = model.forward_features(x), forward_by_hand(model, x, encodings)
    assert_near(actual, expected, 1e-10)
    weights = [instance.weight for instance in instances]
    ahead = torch.randn_like(actual)
    grads = torch.autograd.grad(actual, weights, ahead)
    for a, b in zip(grads, torch.autograd.grad(expected, weights, ahead)):
        assert a.abs() > 1e-3
        assert_near(a, b, 1e-10, 'gradient')
    with torch.no_grad():
        without = forward_by_hand(model, x, [PositionEncoding(**HOST)] * 2)
    assert (actual - without).abs().max() > 1e-3


def test_parameters_carry_the_name():
    register_encoding('inner')(per_layer(PositionBias))
    register_encoding('outer')(shared(Rotation))
    model = build('outer+inner')
    own = {name for name, _ in model.named_parameters() if 'encodings' in name}
    assert own == {'encodings.outer.weight', *(f'blocks.{i}.attn.encodings.inner.weight' for i in range(2))}
    assert own <= model.no_weight_decay()
    assert {name for name in model.state_dict() if 'encodings' in name} == own
    for i in range(2):
        assert model.blocks[i].attn.encodings['inner'].weight.item() == 1 + i


def test_biases_add_up():
    """Biases from geometry and from content, shared and per layer, all at once."""
    names = {
        'toy_a': shared(PositionBias),
        'toy_b': per_layer(PositionBiasPerHead),
        'toy_c': ContentBias,
        'toy_d': shared(PositionBiasPerHead),
    }
    for name, cls in names.items():
        register_encoding(name)(cls)
    model = build('+'.join(names), {name: {'strength': 0.3} for name in names}).double().eval()

    @register_encoding('together')
    class Together(PositionEncoding):
        per_layer = True

        def __init__(self, *, layer=0, **host):
            super().__init__(layer=layer, **host)
            self.layer = layer

        def content_bias(self, q, k, grid):
            layers = model.blocks[self.layer].attn.encodings
            fixed = [model.encodings['toy_a'], layers['toy_b'], model.encodings['toy_d']]
            return sum(e.position_bias(grid) for e in fixed) + layers['toy_c'].content_bias(q, k, grid)

    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    together = [create_encoding('together', layer=i, **HOST) for i in range(2)]
    assert_near(model.forward_features(x), forward_by_hand(model, x, together), 1e-10)


def test_factors_multiply_and_terms_add():
    """Several mixers act in turn on the tokens and on the sum of terms, whatever the order of their names."""
    for name, cls in {'a_toy': FactorOnly, 'b_toy': Embed, 'z_toy': type('Again', (FactorOnly,), {})}.items():
        register_encoding(name)(cls)
    model = build('b_toy+ape+z_toy+a_toy', {'z_toy': {'strength': 0.5}}).double().eval()
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    model(x)
    plain = torch.cat([model.cls_token.expand(2, -1, -1), model.patch_embed(x)], dim=1)
    rows = 1 + torch.arange(4, dtype=torch.float64).repeat_interleave(4)
    factor = 3 * 2.5 * torch.cat([torch.ones(1, dtype=torch.float64), rows])[:, None]
    expected = plain * factor + torch.arange(64, dtype=torch.float64) + model.pos_embed
    assert_near(seen[0], expected, 1e-12)


def test_what_the_host_tells():
    """An encoding gets the sizes of the model, rows before columns, and the index of its layer."""
    told = []

    def init(self, **host):
        told.append(host)
        PositionEncoding.__init__(self, **host)

    acts = {'__init__': init, 'position_bias': lambda self, grid: torch.zeros(())}
    register_encoding('outer')(type('Outer', (PositionEncoding,), {**acts, 'per_layer': False}))
    register_encoding('inner')(type('Inner', (PositionEncoding,), acts))
    build('outer+inner', img_size=(16, 40), reg_tokens=4, depth=3, ref_grid_size=(7, 6))
    common = dict(dim=64, num_heads=4, grid_size=(2, 5), num_prefix_tokens=5, depth=3, ref_grid_size=(7, 6))
    assert len(told) == 4
    assert all({key: host[key] for key in common} == common for host in told)
    assert [host.get('layer') for host in told] == [None, 0, 1, 2]
    assert all(tuple(type(n) for n in host['grid_size']) == (int, int) for host in told)


@pytest.mark.parametrize('model', ['test_vit_sape2_k', 'test_vit_rope2d_ape', 'vit_tiny_cope'])
def test_in_every_model(model):
    """`pos_enc=` overrides the encoding in the name of an entrypoint."""
    register_encoding('toy')(Values)
    built = build('toy+ape', {'toy': {'strength': 0.5}}, model, depth=1)
    assert built.pos_enc == 'ape+toy'
    assert not any('sape2' in name or 'cope' in name for name in built.state_dict())
    assert built(torch.randn(1, 3, 32, 32)).shape == (1, 1000)


def test_overrides():
    """A hook counts as overridden if the class or one of its bases defines it."""
    assert [hook for hook in PositionEncoding.HOOKS if per_layer(RotationPerHead).overrides(hook)] == ['rotation']
    assert [hook for hook in PositionEncoding.HOOKS if Embed.overrides(hook)] == ['embed', 'mix']
    assert [hook for hook in PositionEncoding.HOOKS if Toy.overrides(hook)] == []
    assert Embed.acts_on() == ('tokens',)
    assert ContentBias.acts_on() == ('logits, from content',)


def test_names_that_would_hide_an_attribute():
    """Of the modules that hold encodings by name; the list is complete."""
    for held in (SharedEncodings(), LayerEncodings()):
        assert {name for name in dir(held) if re.fullmatch(r'[a-z][a-z0-9_]*', name)} <= registry.names.RESERVED
    for name in ('position', 'values', 'layer', 'train'):
        with pytest.raises(ValueError, match=f'{name!r}: it would hide an attribute'):
            register_encoding(name)(type('Mine', (PositionEncoding,), {}))


def test_an_encoding_put_into_a_built_layer_acts():
    model = timm.create_model('test_vit_nope', img_size=32, num_classes=3).eval()
    x = torch.randn(2, 3, 32, 32)
    before = model(x)
    encodings = model.blocks[0].attn.encodings
    encodings['rpb'] = create_encoding('rpb', dim=64, num_heads=4, grid_size=(2, 2), num_prefix_tokens=1)
    nn.init.normal_(encodings['rpb'].table)
    assert not torch.allclose(model(x), before)
    del encodings['rpb']
    assert torch.equal(model(x), before)


def test_a_bias_of_other_heads():
    class Wrong(PositionEncoding):
        """Three heads of four."""
        name = 'wrong'

        def position_bias(self, grid):
            return grid.between_tokens(torch.zeros(3, grid.num_patches, grid.num_patches))

    encoding = Wrong(dim=32, num_heads=4, grid_size=(2, 3))
    message = r'returned \[3, 7, 7\], which does not broadcast to \[B, h, N, N\] = \[1, 4, 7, 7\]'
    with pytest.raises(ValueError, match=message):
        encoding(torch.zeros(1), grid=timm_sape.Grid(2, 3, 1), hook='position_bias')


def test_sape2_that_cannot_learn_says_so():
    host = dict(dim=32, num_heads=4, grid_size=(2, 3))
    with pytest.warns(UserWarning, match="'sape2_k' with separate_keys='zero' never learns"):
        create_encoding('sape2_k', separate_keys='zero', **host)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        create_encoding('sape2_q', separate_keys='zero', **host)
        create_encoding('sape2_k', separate_keys='identity', **host)
        create_encoding('sape2_k', bias_scale='learned', bias_init=0, **host)
    with pytest.warns(UserWarning, match="'sape2_k' with bias_scale=0 does nothing and never learns"):
        create_encoding('sape2_k', bias_scale=0, **host)


@pytest.mark.parametrize('name', ['sape2_k', 'sape2sq_k'])
def test_sape2_with_a_gate_and_a_gain_of_0_is_refused(name):
    """Each of them waits for the other."""
    host = dict(dim=32, num_heads=4, grid_size=(2, 3), bias_scale='learned')
    with pytest.raises(ValueError, match='a gate of 0 and a learned gain of 0 would never learn. Leave bias_init out'):
        create_encoding(f'auto_{name}', init=0, bias_init=0, **host)
    create_encoding(f'auto_{name}', init=0.5, bias_init=0, **host)
    create_encoding(f'auto_{name}', init=0, **host)


def test_frozen_tables_stay_frozen_on_another_grid():
    encoding = create_encoding('sape2_k', dim=32, num_heads=4, grid_size=(2, 3)).requires_grad_(False)
    encoding.set_ref_grid_size((4, 5))
    assert encoding.table_x.shape[0] == 6 and not any(p.requires_grad for p in encoding.parameters())
