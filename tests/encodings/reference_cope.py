"""CoPE in float64 loops (Golovneva et al., 'Contextual Position Encoding', 2024, Eq. 3 to 5).

Along the raster, to its end, because a ViT is not causal. Sums between two patches are ours, as are prefix tokens,
dropped patches and other grids than the trained one.
"""
import math

import torch

from loops import content_bias, look_up, places, sigmoid, vectors


def counted(q, k, table, grid_size, from_to, num_prefix_tokens, ref_num_patches, keep_indices):
    """z_i[p_ij] / sqrt(d) with p_ij the sum of sigmoid(q_i.k_m / sqrt(d)) over the patches m in `from_to(i, j)`.

    All three count patches along the raster. A dropped patch has no gate.
    """
    (height, width), root = grid_size, math.sqrt(q.shape[-1])
    shrink = (ref_num_patches or height * width) / (height * width)
    rows, qs, ks = list(table.unbind(0)), vectors(q), vectors(k)

    def pair(b, h, i, j, place_i, place_j):
        (yi, xi), (yj, xj) = place_i, place_j
        pos = torch.zeros((), dtype=q.dtype)
        for n, (y, x) in enumerate(places(b, grid_size, keep_indices)):
            if y * width + x in from_to(yi * width + xi, yj * width + xj):
                pos = pos + sigmoid(qs[b][h][i] @ ks[b][h][num_prefix_tokens + n] / root)
        return qs[b][h][i] @ look_up(rows, pos * shrink) / root

    return content_bias(pair, q.shape[0], q.shape[1], grid_size, num_prefix_tokens, keep_indices)


def cope_bias(q, k, table, grid_size, *, num_prefix_tokens=0, ref_num_patches=None, keep_indices=None):
    """With p_ij the sum over all patches m from j to the last one."""
    def from_to(i, j):
        return range(j, grid_size[0] * grid_size[1])

    return counted(q, k, table, grid_size, from_to, num_prefix_tokens, ref_num_patches, keep_indices)


def cope_between(q, k, table, grid_size, *, num_prefix_tokens=0, ref_num_patches=None, keep_indices=None):
    """With p_ij the sum from the first of i and j to before the last."""
    def from_to(i, j):
        return range(min(i, j), max(i, j))

    return counted(q, k, table, grid_size, from_to, num_prefix_tokens, ref_num_patches, keep_indices)
