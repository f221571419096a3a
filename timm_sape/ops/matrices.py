"""Skew-symmetric matrices, and the two usual ways from them to orthogonal ones.

ONNX has neither a matrix exponential nor a solver, so an exported graph computes both from products. A CUDA graph
cannot contain torch's exponential, so on a GPU it is computed from products, too, while torch compiles or captures.
"""
import torch

__all__ = ['cayley', 'matrix_exp', 'skew']

# In float32, skew-symmetric matrices with a norm of up to 2^11 are at least as close as by torch.linalg.matrix_exp. The
# error grows with the norm: 1e-6 at a norm of 1, 3e-5 at 256, 2.5e-4 at 2^11.
SQUARINGS, TERMS = 12, 8


def skew(entries: torch.Tensor, size: int) -> torch.Tensor:
    """Skew-symmetric matrices by their entries above the diagonal, row by row.

    Args:
        entries: `[..., size*(size-1)/2]`.
        size: Rows of a matrix, 2 or more.

    Returns:
        `[..., size, size]`.
    """
    i = torch.arange(size, device=entries.device)
    low, high = torch.minimum(i[:, None], i), torch.maximum(i[:, None], i)
    index = (low * (2 * size - low - 1) // 2 + high - low - 1).clamp(min=0)  # of the diagonal: any
    return entries[..., index] * (i - i[:, None]).sign()


def matrix_exp(a: torch.Tensor) -> torch.Tensor:
    """The matrix exponential of `[..., b, b]`."""
    if not (torch.onnx.is_in_onnx_export() or _may_be_captured(a)):
        return torch.linalg.matrix_exp(a.contiguous())  # torch 2.15 fails on some strides, as of channels_last
    # Taylor's series of a / 2^s, then s squarings. Without its 1 on the diagonal each step keeps the digits of small
    # entries: (1 + e)^2 = 1 + (2 e + e^2).
    a = a / 2 ** SQUARINGS
    term = e = a
    for n in range(2, TERMS + 1):
        term = term @ a / n
        e = e + term
    for _ in range(SQUARINGS):
        e = 2 * e + e @ e
    return e + torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)


def _may_be_captured(a: torch.Tensor) -> bool:
    """Whether this may become part of a CUDA graph. torch's exponential cannot: it looks at norms on the processor."""
    return a.is_cuda and (torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing())


def cayley(s: torch.Tensor) -> torch.Tensor:
    """(1 - s) (1 + s)^-1 of skew-symmetric matrices `[..., b, b]`, which is orthogonal."""
    one = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    if not torch.onnx.is_in_onnx_export():
        # The factors commute. 1 + s is never singular. `solve` would wait for the GPU to look at an error code, and
        # could not be captured in a CUDA graph.
        return torch.linalg.solve_ex(one + s, one - s)[0]
    # Gauss and Jordan's elimination. As s is skew-symmetric, no pivot is less than 1. In float32 the error of 64 x 64
    # matrices is 4e-5 for entries of 10, 4e-3 for entries of 1,000, and there are NaNs from 10^4 on.
    found = torch.cat([one + s, one - s], dim=-1)
    for i in range(s.shape[-1]):
        row = found[..., i:i + 1, :] / found[..., i:i + 1, i:i + 1]
        found = found - (found[..., i:i + 1] - one[:, i:i + 1]) * row
    return found[..., s.shape[-1]:]
