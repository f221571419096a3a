"""Position encodings for timm's Vision Transformers.

`import timm_sape` registers the models: `timm.create_model('vit_small_sape2_k')`.
"""
from . import functional, vit_pos_enc
from .encodings import (
    PositionEncoding,
    ReferenceGridEncoding,
    create_encoding,
    list_encodings,
    register_encoding,
)
from .grid import Grid

__version__ = '0.1.0.dev0'

__all__ = [
    'Grid',
    'PositionEncoding',
    'ReferenceGridEncoding',
    'create_encoding',
    'functional',
    'list_encodings',
    'register_encoding',
    'vit_pos_enc',
]
