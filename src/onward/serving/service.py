"""The server's state, and the way of a request through it: prompts to requests, to the engine, to a response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Literal, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse

from onward.base.errors import UserError
from onward.generation.check_request import PromptError, check_request
from onward.generation.options import GenerationOptions
from onward.generation.prompts import Prompt, requests_for, schema_note
from onward.serving.edits import Edits, edited_for
from onward.serving.errors import ApiError, body_of
from onward.serving.jobs import Job, Update
from onward.serving.models import Served, engines_of
from onward.serving.request_log import current
from onward.serving.server_options import RequestLimits
from onward.serving.streams import DONE, event
from onward.serving.worker import StepObserver, Worker

T = TypeVar("T")
LOG = logging.getLogger("onward.serving")
PROMPTS = 2048  # of a request, at most
ANSWERS = 128  # for each prompt, at most
TOKENS = 1 << 22  # prompts x answers x the most tokens of each, at most


class Service:
    """The state of the server, used only in the event loop. `pending` counts the answers that are not done.
    `load_more` loads a further model by its name; None: none can be added. `observe_job` is called with each job that
    ends, `observe_step` in the engines' thread after each step."""

    def __init__(self, limits: RequestLimits, load_more: Callable[[str], Sequence[Served]] | None = None) -> None:
        self.limits, self.load_more = limits, load_more
        self.state: Literal["loading", "ready", "draining"] = "loading"
        self.served: dict[str, Served] = {}
        self.worker = Worker(lambda engine, new: self.observe_step(engine, new))
        self.pending = 0
        self.jobs: set[Job] = set()
        self.threads = ThreadPoolExecutor(2, "onward-prompts")  # tokenize prompts and compile constraints
        self.observe_job: Callable[[Job], None] = lambda job: None
        self.observe_step: StepObserver = lambda engine, new: None

    def load(self, load: Callable[[], Sequence[Served]]) -> Future[Sequence[Served]]:
        # OpenMP keeps a team of threads for each thread that has computed, and lets all of them sleep between two
        # kernels once they are more than the cores: a decoding step then takes up to 1.5 times as long. So one thread
        # computes, and loads.
        def run() -> Sequence[Served]:
            served = load()
            self.worker.engines = engines_of(served)
            return served

        self.worker.start()
        return self.worker.call(run)

    def open(self, served: Sequence[Served]) -> None:
        self.served = {one.name: one for one in served}
        if self.state == "loading":
            self.state = "ready"

    def close(self) -> None:
        self.worker.stop()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def model(self, name: str | None) -> Served:
        """The model with this name, by default the first; raises an ApiError for an unknown name, or if not ready."""
        self.check_ready()
        name = name or next(iter(self.served))
        if name not in self.served:
            known = ", ".join(self.served)
            raise ApiError(f"there is no model {name[:200]!r} here: choose {known}", 404, "model", "model_not_found")
        served, record = self.served[name], current()
        record.model, record.tokenizer = served.name, served.lm.tokenizer
        return served

    def check_ready(self) -> None:
        if self.state == "loading":
            raise ApiError("the model is being loaded: try again in some seconds", 503, code="loading")
        if self.state == "draining":
            raise ApiError("the server is shutting down and accepts no more requests", 503, code="draining")

    async def compute(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in a thread that tokenizes prompts, so that the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *args)

    async def in_engine(self, function: Callable[[], T]) -> T:
        """Call a function in the engine's thread between two steps, where it may run a model."""
        return await asyncio.wrap_future(self.worker.call(function))

    async def submit(
        self,
        served: Served,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        label: str,
        edits: Edits | None = None,
        check: Callable[[Sequence[int]], None] | None = None,
    ) -> Job:
        """Start answers; `edits` switches off parts of the model for these prompts alone, and `check` is called with
        the tokens of each complete answer. Raises a UserError for what can never be answered, and an ApiError with
        status 429 if too many answers wait already."""
        engine, rows = served.engine, served.engine.scheduler.rows
        if not prompts:
            raise ApiError("there is no prompt: give at least one", param="prompt")
        if len(prompts) > PROMPTS or options.n > ANSWERS:
            many = f"prompt has {len(prompts)} texts: give at most {PROMPTS:,}"
            raise UserError(many if len(prompts) > PROMPTS else f"n is {options.n}: give at most {ANSWERS}")
        count, most = len(prompts) * options.n, rows + self.limits.max_queue
        if count * (options.max_new_tokens or engine.length) > TOKENS:
            raise UserError(
                f"max_new_tokens is {options.max_new_tokens or engine.length}, so that {count} answers would have more "
                f"than {TOKENS:,} tokens: ask for fewer answers, or shorter ones"
            )
        if count > most:
            raise UserError(
                (f"n is {options.n}" if options.n > 1 else f"prompt has {len(prompts)} texts")
                + f": {count} answers are more than the {most} that may be pending; ask for fewer at a time"
            )

        def prepare() -> dict[Any, Any]:
            answers = requests_for(engine, served.lm.text(), prompts, options)
            log_note(schema_note(options))
            for number, request in enumerate(answers):
                request.adapter = served.adapter
                request.check = check or request.check
                try:
                    check_request(request, engine.model.config, engine.length, None)
                except PromptError as error:
                    error.index = number // options.n if len(prompts) > 1 else None
                    raise
            return answers

        names = edits.names(served.lm.model) if edits else []
        answers = await self.compute(prepare)
        if self.pending + count > most:
            raise ApiError(
                f"Cannot wait for more answers, because {self.pending} are pending already: try again later", 429
            )
        self.check_ready()
        context = edited_for(served.lm.model, names, answers) if names else nullcontext()
        job = Job(engine, answers, label, self.ended, context)
        current().jobs.append(job)
        self.pending += count
        self.jobs.add(job)
        self.worker.add(job)
        return job

    def ended(self, job: Job) -> None:
        self.pending -= len(job.answers)
        self.jobs.discard(job)
        self.observe_job(job)

    async def respond(
        self, http: HttpRequest, job: Job, body: Callable[[list[Update]], dict[str, Any]]
    ) -> Response | dict[str, Any]:
        """Wait for all answers, and return `body(updates)`; cancels the job if the client closes its connection."""

        async def collect() -> list[Update]:
            return [update async for updates in job.updates() for update in updates]

        try:
            updates = await unless_gone(http, collect())
        finally:
            if not job.closed:
                self.worker.cancel(job)
        if updates is None:
            return Response(status_code=499)  # nobody reads it
        for update in updates:
            if update.error:
                raise update.error
        return body(updates)

    def stream(
        self, http: HttpRequest, job: Job, events: Callable[[AsyncIterator[list[Update]]], AsyncIterator[str]]
    ) -> Response:
        """A stream of server-sent events; cancels the job if the client closes its connection."""

        async def body() -> AsyncIterator[str]:
            try:
                async for piece in events(checked(job)):
                    yield piece
            except Exception as error:  # the status is sent already
                status, content = body_of(error, await http.json())
                if status == 500:
                    LOG.exception("a stream failed")
                yield event(content)
                yield DONE
            finally:
                if not job.closed:
                    self.worker.cancel(job)

        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(body(), media_type="text/event-stream", headers=headers)


@lru_cache(maxsize=1000)  # each note once
def log_note(note: str) -> None:
    if note:
        LOG.warning(note)


async def checked(job: Job) -> AsyncIterator[list[Update]]:
    """Updates of a job; raises the exception of an answer that failed."""
    async for updates in job.updates():
        for update in updates:
            if update.error:
                raise update.error
        yield updates


async def unless_gone(http: HttpRequest, work: Awaitable[T]) -> T | None:
    """The result of `work`; None as soon as the client has closed its connection."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watch.cancel()


def service_of(http: HttpRequest) -> Service:
    service: Service = http.app.state.service
    return service
