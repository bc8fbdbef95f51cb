"""A replay buffer of prompts of medium difficulty."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any


@dataclass(frozen=True)
class Question:
    """A prompt for completions, with the fields of its record (a row of the data) that rewards read."""

    prompt: tuple[int, ...]  # token ids
    answer: tuple[int, ...] = ()  # token ids of the record's answer
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)  # the other fields of the record


class Replay:
    """A buffer of the last `size` prompts whose completions had different rewards, each with the standard deviation of
    these rewards. A step draws prompts from it in place of prompts whose completions have equal rewards, which are too
    easy or too hard to learn from."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.deviations: dict[Question, float] = {}

    def note(self, question: Question, deviation: float) -> None:
        """Keep the prompt `question` with the standard deviation of its completions' rewards, or drop it if that is
        0."""
        self.deviations.pop(question, None)
        if deviation > 0:
            self.deviations[question] = deviation
        for oldest in list(self.deviations)[: -self.size or None]:
            del self.deviations[oldest]

    def draw(self, count: int, seed: int) -> list[Question]:
        """Draw up to `count` different kept prompts at random, with probabilities in proportion to the standard
        deviation of their completions' rewards."""
        random, left, drawn = Random(seed), dict(self.deviations), list[Question]()
        while left and len(drawn) < count:
            [question] = random.choices(list(left), list(left.values()))
            drawn.append(question)
            del left[question]
        return drawn

    def state(self) -> str:
        """Return the kept prompts and deviations as JSON text."""
        return json.dumps([[q.prompt, q.answer, q.columns, d] for q, d in self.deviations.items()])

    def load_state(self, text: str) -> None:
        """Restore the prompts from the text that `state` returned."""
        rows: Sequence[Any] = json.loads(text or "[]")
        self.deviations = {Question(tuple(p), tuple(a), columns): d for p, a, columns, d in rows}
