"""Word analogies, as in Mikolov et al. (2013), with the words of any text."""

import random
import re
from collections import Counter
from dataclasses import dataclass

from onward.base.errors import UserError
from onward.evaluation.tasks.task import Question, TextTask


@dataclass(frozen=True)
class Words(TextTask, kind="words"):
    """A multiple-choice task made from the words of a text: three words with their plurals (or forms with another
    ending), a fourth word, and four plurals, one of which is the plural of the fourth word."""

    ending: str = "s"  # ending of the second word of a pair: s, ed, ing, ly, ...

    def questions_of(self, text: str, count: int) -> list[Question]:
        seen, end = Counter(re.findall(r"[a-z]{3,}", text)), self.ending
        known = sorted(word for word in seen if min(seen[word], seen[word + end]) > 1 and not word.endswith(end))
        if not end or len(known) < 7:
            num_words = f"{len(known)} words that occur with and without the ending {end!r}"
            raise UserError(f"the text has {num_words}, but words needs 7: name a longer text")
        rng, result = random.Random(0), []
        for _ in range(count):
            *shown, asked, first, second, third = rng.sample(known, 7)
            choices = sorted(f" {word}{end}" for word in (asked, first, second, third))
            context = "".join(f"{word}: {word}{end}\n" for word in shown) + f"{asked}:"
            result.append(Question(context, tuple(choices), choices.index(f" {asked}{end}")))
        return result
