"""Vision Transformer with a choice of position encodings.

timm's VisionTransformer with any set of the registered encodings:

    image -> patch tokens on a grid
          -> encodings add to the tokens
          -> blocks, in whose attention encodings rotate q and k, and add to the logits and to the values
          -> timm's norm, pooling and head

Every `vit_<size>_...` is timm's `vit_<size>_patch16_224` except for its encoding, so two of them differ only in their
encodings. `test_vit_...` are smaller, for tests; timm's `test_vit` has another shape.
"""
import inspect
import math
import sys
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import HybridEmbed
from timm.models import generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import VisionTransformer

from . import checkpoints, ops
from .attention import PosEncAttention, PosEncBlock
from .conversion import convert_to_plain
from .encodings import ResizedEncoding, encoding_keywords, parse_pos_enc
from .entrypoints import SIZES, base_cfg, entrypoints, make_entrypoint
from .grid import Grid
from .host import PosEncModel, keep_patches
from .model_args import (
    as_pair,
    check_flags,
    check_integers,
    check_logit_scaling,
    check_model_args,
    check_ref_grid_size,
    check_sizes,
)
from .position import Position

__all__ = ['VisionTransformerPosEnc']  # register_model adds each entrypoint to this

torch.fx.wrap('keep_patches')  # in each module that calls it

# timm's arguments that are True or False: `--model-kwargs class_token=false` gives the string 'false', which is true
FLAGS = {name for name, p in inspect.signature(VisionTransformer).parameters.items() if isinstance(p.default, bool)}


class VisionTransformerPosEnc(PosEncModel, VisionTransformer):
    """timm's Vision Transformer with any set of position encodings.

    Its state dict is timm's plus the entries of the encodings: `encodings.<name>.*` for those that the whole model
    shares, `blocks.<i>.attn.encodings.<name>.*` for those that each layer has. The table of `ape` is timm's
    `pos_embed`.

    Two things are as in timm's NaFlexVit, not as in its ViT: `pos_drop_rate` acts also on a model without a table, and
    the blocks are called one by one. So register forward hooks on `blocks[i]`; those on `blocks` never run.
    """

    def __init__(
            self,
            img_size: Union[int, Tuple[int, int]] = 224,
            patch_size: Union[int, Tuple[int, int]] = 16,
            *,
            pos_enc: str = 'ape',
            pos_enc_kwargs: Optional[Dict[str, Dict[str, Any]]] = None,
            ref_grid_size: Optional[Tuple[int, int]] = None,
            logit_scaling: str = 'constant',
            embed_dim: int = 768,
            depth: int = 12,
            num_heads: int = 12,
            dynamic_img_size: bool = False,
            dynamic_img_pad: bool = False,
            patch_drop_rate: float = 0.,
            device=None,
            dtype=None,
            **kwargs,
    ) -> None:
        """
        Args:
            img_size: Input image size, or (height, width).
            patch_size: Patch size, or (height, width).
            pos_enc: Names of encodings joined by `+`, `'nope'` for none; see `timm_sape.list_encodings()`.
            pos_enc_kwargs: Keywords of each part, keyed by its name; plain JSON.
            ref_grid_size: (H, W) of the grid that the weights were trained on, for encodings and rules that need it.
                Checkpoints of such models contain it. Give it if a rule that needs it is chosen for a checkpoint that
                lacks it, or for a loading path that cannot adapt the model.
            logit_scaling: 'constant', or 'log': on another grid than the trained one, q.k is multiplied by
                log N / log N0, for N tokens there and N0 on the trained grid. May be chosen anew when a saved model is
                loaded.
            embed_dim: Embed dim D.
            depth: Number of blocks.
            num_heads: Number of heads h.
            dynamic_img_size: Accept images of any size that is a multiple of the patch size.
            dynamic_img_pad: With `dynamic_img_size`, pad images of any other size.
            patch_drop_rate: Fraction of patches to drop in training, at least 0 and less than 1.
            kwargs: Any other argument of timm's VisionTransformer, except `pos_embed`, `block_fn` and `attn_layer`,
                which the encodings determine.

        Raises:
            ValueError: If an argument is invalid, or arguments do not fit together.
        """
        if kwargs.pop('use_naflex', False):
            raise ValueError(
                'use_naflex=True: this model does not take patches with coordinates. For that create '
                "'naflexvit_...' instead of 'vit_...' ('test_naflexvit_...' instead of 'test_vit_...').")
        parts = parse_pos_enc(pos_enc, pos_enc_kwargs)
        if 'pos_embed' in kwargs:
            raise ValueError("pos_embed= is decided by pos_enc=: use pos_enc='ape' for 'learn', 'nope' for 'none'.")
        for name in ('block_fn', 'attn_layer'):
            if name in kwargs:
                raise ValueError(f'{name}= cannot be chosen: position acts inside the block and attention used here.')
        for name in kwargs:
            for part in parts:
                if name in encoding_keywords(part):
                    raise ValueError(
                        f'{name}= belongs to an encoding: pos_enc_kwargs={{{part!r}: {{{name!r}: ...}}}} sets it.')
        check_flags(
            dynamic_img_size=dynamic_img_size, dynamic_img_pad=dynamic_img_pad,
            **{name: value for name, value in kwargs.items() if name in FLAGS})
        check_sizes(img_size, patch_size, pads=dynamic_img_pad)
        check_model_args(embed_dim, num_heads, depth, kwargs.get('reg_tokens', 0), patch_drop_rate)
        check_ref_grid_size(ref_grid_size)
        check_logit_scaling(logit_scaling)

        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            dynamic_img_size=dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            patch_drop_rate=patch_drop_rate,
            pos_embed='learn',
            block_fn=PosEncBlock,
            attn_layer=PosEncAttention,
            device=device,
            dtype=dtype,
            **kwargs,
        )
        self._set_encodings(parts, ref_grid_size, device, dtype, logit_scaling=logit_scaling)

    def _set_encodings(self, parts: Dict[str, Dict[str, Any]], *args, **kwargs) -> None:
        if not {'ape', 'auto_ape'} & parts.keys():
            self.pos_embed = None
        super()._set_encodings(parts, *args, **kwargs)

    @property
    def grid_size(self) -> Tuple[int, int]:
        return self.patch_embed.grid_size

    @property
    def kernel_size(self) -> Tuple[int, int]:
        return self.patch_embed.patch_size

    def convert_checkpoint(self, state_dict: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        checkpoints.refuse_other_host(state_dict, self)
        return convert_to_plain(state_dict, self)

    def prefix_tokens(self) -> List[nn.Parameter]:
        """Class and register tokens, as far as the model has them, in this order, each `[1, n, D]` for n tokens."""
        return [token for token in (self.cls_token, self.reg_token) if token is not None]

    @property
    def patch_size(self) -> Tuple[int, int]:
        """Height and width of a patch in pixels.

        With a convolutional stem this is more than the kernel size of the last layer of the patch embedding.
        """
        (stem_y, stem_x), (height, width) = self._stem_stride, self.kernel_size
        return stem_y * height, stem_x * width

    @property
    def _stem_stride(self) -> Tuple[int, int]:
        """(y, x) stride of a convolutional stem. Its convolutions round up, and timm's `feature_ratio` rounds down."""
        if not isinstance(self.patch_embed, HybridEmbed):
            return 1, 1
        sizes = zip(self.patch_embed.img_size, self.patch_embed.feature_size)
        height, width = (2 ** round(math.log2(pixels / features)) for pixels, features in sizes)
        return height, width

    @torch.inference_mode(False)  # tables made in it would never train
    def set_input_size(
            self,
            img_size: Optional[Tuple[int, int]] = None,
            patch_size: Optional[Tuple[int, int]] = None,
    ) -> None:
        """Change the image or patch size of the model.

        Each encoding follows its rule for a grid that it was not trained on. A table is resampled from its current
        size, so changing the size and changing it back does not restore it. Where layers were made to share a table,
        each has its own afterwards. Resampled tables are new parameters, which an optimizer or an EMA made before does
        not know: make a new one.

        Args:
            img_size: New image size (height, width) in pixels, None to keep it.
            patch_size: New patch size (height, width) in pixels, None to keep it.

        Raises:
            ValueError: If the patch size does not divide the image size, or a table is pruned or parametrized.
        """
        kernel, stride = self.patch_embed.patch_size, self.patch_size
        new_kernel = kernel if patch_size is None else as_pair(patch_size)
        new_size = self.patch_embed.img_size if img_size is None else as_pair(img_size)
        check_integers(img_size=new_size, patch_size=new_kernel)
        if (new_size, new_kernel) != (self.patch_embed.img_size, kernel):
            new_patch = tuple(s // k * n for s, k, n in zip(stride, kernel, new_kernel))
            check_sizes(new_size, new_patch, pads=self.patch_embed.dynamic_img_pad)
            self._check_tables()
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        for encoding in self.position_encodings().values():
            encoding.set_grid_size(self.patch_embed.grid_size)

    def _check_tables(self) -> None:
        """Check before anything is resized that every table can be, because half a resized model is of no use."""
        tables = [] if self.pos_embed is None else ['pos_embed']
        for path, encoding in self.position_encodings().items():
            if isinstance(encoding, ResizedEncoding):
                tables += [f'{path}.{name}' for name in encoding.RESIZED]
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for table in tables:
            if table not in parameters:
                raise ValueError(
                    f'{table} is pruned or has a parametrization, so it cannot be resized. Remove that first, by '
                    'torch.nn.utils.prune.remove or torch.nn.utils.parametrize.remove_parametrizations.')

    def embed(
            self,
            x: torch.Tensor,
            keep_indices: Optional[torch.Tensor] = None,
            object_index: Optional[torch.Tensor] = None,
    ) -> Tuple[torch.Tensor, Position]:
        """Everything before the blocks. `forward_features` calls it, and so can code that runs the blocks one by one.

        Args:
            x: Images, `[B, C, height, width]`.
            keep_indices: As for `forward_features`.
            object_index: As for `forward_features`.

        Returns:
            Tokens, `[B, N, D]`, and the position, which each block needs: `block(tokens, position=position)`.

        Raises:
            ValueError: As `forward_features`.
        """
        if not hasattr(self.patch_embed, 'strict_img_size'):
            raise ValueError(
                f'patch_embed is a {type(self.patch_embed).__name__}, which does not tell the grid of patches. Derive '
                "it from timm's PatchEmbed, and give it to timm.create_model as embed_layer.")
        is_strict = self.patch_embed.strict_img_size
        grid = _grid(
            x, self._stem_stride, self.kernel_size, self.num_prefix_tokens,
            img_size=self.patch_embed.img_size if is_strict else None,
            grid_size=self.patch_embed.grid_size if is_strict else None,
            pad=self.patch_embed.dynamic_img_pad,
        )
        tokens, grid = keep_patches(
            self.patch_drop, self._with_prefix_tokens(self.patch_embed(x)), grid, keep_indices)
        tokens, position = self.encodings(tokens, grid, self._given(x, object_index))
        return self.norm_pre(self.pos_drop(tokens)), position

    def _with_prefix_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """From the output of the patch embedding to tokens without position, `[B, P+H*W, D]`."""
        x = self.widen(x.flatten(1, -2))  # [B, H*W, D]
        prefix = [token.expand(x.shape[0], -1, -1) for token in self.prefix_tokens()]
        return torch.cat([*prefix, x], dim=1)

    def _given(self, images: Optional[torch.Tensor], object_index: Optional[torch.Tensor]) -> Dict[str, Any]:
        table = self.pos_embed
        if table is not None and self.no_embed_class:
            table = F.pad(table, (0, 0, self.num_prefix_tokens, 0))
        return {
            'pos_embed': table, 'images': images, 'patch_size': self.patch_size, 'object_index': object_index}

    def _pos_embed(self, x: torch.Tensor, object_index: Optional[torch.Tensor] = None) -> torch.Tensor:
        """timm's step between patch embedding and blocks, for code that calls timm's methods one by one.

        The model itself does not call it. A subclass overrides `embed` instead.
        """
        size = x.shape[1:3] if x.ndim == 4 else self.patch_embed.grid_size
        grid = Grid(*size, self.num_prefix_tokens, device=x.device)
        x, _ = self.encodings(self._with_prefix_tokens(x), grid, self._given(None, object_index))
        return self.pos_drop(x)

    def forward(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
            keep_indices: Optional[torch.Tensor] = None,
            object_index: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """From images `[B, C, height, width]` to class logits. Arguments as for `forward_features`."""
        return self.forward_head(self.forward_features(x, attn_mask, is_causal, keep_indices, object_index))

    def forward_features(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
            keep_indices: Optional[torch.Tensor] = None,
            object_index: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """From images to normed tokens.

        Args:
            x: Images, `[B, C, height, width]`.
            attn_mask: Added to the logits, or bool with True where attention is allowed. Broadcastable to
                `[B, h, P+H*W, P+H*W]`, of two or four dimensions, for all tokens of the grid; entries of dropped
                patches are ignored. A token whose row is all False, or all -inf, gets zeros from attention.
            is_causal: Mask out all tokens that are later in the sequence; patches come in the order of `keep_indices`.
            keep_indices: Raster indices of the patches to keep, as for masked autoencoders, int64 `[B, K]`, distinct
                and in any order. They replace patch dropout in this pass, and N is P + K.
            object_index: Which object each patch belongs to, integers `[B, H*W]`, for encodings that use it (`ope`).
                If it is not given, they derive it from the image.

        Returns:
            `[B, N, D]`.

        Raises:
            ValueError: If an argument has the wrong shape, dtype or range, or no encoding uses `object_index`.
        """
        x, position = self.embed(x, keep_indices, object_index)
        mask = _keep_mask(attn_mask, position, x, self.num_heads)
        x, _ = self._run_blocks(x, position, mask, is_causal)
        return self.norm(x)

    def forward_intermediates(
            self,
            x: torch.Tensor,
            indices: Optional[Union[int, List[int]]] = None,
            return_prefix_tokens: bool = False,
            norm: bool = False,
            stop_early: bool = False,
            output_fmt: str = 'NCHW',
            intermediates_only: bool = False,
            output_dict: bool = False,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
            keep_indices: Optional[torch.Tensor] = None,
            object_index: Optional[torch.Tensor] = None,
    ) -> Union[List[torch.Tensor], Tuple[torch.Tensor, List[torch.Tensor]], Dict[str, Any]]:
        """Features of several blocks in one forward pass, with the arguments and results of timm's method.

        Args:
            x: Images, `[B, C, height, width]`.
            indices: Indices of the blocks, or an int for the last so many, or None for all.
            return_prefix_tokens: Return the prefix tokens of each block too.
            norm: Apply the final norm to each.
            stop_early: Stop after the last block that is needed.
            output_fmt: 'NCHW' for maps `[B, D, H, W]`, 'NLC' for tokens `[B, H*W, D]`.
            intermediates_only: Leave out the final features.
            output_dict: Return a dict with `image_features`, `image_intermediates`, `image_intermediates_prefix`.
            attn_mask: As for `forward_features`.
            is_causal: Mask out all tokens that are later in the sequence; patches come in the order of `keep_indices`.
            keep_indices: As for `forward_features`.
            object_index: As for `forward_features`.

        Returns:
            The final features `[B, N, D]` and a list of intermediates, or what the flags above say.

        Raises:
            ValueError: If `output_fmt` is unknown, or 'NCHW' while patches are being dropped, or as `forward_features`.
        """
        if output_fmt not in ('NCHW', 'NLC'):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}.")
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        x, position = self.embed(x, keep_indices, object_index)
        grid = position.grid
        if output_fmt == 'NCHW' and grid.keep_indices is not None:
            raise ValueError("With patches dropped there is no map to return: use output_fmt='NLC', or model.eval().")
        attn_mask = _keep_mask(attn_mask, position, x, self.num_heads)
        x, taken = self._run_blocks(
            x, position, attn_mask, is_causal, take_indices, max_index + 1 if stop_early else None)
        return self._collect_intermediates(
            x, taken, grid.size if output_fmt == 'NCHW' else None, return_prefix_tokens, norm, intermediates_only,
            output_dict)


# torch.fx cannot trace what follows: it depends on sizes and on which arguments are given.

@torch.fx.wrap
def _keep_mask(
        attn_mask: Optional[torch.Tensor],
        position: Position,
        x: torch.Tensor,
        num_heads: int,
) -> Optional[torch.Tensor]:
    """A mask for all tokens of the grid, reduced to the tokens in the sequence, x."""
    if attn_mask is None:
        return None
    grid = position.grid
    num_tokens = grid.num_prefix_tokens + grid.num_patches
    ops.check_mask(attn_mask, (x.shape[0], num_heads, num_tokens, num_tokens), x.device)
    return grid.keep_pairs(attn_mask)


@torch.fx.wrap
def _grid(
        images: torch.Tensor,
        stem: Tuple[int, int],
        kernel: Tuple[int, int],
        num_prefix_tokens: int,
        img_size: Optional[Tuple[int, int]],
        grid_size: Optional[Tuple[int, int]],
        pad: bool,
) -> Grid:
    """The whole grid of a batch of images. Symbolic sizes stay symbolic.

    Args:
        images: `[B, C, height, width]`.
        stem: Stride of a convolutional stem, (y, x), which rounds up; (1, 1) without.
        kernel: (height, width) of the last layer of the patch embedding.
        num_prefix_tokens: P.
        img_size: The only image size allowed, (height, width), or None for any.
        grid_size: Its grid, (H, W). None if images may have any size.
        pad: Whether images are padded to a multiple of the patch size.

    Raises:
        ValueError: If the input is not a tensor of images, or their size does not fit.
    """
    if isinstance(images, dict):
        raise ValueError(
            f'The model takes images [B, C, height, width], not a dict of {", ".join(images)}. Its twin for patches '
            "with coordinates is named 'naflexvit_...' instead of 'vit_...', and loads its weights.")
    if not isinstance(images, torch.Tensor):
        raise ValueError(
            f'The model takes a tensor of images [B, C, height, width], got {type(images).__name__}.')
    if images.ndim != 4:
        batch = ' Give a single image as image[None].' if images.ndim == 3 else ''
        raise ValueError(f'The model takes images [B, C, height, width], not {list(images.shape)}.{batch}')
    height, width = images.shape[-2:]
    if img_size is not None and (height != img_size[0] or width != img_size[1]):
        raise ValueError(
            f'The image is {height}x{width}, the model is made for {img_size[0]}x{img_size[1]}. Resize the image, call '
            'model.set_input_size(), or create the model with img_size= or dynamic_img_size=True.')
    # A grafted model may have a stem, or an image size that is no multiple of the patch size. As in timm, the rest is
    # cropped.
    if not pad and img_size is None and stem == (1, 1) and (height % kernel[0] or width % kernel[1]):
        raise ValueError(
            f'The image is {height}x{width}, which the patch size {kernel[0]}x{kernel[1]} does not divide. '
            'Resize it, or create the model with dynamic_img_pad=True.')
    if grid_size is not None and not pad:
        return Grid(*grid_size, num_prefix_tokens, device=images.device)
    # rounds up in the divisions below; ONNX has no other way
    if stem != (1, 1):
        height, width = (height + stem[0] - 1) // stem[0], (width + stem[1] - 1) // stem[1]
    if pad:
        height, width = height + kernel[0] - 1, width + kernel[1] - 1
    return Grid(height // kernel[0], width // kernel[1], num_prefix_tokens, device=images.device)


def _describe(size: str) -> str:
    width, depth, heads = SIZES[size].values()
    return f'ViT of width {width}, depth {depth}, {heads} heads, patch 16'


default_cfgs = generate_default_cfgs({entry.name: base_cfg(entry.size) for entry in entrypoints()})

for _entry in entrypoints():
    setattr(sys.modules[__name__], _entry.name, register_model(
        make_entrypoint(VisionTransformerPosEnc, _entry, _describe(_entry.size), patch_size=16)))
