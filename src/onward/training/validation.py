"""Validation during a run: the loss on a part of the validation text, and measurements of the model."""

from dataclasses import dataclass, field

from onward.data.tokens import Tokens
from onward.data.windows import ValidationWindows
from onward.training.config import RunConfig
from onward.training.health import measure
from onward.training.loss import mean_loss
from onward.training.trainer import Trainer


@dataclass(frozen=True)
class Validation:
    """How well the model predicts text it was not trained on, and measurements of its layers."""

    step: int
    validation_loss: float  # nats per token
    tokens: int
    figures: dict[str, float] = field(default_factory=dict)


def validate(trainer: Trainer, tokens: Tokens, config: RunConfig) -> Validation:
    """The mean loss over evenly spread windows, about `config.validation_tokens` of the tokens, in the precision of
    training; with averaged weights, where the trainer averages them."""
    model, size = trainer.model, config.batch_size
    windows = ValidationWindows(tokens, model.config.context_length, config.pack)
    apart = max(1, len(windows) * model.config.context_length // config.validation_tokens)
    chosen = range(0, len(windows), apart)
    with trainer.averaged():
        batches = (windows.read(chosen[i : i + size]).to(model.device) for i in range(0, len(chosen), size))
        loss, count = mean_loss(model, batches, config.precision)
        figures = measure(model, windows.read(chosen[:size]).to(model.device))
    return Validation(trainer.step, loss, count, figures)
