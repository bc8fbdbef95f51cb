"""A model behind an OpenAI-compatible address that judges completions, as a reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from onward.arguments import Range
from onward.training.rewards.reward import Completion, Reward, Seconds

PROMPT = (
    "Rate how well the answer responds to the request, from 0 (useless) to 10 (perfect).\n\n"
    "Request:\n{prompt}\n\nAnswer:\n{completion}\n\nReply with the number alone."
)


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
        from onward.evaluation.judging import check_judge

        super().__post_init__()
        check_judge("reward.judge", self.url, self.prompt, self.key_env, "completion")

    def scores(self, completions: Sequence[Completion]) -> list[float]:
        from onward.evaluation.judging import JudgeServer, filled

        server = JudgeServer(self.url, self.model, self.key_env, self.seconds, self.concurrency)
        return server.grades([filled(self.prompt, self.values(completion)) for completion in completions])

    def values(self, completion: Completion) -> dict[str, object]:
        """Return the values of the variables in the prompt for a completion, by name: prompt, completion, answer and
        other fields of its record."""
        values = {**completion.columns, "prompt": completion.prompt, "completion": completion.text}
        values.setdefault("answer", completion.answer)
        return values
