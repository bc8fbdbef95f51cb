"""The scheduler: chooses the requests of each step and their rows. It calls cache managers, never the model.

Requests wait, are admitted to a row, prefill their prompt in chunks, decode together with other requests, and leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from onward.base.errors import UserError
from onward.generation.cache.manager import CacheManager
from onward.generation.cache.prefix_cache import PrefixCache
from onward.generation.request import Request

TOGETHER = 4  # several prompts together have this many times the budget of one prompt
PADDING = 1.25  # prompts are prefilled together if padding enlarges the call at most by this factor


@dataclass(frozen=True)
class Schedule:
    """The requests that the model processes in one step: the decoding requests, with the maximum number of draft tokens
    for each, and the prefilling requests, with their tokens."""

    decode: list[Request]  # row i decodes request i
    room: list[int]  # maximum number of draft tokens for each decoding request
    prefill: list[tuple[Request, list[int]]]  # requests of the following rows, and the tokens to prefill for each


class Pace:
    """The rule for when the next piece of a long prompt is prefilled while other requests decode: after decoding steps
    have taken as many seconds as the previous piece, divided by `crowd`."""

    def __init__(self) -> None:
        self.debt = 0.0  # seconds of decoding that are due before the next piece of prefill
        self.decoding = 0.0  # seconds of the last step without prefill
        self.crowd = 1.0  # number of prefilling requests per decoding request; at least 1

    def add(self, seconds: float, decoding: bool, prefilling: bool) -> None:
        if not decoding:
            self.debt = 0.0
        elif prefilling:
            self.debt += (seconds - self.decoding) / self.crowd
        else:
            self.debt, self.decoding = max(0.0, self.debt - seconds), seconds


class Scheduler:
    """Assigns requests to the rows of a cache: row i belongs to `active[i]`; the first `num_decoding` rows decode, the
    others prefill.

    `prefixes` allocates rows of the cache, and `draft_manager` those of a draft's cache, with the same indices. At most
    `rows` requests are active. A request whose context exceeds `length` tokens is prefilled again from the later half
    of its context. A request that can never continue fails alone, with its `error` set. `prefill_budget` is the maximum
    number of tokens of one prompt in a step in which other requests decode (more if fewer decode than prefill); several
    prompts together may have 4 times as many. With None, the limit for all together is the cache's chunk.
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        rows: int,
        length: int,
        *,
        num_draft_tokens: int = 0,
        draft_manager: CacheManager | None = None,
        prefill_budget: int | None = None,
    ) -> None:
        self.prefixes, self.manager, self.rows, self.length = prefixes, prefixes.manager, rows, length
        self.num_draft_tokens, self.prefill_budget, self.pace = num_draft_tokens, prefill_budget, Pace()
        self.managers = [self.manager, *([draft_manager] if draft_manager else [])]
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self.num_decoding = 0
        self.arrivals = 0

    def add(self, request: Request) -> None:
        request.arrival = self.arrivals
        self.arrivals += 1
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.active:
            self.leave(self.active.index(request))

    def fail(self, request: Request, error: Exception) -> None:
        request.error, request.finish_reason = error, "error"
        self.remove(request)

    def schedule(self) -> Schedule:
        self.prefixes.is_named = False
        self.check_model()
        self.admit()
        decode, most = self.decode()
        room = [min(most, r.remaining - 1, r.last_length - r.num_context_tokens) for r in decode]
        return Schedule(decode, room, self.prefill())

    def check_model(self) -> None:
        """Stop sharing keys and values that were computed before the model changed."""
        if any(request.computed_by is not None for request in self.active) and self.prefixes.model_changed():
            for request in self.active:
                request.computed_by = None

    def admit(self) -> None:
        """Assign free rows to waiting requests in the order of the queue, until memory is short or a request waits to
        share a prompt that is being prefilled."""
        while self.waiting and len(self.active) < self.rows:
            request, row = self.waiting[0], len(self.active)
            if request.num_context_tokens > self.length:
                request.start += request.num_context_tokens - (self.length // 2 or 1)
            context = request.context
            if any(is_prefilling(other, request) for other in self.active[self.num_decoding :]):
                return  # wait until that prompt is prefilled, to share it
            computed_by = self.prefixes.key(request, self.active)
            cached = (shareable(other, computed_by) for other in self.active)  # lazy: read after memory is allocated
            num_cached = self.prefixes.allocate(row, context, len(context), cached, computed_by)
            if num_cached is not None:
                request.num_cached, request.computed_by = num_cached, computed_by
                request.num_shared = request.num_shared if request.last_length else num_cached  # not when it is back
                request.last_length = self.prefixes.last_length(len(context), self.length)
                self.active.append(self.waiting.popleft())
            elif self.active:
                return
            else:
                self.fail(request, self.too_large(request))

    def decode(self) -> tuple[list[Request], int]:
        """Reserve cache memory for the next token and draft tokens of each decoding request, and return these requests
        and the number of draft tokens. If memory is short, the number of draft tokens becomes 0; if that does not
        suffice, the requests that arrived last are preempted: they return to the queue."""
        row, most = 0, self.num_draft_tokens
        while row < self.num_decoding:
            request = self.active[row]
            if self.manager.reserve(row, request.num_cached, min(request.num_cached + 1 + most, self.length)):
                row += 1
                continue
            row = 0
            if most:
                most = 0
            else:
                self.preempt()
        return self.active[: self.num_decoding], most

    def prefill(self) -> list[tuple[Request, list[int]]]:
        """Choose the tokens to prefill in this step: a piece of the first prompt that is not complete in the cache, or
        pieces of several prompts, of about the same length. Returns pairs (request, tokens)."""
        while self.num_decoding < len(self.active) and not tokens_to_prefill(self.active[self.num_decoding]):
            self.num_decoding += 1  # a preempted request continues
        start, chunk = self.num_decoding, self.manager.cache.chunk
        longest = most = chunk  # maximum number of tokens of one prompt, and of all prompts
        if self.prefill_budget is not None and start:
            if self.pace.debt > 0:
                return []
            self.pace.crowd = max(1.0, (len(self.active) - start) / start)
            longest = min(chunk, int(self.prefill_budget * self.pace.crowd))
            most = min(chunk, TOGETHER * longest)
        pieces, is_partial = list[tuple[Request, list[int]]](), False
        for row, request in enumerate(self.active[start:], start):
            rest = tokens_to_prefill(request)
            piece = rest[: self.prefixes.piece(request, longest)]
            width = max(len(p) for _, p in [*pieces, (request, piece)])
            total = sum(len(p) for _, p in pieces) + len(piece)
            too_wide = width * (len(pieces) + 1) > min(most, PADDING * total)
            if not piece or (pieces and (too_wide or is_partial != (len(piece) < len(rest)))):
                break  # decoding rows come first, so no incomplete prompt may precede a complete one
            if not self.manager.reserve(row, request.num_cached, request.num_cached + len(piece)):
                break
            pieces.append((request, piece))
            is_partial = len(piece) < len(rest)
            if is_partial and len(piece) == longest:
                break
        if not pieces and start == 0 and self.active:  # no decoding request will free memory
            self.preempt()
        return pieces

    def prefilled(self, schedule: Schedule) -> list[int]:
        """Update the requests of `schedule.prefill` after the model has processed their tokens.

        Returns the indices in `schedule.prefill` of the requests whose prompts are now complete in the cache, which
        sample their first token in this step.
        """
        first, sampling = self.num_decoding, list[int]()
        for index, (request, piece) in enumerate(schedule.prefill):
            request.num_cached += len(piece)
            if request.computed_by is not None:
                self.prefixes.register(first + index, request)
            if tokens_to_prefill(request):
                continue
            self.num_decoding += 1  # if several prompts are prefilled together, this call completes each of them
            if request.tokens:
                continue
            if request.computed_by is not None:
                self.prefixes.keep(first + index, request)
            request.num_cached -= 1  # compensates `receive`, which adds 1 for the first new token
            sampling.append(index)
        return sampling

    def release(self, requests: Sequence[Request]) -> None:
        """Free the rows of requests that are done. A request returns to the queue, to be prefilled again, if its
        context is full or too long for the rotary positions of its row."""
        for request in requests:
            if request in self.active and (request.done or request.num_context_tokens > request.last_length):
                self.leave(self.active.index(request))
                if not request.done:
                    self.waiting.appendleft(request)

    def leave(self, row: int) -> None:
        """Free the row of a request. The last decoding row fills the gap, and the prefilling rows after it move up, so
        that prompts are prefilled in order of arrival."""
        request = self.active[row]
        if request.computed_by is not None:
            self.prefixes.register(row, request)
        request.num_cached = request.num_draft_cached = 0
        for manager in self.managers:
            manager.free(row)
        if row < self.num_decoding:
            self.num_decoding -= 1
            self.move(self.num_decoding, row)
            row = self.num_decoding
        for later in range(row + 1, len(self.active)):
            self.move(later, later - 1)
        self.active.pop()

    def move(self, source: int, target: int) -> None:
        if source != target:
            self.active[target] = self.active[source]
            for manager in self.managers:
                manager.move(source, target)

    def preempt(self) -> None:
        """Move the request that arrived last back to the queue, to free memory; it is prefilled again later.

        If it is the only active request, it fails instead, since there will never be more memory.
        """
        request = max(self.active, key=lambda request: request.arrival)
        if len(self.active) == 1:
            self.fail(request, self.too_large(request))
            return
        self.leave(self.active.index(request))
        self.waiting.appendleft(request)

    def too_large(self, request: Request) -> UserError:
        return UserError(f"the cache has no room for a request of {request.num_context_tokens} tokens: enlarge it")


def is_prefilling(request: Request, other: Request) -> bool:
    """Return whether `request` is still prefilling the prompt of `other`, with the same adapter, so that `other` waits
    to share it. The last token of the prompt does not count: it is never shared."""
    same = request.prompt == other.prompt and request.adapter == other.adapter
    return same and request.computed_by is not None and request.num_cached < len(request.prompt) - 1


def shareable(request: Request, key: str | None) -> list[int]:
    """Return the cached tokens of a request that another request may share; empty unless it was computed with the same
    `key`, a string that identifies the model and the adapter."""
    return request.context[: request.num_cached] if key is not None and request.computed_by == key else []


def tokens_to_prefill(request: Request) -> list[int]:
    """Return the tokens to prefill before the next token is sampled: the rest of the context. Once the answer has
    begun, its last token is left out: the next decoding step feeds it, together with draft tokens."""
    rest = request.context_from(request.num_cached)
    return rest[:-1] if request.tokens else rest
