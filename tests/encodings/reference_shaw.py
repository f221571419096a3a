"""Relative position representations of keys in float64 loops (Shaw et al., 'Self-Attention with Relative Position
Representations', 2018, Eq. 4).

What a^K adds to the logits of Eq. 4. With a table for each axis it is ours.
"""
import math

from loops import content_bias, vectors


def bias(q, tables, grid_size, *, clip, distance, **where):
    """q_i.a_ij / sqrt(d), `[B, h, N, N]`, with a_ij the row of the clipped offset, or the sum of those for y and x."""
    def look_up(table, delta):
        return table[max(-clip, min(delta, clip)) + clip]

    qs = vectors(q)

    def pair(b, h, i, j, place_i, place_j):
        dy, dx = place_j[0] - place_i[0], place_j[1] - place_i[1]
        if distance == 'raster':
            a = look_up(tables['table'], dy * grid_size[1] + dx)
        else:
            a = look_up(tables['table_y'], dy) + look_up(tables['table_x'], dx)
        return qs[b][h][i] @ a / math.sqrt(q.shape[-1])

    return content_bias(pair, q.shape[0], q.shape[1], grid_size, **where)
