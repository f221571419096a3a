"""Encodings that are wrong on some grids, and models that get the grid wrong."""
import torch
import torch.nn as nn

from common import PATCH
from contract_tools import Controls
from test_shapes_and_grids import contracts
from timm_sape import Grid, PositionEncoding, ReferenceGridEncoding, vit_pos_enc

controls = Controls(contracts)


@controls.broken_encoding('rectangular', 'does not broadcast to', ValueError)
class AssumesSquare(PositionEncoding):
    per_layer = False

    def position_bias(self, grid):
        side = int(grid.num_patches ** 0.5)
        position = Grid(side, side).coordinates(dtype=torch.float32)
        return grid.pad_prefix(-torch.cdist(position, position))


@controls.broken_model('rectangular', 'raster order')
def columns_first(model):
    forward = model.patch_embed.forward
    model.patch_embed.forward = lambda x: forward(x).unflatten(1, (3, 5)).transpose(1, 2).flatten(1, 2)


@controls.broken_encoding('relative', 'moved along y: differs')
class Absolute(PositionEncoding):
    relative = True

    def position_bias(self, grid):
        return grid.pad_prefix(grid.coordinates(dtype=torch.float32)[:, :1].expand(-1, grid.num_patches))


@controls.broken_encoding('relative', 'moved along y: differs')
class TransposesGrid(PositionEncoding):
    """Right on squares only."""
    relative = True

    def position_bias(self, grid):
        position = Grid(grid.width, grid.height).coordinates(dtype=torch.float32)
        return grid.pad_prefix(-torch.cdist(position, position))


@controls.broken_encoding('dynamic_img_size', 'does not broadcast to', ValueError)
@controls.broken_encoding('set_input_size', 'does not broadcast to', ValueError)
class OwnGridOnly(PositionEncoding):
    def __init__(self, **host):
        super().__init__(**host)
        position = Grid(*self.grid_size).coordinates(dtype=torch.float32)
        self.register_buffer('bias', -torch.cdist(position, position), persistent=False)

    def position_bias(self, grid):
        return grid.pad_prefix(self.bias)

    def init_non_persistent_buffers(self):
        """Does nothing; without it, this would be refused at once."""


@controls.broken_encoding('dynamic_img_size', 'own size after another one: differs')
class RemembersLargestGrid(PositionEncoding):
    largest = 0

    def position_bias(self, grid):
        self.largest = max(self.largest, grid.num_patches)
        position = grid.coordinates(dtype=torch.float32)
        return grid.pad_prefix(-torch.cdist(position, position) * 10 / self.largest)


@controls.broken_model('dynamic_img_pad', 'padded image: differs')
def pads_on_the_left(model):
    forward = model.patch_embed.forward
    model.patch_embed.forward = lambda x: forward(nn.functional.pad(x, (-x.shape[-1] % PATCH, 0)))


@controls.broken_code('dynamic_img_pad', r'embed returned \[1, 13, 32\]', ValueError)
def rounds_grid_down(patch):
    patch.setattr(vit_pos_enc, '_grid', lambda images, stem, kernel, num_prefix_tokens, **_: Grid(
        images.shape[2] // kernel[0], images.shape[3] // kernel[1], num_prefix_tokens))


class Scaled(ReferenceGridEncoding):
    """Not broken, but a base class of those below: positions are scaled to the trained grid."""

    def position_bias(self, grid):
        ref = self.rescaling(grid) or grid.size
        position = grid.coordinates(dtype=torch.float32) * torch.tensor(ref) / torch.tensor(grid.size)
        return grid.pad_prefix(-torch.cdist(position, position))


@controls.broken_encoding('set_input_size', 'new size: differs')
@controls.broken_encoding('set_patch_size', 'new patch size: differs')
@controls.broken_encoding('three_ways', 'set_input_size to .*: differs')
class ReferenceFollowsSize(Scaled):
    def set_grid_size(self, grid_size):
        super().set_grid_size(grid_size)
        self.ref_grid_size = self.grid_size


@controls.broken_encoding('three_ways', 'it was trained on grid', ValueError)
class ReferenceIsNotSaved(Scaled):
    def set_extra_state(self, state):
        pass

    def set_ref_grid_size(self, ref_grid_size):
        pass

    def __init__(self, *, ref_grid_size=None, **host):
        super().__init__(**host)


test_contract_rejects = controls.test()
