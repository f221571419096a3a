"""Second derivatives of the operators. Their backward pass is an operator, too, which autograd cannot differentiate.

So if the result will be differentiated again, the backward pass differentiates the reference instead. This stores
everything N x N.
"""
from typing import Callable, Optional, Sequence, Tuple

import torch

from .precision import no_autocast

__all__ = ['differentiable_gradients']


def differentiable_gradients(
        reference: Callable,
        inputs: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
) -> Tuple[Optional[torch.Tensor], ...]:
    """Gradients that can be differentiated again.

    Args:
        reference: The operator in plain PyTorch. Maps `inputs` to as many tensors as there are `grads`.
        inputs: Arguments of the operator.
        grads: Gradients of its results.

    Returns:
        One for each input, None for those that need none.
    """
    # One input may have been computed from another: codes from q and k. Views are the ends of this graph, so that the
    # gradient of q does not contain what comes through the codes, which autograd adds itself.
    inputs = [tensor.view_as(tensor) for tensor in inputs]
    needed = [i for i, tensor in enumerate(inputs) if tensor.requires_grad]
    with no_autocast(inputs[0]):
        outputs = reference(*inputs)
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        outputs, grads = zip(*(pair for pair in zip(outputs, grads) if pair[0].requires_grad))
        found = torch.autograd.grad(outputs, [inputs[i] for i in needed], grads, create_graph=True, allow_unused=True)
    return tuple(dict(zip(needed, found)).get(i) for i in range(len(inputs)))
