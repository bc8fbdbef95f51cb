"""A reward for code that passes tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from onward.base.arguments import Range, shown
from onward.base.errors import UserError
from onward.training.rewards.reward import Completion, Reward, Seconds, column


@dataclass(frozen=True)
class Code(Reward, kind="code"):
    """The share of a record's tests that Python code in the completion passes. The code is the completion's last fenced
    block or, without one, the whole completion.

    The tests are a text or a list of texts, such as `assert add(1, 2) == 3`. Each completion runs in a separate
    process, in a temporary folder, with limits on time and memory and, if the kernel supports them, on files, other
    processes and the network; see evaluation/sandbox.py.
    """

    tests: str = "tests"  # name of the column with the tests
    seconds: Seconds = 10.0  # time limit for the code and its tests
    gigabytes: Annotated[float, Range(0.1, 1e4)] = 1.0  # memory limit for the code and its tests

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.tests})

    def scores(self, completions: Sequence[Completion]) -> list[float]:
        from concurrent.futures import ThreadPoolExecutor

        from onward.base.workers import available_cores

        with ThreadPoolExecutor(available_cores()) as threads:
            return list(threads.map(self.score, completions))

    def score(self, completion: Completion) -> float:
        from onward.evaluation.programs import code_of, num_passed

        tests = tests_of(column(completion, self.tests, self.kind), self.tests)
        return num_passed(code_of(completion.text), tests, self.seconds, self.gigabytes) / len(tests)


def tests_of(value: Any, name: str) -> list[str]:
    """Return the tests in `value`, the content of the field `name` of a record, as a list of texts. Raises a UserError
    if it is neither a text nor a list of texts."""
    tests = [value] if isinstance(value, str) else value
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise UserError(f"{name} is {shown(value)}: give a text or a list of texts, tests in Python")
    return tests
