"""Proximal policy optimization, with a value head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from onward.base.arguments import Range
from onward.config.ranges import NotNegative, Share
from onward.training.methods.completions.policy import Clip, ClipAbove, PolicyMethod
from onward.training.reinforcement.policy_losses import Reduction, clipped, gae, value_loss, whitened

if TYPE_CHECKING:
    from torch import Tensor

    from onward.training.reinforcement.rollouts import PolicyOutputs, Rollouts

VALUE_CLIP = 0.2  # clip range of the value loss: maximum change of a value from its value before the step


@dataclass(frozen=True)
class PPO(PolicyMethod, kind="ppo"):
    """Proximal policy optimization (Schulman et al. 2017). A head predicts the value of each token; the advantage A
    comes from generalized advantage estimation (Schulman et al. 2016), and the KL from the reference is subtracted from
    the reward of each token."""

    formula: ClassVar[str] = (
        "-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) + value_weight (value - return)^2 / 2"
    )
    labels: ClassVar[tuple[str, ...]] = ("value",)
    kl_in_loss: ClassVar[bool] = False

    samples: Annotated[int, Range(1, 4096)] = 8  # completions for each prompt
    clip_low: Clip = 0.2  # probability ratios are clipped to at least 1 - clip_low
    clip_high: ClipAbove = 0.2  # probability ratios are clipped to at most 1 + clip_high
    discount: Share = 1.0  # discount factor for the rewards of later tokens
    gae_lambda: Share = 0.95  # lambda of generalized advantage estimation: 0 trusts the values, 1 the rewards
    value_weight: NotNegative = 0.5  # weight of the value loss

    @property
    def mean_over(self) -> Reduction:
        return "dapo"

    @property
    def needs_sampled(self) -> bool:
        return True

    def advantages(self, rollouts: Rollouts, sampled: PolicyOutputs | None) -> Mapping[str, Tensor]:
        assert sampled is not None
        mask, values = rollouts.mask, sampled.values * rollouts.mask
        last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
        rewards = mask.new_zeros(mask.shape).scatter(1, last[:, None], rollouts.rewards[:, None].to(mask.dtype))
        if rollouts.reference_logprobs is not None:
            rewards = rewards - self.kl * (sampled.logprobs - rollouts.reference_logprobs) * mask
        advantages, returns = gae(rewards, values, mask, self.discount, self.gae_lambda)
        return {"advantages": whitened(advantages, mask), "old_values": values, "returns": returns}

    def surrogate(self, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return clipped((logprobs - old).exp(), advantages, self.clip_low, self.clip_high)

    def token_losses(self, outputs: PolicyOutputs, rollouts: Rollouts) -> tuple[Tensor, Mapping[str, Tensor]]:
        assert rollouts.old_values is not None
        assert rollouts.returns is not None
        loss, figures = super().token_losses(outputs, rollouts)
        of_values = value_loss(outputs.values, rollouts.old_values, rollouts.returns, VALUE_CLIP)
        return loss + self.value_weight * of_values, figures
