"""One file per encoding; importing it registers it."""
from . import (
    ape,
    ape2d,
    cape,
    cope,
    fourier,
    irpe,
    nope,
    rope2d,
    rope2d_mixed,
    sape2,
    sape2sq,
    sincos1d,
    sincos2d,
)
from .base import (
    CoordinateEncoding,
    FixedEncoding,
    FixedRotaryEncoding,
    PositionEncoding,
    ReferenceGridEncoding,
    ResizedEncoding,
    RotaryEncoding,
)
from .registry import (
    create_encoding,
    encoding_keywords,
    get_encoding,
    is_auto,
    is_per_layer,
    list_encodings,
    parse_pos_enc,
    register_encoding,
)
