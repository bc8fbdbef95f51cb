"""The engine: requests come, are read in chunks, continued together and leave when they are done.

Shapes: B rows, T tokens in one call, D d_model, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from onward.errors import UserError
from onward.generation.prompt_cache import PromptCache
from onward.generation.request import Request, TokenLogprob, check
from onward.generation.speculation import Draft, Proposal, feed, verify
from onward.model.cache import Cache
from onward.model.decoder import Decoder, without_dropout

CHUNK = 512  # the most prompt tokens per call; bounds the memory of masks
STEP = 256  # slots by which a cache grows
WASTE = 1.25  # prompts are read together where pads make the call at most this much larger


class Engine:
    """Continues many requests over one cache (continuous batching, Yu et al. 2022, Orca).

    Row i of the cache belongs to `active[i]`; the first rows are decoding, the others still being read. A request's
    tokens depend on its own prompt, sampling and seed, not on its company.

    `stop_token_ids` end an answer, besides those of the request; `allowed` (V,) is False for tokens that are
    never chosen. Where prompt and new tokens are more than `length`, by default the model's context, that is a
    UserError or, with `slide`, the row goes on from the later half of what it has seen whenever the context is full.
    A `draft` proposes tokens that the model then tests together (speculative decoding). Prompts that have been read
    are kept in `prompts` and found there again. At most `rows` requests are continued at a time, by default 16 or as
    many as the `cache` has, which by default is contiguous and grows; with a draft its chunk must exceed
    `draft.num_draft_tokens`.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        rows: int | None = None,
        cache: Cache | None = None,
        stop_token_ids: Collection[int] = (),
        allowed: Tensor | None = None,
        slide: bool = False,
        draft: Draft | None = None,
        prompts: PromptCache | None = None,
    ) -> None:
        weight, length = model.embed.weight, model.config.context_length
        if rows is None:
            rows = 16 if cache is None else cache.rope_length.numel()
        if rows < 1 or (cache and rows > cache.rope_length.numel()):
            raise UserError(f"rows is {rows}: it must be at least 1, and at most the rows of the cache")
        if cache and len(cache.layers) != model.config.n_layers:
            raise UserError("the cache belongs to another model: make one from this model's config")
        if cache and draft and cache.chunk <= draft.num_draft_tokens:
            raise UserError(
                f"the cache takes {cache.chunk} tokens at a time: speculation needs {draft.num_draft_tokens + 1}"
            )
        if cache is None:
            chunk = max(min(CHUNK, length), draft.num_draft_tokens + 1 if draft else 1)
            cache = Cache(model.config, rows, length, chunk, device=weight.device, dtype=weight.dtype, step=STEP)
        self.model, self.cache, self.rows = model, cache, rows
        self.length = min(length, cache.length)
        self.stop_token_ids, self.allowed, self.slide, self.draft = frozenset(stop_token_ids), allowed, slide, draft
        self.prompts = prompts
        if draft:
            draft.start(rows, self.length, cache.chunk, model.config.vocab_size)
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self.reading = 0  # the first row that is still being read
        self.turns = count()

    def add(self, request: Request) -> Request:
        """Take a request; it waits until there is room for it. A UserError where it can never be answered."""
        check(request, self.model.config, self.length, self.slide)
        request.stop_token_ids |= self.stop_token_ids
        request.arrival = next(self.turns)
        if request.max_new_tokens:
            self.waiting.append(request)
        else:
            request.finish_reason = "length"
        return request

    def cancel(self, request: Request) -> None:
        """End a request; its row is free at once."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.active:
            self.leave(self.active.index(request))
        request.finish_reason = request.finish_reason or "cancelled"

    def run(self) -> Iterator[tuple[Request, int]]:
        """Go on until every request is done; yields (request, token) as tokens come, an end token not among them."""
        while self.waiting or self.active:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, int]]:
        """Admit whom there is room for, read a chunk of prompts, choose the next tokens; the new tokens."""
        with without_dropout(self.model):
            self.admit()
            states = [*self.decode(), *self.read()]
            return self.take(*zip(*states)) if states else []

    def admit(self) -> None:
        """Give free rows to waiting requests, the first come first."""
        while self.waiting and len(self.active) < self.rows:
            request, row = self.waiting[0], len(self.active)
            if len(request.context) > self.length:
                request.start += len(request.context) - (self.length // 2 or 1)
            twin = next((i for i, other in enumerate(self.active) if other is request.shares_prompt_with), None)
            if twin is not None and twin >= self.reading:
                return  # its prompt is being read
            reach = min(self.length, len(request.context) + request.remaining)
            find = partial(self.prompts.open, self.cache) if self.prompts else self.cache.open
            held = find(row, request.context, reach)
            if held is None:
                if not self.active:
                    raise self.too_large(request)
                return
            if twin is not None and not request.tokens and self.forks(self.active[twin]):
                held = len(request.context) - 1
                self.cache.fork(twin, row, held)
            request.num_cached = held
            self.active.append(self.waiting.popleft())

    def forks(self, twin: Request) -> bool:
        """Whether a row still holds all that was seen from the end of its prompt."""
        windows = any(store.window for store in self.cache.layers)
        return not twin.start and (not windows or len(twin.tokens) == 1)

    def decode(self) -> list[State]:
        """Feed each row the token that was chosen last, and what the draft proposes to follow it."""
        num_draft_tokens = self.draft.num_draft_tokens if self.draft else 0
        row = 0
        while row < self.reading:  # room for all of them, if need be by sending the last come away
            request = self.active[row]
            if self.cache.extend(row, request.num_cached, min(request.num_cached + 1 + num_draft_tokens, self.length)):
                row += 1
            else:
                self.send_away()
                row = 0
        requests = self.active[: self.reading]
        if not requests:
            return []
        proposals = [Proposal() for _ in requests]
        if self.draft:
            room = [min(num_draft_tokens, r.remaining - 1, self.length - len(r.context)) for r in requests]
            proposals = self.draft.propose(requests, room)
        pieces = [[r.context[-1], *p.tokens] for r, p in zip(requests, proposals)]
        hidden = feed(self.model, self.cache, 0, pieces, [r.num_cached for r in requests])
        return [(r, p, hidden[row, : 1 + len(p.tokens)]) for row, (r, p) in enumerate(zip(requests, proposals))]

    def read(self) -> list[State]:
        """Read a chunk of the first prompt that is not read, or the whole of several that are about as long."""
        while self.reading < len(self.active) and not self.unread(self.active[self.reading]):
            self.reading += 1
        start, chunk = self.reading, self.cache.chunk
        pieces: list[list[int]] = []
        for row, request in enumerate(self.active[start:], start):
            piece = self.unread(request)[:chunk]
            width = max(len(p) for p in [*pieces, piece])
            total = sum(map(len, pieces)) + len(piece)
            if not piece or (pieces and width * (len(pieces) + 1) > min(chunk, WASTE * total)):
                break
            if not self.cache.extend(row, request.num_cached, request.num_cached + len(piece)):
                break
            pieces.append(piece)
        if not pieces:
            if start == 0 and self.active:  # nobody else will make room
                self.send_away()
            return []
        readers = self.active[start : start + len(pieces)]
        hidden = feed(self.model, self.cache, start, pieces, [r.num_cached for r in readers])
        result: list[State] = []
        for row, (request, piece) in enumerate(zip(readers, pieces)):
            request.num_cached += len(piece)
            known = request.context[: request.num_cached]
            self.cache.commit(start + row, known)
            if not self.unread(request):
                if self.prompts and not request.tokens:
                    self.prompts.save(self.cache, start + row, known)
                self.reading += 1  # all of several, or the only one
                if not request.tokens:
                    request.num_cached -= 1  # as after a decoding step, before its token is counted
                    result.append((request, Proposal(), hidden[row, len(piece) - 1 : len(piece)]))
        return result

    @staticmethod
    def unread(request: Request) -> list[int]:
        """What is to be read before the next token can be chosen: the rest of the context, in an answer that has begun
        without its last token, which is fed with what the draft proposes to follow it."""
        context = request.context
        return context[request.num_cached : len(context) - bool(request.tokens)]

    def take(
        self, requests: Sequence[Request], proposals: Sequence[Proposal], hidden: Sequence[Tensor]
    ) -> list[tuple[Request, int]]:
        """Choose tokens from the hidden states (T, D) of each request, and let those go that are done."""
        logits = self.model.logits(torch.cat(list(hidden))[None])[0]
        answers = verify(logits, requests, proposals, self.allowed, self.model)
        new, row = [], 0
        for request, proposal, tokens in zip(requests, proposals, answers):
            chances = alternatives(logits[row : row + len(tokens)], tokens, request.num_logprobs)
            row += 1 + len(proposal.tokens)
            request.steps += 1
            request.num_accepted += len(tokens) - 1
            request.num_drafted += min(len(tokens), len(proposal.tokens))
            for token, chance in zip(tokens, chances):
                request.num_cached += 1
                if token in request.stop_token_ids:
                    request.finish_reason = "stop"
                    break
                request.tokens.append(token)
                request.logprobs += chance
                new.append((request, token))
                over = bool(request.stop and request.stop(token))
                if over or (request.constraint is not None and not request.constraint.accept(token)):
                    request.finish_reason = "stop"
                elif not request.remaining:
                    request.finish_reason = "length"
                if request.done:
                    break
        for request in requests:
            if request.done or len(request.context) > self.length:
                self.leave(self.active.index(request))
                if not request.done:  # it slides: what is left of its context is read again
                    self.waiting.appendleft(request)
        return new

    def leave(self, row: int) -> None:
        """Take a request out of its row; the last ones of the decoding and of the reading rows close the gap."""
        request = self.active[row]
        caches = [self.cache, *([self.draft.cache] if self.draft and self.draft.cache else [])]
        self.cache.commit(row, request.context[: request.num_cached])
        request.num_cached = request.num_draft_cached = 0
        for cache in caches:
            cache.close(row)
        if row < self.reading:
            self.reading -= 1
            self.move(self.reading, row, caches)
            row = self.reading
        self.move(len(self.active) - 1, row, caches)
        self.active.pop()

    def move(self, source: int, target: int, caches: Sequence[Cache]) -> None:
        """Row `target`, which is free, becomes row `source`."""
        if source != target:
            self.active[target] = self.active[source]
            for cache in caches:
                cache.move(source, target)

    def send_away(self) -> None:
        """Let the request that came last wait until there is room again; it is then read anew."""
        if len(self.active) == 1:
            raise self.too_large(self.active[0])
        last = max(range(len(self.active)), key=lambda row: self.active[row].arrival)
        request = self.active[last]
        self.leave(last)
        self.waiting.appendleft(request)

    def too_large(self, request: Request) -> UserError:
        return UserError(f"the cache has no room for {len(request.context)} tokens of one request: make it larger")


State = tuple[Request, Proposal, Tensor]  # a request, what follows if the draft is right, hidden states (T, D)


def alternatives(logits: Tensor, tokens: Sequence[int], count: int | None) -> list[list[TokenLogprob]]:
    """For each token its chance among logits (T, V), in a list of one; empty lists where nobody asks."""
    if count is None:
        return [[] for _ in tokens]
    found = logits.float().log_softmax(-1)
    top = found.topk(min(count, found.size(1)))
    pairs = [list(zip(ids, values)) for ids, values in zip(top.indices.tolist(), top.values.tolist())]
    return [[TokenLogprob(t, float(row[t]), best)] for t, row, best in zip(tokens, found, pairs)]


def generate(model: Decoder, requests: Sequence[Request], **options: Any) -> Iterator[tuple[Request, int]]:
    """Continue all requests together by an Engine with these options; yields (request, token) as tokens come."""
    engine = Engine(model, rows=max(1, min(len(requests), 16)), **options)
    for request in requests:
        engine.add(request)
    yield from engine.run()
