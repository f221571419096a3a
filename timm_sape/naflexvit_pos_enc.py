"""NaFlexVit with a choice of position encodings: images of any sizes and aspect ratios in one batch.

timm's NaFlexVit takes a dict of patches, their coordinates and their validity, as `--naflex-loader` of timm's train.py
makes it, or plain images. Here images of one grid form a group, and each encoding does on a group what it does on a
batch of plain images (`grid_groups.py`). So an image gets what it would get alone, at its own size, wherever its
patches stand in the sequence; padding takes part in nothing.
"""
import difflib
import math
import sys
from dataclasses import fields, replace
from typing import Any, Callable, Dict, List, Mapping, NoReturn, Optional, Sequence, Set, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import PatchDropoutWithIndices
from timm.models import generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models.naflexvit import NaFlexEmbeds, NaFlexVit, NaFlexVitCfg

from . import ops
from .attention import adopt_blocks
from .conversion import convert_to_naflex
from .encodings import parse_pos_enc
from .entrypoints import base_cfg, entrypoints, make_entrypoint
from .grid import Grid
from .grid_groups import GridGroups, grid_sizes, group_by_grid
from .host import PosEncModel, keep_patches
from .model_args import check_flags, check_logit_scaling, check_model_args, check_ref_grid_size, check_sizes
from .position import AnyPosition, MixedPosition, Position

__all__ = ['NaFlexVitPosEnc']  # register_model adds each entrypoint to this

# as in `vit_pos_enc`
FLAGS = {field.name for field in fields(NaFlexVitCfg) if isinstance(field.default, bool)}
ImagesOrPatches = Union[torch.Tensor, Mapping[str, torch.Tensor]]


class PosEncEmbeds(NaFlexEmbeds):
    """timm's embedding of patches, which can also be called for its table alone."""

    def forward(self, patches, *args, of_table: Optional[Callable[[NaFlexEmbeds], torch.Tensor]] = None, **kwargs):
        """As timm's; with `of_table` the result is `of_table(self)`, and no tokens are computed.

        Code outside cannot read the table directly: FSDP and accelerate move the parameters of a module to the device
        only while it is called. So if the model has a table, forward hooks on this module fire again for it: once for
        that of `ape`, `[1, P+H*W, D]`; once for each size of images for a graft's own, `[H*W, D]`.
        """
        return super().forward(patches, *args, **kwargs) if of_table is None else of_table(self)


class NaFlexVitPosEnc(PosEncModel, NaFlexVit):
    """timm's NaFlexVit with any set of position encodings.

    Its state dict is timm's, plus the encodings' own entries, as in `VisionTransformerPosEnc`. `ape` is timm's
    `embeds.pos_embed`. A checkpoint of `VisionTransformerPosEnc` loads with `pretrained=True`.

    It takes images of any size as it is. So, like timm's NaFlexVit, it has no `set_input_size`.
    """
    def __init__(
            self,
            cfg: Optional[NaFlexVitCfg] = None,
            in_chans: int = 3,
            num_classes: int = 1000,
            img_size: Union[int, Tuple[int, int]] = 224,
            *,
            pos_enc: str = 'ape',
            pos_enc_kwargs: Optional[Dict[str, Dict[str, Any]]] = None,
            ref_grid_size: Optional[Tuple[int, int]] = None,
            logit_scaling: str = 'constant',
            device=None,
            dtype=None,
            **kwargs,
    ) -> None:
        """
        Args:
            cfg: timm's configuration.
            in_chans: Channels of the images.
            num_classes: Classes, 0 for no head.
            img_size: Image size, or (height, width), whose grid of patches is the one that tables are made for. The
                model takes images of any size.
            pos_enc: Names of encodings joined by `+`, `'nope'` for none; see `timm_sape.list_encodings()`.
            pos_enc_kwargs: Keywords of each part, keyed by its name; plain JSON.
            ref_grid_size: As for `VisionTransformerPosEnc`.
            logit_scaling: Likewise; each image has the factor of its own size.
            kwargs: Fields of `NaFlexVitCfg`, but for `block_fn`, `attn_layer`, and those about position (`pos_embed*`,
                `rope_*`), which the encodings decide about.

        Raises:
            ValueError: If arguments do not fit together.
        """
        cfg = cfg or NaFlexVitCfg(global_pool='token', class_token=True)
        parts = parse_pos_enc(pos_enc, pos_enc_kwargs)
        _refuse_position_of_timm(cfg, kwargs)
        asked = {**vars(cfg), **kwargs}
        check_flags(**{name: asked[name] for name in FLAGS})
        check_sizes(img_size, asked['patch_size'], pads=asked['dynamic_img_pad'], pad='dynamic_img_pad=True')
        check_model_args(*(
            asked[name] for name in ('embed_dim', 'num_heads', 'depth', 'reg_tokens', 'patch_drop_rate')))
        check_ref_grid_size(ref_grid_size)
        check_logit_scaling(logit_scaling)
        if asked['fc_norm'] is None:  # as the plain model, so that their checkpoints fit each other
            kwargs['fc_norm'] = asked['global_pool'] in ('avg', 'avgmax', 'max')
        super().__init__(
            replace(cfg, pos_embed='learned', pos_embed_grid_size=None, rope_type='', block_fn=None, attn_layer=None),
            in_chans=in_chans,
            num_classes=num_classes,
            img_size=img_size,
            device=device,
            dtype=dtype,
            **kwargs,
        )
        adopt_blocks(self.blocks)
        self._set_encodings(parts, ref_grid_size, device, dtype, logit_scaling=logit_scaling)

    def _set_encodings(self, parts: Dict[str, Dict[str, Any]], *args, **kwargs) -> None:
        self._take_over_embeds()
        if not self.base_position and not {'ape', 'auto_ape'} & parts.keys():
            self.embeds.pos_embed = None
        rotates = self.rope is not None
        own_rotation = self.blocks[0].attn.rotate_half if rotates else None
        super()._set_encodings(parts, *args, own_rotation=own_rotation, **kwargs)

    def _take_over_embeds(self) -> None:
        """Have `embeds` return tokens without position and without dropout; both follow, image by image."""
        self.base_table = self.embeds.pos_embed_type if self.base_position else 'none'
        self.embeds.pos_embed_type = 'none'
        self.embeds.__class__ = PosEncEmbeds
        self.pos_drop, self.embeds.pos_drop = self.embeds.pos_drop, nn.Identity()
        self._traits = {**self._traits, 'first_conv': None}  # timm cannot adapt its channels, convert_checkpoint does

    def no_weight_decay(self) -> Set[str]:
        own = () if self.rope is None else self.rope.named_parameters()  # timm names them without the module
        return super().no_weight_decay() | {f'rope.{name}' for name, _ in own}

    def group_matcher(self, coarse: bool = False) -> Dict[str, Union[str, List]]:
        matcher = super().group_matcher(coarse)
        return dict(matcher, stem=matcher['stem'] + r'|norm_pre|rope\.')

    def prune_intermediate_layers(self, *args, **kwargs) -> List[int]:
        taken = super().prune_intermediate_layers(*args, **kwargs)
        if self.rope_is_mixed:  # a saved model is built again with frequencies for its blocks alone
            freqs, self.rope.depth = self.rope.freqs, len(self.blocks)  # [2, L, h, d/2]
            self.rope.freqs = nn.Parameter(freqs.detach()[:, :self.rope.depth].clone(), freqs.requires_grad)
        return taken

    @property
    def grid_size(self) -> Tuple[int, int]:
        return tuple(self.embeds.pos_embed_grid_size or (16, 16))  # timm's default

    @property
    def patch_size(self) -> Tuple[int, int]:
        return self.embeds.patch_size

    kernel_size = patch_size

    def convert_checkpoint(self, state_dict: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return convert_to_naflex(state_dict, self)

    def embed(
            self,
            x: ImagesOrPatches,
            patch_coord: Optional[torch.Tensor] = None,
            patch_valid: Optional[torch.Tensor] = None,
            grid_size: Optional[torch.Tensor] = None,
            keep_indices: Optional[torch.Tensor] = None,
            object_index: Optional[torch.Tensor] = None,
    ) -> Tuple[torch.Tensor, AnyPosition]:
        """Everything before the blocks, for code that runs the blocks one by one.

        Args:
            x: Images or patches, as for `forward`.
            patch_coord: As for `forward`.
            patch_valid: As for `forward`.
            grid_size: As for `forward`.
            keep_indices: As for `forward`.
            object_index: As for `forward`.

        Returns:
            Tokens `[B, N, D]`, and what the blocks need to know: `block(tokens, position=position)`.

        Raises:
            ValueError: As `forward`.
        """
        x, arguments = _from_dict(
            x, patch_coord=patch_coord, patch_valid=patch_valid, grid_size=grid_size, keep_indices=keep_indices,
            object_index=object_index)
        return self._embed(x, **arguments)[:2]

    def _embed(
            self,
            x: torch.Tensor,
            patch_coord: Optional[torch.Tensor],
            patch_valid: Optional[torch.Tensor],
            grid_size: Optional[torch.Tensor],
            keep_indices: Optional[torch.Tensor],
            object_index: Optional[torch.Tensor],
    ) -> Tuple[torch.Tensor, AnyPosition, Optional[torch.Tensor], Optional[torch.Tensor]]:
        """As `embed`, plus the `patch_valid` of the patches that are left, and their indices in the input, `[B, K]`."""
        if patch_coord is None:
            for name, given in (('patch_valid', patch_valid), ('grid_size', grid_size)):
                if given is not None:
                    raise ValueError(f'{name}= has no effect on images. Leave it out, or give patch_coord=, too.')
            return self._embed_images(x, keep_indices, object_index)
        if torch.jit.is_tracing() or ops.is_exporting():
            raise ValueError(
                'A batch of patches cannot be traced or exported: the steps depend on the coordinates. Trace or export '
                'the model with images.')
        self._check_patches(x, patch_coord, patch_valid, grid_size, object_index)
        if patch_valid is None:
            patch_valid = torch.ones(patch_coord.shape[:2], dtype=torch.bool, device=x.device)
        patch_valid, patch_coord = patch_valid.bool(), patch_coord.long()
        x = x.masked_fill(~patch_valid[(...,) + (None,) * (x.ndim - 2)], 0)  # 0 * NaN is a NaN in the weights' gradient
        if grid_size is None:
            grid_size = grid_sizes(patch_coord, patch_valid)
        tokens, _ = self.embeds(x, patch_coord=patch_coord, patch_valid=patch_valid)
        tokens = self.widen(tokens)
        sequence = Grid(1, x.shape[1], self.num_prefix_tokens, device=x.device)
        is_given = keep_indices is not None
        if not is_given and self._drops_patches():
            keep_indices = self._draw_patches(patch_valid)
        tokens, sequence = keep_patches(self.patch_drop, tokens, sequence, keep_indices)
        kept = sequence.keep_indices
        if is_given:
            _refuse_empty_images(
                patch_valid.gather(1, kept), 'keep_indices keeps no valid patch', 'Keep one at least.')
        if kept is not None:
            x, patch_coord, patch_valid, object_index = (
                None if t is None else t.gather(1, kept.view(*kept.shape, *(1,) * (t.ndim - 2)).expand(
                    -1, -1, *t.shape[2:])) for t in (x, patch_coord, patch_valid, object_index))
        groups = group_by_grid(patch_coord, patch_valid, grid_size, self.num_prefix_tokens)
        tokens, position = self._encode_groups(tokens, x, groups, object_index)
        return self.norm_pre(self.pos_drop(tokens)), position, patch_valid, kept

    def _drops_patches(self) -> bool:
        return isinstance(self.patch_drop, PatchDropoutWithIndices) and self.patch_drop.training

    def _draw_patches(self, valid: torch.Tensor) -> Optional[torch.Tensor]:
        """Indices of the patches that patch dropout keeps, `[B, K']`: as timm draws them, among padding too.

        If nothing but padding would be kept of an image, its first valid patch takes the place of one entry.
        """
        _, kept = self.patch_drop(F.pad(valid[..., None].float(), (0, 0, self.num_prefix_tokens, 0)))
        if kept is None:
            return None
        is_lost = ~valid.gather(1, kept).any(dim=1, keepdim=True)
        first = torch.where(is_lost, valid.int().argmax(dim=1, keepdim=True), kept[:, :1])
        return torch.cat([first, kept[:, 1:]], dim=1)

    @torch.compiler.disable  # it would be compiled again for other sizes
    def _encode_groups(
            self,
            tokens: torch.Tensor,
            patches: torch.Tensor,
            groups: GridGroups,
            object_index: Optional[torch.Tensor],
    ) -> Tuple[torch.Tensor, MixedPosition]:
        """As `_encode`, group by group."""
        images, objects = self._images(patches, groups), self._objects(object_index, groups)
        given = {**self._given(patches), 'patch_size': self._size_of(patches)}
        parts = [
            self._encode(part, grid, {**given, 'images': image, 'object_index': index}, is_naflex=True)
            for part, grid, image, index in zip(groups.split(tokens), groups.grids, images, objects)]
        tokens = groups.merge([part for part, _ in parts])
        return tokens, MixedPosition.of(groups, [position for _, position in parts], tokens)

    def _embed_images(
            self,
            images: torch.Tensor,
            keep_indices: Optional[torch.Tensor],
            object_index: Optional[torch.Tensor],
    ) -> Tuple[torch.Tensor, Position, None, Optional[torch.Tensor]]:
        if not isinstance(images, torch.Tensor) or images.ndim != 4:
            got = list(images.shape) if isinstance(images, torch.Tensor) else type(images).__name__
            raise ValueError(
                f'The model takes images [B, C, height, width], or patches with patch_coord=, got {got} without '
                'coordinates.')
        (height, width), (ph, pw) = images.shape[-2:], self.patch_size
        if self.embeds.dynamic_img_pad:
            height, width = height + ph - 1, width + pw - 1
        elif height % ph or width % pw:
            raise ValueError(
                f'The image is {height}x{width}, which the patch size {ph}x{pw} does not divide. Resize it, or create '
                'the model with dynamic_img_pad=True.')
        grid = Grid(height // ph, width // pw, self.num_prefix_tokens, device=images.device)
        tokens, _ = self.embeds(images)
        tokens, grid = keep_patches(self.patch_drop, self.widen(tokens), grid, keep_indices)
        tokens, position = self._encode(
            tokens, grid, {**self._given(images), 'images': images, 'object_index': object_index}, is_naflex=False)
        return self.norm_pre(self.pos_drop(tokens)), position, None, grid.keep_indices

    def _encode(
            self,
            tokens: torch.Tensor,
            grid: Grid,
            given: Dict[str, Any],
            is_naflex: bool,
    ) -> Tuple[torch.Tensor, Position]:
        """Position for images of one grid: a grafted model's own, by timm's modules, and that of the encodings."""
        for term in self.base_terms(tokens, grid, is_naflex):
            tokens = tokens + term
        tokens, position = self.encodings(tokens, grid, given)
        if self.rope is None:
            return tokens, position
        table = self.rope.get_embed(shape=grid.size)  # [(L, h,) H*W, 2*d]
        if not self.rope_is_mixed:
            return tokens, replace(position, rotation=grid.keep_rows(table))
        return tokens, replace(position, layer_rotations=torch.stack([grid.keep_rows(t) for t in table.unbind(0)]))

    def base_terms(self, x: torch.Tensor, grid: Grid, is_naflex: bool = False) -> List[torch.Tensor]:
        """The base's own table, by the function that timm's model uses for images, or for patches."""
        if self.base_table == 'none':
            return []

        def of_table(embeds: NaFlexEmbeds) -> torch.Tensor:
            table = x.new_zeros(1, grid.num_patches, x.shape[-1])  # these functions add to what they are given
            if is_naflex and embeds.pos_embed_use_grid_sample:
                add = getattr(embeds, f'_apply_{self.base_table}_naflex_pos_embed_grid_sample')
                add(table, patch_coord=grid.coordinates(x.device)[None])
            else:
                getattr(embeds, f'_apply_{self.base_table}_pos_embed')(table, grid_size=grid.size)
            return table[0]

        table = grid.keep_tokens(grid.pad_tokens(self.embeds(x, of_table=of_table)))
        return [table if table.ndim == 3 else table[None]]

    def _given(self, x: torch.Tensor) -> Dict[str, Any]:
        table = None
        if not self.base_position and self.embeds.pos_embed is not None:
            # padding makes a copy, because FSDP and accelerate move the parameter away after the call
            table = self.embeds(
                x, of_table=lambda embeds: F.pad(embeds.pos_embed.flatten(1, 2), (0, 0, self.num_prefix_tokens, 0)))
        return {'pos_embed': table, 'patch_size': self.patch_size}

    def _size_of(self, patches: torch.Tensor) -> Tuple[int, int]:
        """(height, width) of patches `[B, K, ph*pw*C]`, `[B, K, ph, pw, C]`, or `[B, K, C, ph, pw]`."""
        if patches.ndim == 3:
            return self.patch_size
        return tuple(patches.shape[2:4] if self.embeds.channels_last else patches.shape[3:5])

    def _images(self, patches: torch.Tensor, groups: GridGroups) -> List[Optional[torch.Tensor]]:
        """The images of each group `[b, C, height, width]`, where an encoding asks for them and no patch is missing."""
        if not any('images' in encoding.asks_for for encoding in self.encodings.values()):
            return [None] * len(groups.grids)
        if patches.ndim == 3:
            size = (*self.patch_size, -1) if self.embeds.channels_last else (-1, *self.patch_size)
            patches = patches.unflatten(2, size)
        if self.embeds.channels_last:
            patches = patches.movedim(-1, 2)  # [B, K, C, ph, pw]
        p = self.num_prefix_tokens
        images = []
        for part, grid in zip(groups.split(F.pad(patches, (0, 0) * 3 + (p, 0))), groups.grids):
            part = part[:, p:].unflatten(1, grid.size) if grid.keep_indices is None else None  # [b, H, W, C, ph, pw]
            images.append(None if part is None else part.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3))
        return images

    def _objects(self, object_index: Optional[torch.Tensor], groups: GridGroups) -> List[Optional[torch.Tensor]]:
        """The objects of all places of each group's grid, `[b, H*W]`; 0 where a patch is missing."""
        if object_index is None:
            return [None] * len(groups.grids)
        p = self.num_prefix_tokens
        parts = groups.split(F.pad(object_index, (p, 0)))
        return [grid.scatter(part[:, None, p:, None])[:, 0, :, 0] for part, grid in zip(parts, groups.grids)]

    def _check_patches(self, x, coord, valid, grid_size, object_index) -> None:
        """
        Raises:
            ValueError: If shapes or dtypes of NaFlex input are wrong, or an image has no valid patch, or there is none.
        """
        if isinstance(x, torch.fx.Proxy):
            raise ValueError(
                'torch.fx cannot trace this model, whose steps depend on the input. Use torch.export; for features '
                "model.forward_intermediates; for attention timm's AttentionExtract(model, method='hook').")
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.ndim not in (3, 5):
            got = f'{x.dtype} {list(x.shape)}' if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(
                'With patch_coord= the input must be patches [B, K, patch height * patch width * C] of floating-point '
                f'numbers, got {got}. For images leave patch_coord out.')
        if 0 in x.shape[:2]:
            raise ValueError(f'There must be at least one image and one patch, got patches {list(x.shape)}.')
        if not self.embeds.is_linear:
            raise ValueError(
                "The patch embedding is a convolution, for images. For patches use embed_proj_type='linear'.")
        size, (ph, pw) = self.embeds.proj.in_features, self.patch_size
        if x.ndim == 5 and x.shape[4 if self.embeds.channels_last else 2] != self.embeds.in_chans:
            layout = 'ph, pw, C' if self.embeds.channels_last else 'C, ph, pw'
            raise ValueError(
                f'The model takes patches [B, K, {layout}] of {self.embeds.in_chans} channels, got {list(x.shape)}.')
        is_resized = x.ndim == 5 and self.supports_patch_interpolation
        if not is_resized and (math.prod(x.shape[2:]) != size or self._size_of(x) != (ph, pw)):
            raise ValueError(
                f'The patches {list(x.shape[2:])} have {math.prod(x.shape[2:])} values, they must have {size}: '
                f'{ph}x{pw} pixels in {self.embeds.in_chans} channels. For patches [B, K, ph, pw, C] of other sizes '
                'create the model with enable_patch_interpolator=True.')
        shape = tuple(x.shape[:2])
        _check_tensor('patch_coord', coord, (*shape, 2), 'integers', x.device)
        if valid is not None:
            _check_tensor('patch_valid', valid, shape, 'bool or integers', x.device)
            _refuse_empty_images(valid.bool(), 'patch_valid is False for all patches', 'Leave such images out.')
        if grid_size is not None:
            _check_tensor('grid_size', grid_size, (shape[0], 2), 'integers')
        if object_index is not None:
            _check_tensor('object_index', object_index, shape, 'integers', x.device)

    def forward(
            self,
            x: ImagesOrPatches,
            patch_coord: Optional[torch.Tensor] = None,
            patch_valid: Optional[torch.Tensor] = None,
            attn_mask: Optional[torch.Tensor] = None,
            grid_size: Optional[torch.Tensor] = None,
            keep_indices: Optional[torch.Tensor] = None,
            object_index: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Images or patches to logits.

        Args:
            x: Images `[B, C, height, width]`; or patches `[B, K, ph*pw*C]`, or `[B, K, ph, pw, C]` for a patch size
                other than the model's; or a dict of patches and any of the other arguments, as timm's loader makes it.
            patch_coord: (y, x) of each patch, 0-based integers in any order, `[B, K, 2]`.
            patch_valid: False or 0 for padding, `[B, K]`. None if there is none.
            attn_mask: Added to the logits, or bool with True where attention is allowed; broadcastable to
                `[B, h, N, N]` with N = P + K, of two or four dimensions. Padding is masked in any case.
            grid_size: (H, W) of each image, integers `[B, 2]`. Needed where patches of its last row or column are
                missing, or masked by `patch_valid`, which timm counts; otherwise found from the coordinates.
            keep_indices: Indices of the patches to keep among the input patches, distinct, int64 `[B, K']`.
            object_index: The object of each patch, integers `[B, K]`, for encodings that use it (`ope`; without it
                `ope` finds the objects of images that have all patches).

        Returns:
            `[B, num_classes]`.

        Raises:
            ValueError: If shapes or dtypes are wrong, an image has no valid patch or the same one twice, or
                coordinates are outside the grid.
        """
        features = self.forward_features(
            x, patch_coord, patch_valid, attn_mask,
            grid_size=grid_size, keep_indices=keep_indices, object_index=object_index)
        return self.forward_head(**features) if isinstance(features, dict) else self.forward_head(features)

    def _forward_embeds(self, *args, **kwargs) -> NoReturn:
        raise ValueError("This step of timm's would leave out the encodings. Call `embed`, which has the same purpose.")

    def forward_features(
            self,
            patches: ImagesOrPatches,
            patch_coord: Optional[torch.Tensor] = None,
            patch_valid: Optional[torch.Tensor] = None,
            attn_mask: Optional[torch.Tensor] = None,
            *,
            grid_size: Optional[torch.Tensor] = None,
            keep_indices: Optional[torch.Tensor] = None,
            object_index: Optional[torch.Tensor] = None,
    ) -> Union[torch.Tensor, Dict[str, torch.Tensor]]:
        """As `forward`, to normalized tokens `[B, N, D]`; for patches a dict of them and of `patch_valid`."""
        given = dict(grid_size=grid_size, keep_indices=keep_indices, object_index=object_index)
        x, position, valid, attn_mask = self._start(patches, patch_coord, patch_valid, attn_mask, given)
        x, _ = self._run_blocks(x, position, attn_mask)
        x = self.norm(x)
        return {'patches': x, 'patch_valid': valid} if isinstance(position, MixedPosition) else x

    def forward_intermediates(
            self,
            x: ImagesOrPatches,
            indices: Optional[Union[int, List[int]]] = None,
            return_prefix_tokens: bool = False,
            norm: bool = False,
            stop_early: bool = False,
            output_fmt: str = 'NCHW',
            intermediates_only: bool = False,
            output_dict: bool = False,
            patch_coord: Optional[torch.Tensor] = None,
            patch_valid: Optional[torch.Tensor] = None,
            attn_mask: Optional[torch.Tensor] = None,
            *,
            grid_size: Optional[torch.Tensor] = None,
            keep_indices: Optional[torch.Tensor] = None,
            object_index: Optional[torch.Tensor] = None,
    ) -> Union[List[torch.Tensor], Tuple[torch.Tensor, List[torch.Tensor]], Dict[str, Any]]:
        """Features of several blocks in one forward pass; timm's contract, arguments as for `forward`.

        Raises:
            ValueError: As `forward`; or if maps are asked for where there are none: of patches, or while some are
                being dropped; or if patches with coordinates are dropped at random and nothing would tell which.
        """
        if output_fmt not in ('NCHW', 'NLC'):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}.")
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        is_given = keep_indices is not None or isinstance(x, Mapping) and x.get('keep_indices') is not None
        is_random = not is_given and self._drops_patches()
        given = dict(grid_size=grid_size, keep_indices=keep_indices, object_index=object_index)
        x, position, valid, attn_mask = self._start(x, patch_coord, patch_valid, attn_mask, given)
        is_naflex = isinstance(position, MixedPosition)
        if output_fmt == 'NCHW' and (is_naflex or position.grid.keep_indices is not None):
            raise ValueError(
                "There are no maps of patches whose images differ in size, nor with patches dropped: use "
                "output_fmt='NLC'.")
        if is_naflex and is_random and not output_dict:
            raise ValueError('With patches dropped use output_dict=True, which returns the patch_valid that is left.')
        x, taken = self._run_blocks(
            x, position, attn_mask, take=take_indices, num_blocks=max_index + 1 if stop_early else None)
        out = self._collect_intermediates(
            x, taken, position.grid.size if output_fmt == 'NCHW' else None, return_prefix_tokens, norm,
            intermediates_only, output_dict)
        return {**out, 'patch_valid': valid} if output_dict and is_naflex else out

    def _start(
            self,
            x: ImagesOrPatches,
            patch_coord: Optional[torch.Tensor],
            patch_valid: Optional[torch.Tensor],
            attn_mask: Optional[torch.Tensor],
            given: Dict[str, Optional[torch.Tensor]],
    ) -> Tuple[torch.Tensor, AnyPosition, Optional[torch.Tensor], Optional[torch.Tensor]]:
        """Tokens, their position, the validity of the patches that are left, and the mask for them."""
        patches, arguments = _from_dict(
            x, patch_coord=patch_coord, patch_valid=patch_valid, attn_mask=attn_mask, **given)
        attn_mask = arguments.pop('attn_mask')
        x, position, valid, kept = self._embed(patches, **arguments)
        if attn_mask is None:
            return x, position, valid, None
        num_patches = patches.shape[1] if isinstance(position, MixedPosition) else position.grid.num_patches
        num_tokens = self.num_prefix_tokens + num_patches
        ops.check_mask(attn_mask, (len(x), self.num_heads, num_tokens, num_tokens), x.device)
        if kept is not None:
            attn_mask = Grid(1, num_patches, self.num_prefix_tokens, keep_indices=kept).keep_pairs(attn_mask)
        return x, position, valid, attn_mask


def _refuse_position_of_timm(cfg: NaFlexVitCfg, kwargs: Mapping[str, Any]) -> None:
    """Refuse the fields of timm's configuration that choose a position encoding, or other blocks or attention layers.

    Raises:
        ValueError: If one of them is given, as it has no effect here.
    """
    chosen = [field.name for field in fields(cfg) if getattr(cfg, field.name) != field.default] + list(kwargs)
    for name in chosen:
        if name == 'pos_embed_interp_mode' and {**vars(cfg), **kwargs}['enable_patch_interpolator']:
            continue  # it is that of the patch embedding too
        if name in ('block_fn', 'attn_layer') or name.startswith(('pos_embed', 'rope_')):
            instead = 'img_size= sets it' if name == 'pos_embed_grid_size' else 'pos_enc= decides about position'
            raise ValueError(f'{name}= cannot be chosen here: {instead}.')


def _from_dict(
        x: ImagesOrPatches,
        **arguments: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, Dict[str, Optional[torch.Tensor]]]:
    """The images or patches, and the other arguments. If x is a dict, what it has replaces them.

    Raises:
        ValueError: If x is a dict that lacks patches or coordinates, or misspells a name. Other entries, which loaders
            may add, are ignored, as in timm.
    """
    if not isinstance(x, Mapping):
        return x, arguments
    if not torch.compiler.is_compiling():
        _refuse_misspelt(x, ('patches', 'attn_mask', *arguments))
    for name in ('patches', 'patch_coord'):
        if x.get(name) is None and arguments.get(name) is None:
            has = ', '.join(key if value is not None else f'{key}=None' for key, value in x.items())
            raise ValueError(
                f'The dict lacks {name!r}, it has {has}. NaFlex input must have patches [B, K, ...], patch_coord '
                '[B, K, 2] and patch_valid [B, K], as create_naflex_loader of timm.data makes it.')
    return x['patches'], {name: given if x.get(name) is None else x[name] for name, given in arguments.items()}


def _refuse_misspelt(x: Mapping[str, Any], names: Sequence[str]) -> None:
    """
    Raises:
        ValueError: If an entry is named almost as one that is missing, or is a mask while none says what is padding.
    """
    missing = [name for name in names if x.get(name) is None]
    for key in (str(key) for key in x if key not in names):
        close = difflib.get_close_matches(key, missing, n=1, cutoff=0.75)
        if close:
            raise ValueError(f'The dict has {key!r}, which is no argument. Did you mean {close[0]!r}?')
        if key.endswith('mask') and 'patch_valid' in missing:
            raise ValueError(
                f'The dict has {key!r}, which is no argument. Padding is False in patch_valid [B, K]; attn_mask is for '
                'pairs of tokens.')


def _refuse_empty_images(valid: torch.Tensor, what: str, fix: str) -> None:
    """
    Args:
        valid: False for padding, bool `[B, K]`.
        what: Start of the message, which goes on with 'of image 0 of the batch'.
        fix: End of the message, what to do.

    Raises:
        ValueError: If all patches of an image are padding.
    """
    empty = ~valid.any(dim=1)
    if empty.any():
        raise ValueError(f'{what} of image {int(empty.nonzero()[0])} of the batch. {fix}')


def _check_tensor(
        name: str,
        tensor: Any,
        shape: Tuple[int, ...],
        kind: str,
        device: Optional[torch.device] = None,
) -> None:
    is_tensor = isinstance(tensor, torch.Tensor)
    wrong = not is_tensor or tuple(tensor.shape) != shape or tensor.is_floating_point() or tensor.is_complex()
    if wrong or kind == 'integers' and tensor.dtype == torch.bool:
        got = f'{tensor.dtype} {list(tensor.shape)}' if is_tensor else type(tensor).__name__
        raise ValueError(f'{name} must be {kind} {list(shape)}, got {got}.')
    if device is not None and tensor.device != device:
        raise ValueError(f'{name} must be on {device}, where the patches are, and is on {tensor.device}.')


# Of one image these models compute what the plain models compute.
default_cfgs = generate_default_cfgs({
    entry.name: base_cfg(entry.size, fixed_input_size=False, first_conv='embeds.proj')
    for entry in entrypoints('naflexvit')
})

for _entry in entrypoints('naflexvit'):
    setattr(sys.modules[__name__], _entry.name, register_model(make_entrypoint(
        NaFlexVitPosEnc, _entry, f"timm's NaFlexVit in the shape of `{_entry.size}`, for images of any aspect ratio",
        patch_size=16, class_token=True, global_pool='token')))
