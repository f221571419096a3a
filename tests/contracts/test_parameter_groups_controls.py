"""Encodings and models whose parameters end up in the wrong group."""
import torch
import torch.nn as nn
from timm.models.vision_transformer import VisionTransformer

from contract_tools import Controls
from test_parameter_groups import contracts
from timm_sape import PositionEncoding
from timm_sape.host import PosEncModel
from timm_sape.vit_pos_enc import VisionTransformerPosEnc

controls = Controls(contracts)


@controls.broken_encoding('no_weight_decay', 'slope_2d has weight decay')
class Decays(PositionEncoding):
    names = set()

    def __init__(self, **host):
        super().__init__(**host)
        self.slope_2d = nn.Parameter(torch.ones(2, 2))

    def embed(self, x, grid):
        return self.slope_2d.sum()

    def no_weight_decay(self):
        return self.names


@controls.broken_encoding('no_weight_decay', 'names of parameters that are not there')
class NamesNothing(Decays):
    names = {'slope'}


@controls.broken_code('group_matcher', 'group of encodings.toy_shared', pos_enc='toy_shared')
def forgets_encodings(patch):
    patch.setattr(VisionTransformerPosEnc, 'group_matcher', VisionTransformer.group_matcher)


@controls.broken_code('head_is_last', 'last two parameters are .*encodings.toy_shared', pos_enc='toy_shared')
def encodings_are_last(patch):
    original = PosEncModel._set_encodings

    def appended(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self._modules['encodings'] = self._modules.pop('encodings')

    patch.setattr(PosEncModel, '_set_encodings', appended)


test_contract_rejects = controls.test()
