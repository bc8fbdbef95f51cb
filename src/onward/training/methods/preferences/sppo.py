"""Self-play preference optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.training.methods.preferences.pairs import ComparedPairs

if TYPE_CHECKING:
    from torch import Tensor

    from onward.training.losses.answers import Answers


@dataclass(frozen=True)
class SPPO(ComparedPairs, kind="sppo"):
    """Self-play preference optimization (Wu et al. 2024, equation 4.7), where the chosen answer wins with probability
    1. r is an answer's log-ratio to the reference."""

    formula: ClassVar[str] = "(r(chosen) - 1 / (2 beta))^2 + (r(rejected) + 1 / (2 beta))^2"

    def of_pairs(self, chosen: Answers, rejected: Answers) -> Tensor:
        half = 1 / (2 * self.beta)
        return (chosen.ratio - half).square() + (rejected.ratio + half).square()
