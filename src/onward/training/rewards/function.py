"""A user-defined function as a reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from onward.base.arguments import Range
from onward.training.rewards.reward import Completion, Reward, Scorer, Seconds

if TYPE_CHECKING:
    from onward.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Function(Reward, kind="function"):
    """A user-defined function that returns a list of numbers; written in short as FILE.py:FUNCTION. Its arguments are
    `prompts`, `completions` and `answers`, lists of texts.

    Other fields of the records are passed as lists, by name, if the function has a parameter of this name or **kwargs.
    The function may be asynchronous. It runs in a separate process; a call that takes longer than `seconds` is repeated
    once, then ends the run.
    """

    file: str  # a Python file, which Onward executes
    name: str  # name of the function
    seconds: Seconds = 60.0  # time limit for a call
    processes: Annotated[int, Range(1, 1024)] = 1  # number of processes that share the completions of a step

    @property
    def label(self) -> str:
        return self.name

    def open(self, tokenizer: Tokenizer | None = None, device: str = "auto") -> Scorer:
        from concurrent.futures import ThreadPoolExecutor

        from onward.base.function_worker import Worker

        workers = [Worker(self.file, self.name) for _ in range(self.processes)]

        def scores(completions: Sequence[Completion]) -> list[Any]:
            size = -(-len(completions) // len(workers))
            parts = [columns_of(completions[i : i + size]) for i in range(0, len(completions), size)]
            with ThreadPoolExecutor(len(workers)) as threads:
                results = threads.map(lambda worker, part: worker.call(part, self.seconds), workers, parts)
                return [value for values in results for value in values]

        return scores


def columns_of(completions: Sequence[Completion]) -> dict[str, list[Any]]:
    """Return the arguments of a user-defined function by name: lists of the prompts, completions, answers and other
    fields of the records, with None for a record that lacks a field that other records have."""
    names = dict.fromkeys(name for completion in completions for name in completion.columns)
    return {name: [c.columns.get(name) for c in completions] for name in names} | {
        "prompts": [c.prompt for c in completions],
        "completions": [c.text for c in completions],
        "answers": [c.answer for c in completions],
    }
