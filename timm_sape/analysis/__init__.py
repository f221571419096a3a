"""Show and measure the effect of position in a model. Functions return data; `figures` draws it."""
from .maps import LayerMaps, PositionMaps, attention_distance, position_maps, similarity
from .probe import ProbeRow, probe, randomize_encodings
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
    'position_maps',
    'position_shap',
    'probe',
    'randomize_encodings',
    'separation',
    'shuffle_patches',
    'similarity',
]
