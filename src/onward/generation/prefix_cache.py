"""Prompts that begin alike are read once: one prefix cache, with three backends in the order of their cost.

Blocks of a paged cache are found by their hash (`BlockManager.allocate`), rows of requests in the cache by comparing
tokens, and prompts on disk by a hash in their file's name (`PrefixFiles`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onward.generation.cache_manager import CacheManager, rope_key
from onward.generation.prefix_files import PrefixFiles


class PrefixCache:
    """Gives rows to requests with as much of their prompt as is known from elsewhere."""

    def __init__(self, manager: CacheManager, files: PrefixFiles | None = None) -> None:
        self.manager, self.files = manager, files

    def allocate(self, row: int, tokens: Sequence[int], rope_length: int, rows: Iterable[Sequence[int]]) -> int | None:
        """As `CacheManager.allocate`; `rows` are the tokens that each row of the cache holds."""
        found = self.manager.allocate(row, tokens, rope_length)
        if found is None:
            return None
        found = max(found, self.fork(row, tokens, rope_length, rows, found))
        return self.files.load(self.manager, row, tokens, rope_length, found) if self.files else found

    def fork(self, row: int, tokens: Sequence[int], rope_length: int, rows: Iterable[Sequence[int]], found: int) -> int:
        """Copy the longest common prefix with another row, if it is longer than what is `found`; returns its length."""
        best, source = found, None
        for other, held in enumerate(rows):
            length = min(common_prefix(tokens, held), len(tokens) - 1)
            if other != row and length > best and self.manager.can_continue(other, length):
                best, source = length, other
        config, lengths = self.manager.cache.config, self.manager.cache.rope_length
        if source is None or rope_key(config, int(lengths[source])) != rope_key(config, rope_length):
            return 0
        self.manager.fork(source, row, best)
        lengths[row] = rope_length
        return best

    def register(self, row: int, tokens: Sequence[int]) -> None:
        """Note that a row holds these tokens."""
        self.manager.register_prefix(row, tokens)

    def keep(self, row: int, tokens: Sequence[int]) -> None:
        """Keep a prompt that a row holds for other runs of the program."""
        if self.files:
            self.files.save(self.manager, row, tokens)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens are equal."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
