"""Writes the saves of a training run in a separate thread; a run resumes from a save bit for bit.

RUN/                    a model folder: config.json and model.safetensors are those of the newest save
  checkpoints/
    best.json           the step of the save with the lowest validation loss
    step-0000100/       a save; its folder exists only when it is complete
      config.json, model.safetensors    the model for use, with averaged weights if the run averages them; a run that
                                        trains adapters has the files of an adapter instead, and one that trains a draft
                                        head those of the head; state.safetensors then holds every tensor of the trainer
      state.safetensors                 the other tensors of the trainer, for trainable parameters only
      progress.json                     the step, the position in the data, and other values
      checksums.json                    the SHA-256 of the other files of the save
"""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from onward.base import fields
from onward.base.errors import UserError
from onward.base.files import read_json, remove_atomically, remove_leftovers, write_json
from onward.checkpoint.draft_heads import draft_head_files
from onward.checkpoint.huggingface.save import label_keys
from onward.checkpoint.peft.adapters import adapter_files
from onward.checkpoint.peft.bases import BaseModel
from onward.checkpoint.saves.folder import saves, show, step_of, write_part_save, write_save
from onward.checkpoint.saves.shared import SharedSave, Writers, agree
from onward.checkpoint.saves.state import TrainerState, copied
from onward.model.decoder import Decoder
from onward.transforms.draft_head import has_draft_head


@dataclass(frozen=True)
class Best:
    step: int
    validation_loss: float


class Saver:
    """Writes the checkpoints of a run in a separate thread; keeps the last `keep` of them (at least 1) and the best
    one.

    Disk errors are never raised and leave no partial file: `pop_failure` returns them, and the next save tries again.
    The run folder must exist and have one Saver, which removes the temporary files of killed processes.
    """

    def __init__(self, run: Path, keep: int, base: BaseModel | None = None, writers: Writers | None = None) -> None:
        """`base` is the base of a model with adapters or a draft head, whose saves hold only the trained modules.
        `writers` are the processes that hold parts of the model, if it is divided: each has a Saver, they call `save`
        together, and the first one removes old saves and shows the newest."""
        self.run, self.keep, self.base, self.writers = run, keep, base, writers
        self.failure: UserError | None = None
        self.thread = ThreadPoolExecutor(1, "saver")
        self.pending: Future[None] | None = None

    def save(
        self,
        model: Decoder,
        state: TrainerState,
        hf: Mapping[str, Any],
    ) -> None:
        """Copy the state of step `state.progress["step"]` to the CPU, and write it while the caller continues.

        Waits for the previous write first. `hf` contains keys for config.json in addition to those of the architecture.
        A step that is already saved is not written again; the run folder then gets its model.
        """
        self.finish()
        first, step = self.writers is None or not self.writers.rank, state.progress["step"]
        for folder in (self.run, self.run / "checkpoints") if first else ():
            remove_leftovers(folder)
        folder = self.folder(step)
        needed = (lambda: not folder.exists()) if self.writers is None else partial(agree, self.writers, folder)
        write: Callable[[], object] = lambda: None
        if needed():
            frozen = {n: p for n, p in model.named_parameters() if f"weight/{n}" not in state.tensors}
            values = deepcopy((state.progress, {**hf, **label_keys(model)}))
            if self.base is not None:
                gather = self.writers.gathered if self.writers else Tensor.detach
                with self.writers.gathered_parameters(model) if self.writers else nullcontext():
                    files_of = draft_head_files if has_draft_head(model) else adapter_files
                    part = files_of(model, hf, self.base, gather=gather)
                    files = replace(part, tensors=copied(part.tensors))
                tensors = copied({name: gather(tensor) for name, tensor in state.tensors.items()})
                write = partial(write_part_save, folder, files, tensors, values[0]) if first else write
            elif self.writers is not None:
                pipeline: Any = getattr(model, "pipeline", None)
                of_stages = pipeline.of_stages if pipeline else lambda value: [value]
                write = SharedSave(self.writers, folder, model.config, state.tensors, frozen, *values, of_stages).write
            else:
                write = partial(write_save, folder, model.config, copied(state.tensors), copied(frozen), *values)

        def task() -> None:
            write()
            if first:
                show(folder, self.run)

        self.submit(task, f"saving step {step}")

    def best(self, step: int, loss: float) -> None:
        """Record a step as the best, if it has a save and its loss is the lowest so far."""

        def task() -> None:
            known = self.known_best()
            if self.folder(step).exists() and loss < known.get("validation_loss", math.inf):
                write_json(self.run / "checkpoints" / "best.json", {"step": step, "validation_loss": loss})

        self.submit(task, f"recording step {step} as the best")

    def known_best(self) -> dict[str, Any]:
        """The content of best.json; {} if there is none, or if the folder of its save is missing."""
        try:
            best = fields.build(Best, read_json(self.run / "checkpoints" / "best.json"))
            return fields.plain(best) if self.folder(best.step).exists() else {}
        except UserError:
            return {}

    def finish(self) -> None:
        if self.pending:
            self.pending.result()

    def pop_failure(self) -> UserError | None:
        """Return the first error of writing since the previous call; None if every write succeeded."""
        failure, self.failure = self.failure, None
        return failure

    def folder(self, step: int) -> Path:
        return self.run / "checkpoints" / f"step-{step:07d}"

    def submit(self, task: Callable[[], None], what: str) -> None:
        """Run `task` in the thread, and then delete old saves; `what` names it in errors, such as "saving step 100"."""

        def attempt() -> None:
            failed = f"{what} in {self.run} failed"
            try:
                if self.run.is_dir():
                    task()
                    if self.writers is None or not self.writers.rank:
                        self.drop()
                else:
                    self.fail(f"{failed}: the folder has been moved or removed")
            except Exception as error:  # training continues after any error
                reason = getattr(error.__cause__ or error, "strerror", None) or error
                self.fail(f"{failed}: {reason}; earlier saves are kept")

        self.pending = self.thread.submit(attempt)

    def fail(self, sentence: str) -> None:
        self.failure = self.failure or UserError(sentence)

    def drop(self) -> None:
        best = self.known_best().get("step")
        for old in saves(self.run)[: -self.keep]:
            if step_of(old) != best:
                remove_atomically(old)
