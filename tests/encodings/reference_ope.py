"""Object-based encoding (Li et al. 2024, arXiv:2410.06405): [wave(o), wave(x), wave(y)]; and how objects are found."""
import math

import torch

from loops import changed_patches, rescaled


def wave(position, num_channels):
    """All sines, then all cosines."""
    phases = [position / 10000 ** (2 * k / num_channels) for k in range(num_channels // 2)]
    return [math.sin(a) for a in phases] + [math.cos(a) for a in phases]


def ope(tokens, objects, grid_size, *, ref_grid_size=None, **where):
    """Each patch plus the waves of its object, of `[B, H*W]`, of x and of y, in patches of the trained grid."""
    dim = tokens.shape[-1]
    to_y, to_x = (rescaled(size, ref) for size, ref in zip(grid_size, ref_grid_size or grid_size))
    objects = objects.tolist()

    def change(token, b, y, x):
        row = wave(objects[b][y * grid_size[1] + x], dim // 2) + wave(to_x(x), dim // 4) + wave(to_y(y), dim // 4)
        return token + torch.tensor(row, dtype=torch.float64)

    return changed_patches(tokens, change, grid_size, **where)


def color(image, y, x, patch_size, mean, std):
    """Level of each channel of the patch at (y, x) of a `[C, height, width]` image, beyond which pixels are zero."""
    levels = []
    for c, channel in enumerate(image.tolist()):
        total = 0.0
        for row in channel[y * patch_size[0]:(y + 1) * patch_size[0]]:
            total += sum(row[x * patch_size[1]:(x + 1) * patch_size[1]])
        value = total / (patch_size[0] * patch_size[1]) * std[c] + mean[c]
        levels.append(min(max(math.floor(4 * value), 0), 3))
    return tuple(levels)


def find_objects(images, grid_size, patch_size, mean, std):
    """Flood fill: from each patch that has no object yet, in raster order, all that can be reached, `[B, H*W]`."""
    patches = [(y, x) for y in range(grid_size[0]) for x in range(grid_size[1])]
    found = []
    for image in images:
        colors = {(y, x): color(image, y, x, patch_size, mean, std) for y, x in patches}
        number, count = {}, 0
        for start in patches:
            if start in number:
                continue
            reached = [start]
            number[start] = count
            while reached:
                y, x = reached.pop()
                for neighbor in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                    if colors.get(neighbor) == colors[y, x] and neighbor not in number:
                        number[neighbor] = count
                        reached.append(neighbor)
            count += 1
        found.append([number[place] for place in patches])
    return torch.tensor(found)
