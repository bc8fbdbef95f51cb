"""In-context learning: a mapping that only the examples in the prompt define."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from onward.config.ranges import SizeOrZero
from onward.evaluation.tasks.copying import WORDS
from onward.evaluation.tasks.task import Question, Task

COUNTS = 0, 1, 2, 4, 8  # numbers of examples


@dataclass(frozen=True)
class Mapping(Task, kind="mapping"):
    """A multiple-choice task of in-context learning. Each question has four words, each with a random partner word;
    examples show them as `word: partner`, and the question asks for the partner of one word.

    Without `shots`, it is five tasks with 0, 1, 2, 4 and 8 examples, whose scores show the curve of in-context
    learning. Four examples show each pair once, and eight twice.
    """

    shots: SizeOrZero | None = None  # number of examples in the prompt; default: 0, 1, 2, 4 and 8, each with a result

    @property
    def label(self) -> str:
        return f"{self.kind}, {self.shots} examples"

    def parts(self) -> Sequence[Task]:
        return [self] if self.shots is not None else [Mapping(shots=count) for count in COUNTS]

    def questions(self, count: int) -> list[Question]:
        rng, result = random.Random(0), []
        for _ in range(count):
            words = rng.sample(WORDS, 8)
            pairs = list(zip(words[:4], words[4:]))
            rounds = [pair for _ in range(1 + (self.shots or 0) // 4) for pair in rng.sample(pairs, 4)]
            asked = rng.randrange(4)
            lines = [f"{key}: {value}\n" for key, value in rounds[: self.shots or 0]]
            choices = tuple(f" {value}" for value in words[4:])
            result.append(Question("".join(lines) + f"{pairs[asked][0]}:", choices, asked))
        return result
