"""The generator of conditional encodings (Chu et al. 2023, arXiv:2102.10882): x + conv(x), depthwise, on the grid."""
from loops import places, stacked


def peg(tokens, weight, bias, grid_size, *, num_prefix_tokens=0, keep_indices=None):
    """x + conv(x) for patches, with a weight of `[D, 1, k, k]`, y before x. Where there is no patch there is zero."""
    radius = weight.shape[-1] // 2
    images = []
    for b, image in enumerate(tokens.unbind(0)):
        image, place = list(image.unbind(0)), places(b, grid_size, keep_indices)
        at = {yx: image[num_prefix_tokens + n] for n, yx in enumerate(place)}
        out = image[:num_prefix_tokens]
        for y, x in place:
            patch = at[y, x] + bias
            for dy in range(-radius, radius + 1):
                for dx in range(-radius, radius + 1):
                    if (y + dy, x + dx) in at:
                        patch = patch + weight[:, 0, radius + dy, radius + dx] * at[y + dy, x + dx]
            out.append(patch)
        images.append(out)
    return stacked(images)
