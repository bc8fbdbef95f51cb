"""The state of a training run on disk, written in a thread beside the training, and exact to the bit.

RUN/                    a model folder: config.json and model.safetensors are those of the newest save
  checkpoints/
    best.json           the step of the save that predicts best
    step-0000100/       a save, there whole or not at all
      config.json, model.safetensors    the whole model for use: averaged weights where the run averages them; of a run
                                        of adapters, the files of an adapter instead, and all its tensors in the state
      state.safetensors                 the other tensors of the trainer, of trainable parameters only
      progress.json                     the step, the position in the data, and the other numbers
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onward import fields
from onward.checkpoint.huggingface.folder import label_keys, load_model, save_weights
from onward.checkpoint.peft.adapters import ADAPTER_FILES, AdapterFiles, adapter_files, write_adapter
from onward.checkpoint.peft.bases import CONFIG as ADAPTER_CONFIG
from onward.checkpoint.peft.bases import BaseModel
from onward.checkpoint.weights import SINGLE, fill, read_tensors
from onward.config.decoder import DecoderConfig
from onward.errors import UserError
from onward.files import file_sha256, read_json, remove_leftovers, remove_whole, write_json, written_whole
from onward.model.decoder import Decoder

CONFIG, STATE, PROGRESS, CHECKSUMS = "config.json", "state.safetensors", "progress.json", "checksums.json"
KINDS = "weight/", "average/"
LOSS = "loss/"


@dataclass(frozen=True)
class TrainerState:
    """Everything that a trainer needs to go on exactly.

    `tensors` are named after the trainable parameters; frozen parameters have none:
      weight/PARAMETER         the parameter
      average/PARAMETER        its moving average, where the trainer keeps one
      optimizer/KEY/PARAMETER  a tensor that the optimizer keeps for it
      loss/NAME                a tensor that the loss keeps between steps
      number/KEY/PARAMETER     a number that the optimizer keeps for it, or number/KEY/OPTIMIZER.GROUP for a group

    These names do not depend on how many processes train. A sharded parameter (DTensor) has one entry, under the name
    of the whole parameter: `copied` is the one place that would gather it, or hand its shards to
    torch.distributed.checkpoint under the same name.
    """

    tensors: dict[str, Tensor]
    progress: dict[str, Any]  # JSON: "step", "frozen" (names of frozen parameters), and other numbers


@dataclass(frozen=True)
class SavedState(TrainerState):
    """A state that was read from a save, and the model that it belongs to."""

    folder: Path  # of the save
    model: Decoder  # with the weights that are trained, not their average
    messages: list[str]  # a sentence for each damaged save


@dataclass(frozen=True)
class Best:
    """The content of best.json."""

    step: int
    validation_loss: float


class Saver:
    """Writes the saves of a run in a thread of its own; keeps the last `keep` (at least 1) and the best of them.

    Errors of the disk are never raised, and leave no half-written file: `pop_failure` returns them, and the next save
    tries again. The run folder must exist and have one Saver, which removes what killed writers left in it.
    """

    def __init__(self, run: Path, keep: int, base: BaseModel | None = None) -> None:
        """`base` is that of a model with adapters, of which only these and what else is trained are written."""
        self.run, self.keep, self.base = run, keep, base
        self.failure: UserError | None = None
        self.thread = ThreadPoolExecutor(1, "saver")
        self.pending: Future[None] | None = None

    def save(
        self,
        model: Decoder,
        state: TrainerState,
        hf: Mapping[str, Any],
    ) -> None:
        """Copy the state of step `state.progress["step"]` to the CPU, and write it while the caller goes on.

        Waits for the write under way first. `hf` are keys for config.json besides the architecture's. The averages,
        or the weights where there are none, and the model's frozen parameters make model.safetensors; the rest goes
        into state.safetensors. A step that is saved already is not written again, but shown in the run folder.
        """
        self.finish()
        for folder in self.run, self.run / "checkpoints":
            remove_leftovers(folder)
        step = state.progress["step"]
        folder = self.folder(step)
        write: Callable[[], object] = lambda: None
        if self.base is not None and not folder.exists():
            adapter = adapter_files(model, hf, self.base)
            parts = {name: t.detach().to("cpu", copy=True) for name, t in adapter.tensors.items()}
            files = replace(adapter, tensors=parts)
            write = partial(write_adapter_save, folder, files, copied(state.tensors), deepcopy(state.progress))
        elif not folder.exists():
            frozen = {n: p for n, p in model.named_parameters() if f"weight/{n}" not in state.tensors}
            tensors = copied(state.tensors), copied(frozen)
            values = deepcopy((state.progress, {**hf, **label_keys(model)}))
            write = partial(write_save, folder, model.config, *tensors, *values)

        def task() -> None:
            write()
            show(folder, self.run)

        self.submit(task, f"saving step {step}")

    def best(self, step: int, loss: float) -> None:
        """Record a step and its validation loss as the best, if it is saved and better than the best so far."""

        def task() -> None:
            known = self.known_best()
            if self.folder(step).exists() and loss < known.get("validation_loss", math.inf):
                write_json(self.run / "checkpoints" / "best.json", {"step": step, "validation_loss": loss})

        self.submit(task, f"recording step {step} as the best")

    def known_best(self) -> dict[str, Any]:
        """The step and validation loss of the best save that is still there; {} if there is none."""
        try:
            best = fields.build(Best, read_json(self.run / "checkpoints" / "best.json"))
            return fields.plain(best) if self.folder(best.step).exists() else {}
        except UserError:
            return {}

    def finish(self) -> None:
        """Wait until the last save is written."""
        if self.pending:
            self.pending.result()

    def pop_failure(self) -> UserError | None:
        """The error of the last failed write since the last call, if any."""
        failure, self.failure = self.failure, None
        return failure

    def folder(self, step: int) -> Path:
        return self.run / "checkpoints" / f"step-{step:07d}"

    def submit(self, task: Callable[[], None], what: str) -> None:
        """Run a task in the thread, and then drop old saves."""

        def attempt() -> None:
            failed = f"{what} in {self.run} failed"
            try:
                if self.run.is_dir():
                    task()
                    self.drop()
                else:
                    self.fail(f"{failed}: the folder has been moved or removed")
            except Exception as error:  # whatever it is, the training goes on
                reason = getattr(error.__cause__ or error, "strerror", None) or error
                self.fail(f"{failed}: {reason}; the saves before are kept")

        self.pending = self.thread.submit(attempt)

    def fail(self, sentence: str) -> None:
        """Note a failure, of which the first is the cause of those that follow."""
        self.failure = self.failure or UserError(sentence)

    def drop(self) -> None:
        """Remove all saves but the last `keep` and the best."""
        best = self.known_best().get("step")
        for old in saves(self.run)[: -self.keep]:
            if step_of(old) != best:
                remove_whole(old)


def saves(run: Path) -> list[Path]:
    """The saves of a run, oldest first."""
    return sorted((p for p in (run / "checkpoints").glob("step-*") if p.name[5:].isdecimal()), key=step_of)


def step_of(save: Path) -> int:
    return int(save.name.removeprefix("step-"))


def newest_state(
    run: Path, device: torch.device, spoiled: int | None = None, base: Callable[[], Decoder] | None = None
) -> SavedState:
    """The newest save that is as it was written, which the run folder then shows. Damaged saves after it are moved
    aside, each with a message; so is the save of the step `spoiled`, if there is one before it. A UserError if no save
    is good. Where saves hold adapters only, `base` makes the model that they belong to.
    """
    damages: dict[Path, str] = {}
    for folder in reversed(found := saves(run)):
        reason = "each step after it fails" if step_of(folder) == spoiled and folder != found[0] else damage(folder)
        if not reason:
            break
        damages[folder] = reason
    else:
        why = "".join(f" ({folder.name}: {reason})" for folder, reason in damages.items())
        raise UserError(f"{run} has no save to resume from{why}: start another with --out")
    messages = [
        f"{bad} is damaged ({reason}): it is kept as damaged-{bad.name}, and {folder.name} is taken"
        for bad, reason in damages.items()
    ]
    for bad in damages:
        aside = bad.with_name(f"damaged-{bad.name}")
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):  # another process may have done so
            os.replace(bad, aside)
    with suppress(UserError):  # a disk that is full
        show(folder, run)  # where a kill came before, or what is shown is damaged
    model = base().to(device) if base else load_model(folder, device=device)[0]
    tensors, progress = read_tensors(folder / STATE), read_json(folder / PROGRESS)
    frozen = fields.convert(tuple[str, ...], progress.get("frozen", ()), f"{folder / PROGRESS}.frozen")
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name.startswith("weight/")}  # averages have another
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(next(iter(dtypes), parameter.dtype))
        elif (weight := tensors.get(f"weight/{name}")) is not None:
            tensors[f"average/{name}"] = parameter.data
            parameter.data = weight.to(device, copy=True)
        else:
            tensors[f"weight/{name}"] = parameter.data
    return SavedState(tensors, progress, folder, model, messages)


def training_tensors(
    model: Decoder, optimizers: Sequence[Optimizer], average: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The tensors of a TrainerState, not copied; `average` is by the names of parameters."""
    weights = {f"weight/{name}": p for name, p in model.named_parameters() if p.requires_grad}
    averages = {f"average/{name}": tensor for name, tensor in (average or {}).items()}
    return weights | averages | optimizer_tensors(model, optimizers)


def restore(tensors: Mapping[str, Tensor], model: Decoder, optimizers: Sequence[Optimizer]) -> None:
    """Put the tensors of a TrainerState into a model, compiled or not, and its optimizers, in place; gradients are
    dropped. The optimizers must have been made as those that were saved."""
    model.zero_grad()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(tensors[f"weight/{name}"])
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
    """The tensors and numbers that optimizers keep, named as in TrainerState. A UserError where an optimizer keeps
    anything else."""
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
    """Copies on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def write_save(
    folder: Path,
    config: DecoderConfig,
    tensors: Mapping[str, Tensor],
    frozen: Mapping[str, Tensor],
    progress: dict[str, Any],
    hf: Mapping[str, Any],
) -> None:
    """Write a save, whole or not at all, from the tensors of a TrainerState and the frozen parameters."""
    own, average = ({n.removeprefix(kind): t for n, t in tensors.items() if n.startswith(kind)} for kind in KINDS)
    dtypes = {tensor.dtype for tensor in average.values()}  # averages are finer; files have one dtype
    weights = {**{name: t.to(next(iter(dtypes), t.dtype)) for name, t in frozen.items()}, **own, **average}
    in_model = {f"average/{name}" for name in average} | {f"weight/{name}" for name in own if name not in average}
    state = {name: tensor for name, tensor in tensors.items() if name not in in_model}
    with written_whole(folder) as new:
        new.mkdir()
        save_weights(config, weights, new, hf)
        write_state(new, state, progress)


def write_adapter_save(
    folder: Path, adapter: AdapterFiles, tensors: Mapping[str, Tensor], progress: dict[str, Any]
) -> None:
    """Write a save of a model with adapters, whole or not at all."""
    with written_whole(folder) as new:
        new.mkdir()
        write_adapter(new, adapter)
        write_state(new, tensors, progress)


def write_state(new: Path, state: Mapping[str, Tensor], progress: dict[str, Any]) -> None:
    """Write the state of a trainer beside its model, and the checksums of all files."""
    fill(new / STATE, state, state.items())
    (new / PROGRESS).write_text(json.dumps(progress))
    sums = {path.name: file_sha256(path) for path in sorted(new.iterdir())}
    (new / CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n")


def show(folder: Path, run: Path) -> None:
    """Put the model of a save, or its adapter, into the run folder."""
    for name in ADAPTER_FILES if (folder / ADAPTER_CONFIG).exists() else (SINGLE, CONFIG):
        with written_whole(run / name) as new:
            try:
                os.link(folder / name, new)
            except OSError:  # a file system without links
                shutil.copyfile(folder / name, new)


def damage(folder: Path) -> str:
    """The first file of a save that is not as it was written, in words; "" if all are."""
    name = CHECKSUMS
    try:
        sums = read_json(folder / name)
        model = ADAPTER_FILES if ADAPTER_CONFIG in sums else (CONFIG, SINGLE)
        for name in *model, STATE, PROGRESS:
            if sums.get(name) != file_sha256(folder / name):
                return f"{name} is not as it was written"
    except (UserError, OSError):
        return f"{name} is missing or cannot be read"
    return ""
