"""Shared by the references of encodings: plain float64 loops over scalars or vectors.

The references are slow and simple, and the package must agree with them. They share no code with the package, and
autograd gives their gradients. Tensors are `[B, h, N, d]` with prefix tokens first; patches are numbered row by row.
"""
import math

import torch

torch.set_num_threads(1)  # scalars leave no work for more threads, which would only wait for each other


def vectors(x):
    """`[B, h, N, d]` as lists: `vectors(x)[b][h][n]` is a vector."""
    return [[list(head.unbind(0)) for head in image.unbind(0)] for image in x.unbind(0)]


def stacked(lists):
    """Nested lists of scalars or vectors as one tensor."""
    return torch.stack([stacked(x) for x in lists]) if isinstance(lists, list) else lists


def places(b, grid_size, keep_indices):
    """(y, x) of each patch of image `b`, in the order of the sequence."""
    height, width = grid_size
    kept = range(height * width) if keep_indices is None else keep_indices[b].tolist()
    return [(r // width, r % width) for r in kept]


def rescaled(size, ref_size):
    """The coordinate of row or column i of `size`, in patches of the trained grid, which has `ref_size` of them."""
    return lambda i: (i + 0.5) * ref_size / size - 0.5


def sigmoid(a):
    return 1 / (1 + torch.exp(-a)) if a >= 0 else torch.exp(a) / (1 + torch.exp(a))


def look_up(table, p):
    """e[p], interpolated between the cells floor(p) and floor(p) + 1, of which npos-1 is the last."""
    last = len(table) - 1
    p = p.clamp(max=last)
    low = math.floor(p.item())
    high = min(low + 1, last)
    w = p - low
    return (1 - w) * table[low] + w * table[high]


def attention(q, k, v, *, scale=None, bias=None, attn_mask=None, is_causal=False):
    """softmax(scale * q.k + bias) v, one query at a time, `[B, h, N, d]`."""
    batch, num_heads, num_tokens, dim = q.shape
    scale = 1 / math.sqrt(dim) if scale is None else scale
    full = (batch, num_heads, num_tokens, num_tokens)
    bias = torch.zeros(full, dtype=q.dtype) if bias is None else bias.expand(full)
    attn_mask = torch.zeros(full, dtype=q.dtype) if attn_mask is None else attn_mask.expand(full)
    qs, ks, vs = vectors(q), vectors(k), vectors(v)
    out = []
    for b in range(batch):
        out.append([])
        for h in range(num_heads):
            out[b].append([])
            for i in range(num_tokens):
                weights = {}
                for j in range(num_tokens):
                    if is_causal and j > i:
                        continue
                    if attn_mask.dtype == torch.bool and not attn_mask[b, h, i, j]:
                        continue
                    logit = scale * (qs[b][h][i] @ ks[b][h][j]) + bias[b, h, i, j]
                    if attn_mask.dtype != torch.bool:
                        logit = logit + attn_mask[b, h, i, j]
                    weights[j] = torch.exp(logit)
                total = sum(weights.values())
                out[b][h].append(sum(w / total * vs[b][h][j] for j, w in weights.items()))
    return stacked(out)


def rotated(x, angle, grid_size, num_prefix_tokens=0, keep_indices=None, rotate_half=False):
    """Rotate pairs of channels of each patch by `angle(h, t, y, x)`. Prefix tokens do not change.

    Pair t is the channels 2t and 2t + 1, or t and t + d/2 with `rotate_half`.
    """
    out = []
    for b, heads in enumerate(vectors(x)):
        place = places(b, grid_size, keep_indices)
        out.append([])
        for h, tokens in enumerate(heads):
            turned = tokens[:num_prefix_tokens]
            for (row, column), token in zip(place, tokens[num_prefix_tokens:]):
                half = len(token) // 2
                channels = [None] * len(token)
                for t in range(half):
                    first, second = (t, t + half) if rotate_half else (2 * t, 2 * t + 1)
                    a = torch.as_tensor(angle(h, t, row, column), dtype=x.dtype)
                    u, w = token[first], token[second]
                    channels[first] = u * torch.cos(a) - w * torch.sin(a)
                    channels[second] = u * torch.sin(a) + w * torch.cos(a)
                turned = turned + [torch.stack(channels)]
            out[b].append(turned)
    return stacked(out)


def logit_bias(pair, num_heads, grid_size, num_prefix_tokens=0, keep_indices=None, batch=None):
    """`pair(h, from_y, from_x, to_y, to_x)` for all tokens, 0 wherever a prefix token takes part, `[B, h, N, N]`.

    B is the number of rows of `keep_indices`, else 1, unless `batch` says otherwise.
    """
    batch = batch or (1 if keep_indices is None else len(keep_indices))
    return content_bias(
        lambda b, h, i, j, a, c: pair(h, *a, *c), batch, num_heads, grid_size, num_prefix_tokens, keep_indices)


def content_bias(pair, batch, num_heads, grid_size, num_prefix_tokens=0, keep_indices=None):
    """`pair(b, h, i, j, (y_i, x_i), (y_j, x_j))` for all tokens, 0 wherever a prefix token takes part, `[B, h, N, N]`.

    i and j count all tokens.
    """
    p, zero = num_prefix_tokens, torch.zeros((), dtype=torch.float64)
    bias = []
    for b in range(batch):
        place = [None] * p + places(b, grid_size, keep_indices)
        tokens = range(len(place))
        bias.append([[[
            zero if i < p or j < p else torch.as_tensor(pair(b, h, i, j, place[i], place[j]), dtype=torch.float64)
            for j in tokens] for i in tokens] for h in range(num_heads)])
    return stacked(bias)


def changed_patches(tokens, change, grid_size, num_prefix_tokens=0, keep_indices=None):
    """Tokens `[B, N, D]` with `change(token, b, y, x)` in place of each patch of image `b`. Prefix tokens stay."""
    images = []
    for b, image in enumerate(tokens.unbind(0)):
        image = list(image.unbind(0))
        patches = zip(image[num_prefix_tokens:], places(b, grid_size, keep_indices))
        images.append(image[:num_prefix_tokens] + [change(token, b, y, x) for token, (y, x) in patches])
    return stacked(images)


def bicubic_weights(old, new):
    """Antialiased bicubic resampling from `old` to `new` samples: for each new one, {old index: weight}."""
    ratio = old / new
    stretch = max(ratio, 1.0)  # a coarser grid averages over more of the finer one

    def kernel(t):  # Keys' cubic with a = -1/2
        t = abs(t)
        if t < 1:
            return 1.5 * t ** 3 - 2.5 * t ** 2 + 1
        return -0.5 * t ** 3 + 2.5 * t ** 2 - 4 * t + 2 if t < 2 else 0.0

    weights = []
    for n in range(new):
        center = (n + 0.5) * ratio
        row = {m: kernel((m + 0.5 - center) / stretch) for m in range(old)}
        total = sum(row.values())  # samples beyond the border are left out
        weights.append({m: w / total for m, w in row.items() if w})
    return weights


def resampled(table, old_size, new_size, num_prefix_rows=0):
    """A `[1, P+H*W, D]` table for another grid: prefix rows as they are, patch rows resampled along y and x."""
    rows = list(table[0].unbind(0))
    prefix, patches = rows[:num_prefix_rows], rows[num_prefix_rows:]
    weights_y, weights_x = bicubic_weights(old_size[0], new_size[0]), bicubic_weights(old_size[1], new_size[1])
    new = []
    for y in range(new_size[0]):
        for x in range(new_size[1]):
            new.append(sum(
                wy * wx * patches[j * old_size[1] + i]
                for j, wy in weights_y[y].items() for i, wx in weights_x[x].items()))
    return stacked([prefix + new])


def skew(entries, size):
    """The skew-symmetric matrix with these entries above the diagonal, row by row."""
    rows = [[torch.zeros((), dtype=entries.dtype) for _ in range(size)] for _ in range(size)]
    left = iter(entries.unbind(0))
    for i in range(size):
        for j in range(i + 1, size):
            rows[i][j] = next(left)
            rows[j][i] = -rows[i][j]
    assert next(left, None) is None
    return stacked(rows)


def exponential(a):
    """1 + a + a^2 / 2! + a^3 / 3! + ..., of a matrix whose entries add up to less than 1024 in each row."""
    a = a / 1024
    total = term = torch.eye(len(a), dtype=a.dtype)
    for n in range(1, 20):
        term = term @ a / n
        total = total + term
    for _ in range(10):
        total = total @ total
    return total


def multiplied(x, matrices, grid_size, num_prefix_tokens=0, keep_indices=None):
    """Multiply blocks of channels of each patch by the matrices `matrices(h, y, x)`. Prefix tokens do not change."""
    out = []
    for b, heads in enumerate(vectors(x)):
        place = places(b, grid_size, keep_indices)
        out.append([])
        for h, tokens in enumerate(heads):
            turned = tokens[:num_prefix_tokens]
            for (row, column), token in zip(place, tokens[num_prefix_tokens:]):
                blocks, start = [], 0
                for matrix in matrices(h, row, column):
                    end = start + len(matrix)
                    blocks.append(torch.stack([line @ token[start:end] for line in matrix]))
                    start = end
                assert start == len(token)
                turned = turned + [torch.cat(blocks)]
            out[b].append(turned)
    return stacked(out)
