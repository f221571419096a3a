"""Attention with further channels of q and k, which v does not have.

PyTorch's fused kernels want as many channels in v as in q and k, so v and the output are padded with zeros. Autograd
would keep the padded q, k, v and output for the backward pass. On a CPU `attend_with_channels` keeps what they are made
of, and pads again: that is less memory, in the same time.
"""
from typing import List, Sequence, Tuple

import torch
import torch.nn.functional as F

from .precision import keeps_dtype
from .sizes import is_empty
from .transforms import is_exporting, is_transformed

__all__ = ['append_channels', 'attend_with_channels', 'can_attend_with_channels']

Channels = Sequence[Tuple[torch.Tensor, torch.Tensor]]


def append_channels(q: torch.Tensor, k: torch.Tensor, channels: Channels) -> Tuple[torch.Tensor, torch.Tensor]:
    """q and k, `[B, h, N, d]`, followed by further channels of each, pairs of `[B, h, N, C]`.

    Products of a multiple of 8 channels take less time, so zeros may follow. They change none.
    """
    if not channels:
        return q, k
    parts = [(q, k), *channels]
    if not is_exporting():  # an exported program would refuse sizes that need none
        width = sum(a.shape[-1] for a, _ in parts)
        zeros = q.new_zeros(()).expand(*q.shape[:-1], -width % 8)
        parts.append((zeros, zeros))
    q, k = (torch.cat(of_one, dim=-1) for of_one in zip(*parts))
    return q, k


def can_attend_with_channels(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, channels: Channels) -> bool:
    """Whether `attend_with_channels` computes what PyTorch's scaled_dot_product_attention would compute without it."""
    tensors = [q, k, v, *(t for pair in channels for t in pair)]
    return (
        # first, as torch.compile cannot trace what follows
        not (is_transformed() or is_exporting() or torch.compiler.is_compiling() or torch.jit.is_tracing()) and
        q.device.type == 'cpu' and len({t.dtype for t in tensors}) == 1 and keeps_dtype(q) and
        torch.backends.cuda.flash_sdp_enabled() and  # `torch.nn.attention.sdpa_kernel` decides about CPUs, too
        not is_empty(q) and
        # autograd cannot keep what was made in inference mode, such as channels that an encoding caches
        (torch.is_inference_mode_enabled() or not any(t.is_inference() for t in tensors)))


def attend_with_channels(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        channels: Channels,
        scale: float,
) -> torch.Tensor:
    """softmax(scale * q.k) v, where q and k have further channels, by PyTorch's fused kernel for CPUs.

    Args:
        q: `[B, h, N, d]`, or wider.
        k: `[B, h, N, d]`, or wider.
        v: `[B, h, N, d]`.
        channels: Pairs of `[B, h, N, C]`, the channels of q and those of k.
        scale: Factor of the products.

    Returns:
        `[B, h, N, d]`.
    """
    of_q, of_k = zip((q, k), *channels)
    return _AttendWithChannels.apply(scale, v, *of_q, *of_k).transpose(1, 2)


class _AttendWithChannels(torch.autograd.Function):

    @staticmethod
    def forward(ctx, scale, v, *parts):
        q, k = _appended(parts)
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, _padded(v, q), scale=scale)
        # in the order of memory in which models merge the heads
        out = out[..., :v.shape[-1]].transpose(1, 2).clone(memory_format=torch.contiguous_format)
        ctx.save_for_backward(out, logsumexp, v, *parts)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad):
        out, logsumexp, v, *parts = ctx.saved_tensors
        q, k = _appended(parts)
        grad, out, padded_v = (_padded(t, q) for t in (grad.transpose(1, 2), out.transpose(1, 2), v))
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, padded_v, out, logsumexp, 0.0, False, scale=ctx.scale)
        return None, grad_v.narrow(-1, 0, v.shape[-1]), *_split(grad_q, parts), *_split(grad_k, parts)


def _appended(parts: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    """q and k from the parts of both. In their memory channels are adjacent, which the kernel relies on."""
    (q, *of_q), (k, *of_k) = parts[:len(parts) // 2], parts[len(parts) // 2:]
    return [t.contiguous() for t in append_channels(q, k, list(zip(of_q, of_k)))]


def _padded(t: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """v, the output or its gradient, with as many channels as q, likewise adjacent."""
    return F.pad(t, (0, q.shape[-1] - t.shape[-1])).contiguous()


def _split(grad: torch.Tensor, parts: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    """The gradients of the parts of q, or of k, from that of all their channels."""
    widths = [part.shape[-1] for part in parts[:len(parts) // 2]]
    return list(grad.narrow(-1, 0, sum(widths)).split(widths, dim=-1))
