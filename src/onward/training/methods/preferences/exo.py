"""Exact preference optimization."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, log1p
from typing import TYPE_CHECKING, Annotated, ClassVar

from onward.base.arguments import Range
from onward.training.methods.preferences.pairs import ComparedPairs, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor

    from onward.training.losses.answers import Answers


@dataclass(frozen=True)
class EXO(ComparedPairs, kind="exo"):
    """Exact optimization of the alignment of two answers (Ji et al. 2024, equation 16): KL(q || p), where q = (s(beta
    m), s(-beta m)) are the probabilities that the model gives to the answers, and p = (1 - e, e). s is the logistic
    sigmoid, m the margin: the log-ratio to the reference of the chosen answer minus that of the rejected."""

    formula: ClassVar[str] = "s(beta m) log(s(beta m) / (1 - e)) + s(-beta m) log(s(-beta m) / e)"

    label_smoothing: Annotated[float, Range(1e-9, 0.5)] = 1e-3  # e: probability that the rejected answer is better

    def of_pairs(self, chosen: Answers, rejected: Answers) -> Tensor:
        m, e = self.beta * (chosen.ratio - rejected.ratio), self.label_smoothing
        return m.sigmoid() * (log_sigmoid(m) - log1p(-e)) + (-m).sigmoid() * (log_sigmoid(-m) - log(e))
