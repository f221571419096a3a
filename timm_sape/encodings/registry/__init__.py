"""The names of encodings, and what is made of them.

    names.py            `register_encoding`, and the class and the instance behind a name
    class_checks.py     what is checked when a class is registered
    instance_checks.py  what is checked when an encoding is built
    parsing.py          `pos_enc='ape+auto_rope2d'` and `pos_enc_kwargs`
"""
from .class_checks import is_built_in
from .names import (
    create_encoding,
    encoding_keywords,
    encoding_title,
    get_encoding,
    is_auto,
    is_per_layer,
    list_encodings,
    register_encoding,
)
from .parsing import merge_keywords, parse_pos_enc, plain_keywords

__all__ = [
    'create_encoding',
    'encoding_keywords',
    'encoding_title',
    'get_encoding',
    'is_auto',
    'is_built_in',
    'is_per_layer',
    'list_encodings',
    'merge_keywords',
    'parse_pos_enc',
    'plain_keywords',
    'register_encoding',
]
