"""Opens the folder of a run in all its processes: at its newest save, after checking that its inputs are unchanged, or
at the start of a run whose model is sharded over the processes."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from onward.base import fields
from onward.base.device import choose_device
from onward.base.errors import UserError
from onward.base.files import read_json
from onward.checkpoint.draft_heads import is_draft_head, mismatch
from onward.checkpoint.peft.bases import check_base
from onward.checkpoint.saves.newest import newest_state
from onward.config.mesh import Mesh
from onward.hub.folder import is_adapter
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer
from onward.training.clock.budget import Budget
from onward.training.config import RunConfig, seconds
from onward.training.finetuning.base import base_model, load_base, weights_folder
from onward.training.inputs.record import check_inputs, completed, read_config
from onward.training.run.beginning import Parts, divides, with_tokens
from onward.training.run.initial_values import read_initial_values
from onward.training.run.room import check_room
from onward.training.run.saved_progress import SavedProgress, fitting, saved_progress
from onward.training.run.tasks import validation_tasks
from onward.training.run.together import planned
from onward.training.run.track import check_trackers
from onward.training.stages import stage_of
from onward.training.step.loss import Loss, LossFunction, as_loss
from onward.training.step.mup import factors_of, scale_weights
from onward.transforms.heads import add_head

if TYPE_CHECKING:
    from onward.parallel.processes import Processes


def resumed_config(folder: Path) -> RunConfig:
    """Read the configuration of the run to resume in `folder`. Raises a UserError if the run has finished, or cannot
    continue in this process."""
    config = read_config(folder)
    if (folder / "result.json").exists():
        steps = fields.counted(config.steps, "step")
        raise UserError(f"{folder} has finished its {steps}: start another with --out")
    if missing := [module for module in config.modules if module not in sys.modules]:
        raise UserError(f"{folder} was started with code from {', '.join(missing)}: {fields.trusted(missing)}")
    check_trackers(config.track)
    return config


def replanned(config: RunConfig, folder: Path, processes: "Processes | None", mesh: str) -> "Processes | None":
    """Return the processes that resume a run, with their mesh: `mesh` or, if this is empty, the configured mesh or, if
    that needs another number of processes, a mesh chosen by the first process; see `planned`."""
    if config.mesh and Mesh.parse(config.mesh).count != (processes.count if processes else 1):
        config = replace(config, mesh="")
    if processes is None and not (mesh or config.mesh):
        return None
    decoder = config.decoder(Tokenizer.load(folder).vocab_size)
    chosen = lambda: str(planned(config, decoder, processes).mesh) if processes else ""  # type: ignore[union-attr]
    text = mesh or config.mesh or (processes.agreed(chosen) if processes else "")
    return planned(config, decoder, processes, text)


def reopened(config: RunConfig, folder: Path, loss: Loss | LossFunction | None, processes: "Processes | None") -> Parts:
    """Return the parts of a run to resume at its newest save. `loss`, unless None, replaces the configured loss. Raises
    a UserError if the inputs of the run have changed since it was started."""
    try:
        device = choose_device(config.device)
    except UserError as error:
        raise UserError(f"{error}, in {folder / 'run.json'}") from None
    tokenizer = Tokenizer.load(folder)
    check_inputs(folder, config.decoder(tokenizer.vocab_size))
    room = [] if processes else check_room(config, config.decoder(tokenizer.vocab_size), device)
    adapter, stage, lazy = is_adapter(folder), stage_of(config), divides(processes)
    if adapter:
        check_base(folder, weights_folder(config))
    draft = is_draft_head(folder)
    if draft and (reason := mismatch(folder, weights_folder(config))):
        raise UserError(reason)
    first = not (processes and processes.rank)
    inputs = stage.open(config, folder, "sha256" if first else "size")
    where = torch.device("cpu") if lazy else device  # until the model is sharded
    state = newest_state(folder, where, base=base_model(folder, config, inputs.labels, lazy=lazy), lazy=lazy)
    saved = saved_progress(state)
    budget = None
    if config.time and saved.costs and first:
        budget = Budget.of(seconds(config.time), saved.seconds, saved.costs)
    return Parts(
        config=config,
        processes=processes,
        tokenizer=tokenizer,
        inputs=inputs,
        model=state.model,
        hf=load_base(config, lazy=lazy)[1] if adapter or draft else read_json(folder / "config.json"),
        loss=as_loss(loss) if loss else stage.loss(config),
        tasks=validation_tasks(config, inputs, tokenizer),
        budget=budget,
        messages=[*state.messages, *edits(saved, config), *room],
        progress=saved.reached,
        state=fitting(state, config),
    )


def outline(config: RunConfig, folder: Path, loss: Loss | LossFunction | None, processes: "Processes | None") -> Parts:
    """Return the parts of a new run whose model is sharded over the `processes`: the model is on the meta device, and
    `fill` sets its weights after sharding, or raises a UserError if stored weights are not finite. `loss`, unless None,
    replaces the configured loss."""
    from onward.checkpoint.divided import parts_reader
    from onward.parallel.new_weights import new_decoder

    tokenizer, stage = Tokenizer.load(folder), stage_of(config)
    inputs = stage.open(config, folder, "size")
    hf: dict[str, Any] = {}
    fill: Callable[[Decoder], object]
    if config.base:
        model, hf = load_base(config, lazy=True)
        if inputs.labels:
            add_head(model, inputs.labels)
        fill = parts_reader(model, config.base)
    else:
        model, draw = new_decoder(config.decoder(tokenizer.vocab_size), config.seed)
        fill = lambda model: (draw(model), scale_weights(model, factors_of(config, model.config)))
    read_initial_values(model, folder)
    return Parts(
        config=config,
        processes=processes,
        tokenizer=tokenizer,
        inputs=inputs,
        model=model,
        hf=with_tokens(hf, tokenizer),
        loss=as_loss(loss) if loss else stage.loss(config),
        tasks=validation_tasks(config, inputs, tokenizer),
        messages=inputs.notes,
        fill=fill,
    )


def edits(progress: SavedProgress, config: RunConfig) -> list[str]:
    """Compare the configuration in run.json (`config`), which a user may edit, with the one in the save; return a list
    with one sentence that names the changed fields, or an empty list."""
    now = fields.plain(config)
    try:
        known = completed(type(config), progress.config, "progress")
    except UserError:  # the saved options come from another version
        known = dict(progress.config)
    by_clock = ("time", "steps", "decay") if known.get("time") and config.steps else ()
    edited = [name for name in now if now[name] != known.get(name) and name not in ("out", "mesh", *by_clock)]
    return [f"run.json has been edited: the new values of {', '.join(edited)} apply from here on"] if edited else []
