"""Cayley-STRING in float64 loops (Schenck et al., 'Learning the RoPEs: Better 2D and 3D Position Encodings with
STRING', ICML 2025).

In the paper's own form, with the basis on both sides of the rotation: a patch is multiplied by P R(y, x) P^T, and R is
that of RoPE-Mixed. `entries` are those of S above the diagonal, `[h, d*(d-1)/2]`.
"""
import torch

import reference_rope2d_mixed
from loops import skew, stacked, vectors


def rotate(x, grid_size, *, entries, freqs, ref_grid_size=None, gate=1, **where):
    bases = []
    for own in entries.unbind(0):
        s = skew(own, x.shape[-1])
        one = torch.eye(len(s), dtype=s.dtype)
        bases.append((one - s) @ torch.linalg.inv(one + s))
    x = into(x, [basis.T for basis in bases])
    x = reference_rope2d_mixed.rotate(x, grid_size, freqs=freqs, ref_grid_size=ref_grid_size, gate=gate, **where)
    return into(x, bases)


def into(x, bases):
    """Each token of head h multiplied by `bases[h]`."""
    return stacked([
        [[torch.stack([row @ token for row in basis]) for token in tokens] for basis, tokens in zip(bases, heads)]
        for heads in vectors(x)])
