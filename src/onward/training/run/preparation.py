"""How a run begins: its model, its tokens, and its open options, which are fixed here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from onward.base import fields
from onward.base.device import choose_device
from onward.base.errors import UserError
from onward.base.files import read_json, write_json
from onward.config.lora import EVA
from onward.data.progress import Progress
from onward.evaluation.tasks import tasks_of
from onward.model.decoder import Decoder
from onward.parallel.new_weights import new_decoder
from onward.text.tokenizer import Tokenizer
from onward.training.clock.budget import Budget, time_left
from onward.training.clock.calibration import Sampler, calibrated
from onward.training.clock.dial import Choice, dial
from onward.training.config import RunConfig, seconds
from onward.training.finetuning.base import base_config, load_base
from onward.training.finetuning.config import FinetuneConfig
from onward.training.inputs.texts import Inputs
from onward.training.processes import Processes
from onward.training.run.arrangement import arranged, divides
from onward.training.run.tasks import validation_tasks
from onward.training.run.track import check_trackers
from onward.training.stages import stage_of
from onward.training.step.loss import Loss, LossFunction, as_loss
from onward.training.step.mup import factors_of, scale_weights
from onward.training.step.optimizer import check_optimizer
from onward.training.step.tasks import task_results
from onward.transforms.heads import add_head


@dataclass(frozen=True)
class Prepared:
    """The parts of a run, new or resumed: configuration, model, tokenizer, inputs, loss and time budget. `hf` is the
    content of the model's Hugging Face config.json. `fill` sets the weights of a new model on the meta device, after
    the processes have divided it."""

    config: RunConfig
    model: Decoder
    tokenizer: Tokenizer
    inputs: Inputs
    hf: dict[str, Any]
    loss: Loss
    budget: Budget | None  # budget of a run with a time limit, in the first process until the number of steps is fixed
    choice: Choice | None = None  # chosen model size, if the options of a new run leave it open
    fresh: bool = False  # whether the weights are newly initialized
    messages: Sequence[str] = ()  # messages to the user
    fill: Callable[[Decoder], object] = lambda model: None


def chosen_base(
    config: RunConfig, model: Decoder | None, processes: Processes
) -> tuple[RunConfig, Decoder | None, dict[str, Any]]:
    """Return the configuration of a new run, the model to begin from, and the content of its Hugging Face config.json.

    The model is the argument `model` or, if that is None, the model in `config.base`: loaded or, if the processes
    divide it among them, with deferred weights. For a run from new weights the model is None, and the dict is {}.
    Raises a UserError for an option that fine-tuning does not use.
    """
    hf: dict[str, Any] = {}
    for module in config.imports:
        fields.import_parts(module)
    for name in config.fixed:
        if name in fields.changed_fields(config):
            raise UserError(f"{name} is given, which a run on examples does not read: leave it out")
    if model is None and config.base:
        lazy = processes.count > 1 and divides(config, base_config(config), processes)
        adapters = config.adapters if isinstance(config, FinetuneConfig) else None
        inputs = adapters and isinstance(adapters.init, EVA)  # it begins with the inputs of layers
        model, hf = load_base(config, lazy=lazy and not inputs)
    if model is not None:
        config = replace(config, preset="mini", model=fields.plain(model.config))
    return config, model, hf


def check_options(config: RunConfig, processes: Processes) -> None:
    """Raise a UserError for options with which no run can begin, such as an unknown optimizer; called before any text
    is read."""
    config.decoder(1)
    if config.evaluate_tasks:
        tasks_of(config.evaluate_tasks, "evaluate_tasks")
    elif config.task_limit != RunConfig.task_limit:
        raise UserError(
            f"task_limit is {config.task_limit}, and no task is asked: add --evaluate-tasks, or leave it out"
        )
    check_optimizer(config.optimizer or "adamw")
    check_trackers(config.track)
    if config.mesh:
        arranged(config, processes, config.decoder(1).vocab_size)
    else:
        processes.check_batches(config.accumulation)


def prepared(
    config: RunConfig,
    folder: Path,
    model: Decoder | None,
    hf: dict[str, Any],
    loss: Loss | LossFunction | None,
    sample: Sampler,
    progress: Progress,
    began: float,
    processes: Processes,
) -> tuple[Prepared, float]:
    """Prepare the tokens and the model of a new run in the first process, and fix the options left open. `model` and
    `hf` are results of `chosen_base`; the other arguments are those of `Run.start`. Also returns the seconds of a time
    limit that are already spent; these count from `began`, a value of `time.perf_counter`."""
    device, fresh = choose_device(config.device), model is None
    stage = stage_of(config)
    tokenizer = stage.prepare(config, folder, progress)
    inputs = stage.open(config, folder, "sha256")
    import_module("torch._dynamo")  # as the first optimizer does, for a second: not while steps are timed
    choice = None
    if config.dialed and fresh:
        trained = as_loss(loss) if loss else stage.loss(config)
        left = time_left(seconds(config.time), perf_counter() - began)
        config, choice = dial(config, tokenizer, inputs, device, left, trained)
        record = read_json(folder / "inputs.json")
        write_json(folder / "inputs.json", record | {"model": fields.plain(config.decoder(tokenizer.vocab_size))})
    decoder = model.config if model else config.decoder(tokenizer.vocab_size)
    in_parts = divides(config, decoder, processes)
    torch.manual_seed(config.seed)
    if model is None and in_parts:
        model, _ = new_decoder(decoder, config.seed)
    elif model is None:
        model = Decoder(decoder)
        scale_weights(model, factors_of(config, decoder))
    if not in_parts:  # a model that is divided need not fit a device
        model = model.to(device)
    if inputs.labels:
        add_head(model, inputs.labels)
    config, notes = stage.begin(config, folder, model, inputs)
    hf = with_tokens(hf, tokenizer)
    config = replace(config, device=str(device))
    trained = as_loss(loss) if loss else stage.loss(config)
    tasks = validation_tasks(config, inputs, tokenizer)

    def sample_and_ask(model: Decoder, tokenizer: Tokenizer) -> None:
        sample(model, tokenizer)
        task_results(tasks, model, tokenizer, config.task_limit)

    timed, timed_loss = (stand_in(model, device), None) if is_outline(model) else (model, trained)
    config, budget = calibrated(config, timed, tokenizer, inputs, sample_and_ask, processes, timed_loss, began)
    spent = perf_counter() - began if config.time else 0.0
    messages = [*inputs.notes, *notes]
    return Prepared(config, model, tokenizer, inputs, hf, trained, budget, choice, fresh, messages), spent


def with_tokens(hf: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return `hf`, the content of a model's Hugging Face config.json, with the ids of the tokenizer's begin and end
    tokens."""
    return {**hf, "bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.end_ids or None}


def is_outline(model: Decoder) -> bool:
    """Return whether weights of a model are on the meta device, without values until the processes have divided it."""
    return any(parameter.is_meta for parameter in model.parameters())


def stand_in(model: Decoder, device: torch.device) -> Decoder:
    """Return a decoder of at most two blocks like those of a larger model, to time precisions and backends of experts
    on `device` in place of the larger model."""
    return Decoder(replace(model.config, n_layers=min(2, model.config.n_layers))).to(device)
