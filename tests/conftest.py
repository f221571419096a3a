"""Settings that must come before torch or Triton is imported: threads, CPU instructions, Triton's interpreter.

And the kernels of the backend 'cpp' are compiled, once for all tests: half a minute after each change of them.
"""
import os
import zlib
from collections import Counter, defaultdict
from pathlib import Path

if 'PYTEST_XDIST_WORKER' in os.environ:  # there is a worker per core, so more threads would wait for each other
    os.environ['OMP_NUM_THREADS'] = '1'

# On an Intel Xeon with torch 2.15, oneDNN's bfloat16 products sometimes give NaN if they use AMX, in timm's own models,
# too: in 7 of 240 passes of a tiny ViT on small images. Without AMX they never did.
os.environ.setdefault('ONEDNN_MAX_CPU_ISA', 'AVX512_CORE_BF16')

# cuBLAS reads this when it starts. Without it, torch.use_deterministic_algorithms makes it raise an error.
os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')

# Not the user's own folder, where the kernels would be used unasked from then on.
os.environ['TORCH_EXTENSIONS_DIR'] = str(Path(__file__).parents[1] / 'build' / 'torch_extensions')

import pytest  # noqa: E402
import torch  # noqa: E402

if torch.cuda.is_available():
    os.environ.pop('TRITON_INTERPRET', None)  # with it the tests would pass without running any kernel on the GPU
else:
    os.environ['TRITON_INTERPRET'] = '1'
torch.backends.cudnn.allow_tf32 = False  # it would round patch embeddings, on which all comparisons depend

# Their assertions tell the values then, as those in test files do.
pytest.register_assert_rewrite(*(path.stem for path in Path(__file__).parent.glob('encodings/*_checks.py')))

from timm_sape.ops import build_cpp  # noqa: E402

try:
    build_cpp()
    NO_CPP = ''
except RuntimeError as e:
    NO_CPP = f"the kernels of the backend 'cpp' cannot be used: {e}"


@pytest.fixture
def own_registry(monkeypatch):
    """What a test registers is forgotten after it. It must not replace or remove what was there."""
    from timm_sape.encodings.registry import names

    before = {variable: getattr(names, variable) for variable in ('_encodings', '_aliases')}
    for variable, known in before.items():
        monkeypatch.setattr(names, variable, dict(known))
    yield
    for variable, known in before.items():
        assert known.items() <= getattr(names, variable).items()


def pytest_report_header():
    return NO_CPP or None


def pytest_addoption(parser):
    parser.addoption('--full', action='store_true', help='run the tests marked `full` too, as .ci/full does')


@pytest.hookimpl(tryfirst=True)  # before -m selects by marks
def pytest_collection_modifyitems(config, items):
    """Leave out what is marked `full`; pytest's last line counts it as deselected. Skip 'cpp' where there is none."""
    _mark_interpreted(items)
    _thin_out(items)
    for item in items:
        params = item.callspec.params.values() if hasattr(item, 'callspec') else ()
        if NO_CPP and ('cpp' in params or item.get_closest_marker('cpp')):
            item.add_marker(pytest.mark.skip(reason=NO_CPP))
    if config.getoption('--full'):
        return
    kept = [item for item in items if item.get_closest_marker('full') is None]
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker('full')])
    items[:] = kept


def _mark_interpreted(items):
    """Of each test marked `interpreted`, mark four of five cases with Triton `full`, unless there is a GPU."""
    if torch.cuda.is_available():
        return
    seen = Counter()
    for item in items:
        if not item.get_closest_marker('interpreted') or item.get_closest_marker('full'):
            continue
        if 'triton' in item.callspec.params.values():
            if seen[item.function] % 5:  # no number of values of a parameter, so that each has its turn
                item.add_marker(pytest.mark.full)
            seen[item.function] += 1


def _thin_out(items):
    """Of the cases of each test marked `one_of(n)`, mark all but about one in n `full`, always the same; never all.

    Encodings of which there is one for each kind (`OFTEN`) always run, unless the mark says `all_kinds=False`. On a
    GPU nothing is left out: there the tests decide whether Triton becomes the default.
    """
    from common import OFTEN

    if torch.cuda.is_available():
        return
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker('one_of') and not item.get_closest_marker('full'):
            cases[item.nodeid.partition('[')[0]].append(item)

    def is_rare(item):
        marker = item.get_closest_marker('one_of')
        kinds = {'rope2d', *OFTEN} if marker.kwargs.get('all_kinds', True) else set()
        values = {value for value in item.callspec.params.values() if isinstance(value, str)}
        return not kinds & values and zlib.crc32(item.nodeid.encode()) % marker.args[0]

    for test in cases.values():
        rare = [item for item in test if is_rare(item)]
        for item in rare if len(rare) < len(test) else rare[1:]:
            item.add_marker(pytest.mark.full)
