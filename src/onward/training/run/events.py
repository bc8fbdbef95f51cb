"""The events of a run, and the files in which they are recorded.

RUN/metrics.jsonl    a line per step, validation and rollback
RUN/samples.jsonl    texts by the model: displayed samples, and completions that it was trained on
RUN/skipped.jsonl    windows that are skipped because a step failed on them
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from onward.base.errors import UserError
from onward.training.run.journal import Journal
from onward.training.run.track import Trackers
from onward.training.step.trainer import Step
from onward.training.step.validation import Validation


@dataclass(frozen=True)
class Rollback:
    """Event: a step failed. The run returned to its newest save, and skips the windows (training sequences) of that
    step."""

    step: int  # step of the save
    failed_step: int
    reason: str
    skipped: tuple[int, int]  # half-open range of window numbers to skip from now on


@dataclass(frozen=True)
class Notice:
    """Event: a message for the user, for example about a failed save."""

    step: int
    sentence: str


SAMPLES = 4  # maximum number of completions recorded per step

Event = Step | Validation | Rollback | Notice
Recorded = TypeVar("Recorded", Step, Validation)


class EventLog:
    """Records the events of a run in its files, and copies them to TensorBoard or Weights & Biases if configured.
    Records nothing unless `active`: in a run of several processes, only the first process is active."""

    def __init__(self, folder: Path, active: bool, messages: Sequence[str] = ()) -> None:
        """`messages` are sentences for the user, shown with the next step."""
        self.folder, self.active, self.messages = folder, active, [*messages]
        names = "metrics", "samples", "skipped"
        self.metrics, self.samples, self.skipped = (Journal(folder / f"{name}.jsonl") for name in names)
        self.trackers: Trackers | None = None

    @contextmanager
    def tracked(self, names: Sequence[str], config: Mapping[str, Any]) -> Iterator[None]:
        """Context manager: inside it, the rows of metrics.jsonl are also copied to the trackers called `names`, such as
        "tensorboard"; `config` are the options of the run."""
        self.trackers = Trackers(names, self.folder, config) if names and self.active else None
        try:
            yield
        finally:
            if self.trackers:
                self.trackers.close()

    def write(self, event: Recorded) -> Recorded:
        """Record a step or a validation as a row, and return it."""
        row = asdict(event)
        row |= row.pop("figures")
        if not row.get("failure"):
            row.pop("failure", None)
        self.write_row(row)
        return event

    def notices(self, step: int, failure: UserError | None) -> list[Notice]:
        """Return the messages for the user that have arisen since the last call, as notices at `step`; `failure`, the
        error of a save that failed, adds one."""
        messages, self.messages = self.messages, []
        if failure:
            messages.append(f"{failure}; training continues, and the next save tries again")
        return [Notice(step, message) for message in messages]

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        for sample in samples[:SAMPLES] if self.active else ():
            self.samples.write({"step": step, **sample, "trained": True})

    def write_row(self, row: dict[str, Any]) -> None:
        """Write a row to metrics.jsonl and to the trackers; infinite and NaN values become null."""
        row |= {key: None for key, value in row.items() if isinstance(value, float) and not isfinite(value)}
        if self.active:
            self.metrics.write(row)
            if self.trackers:
                self.trackers.write(row)

    def resume(self, step: int) -> None:
        """Remove the rows after the save of `step`, since a resumed run repeats the steps after it."""
        for journal in (self.metrics, self.samples, self.skipped) if self.active else ():
            journal.cut(lambda row: precedes(row, step))

    def roll_back(self, event: Rollback, first_window: str) -> Rollback:
        """Record a rollback with the text of the first skipped window, `first_window`, and return it. Rows of undone
        steps are removed from the files."""
        if self.active:
            self.metrics.cut(lambda row: precedes(row, event.step) or (row["step"] == event.step and "reason" in row))
            self.samples.cut(lambda row: row["step"] == 0 or precedes(row, event.step))
            self.skipped.write(asdict(event) | {"first_window": first_window})
            self.write_row(asdict(event))
        return event


def precedes(row: Mapping[str, Any], step: int) -> bool:
    """Return whether a row of a run's files was written before the save of `step`. Among the rows of this step, the row
    of the training step (with a loss) and the training samples precede the save; validations follow it."""
    return row["step"] < step or (row["step"] == step and ("loss" in row or "trained" in row))
