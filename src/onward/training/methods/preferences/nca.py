"""Noise contrastive alignment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.training.methods.preferences.pairs import ComparedPairs, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor

    from onward.training.losses.answers import Answers


@dataclass(frozen=True)
class NCA(ComparedPairs, kind="nca"):
    """Noise contrastive alignment (Chen et al. 2024, for pairs): raises the probability of the chosen answer itself,
    not only relative to the rejected one. s is the logistic sigmoid, r an answer's log-ratio to the reference."""

    formula: ClassVar[str] = "-log s(beta r(chosen)) - (log s(-beta r(chosen)) + log s(-beta r(rejected))) / 2"

    def of_pairs(self, chosen: Answers, rejected: Answers) -> Tensor:
        c, r = self.beta * chosen.ratio, self.beta * rejected.ratio
        return -log_sigmoid(c) - 0.5 * log_sigmoid(-c) - 0.5 * log_sigmoid(-r)
