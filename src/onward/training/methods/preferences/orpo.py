"""Odds ratio preference optimization, without a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.config.ranges import NotNegative
from onward.training.methods.preferences.pairs import PairMethod, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor

    from onward.training.losses.answers import Answers


@dataclass(frozen=True)
class ORPO(PairMethod, kind="orpo"):
    """Odds ratio preference optimization (Hong et al. 2024, equation 6). l is the mean log p of an answer's tokens,
    odds = p / (1 - p)."""

    formula: ClassVar[str] = "-l(chosen) - beta log s(log odds(chosen) - log odds(rejected))"
    rate: ClassVar[float] = 0.02

    beta: NotNegative = 0.1  # weight of the odds ratio; 0: train only on the chosen answers

    def of_pairs(self, chosen: Answers, rejected: Answers) -> Tensor:
        a, b = chosen.mean_logprob, rejected.mean_logprob
        return -a - self.beta * log_sigmoid(a - b - (log1mexp(a) - log1mexp(b)))


def log1mexp(x: Tensor) -> Tensor:
    """Compute log(1 - exp(x)) for x < 0 elementwise, accurate near 0 and far from it (Maechler 2012). An x above -eps,
    where eps is the rounding error of its dtype, is lowered to -eps, so that the result is finite."""
    from torch import finfo

    x = x.clamp(max=-finfo(x.dtype).eps)
    return x.expm1().neg().log().where(x > -0.693, x.exp().neg().log1p())
