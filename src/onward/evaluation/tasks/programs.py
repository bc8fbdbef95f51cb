"""A task whose answers are programs, which are run with tests."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from onward.base.arguments import Range
from onward.base.errors import UserError
from onward.config.ranges import Size
from onward.evaluation.kept import Kept
from onward.evaluation.programs import code_of, num_passed
from onward.evaluation.tasks.files import rows
from onward.evaluation.tasks.task import Question, Task
from onward.generation.options import GenerationOptions

KS = 1, 10, 100  # k of pass@k, as in Chen et al. (2021)
# texts that mark the end of a generated function
ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\nassert ", "\n```")


@dataclass(frozen=True)
class Programs(Task, kind="programs"):
    """Rows with the beginning of a program and tests, as in HumanEval (Chen et al. 2021). The score is pass@k, the
    probability that at least one of k programs passes all tests of its row.

    Runs code that the model writes, each program in a separate process with limits of time and memory and, on most
    Linux systems, without network (see `sandbox.py`); `run_code` must allow this. Without `k`, it is one task for each
    k of 1, 10 and 100 up to `samples`.
    """

    file: str  # .jsonl, .json or .csv with prompt and test (Python code); entry_point: argument of the test's check()
    samples: Size = 1  # number of programs to generate for each row
    k: Size | None = None  # k in pass@k, at most `samples`; default: 1, 10 and 100, up to `samples`
    temperature: Annotated[float, Range(0, 10)] = 0.0  # sampling temperature; 0.8 is usual with several samples
    tokens: Size = 512  # maximum number of tokens in a program
    seconds: Annotated[float, Range(0.1, 1e4)] = 10.0  # time limit for a program and its tests
    gigabytes: Annotated[float, Range(0.1, 1e4)] = 1.0  # memory limit in GiB for a program and its tests

    runs_code = True
    separator = "\n\n"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.k or 1) > self.samples:
            raise UserError(f"k is {self.k}, more than the {self.samples} samples of each row: give samples={self.k}")
        if self.samples > 1 and not self.temperature:
            raise UserError(f"samples is {self.samples}, but all are equal at temperature 0: give temperature=0.8")

    @property
    def label(self) -> str:
        return f"programs({Path(self.file).name}), pass@{self.k or 1}"

    def parts(self) -> Sequence["Programs"]:
        return [self] if self.k else [replace(self, k=k) for k in KS if k <= self.samples]

    def writing(self) -> GenerationOptions:
        return GenerationOptions(
            temperature=self.temperature, max_new_tokens=self.tokens, stop=ENDS, n=self.samples, seed=0
        )

    def questions(self, count: int) -> list[Question]:
        result = []
        for _, row in rows(self.file, self.kind, ("prompt", "test")):
            test = "\n".join([row["test"]] if isinstance(row["test"], str) else map(str, row["test"]))
            test += f"\ncheck({row['entry_point']})\n" if row.get("entry_point") else ""
            result.append(
                Question(str(row["prompt"]), expected=str(row.get("canonical_solution", "")), accepted=(test,))
            )
        return result[:count]

    def grades(self, answers: Sequence[Sequence[str]], questions: Sequence[Question], kept: Kept) -> list[float]:
        from onward.base.workers import available_cores

        programs = [
            (program_of(one.context, text), one.accepted[0]) for one, some in zip(questions, answers) for text in some
        ]
        with ThreadPoolExecutor(available_cores()) as threads:
            passed = list(threads.map(lambda program: self.passes(program[0], program[1], kept), programs))
        size, k = self.samples, self.k or 1
        counts = [sum(passed[i : i + size]) for i in range(0, len(passed), size)]
        return [pass_at(k, size, right) for right in counts]

    def passes(self, code: str, test: str, kept: Kept) -> bool:
        request: tuple[Any, ...] = ("run", code, test, self.seconds, self.gigabytes)
        if isinstance(stored := kept.get(*request), bool):
            return stored
        passed = num_passed(code, [test], self.seconds, self.gigabytes) == 1
        kept.add([(request, passed)])
        return passed


def program_of(prompt: str, text: str) -> str:
    """The last fenced code block of an answer or, without one, the prompt followed by the answer."""
    code = code_of(text)
    return prompt + text if code == text else code


def pass_at(k: int, samples: int, right: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) for n samples of which c pass (Chen et al. 2021, equation 1)."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)
