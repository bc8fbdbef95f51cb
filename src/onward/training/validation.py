"""Validation during a run: the loss on a part of the validation text, and measurements of the model."""

import math
from dataclasses import dataclass, field

from onward.data.tokens import Tokens
from onward.data.windows import IGNORE_INDEX, ValidationWindows
from onward.text.tokenizer import Tokenizer
from onward.training.config import RunConfig
from onward.training.health import measure
from onward.training.loss import mean_loss
from onward.training.trainer import Trainer


@dataclass(frozen=True)
class Validation:
    """How well the model predicts text it was not trained on, and measurements of its layers."""

    step: int
    validation_loss: float  # nats per token
    bits_per_byte: float  # of the text of these tokens
    tokens: int
    figures: dict[str, float] = field(default_factory=dict)


def validate(trainer: Trainer, tokenizer: Tokenizer, tokens: Tokens, config: RunConfig) -> Validation:
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
    targets = windows.read(chosen).targets
    n_bytes = max(1, tokenizer.byte_count(targets[targets != IGNORE_INDEX].tolist()))
    return Validation(trainer.step, loss, loss * count / math.log(2) / n_bytes, count, figures)
