"""The start of a new run: sets up its processes, its tokens and its model, and chooses the options that the user left
open."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from onward.base import fields
from onward.base.alone import ALONE
from onward.base.device import choose_device
from onward.base.errors import UserError
from onward.base.files import read_json, write_json
from onward.checkpoint.saves.newest import SavedState
from onward.config.decoder import DecoderConfig
from onward.config.lora import EVA
from onward.data.progress import Progress
from onward.evaluation.tasks import Task, tasks_of
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer
from onward.training.clock.budget import Budget, time_left
from onward.training.clock.calibration import Sampler, calibrated
from onward.training.clock.dial import Choice, dial
from onward.training.config import RunConfig, seconds
from onward.training.finetuning.base import base_config, load_base, with_merged_base
from onward.training.inputs.texts import Inputs
from onward.training.run.initial_values import write_initial_values
from onward.training.run.room import check_room
from onward.training.run.saved_progress import RunProgress
from onward.training.run.tasks import validation_tasks
from onward.training.run.together import planned
from onward.training.run.track import check_trackers
from onward.training.stages import stage_of
from onward.training.step.loss import Loss, LossFunction, as_loss
from onward.training.step.mup import factors_of, scale_weights
from onward.training.step.optimizer import check_optimizer
from onward.training.step.own_loss import text_loss
from onward.training.step.tasks import task_results
from onward.transforms.heads import add_head

if TYPE_CHECKING:
    from onward.parallel.processes import Processes


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The components from which a new or resumed Run is made."""

    config: RunConfig
    processes: "Processes | None"  # the processes with their mesh; None: a single process
    tokenizer: Tokenizer
    inputs: Inputs
    model: Decoder
    hf: dict[str, Any]  # content of the model's Hugging Face config.json
    loss: Loss
    tasks: Sequence[Task]  # tasks that are scored at each validation
    budget: Budget | None = None  # for a time limit, only in the first process, until the number of steps is fixed
    choice: Choice | None = None  # chosen model size, if the options of a new run leave it open
    fresh: bool = False  # whether the weights are newly initialized
    messages: Sequence[str] = ()  # messages to the user
    progress: RunProgress = RunProgress()
    state: SavedState | None = None  # the save that the run is resumed from
    fill: Callable[[Decoder], object] = lambda model: None  # sets the weights of a sharded model

    @property
    def whole(self) -> bool:
        """Whether the weights of the model have values; weights on the meta device get their values after the model is
        sharded."""
        return not any(parameter.is_meta for parameter in self.model.parameters())


@dataclass(frozen=True)
class Given:
    """The arguments of a new run in addition to its configuration; see `Run.start`."""

    model: Decoder | None
    loss: Loss | LossFunction | None
    sample: Sampler
    progress: Progress
    began: float


def begun(config: RunConfig, given: Given, processes: "Processes | None") -> Parts:
    """Start a new run in its folder: choose the mesh of its processes, tokenize the data, make the model, choose the
    options left open, and write run.json. Called in the first process. If the processes shard the model, its weights
    are not loaded yet (see `reopening.outline`), unless EVA needs them."""
    folder, device = Path(config.out), choose_device(config.device)
    for module in config.imports:
        fields.import_parts(module)
    for name in config.fixed:
        if name in fields.changed_fields(config):
            raise UserError(f"{name} is not an option of runs on examples: leave it out")
    if config.base:
        config = with_merged_base(config, folder)

    # the mesh, unless it depends on the tokenizer's vocabulary; a base model is loaded for this mesh
    known = known_decoder(config, given.model) if processes or config.mesh else None
    if known:
        processes = planned(config, known, processes)
    model, hf = given.model, dict[str, Any]()
    if model is None and config.base:
        model, hf = load_base(config, lazy=divides(processes) and not starts_with_inputs(config))
    if model is not None:
        config = replace(config, preset="mini", model=fields.plain(model.config))
    check_options(config)
    if processes:
        processes.check_batches(config.accumulation)

    # the data
    stage, fresh = stage_of(config), model is None
    tokenizer = stage.prepare(config, folder, given.progress)
    inputs = stage.open(config, folder, "sha256")
    # the first optimizer imports it, which takes a second: import it before steps are timed
    import_module("torch._dynamo")

    # the model
    loss = lambda: as_loss(given.loss) if given.loss else stage.loss(config)
    choice = None
    if config.dialed and fresh:
        left = time_left(seconds(config.time), perf_counter() - given.began)
        config, choice = dial(config, tokenizer, inputs, device, left, loss())
        record = read_json(folder / "inputs.json")
        write_json(folder / "inputs.json", record | {"model": fields.plain(config.decoder(tokenizer.vocab_size))})
    room = [] if processes else check_room(config, config.decoder(tokenizer.vocab_size), device)
    torch.manual_seed(config.seed)
    if model is None:
        decoder = config.decoder(tokenizer.vocab_size)
        if processes and not known:
            processes = planned(config, decoder, processes)
        model = new_model(config, decoder, divided=divides(processes))
    if not divides(processes):  # a sharded model may be too large for one device
        model = model.to(device)
    if inputs.labels:
        add_head(model, inputs.labels)

    # the options left open
    config, notes = stage.begin(config, folder, model, inputs)
    config = replace(config, device=str(device))
    parts = Parts(
        config=config,
        processes=processes,
        tokenizer=tokenizer,
        inputs=inputs,
        model=model,
        hf=with_tokens(hf, tokenizer),
        loss=loss(),
        tasks=validation_tasks(config, inputs, tokenizer),
        choice=choice,
        fresh=fresh,
        messages=[*inputs.notes, *notes, *room],
    )
    parts = timed(parts, given)
    if processes:  # checked before run.json makes the folder permanent
        processes.check_windows(len(inputs.windows(parts.config, model.config.context_length)))
    write_json(folder / "run.json", fields.plain(parts.config))
    if not parts.whole:
        write_initial_values(model, folder)
    return parts


def known_decoder(config: RunConfig, model: Decoder | None) -> DecoderConfig | None:
    """Return the decoder for which processes plan their mesh before the data is read; None for a mesh chosen by Onward
    for new weights, since their number depends on the tokenizer."""
    if model is not None:
        return model.config
    if config.base:
        return base_config(config)
    return config.decoder(1) if config.mesh else None


def divides(processes: "Processes | None") -> bool:
    """Return whether processes shard a model, so that no process should load the whole model."""
    return bool(processes and processes.divides)


def starts_with_inputs(config: RunConfig) -> bool:
    """Return whether the adapters of a run are initialized from the inputs of layers (EVA), which needs forward passes
    of the whole model."""
    return config.adapters is not None and isinstance(config.adapters.init, EVA)


def check_options(config: RunConfig) -> None:
    """Raise a UserError for options that no run can start with, such as an unknown optimizer; called before any text is
    read."""
    config.decoder(1)
    if config.evaluate_tasks:
        tasks_of(config.evaluate_tasks, "evaluate_tasks")
    elif config.task_limit != RunConfig.task_limit:
        raise UserError(
            f"task_limit is {config.task_limit} without tasks: add --evaluate-tasks, or leave out task_limit"
        )
    check_optimizer(config.optimizer or "adamw")
    text_loss(config)
    check_trackers(config.track)


def new_model(config: RunConfig, decoder: DecoderConfig, *, divided: bool) -> Decoder:
    """Return a decoder with new weights or, if processes divide it, on the meta device."""
    if divided:
        from onward.parallel.new_weights import new_decoder

        return new_decoder(decoder, config.seed)[0]
    model = Decoder(decoder)
    if config.mup:
        scale_weights(model, factors_of(config, decoder))
    return model


def timed(parts: Parts, given: Given) -> Parts:
    """Return the parts of a new run with its open options chosen by timing, and with the budget of a time limit."""
    p, device = parts, torch.device(parts.config.device)

    def sample_and_ask(model: Decoder, tokenizer: Tokenizer) -> None:
        given.sample(model, tokenizer)
        task_results(p.tasks, model, tokenizer, p.config.task_limit)

    trial, loss = (p.model, p.loss) if p.whole else (stand_in(p.model, device), None)
    config, budget = calibrated(
        p.config, trial, p.tokenizer, p.inputs, sample_and_ask, p.processes or ALONE, loss, given.began
    )
    spent = perf_counter() - given.began if config.time else 0.0
    return replace(p, config=config, budget=budget, progress=RunProgress(seconds=spent))


def with_tokens(hf: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of a config.json with the ids of the tokenizer's begin and end tokens."""
    return {**hf, "bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.end_ids or None}


def stand_in(model: Decoder, device: torch.device) -> Decoder:
    """Return a decoder with at most two blocks like those of a larger model, used in its place to time steps."""
    return Decoder(replace(model.config, n_layers=min(2, model.config.n_layers))).to(device)
