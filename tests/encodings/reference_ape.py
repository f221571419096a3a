"""The learned table of ViT (Dosovitskiy et al. 2021, arXiv:2010.11929), Eq. 1: z_0 = [x_class; x_1 E; ...] + E_pos."""
from loops import stacked


def ape(tokens, pos_embed, grid_size, *, num_prefix_tokens=0, keep_indices=None):
    """Each token plus its row of a `[1, P+H*W, D]` table. Without rows for prefix tokens, these get nothing."""
    height, width = grid_size
    num_prefix_rows = pos_embed.shape[1] - height * width
    assert num_prefix_rows in (0, num_prefix_tokens)
    rows, images = pos_embed[0], []
    for b, image in enumerate(tokens.unbind(0)):
        kept = range(height * width) if keep_indices is None else keep_indices[b].tolist()
        out = []
        for n, token in enumerate(image.unbind(0)):
            if n >= num_prefix_tokens:
                token = token + rows[num_prefix_rows + kept[n - num_prefix_tokens]]
            elif num_prefix_rows:
                token = token + rows[n]
            out.append(token)
        images.append(out)
    return stacked(images)
