"""Layers that compute in float32 at least, whatever the dtype of their parameters.

They are subclasses of torch's, and encodings call them instead of reading their weights. So hooks on them fire, and
libraries that wrap or replace a linear layer (adapters, quantization) take effect.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from .. import ops

__all__ = ['WideLayerNorm', 'WideLinear']


class WideLinear(nn.Linear):
    """`nn.Linear` in float32 at least."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ops.no_autocast(x):
            x, *parameters = ops.upcast(x, self.weight, *(() if self.bias is None else (self.bias,)))
            return F.linear(x, *parameters)


class WideLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` in float32 at least."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ops.no_autocast(x):
            x, weight, bias = ops.upcast(x, self.weight, self.bias)
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
