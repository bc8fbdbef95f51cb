"""State outside the model: the keys and values of past tokens, and what a layer knows of one call.

Shapes: B rows, T tokens in this call, S slots, H heads, K key/value heads, E d_head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from onward.model.config import DecoderConfig, at


@dataclass(frozen=True)
class Place:
    """Where the tokens of a call lie in the stores of all layers that are alike."""

    write: tuple[Tensor, Tensor]  # the first two indices of each token, (B, T)
    held: Tensor  # (B or 1, S): the position that each slot read holds once they are written
    pages: Tensor | None = None  # which parts are read, along the first dimension, (B, P); None: all


class Store:
    """What one layer keeps: tensors (B, S, ...), with position p of a row in slot p % S.

    While there are fewer slots than the `most` it may get, positions do not wrap, and the last slot takes what lies
    beyond: pads, which nothing but pads can see.
    """

    def __init__(self, entries: dict[str, Tensor], window: int, most: int) -> None:
        self.entries, self.window, self.most = entries, window, most
        self.wraps = self.slots >= most

    @property
    def slots(self) -> int:
        return next(iter(self.entries.values())).size(1)

    def index(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Where positions (B, T) are kept, as the first two indices of the entries."""
        slot = positions % self.slots if self.wraps else positions.clamp(max=self.slots - 1)
        return torch.arange(positions.size(0), device=positions.device)[:, None], slot

    @torch.inference_mode(False)
    def grow(self, slots: int) -> None:
        """Get so many slots; what is kept stays."""
        for name, old in self.entries.items():
            self.entries[name] = old.new_zeros(old.size(0), slots, *old.shape[2:])
            self.entries[name][:, : old.size(1)] = old
        self.wraps = slots >= self.most

    def place(self, positions: Tensor) -> Place:
        """Where a call with positions (B, T) writes and reads."""
        last = positions[:, -1:]
        return Place(self.index(positions), held(self.slots, last if self.wraps else last.clamp(max=self.slots - 1)))

    def write(self, place: Place, **new: Tensor) -> None:
        """Keep the vectors (B, T, ...) of the tokens in a call."""
        for name, vectors in new.items():
            scales = self.entries.get(name + SCALE)
            if scales is not None:
                vectors, scale = quantize(vectors, scales.dtype)
                scales[place.write] = scale
            self.entries[name][place.write] = vectors.to(self.entries[name].dtype)

    def read(self, name: str, place: Place, dtype: torch.dtype) -> Tensor:
        """The vectors (B, S, ...) of one entry in all slots."""
        parts = [self.entries[n] for n in (name, name + SCALE) if n in self.entries]
        if place.pages is not None:
            chosen, rows = place.pages.flatten(), place.pages.size(0)  # flat, since that is three times as fast
            parts = [part.index_select(0, chosen).view(rows, -1, *part.shape[2:]) for part in parts]
        vectors, *scale = (part.to(dtype) for part in parts)
        return vectors.mul_(scale[0]) if scale else vectors


SCALE = ".scale"  # ends the name of the entry that holds the scales of a quantized one


def quantize(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Vectors (..., E) as int8 and a scale (..., 1) of this dtype: their product is within half a scale of each."""
    vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    scale = (vectors.abs().amax(-1, keepdim=True) / 127).to(dtype).clamp(min=torch.finfo(dtype).tiny)
    return (vectors / scale).round().clamp(-127, 127).to(torch.int8), scale


def allocate(
    config: DecoderConfig,
    layer: int,
    size: tuple[int, int],
    quantized: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """The entries of a layer, each (*size, ...), or its int8 form and the scales, (*size, ..., 1)."""
    dtype, entries = dtype or torch.get_default_dtype(), {}
    for name, shape in at(config.attention, layer).entries(config).items():
        entries[name] = torch.zeros(*size, *shape, device=device, dtype=torch.int8 if quantized else dtype)
        if quantized:
            entries[name + SCALE] = torch.zeros(*size, *shape[:-1], 1, device=device, dtype=dtype)
    return entries


class Cache:
    """The past of a batch of rows: position p of a row lives in slot p % slots of that row.

    The mask hides the slots a row has not reached yet, so nothing is ever cleared: to roll back, or to give the row
    to another request, call the model with smaller positions. Rows advance independently.

    `length` positions fit; one call may add up to `chunk` tokens to each row, which is also how far a row may be
    rolled back from the furthest position it was given, pads included. Full layers have length + chunk slots, since a
    ragged call pads its shorter rows with positions beyond their last; layers with a window have window + chunk.
    With a `step`, layers begin with that many slots and get more, step by step, as `extend` asks for them. `quantized`
    keeps every vector as int8 with a scale of its own.

    `rope_length` (rows,) is the length that each row will reach at most, which rotary scalings may depend on. It is
    `length` unless it is set when a row is given to a request, and must stay the same while the row is continued.

    An engine calls `open` when it gives a row to a request, `extend` before each call of the model, `commit` when
    tokens are in the row, and `close` when it takes the row back. Here they are formalities, unless there is a `step`;
    other caches (`PagedCache`) find memory then. Views, by `rows` and `upto`, are for calls of the model only.
    """

    block_size = 1  # how many positions get memory together

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
        self.length, self.chunk, self.step = length, chunk, step
        self.room = 0 if step else length  # the positions that there are slots for
        self.end = length + chunk  # every position in a call, pads included, is below it
        self.rope_length = torch.full((rows,), length, device=device)
        self.layers: list[Store] = []
        for layer in range(config.n_layers):
            window = at(config.attention, layer).window
            most = chunk + (min(window, length) if window else length)
            size = rows, min(step or most, most)
            self.layers.append(Store(allocate(config, layer, size, quantized, device, dtype), window, most))

    def open(self, row: int, tokens: Sequence[int], rope_length: int) -> int | None:
        """Give a row to a request that has these tokens so far and reaches at most `rope_length` positions.

        Returns how many of the first tokens the row holds already, always fewer than all, or None where there is no
        room now."""
        self.rope_length[row] = rope_length
        return 0

    def extend(self, row: int, start: int, end: int) -> bool:
        """Make ready to write positions start to end - 1 of a row, at most a chunk of them, which holds those before.

        False, and nothing is changed, where there is no room."""
        for store in self.layers:
            if not store.wraps and store.slots <= end:  # one more than positions: the last is for pads
                store.grow(min(store.most, -(-(end + 1) // self.step) * self.step))
        self.room = max(self.room, end)
        return True

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """Tell that a row holds these tokens, so that requests that begin with them may share their memory."""

    def close(self, row: int) -> None:
        """Take a row back; its memory may go to others."""

    def fork(self, source: int, target: int, length: int) -> None:
        """Row `target` becomes a copy of the first `length` positions of row `source`, and gets its rope_length."""
        self.rope_length[target] = self.rope_length[source]
        for store in self.layers:
            for entry in store.entries.values():
                entry[target, :length] = entry[source, :length]

    def move(self, source: int, target: int) -> None:
        """Row `target` becomes row `source`, which is then free."""
        self.fork(source, target, self.end)

    def reorder(self, index: Sequence[int]) -> None:
        """The first rows become the rows of the index, in which some may be left out and others repeated."""
        rows = torch.tensor(index, device=self.rope_length.device)
        for tensor in [self.rope_length, *(entry for store in self.layers for entry in store.entries.values())]:
            tensor[: len(rows)] = tensor[rows]

    def rows(self, start: int, end: int) -> Self:
        """The same memory, rows start to end only."""
        view = self._view(slice(start, end), self.end)
        view.rope_length = self.rope_length[start:end]
        return view

    def upto(self, length: int) -> Self:
        """The same memory, without the slots that positions below `length`, pads included, do not need."""
        view = self._view(slice(None), length)
        view.length, view.end = min(length, view.length), min(length, self.end)
        return view

    def _view(self, rows: slice, slots: int) -> Self:
        view = copy(self)
        view.length = min(self.length, self.room)
        view.layers = [Store({n: t[rows, :slots] for n, t in s.entries.items()}, s.window, s.most) for s in self.layers]
        return view

    def dump(self, row: int, length: int) -> dict[str, Tensor]:
        """What a row that holds `length` tokens needs to go on, be it by its last one once more: for every layer and
        entry the vectors (T, ...) of all of them or, with a window, of the last ones."""
        return {
            f"{layer}.{name}": entry[index][0]
            for layer, store, index in self.needed(row, length)
            for name, entry in store.entries.items()
        }

    def load(self, row: int, length: int, vectors: Mapping[str, Tensor]) -> None:
        """Put what `dump` gave into a row that has been extended from length - 1 to `length`."""
        for layer, store, index in self.needed(row, length):
            for name, entry in store.entries.items():
                entry[index] = vectors[f"{layer}.{name}"][None].to(entry.device)

    def needed(self, row: int, length: int) -> Iterator[tuple[int, Store, tuple[Tensor, Tensor]]]:
        """Each layer, its store and the indices of what is seen from the block of position length - 1 on."""
        size = self.block_size
        for layer, store in enumerate(self.rows(row, row + 1).layers):
            first = max(0, (length - 1) // size * size - store.window + 1) // size * size if store.window else 0
            yield layer, store, store.index(torch.arange(first, length, device=self.rope_length.device)[None])

    def nbytes(self) -> int:
        """Memory of all entries in bytes."""
        return sum(t.nbytes for layer in self.layers for t in layer.entries.values())


@dataclass(frozen=True)
class View:
    """What one layer knows of the tokens in this call."""

    positions: Tensor  # (B, T), or (1, T) where all rows are alike
    rotation: tuple[Tensor, Tensor] | None  # cosines and sines, each (B, T, 1, rope_dim / 2)
    bias: Tensor | None  # added to the scores, (B, 1 or H, T, S), -inf where not seen; None: all up to itself is seen
    store: Store | None  # the past of this layer
    place: Place | None = None  # and where this call writes and reads in it

    def remember(self, **new: Tensor) -> tuple[Tensor, ...]:
        """Keep these vectors (B, T, ...) of the tokens in this call; returns those of all tokens kept, (B, S, ...)."""
        if not self.store or not self.place:
            return tuple(new.values())
        self.store.write(self.place, **new)
        return tuple(self.store.read(name, self.place, vectors.dtype) for name, vectors in new.items())


def rotation_key(config: DecoderConfig, rope_length: int) -> bytes:
    """What rotations depend on in a row made for the length `rope_length`: rows with the same key turn alike."""
    one, length = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1, 1), rope_length, dtype=torch.float64)
    widths = [(at(config.position, i), at(config.attention, i).rope_width(config)) for i in range(config.n_layers)]
    found = [position.rotation(width, one, length) for position, width in dict.fromkeys(widths)]
    return repr([[t.tolist() for t in turn] for turn in found if turn]).encode()


def visible(query: Tensor, key: Tensor, window: int) -> Tensor:
    """May the token at position `query` see the one at position `key`? A slot not reached yet has key < 0."""
    seen = (key <= query) & (key >= 0)
    return seen & (query - key < window) if window else seen


def held(slots: int, last: Tensor) -> Tensor:
    """The position that each slot holds once a row has reached `last` (B, 1): (B, S), negative where none."""
    return last - (last - torch.arange(slots, device=last.device)) % slots


def documents(positions: Tensor) -> Tensor:
    """Which packed document each token belongs to, (B, T): one begins where a position does not follow the last."""
    begins = positions[:, 1:] != positions[:, :-1] + 1
    return torch.nn.functional.pad(begins.cumsum(1), (1, 0))


def views(config: DecoderConfig, x: Tensor, positions: Tensor | None, cache: Cache | None) -> list[View]:
    """One View per layer for a call with embeddings x (B, T, D); layers that are alike share biases and rotations."""
    plain = positions is None and cache is None
    if positions is None:
        positions = torch.arange(x.size(1), device=x.device)[None]
    exact = positions.to(torch.promote_types(x.dtype, torch.float32))
    rope_length = (cache.rope_length.to(exact) if cache else exact.amax(1) + 1)[:, None, None]
    places: dict[tuple[int, int], Place | None] = {}
    masks: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
    rotations, biases = {}, {}
    result = []
    for layer in range(config.n_layers):
        attention, position = at(config.attention, layer), at(config.position, layer)
        store = cache.layers[layer] if cache else None
        where = attention.window, store.slots if store else 0
        if where not in masks:
            place = places[where] = store.place(positions) if store else None
            key = place.held if place else positions
            mask = None
            if attention.window or not plain:
                mask = visible(positions[:, :, None], key[:, None], attention.window)
                if not store and not plain:
                    document = documents(positions)
                    mask = mask & (document[:, :, None] == document[:, None])
            masks[where] = mask, key
        turn = position, attention.rope_width(config)
        if turn not in rotations:
            rotations[turn] = position.rotation(turn[1], exact, rope_length)
        if (position, where) not in biases:
            mask, key = masks[where]
            biases[position, where] = score_bias(position.bias(config, exact, key.to(exact)), exact, key, mask)
        result.append(View(positions, rotations[turn], biases[position, where], store, places[where]))
    return result


def score_bias(bias: Tensor | None, positions: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
    """What is added to the scores (View.bias), for queries at positions (B, T) and keys at positions (B, S): `bias`,
    -inf where the mask (B, T, S), by default the causal one, hides a key. `positions` have the precision to compute in.
    """
    if bias is None and mask is None:
        return None
    if mask is None:
        mask = visible(positions[:, :, None], key[:, None], 0)
    if bias is None:
        bias = positions.new_zeros(mask.shape)[:, None]
    return bias.masked_fill(~mask[:, None], -math.inf)
