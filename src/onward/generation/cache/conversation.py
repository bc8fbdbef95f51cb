"""A cache of one row that keeps the tokens of the last request."""

from __future__ import annotations

from collections.abc import Sequence

from onward.base.arguments import checked
from onward.base.errors import UserError
from onward.generation.cache.common import common_prefix
from onward.generation.cache.manager import CacheManager
from onward.generation.cache.rotations import rope_key
from onward.model.cache import KVCache


class ConversationCache(CacheManager):
    """A manager of a cache with one row, for a chat: the row keeps its tokens when a request ends, so that the next
    turn of the conversation prefills only its new tokens.

    The next request continues after the longest common prefix of its tokens and the tokens in the row.
    """

    @checked
    def __init__(self, cache: KVCache) -> None:
        super().__init__(cache)
        if cache.rows != 1:
            raise UserError(f"the cache has {cache.rows} rows: a conversation needs exactly one")
        self.tokens: Sequence[int] = ()  # the tokens in the row
        self.kind: tuple[str, bytes] = "", b""  # the key and the rotary scaling of the cached tokens

    def allocate(
        self, row: int, tokens: Sequence[int], rope_length: int, key: str = "", most: int | None = None
    ) -> int | None:
        """Assign the row to a request, and keep the cached keys and values of the longest common prefix of `tokens` and
        the row's tokens; see `CacheManager.allocate`."""
        kind = key, rope_key(self.cache.config, rope_length)
        length = common_prefix(tokens[:-1][:most], self.tokens) if kind == self.kind else 0
        if not self.can_continue(row, length):
            length = 0
        super().free(row)
        super().allocate(row, tokens, rope_length, key)
        self.tokens, self.kind = tokens[:length], kind
        if length:  # the row still contains the vectors of these tokens
            self.reserve(row, length - 1, length)
        return length

    def register_prefix(self, row: int, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def free(self, row: int) -> None:
        """Do nothing: the row keeps its tokens until the next request."""
