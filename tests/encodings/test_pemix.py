"""`pemix`: learned weights of content and of position."""
import copy
import functools

import pytest
import torch

import reference_pemix as reference
import timm_sape
from harness import (
    GRIDS, KEPT, assert_near, catches, compare, create, initial_models, make_grid, make_images, make_model, make_tokens)
from timm_sape import Grid
from timm_sape.encodings.pemix import PositionMixer


def make_term(grid, dtype=torch.float64):
    return make_tokens(grid, dtype=dtype, seed=6)


def mixed(encoding, tokens, term, grid):
    """The sum of tokens and term, both weighted."""
    tokens, term = encoding(tokens, term, grid=grid, hook='mix')
    return tokens + term


def check(grid_size, num_prefix_tokens=0, num_keep=None):
    """Value and every gradient."""
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding, tokens, term = create('pemix', grid_size, num_prefix_tokens), make_tokens(grid), make_term(grid)
    inputs = {'tokens': tokens, 'term': term, **dict(encoding.named_parameters())}
    expected = reference.pemix(tokens, term, encoding.weight_x, encoding.weight_pe)
    compare(mixed(encoding, tokens, term, grid), expected, inputs)


@pytest.mark.one_of(2)
@pytest.mark.parametrize('num_prefix_tokens', [0, 1, 5])
@pytest.mark.parametrize('grid_size', GRIDS)
def test_equations(grid_size, num_prefix_tokens):
    check(grid_size, num_prefix_tokens)


@pytest.mark.parametrize('case', KEPT)
def test_equations_of_kept_patches(case):
    check(*case)


MUTANTS = {  # what is checked, owner, attribute, replacement
    'weights swapped': (
        functools.partial(check, (3, 5)), PositionMixer, 'mix',
        lambda self, x, term, grid: (x * self.weight_pe, term * self.weight_x)),
    'position alone weighed': (
        functools.partial(check, (3, 5)), PositionMixer, 'mix',
        lambda self, x, term, grid: (x + 0 * self.weight_x, term * self.weight_pe)),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    catches(MUTANTS[mutant][0], monkeypatch, *MUTANTS[mutant][1:])


@pytest.mark.parametrize('pos_enc', ['sincos2d', 'ape+sincos2d', 'cape', 'cape+fourier', 'ope', 'ape'])
def test_starts_as_an_addition(pos_enc):
    """With other weights, it weighs the sum of all terms, and the tokens after all factors, prefix rows included."""
    model = make_model(f'{pos_enc}+pemix', reg_tokens=4).double()
    plain = make_model(pos_enc, reg_tokens=4).double()
    plain.load_state_dict(model.state_dict(), strict=False)
    images = make_images(dtype=torch.float64)
    assert_near(model.eval()(images), plain.eval()(images), 1e-12)
    encoding, (added, _) = model.encodings['pemix'], plain.embed(images)
    scaled, _ = make_model('nope', reg_tokens=4).double().embed(images)
    with torch.no_grad():
        if 'cape' in pos_enc:
            scaled[:, 5:] *= 8  # the square root of 64
        encoding.weight_x.normal_()
        encoding.weight_pe.normal_()
    expected = reference.pemix(scaled, added - scaled, encoding.weight_x, encoding.weight_pe)
    assert_near(model.embed(images)[0], expected, 1e-10)


def test_where_it_acts():
    assert timm_sape.get_encoding('pemix').acts_on() == ('tokens',)


def test_float32():
    """A large grid in single against double precision."""
    grid, encoding = Grid(24, 32, 1), create('pemix', (24, 32), 1)
    tokens, term = make_tokens(grid), make_term(grid)
    out = mixed(copy.deepcopy(encoding).float(), tokens.float(), term.float(), grid)
    assert out.dtype == torch.float32
    assert_near(out, mixed(encoding, tokens, term, grid), 1e-5)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('grid_size', [(3, 5), (6, 4)])
def test_half_models(grid_size, dtype):
    """Tokens keep their dtype."""
    grid = Grid(*grid_size, 1)
    encoding = create('pemix', (3, 5), 1, dtype=torch.float32).to(dtype)
    tokens, term = make_tokens(grid, dtype=dtype), make_term(grid, dtype)
    out = mixed(encoding, tokens, term, grid)
    assert out.dtype == dtype
    assert_near(out, mixed(copy.deepcopy(encoding).double(), tokens.double(), term.double(), grid), 0.02)


def test_autocast():
    """Autocast does not affect it."""
    grid, encoding = Grid(3, 5, 1), create('pemix', (3, 5), 1, dtype=torch.float32)
    tokens, term = make_tokens(grid, dtype=torch.float32), make_term(grid, torch.float32)
    out = mixed(encoding, tokens, term, grid)
    with torch.autocast('cpu', torch.bfloat16):
        actual = mixed(encoding, tokens, term, grid)
    assert actual.dtype == torch.float32 and torch.equal(actual, out)
    compare(actual, out, dict(encoding.named_parameters()), 0.02)


@pytest.mark.parametrize('pos_enc, text', [
    ('pemix', "mixes tokens with their position terms, but no part adds such a term. Add one, e.g. 'pemix\\+sincos2d'"),
    ('pemix+rope2d', 'no part adds such a term'),
    ('lape+pemix', 'no part adds such a term'),
    ('peg+pemix', 'no part adds such a term'),
    ('auto_pemix+ape', "'auto_pemix'.*no neutral form"),
])
def test_wrong_compositions(pos_enc, text):
    with pytest.raises(ValueError, match=text):
        make_model(pos_enc)


def test_initial_values():
    for model in initial_models('ape+pemix'):
        encoding = model.encodings['pemix']
        assert torch.equal(encoding.weight_x, torch.ones(64)) and torch.equal(encoding.weight_pe, torch.ones(64))
