"""PaPE (Øhrstrøm et al., 'Parabolic Position Encoding', 2026).

The bias is a sum of parabolas of the offset between two patches, along directions that each head learns. The content of
the query decides how wide each parabola is and where its peak lies. It is 2-D in that a direction is a vector (y, x).

A sum of parabolas is a quadratic form in dy and dx, so five numbers per query and head describe it, however many
parabolas there are. Expanded in the coordinates, it is a product of six further channels of q and k (21 in half
precision), so no N x N tensor is made and attention stays fused. (One parabola at a time, M of them would take
3 * M + 2 channels.) Costs a projection of the tokens to h * M widths, and these channels.
"""
from abc import ABC, abstractmethod
from typing import List, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from .. import ops
from ..checks import is_integer
from ..grid import Grid
from .base import CoordinateEncoding, PositionEncoding
from .registry import register_encoding

# UNIT: unit of coordinates, in patches. WEIGHT: multiplies the channels of k and divides those of q. Powers of two
# cause no rounding. LONGEST: on a longer side coordinates have too many digits, or their squares leave the range.
UNIT, WEIGHT = 16.0, 512.0
LONGEST = {torch.bfloat16: 513, torch.float16: 361}


class QuadraticForm(PositionEncoding, ABC):
    """The bias is a quadratic form of the offset. Its factors come from the content of the query.

    Everything is computed in at least float32, except the product itself, which is part of attention. It is a small
    difference of large terms. Three things keep it accurate in half precision. Coordinates are whole numbers around
    0, so that few digits represent them exactly. The five numbers of a query are rounded first (to two channels) and
    everything else is computed from the rounded values: the forms then differ slightly from the exact ones, but their
    terms still cancel. And a value with more digits than the dtype holds is split over several channels.
    """
    skips_dropped = True

    @abstractmethod
    def form(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        """The quadratic form of each query: the factors of dy^2, dy*dx, dx^2, dy and dx in its bias.

        Args:
            x: The tokens, `[B, N, D]`.
            grid: The grid.

        Returns:
            `[B, h, N, 5]`, for offsets in units of `UNIT` patches.
        """

    def channels(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            x: torch.Tensor,
            grid: Grid,
            scale: float,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        longest = LONGEST.get(q.dtype)
        if longest is not None and any(type(size) is int and size > longest for size in grid.size):
            raise ValueError(
                f'{self.name!r} in {q.dtype} is exact on grids of up to {longest} patches along a side, got '
                f'{grid.height}x{grid.width}. Use float32, without autocast, or larger patches.')
        with ops.no_autocast(q):
            # A linear layer copies tokens without prefix, and torch.export then refuses one image.
            form = self.form(x, grid)[:, :, grid.num_prefix_tokens:]
            form = self.gated(form) / (scale * WEIGHT)  # [B, h, N-P, 5]
            narrow = q.dtype != form.dtype
            if narrow:
                high, low = _parts(form.detach(), q.dtype, 2)
                form = form + (high + low.to(q.dtype) - form).detach()
            places = grid.keep_rows(grid.coordinates(form.device, form.dtype))  # [(B, 1,) N-P, 2]
            row = (places[..., 0] - grid.height // 2) / UNIT
            column = (places[..., 1] - grid.width // 2) / UNIT
            # Expand the form in y_i - y_j and x_i - x_j. `first` has the factors of 1, y_j and x_j, `second` those of
            # y_j^2, y_j x_j and x_j^2.
            yy, yx, xx, dy, dx = form.unbind(-1)
            first = torch.stack([
                yy * row * row + yx * row * column + xx * column * column + dy * row + dx * column,
                -2 * yy * row - yx * column - dy,
                -2 * xx * column - yx * row - dx,
            ], dim=-1)  # [B, h, N-P, 3]
            second = form[..., :3]
            linear = WEIGHT * torch.stack([torch.ones_like(row), row, column], dim=-1)  # [(B, 1,) N-P, 3]
            square = WEIGHT * torch.stack([row * row, row * column, column * column], dim=-1)  # [(B, 1,) N-P, 3]
            a, b = [first, second], [linear, square]
            if narrow:
                (high, low), (square_high, square_low) = _parts(second, q.dtype, 2), _parts(square, q.dtype, 2)
                a = [*_parts(first, q.dtype, 3), high, high, low, low]
                b = [linear, linear, linear, square_high, square_low, square_high, square_low]
            a, b = torch.cat(a, dim=-1).to(q.dtype), torch.cat(b, dim=-1).to(q.dtype)
            return grid.pad_tokens(a), grid.pad_tokens(b.expand_as(a))  # [B, h, N, 6 or 21]


@register_encoding('pape')
class ParabolicPositionEncoding(QuadraticForm, CoordinateEncoding):
    """Parabolic (PaPE).

    Logits get sum over m of -a_im (u_im - u_jm)^2 + b_im (u_im - u_jm), with u_jm = w_p[m].(y_j, x_j).

    For each head, a_i = softplus(w_a x_i) and b_i = w_b x_i, where x_i is the normed token that q and k are computed
    from. Positions are in patches. Two things differ from the authors' code. That code divides the bias by sqrt(d)
    along with q.k, while here it is added unscaled; the initial bias is the same, because w_p and w_b are initialized
    as there (uniform in +-1/sqrt(2) and +-1/sqrt(D)) but multiplied by d^(-1/4), and w_a as there (uniform in
    +-1/sqrt(D)). And there patches are numbered from 1 with the class token at (0, 0), while here prefix tokens have no
    bias. No parameter gets weight decay.

    Args:
        num_parabolas: M, number of parabolas per head, 1 or more.

    Raises:
        ValueError: If it is not a positive integer.
    """
    relative = True
    adds = 'L * 100 * h * (D + 1)'
    on_other_grids = 'parabolas extrapolate, or `rescale`'
    paper = 'https://arxiv.org/abs/2602.01418'

    def __init__(self, *, num_parabolas: int = 50, device=None, dtype=None, **host) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        if not is_integer(num_parabolas, 1):
            raise ValueError(f"'pape' needs num_parabolas to be a positive integer, got {num_parabolas!r}.")
        dd = {'device': device, 'dtype': dtype}
        self.w_p = nn.Parameter(torch.empty(self.num_heads, num_parabolas, 2, **dd))
        self.w_a = nn.Parameter(torch.empty(self.num_heads, num_parabolas, self.dim, **dd))
        self.w_b = nn.Parameter(torch.empty(self.num_heads, num_parabolas, self.dim, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        shrink = self.head_dim ** -0.25
        for weight, bound in (
                (self.w_p, shrink * 2 ** -0.5), (self.w_a, self.dim ** -0.5), (self.w_b, shrink * self.dim ** -0.5)):
            nn.init.uniform_(weight, -bound, bound)

    def form(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        x, w_p, w_a, w_b = ops.upcast(x, self.w_p, self.w_a, self.w_b)
        w_p = UNIT * w_p
        ref = self.rescaling(grid)
        if ref is not None:
            stretch = [old / new for old, new in zip(ref, grid.size)]
            w_p = torch.stack([w * s for w, s in zip(w_p.unbind(-1), stretch)], dim=-1)
        wy, wx = w_p.unbind(-1)
        products = torch.stack([wy * wy, 2 * wy * wx, wx * wx], dim=-1)  # [h, M, 3]
        weight = torch.cat([w_a, w_p.transpose(1, 2) @ w_b], dim=1)  # [h, M+2, D]
        ab = F.linear(x, weight.flatten(0, 1)).unflatten(-1, weight.shape[:2]).transpose(1, 2)  # [B, h, N, M+2]
        return torch.cat([-F.softplus(ab[..., :-2]) @ products, ab[..., -2:]], dim=-1)


def _parts(x: torch.Tensor, dtype: torch.dtype, num: int) -> List[torch.Tensor]:
    """Split x into `num` tensors of decreasing size that add up to it.

    All but the last are exact in the narrow `dtype`. Only the last one carries a gradient.
    """
    parts = []
    for _ in range(num - 1):
        parts.append(x.detach().to(dtype).to(x.dtype))
        x = x - parts[-1]
    return [*parts, x]
