"""Layers that compute in at least float32, whatever the dtype of their parameters.

They are subclasses of torch's layers, and encodings call them instead of reading their weights. This way hooks on them
fire, and libraries that wrap or replace linear layers (adapters, quantization) take effect.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from ... import ops

__all__ = ['Float32LayerNorm', 'Float32Linear']


class Float32Linear(nn.Linear):
    """`nn.Linear` in at least float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ops.no_autocast(x):
            x, *parameters = ops.upcast(x, self.weight, *(() if self.bias is None else (self.bias,)))
            return F.linear(x, *parameters)


class Float32LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` in at least float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ops.no_autocast(x):
            x, weight, bias = ops.upcast(x, self.weight, self.bias)
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
