"""Conditional position encoding (Chu et al., 'Conditional Positional Encodings for Vision Transformers', ICLR 2023), as
its generator (PEG) makes it.

2-D in that it is a convolution on the grid. The zeros beyond the border tell the patches there where they are, and
attention hands that on. Costs k^2 multiplications per entry of the patch tokens, once.
"""
import torch
import torch.nn as nn

from ..grid import Grid
from .base import PositionEncoding
from .checks import is_integer
from .registry import register_encoding


@register_encoding('peg')
class ConditionalPositionEncoding(PositionEncoding):
    """Conditional, by a convolution (PEG).

    After the first block: x + conv(x), where conv is depthwise, k x k, with a bias, on the grid of the patches.

    Beyond the border there are zeros, and in the place of a dropped patch as well. Prefix tokens get nothing. The
    convolution starts as torch's do, its weights and biases uniform within +-1/k (Twins starts it otherwise: normal
    with variance 2/k^2, and no bias; the paper does not say). No parameter has weight decay.

    Args:
        kernel_size: k, an odd number of at least 3: a kernel of 1 would see no border.

    Raises:
        ValueError: If it is not.
    """
    first_layers = 1
    adds = '(k^2 + 1) * D'
    resolution = 'the kernel slides over any grid'
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
        maps = self.conv(maps.contiguous())  # opacus' gradients of a convolution are wrong if its input is not
        patches = maps.flatten(2).transpose(1, 2)  # [B, H*W, D]
        return grid.pad_tokens(grid.gather(patches[:, None])[:, 0])  # [B, N, D]
