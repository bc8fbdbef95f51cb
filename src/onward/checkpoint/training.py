"""The state of a training run on disk, saved beside the training and exact to the bit.

RUN/                    a model folder: config.json and model.safetensors are those of the newest save
  checkpoints/
    best.json           the step of the save that predicts best
    step-0000100/       a save, there whole or not at all
      config.json, model.safetensors    the weights one uses: the averaged ones where the run averages
      state.safetensors                 all other tensors, see `Saver.save`
      progress.json                     how far the run is
      checksums.json                    the sha256 of each of these files
"""

import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from hashlib import file_digest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onward.checkpoint.folder import load_model, save_weights
from onward.checkpoint.weights import SINGLE, fill, read_tensors
from onward.errors import UserError
from onward.files import read_json, remove_leftovers, remove_whole, write_json, written_whole
from onward.model.config import DecoderConfig
from onward.model.decoder import Decoder

CONFIG, STATE, PROGRESS, CHECKSUMS = "config.json", "state.safetensors", "progress.json", "checksums.json"


class Saver:
    """Writes the saves of a run in a thread of its own; the last `keep` (at least 1) and the best of them stay.

    What fails on disk is never raised, and leaves nothing half-written: `told` says it, and the next save tries again.
    One Saver saves in a run folder, which is there already; what killed ones have left in it is removed then.
    """

    def __init__(self, run: Path, keep: int) -> None:
        self.run, self.keep = run, keep
        self.failure: UserError | None = None
        self.thread = ThreadPoolExecutor(1, "saver")
        self.pending: Future[None] | None = None

    def save(
        self,
        model: Decoder,
        optimizers: Sequence[Optimizer],
        progress: dict[str, Any],
        hf: Mapping[str, Any],
        shown: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Copy the state of step `progress["step"]` to the CPU, and write it while the caller goes on.

        Waits for what is under way first. `hf` are keys for config.json besides the architecture's, `shown` averaged
        weights by the names of their parameters. state.safetensors holds the optimizers' tensors as
        optimizer/KEY/PARAMETER and number/KEY/PARAMETER (or GROUP), and where averaged weights are shown, the model's
        own as weight/PARAMETER. A step that is saved already is not written again, but shown in the run folder.
        """
        self.finish()
        for folder in self.run, self.run / "checkpoints":
            remove_leftovers(folder)
        folder = self.folder(progress["step"])
        write: Callable[[], object] = lambda: None
        if not folder.exists():
            own, shown = copied(dict(model.named_parameters())), copied(shown or {})
            state = copied(optimizer_tensors(model, optimizers))
            state |= {f"weight/{name}": own[name] for name in shown}
            write = partial(write_save, folder, model.config, own | shown, state, *deepcopy((progress, hf)))

        def task() -> None:
            write()
            show(folder, self.run)

        self.submit(task, f"saving step {progress['step']}")

    def best(self, step: int, loss: float) -> None:
        """Record the validation loss of a step, if its save is there and better than the best so far, which is kept."""

        def task() -> None:
            known = self.known_best()
            if self.folder(step).exists() and loss < known.get("validation_loss", math.inf):
                write_json(self.run / "checkpoints" / "best.json", {"step": step, "validation_loss": loss})

        self.submit(task, f"recording step {step} as the best")

    def known_best(self) -> dict[str, Any]:
        """What is recorded of the best save that is there."""
        try:
            best = read_json(self.run / "checkpoints" / "best.json")
            return best if self.folder(best["step"]).exists() else {}
        except (UserError, KeyError):
            return {}

    def finish(self) -> None:
        """Wait until all is written."""
        if self.pending:
            self.pending.result()

    def pop_failure(self) -> UserError | None:
        """What went wrong since this was last asked, in a sentence."""
        failure, self.failure = self.failure, None
        return failure

    def folder(self, step: int) -> Path:
        return self.run / "checkpoints" / f"step-{step:07d}"

    def submit(self, task: Callable[[], None], what: str) -> None:
        """Have the thread do a task and then drop old saves."""

        def attempt() -> None:
            try:
                if not self.run.is_dir():
                    raise FileNotFoundError(0, "the folder has vanished")
                task()
                self.drop()
            except Exception as error:  # whatever it is, the training goes on
                reason = getattr(error.__cause__ or error, "strerror", None) or error
                self.failure = UserError(f"{what} in {self.run} failed: {reason}; the saves before are kept")

        self.pending = self.thread.submit(attempt)

    def drop(self) -> None:
        """Remove all saves but the last `keep` and the best."""
        best = self.known_best().get("step")
        for old in saves(self.run)[: -self.keep]:
            if step_of(old) != best:
                remove_whole(old)


@dataclass(frozen=True)
class State:
    """A run as it was saved."""

    model: Decoder  # with its own weights
    tensors: dict[str, Tensor]  # for `restore`, and average/PARAMETER where averaged ones were shown
    progress: dict[str, Any]
    messages: list[str]  # a sentence for each save that was damaged


def saves(run: Path) -> list[Path]:
    """The saves of a run, oldest first."""
    return sorted((p for p in (run / "checkpoints").glob("step-*") if p.name[5:].isdecimal()), key=step_of)


def step_of(save: Path) -> int:
    return int(save.name.removeprefix("step-"))


def load_state(run: Path, device: torch.device) -> State:
    """The newest save that is as it was written, which the run folder then shows; those after it are moved aside, and
    `told` says so.

    A UserError if there is none.
    """
    damages: dict[Path, str] = {}
    for folder in reversed(saves(run)):
        if not (found := damage(folder)):
            break
        damages[folder] = found
    else:
        why = "".join(f" ({folder.name}: {found})" for folder, found in damages.items())
        raise UserError(f"{run} has no save to resume from{why}: start another with --out")
    told = [
        f"{bad} is damaged ({found}): it is kept as damaged-{bad.name}, and {folder.name} is taken"
        for bad, found in damages.items()
    ]
    for bad in damages:
        aside = bad.with_name(f"damaged-{bad.name}")
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):  # another process may have done so
            os.replace(bad, aside)
    with suppress(UserError):  # a disk that is full
        show(folder, run)  # where a kill came before, or what is shown is damaged
    model, _ = load_model(folder, device=device)
    tensors = read_tensors(folder / STATE)
    for name, parameter in model.named_parameters():
        if (own := tensors.pop(f"weight/{name}", None)) is not None:
            tensors[f"average/{name}"] = parameter.data
            parameter.data = own.to(device, copy=True)
    return State(model, tensors, read_json(folder / PROGRESS), told)


def reload(run: Path, model: Decoder, optimizers: Sequence[Optimizer]) -> State:
    """Put the newest good save into a model, compiled or not, and its optimizers, in place; gradients are dropped.

    What a Saver has under way must be finished before.
    """
    state = load_state(run, torch.device("cpu"))
    model.zero_grad()
    with torch.no_grad():
        for parameter, saved in zip(model.parameters(), state.model.parameters(), strict=True):
            parameter.copy_(saved)
    restore(state.tensors, model, optimizers)
    return replace(state, model=model)


def restore(tensors: Mapping[str, Tensor], model: Decoder, optimizers: Sequence[Optimizer]) -> None:
    """Give optimizers, made as those that were saved, their state from the tensors of a `State`."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in tensors.items():
        kind, _, rest = name.partition("/")
        if kind in ("optimizer", "number"):
            key, owner = rest.rsplit("/", 1)
            found[owner][key] = value.item() if kind == "number" else value
    names = {parameter: name for name, parameter in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        optimizer.state.clear()
        for j, group in enumerate(optimizer.param_groups):
            group.update(found[f"{i}.{j}"])
            on_device = group.get("fused") or group.get("capturable")  # else torch wants the count of steps on the CPU
            for parameter in group["params"]:
                for key, value in found[names[parameter]].items():
                    if isinstance(value, Tensor):
                        where = parameter.device if on_device or value.ndim else value.device
                        value = value.to(where, copy=True)
                    optimizer.state[parameter][key] = value


def optimizer_tensors(model: Decoder, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """All that optimizers keep, by its key and the parameter, or the group as OPTIMIZER.GROUP, that it belongs to."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for i, optimizer in enumerate(optimizers):
        kept = {names[parameter]: values for parameter, values in optimizer.state.items()}
        for j, group in enumerate(optimizer.param_groups):
            kept[f"{i}.{j}"] = {key: value for key, value in group.items() if type(value) in (int, float)}
        for owner, values in kept.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{key}/{owner}"] = value
                elif isinstance(value, int | float):
                    dtype = torch.float64 if isinstance(value, float) else torch.int64
                    tensors[f"number/{key}/{owner}"] = torch.tensor(value, dtype=dtype)
                else:
                    kind = f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key}"
                    raise UserError(f"{kind}, and only tensors and numbers can be saved: choose another optimizer")
    return tensors


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def write_save(
    folder: Path,
    config: DecoderConfig,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    progress: dict[str, Any],
    hf: Mapping[str, Any],
) -> None:
    """Write a save, whole or not at all."""
    with written_whole(folder) as new:
        new.mkdir()
        save_weights(config, weights, new, hf)
        fill(new / STATE, state, state.items())
        (new / PROGRESS).write_text(json.dumps(progress))
        sums = {path.name: sha256(path) for path in sorted(new.iterdir())}
        (new / CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n")


def show(folder: Path, run: Path) -> None:
    """Have the run folder hold the model of a save."""
    for name in SINGLE, CONFIG:
        with written_whole(run / name) as new:
            try:
                os.link(folder / name, new)
            except OSError:  # a file system without links
                shutil.copyfile(folder / name, new)


def damage(folder: Path) -> str:
    """What is wrong with a save; "" if each of its files is as it was written."""
    name = CHECKSUMS
    try:
        sums = read_json(folder / name)
        for name in CONFIG, SINGLE, STATE, PROGRESS:
            if sums.get(name) != sha256(folder / name):
                return f"{name} is not as it was written"
    except (UserError, OSError):
        return f"{name} is missing or cannot be read"
    return ""


def sha256(path: Path) -> str:
    """Of a file, from the memory that the system still holds it in where it has just been written."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
