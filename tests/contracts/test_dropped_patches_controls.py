"""Encodings and models that lose track of which patches were kept."""
import torch

from contract_tools import Controls
from test_dropped_patches import contracts
from timm_sape import Grid, PositionEncoding, vit_pos_enc

controls = Controls(contracts)


@controls.broken_encoding('patch_dropout', 'all patches in random order: differs')
class IgnoresKeepIndices(PositionEncoding):
    def content_bias(self, q, k, grid):
        i = torch.arange(q.shape[2] - grid.num_prefix_tokens, dtype=torch.float32)
        return grid.pad_prefix(-(i[:, None] - i).abs())


@controls.broken_encoding('patch_dropout', 'does not broadcast to', ValueError)
class ExpectsAllPatches(PositionEncoding):
    def content_bias(self, q, k, grid):
        position = grid.coordinates(dtype=torch.float32)
        return grid.pad_prefix(-torch.cdist(position, position))


@controls.broken_code('patch_dropout', 'all patches in random order: differs', pos_enc='rope2d')
def rotates_by_order(patch):
    def keep_rows(self, table):
        return table if self.keep_indices is None else table[..., :self.keep_indices.shape[1], :]

    patch.setattr(Grid, 'keep_rows', keep_rows)


@controls.broken_code('keep_indices', 'features of kept patches: differs', pos_enc='ape')
def keeps_the_next_patch(patch):
    keep = vit_pos_enc.keep_patches

    def keep_patches(patch_drop, x, grid, keep_indices):
        return keep(patch_drop, x, grid, keep_indices if keep_indices is None else keep_indices.roll(1, 1))

    patch.setattr(vit_pos_enc, 'keep_patches', keep_patches)


@controls.broken_code('no_patch_left', r'\[2, 6, 32\]', pos_enc='ape')
def keeps_one_patch(patch):
    keep = vit_pos_enc.keep_patches

    def keep_patches(patch_drop, x, grid, keep_indices):
        if keep_indices is not None and keep_indices.shape[1] == 0:
            keep_indices = keep_indices.new_zeros(len(x), 1)
        return keep(patch_drop, x, grid, keep_indices)

    patch.setattr(vit_pos_enc, 'keep_patches', keep_patches)


if torch.__version__ >= (2, 12):  # torch 2.11 has this gradient
    @controls.broken_code('no_patch_left', 'no gradient for .*rpb.table', pos_enc='rpb')
    def fused_without_tokens(patch):
        patch.setattr('timm_sape.ops.attention.is_empty', lambda x: False)


@controls.broken_code('patch_dropout_mask', 'mask .* under patch dropout: differs', pos_enc='ape')
def mask_stays(patch):
    patch.setattr(Grid, 'keep_pairs', lambda self, logits: logits)


test_contract_rejects = controls.test()
