"""One file per encoding; importing it registers it."""
from . import ape, cope, nope, rope2d, rope2d_mixed, sape2
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
