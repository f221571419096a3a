"""Scaled dot-product attention with a bias that may be wider than q, k and v."""
import math
from contextlib import nullcontext
from typing import Any, Callable, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

from .channels import Channels, append_channels, attend_with_channels, can_attend_with_channels
from .precision import no_autocast
from .sizes import is_empty
from .transforms import is_transformed

__all__ = ['attend', 'check_mask', 'merge_masks', 'open_empty_rows', 'probabilities']


def check_mask(attn_mask: Any, shape: Sequence[int], device: torch.device) -> None:
    """Check that a mask is a tensor of bool or float on the device of the tokens, and broadcastable to the logits.

    Args:
        attn_mask: What should be a mask, additive or bool.
        shape: B, h, N, N. What is symbolic is not looked at.
        device: Where the tokens are.

    Raises:
        ValueError: If it is no tensor, on another device, of integers, or not broadcastable to `[B, h, N, N]`; or if it
            has three dimensions, which may be meant as one mask for each image or for each head.
    """
    if not isinstance(attn_mask, torch.Tensor) or attn_mask.device != device:
        got = f'one on {attn_mask.device}' if isinstance(attn_mask, torch.Tensor) else type(attn_mask).__name__
        raise ValueError(
            f'attn_mask must be a tensor on {device}, bool (True where attention is allowed) or float (added), got '
            f'{got}.')
    _check_dtype(attn_mask)
    if attn_mask.ndim == 3 and attn_mask.shape[0] != 1:
        raise ValueError(
            f'attn_mask {list(attn_mask.shape)} does not say whether it has a mask for each image or for each head: '
            'give attn_mask[:, None] or attn_mask[None].')
    sizes = zip(reversed(attn_mask.shape), reversed(shape))
    wrong = [size for size, full in sizes if type(size) is type(full) is int and size not in (1, full)]
    if wrong or not 2 <= attn_mask.ndim <= 4:
        raise ValueError(
            f'attn_mask must be broadcastable to [B, h, N, N] = {list(shape)}, got {list(attn_mask.shape)}.')


def _check_dtype(attn_mask: torch.Tensor) -> None:
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise ValueError(
            f'attn_mask must be bool (True where attention is allowed) or float (added), got {attn_mask.dtype}. '
            'Use attn_mask.bool() for a mask of zeros and ones.')


def merge_masks(
        bias: Optional[torch.Tensor],
        attn_mask: Optional[torch.Tensor],
        is_causal: bool,
        num_tokens: int,
        device: torch.device,
) -> Optional[torch.Tensor]:
    """One mask out of what is added to the logits and what is masked out of them.

    Args:
        bias: Additive, broadcastable to `[B, h, N, N]`.
        attn_mask: Additive, or bool with True where attention is allowed; broadcastable likewise.
        is_causal: Mask out all later tokens.
        num_tokens: N.
        device: Device of the causal mask, unless there is an `attn_mask`, whose device it then has.

    Returns:
        Additive if a bias or an additive mask is given, else bool, else None.

    Raises:
        ValueError: If the mask is neither bool nor float.
    """
    if attn_mask is not None:  # a layer may be called without its model
        _check_dtype(attn_mask)
    if is_causal:
        device = device if attn_mask is None else attn_mask.device
        causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
        if attn_mask is None:
            attn_mask = causal
        elif attn_mask.dtype == torch.bool:
            attn_mask = attn_mask & causal
        else:
            attn_mask = attn_mask.masked_fill(~causal, float('-inf'))
    if bias is None or attn_mask is None:
        return attn_mask if bias is None else bias
    if attn_mask.dtype == torch.bool:
        return bias.masked_fill(~attn_mask, float('-inf'))
    return bias + attn_mask


def open_empty_rows(mask: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """A mask without rows that forbid all keys, and which rows those were, `[..., N, 1]`.

    PyTorch's fused attention gives such a row zeros, an explicit softmax NaN, also as gradients.
    """
    is_empty = ~(mask if mask.dtype == torch.bool else mask != float('-inf')).any(dim=-1, keepdim=True)
    return (mask | is_empty if mask.dtype == torch.bool else mask.masked_fill(is_empty, 0)), is_empty


def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Optional[torch.Tensor],
        *,
        scale: float,
        channels: Channels = (),
        dropout_p: float = 0.0,
        drop: Optional[Callable[[torch.Tensor], torch.Tensor]] = None,
        fused: bool = True,
) -> torch.Tensor:
    """softmax(scale * q.k + mask) v by PyTorch's scaled_dot_product_attention.

    q and k may have more channels than v. PyTorch's fused kernels need equal numbers, so v is padded.

    Where an additive mask is wider than q, everything runs in its dtype, also under autocast. Otherwise rounding would
    undo a bias that was computed in float32.

    Args:
        q: `[B, h, N, d+C]`.
        k: `[B, h, N, d+C]`.
        v: `[B, h, N, d]`.
        mask: As `merge_masks` returns it.
        scale: Factor of q.k.
        channels: Pairs of further channels of q and of k, `[B, h, N, C]`.
        dropout_p: Dropout rate of the probabilities.
        drop: Module that applies this dropout to explicit probabilities, so that hooks on it see them.
        fused: False for an explicit softmax, as timm's attention has it after `set_fused_attn(False)`.

    Returns:
        `[B, h, N, d]` in the dtype of v.
    """
    if channels or q.shape[-1] > v.shape[-1]:
        if fused and mask is None and not dropout_p and can_attend_with_channels(q, k, v, channels):
            return attend_with_channels(q, k, v, channels, scale)
        q, k = append_channels(q, k, channels)
    additive = mask is not None and mask.dtype != torch.bool
    # Fused kernels have no forward mode. Under vmap, and without any token, they do not see that an additive mask needs
    # a gradient.
    if not fused or is_transformed() or is_empty(q):
        attn = probabilities(q, k, mask, scale=scale)
        attn = (F.dropout(attn, dropout_p) if drop is None else drop(attn)).to(v.dtype)
        with no_autocast(q) if additive else nullcontext():
            return attn @ v
    if q.shape[-1] != v.shape[-1]:
        assert q.shape[-1] > v.shape[-1], 'encodings add channels to q and k, they take none away'
        padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        return attend(q, k, padded, mask, scale=scale, dropout_p=dropout_p)[..., :v.shape[-1]]
    if mask is not None and mask.ndim not in (2, 4):
        mask = mask[(None,) * (4 - mask.ndim)]  # no kernel takes less than two; on a CPU three are slower
    if not additive:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=scale)
    dtype = torch.promote_types(q.dtype, mask.dtype)
    with no_autocast(q):
        out = F.scaled_dot_product_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=mask.to(dtype), dropout_p=dropout_p, scale=scale)
    if torch.onnx.is_in_onnx_export():
        # The exporter runs the graph several times, with and without gradients. Each run may choose another kernel, so
        # the result may have other strides than were recorded for its views. In ONNX the copy costs nothing.
        out = out.clone(memory_format=torch.contiguous_format)
    return out.to(v.dtype)


def probabilities(
        q: torch.Tensor,
        k: torch.Tensor,
        mask: Optional[torch.Tensor],
        *,
        scale: float,
) -> torch.Tensor:
    """softmax(scale * q.k + mask), the first half of `attend`, with the same rule for wider masks.

    Returns:
        `[B, h, N, N]`, in the dtype of the logits.
    """
    # Multiplying by a power of two is exact. So channels that hold the high and the low part of a number stay exact.
    exact = 2.0 ** round(math.log2(abs(scale))) if scale else 1.0
    additive = mask is not None and mask.dtype != torch.bool
    dtype = torch.promote_types(q.dtype, mask.dtype) if additive else q.dtype
    with no_autocast(q) if additive else nullcontext():
        logits = (q.to(dtype) * exact) @ k.to(dtype).transpose(-2, -1)
        logits = logits if exact == scale else logits * (scale / exact)
        if mask is not None:
            logits = logits + mask if additive else logits.masked_fill(~mask, float('-inf'))
        return logits.softmax(dim=-1)
