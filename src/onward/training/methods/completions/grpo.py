"""Group relative policy optimization, with the variants of Dr. GRPO and DAPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from onward.base.arguments import Range
from onward.training.methods.completions.policy import Clip, ClipAbove, GroupMethod
from onward.training.reinforcement.policy_losses import Reduction, clipped

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GRPO(GroupMethod, kind="grpo"):
    """Group relative policy optimization (Shao et al. 2024).

    `reduction` dr_grpo with `scale` none is Dr. GRPO (Liu et al. 2025); dapo with `clip_high` 0.28 and
    `mask_truncated` is DAPO (Yu et al. 2025).
    """

    formula: ClassVar[str] = "-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) + kl KL, ratio = p / p_old"

    clip_low: Clip = 0.2  # probability ratios are clipped to at least 1 - clip_low
    clip_high: ClipAbove = 0.2  # probability ratios are clipped to at most 1 + clip_high
    clip_worst: Annotated[float, Range(1, 1e6)] | None = None  # maximum ratio for A < 0 (two-sided clipping)
    reduction: Reduction = "dapo"  # mean of the loss, such as over all tokens (dapo) or completions (grpo)

    @property
    def mean_over(self) -> Reduction:
        return self.reduction

    def surrogate(self, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return clipped((logprobs - old).exp(), advantages, self.clip_low, self.clip_high, self.clip_worst)
