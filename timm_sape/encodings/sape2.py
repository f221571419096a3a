"""SaPE2 (Chen et al., 'A 2D Semantic-Aware Position Encoding for Vision Transformers', 2025).

Each patch i compares its query with the keys of its row and gets a gate between 0 and 1 for each of them. For each
column m, it adds up its gates from column m to the end of the row. This sum is the position of column m as patch i sees
it: it counts patches that matter to i, not all patches. Positions are looked up in a learned table, and their products
with the key (or query) of i, one for each column, are the code of i along x. The code along y comes from the column of
i in the same way. Two patches get a bias in attention: the distance between their codes along x plus that along y.

The paper's equations and the code in its Appendix D differ in two scales; `preset` chooses between them. A public
repository that appears to be the authors' swaps K and Q: `help(timm_sape.get_encoding('sape2_k'))` has a table.

The bias says little about geometry alone. If rows of the image are swapped, the x part moves with them and is
otherwise the same; so does the y part with columns. Without another encoding, the bias on a constant image is zero. So
combine it with another encoding, such as `ape`.

Cost: on top of attention, N x N distances between codes of length W, and between codes of length H.
"""
import warnings
from typing import Any, Dict, Optional, Tuple, Union

import torch
import torch.nn as nn

from .. import ops
from ..checks import is_integer, is_number
from ..grid import Grid
from .base import ReferenceGridEncoding, fill_trunc_normal, fill_with
from .registry import register_encoding

PRESETS = {
    'appendix': {'gate_scale': 'head_dim', 'bias_scale': 'one'},  # the scales of Appendix D, and of the repository
    'equations': {'gate_scale': 'one', 'bias_scale': 'head_dim'},  # Eq. 9 and Eq. 16
}

NAMES = """
The names of the variants in each source. e is an entry of the table, looked up by position. The gates are always
computed from q.k.

| | text, Eq. 12 | Appendix D | repository, b802237 | repository, 97e3229 | here |
|---|---|---|---|---|---|
| q.e | SaPE2(Q) | no name | `cope_k=1` | | `sape2_q` |
| k.e | SaPE2(K) | | `cope_q=1` | `cope_k=1` or `cope_q=1` | `sape2_k` |
| both | "both Q and K" (5.3) | | both flags | both flags | `sape2_qk` |
| q.e, keys of their own | | | `sep_keys`, `cope_k=1` | | `sape2_q`, `separate_keys='zero'` |
| k.e, keys of their own | | | | `sep_keys`, either flag | `sape2_k`, `separate_keys='zero'` |

The text is of 2025-05-14. The repository is github.com/zhshy666/cope-vit, which appears to be the authors' and never
names the paper; b802237 (2025-03-06) is its last commit before the paper, 97e3229 (2025-05-16) the one after, which
changed the DeiT models alone, not its Swin Transformers. So K and Q trade places between the paper and the code before
it, and a label in the paper's tables may mean either: nothing public settles which model made which number. Our names
follow the text.

"Both" is defined in the code alone, as three terms: the bias of each flag, and the product of the N x N matrix of the
second with itself. `sape2_qk` concatenates the codes of q and k instead. Every SaPE2 model of the repository has APE.
"""


class SemanticAwareEncoding(ReferenceGridEncoding):
    """What encodings with SaPE2's codes have in common: the tables, the scales and their keywords.

    The paper's equations and the code of its Appendix D differ in two scales. `preset` sets both of them;
    `gate_scale` and `bias_scale` override it. Computed in float32 at least. The tables, the learned gain and the
    matrices of separate keys have no weight decay.

    Args:
        preset: 'appendix' (gates scaled by 1/sqrt(d), bias not scaled) or 'equations' (gates not scaled, bias scaled by
            1/sqrt(d)). It sets these scales only. Appendix D also multiplies the queries, not the keys: that is
            'sape2_q'.
        gate_scale: Factor of q.k inside the gates: 'head_dim' for 1/sqrt(d), 'one', or a number. Default: the preset's.
        bias_scale: Factor of the bias: 'one', 'head_dim' for 1/sqrt(d), 'learned' for one gain per head, or a number.
            By the paper's equations patches with distant codes attend to each other more; by its prose (5.4) less,
            which a negative number does. Default: the preset's.
        bias_init: Initial value of the learned gain, not 0 if there is a gate that starts at 0. Default: the preset's
            scale.
        npos: Table entries per axis, 2 or more. Default: W + 1 and H + 1 of the trained grid, one per position.
        table_std: Standard deviation of the tables' truncated normal initial values.
        separate_keys: Multiply k by a matrix d x d before it is used for gates and codes, one matrix for each axis,
            shared by the heads. 'zero' and 'identity' say how the matrices start; None for no matrices. 'zero' is as in
            the repository that appears to be the authors': all gates are 1/2 at first, so that the codes of 'sape2_q'
            and 'sape2_qk' start from geometry. 'sape2_k' and 'sape2sq_k' never learn with 'zero': their codes are 0, so
            all distances are 0, and a distance of 0 has no gradient.

    Raises:
        ValueError: If a value is none of these.
    """
    mode: str
    adds = 'L * (W + H + 2) * d'
    on_other_grids = 'positions and codes are scaled to the trained grid'
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
        name = self.name
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(f'{name!r}: unknown preset {preset!r}. Choose one of {", ".join(map(repr, PRESETS))}.')
        if npos is not None and not is_integer(npos, 2):
            raise ValueError(
                f'{name!r} needs npos to be an integer of 2 or more, got {npos!r}. Leave it out for one per count.')
        if not is_number(table_std) or table_std <= 0:
            raise ValueError(f'{name!r} needs a positive table_std, got {table_std!r}.')
        if separate_keys == 'zero' and self.mode == 'k':
            warnings.warn(
                f"{name!r} with separate_keys='zero' never learns: all codes are 0 and get no gradient. It is there to "
                "repeat a run of the repository. To train, use 'identity', or 'sape2_q'.")
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
            if self.bias_scale == 0:
                warnings.warn(f'{name!r} with bias_scale=0 does nothing and never learns.')
        self.bias_init = preset_scale if bias_init is None else float(bias_init)
        if learned and self.bias_init == 0 and self.gate is not None and self.gate.init == 0:
            raise ValueError(
                f'{name!r}: a gate of 0 and a learned gain of 0 would never learn. Leave bias_init out: with the gate '
                'the encoding does nothing at the start anyway.')
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

    def _number(self, keyword: str, value: Union[str, float]) -> float:
        if value == 'head_dim':
            return self.head_dim ** -0.5
        if value == 'one':
            return 1.0
        if not is_number(value):
            learned = ", 'learned'" if keyword == 'bias_scale' else ''
            raise ValueError(
                f"{self.name!r}: {keyword} must be 'head_dim', 'one'{learned} or a number, got {value!r}.")
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
                identity = torch.eye(self.head_dim, device=matrix.device)
                fill_with(matrix, 0 * identity if self.separate_keys == 'zero' else identity)

    def set_ref_grid_size(self, ref_grid_size: Tuple[int, int]) -> None:
        super().set_ref_grid_size(ref_grid_size)
        npos_y, npos_x = self._table_sizes()
        for name, npos in (('table_x', npos_x), ('table_y', npos_y)):
            table = getattr(self, name)
            if table.shape[0] != npos:
                setattr(self, name, nn.Parameter(
                    table.new_empty(npos, self.head_dim), requires_grad=table.requires_grad))
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

    def _gain(self, like: torch.Tensor) -> torch.Tensor:
        """Factor of the bias, `[1]` or `[h]`, in the dtype of a tensor, float32 at least."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        return like.new_full((1,), self.bias_scale, dtype=dtype) if self.gain is None else self.gain.to(dtype)


class SemanticAwarePositionEncoding(SemanticAwareEncoding):
    """SaPE2: logits get bias_scale * (b^x + b^y), see `timm_sape.functional.sape2_bias` for the equations."""

    def content_bias(self, q: torch.Tensor, k: torch.Tensor, grid: Grid) -> torch.Tensor:
        bias = ops.sape2_bias(q, k, self.table_x, self.table_y, grid, **self._options(k, grid))
        return self._gain(bias).view(-1, 1, 1) * bias  # [B, h, N, N]

    def attend(self, q, k, v, rotated_q, rotated_k, mask, grid: Grid, **options) -> torch.Tensor:
        return ops.sape2_attention(
            q, k, v, self.table_x, self.table_y, grid, **self._options(k, grid),
            bias_scale=self.gated(self._gain(q)), rotated=(rotated_q, rotated_k), mask=mask, **options)


def _with_names(cls):
    """Add the table of names to the docstring of a class, for `help`."""
    cls.__doc__ = (cls.__doc__ or '') + '\n' + NAMES
    return cls


@_with_names
@register_encoding('sape2_q')
class SemanticAwarePositionEncodingQ(SemanticAwarePositionEncoding):
    """2-D semantic-aware, on queries (SaPE2(Q)).

    Entries of the table are multiplied by the queries, as in Appendix D.
    """
    mode = 'q'


@_with_names
@register_encoding('sape2_k', aliases=('sape2',))
class SemanticAwarePositionEncodingK(SemanticAwarePositionEncoding):
    """2-D semantic-aware, on keys (SaPE2(K)).

    Entries of the table are multiplied by the keys; the gates are computed from q.k as in the other variants. `sape2`
    is another name for it, because the paper prints one accuracy for SaPE2+APE (Table 1) and SaPE2(K)+APE (Table 2).
    """
    mode = 'k'


@_with_names
@register_encoding('sape2_qk')
class SemanticAwarePositionEncodingQK(SemanticAwarePositionEncoding):
    """2-D semantic-aware, on queries and keys (SaPE2(QK)).

    The paper names SaPE2 on both Q and K (5.3) but does not define it. Here the two codes are concatenated.
    """
    mode = 'qk'
