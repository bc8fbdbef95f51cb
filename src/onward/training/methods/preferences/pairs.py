"""Methods that learn from pairs of a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.config.ranges import Positive
from onward.training.methods.method import Base, Method
from onward.training.methods.reference import Online, ReferenceModel

if TYPE_CHECKING:
    from torch import Tensor

    from onward.data.examples import Encoder, Example
    from onward.data.records import Record
    from onward.training.losses.answers import Answers, PairLoss


def log_sigmoid(x: Tensor) -> Tensor:
    """Compute log s(x), the log of the logistic sigmoid, elementwise, without overflow."""
    return -x.neg().logaddexp(x.new_zeros(()))


@dataclass(frozen=True)
class PairMethod(Method, kind=""):
    """The base class of methods that compare the log-probabilities of a chosen and a rejected answer; a subclass
    defines `of_pairs`."""

    by_example: ClassVar[bool] = True
    dropout: ClassVar[bool] = False
    rate: ClassVar[float] = 0.005
    reports: ClassVar[tuple[str, ...]] = ("accuracy", "margin", "chosen_reward", "rejected_reward")

    beta: Positive = 0.1  # factor for the log-probabilities in the loss and the rewards in the log

    @property
    def reference(self) -> ReferenceModel | None:
        """The option for the reference model with which the loss compares the trained model; None if the method has
        none."""
        return None

    @property
    def tail(self) -> float:
        """The weight, in an answer's log-probability, of the tokens of a pair's longer answer that lie beyond the
        length of the shorter one."""
        return 1.0

    def examples(self, encoder: Encoder, records: Iterable[Record]) -> Iterator[Example]:
        from onward.data.forms import preferred

        return preferred(encoder, records)

    def of_pairs(self, chosen: Answers, rejected: Answers) -> Tensor:
        """Compute the loss of each of M pairs, (M,), from the log-probabilities of their `chosen` and their `rejected`
        answers."""
        raise NotImplementedError

    def loss(self, base: Base) -> PairLoss:
        from onward.training.losses.answers import PairLoss

        reference = self.reference.open(base) if self.reference else None
        return PairLoss(self.of_pairs, self.beta, reference, self.tail)


@dataclass(frozen=True)
class ComparedPairs(PairMethod, kind=""):
    """The base class of losses of pairs that compare the model with a reference, the model at the start of the run.

    r = log p(answer) - log p_ref(answer), a sum over the answer's tokens; m = r(chosen) - r(rejected), the margin.
    """

    beta: Positive = 0.1  # larger values keep the model closer to the reference
    reference: ReferenceModel = Online()  # online, kept (computed once, before training) or synced(every=512)
