"""A task about sums and differences of numbers (as in Brown et al. 2020, 3.9.1)."""

import random
from dataclasses import dataclass
from typing import Annotated

from onward.base.arguments import Range
from onward.evaluation.tasks.task import Question, Task


@dataclass(frozen=True)
class Arithmetic(Task, kind="arithmetic"):
    """A multiple-choice task: a sum or a difference such as `3 + 4 =`, and four numbers of similar size, one of which
    is the result."""

    digits: Annotated[int, Range(1, 9)] = 1  # maximum number of digits in each number

    def questions(self, count: int) -> list[Question]:
        rng, result = random.Random(0), []
        for _ in range(count):
            b, a = sorted(rng.randrange(10 ** (self.digits - 1) % 10, 10**self.digits) for _ in range(2))
            sign = rng.choice("+-")
            value = a + b if sign == "+" else a - b
            near = [other for other in range(max(0, value - 4), value + 5) if other != value]
            choices = sorted([value, *rng.sample(near, 3)])
            result.append(Question(f"{a} {sign} {b} =", tuple(f" {one}" for one in choices), choices.index(value)))
        return result
