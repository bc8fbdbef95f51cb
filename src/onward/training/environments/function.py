"""A user-defined function as an environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onward.base.arguments import shown
from onward.base.errors import UserError
from onward.training.environments.environment import Replier, Talk
from onward.training.rewards.function import columns_of
from onward.training.rewards.reward import Completion, Seconds


@dataclass(frozen=True)
class Function(Talk, kind="function"):
    """A user-defined function that returns a list of replies, each a text or None; written in short as
    FILE.py:FUNCTION. Its arguments are `prompts`, `completions` and `answers`, lists of texts, and `turns`, a list of
    lists of texts.

    Other fields of the records are passed by name if the function has a parameter of this name, as for rewards. The
    function runs in a separate process; a call that takes longer than `seconds` is repeated once, then ends the run.
    """

    file: str = ""  # a Python file, which Onward executes
    name: str = ""  # name of the function
    seconds: Seconds = 60.0  # time limit for a call

    def open(self) -> Replier:
        from onward.base.function_worker import Worker

        worker = Worker(self.file, self.name)

        def replies(completions: Sequence[Completion]) -> list[str | None]:
            turns = [list(completion.turns) for completion in completions]
            values: list[Any] = list(worker.call(columns_of(completions) | {"turns": turns}, self.seconds))
            if len(values) != len(completions):
                raise UserError(
                    f"the environment {self.name} returned {len(values)} replies to {len(completions)} completions: "
                    "return one for each"
                )
            if wrong := [value for value in values if not isinstance(value, str | None)]:
                raise UserError(f"the environment {self.name} replied {shown(wrong[0])}: return a text, or None")
            return values

        return replies
