"""`ape2d`: a learned vector for each row and one for each column."""
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from timm.models.naflexvit import NaFlexEmbeds

import reference_ape2d as reference
import timm_sape
from harness import assert_near, create, embed, initial_models, make_tokens, where
from timm_sape import Grid
from timm_sape.encodings.ape2d import FactoredPositionEncoding
from token_checks import MUTANTS, TermTests

interpolate = F.interpolate
ANOTHER_GRID = {'grid_size': (6, 2), 'own_size': (3, 5)}


class TestApe2d(TermTests):
    name = 'ape2d'
    variants = [{'combine': 'sum'}, {'combine': 'concat'}]
    mutants = {
        **MUTANTS,
        'tables resized for each other': (
            ANOTHER_GRID, (FactoredPositionEncoding, 'RESIZED', ('table_x', 'table_y'))),
        'corners aligned': (ANOTHER_GRID, (F, 'interpolate', functools.partial(interpolate, align_corners=True))),
        'nearest row': (ANOTHER_GRID, (F, 'interpolate', lambda x, size, mode: interpolate(x, size))),
    }

    def expected(self, encoding, tokens, grid):
        return reference.ape2d(
            tokens, encoding.table_y, encoding.table_x, grid.size, combine=encoding.combine, **where(grid))

    def test_paths_to_another_grid(self, variant):
        """A dynamic size and `set_grid_size` follow one rule. Loading does too: see the contracts."""
        grid = Grid(4, 7, 1)
        trained, tokens = create('ape2d', (3, 5), 1, **variant), make_tokens(grid)
        moved = copy.deepcopy(trained)
        moved.set_grid_size((4, 7))
        assert torch.equal(embed(moved, tokens, grid), embed(trained, tokens, grid))
        assert moved.table_y.shape[0] == 4 and moved.table_x.shape[0] == 7 and moved.table_x.is_contiguous()

    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize('grid_size, tolerance', [((3, 5), 1e-5), ((6, 4), 1e-2)])
    def test_half_models(self, grid_size, tolerance, dtype):
        """A resampled table keeps its dtype, so its tolerance is larger."""
        self.check_half_model(grid_size, dtype, tolerance)


@pytest.mark.parametrize('grid_size', [(3, 5), (6, 10), (2, 9), (1, 1), (7, 2)])
def test_sum_is_that_of_naflexvit(grid_size):
    """On its own grid and resampled. timm computes in float32."""
    embeds = NaFlexEmbeds(embed_dim=16, class_token=False, pos_embed='factorized', pos_embed_grid_size=(3, 5))
    encoding = create('ape2d', (3, 5), dtype=torch.float32)
    with torch.no_grad():
        embeds.pos_embed_y.copy_(encoding.table_y[None])
        embeds.pos_embed_x.copy_(encoding.table_x[None])
        term = torch.zeros(1, grid_size[0] * grid_size[1], 16)
        embeds._apply_factorized_pos_embed(term, grid_size)
        assert_near(encoding(term, grid=Grid(*grid_size), hook='embed'), term[0], 1e-6)


@pytest.mark.parametrize('combine', ['sum', 'concat'])
def test_separable(combine):
    """The difference between two rows is the same in all columns, whatever the tables."""
    table = create('ape2d', (3, 5), combine=combine)(torch.zeros(1, 15, 16), grid=Grid(3, 5), hook='embed')
    steps = table.unflatten(0, (3, 5)).diff(dim=0)
    assert torch.allclose(steps, steps[:, :1].expand_as(steps))


@pytest.mark.parametrize('combine, channels', [('sum', 64), ('concat', 32)])
def test_initial_values(combine, channels):
    for model in initial_models('ape2d', img_size=(128, 64), pos_enc_kwargs={'ape2d': {'combine': combine}}):
        encoding = model.encodings['ape2d']
        assert encoding.table_y.shape == (16, channels) and encoding.table_x.shape == (8, channels)
        for table in (encoding.table_y, encoding.table_x):
            assert table.std().item() == pytest.approx(0.02, rel=0.15)
            assert abs(table.mean().item()) < 0.003
        assert encoding.table_y.abs().max() > 0.05  # normal, not uniform


@pytest.mark.parametrize('dim, keywords, text', [
    (8, {'combine': 'product'}, "'ape2d': combine must be 'sum' or 'concat', got 'product'"),
    (8, {'combine': ['sum']}, r"combine must be 'sum' or 'concat', got \['sum'\]"),
    (7, {'combine': 'concat'}, "'ape2d' with combine='concat' needs an even embed dim, got 7. Use 'sum'"),
])
def test_wrong_values(dim, keywords, text):
    with pytest.raises(ValueError, match=text):
        timm_sape.create_encoding('ape2d', dim=dim, num_heads=1, grid_size=(3, 5), **keywords)
