"""PEmixer (Li et al., 'Tackling the Abstraction and Reasoning Corpus with Vision Transformers', 2024; ViTARC).

Lets a model weigh content against position channel by channel, whichever encodings of the tokens stand beside it. It
knows no position itself. Costs two multiplications per token entry.
"""
from typing import Tuple

import torch
import torch.nn as nn

from ..grid import Grid
from .base import PositionEncoding
from .registry import register_encoding


@register_encoding('pemix')
class PositionMixer(PositionEncoding):
    """Mixer of tokens and positions (PEmixer).

    Tokens x and the sum of all their position terms, pe, become x * w_x + pe * w_pe, both weights in R^D.

    Both start as ones, which is plain addition, and have no weight decay. Prefix tokens are weighed like all others.
    This is the authors' mixer without norms. There is no `auto_pemix`, as it contributes nothing that could be faded
    in, and nothing to mix without an encoding of the tokens: `pos_enc='pemix+sincos2d'`.
    """
    per_layer = False
    alone = False
    gate_init = None
    adds = '2 * D'
    resolution = 'nothing to adapt'
    paper = 'https://arxiv.org/abs/2410.06405'

    def __init__(self, *, device=None, dtype=None, **host) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        self.weight_x = nn.Parameter(torch.empty(self.dim, device=device, dtype=dtype))
        self.weight_pe = nn.Parameter(torch.empty(self.dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight_x)
        nn.init.ones_(self.weight_pe)

    def mix(self, x: torch.Tensor, term: torch.Tensor, grid: Grid) -> Tuple[torch.Tensor, torch.Tensor]:
        return x * self.weight_x, term * self.weight_pe
