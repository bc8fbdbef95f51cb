"""Identity preference optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.training.methods.preferences.pairs import ComparedPairs

if TYPE_CHECKING:
    from torch import Tensor

    from onward.training.losses.answers import Answers


@dataclass(frozen=True)
class IPO(ComparedPairs, kind="ipo"):
    """Identity preference optimization (Azar et al. 2023, equation 17), with log-ratios to the reference averaged over
    an answer's tokens, as computed by its authors. m is the log-ratio of the chosen answer minus that of the
    rejected."""

    formula: ClassVar[str] = "(m - 1 / (2 beta))^2, m of mean log-ratios"

    def of_pairs(self, chosen: Answers, rejected: Answers) -> Tensor:
        return (chosen.mean_ratio - rejected.mean_ratio - 1 / (2 * self.beta)).square()
