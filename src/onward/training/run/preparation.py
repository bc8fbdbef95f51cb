"""What a new run begins with: its tokens, its model, and the options left open, which are fixed here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from onward import fields
from onward.data.progress import Progress
from onward.device import choose_device
from onward.files import read_json, write_json
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer
from onward.training.clock.budget import Budget
from onward.training.clock.calibration import Sampler, calibrated
from onward.training.clock.dial import Choice, dial
from onward.training.config import RunConfig, seconds
from onward.training.processes import Processes
from onward.training.run.inputs import Inputs
from onward.training.step.loss import Loss
from onward.training.step.mup import factors_of, scale_weights
from onward.training.tasks import task_of
from onward.transforms.heads import add_head


@dataclass(frozen=True)
class Prepared:
    """The parts of a new run."""

    config: RunConfig
    model: Decoder
    tokenizer: Tokenizer
    inputs: Inputs
    hf: dict[str, Any]
    loss: Loss
    budget: Budget | None  # of a run of a given time
    choice: Choice | None  # of the size, where it was left open
    seconds: float  # of that time which are gone


def prepared(
    config: RunConfig,
    folder: Path,
    model: Decoder | None,
    hf: Mapping[str, Any],
    loss: Loss | None,
    sample: Sampler,
    progress: Progress,
) -> Prepared:
    """Prepare the tokens and the model of a run, in the first process, and fix its options."""
    device = choose_device(config.device)
    task = task_of(config)
    tokenizer = task.prepare(config, folder, progress)
    inputs = task.open(config, folder, "sha256")
    import_module("torch._dynamo")  # as the first optimizer does, for a second: before the time begins
    began, choice = perf_counter(), None
    if config.dialed and model is None:
        config, choice = dial(config, tokenizer, inputs, device, seconds(config.time), loss or task.loss(config))
        record = read_json(folder / "inputs.json")
        write_json(folder / "inputs.json", record | {"model": fields.plain(config.decoder(tokenizer.vocab_size))})
    torch.manual_seed(config.seed)
    if model is None:
        model = Decoder(config.decoder(tokenizer.vocab_size))
        scale_weights(model, factors_of(config, model.config))
    model = model.to(device)
    if inputs.labels:
        add_head(model, inputs.labels)
    hf = {**hf, "bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.end_ids or None}
    config, loss = replace(config, device=str(device)), loss or task.loss(config)
    config, budget = calibrated(config, model, tokenizer, inputs, sample, Processes.join(), loss, began)
    spent = perf_counter() - began if config.time else 0.0
    return Prepared(config, model, tokenizer, inputs, hf, loss, budget, choice, spent)
