"""The prefix cache: requests with a common prefix prefill it once. It has three backends, tried in this order.

Blocks of a paged cache are found by their hash (`BlockManager.allocate`), rows of other requests by comparing tokens
(`fork`), and prompts on disk by a hash in the name of their file (`PrefixFiles`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onward.generation.cache_manager import CacheManager, common_prefix, rope_key
from onward.generation.prefix_files import PrefixFiles


class PrefixCache:
    """Allocates rows that hold the longest cached prefix of their tokens."""

    def __init__(self, manager: CacheManager, files: PrefixFiles | None = None) -> None:
        self.manager, self.files = manager, files

    def allocate(
        self, row: int, tokens: Sequence[int], rope_length: int, rows: Iterable[Sequence[int]], adapter: str = ""
    ) -> int | None:
        """As `CacheManager.allocate`; `rows` are the cached tokens of each row in use that may be shared."""
        cached = self.manager.allocate(row, tokens, rope_length, adapter)
        if cached is None:
            return None
        cached = max(cached, self.fork(row, tokens, rope_length, rows, cached))
        return self.files.load(self.manager, row, tokens, rope_length, cached, adapter) if self.files else cached

    def fork(
        self, row: int, tokens: Sequence[int], rope_length: int, rows: Iterable[Sequence[int]], cached: int
    ) -> int:
        """Copy the longest common prefix with another row, if it is longer than `cached`; returns its length or 0."""
        best, source = cached, None
        for other, row_tokens in enumerate(rows):
            length = min(common_prefix(tokens, row_tokens), len(tokens) - 1)
            if other != row and length > best and self.manager.can_continue(other, length):
                best, source = length, other
        config, lengths = self.manager.cache.config, self.manager.cache.rope_length
        if source is None or rope_key(config, int(lengths[source])) != rope_key(config, rope_length):
            return 0
        self.manager.fork(source, row, best)
        lengths[row] = rope_length
        return best

    def register(self, row: int, tokens: Sequence[int]) -> None:
        """Register the tokens that a row holds, see `CacheManager.register_prefix`."""
        self.manager.register_prefix(row, tokens)

    def keep(self, row: int, tokens: Sequence[int], adapter: str = "") -> None:
        """Save the tokens that a row holds to a file, if there are files."""
        if self.files:
            self.files.save(self.manager, row, tokens, adapter)
