"""The Triton kernels: rounding to tf32, and launches for every size that they take."""
import itertools

import pytest
import torch
import triton
import triton.language as tl

from operators import DEVICE
from timm_sape.ops.triton_common import padded
from timm_sape.ops.triton_distances import _add_sums, backward_launches, forward_tiles
from timm_sape.ops.triton_limits import limits_of


@triton.jit
def _sums(R, W, ROW_SUM, RW, N: tl.constexpr):
    at = tl.arange(0, N)
    pairs = at[:, None] * N + at[None, :]
    row_sum, rw = tl.zeros((N,), tl.float32), tl.zeros((N, N), tl.float32)
    row_sum, rw = _add_sums(tl.load(R + pairs), tl.load(W + pairs), row_sum, rw, 'tf32')
    tl.store(ROW_SUM + at, row_sum)
    tl.store(RW + pairs, rw)


@pytest.mark.parametrize('bits', [0x7fffffff, 0xffffffff, 0x7fc00000, 0x7f800001])
@pytest.mark.parametrize('where', ['r', 'w'])
def test_nan_survives_rounding_to_tf32(where, bits):
    """Whatever its bits are; a GPU's arithmetic sets all."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    r, w = torch.randn(2, 16, 16, generator=generator, device=DEVICE)
    (r if where == 'r' else w)[3, 5] = torch.tensor(bits, dtype=torch.uint32).view(torch.float32)
    row_sum, rw = torch.zeros(16, device=DEVICE), torch.zeros(16, 16, device=DEVICE)
    _sums[(1,)](r, w, row_sum, rw, 16)
    expected = r @ w
    assert torch.equal(row_sum.isnan(), r.sum(1).isnan()) and torch.equal(rw.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert finite.sum() == 240 and (rw - expected)[finite].abs().max() < 2e-2


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
