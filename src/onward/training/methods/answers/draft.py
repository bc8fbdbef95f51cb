"""A draft head for a model, for speculative decoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.config.ranges import NotNegative, Positive, Size, SizeOrZero
from onward.training.methods.method import Base, Method

if TYPE_CHECKING:
    from onward.data.examples import Encoder, Example
    from onward.data.records import Record
    from onward.model.decoder import Decoder
    from onward.training.losses.drafting import DraftingLoss


LEAST = 256  # minimum number of hidden units: in a narrow model, fewer would hardly make drafting faster


@dataclass(frozen=True)
class Drafting(Method, kind="draft"):
    """A draft head for speculative decoding (Ankner et al. 2024): it learns to predict the model's next tokens, on
    answers of the model itself to the prompts of the data. The model is unchanged."""

    formula: ClassVar[str] = "mean KL(model || head) over draft tokens k, weighted by falloff^k, on the model's answers"
    rate: ClassVar[float] = 0.5
    dropout: ClassVar[bool] = False
    beside: ClassVar[bool] = True
    reports: ClassVar[tuple[str, ...]] = ("accepted", "tokens_per_step")

    depth: Size = 6  # number of consecutive draft tokens to train
    falloff: Positive = 0.9  # weight of a draft token, relative to that of the one before it
    units: SizeOrZero = 0  # hidden units of the draft head; 0: the width of the model, at least 256
    temperature: NotNegative = 0.8  # temperature of the model's answers; half of the batches use greedy decoding
    completion_length: Size = 256  # maximum number of tokens in an answer of the model

    @property
    def samples_itself(self) -> bool:
        return True

    def attach(self, model: Decoder) -> None:
        from onward.transforms.draft_head import add_draft_head

        add_draft_head(model, self.units or max(model.config.d_model, LEAST))

    def examples(self, encoder: Encoder, records: Iterable[Record]) -> Iterator[Example]:
        from onward.data.forms import supervised

        return supervised(encoder, records)

    def loss(self, base: Base) -> DraftingLoss:
        from onward.training.losses.drafting import DraftingLoss

        return DraftingLoss(self.depth, self.falloff, self.temperature, self.completion_length, base.tokenizer())
