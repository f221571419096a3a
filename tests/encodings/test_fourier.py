"""`fourier`: learnable Fourier features and an MLP."""
import copy
import functools
import math

import pytest
import torch

import reference_fourier as reference
import timm_sape
from breakages import in_raster_order, prefix_behind, x_before_y
from harness import (
    GRIDS, KEPT, OTHER_GRIDS, assert_near, catches, check_first_tokens, compare, create, embed, initial_models,
    make_grid, make_tokens, where)
from timm_sape import Grid
from timm_sape.encodings import CoordinateEncoding, fourier

RULES = pytest.mark.parametrize('resolution', ['extrapolate', 'rescale'])


def expected(encoding, tokens, grid):
    ref = encoding.ref_grid_size if encoding.rule == 'rescale' else None
    parameters = (encoding.freqs, encoding.fc1.weight, encoding.fc1.bias, encoding.fc2.weight, encoding.fc2.bias)
    return reference.fourier(tokens, *parameters, grid.size, ref_grid_size=ref, **where(grid))


def check(grid_size, num_prefix_tokens=0, num_keep=None, own_size=None, **keywords):
    """Value and every gradient."""
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = create('fourier', own_size or grid_size, num_prefix_tokens, **{'features': 6, 'hidden': 5, **keywords})
    tokens = make_tokens(grid)
    inputs = {'tokens': tokens, **dict(encoding.named_parameters())}
    compare(embed(encoding, tokens, grid), expected(encoding, tokens, grid), inputs)


@pytest.mark.parametrize('num_prefix_tokens', [0, 1, 5])
@pytest.mark.parametrize('grid_size', GRIDS)
@pytest.mark.parametrize('keywords', [{}, {'features': 2, 'hidden': 1}])
def test_equations(keywords, grid_size, num_prefix_tokens):
    check(grid_size, num_prefix_tokens, **keywords)


@pytest.mark.parametrize('case', KEPT)
def test_equations_of_kept_patches(case):
    check(*case)


@pytest.mark.parametrize('grid_size, own_size', OTHER_GRIDS)
@RULES
def test_equations_on_another_grid(resolution, grid_size, own_size):
    check(grid_size, 1, own_size=own_size, resolution=resolution)
    check(grid_size, 1, 1, own_size, resolution=resolution)


@RULES
def test_three_paths_to_another_grid(resolution):
    """A dynamic size, `set_grid_size` and construction for the new grid follow one rule."""
    grid = Grid(4, 7, 1)
    trained, tokens = create('fourier', (3, 5), 1, resolution=resolution), make_tokens(grid)
    term = embed(trained, tokens, grid)
    moved = copy.deepcopy(trained)
    moved.set_grid_size((4, 7))
    assert torch.equal(embed(moved, tokens, grid), term)
    built = create('fourier', (4, 7), 1, ref_grid_size=(3, 5), resolution=resolution)
    built.load_state_dict(trained.state_dict())
    assert torch.equal(embed(built, tokens, grid), term)


gelu = fourier.F.gelu
PLAIN = functools.partial(check, (3, 5))
MUTANTS = {  # what is checked, owner, attribute, replacement
    'prefix behind': (functools.partial(check, (3, 5), 1), Grid, 'pad_tokens', prefix_behind),
    'x and y swapped': (PLAIN, Grid, 'coordinates', x_before_y),
    'GELU by tanh': (PLAIN, fourier.F, 'gelu', functools.partial(gelu, approximate='tanh')),
    'no GELU': (PLAIN, fourier.F, 'gelu', lambda x: x),
    'trained grid ignored': (
        functools.partial(check, (4, 7), own_size=(3, 5), resolution='rescale'), CoordinateEncoding, 'rescaling',
        lambda *args: None),
    'kept patches in raster order': (
        functools.partial(check, (3, 5), 1, 8), Grid, 'keep_tokens', in_raster_order(Grid.keep_tokens)),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    catches(MUTANTS[mutant][0], monkeypatch, *MUTANTS[mutant][1:])


def test_not_separable():
    """The difference between two rows is not the same in all columns, unlike in ape2d."""
    grid = Grid(3, 5)
    steps = create('fourier', (3, 5))(make_tokens(grid), grid=grid, hook='embed').unflatten(0, (3, 5)).diff(dim=0)
    assert not torch.allclose(steps, steps[:, :1].expand_as(steps))


def test_features_start_as_a_gaussian_of_distance():
    """cos(p W).cos(p' W) + sin(p W).sin(p' W) sums cos((p - p') W), of which the mean is exp(-r^2 / (2 gamma^2))."""
    for gamma in (1.0, 2.5):
        torch.manual_seed(0)
        encoding = timm_sape.create_encoding(
            'fourier', dim=8, num_heads=2, grid_size=(3, 5), features=40_000, hidden=1, gamma=gamma)
        for delta in ((0.0, 0.0), (1.0, 0.0), (0.0, -2.0), (2.0, 1.5)):
            mean = (torch.tensor(delta) @ encoding.freqs).cos().mean().item()
            assert mean == pytest.approx(math.exp(-(delta[0] ** 2 + delta[1] ** 2) / (2 * gamma ** 2)), abs=0.02)


def test_float32():
    """A large grid in single against double precision."""
    grid = Grid(24, 32, 1)
    encoding = create('fourier', (3, 5), 1)
    single = copy.deepcopy(encoding).float()
    term, wide = (e(make_tokens(grid), grid=grid, hook='embed') for e in (single, encoding))
    assert term.dtype == torch.float32
    assert_near(term, wide, 1e-4)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('grid_size', [(3, 5), (6, 4)])
def test_half_models(grid_size, dtype):
    """The term is computed in float32 from the parameters of a half model, in training too."""
    grid = Grid(*grid_size, 1)
    encoding = create('fourier', (3, 5), 1, dtype=torch.float32).to(dtype)
    wide = copy.deepcopy(encoding).double()(make_tokens(grid), grid=grid, hook='embed')
    for training in (False, True):
        term = encoding.train(training)(make_tokens(grid, dtype=dtype), grid=grid, hook='embed')
        assert term.dtype == torch.float32
        assert_near(term, wide, 1e-5)


def test_autocast():
    """Autocast does not affect the term or its gradients."""
    grid = Grid(3, 5, 1)
    encoding, tokens = create('fourier', (3, 5), 1, dtype=torch.float32), make_tokens(grid, dtype=torch.float32)
    term = encoding(tokens, grid=grid, hook='embed')
    with torch.autocast('cpu', torch.bfloat16):
        actual = encoding(tokens, grid=grid, hook='embed')
    assert actual.dtype == torch.float32
    compare(actual, term, dict(encoding.named_parameters()), 0)


@pytest.mark.parametrize('dim, keywords, text', [
    (8, {'resolution': 'resize'}, "resolution must be 'extrapolate' or 'rescale', got 'resize'"),
    *((8, {'gamma': gamma}, f"'fourier' needs a positive gamma, got {gamma!r}")
      for gamma in (0, -1.0, float('nan'), float('inf'), True, '2.5', None)),
    *((8, {'features': features}, f"'fourier' needs features .* positive even number, got {features!r}")
      for features in (0, 5, -2, 6.0, True, '6', float('nan'))),
    (7, {}, r"'fourier' needs features \(by default embed_dim\) to be a positive even number, got 7"),
    *((8, {'hidden': hidden}, f"'fourier' needs hidden to be a positive integer, got {hidden!r}")
      for hidden in (0, -1, 4.0, True, '4')),
])
def test_wrong_values(dim, keywords, text):
    with pytest.raises(ValueError, match=text):
        timm_sape.create_encoding('fourier', dim=dim, num_heads=1, grid_size=(3, 5), **keywords)


@pytest.mark.parametrize('keywords, std, features, hidden', [
    ({}, 0.4, 64, 256), ({'gamma': 5, 'features': 400, 'hidden': 100}, 0.2, 400, 100)])
def test_initial_values(keywords, std, features, hidden):
    for model in initial_models('fourier', pos_enc_kwargs={'fourier': keywords}):
        encoding = model.encodings['fourier']
        assert encoding.freqs.shape == (2, features // 2)
        assert encoding.freqs.std().item() == pytest.approx(std, rel=0.2)
        assert abs(encoding.freqs.mean().item()) < 0.3 * std
        for layer, shape in ((encoding.fc1, (hidden, features)), (encoding.fc2, (64, hidden))):
            limit = shape[1] ** -0.5
            assert layer.weight.shape == shape and layer.bias.shape == shape[:1]
            for parameter in (layer.weight, layer.bias):
                assert 0.8 * limit < parameter.abs().max() <= limit
                assert parameter.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.2)


def test_where_it_acts():
    assert timm_sape.get_encoding('fourier').acts_on() == ('tokens',)


def test_in_a_model():
    check_first_tokens('fourier', expected)
