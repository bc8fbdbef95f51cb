"""The progress of a run, and the content of a save's progress.json."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from onward.base import fields
from onward.checkpoint.lazy import LazyTensors
from onward.checkpoint.saves.folder import PROGRESS
from onward.checkpoint.saves.newest import SavedState
from onward.checkpoint.saves.state import OPTIMIZER
from onward.training.clock.budget import Costs
from onward.training.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """The saved progress of a run: its position in the data, its time, and its failed steps. The
    trainer counts the steps."""

    position: int = 0  # number of the window to continue from
    seconds: float = 0.0  # training time so far
    skipped: tuple[tuple[int, int], ...] = ()  # windows to skip, as half-open ranges of their numbers
    failed_steps: tuple[int, ...] = ()  # numbers of failed steps; cleared by a good save after the last failed step

    def recovered(self, step: int) -> bool:
        """Whether steps have failed and the run, now at `step`, has since passed the last failed step."""
        return bool(self.failed_steps) and step >= self.failed_steps[-1]


@dataclass(frozen=True, kw_only=True)
class SavedProgress(RunProgress):
    """The content of a save's progress.json: the progress of the run, and the numbers that its trainer needs to
    continue."""

    step: int
    frozen: tuple[str, ...]  # names of frozen parameters
    losses: tuple[float, ...]  # recent losses, to detect spikes
    scaler: Mapping[str, Any]  # state of the GradScaler
    averaged: int  # number of updates of the averaged weights
    config: Mapping[str, Any]  # fields of RunConfig
    costs: Costs | None = None  # measured costs of a run with a time limit, until the number of steps is fixed

    @property
    def reached(self) -> RunProgress:
        """The position in the data, the time and the failed steps at the save."""
        return RunProgress(
            position=self.position, seconds=self.seconds, skipped=self.skipped, failed_steps=self.failed_steps
        )


def fitting(state: SavedState, config: RunConfig) -> SavedState:
    """The state of a save for the optimizer of `config`: if run.json names another one than when it was saved, the new
    optimizer starts without a state."""
    if saved_progress(state).config.get("optimizer") == config.optimizer:
        return state
    others = [name for name in state.tensors if not name.startswith(OPTIMIZER)]
    return replace(state, tensors=LazyTensors({name: partial(state.tensors.__getitem__, name) for name in others}))


def saved_progress(state: SavedState) -> SavedProgress:
    return fields.build(SavedProgress, state.progress, str(state.folder / PROGRESS))
