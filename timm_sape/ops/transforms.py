"""Whether torch.func or forward-mode differentiation is active, or a model is being exported.

Our operators do not support torch.func, and in forward mode their derivatives would silently be zero. Exported graphs
may contain standard operators only. torch.compile traces these functions, and compiles anew if the answer changes.
"""
import torch

__all__ = ['is_exporting', 'is_forward_mode', 'is_transformed']


def is_exporting() -> bool:
    """Whether torch.export is running.

    In torch 2.11 `torch.compiler.is_exporting` is True in graphs of torch.compile, too.
    """
    return torch.compiler._is_exporting_flag


def is_transformed() -> bool:
    """Whether any transform of torch.func, or forward mode, is active."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def is_forward_mode() -> bool:
    """Whether derivatives are computed in forward mode, by torch.func or by torch.autograd.forward_ad."""
    if torch.autograd.forward_ad._current_level < 0:  # torch.func.jvp enters a level, too
        return False
    torch._dynamo.graph_break()  # torch cannot compile what follows as one graph
    return True
