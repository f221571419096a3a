"""Computations behind the encodings. They know tensors and grids, but no encoding and no model."""
from .attention import attend, merge_masks, probabilities
from .backend import choose_backend
from .codes import recomputed_axis_codes
from .contextual import axis_codes, contextual_bias, no_autocast, pairwise_distance, upcast
from .contextual_op import recomputed_contextual_bias
from .distances import distance_attention, distance_bias

__all__ = [
    'attend',
    'axis_codes',
    'choose_backend',
    'contextual_bias',
    'distance_attention',
    'distance_bias',
    'merge_masks',
    'no_autocast',
    'pairwise_distance',
    'probabilities',
    'recomputed_axis_codes',
    'recomputed_contextual_bias',
    'upcast',
]
