"""Encodings whose parameters belong to a grid, which is saved along with them."""
import threading
from abc import ABC, abstractmethod
from typing import Any, Dict, Optional, Tuple

import torch
import torch.nn as nn

from ...grid import MAX_SIDE, Grid
from .position_encoding import PositionEncoding

__all__ = ['ReferenceGridEncoding', 'ResizedEncoding']

_taking = threading.Lock()  # several threads may run a first forward pass at once, and only one may take the grid


class _SavesGrid(PositionEncoding):
    """An encoding that saves the grid of its parameters along with them.

    The grid is extra state, so it is in every state dict, however that is saved.
    """

    def expect_grid(self) -> None:
        """Prepare for a library that sets the entries of a checkpoint one by one, as parameters and buffers.

        accelerate does this for a model that was built on the meta device. Extra state is neither a parameter nor a
        buffer, so until the grid is known a buffer with the name of that entry stands in for it.
        """
        self.register_buffer('_extra_state', torch.tensor(self.saved_grid_size() or (0, 0), device='cpu'))

    def take_grid(self) -> None:
        """Take over the grid that such a library has set.

        The model calls it in `train()` and `eval()`. Where parameters stay on the meta device, because they are moved
        to another one for each call only, the first forward pass does.
        """
        with _taking:
            state = self._buffers.get('_extra_state')
            if state is not None and not state.is_meta and self.saved_grid_size() is not None:
                self.set_extra_state(state)
            self._buffers.pop('_extra_state', None)  # last: while it is there, other threads wait

    def forward(self, x: torch.Tensor, *tensors: torch.Tensor, hook: str, **given) -> Any:
        if '_extra_state' in self._buffers:
            self.take_grid()
        return super().forward(x, *tensors, hook=hook, **given)

    def _apply(self, fn, *args, **kwargs):
        self.take_grid()
        return super()._apply(fn, *args, **kwargs)

    def saved_grid_size(self) -> Optional[Tuple[int, int]]:
        """(H, W) that the parameters belong to. None if they fit any grid, so that none is saved."""
        raise NotImplementedError

    def get_extra_state(self) -> torch.Tensor:
        expected = self._buffers.get('_extra_state')
        return torch.tensor(self.saved_grid_size() or (0, 0), device='cpu') if expected is None else expected

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Handle the grid, int64 `[2]`, that was saved with the parameters that are being loaded.

        Raises:
            ValueError: If it is no grid, or one that the parameters of this encoding do not fit.
        """
        raise NotImplementedError

    def adapt(self, grid_size: Tuple[int, int], state_dict: Dict[str, torch.Tensor], path: str) -> None:
        """Before its entries of a checkpoint are loaded, make them and the encoding fit each other.

        Args:
            grid_size: (H, W) that the entries were trained on.
            state_dict: The checkpoint. Changed in place if entries are resized.
            path: Path of the encoding in the model, the prefix of its entries.
        """
        raise NotImplementedError

    def read_extra_state(self, state: torch.Tensor) -> Tuple[int, int]:
        """(H, W) from a saved entry, which may be floats: some tools average or cast all entries of a file.

        Raises:
            ValueError: If the entry is not a grid.
        """
        has_numbers = isinstance(state, torch.Tensor) and not state.is_complex() and not state.is_meta
        sizes = state.tolist() if has_numbers else state
        is_pair = isinstance(sizes, list) and len(sizes) == 2
        # The upper bound keeps a damaged file from making us allocate huge tables. NaN fails the comparison.
        if not is_pair or not all(
                isinstance(s, (int, float)) and 0.5 < s <= MAX_SIDE and abs(s - round(s)) < 0.01 for s in sizes):
            got = sizes if isinstance(sizes, (list, int, float)) else type(sizes).__name__
            raise ValueError(
                f'{self.name!r}: the grid saved with its parameters, the entry _extra_state, must be (H, W) in '
                f'patches, whole numbers of 1 or more, got {got}. The file is damaged, or an average of models with '
                'different grids; if you know the grid, set this entry to torch.tensor([H, W]).')
        height, width = (round(size) for size in sizes)
        return height, width

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.saved_grid_size() is None:
            del destination[f'{prefix}_extra_state']

    def _load_from_state_dict(
            self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs) -> None:
        key = f'{prefix}_extra_state'
        self._buffers.pop('_extra_state', None)
        has_grid, saves_grid = isinstance(state_dict.get(key), torch.Tensor), self.saved_grid_size() is not None
        if not has_grid or not saves_grid:
            # Where an encoding saves no grid, torch.distributed.checkpoint leaves a marker of its own.
            state_dict = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if not saves_grid and key in missing_keys:
            missing_keys.remove(key)
        if not saves_grid and has_grid:  # the file has another rule for other sizes
            unexpected_keys.append(key)


class ReferenceGridEncoding(_SavesGrid):
    """An encoding whose parameters belong to the grid that they were trained on and are never resized.

    `ref_grid_size`, (H, W), is that grid, and is saved with the parameters. On any other grid the encoding rescales its
    positions.
    """
    #: Whether a checkpoint that saves no grid may be loaded with a rule that needs the trained grid.
    chosen_when_loading: bool = False

    def __init__(self, *, ref_grid_size: Optional[Tuple[int, int]] = None, **host) -> None:
        super().__init__(**host)
        self.ref_grid_size = tuple(ref_grid_size or self.grid_size)

    def saved_grid_size(self) -> Optional[Tuple[int, int]]:
        return self.ref_grid_size

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.ref_grid_size = self.read_extra_state(state)

    def set_ref_grid_size(self, ref_grid_size: Tuple[int, int]) -> None:
        """Prepare for loading parameters that were trained on another grid."""
        self.ref_grid_size = tuple(ref_grid_size)

    def adapt(self, grid_size: Tuple[int, int], state_dict: Dict[str, torch.Tensor], path: str) -> None:
        self.set_ref_grid_size(grid_size)

    def rescaling(self, grid: Grid) -> Optional[Tuple[int, int]]:
        """(H, W) of the grid to rescale positions to. None if `grid` is the trained one."""
        return None if grid.matches(self.ref_grid_size) else self.ref_grid_size


class ResizedEncoding(_SavesGrid, ABC):
    """An encoding whose parameters belong to a grid, `grid_size`, and are resampled for another one.

    Every path uses the same function, `resample`: a forward pass on images of another size, `set_input_size`, and
    loading weights of another size.
    """
    RESIZED: Tuple[str, ...] = ('table',)  #: Names of the parameters that are resampled.

    @abstractmethod
    def resample(
            self,
            name: str,
            table: torch.Tensor,
            old_size: Tuple[int, int],
            new_size: Tuple[int, int],
    ) -> torch.Tensor:
        """The values of a parameter for another grid.

        Args:
            name: Name of the parameter.
            table: Its values on a grid of `old_size`.
            old_size: (H, W).
            new_size: (H, W) of the grid to resample for.
        """

    def resized(self, name: str, grid: Grid) -> torch.Tensor:
        """The parameter `name`, resampled for the whole of `grid` if that is not the model's own."""
        table = getattr(self, name)
        return table if grid.matches(self.grid_size) else self.resample(name, table, self.grid_size, grid.size)

    def saved_grid_size(self) -> Tuple[int, int]:
        return self.grid_size

    def set_extra_state(self, state: torch.Tensor) -> None:
        # Tables for 3 x 5 and 5 x 3 patches can have the same shape. The model's own checks refuse them, but do not run
        # if it is part of another module whose state dict is loaded.
        saved = self.read_extra_state(state)
        if saved != self.grid_size:
            raise ValueError(
                f'{self.name!r}: the checkpoint is of a grid of {saved[0]}x{saved[1]} patches, the model has '
                f'{self.grid_size[0]}x{self.grid_size[1]}. Create the model with the img_size of the checkpoint '
                '(a plain ViT can then change it by set_input_size), or load with pretrained=True, which resizes.')

    def adapt(self, grid_size: Tuple[int, int], state_dict: Dict[str, torch.Tensor], path: str) -> None:
        if grid_size == self.grid_size:
            return
        for name in self.RESIZED:
            key = f'{path}.{name}'
            if key not in state_dict:
                continue
            try:
                state_dict[key] = self.resample(name, state_dict[key], grid_size, self.grid_size)
            except Exception as e:  # encodings do not check the entries of a damaged file
                raise ValueError(
                    f'{key} of the checkpoint cannot be resized from a grid of {grid_size[0]}x{grid_size[1]} patches. '
                    f'Is the file damaged? Copy or save it again. ({e})') from e
        state_dict[f'{path}._extra_state'] = self.get_extra_state()

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        if tuple(grid_size) == self.grid_size:
            return
        for name in self.RESIZED:
            table = getattr(self, name)
            with torch.no_grad():
                resampled = self.resample(name, table, self.grid_size, tuple(grid_size))
            setattr(self, name, nn.Parameter(resampled, requires_grad=table.requires_grad))
        super().set_grid_size(grid_size)
