"""Calls of kernels in a compiled step, whose arguments are checked addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.compiled.interface import NotCompilable
from onward.compiled.recording import Advance, Attention, Write
from onward.kernels.llvm.compiler import Arguments, Emit
from onward.kernels.memory import Unreadable, address

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int64: "int64"}


@dataclass
class Call:
    """One call of a kernel in a compiled decoding step: the kernel and its arguments. `Binding` sets the number of
    threads and the arguments that depend on the memory of a cache."""

    key: tuple[Any, ...]  # equal for calls of the same kernel
    emit: Emit
    arguments: Arguments
    parallel: bool = False  # whether several threads are faster than one
    record: Write | Attention | Advance | None = None  # access to the cache, whose memory may move
    memory: Tensor | None = None  # memory that only this call reads


@contextmanager
def unreadable_is_not_compilable() -> Iterator[None]:
    try:
        yield
    except Unreadable as reason:
        raise NotCompilable(str(reason)) from reason


def contiguous_address(tensor: Tensor) -> int:
    return address(tensor, tensor.dtype, *tensor.shape)
