"""See and measure what position does. Functions return data; pictures are drawn by `figures`."""
from .maps import LayerMaps, PositionMaps, attention_distance, position_maps, similarity
from .probe import ProbeRow, awaken_encodings, probe
from .pshap import PositionShap, attributions, position_shap, shuffle_patches
from .separation import Separation, separation

__all__ = [
    'LayerMaps',
    'PositionMaps',
    'PositionShap',
    'ProbeRow',
    'Separation',
    'attention_distance',
    'attributions',
    'awaken_encodings',
    'position_maps',
    'position_shap',
    'probe',
    'separation',
    'shuffle_patches',
    'similarity',
]
