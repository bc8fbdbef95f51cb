"""Classification."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.config.ranges import NotNegative
from onward.training.methods.method import Base, Method

if TYPE_CHECKING:
    from onward.data.examples import Encoder, Example
    from onward.data.records import Record
    from onward.training.losses.scoring import ClassLoss


@dataclass(frozen=True)
class Classify(Method, kind="classify"):
    """A classifier of texts and pairs of texts (GPT-1, Radford et al. 2018, equation 5). The classes are the labels in
    the data."""

    formula: ClassVar[str] = "-log p(label | text) - lm_weight mean over tokens of log p(token | tokens before it)"
    by_example: ClassVar[bool] = True
    by_record: ClassVar[bool] = False
    reports: ClassVar[tuple[str, ...]] = ("accuracy", "label_loss", "text_loss", "calibration_error")

    lm_weight: NotNegative = 0.5  # weight of the cross-entropy of the text

    def examples(self, encoder: Encoder, records: Iterable[Record]) -> Iterator[Example]:
        from onward.data.forms import classified

        return classified(encoder, records)

    def loss(self, base: Base) -> ClassLoss:
        from onward.training.losses.scoring import ClassLoss

        return ClassLoss(self.lm_weight)
