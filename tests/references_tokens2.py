"""LaPE, PEG, OPE and PEmixer straight from their equations, as in references.py: one patch and one vector at a time."""
import math

import torch

from references import places, stacked
from references_tokens import patches, prefixed, stretched


def lape(table, weights, biases):
    """p_1 ... p_L, `[L, N, D]`, with p_l = LN_l(p_(l-1)) and p_0 the `[1, N, D]` table."""
    rows, layers = list(table[0].unbind(0)), []
    for weight, bias in zip(weights, biases):
        normed = []
        for row in rows:
            mean = sum(row.unbind(0)) / len(row)
            variance = sum((a - mean) ** 2 for a in row.unbind(0)) / len(row)
            normed.append(weight * (row - mean) / torch.sqrt(variance + 1e-6) + bias)
        rows = normed
        layers.append(rows)
    return stacked(layers)


def peg(x, weight, bias, grid_size, *, num_prefix_tokens=0, keep_indices=None):
    """x + conv(x) for patches, with a weight of `[D, 1, k, k]`, y before x. Where there is no patch there is zero."""
    radius = weight.shape[-1] // 2
    images = []
    for b, tokens in enumerate(x.unbind(0)):
        tokens, place = list(tokens.unbind(0)), places(b, grid_size, keep_indices)
        at = {yx: tokens[num_prefix_tokens + n] for n, yx in enumerate(place)}
        image = tokens[:num_prefix_tokens]
        for y, x in place:
            out = at[y, x] + bias
            for dy in range(-radius, radius + 1):
                for dx in range(-radius, radius + 1):
                    if (y + dy, x + dx) in at:
                        out = out + weight[:, 0, radius + dy, radius + dx] * at[y + dy, x + dx]
            image.append(out)
        images.append(image)
    return stacked(images)


def wave(position, num_channels):
    """All sines, then all cosines."""
    phases = [position / 10000 ** (2 * k / num_channels) for k in range(num_channels // 2)]
    return [math.sin(a) for a in phases] + [math.cos(a) for a in phases]


def ope(objects, dim, grid_size, *, ref_grid_size=None, num_prefix_tokens=0):
    """The terms, `[B, N, D]`, of patches that belong to `objects`, `[B, H*W]`."""
    images = []
    for image in objects.tolist():
        rows = []
        for o, place in zip(image, patches(grid_size)):
            y, x = stretched(place, grid_size, ref_grid_size)
            rows.append(torch.tensor(
                wave(o, dim // 2) + wave(x, dim // 4) + wave(y, dim // 4), dtype=torch.float64))
        images.append(prefixed(rows, num_prefix_tokens))
    return stacked(images)


def pemix(x, term, weight_x, weight_pe):
    return stacked([
        [weight_x * token + weight_pe * row for token, row in zip(image.unbind(0), rows.unbind(0))]
        for image, rows in zip(x.unbind(0), term.expand_as(x).unbind(0))])


def colour(image, y, x, patch_size, mean, std):
    """Level of each channel of the patch at (y, x) of a `[C, height, width]` image, beyond which pixels are zero."""
    levels = []
    for c, channel in enumerate(image.tolist()):
        total = 0.0
        for row in channel[y * patch_size[0]:(y + 1) * patch_size[0]]:
            total += sum(row[x * patch_size[1]:(x + 1) * patch_size[1]])
        value = total / (patch_size[0] * patch_size[1]) * std[c] + mean[c]
        levels.append(min(max(math.floor(4 * value), 0), 3))
    return tuple(levels)


def objects(images, grid_size, patch_size, mean, std):
    """Flood fill: from each patch that has no object yet, in raster order, all that can be reached, `[B, H*W]`."""
    found = []
    for image in images:
        colours = {(y, x): colour(image, y, x, patch_size, mean, std) for y, x in patches(grid_size)}
        number, count = {}, 0
        for start in patches(grid_size):
            if start in number:
                continue
            reached = [start]
            number[start] = count
            while reached:
                y, x = reached.pop()
                for neighbour in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                    if colours.get(neighbour) == colours[y, x] and neighbour not in number:
                        number[neighbour] = count
                        reached.append(neighbour)
            count += 1
        found.append([number[place] for place in patches(grid_size)])
    return torch.tensor(found)
