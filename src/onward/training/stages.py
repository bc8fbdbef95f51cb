"""The stages of training: pre-training on texts, and fine-tuning on examples."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from onward.data.progress import Progress
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer
from onward.training.config import RunConfig
from onward.training.finetuning.base import base_of
from onward.training.finetuning.config import FinetuneConfig
from onward.training.inputs.beginning import begin
from onward.training.inputs.examples import open_examples, prepare_examples
from onward.training.inputs.record import read_config
from onward.training.inputs.texts import Inputs, open_inputs, prepare_inputs
from onward.training.step.loss import Loss
from onward.training.step.own_loss import text_loss


@dataclass(frozen=True)
class TrainingStage:
    """A stage of training, pre-training or fine-tuning, as functions of a run's configuration: `prepare` tokenizes the
    data, writes the tokens to the run folder and returns the tokenizer, `open` opens the tokens, and `loss` makes the
    loss. `begin` completes a new run, for example by initializing adapters, and returns the configuration, with values
    for options that were left open, and messages for the user."""

    prepare: Callable[[Any, Path, Progress], Tokenizer]
    open: Callable[..., Inputs]
    begin: Callable[[Any, Path, Decoder, Inputs], tuple[Any, list[str]]]
    loss: Callable[[Any], Loss]


def unchanged(config: Any, folder: Path, model: Decoder, inputs: Inputs) -> tuple[Any, list[str]]:
    return config, []


PRETRAINING = TrainingStage(prepare_inputs, open_inputs, unchanged, text_loss)
FINETUNING = TrainingStage(prepare_examples, open_examples, begin, lambda config: config.method.loss(base_of(config)))


def stage_of(config: RunConfig) -> TrainingStage:
    return FINETUNING if isinstance(config, FinetuneConfig) else PRETRAINING


def inputs_of(folder: Path, verify: Literal["size", "sha256"] = "size") -> Inputs:
    """Return the inputs of the run in a folder, verified by the sizes of files or by checksums."""
    config = read_config(folder)
    return stage_of(config).open(config, folder, verify)
