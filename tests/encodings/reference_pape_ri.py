"""PaPE-RI in float64 loops (Øhrstrøm et al., 'Parabolic Position Encoding', 2026): -a_i s^2 |p_i - p_j|^2."""
from loops import content_bias, rescaled
from reference_pape import softplus


def bias(x, w_a, scale, grid_size, *, ref_grid_size=None, **where):
    """`[B, h, N, N]` from the tokens x. With `ref_grid_size`, places are those in the trained grid."""
    ref_height, ref_width = ref_grid_size or grid_size
    to_y, to_x = rescaled(grid_size[0], ref_height), rescaled(grid_size[1], ref_width)

    def pair(image, h, i, j, place_i, place_j):
        (yi, xi), (yj, xj) = ((to_y(y), to_x(x)) for y, x in (place_i, place_j))
        return -softplus(w_a[h] @ x[image, i]) * scale[h] ** 2 * ((yi - yj) ** 2 + (xi - xj) ** 2)

    return content_bias(pair, x.shape[0], len(scale), grid_size, **where)
