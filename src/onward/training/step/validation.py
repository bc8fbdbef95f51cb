"""Validation during a run: the loss on a part of the validation text, and measurements of the model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onward.data.windows import IGNORE_INDEX, HeldOutWindows
from onward.evaluation.tasks import Task
from onward.text.tokenizer import Tokenizer
from onward.training.config import RunConfig
from onward.training.step.layers import measure
from onward.training.step.loss import Loss, mean_figures
from onward.training.step.tasks import task_results
from onward.training.step.trainer import Trainer


@dataclass(frozen=True)
class Validation:
    """The result of a validation during a run: loss and bits per byte over `tokens` tokens of the validation text, and
    other measurements (`figures`)."""

    step: int
    validation_loss: float  # nats per token
    bits_per_byte: float  # bits per byte of the text; NaN if the loss is not a mean over tokens
    tokens: int
    figures: dict[str, float] = field(default_factory=dict)


def validate(
    trainer: Trainer,
    tokenizer: Tokenizer,
    windows: HeldOutWindows,
    config: RunConfig,
    loss: Loss,
    sets: Mapping[str, HeldOutWindows] | None = None,
    tasks: Sequence[Task] = (),
) -> Validation:
    """Compute the mean loss of the trainer's model over about `config.validation_tokens` tokens of evenly spaced
    validation windows, in the precision of training and with averaged weights if the trainer averages them. The figures
    of the result include the loss on each of the `sets`, the validation windows of each source by name, and the score
    of each of the `tasks`."""
    model, size = trainer.model, config.batch_size
    apart = max(1, windows.num_tokens // config.validation_tokens)
    chosen = range(0, len(windows), apart)
    with trainer.averaged():
        batches = (windows.read(chosen[i : i + size]).to(model.device) for i in range(0, len(chosen), size))
        means = mean_figures(model, batches, loss, config.precision)
        divided = trainer.processes and trainer.processes.divides  # layers of a sharded model are not measured
        figures = {} if divided else measure(model, windows.read(chosen[:size]).to(model.device))
        for name, own in (sets or {}).items():
            rows = range(0, len(own), max(1, own.num_tokens // config.validation_tokens))
            parts = (own.read(rows[i : i + size]).to(model.device) for i in range(0, len(rows), size))
            figures[f"set_loss/{name}"] = mean_figures(model, parts, loss, config.precision).loss
        for result in task_results(tasks, model, tokenizer, config.task_limit):
            figures[f"task/{result.task}"] = result.score
    batch = windows.read(chosen)
    targets = batch.targets[batch.targets != IGNORE_INDEX].tolist()
    bits = math.nan
    if batch.divisor == len(targets):
        bits = means.loss * len(targets) / math.log(2) / max(1, tokenizer.byte_count(targets))
    return Validation(trainer.step, means.loss, bits, len(targets), means.figures | figures)
