"""Object-based position encoding (Li et al., 'Tackling the Abstraction and Reasoning Corpus with Vision Transformers',
2024; ViTARC).

Half of the channels hold the sinusoids of an object's index, the other half those of x and y, so patches of the same
object share half of their encoding. It costs one addition per token entry. If the caller does not pass the objects,
finding them takes about log2(H*W) products of H*W x H*W matrices per image.
"""
from typing import List, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import ops
from ..checks import is_number
from ..grid import Grid
from .base import CoordinateEncoding, FixedEncoding
from .registry import register_encoding


@register_encoding('ope')
class ObjectPositionEncoding(FixedEncoding, CoordinateEncoding):
    """Object-based (OPE).

    The patch at (y, x) of object o gets [wave(o), wave(x), wave(y)], of D/2, D/4 and D/4 channels.

    With C channels, wave(p) is [sin(p w), cos(p w)] with w_k = 10000^(-2k/C), k < C/2. Nothing is added to prefix
    tokens.

    The caller can pass the objects as `model(x, object_index=...)`, integers below 2^24. Otherwise they are found in
    the image: the mean colours of patches are rounded down to 4 levels per channel, and an object is a connected region
    of patches of the same colour (neighbours are left, right, above, below). Objects, the background included, are
    numbered from 0 by their first patch in raster order. (The authors number the bounding boxes of objects, colour by
    colour, from 1, with 0 for the most frequent colour.) No gradient flows to the image. They are found in the whole
    image, with the patches that are dropped or masked: in masked pretraining, pass `object_index`.

    Args:
        mean: Mean by which images were normalized, a number or one per channel. Default: that of the entrypoints. A
            model warns if its config says otherwise, as that of a graft may. train.py's `--mean` is not seen.
        std: Standard deviation by which they were divided, likewise; positive.

    Raises:
        ValueError: If a value is none of these or the embed dim is not a multiple of 8. In the forward pass, if the
            number of channels of the image does not fit mean or std, `object_index` has a wrong shape or dtype, or
            there is neither an image nor an `object_index`.
    """
    asks_for = ('images', 'patch_size', 'object_index')
    on_other_grids = 'coordinates extrapolate, or `rescale`'
    paper = 'https://arxiv.org/abs/2410.06405'

    def __init__(
            self,
            *,
            mean: Union[float, Sequence[float]] = 0.5,
            std: Union[float, Sequence[float]] = 0.5,
            **host,
    ) -> None:
        super().__init__(**host)
        if self.dim % 8:
            raise ValueError(
                f"'ope' needs an embed dim that is a multiple of 8, got {self.dim}. Choose another embed_dim.")
        for name, value in (('mean', mean), ('std', std)):
            values = value if isinstance(value, (list, tuple)) else [value]
            if not values or not all(is_number(v) and (name == 'mean' or v > 0) for v in values):
                kind = 'finite' if name == 'mean' else 'positive'
                raise ValueError(
                    f"'ope' needs {name} to be a {kind} number, or a list of them, one per channel, got {value!r}.")
        if isinstance(mean, (list, tuple)) and isinstance(std, (list, tuple)) and len(mean) != len(std):
            raise ValueError(f"'ope' has a mean of {len(mean)} channels and a std of {len(std)}. Give as many of each.")
        self.mean = mean
        self.std = std
        self.make_table()

    def compute(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        y, x = self.coordinates(grid, device, dtype).unbind(-1)  # [H*W]
        return torch.cat([_waves(x, self.dim // 4), _waves(y, self.dim // 4)], dim=-1)  # [H*W, D/2]

    def embed(
            self,
            x: torch.Tensor,
            grid: Grid,
            images: Optional[torch.Tensor],
            patch_size: Tuple[int, int],
            object_index: Optional[torch.Tensor],
    ) -> torch.Tensor:
        if object_index is not None:
            # x.shape[0], because with len(x) exported models would have a fixed batch size
            _check(object_index, [x.shape[0], grid.num_patches])
        elif images is not None:
            object_index = self.find_objects(images, grid, patch_size)
        else:
            raise ValueError(
                "'ope' finds objects in whole images, but got only tokens, or patches of which some are missing or "
                'dropped. Call model(images) or model.embed(images), or pass object_index=.')
        table = self.table_for(grid)  # [H*W, D/2]
        objects = _waves(object_index.to(table), self.dim // 2)  # [B, H*W, D/2]
        table = torch.cat([objects, table.expand_as(objects)], dim=-1)  # [B, H*W, D]
        return grid.keep_tokens(grid.pad_tokens(table))  # [B, N, D]

    def find_objects(self, images: torch.Tensor, grid: Grid, patch_size: Tuple[int, int]) -> torch.Tensor:
        """The object that each patch of the whole grid belongs to.

        Args:
            images: `[B, C, height, width]`, normalized, as the model gets them.
            grid: The grid.
            patch_size: Height and width of a patch in pixels.

        Returns:
            Index of the object, from 0, int64 `[B, H*W]`.
        """
        levels = self._levels(images.detach(), grid, patch_size)  # [B, H*W, C]
        place = grid.coordinates(levels.device, levels.dtype)  # [H*W, 2]
        is_near = _steps(place) <= 1  # [H*W, H*W]
        is_same = (levels[:, :, None] == levels[:, None]).all(-1)  # [B, H*W, H*W]
        # 1 where a path leads from patch to patch. Each product doubles the length of the paths.
        connected = (is_near & is_same).to(levels.dtype)  # [B, H*W, H*W]
        for _ in range(_num_doublings(grid.num_patches)):
            connected = (connected @ connected).clamp(max=1)
        first = connected.argmax(-1)  # first patch of the object of each patch, [B, H*W]
        is_first = first == torch.arange(grid.num_patches, device=first.device)
        return (is_first.long().cumsum(-1) - 1).gather(-1, first)  # [B, H*W]

    def _levels(self, images: torch.Tensor, grid: Grid, patch_size: Tuple[int, int]) -> torch.Tensor:
        """Mean colour of each patch, rounded down to levels 0, 1, 2, 3 of the range of pixels, `[B, H*W, C]`."""
        # Like the patch embedding: pad patches that extend beyond the image with zeros, or crop an incomplete patch.
        height, width = grid.height * patch_size[0], grid.width * patch_size[1]
        images = F.pad(images, (0, width - images.shape[3], 0, height - images.shape[2]))
        colours = F.avg_pool2d(*ops.upcast(images), patch_size)  # [B, C, H, W]
        channels = colours.flatten(2).unbind(1)  # [B, H*W]
        mean, std = self._per_channel('mean', len(channels)), self._per_channel('std', len(channels))
        levels = torch.stack([4 * (c * s + m) for c, m, s in zip(channels, mean, std)], dim=-1)
        return levels.floor().clamp(0, 3).nan_to_num()  # a NaN would not even equal itself

    def _per_channel(self, name: str, num_channels: int) -> List[float]:
        value = getattr(self, name)
        values = value if isinstance(value, (list, tuple)) else [value] * num_channels
        if len(values) != num_channels:
            raise ValueError(
                f"'ope' has a {name} of {len(values)} channels, but the image has {num_channels}. Create the model "
                f"with pos_enc_kwargs={{'ope': {{'{name}': ...}}}} of that many numbers, or of a single one.")
        return values


def _check(object_index: torch.Tensor, shape: List[int]) -> None:
    is_tensor = isinstance(object_index, torch.Tensor)
    if not is_tensor or object_index.dtype.is_floating_point or object_index.dtype.is_complex or (
            list(object_index.shape) != shape):
        got = f'{object_index.dtype} {list(object_index.shape)}' if is_tensor else type(object_index).__name__
        raise ValueError(
            f"'ope' needs object_index to be a tensor of integers of shape [B, H*W] = {shape}, one for each patch in "
            f'raster order, got {got}.')


def _waves(position: torch.Tensor, num_channels: int) -> torch.Tensor:
    """From positions `[...]` to their sinusoids `[..., C]`."""
    k = torch.arange(num_channels // 2, device=position.device, dtype=position.dtype)
    phase = position[..., None] * 10000 ** (-2 * k / num_channels)  # [..., C/2]
    return torch.cat([phase.sin(), phase.cos()], dim=-1)


def _steps(place: torch.Tensor) -> torch.Tensor:
    """Manhattan distances `[N, N]` between all positions `[N, 2]`. ONNX has no torch.cdist."""
    return (place[:, None] - place).abs().sum(-1)


def _num_doublings(num_patches: int) -> int:
    """How often a path of one step must be doubled to visit all patches, at most 16. 16 if their number is unknown."""
    if torch.jit.is_tracing():  # sizes are tensors then
        return 16
    return next((n for n in range(16) if statically_known_true(num_patches <= 2 ** n)), 16)
