"""PaPE-RI, the form of PaPE that does not change when the image is rotated (Øhrstrøm et al., 2026).

One parabola of the distance between two patches in each head, whose width depends on the content of the query. It is
2-D in that distances are measured on the grid. Computed as `pape` is, by six further channels of q and k (21 in half
precision), so attention stays fused. It costs a projection of the tokens to h widths, and these channels.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from .. import ops
from ..grid import Grid
from .base import CoordinateEncoding
from .pape import UNIT, QuadraticForm
from .registry import register_encoding


@register_encoding('pape_ri')
class RotationInvariantParabolicEncoding(QuadraticForm, CoordinateEncoding):
    """Parabolic, rotation-invariant (PaPE-RI).

    Logits get -a_i s^2 |p_i - p_j|^2 for each head, with a_i = softplus(w_a x_i) and positions p in patches.

    x_i is the normed token that q and k are computed from. s is drawn for each head and layer, uniform in +-1/sqrt(2),
    and is not trained. Three things differ from the authors' code. It draws s anew for each model; here s depends on
    the layer alone, so that models of several seeds are the same encoding, and it is saved with the weights. It divides
    the bias by sqrt(d) along with q.k, while here it is added unscaled and s is multiplied by d^(-1/4) instead. And
    there patches are numbered from 1 with the class token at (0, 0), while here prefix tokens have no bias. w_a is
    initialized as there (uniform in +-1/sqrt(D)). No parameter gets weight decay. As precise as `pape`.
    """
    relative = True
    sees_mirror = False
    adds = 'L * h * D'
    on_other_grids = 'the parabola extrapolates, or `rescale`'
    paper = 'https://arxiv.org/abs/2602.01418'

    def __init__(self, *, layer: int = 0, device=None, dtype=None, **host) -> None:
        super().__init__(layer=layer, device=device, dtype=dtype, **host)
        self.seed = layer
        dd = {'device': device, 'dtype': dtype}
        self.w_a = nn.Parameter(torch.empty(self.num_heads, self.dim, **dd))
        dd['dtype'] = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self.register_buffer('scale', torch.empty(self.num_heads, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.w_a, -self.dim ** -0.5, self.dim ** -0.5)
        if not self.scale.is_meta:
            generator = torch.Generator().manual_seed(self.seed)
            drawn = torch.rand(self.num_heads, dtype=torch.float64, device='cpu', generator=generator)
            self.scale.copy_((2 * drawn - 1) * (self.head_dim ** -0.25 * 2 ** -0.5))

    def _apply(self, fn, *args, **kwargs):
        # model.half() would round the squares of these by a percent
        before = self.scale
        super()._apply(fn, *args, **kwargs)
        if torch.promote_types(self.scale.dtype, torch.float32) != self.scale.dtype:
            self.scale = before.to(self.scale.device)
        return self

    def form(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        x, w_a, scale = ops.upcast(x, self.w_a, self.scale)
        logits = F.linear(x, w_a).transpose(1, 2).contiguous()  # torch.compile takes its strides for those of gradients
        width = F.softplus(logits) * (UNIT * scale[:, None]) ** 2  # [B, h, N]
        ref = self.rescaling(grid)
        stretch = (1.0, 1.0) if ref is None else [old / new for old, new in zip(ref, grid.size)]
        yy, xx = (-width * s * s for s in stretch)  # torch.export fails on the square of a symbolic number
        zero = torch.zeros_like(width)
        return torch.stack([yy, zero, xx, zero, zero], dim=-1)
