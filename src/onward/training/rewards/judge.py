"""A model behind an OpenAI-compatible address that judges completions, as a reward."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Annotated, Any

from onward.arguments import Range, shown
from onward.errors import UserError
from onward.training.rewards.reward import Completion, Reward, Seconds

PROMPT = (
    "Rate how well the answer responds to the request, from 0 (useless) to 10 (perfect).\n\n"
    "Request:\n{prompt}\n\nAnswer:\n{completion}\n\nReply with the number alone."
)
NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?")
MOST = 10  # the best grade
ATTEMPTS, WAIT = 5, 1.0  # requests for a grade, and seconds before the second one, twice as many before each further
LONGEST_WAIT = 60.0  # seconds that a server may ask to wait
REPLY = 1 << 20  # bytes of a reply at most
AGAIN = 408, 409, 425, 429, 500, 502, 503, 504, 529  # statuses after which a request is repeated


class Repeat(Exception):
    """Why a request is repeated, and the seconds that the server asks to wait."""

    def __init__(self, why: str, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait


@dataclass(frozen=True)
class Judge(Reward, kind="judge"):
    """A tenth of the grade from 0 to 10 that a model gives to a completion: the first such number in its reply, after
    its thoughts.

    The request is POST URL/chat/completions, as OpenAI's servers and most others take it, with temperature 0. It is
    repeated while the server is busy, fails, or replies without a grade; after 5 requests the run ends.
    """

    url: str  # up to /v1, such as http://localhost:8000/v1
    model: str  # its name on the server
    prompt: str = PROMPT  # in which {prompt}, {completion}, {answer} and {COLUMN} are replaced
    key_env: str = "OPENAI_API_KEY"  # name of the environment variable with the key; without it none is sent
    seconds: Seconds = 60.0  # that a request may take
    concurrency: Annotated[int, Range(1, 1024)] = 8  # requests at a time

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.match(r"https?://[^/]", self.url):
            raise UserError(f"reward.judge.url is {shown(self.url)}: give an address such as http://localhost:8000/v1")
        if "{completion}" not in self.prompt:
            raise UserError(f"reward.judge.prompt is {shown(self.prompt)}: write {{completion}} where that is to be")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.key_env):
            raise UserError("reward.judge.key_env is no name of an environment variable: the key itself is not given")

    def scores(self, completions: Sequence[Completion]) -> list[float]:
        with ThreadPoolExecutor(self.concurrency) as threads:
            waiting = [threads.submit(self.score, completion) for completion in completions]
            try:
                return [one.result() for one in waiting]
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def score(self, completion: Completion) -> float:
        text = self.filled(completion)
        for attempt in range(ATTEMPTS):
            try:
                return grade(self.reply(text)) / MOST
            except Repeat as why:
                reason = why
            if attempt + 1 < ATTEMPTS:
                time.sleep(max(WAIT * 2**attempt, reason.wait))
        raise UserError(f"the judge {self.model} at {self.url} {reason}, {ATTEMPTS} times: correct it, then resume")

    def filled(self, completion: Completion) -> str:
        """The prompt of the judge for a completion."""
        values = {**completion.columns, "prompt": completion.prompt, "completion": completion.text}
        values.setdefault("answer", completion.answer)
        replaced = lambda match: str(values[match[1]]) if match[1] in values else match[0]
        return re.sub(r"\{(\w+)\}", replaced, self.prompt)

    def reply(self, text: str) -> str:
        """The reply of the judge to a text. Repeat if it may succeed later, a UserError if it cannot."""
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "temperature": 0}
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.key_env):
            headers["Authorization"] = f"Bearer {key}"
        address = f"{self.url.rstrip('/')}/chat/completions"
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        try:
            with urllib.request.build_opener(NoRedirect).open(request, timeout=self.seconds) as response:
                return content(read(response, self.seconds))
        except urllib.error.HTTPError as error:
            with error:
                said = " ".join(error.read(1000).decode(errors="replace").split())
            if error.code in AGAIN:
                raise Repeat(
                    f"answered with status {error.code}", seconds_of(error.headers.get("Retry-After"))
                ) from None
            advice = f"set {self.key_env} to a key" if error.code in (401, 403) else "check url and model"
            raise UserError(
                f"the judge {self.model} at {self.url} refused with status {error.code} ({said:.200}): {advice}"
            ) from None
        except (OSError, HTTPException) as error:  # no connection, or one that broke
            raise Repeat(
                f"cannot be asked ({getattr(error, 'reason', None) or error or type(error).__name__})"
            ) from None


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirection, which would send the key to another server."""

    def redirect_request(self, *args: Any) -> None:
        return None


def read(response: HTTPResponse, seconds: float) -> bytes:
    """The body of a response, of at most REPLY bytes, which come within `seconds`."""
    body, until = b"", time.monotonic() + seconds
    while part := response.read1(1 << 16):
        body += part
        if len(body) > REPLY:
            raise Repeat(f"replied with more than {REPLY:,} bytes")
        if time.monotonic() > until:
            raise Repeat(f"took longer than {seconds:g} s")
    return body


def content(body: bytes) -> str:
    """The text of the message in a reply."""
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise Repeat(f"replied {shown(body.decode(errors='replace'))}, no chat completion")
    return text


def grade(reply: str) -> float:
    """The first number from 0 to 10 in a reply, after its thoughts."""
    numbers = map(float, NUMBER.findall(reply.rpartition("</think>")[2]))
    found = next((number for number in numbers if number <= MOST), None)
    if found is None:
        raise Repeat(f"replied {shown(reply)}, without a number from 0 to {MOST}")
    return found


def seconds_of(header: str | None) -> float:
    """The seconds in a Retry-After header; 0 without one, or for a date."""
    return min(float(header), LONGEST_WAIT) if header and header.isascii() and header.isdecimal() else 0.0
