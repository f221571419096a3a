"""A factor on the logits that grows with the number of tokens. Not a position encoding, but a rule for other sizes.

The more keys there are, the flatter softmax gets: its entropy grows by up to log N. A factor in proportion to log N
keeps the logits ahead of that (Chiang and Cholak, 'Overcoming a Theoretical Limitation of Self-Attention', ACL 2022;
2202.12172). The factor is relative to the trained size and changes nothing there, so a trained model can use it.
"""
import math
from typing import Union

import torch

from .. import ops
from ..grid import Grid
from .base import ReferenceGridEncoding

__all__ = ['LOGIT_SCALINGS', 'LogitScaling']

LOGIT_SCALINGS = ('constant', 'log')  # values of the argument `logit_scaling` of models


class LogitScaling(ReferenceGridEncoding):
    """The products q.k in all layers are multiplied by log N / log N0.

    N = P + H*W is the number of tokens on the grid of the image, N0 that on the trained grid, and each counts as at
    least 2. Patches that were dropped count too, so training with patch dropout is as it was. Biases that encodings add
    to the logits are not multiplied: they have rules of their own.

    It is not registered. A model with `logit_scaling='log'` has it among its shared encodings, so the trained grid is
    saved and loaded as for encodings.
    """
    name = 'logit_scaling'
    per_layer = False
    chosen_when_loading = True

    def logit_factor(self, grid: Grid) -> Union[None, float, torch.Tensor]:
        if self.rescaling(grid) is None:
            return None
        now = ops.log_of_largest([2, grid.num_prefix_tokens + grid.num_patches], grid.device)
        return now / math.log(max(2, self.num_prefix_tokens + math.prod(self.ref_grid_size)))
