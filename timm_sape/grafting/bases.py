"""Which models of timm can be grafted, and what position they have by themselves."""
import re
from typing import Any, Dict, List, Type

import torch.nn as nn
from timm.layers import (
    AttentionRope,
    Mlp,
    RelPosMlp,
    RotaryEmbeddingCat,
    RotaryEmbeddingMixed,
    to_2tuple,
)
from timm.models import get_model_args
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaBlock
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos

from ..attention import unknown_blocks
from ..conversion import GridSize
from ..naflexvit_pos_enc import NaFlexVitPosEnc
from ..vit_pos_enc import VisionTransformerPosEnc

Parts = Dict[str, Dict[str, Any]]  # keywords of each encoding by its name


class VisionTransformerDistilledPosEnc(VisionTransformerPosEnc, VisionTransformerDistilled):
    """timm's distilled DeiT with any set of position encodings. Only grafting creates it."""

    def prefix_tokens(self) -> List[nn.Parameter]:
        return [self.cls_token, self.dist_token]


OURS: Dict[Type[nn.Module], Type[nn.Module]] = {
    NaFlexVit: NaFlexVitPosEnc,
    VisionTransformer: VisionTransformerPosEnc,
    VisionTransformerDistilled: VisionTransformerDistilledPosEnc,
}
# Naver's rotary ViTs: of timm's Eva class, they become a plain ViT, unless use_naflex=True is given.
NAVER = re.compile(r'vit_\w+_patch16_rope(_mixed)?(_ape)?_224')


def check_can_be_grafted(model: nn.Module) -> None:
    """
    Raises:
        ValueError: If the model cannot be grafted, with the reason.
    """
    what = f'{type(model).__name__} cannot be grafted'
    if not isinstance(model, (VisionTransformer, VisionTransformerRelPos, NaFlexVit, Eva)):
        raise ValueError(
            f"{what}: it is none of timm's VisionTransformer, NaFlexVit and Eva, nor a ViT of relative position. "
            "Choose one of these, such as 'vit_small_patch16_224'.")
    if isinstance(model, (VisionTransformer, NaFlexVit)) or isinstance(model, Eva) and not is_naver(model):
        kinds = unknown_blocks(model.blocks) or [type(model).__name__] * (type(model) not in {*OURS, Eva})
        attn = getattr(model.blocks[0], 'attn', None)
        if kinds or attn is None:
            kinds = kinds or [type(model.blocks[0]).__name__]
            raise ValueError(
                f'{what}: timm_sape does not support {" and ".join(kinds)}. Choose a model with plain blocks, such as '
                "'vit_small_patch16_224'.")
        if attn.num_heads * attn.head_dim != model.embed_dim:
            raise ValueError(
                f'{what}: its {attn.num_heads} heads have {attn.num_heads * attn.head_dim} channels, and its tokens '
                f'{model.embed_dim}. Choose a model where these are equal.')
    elif isinstance(model, VisionTransformerRelPos):
        mlps = [model.shared_rel_pos, *(block.attn.rel_pos for block in model.blocks)]
        if any(mlp is not None and not (isinstance(mlp, RelPosMlp) and mlp.mode == 'cr') for mlp in mlps):
            raise ValueError(
                f"{what}: of timm's relative positions only rel_pos_type='mlp' can be converted (to 'cpb'). Choose a "
                'model that has it.')


def is_naver(model: Eva) -> bool:
    """Whether it is built like Naver's rotary ViTs, whatever its name, so that it can become a plain one."""
    rope, attn, mlp = model.rope, model.blocks[0].attn, model.blocks[0].mlp
    is_axial = type(rope) is RotaryEmbeddingCat and rope.temperature == 100 and rope.ref_feat_shape is None and (
        rope.grid_offset == 0 and not rope.in_pixels)
    is_rotary = (is_axial or type(rope) is RotaryEmbeddingMixed) and rope.grid_indexing == 'xy' and not rope.aug_active
    is_plain = {type(block) for block in model.blocks} == {EvaBlock} and isinstance(attn, AttentionRope) and (
        type(mlp) is Mlp and not attn.rotate_half and attn.qkv is not None and model.reg_token is None) and (
        attn.gate is None and (model.attn_pool is None or model.attn_pool.num_heads == attn.num_heads))
    norms = (model.norm_pre, mlp.norm, attn.norm, attn.q_norm, attn.k_norm) if is_plain else ()
    return is_rotary and is_plain and all(isinstance(norm, nn.Identity) for norm in norms)


def own_encodings(model: nn.Module) -> Parts:
    """The position that a timm model has by itself, as far as it is an encoding of ours."""
    if isinstance(model, NaFlexVit):
        return {}
    own: Parts = {} if getattr(model, 'pos_embed', None) is None else {'ape': {}}
    if isinstance(model, Eva):
        own['rope2d_mixed' if model.rope_mixed else 'rope2d'] = {}
    elif isinstance(model, VisionTransformerRelPos):
        mlp = (model.shared_rel_pos or model.blocks[0].attn.rel_pos).mlp
        own['cpb'] = {'mode': 'cr', 'hidden': mlp.fc1.out_features, 'drop': mlp.drop1.p}
    return own


def position_of_base(model: nn.Module) -> str:
    """What a NaFlexVit has by itself and goes on computing by timm's modules, in words."""
    table = {'none': [], 'learned': ['learned table'], 'factorized': ['learned tables of rows and columns']}
    rotation = [] if model.rope is None else [type(model.rope).__name__]
    return ' + '.join([*table[model.embeds.pos_embed_type], *rotation]) or 'none'


def image_grid(model: nn.Module) -> GridSize:
    """(H, W) of the images that a model of timm is for."""
    if not isinstance(model, NaFlexVit):
        return tuple(model.patch_embed.grid_size)
    # its table may have any size
    size = to_2tuple(get_model_args(model).get('img_size') or model.pretrained_cfg['input_size'][-2:])
    return tuple(side // patch for side, patch in zip(size, model.embeds.patch_size))
