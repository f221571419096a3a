"""Bucketed relative position bias in float64 loops (Raffel et al., 'T5', JMLR 2020, section 2.1).

The paper has no equation; the bucket is the formula of its published code. With a table for each axis it is ours.
"""
import math

from loops import logit_bias


def bucket(delta):
    """Of the position of the key minus that of the query: 32 buckets, 128 the largest distance."""
    half = 16 if delta > 0 else 0
    delta = abs(delta)
    if delta < 8:
        return half + delta
    return half + min(8 + int(math.log(delta / 8) / math.log(128 / 8) * 8), 15)


def bias(tables, grid_size, *, distance, **where):
    """table[bucket(j - i)] along the raster, or the sum of such numbers for y and for x, `[B, h, N, N]`."""
    def pair(h, yi, xi, yj, xj):
        if distance == 'raster':
            return tables['table'][bucket((yj - yi) * grid_size[1] + xj - xi), h]
        return tables['table_y'][bucket(yj - yi), h] + tables['table_x'][bucket(xj - xi), h]

    return logit_bias(pair, next(iter(tables.values())).shape[1], grid_size, **where)
