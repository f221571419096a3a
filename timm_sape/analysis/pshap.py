"""Position-SHAP: how much of a model's decisions comes from where things are in the image.

Shapley values of two players, the image and the position encoding (Bruintjes and van Gemert, 'Learning to Adapt to
Position Bias in Vision Transformer Classifiers'). The authors estimate them by Kernel SHAP, at about 5,000 times the
cost of a validation pass. For two players there is a closed form, which costs 18 passes.

Before values are compared with published ones: the class of the authors' code gives the same values as this, but their
batch script (rjbruin/position-shap at d695b6a) restores the order of the images in a batch by their permutation instead
of its inverse. So values and predictions are paired with the labels of other images, and averages over a class, or over
correctly classified images, are taken over the wrong images.
"""
import math
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Iterable, Iterator, Optional, Tuple

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from ..checks import is_integer
from ..grid import Grid
from ..host import PosEncModel
from ..loading import check_classes, patch_size_of
from ..wrappers import unwrapped
from .maps import hooks_run

__all__ = ['PositionShap', 'attributions', 'check_pooled', 'position_shap', 'shuffle_patches']


@dataclass
class PositionShap:
    """The result of `position_shap`, one entry per image, `[n]`."""
    position: torch.Tensor
    """phi_PE, the contribution of position to the logit of the true class."""
    image: torch.Tensor
    """phi_img, the contribution of the image."""
    correct: torch.Tensor
    """Whether the model classifies the image correctly, bool."""
    labels: torch.Tensor
    """The true class."""

    @property
    def values(self) -> torch.Tensor:
        """P-SHAP of each image, |phi_PE| / (|phi_PE| + |phi_img|), `[n]`, from 0 to 1. NaN where both are 0."""
        position, image = self.position.abs(), self.image.abs()
        return position / (position + image)

    @property
    def value(self) -> float:
        """P-SHAP of the model, the mean over the images that it classifies correctly. NaN if there are none."""
        return self.values[self.correct].nanmean().item()


def attributions(
        both: torch.Tensor,
        image_only: torch.Tensor,
        position_only: torch.Tensor,
        neither: torch.Tensor,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Exact Shapley values of two players. They add up to `both - neither`.

    Args:
        both: f(x, p), the logit of the image with its positions, of any shape.
        image_only: f(x, p~), the image with permuted positions.
        position_only: f(x_b, p), a background image instead.
        neither: f(x_b, p~), a background image with permuted positions.

    Returns:
        phi_PE and phi_img, in the common broadcast shape.
    """
    position = (position_only - neither + both - image_only) / 2
    image = (image_only - neither + both - position_only) / 2
    return position, image


def shuffle_patches(images: torch.Tensor, patch_size: Tuple[int, int], order: torch.Tensor) -> torch.Tensor:
    """Shuffle the patches of images.

    For a model that cuts an image into patches this is the same as shuffling positions, whatever the encoding: it only
    changes which token has which position.

    Args:
        images: `[B, C, height, width]`.
        patch_size: Height and width of a patch, in pixels.
        order: For each place in raster order, the raster index of the patch that goes there, `[B, H*W]`.

    Returns:
        `[B, C, height, width]`.

    Raises:
        ValueError: If the image size is not a multiple of the patch size.
    """
    height, width = patch_size
    B, C, img_height, img_width = images.shape
    if img_height % height or img_width % width:
        raise ValueError(
            f'Patches of {height} x {width} do not divide images of {img_height} x {img_width} pixels. Resize the '
            'images.')
    rows, columns = img_height // height, img_width // width
    patches = images.reshape(B, C, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
    patches = patches.reshape(B, rows * columns, C, height, width)
    patches = patches.gather(1, order[:, :, None, None, None].expand_as(patches))
    patches = patches.reshape(B, rows, columns, C, height, width).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(images.shape)


def check_pooled(logits: torch.Tensor) -> None:
    """
    Raises:
        ValueError: If logits are those of each token.
    """
    if logits.ndim != 2:
        raise ValueError(
            f'Class logits must be [B, classes], got {list(logits.shape)}. Use a model that pools its tokens, such as '
            "one with global_pool='avg'.")


@contextmanager
def _positions_per_layer(model: PosEncModel, seeds: Optional[torch.Tensor]) -> Iterator[None]:
    """Within this context, each layer sees the positions in another random order.

    This uses `Grid.keep_indices`, which says where the tokens are: all patches are kept, but in another order.

    Args:
        model: The model.
        seeds: Seed of each image, int64 `[B]`. None to change nothing.
    """
    if seeds is None:
        yield
        return

    def shuffle(layer: int):
        def hook(module, args):
            x, attn_mask, is_causal, position = args
            grid = position.grid
            orders = [_order(seed.item() + 7919 * (layer + 1), grid.num_patches) for seed in seeds]
            grid = replace(grid, keep_indices=torch.stack(orders).to(x.device))
            return x, attn_mask, is_causal, model.encodings.position(x, grid)
        return hook

    with hooks_run(), ExitStack() as stack:
        for i, block in enumerate(model.blocks):
            stack.callback(block.register_forward_pre_hook(shuffle(i)).remove)
        yield


def _order(seed: int, num_patches: int) -> torch.Tensor:
    return torch.randperm(num_patches, generator=torch.Generator().manual_seed(seed), device='cpu')


class _Logits:
    """Computes logits of images, with their own positions or with positions that a seed per image shuffles."""

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
        """Logits of some images.

        Args:
            images: `[n, C, height, width]`.
            index: Which images, int64 `[m]`.
            seeds: A seed for each entry of `index`, int64 `[m]`. None for the images' own positions.

        Returns:
            `[m, classes]`.
        """
        logits = []
        for start in range(0, len(index), self.batch_size):
            part = images[index[start:start + self.batch_size].to(images.device)]
            seed = None if seeds is None else seeds[start:start + self.batch_size]
            with _positions_per_layer(self.model, seed if self.per_layer else None):
                logits.append(self.model(part) if seed is None else self._shuffled(part, seed))
        logits = torch.cat(logits)
        check_pooled(logits)
        if logits.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f'Position-SHAP computes small differences, which are rounding errors in {logits.dtype}: call '
                'model.float() first, and leave autocast out.')
        if not logits.isfinite().all():
            raise ValueError('The model returns logits that are not finite. Check its weights and the images.')
        return logits

    def _shuffled(self, images: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        height, width = (size // patch for size, patch in zip(images.shape[2:], self.patch_size))
        orders = torch.stack([_order(s.item(), height * width) for s in seeds]).to(images.device)
        shuffled = shuffle_patches(images, self.patch_size, orders)
        host = next((m for m in self.model.modules() if isinstance(m, PosEncModel)), None)
        # Objects are found in the original image and belong to positions. So when positions are exchanged, a token
        # gets the object of the place that it moves to, not its own.
        for encoding in host.encodings.values() if host is not None else ():
            if 'object_index' in encoding.asks_for:
                objects = encoding.find_objects(images, Grid(height, width), self.patch_size)
                return self.model(shuffled, object_index=objects)
        return self.model(shuffled)


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

    Images are processed 2 * `background` at a time. Each half is explained with the other half as background. To remove
    the image, a background image replaces it. To remove position, the positions of the tokens are permuted, with
    another permutation for each background image. Logits that involve only the background are computed once for all
    images of a half. The last, smaller group is halved too; if it is a single image, that one is left out.

    Permuting patches works for any encoding. (The authors permute tables of the encodings; for biases their code
    permutes the head dim instead.) All layers see the same permutation, so a token has a single position. With
    `per_layer` each layer draws its own, as the authors do for rotations, and so do encodings of the tokens.

    Args:
        model: A model of timm_sape, or any timm ViT whose patches do not overlap; in eval mode.
        batches: Images `[B, C, height, width]` and labels, integers `[B]`, in random order. If they are in the order of
            their classes, the background is of the class that is explained, and P-SHAP comes out two or three times too
            high.
        background: Number of images in the background, 1 or more; the authors use 16.
        batch_size: Images per forward pass.
        per_layer: Use another permutation in each layer. Only for models of timm_sape.
        seed: Seed of the permutations, 0 or more.
        device: Device of the model.
        progress: Label of a progress bar, shown after two seconds. Default: no bar.

    Raises:
        ValueError: If the model is in training mode, has no classes or does not cut images into separate patches,
            labels are missing or are not classes of the model, logits are not finite or in half precision, there are
            fewer than two images, or a number is out of range.
    """
    model = unwrapped(model)
    if per_layer and not isinstance(model, PosEncModel):
        raise ValueError('per_layer=True is for models of timm_sape. Leave it out.')
    if per_layer and model.base_position:
        raise ValueError(
            f'per_layer=True cannot move the position that the base of this graft has by itself '
            f'({model.base_position}). Leave it out.')
    for name, value, least in (('background', background, 1), ('batch_size', batch_size, 1), ('seed', seed, 0)):
        if not is_integer(value, least):
            raise ValueError(f'{name} must be {least} or more, an integer, got {value!r}.')
    if any(module.training for module in model.modules()):
        raise ValueError('Position-SHAP needs a model without dropout: call model.eval() first.')
    head = model.get_classifier() if hasattr(model, 'get_classifier') else None
    if getattr(model, 'num_classes', None) == 0 and isinstance(head, nn.Identity):
        raise ValueError('The model has no classes, only features. Position-SHAP explains the logit of a class.')
    logits = _Logits(model, batch_size, per_layer)
    found, draws = [], 0
    total = len(batches.dataset) if isinstance(batches, DataLoader) else None
    with tqdm(desc=progress, total=total, unit='image', delay=2, disable=not progress) as bar:
        for images, labels in _pieces(batches, 2 * background):
            if (labels < 0).any():
                raise ValueError('Position-SHAP explains the logit of the true class: images need labels.')
            images = images.to(device)
            draws += len(images)
            seeds = torch.arange(draws - len(images), draws, device='cpu') + 1_000_003 * seed % 2 ** 62  # for int64
            every = torch.arange(len(images), device='cpu')
            with_position, without = logits(images, every), logits(images, every, seeds)
            check_classes(labels, with_position.shape[1])
            half = len(images) // 2
            for explained, others in ((slice(0, half), slice(half, None)), (slice(half, None), slice(0, half))):
                found.append(_explain(
                    logits, images[explained], labels[explained], seeds[others],
                    with_position[explained], with_position[others], without[others]))
            bar.update(len(images))
    if not found:
        raise ValueError('Position-SHAP needs at least two images: each half is the background of the other.')
    found = PositionShap(*(torch.cat(parts).cpu() for parts in zip(*found)))
    if _in_order_of_classes(found.labels):
        warnings.warn(
            'The images seem to be in the order of their classes, so P-SHAP comes out too high. Give them in random '
            'order, e.g. by load_images(..., shuffle=True).')
    return found


def _in_order_of_classes(labels: torch.Tensor) -> bool:
    """Whether the images of each class follow each other, and would do so by chance in less than .1 % of cases."""
    runs, counts = labels.unique_consecutive(), labels.unique(return_counts=True)[1].tolist()
    chance = math.lgamma(len(counts) + 1) + sum(math.lgamma(n + 1) for n in counts) - math.lgamma(len(labels) + 1)
    return len(runs) == len(counts) and chance < math.log(0.001)


def _pieces(batches, size: int) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
    """Images and labels in groups of `size`, then the remaining ones if there are at least two."""
    images, labels = [], []
    for some_images, some_labels in batches:
        found = torch.as_tensor(some_labels, device=getattr(some_labels, 'device', 'cpu'))
        if found.shape != (len(some_images),) or found.is_floating_point() or found.is_complex():
            raise ValueError(
                f'labels must be classes, integers [B] = [{len(some_images)}], got {found.dtype} {list(found.shape)}.')
        images.extend(some_images)
        labels.extend(found.long())
        while len(images) >= size:
            yield torch.stack(images[:size]), torch.stack(labels[:size])
            images, labels = images[size:], labels[size:]
    if len(images) > 1:
        yield torch.stack(images), torch.stack(labels)


def _explain(logits, images, labels, seeds, both, background_position, background_neither):
    """Explain n images against a background of b images.

    Args:
        logits: A `_Logits`.
        images: `[n, C, height, width]`.
        labels: `[n]`.
        seeds: Seeds of the permutations, `[b]`.
        both: Logits of the images with their positions, `[n, classes]`.
        background_position: Logits of the background with its positions, `[b, classes]`.
        background_neither: Logits of the background with permuted positions, `[b, classes]`.

    Returns:
        phi_PE, phi_img, correctness and labels, each `[n]`.
    """
    n, b = len(images), len(seeds)
    labels = labels.to(both.device)
    each = torch.arange(n, device='cpu').repeat_interleave(b)
    image_only = logits(images, each, seeds.repeat(n)).unflatten(0, (n, b))  # [n, b, classes]
    index = labels[:, None].expand(n, b)
    position, image = attributions(
        both.gather(1, labels[:, None]),  # [n, 1]
        image_only.gather(2, index[..., None])[..., 0],  # [n, b]
        background_position[:, labels].T,  # [n, b]
        background_neither[:, labels].T,
    )
    return position.mean(1), image.mean(1), both.argmax(1) == labels, labels
