"""Rewards from a judge, a model on an OpenAI-compatible server, that grades single completions or compares
pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, permutations
from typing import TYPE_CHECKING, Annotated, ClassVar

from onward.base.arguments import Range
from onward.evaluation.judging import PAIR_PROMPT
from onward.training.rewards.reward import Completion, Reward, Seconds

if TYPE_CHECKING:
    from onward.evaluation.judging import JudgeServer

PROMPT = (
    "Rate how well the answer responds to the request, from 0 (useless) to 10 (perfect).\n\n"
    "Request:\n{prompt}\n\nAnswer:\n{completion}\n\nReply with the number alone."
)


@dataclass(frozen=True)
class AskedModel(Reward, kind=""):
    """The base class of rewards that ask a model on a server.

    The request is POST URL/chat/completions, in the format of OpenAI's API, with temperature 0. It is
    repeated while the server is busy, fails, or replies without a verdict; after 5 requests the run ends.
    """

    needed: ClassVar[tuple[str, ...]] = ()  # variables that the prompt must have

    url: str  # address up to /v1, such as http://localhost:8000/v1
    model: str  # name of the judge's model on the server
    prompt: str = ""
    key_env: str = "OPENAI_API_KEY"  # environment variable with the API key; if the variable is not set, no key is sent
    seconds: Seconds = 60.0  # time limit for a request
    concurrency: Annotated[int, Range(1, 1024)] = 8  # concurrent requests

    def __post_init__(self) -> None:
        from onward.evaluation.judging import check_judge

        super().__post_init__()
        check_judge(f"reward.{self.kind}", self.url, self.prompt, self.key_env, *self.needed)

    @property
    def server(self) -> JudgeServer:
        """The client of the server with the judge model."""
        from onward.evaluation.judging import JudgeServer

        return JudgeServer(self.url, self.model, self.key_env, self.seconds, self.concurrency)

    def filled(self, completion: Completion, /, **texts: str) -> str:
        """Return the request to the judge about a completion: the template `prompt`, filled with the completion's
        prompt, its answer, the other fields of its record, and `texts`, further values by placeholder name."""
        from onward.evaluation.judging import filled

        values = {"answer": completion.answer, **completion.columns, "prompt": completion.prompt, **texts}
        return filled(self.prompt, values)


@dataclass(frozen=True)
class Judge(AskedModel, kind="judge"):
    """A reward: a tenth of the grade that a model on a server gives to a completion. The grade is the first number from
    0 to 10 in the model's reply, after any reasoning. In `prompt`, the template of the request, {prompt}, {completion},
    {answer} and the names of other columns in braces are replaced by their texts."""

    needed: ClassVar[tuple[str, ...]] = ("completion",)

    prompt: str = PROMPT  # template, with fields {prompt}, {completion}, {answer} and {COLUMN}

    def scores(self, completions: Sequence[Completion]) -> list[float]:
        return self.server.grades([self.filled(one, completion=one.text) for one in completions])


@dataclass(frozen=True)
class Pairwise(AskedModel, kind="pairwise"):
    """A reward: the share of the other completions of the same prompt that a completion beats, as judged by a model on
    a server.

    The model compares each pair of completions in both orders, since judges have a position bias, and replies A or B.
    Two completions with the same text are a tie.
    """

    needed: ClassVar[tuple[str, ...]] = ("first", "second")

    prompt: str = PAIR_PROMPT  # template, with fields {prompt}, {first}, {second}, {answer} and {COLUMN}

    def scores(self, completions: Sequence[Completion]) -> list[float]:
        record = lambda i: (completions[i].prompt, completions[i].answer, completions[i].columns)
        groups = [[*group] for _, group in groupby(range(len(completions)), record)]
        pairs = [pair for group in groups for pair in permutations(group, 2)]
        differ = [(i, j) for i, j in pairs if completions[i].text != completions[j].text]
        texts = [self.filled(completions[i], first=completions[i].text, second=completions[j].text) for i, j in differ]
        preferences = dict(zip(differ, self.server.preferences(texts)))
        wins = [0.0] * len(completions)
        for i, j in pairs:
            share = preferences.get((i, j), 0.5)
            wins[i] += share / 2
            wins[j] += (1 - share) / 2
        return [wins[i] / max(1, len(group) - 1) for group in groups for i in group]
