"""Direct preference optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.config.ranges import BelowOne, Share
from onward.training.methods.preferences.pairs import ComparedPairs, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor

    from onward.training.losses.answers import Answers


@dataclass(frozen=True)
class DPO(ComparedPairs, kind="dpo"):
    """Direct preference optimization (Rafailov et al. 2023, equation 7). s is the logistic sigmoid, m the margin: the
    log-ratio to the reference of the chosen answer minus that of the rejected answer.

    With label smoothing it is the conservative loss (Mitchell 2023), with `tail` length-desensitized (Liu et al. 2024),
    with `normalized` length-normalized (Lambert et al. 2024).
    """

    formula: ClassVar[str] = "-(1 - e) log s(beta m) - e log s(-beta m)"

    label_smoothing: BelowOne = 0.0  # e: assumed share of pairs whose answers are swapped
    tail: Share = 1.0  # weight of the tokens by which the longer answer exceeds the shorter answer
    normalized: bool = False  # average log-ratios over the answer's tokens instead of summing them

    def of_pairs(self, chosen: Answers, rejected: Answers) -> Tensor:
        e = self.label_smoothing
        margin = chosen.mean_ratio - rejected.mean_ratio if self.normalized else chosen.ratio - rejected.ratio
        m = self.beta * margin
        return -(1 - e) * log_sigmoid(m) - e * log_sigmoid(-m)
