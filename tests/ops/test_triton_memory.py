"""What the Triton kernels read and write: in bounds, initialized, and without races between programs.

On a GPU compute-sanitizer sees the first, and `.ci/gpu` runs it.
"""
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterError

from harness import assert_near
from operators import DEVICE, make_inputs
from timm_sape.functional import sape2_attention
from watched_memory import watched_memory

pytestmark = pytest.mark.skipif(DEVICE != 'cpu', reason='the interpreter is watched, and it runs on the CPU')


def framed(t):
    """The same numbers within a larger tensor of NaN."""
    batch, heads, num_tokens, dim = t.shape
    frame = t.new_full((batch, heads, num_tokens + 3, dim + 5), torch.nan)
    return frame[:, :, 1:-2, 2:-3].copy_(t)


LAYOUTS = {
    'timm': lambda t: t,
    'contiguous': torch.Tensor.contiguous,
    'framed': framed,
    'channels last': lambda t: t.mT.contiguous().mT,
    'one image': lambda t: t[:1].expand_as(t),
    'one head': lambda t: t[:, :1].expand_as(t),
}
CASES = {
    # grid, prefix tokens, heads, dim, batch, positions, mode, dtype, layout
    '1x1': ((1, 1), 0, 1, 1, 1, None, 'k', torch.float32, 'timm'),
    '1x1, framed': ((1, 1), 3, 2, 8, 1, 5, 'q', torch.bfloat16, 'framed'),
    '1x7': ((1, 7), 1, 2, 5, 2, None, 'k', torch.float16, 'contiguous'),
    '7x1, one image': ((7, 1), 0, 2, 5, 2, None, 'qk', torch.float32, 'one image'),
    '1x17, one head': ((1, 17), 2, 2, 16, 1, None, 'q', torch.float32, 'one head'),
    '3x16': ((3, 16), 1, 2, 17, 1, None, 'k', torch.bfloat16, 'framed'),
    '16x3, channels last': ((16, 3), 1, 1, 20, 2, 17, 'k', torch.float16, 'channels last'),
    '9x13': ((9, 13), 1, 1, 16, 1, 12, 'qk', torch.float16, 'framed'),
    '2x33': ((2, 33), 1, 1, 65, 1, None, 'k', torch.bfloat16, 'timm'),
}


@pytest.mark.parametrize('case', [
    pytest.param(case, marks=[] if case == '1x1, framed' else pytest.mark.full) for case in CASES])
def test_memory(case):
    grid, num_prefix_tokens, heads, dim, batch, npos, mode, dtype, layout = CASES[case]
    inputs = make_inputs(grid, num_prefix_tokens, heads=heads, dim=dim, batch=batch, npos=npos)
    q, k, v = (LAYOUTS[layout](t) for t in (t.to(dtype) for t in inputs[:3]))
    leaves = [t.detach().requires_grad_() for t in (q, k, v, *(t.float() for t in inputs[3:]))]
    options = dict(
        num_prefix_tokens=num_prefix_tokens, mode=mode, ref_grid_size=None if npos is None else (npos - 1, npos - 1))
    weights = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with watched_memory() as (launches, problems):
        out = sape2_attention(*leaves[:5], grid, bias_scale=leaves[5], backend='triton', **options)
        found = out, *torch.autograd.grad(out, leaves, weights.to(out))
    assert {launch.name for launch in launches} == {'_prepare', '_forward', '_backward'} and not problems
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out = sape2_attention(*exact[:5], grid, bias_scale=exact[5], backend='reference', **options)
    tolerance = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    for a, b in zip(found, (out, *torch.autograd.grad(out, exact, weights))):
        assert_near(a, b, tolerance)


@triton.jit
def _faulty(X, Y, num, WHAT: tl.constexpr):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    if WHAT == 'outside':
        tl.store(Y + at, tl.load(X + at))
    elif WHAT == 'twice':
        tl.store(Y + at // 2, tl.load(X + at, mask=at < num), mask=at < num)
    elif WHAT == 'two programs':
        tl.store(Y + tl.arange(0, 4), tl.load(X + at, mask=at < num))
    elif WHAT == 'reads what was written':
        tl.store(Y + at, tl.load(X + at, mask=at < num), mask=at < num)
        tl.store(X + at, tl.load(Y + at, mask=at < num), mask=at < num)
    elif WHAT == 'others':
        tl.store(X + at, tl.load(X + num - 1 - at, mask=at < num), mask=at < num)
    else:
        tl.store(Y + at, tl.load(X + at, mask=at < num), mask=at < num)


@pytest.mark.parametrize('what, problems', [
    ('nothing', set()),
    ('twice', {'writes twice'}),
    ('two programs', {'writes twice'}),
    ('reads what was written', {'reads what was written'}),
    ('others', {'reads what was written', 'writes what others read'}),
])
def test_watching_sees_faults(what, problems):
    x, y = torch.arange(8.)[:7], torch.zeros(8)[:7]
    with watched_memory() as (launches, found):
        _faulty[(2,)](x, y, 7, what)
        assert torch.empty(5).isnan().all()
    assert len(launches) == 1 and found == {f'_faulty: {problem}' for problem in problems}
    if what == 'nothing':
        assert torch.equal(x, y)


def test_watching_stops_at_the_border():
    x, y = torch.zeros(8)[:7], torch.zeros(8)
    with watched_memory(), pytest.raises(InterpreterError, match='_faulty: outside of all tensors'):
        _faulty[(2,)](x, y, 7, 'outside')
    with watched_memory(), pytest.raises(InterpreterError, match='_faulty: outside of all tensors'):
        _faulty[(2,)](y, x, 7, 'outside')
