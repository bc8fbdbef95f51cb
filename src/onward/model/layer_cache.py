"""The cache of one layer: its keys and values by name, and how attention writes and reads them.

Shapes: B rows, T tokens in this call, S slots, K key/value heads, E d_head, P blocks of a row.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onward.kernels.memory import Unreadable
from onward.kernels.operations import attention_kernel
from onward.model.cache_codes import quantize
from onward.model.mask import AttentionMask

SCALE = ".scale"  # suffix of the name of the entry with the scales of a quantized entry


@dataclass(frozen=True, eq=False)
class SlotIndices:
    """The cache slots that one call of the model writes and reads; layers with the same window, chunking and number of
    slots share one SlotIndices."""

    write: tuple[Tensor, Tensor]  # the first two indices into the entries for each token, each (B, T)
    key_positions: Tensor  # (B or 1, S): position stored in each slot after the write; < 0: the slot is empty
    blocks: Tensor | None = None  # (B, P), the blocks to read from a paged cache; None: read all slots of the row


@dataclass(frozen=True, eq=False)
class LayerCache:
    """The KV cache of one layer: its entries (tensors such as keys and values) by name, each (rows, S, ...). Position p
    of a row is in slot p % S.

    While a growing cache has fewer slots than its final number, `wraps` is False: positions from S on, which are
    padding, are all written to the last slot, which no real token reads. `window` is the attention window of the layer,
    in positions, 0 for none.
    """

    entries: dict[str, Tensor]
    window: int
    wraps: bool = True
    table: Tensor | None = None  # (B, P), blocks of each row of a paged cache; None: not paged

    @property
    def slots(self) -> int:
        return next((t.size(1) for t in self.entries.values()), 0)

    @property
    def quantized(self) -> bool:
        return any(name.endswith(SCALE) for name in self.entries)

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first two indices into every entry, rows and slots, for positions (B, T)."""
        slot = positions % self.slots if self.wraps else positions.clamp(max=self.slots - 1)
        return torch.arange(positions.size(0), device=positions.device)[:, None], slot

    def slot_indices(self, positions: Tensor) -> SlotIndices:
        if not self.entries:
            return SlotIndices((positions, positions), positions)
        last = positions[:, -1:]
        if not self.wraps:
            last = last.clamp(max=self.slots - 1)
        return SlotIndices(self.locate(positions), slot_positions(self.slots, last))

    def update(self, name: str, vectors: Tensor, indices: SlotIndices) -> CacheEntry:
        """Write the vectors (B, T, ...) of this call's tokens to the entry `name`, such as k; return the entry."""
        scales = self.entries.get(name + SCALE)
        if scales is not None:
            vectors, scale = quantize(vectors, scales.dtype)
            scales[indices.write] = scale
        self.entries[name][indices.write] = vectors.to(self.entries[name].dtype)
        return CacheEntry(self, name, indices)


@dataclass(frozen=True, eq=False)
class CacheEntry:
    """One named tensor of a layer's KV cache, such as its keys, in the form in which attention backends receive it.
    `tail` names a second tensor with the last elements of each vector, if they are stored apart."""

    cache: LayerCache
    name: str
    indices: SlotIndices
    tail: str = ""

    def read(self, dtype: torch.dtype) -> Tensor:
        """Gather and dequantize the vectors (B, S, ...) of all slots that this call of the model reads."""
        if self.tail:
            return torch.cat([replace(self, name=name, tail="").read(dtype) for name in (self.name, self.tail)], -1)
        tensors = [self.cache.entries[n] for n in (self.name, self.name + SCALE) if n in self.cache.entries]
        blocks = self.indices.blocks
        if blocks is not None:  # flat indices: index_select is three times as fast as advanced indexing
            rows = blocks.size(0)
            tensors = [t.index_select(0, blocks.flatten()).view(rows, -1, *t.shape[2:]) for t in tensors]
        vectors, *scale = (t.to(dtype) for t in tensors)
        return vectors.mul_(scale[0]) if scale else vectors

    def attend(
        self,
        q: Tensor,
        v: CacheEntry,
        mask: AttentionMask,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor | None:
        """Compute attention with queries q (B, T, H, E), this entry as the keys and `v` as the values, which are read
        from the cache memory without a copy. Return (B, T, H, F), or None if the kernel cannot do this, for example for
        a cache in another dtype. The options are those of `reference`."""
        names = [name for name in (self.name, v.name, self.tail) if name]
        keys, values, *tails = (self.cache.entries[name] for name in names)
        scales = [self.cache.entries[name + SCALE] for name in names] if self.cache.quantized else []
        slots = mask.key_positions.size(1)
        kernel = attention_kernel(q, scales or [keys, values], slots) if mask.linear else None
        if kernel is None:
            return None
        positions = mask.query_positions.expand(len(q), -1).to(torch.int64)
        if not self.cache.wraps:  # padding beyond the slots sees the tokens of the last slot
            positions = positions.clamp(max=self.cache.slots - 1)
        stored = keys, values, positions, self.cache.table, tails[0] if tails else None, scales
        with suppress(Unreadable):
            return kernel(q, *stored, scale=scale, softcap=softcap, sinks=sinks, slopes=mask.slopes, **mask.reach)
        return None


Keys = Tensor | CacheEntry  # keys (B, S, K, E) or values (B, S, K, F): a tensor, or the entry of a cache


def to_tensor(keys: Keys, dtype: torch.dtype) -> Tensor:
    return keys.read(dtype) if isinstance(keys, CacheEntry) else keys


def slot_positions(slots: int, last: Tensor) -> Tensor:
    """Return the position that each slot of a row holds, (B, S), negative if it is empty; `last` (B, 1) is the greatest
    position written to the row."""
    return last - (last - torch.arange(slots, device=last.device)) % slots
