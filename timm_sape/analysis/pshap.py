"""Position-SHAP: how much of a model's decisions comes from where things are.

By the closed form for two players, the image and the position encoding (Bruintjes and van Gemert, 'Learning to
Adapt to Position Bias in Vision Transformer Classifiers'). They estimate the same numbers by Kernel SHAP, at some 5,000
times the cost of a validation pass; here it is 18 times.
"""
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Iterable, Iterator, Optional, Tuple

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from ..grid import Grid
from ..vit_pos_enc import VisionTransformerPosEnc
from .inputs import check_classes, patch_size_of

__all__ = ['PositionShap', 'attributions', 'position_shap', 'shuffle_patches']


@dataclass
class PositionShap:
    """What `position_shap` finds, one entry for each image, `[n]`."""
    position: torch.Tensor
    """phi_PE, what position contributes to the logit of the true class."""
    image: torch.Tensor
    """phi_img, what the image contributes."""
    correct: torch.Tensor
    """Whether the model classifies the image correctly."""
    labels: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        """P-SHAP of each image, |phi_PE| / (|phi_PE| + |phi_img|), from 0 to 1; NaN where both are 0."""
        position, image = self.position.abs(), self.image.abs()
        return position / (position + image)

    @property
    def value(self) -> float:
        """P-SHAP of the model, the mean over images that it classifies correctly; NaN if there is none."""
        return self.values[self.correct].nanmean().item()


def attributions(
        both: torch.Tensor,
        image_only: torch.Tensor,
        position_only: torch.Tensor,
        neither: torch.Tensor,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Shapley values of two players, exactly; they add up to `both - neither`.

    Args:
        both: f(x, p), the logit with the image and its positions, any shape.
        image_only: f(x, p~), positions taken away.
        position_only: f(x_b, p), the image taken away.
        neither: f(x_b, p~).

    Returns:
        phi_PE and phi_img.
    """
    position = (position_only - neither + both - image_only) / 2
    image = (image_only - neither + both - position_only) / 2
    return position, image


def shuffle_patches(images: torch.Tensor, patch_size: Tuple[int, int], order: torch.Tensor) -> torch.Tensor:
    """Let patches change places.

    To a model that cuts an image into patches, this is the same as letting positions change places: which token has
    which position is all that changes, whatever the encoding does with it.

    Args:
        images: `[B, C, height, width]`.
        patch_size: Height and width of a patch, in pixels.
        order: Which patch comes to each place, in raster order, `[B, H*W]`.

    Raises:
        ValueError: If patches do not divide the image.
    """
    height, width = patch_size
    B, C, img_height, img_width = images.shape
    if img_height % height or img_width % width:
        raise ValueError(
            f'Patches of {height} x {width} do not divide images of {img_height} x {img_width} pixels. Resize them.')
    rows, columns = img_height // height, img_width // width
    patches = images.reshape(B, C, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
    patches = patches.reshape(B, rows * columns, C, height, width)
    patches = patches.gather(1, order[:, :, None, None, None].expand_as(patches))
    patches = patches.reshape(B, rows, columns, C, height, width).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(images.shape)


@contextmanager
def _positions_per_layer(model: VisionTransformerPosEnc, seeds: Optional[torch.Tensor]) -> Iterator[None]:
    """Let each layer see positions in an order of its own, drawn from the seed of each image `[B]`; None for no change.

    A layer takes `Grid.keep_indices` for where the tokens stand. All patches are kept here, in another order.
    """
    if seeds is None:
        yield
        return

    def shuffle(layer: int):
        def hook(module, args):
            x, grid, rotation, bias, pos, *rest = args
            orders = [_order(seed.item() + 7919 * (layer + 1), grid.num_patches) for seed in seeds]
            grid = replace(grid, keep_indices=torch.stack(orders).to(x.device))
            rotation = None if rotation is None else grid.keep_rows(rotation)
            bias = None if bias is None else grid.keep_pairs(bias)
            pos = None if pos is None else grid.keep_tokens(pos)
            return x, grid, rotation, bias, pos, *rest
        return hook

    with ExitStack() as stack:
        for i, block in enumerate(model.blocks):
            stack.callback(block.register_forward_pre_hook(shuffle(i)).remove)
        yield


def _order(seed: int, num_patches: int) -> torch.Tensor:
    return torch.randperm(num_patches, generator=torch.Generator().manual_seed(seed))


class _Logits:
    """Logits of images with their positions, or with positions in the order of a seed for each image."""

    def __init__(self, model: nn.Module, batch_size: int, per_layer: bool) -> None:
        self.model = model
        self.batch_size = batch_size
        self.per_layer = per_layer
        self.patch_size = patch_size_of(model)

    def __call__(
            self,
            images: torch.Tensor,
            index: torch.Tensor,
            seeds: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Logits of `images[index]`, in the order of `seeds`, one for each entry of `index`."""
        logits = []
        for start in range(0, len(index), self.batch_size):
            part = images[index[start:start + self.batch_size].to(images.device)]
            seed = None if seeds is None else seeds[start:start + self.batch_size]
            with _positions_per_layer(self.model, seed if self.per_layer else None):
                logits.append(self.model(part).float() if seed is None else self._shuffled(part, seed))
        return torch.cat(logits)

    def _shuffled(self, images: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        height, width = (size // patch for size, patch in zip(images.shape[2:], self.patch_size))
        orders = torch.stack([_order(s.item(), height * width) for s in seeds]).to(images.device)
        shuffled = shuffle_patches(images, self.patch_size, orders)
        if isinstance(self.model, VisionTransformerPosEnc):
            # Objects are found in the image as it is, and then are a part of the positions, of which each token gets
            # another: not its own object, but that which is at the place where it comes to.
            grid = self.model.encodings.with_objects(Grid(height, width), images, self.patch_size, None)
            if grid.objects is not None:
                return self.model(shuffled, object_index=grid.objects).float()
        return self.model(shuffled).float()


@torch.no_grad()
def position_shap(
        model: nn.Module,
        batches: Iterable[Tuple[torch.Tensor, torch.Tensor]],
        *,
        background: int = 16,
        batch_size: int = 256,
        per_layer: bool = False,
        seed: int = 0,
        device: str = 'cpu',
        progress: str = '',
) -> PositionShap:
    """Position-SHAP of a model, for any encoding.

    Images are taken 2 * `background` at a time. One half is explained against the other as background: the image is
    taken away by putting a background image in its place, and position by a permutation of the positions over the
    tokens, one for each background image, drawn independently. What the background alone gives is computed once for all
    images of a half. What is left over at the end, if it is less, is halved likewise; a single image is left out.

    Any encoding can be permuted, as it is patches that are exchanged. (The authors permute tables of the encodings; for
    biases their code permutes the head dim instead.) All layers see one permutation, so a token has one position. With
    `per_layer` each layer draws its own, as the authors do with rotations; the encodings of tokens are at the start and
    have one as well.

    Args:
        model: One of ours, or any timm ViT whose patches do not overlap; in eval mode.
        batches: Images `[B, C, height, width]` and labels `[B]`.
        background: Images in the background, 1 or more; the authors have 16.
        batch_size: Images in a forward pass.
        per_layer: Let each layer see another permutation. For our models.
        seed: Of the permutations.
        device: Where the model is.
        progress: Shown before the progress bar, on what takes over two seconds. Default: no bar.

    Raises:
        ValueError: If the model has no patches that could be exchanged, images have no label or one that it does not
            know, or there are fewer than two.
    """
    if per_layer and not isinstance(model, VisionTransformerPosEnc):
        raise ValueError('per_layer=True is for models of timm_sape. Leave it out.')
    if background < 1:
        raise ValueError(f'background must be 1 or more, got {background}.')
    logits = _Logits(model, batch_size, per_layer)
    found, draws = [], 0
    total = len(batches.dataset) if isinstance(batches, DataLoader) else None
    with tqdm(desc=progress, total=total, unit='image', delay=2, disable=not progress) as bar:
        for images, labels in _pieces(batches, 2 * background):
            if (labels < 0).any():
                raise ValueError('Position-SHAP explains the logit of the true class: images need labels.')
            images = images.to(device)
            draws += len(images)
            seeds = torch.arange(draws - len(images), draws) + 1_000_003 * seed
            every = torch.arange(len(images))
            with_position, without = logits(images, every), logits(images, every, seeds)
            check_classes(labels, with_position.shape[1])
            half = len(images) // 2
            for explained, others in ((slice(0, half), slice(half, None)), (slice(half, None), slice(0, half))):
                found.append(_explain(
                    logits, images[explained], labels[explained], seeds[others],
                    with_position[explained], with_position[others], without[others]))
            bar.update(len(images))
    if not found:
        raise ValueError('Position-SHAP needs two images at least: one half is the background of the other.')
    return PositionShap(*(torch.cat(parts).cpu() for parts in zip(*found)))


def _pieces(batches, size: int) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
    """Images and labels, `size` at a time, the rest at the end if it is two or more."""
    images, labels = [], []
    for some_images, some_labels in batches:
        images.extend(some_images)
        labels.extend(some_labels)
        while len(images) >= size:
            yield torch.stack(images[:size]), torch.stack(labels[:size])
            images, labels = images[size:], labels[size:]
    if len(images) > 1:
        yield torch.stack(images), torch.stack(labels)


def _explain(logits, images, labels, seeds, both, background_position, background_neither):
    """phi_PE, phi_img, whether it is correct, and labels, of n images against b background images."""
    n, b = len(images), len(seeds)
    labels = labels.to(both.device)
    each = torch.arange(n).repeat_interleave(b)
    image_only = logits(images, each, seeds.repeat(n)).unflatten(0, (n, b))  # [n, b, classes]
    index = labels[:, None].expand(n, b)
    position, image = attributions(
        both.gather(1, labels[:, None]),  # [n, 1]
        image_only.gather(2, index[..., None])[..., 0],  # [n, b]
        background_position[:, labels].T,  # [n, b]
        background_neither[:, labels].T,
    )
    return position.mean(1), image.mean(1), both.argmax(1) == labels, labels
