"""Methods that reward the model's own completions of prompts.

Shapes: N completions, T tokens of a prompt and its completion, less one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from onward.base.arguments import Range
from onward.base.errors import UserError
from onward.config.ranges import NotNegative, Positive, Size, SizeOrZero
from onward.training.environments import Environment
from onward.training.methods.method import Base, Method
from onward.training.methods.reference import Online, ReferenceModel
from onward.training.reinforcement.policy_losses import AdvantageScale, Reduction, group_advantages
from onward.training.rewards import Reward

if TYPE_CHECKING:
    from torch import Tensor

    from onward.data.examples import Encoder, Example
    from onward.data.records import Record
    from onward.training.reinforcement.policy import PolicyGradient
    from onward.training.reinforcement.rollouts import PolicyOutputs, Rollouts

Clip = Annotated[float, Range(0, 1)]
ClipAbove = Annotated[float, Range(0, 100)]


@dataclass(frozen=True)
class PolicyMethod(Method, kind=""):
    """The base class of reinforcement learning methods, which reward completions sampled from the model. A
    policy-gradient method defines `advantages` and `surrogate`, any other method `token_losses`.

    p and p_old are the probabilities of a token under the model and under the model that sampled it; A is its
    advantage.
    """

    rate: ClassVar[float] = 0.02
    reports: ClassVar[tuple[str, ...]] = (
        "reward",
        "length",
        "ended",
        "entropy",
        "clip_share",
        "zero_spread",
        "logprob_gap",
    )
    kl_in_loss: ClassVar[bool] = True  # whether the KL is a term of the loss instead of the reward
    tempered: ClassVar[bool] = True  # whether the loss uses probabilities at the sampling temperature

    reward: Reward | None = None  # reward, such as exact, exact + 0.2 * length(tokens=50), FILE.py:FUNCTION or a folder
    samples: Annotated[int, Range(2, 4096)] = 8  # completions for each prompt
    completion_length: Size = 256  # maximum number of tokens in a completion
    temperature: Positive = 1.0  # temperature for sampling and for the probabilities in the loss
    kl: NotNegative = 0.0  # weight of the KL divergence from the initial model
    iterations: Size = 1  # number of steps that use the same completions
    mask_truncated: bool = False  # exclude completions that are cut off, such as at completion_length
    environment: Environment | None = None  # replies to the model's turns: calculator, or FILE.py:FUNCTION
    replay: SizeOrZero = 0  # number of prompts with unequal rewards to keep, to replace prompts with equal rewards

    def check(self) -> None:
        if self.reward is None:
            raise UserError(f"{self.kind} needs a reward, such as --reward exact")

    @property
    def samples_itself(self) -> bool:
        return True

    @property
    def reference(self) -> ReferenceModel | None:
        return Online() if self.kl else None

    @property
    def loss_temperature(self) -> float:
        """The temperature that the loss divides the logits by before it computes log-probabilities."""
        return self.temperature if self.tempered else 1.0

    @property
    def mean_over(self) -> Reduction:
        """The reduction of the losses of tokens to one loss, such as "grpo"; see `policy_losses.reduced`."""
        return "grpo"

    def examples(self, encoder: Encoder, records: Iterable[Record]) -> Iterator[Example]:
        from onward.data.forms import prompted

        return prompted(encoder, records)

    def loss(self, base: Base) -> PolicyGradient:
        from onward.training.reinforcement.policy import PolicyGradient

        self.check()
        assert self.reward is not None
        reference = self.reference.open(base) if self.reference else None
        return PolicyGradient(self, base.tokenizer(), self.reward, reference, device=base.device)

    def advantages(self, rollouts: Rollouts, sampled: PolicyOutputs | None) -> Mapping[str, Tensor]:
        """Compute the fields of sampled completions that follow from their rewards, by name: `advantages` (N, T) or (N,
        1), and others that the loss needs; by default none. `sampled` are the outputs of the model that sampled the
        completions; None if neither `iterations` > 1 nor `needs_sampled` requires them."""
        return {}

    @property
    def needs_sampled(self) -> bool:
        """Whether `advantages` needs the outputs of the model that sampled the completions."""
        return self.kl > 0

    def surrogate(self, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Compute two tensors: the loss of each token, (N, T), or of each completion, (N, 1), and a mask of where it is
        clipped. `logprobs` and `old` are log p and log p_old, (N, T); `advantages` is (N, T) or (N, 1); `mask` (N, T)
        is 1 for the tokens of completions."""
        raise NotImplementedError

    def token_losses(self, outputs: PolicyOutputs, rollouts: Rollouts) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute the loss of each token, (N, T), or of each completion, (N, 1), and a dict of further figures to
        report. `outputs` are the outputs of the model in training for the sampled completions `rollouts`."""
        logprobs, mask = outputs.logprobs, rollouts.mask
        old = logprobs.detach() if rollouts.old_logprobs is None else rollouts.old_logprobs
        loss, is_clipped = self.surrogate(logprobs, old, rollouts.advantages, mask)
        return loss, {"clip_share": (is_clipped * mask).sum() / mask.sum().clamp(min=1)}


@dataclass(frozen=True)
class GroupMethod(PolicyMethod, kind=""):
    """The base class of methods whose advantages compare the completions of a prompt: A = (reward - mean) / standard
    deviation (see `scale`)."""

    scale: AdvantageScale = "group"  # divisor of advantages: standard deviation of the group or of the batch; none: 1

    def advantages(self, rollouts: Rollouts, sampled: PolicyOutputs | None) -> Mapping[str, Tensor]:
        return {"advantages": group_advantages(rollouts.rewards, self.samples, self.scale)[:, None]}
