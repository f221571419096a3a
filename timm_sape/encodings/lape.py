"""LaPE (Yu et al., 'LaPE: Layer-adaptive Position Embedding for Vision Transformers with Independent Layer
Normalization', ICCV 2023).

A learned table like that of 'ape', but it is passed from layer to layer beside the tokens: each layer applies a
LayerNorm of its own to what the layer before used, and adds the result to the input of its attention. Only the
resampling of the table is 2-D. It costs one LayerNorm of the table per layer, whatever the batch size, and one addition
per token entry and layer.
"""
from typing import Tuple

import torch
import torch.nn as nn

from ..grid import Grid
from .ape import resample_pos_embed
from .base import Float32LayerNorm, ResizedEncoding, fill_trunc_normal
from .registry import register_encoding


@register_encoding('lape')
class LayerAdaptivePositionEncoding(ResizedEncoding):
    """Layer-adaptive absolute (LaPE).

    The attention of layer l sees LN1(x) + p_l, where p_l = LN_l(p_(l-1)) and p_0 is the table.

    Nothing is added to the tokens themselves, so neither the residual path nor an MLP sees p. The table is initialized
    from a truncated normal distribution with std .02 and has rows for the prefix tokens too. The norms LN_l (eps 1e-6)
    belong to the encoding and are initialized by torch's defaults. All p_l are computed in at least float32. No
    parameter gets weight decay.

    On another grid the rows of the patches are resampled like those of 'ape', before the first norm.
    """
    per_layer = False
    supplements_ape = False
    excludes = {'ape': "it is 'ape' passed from layer to layer instead of added once"}
    adds = '(H*W + P + 2 * L) * D'
    on_other_grids = 'the table is resampled (bicubic, antialiased)'
    paper = 'https://arxiv.org/abs/2212.05262'

    def __init__(self, *, depth: int = 1, device=None, dtype=None, **host) -> None:
        super().__init__(depth=depth, device=device, dtype=dtype, **host)
        dd = {'device': device, 'dtype': dtype}
        height, width = self.grid_size
        self.table = nn.Parameter(torch.empty(1, self.num_prefix_tokens + height * width, self.dim, **dd))
        self.norms = nn.ModuleList(Float32LayerNorm(self.dim, eps=1e-6, **dd) for _ in range(depth))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        fill_trunc_normal(self.table, 0.02)
        for norm in self.norms:
            norm.reset_parameters()

    def set_depth(self, depth: int) -> None:
        del self.norms[depth:]

    def resample(
            self,
            name: str,
            table: torch.Tensor,
            old_size: Tuple[int, int],
            new_size: Tuple[int, int],
    ) -> torch.Tensor:
        p, (height, width) = self.num_prefix_tokens, old_size
        if table.shape[1] != p + height * width:
            raise ValueError(
                f"The table of 'lape' has {table.shape[1]} rows, not {p} for the prefix tokens of the model plus "
                f'{height}x{width} for the grid. Create the model with the prefix tokens of the checkpoint '
                '(class_token, reg_tokens).')
        return resample_pos_embed(table, old_size, new_size, p)

    def layer_embed(self, grid: Grid) -> torch.Tensor:
        table, terms = self.resized('table', grid), []
        for norm in self.norms:
            table = norm(table)  # [1, P+H*W, D]
            terms.append(grid.keep_tokens(table[0]))
        return torch.stack(terms)  # [L, (B,) N, D]
