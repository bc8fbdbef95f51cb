"""Trackers: the rows of metrics.jsonl in TensorBoard and Weights & Biases as well."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

from onward.errors import UserError


class Tracker(Protocol):
    """Where rows go."""

    def write(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """The trackers of a run by their names, of which there are `TRACKERS`.

    One that fails is told of once, as a warning, and left alone from then on: training does not depend on it. A
    UserError tells of a library that is missing.
    """

    def __init__(self, names: Sequence[str], run: Path, config: Mapping[str, Any]) -> None:
        self.open: dict[str, Tracker] = {}
        for name in names:
            if find_spec(name) is None:
                raise UserError(f"tracking with {name} needs its library: pip install 'onward[track]'")
        for name in names:
            with self.dispensable(name):
                self.open[name] = TRACKERS[name](run, config)

    def write(self, row: Mapping[str, Any]) -> None:
        """Record a row of metrics.jsonl: its numbers, at its "step".

        A row about a step that has passed goes back to it: what was recorded of later steps is void.
        """
        for name, tracker in list(self.open.items()):
            with self.dispensable(name):
                tracker.write(row)

    def close(self) -> None:
        """Write what is still under way."""
        for name, tracker in list(self.open.items()):
            with self.dispensable(name):
                tracker.close()

    @contextmanager
    def dispensable(self, name: str) -> Iterator[None]:
        """Where what fails is given up."""
        try:
            yield
        except Exception as error:
            self.open.pop(name, None)
            first, *_ = str(error).splitlines() or [type(error).__name__]
            warnings.warn(f"{name} failed, and training goes on without it: {first}", stacklevel=4)


def values(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row that make a curve."""
    return {
        key: value
        for key, value in row.items()
        if isinstance(value, int | float) and key not in ("step", "failed_step")
    }


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        self.folder = run / "tensorboard"
        self.writer: Any = None
        self.step = 0

    def write(self, row: Mapping[str, Any]) -> None:
        if self.writer is None or row["step"] < self.step:
            self.begin(row["step"] + ("loss" not in row))  # other rows come behind that of their step
        self.step = row["step"]
        for key, value in values(row).items():
            self.writer.add_scalar(key, value, self.step)
        if "reason" in row:
            self.writer.add_text("rollback", f"step {row.get('failed_step', self.step)}: {row['reason']}", self.step)
        self.writer.flush()  # so that a kill loses nothing

    def begin(self, step: int) -> None:
        """Open another file, by which what was recorded from a step on is void."""
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self.writer = SummaryWriter(str(self.folder), purge_step=step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class WandB:
    """Weights & Biases, project "onward". Offline where WANDB_MODE says so, there is no key or nobody answers;
    `wandb sync` sends it later. A run that resumes goes on under the id that it keeps in RUN/wandb/id."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        import wandb

        kept = run / "wandb" / "id"
        kept.parent.mkdir(exist_ok=True)
        if not kept.exists():
            kept.write_text(token_hex(4))
        quiet = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, init_timeout=30, finish_timeout=60
        )
        wandb.setup(quiet)
        begin = partial(
            wandb.init,
            project="onward",
            name=run.resolve().name,
            id=kept.read_text(),
            dir=run,
            config=dict(config),
            settings=quiet,
        )
        mode: Any = os.environ.get("WANDB_MODE", "online")
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            mode = "offline"
        try:
            self.run = begin(mode=mode, resume="allow" if mode == "online" else None)
        except wandb.errors.CommError:
            wandb.teardown()  # lets go of the id
            self.run = begin(mode="offline")
        self.run.define_metric("*", step_metric="step")  # its own count of steps could not go back

    def write(self, row: Mapping[str, Any]) -> None:
        reason = {"rollback": row["reason"]} if "reason" in row else {}
        self.run.log({"step": row["step"], **values(row), **reason})

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}
