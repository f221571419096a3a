"""How far a model moves when an image does: shifts, mirrors, permutations, sizes.

Where theory says what happens, that stands beside the figure. The theorems are for float64 and eval mode. That
something does not change holds always; that it changes, wherever chance has not arranged it otherwise: an encoding
whose parameters are all zero, or a picture that is its own mirror image, shows nothing.

- Without position (`nope`) a Vision Transformer does not know the order of its patches. Any other encoding shows.
- With relative encodings alone, the logits of the first attention layer between two patches do not change when both are
  shifted by whole patches: there the tokens are still what they were. (Beyond the first layer they are not, since other
  patches have come into the image.) With an encoding on the tokens that names places they change.
- Distances without a direction (`alibi2d`) do not change in a mirror. Rotations and slopes with a direction do.
- The x bias of SaPE2 does not change when rows of patches change places, as it counts within rows; the y bias does.
  With columns it is the other way round, and a shift or a mirror is that.
"""
import math
from copy import deepcopy
from typing import Callable, Dict, List, NamedTuple, Tuple

import torch
import torch.nn as nn

from .. import ops
from ..attention import PosEncAttention
from ..encodings import get_encoding
from ..encodings.sape2 import SemanticAwarePositionEncoding
from ..vit_pos_enc import VisionTransformerPosEnc
from .inputs import patch_size_of
from .maps import KNOWN, logits_of, record_calls, watched_module
from .pshap import shuffle_patches

__all__ = ['ProbeRow', 'awaken_encodings', 'probe']

EXACT = 1e-9  # a relative change below it is rounding of float64
VISIBLE = 1e-6  # one above it is none


class ProbeRow(NamedTuple):
    """One figure."""
    probe: str
    what: str
    change: float
    """|after - before| / |before|, after the patches have been put back in their order."""
    expected: str
    """'0', 'changes', or empty where there is no theorem."""

    @property
    def verdict(self) -> str:
        """'pass' or 'fail', empty where there is no theorem."""
        if not self.expected:
            return ''
        passed = self.change <= EXACT if self.expected == '0' else self.change > VISIBLE
        return 'pass' if passed else 'fail'


@torch.no_grad()
def awaken_encodings(model: nn.Module, std: float = 0.1, seed: int = 0) -> None:
    """Add noise to every parameter of the encodings: those that start at zero do nothing until they are trained.

    Args:
        model: One of ours.
        std: Standard deviation of the noise.
        seed: Of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    for encoding in model.position_encodings().values():
        for parameter in encoding.parameters():
            parameter += std * torch.randn(parameter.shape, generator=generator).to(parameter)


@torch.no_grad()
def probe(model: nn.Module, images: torch.Tensor, seed: int = 0) -> List[ProbeRow]:
    """Move images in a number of ways and measure how far the model's results move.

    Probed are a copy of the model in float64 and eval mode, its class logits, the features of its patches, and, for
    models that `position_maps` reads, the logits between patches in the first attention layer; of SaPE2 also both parts
    of its bias there. Features and logits of attention are put back into the patches' own order before they are
    compared, and after a shift only patches count that have not come in from the other side.

    Args:
        model: One of ours, or any timm ViT whose patches do not overlap.
        images: `[B, C, height, width]`, of the size that the model was made for.
        seed: Of the permutations.

    Returns:
        A row for each probe and each of those; none for a probe that moves nothing, as a
        mirror does on one column, or on an image of one colour.

    Raises:
        ValueError: If the model has no patches that could be exchanged, or the images are not of its size.
    """
    patch_size = patch_size_of(model)
    model, images = deepcopy(model).double().eval(), images.double()
    height, width = (size // patch for size, patch in zip(images.shape[2:], patch_size))
    places = torch.arange(height * width).view(height, width)
    generator = torch.Generator().manual_seed(seed)
    every, inside = places > -1, places % width > 0
    moves: Dict[str, Tuple[torch.Tensor, torch.Tensor]] = {  # which patch comes to each place, and what counts
        'patches shifted by one': (places.roll(1, 1), inside),
        'patches mirrored': (places.flip(1), every),
        'rows exchanged': (places[_another_order(height, generator)], every),
        'patches permuted': (_another_order(height * width, generator).view(height, width), every),
    }
    moves = {name: move for name, move in moves.items() if not torch.equal(move[0], places)}
    before = _measure(model, images)
    rows = []
    for name, (order, counted) in moves.items():
        order, counted = order.flatten(), counted.flatten()
        moved_images = shuffle_patches(images, patch_size, order.expand(len(images), -1))
        if torch.equal(moved_images, images):
            continue
        after = _measure(model, moved_images)
        for what, value in before.items():
            moved, found = value, after[what]
            if what == 'features':
                moved, found = value[:, order][:, counted], found[:, counted]
            elif what != 'class logits':
                moved = value[..., order, :][..., order][..., counted, :][..., counted]
                found = found[..., counted, :][..., counted]
            rows.append(ProbeRow(name, what, _change(moved, found), _expected(model, name, what)))
    pixels: Dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        'image shifted by half a patch': lambda x: x.roll(patch_size[1] // 2, -1),
        'image mirrored': lambda x: x.flip(-1),
    }
    logits = before['class logits']
    rows += [ProbeRow(name, 'class logits', _change(logits, model(move(images))), '') for name, move in pixels.items()]
    if hasattr(model, 'set_input_size'):
        larger = nn.functional.interpolate(images, scale_factor=2, mode='bilinear')
        model.set_input_size(tuple(larger.shape[2:]))
        rows.append(ProbeRow('image twice as large', 'class logits', _change(logits, model(larger)), ''))
    return rows


def _another_order(n: int, generator: torch.Generator) -> torch.Tensor:
    """A permutation that moves something, if there is one."""
    order = torch.randperm(n, generator=generator)
    return order.roll(1) if torch.equal(order, torch.arange(n)) else order


def _measure(model: nn.Module, images: torch.Tensor) -> Dict[str, torch.Tensor]:
    attn = getattr(model.blocks[0], 'attn', None) if hasattr(model, 'blocks') else None
    with record_calls([watched_module(attn)] if isinstance(attn, KNOWN) else []) as calls:
        features = model.forward_features(images)
    found = {'class logits': model.forward_head(features)}
    num_patches = math.prod(size // patch for size, patch in zip(images.shape[2:], patch_size_of(model)))
    p = getattr(model, 'num_prefix_tokens', 0)
    if features.ndim == 3 and features.shape[1] == p + num_patches:  # [B, N, D]
        found['features'] = features[:, p:]
    for args, kwargs in calls.values():
        content, position = logits_of(attn, args, kwargs)
        found['first layer, attention logits'] = (content + position)[..., p:, p:]
        for encoding in attn.encodings.values() if isinstance(attn, PosEncAttention) else ():
            if isinstance(encoding, SemanticAwarePositionEncoding):
                q, k, _, _, where = args
                for axis, codes in zip('xy', encoding.codes(q, k, where.grid)):
                    found[f'first layer, {axis} bias'] = ops.pairwise_distance(codes)  # [B, h, H*W, H*W]
    return found


def _change(before: torch.Tensor, after: torch.Tensor) -> float:
    """|after - before| / |before|; infinite if logits of -inf, which mask out, have moved."""
    masked = before.isinf()
    if not torch.equal(masked, after.isinf()):
        return math.inf
    before, after = before.masked_fill(masked, 0), after.masked_fill(masked, 0)
    return ((after - before).norm() / before.norm().clamp(min=torch.finfo(before.dtype).tiny)).item()


def _expected(model: nn.Module, move: str, what: str) -> str:
    """What theory says about one of the moves of whole patches."""
    if not isinstance(model, VisionTransformerPosEnc):
        return ''
    names = [name.removeprefix('auto_') for name in model.pos_enc.split('+')]
    encodings = [get_encoding(name) for name in names]
    if names == ['nope']:
        return '0'
    on_tokens = any(
        cls.overrides('embed') and not cls.per_layer or cls.overrides('layer_embed') for cls in encodings)
    if what.endswith('bias'):
        if move == 'patches permuted' or on_tokens:
            return ''
        return '0' if what.endswith('x bias') is (move == 'rows exchanged') else 'changes'
    if move == 'patches shifted by one' and what == 'first layer, attention logits':
        if all(cls.relative for cls in encodings):
            return '0'
        return 'changes' if on_tokens else ''
    if move == 'patches mirrored' and what != 'first layer, attention logits':
        if all(cls.sees_mirror is False for cls in encodings):
            return '0'
        return 'changes' if any(cls.sees_mirror for cls in encodings) else ''
    if move == 'patches permuted' and what == 'class logits':
        return 'changes'
    return ''
