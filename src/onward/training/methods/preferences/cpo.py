"""Contrastive preference optimization, without a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.config.ranges import BelowOne
from onward.training.methods.preferences.pairs import PairMethod, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor

    from onward.training.losses.answers import Answers


@dataclass(frozen=True)
class CPO(PairMethod, kind="cpo"):
    """Contrastive preference optimization (Xu et al. 2024, equation 3), which needs no reference model. The paper's
    additional term, the likelihood of the chosen answer, is left out; `cpo + sft` adds it."""

    formula: ClassVar[str] = "-log s(beta (log p(chosen) - log p(rejected)))"

    label_smoothing: BelowOne = 0.0  # assumed share of pairs whose answers are swapped

    def of_pairs(self, chosen: Answers, rejected: Answers) -> Tensor:
        m, e = self.beta * (chosen.logprob - rejected.logprob), self.label_smoothing
        return -(1 - e) * log_sigmoid(m) - e * log_sigmoid(-m)
