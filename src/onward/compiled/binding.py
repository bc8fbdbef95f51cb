"""Binding: set the arguments of a compiled step's kernels that depend on the memory of a cache, the first row and the
number of threads, which may change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onward.compiled.calls import Call, unreadable_is_not_compilable
from onward.compiled.recording import Advance, Attention, Write
from onward.kernels.llvm.compiler import Arguments
from onward.kernels.memory import Unreadable, address, buffer, rows_address
from onward.model.cache import KVCache
from onward.model.layer_cache import SCALE, LayerCache
from onward.model.no_states import NoStates
from onward.model.states import RowStates


class Binding:
    """The arguments of a compiled step's kernel calls that depend on the memory of a KV cache, on the step's first row
    in it and on the number of threads. `follow`, called before each step, sets these arguments again if one of these
    has changed. `rows` is the number of rows B of the step; `cache` has the kinds of layers (contiguous or paged,
    quantized or not) for which the calls were compiled."""

    def __init__(self, calls: Sequence[Call], cache: KVCache, rows: int) -> None:
        self.calls, self.rows = calls, rows
        self.kinds = [(layer.table is not None, layer.quantized) for layer in cache.layers]
        self.layers: list[LayerCache] = []
        self.first = self.threads = 0
        self.scratch: Tensor | None = None  # (threads, heads, slots): attention scores

    def follow(self, cache: KVCache, first: int) -> None:
        """Set the kernel arguments, for the rows of `cache` from row `first` on, if its layers differ from those of the
        last call, for example after the cache has grown, or if `first` or the number of threads has changed. Raises
        NotCompilable if kernels cannot read the new layers."""
        if self.layers != cache.layers or (self.first, self.threads) != (first, torch.get_num_threads()):
            with unreadable_is_not_compilable():
                self.bind(cache, first, torch.get_num_threads())

    def bind(self, cache: KVCache, first: int, threads: int) -> None:
        layers, self.first = list(cache.layers), first
        if self.kinds != [(layer.table is not None, layer.quantized) for layer in layers]:
            raise Unreadable("a cache of another kind")
        queries = [call.record.q for call in self.calls if isinstance(call.record, Attention)]
        heads = max((q.size(2) for q in queries), default=0)
        length = max(layer.slots * (1 if layer.table is None else layer.table.size(1)) for layer in layers)
        self.scratch, scratch = buffer((threads, heads, length), torch.float32)
        for call in self.calls:
            arguments, record = call.arguments, call.record
            arguments.threads = threads if call.parallel else 1
            if record is None:
                continue
            if isinstance(record, Advance):
                self.bind_states(arguments, cache.states, record)
                continue
            layer = layers[record.layer]
            arguments.slots = layer.slots
            if layer.table is not None:
                columns = layer.table.size(1)
                arguments.table, arguments.columns = rows_address(layer.table[first:], torch.int64, self.rows, columns)
            if isinstance(record, Write):
                dtype, shape = record.vectors.dtype, record.vectors.shape[2:]
                arguments.entry, arguments.scales = self.entry(layer, record.name, dtype, shape)
            else:
                fields = ("k", "k_scales"), ("v", "v_scales"), ("tails", "tail_scales")
                for pair, name, shape in zip(fields, record.names, record.shapes):
                    for field, value in zip(pair, self.entry(layer, name, record.q.dtype, shape)):
                        setattr(arguments, field, value)
                arguments.row_slots, arguments.scratch, arguments.length = layer.slots, scratch, length
        self.layers, self.threads = layers, threads

    def bind_states(self, arguments: Arguments, states: NoStates, record: Advance) -> None:
        if not isinstance(states, RowStates):
            raise Unreadable("a cache without states")
        state = self.own_rows(states.layers[record.layer][record.name])
        arguments.state, arguments.slots = address(state, state.dtype, *state.shape), state.size(1)

    def entry(self, layer: LayerCache, name: str, dtype: torch.dtype, shape: Sequence[int]) -> tuple[int, int]:
        """Return the addresses of a cache entry, (B or more, S, *shape) or (blocks, S, *shape), and of its scales (0:
        none)."""
        entry, *scales = (layer.entries[n] for n in (name, name + SCALE) if n in layer.entries)
        if layer.table is None:
            entry, *scales = map(self.own_rows, (entry, *scales))
        size = len(entry), layer.slots
        if not scales:
            return address(entry, dtype, *size, *shape), 0
        return address(entry, torch.int8, *size, *shape), address(scales[0], dtype, *size, *shape[:-1], 1)

    def own_rows(self, tensor: Tensor) -> Tensor:
        """Return the rows of the step, of a tensor with all rows of the cache."""
        rows = tensor[self.first : self.first + self.rows]
        if len(rows) < self.rows:
            raise Unreadable(f"a cache of {len(tensor)} rows for {self.rows} rows from row {self.first} on")
        return rows
