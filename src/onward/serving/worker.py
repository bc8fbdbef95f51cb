"""The thread that owns the engines: it takes requests from other threads, steps, and hands new text to the event loop.

One thread runs all engines in turn, so that their threads of computation never compete. Other threads only append to
its inbox; the event loop gets the updates of a step in one call.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from onward.base.errors import UserError
from onward.generation.engine.engine import Engine
from onward.generation.request import Request
from onward.serving.errors import ApiError
from onward.serving.jobs import Job, Update, deliver
from onward.serving.models import row_counts
from onward.serving.weight_files import WeightFiles

T = TypeVar("T")
StepObserver = Callable[[Engine, list[tuple[Request, int]]], None]
LOG = logging.getLogger("onward.serving")
# without the pause, the first of four prompts would be prefilled alone, the others between steps of its answer
PAUSE = 0.002  # seconds without an arrival that end a burst of requests
PATIENCE = 0.003  # maximum seconds that a step waits for the event loop to send the tokens of the step before


class Worker(threading.Thread):
    """Runs the engines until `stop`. `observe` is called after each step; functions in `spare` are called one by one
    while there is no request. The work in `pieces` runs models outside the engines: the worker does one piece between
    two steps and, while an engine is busy, the next one after the steps have taken as long. `share` limits the rows of
    each client, see `take_turns`. `coming` has an item for each request on its way to `add`."""

    def __init__(self, observe: StepObserver, share: float = 1.0, coming: Collection[object] = ()) -> None:
        super().__init__(name="onward-engine", daemon=True)
        self.engines: Sequence[Engine] = ()
        self.files = WeightFiles()
        self.on_failure: Callable[[UserError], None] = lambda error: None  # called if the thread cannot continue
        self.observe, self.share, self.coming = observe, share, coming
        self.inbox: deque[Callable[[], None]] = deque()
        self.pieces: deque[tuple[Future[Any], Generator[None, None, Any]]] = deque()
        self.debt = 0.0  # seconds that decoding has to catch up
        self.spare: deque[Callable[[], object]] = deque()
        self.wake, self.stopping = threading.Event(), False
        self.sent = threading.Event()  # set when the event loop has sent the last step's tokens
        self.jobs: dict[Request, Job] = {}  # used only by the engine's thread
        self.generated = Counter[Engine]()  # tokens of each engine so far

    def add(self, job: Job) -> None:
        # called from any thread
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

    def beside(self, pieces: Generator[None, None, T]) -> Future[T]:
        """Run a generator in the engine's thread, alternating with decoding; canceling the future ends the
        generator."""
        future: Future[T] = Future()
        self.post(lambda: self.pieces.append((future, pieces)))
        return future

    def wait_for_client(self, job: Job, waits: bool) -> None:
        """Take the requests of a job from the engine while its client reads nothing, or return them to the queue."""
        self.post(lambda: self.pause(job, waits))

    def post(self, command: Callable[[], None]) -> None:
        self.inbox.append(command)
        self.wake.set()

    def compile_when_idle(self) -> None:
        """Compile the steps of each number of rows separately, so that a request waits for at most one."""
        for engine in self.engines:
            self.spare.extend(partial(engine.compile, rows) for rows in row_counts(engine))
        self.wake.set()

    def stop(self) -> None:
        self.stopping = True
        self.wake.set()

    def run(self) -> None:
        while not self.stopping:
            if not self.pieces and not any(engine.busy for engine in self.engines):
                if self.spare and not self.inbox and not self.files.changed():
                    self.spare.popleft()()
                elif not self.files.changed():
                    self.wake.wait()
                    self.gather()
            self.wake.clear()
            while self.inbox:
                self.inbox.popleft()()
            if path := self.files.changed():
                self.fail(path)
                self.wake.wait()  # a request that was on its way wakes this thread, and is ended too
                continue
            self.next_piece()
            for engine in self.engines:
                if engine.busy:
                    self.take_turns(engine)
                    self.step(engine)

    def fail(self, path: Path) -> None:
        """End all requests, because a weight file has changed: the next step could end the process."""
        error = UserError(
            f"Cannot go on, because {path} was changed while the model uses it: start the server again, and replace "
            "files instead of writing to them, or use --no-mmap"
        )
        for request in list(self.jobs):
            self.jobs[request].engine.cancel(request)
            request.finish_reason, request.error = "error", error
        for engine in self.engines:
            self.send(engine)
        for future, _ in self.pieces:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self.pieces.clear()
        self.on_failure(error)

    def gather(self) -> None:
        # prompts of clients that ask at the same time are prefilled together
        end = perf_counter() + 5 * PAUSE
        self.wake.clear()
        while perf_counter() < end and self.wake.wait(PAUSE if self.coming else PAUSE / 4):
            self.wake.clear()

    def next_piece(self) -> None:
        """Do one piece of the work other than decoding, unless decoding has to catch up."""
        busy = any(engine.busy for engine in self.engines)
        while self.pieces and not (busy and self.debt > 0):
            future, work = self.pieces.popleft()
            if future.cancelled():
                continue
            start = perf_counter()
            try:
                next(work)
                self.pieces.append((future, work))
            except StopIteration as end:
                if future.set_running_or_notify_cancel():
                    future.set_result(end.value)
            except BaseException as error:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            self.debt = perf_counter() - start
            return

    def pause(self, job: Job, waits: bool) -> None:
        scheduler = job.engine.scheduler
        for request in job.answers:
            if request in self.jobs and waits:
                take_out(job.engine, request)
            elif request in self.jobs and request not in scheduler.active and request not in scheduler.waiting:
                scheduler.waiting.append(request)

    def take_turns(self, engine: Engine) -> None:
        """Order the queue of an engine so that clients take turns. While another client waits without a free row,
        preempt the latest request of a client that has more than its share of the rows."""
        scheduler = engine.scheduler
        if not scheduler.waiting or self.share == 1:
            return

        def client(request: Request) -> str:
            return self.jobs[request].client

        rows = Counter(map(client, scheduler.active))
        if len({*rows, *map(client, scheduler.waiting)}) == 1:
            return
        turns, before = rows.copy(), dict[Request, int]()  # number of its client's rows and requests up to it
        for request in scheduler.waiting:
            turns[client(request)] += 1
            before[request] = turns[client(request)]
        scheduler.waiting = deque(sorted(scheduler.waiting, key=before.__getitem__))
        heaviest, most = (rows.most_common(1) or [("", 0)])[0]
        first = client(scheduler.waiting[0])
        if len(scheduler.active) < scheduler.rows or first == heaviest or most <= max(1, self.share * scheduler.rows):
            return
        latest = max((r for r in scheduler.active if client(r) == heaviest), key=lambda r: r.arrival)
        take_out(engine, latest)
        scheduler.waiting.append(latest)

    def begin(self, job: Job) -> None:
        """Add requests to the engine; if this fails, they end with the exception."""
        self.jobs |= dict.fromkeys(job.answers, job)
        try:
            if job.engine not in self.engines:
                raise ApiError(
                    "the model was removed before its answer began: choose another", 404, "model", "model_not_found"
                )
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
        start = perf_counter()
        try:
            new = engine.step()
        except Exception as error:
            LOG.exception("a step failed")
            new = []
            for request in [*engine.scheduler.active, *engine.scheduler.waiting]:
                engine.scheduler.fail(request, error)
        self.debt -= perf_counter() - start
        self.generated[engine] += len(new)
        self.observe(engine, new)
        self.send(engine, new)

    def send(self, engine: Engine, new: Sequence[tuple[Request, int]] = ()) -> None:
        """Write updates, or pass them to the event loop; return once they are sent, or after PATIENCE. Otherwise the
        event loop would send them while the next step computes, and compete with it for the GIL and a core."""
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
        if unsent := [(job, updates) for job, updates in batches.items() if not job.write(updates)]:
            try:
                self.sent.clear()
                unsent[0][0].loop.call_soon_threadsafe(self.hand_over, unsent)
                self.sent.wait(PATIENCE)
            except RuntimeError:  # the loop is closed: the server has ended
                self.stopping = True

    def hand_over(self, batches: list[tuple[Job, list[Update]]]) -> None:
        """Pass updates to jobs, and set `sent` after the tasks that wait for them; called in the event loop."""
        deliver(batches)
        asyncio.get_running_loop().call_soon(self.sent.set)


def take_out(engine: Engine, request: Request) -> None:
    """Free the row of a request, which continues once it is appended to the queue of the engine."""
    engine.scheduler.remove(request)
    if not engine.scheduler.active:
        engine.rest()
