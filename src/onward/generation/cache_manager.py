"""Which request owns which row of a cache, and what memory the row has; tensors of the cache are moved, never computed.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from onward.model.cache import KVCache, LayerCache
from onward.model.config import DecoderConfig, at


class CacheManager:
    """Gives the rows of a contiguous KVCache to requests.

    A scheduler calls `allocate` when it gives a row to a request, `reserve` before each call of the model,
    `register_prefix` when tokens are in the row, and `free` when it takes the row back.

    A freed row is set to zero: a mask of minus infinity hides numbers, but NaN times zero is NaN.
    """

    block_size = 1  # positions that get memory together

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.starts = [0] * cache.rows  # of each row: where the last reserved call began
        self.used = [0] * cache.rows  # of each row: positions that may have been written, padding included

    def allocate(self, row: int, tokens: Sequence[int], rope_length: int) -> int | None:
        """Give a row to a request that has these tokens so far and reaches at most `rope_length` positions.

        Returns how many of the first tokens the row holds already, always fewer than all, or None where there is not
        enough memory now.
        """
        self.starts[row] = 0
        self.cache.rope_length[row] = rope_length
        return 0

    def reserve(self, row: int, start: int, end: int) -> bool:
        """Make positions start to end - 1 of a row writable, at most a chunk; the row holds all before them.

        Returns False, and changes nothing, where there is not enough memory.
        """
        if end > self.cache.capacity:
            self.cache.grow(end)
        self.starts[row] = start
        self.used[row] = max(self.used[row], start + self.cache.chunk)
        return True

    def register_prefix(self, row: int, tokens: Sequence[int]) -> None:
        """Note that a row holds these tokens, so that requests that begin with them may share its memory."""

    def free(self, row: int) -> None:
        """Take a row back; its memory may go to others."""
        for cache in self.cache.layers:
            for entry in cache.entries.values():
                entry[row, : self.used[row]].zero_()
        self.starts[row] = self.used[row] = 0

    def can_continue(self, row: int, position: int) -> bool:
        """Whether a row still holds all that tokens from `position` on see: window layers forget."""
        return position >= self.starts[row] or not any(cache.window for cache in self.cache.layers)

    def fork(self, source: int, target: int, length: int) -> None:
        """Row `target` becomes a copy of the first `length` positions of row `source`, and gets its rope_length."""
        self.cache.rope_length[target] = self.cache.rope_length[source]
        self.starts[target], self.used[target] = self.starts[source], self.used[source]
        for cache in self.cache.layers:
            for entry in cache.entries.values():
                entry[target, :length] = entry[source, :length]

    def move(self, source: int, target: int) -> None:
        """Row `target`, which is free, becomes row `source`, which is then free."""
        self.fork(source, target, self.used[source])
        self.free(source)

    def reorder(self, index: Sequence[int]) -> None:
        """The first rows become the rows of the index, in which some may be left out and others repeated."""
        rows = torch.tensor(index, device=self.cache.rope_length.device)
        entries = (entry for cache in self.cache.layers for entry in cache.entries.values())
        for tensor in [self.cache.rope_length, *entries]:
            tensor[: len(rows)] = tensor[rows]
        self.starts[: len(index)] = [self.starts[row] for row in index]
        self.used[: len(index)] = [self.used[row] for row in index]

    def dump(self, row: int, length: int) -> dict[str, Tensor]:
        """What a row that holds `length` tokens needs to go on, from the last of them: for every layer and entry the
        vectors (T, ...) of all tokens or, in a window layer, of the last ones."""
        return {
            f"{layer}.{name}": entry[index][0]
            for layer, cache, index in self.needed(row, length)
            for name, entry in cache.entries.items()
        }

    def load(self, row: int, length: int, vectors: Mapping[str, Tensor]) -> None:
        """Write what `dump` returned to a row for which length - 1 to `length` is reserved."""
        for layer, cache, index in self.needed(row, length):
            for name, entry in cache.entries.items():
                entry[index] = vectors[f"{layer}.{name}"][None].to(entry.device)

    def needed(self, row: int, length: int) -> Iterator[tuple[int, LayerCache, tuple[Tensor, Tensor]]]:
        """Each layer, its cache and the indices of what is seen from the block of position length - 1 on."""
        size = self.block_size
        for layer, cache in enumerate(self.cache.view(row, row + 1).layers):
            first = max(0, (length - 1) // size * size - cache.window + 1) // size * size if cache.window else 0
            positions = torch.arange(first, length, device=self.cache.rope_length.device)[None]
            yield layer, cache, cache.locate(positions)


@lru_cache(maxsize=256)
def rope_key(config: DecoderConfig, rope_length: int) -> bytes:
    """What rotations depend on in a row of this `rope_length`: rows with the same key rotate alike."""
    one, length = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1, 1), rope_length, dtype=torch.float64)
    widths = [(at(config.position, i), at(config.attention, i).rope_width(config)) for i in range(config.n_layers)]
    found = [position.rotation(width, one, length) for position, width in dict.fromkeys(widths)]
    return repr([[t.tolist() for t in turn] for turn in found if turn]).encode()
