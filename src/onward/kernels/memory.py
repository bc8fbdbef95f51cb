"""The memory that kernels read and write: the one place that allocates it, and that takes the address of a tensor.

A kernel believes the dtypes, shapes and strides that it was compiled for. So no address is taken of a tensor that has
not been checked for them, and no buffer takes the default dtype or device of PyTorch, which a script may change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

allocate = torch.empty  # tests put memory between guard pages in its place


class Unreadable(Exception):
    """A kernel cannot read a tensor; the message names its dtype and shape."""


def buffer(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, int]:
    """Return a contiguous tensor in the memory of the CPU, whose values are not set, and its address."""
    tensor = allocate(shape, dtype=dtype, device="cpu")
    return tensor, tensor.data_ptr()


def filled(values: Sequence[float], dtype: torch.dtype) -> tuple[Tensor, int]:
    """Return a tensor (N,) of these values, and its address."""
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    return tensor, tensor.data_ptr()


def in_memory(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor are numbers in the memory of the CPU, at its address and strides."""
    return (
        tensor.is_cpu
        and (type(tensor) is Tensor or type(tensor) is nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_neg()  # the sign of the elements is not in memory
    )


def fits(tensor: Tensor, dtype: torch.dtype, *shape: int) -> bool:
    """Return whether a tensor, of any strides, is in the memory of the CPU and has this dtype and shape."""
    return tensor.dtype is dtype and tensor.shape == shape and in_memory(tensor)


def address(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int:
    """Return the address of a contiguous tensor of this dtype and shape, 0 for None. Raises Unreadable for any
    other."""
    if tensor is None:
        return 0
    if tensor.dtype is dtype and tensor.shape == shape and in_memory(tensor) and tensor.is_contiguous():
        return tensor.data_ptr()
    raise Unreadable(f"{dtype} {shape} is needed, contiguous: this is {tensor.dtype} {tuple(tensor.shape)}")


def rows_address(tensor: Tensor, dtype: torch.dtype, rows: int, *shape: int) -> tuple[int, int]:
    """Return the address of a tensor of at least this many rows, each contiguous and of this shape (S, ...), and how
    many vectors (...) the rows are apart. Raises Unreadable."""
    if len(tensor) < rows or not rows:
        raise Unreadable(f"{rows} rows are needed: these are {len(tensor)}")
    start, size = address(tensor[0], dtype, *shape), math.prod(shape[1:])
    if len(tensor) > 1 and tensor.stride(0) % size:
        raise Unreadable(f"rows of vectors of {size} numbers are {tensor.stride(0)} numbers apart")
    return start, tensor.stride(0) // size


def strided_address(tensor: Tensor) -> int:
    """Return the address of the first element of a tensor of any strides. Raises Unreadable for one that is not in
    memory."""
    if not in_memory(tensor):
        raise Unreadable(f"a tensor on {tensor.device} with layout {tensor.layout}")
    return tensor.data_ptr()
