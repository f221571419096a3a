"""FIRE (Li et al., 'Functional Interpolation for Relative Positions Improves Long Context Transformers', ICLR 2024).

A small MLP in each layer computes the bias from the distance between two patches, on a logarithmic scale and divided by
the largest distance in the image. So a larger image does not leave the range that the MLP was trained on. It is 2-D in
that distances are measured on the grid. It costs the MLP over the (2H-1)*(2W-1) offsets and one look-up of N x N
numbers per head and layer, whatever the batch size.
"""
from collections import OrderedDict
from functools import reduce
from typing import Optional

import torch
import torch.nn as nn

from ..checks import is_integer, is_number
from ..grid import Grid
from .base import Float32Linear, PositionEncoding, between_patches
from .registry import register_encoding

EPSILON = 1e-6  # as implementations for language models have it


@register_encoding('fire')
class FunctionalInterpolation(PositionEncoding):
    """Functional interpolation (FIRE).

    Logits get f(log(1 + |c| r) / log(1 + |c| max(T, R))), where r is the distance of two patches, R the largest in the
    image, and T the largest in the trained grid. f and c are learned.

    f = fc2(relu(fc1(.))) has one input and an output for each head. Each layer learns f and c. The paper is about text:
    there r is the distance i - j of two tokens, and R the position i of the query, which is the largest distance that
    the query can have. An image has no such order, so R is the distance between opposite corners. The paper learns T,
    from 512 tokens on. Here T is R of the grid that the model was made for, and is saved with it: smaller images keep
    the scale, larger ones are squeezed into it. (With images of one size, a learned T would add nothing to f, and below
    R it would have no gradient.) 1e-6 is added to the denominator, as implementations for language models do. The
    layers are initialized by torch's defaults. No parameter gets weight decay. Computed in at least float32.

    Args:
        distance: 'euclidean' or 'manhattan'.
        hidden: Width of the MLP, 1 or more.
        log_scale: Initial value of c, more than 0.
        threshold: T in patches, more than 0. Default: R of the model's own grid, at least 1. Weights that are loaded
            bring their own.

    Raises:
        ValueError: If a value is none of these.
    """
    relative = True
    sees_mirror = False
    adds = 'L * (65 + 33 * h)'
    on_other_grids = 'larger distances are squeezed into the trained range'
    skips_dropped = True
    paper = 'https://arxiv.org/abs/2310.04418'

    def __init__(
            self,
            *,
            distance: str = 'euclidean',
            hidden: int = 32,
            log_scale: float = 0.1,
            threshold: Optional[float] = None,
            device=None,
            dtype=None,
            **host,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        self._require_choice('distance', distance, ('euclidean', 'manhattan'))
        if not is_integer(hidden, 1):
            raise ValueError(f"'fire' needs hidden to be a positive integer, got {hidden!r}.")
        for name, value in (('log_scale', log_scale), ('threshold', threshold)):
            if (value is not None or name == 'log_scale') and (not is_number(value) or value <= 0):
                raise ValueError(f"'fire' needs {name} to be a positive number, got {value!r}.")
        self.distance = distance
        self.start = log_scale, threshold
        dd = {'device': device, 'dtype': dtype}
        self.log_scale = nn.Parameter(torch.empty(1, **dd))
        self.register_buffer('threshold', torch.empty(1, **dd))
        self.mlp = nn.Sequential(OrderedDict(
            fc1=Float32Linear(1, hidden, **dd),
            act=nn.ReLU(),
            fc2=Float32Linear(hidden, self.num_heads, **dd),
        ))
        self._reset_scalars()

    def _reset_scalars(self) -> None:
        log_scale, threshold = self.start
        height, width = self.grid_size
        largest = max(1.0, self._distance(height - 1, width - 1))
        nn.init.constant_(self.log_scale, log_scale)
        nn.init.constant_(self.threshold, largest if threshold is None else threshold)

    def reset_parameters(self) -> None:
        self._reset_scalars()
        self.mlp.fc1.reset_parameters()
        self.mlp.fc2.reset_parameters()

    def _distance(self, dy, dx):
        """Of numbers or tensors."""
        return abs(dy) + abs(dx) if self.distance == 'manhattan' else (dy ** 2 + dx ** 2) ** 0.5

    def position_bias(self, grid: Grid) -> torch.Tensor:
        # Take the device from the grid, not from the weights: some libraries load a layer's weights only for its call.
        dtype = reduce(torch.promote_types, (p.dtype for p in self.parameters()), torch.float32)
        dy, dx = (torch.arange(1 - size, size, device=grid.device, dtype=dtype) for size in grid.size)
        distances = self._distance(dy[:, None], dx)  # [2H-1, 2W-1]
        log_scale = self.log_scale.to(dtype).abs()
        largest = torch.maximum(self.threshold.to(dtype), distances[0, 0])  # from corner to corner
        scaled = (log_scale * distances).log1p() / ((log_scale * largest).log1p() + EPSILON)
        values = self.mlp(scaled.flatten()[:, None])  # [(2H-1)*(2W-1), h]
        return grid.pad_prefix(between_patches(values, grid))  # [(B,) h, N, N]
