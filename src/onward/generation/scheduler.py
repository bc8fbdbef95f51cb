"""The scheduler: which requests run in a step, in which rows. It moves rows, never tensors, and knows no model.

Requests wait, are admitted to a row, read their prompt in chunks (prefill), decode together with the others, and leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from onward.errors import UserError
from onward.generation.cache_manager import CacheManager
from onward.generation.prefix_cache import PrefixCache
from onward.generation.request import Request

PADDING = 1.25  # prompts are prefilled together where padding makes the call at most this much larger


@dataclass(frozen=True)
class Schedule:
    """What the model computes in one step."""

    decode: list[Request]  # row i decodes request i
    room: list[int]  # for each of them: how many tokens may be proposed to follow the last one
    prefill: list[tuple[Request, list[int]]]  # requests of the next rows, and the tokens that each reads


class Scheduler:
    """Row i of the cache belongs to `active[i]`; the first `num_decoding` rows decode, the others still prefill.

    `manager` owns the memory, and `draft_manager` that of a draft, whose rows are the same. At most `rows` requests are
    active. A context that outgrows `length` tokens ends the request or, with `slide`, is read again from its later
    half. A request that can never go on fails alone: `failed` holds it and the reason.
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        rows: int,
        length: int,
        *,
        num_draft_tokens: int = 0,
        draft_manager: CacheManager | None = None,
    ) -> None:
        self.prefixes, self.manager, self.rows, self.length = prefixes, prefixes.manager, rows, length
        self.num_draft_tokens = num_draft_tokens
        self.managers = [self.manager, *([draft_manager] if draft_manager else [])]
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self.num_decoding = 0
        self.arrivals = 0

    def add(self, request: Request) -> None:
        """Let a request wait for a row."""
        request.arrival = self.arrivals
        self.arrivals += 1
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is; its row is free at once."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.active:
            self.leave(self.active.index(request))

    def fail(self, request: Request, error: Exception) -> None:
        """End a request that cannot go on; the others do."""
        request.error, request.finish_reason = error, "error"
        self.remove(request)

    def schedule(self) -> Schedule:
        """Admit requests, and choose what the next call computes."""
        self.admit()
        decode = self.decode()
        ahead = self.num_draft_tokens
        room = [min(ahead, r.remaining - 1, self.length - r.num_context_tokens) for r in decode]
        return Schedule(decode, room, self.prefill())

    def admit(self) -> None:
        """Give free rows to waiting requests in the order of their arrival."""
        while self.waiting and len(self.active) < self.rows:
            request, row = self.waiting[0], len(self.active)
            if request.num_context_tokens > self.length:
                request.start += request.num_context_tokens - (self.length // 2 or 1)
            context = request.context
            if any(is_reading(other, request.prompt) for other in self.active[self.num_decoding :]):
                return  # the prompt will be shared once it has been read
            reach = min(self.length, len(context) + request.remaining)
            cached = (other.context[: other.num_cached] for other in self.active)  # made only where there is memory
            found = self.prefixes.allocate(row, context, reach, cached)
            if found is not None:
                request.num_cached = found
                self.active.append(self.waiting.popleft())
            elif self.active:
                return
            else:
                self.fail(request, self.too_large(request))

    def decode(self) -> list[Request]:
        """The requests that decode, once all have room for a token and for what may be proposed to follow it; if need
        be, the requests that arrived last are preempted."""
        row = 0
        while row < self.num_decoding:
            request = self.active[row]
            end = min(request.num_cached + 1 + self.num_draft_tokens, self.length)
            if self.manager.reserve(row, request.num_cached, end):
                row += 1
            else:
                self.preempt()
                row = 0
        return self.active[: self.num_decoding]

    def prefill(self) -> list[tuple[Request, list[int]]]:
        """A chunk of the first prompt that is not read, or the whole of several prompts that are about as long."""
        while self.num_decoding < len(self.active) and not unread(self.active[self.num_decoding]):
            self.num_decoding += 1  # it continues where it was preempted
        start, chunk = self.num_decoding, self.manager.cache.chunk
        pieces: list[tuple[Request, list[int]]] = []
        for row, request in enumerate(self.active[start:], start):
            piece = unread(request)[:chunk]
            width = max(len(p) for _, p in [*pieces, (request, piece)])
            total = sum(len(p) for _, p in pieces) + len(piece)
            if not piece or (pieces and width * (len(pieces) + 1) > min(chunk, PADDING * total)):
                break
            if not self.manager.reserve(row, request.num_cached, request.num_cached + len(piece)):
                break
            pieces.append((request, piece))
        if not pieces and start == 0 and self.active:  # no decoding request will make room
            self.preempt()
        return pieces

    def prefilled(self, schedule: Schedule) -> list[int]:
        """Take note that the prompts of a schedule have been read so far.

        Returns which of them, by their place in `schedule.prefill`, are read to their end and sample their first token.
        """
        first, sampling = self.num_decoding, list[int]()
        failed: list[tuple[Request, UserError]] = []
        for place, (request, piece) in enumerate(schedule.prefill):
            request.num_cached += len(piece)
            known = request.context[: request.num_cached]
            self.prefixes.register(first + place, known)
            if unread(request):
                continue
            self.num_decoding += 1  # all of several, or the only one
            if request.tokens:
                continue
            try:
                self.prefixes.keep(first + place, known)
            except UserError as error:  # a full disk
                failed.append((request, error))
                continue
            request.num_cached -= 1  # as after a decoding step, before its token is counted
            sampling.append(place)
        for request, reason in failed:
            self.fail(request, reason)
        return sampling

    def release(self, requests: Sequence[Request]) -> None:
        """Let requests leave that are done; those whose context is full wait, to slide and be read again."""
        for request in requests:
            if request in self.active and (request.done or request.num_context_tokens > self.length):
                self.leave(self.active.index(request))
                if not request.done:
                    self.waiting.appendleft(request)

    def leave(self, row: int) -> None:
        """Take a request out of its row; the last rows that decode and that prefill close the gap."""
        request = self.active[row]
        self.prefixes.register(row, request.context[: request.num_cached])
        request.num_cached = request.num_draft_cached = 0
        for manager in self.managers:
            manager.free(row)
        if row < self.num_decoding:
            self.num_decoding -= 1
            self.move(self.num_decoding, row)
            row = self.num_decoding
        self.move(len(self.active) - 1, row)
        self.active.pop()

    def move(self, source: int, target: int) -> None:
        """Row `target`, which is free, becomes row `source`."""
        if source != target:
            self.active[target] = self.active[source]
            for manager in self.managers:
                manager.move(source, target)

    def preempt(self) -> None:
        """Let the request that arrived last wait until there is room again; it is then read anew.

        The only request fails instead: there will never be room.
        """
        request = max(self.active, key=lambda request: request.arrival)
        if len(self.active) == 1:
            self.fail(request, self.too_large(request))
            return
        self.leave(self.active.index(request))
        self.waiting.appendleft(request)

    def too_large(self, request: Request) -> UserError:
        return UserError(
            f"the cache has no room for {request.num_context_tokens} tokens of one request: make it larger"
        )


def is_reading(request: Request, prompt: list[int]) -> bool:
    """Whether a request is prefilling this very prompt, with more to read than the last token, which all read."""
    return request.num_cached < len(prompt) - 1 and request.prompt == prompt


def unread(request: Request) -> list[int]:
    """What is to be prefilled before the next token can be sampled: the rest of the context, in an answer that has
    begun without its last token, which is fed together with what a draft proposes."""
    rest = request.context_from(request.num_cached)
    return rest[:-1] if request.tokens else rest
