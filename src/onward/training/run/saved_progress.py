"""The progress of a run, and the content of a save's progress.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onward import fields
from onward.checkpoint.saves.folder import PROGRESS
from onward.checkpoint.saves.newest import SavedState
from onward.training.clock.budget import Costs


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """The position of a run in its data, and its failed steps. The trainer counts the steps."""

    position: int = 0  # the number of the window to continue from
    seconds: float = 0.0  # that the run has trained
    skipped: tuple[tuple[int, int], ...] = ()  # windows that are left out, as half-open ranges of their numbers
    failed_steps: tuple[int, ...] = ()  # since the last good save after them

    def recovered(self, step: int) -> bool:
        """Return whether a step is past the last failed step."""
        return bool(self.failed_steps) and step >= self.failed_steps[-1]


@dataclass(frozen=True, kw_only=True)
class SavedProgress(RunProgress):
    """The content of a save's progress.json: the position of the run, and the numbers of its trainer."""

    step: int
    frozen: tuple[str, ...]  # names of frozen parameters
    losses: tuple[float, ...]  # that spikes are compared with
    scaler: Mapping[str, Any]  # state of the GradScaler
    averaged: int  # updates of the averaged weights
    config: Mapping[str, Any]  # fields of RunConfig
    costs: Costs | None = None  # of a run of a given time, until its steps are fixed

    @property
    def reached(self) -> RunProgress:
        """The progress of the run at the save."""
        return RunProgress(
            position=self.position, seconds=self.seconds, skipped=self.skipped, failed_steps=self.failed_steps
        )


def saved_progress(state: SavedState) -> SavedProgress:
    """Read the progress in a save. Raises a UserError for a missing key or a key of another type."""
    return fields.build(SavedProgress, state.progress, str(state.folder / PROGRESS))
