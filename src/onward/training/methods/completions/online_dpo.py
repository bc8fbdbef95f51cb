"""Direct preference optimization on the model's own answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from onward.base.arguments import Range
from onward.config.ranges import BelowOne, Positive
from onward.training.methods.completions.policy import PolicyMethod
from onward.training.methods.preferences.dpo import DPO
from onward.training.methods.reference import Online, ReferenceModel

if TYPE_CHECKING:
    from torch import Tensor

    from onward.training.reinforcement.rollouts import PolicyOutputs, Rollouts


@dataclass(frozen=True)
class OnlineDPO(PolicyMethod, kind="online_dpo"):
    """Online direct preference optimization (Guo et al. 2024, algorithm 1): the model completes each prompt, and the
    completions with the highest and the lowest reward become a pair. A prompt whose completions have equal rewards
    gives no pair."""

    formula: ClassVar[str] = f"{DPO.formula}, of the best and the worst completion of a prompt"
    rate: ClassVar[float] = DPO.rate
    dropout: ClassVar[bool] = False
    tempered: ClassVar[bool] = False
    reports: ClassVar[tuple[str, ...]] = (
        *("reward", "length", "ended", "entropy", "zero_spread", "kl", "logprob_gap", *DPO.reports),
    )

    samples: Annotated[int, Range(2, 4096)] = 2  # completions for each prompt
    temperature: Positive = 1.0  # sampling temperature; the loss uses the model's own probabilities
    beta: Positive = 0.1  # larger values keep the model closer to the reference
    label_smoothing: BelowOne = 0.0  # e: assumed share of pairs whose answers are swapped

    @property
    def reference(self) -> ReferenceModel | None:
        return Online()

    def token_losses(self, outputs: PolicyOutputs, rollouts: Rollouts) -> tuple[Tensor, Mapping[str, Tensor]]:
        from onward.training.losses.answers import Answers, preference_figures

        assert rollouts.reference_logprobs is not None
        mask = rollouts.mask
        of_group = lambda x: x.view(-1, self.samples)
        left_out, rewards = of_group(mask.sum(1)) == 0, of_group(rollouts.rewards)
        most, best = rewards.masked_fill(left_out, -float("inf")).max(1, keepdim=True)
        least, worst = rewards.masked_fill(left_out, float("inf")).min(1, keepdim=True)
        worst = worst.where(most > least, best)  # a pair of equal answers has no gradient
        sums = [of_group((x * mask).sum(1)) for x in (outputs.logprobs, rollouts.reference_logprobs, mask)]
        chosen, rejected = (Answers(*(x.gather(1, i)[:, 0] for x in sums)) for i in (best, worst))
        loss = DPO(beta=self.beta, label_smoothing=self.label_smoothing).of_pairs(chosen, rejected)
        figures = preference_figures(*(self.beta * one.ratio.detach() for one in (chosen, rejected)))
        spread = loss.new_zeros(rewards.shape).scatter(1, best, self.samples * loss[:, None])
        return spread.view(-1, 1), {name: total / len(loss) for name, total in figures.items()}
