"""A model on an OpenAI-compatible server that grades or compares texts. Does not import torch.

The request is POST URL/chat/completions, which OpenAI's servers and most others support, with temperature 0. The
request is repeated if the server is busy, fails, or replies without a verdict.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from onward.base.arguments import shown
from onward.base.errors import UserError
from onward.evaluation.endpoint import Repeat, chat

PAIR_PROMPT = (
    "Which answer responds better to the request?\n\nRequest:\n{prompt}\n\nAnswer A:\n{first}\n\n"
    "Answer B:\n{second}\n\nReply with A or B alone."
)
T = TypeVar("T")
NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?")
LETTER = re.compile(r"\b[AB]\b")
MOST = 10  # the best grade
# maximum number of requests; seconds before the second one, doubled for each further one
ATTEMPTS, WAIT = 5, 1.0


@dataclass(frozen=True)
class JudgeServer:
    """A model on an OpenAI-compatible server that judges texts."""

    url: str  # address of the judge up to /v1
    model: str  # name of the judge's model on the server
    key_env: str  # environment variable that holds the API key; if it is not set, no key is sent
    seconds: float  # time limit for a request
    concurrency: int  # maximum number of concurrent requests

    def grades(self, texts: Sequence[str], graded: Callable[[int, float], None] = lambda i, grade: None) -> list[float]:
        """Grades from 0 to 10, divided by 10; `graded` is called with each index and grade as soon as it is known."""
        return self.verdicts(texts, grade_in, f"a number from 0 to {MOST}", graded)

    def preferences(self, texts: Sequence[str]) -> list[float]:
        """1 for each reply that names answer A, 0 for B."""
        return self.verdicts(texts, preference_in, "either A or B alone")

    def replies(self, texts: Sequence[str]) -> list[str]:
        """The reply to each text."""
        return self.verdicts(texts, lambda reply: reply.strip() or None, "a text")

    def verdicts(
        self,
        texts: Sequence[str],
        read: Callable[[str], T | None],
        wanted: str,
        judged: Callable[[int, T], None] = lambda i, verdict: None,
    ) -> list[T]:
        """Send each text, several at a time. `read` extracts the verdict, or None, from the reply without a reasoning
        model's thoughts; `wanted` describes the verdict in errors."""

        def ask(i: int) -> T:
            verdict = self.verdict(texts[i], read, wanted)
            judged(i, verdict)
            return verdict

        with ThreadPoolExecutor(self.concurrency) as threads:
            waiting = [threads.submit(ask, i) for i in range(len(texts))]
            try:
                return [one.result() for one in waiting]
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def verdict(self, text: str, read: Callable[[str], T | None], wanted: str) -> T:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                reply = chat(self.url, self.model, text, self.key_env, self.seconds)
                if (grade := read(reply.rpartition("</think>")[2])) is None:
                    raise Repeat(f"replied {shown(reply)}, without {wanted}")
                return grade
            except Repeat as why:
                if attempt == ATTEMPTS:
                    raise UserError(
                        f"the judge {self.model} at {self.url} {why}, {ATTEMPTS} times: check the server"
                    ) from None
                time.sleep(max(WAIT * 2 ** (attempt - 1), why.wait))
        raise AssertionError("the last attempt returns or raises")


def check_judge(name: str, url: str, prompt: str, key_env: str, *needed: str) -> None:
    """Raise a UserError for invalid options of a judge. `needed` are fields that the prompt must contain, such as
    {answer}; `name` is the prefix of the options in errors."""
    if not re.match(r"https?://[^/]", url):
        raise UserError(f"{name}.url is {shown(url)}: give an address such as http://localhost:8000/v1")
    if lacking := next((one for one in needed if f"{{{one}}}" not in prompt), None):
        raise UserError(f"{name}.prompt is {shown(prompt)}: write {{{lacking}}} where it belongs")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key_env):
        raise UserError(f"{name}.key_env is not the name of an environment variable: do not give the key itself")


def filled(prompt: str, values: Mapping[str, Any]) -> str:
    """Replace {NAME} by its value; unknown names stay unchanged."""
    return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), prompt)


def grade_in(reply: str) -> float | None:
    """The first number from 0 to 10, divided by 10."""
    numbers = map(float, NUMBER.findall(reply))
    return next((number / MOST for number in numbers if number <= MOST), None)


def preference_in(reply: str) -> float | None:
    """1 for a reply that names A, 0 for B, None for both or neither."""
    letters = {*LETTER.findall(reply)}
    return float(letters == {"A"}) if len(letters) == 1 else None
