"""Word analogies, as in Mikolov et al. (2013): singular and plural, of the words of a text itself."""

import random
import re
from collections import Counter
from dataclasses import dataclass

from onward.errors import UserError
from onward.evaluation.tasks.task import Question, Task, text_of


@dataclass(frozen=True)
class Words(Task, kind="words"):
    """A task: three words with their plurals, a fourth word, and four plurals, of which one is its own."""

    file: str  # a text file

    def questions(self, count: int) -> list[Question]:
        seen = Counter(re.findall(r"[a-z]{3,}", text_of(self.file, self.kind)))
        known = sorted(word for word in seen if min(seen[word], seen[word + "s"]) > 1 and not word.endswith("s"))
        if len(known) < 7:
            raise UserError(f"{self.file} has {len(known)} words with a plural, and words needs 7: name a longer text")
        rng, result = random.Random(0), []
        for _ in range(count):
            *shown, asked, first, second, third = rng.sample(known, 7)
            choices = sorted(f" {word}s" for word in (asked, first, second, third))
            context = "".join(f"{word}: {word}s\n" for word in shown) + f"{asked}:"
            result.append(Question(context, tuple(choices), choices.index(f" {asked}s")))
        return result
