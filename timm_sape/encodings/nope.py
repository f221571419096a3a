"""No position encoding: the model sees its patches as a set.

The baseline that shows how much position matters.
"""
from .base import PositionEncoding
from .registry import register_encoding


@register_encoding('nope')
class NoPositionEncoding(PositionEncoding):
    """No position at all."""
    relative = True
    sees_mirror = False
    supplements_ape = False
    adds = 'none'
    on_other_grids = 'nothing to adapt'
    gate_init = None
