"""Before anything imports torch or Triton: threads, and the interpreter for Triton's kernels where no GPU runs them."""
import os

if 'PYTEST_XDIST_WORKER' in os.environ:  # as many workers as cores: more threads would wait for each other
    os.environ['OMP_NUM_THREADS'] = '1'

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ['TRITON_INTERPRET'] = '1'
