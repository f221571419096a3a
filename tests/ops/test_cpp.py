"""The compiled CPU kernels: blocks, strides and threads; their build, and what is said where they cannot be built."""
import itertools
import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch.utils import cpp_extension
from torch.utils.cpp_extension import get_cxx_compiler

import timm_sape
from harness import assert_near
from operators import make_inputs, run
from timm_sape.functional import sape2_attention
from timm_sape.ops import backend as selection
from timm_sape.ops import build_cpp, cpp_build
from timm_sape.ops.backend import choose_backend
from timm_sape.ops.cpp_operators import cpp_distance_attention

ROOT = Path(timm_sape.__file__).parents[1]


@pytest.mark.cpp
@pytest.mark.parametrize('grid, num_prefix_tokens', [
    ((9, 7), 1),  # one block of queries is full
    ((8, 8), 1),  # one query more
    ((8, 8), 17),  # a vector of prefix tokens alone
    ((5, 26), 0),
    ((6, 12), 70),  # a block of prefix tokens alone, and three blocks
    pytest.param((33, 32), 1, marks=pytest.mark.full),
])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_blocks(grid, num_prefix_tokens, dtype):
    inputs = [t.to(dtype) for t in make_inputs(grid, num_prefix_tokens, heads=1, dim=20)]
    kwargs = dict(grid_size=grid, num_prefix_tokens=num_prefix_tokens)
    expected, expected_grads = run(sape2_attention, inputs, torch.float64, backend='reference', **kwargs)
    found, grads = run(sape2_attention, inputs, backend='cpp', **kwargs)
    # in float32 positions in wide tables, and so the codes, are off by more
    tolerance = 1e-10 if dtype == torch.float64 else 3e-5
    assert_near(found, expected, tolerance)
    for a, b in zip(grads, expected_grads):
        assert_near(a, b, tolerance)


@pytest.mark.cpp
def test_no_tokens():
    """The operator itself, which a compiled graph may call, does not divide by their number."""
    q, k, v, codes = (torch.randn(2, 3, 0, 16, requires_grad=True) for _ in range(4))
    gain = torch.ones(3, requires_grad=True)
    out = cpp_distance_attention(q, k, v, codes, codes, gain, 0.25)
    out.sum().backward()
    assert out.shape == q.shape and q.grad.shape == q.shape and not gain.grad.any()


@pytest.mark.cpp
def test_strides():
    """Of any order, of an expanded gradient, and of tables that are parts of others."""
    inputs = make_inputs((3, 5), heads=3, dim=16, batch=2)
    kwargs = dict(grid_size=(3, 5), num_prefix_tokens=1, backend='cpp')
    expected, expected_grads = run(sape2_attention, [t.contiguous() for t in inputs], **kwargs)
    strided = [t.transpose(-2, -1).contiguous().transpose(-2, -1) for t in inputs[:3]]
    strided += [torch.cat([t, t], dim=-1)[:, 16:] for t in inputs[3:5]]
    leaves = [t.requires_grad_() for t in (*strided, inputs[5])]
    out = sape2_attention(*leaves[:5], bias_scale=leaves[5], **kwargs)
    assert torch.equal(out, expected)
    dense = torch.ones_like(out)
    expanded = dense.new_ones(1).expand_as(out)
    of_dense, of_expanded = (torch.autograd.grad(out, leaves, g, retain_graph=True) for g in (dense, expanded))
    for a, b in zip(of_dense, of_expanded):
        assert torch.equal(a, b)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)  # as in `run`
    for a, b in zip(torch.autograd.grad(out, leaves, weights), expected_grads):
        assert torch.equal(a, b)


@pytest.mark.cpp
def test_strides_of_operators():
    """Codes may have any. Gradients are contiguous, as compiled graphs are told, also where heads were padded."""
    q, k, v, table_x, table_y, gain = make_inputs((3, 5))
    codes = torch.ops.timm_sape.axis_codes_cpp(q, k, table_x, table_y, 3, 5, 'k', 0.3, 1.0, 1.0)
    strided = [c.mT.contiguous().mT for c in codes]
    found = []
    for codes in (codes, strided):
        leaves = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in (q, k, v, *codes, gain)]
        out = cpp_distance_attention(*leaves, 0.3)
        found.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    for a, b in zip(*found):
        assert torch.equal(a, b)
    grads = *found[0][1:], *found[1][1:], *torch.ops.timm_sape.axis_codes_cpp_backward(
        *codes, q, k, table_x, table_y, 3, 5, 'k', 0.3, 1.0, 1.0)
    assert all(grad.is_contiguous() for grad in grads)


@pytest.mark.cpp
def test_threads():
    """The same bits run by run, whatever the number of threads, also if Python threads call at the same time."""
    inputs = [t.float() for t in make_inputs((9, 8), heads=3, dim=16, batch=3)]

    def once(threads=None):
        if threads is not None:
            torch.set_num_threads(threads)
        out, grads = run(sape2_attention, inputs, grid_size=(9, 8), num_prefix_tokens=1, backend='cpp')
        return [out.detach(), *grads]

    before = torch.get_num_threads()
    try:
        expected = once(1)
        found = [once(threads) for threads in (1, 2, 5)]
        with ThreadPoolExecutor(6) as pool:
            found += pool.map(lambda _: once(), range(24))
    finally:
        torch.set_num_threads(before)
    for tensors in found:
        for a, b in zip(tensors, expected):
            assert torch.equal(a, b)


# ---- the build

@pytest.fixture
def not_built(monkeypatch, tmp_path):
    """As in a process that has not loaded the kernels, on a machine where nobody has compiled them."""
    library = tmp_path / 'cache' / 'kernels.so'
    monkeypatch.delenv('TIMM_SAPE_BACKEND', raising=False)
    monkeypatch.setattr(cpp_build, '_is_loaded', lambda: False)
    monkeypatch.setattr(cpp_build, '_library', lambda: library)
    cpp_build.find_cpp.cache_clear()
    selection._log_once.cache_clear()
    yield library
    cpp_build.find_cpp.cache_clear()


def refused(text, caplog):
    """Who asks is told why. Who does not ask gets the operator in PyTorch, and a line in the log."""
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(RuntimeError, match=text):
        build_cpp()
    with pytest.raises(ValueError, match=rf"(?s)backend 'cpp' \(backend=\) cannot be used: .*{text}"):
        choose_backend('cpp', q, (1, 1))
    with caplog.at_level(logging.INFO, logger='timm_sape'):
        for _ in range(3):
            assert choose_backend(None, q, (1, 1)) == 'torch'
    line, = (record.message for record in caplog.records if record.name == selection.__name__)
    return line


def test_nobody_who_did_not_ask_waits_for_a_compiler(not_built, monkeypatch, caplog):
    monkeypatch.setattr(cpp_build, '_compile', lambda library: pytest.fail('compiled'))
    with caplog.at_level(logging.INFO, logger='timm_sape'):
        assert choose_backend(None, torch.zeros(1, 1, 2, 8), (1, 1)) == 'torch'
    assert 'have not been compiled; timm_sape.ops.build_cpp() does that' in caplog.text


def test_what_was_built_is_used_at_once(not_built, monkeypatch):
    """Also where the process has found out before that there was nothing."""
    built = []
    monkeypatch.setattr(cpp_build, '_is_loaded', lambda: bool(built))
    monkeypatch.setattr(cpp_build, '_compile', built.append)
    q = torch.zeros(1, 1, 2, 8)
    assert choose_backend(None, q, (1, 1)) == 'torch' and not built
    assert build_cpp() == not_built and built == [not_built]
    assert choose_backend(None, q, (1, 1)) == 'cpp'


@pytest.mark.cpp
def test_what_another_process_has_compiled_meanwhile(not_built, monkeypatch):
    """While this one waited for it."""
    not_built.parent.mkdir()
    not_built.touch()
    monkeypatch.setattr(cpp_build, '_is_whole', lambda library: library.exists())
    monkeypatch.setattr(cpp_extension, 'load', lambda *args, **kwargs: pytest.fail('compiled'))
    cpp_build._compile(not_built)


@pytest.mark.cpp
@pytest.mark.parametrize('folder', ['', 'elsewhere', None])
def test_folder_of_the_library(monkeypatch, tmp_path, folder):
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.delenv('TORCH_EXTENSIONS_DIR')
    if folder is not None:
        monkeypatch.setenv('TORCH_EXTENSIONS_DIR', folder)
    assert cpp_build._library().parent == Path(folder or tmp_path / '.cache/torch_extensions')


def test_no_compiler(not_built, monkeypatch, caplog):
    monkeypatch.setenv('CXX', '/no/compiler')
    line = refused("there is no compiler '/no/compiler'; install g..", caplog)
    assert 'have not been compiled' in line


def test_no_ninja(not_built, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv('CXX', sys.executable)  # any program
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.setattr(cpp_build.sys, 'executable', str(tmp_path / 'python'))
    refused('Ninja is required', caplog)


def test_ninja_beside_python(monkeypatch, tmp_path):
    """As in a virtual environment that is not activated."""
    ninja = tmp_path / 'ninja'
    ninja.write_text('#!/bin/sh')
    ninja.chmod(0o755)
    monkeypatch.setenv('PATH', '/nowhere')
    monkeypatch.setattr(cpp_build.sys, 'executable', str(tmp_path / 'python'))
    with cpp_build._ninja_on_path():
        assert shutil.which('ninja') == str(ninja)
    assert os.environ['PATH'] == '/nowhere'


@pytest.mark.cpp
def test_source_that_does_not_compile(not_built, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(cpp_build, 'SOURCE', tmp_path / 'wrong.cpp')
    cpp_build.SOURCE.write_text('#error "as it should"\n')
    refused('as it should', caplog)


@pytest.mark.cpp
def test_clang():
    """Its threads would each do all of the work."""
    command = [get_cxx_compiler(), '-D__clang__', '-fsyntax-only', str(cpp_build.SOURCE)]
    done = subprocess.run(command, text=True, stderr=subprocess.PIPE)
    assert done.returncode and 'set CXX=g++' in done.stderr


def test_folder_that_cannot_be_written(not_built, caplog):
    not_built.parent.write_text('')  # a file where the folder should be: that holds for root as well
    refused('set TORCH_EXTENSIONS_DIR to a folder that can be written', caplog)


def test_library_that_cannot_be_loaded(not_built, monkeypatch, caplog):
    """As one that was compiled for a newer C library, or where libraries must not be loaded from."""
    compiled = []

    def compile_again(library):
        compiled.append(library.exists())
        library.write_bytes(bytes(64))

    monkeypatch.setattr(cpp_build, '_compile', compile_again)
    not_built.parent.mkdir()
    not_built.write_bytes(bytes(64))
    line = refused(r'kernels.so.* \(.*invalid ELF header.*\); set TORCH_EXTENSIONS_DIR', caplog)
    assert 'kernels.so' in line and 'invalid ELF header' in line
    assert compiled == [False, False]  # removed and compiled again where somebody asks


@pytest.mark.cpp
def test_library_of_another_system_is_replaced(not_built, monkeypatch):
    monkeypatch.undo()
    whole = cpp_build._library()
    monkeypatch.setattr(cpp_build, '_is_loaded', lambda: False)
    monkeypatch.setattr(cpp_build, '_library', lambda: not_built)
    monkeypatch.setattr(cpp_build, '_compile', lambda library: shutil.copy(whole, library))
    not_built.parent.mkdir()
    not_built.write_bytes(bytes(64))
    load = torch.ops.load_library  # what is whole is loaded already
    monkeypatch.setattr(torch.ops, 'load_library', lambda path: None if cpp_build._is_whole(whole) and Path(
        path).stat().st_size > 64 else load(path))
    assert build_cpp() == not_built and not_built.read_bytes() == whole.read_bytes()


def test_a_compiler_that_does_not_work(not_built, monkeypatch, caplog):
    monkeypatch.setenv('CXX', '/bin/false')
    refused('the compiler does not work .*; name another one in the variable CXX', caplog)


@pytest.mark.cpp
def test_sizes_that_do_not_fit():
    """The kernels would read and write beyond the ends of tensors."""
    q, k, v = torch.zeros(3, 1, 2, 5, 32).unbind(0)
    table, codes, gain = torch.zeros(3, 32), torch.zeros(1, 2, 4, 2), torch.ones(1)
    axis_codes, attention = torch.ops.timm_sape.axis_codes_cpp, torch.ops.timm_sape.distance_attention_cpp
    grid = 2, 2, 'k', 1., 1., 1.
    attention(q, k, v, codes, codes, gain, 1.), axis_codes(q, k, table, table, *grid)
    for call, text in (
            (lambda: axis_codes(q, k, table, table, 9, 9, *grid[2:]), '5 patches, and the grid is 9x9'),
            (lambda: axis_codes(q, k[:, :1], table, table, *grid), 'must be alike'),
            (lambda: axis_codes(q, k, table[:1], table, *grid), 'tables must be'),
            (lambda: axis_codes(q, k, table, table[:, :16], *grid), 'tables must be'),
            (lambda: attention(q, k[:, :1], v[:, :1], codes, codes, gain, 1.), 'must be alike'),
            (lambda: attention(q, k, v[..., :16], codes, codes, gain, 1.), 'must be alike'),
            (lambda: attention(q, k, torch.zeros(1, 2, 5, 48), codes, codes, gain, 1.), 'must be alike'),
            (lambda: attention(q, k, v, codes[:, :1], codes, gain, 1.), 'codes must be'),
            (lambda: attention(q, k, v, codes[:, :, :3], codes, gain, 1.), 'codes of 3 and 4 patches'),
            (lambda: attention(q, k, v, torch.zeros(1, 2, 6, 2), torch.zeros(1, 2, 6, 2), gain, 1.), 'codes must be'),
            (lambda: attention(q, k, v, codes.double(), codes.double(), gain.double(), 1.), 'codes must be'),
            (lambda: torch.ops.timm_sape_cpp.attention(
                q, k, v, codes.mT.contiguous().mT, codes, gain, 1., q, *torch.zeros(2, 1, 2, 5)), 'codes must be')):
        with pytest.raises(RuntimeError, match=text):
            call()


@pytest.mark.cpp
@pytest.mark.parametrize('kept', [0, 64, 4096, 100_000, -1])
def test_part_of_a_library_is_replaced(not_built, monkeypatch, kept):
    """As a copy leaves it that was cut off. To load it would end the process."""
    monkeypatch.undo()
    whole = cpp_build._library()
    assert cpp_build._is_whole(whole)
    monkeypatch.setattr(cpp_build, '_is_loaded', lambda: False)
    monkeypatch.setattr(cpp_build, '_library', lambda: not_built)
    monkeypatch.setattr(cpp_build, '_compile', lambda library: shutil.copy(whole, library))
    loaded = []
    monkeypatch.setattr(torch.ops, 'load_library', loaded.append)  # in earnest it would end this process
    not_built.parent.mkdir()
    not_built.write_bytes(whole.read_bytes()[:kept])
    cpp_build.find_cpp.cache_clear()
    assert 'have not been compiled' in cpp_build.find_cpp()
    assert build_cpp() == not_built and cpp_build._is_whole(not_built) and loaded == [str(not_built)]


@pytest.mark.full
@pytest.mark.cpp
def test_operators_of_a_saved_graph():
    """A graph that another process compiled calls them by name, before anything has chosen a backend."""
    code = (
        'import torch, timm_sape\n'
        'q = torch.randn(1, 1, 5, 16)\n'
        'w, table = q[:, :, 1:], q[0, 0]\n'
        'codes = torch.ops.timm_sape.axis_codes_cpp(w, w, table, table, 2, 2, "k", 1., 1., 1.)\n'
        'print(torch.ops.timm_sape.distance_attention_cpp(q, q, q, *codes, torch.ones(1), 1.)[0].isfinite().all())')
    done = subprocess.run([sys.executable, '-c', code], text=True, capture_output=True)
    assert done.stdout == 'tensor(True)\n', done.stderr


def test_operators_without_kernels(not_built):
    q = torch.zeros(1, 1, 2, 16)
    with pytest.raises(RuntimeError, match="kernels of the backend 'cpp' cannot be used: they have not been compiled"):
        torch.ops.timm_sape.distance_attention_cpp(q, q, q, q, q, torch.ones(1), 1.)


def test_another_process_that_never_ends(not_built, monkeypatch, caplog):
    monkeypatch.setattr(cpp_build, 'LONGEST_WAIT', 0.1)
    monkeypatch.setenv('CXX', sys.executable)
    not_built.parent.mkdir()
    with FileLock(not_built.with_suffix('.lock')):
        refused('another process has been compiling for 0.1 seconds', caplog)


@pytest.mark.parametrize('platform, processor', [('linux', 'DEFAULT'), ('darwin', 'AVX2'), ('win32', 'AVX512')])
def test_machines_without(monkeypatch, platform, processor):
    monkeypatch.setattr(sys, 'platform', platform)
    monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: processor)
    with pytest.raises(RuntimeError, match=f'and this is {platform} with {processor}'):
        cpp_build._library()


def test_libraries_of_different_machines_have_different_names(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, 'platform', 'linux')
    names = set()
    for processor, source, flags in itertools.product(
            cpp_build.INSTRUCTIONS, ('// one', '// another'), (['-O2'], ['-O3'])):
        (tmp_path / 'source.cpp').write_text(source)
        monkeypatch.setattr(cpp_build, 'SOURCE', tmp_path / 'source.cpp')
        monkeypatch.setattr(cpp_build, 'FLAGS', flags)
        monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: processor)
        names.add(cpp_build._library())
    assert len(names) == 8 and all(torch.__version__ in path.name for path in names)


def python(code, **env):
    return subprocess.Popen(
        [sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, 'PYTHONPATH': str(ROOT), **env})


@pytest.mark.full
def test_import_does_not_load_the_build_system():
    out, err = python("import sys, timm_sape; print('torch.utils.cpp_extension' in sys.modules)").communicate()
    assert out.strip() == 'False', err


@pytest.mark.full
@pytest.mark.cpp
def test_processes_that_build_at_the_same_time(tmp_path):
    """One compiles, the others wait; a later one finds the library, needs no compiler, and uses it unasked."""
    build = 'from timm_sape.ops import build_cpp; print(build_cpp())'
    processes = [python(build, TORCH_EXTENSIONS_DIR=str(tmp_path)) for _ in range(3)]
    found = [process.communicate() for process in processes]
    library, = {out.strip() for out, _ in found}
    assert {path.name for path in tmp_path.iterdir()} == {Path(library).name, Path(library).with_suffix('.lock').name}
    choose = (
        'import torch; from timm_sape.ops.backend import choose_backend;'
        'print(choose_backend(None, torch.zeros(1, 1, 2, 8), (1, 1)))')
    env = {'TORCH_EXTENSIONS_DIR': str(tmp_path), 'CXX': '/no/compiler', 'TIMM_SAPE_BACKEND': ''}
    out, err = python(choose, **env).communicate()
    assert out.strip() == 'cpp', err
