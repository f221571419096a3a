"""PaPE in float64 loops, parabola by parabola (Øhrstrøm et al., 'Parabolic Position Encoding', 2026).

Its definition of the bias, sum over m of -a_im (u_im - u_jm)^2 + b_im (u_im - u_jm), which the package multiplies out.
"""
import torch

from loops import content_bias, rescaled


def softplus(a):
    return a + torch.log1p(torch.exp(-a)) if a > 0 else torch.log1p(torch.exp(a))


def bias(x, w_p, w_a, w_b, grid_size, *, ref_grid_size=None, **where):
    """`[B, h, N, N]` from the tokens x. With `ref_grid_size`, places are those in the trained grid."""
    num_heads, num_parabolas, _ = w_p.shape
    tokens = [image.unbind(0) for image in x.unbind(0)]
    ref_height, ref_width = ref_grid_size or grid_size
    to_y, to_x = rescaled(grid_size[0], ref_height), rescaled(grid_size[1], ref_width)

    a = [[[
        [softplus(w_a[h, m] @ token) for m in range(num_parabolas)] for token in image] for image in tokens]
        for h in range(num_heads)]
    b = [[[[w_b[h, m] @ token for m in range(num_parabolas)] for token in image] for image in tokens]
         for h in range(num_heads)]

    def pair(image, h, i, j, place_i, place_j):
        (yi, xi), (yj, xj) = ((to_y(y), to_x(x)) for y, x in (place_i, place_j))
        total = 0
        for m in range(num_parabolas):
            u = (w_p[h, m, 0] * yi + w_p[h, m, 1] * xi) - (w_p[h, m, 0] * yj + w_p[h, m, 1] * xj)
            total = total - a[h][image][i][m] * u ** 2 + b[h][image][i][m] * u
        return total

    return content_bias(pair, x.shape[0], num_heads, grid_size, **where)
