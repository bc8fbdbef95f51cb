"""Anchored preference optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from onward.training.methods.preferences.pairs import ComparedPairs

if TYPE_CHECKING:
    from torch import Tensor

    from onward.training.losses.answers import Answers


@dataclass(frozen=True)
class APO(ComparedPairs, kind="apo"):
    """Anchored preference optimization (D'Oosterlinck et al. 2024, equations 7 and 8). s is the logistic sigmoid, r an
    answer's log-ratio to the reference, and m = r(chosen) - r(rejected)."""

    formula: ClassVar[str] = (
        "zero: 1 - s(beta r(chosen)) + s(beta r(rejected)); down: s(beta r(chosen)) + 1 - s(beta m)"
    )

    variant: Literal["zero", "down"] = "zero"  # zero if chosen answers are better than the model's, down if worse

    def of_pairs(self, chosen: Answers, rejected: Answers) -> Tensor:
        c, r = self.beta * chosen.ratio, self.beta * rejected.ratio
        if self.variant == "zero":
            return (-c).sigmoid() + r.sigmoid()
        return c.sigmoid() + (r - c).sigmoid()
