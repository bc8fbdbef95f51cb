"""The memory that kernels read and write: this file alone allocates it and takes the addresses of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

allocate = torch.empty  # tests put memory between guard pages in its place


class Unreadable(Exception):
    """Raised if a kernel cannot read a tensor; the message names its dtype and shape."""


def buffer(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, int]:
    """Allocate a contiguous, uninitialized tensor in the memory of the CPU; return the tensor and its memory
    address."""
    tensor = allocate(shape, dtype=dtype, device="cpu")
    return tensor, tensor.data_ptr()


def filled(values: Sequence[float], dtype: torch.dtype) -> tuple[Tensor, int]:
    """Make a tensor (N,) of these values in `dtype`; return the tensor and its memory address."""
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    return tensor, tensor.data_ptr()


def in_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are stored in the memory of the CPU, at the tensor's address and strides, and
    are not computed when read."""
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
    """Return the memory address of a contiguous tensor of this dtype and shape; 0 for None. Raises Unreadable for any
    other tensor."""
    if tensor is None:
        return 0
    if tensor.dtype is dtype and tensor.shape == shape and in_memory(tensor) and tensor.is_contiguous():
        return tensor.data_ptr()
    raise Unreadable(f"{dtype} {shape} is needed, contiguous: this is {tensor.dtype} {tuple(tensor.shape)}")


def rows_address(tensor: Tensor, dtype: torch.dtype, rows: int, *shape: int) -> tuple[int, int]:
    """Return the memory address of a tensor of at least `rows` rows, each contiguous and of shape `shape` = (S, ...),
    and the distance of two rows in memory, as a number of vectors (...), S if rows are adjacent. Raises Unreadable for
    any other tensor."""
    if len(tensor) < rows or not rows:
        raise Unreadable(f"{rows} rows are needed: these are {len(tensor)}")
    start, size = address(tensor[0], dtype, *shape), math.prod(shape[1:])
    if len(tensor) > 1 and tensor.stride(0) % size:
        raise Unreadable(f"rows of vectors of {size} numbers are {tensor.stride(0)} numbers apart")
    return start, tensor.stride(0) // size


def strided_address(tensor: Tensor) -> int:
    """Return the memory address of the first element of a tensor of any strides. Raises Unreadable if the tensor is not
    in the memory of the CPU."""
    if not in_memory(tensor):
        raise Unreadable(f"a tensor on {tensor.device} with layout {tensor.layout}")
    return tensor.data_ptr()
