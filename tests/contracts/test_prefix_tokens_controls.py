"""Encodings that get the prefix tokens wrong."""
import torch
import torch.nn as nn
from timm.layers.pos_embed_sincos import apply_rot_embed_cat

from contract_tools import Controls
from test_prefix_tokens import contracts
from timm_sape import PositionEncoding
from timm_sape.position import LayerEncodings

controls = Controls(contracts)


@controls.broken_encoding('class_token', 'patches without prefix: differs')
@controls.broken_encoding('register_tokens', 'patches without prefix: differs')
class CountsPrefix(PositionEncoding):
    per_layer = False

    def embed(self, x, grid):
        return torch.outer(torch.arange(x.shape[1], dtype=x.dtype), torch.ones(self.dim).cumsum(0)).sin()


@controls.broken_encoding('class_token', 'does not broadcast to', ValueError)
class ForgetsPrefix(PositionEncoding):
    def position_bias(self, grid):
        position = grid.coordinates(dtype=torch.float32)
        return -torch.cdist(position, position)


@controls.broken_encoding('register_tokens', 'does not broadcast to', ValueError)
class ExpectsClassToken(PositionEncoding):
    def position_bias(self, grid):
        bias = -grid.coordinates(dtype=torch.float32).sum(-1)
        return nn.functional.pad(bias, (min(grid.num_prefix_tokens, 1), 0))[None]


@controls.broken_encoding('prefix_rule', 'attention: differs')
class BiasesPrefix(PositionEncoding):
    per_layer = False

    def position_bias(self, grid):
        num_tokens = grid.num_prefix_tokens + grid.num_patches
        return (torch.arange(num_tokens).expand(num_tokens, -1) < grid.num_prefix_tokens).float()


@controls.broken_code('prefix_rule', 'attention: differs', pos_enc='rope2d')
def rotates_prefix(patch):
    def rotated(self, q, k, position):
        table = torch.cat([position.rotation[-position.grid.num_prefix_tokens:], position.rotation])
        return apply_rot_embed_cat(q, table), apply_rot_embed_cat(k, table)

    patch.setattr(LayerEncodings, '_rotated', rotated)


test_contract_rejects = controls.test()
