"""Every encoding straight from its equations: loops over patches, one scalar or vector at a time, in float64.

The slowest and plainest form there is, and the truth that the package is held to. Nothing here is shared with it, and
autograd gives the gradients. Tensors are `[B, h, N, d]` with prefix tokens first; patches are numbered row by row.
"""
import math

import torch

torch.set_num_threads(1)  # scalar by scalar there is nothing to share, and threads only wait for each other


def assert_near(actual, expected, tolerance, what='value'):
    """Same shape, and no entry further off than `tolerance` times the largest one. NaN is never near."""
    assert actual.shape == expected.shape, f'{what}: {list(actual.shape)} instead of {list(expected.shape)}'
    actual, expected = actual.detach().double(), expected.detach().double()
    error, largest = (actual - expected).abs().max().item(), expected.abs().max().item()
    assert error <= tolerance * largest, f'{what}: off by {error:.2e} where the largest entry is {largest:.2e}'


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


def sape2_codes(
        q, k, table_x, table_y, grid_size, *, mode, gate_scale, num_prefix_tokens=0, ref_grid_size=None,
        keep_indices=None):
    """SaPE_x[i] and SaPE_y[i] (Eq. 9 to 14), `[b][h][i]` -> vectors of W and H entries, 2W and 2H for 'qk'."""
    height, width = grid_size
    ref_height, ref_width = ref_grid_size or grid_size
    table_x, table_y = list(table_x.unbind(0)), list(table_y.unbind(0))
    codes_x, codes_y = [], []
    for b, (q_heads, k_heads) in enumerate(zip(vectors(q), vectors(k))):
        place = places(b, grid_size, keep_indices)
        codes_x.append([])
        codes_y.append([])
        for qs, ks in zip(q_heads, k_heads):
            qs, ks = qs[num_prefix_tokens:], ks[num_prefix_tokens:]
            at = {yx: n for n, yx in enumerate(place)}
            codes_x[b].append([])
            codes_y[b].append([])
            for i, (y, x) in enumerate(place):
                gates = {  # Eq. 9; a dropped patch has none
                    (row, column): sigmoid(gate_scale * (qs[i] @ ks[at[row, column]]))
                    for row, column in at if row == y or column == x}
                sources = {'q': [qs[i]], 'k': [ks[i]], 'qk': [qs[i], ks[i]]}[mode]
                positions_x, positions_y = [], []
                for m in range(width):  # Eq. 10: all of the row that is not left of m
                    p = sum(gates[y, j] for j in range(m, width) if (y, j) in gates)
                    positions_x.append(torch.as_tensor(p * ref_width / width, dtype=q.dtype))
                for m in range(height):  # and all of the column that is not above m
                    p = sum(gates[j, x] for j in range(m, height) if (j, x) in gates)
                    positions_y.append(torch.as_tensor(p * ref_height / height, dtype=q.dtype))
                scale_x, scale_y = math.sqrt(ref_width / width), math.sqrt(ref_height / height)
                codes_x[b][-1].append(torch.stack(  # Eq. 11 and 12
                    [scale_x * (s @ look_up(table_x, p)) for s in sources for p in positions_x]))
                codes_y[b][-1].append(torch.stack(
                    [scale_y * (s @ look_up(table_y, p)) for s in sources for p in positions_y]))
    return codes_x, codes_y


def distance(a, b):
    """||a - b||; at a = b it has no derivative, and 0 is taken for it."""
    square = (a - b) @ (a - b)
    return 0 * square if square == 0 else square.sqrt()


def sape2_bias(q, k, table_x, table_y, grid_size, *, mode='k', gate_scale=None, num_prefix_tokens=0, **kwargs):
    """b^x + b^y (Eq. 15), 0 wherever a prefix token takes part."""
    gate_scale = 1 / math.sqrt(q.shape[-1]) if gate_scale is None else gate_scale
    codes_x, codes_y = sape2_codes(
        q, k, table_x, table_y, grid_size,
        mode=mode, gate_scale=gate_scale, num_prefix_tokens=num_prefix_tokens, **kwargs)
    batch, num_heads, num_tokens, _ = q.shape
    bias = []
    for b in range(batch):
        bias.append([])
        for h in range(num_heads):
            bias[b].append([])
            for i in range(num_tokens):
                row = []
                for n in range(num_tokens):
                    if i < num_prefix_tokens or n < num_prefix_tokens:
                        row.append(torch.zeros((), dtype=q.dtype))
                    else:
                        cx, cy, p = codes_x[b][h], codes_y[b][h], num_prefix_tokens
                        row.append(distance(cx[i - p], cx[n - p]) + distance(cy[i - p], cy[n - p]))
                bias[b][h].append(row)
    return stacked(bias)


def attention(q, k, v, *, scale=None, bias=None, attn_mask=None, is_causal=False):
    """softmax(scale * q.k + bias) v (Eq. 16, with the scale of the bias in the bias), one query at a time."""
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


def sape2_attention(
        q, k, v, table_x, table_y, grid_size, *, bias_scale=1.0, scale=None, attn_mask=None, is_causal=False, **kwargs):
    """Eq. 16. `bias_scale` is a number or has one value per head."""
    bias = sape2_bias(q, k, table_x, table_y, grid_size, **kwargs)
    if isinstance(bias_scale, torch.Tensor) and bias_scale.ndim:
        bias = torch.stack([bias_scale[h] * bias[:, h] for h in range(q.shape[1])], dim=1)
    else:
        bias = bias_scale * bias
    return attention(q, k, v, scale=scale, bias=bias, attn_mask=attn_mask, is_causal=is_causal)


def cope_bias(q, k, table, grid_size, *, num_prefix_tokens=0, ref_num_patches=None, keep_indices=None):
    """z_i[p_ij] / sqrt(d) with p_ij the sum of sigmoid(q_i.k_m / sqrt(d)) over all patches m from j to the last one."""
    batch, num_heads, num_tokens, dim = q.shape
    height, width = grid_size
    num_patches = height * width
    ref_num_patches = ref_num_patches or num_patches
    p = num_prefix_tokens
    table = list(table.unbind(0))
    qs, ks = vectors(q), vectors(k)
    bias = []
    for b in range(batch):
        raster = [y * width + x for y, x in places(b, grid_size, keep_indices)]
        at = {r: p + n for n, r in enumerate(raster)}
        bias.append([])
        for h in range(num_heads):
            bias[b].append([])
            for i in range(num_tokens):
                gates = {m: sigmoid(qs[b][h][i] @ ks[b][h][n] / math.sqrt(dim)) for m, n in at.items()}
                row = []
                for j in range(num_tokens):
                    if i < p or j < p:
                        row.append(torch.zeros((), dtype=q.dtype))
                        continue
                    pos = sum(gates[m] for m in range(raster[j - p], num_patches) if m in gates)
                    e = look_up(table, pos * ref_num_patches / num_patches)
                    row.append(qs[b][h][i] @ e / math.sqrt(dim))
                bias[b][h].append(row)
    return stacked(bias)


def rotated(x, angle, grid_size, num_prefix_tokens=0, keep_indices=None):
    """Turn channels 2t and 2t + 1 of each patch by `angle(h, t, y, x)`; prefix tokens stay."""
    out = []
    for b, heads in enumerate(vectors(x)):
        place = places(b, grid_size, keep_indices)
        out.append([])
        for h, tokens in enumerate(heads):
            turned = tokens[:num_prefix_tokens]
            for (row, column), token in zip(place, tokens[num_prefix_tokens:]):
                channels = []
                for t in range(len(token) // 2):
                    a = torch.as_tensor(angle(h, t, row, column), dtype=x.dtype)
                    u, w = token[2 * t], token[2 * t + 1]
                    channels += [u * torch.cos(a) - w * torch.sin(a), u * torch.sin(a) + w * torch.cos(a)]
                turned = turned + [torch.stack(channels)]
            out[b].append(turned)
    return stacked(out)


def rope2d(x, grid_size, **kwargs):
    """The first d/4 pairs turn by x * 100^(-4t/d), the others by y * 100^(-4t/d)."""
    dim = x.shape[-1]

    def angle(h, t, row, column):
        return column * 100 ** (-4 * t / dim) if t < dim // 4 else row * 100 ** (-4 * (t - dim // 4) / dim)

    return rotated(x, angle, grid_size, **kwargs)


def rope2d_mixed(x, freqs, grid_size, **kwargs):
    """Pair t of head h turns by x * fx[h, t] + y * fy[h, t]."""
    fx, fy = freqs[0], freqs[1]
    return rotated(x, lambda h, t, row, column: column * fx[h, t] + row * fy[h, t], grid_size, **kwargs)


def ape(x, pos_embed, num_prefix_tokens=0):
    """Each token plus its row; without rows for prefix tokens, these get nothing."""
    num_rows = pos_embed.shape[1]
    skipped = x.shape[1] - num_rows
    assert skipped in (0, num_prefix_tokens)
    out = []
    for tokens in x.unbind(0):
        tokens = list(tokens.unbind(0))
        out.append([
            token if n < skipped else token + pos_embed[0, n - skipped] for n, token in enumerate(tokens)])
    return stacked(out)


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
        centre = (n + 0.5) * ratio
        row = {m: kernel((m + 0.5 - centre) / stretch) for m in range(old)}
        total = sum(row.values())  # samples beyond the border are left out
        weights.append({m: w / total for m, w in row.items() if w})
    return weights


def resampled(pos_embed, old_size, new_size, num_prefix_rows=0):
    """A table for another grid: rows of prefix tokens as they are, the others resampled along y and along x."""
    rows = list(pos_embed[0].unbind(0))
    prefix, patches = rows[:num_prefix_rows], rows[num_prefix_rows:]
    weights_y, weights_x = bicubic_weights(old_size[0], new_size[0]), bicubic_weights(old_size[1], new_size[1])
    new = []
    for y in range(new_size[0]):
        for x in range(new_size[1]):
            new.append(sum(
                wy * wx * patches[j * old_size[1] + i]
                for j, wy in weights_y[y].items() for i, wx in weights_x[x].items()))
    return stacked([prefix + new])
