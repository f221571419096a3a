"""Log-spaced continuous position bias of Swin V2 (Liu et al., 'Swin Transformer V2', CVPR 2022).

A small MLP in each layer computes the bias of an offset, instead of a look-up in a table. It is 2-D in that its input
is the pair (dy, dx). Offsets are on a logarithmic scale, so those beyond the trained ones stay close to the trained
range. It costs the MLP over the (2H-1)*(2W-1) offsets and one look-up of N x N numbers per head and layer, whatever the
batch size.
"""
import math
from collections import OrderedDict
from functools import reduce
from typing import Optional, Tuple

import torch
import torch.nn as nn

from ..checks import is_integer, is_number
from ..grid import Grid
from .base import Float32Linear, ReferenceGridEncoding, between_patches
from .registry import register_encoding


@register_encoding('cpb')
class ContinuousPositionBias(ReferenceGridEncoding):
    """Log-spaced continuous bias of Swin V2.

    Logits get b(f(p_i - p_j)), with b(f) = 16 sigmoid(fc2(relu(fc1(f)))), fc2 without a bias.

    Along each axis f(delta) = sign(delta) * log2(1 + |s|) / log2(8), where s is 8 * delta / (W0 - 1) along x for the
    trained grid H0 x W0, and likewise with H0 along y. (An axis of one patch, for which timm's `RelPosMlp` gives NaN,
    is treated as if it had two.)

    `mode='cr'` is the bias of timm's `vit_relpos_*` models: f(delta) = sign(delta) * ln(1 + |delta|), no sigmoid, fc2
    with a bias, and `hidden` from 128 to 512. Parameters have the names of `RelPosMlp`: `blocks.<i>.attn.rel_pos.mlp.*`
    there, or `shared_rel_pos.mlp.*` if all layers share one, is `blocks.<i>.attn.encodings.cpb.mlp.*` here.

    The layers are initialized by torch's defaults, as in those models. (timm's Swin V2 uses a normal distribution with
    std .02.) No parameter gets weight decay. Computed in at least float32. Note that with 'swin' the bias starts near
    8, while that of a prefix token is 0, as in timm, so at first patches hardly attend to prefix tokens. Swin V2's
    cosine attention is not part of this encoding.

    Args:
        mode: 'swin' or 'cr'.
        hidden: Width of the MLP, 1 or more.
        drop: Dropout rate between its layers in training, at least 0 and less than 1. timm uses .125.

    Raises:
        ValueError: If a value is none of these.
    """
    relative = True
    adds = 'L * 512 * (h + 3)'
    on_other_grids = 'the MLP extrapolates'
    changeable_keywords = ('drop',)
    paper = 'https://arxiv.org/abs/2111.09883'

    def __init__(
            self,
            *,
            mode: str = 'swin',
            hidden: int = 512,
            drop: float = 0.,
            device=None,
            dtype=None,
            **host,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        self._require_choice('mode', mode, ('swin', 'cr'))
        if not is_integer(hidden, 1):
            raise ValueError(f"'cpb' needs hidden to be a positive integer, got {hidden!r}.")
        if not is_number(drop) or not 0 <= drop < 1:
            raise ValueError(f"'cpb' needs drop of at least 0 and less than 1, got {drop!r}.")
        self.mode = mode
        dd = {'device': device, 'dtype': dtype}
        self.mlp = nn.Sequential(OrderedDict(
            fc1=Float32Linear(2, hidden, **dd),
            act=nn.ReLU(),
            drop1=nn.Dropout(drop),
            fc2=Float32Linear(hidden, self.num_heads, bias=mode == 'cr', **dd),
        ))

    def reset_parameters(self) -> None:
        self.mlp.fc1.reset_parameters()
        self.mlp.fc2.reset_parameters()

    def saved_grid_size(self) -> Optional[Tuple[int, int]]:
        return self.ref_grid_size if self.mode == 'swin' else None

    def position_bias(self, grid: Grid) -> torch.Tensor:
        # Take the device from the grid, not from the weights: some libraries load a layer's weights only for its call.
        dtype = reduce(torch.promote_types, (p.dtype for p in self.parameters()), torch.float32)
        offsets = self._squeezed_offsets(grid, grid.device, dtype)
        values = self.mlp(offsets)  # [(2H-1)*(2W-1), h]
        if self.mode == 'swin':
            values = 16 * values.sigmoid()
        return grid.pad_prefix(between_patches(values, grid))  # [(B,) h, N, N]

    def _squeezed_offsets(self, grid: Grid, device: Optional[torch.device], dtype: torch.dtype) -> torch.Tensor:
        """f of each offset from (1-H, 1-W) to (H-1, W-1), row by row, `[(2H-1)*(2W-1), 2]`."""
        axes = []
        for size, ref in zip(grid.size, self.ref_grid_size):
            delta = torch.arange(1 - size, size, device=device, dtype=dtype)
            if self.mode == 'swin':
                delta = delta * (8 / max(ref - 1, 1))
            unit = math.log(8) if self.mode == 'swin' else 1
            axes.append(delta.sign() * delta.abs().log1p() / unit)
        return torch.stack(torch.meshgrid(*axes, indexing='ij'), dim=-1).flatten(0, 1)
