"""The engine: continuous batching of requests over one cache. A step is: schedule, forward, sample, distribute.

Shapes: N rows of logits, T tokens of a request, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
from torch import Tensor

from onward.base.arguments import Range, checked, explained
from onward.base.errors import UserError
from onward.compiled.model_state import ModelState
from onward.config.ranges import Size
from onward.generation.cache.manager import CHUNK, CacheManager, growing_cache
from onward.generation.cache.prefix_cache import PrefixCache
from onward.generation.cache.prefix_files import PrefixFiles
from onward.generation.cache.state_prefixes import StatePrefixCache
from onward.generation.check_request import check_cache, check_mask, check_request
from onward.generation.drafts.forward import decode_drafted
from onward.generation.drafts.proposal import Draft, Proposal, is_ours
from onward.generation.drafts.reading import ReadingDraft, ReadingRunner
from onward.generation.drafts.times import SpeculationTimes
from onward.generation.engine.ahead import compile_ahead
from onward.generation.engine.sampler import Sampler
from onward.generation.engine.scheduler import Schedule, Scheduler
from onward.generation.failures import NotANumber, nan_error
from onward.generation.logprobs import token_logprobs
from onward.generation.request import Request
from onward.generation.runner import COMPILE_AFTER, Runner
from onward.model.attachments import ATTACHMENTS
from onward.model.decoder import Decoder, without_dropout
from onward.model.divided import tensor_axis
from onward.model.rows import Row, labeled

ROWS = 16  # default maximum number of active requests


class Engine:
    """Continues many requests over one cache (continuous batching, Yu et al. 2022, Orca).

    The tokens of a request depend on its prompt, options and seed, not on other requests. A request that cannot
    continue (no token is allowed, its logits are NaN, a user function raises, the cache is too small) fails
    alone: its `finish_reason` is "error", and `error` is the exception.

    `stop_token_ids` end an answer, in addition to those of its request; `allowed` (V,) is False for tokens that are
    never sampled. If prompt and new tokens exceed the length of the context or the cache, `add` raises a UserError or,
    with `slide`, the request continues from the later half of its context whenever the context is full. A `draft`
    proposes tokens that the model then verifies together (speculative decoding). Prefilled prompts are saved in `files`
    and loaded from there. At most `rows` requests are active at a time, by default 16 or, with a given `cache`, the
    number of its rows. The default cache is contiguous and grows. With a draft, the cache's chunk must exceed
    `draft.num_draft_tokens`; if the model has recurrent layers, its `keep` must be at least `draft.num_draft_tokens`.

    While requests decode, a prompt of more than `prefill_budget` tokens is prefilled in pieces of as many tokens;
    several shorter prompts are prefilled together, with at most 4 times as many. A piece waits until decoding steps
    have taken as long as the previous piece, so that a long prompt at most doubles the mean time between the tokens of
    other requests. While more requests prefill than decode, pieces are longer and wait less, in proportion to the ratio
    of the two counts. Without a budget, a piece is a chunk of the cache, and does not wait.

    A decoding step is compiled after `compile_after` uncompiled steps with the same number of rows (None: never); on a
    CPU, so are prefills of up to 128 tokens. This takes about a second per model; on CUDA, steps become graphs.
    """

    @checked
    def __init__(
        self,
        model: Decoder,
        *,
        rows: Size | None = None,
        cache: CacheManager | None = None,
        stop_token_ids: Collection[int] = (),
        allowed: Tensor | None = None,
        slide: bool = False,
        draft: Draft | None = None,
        files: PrefixFiles | None = None,
        compile_after: int | None = COMPILE_AFTER,
        prefill_budget: Annotated[int, Range(1, 1 << 20)] | None = None,
    ) -> None:
        length, num_draft_tokens = model.config.context_length, draft.num_draft_tokens if draft else 0
        check_mask(allowed, (model.config.vocab_size,))
        if rows is None:
            rows = ROWS if cache is None else cache.cache.rows
        chunk = max(min(CHUNK, length), num_draft_tokens + 1)
        cache = cache or growing_cache(model, rows, length, chunk, num_draft_tokens)
        check_cache(cache.cache, model.config, rows, num_draft_tokens)
        self.model, self.length, self.slide, self.draft = model, min(length, cache.cache.length), slide, draft
        self.stop_token_ids = frozenset(stop_token_ids)
        if draft:
            draft.start(rows, self.length, cache.cache.chunk, model.config.vocab_size)
        self.state = ModelState(model)
        self.runner, self.sampler = Runner(model, cache.cache, self.state, compile_after), Sampler(allowed)
        self.scheduler = Scheduler(
            (StatePrefixCache if cache.cache.states else PrefixCache)(cache, files, self.state),
            rows,
            self.length,
            num_draft_tokens=num_draft_tokens,
            draft_manager=draft.manager if draft else None,
            prefill_budget=prefill_budget,
        )
        if isinstance(draft, ReadingDraft):
            self.runner = ReadingRunner(self.runner, draft, self.scheduler.active)
        self.state.kept = self.scheduler.prefixes.keeps
        self.times = SpeculationTimes()
        # all processes of a tensor axis must make the same schedule, so the schedule must not depend on measured times
        divided = ATTACHMENTS in vars(model) and tensor_axis(model) > 1
        self.clock: Callable[[], float] = float if divided else perf_counter

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.active)

    @checked
    def compile(self, rows: Annotated[int, Range(1, 1 << 20)] = 1, folder: str | Path | None = None) -> str:
        """Compile decoding steps of `rows` rows, and on a CPU prefills of as many short prompts, now, rather than after
        `compile_after` uncompiled steps; the machine code is stored in `folder`, if given, for the next start.

        Returns "", or the reason why the steps cannot be compiled and stay uncompiled. On CUDA torch.compile makes the
        kernels. Raises a UserError if requests are active on CUDA.
        """
        if self.model.device.type == "cuda" and self.scheduler.active:
            raise UserError("Cannot compile steps while requests are active: compile them before requests are added")
        return compile_ahead(self.runner, rows, None if folder is None else Path(folder))

    @explained
    def add(self, request: Request) -> Request:
        """Queue a request and return it. Raises a UserError if the request can never be answered."""
        check_request(request, self.model.config, self.length, self.slide)
        request.stop_token_ids |= self.stop_token_ids
        request.adapter = self.runner.adapter(request.adapter)
        if request.max_new_tokens:
            self.scheduler.add(request)
        else:
            request.finish_reason = "length"
        return request

    @explained
    def cancel(self, request: Request) -> None:
        """End a request that waits or is active, with `finish_reason` "cancelled"; if it is active, its row of the
        cache becomes free at once."""
        self.scheduler.remove(request)
        request.finish_reason = request.finish_reason or "cancelled"
        if not self.scheduler.active:
            self.rest()

    def rest(self) -> None:
        """Release the snapshot of the model and the compiled steps while no request is active."""
        if self.runner.compiled:
            self.runner.compiled.release()
        if self.state.snapshot:
            self.state.rest()

    def run(self) -> Iterator[tuple[Request, int]]:
        """Run steps until every request is done, and yield (request, token) for each generated token except stop
        tokens."""
        while self.busy:
            yield from self.step()

    def finish(self) -> None:
        """Run steps until every request is done. Between steps, the engine checks the model for changes only after a
        user's function or draft has run."""
        with without_dropout(self.model):
            self.state.confirmed = False
            while self.busy:
                self.advance()

    def step(self) -> list[tuple[Request, int]]:
        """Run one step: a decoding step of all requests that decode, a piece of prefill, or both. Returns the new
        tokens as pairs (request, token)."""
        self.state.confirmed = False  # the caller may have changed the model
        return self.advance()

    @torch.inference_mode()
    def advance(self) -> list[tuple[Request, int]]:
        """Run one step as `step` does, for internal callers. If anything but a request's own functions may have changed
        the model since the last step, the caller must set `state.confirmed` to False."""
        with without_dropout(self.model):
            schedule, start = self.scheduler.schedule(), self.clock()
            proposals = self.propose(schedule)
            drafting = self.clock() - start
            requests, proposals, logits = self.forward(schedule, proposals)
            if not requests:
                self.scheduler.pace.add(self.clock() - start, decoding=False, prefilling=True)
                return []
            sampled, last = self.sampler.sample(logits, requests, proposals)
            self.runner.keep(requests, last)
            new = self.distribute(requests, proposals, sampled, logits)
            if self.draft and not schedule.prefill:
                speculated = any(proposal.tokens for proposal in proposals)
                self.times.add(self.clock() - start, drafting, len(new) / len(requests), speculated)
            self.scheduler.release(requests)
            self.scheduler.pace.add(self.clock() - start, bool(schedule.decode), bool(schedule.prefill))
            if any(request.calls_user for request in requests):
                self.state.confirmed = False
            if not self.busy:
                self.rest()
            return new

    def propose(self, schedule: Schedule) -> list[Proposal]:
        if self.draft and schedule.decode:
            self.state.confirmed &= is_ours(self.draft)  # a draft of the user may change the model
            return self.draft.propose(schedule.decode, schedule.room)
        return [Proposal() for _ in schedule.decode]

    def forward(self, schedule: Schedule, proposals: list[Proposal]) -> tuple[list[Request], list[Proposal], Tensor]:
        """Run the model on the scheduled tokens, and on the draft tokens in `proposals`. Returns the requests that
        sample a token, the proposal for each, and the logits (N, V) after each request's last token and after each
        draft token."""
        requests, logits = list(schedule.decode), list[Tensor]()
        if requests:
            with labeled(row_of(r, 1 + len(p.tokens)) for r, p in zip(requests, proposals)):
                drafted = [proposal.tokens for proposal in proposals]
                if any(drafted):
                    logits.append(decode_drafted(self.runner, requests, drafted))
                else:
                    logits.append(self.runner.decode(requests))
        if schedule.prefill:
            pieces, first = [piece for _, piece in schedule.prefill], self.scheduler.num_decoding
            starts = [request.num_cached for request, _ in schedule.prefill]
            adapters = [request.adapter or "" for request, _ in schedule.prefill]
            with labeled(row_of(r, len(piece)) for r, piece in schedule.prefill):
                hidden = self.runner.prefill(first, pieces, starts, adapters)
            sampling = self.scheduler.prefilled(schedule)
            requests += [schedule.prefill[index][0] for index in sampling]
            proposals += [Proposal() for _ in sampling]
            if sampling:
                last = [hidden[index, len(pieces[index]) - 1] for index in sampling]
                with labeled(row_of(request, 1) for request in requests[-len(sampling) :]):
                    logits.append(self.runner.logits(torch.stack(last), [adapters[index] for index in sampling]))
        return requests, proposals, logits[0] if len(logits) == 1 else torch.cat(logits) if logits else torch.empty(0)

    def distribute(
        self,
        requests: Sequence[Request],
        proposals: Sequence[Proposal],
        sampled: Sequence[list[int] | Exception],
        logits: Tensor,
    ) -> list[tuple[Request, int]]:
        """Append the tokens sampled from `logits` (N, V) to their requests; a request with an exception instead of
        tokens fails."""
        new: list[tuple[Request, int]] = []
        row = 0
        for request, proposal, tokens in zip(requests, proposals, sampled):
            end = row + 1 + len(proposal.tokens)
            if isinstance(tokens, Exception):
                is_nan = isinstance(tokens, NotANumber)
                self.scheduler.fail(request, nan_error(self.model, request.context) if is_nan else tokens)
            else:
                try:
                    new += receive(request, proposal, tokens, logits[row:end])
                except Exception as error:  # raised by a stop function, a constraint or a check
                    self.scheduler.fail(request, error)
            row = end
        return new


def row_of(request: Request, tokens: int) -> Row:
    return Row(request, tokens, len(request.tokens), request.start + request.num_cached)


def receive(
    request: Request, proposal: Proposal, tokens: Sequence[int], logits: Tensor
) -> Iterator[tuple[Request, int]]:
    """Append tokens, sampled from logits (T, V), to a request up to the end of its answer, and yield (request, token)
    for each appended token. `proposal` are the draft tokens that were verified, which are counted in the request's
    `num_drafted` and `num_accepted`. Raises a UserError if a forced token breaks the constraint, and any exception that
    `request.check` raises."""
    if request.num_logprobs is not None:
        logprobs = token_logprobs(logits[: len(tokens)], tokens, request.num_logprobs)
    complete = False  # whether the answer ends by a stop token or its constraint, not by a stop text or its length
    request.steps += 1
    request.num_accepted += len(tokens) - 1
    request.num_drafted += min(len(tokens), len(proposal.tokens))
    for index, token in enumerate(tokens):
        if request.constraint is not None and not request.constraint.allowed()[token]:
            raise UserError(
                f"Cannot force token {token}, which breaks the request's constraint: leave out one of the two"
            )
        request.num_cached += 1
        if token in request.stop_token_ids:
            request.finish_reason, complete = "stop", True
            break
        request.tokens.append(token)
        if request.num_logprobs is not None:
            request.logprobs.append(logprobs[index])
        yield request, token
        if request.stop and request.stop(token):
            request.finish_reason = "stop"
        elif request.constraint is not None and not request.constraint.accept(token):
            request.finish_reason, complete = "stop", True
        elif not request.remaining:
            request.finish_reason = "length"
        if request.done:
            break
    if complete and request.check is not None:
        request.check(request.tokens)
