"""The prefix cache: requests with a common prefix prefill it once. It has three backends, tried in this order.

Blocks of a paged cache are looked up by their hash (`BlockManager.allocate`), rows of other requests by comparing
tokens (`fork`), and prompts on disk by a hash in the name of their file (`PrefixFiles`). Cached keys and values are
reused only with the same model fingerprint (`fingerprint.py`) and the same adapter; while a model has hooks or edits,
cached keys and values are neither used nor stored.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from onward.compiled.model_state import ModelState
from onward.generation.cache.common import common_prefix
from onward.generation.cache.manager import CacheManager
from onward.generation.cache.prefix_files import PrefixFiles
from onward.generation.cache.rotations import is_scaled, last_length, rope_key
from onward.generation.request import Request

SHORTEST = 16  # least number of a request's context tokens for which sharing repays the cost of hashing all weights


class PrefixCache:
    """A cache of prompt prefixes: assigns rows of a KV cache to requests, and fills each row with the longest cached
    prefix of the request's tokens.

    `manager` owns the KV cache, `files` are prefilled prompts on disk (None: none), and `state` reports changes of the
    model's weights, hooks and edits (None: the model never changes).
    """

    def __init__(
        self, manager: CacheManager, files: PrefixFiles | None = None, state: ModelState | None = None
    ) -> None:
        self.manager, self.files, self.state = manager, files, state
        self.is_scaled = is_scaled(manager.cache.config)
        self.keeps = files is not None or type(manager) is not CacheManager  # prefixes outlive their requests
        self.changes = 0  # `state.changes` at the last call of `model_changed`
        self.model: str | None = ""  # name of the model at the last admission; None: nothing is shared
        self.is_named = False  # whether `model` was computed in this step; the scheduler resets it before each step

    def shares(self, request: Request) -> bool:
        """Return whether a request may share cached keys and values. The name of a prefix includes a hash of all
        weights; sharing a few tokens between rows of a contiguous cache does not repay its cost."""
        return self.keeps or (self.manager.cache.rows > 1 and request.num_context_tokens >= SHORTEST)

    def model_changed(self) -> bool:
        """Return whether the model has changed since the last call, which makes earlier keys and values stale. Only
        `key` detects changes through `data`, such as `p.data.mul_(2)`."""
        if self.state is None:
            return False
        self.state.follow()
        changed, self.changes = self.changes != self.state.changes, self.state.changes
        return changed

    def key(self, request: Request, active: Iterable[Request]) -> str | None:
        """Return a string that identifies the current model and the request's adapter; None if this request shares
        nothing. Requests share cached keys and values only if their strings are equal. Reads all weights once per step;
        if they have changed, the keys and values of the `active` requests are no longer shared."""
        if not self.shares(request):
            return None
        if self.state is not None and not self.is_named:
            before, self.model, self.is_named = self.model, self.state.fingerprint(), True
            self.changes = self.state.changes
            if before != self.model:
                for other in active:
                    other.computed_by = None
        return None if self.model is None else f"{self.model} {request.adapter or ''}"

    def allocate(
        self, row: int, tokens: Sequence[int], rope_length: int, rows: Iterable[Sequence[int]], key: str | None = ""
    ) -> int | None:
        """Assign `row` to a request that begins with `tokens`, and fill it with their longest cached prefix.

        `rows` are, for each row in use, its cached tokens that may be shared. `rope_length` is the length for which
        rotary positions are scaled. `key` names the model and the adapter that cached tokens must come from; with None,
        no cached tokens are used. Returns the number of tokens that `row` then holds; None if there is not enough free
        memory at present.
        """
        if key is None:  # a random key, so that nothing matches
            return self.manager.allocate(row, tokens, rope_length, secrets.token_hex())
        cached = self.manager.allocate(row, tokens, rope_length, key)
        if cached is None:
            return None
        cached = max(cached, self.fork(row, tokens, rope_length, rows, cached))
        return self.files.load(self.manager, row, tokens, rope_length, cached, key) if self.files else cached

    def fork(
        self, row: int, tokens: Sequence[int], rope_length: int, rows: Iterable[Sequence[int]], cached: int
    ) -> int:
        """Copy to `row` the longest common prefix of `tokens` and the tokens of another row, if it is longer than
        `cached`, the number of tokens that `row` already holds; `rows` are the tokens of each row. Nothing is copied if
        the rows scale rotary positions differently (`rope_length`). Returns the length of the prefix, or 0 if nothing
        is copied."""
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

    def last_length(self, length: int, most: int) -> int:
        """Return the length, at most `most`, to which a row of `length` tokens may grow and keep its keys."""
        return last_length(self.manager.cache.config, length, most) if self.is_scaled else most

    def piece(self, request: Request, most: int) -> int:
        """Return the number of tokens of a request to prefill in one call, at most `most`."""
        return most

    def register(self, row: int, request: Request) -> None:
        self.manager.register_prefix(row, request.context[: request.num_cached])

    def keep(self, row: int, request: Request) -> None:
        """Save the keys and values of the cached tokens of a request, which are in `row`, to a file. Does nothing
        without `files`, or if the model has changed since the last admission of a request."""
        if self.files and (self.state is None or self.state.fingerprint() == self.model):
            self.files.keep(self.manager, row, request.context[: request.num_cached], request.computed_by)
