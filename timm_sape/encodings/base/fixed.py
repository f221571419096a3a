"""Encodings with a table that the grid alone determines."""
from abc import ABC, abstractmethod
from typing import Tuple

import torch

from ... import ops
from ...grid import Grid
from .position_encoding import PositionEncoding

__all__ = ['FixedEncoding']


class FixedEncoding(PositionEncoding, ABC):
    """An encoding with a table that the grid alone determines.

    Most of these have no parameters and are the same in all layers. A subclass defines `compute` and calls `make_table`
    at the end of its constructor. The table of the model's own grid is a buffer, in at least float32 whatever the
    model's dtype. For any other grid the table is computed anew in each forward pass.
    """
    per_layer = False
    adds = 'none'

    def __init__(self, *, device=None, dtype=None, **host) -> None:
        super().__init__(device=device, dtype=dtype, **host)
        self._table_kwargs = {
            'device': device,
            'dtype': torch.promote_types(dtype or torch.get_default_dtype(), torch.float32),
        }

    @abstractmethod
    def compute(self, grid: Grid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """The table of a whole grid. Its shape is up to the subclass."""

    def make_table(self) -> None:
        """Compute the buffer `table`.

        Raises:
            ValueError: If `compute` returns no tensor, or one that depends on a parameter.
        """
        table = self._own_table(torch.empty(0, **self._table_kwargs))
        if not isinstance(table, torch.Tensor):
            raise ValueError(
                f'{self.name!r}: compute returned {type(table).__name__}, not a tensor. Is a `return` missing?')
        if table.requires_grad:
            raise ValueError(
                f'{self.name!r}: compute of a FixedEncoding is called once, so its table would not follow a parameter. '
                'Derive it from PositionEncoding, or use the parameter in the hook.')
        self.register_buffer('table', table, persistent=False)

    def _compute(self, grid: Grid, like: torch.Tensor) -> torch.Tensor:
        dtype = like.dtype if like.is_floating_point() else self._table_kwargs['dtype']  # it may hold indices
        with ops.no_autocast(like):  # products of matrices would round positions to bfloat16
            return self.compute(grid, like.device, dtype)

    def _own_table(self, like: torch.Tensor) -> torch.Tensor:
        return self._compute(Grid(*self.grid_size, self.num_prefix_tokens), like)

    def table_for(self, grid: Grid) -> torch.Tensor:
        """What `compute` returns for the whole of `grid`, taken from the buffer if it is the model's own grid."""
        like = self.table_like(grid)
        return self.table if like is self.table and grid.matches(self.grid_size) else self._compute(grid, like)

    def table_like(self, grid: Grid) -> torch.Tensor:
        """A tensor with the dtype and the device of tables: the table, or an empty tensor if that cannot be used.

        A model that was built on the meta device and got its parameters by `load_state_dict(..., assign=True)` still
        has its tables there. SDPA would then read invalid memory. And FSDP's `MixedPrecision` may have rounded
        them, by its `buffer_dtype`.
        """
        is_lost = self.table.is_meta and grid.device is not None
        # model.bfloat16() casts a table that is on meta, too
        is_narrow = self.table.is_floating_point() and self.table.dtype.itemsize < 4
        if not (is_lost or is_narrow):
            return self.table
        return torch.empty(
            0, device=grid.device if is_lost else self.table.device,
            dtype=torch.float32 if is_narrow else self.table.dtype)

    def init_non_persistent_buffers(self) -> None:
        self.table = self._own_table(self.table)

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        super().set_grid_size(grid_size)
        self.init_non_persistent_buffers()

    def _apply(self, fn, *args, **kwargs):
        # Recompute the table: model.half() would round it, model.double() would not make it more exact, and to_empty()
        # leaves it uninitialized.
        before = self.table
        try:
            super()._apply(fn, *args, **kwargs)
        except NotImplementedError:  # of model.to(device), if the table is still on the meta device; see `table_like`
            if not before.is_meta:
                raise
            self.table = before = self._own_table(torch.empty_like(before, device='cpu'))
            super()._apply(fn, *args, **kwargs)
        if self.table is not before and not self.table.is_meta:
            self.table = self._own_table(ops.upcast(self.table)[0])
        return self
