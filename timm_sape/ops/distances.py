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
    'attention_flops',
    'distance_attention',
    'empty_gradients',
    'empty_out',
    'register_attention',
    'register_flops',
    'register_gradients',
]

# The schemas of the operators
ATTENTION_ARGUMENTS = (
    'Tensor q, Tensor k, Tensor v, Tensor codes_x, Tensor codes_y, Tensor bias_scale, float scale')
ATTENTION_GRADIENTS = '(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)'
ATTENTION = f'({ATTENTION_ARGUMENTS}) -> Tensor'
ATTENTION_BACKWARD = f'(Tensor grad, {ATTENTION_ARGUMENTS}) -> {ATTENTION_GRADIENTS}'


def distance_attention(scale, q, k, v, codes_x, codes_y, bias_scale) -> torch.Tensor:
    """What the operators compute, in plain PyTorch, differentiable any number of times."""
    num_prefix_tokens = q.shape[2] - codes_x.shape[2]
    distances = pairwise_distance(codes_x) + pairwise_distance(codes_y)
    bias = bias_scale.to(distances.dtype).view(-1, 1, 1) * F.pad(distances, 2 * (num_prefix_tokens, 0))
    # fused kernels cannot be differentiated twice
    return attend(q, k, v, bias, scale=scale, fused=False)


def empty_out(v: torch.Tensor) -> torch.Tensor:
    """`[B, h, N, d]` in the order of memory in which models merge the heads, so that they need not copy it."""
    # no transposed tensor: autograd forbids to change the output of an operator in place if it is a view
    return torch.empty_permuted(v.shape, (0, 2, 1, 3), dtype=v.dtype, device=v.device)


def empty_gradients(*tensors: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    """Memory for the gradients of tensors."""
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors)


def register_gradients(forward: Callable, backward: Callable, reference: Callable, needs_output: bool) -> None:
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


def register_attention(forward: Callable, backward: Callable) -> None:
    """Register shapes, autograd and FLOP counts of two operators: the forward and the backward pass.

    Their schemas are `ATTENTION` and `ATTENTION_BACKWARD`. Only the tensors are kept for the backward pass.
    """
    @forward.register_fake
    def _(q, k, v, codes_x, codes_y, bias_scale, scale):
        return empty_out(v)

    register_gradients(forward, backward, distance_attention, needs_output=False)
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
