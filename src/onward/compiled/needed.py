"""Select the recorded operations that a compiled step must repeat: operations whose inputs change from step to step and
on which the result or the cache depends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from onward.compiled.interface import NotCompilable
from onward.compiled.recording import Advance, Attention, Operation, Recording, StepRecord, Write

FACTORIES = {"new_full", "new_zeros", "new_ones", "new_empty", "zeros_like", "ones_like", "empty_like", "full_like"}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, an argument or a result of an operation, which may be nested lists or dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))


def memory(value: Any) -> set[int]:
    """Return the addresses of the storages of all tensors in `value`, an argument or a result of an operation."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(value)}


def reads_and_writes(record: StepRecord) -> tuple[set[int], set[int]]:
    """Return (read, written), the addresses of the storages that a recorded operation reads and of those that it
    writes. An operation that returns a view writes no storage."""
    if isinstance(record, Write):
        return memory(record.vectors), set()
    if isinstance(record, Attention):
        return memory([record.q, record.sinks, record.slopes]), memory(record.y)
    if isinstance(record, Advance):
        return memory(list(vars(record).values())) - memory(record.y), memory(record.y)
    reads, result = memory([record.arguments, record.options]), memory(record.result)
    if record.function._schema.is_mutable:
        return reads, memory(record.arguments[0])
    return (set() if name_of(record) in FACTORIES else reads), result - reads


def name_of(operation: Operation) -> str:
    """Return the name of a recorded operation without its overload: "add" for aten.add.Tensor."""
    return str(operation.function.overloadpacket.__name__)


def is_read(tensor: Tensor, records: Sequence[StepRecord]) -> bool:
    """Return whether any of the recorded operations reads the storage of a tensor."""
    return any(memory(tensor) & reads_and_writes(record)[0] for record in records)


def needed(recording: Recording, weights: Sequence[Tensor]) -> list[StepRecord]:
    """Return the recorded operations of a decoding step that a compiled step must repeat, in order: those that depend
    on tokens, positions, the RoPE length, the cache, the rows' adapters or `weights`, and on which the result or the
    cache depends. `weights` are the tensors that may change between steps. Raises NotCompilable if an operation
    overwrites a constant."""
    inputs = [recording.tokens, recording.positions, recording.rope_length, recording.adapters, *weights]
    changing, constant = memory(inputs), set[int]()
    kept = []
    for record in recording.records:
        reads, writes = reads_and_writes(record)
        if isinstance(record, Write | Attention | Advance) or reads & changing:
            if isinstance(record, Operation) and writes & constant:
                raise NotCompilable(f"{label(record)} that overwrites a constant")
            changing |= writes
            kept.append((record, reads, writes))
        else:
            constant |= writes
    live, result = memory(recording.result), list[StepRecord]()
    for record, reads, writes in reversed(kept):
        if isinstance(record, Write | Advance) or writes & live:
            live |= reads
            result.append(record)
    return result[::-1]


def label(record: StepRecord) -> str:
    """Return the name of a recorded operation for error messages, such as "mm", "write" (to the cache) or
    "attention"."""
    return name_of(record) if isinstance(record, Operation) else type(record).__name__.lower()
