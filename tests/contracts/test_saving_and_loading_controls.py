"""Encodings that keep something where it is not saved."""
import pickle

import torch
import torch.nn as nn

from contract_tools import Controls
from test_saving_and_loading import contracts
from timm_sape import PositionEncoding

controls = Controls(contracts)


@controls.broken_encoding('deepcopy', 'copy: differs')
@controls.broken_encoding('pickled', 'pickle|local object', (AttributeError, pickle.PicklingError))
class HoldsClosure(PositionEncoding):
    def __init__(self, **host):
        super().__init__(**host)
        self.slope = nn.Parameter(torch.ones(1))
        self.bias = lambda x: x * self.slope

    def position_bias(self, grid):
        position = grid.coordinates(dtype=torch.float32)
        return grid.pad_prefix(self.bias(-torch.cdist(position, position)))


@controls.broken_encoding('state_dict', 'loaded model: differs')
@controls.broken_encoding('config', 'model made again: differs')
class HidesState(PositionEncoding):
    def __init__(self, **host):
        super().__init__(**host)
        self.slope = torch.rand(1)

    def position_bias(self, grid):
        position = grid.coordinates(dtype=torch.float32)
        return grid.pad_prefix(-self.slope * torch.cdist(position, position))


@controls.broken_encoding(
    'config', 'must be plain JSON', ValueError, pos_enc_kwargs={'broken': {'slope': torch.ones(1)}})
class WantsTensor(PositionEncoding):
    def __init__(self, *, slope=None, **host):
        super().__init__(**host)

    def position_bias(self, grid):
        return torch.zeros(())


test_contract_rejects = controls.test()
