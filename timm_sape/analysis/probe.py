"""How much the results of a model change when an image is shifted, mirrored, permuted or resized."""
import math
from copy import deepcopy
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.nn as nn

from .. import ops
from ..attention import HostsEncodings
from ..encodings import get_encoding
from ..encodings.sape2 import SemanticAwarePositionEncoding
from ..host import PosEncModel
from ..loading import patch_size_of
from ..wrappers import unwrapped
from .maps import KNOWN, logits_of, record_calls, watched_module
from .pshap import check_pooled, shuffle_patches

__all__ = ['ProbeRow', 'probe', 'randomize_encodings']

VISIBLE = 1e-6  # relative changes up to this are rounding: of float64, or of float32 where timm resamples a table


class ProbeRow(NamedTuple):
    """One measured change."""
    probe: str
    """How the image was moved."""
    what: str
    """Which result of the model was compared."""
    change: float
    """|after - before| / |before|, with patches moved back to their places."""
    expected: str
    """'0' or 'changes' by theory, empty if there is no theorem."""

    @property
    def verdict(self) -> str:
        """'pass' or 'fail', empty if there is no theorem."""
        if not self.expected:
            return ''
        return 'pass' if (self.change > VISIBLE) == (self.expected == 'changes') else 'fail'


@torch.no_grad()
def randomize_encodings(model: nn.Module, std: float = 0.1, seed: int = 0) -> None:
    """Add noise to every parameter of the encodings, in place. Those that start at zero otherwise show no effect.

    Args:
        model: A model of timm_sape.
        std: Standard deviation of the noise.
        seed: Seed of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    for encoding in model.position_encodings().values():
        for parameter in encoding.parameters():
            parameter += std * torch.randn(parameter.shape, generator=generator, device='cpu').to(parameter)


@torch.no_grad()
def probe(model: nn.Module, images: torch.Tensor, seed: int = 0) -> List[ProbeRow]:
    """Move images in several ways and measure how much the model's results change.

    The results are class logits, the features of patches, and, for models that `position_maps` can read, the logits
    between patches in the first attention layer; for SaPE2 also both parts of its bias there. They are computed by a
    copy of the model in float64 and eval mode. Features and attention logits are put back into the original order of
    patches before they are compared. After a shift, patches that wrapped around are left out.

    Each change is reported along with what theory predicts, if it predicts anything. A predicted '0' always holds. A
    predicted 'changes' holds except by coincidence: an encoding whose parameters are all zero, or an image that is its
    own mirror image, gives no change. The predictions:

    - Every image of a batch gets the logits that it gets alone.
    - An image of another shape, with as many patches, gets the same logits whether the model is resized for it by
      `set_input_size` or takes it as it is, as with `dynamic_img_size=True`. An encoding that computes from its own
      size, not from the grid that it is given, fails here.
    - Without position (`nope`) a Vision Transformer does not know the order of its patches. With any other encoding it
      does.
    - With relative encodings only, the logits between two patches in the first attention layer do not change when both
      are shifted by whole patches, to the right or down, because there the tokens are the same as before. (In later
      layers they are not, because other patches have entered the image.) They change with an encoding that adds
      absolute positions to the tokens.
    - Distances without a direction (`alibi2d`) do not change when the image is mirrored. Rotations, and slopes with a
      direction, do.
    - The x bias of SaPE2 does not change when rows of patches are exchanged, as in a shift down, because it counts
      within rows; the y bias does. When columns are exchanged, as in a shift to the right or a mirror, it is the other
      way round.

    Only the first is made for a graft whose base has a position of its own, as Eva and NaFlexVit have.

    Args:
        model: A model of timm_sape, or any timm ViT whose patches do not overlap.
        images: `[B, C, height, width]`, normalized, of the model's own size.
        seed: Seed of the permutations.

    Returns:
        A row for each probe and each result. There is none for a probe that moves nothing, such as mirroring a single
        column of patches or an image of a single colour.

    Raises:
        ValueError: If the model does not cut images into separate patches or does not pool its tokens, its logits are
            not finite, or `images` is not a batch of its size.
    """
    if images.ndim != 4:
        raise ValueError(f'images must be [B, C, height, width], got {list(images.shape)}. Of one image give x[None].')
    model = unwrapped(model)
    patch_size = patch_size_of(model)
    model, images = deepcopy(model).double().eval(), images.double()
    height, width = (size // patch for size, patch in zip(images.shape[2:], patch_size))
    places = torch.arange(height * width, device='cpu').view(height, width)
    generator = torch.Generator().manual_seed(seed)
    every = places > -1
    moves: Dict[str, Tuple[torch.Tensor, torch.Tensor]] = {  # which patch goes to each place; which places to compare
        'patches shifted right': (places.roll(1, 1), places % width > 0),
        'patches shifted down': (places.roll(1, 0), places >= width),
        'patches mirrored': (places.flip(1), every),
        'rows exchanged': (places[_another_order(height, generator)], every),
        'patches permuted': (_another_order(height * width, generator).view(height, width), every),
    }
    moves = {name: move for name, move in moves.items() if not torch.equal(move[0], places)}
    before = _measure(model, images)
    check_pooled(before['class logits'])
    if not before['class logits'].isfinite().all():
        raise ValueError(
            'The model returns logits that are not finite. Has its training diverged, or is its file damaged?')
    rows = []
    for name, (order, counted) in moves.items():
        order, counted = order.flatten(), counted.flatten()
        moved_images = shuffle_patches(images, patch_size, order.expand(len(images), -1).to(images.device))
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
    in_batch = model(torch.cat([-images, images]))[len(images):]
    rows.append(ProbeRow(
        'image in a batch', 'class logits', _change(logits, in_batch), '0' if isinstance(model, PosEncModel) else ''))
    rows += [ProbeRow(name, 'class logits', _change(logits, model(move(images))), '') for name, move in pixels.items()]
    shape = _another_shape(height, width)
    if isinstance(model, PosEncModel) and hasattr(model, 'set_input_size') and shape is not None:
        other = nn.functional.interpolate(images, tuple(n * p for n, p in zip(shape, patch_size)), mode='bilinear')
        resized = deepcopy(model)
        resized.set_input_size(tuple(other.shape[2:]))
        model.patch_embed.strict_img_size = False  # now it takes any size
        rows.append(ProbeRow(
            'image of another shape', 'class logits, resized or not', _change(resized(other), model(other)), '0'))
    if hasattr(model, 'set_input_size'):
        larger = nn.functional.interpolate(images, scale_factor=2, mode='bilinear')
        model.set_input_size(tuple(larger.shape[2:]))
        rows.append(ProbeRow('image twice as large', 'class logits', _change(logits, model(larger)), ''))
    return rows


def _another_order(n: int, generator: torch.Generator) -> torch.Tensor:
    """A permutation that moves something, if there is one."""
    order = torch.randperm(n, generator=generator, device='cpu')
    return order.roll(1) if torch.equal(order, order.sort().values) else order


def _another_shape(height: int, width: int) -> Optional[Tuple[int, int]]:
    """Another grid of as many patches. None if there is none."""
    if height != width:
        return width, height
    factor = next((n for n in range(2, height + 1) if height % n == 0), None)
    return None if factor is None else (height // factor, width * factor)


def _measure(model: nn.Module, images: torch.Tensor) -> Dict[str, torch.Tensor]:
    """The results to compare, by name."""
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
        for encoding in attn.encodings.modules() if isinstance(attn, HostsEncodings) else ():  # also in adapters
            if isinstance(encoding, SemanticAwarePositionEncoding):
                q, k, _, _, where = args
                for axis, codes in zip('xy', encoding.codes(q, k, where.grid)):
                    found[f'first layer, {axis} bias'] = ops.pairwise_distance(codes)  # [B, h, H*W, H*W]
    return found


def _change(before: torch.Tensor, after: torch.Tensor) -> float:
    """|after - before| / |before|. Infinite if logits of -inf, which mask out, are in other places."""
    masked = before.isinf()
    if not torch.equal(masked, after.isinf()):
        return math.inf
    before, after = before.masked_fill(masked, 0), after.masked_fill(masked, 0)
    return ((after - before).norm() / before.norm().clamp(min=torch.finfo(before.dtype).tiny)).item()


def _expected(model: nn.Module, move: str, what: str) -> str:
    """The change that theory predicts for one of the moves of whole patches: '0', 'changes' or ''."""
    if not isinstance(model, PosEncModel) or model.base_position:  # theory knows nothing of timm's own positions
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
        return '0' if what.endswith('x bias') is (move in ('rows exchanged', 'patches shifted down')) else 'changes'
    if move.startswith('patches shifted') and what == 'first layer, attention logits':
        if all(cls.relative for cls in encodings):
            return '0'
        return 'changes' if on_tokens else ''
    if move == 'patches mirrored' and what != 'first layer, attention logits':
        if all(cls.sees_mirror is False for cls in encodings):
            return '0'
        return 'changes' if any(cls.sees_mirror for cls in encodings) else ''
    if move == 'patches permuted' and what == 'class logits' and (on_tokens or len(model.blocks) > 1):
        return 'changes'
    return ''
