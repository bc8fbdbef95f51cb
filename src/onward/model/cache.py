"""State outside the model: the keys and values of past tokens, and what a layer knows of one call.

Shapes: B rows, T tokens in this call, S slots, H heads, K key/value heads, E d_head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from onward.model.config import DecoderConfig, at


class Store:
    """What one layer keeps: tensors (B, S, ...), with position p of a row in slot p % S."""

    def __init__(self, entries: dict[str, Tensor]) -> None:
        self.entries = entries

    @property
    def slots(self) -> int:
        return next(iter(self.entries.values())).size(1)

    def write(self, positions: Tensor, **new: Tensor) -> None:
        """Keep the vectors (B, T, ...) of the tokens at positions (B, T)."""
        row = torch.arange(positions.size(0), device=positions.device)[:, None]
        for name, vectors in new.items():
            self.entries[name][row, positions % self.slots] = vectors.to(self.entries[name].dtype)


class Cache:
    """The past of a batch of rows: position p of a row lives in slot p % slots of that row.

    The mask hides the slots a row has not reached yet, so nothing is ever cleared: to roll back, or to give the row
    to another request, call the model with smaller positions. Rows advance independently.

    `length` positions fit; one call may add up to `chunk` tokens to each row, which is also how far a row may be
    rolled back from the furthest position it was given, pads included. Full layers have length + chunk slots, since a
    ragged call pads its shorter rows with positions beyond their last; layers with a window have window + chunk.

    `horizon` (rows,) is the length that each row will reach at most, which rotary scalings may depend on. It is
    `length` unless it is set when a row is given to a request, and must stay the same while the row is continued.
    """

    def __init__(
        self,
        config: DecoderConfig,
        rows: int,
        length: int,
        chunk: int = 1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.length, self.chunk = length, chunk
        self.horizon = torch.full((rows,), length, device=device)
        self.end = length + chunk  # every position in a call, pads included, is below it
        self.layers: list[Store] = []
        for layer in range(config.n_layers):
            attention = at(config.attention, layer)
            slots = chunk + (min(attention.window, length) if attention.window else length)
            self.layers.append(
                Store(
                    {
                        name: torch.zeros(rows, slots, *shape, device=device, dtype=dtype)
                        for name, shape in attention.entries(config).items()
                    }
                )
            )

    def rows(self, start: int, end: int) -> Self:
        """The same memory, rows start to end only."""
        view = self._view(lambda t: t[start:end])
        view.horizon = self.horizon[start:end]
        return view

    def upto(self, length: int) -> Self:
        """The same memory, without the slots that positions below `length`, pads included, do not need."""
        view = self._view(lambda t: t[:, :length])
        view.length, view.end = min(length, self.length), min(length, self.end)
        return view

    def _view(self, cut: Callable[[Tensor], Tensor]) -> Self:
        view = object.__new__(type(self))
        view.length, view.chunk, view.end, view.horizon = self.length, self.chunk, self.end, self.horizon
        view.layers = [Store({name: cut(t) for name, t in layer.entries.items()}) for layer in self.layers]
        return view

    def nbytes(self) -> int:
        """Memory of all entries in bytes."""
        return sum(t.nbytes for layer in self.layers for t in layer.entries.values())


@dataclass(frozen=True)
class View:
    """What one layer knows of the tokens in this call."""

    positions: Tensor  # (B, T), or (1, T) where all rows are alike
    rotation: tuple[Tensor, Tensor] | None  # cosines and sines, each (B, T, 1, rotating / 2)
    bias: Tensor | None  # added to the scores, (B, 1 or H, T, S), -inf where not seen; None: all up to itself is seen
    store: Store | None  # the past of this layer

    def remember(self, **new: Tensor) -> tuple[Tensor, ...]:
        """Keep these vectors (B, T, ...) of the tokens in this call; returns those of all tokens kept, (B, S, ...)."""
        if not self.store:
            return tuple(new.values())
        self.store.write(self.positions, **new)
        return tuple(self.store.entries[name].type_as(vectors) for name, vectors in new.items())


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
    horizon = (cache.horizon.to(exact) if cache else exact.amax(1) + 1)[:, None, None]
    masks: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
    rotations, biases = {}, {}
    result = []
    for layer in range(config.n_layers):
        attention, position = at(config.attention, layer), at(config.position, layer)
        store = cache.layers[layer] if cache else None
        where = attention.window, store.slots if store else 0
        if where not in masks:
            key = held(store.slots, positions[:, -1:]) if store else positions
            mask = None
            if attention.window or not plain:
                mask = visible(positions[:, :, None], key[:, None], attention.window)
                if not store and not plain:
                    document = documents(positions)
                    mask = mask & (document[:, :, None] == document[:, None])
            masks[where] = mask, key
        turn = position, attention.rotary_width(config)
        if turn not in rotations:
            rotations[turn] = position.rotation(turn[1], exact, horizon)
        if (position, where) not in biases:
            mask, key = masks[where]
            biases[position, where] = score_bias(position.bias(config, exact, key.to(exact)), exact, key, mask)
        result.append(View(positions, rotations[turn], biases[position, where], store))
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
