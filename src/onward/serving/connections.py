"""The server's connections: their number, and how long a client may take to send a request or to read its reply."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from onward.serving.server_options import ConnectionLimits

LOG = logging.getLogger("onward.serving")
RESERVED = 200  # descriptors for files, and for connections that are accepted in one turn of the event loop
BACKLOG = 64  # connections that the system queues, and that the server accepts in one turn of the event loop
REFUSAL = b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connections:
    """All open connections: at most `limits.max_connections`, and at most the descriptors of this process minus
    RESERVED, but at least 16. If there are more, the connection that has waited longest without a complete request is
    closed in favor of the new one; if none waits, the new one is refused."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.most = max(16, min(limits.max_connections, descriptors() - RESERVED))
        self.open: set[Connection] = set()
        self.waiting: dict[Connection, None] = {}  # connections that wait for a request, the oldest first
        self.full = False

    def protocol(self, **given: Any) -> Connection:
        return Connection(self, **given)

    def add(self, one: Connection) -> None:
        if len(self.open) >= self.most:
            if not self.full:
                LOG.warning("%d connections are open, which is the limit: idle ones are closed", self.most)
            self.full = True
            if not self.waiting:
                one.refuse(b"503 Service Unavailable")
                return
            oldest = next(iter(self.waiting))
            self.remove(oldest)
            oldest.transport.abort()
        self.open.add(one)
        self.waiting[one] = None

    def remove(self, one: Connection) -> None:
        self.open.discard(one)
        self.waiting.pop(one, None)
        if self.full and len(self.open) < 0.9 * self.most:
            LOG.warning("%d connections are open, below the limit of %d again", len(self.open), self.most)
            self.full = False


class Connection(H11Protocol):
    """A connection that is closed if its client takes too long to send a request or to read a reply."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.all, self.limits = connections, connections.limits
        self.timer: asyncio.TimerHandle | None = None
        self.app_state = {**self.app_state, "connection": self}  # in the state of each request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.all.add(self)
        self.within(self.limits.receive_timeout, self.too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self.within(0)
        self.all.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.answering:
            self.all.waiting.pop(self, None)
            self.within(0)
        elif self.timer is None and not self.transport.is_closing():
            self.within(self.limits.receive_timeout, self.too_slow)

    @property
    def answering(self) -> bool:
        """Whether a request is complete but its response is not."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        super().on_response_complete()  # this may begin the next request
        if self in self.all.open and not self.answering:
            self.all.waiting[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self.within(self.limits.send_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.within(0)

    def outlet(self) -> Outlet | None:
        """An outlet for the body of the response to the current request; None if the body is not sent in chunks, or if
        half of the allowed connections are open, since an outlet needs a descriptor."""
        spare = len(self.all.open) < self.all.most // 2
        return Outlet(self.transport, self.loop) if spare and self.scope["http_version"] == "1.1" else None

    def within(self, seconds: float, action: Callable[[], None] | None = None) -> None:
        """Call `action` after `seconds`, and cancel the call that is pending; without `action`, only cancel it."""
        if self.timer:
            self.timer.cancel()
        self.timer = self.loop.call_later(seconds, action) if action else None

    def too_slow(self) -> None:
        self.refuse(b"408 Request Timeout")

    def refuse(self, status: bytes) -> None:
        if self.cycle is None or not self.cycle.response_started:
            self.transport.write(REFUSAL % status)
        self.transport.close()
        self.within(self.limits.send_timeout, self.transport.abort)  # in case the client does not read this either


class Outlet:
    """Writes pieces of a response's body to the socket of a connection, from any thread. It may write only while it is
    `free`, when the event loop has nothing else to send over the connection."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.transport, self.loop = transport, loop
        self.socket = transport.get_extra_info("socket").dup()  # no other connection can get this descriptor

    @property
    def free(self) -> bool:
        return not self.transport.get_write_buffer_size()

    def write(self, body: bytes) -> bool:
        """Send a piece as a chunk; False if the event loop has to send the rest of it."""
        chunk, sent = b"%x\r\n%b\r\n" % (len(body), body), 0
        try:
            sent = self.socket.send(chunk)
        except BlockingIOError:
            pass
        except OSError:  # the client has disconnected; the event loop notices this, too
            return True
        if sent < len(chunk):
            self.loop.call_soon_threadsafe(self.transport.write, chunk[sent:])
        return sent == len(chunk)

    def close(self) -> None:
        self.socket.close()


def descriptors() -> int:
    """The number of descriptors that this process may have; raises its soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems have a lower limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
