"""Settings that must come before torch or Triton is imported: threads, CPU instructions, Triton's interpreter."""
import os

if 'PYTEST_XDIST_WORKER' in os.environ:  # there is a worker per core, so more threads would wait for each other
    os.environ['OMP_NUM_THREADS'] = '1'

# On an Intel Xeon with torch 2.15, oneDNN's bfloat16 products sometimes give NaN if they use AMX, in timm's own models,
# too: in 7 of 240 passes of a tiny ViT on small images. Without AMX they never did.
os.environ.setdefault('ONEDNN_MAX_CPU_ISA', 'AVX512_CORE_BF16')

# cuBLAS reads this when it starts. Without it, torch.use_deterministic_algorithms makes it raise an error.
os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')

import torch  # noqa: E402

if torch.cuda.is_available():
    os.environ.pop('TRITON_INTERPRET', None)  # with it the tests would pass without running any kernel on the GPU
else:
    os.environ['TRITON_INTERPRET'] = '1'
torch.backends.cudnn.allow_tf32 = False  # it would round patch embeddings, on which all comparisons depend


def pytest_addoption(parser):
    parser.addoption('--full', action='store_true', help='run the tests marked `full` too, as .ci/full does')


def pytest_collection_modifyitems(config, items):
    """Leave out what is marked `full`; pytest's last line counts it as deselected."""
    if config.getoption('--full'):
        return
    kept = [item for item in items if item.get_closest_marker('full') is None]
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker('full')])
    items[:] = kept
