"""Skew-symmetric matrices, exponentials and Cayley transforms, as computed here and in exported graphs."""
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from timm_sape import ops

SIZES = [2, 3, 8, 64]


def entries(size, scale, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(3, size * (size - 1) // 2, generator=generator, dtype=torch.float64).to(dtype)


@pytest.fixture(params=[False, True], ids=['here', 'exported'])
def exported(request, monkeypatch):
    """Whether the operators that ONNX lacks are computed from products."""
    monkeypatch.setattr(torch.onnx, 'is_in_onnx_export', lambda: request.param)
    return request.param


@pytest.mark.parametrize('size', SIZES)
def test_skew(size):
    """Entries above the diagonal row by row, their negatives below it."""
    given = entries(size, 1)
    found = ops.skew(given, size)
    rows, columns = torch.triu_indices(size, size, 1)
    assert torch.equal(found[:, rows, columns], given)
    assert torch.equal(found, -found.mT) and found.shape == (3, size, size)


@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-11), (torch.float32, 1e-5)])
@pytest.mark.parametrize('norm', [1e-3, 1, 30, 500])
@pytest.mark.parametrize('size', SIZES)
def test_matrix_exp(size, norm, dtype, tolerance, exported):
    """Beside the eigenvalues of i*a, which is Hermitian. Small matrices keep their digits."""
    given = entries(size, 1)
    given = given * (norm / torch.linalg.matrix_norm(ops.skew(given, size), 2)[:, None])
    a = ops.skew(given, size).to(dtype)
    values, vectors = torch.linalg.eigh(1j * a.to(torch.complex128))
    expected = (vectors * torch.exp(-1j * values)[:, None] @ vectors.mH).real
    tolerance *= max(1, norm) if dtype is torch.float64 else max(1, norm / 10)
    found = ops.matrix_exp(a)
    assert found.dtype == dtype and (found - expected).abs().max() < tolerance
    one = torch.eye(size, dtype=dtype)
    assert (found @ found.mT - one).abs().max() < 2 * tolerance
    if norm < 1:
        assert (found - expected).abs().max() < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize('norm, most', [(1, 1e-6), (256, 3e-5), (2 ** 11, 2.5e-4)])
@pytest.mark.parametrize('size', SIZES)
def test_exported_exponential_is_as_close_as_that_of_torch(size, norm, most, monkeypatch):
    a = ops.skew(entries(size, 1), size)
    a = (norm * a / torch.linalg.matrix_norm(a, 2)[:, None, None]).float()
    expected = torch.linalg.matrix_exp(a.double())
    by_torch = (torch.linalg.matrix_exp(a) - expected).abs().max()
    monkeypatch.setattr(torch.onnx, 'is_in_onnx_export', lambda: True)
    assert (ops.matrix_exp(a) - expected).abs().max() <= min(by_torch, most)


@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize('scale', [0, 1e-3, 1, 5])
@pytest.mark.parametrize('size', SIZES)
def test_cayley(size, scale, dtype, tolerance, exported):
    s = ops.skew(entries(size, scale, dtype), size)
    one = torch.eye(size, dtype=torch.float64)
    found = ops.cayley(s)
    expected = (one - s.double()) @ torch.linalg.inv(one + s.double())
    assert found.dtype == dtype and (found - expected).abs().max() < tolerance * max(1, scale)
    assert (found @ found.mT - one).abs().max() < tolerance * max(1, scale)


@pytest.mark.parametrize('function', [ops.matrix_exp, ops.cayley])
def test_gradients(function, exported):
    given = entries(5, 0.7).requires_grad_()
    assert torch.autograd.gradcheck(lambda e: function(ops.skew(e, 5)), given)


class Called(TorchDispatchMode):
    """Records the operators that are called."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize('compiling, capturing', [(False, False), (True, False), (False, True)])
def test_nothing_waits_for_the_gpu_in_a_graph(compiling, capturing, monkeypatch):
    """By shapes alone, so that it needs no GPU. torch's exponential waits, and `solve`, which checks for errors."""
    monkeypatch.setattr(torch.compiler, 'is_compiling', lambda: compiling)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: capturing)
    for device in ('cpu', 'cuda'):
        with FakeTensorMode(), Called() as called:
            s = ops.skew(torch.zeros(3, 28, device=device), 8)
            found = ops.matrix_exp(s), ops.cayley(s)
        assert all(t.shape == s.shape and t.device == s.device for t in found)
        products = device == 'cuda' and (compiling or capturing)
        assert ('linalg_matrix_exp' in called.names) != products
        assert '_linalg_solve_ex' in called.names and '_linalg_check_errors' not in called.names
    with FakeTensorMode(), Called() as called:  # the negative control
        torch.linalg.solve(*torch.zeros(2, 3, 8, 8, device='cuda'))
    assert '_linalg_check_errors' in called.names


@pytest.mark.skipif(not torch.cuda.is_available(), reason='captures a CUDA graph, so it needs a GPU')
@pytest.mark.parametrize('function', [ops.matrix_exp, ops.cayley])
def test_captured(function):
    s = ops.skew(entries(8, 1, torch.float32), 8).cuda().requires_grad_()
    weight = torch.randn_like(s)

    def run():
        found = function(s)
        return found, *torch.autograd.grad((weight * found).sum(), s)

    expected = run()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()  # warm-up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    graph.replay()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
