"""A cloze task from any text: which of four continuations is the real one, as in HellaSwag (Zellers et al. 2019)."""

import random
from dataclasses import dataclass

from onward.base.errors import UserError
from onward.config.ranges import Size
from onward.evaluation.tasks.task import Question, TextTask


@dataclass(frozen=True)
class Cloze(TextTask, kind="cloze"):
    """A multiple-choice task made from a text: a passage, and four continuations to choose from, the words that really
    follow and the words that follow three other passages."""

    before: Size = 40  # number of words of the passage before the continuation
    after: Size = 8  # number of words in a continuation

    separator = "\n\n"

    def questions_of(self, text: str, count: int) -> list[Question]:
        words, size = text.split(), self.before + self.after
        passages = [words[start : start + size] for start in range(0, len(words) - size + 1, size)]
        if len(passages) < 4:
            raise UserError(f"the text has {len(words)} words, but cloze needs {4 * size}: name a longer text")
        rng = random.Random(0)
        continuations = [" " + " ".join(passage[self.before :]) for passage in passages]
        result = []
        for i in rng.sample(range(len(passages)), min(count, len(passages))):
            others = [j for j in rng.sample(range(len(passages)), 4) if j != i][:3]
            choices = [continuations[j] for j in (i, *others)]
            order = rng.sample(range(4), 4)
            context = " ".join(passages[i][: self.before])
            result.append(Question(context, tuple(choices[j] for j in order), order.index(0)))
        return result
