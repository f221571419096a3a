"""Tests and checks that biases from content share: SaPE2, SaPE2 with squared distances, CoPE and iRPE.

`make` makes an encoding, called with a grid, the number of prefix tokens, and keywords. `expected` is its bias by the
equations, called with the encoding, q, k and the grid.
"""
import copy
import functools

import pytest
import torch
import torch.nn as nn

import bias_checks
import timm_sape
from harness import (
    assert_near,
    attend,
    catches,
    compare,
    create,
    gradients,
    make_flat_regions,
    make_grid,
    make_qkv,
)
from loops import attention
from model_checks import EncodingTests, check_learns, check_masks, check_number_of_parameters
from timm_sape import Grid

SIZES = {'heads': 2, 'head_dim': 6}  # 1/sqrt(6) is no power of two: rounding with it would show
CASES = {  # grid, prefix tokens, kept patches
    '3x5': ((3, 5), 0, None),
    '3x5 and 5 prefix tokens': ((3, 5), 5, None),
    '1x7': ((1, 7), 1, None),
    '7x1': ((7, 1), 1, None),
    '4x4': ((4, 4), 1, None),
    '1x1': ((1, 1), 1, None),
    '1x1 alone': ((1, 1), 0, None),
    '3x5, 8 kept': ((3, 5), 1, 8),
    '7x1, 3 kept': ((7, 1), 0, 3),
    '4x4 and 5 prefix tokens, 6 kept': ((4, 4), 5, 6),
}
TRAINED_ON = {  # grid, prefix tokens, kept patches, trained grid
    '3x5 trained on 6x2': ((3, 5), 0, None, (6, 2)),
    '3x5 and a prefix token, trained on 6x2': ((3, 5), 1, None, (6, 2)),
    '1x7 trained on 4x4': ((1, 7), 0, None, (4, 4)),
    '1x7 and a prefix token, trained on 4x4': ((1, 7), 1, None, (4, 4)),
    '4x4 trained on 3x5, 6 kept': ((4, 4), 5, 6, (3, 5)),
}
IMAGES = ['random', 'flat regions', 'duplicated rows']


def make_image(image, grid):
    """q and k of one of `IMAGES`, of 8 rows, as leaves."""
    if image == 'random':
        return make_qkv(grid, **SIZES)[:2]
    qk = make_flat_regions(grid, **SIZES)
    return qk if image == 'flat regions' else [with_rows(x, grid.size, [0, 0, 2, 3, 3, 3, 6, 7]) for x in qk]


def with_rows(x, grid_size, rows):
    """`[B, h, H*W, d]` with these rows of the image in place of its own, as a leaf."""
    return x.detach().unflatten(2, grid_size)[:, :, rows].flatten(2, 3).requires_grad_()


def bias_of(encoding, q, k, grid):
    """What the encoding adds to the logits, `[B, h, N, N]`."""
    x = q.transpose(1, 2).flatten(2)
    return bias_checks.bias_of(encoding, grid, (q, k, x)).expand(*q.shape[:3], -1)


def check_bias(encoding, expected, grid, qk=None):
    """The bias and every gradient in float64."""
    q, k = qk or make_qkv(grid, **SIZES)[:2]
    leaves = {'q': q, 'k': k, **dict(encoding.named_parameters())}
    compare(bias_of(encoding, q, k, grid), expected(encoding, q, k, grid), leaves)


def check(make, expected, grid_size, num_prefix_tokens=0, num_keep=None, trained_on=None, **keywords):
    """The bias and every gradient, of an encoding made for the grid and of one made for the trained grid."""
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    for made_for in {grid_size, trained_on or grid_size}:
        encoding = make(made_for, num_prefix_tokens, ref_grid_size=trained_on, **keywords)
        check_bias(encoding, expected, grid)


def check_attention(make, expected, grid_size, num_prefix_tokens=0, num_keep=None, trained_on=None, **keywords):
    """Attention of a layer with this encoding alone, and every gradient, in float64. Not for a single token."""
    grid = make_grid(grid_size, num_prefix_tokens, num_keep)
    encoding = make(grid_size, num_prefix_tokens, ref_grid_size=trained_on, **keywords)
    if encoding.gate is not None:
        nn.init.constant_(encoding.gate.weight, 0.004)  # a gate of 0.4, or all attention would go to one token
    q, k, v = make_qkv(grid, **SIZES)
    out = attention(q, k, v, bias=expected(encoding, q, k, grid))
    compare(attend(encoding, q, k, v, grid), out, {'q': q, 'k': k, 'v': v, **dict(encoding.named_parameters())})


def gate_of(encoding):
    return 1 if encoding.gate is None else 100 * encoding.gate.weight[0]


# --- images that are hard to compute ---------------------------------------------------------------------------------

def check_flat_regions(make, expected):
    """Distances between patches are small beside what they are the distances of."""
    grid = make_grid((3, 5))
    check_bias(make((3, 5)), expected, grid, make_flat_regions(grid, **SIZES))


def check_duplicated_patches(make, expected):
    """Some patches cannot be told apart. Returns the bias between all patches, `[B, h, H, W, H, W]`."""
    grid, encoding = make_grid((4, 4)), make((4, 4))
    q, k = (with_rows(x, (4, 4), [0, 1, 1, 1]) for x in make_qkv(grid, **SIZES)[:2])
    check_bias(encoding, expected, grid, (q, k))
    return bias_of(encoding, q, k, grid).unflatten(3, (4, 4)).unflatten(2, (4, 4))


def check_large_logits(make, magnitude):
    """Nothing overflows, and no gradient becomes NaN."""
    grid = make_grid((4, 4), num_prefix_tokens=1)
    encoding = make((4, 4), 1, dtype=torch.float32)
    q, k, _ = make_qkv(grid, **SIZES, dtype=torch.float32)
    scale = (magnitude / (q @ k.mT).abs().max()).sqrt().detach()
    bias = bias_of(encoding, q * scale, k * scale, grid)
    assert bias.isfinite().all() and bias.abs().max() > 0
    for grad in gradients(bias, [q, k, *encoding.parameters()]):
        assert grad.isfinite().all()


def check_nan(make, in_k):
    """A run that diverges sees its loss become NaN; on a GPU, an index out of NaN would end the process instead.

    Args:
        in_k: Whether k has the NaN as well as q. It stays in its image and its head.
    """
    grid = make_grid((3, 3))
    q, k, _ = (x.detach().float() for x in make_qkv(grid, **SIZES, batch=2))
    q[0, 0, 4, 0] = float('nan')
    if in_k:
        k[0, 0, 4, 0] = float('nan')
    bias = bias_of(make((3, 3), dtype=torch.float32), q, k, grid)
    assert bias[0, 0, 4].isnan().any()
    assert bias[0, 1].isfinite().all() and bias[1].isfinite().all()


# --- precision -------------------------------------------------------------------------------------------------------

def check_float32(make, image, num_prefix_tokens=0):
    """The value and every gradient in float32 against float64, on one of `IMAGES`."""
    assert image == 'random' or num_prefix_tokens == 0
    grid = make_grid((8, 8), num_prefix_tokens)
    encoding = make((8, 8), num_prefix_tokens)
    qk = make_image(image, grid)
    single = copy.deepcopy(encoding).float()
    qk32 = [x.detach().float().requires_grad_() for x in qk]

    expected, actual = bias_of(encoding, *qk, grid), bias_of(single, *qk32, grid)
    assert actual.dtype == torch.float32
    assert_near(actual, expected, 1e-5)
    # Neighbours that differ by 1 % take two of float32's seven digits from the direction of their difference.
    tolerance = 1e-5 if image == 'random' else 1e-4
    for what, a, b in zip(
            ['q', 'k', *dict(encoding.named_parameters())],
            gradients(actual, [*qk32, *single.parameters()]),
            gradients(expected, [*qk, *encoding.parameters()])):
        assert_near(a, b, tolerance, f'gradient of {what}')


def check_half(make, dtype, **keywords):
    """Computed in float32 from the given values on: in float32 and in half models, with autocast and without."""
    grid = make_grid((4, 4), num_prefix_tokens=1, num_keep=9)
    q, k, _ = (x.detach() for x in make_qkv(grid, **SIZES, dtype=dtype))
    for encoding in (make((4, 4), 1, dtype=torch.float32, **keywords), make((4, 4), 1, **keywords).to(dtype)):
        expected = bias_of(copy.deepcopy(encoding).float(), q.float(), k.float(), grid)
        for enabled in (False, True):
            with torch.autocast('cpu', dtype, enabled=enabled):
                bias = bias_of(encoding, q, k, grid)
            assert bias.dtype == torch.float32
            assert_near(bias, expected, 1e-6)


def check_autocast(make):
    """Autocast reaches neither the bias nor its gradients."""
    grid = make_grid((4, 4), num_prefix_tokens=1)
    encoding = make((4, 4), 1, dtype=torch.float32)
    q, k, _ = make_qkv(grid, **SIZES, dtype=torch.float32)
    expected = bias_of(encoding, q, k, grid)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        actual = bias_of(encoding, q, k, grid)
    assert actual.dtype == torch.float32
    compare(actual, expected, {'q': q, 'k': k, **dict(encoding.named_parameters())}, 1e-6)


# --- properties ------------------------------------------------------------------------------------------------------

def check_images_apart(make):
    """Each image of a batch gives the same bias as it does alone."""
    grid = make_grid((3, 5), num_prefix_tokens=1, num_keep=6)
    encoding = make((3, 5), 1)
    q, k, _ = make_qkv(grid, **SIZES)
    together = bias_of(encoding, q, k, grid)
    for b in range(3):
        one = Grid(3, 5, 1, grid.keep_indices[b:b + 1])
        assert_near(bias_of(encoding, q[b:b + 1], k[b:b + 1], one), together[b:b + 1], 1e-13)


def check_scale_on_other_grids(name, tolerance, growth):
    """The mean bias is that of the trained grid; without rescaling it would grow with the size of the grid.

    Args:
        name: An encoding with the tables of SaPE2.
        tolerance: Of the mean bias, relative to that of the trained grid.
        growth: How much it would grow at least.
    """
    torch.manual_seed(0)

    def with_tables_of(trained, grid_size, **keywords):
        encoding = create(name, grid_size, heads=4, head_dim=16, table_std=1.0, random=False, **keywords)
        if trained is not None:
            encoding.load_state_dict(trained.state_dict())
        return encoding

    trained = with_tables_of(None, (7, 8))
    expected = mean_bias(trained)
    for size in ((14, 16), (14, 8), (5, 12)):
        assert mean_bias(with_tables_of(trained, size, ref_grid_size=(7, 8))) == pytest.approx(expected, rel=tolerance)
    assert mean_bias(with_tables_of(None, (14, 16))) > growth * expected


def mean_bias(encoding):
    """Of random q and k on the encoding's own grid, with 4 heads of 16 channels."""
    grid = Grid(*encoding.grid_size)
    q, k = torch.randn(2, 4, 4, grid.num_patches, 16, dtype=torch.float64)
    with torch.no_grad():
        return bias_of(encoding, q, k, grid).mean().item()


# --- what must be noticed --------------------------------------------------------------------------------------------

def no_longer_kept(grid, like):
    """Replaces `_is_kept`: as if no patch had been dropped."""
    return like.new_ones(like.shape[0], grid.num_patches)


def swapping(function):
    return lambda q, k, *args, **kwargs: function(k, q, *args, **kwargs)


def without_itself(gates):
    """Replaces `suffix_sum`: the gate of a patch itself is left out."""
    return gates.flip(-1).cumsum(-1).flip(-1) - gates


def from_the_start(gates):
    """Replaces `suffix_sum`: the sum of what lies before instead of what lies behind."""
    return gates.cumsum(-1)


def interpolating(shift=0, linear=True, slope=True):
    """Replaces `interpolate`: a cell too far, not between two cells, or with half the gradient of the positions."""
    def mutant(z, pos):
        last = z.shape[-1] - 1
        pos = (pos + shift).clamp(min=0, max=last)
        cell = pos.detach().long().clamp(max=last - 1)
        weight = pos - cell
        weight = weight if slope else 0.5 * (weight + weight.detach())
        return torch.lerp(z.gather(-1, cell), z.gather(-1, cell + 1), weight if linear else 0 * weight)
    return mutant


def never_rescaled(self, grid):
    """Replaces `rescaling`: every grid is taken for the trained one."""


# --- tests -----------------------------------------------------------------------------------------------------------

class ContentBiasTests(EncodingTests):
    """What every bias from content must pass.

    A subclass has a method `expected_bias(encoding, q, k, grid)`, which calls the reference.

    Attributes:
        kinds: A name and keywords for each kind of the encoding.
        model_keywords: Keywords in whole models, by kind, unless they are the default ones.
        knows_trained_grid: Whether the bias depends on the trained grid, so that this is saved.
    """
    kinds: dict
    model_keywords = {}
    knows_trained_grid = True
    PARAMETERS = [*EncodingTests.PARAMETERS, 'kind']

    def new(self, kind, *args, gated=False, **keywords):
        name, own = self.kinds[kind]
        return create(f'auto_{name}' if gated else name, *args, **{**SIZES, **own, **keywords})

    def maker(self, kind):
        return functools.partial(self.new, kind)

    def check(self, kind, *case, **keywords):
        check(self.maker(kind), self.expected_bias, *case, **keywords)

    # --- equations

    @pytest.mark.one_of(2)
    @pytest.mark.parametrize('case', CASES)
    def test_equations(self, kind, case):
        self.check(kind, *CASES[case])

    @pytest.mark.one_of(2)
    @pytest.mark.parametrize('case', TRAINED_ON)
    def test_equations_on_another_grid(self, kind, case):
        """Positions are scaled to the trained grid, if it matters."""
        self.check(kind, *TRAINED_ON[case])

    @pytest.mark.parametrize('case', ['3x5', '4x4 and 5 prefix tokens, 6 kept'])
    def test_equations_with_a_gate(self, kind, case):
        self.check(kind, *CASES[case], gated=True)

    @pytest.mark.one_of(3)
    def test_mutants_are_caught(self, mutant, monkeypatch):
        """If the package is broken like this, the comparison with the equations fails."""
        kind, case, patch = self.mutants[mutant]
        catches(lambda: self.check(kind, *case), monkeypatch, *patch)

    # --- images that are hard to compute

    def test_equations_on_flat_regions(self, kind):
        check_flat_regions(self.maker(kind), self.expected_bias)

    def test_duplicated_patches(self, kind):
        check_duplicated_patches(self.maker(kind), self.expected_bias)

    @pytest.mark.parametrize('magnitude', [1e2, 1e3, 1e4])
    def test_large_logits(self, kind, magnitude):
        check_large_logits(self.maker(kind), magnitude)

    @pytest.mark.parametrize('in_k', [False, True])
    def test_nan_stays_nan(self, kind, in_k):
        check_nan(self.maker(kind), in_k)

    # --- precision

    @pytest.mark.parametrize('image', IMAGES)
    def test_float32(self, kind, image):
        check_float32(self.maker(kind), image)
        if image == 'random':
            check_float32(self.maker(kind), image, num_prefix_tokens=1)

    @pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
    def test_half(self, kind, dtype):
        check_half(self.maker(kind), dtype)

    # --- properties

    def test_images_apart(self, kind):
        check_images_apart(self.maker(kind))

    def test_bias_moves_with_kept_patches(self, kind):
        name, keywords = self.kinds[kind]
        bias_checks.check_order_of_kept_patches(name, **keywords)

    def test_other_grid(self, kind):
        name, keywords = self.kinds[kind]
        bias_checks.check_other_grid(name, self.knows_trained_grid, **keywords)

    # --- models

    def test_number_of_parameters(self, kind):
        check_number_of_parameters(self.kinds[kind][0])

    def test_learns(self, kind):
        check_learns(self.kinds[kind][0], self.model_keywords.get(kind))

    def test_masks(self, kind):
        check_masks(self.kinds[kind][0], self.model_keywords.get(kind))

    # --- keywords

    def test_unknown_keyword(self, kind):
        name, _ = self.kinds[kind]
        with pytest.raises(ValueError, match=f"'{name}' has no keyword 'scale'"):
            create(name, scale=1)

    def test_registered_from_its_file(self, kind):
        name, _ = self.kinds[kind]
        assert timm_sape.get_encoding(name).__module__ == f'timm_sape.encodings.{name.split("_")[0]}'
