"""A server for tests, which runs in a thread on a free port."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from httpx._config import DEFAULT_TIMEOUT_CONFIG

import onward
from onward.cli import main
from onward.serving import EngineOptions, RequestLimits, Served, Service, load_served, make_app
from onward.serving.models import engines_of
from onward.serving.server import config_of, listen
from onward.serving.server_options import ConnectionLimits

from support.forked import Forked

DEFAULT_TIMEOUT_CONFIG.read = 60.0  # in seconds, since other tests may use all cores; httpx's default is 5
APP = "keys", "hosts", "origins", "observers"  # options of make_app


@dataclass
class Running:
    """A running server and its parts."""

    url: str
    service: Service
    served: Sequence[Served]

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Send a request; returns the response."""
        return httpx.post(self.url + path, json=body, timeout=60)

    def idle(self, within: float = 20.0) -> bool:
        """Return whether no request, row or block is in use, after waiting at most this many seconds."""
        end = time.monotonic() + within
        while time.monotonic() < end:
            if self.is_idle():
                return True
            time.sleep(0.02)
        return False

    def is_idle(self) -> bool:
        """Return whether no request, row or block is in use now."""
        engines = engines_of(self.served)
        rows = any(any(pool.ref_counts) for engine in engines for pool in engine.scheduler.manager.pools.values())  # type: ignore[attr-defined]
        busy = any(engine.busy for engine in engines)
        return not (busy or rows or self.service.accounts.pending or self.service.jobs or self.service.worker.jobs)


@contextmanager
def serving(
    model: Path | str | Sequence[Path | str],
    adapters: Sequence[str] = (),
    limits: RequestLimits | None = None,
    connections: ConnectionLimits | None = None,
    **options: Any,
) -> Iterator[Running]:
    """Serve models inside the `with` block. `options` are options of EngineOptions and of `make_app`, and
    `load_more`."""
    own = {name: options.pop(name) for name in APP if name in options}
    models = [str(one) for one in ([model] if isinstance(model, str | Path) else model)]
    load = lambda name, folders: onward.load(name, adapter_folder=[*folders])
    service = Service(limits or RequestLimits(), options.pop("load_more", None))
    served = service.load(lambda: load_served(models, adapters, EngineOptions(**options), load)).result()
    bound, app = listen("127.0.0.1", 0), make_app(service, **own)
    server = uvicorn.Server(config_of(app, connections or ConnectionLimits(), drain=2))
    service.open(served)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Running(f"http://127.0.0.1:{bound.getsockname()[1]}", service, served)
    finally:
        server.should_exit = True
        thread.join()
        service.close()
        service.worker.join()
        bound.close()


def started(*words: str, log: list[str] | None = None) -> tuple[Forked, str]:
    """Start `onward serve` on a free port; return its process and address, once it is ready. Its log lines are appended
    to `log`."""
    process = Forked(main, ["serve", *words, "--port", "0"])
    said: list[str] = [] if log is None else log
    for line in process.stderr:
        said.append(line)
        if "the page: " in line:
            # keeps reading, since the pipe would fill up
            threading.Thread(target=said.extend, args=(process.stderr,), daemon=True).start()
            return process, line.partition("the page: ")[2].split()[0].removesuffix("/")
    raise AssertionError("".join(said))
