"""The server's process: its socket, its signals, and the models, which are loaded while it already listens."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from onward.base.errors import UserError
from onward.serving.app import make_app
from onward.serving.connections import BACKLOG, Connections
from onward.serving.models import Served
from onward.serving.server_options import ConnectionLimits, Listening, check_listening
from onward.serving.service import Service
from onward.serving.spans import Spans

LOG = logging.getLogger("onward.serving")
LEAVE = 10.0  # seconds that the engine's thread may take for its last step, or a compilation


def listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        if isinstance(error, socket.gaierror):
            raise UserError(
                f"Cannot listen on {host!r}, which is not an address of this machine: give another --host"
            ) from None
        raise UserError(
            f"Cannot listen on port {port} of {host} ({error.strerror}): choose another with --port"
        ) from None
    return bound


def config_of(app: FastAPI, limits: ConnectionLimits, drain: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connections(limits).protocol,  # type: ignore[arg-type]  # a function that makes a protocol
        ws="none",
        log_config=None,
        log_level="critical",  # the application logs its failures, and Connections when its limit is reached
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(drain)),
        timeout_keep_alive=max(1, round(limits.keep_alive)),
        server_header=False,
    )


class Server(uvicorn.Server):
    """After the first SIGINT or SIGTERM, running answers may finish within the graceful timeout; a second one ends the
    server at once. SIGHUP calls `reload`."""

    def __init__(self, config: uvicorn.Config, service: Service, reload: Callable[[], None] | None) -> None:
        super().__init__(config)
        self.service, self.reload = service, reload

    def read_keys_again(self) -> None:
        assert self.reload
        try:
            self.reload()
        except UserError as error:
            LOG.error("%s; the keys stay as they were", error)
        else:
            LOG.info("the keys were read again")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.service.state, self.should_exit = "draining", True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # unlike uvicorn's, it does not raise the signals again at the end, so that the process ends with status 0
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        if self.reload:  # in the event loop: a handler could interrupt the log while it holds its lock, and wait for it
            before[signal.SIGHUP] = signal.getsignal(signal.SIGHUP)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.read_keys_again)
        try:
            yield
        finally:
            if self.reload:
                asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    options: Listening,
    load: Callable[[], Sequence[Served]],
    ready: Callable[[str, Sequence[Served]], None],
    load_more: Callable[[str], Sequence[Served]] | None = None,
) -> None:
    """Listen, load the models, and answer requests until a signal; `ready` is called with the address and the loaded
    models, and `load_more` with the name of a model that an administrator adds. Raises a UserError if it cannot listen
    on the address, and any exception of `load`."""
    check_listening(options)
    keys, spans = options.keys(), Spans(options.otlp_traces_endpoint) if options.otlp_traces_endpoint else None
    bound, service = listen(options.host, options.port), Service(options, load_more)
    failures: list[BaseException] = []
    name = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{name}:{bound.getsockname()[1]}"

    async def begin() -> None:
        try:
            served = await asyncio.wrap_future(service.load(load))
        except asyncio.CancelledError:  # canceled by a signal
            return
        except BaseException as error:
            failures.append(error)
            server.should_exit = True
            return
        service.open(served)
        service.worker.compile_when_idle()
        ready(address, served)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.ensure_future(begin())
        yield
        loading.cancel()
        service.close()

    app = make_app(
        service,
        keys=keys,
        hosts=(options.host, *options.allow_host),
        origins=options.allow_origin,
        log_prompts=options.log_prompts,
        observers=[spans] if spans else [],
    )
    app.router.lifespan_context = lifespan

    def stop(error: UserError) -> None:
        service.failure = error
        failures.append(error)
        service.state, server.should_exit = "draining", True

    service.worker.on_failure = stop
    reload = (lambda: app.state.keys.replace(options.keys())) if options.api_key_file else None
    server = Server(config_of(app, options, options.drain), service, reload)
    with bound:
        server.run(sockets=[bound])
    if service.worker.is_alive():
        service.worker.join(LEAVE)  # a thread that runs machine code may crash while Python ends
    if spans:
        spans.close()
    if failures:
        raise failures[0]
