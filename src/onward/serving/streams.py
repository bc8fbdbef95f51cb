"""Server-sent events: the form in which the API streams."""

from __future__ import annotations

import json
from typing import Any

DONE = "data: [DONE]\n\n"


def event(value: Any, name: str = "") -> str:
    """Return the text of a server-sent event: a value as JSON, with its `name` unless that is ""."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"
