"""Computations behind the encodings. They know tensors and grids, but no encoding and no model.

| file | what |
|---|---|
| `attention` | attention with a bias or mask, any encoding's |
| `channels` | attention with further channels of q and k |
| `sape2`, `cope` | SaPE2's and CoPE's bias, and attention with SaPE2; they choose the implementation |
| `backend` | which implementations can run: reference, torch, cpp or triton |
| `reference` | plain PyTorch: stores everything N x N, differentiable any number of times |
| `torch_codes`, `torch_distances`, `torch_contextual` | operators that store nothing N x N, on any device |
| `cpp_operators`, `cpp_kernels.cpp`, `cpp_build` | the same in C++ for CPUs, compiled when asked for |
| `triton_operators` | the same in Triton |
| `triton_codes`, `triton_prepare`, `triton_distances`, `triton_tiles` | their kernels; imported only when used |
| `codes`, `distances`, `merged` | what torch, cpp and triton operators share: shapes, autograd, FLOP counts |
| `double_backward` | second derivatives of the operators |
| `matrices` | skew-symmetric and orthogonal matrices |
| `counting`, `chunks`, `triton_common`, `triton_limits` | arithmetic, sizes and limits of the implementations |
| `precision`, `transforms`, `devices` | dtypes and autocast; torch.func, forward mode, export; a check of devices |
| `sizes` | sizes that may be symbolic |
"""
from .attention import attend, check_mask, merge_masks, open_empty_rows, probabilities
from .backend import using_backend
from .channels import append_channels
from .cope import contextual_bias
from .cpp_build import build_cpp
from .devices import check_devices
from .matrices import cayley, matrix_exp, skew
from .precision import no_autocast, upcast, wide_under_autocast
from .reference import pairwise_distance
from .sape2 import axis_codes, sape2_attention, sape2_bias
from .sizes import log_of_largest
from .transforms import is_exporting

__all__ = [
    'append_channels',
    'attend',
    'axis_codes',
    'build_cpp',
    'cayley',
    'check_devices',
    'check_mask',
    'contextual_bias',
    'is_exporting',
    'log_of_largest',
    'matrix_exp',
    'merge_masks',
    'no_autocast',
    'open_empty_rows',
    'pairwise_distance',
    'probabilities',
    'sape2_attention',
    'sape2_bias',
    'skew',
    'upcast',
    'using_backend',
    'wide_under_autocast',
]
