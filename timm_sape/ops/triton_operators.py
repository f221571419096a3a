"""SaPE2's codes and attention by Triton kernels, as operators. Triton is imported when one of them runs.

`axis_codes_triton` and `distance_attention_triton` are for what needs one of the two. `sape2_attention_triton` is both,
see `merged`. It prepares the codes once and keeps them for the backward pass.
"""
import torch

from .codes import CODES, CODES_BACKWARD, empty_codes, register_codes
from .distances import (
    ATTENTION,
    ATTENTION_BACKWARD,
    ATTENTION_GRADIENTS,
    ATTENTION_OUTPUT,
    empty_gradients,
    empty_out,
    empty_rows,
    register_attention,
)
from .merged import MERGED_ARGUMENTS, register_merged
from .precision import without_autocast

__all__ = ['triton_axis_codes', 'triton_distance_attention', 'triton_sape2_attention']


@torch.library.custom_op('timm_sape::axis_codes_triton', mutates_args=(), schema=CODES)
@without_autocast
def triton_axis_codes(q, k, table_x, table_y, height, width, mode, gate_scale, shrink_x, shrink_y):
    from .triton_codes import codes_of
    return codes_of(q, k, table_x, table_y, height, width, mode, gate_scale, shrink_x, shrink_y)


@torch.library.custom_op('timm_sape::axis_codes_triton_backward', mutates_args=(), schema=CODES_BACKWARD)
@without_autocast
def triton_axis_codes_backward(
        grad_x, grad_y, q, k, table_x, table_y, height, width, mode, gate_scale, shrink_x, shrink_y,
):
    from .triton_codes import gradients_of
    grads = empty_gradients(q, k)
    grads_of_tables = gradients_of(
        grad_x, grad_y, *grads, False, q, k, table_x, table_y, height, width, mode, gate_scale, shrink_x, shrink_y)
    return *grads, *grads_of_tables


register_codes(triton_axis_codes, triton_axis_codes_backward)


@torch.library.custom_op('timm_sape::distance_attention_triton', mutates_args=(), schema=ATTENTION)
def triton_distance_attention_forward(q, k, v, codes_x, codes_y, bias_scale, scale):
    """The output, and for the backward pass two numbers for each row, see `triton_distances.attention_forward`."""
    from .triton_distances import attention_forward
    from .triton_prepare import PreparedCodes
    prepared = PreparedCodes.of(codes_x, codes_y, q.shape[2], q.dtype)
    return attention_forward(q, k, v, prepared, codes_x, codes_y, bias_scale, scale)


@torch.library.custom_op(
    'timm_sape::distance_attention_triton_backward', mutates_args=(), schema=ATTENTION_BACKWARD)
def triton_distance_attention_backward(grad, out, row_max, row_sum, q, k, v, codes_x, codes_y, bias_scale, scale):
    from .triton_distances import attention_backward
    from .triton_prepare import PreparedCodes
    prepared = PreparedCodes.of(codes_x, codes_y, q.shape[2], q.dtype)
    grads = empty_gradients(codes_x, codes_y)
    *grads_of_tokens, grad_scale = attention_backward(
        grad, out, row_max, row_sum, q, k, v, prepared, *grads, bias_scale, scale)
    return *grads_of_tokens, *grads, grad_scale


register_attention(triton_distance_attention_forward, triton_distance_attention_backward)


def triton_distance_attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        codes_x: torch.Tensor,
        codes_y: torch.Tensor,
        bias_scale: torch.Tensor,
        scale: float,
) -> torch.Tensor:
    """`torch_distances.torch_distance_attention` on a GPU, or in Triton's interpreter (`TRITON_INTERPRET=1`).

    Arguments and result are the same. q, k and v have one dtype. For the widths of heads and codes see `triton_limits`.
    """
    return triton_distance_attention_forward(q, k, v, codes_x, codes_y, bias_scale, scale)[0]


_PREPARED = 'Tensor wx, Tensor wy, Tensor sx, Tensor sy, Tensor unit'
_SAPE2 = f'({MERGED_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)'
_SAPE2_BACKWARD = f'(Tensor grad, {ATTENTION_OUTPUT}, {_PREPARED}, {MERGED_ARGUMENTS}) -> {ATTENTION_GRADIENTS}'


@torch.library.custom_op('timm_sape::sape2_attention_triton', mutates_args=(), schema=_SAPE2)
@without_autocast
def triton_sape2_attention_forward(q, k, v, table_x, table_y, bias_scale, size, mode, factors):
    """The output, and for the backward pass two numbers for each row and the prepared codes."""
    from .triton_codes import codes_of
    from .triton_distances import attention_forward
    from .triton_prepare import PreparedCodes
    *factors, scale = factors
    codes = codes_of(q, k, table_x, table_y, *size, mode, *factors)
    prepared = PreparedCodes.of(*codes, q.shape[2], q.dtype)
    return *attention_forward(q, k, v, prepared, *codes, bias_scale, scale), *prepared


@triton_sape2_attention_forward.register_fake
def _(q, k, v, table_x, table_y, bias_scale, size, mode, factors):
    from .triton_prepare import PreparedCodes
    codes = empty_codes(q, *size, mode)
    return empty_out(v), *empty_rows(q), *PreparedCodes.empty(*codes, q.shape[2], q.dtype)


@torch.library.custom_op('timm_sape::sape2_attention_triton_backward', mutates_args=(), schema=_SAPE2_BACKWARD)
@without_autocast
def triton_sape2_attention_backward(
        grad, out, row_max, row_sum, wx, wy, sx, sy, unit, q, k, v, table_x, table_y, bias_scale, size, mode, factors,
):
    from .triton_codes import gradients_of
    from .triton_distances import attention_backward
    from .triton_prepare import PreparedCodes
    *factors, scale = factors
    grads_of_codes = empty_codes(q, *size, mode)
    grad_q, grad_k, grad_v, grad_scale = attention_backward(
        grad, out, row_max, row_sum, q, k, v, PreparedCodes(wx, wy, sx, sy, unit), *grads_of_codes, bias_scale, scale)
    grads_of_tables = gradients_of(
        *grads_of_codes, grad_q, grad_k, True, q, k, table_x, table_y, *size, mode, *factors)
    return grad_q, grad_k, grad_v, *grads_of_tables, grad_scale


register_merged(triton_sape2_attention_forward, triton_sape2_attention_backward)


def triton_sape2_attention(*args) -> torch.Tensor:
    """The output alone, `[B, h, N, d]`. For the arguments see `MERGED_ARGUMENTS`."""
    return triton_sape2_attention_forward(*args)[0]
