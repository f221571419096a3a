"""The Triton kernels: rounding to 16 bits and to tf32, and launches for every size that they take."""
import itertools

import pytest
import torch
import triton
import triton.language as tl

from operators import DEVICE
from timm_sape.ops.distances import distance_attention
from timm_sape.ops.triton_common import dense_rows, padded
from timm_sape.ops.triton_distances import _add_sums
from timm_sape.ops.triton_limits import limits_of
from timm_sape.ops.triton_operators import triton_distance_attention
from timm_sape.ops.triton_prepare import PreparedCodes
from timm_sape.ops.triton_tiles import backward_launches, forward_tiles


@triton.jit
def _sums(R, W, LOW, ROW_SUM, RW, N: tl.constexpr, FEW_DIGITS: tl.constexpr):
    at = tl.arange(0, N)
    pairs = at[:, None] * N + at[None, :]
    row_sum, rw = tl.zeros((N, 8), tl.float32), tl.zeros((N, N), tl.float32)
    row_sum, rw = _add_sums(
        tl.load(R + pairs), tl.load(W + pairs), tl.load(LOW + pairs), row_sum, rw, True, FEW_DIGITS)
    tl.store(ROW_SUM + at, tl.sum(row_sum, 1))
    tl.store(RW + pairs, rw)


@pytest.mark.parametrize('few_digits', [True, False])
@pytest.mark.parametrize('where, bits', [
    *itertools.product(('r', 'w'), (0x7fffffff, 0xffffffff, 0x7fc00000)), ('w', 0x7f800001)])
def test_nan_survives_rounding(where, bits, few_digits):
    """To bfloat16 and to tf32. R is computed, and a GPU's own NaN has all bits set. The codes may hold any."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    r, w = torch.randn(2, 16, 16, generator=generator, device=DEVICE)
    (r if where == 'r' else w)[3, 5] = torch.tensor(bits, dtype=torch.uint32).view(torch.float32)
    high = w.half()
    low = (w - high).half()
    row_sum, rw = torch.zeros(16, device=DEVICE), torch.zeros(16, 16, device=DEVICE)
    _sums[(1,)](r, high, low, row_sum, rw, 16, few_digits)
    expected = r @ w
    assert torch.equal(row_sum.isnan(), r.sum(1).isnan()) and torch.equal(rw.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert finite.sum() == 240 and (rw - expected)[finite].abs().max() < 5e-2
    if where == 'r':
        return
    # R is rounded alike in both
    rounded = r.bfloat16().float() if few_digits else (r.view(torch.int32) & ~0x1fff).view(torch.float32)
    assert (rw - rounded @ w)[finite].abs().max() < (2e-4 if few_digits else 1e-5)
    assert (row_sum - rounded.sum(1)).abs().max() < 1e-5


def _codes(seed, width, num_patches=45):
    return torch.randn(1, 2, num_patches, width, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_prepared_codes_have_22_bits():
    """The two parts sum to the centred code in units of a power of two; the norms are those of the sum."""
    codes = _codes(0, 9) + 3, 1e-3 * _codes(1, 5)
    codes[0][:, 1] *= 1e-12
    codes[1][:, 1] *= 1e12
    found = PreparedCodes.of(*codes, 47, torch.float16)
    mantissa, _ = torch.frexp(found.unit)
    assert (mantissa == 0.5).all()
    highs, lows = zip(*(w.chunk(2, dim=-1) for w in (found.wx, found.wy)))
    largest = torch.stack([w.abs().amax((1, 2)) for w in highs]).amax(0)
    assert (largest >= 2 ** 13).all() and (largest <= 2 ** 14).all()
    for c, high, low, s in zip(codes, highs, lows, (found.sx, found.sy)):
        w = (high.double() + low.double()) * found.unit.double()[:, None, None]
        exact = c[0].double() - c[0].double().mean(1, keepdim=True)
        error = (w[:, 2:, :c.shape[-1]] - exact).abs()
        # 22 bits, the rounding of the mean, and half of fp16's smallest number
        mean_error = 2 ** -22 * c[0].abs().amax((1, 2), keepdim=True)
        allowed = 2 ** -22 * exact.abs() + mean_error + 2 ** -25 * found.unit[:, None, None]
        assert (error <= allowed).all(), (error - allowed).max()
        assert not w[:, :2].any() and not w[..., c.shape[-1]:].any()
        norms = (high.double() + low.double()).square().sum(-1)
        assert (s[:, :2] < -1e37).all() and ((s - norms)[:, 2:].abs() <= 1e-6 * norms[:, 2:]).all()


@pytest.mark.one_of(3)
@pytest.mark.parametrize('width', [3, 9])
@pytest.mark.parametrize('exponent', [-60, 40])
def test_size_of_codes_does_not_matter(exponent, width):
    """With codes times a power of two and the gain divided by it, everything is the same to the last digit."""
    q, k, v = torch.randn(3, 1, 2, 47, 8, generator=torch.Generator().manual_seed(2)).half().to(DEVICE)
    found = []
    for factor in (1.0, 2.0 ** exponent):
        inputs = [
            q, k, v, *(factor * _codes(seed, width) for seed in (0, 1)),
            torch.tensor([0.5, -0.3], device=DEVICE) / factor]
        inputs = [t.clone().requires_grad_() for t in inputs]
        out = triton_distance_attention(*inputs, 0.3)
        grads = torch.autograd.grad(out, inputs, torch.ones_like(out).cumsum(-1))
        found.append([out, *grads[:3], *(g * factor for g in grads[3:5]), grads[5] / factor])
    for a, b in zip(*found):
        assert a.isfinite().all() and torch.equal(a, b)


@pytest.mark.one_of(3)
@pytest.mark.parametrize('dtype, width, centre, spread', [
    (torch.float32, 16, 3e18, 6e16),  # squared norms of 1e38
    (torch.float32, 9, 0, 1e-17),  # squared distances that float32 can just hold
    (torch.float16, 60, 1e37, 1e37),  # sums over channels that it cannot hold
    (torch.float16, 9, 0, 1e-35),
    (torch.float16, 9, 0, 1e30),
])
def test_extreme_codes(dtype, width, centre, spread):
    """With a gain that makes something of them, they are right; prefix tokens have no distance."""
    q, k, v = torch.randn(3, 1, 2, 47, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    codes = [(centre + spread * _codes(seed, width)).cpu() for seed in (0, 1)]
    inputs = [q, k, v, *codes, torch.tensor([-0.3 / spread])]
    found, expected = ([t.clone().requires_grad_() for t in case] for case in (inputs, [t.double() for t in inputs]))
    out = triton_distance_attention(*(t.to(DEVICE) for t in found), 0.3).cpu()
    exact = distance_attention(0.3, *expected)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    grads = torch.autograd.grad(out, found[:5], weights.to(dtype))
    exact_grads = torch.autograd.grad(exact, expected[:5], weights.to(dtype).double())
    for a, b in zip((out, *grads), (exact, *exact_grads)):
        error = (a.double() / b.abs().max() - b / b.abs().max()).abs().max()
        assert error < (2e-2 if dtype == torch.float16 else 2e-4), error


def test_memory_of_output_and_its_gradient():
    """Heads can be merged without a copy. The gradient may have any strides; 0 where it is a broadcast sum."""
    q, k, v = torch.randn(3, 1, 2, 47, 8, generator=torch.Generator().manual_seed(2)).half().to(DEVICE)
    inputs = [t.requires_grad_() for t in (q, k, v, _codes(0, 9), _codes(1, 9), torch.ones(1, device=DEVICE))]
    out = triton_distance_attention(*inputs, 0.3)
    assert out.transpose(1, 2).is_contiguous()
    weights = torch.randn(1, 47, 2, 8, generator=torch.Generator().manual_seed(3)).half().to(DEVICE).transpose(1, 2)
    grads = [torch.autograd.grad(out, inputs, w, retain_graph=True) for w in (weights, weights.contiguous())]
    assert all(map(torch.equal, *grads))
    ones = torch.ones(1, 1, 1, 1, device=DEVICE, dtype=out.dtype).expand(out.shape)
    grads = [torch.autograd.grad(out, inputs, w, retain_graph=True) for w in (ones, ones.contiguous())]
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize('stride, is_copied', [(2 ** 29 - 1, False), (2 ** 29, True)])
def test_offsets_fit_32_bits(stride, is_copied):
    """Rows that are too far apart are copied. The meta device has no memory, so they may be."""
    found, = dense_rows(torch.empty_strided((1, 1, 4, 8), (8, 8, stride, 1), device='meta'))
    assert found.is_contiguous() == is_copied


def test_short_codes_that_differ_by_rounding_alone():
    """They count as equal. Otherwise gradients would have the direction of noise."""
    q, k, v = torch.randn(3, 1, 2, 47, 8, generator=torch.Generator().manual_seed(2)).half().to(DEVICE)
    distinct = _codes(0, 3)
    distinct[:, :, 20:] = distinct[:, :, 20:21]
    noisy = distinct * (1 + 2e-7 * _codes(1, 3).sign())
    grads = []
    for codes in (distinct, noisy):
        codes = codes.clone().requires_grad_()
        out = triton_distance_attention(q, k, v, codes, torch.zeros_like(codes), torch.ones(1, device=DEVICE), 0.3)
        grads += torch.autograd.grad(out.cumsum(-1).sum(), codes)
    assert (grads[0] - grads[1]).norm() < 1e-2 * grads[0].norm()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
def test_launches_compute_each_gradient_once(dtype):
    """In each pass, for every head dim and code within the limits; the query pass first, which the key pass adds to."""
    max_head_dim, max_code = limits_of(dtype)
    sizes = itertools.product(range(1, max_head_dim + 1), range(1, max_code + 1))
    for head_dim, code in sorted({(padded(head_dim), padded(code)) for head_dim, code in sizes}):
        assert forward_tiles(head_dim, code, dtype.itemsize).own >= 16
        launches = backward_launches(head_dim, code, dtype.itemsize)
        if dtype == torch.float32:
            assert launches[0].delta_only and not any(launches[0][3:]), 'the others read what it computes'
            launches = launches[1:]
        assert [launch.key_pass for launch in launches] == sorted(launch.key_pass for launch in launches)
        for key_pass in (False, True):
            of_pass = [launch[2:] for launch in launches if launch.key_pass == key_pass]
            assert [sum(computed) for computed in zip(*of_pass)] == [0, 1, 1, 1], (head_dim, code)
