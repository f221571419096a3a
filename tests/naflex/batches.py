"""What the NaFlexVit tests share: twins of plain models, and batches of patches with coordinates."""
import timm
import torch
from common import HEADS, PATCH, Maker

import timm_sape
from timm_sape.conversion import convert_to_naflex

GRID = 5, 6
# Four aspect ratios. GRID is there twice, and so is a grid whose tables are resampled.
SIZES = [(5, 6), (2, 8), (8, 2), (5, 6), (3, 4), (2, 8)]


class Twins(Maker):
    """Makes plain models; `naflex` makes a NaFlexVit of the same weights."""

    def __init__(self, pos_enc, dtype=torch.float64, **fixed):
        super().__init__(pos_enc, GRID, dynamic_img_size=True, reg_tokens=2, dtype=dtype, **fixed)

    def naflex(self, plain, name='test_naflexvit_pos_enc', **kwargs):
        keep = ('pos_enc', 'embed_dim', 'depth', 'num_heads', 'num_classes', 'global_pool', 'fc_norm', 'reg_tokens')
        model = timm.create_model(name, **{
            'pos_enc': plain.pos_enc, 'pos_enc_kwargs': plain.pos_enc_kwargs, 'img_size': self.img_size(),
            'patch_size': PATCH, 'embed_dim': 32, 'depth': 2, 'num_heads': HEADS, 'num_classes': 3,
            'global_pool': 'avg', 'fc_norm': False, **{k: v for k, v in self.fixed.items() if k in keep},
            'dtype': plain.cls_token.dtype, **kwargs})
        model.load_state_dict(convert_to_naflex(plain.state_dict(), model))
        return model.eval()


def pictures(sizes, dtype=torch.float64, seed=0):
    """One image for each (H, W), `[1, 3, H*8, W*8]`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 3, h * PATCH, w * PATCH, generator=generator).to(dtype) for h, w in sizes]


def batch(images, padding=0, permute=False, keep=None, seed=1):
    """A dict as timm's loader makes it.

    Args:
        images: Of any sizes, each `[1, 3, height, width]`.
        padding: Padded tokens beyond the longest image; what is in them must not matter.
        permute: Put tokens, padding included, in a random order.
        keep: Raster indices of the patches to keep, one tensor an image.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for i, image in enumerate(images):
        patches, (height, width) = timm.models.naflexvit.batch_patchify(image, (PATCH, PATCH))
        coord = timm_sape.Grid(height, width).coordinates()
        kept = torch.arange(height * width) if keep is None else keep[i]
        parts.append((patches[0, kept], coord[kept]))
    length = max(len(coord) for _, coord in parts) + padding
    found = {'patches': [], 'patch_coord': [], 'patch_valid': []}
    for patches, coord in parts:
        order = torch.randperm(length, generator=generator) if permute else torch.arange(length)
        missing = length - len(coord)
        found['patches'].append(torch.cat([patches, patches.new_full((missing, patches.shape[1]), 9.)])[order])
        found['patch_coord'].append(torch.cat([coord, coord.new_zeros(missing, 2)])[order])
        found['patch_valid'].append((torch.arange(length) < len(coord))[order])
    found = {name: torch.stack(tensors) for name, tensors in found.items()}
    if keep is not None:
        found['grid_size'] = torch.tensor([[s // PATCH for s in image.shape[-2:]] for image in images])
    return found
