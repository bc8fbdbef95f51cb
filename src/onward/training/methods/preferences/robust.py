"""Robust DPO, for pairs with some swapped answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from onward.base.arguments import Range
from onward.training.methods.preferences.pairs import ComparedPairs, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor

    from onward.training.losses.answers import Answers


@dataclass(frozen=True)
class Robust(ComparedPairs, kind="robust"):
    """Robust DPO, for data in which the answers of a share e of the pairs are swapped (Ray Chowdhury et al. 2024):
    in expectation, the loss of DPO on the correct pairs. s and m are those of DPO."""

    formula: ClassVar[str] = "(-(1 - e) log s(beta m) + e log s(-beta m)) / (1 - 2 e)"

    label_smoothing: Annotated[float, Range(0, 0.499999)] = 0.0  # e: share of pairs whose answers are swapped

    def of_pairs(self, chosen: Answers, rejected: Answers) -> Tensor:
        m, e = self.beta * (chosen.ratio - rejected.ratio), self.label_smoothing
        return (e * log_sigmoid(-m) - (1 - e) * log_sigmoid(m)) / (1 - 2 * e)
