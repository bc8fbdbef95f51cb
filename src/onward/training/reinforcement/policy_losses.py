"""Reinforcement learning losses as pure functions: group advantages, clipped ratios, reductions, GAE. Does not import
torch.

Sources: PPO (Schulman et al. 2017), GAE (Schulman et al. 2016), GRPO (Shao et al. 2024), RLOO (Ahmadian et al. 2024),
Dr. GRPO (Liu et al. 2025), DAPO (Yu et al. 2025); the estimator of KL is k3 (Schulman 2020).
Shapes: N completions, G completions of each prompt, T tokens. Masks (N, T) are 1 for the tokens of completions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Reduction = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
AdvantageScale = Literal["group", "batch", "none"]
EPSILON = 1e-4  # added to the standard deviation of rewards


def group_advantages(rewards: Tensor, group: int, scale: AdvantageScale = "group") -> Tensor:
    """Compute GRPO's advantages (N,): rewards (N,) minus the mean of their group; a group is `group` consecutive
    completions of one prompt. They are divided by the standard deviation of the group's rewards or, with `scale`
    "batch", of all rewards; `scale` "none" does not divide them. A group of equal rewards has advantages of 0."""
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    grouped = rewards.view(-1, group)
    advantages = grouped - grouped.mean(1, keepdim=True)
    if scale != "none":
        part = grouped if scale == "group" else rewards[None]
        deviation = part.std(1, keepdim=True, correction=min(1, part.size(1) - 1))  # of a single reward: 0
        advantages = advantages / (deviation + EPSILON)
    return advantages.view(-1)


def leave_one_out(rewards: Tensor, group: int) -> Tensor:
    """Compute RLOO's advantages (N,): each of the rewards (N,) minus the mean of the other rewards in its group; a
    group is `group` consecutive completions of one prompt."""
    grouped = rewards.view(-1, group)
    return (grouped - (grouped.sum(1, keepdim=True) - grouped) / (group - 1)).view(-1)


def kl_estimate(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return an estimate of KL(policy, reference) at each token, at least 0: exp(r - p) - (r - p) - 1, from the
    log-probabilities of the token under the policy (p, `logprobs`) and the reference (r), (N, T)."""
    difference = reference - logprobs
    return (difference.expm1() - difference).clamp(min=0)  # rounding may give less than 0


def clipped(
    ratio: Tensor, advantages: Tensor, low: float, high: float, most: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute PPO's clipped loss -min(ratio A, clip(ratio, 1 - low, 1 + high) A) and a mask of where clipping applies,
    elementwise; `ratio` is p / p_old, A the advantage. `most`, if given, bounds the ratio in the first term too
    (two-sided clipping, Ye et al. 2020)."""
    clipped_ratio = ratio.clamp(1 - low, 1 + high)
    is_clipped = ((ratio < 1 - low) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))
    if most is not None:
        is_clipped = is_clipped | ((ratio > most) & (advantages < 0))
        ratio = ratio.clamp(max=most)
    return -(ratio * advantages).minimum(clipped_ratio * advantages), is_clipped


def sequence_ratio(logprobs: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Compute the ratio p / p_old of each completion, (N, 1), from log-probabilities (N, T) under the model and, `old`,
    under the model that sampled: the geometric mean over the completion's tokens (GSPO, Zheng et al. 2025, equation
    7)."""
    return (((logprobs - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()


def reduced(per_token: Tensor, mask: Tensor, reduction: Reduction, max_length: int) -> tuple[Tensor, int]:
    """Return the sum of a batch's losses and the number to divide it by, from the losses `per_token` (N, T) of tokens.
    `mask` (N, T) is 1 for the tokens of completions; `max_length` is the maximum length of a completion.

    | reduction | the mean is over                                                                       |
    | --------- | -------------------------------------------------------------------------------------- |
    | grpo      | the tokens of each completion, then completions: short ones weigh as much as long ones |
    | bnpo      | the tokens of the batch                                                                |
    | dr_grpo   | N * max_length, whatever the lengths                                                   |
    | dapo      | the tokens of all batches of a step                                                    |
    """
    masked = per_token * mask
    match reduction:
        case "grpo":
            return (masked.sum(1) / mask.sum(1).clamp(min=1)).sum(), len(mask)
        case "bnpo":
            return masked.sum() / mask.sum().clamp(min=1), 1
        case "dr_grpo":
            return masked.sum(), len(mask) * max_length
        case "dapo":
            return masked.sum(), int(mask.sum())


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Compute the generalized advantages and the returns, both (N, T), from the rewards and the predicted values (N, T)
    of tokens, with discount `gamma` and the lambda `lam` of GAE (Schulman et al. 2016). The value after the last token
    of a completion is 0. Tokens whose `mask` (N, T) is 0 are skipped."""
    advantages = rewards.new_zeros(rewards.shape)
    following = next_value = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.size(1))):
        inside = mask[:, t] > 0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        following = (delta + gamma * lam * following).where(inside, following)
        next_value = values[:, t].where(inside, next_value)
        advantages[:, t] = following * inside
    return advantages, (advantages + values) * mask


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Compute PPO's loss of predicted values, elementwise: half the squared error of `values` from `returns`, or that
    of the values clipped to `old` ± `clip`, whichever is larger; `old` are the values before the step."""
    clipped_values = old + (values - old).clamp(-clip, clip)
    return 0.5 * (values - returns).square().maximum((clipped_values - returns).square())


def whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return advantages (N, T) shifted and scaled to mean 0 and variance 1 over the tokens whose `mask` (N, T) is 1; 0
    at all others."""
    count = mask.sum().clamp(min=1)
    mean = (advantages * mask).sum() / count
    variance = ((advantages - mean).square() * mask).sum() / count
    return (advantages - mean) * (variance + 1e-8).rsqrt() * mask
