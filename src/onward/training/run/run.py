"""A training run: a folder with its configuration, its data, its metrics, and the model that it trains.

runs/mybook/
  run.json              the RunConfig, with steps, device, precision and the backend of experts fixed
  inputs.json           the run's token folders, tokenizer and model, with checksums
  data/, held_out/      the tokens, unless they were prepared before
  config.json, model.safetensors, tokenizer.json    the model of the newest save, as a Hugging Face folder
  checkpoints/step-N/   the last saves and the best, each with everything needed to resume
  *.jsonl               its events, see events.py
"""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from time import perf_counter
from typing import TYPE_CHECKING, Any

from onward.base.alone import ALONE, Alone
from onward.base.arguments import checked
from onward.base.device import choose_device
from onward.base.errors import UserError
from onward.config.mesh import Mesh
from onward.data.progress import Progress, silent
from onward.model.decoder import Decoder
from onward.training.clock.calibration import Sampler
from onward.training.config import RunConfig
from onward.training.run.beginning import Given, begun
from onward.training.run.initial_values import FILE
from onward.training.run.lock import KEEPING, run_lock
from onward.training.run.loop import Loop
from onward.training.run.reopening import outline, reopened, replanned, resumed_config
from onward.training.run.run_folder import new_folder
from onward.training.run.together import several
from onward.training.step.loss import Loss, LossFunction

if TYPE_CHECKING:
    from onward.parallel.processes import Processes


class Run(Loop):
    """A run in progress: `start` or `resume` creates it, `train` trains its model.

    `trainer` trains `model` in place on `inputs`; `progress` is the position in the data. `fresh` says whether the run
    started from new weights. `choice` explains the size that Onward chose, and `budget` keeps the time limit; both are
    None if they do not apply.
    """

    @classmethod
    @checked
    def start(
        cls,
        config: RunConfig,
        *,
        model: Decoder | None = None,
        loss: Loss | LossFunction | None = None,
        sample: Sampler = lambda model, tokenizer: None,
        progress: Progress = silent,
        began: float | None = None,
        processes: Alone | None = None,
    ) -> "Run":
        """Prepare the data and the tokenizer, choose the options that are left open (steps, device, precision,
        experts), and save step 0.

        The run starts from `model`, whose trainable parameters are trained in place by one process; by default from the
        model in the folder `config.base` or, if this is empty, from a newly initialized model as configured. A given
        model replaces the configured preset and fields; the configured tokenizer must be the tokenizer of this model.
        `loss` replaces the configured loss; pass it to `resume` as well. `sample` does what the caller does at each
        validation, to measure its duration: a run with a time limit reserves that time. `progress` is called while
        texts are read: with the task, the number of bytes done, and the total number of bytes (0: unknown). A time
        limit counts from `began`, a value of `time.perf_counter`; by default from this call. `processes` is the group
        of processes that train the run together, which this process has joined; by default all processes that torchrun
        started.
        """
        given = Given(model, loss, sample, progress, perf_counter() if began is None else began)
        folder, many = Path(config.out), several(processes)
        if many and many.rank:
            return cls.started(folder, loss, many)
        with new_folder(folder) as hold:
            parts = begun(config, given, many)
            if parts.whole:
                run = cls(replace(parts, processes=None))
                run.save_first()
                run.hold = hold if KEEPING.get() else None
                if parts.processes is None:
                    return run
                del run
        assert parts.processes
        told = {"new": not parts.whole, "fresh": parts.fresh, "mesh": str(parts.processes.mesh)}
        many, choice = parts.processes, parts.choice
        del parts, given, model
        run = cls.started(folder, loss, many, told)
        run.choice = choice
        return run

    @classmethod
    def started(
        cls,
        folder: Path,
        loss: Loss | LossFunction | None,
        processes: "Processes",
        told: Mapping[str, Any] | None = None,
    ) -> "Run":
        """Open, in every process, the new run that the first process has started. `told`, which the first process
        passes and sends to the others, says whether the model has no values yet, whether its weights are new, and the
        mesh of the run."""
        processes.wait()  # until the first process has made the folder
        if not folder.exists():
            raise UserError(
                f"Cannot find {folder} on {gethostname()}, because rank 0 made it on another disk: choose a folder on "
                "a disk that all processes share"
            )
        known = json.loads(processes.agreed(lambda: json.dumps(told)))
        if told is None:
            processes = processes.arranged(Mesh.parse(known["mesh"]))
        run = cls.opened(folder, loss, processes, new=known["new"])
        run.fresh = known["fresh"]
        return run

    @classmethod
    @checked
    def resume(
        cls,
        folder: str | Path,
        *,
        loss: Loss | LossFunction | None = None,
        mesh: str = "",
        processes: Alone | None = None,
    ) -> "Run":
        """Resume a run from its newest undamaged save, exactly as if it had never stopped.

        Modules with user-defined parts that the run was started with must be imported first. `mesh` replaces the
        configured mesh: a save from any mesh can be resumed on any other mesh, with results that differ by rounding. If
        the number of processes that read different batches changes, a loss with a separate state in each process
        (`Loss.of_batches`) starts from its initial state. `processes` is as for `start`.
        """
        return cls.opened(Path(folder), loss, several(processes), mesh)

    @classmethod
    def opened(
        cls,
        folder: Path,
        loss: Loss | LossFunction | None,
        processes: "Processes | None",
        mesh: str | None = None,
        *,
        new: bool = False,
    ) -> "Run":
        """Open the run in a folder, in all its processes: at its newest save or, if it is `new` and its model is
        sharded over the processes, at step 0, which they save together. `loss` and `mesh` are as for `resume`; `mesh`
        None means that the processes have their mesh already."""
        alone = processes or ALONE
        lock = lambda: nullcontext() if alone.rank else run_lock(folder)
        with alone.first_before_others():
            config = resumed_config(folder)
            if mesh is not None:
                processes = replanned(config, folder, processes, mesh)
            with lock() as hold:
                parts = (outline if new else reopened)(config, folder, loss, processes)
        if processes:
            parts = replace(parts, processes=processes.connected(choose_device(config.device)))
        run = cls(parts)
        run.hold = hold if KEEPING.get() else None
        with lock():
            if new:
                run.save_first()
                if not alone.rank:
                    (folder / FILE).unlink(missing_ok=True)
            run.log.resume(run.step)
        return run
