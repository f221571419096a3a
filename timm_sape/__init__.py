"""Position encodings for timm's Vision Transformers.

`import timm_sape` registers the models: `timm.create_model('vit_small_sape2_k')`.
"""
from . import functional, hub
from .encodings import (
    BlockRotaryEncoding,
    CoordinateEncoding,
    FixedEncoding,
    FixedRotaryEncoding,
    FrequencyEncoding,
    OffsetBiasEncoding,
    PositionEncoding,
    ReferenceGridEncoding,
    ResizedEncoding,
    RotaryEncoding,
    create_encoding,
    encoding_keywords,
    get_encoding,
    list_encodings,
    register_encoding,
)
from .grafting import graft
from .grid import Grid
from .naflexvit_pos_enc import NaFlexVitPosEnc
from .version import __version__ as __version__
from .vit_pos_enc import VisionTransformerPosEnc

__all__ = [
    'BlockRotaryEncoding',
    'CoordinateEncoding',
    'FixedEncoding',
    'FixedRotaryEncoding',
    'FrequencyEncoding',
    'Grid',
    'NaFlexVitPosEnc',
    'OffsetBiasEncoding',
    'PositionEncoding',
    'ReferenceGridEncoding',
    'ResizedEncoding',
    'RotaryEncoding',
    'VisionTransformerPosEnc',
    'create_encoding',
    'encoding_keywords',
    'functional',
    'get_encoding',
    'graft',
    'hub',
    'list_encodings',
    'register_encoding',
]
