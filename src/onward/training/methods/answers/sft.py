"""Supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.config.ranges import BelowOne, NotNegative, SizeOrZero
from onward.training.methods.method import Base, Method

if TYPE_CHECKING:
    from torch import Tensor

    from onward.data.examples import Encoder, Example
    from onward.data.records import Record
    from onward.training.losses.answers import Answers
    from onward.training.step.loss import Loss


@dataclass(frozen=True)
class SFT(Method, kind="sft"):
    """Supervised fine-tuning: the cross-entropy of the trained tokens, which are the tokens of answers and of texts
    without a prompt."""

    formula: ClassVar[str] = "-log p(token | tokens before it)"

    label_smoothing: BelowOne = 0.0  # share of the target's probability to spread over the vocabulary
    z_loss: NotNegative = 0.0  # weight of the squared log of the softmax's denominator (PaLM: 1e-4)
    loss_chunk: SizeOrZero = 0  # number of tokens whose logits are in memory at once; 0: as many as fit in 128 MiB

    def examples(self, encoder: Encoder, records: Iterable[Record]) -> Iterator[Example]:
        from onward.data.forms import supervised

        return supervised(encoder, records)

    def loss(self, base: Base) -> Loss:
        from onward.training.step.loss import CrossEntropy

        return CrossEntropy.of(self)

    def of_pairs(self, chosen: Answers, rejected: Answers) -> Tensor:
        """Compute the loss (M,) of M pairs of answers as a term of a sum such as `dpo + 0.2 * sft`: minus the mean
        log-probability of the chosen answer's tokens (Pang et al. 2024)."""
        return -chosen.mean_logprob
