"""The base class of fine-tuning methods, and the inputs that a run passes to a method's loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onward.base.fields import Part

if TYPE_CHECKING:
    from onward.data.examples import Encoder, Example
    from onward.data.records import Record
    from onward.model.decoder import Decoder
    from onward.text.tokenizer import Tokenizer
    from onward.training.step.loss import Loss


@dataclass(frozen=True)
class Base:
    """Functions that load the base model of a run and its tokenizer, for losses that need a second copy of the model,
    such as the reference of DPO."""

    load: Callable[[bool], Decoder]  # loads another copy of the model; given True, with deferred weights
    tokenizer: Callable[[], Tokenizer]  # returns the tokenizer, with the chat template of the run
    device: str  # device of the run


class Method(Part):
    """The base class of fine-tuning methods, such as SFT and DPO: how a model learns from examples. A method is a
    frozen dataclass; its fields are its options.

    A subclass with a kind (`class Mine(Method, kind="mine")`) is registered when its module is imported: `onward
    finetune --import MODULE --method mine`.
    """

    formula: ClassVar[str] = ""  # the loss of one target or example, for `--help`
    rate: ClassVar[float] = 0.05  # default learning rate times d_model; pre-training with AdamW uses 0.5
    by_example: ClassVar[bool] = False  # whether the loss is a mean over examples instead of targets
    by_record: ClassVar[bool] = True  # whether each record is turned into examples independently of other records
    dropout: ClassVar[bool] = True  # whether training uses dropout; losses that compare log-probabilities use none
    beside: ClassVar[bool] = False  # whether the method trains separate modules and leaves the model unchanged
    labels: ClassVar[tuple[str, ...]] = ()  # labels of the trained output head; `classify` reads them from its data
    reports: ClassVar[tuple[str, ...]] = ()  # names of the method's figures in the log, in addition to the loss

    @property
    def reference(self) -> Part | None:
        """The option for the reference model with which the loss compares the trained model, a
        `reference.ReferenceModel`; None if the method has none."""
        return None

    @property
    def samples_itself(self) -> bool:
        """Whether the model in training generates answers, as in reinforcement learning; each row of a batch must then
        contain only one example."""
        return False

    def attach(self, model: Decoder) -> None:
        """Freeze a model, and add the modules that a method trains `beside` it."""

    def check(self) -> None:
        """Raise a UserError if a required option of the method is missing."""

    def examples(self, encoder: Encoder, records: Iterable[Record]) -> Iterator[Example]:
        """Yield tokenized examples made from the records of the data; `encoder` tokenizes them. Raises a UserError that
        names a record that lacks a field."""
        raise NotImplementedError

    def loss(self, base: Base) -> Loss:
        """Return the loss, which the trainer calls with the model and a batch of examples; `base` loads the base model
        of the run."""
        raise NotImplementedError
