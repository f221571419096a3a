"""Second derivatives of operators whose backward pass is an operator too: autograd goes through the reference."""
from typing import Callable, Optional, Sequence, Tuple

import torch

__all__ = ['differentiable_gradients']


def differentiable_gradients(
        reference: Callable,
        inputs: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
) -> Tuple[Optional[torch.Tensor], ...]:
    """Gradients that can be differentiated again.

    Args:
        reference: What the operator computes, in plain PyTorch; maps `inputs` to one tensor, or as many as `grads`.
        inputs: What the operator was called with.
        grads: Gradients of its results.

    Returns:
        One for each input, None where it needs none.
    """
    needed = [i for i, tensor in enumerate(inputs) if tensor.requires_grad]
    found = torch.autograd.grad(
        reference(*inputs), [inputs[i] for i in needed], grads, create_graph=True, allow_unused=True)
    return tuple(dict(zip(needed, found)).get(i) for i in range(len(inputs)))
