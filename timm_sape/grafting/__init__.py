"""Grafting: add an encoding to a pretrained timm ViT, so that the outputs do not change until it has learned something.

    model = timm_sape.graft('vit_small_patch16_224.augreg_in21k_ft_in1k', 'sape2_k', pretrained=True)

The ViT keeps its weights and its own position encoding (timm's table is `ape`). A grafted encoding is `auto_<name>`,
with a learned gate that starts at 0, so the model above is `ape+auto_sape2_k`. If an encoding contributes zero until it
is trained, its gate starts at 1, because with two zeros in a row neither gets a gradient.

Four kinds of models can be grafted:

    timm's VisionTransformer, and its distilled one      any `vit_*`, `deit*`, ... of these classes, as it is
    timm's NaFlexVit, and Eva (DINOv3, EVA-02, ...)      by timm's `use_naflex=True`; they keep their own position
    timm's rotary ViTs, `vit_*_patch16_rope*_224`        converted: their rotation becomes `rope2d` or `rope2d_mixed`
    the relative-position ViTs                           converted: their MLP becomes `cpb` with mode='cr'

The architecture of the result is `vit_graft`, which builds the base by timm's own entrypoint. So what timm saves of a
graft (in a folder, or in a repository on the Hub) is enough to build it again.

    bases.py        which models of timm can be grafted, and what position they have by themselves
    build_base.py   timm builds the base
    adopt.py        the base becomes a model of this package, with the encodings that are added
    vit_graft.py    the architecture `vit_graft`, and the entrypoints `vit_{size}_{encoding}_graft`
    graft_model.py  the function `graft`
"""
from .bases import VisionTransformerDistilledPosEnc
from .graft_model import graft
from .vit_graft import OUR_MODULES

__all__ = ['OUR_MODULES', 'VisionTransformerDistilledPosEnc', 'graft']
