"""Encodings and models with values that are missing, wrong or drawn at the wrong time."""
import torch
import torch.nn as nn

from contract_tools import Controls
from test_initial_values import contracts
from test_shapes_and_grids_controls import OwnGridOnly
from timm_sape import PositionEncoding, vit_pos_enc
from timm_sape.vit_pos_enc import VisionTransformerPosEnc

controls = Controls(contracts)


@controls.broken_encoding('init_weights', 'nothing gives slope its initial values again', ValueError)
@controls.broken_encoding('weight_init_skip', 'nothing gives slope its initial values again', ValueError)
class InitialisesOnce(PositionEncoding):
    def __init__(self, **host):
        super().__init__(**host)
        self.slope = nn.Parameter(torch.ones(self.num_heads))

    def position_bias(self, grid):
        position = grid.coordinates(dtype=torch.float32)
        return grid.pad_prefix(-self.slope.view(-1, 1, 1) * torch.cdist(position, position))


@controls.broken_encoding('init_weights', 'slope starts at 0 instead of 1')
class InitialisesTwice(InitialisesOnce):
    """The constructor sets one value, `reset_parameters` another."""

    def reset_parameters(self):
        nn.init.zeros_(self.slope)


@controls.broken_code('fix_init', 'fix_init of .*: differs')
def forgets_fix_init(patch):
    patch.setattr(VisionTransformerPosEnc, 'fix_init_weight', lambda self: None)


@controls.broken_code('same_backbone', 'backbone starts elsewhere', pos_enc='sape2_k')
def draws_before_backbone(patch):
    parse = vit_pos_enc.parse_pos_enc

    def parse_and_draw(pos_enc, pos_enc_kwargs=None):
        torch.rand(0 if pos_enc == 'nope' else 1)
        return parse(pos_enc, pos_enc_kwargs)

    patch.setattr(vit_pos_enc, 'parse_pos_enc', parse_and_draw)


@controls.broken_encoding('meta_device', 'memory on the meta device')
class FillsOnCpu(OwnGridOnly):
    def __init__(self, **host):
        super().__init__(**host)
        self.bias = torch.zeros(self.bias.shape, device='cpu')


@controls.broken_encoding('meta_device', 'buffer .*bias: differs')
class NeverRefills(OwnGridOnly):
    def __init__(self, *, device=None, **host):
        super().__init__(**host)
        self.bias = self.bias.to(device)


test_contract_rejects = controls.test()
