"""Copying a sequence seen before, the task of induction heads (Olsson et al. 2022)."""

import random
from dataclasses import dataclass

from onward.config.ranges import Size
from onward.evaluation.tasks.task import Question, Task

WORDS = (
    *("time", "way", "day", "man", "thing", "world", "life", "hand", "part", "child", "eye", "place", "work"),
    *("week", "case", "point", "number", "group", "fact", "home"),
)


@dataclass(frozen=True)
class Copying(Task, kind="copying"):
    """A multiple-choice task: a random sequence of words, the beginning of the same sequence again, and four of its
    words, one of which comes next."""

    words: Size = 8  # number of words in the sequence, limited to 4 ... 20

    def questions(self, count: int) -> list[Question]:
        rng, result = random.Random(0), []
        size = max(4, min(self.words, len(WORDS)))
        for _ in range(count):
            sequence = rng.sample(WORDS, size)
            at = rng.randrange(1, size)
            wrong = rng.sample([word for word in sequence if word != sequence[at]], 3)
            choices = sorted([sequence[at], *wrong])
            context = " " + " ".join([*sequence, *sequence[:at]])
            result.append(Question(context, tuple(" " + word for word in choices), choices.index(sequence[at])))
        return result
