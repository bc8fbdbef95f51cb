"""The application: its routes and how it reports errors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import get_type_hints

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles

from onward.base.errors import UserError
from onward.serving import (
    admin,
    chat,
    completions,
    embeddings,
    inside,
    listing,
    live,
    metrics,
    pages,
    reference,
    responses,
    tokens,
)
from onward.serving.errors import RETRY_AFTER, body_of, error_body
from onward.serving.guard import Guard
from onward.serving.keys import Key, Keys
from onward.serving.metrics import ServerMetrics
from onward.serving.request_log import Observer, RequestLog, RequestRecord, current, log_request
from onward.serving.service import Service
from onward.serving.shapes import mistake, shown
from onward.serving.streams import JSONReply

LOG = logging.getLogger("onward.serving")
ABOUT = (
    "Serves models through an API compatible with OpenAI's. The fields of a request have the names of OpenAI, vLLM and "
    "llama.cpp."
)


def make_app(
    service: Service,
    *,
    keys: Sequence[str | Key] = (),
    hosts: Sequence[str] = (),
    origins: Sequence[str] = (),
    log_prompts: bool = False,
    observers: Sequence[Observer] = (),
) -> FastAPI:
    """The application of a Service. `keys` are accepted API keys (empty: none is needed), `hosts` additional names that
    a Host header may have, `origins` the web sites whose pages may call the server. Each request has a line in the log
    `onward.serving.requests`, with its prompts and answers if `log_prompts`; `observers` are called with the record of
    each request when it has ended. `app.state.keys.replace` changes the keys."""
    # /docs is our own page: FastAPI's loads a script from another host, which the Content-Security-Policy forbids
    app = FastAPI(title="Onward", description=ABOUT, docs_url=None, redoc_url=None, default_response_class=JSONReply)
    app.state.service, app.state.metrics = service, ServerMetrics(service)
    app.state.logits, app.state.roles, app.state.keys = inside.Logits(), {}, Keys(keys)
    service.observe_job, service.observe_step = app.state.metrics.job, app.state.metrics.step
    for routes in (
        *(completions, chat, responses, embeddings, tokens, listing, metrics, inside, live, pages, reference),
        admin,
    ):
        app.include_router(routes.router)
    app.mount("/page", StaticFiles(directory=pages.FOLDER))
    app.add_middleware(Guard, keys=app.state.keys, hosts=hosts, limits=service.limits, accounts=service.accounts)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=[*origins], allow_methods=["*"], allow_headers=["*"])
    watching = partial(log_request, prompts=log_prompts), app.state.metrics.request, partial(charge, app.state.keys)
    app.add_middleware(RequestLog, observers=[*watching, *observers])
    app.add_exception_handler(UserError, failed)
    app.add_exception_handler(Exception, failed)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    return app


def charge(keys: Keys, record: RequestRecord) -> None:
    keys.charge(record.key, record.prompt_tokens + record.new_tokens)


async def failed(request: Request, error: Exception) -> JSONReply:
    sent = await request.json() if isinstance(error, UserError) and request.method == "POST" else None
    status, body = body_of(error, sent)
    if status == 500:
        LOG.error("the request %s failed", current().id, exc_info=error)
    headers = {"X-Request-Id": current().id} if status == 500 else {}  # no middleware adds headers to this response
    if status in RETRY_AFTER:
        headers["Retry-After"] = RETRY_AFTER[status]
    return JSONReply(body, status, headers=headers)


async def refused(request: Request, error: Exception) -> JSONReply:
    # raised for an unknown path, a wrong method, a body that cannot be read, or a list of too many items
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 400:  # raised while reading the body
        message = "the body is not JSON in UTF-8, has a number of too many digits, or nests too deep: send an object"
    if error.status_code in (404, 405):
        message = f"there is no {request.method} {request.url.path[:200]} here: see /docs"
    return JSONReply(error_body(message, error.status_code), error.status_code, headers=error.headers)


async def invalid(request: Request, error: Exception) -> JSONReply:
    """Describe the first mistake of a request's body in one sentence."""
    assert isinstance(error, RequestValidationError)
    first, kind = error.errors()[0], request.headers.get("content-type")
    param = None
    if first["type"] == "json_invalid":
        message = f"the body is not JSON ({first['ctx']['error']} at character {first['loc'][1]}): send an object"
    elif isinstance(error.body, bytes):
        given = f"is {shown(kind)}" if kind else "is missing"
        message = f"the header Content-Type {given}: send the body as application/json"
    elif error.body is None or not isinstance(error.body, dict):
        given = f"is {shown(error.body)}" if error.body is not None else "is missing"
        message = f"the body {given}: send a JSON object"
    else:
        found = mistake(get_type_hints(request.scope["endpoint"])["body"], error.body)
        assert found is not None, "pydantic found one"
        param, problem = found
        message = f"{param} {problem}"
    return JSONReply(error_body(message, 400, param), 400)
