"""The cache of decoders with parts from outside the package, which may call their attention more than once in a layer.

Each call has its own cache entries: the first call's entries have the names that it passes, such as k and v; the second
call's are named k@1 and v@1. `own.py` runs a first forward pass to find the entries and states that the calls of each
layer keep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onward.base import handed
from onward.base.errors import UserError
from onward.config.decoder import DecoderConfig
from onward.config.part_types import States
from onward.model.layer_cache import CacheEntry, LayerCache, SlotIndices
from onward.model.no_states import NoStates

Device = torch.device | str | None
Shapes = dict[str, tuple[int, ...]]  # name -> shape of the entry of one token


@dataclass(frozen=True)
class Kept:
    """The cache entries that a layer keeps, of all earlier tokens or of a window, and its states."""

    window: int  # in tokens; 0: all
    entries: Shapes
    states: States
    own: bool = False  # whether to count calls: a part of the decoder is from outside the package


def tried(config: DecoderConfig) -> list[Kept]:
    """Return the tensors that each layer caches in a decoder with parts from outside the package. Raises a UserError if
    such a decoder fails the trial, for example because its logits with a cache differ from those without."""
    return handed.tried(config)  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class CallSlots(SlotIndices):
    """The slots that one call of the model reads and writes, and its calls of attention in each layer so far."""

    calls: Counter[tuple[LayerCache, str]] = field(default_factory=Counter)  # numbers of calls by layer and name

    def numbered(self, cache: LayerCache, name: str) -> str:
        """Return `name` with the number of this use of it in the layer of `cache`: the name, name@1, name@2, ..."""
        count = self.calls[cache, name]
        self.calls[cache, name] += 1
        return f"{name}@{count}" if count else name


@dataclass(frozen=True, eq=False, kw_only=True)
class CallLayerCache(LayerCache):
    """The cache of a layer with parts from outside the package, in a view; `base` has the entries of all calls."""

    base: LayerCache

    def slot_indices(self, positions: Tensor) -> CallSlots:
        slots = self.base.slot_indices(positions)
        return CallSlots(slots.write, slots.key_positions, slots.blocks)

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.base.locate(positions)

    def update(self, name: str, vectors: Tensor, indices: SlotIndices) -> CacheEntry:
        assert isinstance(indices, CallSlots)
        name = indices.numbered(self, name)
        if name not in self.base.entries:
            known = ", ".join(self.base.entries) or "none"
            raise UserError(
                f"Cannot keep {name}, because the first forward pass of this decoder kept {known} in this layer: call "
                "the attention of a layer equally often in every forward pass"
            )
        return self.base.update(name, vectors, indices)


class CountedCalls(NoStates):
    """The NoStates of a decoder with parts from outside the package; counts the calls of each layer."""

    def view(self, rows: slice, counts: Tensor | None) -> CountedCalls:
        return self

    def beside(self, layers: list[LayerCache]) -> list[LayerCache]:
        return by_call(layers)


def by_call(layers: Sequence[LayerCache]) -> list[LayerCache]:
    return [CallLayerCache(c.entries, c.window, c.wraps, c.table, base=c) for c in layers]
