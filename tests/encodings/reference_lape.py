"""LaPE (Yu et al. 2023, arXiv:2212.05262): p_l = LN_l(p_(l-1)), added to the input of the attention of layer l."""
import torch

from loops import resampled, stacked


def layer_norm(row, weight, bias, eps=1e-6):
    mean = sum(row.unbind(0)) / len(row)
    variance = sum((a - mean) ** 2 for a in row.unbind(0)) / len(row)
    return weight * (row - mean) / torch.sqrt(variance + eps) + bias


def lape(table, weights, biases, trained_size, grid_size, *, num_prefix_tokens=0, keep_indices=None):
    """p_1 ... p_L with p_l = LN_l(p_(l-1)), where p_0 is the table on this grid.

    Args:
        table: `[1, P+H*W, D]` on the trained grid.
        weights: Of the L norms, each `[D]`.
        biases: Of the L norms, each `[D]`.
        trained_size: (H, W) of the trained grid.
        grid_size: (H, W) of this one.
        num_prefix_tokens: P.
        keep_indices: Patches that are there, if some were dropped, `[B, K]`.

    Returns:
        `[L, N, D]`, or `[L, B, N, D]` if patches were dropped.
    """
    if grid_size != trained_size:
        table = resampled(table, trained_size, grid_size, num_prefix_tokens)
    rows, layers = list(table[0].unbind(0)), []
    for weight, bias in zip(weights, biases):
        rows = [layer_norm(row, weight, bias) for row in rows]
        layers.append(rows)
    if keep_indices is not None:
        layers = [
            [rows[:num_prefix_tokens] + [rows[num_prefix_tokens + n] for n in kept] for kept in keep_indices.tolist()]
            for rows in layers]
    return stacked(layers)
