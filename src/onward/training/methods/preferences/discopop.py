"""DiscoPOP, a loss discovered by a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.config.ranges import Positive
from onward.training.methods.preferences.pairs import ComparedPairs, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor

    from onward.training.losses.answers import Answers


@dataclass(frozen=True)
class DiscoPOP(ComparedPairs, kind="discopop"):
    """The log-ratio modulated loss of pairs, found by a language model (Lu et al. 2024, equation 5); s is the logistic
    sigmoid, m the margin (the chosen answer's log-ratio to the reference minus the rejected answer's), and g =
    s(beta m / tau)."""

    formula: ClassVar[str] = "-(1 - g) log s(beta m) + g exp(-beta m)"

    tau: Positive = 0.05  # temperature of the mixture of the two terms

    def of_pairs(self, chosen: Answers, rejected: Answers) -> Tensor:
        m = self.beta * (chosen.ratio - rejected.ratio)
        g = (m / self.tau).sigmoid()
        return -(1 - g) * log_sigmoid(m) + g * (-m).exp()
