"""Which operations of a recorded step a program repeats: those that change from step to step, and that the result or
the cache depends on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from onward.compiled.recording import Attention, NotCompilable, Operation, Record, Write

FACTORIES = {"new_full", "new_zeros", "new_ones", "new_empty", "zeros_like", "ones_like", "empty_like", "full_like"}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))


def memory(value: Any) -> set[int]:
    """The memory of the tensors among arguments or results."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(value)}


def reads_and_writes(record: Record) -> tuple[set[int], set[int]]:
    """The memory that a record reads and writes; a view writes none."""
    if isinstance(record, Write):
        return memory(record.vectors), set()
    if isinstance(record, Attention):
        return memory([record.q, record.sinks]), memory(record.y)
    reads, result = memory([record.arguments, record.options]), memory(record.result)
    if record.function._schema.is_mutable:
        return reads, memory(record.arguments[0])
    return (set() if name_of(record) in FACTORIES else reads), result - reads


def name_of(operation: Operation) -> str:
    """The name of an operation without its overload."""
    return str(operation.function.overloadpacket.__name__)


def needed(records: Sequence[Record], variable: Sequence[Tensor], result: Tensor) -> list[Record]:
    """The records that change from step to step, and on which the result or the cache depends."""
    changing, constant = memory(list(variable)), set[int]()
    kept = []
    for record in records:
        reads, writes = reads_and_writes(record)
        if isinstance(record, Write | Attention) or reads & changing:
            if isinstance(record, Operation) and writes & constant:
                raise NotCompilable(f"{label(record)} in place of a constant")
            changing |= writes
            kept.append((record, reads, writes))
        else:
            constant |= writes
    live, found = memory(result), list[Record]()
    for record, reads, writes in reversed(kept):
        if isinstance(record, Write) or writes & live:
            live |= reads
            found.append(record)
    return found[::-1]


def label(record: Record) -> str:
    """What a record does, for messages."""
    return name_of(record) if isinstance(record, Operation) else type(record).__name__.lower()
