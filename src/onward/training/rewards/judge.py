"""A model behind an OpenAI-compatible address that judges completions, as a reward."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

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
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(self.concurrency) as threads:
            waiting = [threads.submit(self.score, completion) for completion in completions]
            try:
                return [one.result() for one in waiting]
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def score(self, completion: Completion) -> float:
        from onward.training.rewards.endpoint import Repeat, chat

        text = self.filled(completion)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                reply = chat(self.url, self.model, text, self.key_env, self.seconds)
                if (found := grade(reply)) is None:
                    raise Repeat(f"replied {shown(reply)}, without a number from 0 to {MOST}")
                return found / MOST
            except Repeat as why:
                if attempt == ATTEMPTS:
                    raise UserError(f"the judge {self.model} at {self.url} {why}, {ATTEMPTS} times: mend it") from None
                time.sleep(max(WAIT * 2 ** (attempt - 1), why.wait))
        raise AssertionError("the last attempt returns or raises")

    def filled(self, completion: Completion) -> str:
        """Return the prompt of the judge for a completion."""
        values = {**completion.columns, "prompt": completion.prompt, "completion": completion.text}
        values.setdefault("answer", completion.answer)
        replaced = lambda match: str(values[match[1]]) if match[1] in values else match[0]
        return re.sub(r"\{(\w+)\}", replaced, self.prompt)


def grade(reply: str) -> float | None:
    """Return the first number from 0 to 10 in a reply, after its thoughts; None if it has none."""
    numbers = map(float, NUMBER.findall(reply.rpartition("</think>")[2]))
    return next((number for number in numbers if number <= MOST), None)
