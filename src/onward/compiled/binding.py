"""Binding: set the arguments of a compiled step's kernels that depend on the memory of a cache and on the number of
threads, both of which may change."""

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
    """The arguments of a compiled decoding step's kernel calls that depend on the memory of a KV cache and on the
    number of threads. `follow`, called before each step, sets these arguments again if the memory or the number has
    changed. `rows` is the number of rows B of the step; `cache` has the kinds of layers (contiguous or paged, quantized
    or not) for which the calls were compiled."""

    def __init__(self, calls: Sequence[Call], cache: KVCache, rows: int) -> None:
        self.calls, self.rows = calls, rows
        self.kinds = [(layer.table is not None, layer.quantized) for layer in cache.layers]
        self.layers: list[LayerCache] = []
        self.threads = 0
        self.scratch: Tensor | None = None  # (threads, heads, slots): attention scores

    def follow(self, cache: KVCache) -> None:
        """Set the kernel arguments again if the layers of `cache` differ from those of the last call, for example after
        the cache has grown, or if the number of threads has changed. Raises NotCompilable if kernels cannot read the
        new layers."""
        if self.layers != cache.layers or self.threads != torch.get_num_threads():
            with unreadable_is_not_compilable():
                self.bind(cache, torch.get_num_threads())

    def bind(self, cache: KVCache, threads: int) -> None:
        layers = list(cache.layers)
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
                arguments.table, arguments.columns = rows_address(layer.table, torch.int64, self.rows, columns)
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
        state = states.layers[record.layer][record.name] if isinstance(states, RowStates) else record.y
        if len(state) < self.rows or not isinstance(states, RowStates):
            raise Unreadable(f"states of {len(state)} rows for a step of {self.rows}")
        arguments.state, arguments.slots = address(state, state.dtype, *state.shape), state.size(1)

    def entry(self, layer: LayerCache, name: str, dtype: torch.dtype, shape: Sequence[int]) -> tuple[int, int]:
        """Return the addresses of a cache entry, (B or more, S, *shape) or (blocks, S, *shape), and of its scales (0:
        none)."""
        entry = layer.entries[name]
        if layer.table is None and len(entry) < self.rows:
            raise Unreadable(f"a cache of {len(entry)} rows for a step of {self.rows}")
        size = len(entry), layer.slots
        if not layer.quantized:
            return address(entry, dtype, *size, *shape), 0
        scales = address(layer.entries[name + SCALE], dtype, *size, *shape[:-1], 1)
        return address(entry, torch.int8, *size, *shape), scales
