"""Encodings that remember something from pass to pass, or draw random numbers."""
import time

import torch

from contract_tools import Controls
from test_features_and_heads_controls import DrawsInForward, MixesBatch
from test_repeated_passes import contracts
from timm_sape import PositionEncoding

controls = Controls(contracts)
controls.broken_encoding('deterministic', 'one image of the batch: differs')(MixesBatch)
controls.broken_encoding('deterministic', 'random numbers drawn')(DrawsInForward)


@controls.broken_encoding('gradient_checkpointing', 'gradient of .*: differs')
@controls.broken_encoding('nothing_stored', "stored in forward: .*'calls'")
class CountsCalls(PositionEncoding):
    def __init__(self, **host):
        super().__init__(**host)
        self.calls = 0

    def content_bias(self, q, k, grid):
        self.calls += 1
        return q @ k.transpose(-2, -1) * self.calls


@controls.broken_code('hooks_in_place', 'after the hooks: differs', pos_enc='rope1d')
def gives_hooks_its_table(patch):
    forward = PositionEncoding.forward

    def without_copy(self, *args, **kwargs):
        hooks, self._forward_hooks = self._forward_hooks, {}
        try:
            return forward(self, *args, **kwargs)
        finally:
            self._forward_hooks = hooks

    patch.setattr(PositionEncoding, 'forward', without_copy)


@controls.broken_encoding('surroundings', 'position_bias returned a tensor on the meta device', ValueError)
class OnDefaultDevice(PositionEncoding):
    def position_bias(self, grid):
        return torch.zeros(1, 1)


@controls.broken_encoding('surroundings', 'view size is not compatible', RuntimeError)
class ViewsItsTable(PositionEncoding):
    def __init__(self, *, device=None, dtype=None, **host):
        super().__init__(device=device, dtype=dtype, **host)
        self.table = torch.nn.Parameter(torch.ones(2, 3, 4, 4, device=device, dtype=dtype))

    def position_bias(self, grid):
        return grid.between_tokens(self.table.view(-1).sum().expand(grid.num_patches, grid.num_patches))


@controls.broken_encoding('threads', 'result of a thread: differs')
@controls.broken_encoding('nothing_stored', "stored in forward: .*'height'")
class RemembersHeight(PositionEncoding):
    height = 0

    def content_bias(self, q, k, grid):
        self.height = grid.height
        time.sleep(0.01)
        return q @ k.transpose(-2, -1) * self.height


@controls.broken_encoding('nothing_stored', "stored in forward: .*'cache'")
class FillsCache(PositionEncoding):
    def __init__(self, **host):
        super().__init__(**host)
        self.cache = {}

    def position_bias(self, grid):
        if grid.size not in self.cache:
            position = grid.coordinates(dtype=torch.float32)
            self.cache[grid.size] = grid.pad_prefix(-torch.cdist(position, position))
        return self.cache[grid.size]


@controls.broken_encoding('nothing_stored', "stored in forward: .*'log'")
class AppendsToList(PositionEncoding):
    def __init__(self, **host):
        super().__init__(**host)
        self.log = []

    def position_bias(self, grid):
        self.log.append(grid.size)
        return torch.zeros(1, 1)


@controls.broken_encoding('nothing_stored', "stored in forward: .*'count'")
class WritesBuffer(PositionEncoding):
    def __init__(self, **host):
        super().__init__(**host)
        self.register_buffer('count', torch.zeros(1))

    def position_bias(self, grid):
        self.count += 1
        return self.count[None]


@controls.broken_encoding('nothing_stored', "stored in forward: .*'seen'")
class WritesClass(PositionEncoding):
    seen = 0

    def position_bias(self, grid):
        type(self).seen += 1
        return torch.zeros(1, 1)


test_contract_rejects = controls.test()
