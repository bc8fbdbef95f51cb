"""A line in the log for each request, with its id, and the other observers of requests. Pure ASGI, around the guard, so
that refused requests have a line as well."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onward.serving.jobs import Job
from onward.serving.usage import usage_of
from onward.text.tokenizer import Tokenizer

LOG = logging.getLogger("onward.serving.requests")
SENT_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)  # a client's id that the log keeps
PLAIN = re.compile(r"[\w.:/+@,-]+", re.ASCII)  # a value that is written without quotation marks
LONGEST = 200  # largest number of characters of a value in a line
PROBES = {"/health", "/v1/health", "/ready", "/metrics"}  # polled every few seconds, so logged only at the level debug


@dataclass
class RequestRecord:
    """A request of a client, and its handling by the server. `began` is in seconds since 1970, `arrival` of
    `perf_counter`; `trace` is the header traceparent of the client."""

    id: str
    method: str
    path: str
    client: str = ""
    trace: str = ""
    key: str = ""  # name of the API key
    model: str = ""
    status: int = 0  # HTTP status; 0: the client disconnected before a response
    read: int = 0  # tokens read without generating any
    jobs: list[Job] = field(default_factory=list)
    tokenizer: Tokenizer | None = None
    note: str = ""  # the reason for a refusal, if the log should contain it
    began: float = field(default_factory=time.time)
    arrival: float = field(default_factory=perf_counter)
    seconds: float = 0.0  # from arrival to end

    @property
    def prompt_tokens(self) -> int:
        return self.read + sum(usage_of(job)["prompt_tokens"] for job in self.jobs)

    @property
    def new_tokens(self) -> int:
        return sum(usage_of(job)["completion_tokens"] for job in self.jobs)

    @property
    def first_token(self) -> float | None:
        """Seconds until the first token; None without one."""
        times = [job.first_token - self.arrival for job in self.jobs if job.first_token]
        return min(times, default=None)

    @property
    def finish_reasons(self) -> list[str]:
        return list(dict.fromkeys(one.finish_reason or "cancelled" for job in self.jobs for one in job.answers))

    def texts(self) -> dict[str, list[str]]:
        """The prompts and answers for the log, if it records them; else {}."""
        if self.tokenizer is None:
            return {}
        decode = self.tokenizer.decode
        answers = [request for job in self.jobs for request in job.answers]
        prompts = {id(request.prompt): request.prompt for request in answers}
        return {"prompts": [*map(decode, prompts.values())], "answers": [decode(one.tokens) for one in answers]}

    def fields(self) -> dict[str, Any]:
        """The fields of a line of the log, by name."""
        first, worked = self.first_token, self.read or self.jobs
        found = {
            "id": self.id,
            "key": self.key,
            "client": self.client if self.status in (401, 403) else "",
            "request": f"{self.method} {self.path}",
            "model": self.model,
            "prompt_tokens": self.prompt_tokens if worked else None,
            "new_tokens": self.new_tokens if worked else None,
            "first_token": None if first is None else round(first, 4),
            "seconds": round(self.seconds, 4),
            "finish": ",".join(self.finish_reasons),
            "status": self.status,
            "note": self.note,
        }
        return {name: value for name, value in found.items() if value not in ("", None)}


Observer = Callable[[RequestRecord], None]
CURRENT: ContextVar[RequestRecord] = ContextVar("CURRENT")


def current() -> RequestRecord:
    """The record of the request that this task answers; outside a request, an unused record."""
    return CURRENT.get(None) or RequestRecord("", "", "")


class RequestLog:
    """Gives each request an id, taken from the header X-Request-Id if the client has sent a valid one (SENT_ID), and
    calls `observers` with its record when it has ended."""

    def __init__(self, app: ASGIApp, *, observers: Sequence[Observer]) -> None:
        self.app, self.observers = app, observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers, sent = Headers(scope=scope), Headers(scope=scope).get("x-request-id", "")
        record = RequestRecord(
            sent if SENT_ID.fullmatch(sent) else secrets.token_hex(16),
            scope["method"],
            scope["path"],
            (scope.get("client") or ("",))[0],
            headers.get("traceparent", ""),
        )
        CURRENT.set(record)  # set in the request's own task

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = record.id
            await send(message)

        try:
            await self.app(scope, receive, with_id)
        except Exception:
            record.status = record.status or 500
            raise
        finally:
            record.seconds = perf_counter() - record.arrival
            for observe in self.observers:
                observe(record)


def log_request(record: RequestRecord, prompts: bool = False) -> None:
    """Write the line of a request; `prompts`: with its prompts and answers."""
    level = logging.DEBUG if record.path.rstrip("/") in PROBES and record.status != 401 else logging.INFO
    if LOG.isEnabledFor(level):
        fields = record.fields() | (record.texts() if prompts else {})
        words = (f"{name}={shown(value)}" for name, value in fields.items())
        LOG.log(level, "request %s", " ".join(words), extra={"fields": fields})


def shown(value: Any) -> str:
    """A value in one line, in quotation marks unless it is one plain word, so that no client's text can forge a
    line."""
    if not isinstance(value, str):
        return json.dumps(value)
    return value if PLAIN.fullmatch(value) and len(value) <= LONGEST else json.dumps(value[:LONGEST])
