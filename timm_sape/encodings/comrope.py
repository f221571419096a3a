"""ComRoPE (Yu et al., 'ComRoPE: Scalable and Robust Rotary Position Embedding Parameterized by Trainable Commuting
Angle Matrices', CVPR 2025).

A rotation of q and k in blocks of channels, by exponentials of learned skew-symmetric matrices. Those of y and of x
commute, so q.k depends on offsets alone. It is 2-D in that a block turns with y, with x, or with a mixture of both. As
the matrices commute, it costs one exponential per row and column and one product of two blocks per patch, whatever the
batch size, then a product of each block with q and with k.
"""
import torch
import torch.nn as nn

from .. import ops
from ..grid import Grid
from .base import BlockRotaryEncoding
from .liere import require_blocks
from .registry import register_encoding


@register_encoding('comrope')
class CommutingRotaryEncoding(BlockRotaryEncoding):
    """Commuting rotary (ComRoPE).

    Block m of the channels of head h is multiplied by exp((f[0, m] y + f[1, m] x) * A[h, m]), with A skew-symmetric.

    In the form LD (linearly dependent) each layer learns A and the factors f, which all heads share. In the form AP
    (axial partition) it learns A alone; f is (1, 0) for even blocks and (0, 1) for odd ones. y goes from -1/2 to 1/2
    over the image, ((row + 1/2) / H - 1/2), and x likewise, so 0 is the middle of the image. Prefix tokens are not
    turned, which places them in the middle, like the authors' class token. The authors' code learns a matrix P with
    A = P - P^T, whose entries start normal with a standard deviation of 1. Here the entries of A above the diagonal are
    learned, and start normal with a standard deviation of sqrt(2), as those of P - P^T do. f starts standard normal.
    The paper also shifts positions at random in training, which is left out. No parameter gets weight decay. Computed
    in at least float32.

    Args:
        form: 'ld' (linearly dependent) or 'ap' (axial partition).
        block_size: Channels of a block, 2 or more.

    Raises:
        ValueError: If a value is none of these, or the head dim is not a multiple of block_size, in the form AP of
            2 * block_size.
    """
    relative = True
    adds = 'L * (3.5 * D + d / 4)'
    on_other_grids = 'nothing to do: positions go from edge to edge'
    paper = 'https://arxiv.org/abs/2506.03737'

    def __init__(self, *, form: str = 'ld', block_size: int = 8, device=None, dtype=None, **host) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        self._require_choice('form', form, ('ld', 'ap'))
        require_blocks('comrope', block_size, self.head_dim)
        self.block_size = block_size
        num_blocks = self.head_dim // block_size
        if form == 'ap' and num_blocks % 2:
            raise ValueError(
                f"'comrope' in the form 'ap' needs an even number of blocks, half of them for each axis, got "
                f"{num_blocks} of {block_size} channels. Choose another num_heads or block_size, or form='ld'.")
        dd = {'device': device, 'dtype': dtype}
        self.entries = nn.Parameter(torch.empty(self.num_heads, num_blocks, block_size * (block_size - 1) // 2, **dd))
        self.factors = nn.Parameter(torch.empty(2, num_blocks, **dd)) if form == 'ld' else None
        self.reset_parameters()

    @classmethod
    def fits(cls, dim: int, num_heads: int) -> bool:
        return dim // num_heads % 8 == 0

    def reset_parameters(self) -> None:
        nn.init.normal_(self.entries, std=2 ** 0.5)
        if self.factors is not None:
            nn.init.normal_(self.factors)

    def blocks(self, grid: Grid) -> torch.Tensor:
        if self.factors is None:
            entries, = ops.upcast(self.entries)
            is_odd = torch.arange(entries.shape[1], device=entries.device) % 2
            factors = torch.stack([1 - is_odd, is_odd])
        else:
            entries, factors = ops.upcast(self.entries, self.factors)
        rows, columns = (
            ops.matrix_exp(ops.skew(self._scaled(entries, factor, size), self.block_size))
            for factor, size in zip(factors, grid.size))  # [h, H, n, b, b], [h, W, n, b, b]
        return (rows[:, :, None] @ columns[:, None]).flatten(1, 2)

    def _scaled(self, entries: torch.Tensor, factor: torch.Tensor, size: int) -> torch.Tensor:
        """The entries times the places of `size` rows or columns and the blocks' factors, gated, `[h, size, n, C]`."""
        places = (torch.arange(size, device=entries.device, dtype=entries.dtype) + 0.5) / size - 0.5
        return self.gated(places[:, None, None] * factor[:, None] * entries[:, None])
