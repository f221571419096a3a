"""What the operators for attention with distances, in PyTorch, C++ and Triton, share: autograd and FLOP counts."""
from functools import partial
from typing import Callable, Tuple

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from .attention import attend
from .double_backward import differentiable_gradients
from .reference import pairwise_distance

__all__ = [
    'ATTENTION',
    'ATTENTION_ARGUMENTS',
    'ATTENTION_BACKWARD',
    'ATTENTION_GRADIENTS',
    'ATTENTION_OUTPUT',
    'attention_flops',
    'distance_attention',
    'empty_gradients',
    'empty_out',
    'empty_rows',
    'register_attention',
    'register_flops',
    'register_gradients',
]

# The schemas of the compiled operators. They also return two numbers for each query, which their backward passes get:
# its largest logit, and the sum of the exponentials.
ATTENTION_ARGUMENTS = (
    'Tensor q, Tensor k, Tensor v, Tensor codes_x, Tensor codes_y, Tensor bias_scale, float scale')
ATTENTION_GRADIENTS = '(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)'
ATTENTION_OUTPUT = 'Tensor out, Tensor row_max, Tensor row_sum'
ATTENTION = f'({ATTENTION_ARGUMENTS}) -> (Tensor, Tensor, Tensor)'
ATTENTION_BACKWARD = f'(Tensor grad, {ATTENTION_OUTPUT}, {ATTENTION_ARGUMENTS}) -> {ATTENTION_GRADIENTS}'


def distance_attention(scale, q, k, v, codes_x, codes_y, bias_scale) -> torch.Tensor:
    """What the operators compute, in plain PyTorch, differentiable any number of times."""
    num_prefix_tokens = q.shape[2] - codes_x.shape[2]
    distances = pairwise_distance(codes_x) + pairwise_distance(codes_y)
    bias = bias_scale.to(distances.dtype).view(-1, 1, 1) * F.pad(distances, 2 * (num_prefix_tokens, 0))
    # fused kernels cannot be differentiated twice
    return attend(q, k, v, bias, scale=scale, fused=False)


def empty_out(v: torch.Tensor, wide: bool = False) -> torch.Tensor:
    """`[B, h, N, d]` in the order of memory in which models merge the heads, so that they need not copy it.

    Args:
        v: The values.
        wide: float32, unless the values are wider.
    """
    dtype = torch.promote_types(v.dtype, torch.float32) if wide else v.dtype
    # no transposed tensor: autograd forbids to change the output of an operator in place if it is a view
    return torch.empty_permuted(v.shape, (0, 2, 1, 3), dtype=dtype, device=v.device)


def empty_rows(q: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Memory for two numbers for each query, `[B, h, N]`, float32 or wider."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return tuple(q.new_empty(q.shape[:-1], dtype=dtype) for _ in range(2))


def empty_gradients(*tensors: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    """Memory for the gradients of tensors."""
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors)


def register_gradients(
        forward: Callable,
        backward: Callable,
        reference: Callable,
        needs_output: bool = True,
) -> None:
    """Register shapes of gradients and autograd of two operators for attention: the forward and the backward pass.

    Both get six tensors, the first of them q, k and v, and then what has no gradient. The forward pass returns the
    output, alone or followed by what the backward pass needs. The backward pass gets the gradient of the output, the
    output if it needs that, what else the forward pass returned, and the arguments.

    Args:
        forward: The operator.
        backward: That of its gradients.
        reference: Computes the output from what has no gradient and the six tensors.
        needs_output: Whether the backward pass gets the output.
    """
    @backward.register_fake
    def _(*args):
        return empty_gradients(*[t for t in args if isinstance(t, torch.Tensor)][-6:])

    def setup_context(ctx, inputs, output) -> None:
        out, *others = (output,) if isinstance(output, torch.Tensor) else output
        ctx.args = inputs[6:]
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)  # else zeros are made for each of these
        ctx.save_for_backward(*([out] if needs_output else []), *others, *inputs[:6])

    def formula(ctx, grad, *_):
        if grad is None:  # nothing that was made of the output has a gradient
            grads = [None] * 6
        elif torch.is_grad_enabled():  # the caller will differentiate the result again
            grads = differentiable_gradients(partial(reference, *ctx.args), ctx.saved_tensors[-6:], (grad,))
        else:
            grads = backward(grad, *ctx.saved_tensors, *ctx.args)
        return (*grads, *(None for _ in ctx.args))

    forward.register_autograd(formula, setup_context=setup_context)


def register_attention(forward: Callable, backward: Callable, wide: bool = False) -> None:
    """Register shapes, autograd and FLOP counts of two operators: the forward and the backward pass.

    Their schemas are `ATTENTION` and `ATTENTION_BACKWARD`. `wide`: as for `empty_out`.
    """
    @forward.register_fake
    def _(q, k, v, codes_x, codes_y, bias_scale, scale):
        return empty_out(v, wide), *empty_rows(q)

    register_gradients(forward, backward, distance_attention)
    register_flops(forward, backward)


def register_flops(forward: Callable, backward: Callable) -> None:
    """Tell torch's FLOP counter about two operators: the forward and the backward pass.

    See `attention_flops`.
    """
    @register_flop_formula(forward._opoverload.overloadpacket)
    def _(q_shape, k_shape, v_shape, codes_x_shape, codes_y_shape, *args, out_shape=None, **kwargs) -> int:
        return attention_flops(q_shape, codes_x_shape[-1] + codes_y_shape[-1])

    @register_flop_formula(backward._opoverload.overloadpacket)
    def _(*shapes, out_shape=None, **kwargs) -> int:
        q_shape, _, _, codes_x_shape, codes_y_shape = shapes[-7:-2]  # bias_scale and scale are the last two
        return attention_flops(q_shape, codes_x_shape[-1] + codes_y_shape[-1], backward=True)


def attention_flops(q_shape, code_width: int, backward: bool = False) -> int:
    """FLOPs of attention with distances between codes that have so many channels, for both axes together.

    Only matrix products count, as everywhere in torch's counter. The distances between N codes of C entries count as
    the product of an N x C and a C x N matrix. (The reference uses cdist, which torch counts as 0.)
    """
    batch, num_heads, num_tokens, dim = q_shape
    # Forward, q.k and p.v. Backward, the logits once more, and the gradients of v, p, q and k; the distances once more,
    # and R w and R^T w.
    channels = 5 * dim + 3 * code_width if backward else 2 * dim + code_width
    return 2 * batch * num_heads * num_tokens ** 2 * channels
