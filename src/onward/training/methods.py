"""The methods of fine-tuning in one table: the examples that each makes of records, and its loss."""

from collections.abc import Callable
from dataclasses import dataclass

from onward.data.examples import Form, supervised
from onward.training.finetuning import FinetuneConfig
from onward.training.loss import CrossEntropy, Loss


@dataclass(frozen=True)
class Method:
    """A method: what is new in it beside the loop of training, which all share."""

    form: Form  # the examples that it makes of records
    loss: Callable[[FinetuneConfig], Loss]
    by_example: bool = False  # whether the loss is a mean over examples, and not over targets


def next_token(config: FinetuneConfig) -> Loss:
    """The cross-entropy of the trained tokens."""
    return CrossEntropy(config.z_loss, config.label_smoothing, config.loss_chunk)


METHODS = {"sft": Method(supervised, next_token)}
