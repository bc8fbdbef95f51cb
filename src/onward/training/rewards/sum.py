"""Weighted sums of rewards, and rewards that are ready to score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onward.base.errors import UserError
from onward.base.fields import SUM, notation
from onward.training.rewards.reward import Completion, Reward, finite

if TYPE_CHECKING:
    from onward.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sum(Reward, kind=SUM, internal=True):
    """A weighted sum of rewards, written as `exact + 0.2 * length(characters=100)`."""

    terms: tuple[tuple[float, Reward], ...]  # weights and rewards

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.terms:
            raise UserError("reward has no terms: write one, such as exact")
        if not all(math.isfinite(weight) for weight, _ in self.terms):
            raise UserError("a weight of reward is not a finite number: give a finite weight")
        names = [notation(reward) for _, reward in self.terms]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"reward has the term {twice[0]:.99} twice: write it once, with the sum of the weights")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(reward.needs for _, reward in self.terms))

    def open(self, tokenizer: Tokenizer | None = None, device: str = "auto") -> OpenReward:
        return OpenReward(self, tokenizer, device)


class OpenReward:
    """A reward that is ready to score, with its models loaded and its processes started: the K terms of a weighted sum,
    with their names and weights. A reward that is not a sum is its only term.

    The name of a term is its label or, if several terms have the same label, the term as the user wrote it.
    """

    def __init__(self, reward: Reward, tokenizer: Tokenizer | None = None, device: str = "auto") -> None:
        terms = reward.terms if isinstance(reward, Sum) else ((1.0, reward),)
        labels = [term.label for _, term in terms]
        self.names = [name if labels.count(name) == 1 else notation(term) for name, (_, term) in zip(labels, terms)]
        self.weights = [weight for weight, _ in terms]
        self.scorers = [term.open(tokenizer, device) for _, term in terms]

    def terms(self, completions: Sequence[Completion]) -> list[list[float]]:
        """Return the scores of the completions by each term of the sum: K lists with a finite number for each
        completion. The terms are scored in parallel, so that they wait for their processes and servers at the same
        time."""
        from concurrent.futures import ThreadPoolExecutor

        if len(self.scorers) == 1:  # in this thread, so that Ctrl-C interrupts it
            scores = [self.scorers[0](completions)]
        else:
            with ThreadPoolExecutor(len(self.scorers)) as threads:
                scores = list(threads.map(lambda scorer: scorer(completions), self.scorers))
        return [finite(some, completions, name) for some, name in zip(scores, self.names)]

    def __call__(self, completions: Sequence[Completion]) -> list[float]:
        """Return the weighted sum of the terms' scores of each completion."""
        return [math.fsum(map(float.__mul__, self.weights, scores)) for scores in zip(*self.terms(completions))]
