"""Kahneman-Tversky optimization, for single answers that are wanted or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.config.ranges import NotNegative, Positive
from onward.training.methods.method import Base, Method
from onward.training.methods.reference import Online, ReferenceModel

if TYPE_CHECKING:
    from torch import Tensor

    from onward.data.examples import Encoder, Example
    from onward.data.records import Record
    from onward.training.losses.answers import JudgedLoss


@dataclass(frozen=True)
class KTO(Method, kind="kto"):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, equation 7), of single answers with a label.

    r = log p(answer) - log p_ref(answer); KL is the divergence from the reference, estimated by the mean r of answers
    to other prompts; s is the logistic sigmoid.
    """

    formula: ClassVar[str] = "w (1 - s(beta (r - KL))) if the answer is wanted, else w (1 - s(beta (KL - r)))"
    by_example: ClassVar[bool] = True
    by_record: ClassVar[bool] = False
    dropout: ClassVar[bool] = False
    rate: ClassVar[float] = 0.005
    reports: ClassVar[tuple[str, ...]] = ("accuracy", "kl", "reward")

    beta: Positive = 0.1  # larger values keep the model closer to the reference
    reference: ReferenceModel = Online()  # online, kept (computed once, before training) or synced(every=512)
    desirable: NotNegative = 1.0  # weight w of desirable answers
    undesirable: NotNegative = 1.0  # weight w of undesirable answers

    def examples(self, encoder: Encoder, records: Iterable[Record]) -> Iterator[Example]:
        from onward.data.forms import judged

        return judged(encoder, records)

    def of_answers(self, ratio: Tensor, wanted: Tensor, kl: Tensor) -> Tensor:
        """Compute the loss of each of M answers, (M,): `ratio` (M,) is its log-ratio to the reference, `wanted` (M,) is
        1 for a wanted answer and 0 for an unwanted one, and `kl` () is the divergence from the reference."""
        sign = wanted * 2.0 - 1.0
        weight = wanted * self.desirable + (1 - wanted) * self.undesirable
        return weight * (1 - (sign * self.beta * (ratio - kl)).sigmoid())

    def loss(self, base: Base) -> JudgedLoss:
        from onward.training.losses.answers import JudgedLoss

        return JudgedLoss(self.of_answers, self.beta, self.reference.open(base))
