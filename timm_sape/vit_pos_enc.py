"""Vision Transformer with a choice of position encodings.

timm's VisionTransformer, whose tokens, q and k, logits and values can carry any set of the registered encodings:

    image -> patch tokens on a grid
          -> encodings add to the tokens
          -> blocks of attention, where encodings rotate q and k, add to the logits and to the values
          -> timm's norm, pooling and head

Every entrypoint is timm's `vit_<size>_patch16_224` but for its encoding, so that comparing two of them compares
encodings.
"""
import sys
import warnings
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any, Callable, Dict, List, Mapping, Optional, Set, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
from timm.layers import PatchDropout, PatchDropoutWithIndices, to_2tuple
from timm.models import build_model_with_cfg, checkpoint, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import VisionTransformer

from . import checkpoints
from .attention import PosEncAttention, PosEncBlock
from .encodings import (
    PositionEncoding,
    ReferenceGridEncoding,
    ResizedEncoding,
    create_encoding,
    encoding_keywords,
    get_encoding,
    is_per_layer,
    list_encodings,
    parse_pos_enc,
)
from .encodings.checks import is_integer
from .encodings.registry import AUTO
from .grid import Grid
from .position import LayerEncodings, Position, SharedEncodings

__all__ = ['VisionTransformerPosEnc']  # register_model adds each entrypoint to this


class VisionTransformerPosEnc(VisionTransformer):
    """timm's Vision Transformer with any set of position encodings.

    Its state dict is timm's, plus the encodings' own entries, which carry their names: `encodings.<name>.*` for those
    that the model shares, `blocks.<i>.attn.encodings.<name>.*` for the others. `ape` is timm's `pos_embed`.
    """

    def __init__(
            self,
            img_size: Union[int, Tuple[int, int]] = 224,
            patch_size: Union[int, Tuple[int, int]] = 16,
            *,
            pos_enc: str = 'ape',
            pos_enc_kwargs: Optional[Dict[str, Dict[str, Any]]] = None,
            ref_grid_size: Optional[Tuple[int, int]] = None,
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
            ref_grid_size: (H, W) of the grid that the weights of encodings which never resize them (SaPE2, CoPE) were
                trained on. Found in checkpoints; to be given only to take weights in on a road that cannot adapt.
            embed_dim: Embed dim D.
            depth: Number of blocks.
            num_heads: Number of heads h.
            dynamic_img_size: Take images of any size that the patch size divides.
            dynamic_img_pad: With `dynamic_img_size`, pad images that it does not divide.
            patch_drop_rate: Share of patches to drop in training.
            kwargs: All else that timm's VisionTransformer takes, but for `pos_embed`, `block_fn` and `attn_layer`,
                which the encodings decide about.

        Raises:
            ValueError: If arguments do not fit together.
        """
        if kwargs.pop('use_naflex', False):
            raise ValueError(
                'use_naflex=True: this model does not take NaFlex input (patches with coordinates). Leave it out; '
                'dynamic_img_size=True takes images of any size, one size a batch.')
        parts = parse_pos_enc(pos_enc, pos_enc_kwargs)
        if 'pos_embed' in kwargs:
            raise ValueError("pos_embed= is decided by pos_enc=: use pos_enc='ape' for 'learn', 'nope' for 'none'.")
        for name in ('block_fn', 'attn_layer'):
            if name in kwargs:
                raise ValueError(f'{name}= cannot be chosen: position acts inside the block and attention used here.')
        for name in kwargs:
            for part in parts:
                if name in encoding_keywords(part):
                    raise ValueError(f'{name}= belongs to an encoding: pos_enc_kwargs={{{part!r}: {{{name!r}: ...}}}}.')
        _check_sizes(img_size, patch_size)
        if not 0 <= patch_drop_rate < 1:
            raise ValueError(f'patch_drop_rate must be at least 0 and less than 1, got {patch_drop_rate}.')
        for name, value, least in (
                ('embed_dim', embed_dim, 1), ('num_heads', num_heads, 1), ('depth', depth, 1),
                ('reg_tokens', kwargs.get('reg_tokens', 0), 0)):
            if not is_integer(value, least):
                raise ValueError(f'{name} must be an integer of at least {least}, got {value!r}.')
        if embed_dim % num_heads:
            raise ValueError(f'embed_dim={embed_dim} is not divisible by num_heads={num_heads}.')
        check_ref_grid_size(ref_grid_size)

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
        self._set_encodings(parts, ref_grid_size, device, dtype)

    def _set_encodings(
            self,
            parts: Dict[str, Dict[str, Any]],
            ref_grid_size: Optional[Tuple[int, int]] = None,
            device=None,
            dtype=None,
    ) -> None:
        """Give a model that timm's constructor has built its encodings.

        They come last because timm's constructor initializes every linear layer inside the blocks anew. They draw their
        initial values from a fork of the CPU's random generator, and leave it as timm leaves it. So models of one seed
        start from one backbone and see the same images in the same order, unless an encoding draws numbers while it
        trains (`cape`).

        Args:
            parts: Keywords of each encoding by its name, as of `parse_pos_enc`.
            ref_grid_size: As in the constructor.
            device: Device of parameters and buffers.
            dtype: Their dtype.
        """
        self.take_patch_drop(self.patch_drop)
        if not {'ape', 'auto_ape'} & parts.keys():
            del self.pos_embed
            self.pos_embed = None
        self.pos_enc = '+'.join(parts)
        self.pos_enc_kwargs = {name: keywords for name, keywords in parts.items() if keywords}
        create = partial(
            create_encoding,
            dim=self.embed_dim,
            num_heads=self.blocks[0].attn.num_heads,
            grid_size=self.patch_embed.grid_size,
            num_prefix_tokens=self.num_prefix_tokens,
            depth=len(self.blocks),
            ref_grid_size=ref_grid_size,
            device=device,
            dtype=dtype,
        )
        classes = {name: get_encoding(name) for name in parts}
        rotate_half = any(getattr(cls, 'rotate_half', False) for cls in classes.values())
        with torch.random.fork_rng(devices=[]):
            # not the numbers that are drawn next, say for a new head
            torch.default_generator.manual_seed(int(torch.randint(2 ** 62, (), device='cpu')))
            self.encodings = SharedEncodings({
                name: create(name, **keywords) for name, keywords in parts.items() if not is_per_layer(name)})
            for i, block in enumerate(self.blocks):
                own = [
                    name for name, cls in classes.items()
                    if is_per_layer(name) and (cls.first_layers is None or i < cls.first_layers)]
                block.attn.encodings = LayerEncodings(
                    {name: create(name, layer=i, **parts[name]) for name in own},
                    layer=i,
                    rotate_half=rotate_half,
                    needs_position=bool(own) or self.encodings.act_on_blocks(),
                )
        # If only parameters are on the meta device, accelerate will set the entries of a checkpoint one by one.
        if any(p.is_meta for p in self.parameters()) and not torch.empty(0, device=device).is_meta:
            for encoding in self.position_encodings().values():
                if isinstance(encoding, (ReferenceGridEncoding, ResizedEncoding)):
                    encoding.expect_grid()

    def take_patch_drop(self, patch_drop: Optional[nn.Module]) -> None:
        """Drop patches as timm's PatchDropout does, if this is one, such that encodings know which are left."""
        if isinstance(patch_drop, PatchDropout):
            self.patch_drop = PatchDropoutWithIndices(patch_drop.prob, self.num_prefix_tokens, patch_drop.ordered)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False):
        """As in torch, but refuses a checkpoint of other encodings or another grid before anything is loaded.

        Raises:
            ValueError: On such a checkpoint, naming the roads on which it would be adapted.
        """
        checkpoints.refuse_misfit(self, state_dict, strict)
        return super().load_state_dict(state_dict, strict, assign)

    def train(self, mode: bool = True) -> 'VisionTransformerPosEnc':
        """As in torch; warns of gates that are 0 and frozen, behind which an encoding does nothing and never will."""
        if mode and any(p.requires_grad for p in self.parameters()):
            gates = {
                name: encoding.gate.weight
                for encodings in (self.encodings, *(block.attn.encodings for block in self.blocks))
                for name, encoding in encodings.items() if encoding.gate is not None}
            closed = sorted(
                name for name, w in gates.items() if not w.requires_grad and not w.is_meta and w.item() == 0)
            if closed:
                warnings.warn(
                    f'The gates of {", ".join(closed)} are 0 and frozen: these encodings do nothing, and training will '
                    'not change that. Set requires_grad=True for their parameters; with peft, give its config '
                    f'modules_to_save={closed}.')
        return super().train(mode)

    def prefix_tokens(self) -> List[nn.Parameter]:
        """What stands before the patches, in this order, each `[1, P, D]`."""
        return [token for token in (self.cls_token, self.reg_token) if token is not None]

    @property
    def patch_size(self) -> Tuple[int, int]:
        """Height and width in pixels of the image part that a token stands for.

        Not that of the last kernel of the patch embedding, where a convolutional stem comes before it.
        """
        return self.patch_embed.feat_ratio(as_scalar=False)

    def position_encodings(self) -> Dict[str, PositionEncoding]:
        """All encodings of the model by their path in it."""
        return {name: m for name, m in self.named_modules() if isinstance(m, PositionEncoding)}

    @property
    def ref_grid_size(self) -> Optional[Tuple[int, int]]:
        """(H, W) that never-resized encodings were trained on, None without any."""
        for encoding in self.position_encodings().values():
            if isinstance(encoding, ReferenceGridEncoding) and encoding.saved_grid_size() is not None:
                return encoding.ref_grid_size
        return None

    # timm records here what a model was created with, and saves it as `model_args`. Ours adds what is true of the
    # encodings, in canonical form, however they were spelled and whatever has happened since.
    @property
    def _model_args(self) -> Dict[str, Any]:
        args = {**self._recorded_args, 'pos_enc': self.pos_enc, 'pos_enc_kwargs': self.pos_enc_kwargs}
        if self.ref_grid_size is not None:
            args['ref_grid_size'] = list(self.ref_grid_size)
        return args

    @_model_args.setter
    def _model_args(self, args: Dict[str, Any]) -> None:
        self._recorded_args = args

    _recorded_args: Dict[str, Any] = {}

    def no_weight_decay(self) -> Set[str]:
        """Names of parameters without weight decay."""
        return super().no_weight_decay() | {
            f'{path}.{name}' for path, encoding in self.position_encodings().items()
            for name in encoding.no_weight_decay()}

    def group_matcher(self, coarse: bool = False) -> Dict[str, Union[str, List]]:
        """Regular expressions of parameter groups, for layer-wise learning rates."""
        matcher = super().group_matcher(coarse)
        return dict(matcher, stem=matcher['stem'] + r'|encodings\.')

    def set_input_size(
            self,
            img_size: Optional[Tuple[int, int]] = None,
            patch_size: Optional[Tuple[int, int]] = None,
    ) -> None:
        """Change the image or patch size that the model is made for.

        Each encoding follows its rule for a grid that it was not trained on. A `pos_embed` is resampled from its
        present size, so going there and back again does not restore it.

        Args:
            img_size: New image size, None to keep it.
            patch_size: New patch size, None to keep it.

        Raises:
            ValueError: If the patch size does not divide the image size.
        """
        kernel, stride = self.patch_embed.patch_size, self.patch_size
        new_kernel = kernel if patch_size is None else to_2tuple(patch_size)
        new_size = self.patch_embed.img_size if img_size is None else to_2tuple(img_size)
        _check_integers(img_size=new_size, patch_size=new_kernel)
        if (new_size, new_kernel) != (self.patch_embed.img_size, kernel):
            _check_sizes(new_size, tuple(s // k * n for s, k, n in zip(stride, kernel, new_kernel)))
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        for encoding in self.position_encodings().values():
            encoding.set_grid_size(self.patch_embed.grid_size)

    def prune_intermediate_layers(
            self,
            indices: Union[int, List[int]] = 1,
            prune_norm: bool = False,
            prune_head: bool = True,
    ) -> List[int]:
        """Cut the model down to the layers that certain intermediates need; timm's contract."""
        taken = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        for encoding in self.encodings.values():
            encoding.set_depth(len(self.blocks))
        return taken

    def embed(
            self,
            x: torch.Tensor,
            keep_indices: Optional[torch.Tensor] = None,
            object_index: Optional[torch.Tensor] = None,
    ) -> Tuple[torch.Tensor, Position]:
        """Everything before the blocks. `forward_features` calls it; so may whoever runs the blocks one by one.

        Args:
            x: Images, `[B, C, height, width]`.
            keep_indices: As for `forward_features`, and so is `object_index`.

        Returns:
            Tokens, `[B, N, D]`, and what the blocks need to know: `block(tokens, position=position)`.

        Raises:
            ValueError: As `forward_features`.
        """
        grid = _grid(
            x, self.patch_size, self.num_prefix_tokens,
            img_size=self.patch_embed.img_size if self.patch_embed.strict_img_size else None,
            pad=self.patch_embed.dynamic_img_pad,
        )
        tokens, grid = _keep_patches(
            self.patch_drop, self._with_prefix_tokens(self.patch_embed(x)), grid, keep_indices)
        tokens, position = self.encodings(tokens, grid, self._given(x, object_index))
        return self.norm_pre(self.pos_drop(tokens)), position

    def _with_prefix_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """What the patch embedding returns to tokens without position, `[B, P+H*W, D]`."""
        x = x.flatten(1, -2)  # [B, H*W, D]
        prefix = [token.expand(x.shape[0], -1, -1) for token in self.prefix_tokens()]
        return torch.cat([*prefix, x], dim=1)

    def _given(self, images: Optional[torch.Tensor], object_index: Optional[torch.Tensor]) -> Dict[str, Any]:
        return {
            'pos_embed': self.pos_embed, 'images': images, 'patch_size': self.patch_size, 'object_index': object_index}

    def _pos_embed(self, x: torch.Tensor, object_index: Optional[torch.Tensor] = None) -> torch.Tensor:
        """timm's step between patch embedding and blocks, for code that takes timm's ViT apart."""
        size = x.shape[1:3] if x.ndim == 4 else self.patch_embed.grid_size
        grid = Grid(*size, self.num_prefix_tokens, device=x.device)
        x, _ = self.encodings(self._with_prefix_tokens(x), grid, self._given(None, object_index))
        return self.pos_drop(x)

    def _run_block(self, i: int, x, position: Position, attn_mask, is_causal) -> torch.Tensor:
        block = self.blocks[i]
        if not self.grad_checkpointing:
            return block(x, attn_mask, is_causal, position)

        # Reentrant checkpointing finds gradients of those tensors alone that are arguments themselves.
        def run(x, attn_mask, *tensors):
            return block(x, attn_mask, is_causal, position.with_tensors(*tensors))

        return checkpoint(run, x, attn_mask, *position.tensors())

    def forward(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
            object_index: Optional[torch.Tensor] = None,
            keep_indices: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Images `[B, C, height, width]` to logits; arguments as for `forward_features`."""
        return self.forward_head(self.forward_features(x, attn_mask, is_causal, object_index, keep_indices))

    def forward_features(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
            object_index: Optional[torch.Tensor] = None,
            keep_indices: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Images `[B, C, height, width]` to normalized tokens `[B, N, D]`.

        Args:
            x: Images.
            attn_mask: Added to the logits, or bool with True where attention is allowed; broadcastable to
                `[B, h, N, N]`, for all tokens of the grid (entries of dropped patches are left out).
            is_causal: Mask out all later tokens.
            object_index: Which object each patch belongs to, integers `[B, H*W]`, for encodings that use it (`ope`),
                which derive it from the image if it is not given.
            keep_indices: Raster indices of the patches to keep, distinct, in any order, int64 `[B, K]`, as for masked
                autoencoders. Takes the place of patch dropout in this pass. N is then P + K.

        Raises:
            ValueError: If an argument has the wrong shape, dtype or range, or no encoding uses `object_index`.
        """
        x, position = self.embed(x, keep_indices, object_index)
        attn_mask = _keep_mask(attn_mask, position)
        for i in range(len(self.blocks)):
            x = self._run_block(i, x, position, attn_mask, is_causal)
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
            object_index: Optional[torch.Tensor] = None,
            keep_indices: Optional[torch.Tensor] = None,
    ) -> Union[List[torch.Tensor], Tuple[torch.Tensor, List[torch.Tensor]], Dict[str, Any]]:
        """Features of several blocks in one forward pass; timm's contract.

        Args:
            x: Images, `[B, C, height, width]`.
            indices: The last n blocks if an int, all if None, else these.
            return_prefix_tokens: Return the prefix tokens of each block too.
            norm: Apply the final norm to each.
            stop_early: Stop after the last block that is asked for.
            output_fmt: 'NCHW' for maps `[B, D, H, W]`, 'NLC' for tokens `[B, H*W, D]`.
            intermediates_only: Leave the final features out.
            output_dict: Return a dict with `image_features`, `image_intermediates`, `image_intermediates_prefix`.
            attn_mask: As in `forward_features`.
            is_causal: Mask out all later tokens.
            object_index: As in `forward_features`, and so is `keep_indices`.

        Raises:
            ValueError: If maps are asked for while patches are being dropped.
        """
        if output_fmt not in ('NCHW', 'NLC'):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}.")
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        x, position = self.embed(x, keep_indices, object_index)
        grid = position.grid
        if output_fmt == 'NCHW' and grid.keep_indices is not None:
            raise ValueError("With patches dropped there is no map to return: use output_fmt='NLC', or model.eval().")
        attn_mask = _keep_mask(attn_mask, position)

        taken = []
        for i in range(max_index + 1 if stop_early else len(self.blocks)):
            x = self._run_block(i, x, position, attn_mask, is_causal)
            if i in take_indices:
                taken.append(self.norm(x) if norm else x)
        prefix = [y[:, :grid.num_prefix_tokens] for y in taken] if grid.num_prefix_tokens else None
        maps = [y[:, grid.num_prefix_tokens:] for y in taken]
        if output_fmt == 'NCHW':
            maps = [y.transpose(1, 2).reshape(y.shape[0], -1, *grid.size).contiguous() for y in maps]

        if output_dict:
            result = {'image_intermediates': maps}
            if prefix is not None and return_prefix_tokens:
                result['image_intermediates_prefix'] = prefix
            if not intermediates_only:
                result['image_features'] = self.norm(x)
            return result
        if prefix is not None and return_prefix_tokens:
            maps = list(zip(maps, prefix))
        return maps if intermediates_only else (self.norm(x), maps)


def _check_integers(**sizes) -> None:
    for name, size in sizes.items():
        size = to_2tuple(size)
        if len(size) != 2 or not all(isinstance(s, Integral) and s >= 1 for s in size):
            raise ValueError(f'{name} must be an integer of at least 1, or two: (height, width), got {size}.')


def _check_sizes(img_size, patch_size) -> None:
    _check_integers(img_size=img_size, patch_size=patch_size)
    img_size, patch_size = to_2tuple(img_size), to_2tuple(patch_size)
    fit = tuple(max(1, round(i / p)) * p for i, p in zip(img_size, patch_size))
    if any(i < p for i, p in zip(img_size, patch_size)):
        raise ValueError(f'img_size={img_size} is smaller than patch_size={patch_size}. Use at least img_size={fit}.')
    if fit != img_size:
        raise ValueError(
            f'patch_size={patch_size} does not divide img_size={img_size}. Use e.g. img_size={fit} or another '
            'patch_size; with that, dynamic_img_size=True, dynamic_img_pad=True pads images of any other size.')


def check_ref_grid_size(ref_grid_size: Any) -> None:
    """
    Raises:
        ValueError: If it is neither None nor (H, W).
    """
    size = ref_grid_size if isinstance(ref_grid_size, (tuple, list)) else ()
    if ref_grid_size is not None and (len(size) != 2 or not all(is_integer(s, 1) for s in size)):
        raise ValueError(f'ref_grid_size must be (H, W) in patches, got {ref_grid_size!r}.')


# What follows depends on sizes and on what is given, which torch.fx cannot look into.

@torch.fx.wrap
def _keep_patches(
        patch_drop: nn.Module,
        x: torch.Tensor,
        grid: Grid,
        keep_indices: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, Grid]:
    """Drop patches, those that the caller does not keep or else as patch dropout has it."""
    if keep_indices is not None:
        _check_keep_indices(keep_indices, x.shape[0], grid)
        index = F.pad(keep_indices + grid.num_prefix_tokens, (grid.num_prefix_tokens, 0))  # [B, P+K]
        index[:, :grid.num_prefix_tokens] = torch.arange(grid.num_prefix_tokens, device=index.device)
        x = x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
    elif isinstance(patch_drop, PatchDropoutWithIndices):
        x, keep_indices = patch_drop(x)
    elif not isinstance(patch_drop, nn.Identity):
        raise ValueError(
            f'patch_drop is a {type(patch_drop).__name__}, which does not tell the encodings which patches are left. '
            'Use timm.layers.PatchDropoutWithIndices, or create the model with patch_drop_rate=.')
    return x, grid if keep_indices is None else replace(grid, keep_indices=keep_indices)


def _check_keep_indices(keep_indices: torch.Tensor, batch: int, grid: Grid) -> None:
    is_tensor = isinstance(keep_indices, torch.Tensor)
    if not is_tensor or keep_indices.dtype != torch.int64 or keep_indices.ndim != 2 or len(keep_indices) != batch:
        got = f'{keep_indices.dtype} {list(keep_indices.shape)}' if is_tensor else type(keep_indices).__name__
        raise ValueError(f'keep_indices must be int64 [B, K] = [{batch}, K], got {got}.')
    if keep_indices.device.type != 'cpu' or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return  # a look at the values would make a GPU wait
    if keep_indices.numel() and (keep_indices.min() < 0 or keep_indices.max() >= grid.num_patches):
        raise ValueError(
            f'keep_indices must be from 0 to H*W - 1 = {grid.num_patches - 1}, got {keep_indices.min().item()} to '
            f'{keep_indices.max().item()}. Prefix tokens do not count.')
    ordered = keep_indices.sort(dim=1).values
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise ValueError('keep_indices has the same patch twice in an image. Name each patch once.')


@torch.fx.wrap
def _keep_mask(attn_mask: Optional[torch.Tensor], position: Position) -> Optional[torch.Tensor]:
    """Entries of the tokens that are there."""
    return None if attn_mask is None else position.grid.keep_pairs(attn_mask)


@torch.fx.wrap
def _grid(
        images: torch.Tensor,
        patch_size: Tuple[int, int],
        num_prefix_tokens: int,
        img_size: Optional[Tuple[int, int]],
        pad: bool,
) -> Grid:
    """The whole grid of images. `img_size` is the only size allowed, None for any. Symbolic sizes stay symbolic."""
    if isinstance(images, dict):
        raise ValueError(
            f'The model takes images [B, C, height, width], not NaFlex input (a dict of {", ".join(images)}).')
    height, width = images.shape[-2:]
    if img_size is not None and (height != img_size[0] or width != img_size[1]):
        raise ValueError(
            f'The image is {height}x{width}, the model is made for {img_size[0]}x{img_size[1]}. Resize the image, call '
            'model.set_input_size(), or create the model with img_size= or dynamic_img_size=True.')
    # A model grafted onto one of timm's may be made for a size that is not divided. The rest is left out, as there.
    if not pad and img_size is None and (height % patch_size[0] or width % patch_size[1]):
        raise ValueError(
            f'The image is {height}x{width}, which the patch size {patch_size[0]}x{patch_size[1]} does not divide. '
            'Resize it, or create the model with dynamic_img_pad=True.')
    if pad:
        height, width = height + patch_size[0] - 1, width + patch_size[1] - 1  # to round up; ONNX has no other way
    return Grid(height // patch_size[0], width // patch_size[1], num_prefix_tokens, device=images.device)


def _cfg(**kwargs) -> Dict[str, Any]:
    return {
        'num_classes': 1000,
        'input_size': (3, 224, 224),
        'pool_size': None,
        'crop_pct': 0.9,
        'interpolation': 'bicubic',
        'fixed_input_size': True,
        'mean': IMAGENET_INCEPTION_MEAN,
        'std': IMAGENET_INCEPTION_STD,
        'first_conv': 'patch_embed.proj',
        'classifier': 'head',
        'license': 'apache-2.0',
        **kwargs,
    }


def take_out_indices(kwargs: Dict[str, Any]) -> Any:
    """Remove timm's `out_indices` from the arguments of a model. Default: the last 3 layers, or all of fewer."""
    depth = kwargs.get('depth', 3)
    return kwargs.pop('out_indices', min(3, depth) if is_integer(depth, 1) else 3)  # what is no depth is refused later


def _create_vit(variant: str, pretrained: bool = False, **kwargs) -> VisionTransformerPosEnc:
    """Build a model by timm's builder.

    Raises:
        ValueError: If the encodings are not those of the saved model that it is made after, or weights do not fit.
    """
    checkpoints.refuse_other_encoding(variant, kwargs)
    ref_grid_size = kwargs.get('ref_grid_size')
    out_indices = take_out_indices(kwargs)
    filter_fn = partial(checkpoints.filter_state_dict, ref_grid_size=ref_grid_size)
    with checkpoints.reading_errors(variant) as reading:
        return build_model_with_cfg(
            reading.begins_after(VisionTransformerPosEnc),
            variant,
            pretrained,
            pretrained_filter_fn=reading.ends_before(filter_fn),
            feature_cfg=dict(out_indices=out_indices, feature_cls='getter'),
            **kwargs,
        )


# Entrypoints:
#   {size}_{encoding}       e.g. vit_small_sape2_k, vit_base_rope2d
#   {size}_{encoding}_ape   the same with timm's learned table, for encodings that add nothing to the tokens themselves
#   {size}_pos_enc          for any set of encodings, given by pos_enc=
SIZES = {
    'vit_tiny': dict(embed_dim=192, depth=12, num_heads=3),
    'vit_small': dict(embed_dim=384, depth=12, num_heads=6),
    'vit_base': dict(embed_dim=768, depth=12, num_heads=12),
    'test_vit': dict(embed_dim=64, depth=2, num_heads=4),
}


def _entrypoints() -> Dict[str, Tuple[str, str]]:
    """Size and `pos_enc` of each model name."""
    names = {}
    for size in SIZES:
        names[f'{size}_pos_enc'] = size, 'ape'
        for encoding in list_encodings(aliases=True):
            cls = get_encoding(encoding)
            if not cls.fits(SIZES[size]['embed_dim'], SIZES[size]['num_heads']):
                continue
            if cls.alone:
                names[f'{size}_{encoding}'] = size, encoding
            if cls.supplements_ape and (cls.per_layer or not cls.overrides('embed')):
                names[f'{size}_{encoding}_ape'] = size, f'{encoding}+ape'
    return names


default_cfgs = generate_default_cfgs({
    name: _cfg(input_size=(3, 160, 160)) if size == 'test_vit' else _cfg()
    for name, (size, _) in _entrypoints().items()
})


def _warn_of_misnomer(name: str, size: str, named: str, kwargs: Dict[str, Any]) -> None:
    """Warn if a model gets a name that states an encoding which it does not have."""
    given = kwargs.get('pos_enc', named)
    is_loaded = 'pos_enc' in (kwargs.get('pretrained_model_args') or {})  # then it was warned about when it was made
    if is_loaded or not isinstance(given, str):
        return
    lacking = {*parse_pos_enc(named)} - {part.removeprefix(AUTO) for part in parse_pos_enc(given)}
    if lacking:
        warnings.warn(
            f'{name} is created with pos_enc={given!r}, so despite its name it has no '
            f'{" and no ".join(sorted(lacking))}. Use {size}_pos_enc, whose name does not state an encoding.',
            stacklevel=3)


def _make_entrypoint(name: str, size: str, pos_enc: str) -> Callable[..., VisionTransformerPosEnc]:
    def entrypoint(pretrained: bool = False, **kwargs) -> VisionTransformerPosEnc:
        if name != f'{size}_pos_enc':
            _warn_of_misnomer(name, size, pos_enc, kwargs)
        model_args = dict(patch_size=16, pos_enc=pos_enc, **SIZES[size])
        return _create_vit(name, pretrained=pretrained, **dict(model_args, **kwargs))

    width, depth, heads = SIZES[size].values()
    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__doc__ = (
        f'ViT of width {width}, depth {depth}, {heads} heads, patch 16, with `pos_enc={pos_enc!r}`'
        f'{" unless another is given" if name == f"{size}_pos_enc" else ""}.\n\n'
        f'Any argument of `VisionTransformerPosEnc` and of `timm.create_model` may be given.')
    return entrypoint


for _name, (_size, _pos_enc) in _entrypoints().items():
    setattr(sys.modules[__name__], _name, register_model(_make_entrypoint(_name, _size, _pos_enc)))
