"""Watch what Triton kernels read and write in the interpreter.

It runs the programs of a launch one after another, and all threads of a program at once, so a race gives the right
result there. Reading beside a tensor goes unnoticed, too, if something lies there.
"""
from contextlib import contextmanager

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, _get_np_dtype

NOBODY, MANY = 0, -1


class _Launch:
    """The elements of the tensors of one launch by address, and the programs, from 1, that read and wrote them."""

    def __init__(self, name, tensors, problems):
        self.name, self.problems = name, problems
        addresses = {}
        for tensor in tensors:
            addresses.setdefault(tensor.element_size(), []).append(_addresses(tensor))
        self.addresses = {size: np.unique(np.concatenate(found)) for size, found in addresses.items()}
        self.reader, self.writer = (
            {size: np.full(len(found), NOBODY) for size, found in self.addresses.items()} for _ in range(2))

    def report(self, seen, problem):
        if np.any(seen):
            self.problems.add(f'{self.name}: {problem}')

    def touched(self, pointers, mask, size):
        pointers, mask = np.broadcast_arrays(pointers, mask)
        pointers = pointers[mask].astype(np.int64)
        known = self.addresses.get(size, np.zeros(0, np.int64))
        if not np.isin(pointers, known).all():
            raise IndexError(f'{self.name}: outside of all tensors')
        return np.searchsorted(known, pointers)

    def load(self, program, pointers, mask, size):
        at = self.touched(pointers, mask, size)
        if len(at):
            self.report(self.writer[size][at] != NOBODY, 'reads what was written')
            reader = self.reader[size][at]
            self.reader[size][at] = np.where((reader == NOBODY) | (reader == program), program, MANY)

    def store(self, program, pointers, mask, size):
        at = self.touched(pointers, mask, size)
        if len(at):
            self.report(len(np.unique(at)) < len(at) or self.writer[size][at] != NOBODY, 'writes twice')
            reader = self.reader[size][at]
            self.report((reader != NOBODY) & (reader != program), 'writes what others read')
            self.writer[size][at] = program


def _addresses(tensor):
    offsets = np.zeros(1, np.int64)
    for size, stride in zip(tensor.shape, tensor.stride()):
        offsets = (offsets[:, None] + stride * np.arange(size)).reshape(-1)
    return tensor.data_ptr() + tensor.element_size() * offsets


@contextmanager
def watched_memory():
    """Yields the launches, each with the `name` of its kernel, and a set of the problems that are found.

    Within one launch no element may be written twice, read after it was written, or written after another program has
    read it. New tensors are filled with NaN. A kernel that touches what is no element of an argument raises an error.
    """
    launched, problems = [], set()
    init_args, load, store = (
        GridExecutor._init_args_hst, InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store)

    def watched_args(self, args, kwargs):
        found = init_args(self, args, kwargs)
        args, kwargs = found[:2]
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        launched.append(_Launch(self.fn.__name__, tensors, problems))
        return found

    def touched(builder, pointers, mask):
        """The program that runs, its pointers and mask, and the bytes of an element."""
        x, y, z = builder.grid_idx
        _, ny, nz = builder.grid_dim
        size = np.dtype(_get_np_dtype(pointers.get_element_ty())).itemsize
        return 1 + (x * ny + y) * nz + z, pointers.data, mask.data, size

    def watched_load(self, pointers, mask, *args):
        launched[-1].load(*touched(self, pointers, mask))
        return load(self, pointers, mask, *args)

    def watched_store(self, pointers, value, mask, *args):
        launched[-1].store(*touched(self, pointers, mask))
        return store(self, pointers, value, mask, *args)

    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)  # then torch fills memory that it allocates
        GridExecutor._init_args_hst = watched_args
        InterpreterBuilder.create_masked_load = watched_load
        InterpreterBuilder.create_masked_store = watched_store
        yield launched, problems
    finally:
        torch.use_deterministic_algorithms(deterministic)
        GridExecutor._init_args_hst = init_args
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
