"""The server's state, and how it processes a request: from prompts to requests of the engine, to a response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import chain
from typing import Any, Literal, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import Response

from onward.base.errors import UserError
from onward.generation.check_request import PromptError, check_request
from onward.generation.constraint import language_of
from onward.generation.options import FORMS, GenerationOptions
from onward.generation.prompts import Prompt, requests_for, schema_note
from onward.generation.schemas import Claim
from onward.serving.account import Account, Accounts
from onward.serving.connections import Connection
from onward.serving.constraints.remote import Constraints
from onward.serving.edits import Edits, edited_for
from onward.serving.errors import ApiError, body_of
from onward.serving.jobs import Job, Update
from onward.serving.models import Served, engines_of
from onward.serving.request_log import current
from onward.serving.server_options import RequestLimits
from onward.serving.streams import EventStream, Streamed
from onward.serving.weight_files import WeightFiles
from onward.serving.worker import StepObserver, Worker

T = TypeVar("T")
LOG = logging.getLogger("onward.serving")
PROMPTS = 2048  # largest number of prompts in a request
ANSWERS = 128  # largest number of answers to a prompt
TOKENS = 1 << 22  # maximum of prompts x answers x tokens of each answer; 4 logprobs of a token count as a token
SHORT = 16_384  # largest number of characters of a prompt that is tokenized in some milliseconds
BRIEF = 2_048  # largest number of characters that are tokenized in less time than another thread takes to start


class Service:
    """The state of the server, used only in the event loop. `accounts` are those of the requests in progress.
    `load_more` loads a further model by its name; None: none can be added. `observe_job` is called with each job that
    ends, `observe_step` in the engines' thread after each step."""

    def __init__(self, limits: RequestLimits, load_more: Callable[[str], Sequence[Served]] | None = None) -> None:
        self.limits, self.load_more = limits, load_more
        self.state: Literal["loading", "ready", "draining"] = "loading"
        self.failure: UserError | None = None  # why the server accepts no more requests, if not because of a signal
        self.served: dict[str, Served] = {}
        self.accounts = Accounts(limits, self.num_rows)
        self.worker = Worker(lambda engine, new: self.observe_step(engine, new), limits.share, self.accounts.coming)
        self.constraints = Constraints(limits)
        self.jobs: set[Job] = set()
        self.threads = ThreadPoolExecutor(2, "onward-prompts")  # tokenize prompts
        self.long = ThreadPoolExecutor(1, "onward-long-prompts")  # tokenizes long prompts, which would delay others
        self.observe_job: Callable[[Job], None] = lambda job: None
        self.observe_step: StepObserver = lambda engine, new: None

    def load(self, load: Callable[[], Sequence[Served]]) -> Future[Sequence[Served]]:
        # OpenMP keeps a team of threads for each thread that has computed, and lets all of them sleep between two
        # kernels once there are more threads than cores: a decoding step then takes up to 1.5 times as long. So one
        # thread computes, and loads.
        def run() -> Sequence[Served]:
            served = load()
            self.worker.engines, self.worker.files = engines_of(served), WeightFiles()
            return served

        self.worker.start()
        return self.worker.call(run)

    def open(self, served: Sequence[Served]) -> None:
        self.served = {one.name: one for one in served}
        if self.state == "loading":
            self.state = "ready"

    def close(self) -> None:
        self.worker.stop()
        self.constraints.close()
        for threads in self.threads, self.long:
            threads.shutdown(wait=False, cancel_futures=True)

    def model(self, name: str | None) -> Served:
        """The model with this name, by default the first; raises an ApiError if it is unknown, or the server not
        ready."""
        self.check_ready()
        name = name or next(iter(self.served))
        if name not in self.served:
            known = ", ".join(self.served)
            raise ApiError(f"there is no model {name[:200]!r} here: choose {known}", 404, "model", "model_not_found")
        served, record = self.served[name], current()
        record.model, record.tokenizer = served.name, served.lm.tokenizer
        return served

    def num_rows(self) -> int:
        return sum(engine.scheduler.rows for engine in engines_of(list(self.served.values())))

    def check_ready(self) -> None:
        if self.state == "loading":
            raise ApiError("the model is being loaded: try again in some seconds", 503, code="loading")
        if self.failure:
            raise ApiError(str(self.failure), 503, code="failed")
        if self.state == "draining":
            raise ApiError(
                "the server is shutting down and accepts no more requests: try again later", 503, code="draining"
            )

    async def compute(self, function: Callable[..., T], *args: Any, size: int = 0) -> T:
        """Call a function in a thread that tokenizes prompts, so that the event loop keeps running; `size` is the
        number of characters of the prompts, 0 if the time does not depend on it. Very short texts are processed at
        once, without a thread."""
        if 0 < size <= BRIEF:
            return function(*args)
        threads = self.threads if size <= SHORT else self.long
        return await asyncio.get_running_loop().run_in_executor(threads, function, *args)

    async def in_engine(self, function: Callable[[], T]) -> T:
        """Call a short function in the engine's thread between two steps."""
        return await asyncio.wrap_future(self.worker.call(function))

    async def beside(self, pieces: Generator[None, None, T]) -> T:
        """The result of work that runs a model in the engine's thread, alternating with decoding: after each decoding
        step at most one of its `pieces`."""
        return await asyncio.wrap_future(self.worker.beside(pieces))

    async def submit(
        self,
        account: Account,
        served: Served,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        label: str,
        edits: Edits | None = None,
        claims: Callable[[Sequence[int]], list[Claim]] | None = None,
    ) -> Job:
        """Start to generate answers for `account`; `edits` switches off parts of the model for these prompts alone,
        and `claims` returns the claims to check, given the tokens of a complete answer (default: of its constraint).
        Raises a UserError for requests that can never be answered, and an ApiError with status 429 if too many answers
        wait already."""
        engine = served.engine
        if not prompts:
            raise ApiError("prompt is an empty list: give at least one prompt", param="prompt")
        if len(prompts) > PROMPTS or options.n > ANSWERS:
            many = f"prompt has {len(prompts)} texts: give at most {PROMPTS:,}"
            raise UserError(many if len(prompts) > PROMPTS else f"n is {options.n}: give at most {ANSWERS}")
        count, most = len(prompts) * options.n, engine.scheduler.rows + self.limits.max_queue
        longest = engine.length if options.max_new_tokens is None else options.max_new_tokens
        if count * longest * (1 + (options.logprobs or 0) // 4) > TOKENS:
            raise UserError(
                f"max_new_tokens is {longest}, so that {count} answers would have more "
                f"than {TOKENS:,} tokens: ask for fewer answers, or shorter ones"
            )
        if count > most:
            raise UserError(
                (f"n is {options.n}" if options.n > 1 else f"prompt has {len(prompts)} texts")
                + f": {count} answers are more than the {most} that may be pending; ask for fewer at a time"
            )

        def prepare() -> dict[Any, Any]:
            answers = requests_for(engine, tokenizer, prompts, options, form)
            log_note(schema_note(options))
            for number, request in enumerate(answers):
                request.adapter = served.adapter
                try:
                    check_request(request, engine.model.config, engine.length, None)
                except PromptError as error:
                    error.index = number // options.n if len(prompts) > 1 else None
                    raise
            return answers

        names = edits.names(served.lm.model) if edits else []
        account.grow(count)
        tokenizer, form = served.lm.text(), None
        constrained = any(getattr(options, name) for name in FORMS)
        if constrained and (language := await self.compute(language_of, tokenizer, options)):
            ends = {*engine.stop_token_ids, *options.stop_token_ids}
            form = await self.constraints.start(language, tokenizer, engine.model.config.vocab_size, ends)
        answers = await self.compute(prepare, size=0 if constrained or count > 1 else len(prompts[0]))
        self.check_ready()
        context = edited_for(served.lm.model, names, answers) if names else nullcontext()
        unread = self.limits.max_unread, self.worker.wait_for_client
        job = Job(engine, answers, label, account.client, self.ended, context, *unread)
        if claims is None and form is not None:
            claims = form.claims
        if claims is not None:
            job.check_answers(partial(self.constraints.problem, claims))
        current().jobs.append(job)
        self.jobs.add(job)
        account.ends.callback(self.cancel, job)
        account.arrive()
        self.worker.add(job)
        return job

    def ended(self, job: Job) -> None:
        self.jobs.discard(job)
        self.observe_job(job)

    async def respond(self, job: Job, body: Callable[[list[Update]], dict[str, Any]]) -> dict[str, Any]:
        """Wait for all answers, and return `body(updates)`."""
        updates = [update async for updates in job.updates() for update in updates]
        for update in updates:
            if update.error:
                raise update.error
        return body(updates)

    def stream(self, http: HttpRequest, job: Job, reply: Streamed) -> Response:
        """A stream of server-sent events."""
        connection: Connection | None = getattr(http.state, "connection", None)  # None: not in Onward's server
        if connection and len(job.answers) == 1 and (outlet := connection.outlet()):
            account_of(http).ends.callback(outlet.close)
            job.write_to(outlet, reply.growth)

        async def body() -> AsyncIterator[bytes]:
            try:
                if beginning := b"".join(reply.beginning()):
                    yield beginning
                async for updates in checked(job):
                    yield b"".join(chain.from_iterable(map(reply.growth, updates)))
                yield b"".join(reply.ending())
            except Exception as error:  # the status is sent already
                status, content = body_of(error, await http.json())
                if status == 500:
                    LOG.exception("a stream failed")
                yield b"".join(reply.failure(content))

        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return EventStream(body(), headers=headers)

    def cancel(self, job: Job) -> None:
        if not job.closed:
            self.worker.cancel(job)


@lru_cache(maxsize=1000)  # so that each note is logged once
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


def service_of(http: HttpRequest) -> Service:
    service: Service = http.app.state.service
    return service


def account_of(http: HttpRequest) -> Account:
    account: Account = http.state.account
    return account
