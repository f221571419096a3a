"""Tests that encodings of tokens share, as classes to derive from."""
import copy

import pytest
import torch

import timm_sape
from breakages import in_raster_order, prefix_behind
from harness import (
    GRIDS,
    KEPT,
    OTHER_GRIDS,
    assert_near,
    catches,
    check_first_tokens,
    compare,
    create,
    embed,
    make_grid,
    make_tokens,
)
from model_checks import EncodingTests
from timm_sape import Grid
from timm_sape.encodings import CoordinateEncoding

RULES = [{'resolution': 'extrapolate'}, {'resolution': 'rescale'}]
PLAIN = {'grid_size': (3, 5)}  # arguments of `check`
PREFIXED = {'grid_size': (3, 5), 'num_prefix_tokens': 1}
DROPPED = {'grid_size': (3, 5), 'num_prefix_tokens': 1, 'num_keep': 8}
RESCALED = {'grid_size': (4, 7), 'own_size': (3, 5), 'resolution': 'rescale'}
MUTANTS = {  # arguments of `check`, (owner, attribute, replacement)
    'prefix behind': (PREFIXED, (Grid, 'pad_tokens', prefix_behind)),
    'kept patches in raster order': (DROPPED, (Grid, 'keep_tokens', in_raster_order(Grid.keep_tokens))),
}
TRAINED_GRID_IGNORED = RESCALED, (CoordinateEncoding, 'rescaling', lambda *args: None)


class TokenTests(EncodingTests):
    """What every encoding of tokens must pass.

    A subclass has a method `expected(encoding, tokens, grid)`, which calls the reference.

    Attributes:
        variants: Keywords that change the equations, one dictionary for each kind.
        keywords: Keywords that make the loops of the reference quick.
        acts_on: What it says that it acts on.
    """
    variants = [{}]
    keywords = {}
    acts_on = ('tokens',)
    mutants = MUTANTS
    PARAMETERS = [*EncodingTests.PARAMETERS, 'variant']

    def new(self, grid_size, num_prefix_tokens=0, **keywords):
        return create(self.name, grid_size, num_prefix_tokens, **keywords)

    def actual(self, encoding, tokens, grid):
        """What the encoding makes of tokens."""
        return embed(encoding, tokens, grid)

    def check(self, grid_size, num_prefix_tokens=0, num_keep=None, own_size=None, **keywords):
        """Value and every gradient."""
        grid = make_grid(grid_size, num_prefix_tokens, num_keep)
        encoding = self.new(own_size or grid_size, num_prefix_tokens, **{**self.keywords, **keywords})
        tokens = make_tokens(grid, batch=3)
        inputs = {'tokens': tokens, **dict(encoding.named_parameters())}
        compare(self.actual(encoding, tokens, grid), self.expected(encoding, tokens, grid), inputs)

    @pytest.mark.one_of(2)
    @pytest.mark.parametrize('num_prefix_tokens', [0, 1, 5])
    @pytest.mark.parametrize('grid_size', GRIDS)
    def test_equations(self, grid_size, num_prefix_tokens, variant):
        self.check(grid_size, num_prefix_tokens, **variant)

    @pytest.mark.parametrize('case', KEPT)
    def test_equations_of_kept_patches(self, case, variant):
        self.check(*case, **variant)

    @pytest.mark.one_of(2)
    @pytest.mark.parametrize('num_prefix_tokens', [0, 2])
    @pytest.mark.parametrize('grid_size, own_size', OTHER_GRIDS)
    def test_equations_on_another_grid(self, grid_size, own_size, num_prefix_tokens, variant):
        self.check(grid_size, num_prefix_tokens, own_size=own_size, **variant)
        self.check(grid_size, num_prefix_tokens, 1, own_size, **variant)

    @pytest.mark.one_of(3)
    def test_mutants_are_caught(self, mutant, monkeypatch):
        """If the package is broken like this, the comparison with the equations fails."""
        case, patch = self.mutants[mutant]
        catches(lambda: self.check(**case), monkeypatch, *patch)

    def test_paths_to_another_grid(self, variant):
        """A dynamic size, `set_grid_size` and construction for the new grid follow one rule."""
        grid = Grid(4, 7, 1)
        trained, tokens = self.new((3, 5), 1, **variant), make_tokens(grid, batch=3)
        out = self.actual(trained, tokens, grid)
        moved = copy.deepcopy(trained)
        moved.set_grid_size((4, 7))
        assert torch.equal(self.actual(moved, tokens, grid), out)
        built = self.new((4, 7), 1, ref_grid_size=(3, 5), **variant)
        built.load_state_dict(trained.state_dict())
        assert torch.equal(self.actual(built, tokens, grid), out)

    def test_where_it_acts(self):
        assert timm_sape.get_encoding(self.name).acts_on() == self.acts_on


class TermTests(TokenTests):
    """For an encoding that adds a term to tokens which does not depend on them."""

    def term(self, encoding, tokens, grid):
        return encoding(tokens, grid=grid, hook='embed')

    def test_float32(self):
        """A large grid in single against double precision."""
        grid, encoding = Grid(24, 32, 1), self.new((3, 5), 1)
        tokens = make_tokens(grid, batch=3)
        single = self.term(copy.deepcopy(encoding).float(), tokens, grid)
        assert single.dtype == torch.float32
        assert_near(single, self.term(encoding, tokens, grid), 1e-4)

    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize('grid_size', [(3, 5), (6, 4)])
    def test_half_models(self, grid_size, dtype):
        """The term is computed in float32 from the parameters of a half model, in training too."""
        self.check_half_model(grid_size, dtype, 1e-5)

    def check_half_model(self, grid_size, dtype, tolerance):
        grid = Grid(*grid_size, 1)
        encoding, tokens = self.new((3, 5), 1, dtype=torch.float32).to(dtype), make_tokens(grid, batch=3)
        wide = self.term(copy.deepcopy(encoding).double(), tokens, grid)
        for training in (False, True):
            term = self.term(encoding.train(training), tokens.to(dtype), grid)
            assert term.dtype == torch.float32
            assert_near(term, wide, tolerance)

    @pytest.mark.parametrize('grid_size', [(3, 5), (6, 4)])
    def test_autocast(self, grid_size):
        """Autocast does not affect the term or its gradients."""
        grid, encoding = Grid(*grid_size, 1), self.new((3, 5), 1, dtype=torch.float32)
        tokens = make_tokens(grid, batch=3, dtype=torch.float32)
        expected = self.actual(encoding, tokens, grid)
        with torch.autocast('cpu', torch.bfloat16):
            actual = self.actual(encoding, tokens, grid)
        assert actual.dtype == torch.float32 and torch.equal(actual, expected)
        compare(actual, expected, {'tokens': tokens, **dict(encoding.named_parameters())}, 0)

    def test_in_a_model(self):
        check_first_tokens(self.name, self.expected)
