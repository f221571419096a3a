"""What the operators that compute codes and attention together, in C++ and Triton, share: arguments, autograd, FLOPs.

They are for codes and attention of the same q and k. As one operator they take less time between the kernels, and the
kernels add what q and k get through the codes to their gradients from attention.
"""
from typing import Callable

from torch.utils.flop_counter import register_flop_formula

from .codes import codes_flops, codes_reference
from .distances import attention_flops, distance_attention, register_gradients

__all__ = ['MERGED_ARGUMENTS', 'register_merged']

# Part of the schemas. torch spends time on each argument, more so the more there are. So these operators take lists of
# numbers:
#   size                    H, W
#   factors                 gate_scale, shrink_x, shrink_y, scale
MERGED_ARGUMENTS = (
    'Tensor q, Tensor k, Tensor v, Tensor table_x, Tensor table_y, Tensor bias_scale, SymInt[] size, str mode, '
    'float[] factors')


def register_merged(forward: Callable, backward: Callable) -> None:
    """Register shapes of gradients, autograd and FLOP counts of two operators: the forward and the backward pass.

    They are as `register_gradients` wants them. Their last arguments are `MERGED_ARGUMENTS`.
    """
    register_gradients(forward, backward, _reference)

    @register_flop_formula(forward._opoverload.overloadpacket)
    def _(*args, out_shape=None, **kwargs) -> int:
        return _flops(*args[-9:])

    @register_flop_formula(backward._opoverload.overloadpacket)
    def _(*args, out_shape=None, **kwargs) -> int:
        return _flops(*args[-9:], backward=True)


def _reference(size, mode, factors, q, k, v, table_x, table_y, bias_scale):
    """What the operators compute, in plain PyTorch, differentiable any number of times."""
    *factors, scale = factors
    return distance_attention(
        scale, q, k, v, *codes_reference(*size, mode, *factors, q, k, table_x, table_y), bias_scale)


def _flops(q_shape, k_shape, v_shape, x_shape, y_shape, gain_shape, size, mode, factors, backward=False) -> int:
    codes = codes_flops(q_shape, x_shape, y_shape, *size, mode, backward)
    return codes + attention_flops(q_shape, len(mode) * sum(size), backward)
