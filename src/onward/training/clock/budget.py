"""The time budget of a run with a time limit. The clock fixes the number of steps at the moment when the decay of the
learning rate must begin.

Validations before the last one are skipped if time is short. Does not import torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

from onward.training.config import RunConfig

STALLED = 4.0  # times the average cost of a step: more is a stall of the machine, not the cost of a step
EVALUATED = 0.2  # share of the planned evaluation that is made even if no time is left
LEAST = 0.25  # share of the time that the steps of a run get, however long its start takes


def time_left(limit: float, spent: float) -> float:
    """Return the seconds that a run with a limit has left after its start of `spent` seconds: the rest, and at least a
    quarter of the limit."""
    return max(LEAST * limit, limit - spent)


@dataclass(frozen=True)
class Costs:
    """The measured seconds of each kind of work in a run: a step, a validation, the end and the start."""

    step: float
    validation: float = 0.0  # one validation, with its save and sample
    end: float = 0.0  # everything after the last step: the final evaluation and the report
    evaluation: float = 0.0  # the final evaluation, a part of `end`; it uses less text if time is short
    start: float = 0.0  # everything before the first step: reading texts and calibration


@dataclass
class Budget:
    """Keeps a run within its time: the end of the time, in seconds of a clock, and the costs of the remaining work,
    measured during the run."""

    end: float
    costs: Costs
    clock: Callable[[], float] = perf_counter
    limit: float = 60.0  # seconds of the whole run
    since: float = field(init=False)  # start time of the current step

    def __post_init__(self) -> None:
        self.begin_step()

    @classmethod
    def of(cls, limit: float, spent: float, costs: Costs) -> "Budget":
        """Return the budget of a run with `limit` seconds, of which `spent` have passed."""
        return cls(perf_counter() + time_left(limit, spent), costs, limit=limit)

    def begin_step(self) -> None:
        """Start timing the next step."""
        self.since = self.clock()

    def note_step(self) -> None:
        """Update the cost of a step, which ends now together with its validation and save; start timing the next step.

        The cost is a moving average over about a twentieth of the time. A step that was held up counts as STALLED times
        the average at most, so that it does not end the run early. The cost of the end of the run is scaled in
        proportion.
        """
        known, before = self.costs.step, self.since
        self.begin_step()
        taken = min(self.since - before, STALLED * known)
        step = known + min(0.5, 20 * known / self.limit) * (taken - known)
        end, evaluation = (cost * step / known for cost in (self.costs.end, self.costs.evaluation))
        self.costs = replace(self.costs, step=step, end=end, evaluation=evaluation)

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
        """The remaining seconds for steps and for their validations before the last one."""
        return self.end - self.clock() - self.costs.validation - self.costs.end

    def last_step(self, step: int, config: RunConfig) -> int:
        """Return the total number of steps, if the remaining time is as long as the decay must be; else 0. Also 0
        during the warm-up, and if the number is fixed already."""
        if config.steps:
            return 0
        c, left = self.costs, self.steps_left(config.validation_interval)
        share = self.seconds_left / (time_left(self.limit, c.start) - c.validation - c.end)
        late = left == 1 or (share if config.decay < 1 else left) <= config.decay
        return step + left if late and step >= config.warmup else 0

    @property
    def evaluated_share(self) -> float:
        """Return the share of the evaluation after the last step that fits into the remaining time, at least EVALUATED;
        1 if all of it fits, or none may be left out."""
        c = self.costs
        left = self.end - self.clock() - (c.end - c.evaluation)
        return min(1.0, max(EVALUATED, left / c.evaluation)) if c.evaluation else 1.0

    def affords_validation(self, steps_left: int) -> bool:
        """Return whether the remaining time suffices for a validation now, the remaining steps, the last validation and
        the end of the run."""
        c = self.costs
        return self.clock() + steps_left * c.step + 2 * c.validation + c.end <= self.end
