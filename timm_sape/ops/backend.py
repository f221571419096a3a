"""Which implementation of SaPE2's attention runs: 'reference', 'torch', 'cpp' or 'triton'."""
import functools
import importlib.util
import logging
import os
from contextlib import contextmanager
from typing import Dict, Iterator, Mapping, Optional, Sequence, Tuple

import torch

from .cpp_build import build_cpp, find_cpp
from .sizes import is_empty
from .transforms import is_exporting, is_transformed
from .triton_limits import FAST_FLOAT64, LIMITS, MIN_CAPABILITY, MISCOMPILED_ON, limits_of, shared_memory

__all__ = ['BACKENDS', 'choose_backend', 'using_backend']

BACKENDS = ('reference', 'torch', 'cpp', 'triton')
VARIABLE = 'TIMM_SAPE_BACKEND'

#: GPU and date of the last time that the kernels' tests passed on hardware, by compute capability. On other GPUs the
#: Triton kernels run only where they are asked for.
TRITON_TESTED_ON: Dict[Tuple[int, int], str] = {(9, 0): 'NVIDIA H200, 2026-11-27'}

_logger = logging.getLogger(__name__)


@torch.compiler.assume_constant_result
def _from_environment() -> Optional[str]:
    return os.environ.get(VARIABLE) or None


@contextmanager
def using_backend(backend: Optional[str]) -> Iterator[None]:
    """Set `TIMM_SAPE_BACKEND` within a `with` block; None unsets it.

    The variable belongs to the process, so other threads see it. A graph that torch.compile has built keeps its
    backend; call `torch.compiler.reset()` before.
    """
    before = os.environ.pop(VARIABLE, None)
    try:
        if backend is not None:
            os.environ[VARIABLE] = backend
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


@functools.lru_cache(maxsize=None)
def _log_once(level: int, backend: str, why: str) -> None:
    _logger.log(level, f'SaPE2 attention by backend {backend!r}: {why}.')


@torch.compiler.assume_constant_result  # torch.compile calls it while it compiles
def _log(level: int, backend: str, why: str) -> None:
    _log_once(level, backend, why)


@functools.lru_cache(maxsize=None)
def _gpu(index: int) -> Tuple[str, int]:
    """Why Triton does not run on a GPU, empty if it does, and how many KiB of shared memory a program may use there."""
    properties = torch.cuda.get_device_properties(index)
    capability = properties.major + properties.minor / 10
    if capability < MIN_CAPABILITY:
        return f'Triton needs compute capability {MIN_CAPABILITY}, and this GPU has {capability}', 0
    if properties.major == MISCOMPILED_ON:
        return f'on GPUs of compute capability {capability} some versions of Triton compile them into wrong code', 0
    try:
        from triton.runtime import driver
        driver.active.get_current_device()
    except Exception as e:  # it compiles a part of itself, and slim containers have no compiler
        return f'Triton does not start ({e})', 0
    return '', properties.shared_memory_per_block_optin // 1024


@torch.compiler.assume_constant_result
def _triton_on(device_type: str, index: Optional[int]) -> Tuple[str, int]:
    """As `_gpu`, for any device."""
    if importlib.util.find_spec('triton') is None:
        return 'Triton is not installed', 0
    if device_type == 'cuda' and torch.version.hip is None:
        return _gpu(torch.cuda.current_device() if index is None else index)
    if device_type == 'cpu' and os.environ.get('TRITON_INTERPRET') == '1':
        return '', shared_memory(*LIMITS[16], itemsize=2)
    return (
        'its kernels do not run on this device: they need an NVIDIA GPU, or the CPU with TRITON_INTERPRET=1 set before '
        'Python starts'), 0


@torch.compiler.assume_constant_result
def _capability(index: Optional[int]) -> Tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@torch.compiler.assume_constant_result
def _cpp_on(device_type: str, build: bool) -> str:
    """Why the compiled CPU kernels cannot be used, empty if they can. They are compiled if `build`."""
    if device_type != 'cpu':
        return f'its kernels run on the CPU, not on {device_type}'
    why = find_cpp()
    if why and build:
        try:
            build_cpp()
        except RuntimeError as e:
            return str(e)
        return ''
    return why


def _refusal(
        backend: str,
        q: torch.Tensor,
        head_dim: int,
        code_widths: Sequence[int],
        needs_reference: str,
) -> str:
    """Why a backend cannot be used, empty if it can."""
    if backend == 'reference':
        return ''
    if needs_reference:
        return f'only the reference supports {needs_reference}'
    if backend == 'cpp':
        return _cpp_on(q.device.type, build=True)
    if backend == 'triton':
        why, memory = _triton_on(q.device.type, q.device.index)
        if why:
            return why
        if q.dtype == torch.float64 and q.device.type == 'cuda':
            return 'on a GPU its kernels do not take float64'
        (most_channels, most_entries), widest = limits_of(q.dtype), max(code_widths)
        if head_dim > most_channels or widest > most_entries:
            return (
                f'in {q.dtype} its kernels take a head dim of {most_channels} and codes of {most_entries} entries at '
                'most')
        needed = shared_memory(head_dim, widest, q.dtype.itemsize)
        if needed > memory:
            return (
                f'in {q.dtype}, for a head dim of {head_dim} and codes of {widest} entries, its kernels need '
                f'{needed} KiB of shared memory, and this GPU has {memory}')
    return ''


def _fastest(q: torch.Tensor, head_dim: int, code_widths: Sequence[int]) -> Tuple[str, int, str]:
    """The fastest backend that can be used; for the log a level, and why."""
    if q.device.type == 'cpu':
        why = _cpp_on('cpu', build=False)
        if why:
            return 'torch', logging.INFO, f"the kernels of 'cpp' would be faster, but {why}"
        return 'cpp', logging.INFO, 'the fastest on cpu'
    if q.device.type != 'cuda' or torch.version.hip is not None:
        return 'torch', logging.INFO, f'the fastest on {q.device.type}'
    refusal = _refusal('triton', q, head_dim, code_widths, '')
    if refusal and q.dtype.itemsize <= 2:
        return 'torch', logging.WARNING, f"the kernels of 'triton' would be faster, but {refusal}"
    if refusal:  # wider numbers they compute in float64, which is slow on most GPUs
        return 'torch', logging.INFO, f"the kernels of 'triton' cannot be used: {refusal}"
    capability = _capability(q.device.index)
    if q.dtype == torch.float32 and capability not in FAST_FLOAT64:
        why = 'for float32 the Triton kernels compute in float64, which is slow on this GPU'
        return 'torch', logging.INFO, why
    if capability in TRITON_TESTED_ON:
        return 'triton', logging.INFO, 'the fastest on this GPU'
    return 'torch', logging.WARNING, (
        "the kernels of 'triton' would be faster, but no GPU of compute capability {}.{} has run their tests yet; "
        '{}=triton selects them'.format(*capability, VARIABLE))


def choose_backend(
        requested: Optional[str],
        q: torch.Tensor,
        code_widths: Sequence[int],
        only_reference: Mapping[str, bool] = {},
        head_dim: Optional[int] = None,
) -> str:
    """The argument decides, then the variable `TIMM_SAPE_BACKEND`, then what is fastest for device and shape.

    Two cases get the reference whatever was requested: exported graphs, which must not contain our operators, and input
    without tokens, because the kernels divide by their number.

    Says once in the log what it chose and why: as a warning, which Python shows by default, where a GPU could do it
    much faster.

    Args:
        requested: One of `BACKENDS`, None to choose.
        q: Queries.
        code_widths: For x and for y the entries of the codes, or those of the table minus 1 if that is more.
        only_reference: What the reference alone supports, in words, and whether it is needed.
        head_dim: Channels of q and k in the logits; None for those of q.

    Raises:
        ValueError: If the backend is unknown, or requested and cannot be used.
    """
    if is_exporting() or torch.jit.is_tracing() or is_empty(q):
        return 'reference'
    head_dim = q.shape[-1] if head_dim is None else head_dim
    only_reference = {**only_reference, 'torch.func and forward mode': is_transformed()}
    needs_reference = ', '.join(what for what, needed in only_reference.items() if needed)
    by, level = 'backend=' if requested is not None else VARIABLE, logging.INFO
    requested = requested if requested is not None else _from_environment()
    if requested is not None:
        if requested not in BACKENDS:
            raise ValueError(f'Unknown backend {requested!r} ({by}). Use one of {", ".join(map(repr, BACKENDS))}.')
        refusal = _refusal(requested, q, head_dim, code_widths, needs_reference)
        if refusal:
            raise ValueError(
                f"backend {requested!r} ({by}) cannot be used: {refusal}. Use 'reference', or leave it out.")
        backend, why = requested, f'requested by {by.rstrip("=")}'
    elif needs_reference:
        backend, why = 'reference', f'only it supports {needs_reference}'
        if q.device.type == 'cuda':
            level, why = logging.WARNING, f'{why}; without that, this GPU would be faster'
    else:
        backend, level, why = _fastest(q, head_dim, code_widths)
    _log(level, backend, why)
    return backend
