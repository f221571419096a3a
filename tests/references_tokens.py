"""The encodings of tokens straight from their equations, as in references.py: one patch and one channel at a time."""
import math

import torch

from references import stacked


def patches(grid_size):
    """(y, x) of each patch, row by row."""
    return [(y, x) for y in range(grid_size[0]) for x in range(grid_size[1])]


def prefixed(rows, num_prefix_tokens):
    """Rows of all tokens: zeros for the prefix."""
    return stacked([torch.zeros_like(rows[0])] * num_prefix_tokens + rows)


def stretched(place, grid_size, ref_grid_size):
    """(y, x) in the trained grid, where patches are cells and each counts from its centre."""
    return [(c + 0.5) * ref / size - 0.5 for c, size, ref in zip(place, grid_size, ref_grid_size or grid_size)]


def resized(table, length):
    """Rows at the centres of `length` cells: linear between the centres of the old cells, constant beyond the outer."""
    rows = []
    for i in range(length):
        place = min(max((i + 0.5) * len(table) / length - 0.5, 0), len(table) - 1)
        low = math.floor(place)
        high = min(low + 1, len(table) - 1)
        rows.append((low + 1 - place) * table[low] + (place - low) * table[high])
    return rows


def ape2d(table_y, table_x, grid_size, *, combine='sum', num_prefix_tokens=0):
    table_y, table_x = resized(table_y, grid_size[0]), resized(table_x, grid_size[1])
    rows = []
    for y, x in patches(grid_size):
        if combine == 'sum':
            rows.append(table_y[y] + table_x[x])
        else:
            rows.append(torch.stack([*table_y[y].unbind(0), *table_x[x].unbind(0)]))
    return prefixed(rows, num_prefix_tokens)


def sincos1d(dim, grid_size, *, ref_grid_size=None, num_prefix_tokens=0):
    ref_height, ref_width = ref_grid_size or grid_size
    rows = []
    for n in range(grid_size[0] * grid_size[1]):
        n = n * ref_height * ref_width / (grid_size[0] * grid_size[1])
        row = []
        for c in range(dim):
            angle = n / 10000 ** (2 * (c // 2) / dim)
            row.append(math.cos(angle) if c % 2 else math.sin(angle))
        rows.append(torch.tensor(row, dtype=torch.float64))
    return prefixed(rows, num_prefix_tokens)


def sincos2d(dim, grid_size, *, ref_grid_size=None, num_prefix_tokens=0):
    rows = []
    for place in patches(grid_size):
        y, x = stretched(place, grid_size, ref_grid_size)
        row = []
        for wave, coordinate in ((math.sin, x), (math.cos, x), (math.sin, y), (math.cos, y)):
            row += [wave(coordinate / 10000 ** (k / (dim // 4))) for k in range(dim // 4)]
        rows.append(torch.tensor(row, dtype=torch.float64))
    return prefixed(rows, num_prefix_tokens)


def gelu(a):
    return a * (1 + torch.erf(a / math.sqrt(2))) / 2


def fourier(freqs, weight1, bias1, weight2, bias2, grid_size, *, ref_grid_size=None, num_prefix_tokens=0):
    num_features = weight1.shape[1]
    rows = []
    for place in patches(grid_size):
        y, x = stretched(place, grid_size, ref_grid_size)
        phases = [y * freqs[0, k] + x * freqs[1, k] for k in range(num_features // 2)]
        features = torch.stack([torch.cos(a) for a in phases] + [torch.sin(a) for a in phases])
        features = features / math.sqrt(num_features)
        hidden = torch.stack([gelu(w @ features + b) for w, b in zip(weight1, bias1)])
        rows.append(torch.stack([w @ hidden + b for w, b in zip(weight2, bias2)]))
    return prefixed(rows, num_prefix_tokens)


def cape_position(i, size):
    """`size` positions from -1 to 1, and the distance of neighbours."""
    return (-1 + 2 * i / (size - 1), 2 / (size - 1)) if size > 1 else (0.0, 0.0)


def cape(tokens, grid_size, *, num_prefix_tokens=0, global_shift=None, local_shift=None, log_scale=None):
    """The tokens with their positions, `[B, N, D]`; of what is drawn at random, what the caller says.

    Args:
        tokens: `[B, N, D]`.
        grid_size: (H, W).
        num_prefix_tokens: Prefix tokens, which come first.
        global_shift: `[B, 2]`.
        local_shift: In distances of neighbours, `[B, H*W, 2]`.
        log_scale: `[B]`.
    """
    batch, _, dim = tokens.shape
    images = []
    for b in range(batch):
        image = list(tokens[b, :num_prefix_tokens].unbind(0))
        for n, place in enumerate(patches(grid_size)):
            position = []
            for axis in range(2):
                p, step = cape_position(place[axis], grid_size[axis])
                if global_shift is not None:
                    p = p + global_shift[b, axis].item()
                if local_shift is not None:
                    p = p + local_shift[b, n, axis].item() * step
                if log_scale is not None:
                    p = p * math.exp(log_scale[b].item())
                position.append(p)
            phases = []
            for k in range(dim // 2):
                rho = 10 ** (k / (dim // 2 - 1))
                phases.append(math.pi * rho * (math.cos(k) * position[0] + math.sin(k) * position[1]))
            waves = [math.cos(a) for a in phases] + [math.sin(a) for a in phases]
            token = tokens[b, num_prefix_tokens + n]
            image.append(torch.stack([math.sqrt(dim) * t + w for t, w in zip(token, waves)]))
        images.append(image)
    return stacked(images)
