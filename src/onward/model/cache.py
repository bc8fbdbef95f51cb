"""The KV cache: the memory of past tokens, outside the model, and views of it for single calls.

Shapes: B rows, T tokens in this call, S slots, K key/value heads, E d_head, P blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onward.model.config import DecoderConfig, at

SCALE = ".scale"  # ends the name of the entry that holds the scales of a quantized one


@dataclass(frozen=True, eq=False)
class SlotIndices:
    """Where the tokens of a call lie in every layer whose slots are alike."""

    write: tuple[Tensor, Tensor]  # the first two indices into the entries for each token, each (B, T)
    key_positions: Tensor  # (B or 1, S): the position that each slot holds after the write, negative where none
    blocks: Tensor | None = None  # paged: the blocks that are read, (B, P); None: all slots of the row


@dataclass(frozen=True, eq=False)
class LayerCache:
    """The entries of one layer, each (rows, S, ...): position p of a row lies in slot p % S.

    While a cache has fewer slots than it may get (`wraps` False) positions do not wrap: the last slot takes those
    beyond, which are padding that only padding sees. `window` is that of the layer, 0 for none.
    """

    entries: dict[str, Tensor]
    window: int
    wraps: bool = True

    @property
    def slots(self) -> int:
        """Slots of a row."""
        return next(iter(self.entries.values())).size(1)

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The first two indices into the entries for positions (B, T)."""
        slot = positions % self.slots if self.wraps else positions.clamp(max=self.slots - 1)
        return torch.arange(positions.size(0), device=positions.device)[:, None], slot

    def slot_indices(self, positions: Tensor) -> SlotIndices:
        """Where a call with positions (B, T) writes, and what it reads."""
        last = positions[:, -1:]
        if not self.wraps:
            last = last.clamp(max=self.slots - 1)
        return SlotIndices(self.locate(positions), slot_positions(self.slots, last))

    def update(self, name: str, vectors: Tensor, indices: SlotIndices) -> CacheEntry:
        """Write the vectors (B, T, ...) of this call's tokens to the entry `name`; returns the entry, to be read."""
        scales = self.entries.get(name + SCALE)
        if scales is not None:
            vectors, scale = quantize(vectors, scales.dtype)
            scales[indices.write] = scale
        self.entries[name][indices.write] = vectors.to(self.entries[name].dtype)
        return CacheEntry(self, name, indices)


@dataclass(frozen=True, eq=False)
class CacheEntry:
    """One entry of a layer, as a backend of attention receives it: gathered and dequantized only on demand."""

    cache: LayerCache
    name: str
    indices: SlotIndices

    def read(self, dtype: torch.dtype) -> Tensor:
        """The vectors (B, S, ...) of all slots that this call reads."""
        tensors = [self.cache.entries[n] for n in (self.name, self.name + SCALE) if n in self.cache.entries]
        blocks = self.indices.blocks
        if blocks is not None:  # flat indices: index_select is three times as fast as advanced indexing
            rows = blocks.size(0)
            tensors = [t.index_select(0, blocks.flatten()).view(rows, -1, *t.shape[2:]) for t in tensors]
        vectors, *scale = (t.to(dtype) for t in tensors)
        return vectors.mul_(scale[0]) if scale else vectors

    def pool_positions(self) -> Tensor:
        """Paged: the position of each slot of the whole pool in each row, (B, blocks * size), -1 where it is not the
        row's."""
        blocks, size = self.indices.blocks, self.cache.slots
        assert blocks is not None, "only a paged cache is a pool"
        rows, count = blocks.size(0), self.cache.entries[self.name].size(0)
        positions = self.indices.key_positions.expand(rows, -1).unflatten(1, (-1, size))
        pool = positions.new_full((rows, count, size), -1)
        pool.scatter_(1, blocks[:, :, None].expand_as(positions), positions)
        pool[:, 0] = -1  # the null block
        return pool.flatten(1)


def quantize(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Vectors (..., E) as int8 and one scale (..., 1) of this dtype each: every product is within half a scale of the
    exact number."""
    vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    scale = (vectors.abs().amax(-1, keepdim=True) / 127).to(dtype).clamp(min=torch.finfo(dtype).tiny)
    return (vectors / scale).round().clamp(-127, 127).to(torch.int8), scale


def slot_positions(slots: int, last: Tensor) -> Tensor:
    """The position that each slot holds once a row has reached position `last` (B, 1): (B, S), negative where none."""
    return last - (last - torch.arange(slots, device=last.device)) % slots


def empty_entries(
    config: DecoderConfig,
    layer: int,
    size: tuple[int, int],
    quantized: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """The entries of a layer as zeros, each (*size, ...); quantized ones as int8 with their scales, (*size, ..., 1)."""
    dtype, entries = dtype or torch.get_default_dtype(), {}
    for name, shape in at(config.attention, layer).entries(config).items():
        entries[name] = torch.zeros(*size, *shape, device=device, dtype=torch.int8 if quantized else dtype)
        if quantized:
            entries[name + SCALE] = torch.zeros(*size, *shape[:-1], 1, device=device, dtype=dtype)
    return entries


@dataclass(frozen=True, eq=False)
class CacheView:
    """Some rows of a cache and the slots that positions below `length` need, for calls of the model.

    It shares the memory of the cache, and nothing can be allocated on it.
    """

    layers: list[LayerCache]
    rope_length: Tensor  # (B,)
    length: int  # positions of real tokens are below it
    end: int  # positions, those of padding included, are below it
    chunk: int  # the most tokens that one call adds to a row


class KVCache:
    """The keys and values of a batch of rows: position p of a row lies in slot p % slots of that row.

    The mask hides the slots that a row has not reached, so nothing is ever cleared: to roll back, or to give the row
    to another request, call the model with smaller positions. Rows advance independently.

    `length` positions fit; one call may add up to `chunk` tokens to each row, which is also how far a row may be
    rolled back from the furthest position it was given, padding included. Layers without a window have length + chunk
    slots, since a ragged call pads its shorter rows with positions beyond their last token; layers with a window have
    window + chunk. With a `step`, layers begin with that many slots, and `grow` adds more in such steps. `quantized`
    keeps every vector as int8 with a scale of its own.

    `rope_length` (rows,) is the greatest length that each row will reach, on which rotary scalings may depend. It is
    `length` unless it is set when a row is given to a request, and must stay the same while the row is continued.

    >>> cache = KVCache(config, rows=1, length=16, chunk=8)
    >>> logits = model(tokens, positions, cache)
    """

    @torch.inference_mode(False)  # so that the tensors can be written to in every mode
    def __init__(
        self,
        config: DecoderConfig,
        rows: int,
        length: int,
        chunk: int = 1,
        *,
        step: int = 0,
        quantized: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.config, self.length, self.chunk, self.step = config, length, chunk, step
        self.capacity = 0 if step else length  # positions that there are slots for
        self.rope_length = torch.full((rows,), length, device=device)
        self.layers: list[LayerCache] = []
        self.max_slots: list[int] = []  # by layer
        for layer in range(config.n_layers):
            window = at(config.attention, layer).window
            most = chunk + (min(window, length) if window else length)
            slots = min(step or most, most)
            entries = empty_entries(config, layer, (rows, slots), quantized, device, dtype)
            self.layers.append(LayerCache(entries, window, slots >= most))
            self.max_slots.append(most)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.rope_length.numel()

    @torch.inference_mode(False)
    def grow(self, capacity: int) -> None:
        """Make slots for positions below `capacity` or more, in steps; the slots there were keep their entries."""
        for layer, (cache, most) in enumerate(zip(self.layers, self.max_slots)):
            if cache.wraps or cache.slots > capacity:  # one slot more than positions: the last is for padding
                continue
            slots, entries = min(most, -(-(capacity + 1) // self.step) * self.step), {}
            for name, old in cache.entries.items():
                entries[name] = old.new_zeros(old.size(0), slots, *old.shape[2:])
                entries[name][:, : old.size(1)] = old
            self.layers[layer] = LayerCache(entries, cache.window, slots >= most)
        self.capacity = min((cache.slots - 1 for cache in self.layers if not cache.wraps), default=self.length)

    def view(self, start: int = 0, end: int | None = None, length: int | None = None) -> CacheView:
        """Rows start to end - 1, by default all, with the slots that positions below `length`, padding included, need;
        by default all."""
        most = self.length + self.chunk
        last = most if length is None else min(length, most)
        layers = [self.narrow(cache, slice(start, end), last) for cache in self.layers]
        return CacheView(layers, self.rope_length[start:end], min(self.length, self.capacity, last), last, self.chunk)

    def narrow(self, cache: LayerCache, rows: slice, slots: int) -> LayerCache:
        """The same memory of a layer, some rows and the first slots only."""
        return LayerCache({n: t[rows, :slots] for n, t in cache.entries.items()}, cache.window, cache.wraps)

    def nbytes(self) -> int:
        """Memory of all entries in bytes."""
        return sum(t.nbytes for layer in self.layers for t in layer.entries.values())
