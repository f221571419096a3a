"""SaPE2 (Chen et al., 'A 2D Semantic-Aware Position Encoding for Vision Transformers', 2025).

A patch counts, along its row and along its column, how much of what lies there concerns it (the gates), and looks the
counts up in a learned table. The vector of what it finds is its code; the bias between two patches is the distance of
their codes, one along x plus one along y. 2-D in that rows and columns are counted apart.

The paper prints code in its Appendix D, which differs from its equations in two scales (see `SemanticAwareEncoding`).
There is a repository that appears to be the authors'; who calls what K and Q is in the table `NAMES`, which `help` of
each encoding shows.

What it can tell: the x bias does not change when rows change places, nor the y bias when columns do, and on a constant
image the bias is zero. It supplements a position encoding rather than replacing one, hence `ape+sape2_k`.

Cost: distances of N x N codes of length W and of length H, on top of attention.
"""
from typing import Any, Dict, Optional, Tuple, Union

import torch
import torch.nn as nn

from .. import ops
from ..grid import Grid
from .base import ReferenceGridEncoding, fill_trunc_normal
from .checks import is_integer, is_number
from .registry import register_encoding

PRESETS = {
    'appendix': {'gate_scale': 'head_dim', 'bias_scale': 'one'},  # the scales of Appendix D, and of the repository
    'equations': {'gate_scale': 'one', 'bias_scale': 'head_dim'},  # Eq. 9 and Eq. 16
}

NAMES = """
Who calls what by which name. e is what a patch looks up; the gates are of q.k everywhere.

| | text, Eq. 12 | Appendix D | repository, b802237 | repository, 97e3229 | here |
|---|---|---|---|---|---|
| q.e | SaPE2(Q) | no name | `cope_k=1` | | `sape2_q` |
| k.e | SaPE2(K) | | `cope_q=1` | `cope_k=1` or `cope_q=1` | `sape2_k` |
| both | "both Q and K" (5.3) | | both flags | both flags | `sape2_qk` |
| q.e, keys of their own | | | `sep_keys`, `cope_k=1` | | `sape2_q`, `separate_keys='zero'` |
| k.e, keys of their own | | | | `sep_keys`, either flag | `sape2_k`, `separate_keys='zero'` |

The text is of 2025-05-14. The repository is github.com/zhshy666/cope-vit, which appears to be the authors' and never
names the paper; b802237 (2025-03-06) is its last commit before the paper, 97e3229 (2025-05-16) the one after. So K and
Q trade places between the paper and the code before it, and a label in the paper's tables may mean either: nothing
public settles which model made which number. Our names follow the text.

"Both" is defined in the code alone, as three terms: the bias of each flag, and the product of the N x N matrix of the
second with itself. `sape2_qk` concatenates the codes of q and k instead. Every SaPE2 model of the repository has APE.
"""


class SemanticAwareEncoding(ReferenceGridEncoding):
    """What encodings with SaPE2's codes have in common: the tables, the scales and their keywords.

    The paper's equations and the code of its Appendix D differ in two scales; a preset chooses both, a keyword given
    explicitly beats it. Computed in float32 at least. The tables, the learned gain and the matrices of separate keys
    have no weight decay.

    Args:
        preset: 'appendix' (gates scaled by 1/sqrt(d), bias not scaled) or 'equations' (gates not scaled, bias scaled by
            1/sqrt(d)). It chooses these scales and nothing else: Appendix D multiplies the queries, as 'sape2_q' does.
        gate_scale: Factor of q.k inside the gates: 'head_dim' for 1/sqrt(d), 'one', or a number. Default: the preset's.
        bias_scale: Factor of the bias: 'one', 'head_dim' for 1/sqrt(d), 'learned' for one gain per head, or a number.
            Negative numbers flip the sign: by the paper's equations distant codes attract, by its prose (5.4) they
            repel. Default: the preset's.
        bias_init: Initial value of the learned gain. Default: the preset's scale.
        npos: Embeddings per axis, 2 or more. Default: W + 1 and H + 1 of the trained grid, all that can be counted.
        table_std: Standard deviation of the tables' truncated normal initial values.
        separate_keys: Start of two matrices d x d, one for each axis, shared by the heads, which k is multiplied with
            before gates and codes see it: 'zero' as in the repository (see the table), or 'identity', which starts as
            if there were none. None for none. With 'zero' all gates are 1/2 at first, so the codes of 'sape2_q' and
            'sape2_qk' start from geometry. 'sape2_k' and 'sape2sq_k' are dead with it: their codes are 0, so are the
            distances, a distance of 0 has no gradient, and they add nothing for ever.

    Raises:
        ValueError: If a value is none of these.
    """
    family: str
    mode: str
    adds = 'L * (W + H + 2) * d'
    resolution = 'positions and codes are scaled to the trained grid'
    paper = 'https://arxiv.org/abs/2505.09466'

    def __init__(
            self,
            *,
            preset: str = 'appendix',
            gate_scale: Optional[Union[str, float]] = None,
            bias_scale: Optional[Union[str, float]] = None,
            bias_init: Optional[float] = None,
            npos: Optional[int] = None,
            table_std: float = 0.02,
            separate_keys: Optional[str] = None,
            device=None,
            dtype=None,
            **host,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        name = self._name
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(f'{name!r}: unknown preset {preset!r}. Choose one of {", ".join(map(repr, PRESETS))}.')
        if npos is not None and not is_integer(npos, 2):
            raise ValueError(
                f'{name!r} needs npos to be an integer of 2 or more, got {npos!r}. Leave it out for one per count.')
        if not is_number(table_std) or table_std <= 0:
            raise ValueError(f'{name!r} needs a positive table_std, got {table_std!r}.')
        if separate_keys not in (None, 'zero', 'identity'):
            raise ValueError(
                f"{name!r}: separate_keys must be 'zero', 'identity' or None for none, got {separate_keys!r}.")
        values = PRESETS[preset]
        self.gate_scale = self._number('gate_scale', values['gate_scale'] if gate_scale is None else gate_scale)
        preset_scale = self._number('bias_scale', values['bias_scale'])
        learned = bias_scale == 'learned'
        if bias_init is not None and not learned:
            raise ValueError(
                f'{name!r}: bias_init is the initial value of a learned gain. '
                "Add bias_scale='learned', or leave bias_init out.")
        if bias_init is not None and not is_number(bias_init):
            raise ValueError(f'{name!r}: bias_init must be a number, got {bias_init!r}.')
        if not learned:
            self.bias_scale = preset_scale if bias_scale is None else self._number('bias_scale', bias_scale)
        self.bias_init = preset_scale if bias_init is None else float(bias_init)
        self.npos = npos
        self.table_std = table_std
        self.separate_keys = separate_keys

        dd = {'device': device, 'dtype': dtype}
        npos_y, npos_x = self._table_sizes()
        self.table_x = nn.Parameter(torch.empty(npos_x, self.head_dim, **dd))
        self.table_y = nn.Parameter(torch.empty(npos_y, self.head_dim, **dd))
        self.gain = nn.Parameter(torch.empty(self.num_heads, **dd)) if learned else None
        for name in ('key_x', 'key_y'):
            matrix = None if separate_keys is None else nn.Parameter(torch.empty(self.head_dim, self.head_dim, **dd))
            self.register_parameter(name, matrix)
        self.reset_parameters()

    @property
    def _name(self) -> str:
        return f'{self.family}_{self.mode}'

    def _number(self, keyword: str, value: Union[str, float]) -> float:
        if value == 'head_dim':
            return self.head_dim ** -0.5
        if value == 'one':
            return 1.0
        if not is_number(value):
            learned = ", 'learned'" if keyword == 'bias_scale' else ''
            raise ValueError(
                f"{self._name!r}: {keyword} must be 'head_dim', 'one'{learned} or a number, got {value!r}.")
        return float(value)

    def _table_sizes(self) -> Tuple[int, int]:
        height, width = self.ref_grid_size
        return self.npos or height + 1, self.npos or width + 1

    def reset_parameters(self) -> None:
        fill_trunc_normal(self.table_x, self.table_std)
        fill_trunc_normal(self.table_y, self.table_std)
        if self.gain is not None:
            nn.init.constant_(self.gain, self.bias_init)
        if self.separate_keys is not None:
            for matrix in (self.key_x, self.key_y):
                nn.init.zeros_(matrix) if self.separate_keys == 'zero' else nn.init.eye_(matrix)

    def set_ref_grid_size(self, ref_grid_size: Tuple[int, int]) -> None:
        super().set_ref_grid_size(ref_grid_size)
        npos_y, npos_x = self._table_sizes()
        for name, npos in (('table_x', npos_x), ('table_y', npos_y)):
            table = getattr(self, name)
            if table.shape[0] != npos:
                setattr(self, name, nn.Parameter(table.new_empty(npos, self.head_dim)))
                fill_trunc_normal(getattr(self, name), self.table_std)

    def codes(self, q: torch.Tensor, k: torch.Tensor, grid: Grid) -> Tuple[torch.Tensor, torch.Tensor]:
        """The codes of the patches along x and along y, `[B, h, N-P, W]` and `[B, h, N-P, H]`, in float32 or wider."""
        return ops.axis_codes(q, k, self.table_x, self.table_y, grid, **self._options(k, grid))

    def _options(self, k: torch.Tensor, grid: Grid) -> Dict[str, Any]:
        return {
            'mode': self.mode, 'gate_scale': self.gate_scale, 'ref_grid_size': self.rescaling(grid),
            'axis_keys': self._axis_keys(k)}

    def _axis_keys(self, k: torch.Tensor) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
        if self.separate_keys is None:
            return None
        with ops.no_autocast(k):
            k = k.to(torch.promote_types(k.dtype, torch.float32))
            return k @ self.key_x.to(k.dtype), k @ self.key_y.to(k.dtype)


class SemanticAwarePositionEncoding(SemanticAwareEncoding):
    """SaPE2: logits get bias_scale * (b^x + b^y), see `timm_sape.functional.sape2_bias` for the equations."""
    family = 'sape2'

    def content_bias(self, q: torch.Tensor, k: torch.Tensor, grid: Grid) -> torch.Tensor:
        bias = ops.sape2_bias(q, k, self.table_x, self.table_y, grid, **self._options(k, grid))
        return self._gain(bias).view(-1, 1, 1) * bias  # [B, h, N, N]

    def attend(self, q, k, v, rotated_q, rotated_k, mask, grid: Grid, **options) -> torch.Tensor:
        return ops.sape2_attention(
            q, k, v, self.table_x, self.table_y, grid, **self._options(k, grid),
            bias_scale=self.gated(self._gain(ops.upcast(q)[0])), rotated=(rotated_q, rotated_k), mask=mask, **options)

    def _gain(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_full((1,), self.bias_scale) if self.gain is None else self.gain.to(like.dtype)


def _with_names(cls):
    """Add the table of names to the docstring of a class, for `help`."""
    cls.__doc__ = (cls.__doc__ or '') + '\n' + NAMES
    return cls


@_with_names
@register_encoding('sape2_q')
class SemanticAwarePositionEncodingQ(SemanticAwarePositionEncoding):
    """2-D semantic-aware, on queries (SaPE2(Q)).

    Embeddings are multiplied with the queries, as in Appendix D.
    """
    mode = 'q'


@_with_names
@register_encoding('sape2_k', aliases=('sape2',))
class SemanticAwarePositionEncodingK(SemanticAwarePositionEncoding):
    """2-D semantic-aware, on keys (SaPE2(K)).

    Embeddings are multiplied with the keys; the gates are of q.k still. It is `sape2` because the paper prints one
    figure for SaPE2+APE (Table 1) and for SaPE2(K)+APE (Table 2).
    """
    mode = 'k'


@_with_names
@register_encoding('sape2_qk')
class SemanticAwarePositionEncodingQK(SemanticAwarePositionEncoding):
    """2-D semantic-aware, on queries and keys (SaPE2(QK)).

    SaPE2 on both Q and K, which the paper names (5.3) but does not define: here their codes are concatenated.
    """
    mode = 'qk'
