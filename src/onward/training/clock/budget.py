"""The time budget of a run with a time limit. The clock fixes the number of steps at the moment when the decay of the
learning rate must begin.

Validations before the last one are skipped if time is short. Does not import torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

from onward.training.config import RunConfig

STALLED = 4.0  # steps longer than this multiple of the average step count as stalls of the machine
EVALUATED = 0.2  # share of the planned evaluation that is made even if no time is left
LEAST = 0.25  # minimum share of the time limit that is left for steps after a long start


def time_left(limit: float, spent: float) -> float:
    """Return the seconds left of a time limit after `spent` seconds; at least a quarter of the limit."""
    return max(LEAST * limit, limit - spent)


@dataclass(frozen=True)
class Costs:
    """The measured seconds of each kind of work in a run with a time limit, used to plan the number of steps."""

    step: float
    validation: float = 0.0  # one validation, with its save and sample
    end: float = 0.0  # everything after the last step: the final evaluation and the report
    evaluation: float = 0.0  # the final evaluation, a part of `end`; it uses less text if time is short
    start: float = 0.0  # everything before the first step: reading texts and calibration


@dataclass
class Budget:
    """Keeps a run within its time limit: holds the time `end` at which the run must end, as a value of `clock`, and the
    costs of the remaining work, which are measured during the run."""

    end: float
    costs: Costs
    clock: Callable[[], float] = perf_counter
    limit: float = 60.0  # seconds of the whole run
    since: float = field(init=False)  # start time of the current step

    def __post_init__(self) -> None:
        self.begin_step()

    @classmethod
    def of(cls, limit: float, spent: float, costs: Costs) -> "Budget":
        """Return the budget of a run whose time limit is `limit` seconds, of which `spent` have passed; `costs` are the
        measured seconds of a step and of other work."""
        return cls(perf_counter() + time_left(limit, spent), costs, limit=limit)

    def begin_step(self) -> None:
        self.since = self.clock()

    def note_step(self) -> None:
        """Update the cost of a step, which ends now, and start timing the next step. Validations are not part of a
        step.

        The cost is a moving average over about a twentieth of the time limit. A stalled step counts as at most four
        times the average, so that it does not end the run early. The cost of the work after the last step is scaled in
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
        """Context manager around a validation; its duration becomes the cost of one validation."""
        start = self.clock()
        yield
        self.begin_step()
        self.costs = replace(self.costs, validation=self.since - start)

    def steps_left(self, validate_every: int) -> int:
        """The steps that fit into the remaining time, at least 1, with a validation every `validate_every` steps."""
        return max(1, int(self.seconds_left / (self.costs.step + self.costs.validation / validate_every)))

    @property
    def seconds_left(self) -> float:
        """The seconds for steps and validations: without the last validation and the work after the last step."""
        return self.end - self.clock() - self.costs.validation - self.costs.end

    def last_step(self, step: int, config: RunConfig) -> int:
        """Return the total number of steps of the run as soon as the remaining time is just long enough for the decay
        of the learning rate, and 0 before. The run calls this after each `step` (counted from 1). Also returns 0 during
        the warm-up, and if `config.steps` is set."""
        if config.steps:
            return 0
        c, left = self.costs, self.steps_left(config.validation_interval)
        share = self.seconds_left / (time_left(self.limit, c.start) - c.validation - c.end)
        late = left == 1 or (share if config.decay < 1 else left) <= config.decay
        return step + left if late and step >= config.warmup else 0

    @property
    def evaluated_share(self) -> float:
        """The fraction of the final evaluation that fits into the remaining time, from 0.2 to 1; 1 if the user has
        fixed the number of tokens to evaluate."""
        c = self.costs
        left = self.end - self.clock() - (c.end - c.evaluation)
        return min(1.0, max(EVALUATED, left / c.evaluation)) if c.evaluation else 1.0

    def affords_validation(self, steps_left: int) -> bool:
        """Whether there is time for a validation now, in addition to `steps_left` steps, the last validation and the
        work after the last step."""
        c = self.costs
        return self.clock() + steps_left * c.step + 2 * c.validation + c.end <= self.end
