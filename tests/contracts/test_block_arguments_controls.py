"""Models whose blocks forget an argument, or apply it in the wrong place."""
import pytest
import torch
import torch.nn as nn

from contract_tools import Controls
from test_block_arguments import contracts
from timm_sape import PositionEncoding, ops, vit_pos_enc
from timm_sape.attention import PosEncAttention, PosEncBlock
from timm_sape.position import LayerEncodings

controls = Controls(contracts)


@controls.broken_model('qk_norm', 'logits with larger q and k: differs')
def forgets_query_norm(model):
    model.blocks[0].attn.q_norm = nn.Identity()


@controls.broken_code('qk_norm', 'attention: differs')
def biases_before_norm(patch):
    class Attention(PosEncAttention):
        def forward(self, x, attn_mask, is_causal, position):
            qkv = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
            encoding, attend = self.encodings['sape2_k'], self.encodings['sape2_k'].attend
            with pytest.MonkeyPatch.context() as within:
                within.setattr(
                    encoding, 'attend', lambda q, k, *args, **kwargs: attend(qkv[0], qkv[1], *args, **kwargs),
                    raising=False)
                return super().forward(x, position=position)

    patch.setattr(vit_pos_enc, 'PosEncAttention', Attention)


@controls.broken_model('scale_attn_norm', 'mean of the normed output: differs')
def skips_attention_norm(model):
    for block in model.blocks:
        block.attn.norm.forward = lambda x: x


@controls.broken_model('position_dropout', 'tokens after position dropout: differs')
def spares_first_token(model):
    rate = model.pos_drop.p
    model.pos_drop = nn.Identity()
    model.pos_drop.forward = lambda x: torch.cat(
        [x[:, :1], nn.functional.dropout(x[:, 1:], rate, training=model.training)], dim=1)


@controls.broken_encoding('attention_dropout', 'attention after attention dropout: differs')
class ValuesWithoutAttention(PositionEncoding):
    def values(self, attn, grid):
        return attn.new_ones(attn.shape[2], 1)


@controls.broken_model('projection_dropout', 'features after projection dropout: differs')
def projects_without_dropout(model):
    model.blocks[0].attn.proj_drop = nn.Identity()


@controls.broken_model('drop_path', 'last block after drop path: differs')
def keeps_path(model):
    model.blocks[1].drop_path2 = nn.Identity()


@controls.broken_code('layer_scale', 'no gradient for .*ls1.gamma')
def forgets_layer_scale(patch):
    def forward(self, x, attn_mask=None, is_causal=False, position=None):
        x = x + self.attn(self.norm1(x), attn_mask, is_causal, position)
        return x + self.ls2(self.mlp(self.norm2(x)))

    patch.setattr(PosEncBlock, 'forward', forward)


@controls.broken_code('attn_mask', 'attention: differs')
def bias_replaces_mask(patch):
    merge_masks = ops.merge_masks

    def broken(bias, *args):
        return merge_masks(bias, *args) if bias is None else bias

    patch.setattr(ops, 'merge_masks', broken)
    patch.setattr(ops.sape2, 'merge_masks', broken)


@controls.broken_code('attn_mask', 'attention: differs', pos_enc='nope')
def causal_replaces_mask(patch):
    whole = ops.merge_masks

    def merge_masks(bias, attn_mask, is_causal, *args):
        return whole(bias, None if is_causal else attn_mask, is_causal, *args)

    patch.setattr(ops, 'merge_masks', merge_masks)


@controls.broken_code('empty_rows', 'fused or not, .*: differs by nan', pos_enc='irpe_qkv')
def leaves_empty_rows(patch):
    patch.setattr(ops, 'open_empty_rows', lambda mask: (mask, torch.zeros((), dtype=torch.bool)))


@controls.broken_code('empty_rows', 'fused or not', pos_enc='lookhere')
def looks_for_empty_rows_before_the_bias(patch):
    attend, open_empty_rows = LayerEncodings._attend, ops.open_empty_rows

    def too_early(self, *args, attn_mask, **kwargs):
        if attn_mask is None:
            return attend(self, *args, attn_mask=None, **kwargs)
        mask, is_empty = open_empty_rows(attn_mask)
        return attend(self, *args, attn_mask=mask, **kwargs).masked_fill(is_empty, 0)

    patch.setattr(LayerEncodings, '_attend', too_early)
    patch.setattr(ops, 'open_empty_rows', lambda mask: (mask, torch.zeros((), dtype=torch.bool)))


test_contract_rejects = controls.test()
