"""Requests to an OpenAI-compatible server."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from http.client import HTTPException, HTTPResponse
from typing import Any

from onward.base.arguments import shown
from onward.base.errors import UserError

LONGEST_WAIT = 60.0  # maximum number of seconds to wait if a server asks for it
REPLY = 1 << 20  # maximum number of bytes in a reply
AGAIN = 408, 409, 425, 429, 500, 502, 503, 504, 529  # statuses after which a request is repeated


class Repeat(Exception):
    """Raised for a request that may succeed if it is sent again after `wait` seconds, as the server asks (0: no time
    named)."""

    def __init__(self, why: str, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait


def chat(url: str, model: str, text: str, key_env: str, seconds: float) -> str:
    """The reply of an OpenAI-compatible server to a user's message, at temperature 0: POST URL/chat/completions."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0}
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(key_env):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.build_opener(NoRedirect).open(request, timeout=seconds) as response:
            return content(read(response, seconds))
    except urllib.error.HTTPError as error:
        with error:
            reply = " ".join(error.read(1000).decode(errors="replace").split())
        if error.code in AGAIN:
            raise Repeat(f"answered with status {error.code}", seconds_of(error.headers.get("Retry-After"))) from None
        advice = f"set {key_env} to a key" if error.code in (401, 403) else "check url and model"
        raise UserError(
            f"the judge {model} at {url} refused with status {error.code} ({reply:.200}): {advice}"
        ) from None
    except (OSError, HTTPException) as error:  # no connection, or a broken one
        why = getattr(error, "reason", None) or error
        raise Repeat(f"cannot be asked ({why or type(error).__name__})") from None


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirection, which would send the API key to another server."""

    def redirect_request(self, *args: Any) -> None:
        return None


def read(response: HTTPResponse, seconds: float) -> bytes:
    body, until = b"", time.monotonic() + seconds
    while part := response.read1(1 << 16):
        body += part
        if len(body) > REPLY:
            raise Repeat(f"replied with more than {REPLY:,} bytes")
        if time.monotonic() > until:
            raise Repeat(f"took longer than {seconds:g} s")
    return body


def content(body: bytes) -> str:
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise Repeat(f"replied {shown(body.decode(errors='replace'))}, which is not a chat completion")
    return text


def seconds_of(header: str | None) -> float:
    """The seconds of a Retry-After header, at most LONGEST_WAIT; 0 without a header, or for a date."""
    return min(float(header), LONGEST_WAIT) if header and header.isascii() and header.isdecimal() else 0.0
