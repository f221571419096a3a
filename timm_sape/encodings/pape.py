"""PaPE (Øhrstrøm et al., 'Parabolic Position Encoding', 2026).

What a patch sees of another one falls off with a sum of parabolas in directions that each head learns, as wide and as
far to one side as the patch's own content says. 2-D in that a direction is a vector (y, x).

A sum of parabolas of dy and dx is a quadratic form in them: however many there are, five numbers for each query and
head are all that is left of them. Multiplied out they are six channels of q and k (21 in half precision), so that no
N x N tensor is made and attention stays fused. (One by one, M parabolas would take 3 * M + 2.) Costs a projection of
the tokens to h * M widths, and those channels.
"""
from typing import List, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from .. import ops
from ..grid import Grid
from .base import CoordinateEncoding
from .checks import is_integer
from .registry import register_encoding

# The unit of coordinates, in patches, and what multiplies the channels of k and divides those of q. Powers of two
# change no digit: with these, the channels of k are within the range of float16 on grids of up to 256 x 256.
UNIT, WEIGHT = 16.0, 512.0


@register_encoding('pape')
class ParabolicPositionEncoding(CoordinateEncoding):
    """Parabolic (PaPE).

    Logits get sum over m of -a_im (u_im - u_jm)^2 + b_im (u_im - u_jm), with u_jm = w_p[m].(y_j, x_j).

    For each head, a_i = softplus(w_a x_i) and b_i = w_b x_i, with x_i the normed token that q and k are made of. The
    authors' code divides the bias by sqrt(d) along with q.k; here it is added as it stands. So that it starts from the
    same values, w_p and w_b start from those of that code (uniform in +-1/sqrt(2) and +-1/sqrt(D)) times d^(-1/4), w_a
    in +-1/sqrt(D) as it is. There, patches count from 1 and the class token is at (0, 0); here prefix tokens have no
    bias. No parameter has weight decay.

    Everything is computed in float32 at least, but for the product itself, which is the attention's own. Three things
    keep the difference of its large terms right in half precision: coordinates are centred, so that few digits are
    enough to be exact; the five numbers of a query are rounded (to two channels) before anything is made of them, which
    leaves an error in the parabolas, small where offsets are, and none in their differences; and whatever has more
    digits than the dtype has as many channels as that takes.

    Args:
        num_parabolas: M, parabolas for each head, 1 or more.

    Raises:
        ValueError: If it is none.
    """
    relative = True
    adds = 'L * 100 * h * (D + 1)'
    resolution = 'parabolas go on for further offsets, or `rescale`'
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

    def channels(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            x: torch.Tensor,
            grid: Grid,
            scale: float,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        with ops.no_autocast(q):
            form = self.gated(self._form(x[:, grid.num_prefix_tokens:], grid)) / (scale * WEIGHT)  # [B, h, N-P, 5]
            narrow = q.dtype != form.dtype
            if narrow:
                high, low = _parts(form.detach(), q.dtype, 2)
                form = form + (high + low.to(q.dtype) - form).detach()
            places = grid.keep_rows(grid.coordinates(form.device, form.dtype))  # [(B, 1,) N-P, 2]
            row = (places[..., 0] - (grid.height - 1) / 2) / UNIT
            column = (places[..., 1] - (grid.width - 1) / 2) / UNIT
            # In the form of y_i - y_j and x_i - x_j: what multiplies 1, y_j and x_j; and y_j^2, y_j x_j and x_j^2
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

    def _form(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        """What multiplies dy^2, dy*dx, dx^2, dy and dx in the bias of each query, `[B, h, N-P, 5]`.

        Args:
            x: Tokens of the patches, `[B, N-P, D]`.
            grid: The grid.
        """
        x, w_p, w_a, w_b = ops.upcast(x, self.w_p, self.w_a, self.w_b)
        w_p = UNIT * w_p
        ref = self.rescaling(grid) if self.rescales else None
        if ref is not None:
            stretch = [old / new for old, new in zip(ref, grid.size)]
            w_p = torch.stack([w * s for w, s in zip(w_p.unbind(-1), stretch)], dim=-1)
        wy, wx = w_p.unbind(-1)
        products = torch.stack([wy * wy, 2 * wy * wx, wx * wx], dim=-1)  # [h, M, 3]
        weight = torch.cat([w_a, w_p.transpose(1, 2) @ w_b], dim=1)  # [h, M+2, D]
        ab = F.linear(x, weight.flatten(0, 1)).unflatten(-1, weight.shape[:2]).transpose(1, 2)  # [B, h, N-P, M+2]
        return torch.cat([-F.softplus(ab[..., :-2]) @ products, ab[..., -2:]], dim=-1)


def _parts(x: torch.Tensor, dtype: torch.dtype, num: int) -> List[torch.Tensor]:
    """Numbers that add up to x, smaller and smaller; all but the last are exact in a narrow dtype, without gradient."""
    parts = []
    for _ in range(num - 1):
        parts.append(x.detach().to(dtype).to(x.dtype))
        x = x - parts[-1]
    return [*parts, x]
