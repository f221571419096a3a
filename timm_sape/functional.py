"""SaPE2 as functions of tensors, without a model.

Chen et al., 'A 2D Semantic-Aware Position Encoding for Vision Transformers', 2025. Its symbols here:

| paper | here |
|---|---|
| q_i, k_i | `q[:, :, P + i]`, `k[:, :, P + i]`, i = y*W + x, 0-based |
| e^x[p], e^y[p] | `table_x[p]`, `table_y[p]` |
| M | npos - 1 |
| SaPE2(Q), SaPE2(K) of the text, Eq. 12 | `mode='q'`, `mode='k'` |
| the code of Appendix D | `mode='q'` |
| b_in^x + b_in^y | `sape2_bias(...)[:, :, P + i, P + n]` |

A repository that appears to be the authors' exchanges Q and K: `help(timm_sape.get_encoding('sape2_k'))` has a table.
"""
from typing import Any, Optional, Tuple, Union

import torch

from . import ops
from .checks import is_integer, is_number
from .grid import MAX_SIDE, Grid, check_keep_indices, is_grid_size

__all__ = ['sape2_attention', 'sape2_bias']

MODES = ('q', 'k', 'qk')


def sape2_bias(
        q: torch.Tensor,
        k: torch.Tensor,
        table_x: torch.Tensor,
        table_y: torch.Tensor,
        grid_size: Tuple[int, int],
        *,
        mode: str = 'k',
        gate_scale: Optional[Union[float, torch.Tensor]] = None,
        num_prefix_tokens: int = 0,
        ref_grid_size: Optional[Tuple[int, int]] = None,
        keep_indices: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """The position bias of SaPE2, b^x + b^y (Eq. 9 to 15), before any scale.

    Differentiable in q, k and both tables. The paper contradicts itself in places and is silent in others. Here

    - gates are scaled by `gate_scale`, by default 1/sqrt(d) as in Appendix D; Eq. 9 has 1;
    - grids are any H x W; Appendix D confuses H and W and runs on squares only;
    - prefix tokens take no part: every pair with one has a bias of zero;
    - the gradient at an integer position is the slope to the right; Eq. 11 has none there;
    - `mode='qk'`, which the paper names but does not define, concatenates the codes of both modes, so that their
      squared distances add;
    - on another grid than `ref_grid_size`, positions along x are scaled by W0/W and codes by sqrt(W0/W), so that the
      mean bias stays what it was in training; along y likewise with H.

    Args:
        q: Queries, prefix tokens first, `[B, h, N, d]` with N = P + H*W, or P + K with `keep_indices`.
        k: Keys, likewise.
        table_x: Embeddings of the positions 0 ... npos-1 along a row, `[npos, d]`. Positions reach W (W0 with
            `ref_grid_size`), so npos = W + 1 never clamps.
        table_y: Embeddings of the positions along a column, `[npos, d]`; npos may differ.
        grid_size: (H, W) in patches.
        mode: 'k', 'q' or 'qk': what the looked-up embeddings are multiplied with. The gates always use q.k.
        gate_scale: Factor of q.k inside the gates, a number or a tensor of one element. Default 1/sqrt(d).
        num_prefix_tokens: P.
        ref_grid_size: (H0, W0), the grid that the tables were trained on. None for no rescaling.
        keep_indices: Raster indices of the patches that were not dropped, distinct, in any order, int64 `[B, K]`. A
            dropped patch has gate 0.

    Returns:
        `[B, h, N, N]`, symmetric, at least 0, in the widest dtype of q, k and the tables, float32 at least.

    Raises:
        ValueError: If shapes, sizes, devices or the mode do not fit. Swapped arguments go unnoticed: `table_y` before
            `table_x`, or (W, H) for `grid_size`.
    """
    grid, gate_scale, ref_grid_size = _check(
        q, k, table_x, table_y, grid_size, mode, gate_scale, num_prefix_tokens, ref_grid_size, keep_indices)
    return ops.sape2_bias(
        q, k, table_x, table_y, grid, mode=mode, gate_scale=gate_scale, ref_grid_size=ref_grid_size)


def sape2_attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table_x: torch.Tensor,
        table_y: torch.Tensor,
        grid_size: Tuple[int, int],
        *,
        mode: str = 'k',
        gate_scale: Optional[Union[float, torch.Tensor]] = None,
        bias_scale: Union[float, torch.Tensor] = 1.0,
        scale: Optional[float] = None,
        num_prefix_tokens: int = 0,
        ref_grid_size: Optional[Tuple[int, int]] = None,
        keep_indices: Optional[torch.Tensor] = None,
        attn_mask: Optional[torch.Tensor] = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        backend: Optional[str] = None,
) -> torch.Tensor:
    """Attention with SaPE2: softmax(scale * q.k + bias_scale * bias) v (Eq. 16).

    In Eq. 16 the bias is divided by sqrt(d) as the product is, in Appendix D it is not. Here the two factors are
    separate: Appendix D is the default, Eq. 16 is `bias_scale=d ** -0.5`.

    Args:
        q: Queries, prefix tokens first, `[B, h, N, d]`.
        k: Keys, likewise.
        v: Values, likewise.
        table_x: As in `sape2_bias`, and so are `table_y`, `grid_size`, `mode`, `gate_scale`, `num_prefix_tokens`,
            `ref_grid_size` and `keep_indices`.
        bias_scale: Factor of the bias, a number or a tensor of one value per head, `[h]`.
        scale: Factor of q.k. Default 1/sqrt(d).
        attn_mask: Added to the logits, or bool with True where attention is allowed; broadcastable to `[B, h, N, N]`,
            of two or four dimensions.
        is_causal: Mask out all later tokens of the sequence; may be combined with `attn_mask`.
        dropout_p: Dropout of the probabilities. Applied whenever it is not 0, as in PyTorch's own function.
        backend: 'reference' (plain PyTorch, stores N x N), 'torch' (any device, stores nothing N x N), 'cpp' (the
            same, compiled for the CPU at the first call), 'triton' (NVIDIA GPUs), or None: what `TIMM_SAPE_BACKEND`
            says, else the fastest that can be used. Only the reference supports masks, causality, dropout, q, k and v
            of different dtypes, torch.func and forward mode. Second derivatives are computed by the reference,
            whatever the backend; before torch 2.14 there are none, nor on a CPU if only v needs a gradient.
            Exported graphs always contain the reference.

    Returns:
        `[B, h, N, d]` in the dtype of v. Bias and softmax are computed in the dtype of q, float32 at least, whatever
        the dtype of the tables; by the reference in the widest dtype of q, k and the tables, to which a wider v is
        rounded. In training, do not change it in place: the backward passes of 'cpp' and 'triton' need it, as does that
        of PyTorch's own function.

    Raises:
        ValueError: If shapes, sizes, devices, numbers or the mode do not fit, or the requested backend cannot be used.
            Swapped arguments go unnoticed: `table_y` before `table_x`, or (W, H) for `grid_size`.
    """
    _check_tensors(q=q, k=k, v=v)
    if v.shape != q.shape:
        raise ValueError(f'q, k and v must have one shape [B, h, N, d], got q {list(q.shape)} and v {list(v.shape)}.')
    if not is_number(dropout_p) or not 0 <= dropout_p <= 1:
        raise ValueError(f'dropout_p must be between 0 and 1, got {dropout_p!r}.')
    if scale is not None and not is_number(scale):
        raise ValueError(f'scale must be a number, or None for 1/sqrt(d), got {scale!r}.')
    ops.check_devices(q=q, v=v, bias_scale=bias_scale, mask=attn_mask)
    grid, gate_scale, ref_grid_size = _check(
        q, k, table_x, table_y, grid_size, mode, gate_scale, num_prefix_tokens, ref_grid_size, keep_indices)
    if not isinstance(bias_scale, torch.Tensor):
        if not is_number(bias_scale):
            raise ValueError(
                f'bias_scale must be a number, or a tensor of one value per head [{q.shape[1]}], got {bias_scale!r}.')
        bias_scale = q.new_full((), bias_scale, dtype=torch.promote_types(q.dtype, torch.float32))
    elif bias_scale.is_complex() or bias_scale.ndim and bias_scale.shape != (q.shape[1],):
        raise ValueError(
            f'bias_scale must be a number or one value per head [{q.shape[1]}], got {_shape(bias_scale)}.')
    if not isinstance(is_causal, bool):
        raise ValueError(f'is_causal must be True or False, got {type(is_causal).__name__}.')
    if attn_mask is not None:
        ops.check_mask(attn_mask, (*q.shape[:3], q.shape[2]), q.device)
    mask, is_empty_row = ops.merge_masks(None, attn_mask, is_causal, q.shape[2], q.device), None
    if attn_mask is not None:
        mask, is_empty_row = ops.open_empty_rows(mask)
    out = ops.sape2_attention(
        q, k, v, table_x, table_y, grid,
        mode=mode,
        gate_scale=gate_scale,
        ref_grid_size=ref_grid_size,
        bias_scale=bias_scale.reshape(-1),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        mask=mask,
        dropout_p=dropout_p,
        backend=backend,
    )
    return out if is_empty_row is None else out.masked_fill(is_empty_row, 0)


def _check(
        q, k, table_x, table_y, grid_size, mode, gate_scale, num_prefix_tokens, ref_grid_size, keep_indices,
) -> Tuple[Grid, Union[float, torch.Tensor], Optional[Tuple[int, int]]]:
    """The grid, the factor inside the gates, and the size of the trained grid, None if there is nothing to rescale."""
    _check_tensors(q=q, k=k, table_x=table_x, table_y=table_y)
    ops.check_devices(q=q, k=k, table_x=table_x, table_y=table_y, gate_scale=gate_scale, keep_indices=keep_indices)
    if isinstance(gate_scale, torch.Tensor):
        if gate_scale.numel() != 1 or gate_scale.is_complex():
            raise ValueError(f'gate_scale must be a number or a tensor of one, got {_shape(gate_scale)}.')
        gate_scale = gate_scale.view(())
    elif gate_scale is not None and not is_number(gate_scale):
        raise ValueError(f'gate_scale must be a number, a tensor of one, or None for 1/sqrt(d), got {gate_scale!r}.')
    if q.ndim != 4 or k.shape != q.shape:
        raise ValueError(f'q and k must have one shape [B, h, N, d], got {list(q.shape)} and {list(k.shape)}.')
    _, _, num_tokens, dim = q.shape
    if dim < 1:
        raise ValueError(f'q and k must have a head dim of at least 1, got {list(q.shape)}.')
    sizes = {'grid_size': grid_size, **({} if ref_grid_size is None else {'ref_grid_size': ref_grid_size})}
    for name, size in sizes.items():
        if not is_grid_size(size):
            raise ValueError(f'{name} must be (H, W), two Python ints from 1 to {MAX_SIDE:,}, got {size!r}.')
    if mode not in MODES:
        raise ValueError(f'Unknown mode {mode!r}. Choose one of {", ".join(map(repr, MODES))}.')
    if not (is_integer(num_prefix_tokens, 0) or isinstance(num_prefix_tokens, torch.SymInt)):
        raise ValueError(f'num_prefix_tokens must be an integer of 0 or more, got {num_prefix_tokens!r}.')
    for name, table in (('table_x', table_x), ('table_y', table_y)):
        if table.ndim != 2 or table.shape[0] < 2 or table.shape[1] != dim:
            raise ValueError(f'{name} must be [npos, {dim}] with npos >= 2, got {list(table.shape)}.')
    height, width = grid_size
    if keep_indices is None:
        num_patches, kept = height * width, f'a {height} x {width} grid'
    else:
        check_keep_indices(keep_indices, q, height * width)
        num_patches, kept = keep_indices.shape[1], f'{keep_indices.shape[1]} kept patches'
    if num_tokens != num_prefix_tokens + num_patches:
        raise ValueError(
            f'q has {num_tokens} tokens, but {num_prefix_tokens} prefix tokens and {kept} make '
            f'{num_prefix_tokens + num_patches}. Check grid_size=(H, W) and num_prefix_tokens.')
    grid = Grid(height, width, num_prefix_tokens, keep_indices)
    gate_scale = dim ** -0.5 if gate_scale is None else gate_scale
    return grid, gate_scale, None if ref_grid_size is None or grid.matches(ref_grid_size) else ref_grid_size


def _check_tensors(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            got = f'{tensor.dtype} {list(tensor.shape)}' if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValueError(f'{name} must be a tensor of floating-point numbers, got {got}.')


def _shape(tensor: torch.Tensor) -> str:
    return f'{tensor.dtype if tensor.is_complex() else ""} {list(tensor.shape)}'.strip()
