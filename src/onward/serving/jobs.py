"""A client's request in the engine: its answers, and their new text as the engine steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from threading import Lock
from time import perf_counter

from onward.base.errors import UserError
from onward.generation.answer import Answer
from onward.generation.engine.engine import Engine
from onward.generation.logprobs import TokenLogprob
from onward.generation.request import Request
from onward.serving.connections import Outlet


@dataclass(frozen=True)
class Update:
    """The tokens that one or more steps of the engine added to one answer of a job, a client's request."""

    index: int  # index of the answer in the job
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str  # "" until the answer ends
    error: Exception | None = None


def merged(updates: Sequence[Update]) -> Update:
    """Join successive updates of one answer."""
    if len(updates) == 1:
        return updates[0]
    return Update(
        updates[0].index,
        "".join(update.text for update in updates),
        [token for update in updates for token in update.tokens],
        [one for update in updates for one in update.logprobs],
        updates[-1].finish_reason,
        updates[-1].error,
    )


def by_token(update: Update) -> list[Update]:
    """An update with log-probabilities as one update per token, of which the first has all the text."""
    pairs = zip(update.tokens, update.logprobs)
    parts = [replace(update, text="", tokens=[token], logprobs=[one], finish_reason="") for token, one in pairs]
    if len(parts) < 2:
        return [update]
    return [replace(parts[0], text=update.text), *parts[1:-1], replace(parts[-1], finish_reason=update.finish_reason)]


class Job:
    """The answers to one request of a client: the engine's thread makes updates, the event loop receives them.
    `answers` maps the engine's requests to answers that grow from them; `context`, such as one that edits the model, is
    open in the engine's thread until they end. `on_close` is called once, when all are done or the job is canceled.
    While the client leaves more than `max_unread` tokens unread, the answers wait: `on_unread` is called with True, and
    later with False. Times are seconds of `perf_counter`."""

    def __init__(
        self,
        engine: Engine,
        answers: dict[Request, Answer],
        label: str,
        client: str,
        on_close: Callable[[Job], None],
        context: AbstractContextManager[None],
        max_unread: int = 1 << 20,
        on_unread: Callable[[Job, bool], None] = lambda job, waits: None,
    ) -> None:
        self.engine, self.answers, self.label, self.on_close = engine, answers, label, on_close
        self.client, self.max_unread, self.on_unread = client, max_unread, on_unread
        self.unread, self.waits = 0, False  # tokens in `queue`, and whether the answers wait for them to be read
        self.context, self.opened = context, ExitStack()
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[list[Update]] = asyncio.Queue()
        self.index = {request: number for number, request in enumerate(answers)}
        self.num_sent = dict.fromkeys(answers, 0)  # number of tokens of each request in updates so far
        self.remaining, self.closed = len(answers), False  # answers that are not done
        self.arrival, self.first_token = perf_counter(), 0.0
        self.complete: dict[int, Sequence[int]] = {}  # tokens of answers that are to be checked, by index
        self.checks = set[asyncio.Task[None]]()  # checks in progress
        self.outlet: Outlet | None = None
        self.lock, self.ready = Lock(), False  # whether the engine's thread may write to `outlet`
        self.num_posted = self.num_received = 0  # numbers of lists of updates for the event loop
        self.error: Exception | None = None  # raised in the engine's thread while writing

    def write_to(self, outlet: Outlet, growth: Callable[[Update], Iterator[bytes]]) -> None:
        """Let the engine's thread write the `growth` of the only answer to an outlet, whenever the client has received
        all earlier tokens. The engine's thread and the event loop then do not have to wake each other and wait for each
        token."""
        self.outlet, self.growth = outlet, growth

    def check_answers(self, problem: Callable[[Sequence[int]], Awaitable[str]]) -> None:
        """Check complete answers before their last update is sent: `problem` returns a sentence with the mistake in an
        answer's tokens, or ""."""
        self.problem = problem
        for request, index in self.index.items():
            request.check = partial(self.complete.__setitem__, index)  # called by the engine's thread

    def update(self, request: Request) -> Update:
        # called by the engine's thread
        answer, start = self.answers[request], self.num_sent[request]
        if request.done:
            answer.finish()
        self.num_sent[request] = len(request.tokens)
        logprobs = request.logprobs[start:] if request.logprobs else []
        text, tokens = answer.take(), request.tokens[start:]
        return Update(self.index[request], text, tokens, logprobs, request.finish_reason, request.error)

    def write(self, updates: list[Update]) -> bool:
        """Write updates to the outlet; False if the event loop has to send them. Called by the engine's thread."""
        with self.lock:
            if self.outlet and self.ready and not updates[-1].finish_reason:
                self.first_token = self.first_token or perf_counter()
                try:
                    body = b"".join(chain.from_iterable(map(self.growth, updates)))
                    self.ready = not body or self.outlet.write(body)  # an empty chunk would end the response
                    return True
                except Exception as error:
                    self.error = error
            self.ready = False
            self.num_posted += 1
            return False

    def receive(self, updates: list[Update]) -> None:
        # called in the event loop
        self.first_token = self.first_token or perf_counter()
        complete = [one for one in updates if one.finish_reason == "stop" and one.index in self.complete]
        updates = [one for one in updates if one not in complete]
        for update in complete:
            task = self.loop.create_task(self.check(update, self.complete.pop(update.index)))
            self.checks.add(task)
            task.add_done_callback(self.checks.discard)
        if not updates:
            return
        self.queue.put_nowait(updates)
        self.unread += sum(len(update.tokens) for update in updates)
        if self.unread > self.max_unread and not self.waits and not self.closed:
            self.waits = True
            self.on_unread(self, True)
        self.remaining -= sum(bool(update.finish_reason) for update in updates)
        if not self.remaining:
            self.close()

    async def check(self, update: Update, tokens: Sequence[int]) -> None:
        """Receive the last update of an answer, with an error if the answer is wrong."""
        try:
            if problem := await self.problem(tokens):
                raise UserError(problem)
        except Exception as error:
            request = list(self.answers)[update.index]
            request.finish_reason, request.error = "error", error
            update = replace(update, finish_reason="error", error=error)
        if not self.closed:
            self.receive([update])

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.on_close(self)

    async def next_updates(self) -> list[Update]:
        try:
            with self.lock:
                unsent = self.num_posted > self.num_received or not self.queue.empty()
                self.ready = self.outlet is not None and self.outlet.free and not unsent
            return await self.queue.get()
        finally:
            with self.lock:
                self.ready = False

    async def updates(self) -> AsyncIterator[list[Update]]:
        """Yield lists of updates as the answers grow, each with at most one update per answer."""
        done = 0
        while done < len(self.answers):
            updates = await self.next_updates()
            if self.error:
                raise self.error
            while not self.queue.empty():  # a client that reads slowly gets longer pieces
                updates = updates + self.queue.get_nowait()
            self.unread = 0
            if self.waits:
                self.waits = False
                self.on_unread(self, False)
            done += sum(bool(update.finish_reason) for update in updates)
            by_index: dict[int, list[Update]] = {}
            for update in updates:
                by_index.setdefault(update.index, []).append(update)
            yield [merged(own) for own in by_index.values()]


def deliver(batches: list[tuple[Job, list[Update]]]) -> None:
    # called in the event loop
    for job, updates in batches:
        job.num_received += 1
        job.receive(updates)
