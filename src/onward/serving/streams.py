"""Replies as JSON, whole or as server-sent events, the form in which the API streams."""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import JSONResponse

DONE = "data: [DONE]\n\n"


def text_of(value: Any) -> str:
    """JSON in one line; half a character, which UTF-8 cannot encode, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace").decode()


class JSONReply(JSONResponse):
    """A response as JSON, which may repeat any text of its request."""

    def render(self, content: Any) -> bytes:
        return text_of(content).encode()


def event(value: Any, name: str = "") -> str:
    return f"event: {name}\ndata: {text_of(value)}\n\n" if name else f"data: {text_of(value)}\n\n"
