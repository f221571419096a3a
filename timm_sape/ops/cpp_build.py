"""Compiles and loads the CPU kernels of the backend 'cpp', `cpp_kernels.cpp`, by PyTorch's own extension loader.

They are compiled when somebody asks for them, by `build_cpp` or `backend='cpp'`, and not before: that takes half a
minute, and nobody who did not ask should wait for it in a forward pass. Whoever has asked once has a library on disk,
which later processes use unasked.

The name of the library tells processor, torch, source and flags, so machines that share a home directory do not share
libraries by mistake. It is compiled in a folder of its own and then moved, so nobody sees one that is being written; a
copy that was cut off is compiled again. Processes that want it at the same time wait for one of them.
"""
import functools
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import torch

__all__ = ['build_cpp', 'find_cpp']

SOURCE = Path(__file__).with_name('cpp_kernels.cpp')
FLAGS = ['-O3', '-fopenmp', '-fno-math-errno', '-fno-trapping-math']
INSTRUCTIONS = {  # what torch's vectors need, by the name that torch has for a processor
    'AVX2': ['-mavx2', '-mfma', '-mf16c'],
    'AVX512': ['-mavx512f', '-mavx512bw', '-mavx512dq', '-mavx512vl', '-mfma', '-mf16c'],
}
LONGEST_WAIT = 300  # seconds, for another process that compiles

_lock = threading.Lock()


def build_cpp() -> Path:
    """Compile the kernels of the backend 'cpp' unless they are there, and load them: half a minute, once a machine.

    Afterwards they are used unasked, in this process and in later ones. The library is in `TORCH_EXTENSIONS_DIR`, by
    default `~/.cache/torch_extensions`.

    Returns:
        The library.

    Raises:
        RuntimeError: If they cannot be compiled or loaded; says why, and what to do.
    """
    library = _load(compiling=True)
    find_cpp.cache_clear()
    return library


@functools.cache
def find_cpp() -> str:
    """Load the kernels if they have been compiled. Decided once, so that a run does not change its backend midway.

    Returns:
        Why they cannot be used, empty if they can.
    """
    try:
        _load(compiling=False)
    except RuntimeError as e:
        return str(e)
    return ''


def _load(compiling: bool) -> Path:
    with _lock:
        try:
            library = _library()
            if not _is_loaded() and _is_whole(library):
                try:
                    torch.ops.load_library(str(library))
                except OSError:
                    if not compiling:
                        raise
                    library.unlink(missing_ok=True)  # it may be of another system that shares the folder
            if not _is_loaded():
                if not compiling:
                    raise RuntimeError('they have not been compiled; timm_sape.ops.build_cpp() does that')
                _compile(library)
            if not _is_loaded():
                torch.ops.load_library(str(library))
        except OSError as e:
            why = f'{e} ({e.__cause__})' if e.__cause__ else str(e)  # torch hides the reason of the system
            raise RuntimeError(
                f'{why}; set TORCH_EXTENSIONS_DIR to a folder that can be written, and from which libraries can be '
                'loaded') from e
        except subprocess.CalledProcessError as e:
            raise RuntimeError(f'the compiler does not work ({e}); name another one in the variable CXX') from e
        return library


def _is_loaded() -> bool:
    return hasattr(torch.ops.timm_sape_cpp, 'attention')


def _library() -> Path:
    """Where the library for this machine is, or would be."""
    processor = torch.backends.cpu.get_cpu_capability()
    if sys.platform != 'linux' or processor not in INSTRUCTIONS:
        raise RuntimeError(
            f'they are for Linux and processors with AVX2 or AVX-512, and this is {sys.platform} with {processor}')
    flags = ' '.join([*FLAGS, *INSTRUCTIONS[processor]])
    key = hashlib.sha256(SOURCE.read_bytes() + flags.encode()).hexdigest()[:12]
    root = os.environ.get('TORCH_EXTENSIONS_DIR') or Path.home() / '.cache' / 'torch_extensions'
    name = f'timm_sape_torch{torch.__version__}_{platform.machine()}_{processor}_{key}.so'
    return Path(root) / name


def _is_whole(library: Path) -> bool:
    """Whether it is there, to its end. A process that loads a part of a library dies without a word."""
    if not library.exists():
        return False
    with open(library, 'rb') as f:
        head = f.read(64)  # of an ELF file of 64 bits; the table of its sections is the last thing in it
    if len(head) < 64:
        return False
    table, = struct.unpack_from('<Q', head, 40)
    size, count = struct.unpack_from('<HH', head, 58)
    return library.stat().st_size >= table + size * count


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """`pip install ninja` puts it beside Python, which is not on the path of an environment that is not activated."""
    beside, path = Path(sys.executable).parent, os.environ.get('PATH', '')
    if shutil.which('ninja') is None and (beside / 'ninja').exists():
        os.environ['PATH'] = os.pathsep.join([path, str(beside)])
    try:
        yield
    finally:
        os.environ['PATH'] = path


def _compile(library: Path) -> None:
    """Compile the library and load it, unless another process has done so meanwhile."""
    from filelock import FileLock, Timeout  # a dependency of torch
    from torch.utils import cpp_extension

    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        raise RuntimeError(f'there is no compiler {compiler!r}; install g++, or name another one in the variable CXX')
    processor = torch.backends.cpu.get_cpu_capability()
    # The OpenMP that torch has loaded already; one of our own would have threads of its own, and their number.
    openmp = [str(path) for path in Path(torch.__file__).parent.glob('lib/libgomp*')][:1]
    library.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(library.with_suffix('.lock'), timeout=LONGEST_WAIT):
            if _is_whole(library):
                return
            with tempfile.TemporaryDirectory(dir=library.parent) as folder, _ninja_on_path():
                built = cpp_extension.load(
                    'timm_sape_cpp', [str(SOURCE)],
                    extra_cflags=[
                        *FLAGS, *INSTRUCTIONS[processor], f'-DCPU_CAPABILITY={processor}',
                        f'-DCPU_CAPABILITY_{processor}'],
                    extra_ldflags=openmp or ['-fopenmp'], build_directory=folder, is_python_module=False)
                with open(built, 'rb') as f:
                    os.fsync(f.fileno())  # so that no crash leaves a whole name and half a library
                os.replace(built, library)
    except Timeout:
        raise RuntimeError(f'another process has been compiling for {LONGEST_WAIT} seconds') from None
