"""The memory that kernels read and write, and calls of compiled kernels: this file alone takes the addresses of
tensors, and allocates the outputs of kernels outside compiled steps."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}  # the dtypes that kernels support
MIN_PARALLEL = 1 << 16  # minimum elements of a weight or an activation for which several threads are faster
allocate = torch.empty  # tests replace it with a function that allocates between guard pages


class Unreadable(Exception):
    """Raised if a kernel cannot read a tensor."""


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel as a function whose arguments are the fields of `structure`, in their order or by name."""

    function: Callable[[Any], None]
    structure: Callable[..., Any]
    engine: object  # keeps the machine code alive

    def __call__(self, *fields: int, **named: int) -> None:
        self.function(self.structure(*fields, **named))


def buffer(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, int]:
    """A contiguous, uninitialized tensor in the memory of the CPU, and its address."""
    tensor = allocate(shape, dtype=dtype, device="cpu")
    return tensor, tensor.data_ptr()


def filled(kind: str, values: Sequence[float]) -> tuple[array[Any], int]:
    """An array of these values, with `kind` a type code of Python's `array`, and its address."""
    return (numbers := array(kind, values)), numbers.buffer_info()[0]


def in_memory(tensor: Tensor) -> bool:
    """Whether a tensor's elements are stored in the memory of the CPU, at the tensor's address and strides, and are not
    computed when read."""
    return (
        tensor.is_cpu
        and (type(tensor) is Tensor or type(tensor) is nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_neg()  # the memory lacks the sign of a lazily negated tensor
    )


def fits(tensor: Tensor, dtype: torch.dtype, *shape: int) -> bool:
    """Whether a tensor, of any strides, is in the memory of the CPU and has this dtype and shape."""
    return tensor.dtype is dtype and tensor.shape == shape and in_memory(tensor)


def address(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int:
    """The address of a contiguous tensor of this dtype and shape; 0 for None. Raises Unreadable for any other
    tensor."""
    if tensor is None:
        return 0
    if tensor.dtype is dtype and tensor.shape == shape and in_memory(tensor) and tensor.is_contiguous():
        return tensor.data_ptr()
    raise Unreadable(f"{dtype} {shape} is needed, contiguous: this is {tensor.dtype} {tuple(tensor.shape)}")


def rows_address(tensor: Tensor, dtype: torch.dtype, rows: int, *shape: int) -> tuple[int, int]:
    """The address of a tensor of at least `rows` rows, each contiguous and of shape `shape` = (S, ...), and the
    distance between rows in memory, counted in vectors of shape (...), which is S if rows are adjacent. Raises
    Unreadable for any other tensor."""
    if len(tensor) < rows or not rows:
        raise Unreadable(f"{rows} rows are needed, but the tensor has {len(tensor)}")
    start, size = address(tensor[0], dtype, *shape), math.prod(shape[1:])
    if len(tensor) > 1 and tensor.stride(0) % size:
        raise Unreadable(f"rows of vectors of {size} numbers are {tensor.stride(0)} numbers apart")
    return start, tensor.stride(0) // size


def strided_address(tensor: Tensor) -> int:
    """The address of the first element of a tensor of any strides. Raises Unreadable if it is not in the memory of the
    CPU."""
    if not in_memory(tensor):
        raise Unreadable(f"a tensor on {tensor.device} with layout {tensor.layout}")
    return tensor.data_ptr()


def multiply(kernel: Kernel, x: Tensor, weight: int, scales: int, bias: Tensor | None, outputs: int) -> Tensor:
    """Call a kernel that multiplies x (..., I) with a weight; return (..., outputs). `weight` and `scales` are the
    addresses of the weight and of its quantization scales, the latter ignored for an unquantized weight. Raises
    Unreadable if the kernel cannot read x or the bias."""
    x, inputs, dtype = x.contiguous(), x.size(-1), x.dtype
    y, target = buffer((*x.shape[:-1], outputs), dtype)
    threads = torch.get_num_threads() if outputs * inputs >= MIN_PARALLEL else 1
    operands = address(x, dtype, *x.shape), weight, scales, address(bias, dtype, outputs), target
    kernel(*operands, x.numel() // inputs, outputs, inputs, outputs, threads)
    return y


def run(kernel: Kernel, x: Tensor, *others: Tensor, items: int) -> Tensor:
    """Call a kernel that writes a tensor with the shape and dtype of x, its first input; return this tensor. `items` is
    the number of pieces of work, such as rows, that threads divide."""
    y, target = buffer(x.shape, x.dtype)
    launch(kernel, target, x, *others, items=items)
    return y


def launch(kernel: Kernel, *arguments: Tensor | int, items: int) -> None:
    """Call a kernel with `arguments`, contiguous tensors (passed by address) or numbers, in the order of the kernel's
    arguments."""
    values = (address(each, each.dtype, *each.shape) if isinstance(each, Tensor) else each for each in arguments)
    kernel(*values, items, torch.get_num_threads())
