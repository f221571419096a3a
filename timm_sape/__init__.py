"""Position encodings for timm's Vision Transformers.

`import timm_sape` registers the models: `timm.create_model('vit_small_sape2_k')`.
"""
from . import functional
from .encodings import (
    FixedEncoding,
    PositionEncoding,
    ReferenceGridEncoding,
    create_encoding,
    list_encodings,
    register_encoding,
)
from .grid import Grid
from .vit_pos_enc import VisionTransformerPosEnc

__version__ = '0.1.0.dev0'

__all__ = [
    'FixedEncoding',
    'Grid',
    'PositionEncoding',
    'ReferenceGridEncoding',
    'VisionTransformerPosEnc',
    'create_encoding',
    'functional',
    'list_encodings',
    'register_encoding',
]
