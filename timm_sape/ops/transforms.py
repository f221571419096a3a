"""Whether torch.func or forward-mode differentiation is active.

Our operators do not support torch.func, and in forward mode their derivatives would silently be zero. torch.compile
traces these functions, and compiles anew if the answer changes.
"""
import torch

__all__ = ['is_forward_mode', 'is_transformed']


def is_transformed() -> bool:
    """Whether any transform of torch.func, or forward mode, is active."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def is_forward_mode() -> bool:
    """Whether derivatives are computed in forward mode, by torch.func or by torch.autograd.forward_ad."""
    if not is_transformed():
        return False
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    return torch.autograd.forward_ad._current_level >= 0 or any(
        transform.key() == torch._C._functorch.TransformType.Jvp for transform in transforms)
