"""PEmixer (Li et al., 'Tackling the Abstraction and Reasoning Corpus with Vision Transformers', 2024; ViTARC).

Lets a model weigh content against position in each channel, for any encodings that are added to the tokens. It has no
positions of its own. It costs two multiplications per token entry.
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

    Both weights are initialized to ones, which is plain addition, and get no weight decay. They apply to prefix tokens
    too. This is the authors' mixer without norms. It must be combined with an encoding that is added to the tokens,
    e.g. `pos_enc='pemix+sincos2d'`. There is no `auto_pemix`, because the mixer adds nothing that a gate could scale.
    """
    per_layer = False
    alone = False
    gate_init = None
    adds = '2 * D'
    on_other_grids = 'nothing to adapt'
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
