"""The thread that owns the engines: it takes requests from other threads, steps, and hands new text to the event loop.

One thread runs all engines in turn, so that their threads of computation never compete. Other threads only append to
its inbox; the event loop gets the updates of a step in one call.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from time import perf_counter
from typing import TypeVar

from onward.generation.engine.engine import Engine
from onward.generation.request import Request
from onward.serving.errors import ApiError
from onward.serving.jobs import Job, Update, deliver
from onward.serving.models import row_counts

T = TypeVar("T")
StepObserver = Callable[[Engine, list[tuple[Request, int]]], None]
LOG = logging.getLogger("onward.serving")
# without the pause, the first of four prompts would be prefilled alone, the others between steps of its answer
PAUSE = 0.002  # seconds without an arrival that end a burst of requests
PATIENCE = 0.003  # seconds that a step waits at most for the event loop to send the tokens of the step before


class Worker(threading.Thread):
    """Runs the engines until `stop`. `observe` is called after each step; functions in `spare` are called one by one
    while there is no request."""

    def __init__(self, observe: StepObserver) -> None:
        super().__init__(name="onward-engine", daemon=True)
        self.engines: Sequence[Engine] = ()
        self.observe = observe
        self.inbox: deque[Callable[[], None]] = deque()
        self.spare: deque[Callable[[], object]] = deque()
        self.wake, self.stopping = threading.Event(), False
        self.sent = threading.Event()  # the event loop has sent the last step's tokens
        self.jobs: dict[Request, Job] = {}  # of the engine's thread alone
        self.generated = Counter[Engine]()  # tokens of each engine so far

    def add(self, job: Job) -> None:
        # from any thread
        self.post(lambda: self.begin(job))

    def cancel(self, job: Job) -> None:
        """End a job whose client has gone; its rows are free after the current step."""
        job.close()
        self.post(lambda: self.remove(job))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in the engine's thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.post(run)
        return future

    def post(self, command: Callable[[], None]) -> None:
        self.inbox.append(command)
        self.wake.set()

    def compile_when_idle(self) -> None:
        """Compile the steps of each number of rows by itself, so that a request waits for at most one."""
        for engine in self.engines:
            self.spare.extend(partial(engine.compile, rows) for rows in row_counts(engine))
        self.wake.set()

    def stop(self) -> None:
        self.stopping = True
        self.wake.set()

    def run(self) -> None:
        while not self.stopping:
            if not any(engine.busy for engine in self.engines):
                if self.spare and not self.inbox:
                    self.spare.popleft()()
                else:
                    self.wake.wait()
                    self.gather()
            self.wake.clear()
            while self.inbox:
                self.inbox.popleft()()
            for engine in self.engines:
                if engine.busy:
                    self.step(engine)

    def gather(self) -> None:
        # prompts of clients that ask at the same time are prefilled together
        end = perf_counter() + 5 * PAUSE
        self.wake.clear()
        while perf_counter() < end and self.wake.wait(PAUSE):
            self.wake.clear()

    def begin(self, job: Job) -> None:
        """Add requests to the engine; if this fails, they end with the exception."""
        self.jobs |= dict.fromkeys(job.answers, job)
        try:
            if job.engine not in self.engines:
                raise ApiError("the model was removed before its answer began", 404, "model", "model_not_found")
            job.opened.enter_context(job.context)
            for request in job.answers:
                job.engine.add(request)
        except Exception as error:  # requests were checked before, but edits or a changed model may fail
            for request in job.answers:
                job.engine.cancel(request)
                request.finish_reason, request.error = "error", error
        self.send(job.engine)

    def remove(self, job: Job) -> None:
        for request in job.answers:
            if request in self.jobs:
                job.engine.cancel(request)
                self.forget(request)

    def forget(self, request: Request) -> None:
        """Stop following a request, and close its job's context after the last one."""
        job = self.jobs.pop(request)
        if not any(other in self.jobs for other in job.answers):
            job.opened.close()

    def step(self, engine: Engine) -> None:
        """Step an engine and send its updates; if the step itself fails, so do all requests of the engine."""
        try:
            new = engine.step()
        except Exception as error:
            LOG.exception("a step failed")
            new = []
            for request in [*engine.scheduler.active, *engine.scheduler.waiting]:
                engine.scheduler.fail(request, error)
        self.generated[engine] += len(new)
        self.observe(engine, new)
        self.send(engine, new)

    def send(self, engine: Engine, new: Sequence[tuple[Request, int]] = ()) -> None:
        """Pass updates to the event loop; return once they are sent, or after PATIENCE. Otherwise the event loop would
        send them while the next step computes, and take the lock of Python and a core from it."""
        changed = dict.fromkeys(request for request, _ in new if request in self.jobs)
        changed |= dict.fromkeys(request for request in self.jobs if request.done)
        batches: dict[Job, list[Update]] = {}
        for request in changed:
            job = self.jobs[request]
            update = job.update(request)
            if request.done:
                self.forget(request)
            if update.text or update.finish_reason or update.logprobs or update.tokens:
                batches.setdefault(job, []).append(update)
        if batches:
            try:
                self.sent.clear()
                next(iter(batches)).loop.call_soon_threadsafe(self.hand_over, list(batches.items()))
                self.sent.wait(PATIENCE)
            except RuntimeError:  # the loop is closed: the server has ended
                self.stopping = True

    def hand_over(self, batches: list[tuple[Job, list[Update]]]) -> None:
        """Pass updates to jobs, and set `sent` after the tasks that wait for them; called in the event loop."""
        deliver(batches)
        asyncio.get_running_loop().call_soon(self.sent.set)
