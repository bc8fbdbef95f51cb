"""What a run trains on, and the loss: texts in pre-training, examples in fine-tuning."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.data.progress import Progress
from onward.text.tokenizer import Tokenizer
from onward.training.config import RunConfig
from onward.training.finetuning.config import FinetuneConfig
from onward.training.finetuning.example_inputs import open_examples, prepare_examples
from onward.training.finetuning.methods import METHODS
from onward.training.run.inputs import Inputs, open_inputs, prepare_inputs, read_config
from onward.training.step.loss import CrossEntropy, Loss


@dataclass(frozen=True)
class Task:
    """How the inputs of a run are made and opened, and its loss."""

    prepare: Callable[[Any, Path, Progress], Tokenizer]
    open: Callable[..., Inputs]
    loss: Callable[[Any], Loss]


def cross_entropy(config: RunConfig) -> Loss:
    """The configured cross-entropy."""
    return CrossEntropy(config.z_loss, config.label_smoothing, config.loss_chunk)


PRETRAINING = Task(prepare_inputs, open_inputs, cross_entropy)
FINETUNING = Task(prepare_examples, open_examples, lambda config: METHODS[config.method].loss(config))


def task_of(config: RunConfig) -> Task:
    """The task of a configuration."""
    return FINETUNING if isinstance(config, FinetuneConfig) else PRETRAINING


def inputs_of(folder: Path) -> Inputs:
    """The inputs of a run, of which only the sizes are verified."""
    config = read_config(folder)
    return task_of(config).open(config, folder, "size")
