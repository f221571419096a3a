"""Models whose features differ from one way to another, or whose pool or head is wrong."""
import torch
import torch.nn as nn
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import VisionTransformer

from contract_tools import Controls
from test_features_and_heads import contracts
from timm_sape import PositionEncoding
from timm_sape.vit_pos_enc import VisionTransformerPosEnc

controls = Controls(contracts)


@controls.broken_encoding('forward_features', 'one image of the batch: differs')
class MixesBatch(PositionEncoding):
    def content_bias(self, q, k, grid):
        p = grid.num_prefix_tokens
        bias = (q[:, :, p:] @ k[:, :, p:].transpose(-2, -1)).mean(0, keepdim=True)
        return nn.functional.pad(bias, (p, 0, p, 0))


@controls.broken_code('forward_features', 'head of the features: differs')
def normalises_in_the_head(patch):
    head = VisionTransformer.forward_head
    patch.setattr(VisionTransformerPosEnc, 'forward_head', lambda self, x: head(self, self.norm(x)))
    patch.setattr(VisionTransformerPosEnc, 'forward', lambda self, x: head(self, self.forward_features(x)))


@controls.broken_encoding('forward_intermediates', 'final features: differs')
class DrawsInForward(PositionEncoding):
    def position_bias(self, grid):
        return grid.pad_prefix(torch.rand(grid.num_patches, grid.num_patches))


@controls.broken_code('forward_intermediates', 'intermediates .*: differs')
def norms_always(patch):
    whole = VisionTransformerPosEnc.forward_intermediates

    def forward_intermediates(self, x, indices=None, **kwargs):
        return whole(self, x, indices, **{**kwargs, 'norm': indices is not None})

    patch.setattr(VisionTransformerPosEnc, 'forward_intermediates', forward_intermediates)


@controls.broken_code('features_only', 'no gradient for')
@controls.broken_code('prune_intermediate_layers', '3 blocks are left')
def prunes_nothing(patch):
    def prune(self, indices=1, prune_norm=False, prune_head=True):
        VisionTransformer.prune_intermediate_layers(self, 1, prune_norm, prune_head)
        return feature_take_indices(len(self.blocks), indices)[0]

    patch.setattr(VisionTransformerPosEnc, 'prune_intermediate_layers', prune)


@controls.broken_code('get_intermediate_layers', 'intermediate layers: differs')
def forgets_norm(patch):
    whole = VisionTransformer.get_intermediate_layers
    patch.setattr(
        VisionTransformerPosEnc, 'get_intermediate_layers',
        lambda self, x, n=1, norm=False, **kwargs: whole(self, x, n, **kwargs))


@controls.broken_code('reset_classifier', 'features after a new head: differs')
def resets_all(patch):
    def reset_classifier(self, *args):
        VisionTransformer.reset_classifier(self, *args)
        self.init_weights()

    patch.setattr(VisionTransformerPosEnc, 'reset_classifier', reset_classifier)


@controls.broken_code('pooling', "pooling 'avg': differs")
def pools_prefix(patch):
    def pool(self, x, pool_type=None):
        if self.global_pool == 'avg':
            return x.mean(1)
        return VisionTransformer.pool(self, x, pool_type)

    patch.setattr(VisionTransformerPosEnc, 'pool', pool)


test_contract_rejects = controls.test()
