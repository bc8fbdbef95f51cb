"""A decoding step as one program of machine code: the recorded operations, each a kernel on the memory it was recorded
with.

Between two kernels of a program there is no Python and no PyTorch, whose calls cost more than the arithmetic of a
single token. The weights are read where they are, so that a program sees every change of them in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from onward.compiled.lowering import Call, is_paged, lower
from onward.compiled.needed import memory, needed, reads_and_writes
from onward.compiled.recording import Attention, NotCompilable, Recording, Write
from onward.kernels.llvm.compiler import BYTES, INT, Code, add_kernel, load
from onward.kernels.memory import Unreadable, address, buffer, rows_address
from onward.model.cache import KVCache, LayerCache


class Program:
    """A step of some rows of a cache, from its recording. The caller has it to itself, since it has memory of its own.

    `weights` are the tensors that may change between runs, in place; `folder` keeps machine code for the next start.
    """

    def __init__(
        self, recording: Recording, cache: KVCache, weights: Sequence[Tensor], folder: Path | None = None
    ) -> None:
        self.recording = recording
        variable = [recording.tokens, recording.positions, recording.rope_length, *weights]
        records = needed(recording.records, variable, recording.result)
        self.uses_rope_length = any(memory(recording.rope_length) & reads_and_writes(record)[0] for record in records)
        with readable_or_refused():
            self.calls = [call for record in records for call in lower(record, cache, recording.positions)]
        addresses = kernel_addresses(self.calls, folder)
        self.fields = [(ctypes.c_int64 * (len(c.fields) + 2))(*c.fields, c.items, 1) for c in self.calls]
        table = [n for address, fields in zip(addresses, self.fields) for n in (address, ctypes.addressof(fields))]
        self.table = (ctypes.c_int64 * len(table))(*table)
        self.layers: Sequence[object] = []
        self.threads = 0  # as many as `scratch` is for
        self.paged = [is_paged(layer) for layer in cache.layers]

    def run(self, tokens: Tensor, positions: Tensor, cache: KVCache, length: int) -> Tensor:
        """The result for tokens (B, T) at positions (B, T), from which the kernels know what to read; the next run
        overwrites it. Raises NotCompilable for a cache of another form."""
        self.recording.tokens.copy_(tokens)
        self.recording.positions.copy_(positions)
        if self.uses_rope_length:
            self.recording.rope_length.copy_(cache.rope_length[: tokens.size(0)])
        if self.layers != cache.layers or self.threads != torch.get_num_threads():
            with readable_or_refused():
                self.bind(cache)
        sequence()(ctypes.addressof(self.table), len(self.calls))
        return self.recording.result

    def bind(self, cache: KVCache) -> None:
        """Use the memory of a cache, which is another one after it has grown, and as many threads as there are."""
        layers, threads, rows = list(cache.layers), torch.get_num_threads(), len(self.recording.tokens)
        if self.paged != [is_paged(layer) for layer in layers]:
            raise Unreadable("a cache of another kind")
        queries = [call.record.q for call in self.calls if isinstance(call.record, Attention)]
        heads = max((q.size(2) for q in queries), default=0)
        length = max(layer.slots * (layer.table.size(1) if is_paged(layer) else 1) for layer in layers)
        self.scratch, scratch = buffer((threads, heads, length), torch.float32)
        for call, fields in zip(self.calls, self.fields):
            record = call.record
            fields[len(call.fields) + 1] = threads if call.parallel else 1
            if not isinstance(record, Write | Attention):
                continue
            layer = layers[record.layer]
            table = rows_address(layer.table, torch.int64, rows, layer.table.size(1)) if is_paged(layer) else (0, 0)
            if isinstance(record, Write):
                entry = entry_address(layer, record.name, record.vectors.dtype, rows, record.vectors.shape[2:])
                fields[0], fields[4:7] = entry, [layer.slots, *table]
            else:
                names = record.key, record.value
                pairs = zip(names, record.shapes)
                fields[2:4] = [entry_address(layer, name, record.q.dtype, rows, shape) for name, shape in pairs]
                fields[8:14] = [layer.slots, layer.slots, scratch, length, *table]
        self.layers, self.threads = layers, threads


@contextmanager
def readable_or_refused() -> Iterator[None]:
    """NotCompilable in place of Unreadable."""
    try:
        yield
    except Unreadable as reason:
        raise NotCompilable(str(reason)) from reason


def entry_address(layer: LayerCache, name: str, dtype: torch.dtype, rows: int, shape: Sequence[int]) -> int:
    """The address of an entry of a layer: (B or more, S, *shape), contiguous, or (blocks, S, *shape). Raises
    Unreadable."""
    entry = layer.entries[name]
    if not is_paged(layer) and len(entry) < rows:
        raise Unreadable(f"a cache of {len(entry)} rows for a step of {rows}")
    return address(entry, dtype, len(entry), layer.slots, *shape)


KERNELS: dict[tuple[Any, ...], int] = {}  # the addresses of compiled kernels
MODULES: list[Any] = []  # their code


def kernel_addresses(calls: Sequence[Call], folder: Path | None) -> list[int]:
    """The address of each call's kernel; those that were not compiled before are, together."""
    module, names = ir.Module(), dict[tuple[Any, ...], str]()
    for call in calls:
        if call.key not in KERNELS and call.key not in names:
            names[call.key] = f"kernel{len(names)}"
            add_kernel(module, names[call.key], len(call.fields), call.emit)
    if names:
        MODULES.append(load(module, folder=folder))
        KERNELS.update({key: MODULES[-1].get_function_address(name) for key, name in names.items()})
    return [KERNELS[call.key] for call in calls]


@cache
def sequence() -> Callable[[int, int], None]:
    """The function that runs a table of kernels."""
    module = ir.Module()
    add_sequence(module)
    MODULES.append(load(module))
    prototype = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)  # keeps the lock of Python
    return prototype(MODULES[-1].get_function_address("sequence"))


def add_sequence(module: ir.Module) -> None:
    """Add the function `sequence(table, count)`, which calls kernels one after the other; the table has the address of
    each and that of its fields."""
    task = ir.FunctionType(ir.VoidType(), [BYTES])
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [BYTES, INT]), "sequence")
    code = Code(function.append_basic_block())
    with code.loop(0, code.mul(function.args[1], INT(2)), 2) as (index, _):
        kernel = code.inttoptr(code.scalar(function.args[0], "int64", index), task.as_pointer())
        code.call(kernel, [code.inttoptr(code.scalar(function.args[0], "int64", code.add(index, INT(1))), BYTES)])
    code.ret_void()
