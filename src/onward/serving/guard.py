"""Checks of a request before any route: its host, key, limits and size, and the account of its work. Pure ASGI."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onward.planning.tables import byte_count
from onward.serving.account import Accounts
from onward.serving.errors import RETRY_AFTER, ApiError, error_body
from onward.serving.keys import Key, Keys
from onward.serving.request_log import current
from onward.serving.server_options import RequestLimits
from onward.serving.streams import DONE, event

PUBLIC = {
    "/health",
    "/v1/health",
    "/ready",
    "/",
    "/favicon.ico",
    "/docs",
    "/openapi.json",
    "/learn",
}  # paths that need no key
PUBLIC_FILES = "/page/", "/learn/"  # files of the page, chapters of the course
WORK = {"/api/roles"}  # paths that cause work, in addition to the POST routes
BODIES = 16  # maximum number of large bodies that are read at a time
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Guard:
    """Refuses requests with a foreign Host header (DNS rebinding), without a valid key (if there are keys, and the path
    is not public), beyond the limits of their key, or with a body beyond `max_body` bytes or with too many values, and
    adds security headers to the application's responses. A path may end with a slash, and HEAD is answered as GET. The
    key is in the scope as `key`.

    A request that causes work has an account from the moment that its body is complete. When its client closes the
    connection, the request and all its work are canceled."""

    def __init__(
        self, app: ASGIApp, *, keys: Keys, hosts: Sequence[str], limits: RequestLimits, accounts: Accounts
    ) -> None:
        self.app, self.keys, self.limits, self.accounts = app, keys, limits, accounts
        self.max_body = int(byte_count(limits.max_body, "max_body"))
        self.hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}
        self.reading = 0  # bytes of incomplete bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers, path = Headers(scope=scope), scope["path"].rstrip("/") or "/"
        host = headers.get("host")  # None for a load balancer with HTTP/1.0; browsers always send it
        if host is not None and not self.known_host(host):
            return await refuse(
                send, 403, f"the host {host[:200]!r} is not known here: start the server with --allow-host"
            )
        public = path in PUBLIC or path.startswith(PUBLIC_FILES) or scope["method"] == "OPTIONS"
        key = self.keys.find(sent_key(headers)) if self.keys else None
        if self.keys and not public and not key:
            current().note = "wrong key" if sent_key(headers) else "no key"
            return await refuse(send, 401, "the API key is missing or wrong: send it as Authorization: Bearer KEY")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.max_body:
            return await refuse(send, 413, self.too_large)

        started = False

        async def with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                own = MutableHeaders(scope=message)
                own["X-Content-Type-Options"], own["Referrer-Policy"] = "nosniff", "no-referrer"
                own.setdefault("Content-Security-Policy", POLICY)
            await send(message)

        method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the HTTP server leaves out the body
        scope = {**scope, "method": method, "path": path, "key": key}
        if key:
            current().key = key.name
        if method != "POST" and path not in WORK:
            return await self.app(scope, receive, with_headers)
        if refusal := key and self.keys.begin(key):
            message, seconds = refusal
            return await refuse(send, 429, message, seconds)
        try:
            body = await self.body(receive)
            client = f"key {key.name}" if key else (scope.get("client") or [""])[0]
            with self.accounts.open(client) as account:
                scope["state"] = {**scope.get("state", {}), "account": account}
                await self.answer(scope, body, receive, with_headers)
        except ApiError as error:
            if started:  # the status is sent: the error ends the stream
                last = event(error_body(str(error), error.status)) + DONE
                await send({"type": "http.response.body", "body": last})
            else:
                await refuse(send, error.status, str(error))
        except ClientDisconnect:
            pass  # no client reads a response
        finally:
            if key:
                self.keys.end(key)

    async def body(self, receive: Receive) -> bytes:
        """The whole body of a request. Raises an ApiError if it is too large or has too many values, or if too many
        large bodies are being read."""
        body, more = bytearray(), True
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                piece, more = message.get("body", b""), message.get("more_body", False)
                body += piece
                self.reading += len(piece)
                if len(body) > self.max_body:
                    raise ApiError(self.too_large, 413)
                if self.reading > BODIES * self.max_body:
                    raise ApiError("Cannot read more large bodies at a time: try again later", 429)
        finally:
            self.reading -= len(body)
        most = self.limits.max_values
        if body.count(b",") >= most and num_commas(body) >= most:
            raise ApiError(
                f"the body has more than {most:,} values, which is the limit (--max-values): send fewer", 413
            )
        return bytes(body)

    async def answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application on a request whose body is complete; cancel it if the client disconnects."""
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def once() -> Message:
            return messages.pop() if messages else await asyncio.get_running_loop().create_future()

        task = asyncio.ensure_future(self.app(scope, once, send))
        watch = asyncio.ensure_future(receive())  # returns when the client closes its connection
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            else:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        except asyncio.CancelledError:  # the server is ending, and no longer waits for this request
            task.cancel()
            raise ApiError("the server has shut down before the end of the answer: try again later", 503) from None
        finally:
            watch.cancel()

    @property
    def too_large(self) -> str:
        return f"the body has more than {self.max_body:,} bytes, which is the limit (--max-body): send fewer"

    def known_host(self, host: str) -> bool:
        """Whether a Host header is an IP address, or an accepted name of this server."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else host
        name = name.lower().strip("[]")
        if name in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def num_commas(body: bytes | bytearray) -> int:
    """The number of commas in JSON, outside of its strings."""
    data = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    inside = np.bitwise_xor.accumulate(data == ord('"'))
    return int(((data == ord(",")) & ~inside).sum())


def sent_key(headers: Headers) -> bytes:
    """The key that a client has sent; b"" without one."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return given.encode("latin-1")  # the bytes of the header


def check_admin(key: Key | None) -> None:
    """Raise an ApiError unless a request's key is that of an administrator."""
    if not (key and key.admin):
        raise ApiError("this needs a key with admin = true, from a file of --api-key-file that ends in .toml", 403)


async def refuse(send: Send, status: int, message: str, retry_after: int = 0) -> None:
    body = json.dumps(error_body(message, status)).encode()
    headers: list[Any] = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status in RETRY_AFTER:
        headers.append((b"retry-after", str(retry_after or RETRY_AFTER[status]).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
