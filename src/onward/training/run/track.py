"""Trackers: copy the rows of metrics.jsonl to TensorBoard and Weights & Biases."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

from onward.base.errors import UserError
from onward.training.config import TRACKERS


class Tracker(Protocol):
    """The interface of a destination, such as TensorBoard, that receives copies of the rows of a run's
    metrics.jsonl."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Record a row of metrics.jsonl, its values by name, at its "step"."""

    def close(self) -> None:
        """Write the buffered rows, and close the destination."""


class Trackers:
    """The trackers of a run, such as TensorBoard, by name: they receive copies of the rows of metrics.jsonl.

    A tracker that fails causes one warning and is not used again; training continues.
    """

    def __init__(self, names: Sequence[str], run: Path, config: Mapping[str, Any]) -> None:
        self.open: dict[str, Tracker] = {}
        for name in names:
            with self.dispensable(name):
                self.open[name] = KINDS[name](run, config)

    def write(self, row: Mapping[str, Any]) -> None:
        """Send a row of metrics.jsonl to all trackers, which record its numbers at its "step".

        In TensorBoard, a row with an earlier step than the last one, as after a rollback, replaces the rows of later
        steps.
        """
        for name, tracker in list(self.open.items()):
            with self.dispensable(name):
                tracker.write(row)

    def close(self) -> None:
        for name, tracker in list(self.open.items()):
            with self.dispensable(name):
                tracker.close()

    @contextmanager
    def dispensable(self, name: str) -> Iterator[None]:
        """Context manager: an error inside it removes the tracker `name` with a warning, instead of ending the run."""
        try:
            yield
        except Exception as error:
            self.open.pop(name, None)
            first, *_ = str(error).splitlines() or [type(error).__name__]
            warnings.warn(f"{name} failed, and training continues without it: {first}", stacklevel=4)


def check_trackers(names: Sequence[str]) -> None:
    """Raise a UserError if the library of a named tracker, such as "wandb", is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(f"tracking with {name} needs its library: pip install 'onward[track]'")


def values(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row that a tracker can plot."""
    return {
        key: value
        for key, value in row.items()
        if isinstance(value, int | float) and key not in ("step", "failed_step")
    }


class TensorBoard:
    """A tracker that writes event files in RUN/tensorboard."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        self.folder = run / "tensorboard"
        self.writer: Any = None
        self.step = 0

    def write(self, row: Mapping[str, Any]) -> None:
        """Record the numbers of a row of metrics.jsonl and, for a rollback, its reason."""
        if self.writer is None or row["step"] < self.step:
            self.begin(row["step"] + ("loss" not in row))  # other rows follow the training row of their step
        self.step = row["step"]
        for key, value in values(row).items():
            self.writer.add_scalar(key, value, self.step)
        if "reason" in row:
            self.writer.add_text("rollback", f"step {row.get('failed_step', self.step)}: {row['reason']}", self.step)
        self.writer.flush()  # a killed process then loses no rows

    def begin(self, step: int) -> None:
        """Open a new event file; TensorBoard then ignores rows at `step` or later in earlier files."""
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self.writer = SummaryWriter(str(self.folder), purge_step=step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class WandB:
    """A tracker that sends rows to Weights & Biases, project "onward". It works offline if WANDB_MODE requires it,
    without a key, or if no server answers; `wandb sync` sends the rows later. A resumed run continues under its id in
    RUN/wandb/id."""

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
            wandb.teardown()  # releases the run id
            self.run = begin(mode="offline")
        self.run.define_metric("*", step_metric="step")  # W&B's own step counter cannot go back after a rollback

    def write(self, row: Mapping[str, Any]) -> None:
        """Send the numbers of a row of metrics.jsonl and, for a rollback, its reason."""
        reason = {"rollback": row["reason"]} if "reason" in row else {}
        self.run.log({"step": row["step"], **values(row), **reason})

    def close(self) -> None:
        self.run.finish()


KINDS: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = dict(zip(TRACKERS, (TensorBoard, WandB), strict=True))
