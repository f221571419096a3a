"""What the operators for SaPE2's codes, in PyTorch, C++ and Triton, share: arguments, shapes, autograd, FLOP counts."""
from functools import partial
from typing import Callable, List, Tuple

import torch
from torch.utils.flop_counter import register_flop_formula

from ..grid import Grid
from .distances import empty_gradients
from .double_backward import differentiable_gradients
from .reference import axis_codes

__all__ = ['CODES', 'CODES_BACKWARD', 'codes_flops', 'codes_reference', 'empty_codes', 'patches_of', 'register_codes']

# The schemas of the operators. Arguments: q and k `[B, h, N, d]`, prefix tokens first if there are any; the tables.
_ARGUMENTS = (
    'Tensor q, Tensor k, Tensor table_x, Tensor table_y, SymInt height, SymInt width, str mode, float gate_scale, '
    'float shrink_x, float shrink_y')
CODES = f'({_ARGUMENTS}) -> (Tensor, Tensor)'
CODES_BACKWARD = f'(Tensor grad_x, Tensor grad_y, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)'


def patches_of(height: int, width: int, *tensors: torch.Tensor) -> List[torch.Tensor]:
    """The rows of the patches, which follow those of the prefix tokens."""
    return [t[:, :, t.shape[2] - height * width:] for t in tensors]


def empty_codes(q: torch.Tensor, height: int, width: int, mode: str) -> Tuple[torch.Tensor, torch.Tensor]:
    """Memory for the codes along x and along y, `[B, h, H*W, Cx]` and `[B, h, H*W, Cy]`."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    shape, n = (*q.shape[:2], height * width), len(mode)
    return q.new_empty(*shape, n * width, dtype=dtype), q.new_empty(*shape, n * height, dtype=dtype)


def codes_flops(q_shape, table_x_shape, table_y_shape, height: int, width: int, mode: str, backward=False) -> int:
    """FLOPs of the gates, and of the products of the sources with the tables."""
    batch, num_heads, _, dim = q_shape
    columns = height + width + len(mode) * (table_x_shape[0] + table_y_shape[0])
    # backward, each product once more, and two products for its gradients
    return (3 if backward else 1) * 2 * batch * num_heads * height * width * dim * columns


def codes_reference(height, width, mode, gate_scale, shrink_x, shrink_y, q, k, table_x, table_y):
    """What the operators compute, in plain PyTorch, differentiable any number of times."""
    q, k = patches_of(height, width, q, k)
    ref_grid_size = round(shrink_y * height), round(shrink_x * width)
    return axis_codes(
        q, k, table_x, table_y, Grid(height, width), mode=mode, gate_scale=gate_scale, ref_grid_size=ref_grid_size)


def register_codes(forward: Callable, backward: Callable) -> None:
    """Register shapes, autograd and FLOP counts of two operators for the codes: the forward and the backward pass.

    Their schemas are `CODES` and `CODES_BACKWARD`. Only the tensors are kept for the backward pass.
    """
    @forward.register_fake
    def _(q, k, table_x, table_y, height, width, mode, gate_scale, shrink_x, shrink_y):
        return empty_codes(q, height, width, mode)

    @backward.register_fake
    def _(grad_x, grad_y, q, k, table_x, table_y, *args):
        return empty_gradients(q, k, table_x, table_y)

    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.args = inputs[4:]

    def formula(ctx, grad_x, grad_y):
        if torch.is_grad_enabled():  # the caller will differentiate the result again
            grads = differentiable_gradients(partial(codes_reference, *ctx.args), ctx.saved_tensors, (grad_x, grad_y))
        else:
            grads = backward(grad_x, grad_y, *ctx.saved_tensors, *ctx.args)
        return (*grads, *(None for _ in ctx.args))

    forward.register_autograd(formula, setup_context=setup_context)

    @register_flop_formula(forward._opoverload.overloadpacket)
    def _(q_shape, k_shape, *args, out_shape=None, **kwargs) -> int:
        return codes_flops(q_shape, *args[:5])

    @register_flop_formula(backward._opoverload.overloadpacket)
    def _(grad_x_shape, grad_y_shape, q_shape, k_shape, *args, out_shape=None, **kwargs) -> int:
        return codes_flops(q_shape, *args[:5], backward=True)
