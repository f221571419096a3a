"""`fourier`: learnable Fourier features and an MLP."""
import functools
import math

import pytest
import torch

import reference_fourier as reference
import timm_sape
from breakages import x_before_y
from harness import create, initial_models, make_tokens, where
from timm_sape import Grid
from timm_sape.encodings import fourier
from token_checks import MUTANTS, PLAIN, RULES, TRAINED_GRID_IGNORED, TermTests

gelu = fourier.F.gelu


class TestFourier(TermTests):
    name = 'fourier'
    variants = [*RULES, {'features': 2, 'hidden': 1}]
    keywords = {'features': 6, 'hidden': 5}
    mutants = {
        **MUTANTS,
        'x and y swapped': (PLAIN, (Grid, 'coordinates', x_before_y)),
        'GELU by tanh': (PLAIN, (fourier.F, 'gelu', functools.partial(gelu, approximate='tanh'))),
        'no GELU': (PLAIN, (fourier.F, 'gelu', lambda x: x)),
        'trained grid ignored': TRAINED_GRID_IGNORED,
    }

    def expected(self, encoding, tokens, grid):
        ref = encoding.ref_grid_size if encoding.rule == 'rescale' else None
        parameters = (encoding.freqs, encoding.fc1.weight, encoding.fc1.bias, encoding.fc2.weight, encoding.fc2.bias)
        return reference.fourier(tokens, *parameters, grid.size, ref_grid_size=ref, **where(grid))


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
