"""The states of recurrent layers in a cache: per row, not per token, in a ring of the last K + 1 states.

The state after the token at position p is in slot p % (K + 1) of its row, so rolling a row back by up to K positions
needs no copy of a state. As with keys and values, the model is called with smaller positions.

Shapes: B rows of a call, T tokens in this call, K states kept besides the newest, W = min(T, K + 1) states that a call
writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.model.calls import CallSlots, Device, Kept, by_call
from onward.model.layer_cache import CacheEntry, LayerCache, SlotIndices
from onward.model.no_states import NoStates, Snapshot


@dataclass(frozen=True, eq=False)
class StateIndices:
    """The slots of the states that one call of the model reads and writes, the same in all layers."""

    rows: Tensor  # (B, 1), indices of the rows
    before: Tensor  # (B, 1), slot of the state before the first token
    fresh: Tensor  # (B,), whether the row begins here, at position 0, with a state of zeros
    after: Tensor  # (B, W), slots of the states after the last W tokens
    columns: Tensor  # (B, W), indices of the last W tokens in this call; < 0: no token, and its slot stays as it is
    counts: Tensor | None  # (B,), number of tokens in each row of the call, without padding; None: no padding

    def real(self, tokens: int) -> Tensor | None:
        """Return whether each of the call's `tokens` columns is a token, (B, T); None: all are."""
        if self.counts is None:
            return None
        return torch.arange(tokens, device=self.counts.device) < self.counts[:, None]


@dataclass(eq=False)
class RowStates(NoStates):
    """The states of all layers and rows of a cache, and the positions whose states are stored."""

    layers: Sequence[dict[str, Tensor]] = field()  # required, unlike in NoStates
    held: Tensor  # (rows, K + 1), the last position that the state in each slot includes; < 0: no state
    counts: Tensor | None = None  # (B,), number of tokens per row of the next call, without padding; None: no padding
    own: bool = False  # whether a part is from outside the package: its calls are counted
    call: StateIndices | None = None  # the slots that the current call reads and writes

    @staticmethod
    def empty(kept: Sequence[Kept], rows: int, keep: int, device: Device, dtype: torch.dtype | None) -> RowStates:
        """Allocate the states of a cache of `rows` rows, which can be rolled back by `keep` positions; `dtype` is that
        of states without their own dtype."""
        layers, usual = list[dict[str, Tensor]](), dtype or torch.get_default_dtype()
        for layer in kept:
            layers.append({})
            for name, (shape, own) in layer.states.items():
                exact = torch.promote_types(usual, getattr(torch, own)) if own else usual
                layers[-1][name] = torch.zeros(rows, keep + 1, *shape, device=device, dtype=exact)
        return RowStates(layers, torch.full((rows, keep + 1), -1, device=device), own=kept[0].own)

    def __bool__(self) -> bool:
        return True

    def view(self, rows: slice, counts: Tensor | None) -> RowStates:
        """Return the states of some rows; `counts` (B,) is the number of tokens per row that are not padding in the
        next call."""
        layers = [{n: t[rows] for n, t in layer.items()} for layer in self.layers]
        return RowStates(layers, self.held[rows], counts, self.own)

    def nbytes(self) -> int:
        return sum(t.nbytes for layer in self.layers for t in layer.values())

    def beside(self, layers: list[LayerCache]) -> list[LayerCache]:
        """Return the caches of the layers together with their states, for one view of the cache."""
        layers = by_call(layers) if self.own else layers
        first = next((i for i, states in enumerate(self.layers) if states), 0)
        return [
            StateLayerCache(c.entries, c.window, c.wraps, c.table, base=c, states=states, rows=self, leads=i == first)
            if states
            else c
            for i, (c, states) in enumerate(zip(layers, self.layers))
        ]

    def advance(self, positions: Tensor) -> StateIndices:
        """Return the slots that a call with tokens at `positions` (B, T), consecutive in each row, reads and writes;
        record the states that exist after it. On a CPU, raises a UserError if the state before a row's first token is
        no longer stored."""
        (rows, tokens), slots = positions.shape, self.held.size(1)
        index, first = torch.arange(rows, device=positions.device)[:, None], positions[:, :1]
        counts = torch.full_like(first, tokens) if self.counts is None else self.counts[:, None].to(first)
        width = min(tokens, slots)
        columns = counts - width + torch.arange(width, device=positions.device)
        before, after = (first - 1) % slots, first + columns
        if positions.device.type == "cpu" and not torch.compiler.is_compiling():
            self.check(first, (self.held[index, before] == first - 1) | (first == 0) | (counts == 0))
        held = self.held[:rows]
        held.masked_fill_((held >= first) & (counts > 0), -1)  # states that were rolled back
        held[index, after % slots] = torch.where(columns >= 0, after, held[index, after % slots])
        self.call = StateIndices(index, before, first[:, 0] == 0, after % slots, columns, self.counts)
        return self.call

    def check(self, first: Tensor, there: Tensor) -> None:
        if not there.all():
            row = int((~there[:, 0]).nonzero()[0])
            start, held = int(first[row]), sorted(p for p in self.held[row].tolist() if p >= 0)
            raise UserError(
                f"Cannot continue row {row} at position {start}, because its state after position {start - 1} is not "
                f"kept (it has those after {held or 'none'}): keep more states, restore a snapshot, or begin again at 0"
            )

    def holds(self, row: int, length: int) -> bool:
        return not length or bool((self.held[row] == length - 1).any())

    def note(self, positions: Tensor, first: int = 0) -> None:
        self.view(slice(first, first + len(positions)), None).advance(positions)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        kept = [(t, t.clone()) for t in (self.held, *(t for layer in self.layers for t in layer.values()))]
        try:
            yield
        finally:
            for tensor, before in kept:
                tensor.copy_(before)

    def snapshot_bytes(self) -> int:
        return self.nbytes() // self.held.numel()

    def forget(self, row: int) -> None:
        self.held[row] = -1

    def snapshot(self, row: int, length: int) -> Snapshot:
        if not self.holds(row, length):
            held = sorted(p + 1 for p in self.held[row].tolist() if p >= 0)
            raise UserError(
                f"row {row} has no state after {length} tokens, only after {held or 'none'}: keep more states"
            )
        slot = (length - 1) % self.held.size(1)
        return {f"{i}.{n}": t[row, slot].clone() for i, layer in enumerate(self.layers) for n, t in layer.items()}

    def restore(self, row: int, length: int, snapshot: Snapshot) -> None:
        slot = (length - 1) % self.held.size(1)
        for i, layer in enumerate(self.layers):
            for name, tensor in layer.items():
                tensor[row, slot] = snapshot[f"{i}.{name}"].to(tensor)
        self.held[row] = -1
        self.held[row, slot] = length - 1

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        source, target = (torch.tensor(list(rows), device=self.held.device) for rows in (sources, targets))
        for tensor in [self.held, *(t for layer in self.layers for t in layer.values())]:
            tensor[target] = tensor[source]


@dataclass(frozen=True, eq=False, kw_only=True)
class StateSlots(CallSlots):
    """The slots of keys and values, and those of states, that one call reads and writes in a layer with states."""

    states: StateIndices


@dataclass(frozen=True, eq=False, kw_only=True)
class StateLayerCache(LayerCache):
    """The cache of a layer with states, in a view; `base` caches its keys and values, often none."""

    base: LayerCache
    states: dict[str, Tensor]  # states by name, each (rows, K + 1, ...)
    rows: RowStates  # shared by the layers
    leads: bool  # whether this is the first layer with states, which records each call for all of them

    def slot_indices(self, positions: Tensor) -> StateSlots:
        call = self.rows.advance(positions) if self.leads or not self.rows.call else self.rows.call
        keys = self.base.slot_indices(positions)
        return StateSlots(write=keys.write, key_positions=keys.key_positions, blocks=keys.blocks, states=call)

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.base.locate(positions)

    def update(self, name: str, vectors: Tensor, indices: SlotIndices) -> CacheEntry:
        return self.base.update(name, vectors, indices)

    def before(self, name: str, call: StateIndices, empty: Tensor) -> Tensor:
        """Return the result of `read` in the dtype and shape of `empty`, (B, ...)."""
        return self.read(name, call).view_as(empty).to(empty.dtype)

    def read(self, name: str, call: StateIndices) -> Tensor:
        """Return the state `name` of each row before the first token of this call, (B, ...)."""
        state = self.states[name][call.rows[:, 0], call.before[:, 0]]
        return state.masked_fill_(call.fresh.view(-1, *[1] * (state.ndim - 1)), 0)

    def recur(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None = None
    ) -> Tensor | None:
        """Return the outputs (B, G, R, T, F) of the recurrence of `recurrent/recurrence.py` over this call's tokens, if
        this cache advances the state `name` in its own memory; None: the layer reads and writes it."""
        return None

    def convolve(self, name: str, x: Tensor, weight: Tensor) -> Tensor | None:
        """Return x (B, T, X), in at least fp32, after a convolution with `weight` (X, K), if this cache advances the
        state `name` in its own memory; None: the layer reads and writes it."""
        return None

    def write(self, name: str, states: Tensor, call: StateIndices) -> None:
        """Keep the states `name` after the last W tokens of each row, (B, W, ...): those after the tokens at
        `call.columns`. Where a column is negative, the given state is not used."""
        kept, place = self.states[name], (call.rows, call.after)
        states = states.to(kept.dtype)
        if call.counts is not None:
            there = (call.columns >= 0).view(*call.columns.shape, *[1] * (states.ndim - 2))
            states = torch.where(there, states, kept[place])
        kept[place] = states
