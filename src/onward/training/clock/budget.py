"""The time budget of a run with a time limit. The clock fixes the number of steps at the moment when the decay of the
learning rate must begin.

Validations before the last one are skipped if time is short. Does not import torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

from onward.training.config import RunConfig


@dataclass(frozen=True)
class Costs:
    """The measured seconds of each kind of work in a run, such as a step or a validation."""

    step: float
    validation: float = 0.0  # of a part of the validation text, with the save and the sample that come with it
    end: float = 0.0  # after the last step: the evaluation of the validation text and the report
    start: float = 0.0  # before the first step: the calibration


@dataclass
class Budget:
    """Keeps a run within its time: the end of the time, in seconds of a clock, and the costs of the remaining work,
    measured during the run."""

    end: float
    costs: Costs
    clock: Callable[[], float] = perf_counter
    limit: float = 60.0  # the seconds of the run in all
    since: float = field(init=False)  # when the present step began

    def __post_init__(self) -> None:
        self.begin_step()

    @classmethod
    def of(cls, limit: float, spent: float, costs: Costs) -> "Budget":
        """Return the budget of a run with `limit` seconds, of which `spent` have passed."""
        return cls(perf_counter() + limit - spent, costs, limit=limit)

    def begin_step(self) -> None:
        """Start timing the next step."""
        self.since = self.clock()

    def note_step(self) -> None:
        """Update the cost of a step, which ends now together with its validation and save; start timing the next step.

        The cost is a moving average over about a sixtieth of the time. The cost of the end of the run is scaled in
        proportion.
        """
        known, before = self.costs.step, self.since
        self.begin_step()
        step = known + min(0.5, 60 * known / self.limit) * (self.since - before - known)
        self.costs = replace(self.costs, step=step, end=self.costs.end * step / known)

    @contextmanager
    def validating(self) -> Iterator[None]:
        """A context that measures the cost of a validation."""
        start = self.clock()
        yield
        self.begin_step()
        self.costs = replace(self.costs, validation=self.since - start)

    def steps_left(self, validate_every: int) -> int:
        """Compute the number of steps that fit into the remaining time, with their validations, the last validation and
        the end of the run."""
        return max(1, int(self.seconds_left / (self.costs.step + self.costs.validation / validate_every)))

    @property
    def seconds_left(self) -> float:
        """Return the remaining seconds for steps and for their validations before the last one."""
        return self.end - self.clock() - self.costs.validation - self.costs.end

    def last_step(self, step: int, config: RunConfig) -> int:
        """Return the total number of steps, if the remaining time is as long as the decay must be; else 0. Also 0
        during the warm-up, and if the number is fixed already."""
        if config.steps:
            return 0
        c, left = self.costs, self.steps_left(config.validation_interval)
        share = self.seconds_left / (self.limit - c.start - c.validation - c.end)
        late = left == 1 or (share if config.decay < 1 else left) <= config.decay
        return step + left if late and step >= config.warmup else 0

    def affords_validation(self, steps_left: int) -> bool:
        """Return whether the remaining time suffices for a validation now, the remaining steps, the last validation and
        the end of the run."""
        c = self.costs
        return self.clock() + steps_left * c.step + 2 * c.validation + c.end <= self.end
