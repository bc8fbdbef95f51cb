"""The prefix cache of models with recurrent layers: a prefix is shared where a snapshot of their states was taken.

Keys and values exist for every token, states only after the last tokens. A request therefore continues from the
longest prefix whose keys and values are cached and whose states were copied, and recomputes the tokens after it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from weakref import WeakKeyDictionary

from onward.compiled.model_state import ModelState
from onward.generation.cache.manager import CHUNK, CacheManager
from onward.generation.cache.prefix_cache import PrefixCache
from onward.generation.cache.prefix_files import PrefixFiles
from onward.generation.cache.rotations import rope_key
from onward.generation.request import Request
from onward.model.cache import KVCache
from onward.model.no_states import Snapshot

LEAST = 4  # number of snapshots that are kept even if they are larger than the cache, such as in a chat


class Snapshots:
    """The snapshots of the states of rows of a cache, by a hash of all tokens before them. Together they take at most
    as much memory as the cache, or that of LEAST snapshots; the least recently used is dropped first."""

    def __init__(self) -> None:
        self.by_hash: OrderedDict[bytes, tuple[int, Snapshot]] = OrderedDict()
        self.lengths: Counter[int] = Counter()  # number of snapshots by the number of tokens before them
        self.bytes = 0

    def add(self, digest: bytes, length: int, snapshot: Snapshot, most: int) -> None:
        """Add a snapshot after `length` tokens whose hash is `digest`; `most` is the size of the cache in bytes."""
        self.by_hash[digest] = length, snapshot
        self.lengths[length] += 1
        self.bytes += nbytes(snapshot)
        while self.bytes > most and len(self.by_hash) > LEAST:
            _, (length, snapshot) = self.by_hash.popitem(last=False)
            self.lengths -= Counter([length])
            self.bytes -= nbytes(snapshot)

    def digests(self, root: bytes, tokens: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yield (length, hash) of each prefix of `tokens` after which there may be a snapshot, shortest first; `root`
        names the model and everything else that its states depend on."""
        state, done = hashlib.sha256(root), 0
        for length in sorted(length for length in self.lengths if length <= len(tokens)):
            state.update(array("q", tokens[done:length]))
            done = length
            yield length, state.digest()


SNAPSHOTS: WeakKeyDictionary[KVCache, Snapshots] = WeakKeyDictionary()  # a cache may outlive its engine, as in a chat


def nbytes(snapshot: Snapshot) -> int:
    return sum(state.nbytes for state in snapshot.values())


class StatePrefixCache(PrefixCache):
    """A PrefixCache for models with recurrent layers. States are copied at the last block boundary before the prompt's
    last token, where the next sample of the same prompt continues, after every `stride` tokens, and, if prefixes
    outlive their requests, after an answer that ends at a block boundary. The keys and values of `stride` tokens in
    layers without windows take about as much memory as a snapshot, or more."""

    def __init__(
        self, manager: CacheManager, files: PrefixFiles | None = None, state: ModelState | None = None
    ) -> None:
        super().__init__(manager, files, state)
        cache = manager.cache
        self.states, self.snapshots = cache.states, SNAPSHOTS.setdefault(cache, Snapshots())
        slots = [t[0, 0].nbytes for layer in cache.layers if not layer.window for t in layer.entries.values()]
        self.has_keys = any(layer.entries for layer in cache.layers)
        tokens = max(CHUNK, self.states.snapshot_bytes() // sum(slots) if slots else 0)
        self.stride = -(-tokens // manager.block_size) * manager.block_size

    def allocate(
        self, row: int, tokens: Sequence[int], rope_length: int, rows: Iterable[Sequence[int]], key: str | None = ""
    ) -> int | None:
        """Assign `row` to a request as `PrefixCache.allocate` does, and fill it with the longest prefix that has a
        snapshot, and whose keys and values are cached if the model has any."""
        if key is None:
            return super().allocate(row, tokens, rope_length, (), key)
        cached = self.continued(row, tokens, rope_length, list(rows), key)
        if cached is None or not self.files:
            return cached
        return self.files.load(self.manager, row, tokens, rope_length, cached, key)

    def continued(
        self, row: int, tokens: Sequence[int], rope_length: int, rows: Sequence[Sequence[int]], key: str
    ) -> int | None:
        for length, digest in reversed([*self.snapshots.digests(self.root(rope_length, key), tokens[:-1])]):
            if digest in self.snapshots.by_hash:
                cached = self.manager.allocate(row, tokens, rope_length, key, length)
                if cached is None:
                    return None
                cached = max(cached, self.fork(row, tokens[: length + 1], rope_length, rows, cached))
                if cached == length or not self.has_keys:
                    self.snapshots.by_hash.move_to_end(digest)
                    self.states.restore(row, length, self.snapshots.by_hash[digest][1])
                    return length
        return self.manager.allocate(row, tokens, rope_length, key, 0)

    def piece(self, request: Request, most: int) -> int:
        """Return how many tokens, at most `most`, to prefill in one call: up to the next snapshot."""
        if request.computed_by is None:
            return most
        cached = request.num_cached
        points = self.prompt_end(request), (cached // self.stride + 1) * self.stride
        return min(most, *(point - cached for point in points if point > cached))

    def prompt_end(self, request: Request) -> int:
        """Return the position in the context of the last block boundary before the last token of the prompt."""
        size = self.manager.block_size
        return max(0, len(request.prompt) - request.start - 1) // size * size

    def register(self, row: int, request: Request) -> None:
        super().register(row, request)
        length, key = request.num_cached, request.computed_by
        is_prompt, is_answer = length == self.prompt_end(request), request.done and self.keeps
        wanted = is_prompt or length % (self.manager.block_size if is_answer else self.stride) == 0
        if not (wanted and length and key and self.states.holds(row, length)):
            return
        tokens = request.context[:length]
        digest = hashlib.sha256(self.root(request.last_length, key) + array("q", tokens).tobytes()).digest()
        if digest not in self.snapshots.by_hash:
            self.snapshots.add(digest, length, self.states.snapshot(row, length), self.manager.cache.nbytes())
        if is_prompt:
            super().keep(row, request)

    def keep(self, row: int, request: Request) -> None:
        """Do nothing: `register` has saved the prompt up to the snapshot, from which a later request continues."""

    def root(self, rope_length: int, key: str) -> bytes:
        return rope_key(self.manager.cache.config, rope_length) + key.encode()
