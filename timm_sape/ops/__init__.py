"""Computations behind the encodings. They know tensors and grids, but no encoding and no model."""
from .attention import attend, merge_masks, probabilities
from .contextual import axis_codes, contextual_bias, pairwise_distance, upcast

__all__ = ['attend', 'axis_codes', 'contextual_bias', 'merge_masks', 'pairwise_distance', 'probabilities', 'upcast']
