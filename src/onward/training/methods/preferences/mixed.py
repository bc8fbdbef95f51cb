"""Weighted sums of losses of pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.base.errors import UserError
from onward.base.fields import SUM, notation
from onward.training.methods.answers.sft import SFT
from onward.training.methods.method import Base, Method
from onward.training.methods.preferences.pairs import PairMethod
from onward.training.methods.reference import ReferenceModel

if TYPE_CHECKING:
    from torch import Tensor

    from onward.data.examples import Encoder, Example
    from onward.data.records import Record
    from onward.training.losses.answers import Answers, PairLoss


@dataclass(frozen=True)
class Mixed(Method, kind=SUM, internal=True):
    """A weighted sum of losses of pairs of answers, written as `dpo + 0.2 * sft`."""

    by_example: ClassVar[bool] = True
    dropout: ClassVar[bool] = False
    rate: ClassVar[float] = PairMethod.rate
    reports: ClassVar[tuple[str, ...]] = PairMethod.reports

    terms: tuple[tuple[float, Method], ...] = ()  # weights and methods

    def __post_init__(self) -> None:
        super().__post_init__()
        methods = [method for _, method in self.terms]
        if other := next((m for m in methods if not isinstance(m, PairMethod | SFT)), None):
            raise UserError(f"method has the term {other.kind}, which is not a loss of pairs: train with it alone")
        if not all(math.isfinite(weight) and weight for weight, _ in self.terms):
            raise UserError("a weight of method is 0 or not finite: give another weight, or leave out its term")
        names = [notation(method) for method in methods]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"method has the term {twice[0]:.99} twice: write it once, with the sum of the weights")
        if not self.pairs:
            raise UserError("method has no term that compares answers, such as dpo: add one")
        if len({(m.tail, m.reference) for m in self.pairs if m.reference}) > 1:
            raise UserError(
                "the terms of method have different values of tail or reference: give all terms the same values"
            )

    @property
    def pairs(self) -> list[PairMethod]:
        """The terms of the sum that compare a chosen and a rejected answer, such as dpo."""
        return [method for _, method in self.terms if isinstance(method, PairMethod)]

    @property
    def reference(self) -> ReferenceModel | None:
        return next((method.reference for method in self.pairs if method.reference), None)

    def examples(self, encoder: Encoder, records: Iterable[Record]) -> Iterator[Example]:
        return self.pairs[0].examples(encoder, records)

    def of_pairs(self, chosen: Answers, rejected: Answers) -> Tensor:
        """Return the weighted sum of the terms' losses for each pair of answers, (M,)."""
        losses = [w * m.of_pairs(chosen, rejected) for w, m in self.terms if isinstance(m, PairMethod | SFT)]
        return sum(losses[1:], losses[0])

    def loss(self, base: Base) -> PairLoss:
        from onward.training.losses.answers import PairLoss

        reference = self.reference.open(base) if self.reference else None
        tail = next((method.tail for method in self.pairs if method.reference), 1.0)
        return PairLoss(self.of_pairs, self.pairs[0].beta, reference, tail)
