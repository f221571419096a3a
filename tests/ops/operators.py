"""What the tests of the operators share: backends and their devices, inputs, and comparisons with the float64 loops.

On a machine without an NVIDIA GPU the Triton kernels run in Triton's interpreter, see conftest.py.
"""
import pytest
import torch

import reference_sape2
import tensor_cores
from harness import assert_near
from timm_sape.functional import sape2_attention

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
FAST = ('torch', 'cpp', 'triton')
BACKENDS = ('reference', *FAST)
HALVES = [(backend, dtype) for backend in FAST for dtype in (torch.float16, torch.bfloat16)]
NAMES = ('q', 'k', 'v', 'table_x', 'table_y', 'bias_scale')
FULL_WITHOUT_GPU = [] if DEVICE == 'cuda' else [pytest.mark.full]  # takes long in Triton's interpreter
if DEVICE == 'cpu':
    tensor_cores.install()


def _cdist_has_second_derivatives():
    x = torch.eye(3, requires_grad=True)
    grad, = torch.autograd.grad(torch.cdist(x, x).sum(), x, create_graph=True)
    try:
        grad.sum().backward()
    except NotImplementedError:
        return False
    return True


second_derivatives_of_distances = pytest.mark.skipif(
    not _cdist_has_second_derivatives(), reason='this version of torch has no second derivatives of cdist')


def device_of(backend):
    return DEVICE if backend == 'triton' else 'cpu'


def strictest(backend):
    """Device, dtype and tolerance. On a GPU Triton has no kernels for float64."""
    device = device_of(backend)
    return (device, torch.float64, 1e-10) if device == 'cpu' else (device, torch.float32, 1e-5)


def make_inputs(grid, num_prefix_tokens=1, *, heads=2, dim=8, batch=1, seed=0, npos=None):
    """q, k, v, both tables and bias_scale, in float64 on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    num_tokens = num_prefix_tokens + grid[0] * grid[1]
    # strided as in timm: q, k and v are parts of one projection
    q, k, v = draw(batch, num_tokens, 3, heads, dim).permute(2, 0, 3, 1, 4)
    return [q, k, v, draw(npos or grid[1] + 1, dim), draw(npos or grid[0] + 1, dim), draw(heads)]


def interleaved(q, k, v):
    """Parts of one tensor, as timm's projection makes them. `Tensor.to` would give each memory of its own."""
    return torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).contiguous().permute(2, 0, 3, 1, 4).unbind(0)


def run(function, inputs, dtype=None, device='cpu', seed=4, **kwargs):
    """Output and gradients of a weighted sum of its entries, on the CPU."""
    inputs = [t.detach().to(device, dtype) for t in inputs]
    if len({(t.shape, t.dtype) for t in inputs[:3]}) == 1 and inputs[0].ndim == 4:
        inputs[:3] = interleaved(*inputs[:3])
    kwargs = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
    for t in inputs:
        t.requires_grad_()
    *tensors, bias_scale = inputs
    out = function(*tensors, bias_scale=bias_scale, **kwargs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return out.cpu(), [g.cpu() for g in torch.autograd.grad(out, inputs, weights.to(out))]


def check(backend, inputs, grid, num_prefix_tokens, dtype=None, tolerance=None, **kwargs):
    """Attention and all gradients against the loops; by default in the strictest dtype."""
    device, *default = strictest(backend)
    dtype, tolerance = (dtype, tolerance) if dtype else default
    kwargs = dict(grid_size=grid, num_prefix_tokens=num_prefix_tokens, **kwargs)
    rounded = [t.to(dtype).double() for t in inputs]
    expected, expected_grads = run(reference_sape2.sape2_attention, rounded, **kwargs)
    actual, grads = run(sape2_attention, rounded, dtype, device, backend=backend, **kwargs)
    assert actual.dtype == dtype
    assert_near(actual, expected, tolerance, 'output')
    for what, a, b in zip(NAMES[:-1], grads, expected_grads):
        assert_near(a, b, tolerance, f'gradient of {what}')
    if tolerance < 1e-8:
        assert_near(grads[-1], expected_grads[-1], tolerance, 'gradient of bias_scale')
    else:
        # A sum of N x N terms of both signs, which cancel for some losses: it is compared with what it is for several.
        several = [
            run(sape2_attention, rounded, backend='reference', seed=seed, **kwargs)[1][-1] for seed in range(8)]
        error = (grads[-1] - expected_grads[-1]).abs().max()
        typical = torch.stack(several).square().mean(0).max().sqrt()
        assert error <= tolerance * typical, f'gradient of bias_scale: off by {error:.1e} of {typical:.1e}'


KINDS = ['random', 'smooth', 'constant', 'duplicated', 'outlier', 'large']


def make_hard(kind, grid, num_prefix_tokens, *, dim=16, seed=0):
    """Inputs for which a difference of products would lose its digits."""
    inputs = make_inputs(grid, num_prefix_tokens, dim=dim, seed=seed)
    q, k = inputs[0][:, :, num_prefix_tokens:], inputs[1][:, :, num_prefix_tokens:]
    if kind == 'smooth':
        y, x = torch.meshgrid(torch.linspace(0, 1, grid[0]), torch.linspace(0, 1, grid[1]), indexing='ij')
        for t in (q, k):
            base, along_y, along_x = t[:, :, :3].clone().split(1, dim=2)
            t.copy_(3 * base + 0.05 * (y.flatten()[:, None] * along_y + x.flatten()[:, None] * along_x))
    elif kind == 'constant':
        for t in (q, k):
            t.copy_(t[:, :, :1].clone().expand_as(t))
    elif kind == 'duplicated':
        for t in (q, k):
            t[:, :, grid[0] * grid[1] // 2:] = t[:, :, :1].clone()
    elif kind == 'outlier':
        k[:, :, 3] *= 100
    elif kind == 'large':
        for t in (q, k):
            t.mul_(30)  # logits of up to 10^4
    return inputs


def make_near_codes(num_near, distance, width=6, offset=3.0, seed=0):
    """Codes of two heads, `[2, 40, width]`; in the second head some are near the first one."""
    generator = torch.Generator().manual_seed(seed)
    codes = offset + torch.randn(2, 40, width, generator=generator)
    codes[1, :num_near] = codes[1, :1] + distance * torch.randn(num_near, width, generator=generator)
    return codes
