"""Resumes a run from its newest save, after checking that its inputs are unchanged."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from onward.base import fields
from onward.base.device import choose_device
from onward.base.errors import UserError
from onward.base.files import read_json
from onward.checkpoint.divided import parts_reader
from onward.checkpoint.peft.bases import check_base, is_adapter
from onward.checkpoint.saves.newest import SavedState, newest_state
from onward.model.decoder import Decoder
from onward.parallel.new_weights import new_decoder
from onward.text.tokenizer import Tokenizer
from onward.training.clock.budget import Budget
from onward.training.config import RunConfig, seconds
from onward.training.finetuning.base import base_model, load_base, weights_folder
from onward.training.inputs.record import check_inputs, read_config
from onward.training.processes import Processes
from onward.training.run.arrangement import arranged
from onward.training.run.initial_values import read_initial_values
from onward.training.run.preparation import Prepared, with_tokens
from onward.training.run.saved_progress import SavedProgress, saved_progress
from onward.training.run.track import check_trackers
from onward.training.stages import stage_of
from onward.training.step.loss import Loss, LossFunction, as_loss
from onward.training.step.mup import factors_of, scale_weights
from onward.transforms.heads import add_head


def resumed_config(folder: Path, processes: Processes, mesh: str = "") -> tuple[RunConfig, Processes]:
    """Read the configuration of the run to resume in `folder`, and arrange the processes in its mesh or, if not empty,
    in `mesh`; return both. Raises a UserError if the run has finished, or cannot continue in these processes."""
    config = read_config(folder)
    if (folder / "result.json").exists():
        steps = fields.counted(config.steps, "step")
        raise UserError(f"{folder} has finished its {steps}: start another with --out")
    if missing := [module for module in config.modules if module not in sys.modules]:
        raise UserError(f"{folder} was started with code from {', '.join(missing)}: {fields.trusted(missing)}")
    check_trackers(config.track)
    return config, arranged(config, processes, Tokenizer.load(folder).vocab_size, mesh)


def reopened(
    config: RunConfig, folder: Path, loss: Loss | LossFunction | None, processes: Processes
) -> tuple[Prepared, SavedState]:
    """Return the parts of a run to resume (see Prepared), and its newest save. `loss`, unless None, replaces the
    configured loss. Raises a UserError if the inputs of the run have changed since it was started."""
    try:
        device = choose_device(config.device)
    except UserError as error:
        raise UserError(f"{error}, in {folder / 'run.json'}") from None
    tokenizer = Tokenizer.load(folder)
    check_inputs(folder, config.decoder(tokenizer.vocab_size))
    adapter, stage = is_adapter(folder), stage_of(config)
    if adapter:
        check_base(folder, weights_folder(config))
    inputs = stage.open(config, folder, "size" if processes.rank else "sha256")
    where = torch.device("cpu") if processes.mesh.divides else device  # until it is divided
    lazy = processes.mesh.divides
    state = newest_state(folder, where, base=base_model(folder, config, inputs.labels, lazy=lazy), lazy=lazy)
    progress = saved_progress(state)
    hf = load_base(config, lazy=lazy)[1] if adapter else read_json(folder / "config.json")
    trained = as_loss(loss) if loss else stage.loss(config)
    budget = None
    if config.time and progress.costs and not processes.rank:
        budget = Budget.of(seconds(config.time), progress.seconds, progress.costs)
    messages = [*state.messages, *edits(progress, config)]
    return Prepared(config, state.model, tokenizer, inputs, hf, trained, budget, messages=messages), state


def begun(
    config: RunConfig, folder: Path, loss: Loss | LossFunction | None, processes: Processes
) -> tuple[Prepared, None]:
    """Return the parts of a new run (see Prepared) whose model the processes divide among them; the second result,
    None, is in place of a save, which a new run does not have yet. `loss`, unless None, replaces the configured
    loss."""
    tokenizer, stage = Tokenizer.load(folder), stage_of(config)
    inputs = stage.open(config, folder, "size")
    model, fill, hf = new_model(config, tokenizer, inputs.labels)
    read_initial_values(model, folder)
    trained = as_loss(loss) if loss else stage.loss(config)
    return Prepared(config, model, tokenizer, inputs, hf, trained, None, messages=inputs.notes, fill=fill), None


def new_model(
    config: RunConfig, tokenizer: Tokenizer, labels: Sequence[str]
) -> tuple[Decoder, Callable[[Decoder], object], dict[str, Any]]:
    """Return the model of a new run on the meta device, a function that sets its weights once the processes have
    divided it, and the content of its Hugging Face config.json. `labels` are those of a classifier's or reward model's
    head, () without a head. The function raises a UserError if stored weights are not finite."""
    if not config.base:
        decoder = config.decoder(tokenizer.vocab_size)
        model, draw = new_decoder(decoder, config.seed)

        def fill(model: Decoder) -> None:
            draw(model)
            scale_weights(model, factors_of(config, decoder))

        return model, fill, with_tokens({}, tokenizer)
    model, hf = load_base(config, lazy=True)
    if labels:
        add_head(model, labels)
    return model, parts_reader(model, config.base), with_tokens(hf, tokenizer)


def edits(progress: SavedProgress, config: RunConfig) -> list[str]:
    """Compare the configuration in run.json (`config`), which a user may edit, with the one in the save; return a list
    with a sentence that names the fields that differ, or an empty list."""
    known, now = progress.config, fields.plain(config)
    by_clock = ("time", "steps", "decay") if known.get("time") and config.steps else ()
    edited = [name for name in now if now[name] != known.get(name) and name not in ("out", "mesh", *by_clock)]
    return [f"run.json has been edited: {', '.join(edited)} from here on"] if edited else []
