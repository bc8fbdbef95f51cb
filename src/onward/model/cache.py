"""The KV cache, which is separate from the model: keys and values of past tokens, and views of them for one call.

Shapes: B rows, S slots, P blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from onward.base.arguments import checked, explained
from onward.base.device import known_device
from onward.base.own import own_parts
from onward.config.decoder import DecoderConfig, at
from onward.config.ranges import Size, SizeOrZero
from onward.model.calls import CountedCalls, Device, Kept, Shapes, tried
from onward.model.layer_cache import SCALE, LayerCache
from onward.model.no_states import NoStates
from onward.model.states import RowStates


def kept_by(config: DecoderConfig) -> list[Kept]:
    """Return what each layer keeps, declared by its attention or, for parts of users, found by a trial forward pass."""
    return tried(config) if own_parts(config) else declared(config)


@lru_cache(maxsize=64)
def declared(config: DecoderConfig) -> list[Kept]:
    parts = [at(config.attention, layer) for layer in range(config.n_layers)]
    return [Kept(part.window, part.entries(config), part.states(config)) for part in parts]


def empty_entries(
    shapes: Shapes, size: tuple[int, int], quantized: bool, device: Device, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Allocate the cache entries of a layer, each (*size, ...), where `size` is (rows, slots) or (blocks, block size);
    quantized, they are int8 codes with scales (*size, ..., 1)."""
    dtype, entries = dtype or torch.get_default_dtype(), {}
    for name, shape in shapes.items():
        entries[name] = torch.zeros(*size, *shape, device=device, dtype=torch.int8 if quantized else dtype)
        if quantized:
            entries[name + SCALE] = torch.zeros(*size, *shape[:-1], 1, device=device, dtype=dtype)
    return entries


def row_states(kept: list[Kept], rows: int, keep: int, device: Device, dtype: torch.dtype | None) -> NoStates:
    """Allocate the states of all layers, or none if no layer has one."""
    if any(layer.states for layer in kept):
        return RowStates.empty(kept, rows, keep, device, dtype)
    return CountedCalls() if kept[0].own else NoStates()


@dataclass(frozen=True, eq=False)
class CacheView:
    """The rows of a KV cache that one call of the model uses, limited to the slots for positions below `end`.

    A view shares the memory of the cache and cannot grow; `KVCache.view` makes it.
    """

    layers: list[LayerCache]
    rope_length: Tensor  # (B,)
    states: NoStates  # states of recurrent layers
    length: int  # exclusive upper bound of the positions of tokens
    end: int  # exclusive upper bound of the positions of tokens and padding
    chunk: int  # maximum number of tokens that one call adds to a row


class KVCache:
    """The keys and values of a batch of rows: position p of a row is in slot p % slots of that row.

    The mask hides the slots that a row has not reached, so nothing is ever cleared: to roll back, or to give the row
    to another request, call the model with smaller positions. Rows advance independently.

    A row holds up to `length` positions. One call adds up to `chunk` tokens to each row, and a row can be rolled back
    by up to `chunk` from its greatest position, padding included. Layers without a window have length + chunk slots,
    since a ragged call pads its shorter rows with positions beyond their last token; layers with a window have
    min(window, length) + chunk. With a `step` > 0, layers begin with `step` slots, and `grow` adds multiples of `step`.
    `quantized` keeps every vector as int8 with one scale.

    Layers with a state, such as GatedDeltaNet, keep the states after the row's last token and after the `keep` tokens
    before it, so a row can be rolled back by up to `keep` tokens, padding included. On a CPU, a call that rolls back
    further raises a UserError. For a call with longer padding, pass the number of tokens per row to `view` as `counts`.

    `rope_length` (rows,) is the number of tokens for which dynamic NTK or LongRoPE scale the rotary positions of a row,
    by default `length`. It is fixed while a row is continued: an Engine recomputes the row when the scaling changes.

    >>> cache = KVCache(config, rows=1, length=16, chunk=8)
    >>> logits = model(tokens, positions, cache)
    """

    @checked
    @torch.inference_mode(False)  # so that the tensors can be written to in every mode
    def __init__(
        self,
        config: DecoderConfig,
        rows: Size,
        length: Size,
        chunk: SizeOrZero = 1,
        *,
        step: SizeOrZero = 0,
        keep: SizeOrZero = 0,
        quantized: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        device = known_device(device) if device else None
        self.config, self.length, self.chunk, self.step, self.keep = config, length, chunk, step, keep
        self.rope_length = torch.full((rows,), length, device=device)
        self.layers: list[LayerCache] = []
        self.max_slots: list[int] = []  # the final number of slots of each layer
        for layer in (kept := kept_by(config)):
            most = chunk + (min(layer.window, length) if layer.window else length)
            slots = min(step or most, most)
            entries = empty_entries(layer.entries, (rows, slots), quantized, device, dtype)
            self.layers.append(LayerCache(entries, layer.window, slots >= most or not entries))
            self.max_slots.append(most)
        self.capacity = length if all(layer.wraps for layer in self.layers) else step - 1  # positions that have slots
        self.states = row_states(kept, rows, keep, device, dtype)

    @property
    def rows(self) -> int:
        """The number of rows of the cache."""
        return self.rope_length.numel()

    @checked
    @torch.inference_mode(False)
    def grow(self, capacity: int) -> None:
        """Allocate slots of the cache for positions below `capacity` or more, in multiples of `step`; existing slots
        keep their keys and values."""
        for layer, (cache, most) in enumerate(zip(self.layers, self.max_slots)):
            if cache.wraps or cache.slots > capacity:  # one slot more than positions: the last is for padding
                continue
            slots, entries = min(most, -(-(capacity + 1) // self.step) * self.step), {}
            for name, old in cache.entries.items():
                entries[name] = old.new_zeros(old.size(0), slots, *old.shape[2:])
                entries[name][:, : old.size(1)] = old
            self.layers[layer] = LayerCache(entries, cache.window, slots >= most)
        self.capacity = min((cache.slots - 1 for cache in self.layers if not cache.wraps), default=self.length)

    @explained
    def view(
        self, start: int = 0, end: int | None = None, length: int | None = None, counts: Tensor | None = None
    ) -> CacheView:
        """Return a view of rows `start` to `end` - 1 (None: all from `start` on), with the slots for positions below
        `length`, padding included (None: all slots). `counts` (B,) is the number of tokens per row of the call that are
        not padding (None: all), for layers with a state."""
        last = self.length + self.chunk if length is None else min(length, self.length + self.chunk)
        layers = [self.narrow(cache, slice(start, end), last) for cache in self.layers]
        states = self.states
        if isinstance(states, RowStates | CountedCalls):
            states = states.view(slice(start, end), counts)
            layers = states.beside(layers)
        length = min(self.length, self.capacity, last)
        return CacheView(layers, self.rope_length[start:end], states, length, last, self.chunk)

    def narrow(self, cache: LayerCache, rows: slice, slots: int) -> LayerCache:
        return LayerCache({n: t[rows, :slots] for n, t in cache.entries.items()}, cache.window, cache.wraps)

    def nbytes(self) -> int:
        """Return the memory of all keys, values and states in bytes."""
        return sum([t.nbytes for layer in self.layers for t in layer.entries.values()]) + self.states.nbytes()
