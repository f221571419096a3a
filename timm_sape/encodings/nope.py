"""No position encoding: the model sees its patches as a set."""
from .base import PositionEncoding
from .registry import register_encoding


@register_encoding('nope')
class NoPositionEncoding(PositionEncoding):
    """Nothing at all; the baseline that tells how much position matters."""
    relative = True
    adds = 'none'
    resolution = 'nothing to adapt'
    gate_init = None
