"""What a request passes before any route: its host, key, limits and size. Pure ASGI, so that routes notice clients
that go."""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onward.serving.errors import ApiError, error_body
from onward.serving.keys import Key, Keys
from onward.serving.request_log import current

PUBLIC = {"/health", "/v1/health", "/ready", "/", "/favicon.ico", "/docs", "/openapi.json"}  # paths that need no key
PUBLIC_FILES = "/page/"  # files of the page
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Guard:
    """Refuses requests with a foreign Host header (DNS rebinding), without a valid key, beyond the limits of their key,
    or with a body beyond `max_body` bytes, and adds security headers to responses. A path may end with a slash, and
    HEAD is answered as GET. The key is in the scope as `key`."""

    def __init__(self, app: ASGIApp, *, keys: Keys, hosts: Sequence[str], max_body: int) -> None:
        self.app, self.keys, self.max_body = app, keys, max_body
        self.hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers, path = Headers(scope=scope), scope["path"].rstrip("/") or "/"
        if not self.known_host(headers.get("host", "")):
            message = (
                f"the host {headers.get('host', '')[:200]!r} is not known here: start the server with --allow-host"
            )
            return await refuse(send, 403, message)
        public = path in PUBLIC or path.startswith(PUBLIC_FILES) or scope["method"] == "OPTIONS"
        key = self.keys.find(sent_key(headers)) if self.keys else None
        if self.keys and not public and not key:
            current().note = "wrong key" if sent_key(headers) else "no key"
            return await refuse(send, 401, "the API key is missing or wrong: send it as Authorization: Bearer KEY")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.max_body:
            return await refuse(send, 413, self.too_large)
        read = 0

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.max_body:
                raise HTTPException(413, self.too_large)
            return message

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(scope=message)
                own["X-Content-Type-Options"], own["Referrer-Policy"] = "nosniff", "no-referrer"
                own.setdefault("Content-Security-Policy", POLICY)
            await send(message)

        method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the HTTP server leaves out the body
        inner = {**scope, "method": method, "path": path, "key": key}
        if not key:
            return await self.app(inner, bounded, with_headers)
        current().key = key.name
        if method != "POST":
            return await self.app(inner, bounded, with_headers)
        if refusal := self.keys.begin(key):
            message, seconds = refusal
            return await refuse(send, 429, message, seconds)
        try:
            await self.app(inner, bounded, with_headers)
        finally:
            self.keys.end(key)

    @property
    def too_large(self) -> str:
        return f"the body has more than {self.max_body:,} bytes, which is the limit (--max-body)"

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


def sent_key(headers: Headers) -> bytes:
    """The key that a client has sent; b"" without one."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return given.encode("latin-1")  # as the header had it


def check_admin(key: Key | None) -> None:
    """Raise an ApiError unless a request's key is one of an administrator."""
    if not (key and key.admin):
        raise ApiError("this needs a key with admin = true, from a file of --api-key-file that ends in .toml", 403)


async def refuse(send: Send, status: int, message: str, retry_after: int = 0) -> None:
    body = json.dumps(error_body(message, status)).encode()
    headers: list[Any] = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if retry_after:
        headers.append((b"retry-after", str(retry_after).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
