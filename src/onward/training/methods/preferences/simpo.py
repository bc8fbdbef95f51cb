"""Simple preference optimization, without a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.config.ranges import BelowOne, NotNegative
from onward.training.methods.preferences.pairs import PairMethod, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor

    from onward.training.losses.answers import Answers


@dataclass(frozen=True)
class SimPO(PairMethod, kind="simpo"):
    """Simple preference optimization (Meng et al. 2024, equation 6), which needs no reference model. l is the mean log
    p of an answer's tokens, s the logistic sigmoid."""

    formula: ClassVar[str] = "-log s(beta (l(chosen) - l(rejected)) - gamma)"

    gamma: NotNegative = 0.5  # target margin by which the chosen answer should score higher
    label_smoothing: BelowOne = 0.0  # assumed share of pairs whose answers are swapped

    def of_pairs(self, chosen: Answers, rejected: Answers) -> Tensor:
        m = self.beta * (chosen.mean_logprob - rejected.mean_logprob) - self.gamma
        e = self.label_smoothing
        return -(1 - e) * log_sigmoid(m) - e * log_sigmoid(-m)
