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

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from onward import fields
from onward.checkpoint.huggingface.save import label_keys
from onward.checkpoint.peft.adapters import adapter_files
from onward.checkpoint.peft.bases import BaseModel
from onward.checkpoint.saves.folder import saves, show, step_of, write_adapter_save, write_save
from onward.checkpoint.saves.state import TrainerState, copied
from onward.errors import UserError
from onward.files import read_json, remove_leftovers, remove_whole, write_json
from onward.model.decoder import Decoder


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
        """The folder of the save of a step."""
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
