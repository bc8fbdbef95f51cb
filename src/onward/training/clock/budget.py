"""The time of a run that was given one: the clock fixes the number of steps when the learning rate is to fall.

Validations before the last one are left out where time is short.

Does not import torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

from onward.training.config import RunConfig


@dataclass(frozen=True)
class Costs:
    """Seconds that the parts of a run take."""

    step: float
    validation: float = 0.0  # of a part of the validation text, with the save and the sample that come with it
    end: float = 0.0  # after the last step: the evaluation of the validation text and the report
    start: float = 0.0  # before the first step: the calibration


@dataclass
class Budget:
    """The end of a run's time by a clock in seconds, and the costs of what is left to do, measured while it runs."""

    end: float
    costs: Costs
    clock: Callable[[], float] = perf_counter
    limit: float = 60.0  # the seconds of the run in all
    since: float = field(init=False)  # when the present step began

    def __post_init__(self) -> None:
        self.begin_step()

    @classmethod
    def of(cls, limit: float, spent: float, costs: Costs) -> "Budget":
        """The budget of a limit of seconds, of which some are spent."""
        return cls(perf_counter() + limit - spent, costs, limit=limit)

    def begin_step(self) -> None:
        """Time the next step from now on."""
        self.since = self.clock()

    def note_step(self) -> None:
        """Take account of a step, which ends now, with all that came with it; the next one begins.

        The cost of a step is that of about the last sixtieth of the time; what comes after the steps is taken to become
        slower as they do.
        """
        known, before = self.costs.step, self.since
        self.begin_step()
        step = known + min(0.5, 60 * known / self.limit) * (self.since - before - known)
        self.costs = replace(self.costs, step=step, end=self.costs.end * step / known)

    @contextmanager
    def validating(self) -> Iterator[None]:
        """A context that takes account of the validation made in it."""
        start = self.clock()
        yield
        self.begin_step()
        self.costs = replace(self.costs, validation=self.since - start)

    def steps_left(self, validate_every: int) -> int:
        """How many steps fit into the time that is left, with their validations, the last one and the end."""
        return max(1, int(self.seconds_left / (self.costs.step + self.costs.validation / validate_every)))

    @property
    def seconds_left(self) -> float:
        """The time for steps that is left, with their validations before the last one."""
        return self.end - self.clock() - self.costs.validation - self.costs.end

    def last_step(self, step: int, config: RunConfig) -> int:
        """The number of steps in all if after `step` of them the others that fit into the time are those of the decay;
        0 if the number is fixed already, or it is too early for that, which it is during the warm-up."""
        if config.steps:
            return 0
        c, left = self.costs, self.steps_left(config.validation_interval)
        share = self.seconds_left / (self.limit - c.start - c.validation - c.end)
        late = left == 1 or (share if config.decay < 1 else left) <= config.decay
        return step + left if late and step >= config.warmup else 0

    def affords_validation(self, steps_left: int) -> bool:
        """Whether a validation fits beside the steps that are left, the validation after them and the end."""
        c = self.costs
        return self.clock() + steps_left * c.step + 2 * c.validation + c.end <= self.end
