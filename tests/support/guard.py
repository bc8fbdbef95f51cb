"""Memory next to pages that cannot be read or written: a kernel that accesses memory outside its operands ends the
process."""

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from onward import Decoder, KVCache
from onward.compiled import recording
from onward.compiled.needed import memory as addresses
from onward.compiled.needed import tensors_in
from onward.kernels import cross_entropy, memory, operations

PAGE = mmap.PAGESIZE
SIDES = "start", "end"  # side of the inaccessible page
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(tensor: Tensor, side: str) -> Tensor:
    """A copy of a dense tensor with the same strides between two guard pages, directly at one of them. It is never
    freed."""
    size = tensor.numel() * tensor.element_size()
    pages = -(-max(size, 1) // PAGE) * PAGE
    start = libc.mmap(None, pages + 2 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANON, -1, 0)
    for page in start, start + PAGE + pages:
        assert libc.mprotect(page, PAGE, 0) == 0
    begin = start + PAGE + (pages - size if side == "end" else 0)
    if not size:
        return tensor.clone()
    copy = torch.frombuffer((ctypes.c_char * size).from_address(begin), dtype=tensor.dtype)
    return copy.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


class Allocator:
    """Replaces `memory.allocate`: gives buffers filled with NaN or -1, with a `side` between guard pages, and counts
    them."""

    def __init__(self, side: str | None) -> None:
        self.side, self.count = side, 0

    def __call__(self, shape: Sequence[int], *, dtype: torch.dtype, device: str) -> Tensor:
        self.count += 1
        value = torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype, device=device)
        return value if self.side is None else guarded(value, self.side)

    def place(self, tensor: Tensor) -> Tensor:
        """An operand, between guard pages."""
        return tensor if self.side is None else guarded(tensor.detach(), self.side).requires_grad_(tensor.requires_grad)

    def model(self, model: Decoder) -> Decoder:
        """Place the parameters and buffers of a model between guard pages, and return the model."""
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = self.place(tensor.data)
        return model

    def cache(self, cache: KVCache) -> KVCache:
        """Place the entries of a cache between guard pages, and return the cache."""
        for layer in cache.layers:
            layer.entries.update({name: self.place(entry) for name, entry in layer.entries.items()})
        return cache


@contextmanager
def kernels_used(side: str | None = None) -> Iterator[Allocator]:
    """Context manager: kernels compute all operations that they support, even small ones; with a `side`, all of their
    memory has guard pages."""
    allocator = Allocator(side)

    class Recorder(recording.Recorder):
        """Puts the results of a recorded step into memory of the allocator."""

        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            result = super().__torch_dispatch__(function, types, arguments, options)
            known = addresses([arguments, options or {}])
            for tensor in tensors_in(result):
                if tensor.untyped_storage().data_ptr() not in known and tensor.storage_offset() == 0:
                    tensor.set_(allocator.place(tensor))  # type: ignore[call-overload]
            return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "allocate", allocator)
        patch.setattr(operations, "COMPILED_AFTER", 0)
        patch.setattr(operations, "MIN_PARALLEL", 1)
        patch.setattr(cross_entropy, "MIN_KERNEL", 1)
        patch.setattr(operations, "MIN_WORK", 1)
        if side is not None:
            patch.setattr(recording, "Recorder", Recorder)
        yield allocator


Case = Callable[[Allocator], Iterator[tuple[Tensor, Tensor, float]]]  # yields (kernel's result, expected result, bound)
