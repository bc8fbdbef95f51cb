"""What a save of a run says beside weights and optimizer. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onward.training.clock.budget import Costs


@dataclass(frozen=True)
class RunProgress:
    """The content of a save's progress.json."""

    step: int
    frozen: tuple[str, ...]  # names of frozen parameters
    losses: tuple[float, ...]  # that spikes are compared with
    scaler: Mapping[str, Any]  # state of the GradScaler
    averaged: int  # updates of the averaged weights
    config: Mapping[str, Any]  # fields of RunConfig
    position: int  # the number of the window to continue from
    seconds: float  # that the run has trained
    skipped: tuple[tuple[int, int], ...]  # half-open ranges of window numbers
    failed_steps: tuple[int, ...]
    costs: Costs | None = None  # of a run of a given time, until its steps are fixed
