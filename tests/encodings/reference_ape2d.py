"""The factored embeddings of NaViT (Dehghani et al. 2023, arXiv:2307.06304): PE(y, x) = table_y[y] + table_x[x]."""
import math

import torch

from loops import changed_patches


def resized(table, length):
    """Rows at the centers of `length` cells: linear between the centers of the old cells, constant beyond the outer."""
    rows = []
    for i in range(length):
        place = min(max((i + 0.5) * len(table) / length - 0.5, 0), len(table) - 1)
        low = math.floor(place)
        high = min(low + 1, len(table) - 1)
        rows.append((low + 1 - place) * table[low] + (place - low) * table[high])
    return rows


def ape2d(tokens, table_y, table_x, grid_size, *, combine='sum', **where):
    """Each patch plus table_y[y] + table_x[x], or plus the two side by side."""
    rows, columns = resized(table_y, grid_size[0]), resized(table_x, grid_size[1])

    def change(token, b, y, x):
        if combine == 'sum':
            return token + rows[y] + columns[x]
        return token + torch.stack([*rows[y].unbind(0), *columns[x].unbind(0)])

    return changed_patches(tokens, change, grid_size, **where)
