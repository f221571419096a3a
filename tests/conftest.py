"""Before anything imports Triton: without an NVIDIA GPU its kernels run in its interpreter."""
import os

import torch

if not torch.cuda.is_available():
    os.environ['TRITON_INTERPRET'] = '1'
