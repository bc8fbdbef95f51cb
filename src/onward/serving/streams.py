"""Replies as JSON, whole or as server-sent events, the form in which the API streams."""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import JSONResponse

DONE = b"data: [DONE]\n\n"
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def line_of(value: Any) -> bytes:
    """JSON in one line; half a character, which UTF-8 cannot encode, becomes a question mark."""
    return ENCODER.encode(value).encode(errors="replace")


class JSONReply(JSONResponse):
    """A response as JSON, which may repeat any text of its request."""

    def render(self, content: Any) -> bytes:
        return line_of(content)


def event(value: Any, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return b"%bdata: %b\n\n" % (head, line_of(value))
