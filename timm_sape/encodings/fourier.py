"""Learnable Fourier features (Li et al., 'Learnable Fourier Features for Multi-Dimensional Spatial Positional
Encoding', NeurIPS 2021), as in the comparison of Position-SHAP.

A learned function of the coordinates is added to each patch token: an MLP of waves, each in a direction of its own. At
initialization, the dot product of the features of two patches is a Gaussian of the Euclidean distance between them. It
costs a small MLP over the grid, once per forward pass whatever the batch size, and one addition per token entry.
"""
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F

from .. import ops
from ..checks import is_integer, is_number
from ..grid import Grid
from .base import CoordinateEncoding, Float32Linear
from .registry import register_encoding


@register_encoding('fourier')
class FourierPositionEncoding(CoordinateEncoding):
    """Learnable Fourier features.

    The patch at p = (y, x) gets fc2(GELU(fc1([cos(p W), sin(p W)] / sqrt(F)))), coordinates in patches.

    W is initialized from a normal distribution with variance gamma^-2, so the features of two patches at distance r
    have the expected dot product exp(-r^2 / (2 gamma^2)) / 2. The linear layers are initialized by torch's defaults.
    Both axes form a single group in the sense of the paper. (The code of Position-SHAP uses gamma^-2 as the standard
    deviation: its gamma of 2.5 is 6.25 here.) Computed in at least float32. No parameter gets weight decay, and nothing
    is added to prefix tokens.

    Args:
        gamma: Width (standard deviation) of that Gaussian in patches, positive.
        features: F, number of Fourier features, even. Default: D.
        hidden: Width of the hidden layer, 1 or more. Default: 4 * D.

    Raises:
        ValueError: If a value is none of these, or `features` is left out and D is odd.
    """
    per_layer = False
    adds = '(8 * D + 6) * D'
    on_other_grids = 'coordinates extrapolate, or `rescale`'
    paper = 'https://arxiv.org/abs/2106.02795'

    def __init__(
            self,
            *,
            gamma: float = 2.5,
            features: Optional[int] = None,
            hidden: Optional[int] = None,
            device=None,
            dtype=None,
            **host,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        if not is_number(gamma) or gamma <= 0:
            raise ValueError(f"'fourier' needs a positive gamma, got {gamma!r}.")
        features = self.dim if features is None else features
        hidden = 4 * self.dim if hidden is None else hidden
        if not is_integer(features, 2) or features % 2:
            raise ValueError(
                f"'fourier' needs features (by default embed_dim) to be a positive even number, got {features!r}.")
        if not is_integer(hidden, 1):
            raise ValueError(f"'fourier' needs hidden to be a positive integer, got {hidden!r}.")
        self.gamma = gamma
        dd = {'device': device, 'dtype': dtype}
        self.freqs = nn.Parameter(torch.empty(2, features // 2, **dd))  # W
        self.fc1 = Float32Linear(features, hidden, **dd)
        self.fc2 = Float32Linear(hidden, self.dim, **dd)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.freqs, std=1 / self.gamma)
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    def embed(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        with ops.no_autocast(self.freqs):
            (freqs,) = ops.upcast(self.freqs)
            position = self.coordinates(grid, freqs.device, freqs.dtype)[..., None]  # [H*W, 2, 1]
            phase = (position * freqs).sum(1)  # [H*W, F/2]
            features = torch.cat([phase.cos(), phase.sin()], dim=-1) * (2 * freqs.shape[1]) ** -0.5  # [H*W, F]
            table = self.fc2(F.gelu(self.fc1(features)))  # [H*W, D]
        return grid.keep_tokens(grid.pad_tokens(table))  # [(B,) N, D]
