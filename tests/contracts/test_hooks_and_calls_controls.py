"""Models that bypass the call of a module, or do not notice that one was called wrongly."""
import pytest
import torch
import torch.nn as nn

from contract_tools import Controls
from test_hooks_and_calls import contracts
from timm_sape import PositionEncoding
from timm_sape.position import LayerEncodings, SharedEncodings

controls = Controls(contracts)


@controls.broken_encoding('own_call', 'read outside of its own call: .*slope')
class ReadsAnotherModule(PositionEncoding):
    """Its linear layer is never called."""

    def __init__(self, **host):
        super().__init__(**host)
        self.slope = nn.Linear(1, self.num_heads)

    def position_bias(self, grid):
        position = grid.coordinates(dtype=torch.float32)
        slope = self.slope.weight + self.slope.bias[:, None]
        return grid.between_tokens(-slope[..., None] * torch.cdist(position, position))


@controls.broken_code('own_call', 'read outside of its own call: .*table', pos_enc='shaw')
def calls_the_method(patch):
    def bias(self, q, k, position, without=()):
        return self['shaw'].content_bias(q, k, position.grid)

    patch.setattr(LayerEncodings, '_bias', bias)


@controls.broken_code('blocks_alone', 'DID NOT RAISE', pytest.fail.Exception, pos_enc='rope2d')
def needs_no_position(patch):
    patch.setattr(SharedEncodings, 'act_on_blocks', lambda self: False)


test_contract_rejects = controls.test()
