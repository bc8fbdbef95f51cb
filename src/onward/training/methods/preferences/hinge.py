"""The hinge loss of preferences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.training.methods.preferences.pairs import ComparedPairs

if TYPE_CHECKING:
    from torch import Tensor

    from onward.training.losses.answers import Answers


@dataclass(frozen=True)
class Hinge(ComparedPairs, kind="hinge"):
    """The hinge loss of SLiC (Zhao et al. 2023), with the reference of DPO. m is the chosen answer's log-ratio to the
    reference minus the rejected answer's."""

    formula: ClassVar[str] = "max(0, 1 - beta m)"

    def of_pairs(self, chosen: Answers, rejected: Answers) -> Tensor:
        return (1 - self.beta * (chosen.ratio - rejected.ratio)).relu()
