"""What every host of encodings has in common: a timm model whose blocks and tokens carry them.

A host is a subclass of `PosEncModel` and of one of timm's models. It has `grid_size`, `kernel_size`, `patch_size`,
`convert_checkpoint`, and an `embed` that calls `self.encodings` between the patch embedding and the blocks.

timm's class must have what timm's ViT has: `blocks`, `embed_dim`, `in_chans`, `num_classes`, `num_prefix_tokens`,
`global_pool`, `attn_pool`, `patch_drop`, `norm`, `fc_norm`, `head`, `grad_checkpointing`, `no_weight_decay`,
`group_matcher`, `prune_intermediate_layers`, `reset_classifier`.
"""
import warnings
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

import torch
import torch.nn as nn
from timm.layers import PatchDropout, PatchDropoutWithIndices, use_reentrant_ckpt
from timm.models import checkpoint

from . import checkpoints
from .encodings import (
    LogitScaling,
    PositionEncoding,
    ReferenceGridEncoding,
    ResizedEncoding,
    create_encoding,
    get_encoding,
    is_per_layer,
)
from .grid import Grid, check_keep_indices
from .ops import wide_under_autocast
from .position import AnyPosition, LayerEncodings, SharedEncodings

__all__ = ['PosEncModel', 'keep_patches']

torch.fx.wrap('wide_under_autocast')  # it cannot trace dtypes


class PosEncModel(nn.Module):
    """A timm model with any set of position encodings."""
    #: In words, the position encoding that the base of a graft has itself, computed by timm's modules. Empty for none.
    base_position: str = ''
    #: Whether only the attention pool includes the prefix tokens, as in Eva: without it `pool_include_prefix` is False.
    attn_pool_includes_prefix: bool = False

    # Read-only, because the modules were built from these: another value would only be saved, and change nothing.
    @property
    def pos_enc(self) -> str:
        """Names of the encodings, joined by `+`."""
        return vars(self)['pos_enc']

    @property
    def pos_enc_kwargs(self) -> Dict[str, Dict[str, Any]]:
        """Keywords of each encoding by its name, without those that have none. A copy."""
        return deepcopy(vars(self)['pos_enc_kwargs'])

    @property
    def logit_scaling(self) -> str:
        """As in the constructor."""
        return vars(self)['logit_scaling']

    @property
    def grid_size(self) -> Tuple[int, int]:
        """(H, W) in patches, the grid of the model's own image size."""
        raise NotImplementedError

    @property
    def kernel_size(self) -> Tuple[int, int]:
        """(height, width) of the patch embedding's last kernel: in pixels, or with a stem in entries of its output."""
        raise NotImplementedError

    def convert_checkpoint(self, state_dict: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Entries of a checkpoint under the names of this model, resized where timm's own are."""
        raise NotImplementedError

    def _set_encodings(
            self,
            parts: Dict[str, Dict[str, Any]],
            ref_grid_size: Optional[Tuple[int, int]] = None,
            device=None,
            dtype=None,
            own_rotation: Optional[bool] = None,
            logit_scaling: str = 'constant',
    ) -> None:
        """Create the encodings of a model that timm's constructor has built.

        They come last because timm's constructor initializes every linear layer inside the blocks. Their initial values
        come from a fork of the CPU's random generator. So models of one seed have the same backbone and see the same
        images in the same order, unless an encoding draws random numbers in training (`cape`).

        Args:
            parts: Keywords of each encoding by its name, as of `parse_pos_enc`.
            ref_grid_size: As in the constructor.
            device: Device of parameters and buffers.
            dtype: Their dtype.
            own_rotation: None if the host has no rotation of its own; else whether that rotation pairs channels t and
                t + d/2 (True) or 2t and 2t + 1 (False).
            logit_scaling: As in the constructor.
        """
        self.take_patch_drop(self.patch_drop)
        vars(self)['pos_enc'] = '+'.join(parts)
        vars(self)['pos_enc_kwargs'] = {name: keywords for name, keywords in parts.items() if keywords}
        vars(self)['logit_scaling'] = logit_scaling
        self.num_heads = self.blocks[0].attn.num_heads
        host = dict(
            dim=self.embed_dim,
            num_heads=self.num_heads,
            grid_size=self.grid_size,
            num_prefix_tokens=self.num_prefix_tokens,
            depth=len(self.blocks),
            ref_grid_size=ref_grid_size,
            device=device,
            dtype=dtype,
        )
        create = partial(create_encoding, **host)
        classes = {name: get_encoding(name) for name in parts}
        with torch.random.fork_rng(devices=[]):
            # A new seed, so that encodings do not repeat the numbers that are drawn next, say for a new head.
            torch.default_generator.manual_seed(int(torch.randint(2 ** 62, (), device='cpu')))
            self.encodings = SharedEncodings({
                name: create(name, **keywords) for name, keywords in parts.items() if not is_per_layer(name)})
            if logit_scaling == 'log':
                self.encodings['logit_scaling'] = LogitScaling(**host)
            for i, block in enumerate(self.blocks):
                own = [
                    name for name, cls in classes.items()
                    if is_per_layer(name) and (cls.first_layers is None or i < cls.first_layers)]
                block.attn.encodings = LayerEncodings(
                    {name: create(name, layer=i, **parts[name]) for name in own},
                    layer=i,
                    rotate_half=own_rotation or self.encodings.rotate_half,
                    needs_position=self.encodings.act_on_blocks() or own_rotation is not None,
                )
        unscaled = [
            name for name, keywords in parts.items()
            if 'resolution' in classes[name].changeable_keywords and 'resolution' not in keywords]
        if ref_grid_size is not None and self.ref_grid_size is None and unscaled:
            warnings.warn(
                f'ref_grid_size={ref_grid_size} changes nothing of what the model computes, because none of its '
                'encodings rescales positions; a saved model remembers it. To rescale them, use '
                f"pos_enc_kwargs={{'{unscaled[0]}': {{'resolution': 'rescale'}}}}.")
        # Move heads to the end again: timm exempts the last two parameters from adaptive clipping, as the head's.
        for name in ('head', 'head_dist'):
            if name in self._modules:
                self._modules[name] = self._modules.pop(name)
        # If only parameters are on the meta device, accelerate sets the entries of a checkpoint one by one later.
        if any(p.is_meta for p in self.parameters()) and not torch.empty(0, device=device).is_meta:
            for encoding in self.encodings_with_grids().values():
                encoding.expect_grid()

    def reset_classifier(self, *args, **kwargs) -> None:
        """As in timm. Without its attention pool, a graft of an Eva model leaves the prefix tokens out, as Eva does."""
        super().reset_classifier(*args, **kwargs)
        if self.attn_pool_includes_prefix and self.attn_pool is None:
            self.pool_include_prefix = False

    def take_patch_drop(self, patch_drop: Optional[nn.Module]) -> None:
        """Replace timm's PatchDropout by the one that returns indices, which tell encodings what patches are left."""
        if isinstance(patch_drop, (PatchDropout, PatchDropoutWithIndices)):
            self.patch_drop = PatchDropoutWithIndices(patch_drop.prob, self.num_prefix_tokens, patch_drop.ordered)

    def widen(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens, under autocast in the dtype of the blocks' norms if that is wider.

        Under autocast the patch embedding returns a narrow dtype. In timm's models, adding the float32 table or class
        token widens it again. Here the dtype must be the same for all encodings.
        """
        norm = getattr(self.blocks[0], 'norm1', None)  # blocks may be wrapped
        return wide_under_autocast(tokens, getattr(norm, 'weight', None))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False):
        """As in torch, but refuses a checkpoint of other encodings or another grid before anything is loaded.

        Raises:
            ValueError: On such a checkpoint, naming the loading paths that would adapt it.
        """
        # The last of the hooks: those before it may rename the entries.
        check = self.register_load_state_dict_pre_hook(
            lambda module, entries, *_: checkpoints.refuse_misfit(module, entries, strict))
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:
            check.remove()

    def load_pretrained(self, checkpoint_path: str, prefix: str = '') -> None:
        """Refuse files of JAX, which timm's `load_checkpoint` hands over: nothing would check what fits.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f'{checkpoint_path}: {type(self).__name__} cannot read weights in .npz or .npy files. '
            f'{checkpoints.CONVERT_FOREIGN}')

    def train(self, mode: bool = True) -> 'PosEncModel':
        """As in torch, with a warning if a gate is 0 and frozen: its encoding does nothing, and cannot learn."""
        if mode and any(p.requires_grad for p in self.parameters()):
            gates = [
                (name, encoding.gate.weight)
                for encodings in self.modules() if isinstance(encodings, (SharedEncodings, LayerEncodings))
                for name, encoding in encodings.items() if encoding.gate is not None]
            closed = sorted({
                name for name, weight in gates
                # FSDP may leave an empty part of it on a rank
                if not weight.requires_grad and not weight.is_meta and weight.numel() and not weight.detach().any()})
            if closed:
                warnings.warn(
                    f'The gates of {", ".join(closed)} are 0 and frozen: these encodings do nothing, and training will '
                    'not change that. Set requires_grad=True for their parameters; with peft, give its config '
                    f'modules_to_save={closed}.')
        # A library may have set the entries of a checkpoint one by one, the grids among them.
        if not any(p.is_meta for p in self.parameters()):
            for encoding in self.encodings_with_grids().values():
                encoding.take_grid()
        return super().train(mode)

    def base_terms(self, x: torch.Tensor, grid: Grid) -> List[torch.Tensor]:
        """What the base of a graft itself adds to the tokens x, `[B, N, D]`: nothing, or one term `[B|1, N, D]`."""
        return []

    def position_encodings(self) -> Dict[str, PositionEncoding]:
        """All encodings by their path in the model. The table of `ape` is in none of them: it is `pos_embed`."""
        return {name: m for name, m in self.named_modules() if isinstance(m, PositionEncoding)}

    def encodings_with_grids(self) -> Dict[str, Union[ReferenceGridEncoding, ResizedEncoding]]:
        """By their path, the encodings whose parameters may belong to a grid, which they then save."""
        return {
            path: encoding for path, encoding in self.position_encodings().items()
            if isinstance(encoding, (ReferenceGridEncoding, ResizedEncoding))}

    @property
    def ref_grid_size(self) -> Optional[Tuple[int, int]]:
        """(H, W) that encodings whose tables are never resized were trained on. None if there are none."""
        for encoding in self.position_encodings().values():
            if isinstance(encoding, ReferenceGridEncoding) and encoding.saved_grid_size() is not None:
                return encoding.ref_grid_size
        return None

    # timm records here the arguments that a model was created with, and saves them as `model_args`. The arguments of
    # the encodings come from the model itself: in one spelling, and as they are now.
    @property
    def _model_args(self) -> Dict[str, Any]:
        args = {**self._recorded_args, 'pos_enc': self.pos_enc, 'pos_enc_kwargs': self.pos_enc_kwargs}
        if self.logit_scaling != 'constant' or 'logit_scaling' in args:
            args['logit_scaling'] = self.logit_scaling
        if self.ref_grid_size is not None:
            args['ref_grid_size'] = list(self.ref_grid_size)
        if self.base_position:
            args['base_position'] = self.base_position
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

    def prune_intermediate_layers(
            self,
            indices: Union[int, List[int]] = 1,
            prune_norm: bool = False,
            prune_head: bool = True,
    ) -> List[int]:
        """Remove the blocks after the last intermediate that is asked for, as in timm."""
        depth = len(self.blocks)
        taken = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        for encoding in self.encodings.values():
            encoding.set_depth(len(self.blocks))
        now = {}
        deep = [name for name in self.pos_enc.split('+') if get_encoding(name).uses_depth]
        if not deep:
            now['depth'] = len(self.blocks)  # recorded, so that it is saved as it is now
        elif len(self.blocks) < depth:
            warnings.warn(
                f'{deep[0]!r} depends on the depth that the model was built with, so without its last layers the model '
                'can be used, but not saved. Save it before, and prune it after loading.')
        if isinstance(self.norm, nn.Identity) and isinstance(self.fc_norm, nn.Identity):  # goes with the head
            now['final_norm'] = False
        self._recorded_args = {**self._recorded_args, **now}
        return taken

    def _run_blocks(
            self,
            x: torch.Tensor,
            position: AnyPosition,
            attn_mask: Optional[torch.Tensor],
            is_causal: bool = False,
            take: Sequence[int] = (),
            num_blocks: Optional[int] = None,
    ) -> Tuple[torch.Tensor, List[torch.Tensor]]:
        """The tokens after the first `num_blocks` blocks (all by default), and those after each block of `take`."""
        taken = []
        for i in range(len(self.blocks) if num_blocks is None else num_blocks):
            x = self._run_block(self.blocks[i], x, position, attn_mask, is_causal)
            if i in take:
                taken.append(x)
        return x, taken

    def _collect_intermediates(
            self,
            x: torch.Tensor,
            taken: List[torch.Tensor],
            map_size: Optional[Tuple[int, int]],
            return_prefix_tokens: bool,
            norm: bool,
            intermediates_only: bool,
            output_dict: bool,
    ) -> Union[List[torch.Tensor], Tuple[torch.Tensor, List[torch.Tensor]], Dict[str, Any]]:
        """What `forward_intermediates` returns. `map_size` is (H, W) of maps, None for tokens."""
        p = self.num_prefix_tokens
        taken = [self.norm(y) for y in taken] if norm else taken
        prefix = [y[:, :p] for y in taken] if p and return_prefix_tokens else None
        maps = [y[:, p:] for y in taken]
        if map_size is not None:
            maps = [y.transpose(1, 2).reshape(y.shape[0], -1, *map_size).contiguous() for y in maps]
        if output_dict:
            result = {'image_intermediates': maps}
            if prefix is not None:
                result['image_intermediates_prefix'] = prefix
            if not intermediates_only:
                result['image_features'] = self.norm(x)
            return result
        if prefix is not None:
            maps = list(zip(maps, prefix))
        return maps if intermediates_only else (self.norm(x), maps)

    def _run_block(self, block: nn.Module, x, position: AnyPosition, attn_mask, is_causal) -> torch.Tensor:
        if not self.grad_checkpointing:
            return block(x, attn_mask, is_causal, position)

        # Reentrant checkpointing finds gradients of those tensors alone that are arguments themselves.
        tensors = position.tensors() if use_reentrant_ckpt() else ()

        def run(x, attn_mask, *tensors):
            return block(x, attn_mask, is_causal, position.with_tensors(*tensors) if tensors else position)

        return checkpoint(run, x, attn_mask, *tensors)


# torch.fx cannot trace this: it depends on sizes and on which arguments are given.

@torch.fx.wrap
def keep_patches(
        patch_drop: Optional[nn.Module],
        x: torch.Tensor,
        grid: Grid,
        keep_indices: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, Grid]:
    """Drop patches: those that `keep_indices` leaves out, or, without it, as patch dropout decides."""
    if keep_indices is not None:
        check_keep_indices(keep_indices, x, grid.num_patches)
        x = replace(grid, keep_indices=keep_indices).keep_tokens(x)
    elif isinstance(patch_drop, PatchDropoutWithIndices):
        x, keep_indices = patch_drop(x)
    elif not isinstance(patch_drop, (nn.Identity, type(None))):
        raise ValueError(
            f'patch_drop is a {type(patch_drop).__name__}, which does not tell the encodings which patches are left. '
            'Use timm.layers.PatchDropoutWithIndices, or create the model with patch_drop_rate=.')
    return x, grid if keep_indices is None else replace(grid, keep_indices=keep_indices)
