"""Encodings that round too early, and attention that is scaled wrongly."""
import torch

from contract_tools import Controls
from test_numerics import contracts
from timm_sape import PositionEncoding, ops

controls = Controls(contracts)


@controls.broken_code('fused_attention_switch', 'logits without fused attention: differs')
def scales_twice(patch):
    probabilities = ops.probabilities
    patch.setattr(ops.attention, 'probabilities', lambda q, k, mask, scale: probabilities(q, k, mask, scale=scale ** 2))


@controls.broken_encoding('float32_bias', 'bias is torch.bfloat16')
class NarrowBias(PositionEncoding):
    def content_bias(self, q, k, grid):
        return grid.pad_prefix((q @ k.transpose(-2, -1))[:, :, 5:, 5:])


@controls.broken_encoding('float32_bias', 'bias computed in torch.bfloat16: differs')
@controls.broken_encoding('autocast', 'autocast in torch.bfloat16: off by')
@controls.broken_encoding('half', 'half in torch.bfloat16: off by')
class LosesDigits(PositionEncoding):
    """Sums in the dtype of q."""

    def content_bias(self, q, k, grid):
        p = grid.num_prefix_tokens
        total = 300 + q[:, :, p:] @ k[:, :, p:].transpose(-2, -1)
        return grid.pad_prefix(total.float() - 300)


@controls.broken_encoding('half', 'dtype', RuntimeError)
class FixedDtype(PositionEncoding):
    per_layer = False

    def embed(self, x, grid):
        return x @ torch.eye(self.dim)


test_contract_rejects = controls.test()
