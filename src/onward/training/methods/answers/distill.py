"""Distillation from a teacher."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.base.errors import UserError
from onward.config.ranges import Positive, Share, Size, SizeOrZero
from onward.training.methods.method import Base, Method

if TYPE_CHECKING:
    from onward.data.examples import Encoder, Example
    from onward.data.records import Record
    from onward.training.step.loss import Loss


@dataclass(frozen=True)
class Distill(Method, kind="distill"):
    """The divergence of the student's distribution s from the teacher's t at each trained token (Agarwal et al. 2024,
    equation 1): the forward KL(t || s) for mix 0, the reverse KL(s || t) for mix 1."""

    formula: ClassVar[str] = "mix KL(t || m) + (1 - mix) KL(s || m), m = mix t + (1 - mix) s; KL(t || s) for mix 0"

    teacher: str = ""  # model to learn from: a folder or a name on the hub
    mix: Share = 0.0  # 0: forward KL(t || s), 1: reverse KL(s || t), between: Jensen-Shannon
    temperature: Positive = 1.0  # temperature of both models' probabilities
    on_policy: Share = 0.0  # share of batches for which the student generates the answers
    completion_length: Size = 256  # maximum number of tokens in an answer that the student generates
    loss_chunk: SizeOrZero = 0  # number of tokens whose logits are in memory at once; 0: as many as fit in 128 MiB

    def check(self) -> None:
        if not self.teacher:
            raise UserError("distill needs a teacher: name the model to learn from")
        if self.completion_length != Distill.completion_length and not self.on_policy:
            raise UserError(
                "completion_length is used only with on_policy: give on_policy as well, or leave completion_length out"
            )

    @property
    def samples_itself(self) -> bool:
        return self.on_policy > 0

    def examples(self, encoder: Encoder, records: Iterable[Record]) -> Iterator[Example]:
        from onward.data.forms import supervised

        return supervised(encoder, records)

    def loss(self, base: Base) -> Loss:
        from onward.training.losses.distillation import Distillation, OnPolicy, Teacher

        loss = Distillation(Teacher(self.teacher), self.mix, self.temperature, self.loss_chunk)
        if not self.on_policy:
            return loss
        return OnPolicy(loss, self.on_policy, self.completion_length, base.tokenizer())
