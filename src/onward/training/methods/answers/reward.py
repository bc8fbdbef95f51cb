"""Reward models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.config.ranges import NotNegative
from onward.training.methods.method import Base, Method

if TYPE_CHECKING:
    from onward.data.examples import Encoder, Example
    from onward.data.records import Record
    from onward.training.losses.scoring import RewardLoss


@dataclass(frozen=True)
class RewardModelling(Method, kind="reward"):
    """A reward model (Bradley and Terry 1952; margins as in Touvron et al. 2023, equation 2; center as in Eisenstein et
    al. 2023). r is the output of the reward head after an answer's last token."""

    formula: ClassVar[str] = "-log s(r(chosen) - r(rejected) - margin) + center (r(chosen) + r(rejected))^2"
    by_example: ClassVar[bool] = True
    labels: ClassVar[tuple[str, ...]] = ("reward",)
    reports: ClassVar[tuple[str, ...]] = (
        "accuracy",
        "margin",
        "chosen_reward",
        "rejected_reward",
        "calibration_error",
    )

    center: NotNegative = 0.0  # weight of a term that keeps rewards close to 0: the squared sum of each pair's rewards

    def examples(self, encoder: Encoder, records: Iterable[Record]) -> Iterator[Example]:
        from onward.data.forms import preferred

        return preferred(encoder, records)

    def loss(self, base: Base) -> RewardLoss:
        from onward.training.losses.scoring import RewardLoss

        return RewardLoss(self.center)
