"""The manager of a contiguous cache: assigns rows and their memory to requests; copies keys and values, never computes
them.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from onward.base.arguments import checked, unchecked
from onward.base.errors import UserError
from onward.model.attachments import ATTACHMENTS
from onward.model.cache import KVCache
from onward.model.decoder import Decoder
from onward.model.divided import cache_config
from onward.model.layer_cache import LayerCache
from onward.model.paged import PagedKVCache

BUCKET = 64  # an engine's call for one row reads slots up to the next multiple of this number
CHUNK = 512  # maximum number of prompt tokens per call; bounds the memory of masks
STEP = 256  # number of slots by which a cache grows


class CacheManager:
    """The manager of a contiguous KVCache: assigns its rows to requests.

    A scheduler calls `allocate` when it assigns a row to a request, `reserve` before each call of the model,
    `register_prefix` after the call, and `free` when the request leaves the row. `reserve` clears vectors of an earlier
    request that a call reads but does not overwrite: a masked key has weight 0, but 0 * NaN is NaN.
    """

    block_size = 1  # positions per block; a contiguous cache has no blocks

    @checked
    def __init__(self, cache: KVCache) -> None:
        if isinstance(cache, PagedKVCache):
            raise UserError("this cache is paged: make a BlockManager for it")
        self.cache = cache
        self.starts = [0] * cache.rows  # per row: position where the last reserved call began
        self.ends = [0] * cache.rows  # per row: the end of the positions that were written for its request
        self.left = [range(0)] * cache.rows  # per row: positions that may hold vectors of an earlier request
        self.widest = 0  # maximum number of positions reserved at once; other rows of the call may have as much padding

    def allocate(
        self, row: int, tokens: Sequence[int], rope_length: int, key: str = "", most: int | None = None
    ) -> int | None:
        """Assign `row` to a request that begins with `tokens`, with rotary positions scaled for `rope_length` tokens.
        `key` names the model and the adapter: rows share cached keys and values only if their keys are equal. Returns
        the number of leading tokens that the row already holds, always fewer than all of them and at most `most` (None:
        no limit); None if there is not enough free memory at present.
        """
        self.leave(row, 0)
        self.cache.rope_length[row] = rope_length
        return 0

    def leave(self, row: int, end: int) -> None:
        """Record that the positions of a row from `end` on belong to an earlier request."""
        last, padding = self.ends[row], self.widest if self.cache.rows > 1 else 0
        self.left[row] = range(end, max(last and last + padding, self.left[row].stop if self.left[row] else 0))
        self.starts[row], self.ends[row] = 0, end

    def entries(self) -> list[Tensor]:
        return [entry for cache in self.cache.layers for entry in cache.entries.values()]

    def reserve(self, row: int, start: int, end: int) -> bool:
        """Prepare positions `start` to `end` - 1 of a row for writing: at most `chunk` positions (a limit of the
        cache), directly after the positions that the row holds. Returns False, and changes nothing, if memory is short.
        """
        if end > self.cache.capacity:
            unchecked(KVCache.grow)(self.cache, end)
        self.starts[row], self.ends[row], self.widest = start, max(self.ends[row], end), max(self.widest, end - start)
        if left := self.left[row]:  # the first call overwrites all positions; a later call may have fewer draft tokens
            first, stop = max(left.start, start + 1 if start else end), left.stop
            if self.cache.rows == 1 and self.cache.rope_length.device.type == "cpu":  # no other, longer row is read
                stop = min(stop, -(-end // BUCKET) * BUCKET)
            for entry in self.entries() if first < stop else ():
                entry[row, first:stop].zero_()
            self.left[row] = range(max(first, stop), left.stop)
        return True

    def register_prefix(self, row: int, tokens: Sequence[int]) -> None:
        """Do nothing: only managers that share the memory of prefixes record that a row contains `tokens`."""

    def free(self, row: int) -> None:
        """Free a row and its memory after its request has left."""
        self.cache.states.forget(row)

    def can_continue(self, row: int, position: int) -> bool:
        """Return whether a row still holds all positions that queries from `position` on attend to; layers with a
        window overwrite old positions."""
        return position >= self.starts[row] or not any(cache.window for cache in self.cache.layers)

    def fork(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source`, its states and its rope_length, to row `target`."""
        self.leave(target, length)
        self.cache.rope_length[target] = self.cache.rope_length[source]
        self.cache.states.copy([source], [target])
        self.starts[target] = self.starts[source]
        for entry in self.entries():
            entry[target, :length] = entry[source, :length]

    def move(self, source: int, target: int) -> None:
        """Move the contents of row `source` to row `target`, which is free."""
        self.fork(source, target, self.ends[source])
        self.free(source)

    def reorder(self, index: Sequence[int]) -> None:
        """Copy row index[i] to row i for every i, as beam search does; `index` may omit or repeat rows."""
        rows = torch.tensor(index, device=self.cache.rope_length.device)
        for tensor in [self.cache.rope_length, *self.entries()]:
            tensor[: len(rows)] = tensor[rows]
        self.cache.states.copy(index, range(len(index)))
        self.starts[: len(index)] = [self.starts[row] for row in index]
        self.ends[: len(index)] = [self.ends[row] for row in index]
        self.left[: len(index)] = [self.left[row] for row in index]

    def dump(self, row: int, length: int) -> dict[str, Tensor]:
        """Return the cache entries that a row with `length` tokens needs to continue from the last token, to save them
        or use them for a later request. The keys are "layer.entry" (layer index, name of the entry); the values are
        tensors (T, ...) of all tokens or, in layers with a window, of the last tokens."""
        return {
            f"{layer}.{name}": entry[index][0]
            for layer, cache, index in self.needed(row, length)
            for name, entry in cache.entries.items()
        }

    def load(self, row: int, length: int, vectors: Mapping[str, Tensor]) -> None:
        """Write `vectors`, which `dump` returned for `length` tokens, to the cache entries of a row; position
        length - 1 must be reserved."""
        for layer, cache, index in self.needed(row, length):
            for name, entry in cache.entries.items():
                entry[index] = vectors[f"{layer}.{name}"][None].to(entry.device)

    def needed(self, row: int, length: int) -> Iterator[tuple[int, LayerCache, tuple[Tensor, Tensor]]]:
        """Yield (layer index, cache of the layer, slot indices) for each layer: the slots of the positions that queries
        in the block of position length - 1 attend to."""
        size = self.block_size
        for layer, cache in enumerate(self.cache.view(row, row + 1).layers):
            first = max(0, (length - 1) // size * size - cache.window + 1) // size * size if cache.window else 0
            positions = torch.arange(first, length, device=self.cache.rope_length.device)[None]
            if cache.entries:
                yield layer, cache, cache.locate(positions)


def growing_cache(model: Decoder, rows: int, length: int, chunk: int, keep: int = 0) -> CacheManager:
    """Create a contiguous KV cache of `rows` rows in the model's dtype, and return its manager. The cache grows as
    needed, up to `length` tokens per row; `chunk` is the maximum number of tokens per row in one call of the model.
    States of recurrent layers can be rolled back by `keep` tokens."""
    config = cache_config(model) if ATTACHMENTS in vars(model) else model.config
    cache = unchecked(KVCache)(
        config, rows, length, chunk, step=STEP, keep=keep, device=model.device, dtype=model.dtype
    )
    return unchecked(CacheManager)(cache)
