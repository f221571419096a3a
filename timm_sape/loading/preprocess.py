"""timm's preprocessing of images for a model, and the sizes that it depends on."""
from functools import partial
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.data.loader import adapt_to_chs
from timm.models import get_model_input_config
from timm.models.naflexvit import NaFlexVit
from torchvision.transforms import Compose, Grayscale
from torchvision.transforms.v2 import RGB
from torchvision.transforms.v2.functional import center_crop

from ..host import PosEncModel
from ..wrappers import unwrapped

__all__ = ['image_size_of', 'native_preprocessing', 'patch_ratio', 'patch_size_of', 'preprocessing']


def preprocessing(model: torch.nn.Module, img_size: Optional[Sequence[int]] = None, **overrides):
    """timm's preprocessing of images for inference.

    Args:
        model: The model.
        img_size: (height, width) in pixels. Default: the model's image size.
        overrides: Entries of its data config to replace, such as `crop_mode='squash'`, which shows the central
            crop_pct of both the height and the width.

    Returns:
        A transform from PIL images to normalized tensors `[C, height, width]`.

    Raises:
        ValueError: If the model takes images with neither 1 nor 3 channels.
    """
    to_channels, config = _data_config(model)
    if img_size is not None:
        overrides['input_size'] = (config['input_size'][0], *img_size)
    return Compose([to_channels, create_transform(**{**config, **overrides}, is_training=False)])


def native_preprocessing(model: torch.nn.Module, max_patches: int):
    """Preprocessing that keeps the aspect ratio of each image, for a NaFlexVit.

    The image is the central crop_pct of its height and of its width, as with `crop_mode='squash'` in `preprocessing`.
    It is resized to as many whole patches as fit into `max_patches`.

    Args:
        model: timm's NaFlexVit, or ours.
        max_patches: The most patches of an image.

    Returns:
        A transform from PIL images to a dict of patches, as `load_images` collates them with `max_patches`.

    Raises:
        ValueError: If the model takes no patches, or neither 1 nor 3 channels.
    """
    model = unwrapped(model)
    if not isinstance(model, NaFlexVit) or not model.embeds.is_linear:
        raise ValueError(
            f'{type(model).__name__} takes no images of different shapes in a batch. Use a NaFlexVit, such as '
            'naflexvit_small_rope2d; the weights of vit_small_rope2d fit it: naflexvit_small_rope2d@FILE.')
    if len(set(model.embeds.patch_size)) > 1:
        height, width = model.embeds.patch_size
        raise ValueError(f"timm's transform to patches has square ones, the model {height}x{width}.")
    to_channels, config = _data_config(model)
    to_patches = create_transform(
        **config,
        is_training=False,
        naflex=True,
        patch_size=model.embeds.patch_size[0],
        max_seq_len=max_patches,
        patchify=True,
        patchify_channels_last=model.embeds.channels_last,
    )
    return Compose([to_channels, partial(_central_part, share=config['crop_pct']), to_patches])


def _central_part(image: Image.Image, share: float) -> Image.Image:
    return center_crop(image, [max(round(share * side), 1) for side in (image.height, image.width)])


def _data_config(model: torch.nn.Module) -> Tuple[torch.nn.Module, Dict[str, Any]]:
    """What gives an image the channels of the model, and timm's data config at the model's image size."""
    model = unwrapped(model)
    config = resolve_model_data_config(model)
    channels, *size = get_model_input_config(model)['input_size']
    first = dict(model.named_modules()).get(str((getattr(model, 'pretrained_cfg', None) or {}).get('first_conv')))
    channels = getattr(first, 'in_channels', channels)  # the config may be wrong if weights came from a bare file
    if channels not in (1, 3):
        raise ValueError(
            f'The model takes images with {channels} channels, but image files have 1 or 3. Use a model for 3.')
    for statistic in ('mean', 'std'):
        config[statistic] = adapt_to_chs(config[statistic], channels)
    config['input_size'] = (channels, *size)
    return Grayscale() if channels == 1 else RGB(), config


def image_size_of(model: torch.nn.Module) -> Tuple[int, int]:
    """(height, width) in pixels of the images that a model was created for, or trained on."""
    return tuple(get_model_input_config(unwrapped(model))['input_size'][1:])


def patch_ratio(model: torch.nn.Module, name: str = '') -> Tuple[int, int]:
    """(height, width) in pixels for which a model has one patch.

    Args:
        model: The model.
        name: What the message calls it. Default: its class.

    Raises:
        ValueError: If the model has no patches.
    """
    model = unwrapped(model)
    if isinstance(model, PosEncModel):
        return model.patch_size
    embedding = model.embeds if isinstance(model, NaFlexVit) else getattr(model, 'patch_embed', None)
    if not hasattr(embedding, 'feat_ratio'):
        raise ValueError(f'{name or type(model).__name__} has no patches. Use a Vision Transformer.')
    return embedding.feat_ratio(as_scalar=False)


def patch_size_of(model: torch.nn.Module) -> Tuple[int, int]:
    """Height and width, in pixels, of the patches that a model cuts images into.

    Raises:
        ValueError: If the model has no patches, they overlap, or several layers compute them.
    """
    model = unwrapped(model)
    if isinstance(model, NaFlexVit):
        return model.embeds.patch_size
    projection = getattr(getattr(model, 'patch_embed', None), 'proj', None)
    sizes = [getattr(projection, name, None) for name in ('kernel_size', 'stride')]
    if not isinstance(projection, torch.nn.Conv2d) or sizes[0] != sizes[1] or hasattr(model.patch_embed, 'backbone'):
        raise ValueError(
            f'{type(model).__name__} does not cut images into separate patches, so they cannot be moved. Use a plain '
            'Vision Transformer.')
    return sizes[0]
