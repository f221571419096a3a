"""The gate of an `auto_` encoding."""
import torch
import torch.nn as nn

__all__ = ['AUTO', 'Gate']

AUTO = 'auto_'  # prefix of the name of an encoding with a gate


class Gate(nn.Module):
    """The learned scalar w of an `auto_` encoding (Auto-PE; Position-SHAP, Eq. 12 for its form on angles).

    The paper trains w with 100 times the learning rate of the other parameters. This module stores w/100 instead. An
    Adam-like optimizer takes steps of about the same size for every parameter, so w moves 100 times as far and no
    parameter group is needed. (SGD's steps grow with the gradient, so under SGD w moves 10^4 times as far. Also, the
    gradient of w/100 is 100 times that of w, which counts where gradients are clipped by their norm.)

    Angles are multiplied by w as they are, which is Eq. 12. The code of Position-SHAP's authors multiplies what is left
    of them in (-pi, pi] (rjbruin/position-shap at d695b6a), and a rotation by that is no longer relative.

    Args:
        init: Initial value of w.
    """

    def __init__(self, init: float, device=None, dtype=None) -> None:
        super().__init__()
        self.init = init
        self.weight = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.init / 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 100. * self.weight.to(x.dtype) * x  # the ONNX exporter of torch 2.11 fails on an integer 100
