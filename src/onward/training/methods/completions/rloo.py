"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.training.methods.completions.policy import Clip, ClipAbove, PolicyMethod
from onward.training.reinforcement.policy_losses import clipped, leave_one_out

if TYPE_CHECKING:
    from torch import Tensor

    from onward.training.reinforcement.rollouts import PolicyOutputs, Rollouts


@dataclass(frozen=True)
class RLOO(PolicyMethod, kind="rloo"):
    """REINFORCE leave-one-out (Ahmadian et al. 2024): the advantage A is the reward of a completion minus the mean
    reward of the other completions of its prompt. The ratio is computed for whole completions, and the KL from the
    reference is subtracted from the reward."""

    formula: ClassVar[str] = "-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), ratio = p / p_old"
    kl_in_loss: ClassVar[bool] = False

    clip_low: Clip = 0.2  # probability ratios are clipped to at least 1 - clip_low
    clip_high: ClipAbove = 0.2  # probability ratios are clipped to at most 1 + clip_high

    def advantages(self, rollouts: Rollouts, sampled: PolicyOutputs | None) -> Mapping[str, Tensor]:
        rewards = rollouts.rewards
        if sampled is not None and rollouts.reference_logprobs is not None:
            rewards = rewards - self.kl * ((sampled.logprobs - rollouts.reference_logprobs) * rollouts.mask).sum(1)
        return {"advantages": leave_one_out(rewards, self.samples)[:, None]}

    def surrogate(self, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        ratio = ((logprobs - old) * mask).sum(1, keepdim=True).exp()
        return clipped(ratio, advantages, self.clip_low, self.clip_high)
