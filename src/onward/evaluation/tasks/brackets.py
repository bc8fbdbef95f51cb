"""A task about brackets, which close in the reverse order of opening."""

import random
from dataclasses import dataclass

from onward.config.ranges import Size
from onward.evaluation.tasks.task import Question, Task

PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}


@dataclass(frozen=True)
class Brackets(Task, kind="brackets"):
    """A multiple-choice task: a sequence of opening and closing brackets, and the four kinds of closing bracket, one of
    which closes the innermost bracket that is still open."""

    length: Size = 8  # minimum number of brackets in the context

    def questions(self, count: int) -> list[Question]:
        rng, result, closing = random.Random(0), [], tuple(PAIRS.values())
        for _ in range(count):
            sequence: list[str] = []
            open_: list[str] = []
            while len(sequence) < self.length or not open_:
                if open_ and rng.random() < 0.4:
                    sequence.append(PAIRS[open_.pop()])
                else:
                    open_.append(rng.choice(list(PAIRS)))
                    sequence.append(open_[-1])
            choices = tuple(" " + bracket for bracket in closing)
            result.append(Question(" ".join(sequence), choices, closing.index(PAIRS[open_[-1]])))
        return result
