"""Before anything imports torch or Triton: threads, instructions, the interpreter for Triton without a GPU."""
import os

if 'PYTEST_XDIST_WORKER' in os.environ:  # as many workers as cores: more threads would wait for each other
    os.environ['OMP_NUM_THREADS'] = '1'

# oneDNN's bfloat16 products by AMX give NaN now and then on an Intel Xeon with torch 2.15, in timm's own models, too: 7
# of 240 passes of a tiny ViT on small images; without AMX none
os.environ.setdefault('ONEDNN_MAX_CPU_ISA', 'AVX512_CORE_BF16')

# cuBLAS reads it as it starts, and without it raises under torch.use_deterministic_algorithms
os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')

import torch  # noqa: E402

if torch.cuda.is_available():
    os.environ.pop('TRITON_INTERPRET', None)  # or the tests would pass, and the GPU would not have run a kernel
else:
    os.environ['TRITON_INTERPRET'] = '1'
torch.backends.cudnn.allow_tf32 = False  # of patch embeddings, which everything else is compared after
