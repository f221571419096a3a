"""Broken methods of `Grid`, which the tests of several encodings must notice."""
import torch.nn.functional as F

from timm_sape import Grid

coordinates = Grid.coordinates


def prefix_behind(self, table):
    """`pad_tokens` with the prefix tokens last."""
    return F.pad(table, (0, 0, 0, self.num_prefix_tokens))


def x_before_y(self, device=None, dtype=None):
    """`coordinates` as (x, y)."""
    return coordinates(self, device, dtype).flip(-1)


def columns_first(self, device=None, dtype=None):
    """`coordinates` of patches numbered column by column."""
    return coordinates(Grid(self.width, self.height), device, dtype).flip(-1)


def in_raster_order(method):
    """The method with the kept patches in raster order, not in their own."""
    def broken(self, *args):
        return method(Grid(*self.size, self.num_prefix_tokens, self.keep_indices.sort().values), *args)
    return broken
