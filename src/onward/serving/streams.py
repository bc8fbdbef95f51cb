"""Replies as JSON, whole or as server-sent events, the format in which the API streams."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from onward.serving.jobs import Update

DONE = b"data: [DONE]\n\n"
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def line_of(value: Any) -> bytes:
    """JSON in one line; an unpaired surrogate, which UTF-8 cannot encode, becomes a question mark."""
    return ENCODER.encode(value).encode(errors="replace")


class JSONReply(JSONResponse):
    """A response as JSON, which may repeat any text of its request."""

    def render(self, content: Any) -> bytes:
        return line_of(content)


class EventStream(StreamingResponse):
    """A stream of server-sent events. It does not run its own task that waits for the client to disconnect, since the
    guard does this for each request."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


def event(value: Any, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return b"%bdata: %b\n\n" % (head, line_of(value))


class Streamed(ABC):
    """A reply as server-sent events, in the order of its methods; a reply that fails ends with a `failure`."""

    def beginning(self) -> Iterator[bytes]:
        """Events before the first token."""
        return iter(())

    @abstractmethod
    def growth(self, update: Update) -> Iterator[bytes]:
        """Events for the new tokens of one answer."""

    def ending(self) -> Iterator[bytes]:
        """Events after the last token."""
        yield DONE

    def failure(self, error: Mapping[str, Any]) -> Iterator[bytes]:
        """Events of an error, which is given in the format of the API."""
        yield event(error)
        yield DONE
