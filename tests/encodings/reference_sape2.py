"""SaPE2 in float64 loops (Chen et al., 'A 2D Semantic-Aware Position Encoding for Vision Transformers', 2025).

Eq. 9 to 16, with the scales of Eq. 9 and 16 as arguments, because Appendix D has others. Prefix tokens, dropped
patches, other grids than the trained one and the mode 'qk' are ours.
"""
import math

import torch

from loops import attention, content_bias, look_up, places, sigmoid, vectors


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
        at = {yx: n for n, yx in enumerate(place)}
        codes_x.append([])
        codes_y.append([])
        for qs, ks in zip(q_heads, k_heads):
            qs, ks = qs[num_prefix_tokens:], ks[num_prefix_tokens:]
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


def sape2_bias(
        q, k, table_x, table_y, grid_size, *, mode='k', gate_scale=None, num_prefix_tokens=0, ref_grid_size=None,
        keep_indices=None):
    """b^x + b^y (Eq. 15), 0 wherever a prefix token takes part."""
    gate_scale = 1 / math.sqrt(q.shape[-1]) if gate_scale is None else gate_scale
    p, where = num_prefix_tokens, {'num_prefix_tokens': num_prefix_tokens, 'keep_indices': keep_indices}
    axes = sape2_codes(
        q, k, table_x, table_y, grid_size, mode=mode, gate_scale=gate_scale, ref_grid_size=ref_grid_size, **where)

    def pair(b, h, i, n, place_i, place_n):
        return sum(distance(codes[b][h][i - p], codes[b][h][n - p]) for codes in axes)

    return content_bias(pair, q.shape[0], q.shape[1], grid_size, **where)


def sape2_attention(
        q, k, v, table_x, table_y, grid_size, *, bias_scale=1.0, scale=None, attn_mask=None, is_causal=False, **kwargs):
    """Eq. 16. `bias_scale` is a number or has one value per head."""
    bias = sape2_bias(q, k, table_x, table_y, grid_size, **kwargs)
    if isinstance(bias_scale, torch.Tensor) and bias_scale.ndim:
        bias = torch.stack([bias_scale[h] * bias[:, h] for h in range(q.shape[1])], dim=1)
    else:
        bias = bias_scale * bias
    return attention(q, k, v, scale=scale, bias=bias, attn_mask=attn_mask, is_causal=is_causal)
