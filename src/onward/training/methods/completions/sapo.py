"""Soft adaptive policy optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.config.ranges import Positive
from onward.training.methods.completions.policy import GroupMethod

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SAPO(GroupMethod, kind="sapo"):
    """Soft adaptive policy optimization (Gao et al. 2025): a sigmoid s reduces the gradient of tokens whose probability
    ratio p / p_old is far from 1; p_old is the probability under the model that sampled. tau is tau_good for advantages
    A > 0, else tau_bad."""

    formula: ClassVar[str] = "-(4 / tau) s(tau (p / p_old - 1)) A + kl KL"

    tau_good: Positive = 1.0  # steepness for tokens of better completions
    tau_bad: Positive = 1.05  # steepness for tokens of worse completions

    def surrogate(self, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        ratio, good = (logprobs - old).exp(), (advantages > 0).to(logprobs.dtype)
        tau = good * self.tau_good + (1 - good) * self.tau_bad
        return -(4 / tau) * (tau * (ratio - 1)).sigmoid() * advantages, ratio < 0  # SAPO does not clip
