"""Binary classifier optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.training.methods.preferences.pairs import ComparedPairs, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor

    from onward.training.losses.answers import Answers


@dataclass(frozen=True)
class BCO(ComparedPairs, kind="bco"):
    """Binary classifier optimization (Jung et al. 2024, with a reward shift of 0): the sign of r, an answer's log-ratio
    to the reference, classifies answers as chosen or rejected. s is the logistic sigmoid."""

    formula: ClassVar[str] = "-log s(beta r(chosen)) - log s(-beta r(rejected))"

    def of_pairs(self, chosen: Answers, rejected: Answers) -> Tensor:
        return -log_sigmoid(self.beta * chosen.ratio) - log_sigmoid(-self.beta * rejected.ratio)
