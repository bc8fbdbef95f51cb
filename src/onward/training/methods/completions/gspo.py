"""Group sequence policy optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.training.methods.completions.policy import Clip, ClipAbove, GroupMethod
from onward.training.reinforcement.policy_losses import clipped, sequence_ratio

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GSPO(GroupMethod, kind="gspo"):
    """Group sequence policy optimization (Zheng et al. 2025): all tokens of a completion have one ratio,
    the geometric mean of the tokens' ratios p / p_old."""

    formula: ClassVar[str] = "-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) + kl KL, s = (p / p_old)^(1 / length)"

    clip_low: Clip = 3e-4  # probability ratios are clipped to at least 1 - clip_low
    clip_high: ClipAbove = 4e-4  # probability ratios are clipped to at most 1 + clip_high

    def surrogate(self, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return clipped(sequence_ratio(logprobs, old, mask), advantages, self.clip_low, self.clip_high)
