"""Conditional position encoding by a generator, PEG (Chu et al., 'Conditional Positional Encodings for Vision
Transformers', ICLR 2023).

A convolution over the grid of patch tokens is added to them, once, after a block. The zero padding reveals their
position to the patches at the border, and attention passes it on to the others. It costs k^2 multiplications per entry
of the patch tokens, once.
"""
import torch
import torch.nn as nn

from ..checks import is_integer
from ..grid import Grid
from .base import PositionEncoding
from .registry import register_encoding


@register_encoding('peg')
class ConditionalPositionEncoding(PositionEncoding):
    """Conditional, by a convolution (PEG).

    After the first block: x + conv(x), where conv is depthwise, k x k, with a bias, on the grid of the patches.

    The input is zero beyond the border and in place of dropped patches. Nothing is added to prefix tokens. The
    convolution is initialized by torch's defaults, so weights and biases are uniform within +-1/k. (The paper gives no
    initialization. Twins uses a normal distribution with variance 2/k^2 and a bias of zero.) No parameter gets weight
    decay.

    Args:
        kernel_size: k, an odd number of at least 3: a kernel of 1 would not reach beyond the border.

    Raises:
        ValueError: If `kernel_size` is anything else.
    """
    first_layers = 1
    adds = '(k^2 + 1) * D'
    on_other_grids = 'the kernel slides over any grid'
    paper = 'https://arxiv.org/abs/2102.10882'

    def __init__(self, *, kernel_size: int = 3, device=None, dtype=None, **host) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        if not is_integer(kernel_size, 3) or kernel_size % 2 == 0:
            raise ValueError(f"'peg' needs kernel_size to be an odd number of at least 3, got {kernel_size!r}.")
        self.conv = nn.Conv2d(
            self.dim, self.dim, kernel_size, padding=kernel_size // 2, groups=self.dim, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        self.conv.reset_parameters()

    def embed(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        patches = grid.scatter(x[:, None, grid.num_prefix_tokens:])[:, 0]  # [B, H*W, D]
        maps = patches.transpose(1, 2).unflatten(2, grid.size)  # [B, D, H, W]
        maps = self.conv(maps.contiguous())  # opacus computes wrong gradients if the input is not contiguous
        patches = maps.flatten(2).transpose(1, 2)  # [B, H*W, D]
        return grid.keep_tokens(grid.pad_tokens(patches))  # [B, N, D]
