"""rope_dinov3: rotation by y and x, which go from -1 to 1."""
import itertools
import math

import pytest
import torch
from timm.layers import RotaryEmbeddingDinoV3

import reference_rope_dinov3
from harness import assert_near, attend, compare, create, make_grid, make_qkv, where
from loops import attention
from model_checks import build, images
from rotation_checks import CASES, SIZES, FixedTableTests
from timm_sape import Grid, position
from timm_sape.encodings import base


class TestRopeDinov3(FixedTableTests):
    name = 'rope_dinov3'
    reference = reference_rope_dinov3
    rotate_half = True

    @pytest.mark.parametrize('keywords', [{'base': 30.0}, {'normalize': 'max'}, {'normalize': 'min'}], ids=str)
    def test_keywords(self, keywords):
        self.check(*CASES['3x5, 6 kept'], **keywords)
        self.check((2, 4), 0, None, **keywords)

    def test_timms_layer_in_place_of_ours(self, monkeypatch):
        """The comparison notices that timm's layer rounds to float32 even in a float64 model."""
        layer = RotaryEmbeddingDinoV3(SIZES['head_dim'], dtype=torch.float64)
        monkeypatch.setattr(
            base.FixedRotaryEncoding, 'rotation_of_grid', lambda self, grid: layer.get_embed(list(grid.size)))
        with pytest.raises(AssertionError, match='off by'):
            self.check(*CASES['3x5'])


# --- timm ------------------------------------------------------------------------------------------------------------

RECTANGLES = [(3, 5), (5, 3), (1, 7), (7, 1), (4, 4), (1, 1), (14, 14), (9, 16)]


@pytest.mark.parametrize('normalize', ['separate', 'max', 'min'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_same_as_timm(dtype, normalize):
    for head_dim, temperature, grid_size in itertools.product((4, 16, 64), (100.0, 7.0), RECTANGLES):
        layer = RotaryEmbeddingDinoV3(head_dim, temperature=temperature, normalize_coords=normalize, dtype=dtype)
        options = {'base': temperature, 'normalize': normalize, 'heads': 1, 'head_dim': head_dim, 'dtype': dtype}
        for made_for in (grid_size, (2, 2)):
            actual = create('rope_dinov3', made_for, **options)(torch.zeros(1), grid=Grid(*grid_size), hook='rotation')
            expected = layer.get_embed(list(grid_size))
            assert actual.dtype == expected.dtype == dtype
            # timm's coordinates are float32 in any case; over min(H, W), angles go up to 60
            assert_near(actual, expected, 3e-5 if normalize == 'min' else 3e-6)


# --- augmentation ----------------------------------------------------------------------------------------------------

AUGMENTATIONS = [
    {'shift': 0.3}, {'jitter': 1.7}, {'rescale': 2.0}, {'shift': 0, 'jitter': 1, 'rescale': 1},
    {'shift': 0.3, 'jitter': 1.7, 'rescale': 2.0}, {'shift': 1.5, 'rescale': 1.2, 'normalize': 'max'}]


@pytest.mark.parametrize('keywords', AUGMENTATIONS, ids=str)
def test_augmentation_same_as_timm(keywords):
    """With the same seed, the same random positions as timm's layer. In evaluation mode, none."""
    of_timm = {('normalize_coords' if key == 'normalize' else f'{key}_coords'): v for key, v in keywords.items()}
    layer = RotaryEmbeddingDinoV3(16, **of_timm)
    for made_for in ((3, 5), (2, 2)):
        encoding = create('rope_dinov3', made_for, heads=1, head_dim=16, dtype=torch.float32, **keywords).train()
        layer.train()

        def rotation():
            return encoding(torch.zeros(1), grid=Grid(3, 5), hook='rotation')

        for seed in range(3):
            torch.manual_seed(seed)
            actual = rotation()
            torch.manual_seed(seed)
            assert_near(actual, layer.get_embed([3, 5]), 3e-6)
        encoding.eval()
        before = rotation()
        assert torch.equal(before, rotation())
        assert_near(before, layer.eval().get_embed([3, 5]), 3e-6)


def test_augmentation_equations():
    """In float64, with a gate and dropped patches."""
    grid = make_grid((3, 5), 1, 6)
    q, k, v = make_qkv(grid, **SIZES)
    limits = {'shift': 0.4, 'jitter': 1.5, 'rescale': 2.0}
    encoding = create('auto_rope_dinov3', (3, 5), 1, **SIZES, **limits, init=0.7, random=False).train()
    torch.manual_seed(7)
    actual = attend(encoding, q, k, v, grid)
    torch.manual_seed(7)
    shift = torch.empty(2, dtype=torch.float64).uniform_(-0.4, 0.4)
    jitter = torch.empty(2, dtype=torch.float64).uniform_(-math.log(1.5), math.log(1.5)).exp()
    rescale = torch.empty(1, dtype=torch.float64).uniform_(-math.log(2), math.log(2)).exp()
    drawn = {'shift': shift.tolist(), 'jitter': jitter.tolist(), 'rescale': rescale.item()}
    gate = 100 * encoding.gate.weight[0]
    q_turned, k_turned = (reference_rope_dinov3.rotate(x, grid.size, gate=gate, **where(grid), **drawn) for x in (q, k))
    inputs = {'q': q, 'k': k, 'v': v, **dict(encoding.named_parameters())}
    compare(actual, attention(q_turned, k_turned, v), inputs)


def test_augmentation_in_a_model(monkeypatch):
    """One draw for each forward pass in training, none in evaluation mode, and none if augmentation is off."""
    tables = []

    def recorded(x, table, half, rotate=position.apply_rot_embed_cat):
        tables.append(table)
        return rotate(x, table, half=half)

    off = build('rope_dinov3').train()
    model = build('rope_dinov3', {'shift': 0.5, 'jitter': 1.5, 'rescale': 2}).train()
    model.load_state_dict(off.state_dict())
    state = torch.get_rng_state()
    expected = off(images())
    assert torch.equal(torch.get_rng_state(), state)
    with monkeypatch.context() as patched:
        patched.setattr(position, 'apply_rot_embed_cat', recorded)
        model(images()), model(images())
    assert len(tables) == 8 and all(torch.equal(table, tables[0]) for table in tables[:4])
    assert (tables[4] - tables[0]).abs().max() > 1e-3
    assert torch.equal(model.eval()(images()), expected)


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords, message', [
    *[({'base': base}, "'rope_dinov3' needs base to be a positive number, got") for base in (
        0, -1.0, float('nan'), float('inf'), '100', True, None, [100])],
    *[({'normalize': normalize}, "'rope_dinov3': normalize must be 'separate', 'max' or 'min', got")
      for normalize in ('mean', None, 1, ['max'])],
    *[({key: value}, f"'rope_dinov3' needs {key} to be a number of at least {least}, or None")
      for key, least, values in (('shift', 0, (-0.1,)), ('jitter', 1, (0.9, 0)), ('rescale', 1, (0.5, -2)))
      for value in (*values, float('nan'), float('inf'), True, '2', [2])],
    ({'resolution': 'rescale'}, "'rope_dinov3' has no keyword 'resolution'"),
])
def test_wrong_input(keywords, message):
    with pytest.raises(ValueError, match=message):
        create('rope_dinov3', **{'dim': 24, 'heads': 2, **keywords})
