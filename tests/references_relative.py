"""Encodings of offsets straight from their equations, as in references.py: one pair of patches at a time."""
import math

import torch

from references import places, stacked, vectors


def softplus(a):
    return a + torch.log1p(torch.exp(-a)) if a > 0 else torch.log1p(torch.exp(a))


def pairs(grid_size, num_prefix_tokens, num_heads, value):
    """Bias `[h, N, N]` out of `value(y_i, x_i, y_j, x_j)`, a vector of one entry per head; 0 for prefix tokens."""
    place = [None] * num_prefix_tokens + places(0, grid_size, None)
    zeros = torch.zeros(num_heads, dtype=torch.float64)
    rows = [[zeros if i is None or j is None else value(*i, *j) for j in place] for i in place]
    return stacked(rows).permute(2, 0, 1)


# --- rpb -------------------------------------------------------------------------------------------------------------

def cubic(t):
    """Weight of a neighbour at distance t: the cubic convolution of Keys with a = -3/4."""
    a, t = -0.75, abs(t)
    if t <= 1:
        return (a + 2) * t ** 3 - (a + 3) * t ** 2 + 1
    return a * (t ** 3 - 5 * t ** 2 + 8 * t - 4) if t < 2 else 0


def resampled(values, length):
    """A list at the centres of `length` cells, from that at the centres of its own; constant beyond the outer ones."""
    out = []
    for i in range(length):
        place = (i + 0.5) * len(values) / length - 0.5
        low = math.floor(place)
        out.append(sum(
            cubic(place - n) * values[min(max(n, 0), len(values) - 1)] for n in range(low - 1, low + 3)))
    return out


def rpb(table, grid_size, own_size, num_prefix_tokens):
    """Rows of the table are offsets p_i - p_j, of own_size."""
    (height, width), (own_height, own_width) = grid_size, own_size
    rows = table.unbind(0)
    rows = [list(rows[r * (2 * own_width - 1):(r + 1) * (2 * own_width - 1)]) for r in range(2 * own_height - 1)]
    if grid_size != own_size:
        rows = [resampled(row, 2 * width - 1) for row in rows]
        columns = [resampled([row[c] for row in rows], 2 * height - 1) for c in range(2 * width - 1)]
        rows = [[column[r] for column in columns] for r in range(2 * height - 1)]

    def value(yi, xi, yj, xj):
        return rows[yi - yj + height - 1][xi - xj + width - 1]

    return pairs(grid_size, num_prefix_tokens, table.shape[1], value)


# --- cpb -------------------------------------------------------------------------------------------------------------

def cpb(weight1, bias1, weight2, bias2, grid_size, ref_grid_size, num_prefix_tokens, *, mode):
    def squeezed(delta, ref):
        if mode == 'cr':
            return math.copysign(math.log(1 + abs(delta)), delta)
        scaled = delta / max(ref - 1, 1) * 8
        return math.copysign(math.log2(1 + abs(scaled)) / math.log2(8), delta)

    def value(yi, xi, yj, xj):
        f = squeezed(yi - yj, ref_grid_size[0]), squeezed(xi - xj, ref_grid_size[1])
        hidden = weight1[:, 0] * f[0] + weight1[:, 1] * f[1] + bias1
        hidden = torch.where(hidden > 0, hidden, torch.zeros_like(hidden))
        out = weight2 @ hidden
        return out + bias2 if mode == 'cr' else 16 / (1 + torch.exp(-out))

    return pairs(grid_size, num_prefix_tokens, weight2.shape[0], value)


# --- t5 --------------------------------------------------------------------------------------------------------------

def t5_bucket(delta):
    """Of the position of the key minus that of the query: the published formula, 32 buckets, 128 the largest."""
    half = 16 if delta > 0 else 0
    delta = abs(delta)
    if delta < 8:
        return half + delta
    return half + min(8 + int(math.log(delta / 8) / math.log(128 / 8) * 8), 15)


def t5(tables, grid_size, num_prefix_tokens, *, distance):
    def value(yi, xi, yj, xj):
        if distance == 'raster':
            return tables['table'][t5_bucket((yj - yi) * grid_size[1] + xj - xi)]
        return tables['table_y'][t5_bucket(yj - yi)] + tables['table_x'][t5_bucket(xj - xi)]

    return pairs(grid_size, num_prefix_tokens, next(iter(tables.values())).shape[1], value)


# --- of content ------------------------------------------------------------------------------------------------------

def content_pairs(num_images, num_heads, grid_size, num_prefix_tokens, keep_indices, value):
    """Bias `[B, h, N, N]` out of `value(b, head, i, j, place_i, place_j)`; i and j count all tokens."""
    zero = torch.zeros((), dtype=torch.float64)
    bias = []
    for b in range(num_images):
        place = [None] * num_prefix_tokens + places(b, grid_size, keep_indices)
        bias.append([[[
            zero if place[i] is None or place[j] is None else value(b, head, i, j, place[i], place[j])
            for j in range(len(place))] for i in range(len(place))] for head in range(num_heads)])
    return stacked(bias)


def shaw(q, tables, grid_size, num_prefix_tokens, keep_indices, *, clip, distance):
    def look_up(table, delta):
        return table[max(-clip, min(delta, clip)) + clip]

    qs = vectors(q)

    def value(b, head, i, j, place_i, place_j):
        dy, dx = place_j[0] - place_i[0], place_j[1] - place_i[1]
        if distance == 'raster':
            r = look_up(tables['table'], dy * grid_size[1] + dx)
        else:
            r = look_up(tables['table_y'], dy) + look_up(tables['table_x'], dx)
        return qs[b][head][i] @ r / math.sqrt(q.shape[-1])

    return content_pairs(q.shape[0], q.shape[1], grid_size, num_prefix_tokens, keep_indices, value)


def pape(x, w_p, w_a, w_b, grid_size, ref_grid_size, num_prefix_tokens, keep_indices):
    """Parabola by parabola. With `ref_grid_size`, places are those in the trained grid."""
    num_heads, num_parabolas, _ = w_p.shape
    tokens = [image.unbind(0) for image in x.unbind(0)]

    def stretched(place):
        return [(c + 0.5) * ref / size - 0.5 for c, size, ref in zip(place, grid_size, ref_grid_size or grid_size)]

    a = [[[
        [softplus(w_a[h, m] @ token) for m in range(num_parabolas)] for token in image] for image in tokens]
        for h in range(num_heads)]
    b = [[[[w_b[h, m] @ token for m in range(num_parabolas)] for token in image] for image in tokens]
         for h in range(num_heads)]

    def value(image, head, i, j, place_i, place_j):
        (yi, xi), (yj, xj) = stretched(place_i), stretched(place_j)
        bias = 0
        for m in range(num_parabolas):
            u = (w_p[head, m, 0] * yi + w_p[head, m, 1] * xi) - (w_p[head, m, 0] * yj + w_p[head, m, 1] * xj)
            bias = bias - a[head][image][i][m] * u ** 2 + b[head][image][i][m] * u
        return bias

    return content_pairs(x.shape[0], num_heads, grid_size, num_prefix_tokens, keep_indices, value)
