"""Make Triton's interpreter round as NVIDIA GPUs do.

By itself the interpreter (of Triton 3.9) has no tf32, silently multiplies bfloat16 wrongly, and truncates to bfloat16
where it should round.
"""
import numpy as np
import triton.language as tl
from triton._C.libtriton.ir import INPUT_PRECISION
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_create_dot, _cast_impl = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl


def _dropped(x):
    """A float32 as a tensor core reads it, with fewer digits."""
    return (x.view(np.uint32) & np.uint32(0xffffe000)).view(np.float32)


def _rounded(x):
    return _dropped((x.view(np.uint32) + np.uint32(0x1000)).view(np.float32))


def _values(block):
    data = np.ascontiguousarray(block.data)
    return (data.astype(np.uint32) << 16).view(np.float32) if block.dtype.scalar == tl.bfloat16 else data


def _cast(self, source, dtype):
    if source.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
        return _cast_impl(self, source, dtype)
    data = np.ascontiguousarray(source.data)
    bits = data.view(np.uint32)
    rounded = bits + 0x7fff + (bits >> 16 & 1) >> 16
    return TensorHandle(np.where(np.isnan(data), 0x7fff, rounded).astype(np.uint16), tl.bfloat16)


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """Tensor cores read few digits of a float32. Here their sum is rounded once, to the dtype of the result."""
    single = a.dtype.scalar == tl.float32
    if a.dtype.scalar == tl.float64 or single and input_precision == INPUT_PRECISION.IEEE:
        return _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc)
    x, y = _values(a), _values(b)
    if not single:
        pairs = [(x, y)]
    elif input_precision == INPUT_PRECISION.TF32:
        pairs = [(_dropped(x), _dropped(y))]
    else:
        assert input_precision == INPUT_PRECISION.TF32x3
        high_x, high_y = _rounded(x), _rounded(y)
        pairs = [(high_x, high_y), (_dropped(x - high_x), high_y), (high_x, _dropped(y - high_y))]
    total = d.data + sum(np.matmul(left, right, dtype=np.float64) for left, right in pairs)
    return TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)


def install():
    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = _dot, _cast
