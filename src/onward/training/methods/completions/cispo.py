"""Clipped importance-sampling weights in place of clipped losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from onward.base.arguments import Range
from onward.training.methods.completions.policy import GroupMethod
from onward.training.reinforcement.policy_losses import Reduction

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CISPO(GroupMethod, kind="cispo"):
    """Clipped importance-sampling policy optimization (MiniMax 2025): the importance weight p / p_old of a
    token is bounded by `highest`, and no token loses its gradient."""

    formula: ClassVar[str] = "-min(p / p_old, highest), a constant in the gradient, times A log p, + kl KL"

    highest: Annotated[float, Range(1, 1e6)] = 5.0  # maximum weight of a token

    @property
    def mean_over(self) -> Reduction:
        return "dapo"

    def surrogate(self, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        ratio = (logprobs - old).exp().detach()
        return -ratio.clamp(max=self.highest) * advantages * logprobs, (ratio > self.highest) & (advantages > 0)
